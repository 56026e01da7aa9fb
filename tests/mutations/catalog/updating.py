"""Faults of the update: which parameters it is of, clipping, masters, the delayed one, gradients on the host."""

from __future__ import annotations

from ..mutant import Mutant

ACCUMULATION = "tests/unit/test_accumulation.py"
BRANCHES = "tests/distributed/test_branches.py"
HIDDEN = "tests/distributed/test_hidden.py"
INITIALIZE = "tests/unit/test_initialize.py"
OFFLOAD = "tests/distributed/test_offload.py"
TILED_STEPS = "tests/distributed/test_tiled_steps.py"
TRAINING_LOOPS = "tests/distributed/test_training_loops.py"
TRAINING_CHECK = "tests/distributed/test_training_check.py"
UNIT_WRITES = "tests/unit/test_writes.py"
WRITES = "tests/distributed/test_writes.py"

MUTANTS = (
    Mutant(
        "delayed-gradients-read",
        "A backward looks at the optimizer's gradients while the delayed update's thread sets them.",
        "        if self._engine.update.is_running:\n            return",
        "        if False:\n            return",
        (f"{OFFLOAD}::test_a_backward_leaves_the_gradients_of_a_late_update_alone",),
    ),
    Mutant(
        "data-in-forward-lost",
        "What a forward writes by .data is lost when a unit of stage 3 is resharded.",
        "            self.parameter_shard.narrow(0, 0, numel).copy_(own.narrow(0, 0, numel))",
        "            pass",
        (f"{WRITES}::test_writes_inside_the_forward_count_in_every_stage",),
    ),
    Mutant(
        "data-in-forward-lost-in-silence",
        "What a forward writes by .data to parameters that are offloaded, or rounded by ZeRO++, is lost in silence.",
        "        if lost is not None and bool(lost):",
        "        if False:",
        (f"{WRITES}::test_writes_that_a_forward_would_lose_are_refused",),
    ),
    Mutant(
        "data-between-steps-undone",
        "A write by .data between steps does not reach masters that are apart, and the next step undoes it.",
        "            if unit.placement.may_be_written(unit):",
        "            if False:",
        (f"{UNIT_WRITES}::test_writes_count",),
    ),
    Mutant(
        "param-groups-mixture",
        "Writes to an optimizer's tensors between steps leave every rank with another mixture of weights.",
        "        if not self._engine.schedule.is_at_work and self._segments.have_moved:",
        "        if False:",
        (f"{WRITES}::test_writes_to_param_groups_are_refused_until_all_ranks_take_them",),
    ),
    Mutant(
        "param-groups-data-unseen",
        "A write by .data to an optimizer's tensor does not count.",
        "        return self.detach()\n\n    @data.setter",
        "        return torch.Tensor.data.__get__(self)\n\n    @data.setter",
        (f"{UNIT_WRITES}::test_writes_to_an_optimizers_tensors_are_counted",),
    ),
    Mutant(
        "hidden-detach-is-nan",
        "Under zero3 a detached parameter reads as NaN, and an average of weights becomes NaN, without a word.",
        "Hiding(self.refuse, lets_write=True)",
        "Hiding(self.refuse, lets_write=True, lets_detach=True)",
        (f"{HIDDEN}::test_values_that_are_away_are_brought_or_refused",),
    ),
    Mutant(
        "shared-memory-cut",
        "Weights that share memory before initialize are trained apart.",
        "    check_memory(model, moves_frozen)\n",
        "",
        (f"{INITIALIZE}::test_memory_that_is_shared_is_refused",),
    ),
    Mutant(
        "update-unused-decay",
        "Parameters without a gradient on any rank are updated as if theirs were 0.",
        "            segment.used = segment.segment.parameter in self.used",
        "            segment.used = True",
        (f"{BRANCHES}::test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays",),
    ),
    Mutant(
        "update-used-here-alone",
        "A rank updates only parameters whose gradients came on itself.",
        "            self.used = {i for i, flag in enumerate(flags) if flag}",
        "            pass",
        (f"{BRANCHES}::test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays",),
    ),
    Mutant(
        "segments-flat",
        "An optimizer of the user's gets flat segments, so that its rules for matrices hold for none.",
        "    return 1 if type(optimizer) in ELEMENTWISE else max(1, parameter.dim())",
        "    return 1",
        (f"{TILED_STEPS}::test_counts_and_hooks_know_nothing_of_tiles[in tiles]",),
    ),
    Mutant(
        "clip-by-local-norm",
        "Each rank clips by the norm of its own shards.",
        "        return norm_over_ranks(total, norm_type, self.comm.sum, self.comm.maximum)",
        "        return norm_over_ranks(total, norm_type, lambda _: None, lambda _: None)",
        (f"{TRAINING_CHECK}::test_every_strategy_has_the_norm_of_ddp_and_of_its_own_clipping[2]",),
    ),
    Mutant(
        "clip-nan-is-infinite",
        "A norm of gradients with a NaN is infinite, so that a loop's isnan() does not see it.",
        "    sent = total.nan_to_num(nan=math.inf, posinf=largest)",
        "    sent = total.nan_to_num(nan=largest, posinf=largest)",
        (f"{TRAINING_LOOPS}::test_training_loops[3]",),
    ),
    Mutant(
        "clip-refused-and-kept",
        "Clipping that error_if_nonfinite refuses counts at the next step all the same.",
        "        if error_if_nonfinite and not norm.isfinite():",
        "        self.coefficient = clip_coefficient(norm, max_norm) * pending\n"
        "        if error_if_nonfinite and not norm.isfinite():",
        (f"{TRAINING_LOOPS}::test_training_loops[3]",),
    ),
    Mutant(
        "clip-half-the-tiles",
        "The norm leaves out the gradients of the last tile.",
        "for tile in filter(None, self.tiles):\n            with tile[0].shard_range.gradients()",
        "for tile in filter(None, self.tiles[:-1]):\n            with tile[0].shard_range.gradients()",
        (f"{TRAINING_CHECK}::test_every_strategy_has_the_norm_of_ddp_and_of_its_own_clipping[2]",),
    ),
    Mutant(
        "masters-not-rounded",
        "Parameters do not follow their masters after a delayed update.",
        "        self._placement.round_masters()",
        "        pass",
        (f"{OFFLOAD}::test_a_late_update_is_that_of_a_loop_by_hand",),
    ),
    Mutant(
        "delayed-update-not-applied",
        "A pending update is dropped where it should be made.",
        "                update_silently(self.optimizer, self.tiles, self.coefficient)",
        "                pass",
        (f"{OFFLOAD}::test_a_late_update_is_that_of_a_loop_by_hand",),
    ),
    Mutant(
        "delayed-options-of-now",
        "A delayed update takes the learning rate of the step that waits for it.",
        "then = stand_in(optimizer, groups)",
        "then = stand_in(optimizer, optimizer.param_groups)",
        (f"{OFFLOAD}::test_a_late_update_is_that_of_a_loop_by_hand",),
    ),
    Mutant(
        "offload-gradient-overwrites",
        "What leaves of a second micro-batch's gradients takes the place of the first's.",
        "self.sink.take(mean.narrow(0, 0, self.offloaded_numel), adds=self.is_reduced)",
        "self.sink.take(mean.narrow(0, 0, self.offloaded_numel), adds=False)",
        (f"{ACCUMULATION}::test_micro_batches_add_up",),
    ),
)
