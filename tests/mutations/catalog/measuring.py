"""Faults of what measures: the ledger, the meter, the clock, traces, and how ranks and passes become a row."""

from __future__ import annotations

from ..mutant import Mutant

CLOCK = "tests/unit/test_clock.py"
FLOPS = "tests/unit/test_flops.py"
GROUPING = "tests/unit/test_grouping.py"
JOIN = "tests/unit/test_join.py"
IN_TRANSIT = "tests/unit/test_in_transit.py"
LEDGER = "tests/unit/test_ledger.py"
MEMORY_VIZ = "tests/unit/test_memory_viz.py"
PLANTED = "tests/faults/test_planted.py"
TIERS = "tests/unit/test_tiers.py"
TRACE = "tests/unit/test_trace.py"
TRAFFIC = "tests/unit/test_traffic.py"
TRAINING_CHECK = "tests/distributed/test_training_check.py"

MUTANTS = (
    Mutant(
        "ledger-resize-not-seen",
        "Memory that a storage is given anew by resize_ is not counted.",
        "zerobench/probes",
        "        meet(storage)\n",
        "",
        (f"{LEDGER}::test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase",),
    ),
    Mutant(
        "ledger-death-not-seen",
        "A storage that dies keeps its bytes.",
        "zerobench/probes",
        "self._events.append(Event(self.phase, time.perf_counter(), stored, grown=-stored.bytes))",
        "self._events.append(Event(self.phase, time.perf_counter(), stored, grown=0))",
        (f"{LEDGER}::test_the_first_label_holds_from_birth_and_a_second_from_then_on",),
    ),
    Mutant(
        "ledger-counts-views",
        "Every tensor counts, so that two views of a storage are counted twice.",
        "zerobench/probes",
        "        if size != stored.bytes:\n            self._events",
        "        if size:\n            self._events",
        (f"{LEDGER}::test_memory_that_is_asked_for_is_counted_and_so_is_what_outlives_its_phase",),
    ),
    Mutant(
        "ledger-label-from-now-on",
        "A storage's first label holds from the label on, not from its birth.",
        "zerobench/probes",
        "if stored.labeled and stored.category != category:",
        "if stored.category != category:",
        (f"{LEDGER}::test_the_first_label_holds_from_birth_and_a_second_from_then_on",),
    ),
    Mutant(
        "ledger-recomputation-is-temporary",
        "What is made again in backward is not counted as activations.",
        "zerobench/probes",
        'recomputing = self.phase == "backward" and torch.is_grad_enabled()',
        'recomputing = self.phase == "nothing" and torch.is_grad_enabled()',
        (f"{LEDGER}::test_recomputation_makes_activations_and_backward_makes_temporaries",),
    ),
    Mutant(
        "ledger-peak-at-the-end",
        "The largest tensors are those at a step's end in place of its peak.",
        "zerobench/probes",
        "best.alive = alive_after(interval, best_at)",
        "best.alive = alive_after(interval, len(interval.events) - 1)",
        (f"{LEDGER}::test_the_largest_tensors_are_those_of_the_peak",),
    ),
    Mutant(
        "ledger-host-is-device",
        "Bytes in host memory count as the device's.",
        "zerobench/probes",
        "stored.tier = tier or stored.tier",
        "stored.tier = stored.tier",
        (f"{TIERS}::test_copies_between_tiers_are_listed_with_their_bytes",),
    ),
    Mutant(
        "traffic-payload-is-wire",
        "Bytes on the wire are the payload, whatever the collective and the number of ranks.",
        "zerobench/probes",
        "wire = payload * rule.wire(n) if rule else 0.0",
        "wire = float(payload)",
        (f"{TRAFFIC}::test_every_collective_in_a_world_of_two",),
    ),
    Mutant(
        "traffic-control-of-any-size",
        "Whatever calls itself control is left out of the volume, however large.",
        "zerobench/probes",
        "((said or flags) and payload <= CONTROL_MOST_BYTES)",
        "(said or flags)",
        (f"{PLANTED}::test_a_planted_mistake_is_seen_and_named[an int32 all-reduce of 1 MiB]",),
    ),
    Mutant(
        "traffic-threads-are-the-engine",
        "A collective of a stray thread is taken for the engine's own.",
        "zerobench/probes",
        "if threading.get_ident() == self._home:\n            return labels.current_collective()",
        "if threading.get_ident():\n            return labels.current_collective()",
        (f"{TRAFFIC}::test_what_a_thread_sends_is_not_the_engines",),
    ),
    Mutant(
        "traffic-all-between-nodes",
        "All bytes of a collective that leaves a node count as between nodes.",
        "zerobench/probes",
        "return {leaving / len(nodes): 1}",
        "return {float(leaving > 0): 1}",
        (f"{GROUPING}::test_the_meter_tells_nodes_apart",),
    ),
    Mutant(
        "tiers-copies-of-control",
        "Flags and stamps count as bytes that move between tiers.",
        "zerobench/probes",
        'aside = self.phase == "data" or place.dim() == 0 or bool(labels.current_collective()[0])',
        "aside = False",
        (f"{TIERS}::test_batches_flags_and_stamps_are_no_bytes_of_a_tier",),
    ),
    Mutant(
        "clock-data-is-part-of-a-step",
        "The time in which a batch is made counts as the step's.",
        "zerobench/probes",
        'return times | {"step": times["step"] - sum(times.get(name, 0.0) for name in APART)}',
        "return times",
        (f"{CLOCK}::test_a_step_s_time_is_its_work_alone",),
    ),
    Mutant(
        "clock-collects-within",
        "Python's garbage is collected within measured steps.",
        "zerobench/probes",
        "        gc.freeze()\n        gc.disable()\n        self._holds_garbage = True",
        "        gc.freeze()\n        self._holds_garbage = True",
        (f"{CLOCK}::test_garbage_is_collected_between_measured_steps_and_not_within",),
    ),
    Mutant(
        "trace-spans-not-joined",
        "Communication that overlaps other communication counts twice.",
        "zerobench/probes",
        "if joined and begin <= joined[-1][1]:",
        "if joined and begin < joined[0][0]:",
        (f"{TRACE}::test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does",),
    ),
    Mutant(
        "trace-exposed-is-all",
        "Communication that computing hides counts as exposed.",
        "zerobench/probes",
        "within, subtract(within, computing))",
        "within, subtract(within, []))",
        (f"{TRACE}::test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does",),
    ),
    Mutant(
        "row-first-rank-s-time",
        "A step's time is the fastest rank's in place of the slowest's.",
        "zerobench/sweep",
        "return [max(times) for times in by_step.values()]",
        "return [min(times) for times in by_step.values()]",
        (f"{JOIN}::test_the_slowest_rank_of_each_step_after_warm_up",),
    ),
    Mutant(
        "row-warmup-counts",
        "Warm-up steps are among the measured ones.",
        "zerobench/sweep",
        "                if not step.warmup:\n                    by_step",
        "                if True:\n                    by_step",
        (f"{JOIN}::test_the_slowest_rank_of_each_step_after_warm_up",),
    ),
    Mutant(
        "row-least-rank-s-memory",
        "The peak of a cell is that of the rank that needs least.",
        "zerobench/sweep",
        'worst = max((m for m in whole if m.category == "total"), key=lambda m: m.max_bytes)',
        'worst = min((m for m in whole if m.category == "total"), key=lambda m: m.max_bytes)',
        (f"{JOIN}::test_memory_is_that_of_the_fullest_rank",),
    ),
    Mutant(
        "row-passes-need-not-agree",
        "The timed and the accounted pass may have trained differently and are called equal.",
        "zerobench/sweep",
        "return all(one == first for one in others) if others else None",
        "return all(len(one) == len(first) for one in others) if others else None",
        (f"{JOIN}::test_passes_that_differ_in_one_bit_are_told",),
    ),
    Mutant(
        "row-wire-of-one-rank",
        "Wire bytes are those of all ranks together in place of their mean.",
        "zerobench/sweep",
        "round(sum(per_step(traffic, value) for traffic in data) / len(data))",
        "round(sum(per_step(traffic, value) for traffic in data))",
        (f"{JOIN}::test_bytes_on_the_wire_are_the_mean_over_the_ranks_and_payload_that_of_the_rank_with_most",),
    ),
    Mutant(
        "row-nan-loss-is-ok",
        "A run whose loss is no number any more ends as ok.",
        "zerobench/sweep",
        "if not math.isfinite(step.loss)]",
        "if math.isinf(step.loss)]",
        (f"{TRAINING_CHECK}::test_a_loss_that_is_lost_is_a_status",),
    ),
    Mutant(
        "row-norm-of-replicas-twice",
        "Replicas of a shard each add to the gradients' norm.",
        "zerobench/sweep",
        "row.grad_norm = math.sqrt(sum(known) / holders)",
        "row.grad_norm = math.sqrt(sum(known))",
        (f"{JOIN}::test_replicas_of_a_gradient_count_once_in_its_norm",),
    ),
    Mutant(
        "ledger-late-release-counts",
        "What gloo's thread still holds is counted, or not, as it happens.",
        "zerobench/probes",
        "            self.in_transit.settle()\n",
        "            pass\n",
        (f"{IN_TRANSIT}::test_what_gloo_has_finished_with_is_gone_before_the_next_storage_is_counted",),
    ),
    Mutant(
        "snapshot-without-unknown",
        "A snapshot has no block of the category without which torch's page fails.",
        "zerobench/probes",
        "for category in (*CATEGORIES, UNKNOWN)]",
        "for category in CATEGORIES]",
        (f"{MEMORY_VIZ}::test_the_page_can_unpickle_and_color_it",),
    ),
    Mutant(
        "snapshot-shows-the-harness",
        "A snapshot shows memory of the harness's own work within a step.",
        "zerobench/probes",
        "if event.phase != ASIDE:  # what the harness does aside",
        "if event.phase:  # what the harness does aside",
        (f"{MEMORY_VIZ}::test_live_bytes_are_the_ledgers_at_every_instant",),
    ),
    Mutant(
        "snapshot-of-the-last-step",
        "A snapshot is of the last step, whichever has the peak.",
        "zerobench/probes",
        " and peak == self.sums.extremes[whole].peak:",
        ":",
        (f"{MEMORY_VIZ}::test_a_watch_writes_the_step_of_its_peak",),
    ),
    Mutant(
        "stamp-first-before-the-history",
        "A block that was there before CUDA's history gets the label of an earlier one at its address.",
        "zerobench/probes",
        "if turn == 0 or turn not in found:",
        "if turn not in found:",
        (f"{MEMORY_VIZ}::test_labels_are_stamped_into_torchs_own_snapshot",),
    ),
    Mutant(
        "flops-recomputation-is-the-model-s",
        "The FLOPs of recomputed blocks count for the model, too.",
        "zerobench/predict",
        "model=replace(config.model, checkpointing=False))",
        "model=replace(config.model))",
        (f"{FLOPS}::test_what_is_recomputed_counts_for_the_hardware_only",),
    ),
)
