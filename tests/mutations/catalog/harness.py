"""Faults of what runs cells and keeps rows: launches, sweeps, results, jobs of several machines, data."""

from __future__ import annotations

from ..mutant import Mutant

ATTEMPTS = "tests/unit/test_attempts.py"
CLI = "tests/end_to_end/test_cli.py"
DAMAGED_RUNS = "tests/faults/test_damaged_runs.py"
DATA_AND_MODELS = "tests/unit/test_data_and_models.py"
FOLDERS = "tests/faults/test_folders.py"
JOB = "tests/unit/test_job.py"
JOINED = "tests/unit/test_joined.py"
LAUNCH = "tests/faults/test_launch.py"
SELECTION = "tests/unit/test_selection.py"
SHARED = "tests/cluster/test_shared_folder.py"
START = "tests/end_to_end/test_start.py"
SWEEPS = "tests/end_to_end/test_sweeps.py"
TABLE_CACHE = "tests/unit/test_table_cache.py"

MUTANTS = (
    Mutant(
        "launch-exit-code-lost",
        "A rank that a signal has killed is said to have exited early.",
        "zerobench/launch",
        "if code is not None and code < 0:",
        "if code is not None and code > 0:",
        (f"{LAUNCH}::test_a_rank_that_fails_ends_the_pass_at_once",),
    ),
    Mutant(
        "launch-ctrl-c-reaches-ranks",
        "Ctrl-C in a rank's first instructions has it exit early with code 1.",
        "zerobench/launch/fork_server.py",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])",
        "signal.pthread_sigmask(signal.SIG_BLOCK, [])",
        (f"{LAUNCH}::test_ctrl_c_is_left_to_the_command_from_the_servers_first_instruction_on",),
    ),
    Mutant(
        "import-loses-ctrl-c",
        "Ctrl-C is an exception in the midst of imports, which may pass over it or abort.",
        "zerobench/host/signals.py",
        "        signal.signal(one, leave)\n",
        "        pass\n",
        (f"{START}::test_ctrl_c_during_imports_ends_a_command_quietly",),
    ),
    Mutant(
        "launch-signal-without-a-name",
        "A rank that a real-time signal has killed raises an error of the harness.",
        "zerobench/launch",
        'name = ProcessFailure(rank.number, rank.process.pid, code, error_file="").signal_name()',
        "name = signal.Signals(-code).name",
        (f"{LAUNCH}::test_a_rank_that_fails_ends_the_pass_at_once",),
    ),
    Mutant(
        "job-gives-lost-ranks-to-a-cell",
        "After a node has died, cells get the first ranks of the job, also where these are lost.",
        "zerobench/launch",
        "mine.living.members, mine.passes + 1",
        "mine.membership.members, mine.passes + 1",
        (f"{JOINED}::test_a_sweep_goes_on_with_the_ranks_that_are_left",),
    ),
    Mutant(
        "job-counts-machines-that-are-gone",
        "After a node has died, a cell on other machines than were meant passes for the one that was meant.",
        "zerobench/launch",
        "nodes = mine.living.machines(cell.config.world_size)",
        "nodes = mine.membership.machines(cell.config.world_size)",
        (f"{JOINED}::test_a_sweep_goes_on_with_the_ranks_that_are_left",),
    ),
    Mutant(
        "job-without-rounds",
        "A command that torchrun's agents have started again meets the keys of the one that failed.",
        "zerobench/cluster",
        'self.number = store.increment("rounds", 1)',
        'self.number = 1 + store.increment("rounds", 0)',
        (f"{JOB}::test_processes_that_torchrun_starts_again_meet_in_a_round_of_their_own",),
    ),
    Mutant(
        "launch-orphans",
        "Ranks outlive a parent that is killed: neither the kernel nor a thread of theirs ends them.",
        "zerobench/launch",
        "    threading.Thread(target=_leave_with_parent, daemon=True).start()",
        '    __import__("ctypes").CDLL(None).prctl(1, 0)',
        (f"{LAUNCH}::test_ranks_die_with_a_parent_that_is_killed",),
    ),
    Mutant(
        "launch-waits-for-the-others",
        "A rank that fails does not end its pass: the others wait for it until the timeout.",
        "zerobench/launch",
        "if any(rank.error for rank in ranks):",
        "if all(rank.error for rank in ranks):",
        (f"{LAUNCH}::test_a_rank_that_fails_ends_the_pass_at_once",),
    ),
    Mutant(
        "launch-blames-the-victim",
        "The reason is that of a rank that lost its peer, not of the peer that died.",
        "zerobench/launch",
        "key=lambda f: (f.status == STOPPED, _lost_a_peer(f),",
        "key=lambda f: (f.status == STOPPED, not _lost_a_peer(f),",
        (f"{LAUNCH}::test_the_first_cause_is_told_and_not_who_suffered_from_it",),
    ),
    Mutant(
        "launch-no-stacks",
        "A rank that hangs is not asked for its stacks.",
        "zerobench/launch",
        "os.kill(rank.process.pid, signal.SIGUSR1)",
        "os.kill(rank.process.pid, 0)",
        (f"{LAUNCH}::test_a_hang_is_a_timeout_with_stacks_in_the_log",),
    ),
    Mutant(
        "launch-out-of-memory-is-a-crash",
        "A rank that ran out of memory has crashed, so that a search takes it for a fault.",
        "zerobench/launch",
        'return ("oom" if out_of_memory else "crash"), "; ".join(words)',
        'return "crash", "; ".join(words)',
        (f"{LAUNCH}::test_a_rank_that_fails_ends_the_pass_at_once",),
    ),
    Mutant(
        "sweep-failed-is-reused",
        "A cell that failed is taken as finished by the next sweep.",
        "zerobench/sweep",
        'if one[1]["status"] in statuses and one[1]["repeat"] == repeat]',
        'if one[1]["status"] and one[1]["repeat"] == repeat]',
        (f"{SWEEPS}::test_a_failed_cell_runs_again_and_the_verbs_look_after_what_is_left",),
    ),
    Mutant(
        "sweep-finished-is-run-again",
        "A finished launch is measured again by the next sweep.",
        "zerobench/sweep",
        "found = find_reusable(cell, repeat, statuses)",
        "found = None",
        (f"{CLI}::test_a_sweep_becomes_rows_files_and_a_table_and_is_reused",),
    ),
    Mutant(
        "sweep-failed-is-repeated",
        "A cell that has failed is launched again in every round.",
        "zerobench/sweep",
        "            if id(launch.cell) in spoilt:\n",
        "            if id(launch) in spoilt:\n",
        (f"{SWEEPS}::test_a_failure_spoils_its_own_cell_alone_even_where_names_are_alike",),
    ),
    Mutant(
        "sweep-repeats-in-blocks",
        "All repeats of a cell come one after the other, so that drift falls on single cells.",
        "zerobench/sweep",
        "    for repeat in range(max(repeats, default=0)):\n"
        "        for name, cell, wanted in zip(names, cells, repeats, strict=True):\n",
        "    for name, cell, wanted in zip(names, cells, repeats, strict=True):\n"
        "        for repeat in range(max(repeats, default=0)):\n",
        (f"{SWEEPS}::test_repeats_are_rounds_and_a_failed_cell_is_not_repeated",),
    ),
    Mutant(
        "sweep-lock-not-held",
        "Two sweeps into one folder measure the same launch at once.",
        "zerobench/results",
        "while (lease := leases.take(place)) is None:",
        'while (lease := leases.take(place.with_name(f"{place.name}{time.time()}"))) is None:',
        (f"{FOLDERS}::test_two_sweeps_do_not_measure_one_launch_twice",),
    ),
    Mutant(
        "lease-by-the-local-clock",
        "The age of a lease is judged by this machine's clock, not by the file server's.",
        "zerobench/host",
        "now = clock_of(beside)",
        "now = time.time()",
        (f"{SHARED}::test_without_locks_silence_alone_makes_a_folder_abandoned",),
    ),
    Mutant(
        "lease-not-renewed",
        "The owner of a lease lives and does not renew it.",
        "zerobench/host",
        "lease.beat()",
        "lease.name",
        (f"{SHARED}::test_a_living_owner_renews_its_lease",),
    ),
    Mutant(
        "rename-that-was-done-is-done-again",
        "A rename of which the answer of the server was lost is taken for one that failed.",
        "zerobench/results",
        "        rename_new(aside.path, path)\n",
        "        aside.path.rename(path)\n",
        (f"{SHARED}::test_a_rename_that_was_done_though_it_failed_is_one_run",),
    ),
    Mutant(
        "removed-by-an-old-name",
        "A leftover is removed by a name that a finished run had, as this client still believes.",
        "zerobench/host",
        "        folder.rename(hidden)\n        shutil.rmtree(hidden, ignore_errors=True)",
        "        shutil.rmtree(folder, ignore_errors=True)",
        (f"{SHARED}::test_what_is_removed_by_an_old_name_is_no_run_that_was_finished_meanwhile",),
    ),
    Mutant(
        "run-named-before-its-bytes",
        "A run has its name before its files are on the disk: a loss of power leaves empty ones.",
        "zerobench/results",
        "        sync_files(aside.path)\n",
        "",
        (f"{FOLDERS}::test_a_run_is_on_the_disk_before_it_has_its_name",),
    ),
    Mutant(
        "results-nan-in-json",
        "A loss that is no number is written as NaN, which JSON does not know.",
        "zerobench/results",
        'text = json.dumps(finite(asdict(row) | {"run_id": path.name}), indent=1, allow_nan=False)',
        'text = json.dumps(asdict(row) | {"run_id": path.name}, indent=1)',
        (f"{ATTEMPTS}::test_a_value_that_is_not_finite_is_null_in_the_file",),
    ),
    Mutant(
        "results-partial-is-read",
        "A run that is still being written is read as one.",
        "zerobench/results",
        '    return sorted(p for p in where.iterdir() if not p.name.startswith(".") and (p / "run.json").is_file())',
        '    return sorted(p for p in where.iterdir() if (p / "run.json").is_file())',
        (f"{ATTEMPTS}::test_a_run_that_is_being_written_is_not_read",),
    ),
    Mutant(
        "results-clock-decides",
        "A run that began after the clock was set back is taken for the older one.",
        "zerobench/results",
        'latest[prefix] = started if prefix in merged else max(started, latest.get(prefix, ""))',
        "latest[prefix] = started",
        (f"{ATTEMPTS}::test_a_clock_that_is_set_back_makes_no_older_run_the_newest",),
    ),
    Mutant(
        "results-number-given-twice",
        "A number that was removed is given to a later attempt.",
        "zerobench/results",
        "return 1 + max((number for name, number in (split(p.name) for p in others) if name == prefix), default=0)",
        "return 1 + sum(name == prefix for name, _ in (split(p.name) for p in others))",
        (f"{ATTEMPTS}::test_a_number_that_was_removed_is_not_given_to_a_later_attempt",),
    ),
    Mutant(
        "results-failed-attempts-count",
        "Tables and figures take failed attempts for runs.",
        "zerobench/results",
        'ended = runs[~runs["status"].isin(ATTEMPTS)]',
        "ended = runs",
        (f"{SELECTION}::test_failed_and_superseded_attempts_are_left_out_unless_asked_for",),
    ),
    Mutant(
        "results-newer-version-read",
        "A run of a newer schema is read as if its columns were known.",
        "zerobench/results",
        "* (version > SCHEMA_VERSION)",
        "* (version < 0)",
        (f"{DAMAGED_RUNS}::test_each_is_left_out_with_a_sentence",),
    ),
    Mutant(
        "results-many-read-at-once",
        "The rows of thousands of runs are not to be had without all their tables.",
        "zerobench/results",
        "if files.is_large else long_table(name)",
        "if False else long_table(name)",
        (f"{TABLE_CACHE}::test_a_second_load_reads_few_files_and_gives_the_same",),
    ),
    Mutant(
        "results-stale-cache",
        "A run that changed since its table was remembered is shown as it was.",
        "zerobench/results",
        "if run in states and was == states[run]}",
        "if run in states}",
        (f"{TABLE_CACHE}::test_runs_that_changed_came_or_went_are_seen",),
    ),
    Mutant(
        "job-other-keys-accepted",
        "What comes from another machine may have keys that no field has.",
        "zerobench/cluster",
        "if not isinstance(value, dict) or set(value) != set(types):",
        "if not isinstance(value, dict) or not set(value) >= set(types):",
        (f"{JOB}::test_records_survive_json_to_the_bit",),
    ),
    Mutant(
        "job-silence-is-life",
        "A process whose pulse stands still is taken to live.",
        "zerobench/cluster",
        "or 0) > heard.beat:",
        "or 0) >= heard.beat:",
        (f"{JOB}::test_a_pulse_that_stands_still_is_heard",),
    ),
    Mutant(
        "data-ranks-see-the-same",
        "Every rank trains on rank 0's batches.",
        "zerobench/data.py",
        "source.micro_batch, source.accumulation, rank, source.world_size,",
        "source.micro_batch, source.accumulation, 0, source.world_size,",
        (f"{DATA_AND_MODELS}::test_a_cells_ranks_have_their_own_parts",),
    ),
)
