"""Faults of collectives: slices, sums, stamps, groups and codes."""

from __future__ import annotations

from ..mutant import Mutant

CODEC = "tests/unit/test_codec.py"
COMM = "tests/distributed/test_comm.py"
GROUPS = "tests/distributed/test_groups.py"
SEALS = "tests/unit/test_seals.py"
ZEROPP = "tests/distributed/test_zeropp.py"

MUTANTS = (
    Mutant(
        "comm-gather-wrong-slice",
        "A gather puts each peer's slice where the next peer's belongs.",
        "to_come = [(peer, piece) for peer in others for piece in slices[peer]]",
        "to_come = [(peer, piece) for peer in others for piece in slices[(peer + 1) % size]]",
        (f"{COMM}::test_ranks_at_different_places_hear_of_it[2]",),
    ),
    Mutant(
        "comm-reduce-sends-own-slice",
        "A reduction sends every peer the own slice in place of the peer's.",
        "to_go = [(peer, slices[peer][place]) for place in range(len(own)) for peer in others]",
        "to_go = [(peer, own[place]) for place in range(len(own)) for peer in others]",
        (f"{COMM}::test_a_mismatch_ends_the_run_with_its_sentence",),
    ),
    Mutant(
        "comm-last-rank-not-summed",
        "A reduction leaves out what the highest rank has sent.",
        "torch.add(so_far, arrived.place, out=total)",
        "torch.add(so_far, 0, out=total)",
        (f"{COMM}::test_collectives_put_the_same_bits_on_every_run",),
    ),
    Mutant(
        "comm-sum-by-ring-order",
        "The order of a sum follows the place in the ring, so that ranks round differently.",
        "for piece in self._own for peer in (*self._lower, *self._higher)])",
        "for piece in self._own for peer in (*self._lower[::-1], *self._higher[::-1])])",
        (f"{COMM}::test_collectives_put_the_same_bits_on_every_run[3]",),
    ),
    Mutant(
        "comm-stamp-not-checked",
        "What arrives in a reduction may be of another unit or step: its stamp is not looked at.",
        "if is_last and self._check is not None:",
        "if is_last and self._check is None:",
        (f"{COMM}::test_a_missing_stamp_is_named",),
    ),
    Mutant(
        "comm-stamp-of-unit-alone",
        "A stamp says the unit and not the step.",
        "for n in (self.unit, self.step) for place in range(_DIGITS)",
        "for n in (self.unit, self.unit) for place in range(_DIGITS)",
        (f"{COMM}::test_digits_and_the_dtypes_that_hold_their_sums",),
    ),
    Mutant(
        "comm-seal-not-compared",
        "Ranks that launched other collectives before an agreement are not told so.",
        "if len(flags) > 1 and flags[0] >> 1 != (flags[-1] >> 1) ^ MASK:",
        "if len(flags) > 1 and flags[0] >> 1 < 0:",
        (f"{SEALS}::test_ranks_that_did_not_are_told",),
    ),
    Mutant(
        "comm-lost-tag",
        "Transfers of different units share a tag, so that messages of equal size may meet.",
        'return zlib.crc32(f"{kind} {unit} {size_bytes}".encode()) & 0x7FFFFFFF',
        'return zlib.crc32(f"{kind} {size_bytes}".encode()) & 0x7FFFFFFF',
        (f"{SEALS}::test_transfers_of_different_collectives_have_different_tags",),
    ),
    Mutant(
        "nodes-wrong-block",
        "The hop between nodes carries the first block in place of the rank's own.",
        "return full.narrow(0, self.nodes.within.rank * numel, numel)",
        "return full.narrow(0, 0 * numel, numel)",
        (f"{GROUPS}::test_collectives_in_nodes_and_in_replicas[6]",),
    ),
    Mutant(
        "replicas-not-summed",
        "Shard groups do not add their gradients to those of their replicas.",
        "lambda: self._replicas.all_reduce(own, unit, stamp if self._is_end else None),",
        "lambda: Handle([]),",
        (f"{GROUPS}::test_collectives_in_nodes_and_in_replicas[6]",),
    ),
    Mutant(
        "nodes-check-first-stamp-twice",
        "Stamps of the hop between nodes are never looked at.",
        "for comm in (self._below, self.nodes.within, self.nodes.between):",
        "for comm in (self._below, self.nodes.within, self.nodes.within):",
        (f"{SEALS}::test_stamps_of_every_hop_are_looked_at",),
    ),
    Mutant(
        "codec-scale-off",
        "The scale of a block is max|x| / (LEVELS + 1), which the largest element overflows.",
        "scale = torch.where(largest < LEAST, 0.0, largest / levels)",
        "scale = torch.where(largest < LEAST, 0.0, largest / (levels + 1))",
        (f"{CODEC}::test_no_element_is_off_by_more_than_half_a_step",),
    ),
    Mutant(
        "codec-halves-swapped",
        "Numbers of 4 bits come out of a byte in the wrong order.",
        "whole[:, half:] = values[:, : numel - half] >> 4",
        "whole[:, half:] = values[:, : numel - half] & 15",
        (f"{CODEC}::test_no_element_is_off_by_more_than_half_a_step",),
    ),
    Mutant(
        "codec-hides-nan",
        "A block with an infinity comes out as finite numbers, and an overflow is not seen.",
        "scale = torch.where(largest.isfinite(), scale, torch.nan)",
        "scale = torch.where(largest.isfinite(), scale, 0.0)",
        (f"{CODEC}::test_what_is_no_number_or_next_to_nothing",),
    ),
    Mutant(
        "hpz-stale-shard",
        "A secondary shard outlives the update, so that later gathers bring parameters of the step before.",
        "self._shard = None\n\n    def _block",
        "pass\n\n    def _block",
        (f"{ZEROPP}::test_models_train_near_enough_and_all_ranks_alike",),
    ),
    Mutant(
        "qgz-own-row-lost",
        "A coded reduction leaves out the rank's own part of the sum.",
        "total = self._rows[own].float()\n",
        "total = torch.zeros_like(self._rows[own], dtype=torch.float32)\n",
        (f"{ZEROPP}::test_every_element_is_within_the_bound",),
    ),
)
