"""Faults of configs: what is accepted, what is filled in, and what makes a cell itself."""

from __future__ import annotations

from ..mutant import Mutant

BUDGET = "tests/unit/test_budget.py"
CELLS = "tests/unit/test_cells.py"
CLI = "tests/end_to_end/test_cli.py"
COMPOSITION = "tests/unit/test_composition.py"
GROUPING = "tests/unit/test_grouping.py"
HOSTILE_INPUT = "tests/end_to_end/test_hostile_input.py"
POLICIES = "tests/unit/test_policies.py"
SELECTION = "tests/unit/test_selection.py"
TRAINING_CONFIG = "tests/unit/test_training_config.py"

MUTANTS = (
    Mutant(
        "config-typo-accepted",
        "A key that no choice of a sweep has is passed over in silence.",
        "zerobench/config",
        'self.problems.append(next((one for one in sentences if "did you mean" in one), sentences[0]))',
        "self.elsewhere.add(key)",
        (f"{CLI}::test_a_mistyped_command_is_one_sentence_and_exit_2",),
    ),
    Mutant(
        "config-default-changes-the-cell",
        "A key that is as usual stands in the resolved config, so that cells from before it was there are "
        "measured again.",
        "zerobench/config",
        'words=("cpu", "device"),\n        omitted=True,\n',
        'words=("cpu", "device"),\n',
        (f"{POLICIES}::test_the_usual_is_not_named_so_that_cells_are_what_they_were",),
    ),
    Mutant(
        "config-usual-tiles-change-the-cell",
        "model.tiles=1 is another cell than a model without the key.",
        "zerobench/config",
        'omitted=True, deepspeed="`deepspeed.zero.TiledLinear`"',
        'deepspeed="`deepspeed.zero.TiledLinear`"',
        (f"{POLICIES}::test_the_usual_is_not_named_so_that_cells_are_what_they_were",),
    ),
    Mutant(
        "config-limit-not-checked",
        "A number below the least that makes sense is accepted.",
        "zerobench/config",
        "        elif not least <= value <= most:\n",
        "        elif not value <= most:\n",
        (f"{TRAINING_CONFIG}::test_what_makes_no_sense_gets_a_sentence",),
    ),
    Mutant(
        "config-volatile-is-identity",
        "Where results go is a part of what a cell is, so that nothing is reused from another folder.",
        "zerobench/config",
        'rule="a folder", volatile=True,',
        'rule="a folder",',
        (f"{CELLS}::test_where_it_goes_how_often_and_what_is_the_default_do_not",),
    ),
    Mutant(
        "config-seed-is-volatile",
        "A run with another seed is taken for the same measurement.",
        "zerobench/config",
        "limits=(0, 2**31), torch=",
        "limits=(0, 2**31), volatile=True, torch=",
        (f"{CELLS}::test_what_is_measured_makes_another_cell",),
    ),
    Mutant(
        "config-local-is-work",
        "The number of threads, which is the machine's, makes other work.",
        "zerobench/config",
        "limits=(1, 2**10), local=True",
        "limits=(1, 2**10)",
        (f"{CELLS}::test_threads_are_the_machines_and_no_other_work",),
    ),
    Mutant(
        "config-batch-not-divided",
        "A batch that ranks and micro-batches do not divide is accepted, and is another one than was asked for.",
        "zerobench/config",
        "    elif batch is not None and batch % parts:\n",
        "    elif batch is not None and batch < 0:\n",
        (f"{CELLS}::test_a_batch_is_divided_by_ranks_and_micro_batches",),
    ),
    Mutant(
        "config-micro-batch-forgets-accumulation",
        "A micro-batch is the batch over the ranks, and accumulation multiplies it.",
        "zerobench/config",
        "micro if micro is not None else batch // parts if",
        "micro if micro is not None else batch // ranks if",
        (f"{CELLS}::test_a_batch_is_divided_by_ranks_and_micro_batches",),
    ),
    Mutant(
        "config-mode-overrides-the-user",
        "A mode fills in what the user has said, too.",
        "zerobench/config",
        "for key in [key for key, value in chosen.items() if value is None]:",
        "for key in [key for key in chosen if key in defaults]:",
        (f"{TRAINING_CONFIG}::test_a_mode_fills_in_what_is_left_open_and_nothing_else",),
    ),
    Mutant(
        "config-groups-need-not-divide",
        "Nodes and shard groups that do not divide the ranks are accepted.",
        "zerobench/config",
        "            elif size < least or ranks % size:\n",
        "            elif size < least:\n",
        (f"{GROUPING}::test_what_makes_no_sense_is_one_sentence",),
    ),
    Mutant(
        "config-part-of-zeropp-off",
        "zeropp=qwz with its weights not quantized is accepted.",
        "zerobench/config",
        "for part in named if not getattr(self, part)]",
        "for part in named if getattr(self, part) is None]",
        (f"{GROUPING}::test_what_makes_no_sense_is_one_sentence",),
    ),
    Mutant(
        "config-delayed-fp16",
        "A delayed update under loss scaling is accepted, which must judge before the next step.",
        "zerobench/config",
        'if self.delayed and cell.precision.name == "fp16":',
        'if self.delayed and cell.precision.name == "fp8":',
        (f"{COMPOSITION}::test_what_makes_no_sense_is_refused_in_a_sentence_each_and_nothing_else",),
    ),
    Mutant(
        "config-swept-choices-only",
        "A key that was swept over within a choice has no column in tables.",
        "zerobench/config",
        "        if any(len(values) > 1 for values in by_choice.values()):\n",
        "        if len(by_choice) > 1:\n",
        (f"{SELECTION}::test_every_swept_key_is_a_column",),
    ),
    Mutant(
        "config-brackets-any-depth",
        "A word with thousands of brackets reaches the parser, which ends in a recursion error.",
        "zerobench/config",
        "    if deepest > DEEPEST:\n",
        "    if deepest < 0:\n",
        (f"{HOSTILE_INPUT}::test_a_command_line_is_refused_in_a_sentence[words5-3000 brackets within one another]",),
    ),
    Mutant(
        "config-aliases-unfold",
        "A few lines of YAML whose aliases stand for 10¹² values are unfolded.",
        "zerobench/config",
        "    if count > MOST_NODES:\n",
        "    if count < 0:\n",
        (f"{HOSTILE_INPUT}::test_a_budget_file_is_refused_in_a_sentence[a loop]",),
    ),
    Mutant(
        "config-twice-the-same-key",
        "Of a key that stands twice in a YAML file the second wins in silence.",
        "zerobench/config",
        "        if twice:\n",
        "        if twice is None:\n",
        (f"{BUDGET}::test_a_wrong_file_gets_a_sentence",),
    ),
    Mutant(
        "config-optimizer-of-any-name",
        "An implementation that torch does not have for an optimizer is accepted.",
        "zerobench/config/schema_training.py",
        "if self.implementation not in IMPLEMENTATIONS:",
        "if self.implementation is None:",
        (f"{TRAINING_CONFIG}::test_what_makes_no_sense_gets_a_sentence",),
    ),
)
