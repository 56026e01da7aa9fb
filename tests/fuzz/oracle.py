"""Holds a command line against all that must be true of it, whatever it says.

It makes cells, or is refused in sentences that name a word of it; nothing else is touched (watch.py). Each cell
survives being written and read, is made again by the same words, and where it has no problem one of its ranks can be
executed.
"""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from zerobench.config import compose
from zerobench.config.cell import Cell, CellConfig
from zerobench.config.compose import RefusedError, compose_cells
from zerobench.config.names import name_cells
from zerobench.config.overrides import Overrides
from zerobench.config.schema import store_schemas
from zerobench.fake_execution import execute
from zerobench.sizes import LONGEST, printable

from .commands import FOLDER, Command
from .watch import watched

PYTHONS = re.compile(
    r"\b((Attribute|Type|Key|Index|Assertion|Recursion|UnboundLocal|Name|Runtime|Overflow|UnicodeEncode|UnicodeDecode"
    r"|ZeroDivision|NotImplemented|Memory|Value)Error|StopIteration|Traceback|object at 0x)\b"
)
"""Words that a person should not be given for a reason."""

AGAIN = 0.1
"""Part of the command lines that are composed twice."""

EXECUTED = 0.25
"""Part of those with cells without a problem of which one is executed."""


@contextmanager
def quick() -> Iterator[None]:
    """Lets checks of different command lines look at the same composed configs: those of our own folder, which stays as
    it is. The command line's own cells are composed anew each time.
    """
    known: dict[Any, Any] = {}
    make = Overrides.__init__

    def made(self: Overrides, config_dir: Path, users: dict[str, list[str]], extra_dirs: list[Path]) -> None:
        make(self, config_dir, users, extra_dirs)
        self._composed = {} if extra_dirs else known

    stored: list[Any] = []

    def store_once(users: dict[str, dict[str, type]]) -> None:
        if not stored:
            store_schemas(users)
            stored.append(users)

    with patch.object(Overrides, "__init__", made), patch.object(compose, "store_schemas", store_once):
        yield


@dataclass
class Verdict:
    """The end of a case: `outcome` is refused, cells or crash, `cells` how many. `findings`: sentences."""

    outcome: str = ""
    cells: int = 0
    sound: int = 0
    executed: int = 0
    seconds: float = 0.0
    findings: list[str] = field(default_factory=list)


def judge(command: Command, draw: random.Random, room: Path) -> Verdict:
    """Composes a command line in a room of its own. `draw` says whether it is composed twice, and what is executed."""
    verdict, folder = Verdict(), room / "folder"
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in command.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode("utf-8", "surrogateescape"))
    words = [word.replace(FOLDER, str(folder)) for word in command.words]
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), watched(room, folder) as watch:
        cells = _compose(words, verdict)
    verdict.seconds, verdict.findings = watch.seconds, [*verdict.findings, *watch.told]
    written = [key for content in command.files.values() for key in re.findall(r"[\w./]+(?=:)", content)]
    for cell in cells:
        verdict.findings += _problems_of_cell(cell, [*words, *written])
    if cells and draw.random() < AGAIN:
        verdict.findings += _again(words, cells)
    sound = [cell for cell in cells if not cell.problems and not verdict.findings and _is_small(cell.config)]
    if sound and draw.random() < EXECUTED:
        verdict.executed = 1
        verdict.findings += _problems_of_execution(draw.choice(sound))
    verdict.cells, verdict.sound = len(cells), sum(not cell.problems for cell in cells)
    shutil.rmtree(folder, ignore_errors=True)
    return verdict


