"""Faults of what shows and tidies results: pages, figures, summaries, prune."""

from __future__ import annotations

from ..mutant import Mutant

COMPARISON = "tests/unit/test_comparison.py"
CONSOLE = "tests/unit/test_console.py"
FIGURES = "tests/unit/test_figures.py"
FIGURE_FAULTS = "tests/unit/test_figure_faults.py"
FOLLOW = "tests/unit/test_follow.py"
PAGES = "tests/unit/test_pages.py"
PRUNE_REFUSALS = "tests/unit/test_prune_refusals.py"
STATUS_SHOW_PRUNE = "tests/unit/test_status_show_prune.py"

MUTANTS = (
    Mutant(
        "report-counts-wins-that-are-not-told-apart",
        "The headline of a report counts the fastest cell of a setting though others are not told apart from it.",
        "zerobench/commands/report",
        "return first if all(",
        "return first if any(True or ",
        ("tests/unit/test_report.py::test_the_headline_counts_wins_that_are_proven_and_none_of_a_busy_machine",),
    ),
    Mutant(
        "table-marks-a-best-time-of-a-busy-machine",
        "A time is marked as the best though other processes took the cores.",
        "zerobench/results",
        "if column.times and any(is_busy(cells[place]) for place in values):",
        "if False:",
        ("tests/unit/test_console.py::test_on_a_busy_machine_no_time_is_the_best_and_it_is_said_above_the_table",),
    ),
    Mutant(
        "pages-block-not-held",
        "A block of a page that was changed by hand is taken for what the committed tables say.",
        "tools/docs/pages.py",
        "        text = re.sub(",
        "        re.sub(",
        (f"{PAGES}::test_a_block_that_was_changed_by_hand_is_seen_and_made_anew",),
    ),
    Mutant(
        "pages-block-of-no-page",
        "A block of a page without an end is passed over.",
        "tools/docs/pages.py",
        "if text.count(begin) != 1 or text.count(end) != 1:",
        "if text.count(begin) != 1:",
        (f"{PAGES}::test_a_block_that_has_no_end_or_is_unknown_is_a_sentence",),
    ),
    Mutant(
        "front-of-dominated-cells",
        "A cell that another one beats in memory at equal throughput is drawn on the front.",
        "zerobench/plots/pareto.py",
        "((peak < p) | (rate > r))",
        "((peak < p) & (rate > r))",
        (f"{FIGURES}::test_the_front_is_what_a_scan_from_small_to_large_says",),
    ),
    Mutant(
        "front-of-several-batches",
        "Cells of different batches lie on one front.",
        "zerobench/plots/pareto.py",
        'cells.groupby(["world_size", "batch"])',
        'cells.groupby(["world_size"])',
        (f"{FIGURE_FAULTS}::test_a_front_is_of_one_batch_on_as_many_ranks",),
    ),
    Mutant(
        "bar-of-medians-of-phases",
        "A bar is as high as the medians of its phases, and has the median of the step as its number.",
        "zerobench/plots",
        "whole * part / total",
        "part",
        (f"{FIGURES}::test_a_bar_of_phases_is_as_high_as_its_number_says",),
    ),
    Mutant(
        "legend-of-what-is-absent",
        "A legend names parts that no bar has.",
        "zerobench/plots/style.py",
        "for name, how in fills.items() if name in found}",
        "for name, how in fills.items() if name}",
        (f"{FIGURE_FAULTS}::test_a_legend_names_what_can_be_seen_alone",),
    ),
    Mutant(
        "name-beside-another-point",
        "A name that is nearer to another point than to its own has no line to its own.",
        "zerobench/plots/places.py",
        "return box, ring > 0 or unclear(box) > 0",
        "return box, False",
        (f"{FIGURE_FAULTS}::test_a_name_lies_beside_its_own_point_or_is_joined_to_it",),
    ),
    Mutant(
        "model-by-its-name-alone",
        "A model with options of its own is called by the name that stands for others.",
        "zerobench/plots/panels.py",
        'return " ".join([name, *(["with"] if others else []), *others])',
        "return name",
        (f"{FIGURE_FAULTS}::test_a_models_name_stands_for_its_own_shape_alone",),
    ),
    Mutant(
        "prune-takes-the-newest",
        "The newest of a cell's runs counts as superseded by itself.",
        "zerobench/commands/folder_contents.py",
        "if run.began < newest.get(_launch(row), run.began):",
        "if run.began <= newest.get(_launch(row), run.began):",
        (f"{STATUS_SHOW_PRUNE}::test_prune_removes_superseded_and_failed_runs_and_leftovers",),
    ),
    Mutant(
        "prune-takes-what-is-being-written",
        "A folder that a sweep is writing to is removed as a leftover.",
        "zerobench/commands/prune.py",
        "if one.path.name.startswith(PARTIAL) and is_claimed(one.path):",
        "if one.path.name.startswith(PARTIAL) and one.path is None:",
        ("tests/unit/test_prune_refusals.py::test_prune_leaves_a_folder_that_a_sweep_has_claimed_meanwhile",),
    ),
    Mutant(
        "prune-follows-links",
        "A run that is only shown here, behind a link, is removed.",
        "zerobench/commands/prune.py",
        " and not run.folder.is_symlink():",
        ":",
        (f"{STATUS_SHOW_PRUNE}::test_prune_leaves_what_is_claimed_linked_or_no_run",),
    ),
    Mutant(
        "prune-takes-what-a-search-names",
        "Runs that a search's answer refers to are removed.",
        "zerobench/commands/folder_contents.py",
        'if ok and row["run_id"] in self.named:',
        'if not ok and row["run_id"] in self.named:',
        (f"{STATUS_SHOW_PRUNE}::test_prune_keeps_what_a_search_names",),
    ),
    Mutant(
        "interval-too-narrow",
        "A 95 % interval is computed with the quantile of a 90 % one.",
        "zerobench/results/summary.py",
        "scipy.stats.t.ppf((1 + confidence) / 2, len(logs) - 1)",
        "scipy.stats.t.ppf(confidence, len(logs) - 1)",
        (f"{COMPARISON}::test_slower_has_the_ratio_and_interval_that_scipy_says",),
    ),
    Mutant(
        "a-board-is-left-when-its-sweep-ends",
        "A sweep leaves its board: those that follow it would wait, or take it for killed.",
        "zerobench/results",
        "shutil.rmtree(board.path, ignore_errors=True)",
        "pass",
        (f"{FOLLOW}::test_a_sweep_puts_its_board_up_tells_each_change_and_takes_it_down",),
    ),
    Mutant(
        "a-narrow-table-does-not-name-what-it-leaves-out",
        "Columns that do not fit the terminal are left out without a word.",
        "zerobench/results",
        "if missing and self.hints and not is_quiet() and words not in told:",
        "if not missing and words not in told:",
        (f"{CONSOLE}::test_a_table_of_any_width_shows_whole_figures_and_names_what_it_leaves_out",),
    ),
)
