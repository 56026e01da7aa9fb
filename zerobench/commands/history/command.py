"""`zerobench history`: its options, and where its output goes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...config.unknown_keys import meant
from ...host.temporary import temporary_folder
from ...host.terminal import file_console, stdout_console
from ...records import RunRow
from ...results.options import RESULTS, Parser, add_columns, add_options
from ...results.row_checks import columns_of
from ...sizes import printable, show_count
from ..bisect.search import METRICS
from ..revisions import GitError, commit, git
from . import store
from .entries import History, folder_of, read
from .page import by_metric, write_page
from .series import USUAL, Series, series_of
from .tables import HEADER, as_csv, as_json, markdown_table, print_text, rows, summary, title

FOLDER = Path("results/history")
ALL = "all"
PAGES = (".md", ".html")

EPILOG = """\
examples:
  zerobench history add --runs results/runs             this commit's runs become an entry of results/history
  zerobench history                                     every series that moved, with the commits that moved it
  zerobench history --metric volume_psi --where strategy=zero2 --format csv
  zerobench history --out history.html                  a page of figures and tables, one file
  zerobench history add --branch metrics --runs results/runs && git push origin metrics
  zerobench history --branch metrics --out history.md

A step is a value that differs from that of the commit before which has one, exactly. Commits that were not measured are
gaps, cells that failed are shown with their reason. Exit code: 0, or 2 where there is nothing to show."""


def history(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, or 2 for a refusal."""
    adding = arguments[:1] == ["add"]
    try:
        return _add(arguments[1:]) if adding else _show(arguments)
    except (FileNotFoundError, ValueError) as error:
        print(printable(f"zerobench history{' add' * adding}: {error}"), file=sys.stderr)
        return 2


def _parser(prog: str, description: str) -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog, description=description, epilog=EPILOG, formatter_class=raw)
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help=f"of the history (default: {FOLDER})")
    words = "the history lies on this git branch, which is read and written without checking it out"
    parser.add_argument("--branch", help=words)
    words = "with --branch: the history's folder on it (default: %(default)s)"
    parser.add_argument("--path", default="results", metavar="FOLDER", help=words)
    words = "the repository of the commits (default: that of this folder)"
    parser.add_argument("--repo", type=Path, default=Path("."), metavar="DIR", help=words)
    return parser


def _show(arguments: list[str]) -> int:
    parser = _parser("zerobench history", "Shows figures over commits, and the commits at which they moved.")
    add = parser.add_argument
    words = f"columns of the table of runs, comma-separated, or all exact ones: all (default: {','.join(USUAL)})"
    add("--metric", default=",".join(USUAL), metavar="METRIC", help=words)
    add_options(parser, attempts=False)
    add("--last", type=int, metavar="N", help="the last N measured commits only")
    add("--steps", action="store_true", help="leave out commits at which nothing moved")
    add("--format", choices=("text", "markdown", "csv", "json"), default="text")
    words = "a file; a page with figures where it ends in .md or .html (default: standard output)"
    add("--out", type=Path, metavar="FILE", help=words)
    add("--figures", type=Path, metavar="DIR", help="a figure per metric, as PNG and SVG")
    add_columns(parser, HEADER)
    chosen = parser.parse_args(arguments)
    metrics = _metrics(chosen.metric)
    if chosen.last is not None and chosen.last < 1:
        raise ValueError(f"--last {chosen.last}: must be 1 or more")
    with _place(chosen) as place:
        found = read(place, _repository(chosen.repo), chosen.where, chosen.last)
    series = series_of(found, metrics)
    if not series:
        raise ValueError(f"no cell has a value of {', '.join(metrics)}")
    if chosen.figures is not None:
        _write_figures(chosen.figures, found, series)
    _write(chosen, found, series)
    return 0


def _metrics(text: str) -> list[str]:
    """Parses --metric. Raises ValueError for a name that is no figure of a run."""
    if text == ALL:
        return list(METRICS)
    kinds = dict(columns_of(RunRow))
    for metric in text.split(","):
        if kinds.get(metric) not in (int, float):
            raise ValueError(f"--metric {metric}: no such figure of a run{meant(metric, list(METRICS))}")
    return list(dict.fromkeys(text.split(",")))


def _repository(where: Path) -> Path | None:
    """Returns the repository of a folder; None outside of one."""
    if not where.is_dir():
        raise ValueError(f"--repo {where}: there is no such folder")
    try:
        return Path(git(where, "rev-parse", "--show-toplevel"))
    except GitError:
        return None


@contextmanager
def _place(chosen: argparse.Namespace) -> Iterator[Path]:
    if chosen.branch is None:
        yield Path(chosen.folder or FOLDER)
        return
    if chosen.folder is not None:
        raise ValueError(f"{chosen.folder}: the history is on --branch {chosen.branch}; name its folder with --path")
    with folder_of(chosen.repo, chosen.branch, chosen.path) as place:
        yield place


def _write(chosen: argparse.Namespace, found: History, series: list[Series]) -> None:
    if chosen.out is not None and chosen.out.suffix in PAGES:
        write_page(chosen.out, found, series, chosen.steps)
        print(f"page: {chosen.out}")
        return
    if chosen.out is None and chosen.format == "text":
        print_text(found, series, stdout_console(), chosen.steps, chosen.columns)
        return
    if chosen.out is None:
        sys.stdout.write(_text(chosen, found, series))
        return
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with chosen.out.open("w") as file:
        if chosen.format == "text":
            print_text(found, series, file_console(file), chosen.steps, chosen.columns)
        else:
            file.write(_text(chosen, found, series))


def _text(chosen: argparse.Namespace, found: History, series: list[Series]) -> str:
    if chosen.format == "csv":
        return as_csv(series)
    if chosen.format == "json":
        return as_json(found, series)
    parts = [f"## {title(one)}\n\n{markdown_table(HEADER, rows(one, chosen.steps))}" for one in series]
    return "\n".join([*parts, "  \n".join(summary(found, series)) + "\n"])


def _write_figures(folder: Path, found: History, series: list[Series]) -> None:
    from .figures import draw, save

    for metric, mine in by_metric(series).items():
        figure = draw(mine, found.entries)
        for suffix in ("png", "svg"):
            save(figure, folder / f"{metric}.{suffix}")
            print(f"figure: {folder / f'{metric}.{suffix}'}", file=sys.stderr)


def _add(arguments: list[str]) -> int:
    parser = _parser("zerobench history add", "Adds the runs of a commit to a history, as an entry of its own.")
    words = "the results folder to add (default: %(default)s)"
    parser.add_argument("--runs", type=Path, default=Path(RESULTS), metavar="RUNS", help=words)
    parser.add_argument("--commit", default="HEAD", metavar="REVISION", help="whose runs they are (default: HEAD)")
    chosen = parser.parse_args(arguments)
    if chosen.branch is not None and chosen.folder is not None:
        raise ValueError(f"{chosen.folder}: the history is on --branch {chosen.branch}; name its folder with --path")
    of = commit(chosen.repo, chosen.commit)
    new = store.gathered(chosen.runs)
    words = f"{show_count(len(new.runs), 'run')} of {of.short} {of.subject}"
    if chosen.branch is None:
        place = store.add(Path(chosen.folder or FOLDER), of, new)
        print(printable(f"{words}: {place}"))
        return 0
    with temporary_folder() as aside:
        made = store.add_to_branch(chosen.repo, chosen.branch, chosen.path.strip("/"), of, new, aside)
    print(printable(f"{words}: branch {chosen.branch} is at {made[:10]}; git push origin {chosen.branch} shares it"))
    return 0
