"""Every file that zerobench reads: a valid example, and the code that reads it.

A row of READERS is a reader; `example` makes its files in an empty folder and returns those that are damaged. What is
read by the engine alone from files that it has just written (blocks of NVMe offload, which have checksums) is not here,
nor what is never read (a run's config.yaml).
"""

from __future__ import annotations

import contextlib
import io
import random
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from zerobench.sizes import printable

from . import examples
from .damage import clear, damage
from .oracle import PYTHONS, Verdict
from .watch import watched

MOST_S = 60.0
"""Seconds of one reading."""


@dataclass(frozen=True)
class Reader:
    """`read` takes the folder and the file. It may raise `raises`, with the file's name or its folder's."""

    example: Callable[[Path], list[Path]]
    read: Callable[[Path, Path], Any]
    raises: tuple[type[Exception], ...] = (ValueError, OSError)


class HungError(BaseException):
    """A reading that was ended by its time."""


# -- readers ------------------------------------------------------------------------------------------------


def _load(folder: Path, path: Path) -> Any:
    from zerobench.results.tables import load

    found = load(folder)
    others = set(found.runs["run_id"])
    assert any(name.startswith("zero2") for name in others) or path.parent == folder, "the other run is gone"
    return found, found.memory


def _cli(*words: str) -> Callable[[Path, Path], Any]:
    """A command, whose sentence becomes the error of the reading."""

    def read(folder: Path, path: Path) -> Any:
        from zerobench import cli

        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            code = cli.run([word.replace("FOLDER", str(folder)).replace("FILE", str(path)) for word in words])
        told = err.getvalue() + out.getvalue()
        assert "Traceback" not in told, told[-300:]
        assert code in (0, 1, 2), code
        if code == 2:
            left_out = [str(one.message) for one in warned]  # files, before the verb found nothing else
            raise ValueError("; ".join([*left_out, err.getvalue().strip() or out.getvalue().strip()]))
        return code

    return read


def _colors(folder: Path, path: Path) -> Any:
    from zerobench.plots.style import learn_colors
    from zerobench.results.tables import load

    found = load(folder)
    found.runs["strategy"] = "of-a-user"
    return learn_colors(found, [folder])


def _boards(folder: Path, path: Path) -> Any:
    from zerobench.commands.follow import follow  # noqa: F401  the reader's reader is there
    from zerobench.results.board import board_folders, read_board

    return [read_board(one) for one in board_folders(folder)]


def _budget(folder: Path, path: Path) -> Any:
    from zerobench.judging.budget_file import read_budget

    return read_budget(path)


def _noise(folder: Path, path: Path) -> Any:
    from zerobench.judging.noise_floor import read

    return read(folder)


def _calibration(folder: Path, path: Path) -> Any:
    from zerobench.calibrate.collectives import load_calibration

    return load_calibration(path.parent)


def _disk(folder: Path, path: Path) -> Any:
    from zerobench.calibrate.disk import load_disk_calibration

    return load_disk_calibration(path.parent)


def _published(folder: Path, path: Path) -> Any:
    from validation.published_runs.runs import read

    return read(path)


def _table1(folder: Path, path: Path) -> Any:
    from validation.store import read
    from validation.table1 import CellRow, StatesRow

    return read(path, CellRow if path.name == "cells.csv" else StatesRow)


def _suite(folder: Path, path: Path) -> Any:
    from validation.gpu_suite.suite import _read

    return _read(path)


def _find_weights(folder: Path, path: Path) -> Any:
    from zerobench.zero.checkpoint.weights import find_weights

    found = find_weights(path, slice(None))
    for tensor in found.tensors.values():
        tensor.part(tensor.order, 0, min(4, torch.Size(tensor.shape).numel()))
    return found


def _huggingface(folder: Path, path: Path) -> Any:
    from zerobench.models.huggingface_config import read_config

    return read_config(str(path), {})


def _text(folder: Path, path: Path) -> Any:
    from zerobench.data import read_text, text_hash

    return read_text(str(path), 4), text_hash(str(path))


def _read_yaml(folder: Path, path: Path) -> Any:
    from zerobench.config.safe_yaml import read_yaml

    return read_yaml(path)


def _orders(folder: Path, path: Path) -> Any:
    from zerobench.dispatch.job_folder import JobFolder

    job = JobFolder(path.parent)
    return job.launches(), job.rows(), job.board()


