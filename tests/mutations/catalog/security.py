"""Faults of what a stranger must not get: values of a job, an order carried out, a pickle opened."""

from __future__ import annotations

from ..mutant import Mutant

SECRET = "tests/unit/test_job_secret.py"
FOLDERS = "tests/faults/test_folders.py"
HOSTILE = "tests/end_to_end/test_hostile_input.py"
INTERFACES = "tests/distributed/test_interfaces.py"
LOCKS = "tests/unit/test_locks.py"

MUTANTS = (
    Mutant(
        "seal-without-proof",
        "A value that was not sealed with the job's secret is taken.",
        "zerobench/cluster/seal.py",
        "if len(hidden) < NONCE_BYTES or not hmac.compare_digest(tag, self._tag(name, hidden)):",
        "if len(hidden) < NONCE_BYTES:",
        (f"{SECRET}::test_a_seal_opens_for_its_name_and_secret_alone",),
    ),
    Mutant(
        "seal-without-name",
        "A sealed value may be moved to another name.",
        "zerobench/cluster/seal.py",
        'f"{len(name.encode())} {name} ".encode() + hidden',
        "hidden",
        (f"{SECRET}::test_a_value_moved_to_another_name_is_foreign",),
    ),
    Mutant(
        "secret-for-all-users",
        "A job's secret is taken from a file that others can read.",
        "zerobench/cluster/own_files.py",
        "WRITABLE, ANY = 0o022, 0o077",
        "WRITABLE, ANY = 0o022, 0o007",
        (f"{SECRET}::test_the_way_by_file",),
    ),
    Mutant(
        "lease-waits-for-a-pipe",
        "A pipe that another user calls a lease is opened until somebody writes to it.",
        "zerobench/host/files.py",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW",
        "os.O_RDONLY | os.O_NOFOLLOW",
        (f"{FOLDERS}::test_a_strangers_lease_is_not_waited_for",),
    ),
    Mutant(
        "lease-of-any-size",
        "A lease is read whole, however large it claims to be.",
        "zerobench/host/files.py",
        "if found.st_size > most",
        "if False",
        (f"{FOLDERS}::test_a_strangers_lease_is_not_waited_for",),
    ),
    Mutant(
        "doubt-written-through-a-link",
        "A doubt is written into whatever file the stranger's link names.",
        "zerobench/host/leases.py",
        '        doubt.unlink(missing_ok=True)\n        with doubt.open("x")',
        '        with doubt.open("w")',
        (f"{FOLDERS}::test_a_strangers_lease_is_not_waited_for",),
    ),
    Mutant(
        "rescued-into-a-strangers-folder",
        "A run that cannot be written to its results folder goes through a link of another user's.",
        "zerobench/results/rescue.py",
        "        make_own_folder(place)\n",
        "        pass\n",
        (f"{FOLDERS}::test_the_temporary_place_of_a_run_is_the_users_own",),
    ),
    Mutant(
        "environment-read-by-a-config",
        "A config folder of others has any environment variable printed and written into runs.",
        "zerobench/config/environment_values.py",
        "if name not in named:",
        "if False:",
        (f"{HOSTILE}::test_an_experiment_of_the_users_is_refused_in_a_sentence",),
    ),
    Mutant(
        "formula-in-a-cell",
        "A spreadsheet computes a text of a run.",
        "zerobench/commands/export/table.py",
        "if value.startswith(FORMULA)",
        "if False",
        (f"{HOSTILE}::test_texts_of_runs_neither_forge_a_line_nor_control_the_terminal",),
    ),
    Mutant(
        "line-forged-by-a-reason",
        "A newline in a run's reason begins a line of its own in the account of the run.",
        "zerobench/commands/text_blocks.py",
        "console.print(printable(words),",
        "console.print(words,",
        (f"{HOSTILE}::test_texts_of_runs_neither_forge_a_line_nor_control_the_terminal",),
    ),
    Mutant(
        "store-on-all-interfaces",
        "The job's store listens on every interface.",
        "zerobench/cluster/interface.py",
        "        listener.bind(place)\n",
        '        listener.bind(("", port))\n',
        (f"{INTERFACES}::test_the_jobs_store_listens_at_its_address_alone",),
    ),
)
