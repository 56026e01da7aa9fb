"""Faults of what judges: budgets, comparisons, noise, parity and searches."""

from __future__ import annotations

from ..mutant import Mutant

BUDGET = "tests/unit/test_budget.py"
BUDGET_LINES = "tests/unit/test_budget_lines.py"
BUDGET_OF_A_LOOP = "tests/unit/test_budget_of_a_loop.py"
BUDGET_REPORTS = "tests/unit/test_budget_reports.py"
COMPARISON = "tests/unit/test_comparison.py"
PARITY = "tests/unit/test_parity.py"
SEARCH = "tests/unit/test_search.py"

MUTANTS = (
    Mutant(
        "budget-ceiling-is-a-floor",
        "A ceiling is crossed from above, and a floor from below.",
        "zerobench/commands/budget",
        'value > self.value + slack if self.bound == "<=" else',
        'value > self.value + slack if self.bound == ">=" else',
        (f"{BUDGET}::test_verdicts_go_both_ways",),
    ),
    Mutant(
        "budget-met-ceiling-is-crossed",
        "A value that is exactly its ceiling has crossed it.",
        "zerobench/commands/budget",
        'crossed = value > self.value + slack if self.bound == "<="',
        'crossed = value >= self.value if self.bound == "<="',
        (f"{BUDGET}::test_verdicts_go_both_ways",),
    ),
    Mutant(
        "budget-one-way",
        "A value below an exact limit is taken to meet it, so that an improvement is never recorded.",
        "zerobench/commands/budget",
        "if abs(value - self.value) <= slack:",
        "if value - self.value <= slack:",
        (f"{BUDGET}::test_verdicts_go_both_ways",),
    ),
    Mutant(
        "budget-missing-cell-passes",
        "A cell that is in the budget and was not run says nothing.",
        "zerobench/commands/budget",
        'return [Finding("missing", cell, "", f"{cell}: the budget has it and the runs have not")]',
        "return []",
        (f"{BUDGET}::test_missing_cells_and_metrics_and_failed_runs",),
    ),
    Mutant(
        "budget-missing-metric-passes",
        "A metric that was not measured meets its limit.",
        "zerobench/commands/budget",
        "if (value is None or pd.isna(value)) and metric in WHERE_READABLE:",
        "if value is None or pd.isna(value):",
        (f"{BUDGET}::test_missing_cells_and_metrics_and_failed_runs",),
    ),
    Mutant(
        "budget-failed-run-is-judged",
        "A run that crashed is held against the budget as if it had been measured.",
        "zerobench/commands/budget/judge.py",
        'if row["status"] != "ok":',
        'if row["status"] == "timeout":',
        (f"{BUDGET}::test_missing_cells_and_metrics_and_failed_runs",),
    ),
    Mutant(
        "budget-blames-what-shrank",
        "A category that shrank is named as what made the peak grow.",
        "zerobench/commands/budget",
        "if by and (by > 0) == grown}",
        "if by and (by > 0) != grown}",
        (f"{BUDGET}::test_a_sentence_has_cell_metric_category_value_and_limit",),
    ),
    Mutant(
        "budget-lines-by-number",
        "Lines of a function are matched by their numbers alone, which shift with every edit above them.",
        "zerobench/commands/budget/lines.py",
        "lambda one: (one.number, one.bytes), lambda one: one.bytes, lambda one: one.number, lambda _: 0,",
        "lambda one: one.number, lambda _: 0,",
        (f"{BUDGET_LINES}::test_the_line_that_moved_is_found",),
    ),
    Mutant(
        "budget-rest-of-lines-dropped",
        "Bytes of lines that a budget does not list are left out of what moved.",
        "zerobench/commands/budget/lines.py",
        "    if was != now:",
        "    if False:",
        (f"{BUDGET_LINES}::test_differences_add_up_whatever_has_moved",),
    ),
    Mutant(
        "budget-noisy-baseline-recorded",
        "A budget is recorded from launches that differ.",
        "zerobench/commands/budget/record.py",
        'all(limit.judge(metric, v) == "ok" for v in values)',
        "True",
        (f"{BUDGET_OF_A_LOOP}::test_a_noisy_baseline_is_refused",),
    ),
    Mutant(
        "budget-dry-run-writes",
        "A dry run of a recording writes the budget.",
        "zerobench/commands/budget/record.py",
        "    if chosen.dry_run:\n",
        "    if chosen.dry_run and not write_budget(file):  # type: ignore[func-returns-value]\n",
        (f"{BUDGET_OF_A_LOOP}::test_a_recording_explains_what_it_changes",),
    ),
    Mutant(
        "github-name-is-a-command",
        "A line break in a cell's name begins a command of a GitHub workflow.",
        "zerobench/commands/budget/github.py",
        '.replace("\\n", "%0A")',
        "",
        (f"{BUDGET_REPORTS}::test_a_hostile_name_is_no_command",),
    ),
    Mutant(
        "github-file-outside-the-repository",
        "An annotation names a file that is not in the repository.",
        "zerobench/commands/budget/github.py",
        'return found.relative_to(root.resolve()).as_posix() if found.is_file() else ""',
        "return place.file",
        (f"{BUDGET_REPORTS}::test_each_kind_has_its_level_and_lines_inside_the_repository_alone",),
    ),
    Mutant(
        "compare-ratio-inverted",
        "A ratio is A's time over B's: what became slower is called faster.",
        "zerobench/commands/compare",
        "ratios = [theirs / ours for ours, theirs in zip(a, b, strict=True)]",
        "ratios = [ours / theirs for ours, theirs in zip(a, b, strict=True)]",
        (f"{COMPARISON}::test_an_interval_with_1_is_noise_and_so_is_an_effect_below_the_least",),
    ),
    Mutant(
        "compare-blocks-are-judged",
        "Launches that were measured one side after the other get a verdict.",
        "zerobench/commands/compare",
        "found.append(one if judged else replace(one, verdict=UNJUDGED))",
        "found.append(one)",
        (f"{COMPARISON}::test_drift_is_no_change_of_the_code",),
    ),
    Mutant(
        "compare-noise-is-a-change",
        "An interval that holds 1 is called a change.",
        "zerobench/commands/compare",
        "if low <= 1 <= high:",
        "if low == 1 == high:",
        (f"{COMPARISON}::test_an_interval_with_1_is_noise_and_so_is_an_effect_below_the_least",),
    ),
    Mutant(
        "compare-threshold-one-way",
        "A time that halved is a smaller effect than one that doubled.",
        "zerobench/commands/compare",
        "if max(ratio, 1 / ratio) - 1 <= threshold:",
        "if abs(ratio - 1) <= threshold:",
        (f"{COMPARISON}::test_the_threshold_is_the_same_both_ways",),
    ),
    Mutant(
        "noise-floor-of-one-launch",
        "The floor forgets that a ratio has two launches: it lacks the factor √2.",
        "zerobench/commands/compare",
        "spread * np.sqrt(2)))",
        "spread))",
        (f"{COMPARISON}::test_the_floor_covers_ratios_of_identical_code_in_95_of_100_cases",),
    ),
    Mutant(
        "parity-signed",
        "A loss below DDP's has a deviation below 0, which no limit catches.",
        "zerobench/sweep",
        "off = abs(ours - theirs) / abs(theirs) if theirs else math.inf",
        "off = (ours - theirs) / abs(theirs) if theirs else math.inf",
        (f"{PARITY}::test_what_differs_first_is_to_blame",),
    ),
    Mutant(
        "parity-traced-pass-counts",
        "Losses of the traced pass take the place of the measured ones.",
        "zerobench/sweep",
        'for row in steps[steps["mode"] != "traced"].to_dict("records"):',
        'for row in steps.to_dict("records"):',
        (f"{PARITY}::test_what_a_trace_trained_counts_for_nothing",),
    ),
    Mutant(
        "search-failed-run-fits",
        "A combination that ran out of memory is taken to fit.",
        "zerobench/sweep",
        'return row["status"] == "ok" and used_bytes(row) <= self.limit_bytes',
        "return used_bytes(row) <= self.limit_bytes",
        (f"{SEARCH}::test_running_out_of_memory_is_not_fitting_and_crashes_are_told",),
    ),
    Mutant(
        "search-slowest-wins",
        "The finalists are what came within a tenth of the slowest.",
        "zerobench/sweep",
        "best = max((speed for _, speed in fitting), default=0.0)",
        "best = min((speed for _, speed in fitting), default=0.0)",
        (f"{SEARCH}::test_only_what_is_about_as_fast_as_the_fastest_is_measured_again",),
    ),
)