READERS: dict[str, Reader] = {
    "run.json": Reader(examples.run_file("run.json"), _load),
    "tables of a run": Reader(examples.run_file("*.parquet"), _load),
    "provenance.json": Reader(examples.run_file("provenance.json"), _colors),
    "collection": Reader(examples.copied("reference/cpu/stages"), _cli("export", "FOLDER", "--latest")),
    "table cache": Reader(examples.cached, _load),
    "searches": Reader(examples.search, _load),
    "board": Reader(examples.board, _boards),
    "job": Reader(examples.job, _orders),
    "run, status": Reader(examples.run_file("run.json"), _cli("status", "FOLDER")),
    "run, show": Reader(
        examples.run_file("run.json", "*.parquet"), _cli("show", "zero1 tiny N=2 b=8", "--results", "FOLDER")
    ),
    "run, compare": Reader(examples.run_file("run.json", "*.parquet"), _cli("compare", "FOLDER", "FOLDER")),
    "events, replay": Reader(
        examples.copied("replay"), _cli("replay", "FOLDER", "--worlds", "none", "--out", "FOLDER/page.html")
    ),
    "collection, report": Reader(
        examples.copied("reference/cpu/stages"), _cli("report", "FOLDER", "--out", "FOLDER/report.html")
    ),
    "budget": Reader(examples.copied("budgets/gpt_tiny.yaml"), _budget),
    "noise": Reader(examples.copied("noise"), _noise),
    "calibration": Reader(examples.copied("calibration/cpu"), _calibration),
    "calibration of a disk": Reader(examples.copied("calibration/disk"), _disk),
    "published runs": Reader(examples.copied("published_runs/training.csv"), _published),
    "table 1": Reader(examples.copied("table1"), _table1),
    "suite": Reader(examples.written("suite.json", examples.SUITE), _suite),
    "weights": Reader(examples.weights, _find_weights),
    "huggingface's config.json": Reader(examples.written("config.json", examples.GPT2), _huggingface),
    "text": Reader(examples.written("text.txt", "a text of a few letters"), _text),
    "yaml": Reader(examples.written("x.yaml", "a: {b: [1, 2], c: x}\nd: null\n"), _read_yaml),
}  # fmt: skip
"""Name -> reader. A name with a comma is one file read by a verb."""


# -- cases --------------------------------------------------------------------------------------------------


@cache
def _example(reader: str, home: Path) -> tuple[Path, tuple[Path, ...]]:
    """Makes a reader's example once for this process."""
    folder = home / reader.replace(" ", "-").replace("'", "")
    folder.mkdir(parents=True)
    return folder, tuple(path.relative_to(folder) for path in READERS[reader].example(folder))


def damaged(seed: int, number: int) -> tuple[str, random.Random]:
    """The reader of a case, one after the other, and the draw of its damage."""
    return list(READERS)[number % len(READERS)], random.Random(f"{seed} file {number}")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Ends a reading that hangs."""

    def end(number: int, frame: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def read_damaged(name: str, draw: random.Random, room: Path) -> Verdict:
    """Copies the example, damages one of its files and has it read."""
    reader, verdict, folder = READERS[name], Verdict(), room / "files"
    home, paths = _example(name, room.parent / "examples")
    clear(folder)
    shutil.copytree(home, folder, symlinks=True)
    path = folder / draw.choice(paths)
    done = damage(draw, path)
    told = io.StringIO()
    with contextlib.redirect_stdout(told), contextlib.redirect_stderr(told), watched(room, folder) as watch, bounded():
        warnings.simplefilter("always")
        verdict.outcome, sentence = _outcome(reader, folder, path)
    if reader.read.__name__ == "read":  # a verb that writes what it was asked for
        watch.told = [one for one in watch.told if not one.startswith("changes the files")]
    verdict.seconds, verdict.findings = watch.seconds, [*watch.told]
    verdict.findings += _problems(reader, verdict.outcome, sentence, path)
    verdict.findings = [f"{name}, {path.name} ({done}): {one}" for one in verdict.findings]
    clear(folder)
    return verdict


def _outcome(reader: Reader, folder: Path, path: Path) -> tuple[str, str]:
    try:
        reader.read(folder, path)
        return "read", ""
    except reader.raises as error:
        return "refused", str(error)
    except HungError:
        return "hang", f"is not done after {MOST_S:g} s"
    except BaseException as error:
        return "crash", f"raises {type(error).__name__}: {str(error)[:300]}"


def _problems(reader: Reader, outcome: str, sentence: str, path: Path) -> list[str]:
    if outcome in ("hang", "crash"):
        return [sentence]
    if outcome != "refused":
        return []
    named = any(printable(name) in printable(sentence) for name in (path.name, str(path.parent), path.parent.name))
    found = [] if named else [f"is refused without its name: {sentence[:300]}"]
    return found + ([f"is refused in Python's words: {sentence[:300]}"] if PYTHONS.search(sentence) else [])
