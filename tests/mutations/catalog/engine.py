"""Faults of the engine: gradients on their way, units, and the stages."""

from __future__ import annotations

from ..mutant import Mutant

ACCUMULATION = "tests/unit/test_accumulation.py"
BRANCHES = "tests/distributed/test_branches.py"
INITIALIZE = "tests/unit/test_initialize.py"
COMPILE = "tests/distributed/test_compile.py"
ENGINE_OPTIONS = "tests/distributed/test_engine_options.py"
FORWARDS = "tests/distributed/test_forwards.py"
MEASUREMENT = "tests/distributed/test_measurement.py"
PARITY = "tests/distributed/test_parity.py"
RACES = "tests/distributed/test_races.py"
TIED = "tests/distributed/test_tied.py"

MUTANTS = (
    Mutant(
        "gradient-mean-not-divided",
        "Gradients are summed over the ranks where their mean belongs.",
        "place, scale = self.full.narrow(0, piece.offset, piece.numel), 1 / self._comm.ranks",
        "place, scale = self.full.narrow(0, piece.offset, piece.numel), 1.0",
        (f"{PARITY}::test_optimizers_update_as_under_ddp[sgd]",),
    ),
    Mutant(
        "gradient-second-use-overwrites",
        "A second gradient of the same elements takes the place of the first, so that accumulation is lost.",
        "        if piece in self.filled:\n            place.add_(gradient, alpha=scale)",
        "        if piece is None:\n            place.add_(gradient, alpha=scale)",
        (f"{ACCUMULATION}::test_micro_batches_add_up",),
    ),
    Mutant(
        "gradient-unused-keeps-old",
        "Elements that no gradient was written to are sent as whatever lies there.",
        "                self.full.narrow(0, piece.offset, piece.numel).zero_()\n        for offset",
        "                pass\n        for offset",
        (f"{BRANCHES}::test_what_a_rank_did_not_use_counts_as_zero_there_and_what_none_used_stays",),
    ),
    Mutant(
        "gradient-late-one-lost",
        "A gradient that comes after its bucket was sent waits for the next backward.",
        "            if unit.gradients.filled and not unit.gradients.is_in_flight:",
        "            if unit.gradients.filled and not unit.gradients.is_in_flight and not unit.gradients.is_reduced:",
        (f"{PARITY}::test_reentrant_recomputation[2]",),
    ),
    Mutant(
        "gradient-waits-for-none",
        "A reduction that is in flight is not waited for at the backward's end.",
        "            self.gradients.reduce(self.left_over())\n            self.gradients.wait_all()",
        "            self.gradients.reduce(self.left_over())",
        (f"{PARITY}::test_optimizers_update_as_under_ddp[sgd]",),
    ),
    Mutant(
        "gradient-tied-order",
        "Uses of a tied parameter that come through its places are dropped.",
        "            self._fill(unit.gradients, piece, flat)\n        return None",
        "            pass\n        return None",
        (f"{TIED}::test_tied_parameters_train_as_under_plain_torch",),
    ),
    Mutant(
        "no-sync-ignored",
        "Backwards under no_sync reduce like any other.",
        "before, self.gradients.synchronizing = self.gradients.synchronizing, False",
        "before, self.gradients.synchronizing = self.gradients.synchronizing, True",
        (f"{MEASUREMENT}::test_accumulation_is_counted_and_changes_nothing_else[zero1-3]",),
    ),
    Mutant(
        "stage1-sum-so-far-lost",
        "A further micro-batch's reduction takes the place of the sum of those before it.",
        "            self.shard.add_(self._carried)",
        "            pass",
        (f"{PARITY}::test_accumulation[False]",),
    ),
    Mutant(
        "stage1-bucket-never-sent",
        "Buckets that no gradient filled are not reduced, although other ranks wait for them.",
        "yield from self.units[sent:]",
        "yield from (unit for unit in self.units[sent:] if unit.gradients.is_full)",
        (f"{PARITY}::test_models_train_as_under_ddp[tied recomputed unused rich-2]",),
    ),
    Mutant(
        "stage1-parameters-not-gathered",
        "The last bucket's updated parameters stay on their owners.",
        "        for unit in self.units:\n            self.gathers.launch(unit)",
        "        for unit in self.units[:-1]:\n            self.gathers.launch(unit)",
        (f"{PARITY}::test_optimizers_update_as_under_ddp[sgd]",),
    ),
    Mutant(
        "stage1-gather-not-waited-for",
        "With gathers that overlap the next forward, parameters are shown before their gather is done.",
        "        handle.wait()\n        for parameter in",
        "        for parameter in",
        (f"{RACES}::test_overlapped_runs_equal_serialized_ones",),
    ),
    Mutant(
        "stage2-bucket-kept",
        "A bucket's full gradients keep their memory once they have been sent.",
        "        self.release_full()\n        self.end_round()",
        "        self.end_round()",
        (f"{MEASUREMENT}::test_bytes_and_volumes_are_those_of_the_formulas[zero2-odd-3]",),
    ),
    Mutant(
        "stage2-second-micro-batch-replaces",
        "The mean of a second micro-batch takes the place of the first's.",
        "            self.shard.add_(mean)",
        "            self.shard.copy_(mean)",
        (f"{PARITY}::test_accumulation[False]",),
    ),
    Mutant(
        "stage2-shard-kept",
        "The gradient shard keeps its memory after the update.",
        "            self.release_full()\n            self.unit.heap.release(self.shard)",
        "            self.release_full()",
        (f"{ENGINE_OPTIONS}::test_gradient_shards_have_memory_from_reduction_to_update[zero2]",),
    ),
    Mutant(
        "unit-wrong-slice",
        "Every rank takes the first slice of a unit for its own.",
        "return full.narrow(0, self.rank * self.layout.shard_numel, self.layout.shard_numel)",
        "return full.narrow(0, 0 * self.layout.shard_numel, self.layout.shard_numel)",
        (f"{PARITY}::test_optimizers_update_as_under_ddp[sgd]",),
    ),
    Mutant(
        "unit-never-resharded",
        "A unit's storage is not given back after its use.",
        "        self.full_parameters.untyped_storage().resize_(0)\n        labels.unit",
        "        labels.unit",
        (f"{MEASUREMENT}::test_bytes_and_volumes_are_those_of_the_formulas[zero3-odd-3]",),
    ),
    Mutant(
        "unit-gathered-twice",
        "A unit is gathered twice for each use.",
        "            self.gather = self.source.launch(",
        "            self.source.launch(full, self.name, self._stamp(self)).wait()\n"
        "            self.gather = self.source.launch(",
        (f"{MEASUREMENT}::test_bytes_and_volumes_are_those_of_the_formulas[zero3-odd-3]",),
    ),
    Mutant(
        "unit-read-before-it-is-there",
        "A unit is shown before its gather is done.",
        "        self.gather.wait()\n        self.gather, self.is_whole = None, True",
        "        self.gather, self.is_whole = None, True",
        (f"{RACES}::test_overlapped_runs_equal_serialized_ones",),
    ),
    Mutant(
        "stage3-no-prefetch",
        "No unit is gathered ahead of its use.",
        "                following.launch_unshard()",
        "                pass",
        (f"{MEASUREMENT}::test_bytes_and_volumes_are_those_of_the_formulas[zero3-odd-3]",),
    ),
    Mutant(
        "stage3-kept-units-stale",
        "Small parameters that stay whole keep their old values after an update.",
        "            self.comm.exact.all_gather(self.full_parameters, self.name).wait()",
        "            pass",
        (f"{ENGINE_OPTIONS}::test_options_train_as_ddp_does[3]",),
    ),
    Mutant(
        "stage3-age-not-checked",
        "A backward may go through a forward of before the step.",
        "if not self._order.come_to(forward):",
        "if self._order.come_to(forward) is None:",
        (f"{FORWARDS}::test_a_forward_is_gone_through_once_and_before_a_step",),
    ),
    Mutant(
        "hooks-compiled",
        "torch.compile traces into the engine's hooks.",
        "        if torch.compiler.is_dynamo_compiling():",
        "        if self is None:",
        (f"{COMPILE}::test_a_compiled_model_trains_as_under_ddp",),
    ),
    Mutant(
        "engine-call-compiled",
        "torch.compile of the engine traces into what it does before a forward.",
        "        Hook(self._before_forward)()",
        "        self._before_forward()",
        (f"{COMPILE}::test_a_compiled_model_trains_as_under_ddp",),
    ),
    Mutant(
        "parameter-of-two-engines",
        "A part of a module that is under an engine is put under another one.",
        "        _ENGINE_OF[parameter] = strategy, moves_frozen",
        "        pass",
        tuple(f"{INITIALIZE}::test_a_parameter_has_one_engine[zero{stage}]" for stage in (1, 2, 3)),
    ),
    Mutant(
        "hidden-write-passes",
        "A write to a parameter in parts goes to the NaN in its place.",
        "        elif is_write(operation):",
        "        elif False:",
        ("tests/distributed/test_writes.py::test_parameters_in_parts_are_not_written_to_in_silence",),
    ),
    Mutant(
        "transform-not-explained",
        "A gather that a transform of torch.func refuses ends in the words of torch, which do not say what to do.",
        "                if CAPTURED in str(error):",
        "                if False:",
        ("tests/distributed/test_hidden.py::test_values_that_are_away_are_brought_or_refused",),
    ),
)