def _compose(words: list[str], verdict: Verdict) -> list[Cell]:
    try:
        cells = compose_cells(words)
        verdict.outcome = "cells" if cells else "shown"
        return cells
    except RefusedError as refused:
        verdict.outcome = "refused"
        verdict.findings += _problems_of_sentences(refused.problems, words)
        verdict.findings += [] if refused.problems else ["is refused without a sentence"]
    except (KeyboardInterrupt, SystemExit) as error:
        verdict.outcome = "crash"
        verdict.findings.append(f"ends with {error!r:.200}")
    except Exception as error:
        verdict.outcome = "crash"
        verdict.findings.append(f"raises {type(error).__name__}: {str(error)[:200]}")
    return []


def _problems_of_sentences(sentences: list[str] | tuple[str, ...], words: list[str]) -> list[str]:
    named = {part for word in words for part in (word, *word.replace("=", ".").replace("/", ".").split(".")) if part}
    named |= {part for word in words for part in (*word.split("="), *re.split(r"[^\w-]+", word))} - {""}
    named |= {"''" for word in words if not word}
    named = {printable(name) for name in named}
    found = []
    for one in sentences:
        if PYTHONS.search(one):
            found.append(f"is answered in Python's words: {one!r:.300}")
        if not any(name[:60] in one for name in named) and not any(key in one for key in KEYS):
            found.append(f"is answered without a name: {one!r:.300}")
        if len(one) > LONGEST or one != printable(one):
            found.append(f"is answered in {len(one)} letters, or in some that no terminal shows: {one!r:.100}")
    return found


KEYS = (
    "strategy", "model", "data", "optimizer", "precision", "measure", "offload", "activation", "buffers", "zeropp",
    "launch", "search", "huggingface", "world_size", "batch", "hydra", "experiment", "arena", "sequence", "rank",
)  # fmt: skip
"""Words of ours, of which a sentence about a default may name one."""


def _problems_of_cell(cell: Cell, words: list[str]) -> list[str]:
    """Judges a cell that was made: its sentences, and its way to a file and back."""
    found = _problems_of_sentences(cell.problems, words)
    try:
        written = cell.config.as_dict()
        name_cells([cell.config])
        if cell.problems and not _is_finite(written):  # its row has null there
            return found
        text = json.dumps(written, allow_nan=False)
        for name, again in (
            ("as_dict", CellConfig.from_dict(written)),
            ("JSON", CellConfig.from_json(text)),
            ("yaml", CellConfig.from_dict(yaml.safe_load(yaml.safe_dump(cell.config.written(), sort_keys=False)))),
        ):
            if again != cell.config or again.cell_id != cell.cell_id:
                found.append(f"its cell differs after {name}: {written} / {again.as_dict()}"[:400])
    except Exception as error:
        found.append(f"its cell cannot be written: {type(error).__name__}: {str(error)[:200]}")
    return found


def _is_finite(value: Any) -> bool:
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(map(_is_finite, parts)) and not (isinstance(value, float) and not math.isfinite(value))


def _again(words: list[str], cells: list[Cell]) -> list[str]:
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            again = {cell.cell_id for cell in compose_cells(words)}  # a sweep may be shuffled
    except RefusedError as refused:
        return [f"is refused the second time: {refused}"]
    return [] if again == {cell.cell_id for cell in cells} else ["makes other cells the second time"]


MOST_UPDATED = 10**10
"""Parameters of a rank, about, up to which the tiles of its update are executed in seconds."""


def _is_small(config: CellConfig) -> bool:
    """True where an execution takes seconds."""
    units = getattr(config.model, "layers", 4) * (1 + getattr(config.model, "tiles", 1) / 4)
    work = units * config.accumulation * max(1, config.micro_batch / 64)
    updated = 12 * getattr(config.model, "layers", 4) * getattr(config.model, "hidden", 64) ** 2 / config.world_size
    if updated > MOST_UPDATED:
        return False
    return work < 200 and config.sequence <= 65536 and config.search.memory_limit is None


def _problems_of_execution(cell: Cell) -> list[str]:
    done = execute(cell.config)
    return [f"has no problem and cannot be executed: {done.problem:.300}"] if done.problem else []
