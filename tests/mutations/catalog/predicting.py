"""Faults of theory, its closed forms and its replay of a schedule, and of the table of strategies."""

from __future__ import annotations

from ..mutant import Mutant

FORMULAS = "tests/unit/test_formulas.py"
GROUPING = "tests/unit/test_grouping.py"
MEASUREMENT = "tests/distributed/test_measurement.py"
PARITY = "tests/unit/test_parity.py"
PEERS = "tests/distributed/test_peers.py"
PLANTED = "tests/faults/test_planted.py"
STRATEGIES = "tests/unit/test_strategies.py"
SUITE = "tests/unit/test_suite.py"

MUTANTS = (
    Mutant(
        "theory-optimizer-on-every-rank",
        "The closed form has the optimizer's states whole on every rank under ZeRO-1.",
        "updated = n if theory.optimizer else None",
        "updated = n if theory.gradients else None",
        (f"{PARITY}::test_the_formula_stands_beside_the_prediction_before_a_run",),
    ),
    Mutant(
        "theory-gradients-on-every-rank",
        "The closed form has whole gradients under ZeRO-2 and ZeRO-3.",
        "reduced = n if theory.gradients or tiers.gradients else None",
        "reduced = n if tiers.gradients else None",
        (f"{PARITY}::test_the_formula_stands_beside_the_prediction_before_a_run",),
    ),
    Mutant(
        "theory-all-reduce-counts-once",
        "An all-reduce counts one times its elements in the volume, where the paper counts two.",
        "return Moved(2 * numel, (1 - crossing) * sent, crossing * sent)",
        "return Moved(numel, (1 - crossing) * sent, crossing * sent)",
        (f"{PLANTED}::test_an_honest_run_has_nothing_unexplained",),
    ),
    Mutant(
        "theory-no-gather-for-the-backward",
        "A unit is gathered for each use in forward, and not again for the backward.",
        "return len(uses) + any(uses)",
        "return len(uses)",
        (f"{PLANTED}::test_an_honest_run_has_nothing_unexplained",),
    ),
    Mutant(
        "theory-fresh-gradient-dropped",
        "The replay forgets the gradient that autograd has made and that is in no bucket yet.",
        'replay.hold("gradients", "fresh", bytes_of(schedule.shapes[i]))\n        yield',
        'replay.hold("gradients", "fresh", 0)\n        yield',
        (f"{PLANTED}::test_an_honest_run_has_nothing_unexplained",),
    ),
    Mutant(
        "theory-one-reduction-a-step",
        "Gradients that are reduced in every micro-batch are counted as reduced once a step.",
        'return micro_batches if self.accumulate == "every" else 1',
        "return 1",
        (f"{MEASUREMENT}::test_accumulation_is_counted_and_changes_nothing_else[zero2-2]",),
    ),
    Mutant(
        "theory-no-room-for-stamps",
        "Units of stage 3 are laid out without the elements that their stamps need.",
        "TAIL_NUMEL = 8\n",
        "TAIL_NUMEL = 0\n",
        (f"{MEASUREMENT}::test_bytes_and_volumes_are_those_of_the_formulas[zero3-odd-3]",),
    ),
    Mutant(
        "theory-payload-without-scales",
        "The payload of a coded slice lacks the scales of its blocks.",
        "used = -(-values // 4) * 4 + 4 * -(-numel // block) + STAMP_BYTES",
        "used = -(-values // 4) * 4 + STAMP_BYTES",
        (f"{GROUPING}::test_theory_knows_payloads_as_the_codec_does",),
    ),
    Mutant(
        "theory-second-hop-lost",
        "A gather in two hops is counted without the hop between nodes.",
        "return moved + (Moved(numel // inside, 0, (outside - 1)",
        "return moved + (Moved(0, 0, 0 * (outside - 1)",
        (f"{GROUPING}::test_formulas_of_a_large_world",),
    ),
    Mutant(
        "theory-logits-in-two-bytes",
        "The activations of a GPT's head are counted in the model's precision, where they are in fp32.",
        "at_the_end = 2 * stream + 12 * shape.tokens * shape.vocabulary",
        "at_the_end = 2 * stream + 6 * shape.tokens * shape.vocabulary",
        (f"{SUITE}::test_activations_are_as_the_formula_says",),
        "validation",
    ),
    Mutant(
        "theory-flags-of-a-byte",
        "A flag that a parameter has a gradient is counted as one byte.",
        "FLAG_BYTES, NORM_BYTES = 4, 8",
        "FLAG_BYTES, NORM_BYTES = 1, 8",
        (f"{PLANTED}::test_an_honest_run_has_nothing_unexplained",),
    ),
    Mutant(
        "theory-pool-forgotten",
        "The host memory through which files are read and written is not predicted.",
        'return block * self.buffers + POOL_ALIGN_BYTES if self.place == "nvme" else 0',
        "return 0",
        (f"{PLANTED}::test_an_honest_run_has_nothing_unexplained",),
    ),
    Mutant(
        "theory-volume-of-one-gather",
        "The closed form of ZeRO-3's volume has one gather a micro-batch, where the paper has two.",
        'text, value = "(r + 2m)ψ", r + 2 * m',
        'text, value = "(r + 2m)ψ", r + m',
        (f"{FORMULAS}::test_volumes_are_those_of_section_7",),
    ),
    Mutant(
        "theory-padding-moves-nothing",
        "What padding adds to the volume is left out of the terms beside the closed form.",
        'yield "padding", (gathers + reduced) * (numel - own)',
        'yield "padding", 0',
        (f"{FORMULAS}::test_the_volume_is_the_formula_and_its_terms",),
    ),
    Mutant(
        "theory-terms-that-do-not-add-up",
        "The rest beyond a formula is what the named terms are, so that formula and terms are no sum.",
        "rest = predicted - self.value - sum(in_flight.values())",
        "rest = predicted - self.value",
        ("tests/distributed/test_random_models.py::test_a_simulated_rank_holds_what_is_replayed",),
    ),
    Mutant(
        "strategy-name-taken-twice",
        "A user's strategy takes the place of one of ours.",
        "if name in _SPECS and _SPECS[name].build is not build:",
        "if name in _SPECS and _SPECS[name].build is None:",
        (f"{STRATEGIES}::test_what_cannot_be_registered_is_one_sentence",),
    ),
    Mutant(
        "strategy-code-is-not-in-the-hash",
        "A user's engine that changed is taken for the one that was measured.",
        'return source_of(found.build) if found is not None and found.of_user else b""',
        'return b""',
        (f"{STRATEGIES}::test_the_users_code_is_part_of_a_runs_source_and_of_no_other_strategys",),
    ),
    Mutant(
        "fsdp2-shards-a-block-before-its-tiles",
        "fully_shard takes a block's parameters, its tiles' too, before it is applied to the tiles.",
        "for unit in reversed(units):",
        "for unit in units:",
        (f"{PEERS}::test_torchs_peers_accumulate_clip_and_take_tiles_and_what_is_refused_fails",),
    ),
)
