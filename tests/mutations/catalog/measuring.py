"""Faults of what measures: the ledger, the meter, the clock, traces, and how ranks and passes become a row."""

from __future__ import annotations

from ..mutant import Mutant

CLOCK = "tests/unit/test_clock.py"
GROUPING = "tests/unit/test_grouping.py"
IN_TRANSIT = "tests/unit/test_in_transit.py"
LEDGER = "tests/unit/test_ledger.py"
MEMORY_VIZ = "tests/unit/test_memory_viz.py"
EVENT_ROWS = "tests/unit/test_event_rows.py"
PLANTED = "tests/faults/test_planted.py"
TIERS = "tests/unit/test_tiers.py"
TRACE = "tests/unit/test_trace.py"
TRAFFIC = "tests/unit/test_traffic.py"
WATCH = "tests/unit/test_watch.py"
LEFT = f"{WATCH}::test_nothing_is_left_where_a_watch_has_been"

MUTANTS = (
    Mutant(
        "between-steps-not-seen",
        "What lives when a step ends is not recorded, so that a kept output moves no figure.",
        "self.extremes.setdefault(BETWEEN, Extremes()).see(on_device)",
        "pass",
        (f"{PLANTED}::test_a_planted_mistake_is_seen_and_named[outputs kept until the next forward]",),
    ),
    Mutant(
        "ledger-resize-not-seen",
        "Memory that a storage is given again by resize_ is not counted.",
        "        meet(storage)\n",
        "",
        (f"{LEDGER}::test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase",),
    ),
    Mutant(
        "ledger-death-not-seen",
        "A storage that dies keeps its bytes.",
        "            self._grow(stored, -stored.bytes)\n",
        "            self._grow(stored, 0)\n",
        (f"{LEDGER}::test_the_first_label_holds_from_birth_and_a_second_from_then_on",),
    ),
    Mutant(
        "ledger-counts-views",
        "Every tensor counts, so that two views of a storage are counted twice.",
        "        if size != stored.bytes:\n            self._grow(stored, size - stored.bytes)",
        "        if size:\n            self._grow(stored, size)",
        (f"{LEDGER}::test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase",),
    ),
    Mutant(
        "ledger-label-from-now-on",
        "A storage's first label holds from the label on, not from its birth.",
        "if stored.labeled and stored.category != category:",
        "if stored.category != category:",
        (f"{LEDGER}::test_the_first_label_holds_from_birth_and_a_second_from_then_on",),
    ),
    Mutant(
        "ledger-recomputation-is-temporary",
        "What is made again in backward is not counted as activations.",
        'recomputing = self.phase == "backward" and torch.is_grad_enabled()',
        'recomputing = self.phase == "nothing" and torch.is_grad_enabled()',
        (f"{LEDGER}::test_recomputation_makes_activations_and_backward_makes_temporaries",),
    ),
    Mutant(
        "ledger-peak-at-the-end",
        "The largest tensors are those at a step's end in place of its peak.",
        "best.alive = alive_after(interval, best_at)",
        "best.alive = alive_after(interval, len(interval.events) - 1)",
        (f"{LEDGER}::test_the_largest_tensors_are_those_of_the_peak",),
    ),
    Mutant(
        "ledger-host-is-device",
        "Bytes in host memory count as the device's.",
        "stored.tier = tier or stored.tier",
        "stored.tier = stored.tier",
        (f"{TIERS}::test_copies_between_tiers_are_listed_with_their_bytes",),
    ),
    Mutant(
        "traffic-payload-is-wire",
        "Bytes on the wire are the payload, whatever the collective and the number of ranks.",
        "wire = payload * rule.wire(n) if rule else 0.0",
        "wire = float(payload)",
        (f"{TRAFFIC}::test_every_collective_in_a_world_of_two",),
    ),
    Mutant(
        "traffic-control-of-any-size",
        "Whatever calls itself control is left out of the volume, however large.",
        "((said or flags) and payload <= CONTROL_MOST_BYTES)",
        "(said or flags)",
        (f"{PLANTED}::test_a_planted_mistake_is_seen_and_named[an int32 all-reduce of 1 MiB]",),
    ),
    Mutant(
        "traffic-threads-are-the-engine",
        "A collective of a stray thread is taken for the engine's own.",
        "if threading.get_ident() == self._home:\n            return labels.current_collective()",
        "if threading.get_ident():\n            return labels.current_collective()",
        (f"{TRAFFIC}::test_what_a_thread_sends_is_not_the_engines",),
    ),
    Mutant(
        "traffic-all-between-nodes",
        "All bytes of a collective that leaves a node count as between nodes.",
        "return {leaving / len(nodes): 1}",
        "return {float(leaving > 0): 1}",
        (f"{GROUPING}::test_the_meter_tells_nodes_apart",),
    ),
    Mutant(
        "tiers-copies-of-control",
        "Flags and stamps count as bytes that move between tiers.",
        'aside = self.phase == "data" or place.dim() == 0 or bool(labels.current_collective()[0])',
        "aside = False",
        (f"{TIERS}::test_batches_flags_and_stamps_are_no_bytes_of_a_tier",),
    ),
    Mutant(
        "clock-data-is-part-of-a-step",
        "The time in which a batch is made counts as the step's.",
        'return times | {"step": times["step"] - sum(times.get(name, 0.0) for name in APART)}',
        "return times",
        (f"{CLOCK}::test_a_step_s_time_is_its_work_alone",),
    ),
    Mutant(
        "clock-collects-within",
        "Python's garbage is collected within measured steps.",
        "        gc.freeze()\n        gc.disable()\n        self._holds_garbage = True",
        "        gc.freeze()\n        self._holds_garbage = True",
        (f"{CLOCK}::test_garbage_is_collected_between_measured_steps_and_not_within",),
    ),
    Mutant(
        "trace-spans-not-joined",
        "Communication that overlaps other communication counts twice.",
        "if joined and begin <= joined[-1][1]:",
        "if joined and begin < joined[0][0]:",
        (f"{TRACE}::test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does",),
    ),
    Mutant(
        "trace-exposed-is-all",
        "Communication that computing hides counts as exposed.",
        "within, subtract(within, computing))",
        "within, subtract(within, []))",
        (f"{TRACE}::test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does",),
    ),
    Mutant(
        "ledger-late-release-counts",
        "What gloo's thread still holds is counted, or not, as it happens.",
        "            self.in_transit.settle()\n",
        "            pass\n",
        (f"{IN_TRANSIT}::test_what_gloo_has_finished_with_is_gone_before_the_next_storage_is_counted",),
    ),
    Mutant(
        "snapshot-without-unknown",
        "A snapshot has no block of the category without which torch's page fails.",
        "for category in (*CATEGORIES, UNKNOWN)]",
        "for category in CATEGORIES]",
        (f"{MEMORY_VIZ}::test_the_page_can_unpickle_and_color_it",),
    ),
    Mutant(
        "snapshot-shows-the-harness",
        "A snapshot shows memory of the harness's own work within a step.",
        "if event.phase != ASIDE:  # what the harness does aside",
        "if event.phase:  # what the harness does aside",
        (f"{MEMORY_VIZ}::test_live_bytes_are_the_ledgers_at_every_instant",),
    ),
    Mutant(
        "snapshot-of-the-last-step",
        "A snapshot is of the last step, whichever has the peak.",
        " and peak == self.sums.extremes[whole].peak:",
        ":",
        (f"{MEMORY_VIZ}::test_a_watch_writes_the_step_of_its_peak",),
    ),
    Mutant(
        "events-show-the-harness",
        "The table of events has what the harness does aside within a step.",
        "        if event.phase == ASIDE:\n            if stored is not None:",
        "        if event.phase == 'nowhere':\n            if stored is not None:",
        (f"{EVENT_ROWS}::test_what_the_harness_leaves_is_told_where_the_next_phase_begins",),
    ),
    Mutant(
        "events-births-before-frees",
        "What the harness has left is told in any order: a sum in between is above the ledger's.",
        "        for stored in sorted(self._aside, key=self._growth):",
        "        for stored in self._aside:",
        (f"{EVENT_ROWS}::test_what_the_harness_leaves_is_told_where_the_next_phase_begins",),
    ),
    Mutant(
        "events-every-wait",
        "Each wait for a collective is told, so that it seems to end where it was looked at last.",
        'self._launches.pop(one.facts["operation"], None)',
        'self._launches.get(one.facts["operation"])',
        (f"{EVENT_ROWS}::test_a_wait_has_what_its_launch_has_and_the_first_counts",),
    ),
    Mutant(
        "events-without-the-threads-writes",
        "The step's writes of files that a thread makes while the harness reads gradients are in no row.",
        "one.phase == ASIDE and one.kind not in (LAUNCH, MOVE)",
        "one.phase == ASIDE",
        (f"{EVENT_ROWS}::test_what_the_harness_leaves_is_told_where_the_next_phase_begins",),
    ),
    Mutant(
        "stamp-first-before-the-history",
        "A block that was there before CUDA's history gets the label of an earlier one at its address.",
        "if turn == 0 or turn not in found:",
        "if turn not in found:",
        (f"{MEMORY_VIZ}::test_labels_are_stamped_into_torchs_own_snapshot",),
    ),
    Mutant(
        "watch-leaves-hooks-on-parameters",
        "The hooks that hear of gradients stay on the parameters.",
        "self._stack.callback(parameter.register_hook(partial(self._gradient_arrived, number, name)).remove)",
        "parameter.register_hook(partial(self._gradient_arrived, number, name))",
        (f"{LEFT}[over]", f"{LEFT}[error]"),
    ),
    Mutant(
        "watch-hears-threads-after-its-end",
        "A thread that outlives the watch goes on filling its ledger.",
        "        listening.clear()\n",
        "",
        (f"{WATCH}::test_a_thread_that_outlives_the_watch_is_heard_no_more",),
    ),
)
