"""Faults of layouts, precision, host memory, files and activations."""

from __future__ import annotations

from ..mutant import Mutant

DISK = "tests/faults/test_disk.py"
FILE_STORE = "tests/unit/test_file_store.py"
LAYOUT = "tests/unit/test_layout.py"
LOSS_SCALING = "tests/unit/test_loss_scaling.py"
PRECISION = "tests/unit/test_precision.py"
RESIDUAL = "tests/distributed/test_residual.py"
UNIT_RESIDUAL = "tests/unit/test_residual.py"

MUTANTS = (
    Mutant(
        "layout-segment-not-shifted",
        "A segment of a parameter that is cut in pieces counts its elements from the piece, not from the parameter.",
        "shift = piece.start - piece.offset",
        "shift = -piece.offset",
        (f"{LAYOUT}::test_segments_cover_every_element_once_and_cuts_are_aligned",),
    ),
    Mutant(
        "layout-shard-not-aligned",
        "Shards end anywhere, so that fused optimizers round their edges otherwise than in the whole parameter.",
        "return _round_up(-(-(self._end + self.tail) // self.world_size), self.align)",
        "return -(-(self._end + self.tail) // self.world_size)",
        (f"{LAYOUT}::test_segments_cover_every_element_once_and_cuts_are_aligned",),
    ),
    Mutant(
        "layout-last-gap-lost",
        "The padding at the end of a unit is none of its gaps, and keeps whatever was there.",
        "starts = [*(piece.offset for piece in self.pieces), self.padded_numel]",
        "starts = [*(piece.offset for piece in self.pieces), ends[-1]]",
        (f"{LAYOUT}::test_gaps_are_all_that_no_parameter_owns",),
    ),
    Mutant(
        "arena-slot-of-another-size",
        "A slot that is given back is found under the wrong key, so that every step makes new ones.",
        "self.free[slot.numel(), slot.device].append(slot)",
        "self.free.setdefault((slot.numel() + 1, slot.device), []).append(slot)",
        (f"{RESIDUAL}::test_in_an_arena_nothing_is_allocated_from_the_second_step_on[zero2]",),
    ),
    Mutant(
        "clip-scales-up",
        "Clipping multiplies small gradients until their norm is the limit.",
        "return torch.clamp(max_norm / (norm + 1e-6), max=1.0)",
        "return max_norm / (norm + 1e-6)",
        (f"{PRECISION}::test_gradients_are_clipped_as_by_torch",),
    ),
    Mutant(
        "norm-inf-summed",
        "The infinity norm over several tensors is the sum of their maxima.",
        "return stacked.max() if norm_type == math.inf else stacked.pow(norm_type).sum()",
        "return stacked.sum() if norm_type == math.inf else stacked.pow(norm_type).sum()",
        (f"{PRECISION}::test_the_norm_of_several_tensors_is_torchs",),
    ),
    Mutant(
        "scale-not-undone",
        "Gradients keep the loss scale until the update.",
        "return 1.0 if self.policy is None else 1 / self.scale",
        "return 1.0 if self.policy is None else self.scale / self.scale",
        (f"{PRECISION}::test_a_loss_scale_is_out_of_the_gradients_before_the_update",),
    ),
    Mutant(
        "scale-below-minimum",
        "After many overflows the loss scale falls to nothing.",
        "self.scale.clamp_(min=policy.minimum)",
        "self.scale.clamp_(min=0.0)",
        (f"{LOSS_SCALING}::test_a_step_that_overflows_changes_nothing",),
    ),
    Mutant(
        "scale-overflow-ignored",
        "A step whose gradients overflowed is taken all the same.",
        "yield not judges_itself and bool(found)",
        "yield False",
        (f"{LOSS_SCALING}::test_a_step_that_overflows_changes_nothing",),
    ),
    Mutant(
        "masters-in-half",
        "Half parameters are updated in half precision: there is no fp32 master, and small updates are lost.",
        "return Dtypes(parameter, gradients, sent, torch.float32 if half else parameter)",
        "return Dtypes(parameter, gradients, sent, parameter)",
        (f"{PRECISION}::test_updates_that_half_precision_would_round_away_add_up_in_masters",),
    ),
    Mutant(
        "file-wrong-range",
        "A read begins at the file's start in place of the region's.",
        "offset, path = self.offset + number * self.store.block_bytes, self.store.channel.path",
        "offset, path = number * self.store.block_bytes, self.store.channel.path",
        (f"{FILE_STORE}::test_any_size_comes_back",),
    ),
    Mutant(
        "file-checksum-not-verified",
        "A block that is not what was written is taken for it.",
        "if self.store.checksums and checksum(piece) != self._sums[number]:",
        "if self.store.checksums and self._sums[number] is None:",
        (f"{DISK}::test_a_damaged_block_is_named[False]",),
    ),
    Mutant(
        "file-checksum-of-rows-alone",
        "A checksum is blind to words of a page that changed places.",
        "for sums in (chunk.sum(1), chunk.sum(0)):",
        "for sums in (chunk.sum(1),):",
        (f"{FILE_STORE}::test_a_checksum_tells_bytes_apart",),
    ),
    Mutant(
        "file-tail-not-checked",
        "A checksum leaves out the bytes behind the last whole page.",
        "found = zlib.crc32(piece[whole:])",
        "found = zlib.crc32(piece[:0])",
        (f"{FILE_STORE}::test_a_checksum_tells_bytes_apart",),
    ),
    Mutant(
        "file-error-not-raised",
        "What went wrong with a write that nobody waited for is never heard of.",
        "            if handle.failed:\n                handle.wait()",
        "            if handle.failed:\n                continue",
        (f"{DISK}::test_what_nobody_waited_for_is_raised_in_the_end",),
    ),
    Mutant(
        "file-no-room-not-asked",
        "A file is made on a disk that has no room for it.",
        "if nbytes > free:",
        "if nbytes < 0:",
        (f"{DISK}::test_what_could_not_be_reserved_is_given_back",),
    ),
    Mutant(
        "activations-last-unit-leaves",
        "What the last unit saves goes to the host, and backward waits for all of it at once.",
        "is_last=number == len(units) - 1",
        "is_last=False",
        (f"{UNIT_RESIDUAL}::test_bytes_lie_where_the_policy_says",),
    ),
    Mutant(
        "activations-view-from-the-start",
        "A view of a saved storage comes back from the storage's first element.",
        "set_(memory.untyped_storage(), offset, shape, stride)",
        "set_(memory.untyped_storage(), 0, shape, stride)",
        (f"{UNIT_RESIDUAL}::test_one_memory_travels_once_and_views_come_back_with_their_strides",),
    ),
    Mutant(
        "activations-written-not-seen",
        "A saved tensor that its owner wrote to while it left comes back in silence.",
        "if self._written or not self._is_intact():",
        "if self._written and not self._is_intact():",
        (f"{UNIT_RESIDUAL}::test_a_saved_tensor_that_is_written_to_is_an_error_as_it_is_without",),
    ),
    Mutant(
        "activations-stay-on-device",
        "What has gone to the host keeps its memory on the device.",
        "self._seen, self._here = [], None",
        "self._seen = []",
        (f"{UNIT_RESIDUAL}::test_bytes_lie_where_the_policy_says",),
    ),
    Mutant(
        "activations-not-recomputed",
        "Checkpointing keeps all that autograd saves.",
        "return checkpoint(self.forward, *inputs, use_reentrant=False, **named_inputs)",
        "return self.forward(*inputs, **named_inputs)",
        (f"{UNIT_RESIDUAL}::test_bytes_lie_where_the_policy_says",),
    ),
)
