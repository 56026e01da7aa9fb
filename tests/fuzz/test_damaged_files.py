"""Every file that zerobench reads: a valid example, damaged, and the code that reads it.

A row of READERS is a reader; its example makes files in an empty folder and returns those that are damaged. What is
read by the engine alone from files that it has just written (blocks of NVMe offload, which have checksums) is not here,
nor what is never read (a run's config.yaml).
"""

import io
import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.unit.test_status_show_prune import make
from validation import store
from validation.gpu_suite import suite
from validation.published_runs import rows as published_runs
from validation.table1 import CellRow, StatesRow
from zerobench import cli, data
from zerobench.calibrate.collectives import load_calibration
from zerobench.config.safe_yaml import read_yaml
from zerobench.judging.budget_file import read_budget
from zerobench.judging.paired import read_floors
from zerobench.models.huggingface_config import read_config
from zerobench.plots.style import learn_colors
from zerobench.records import SearchRow
from zerobench.results.board import board_folders, read_board
from zerobench.results.folders import write_search
from zerobench.results.row_checks import columns_of
from zerobench.results.tables import load
from zerobench.sizes import printable
from zerobench.zero.checkpoint.weights import find_weights

from .canary import Canary
from .conftest import examples
from .watch import watched
from .words import TEXTS, VALUES

RESULTS = Path(__file__).parent.parent.parent / "results"
Example = Callable[[Path], list[Path]]

PYTHONS = re.compile(
    r"\b((Attribute|Type|Key|Index|Assertion|Recursion|UnboundLocal|Name|Runtime|Overflow|UnicodeEncode|UnicodeDecode"
    r"|ZeroDivision|NotImplemented|Memory|Value)Error|StopIteration|Traceback|object at 0x)\b"
)
"""Words that a person should not be given for a reason."""

# -- examples -----------------------------------------------------------------------------------------------


def runs(*names: str) -> Example:
    """Two runs, of which these files of the first are damaged."""

    def example(folder: Path) -> list[Path]:
        make(folder, "zero2")
        run = make(folder, "zero1")
        (run / "provenance.json").write_text(json.dumps({"look": {"color": "red"}, "versions": {"torch": "2"}}))
        return [path for name in names for path in sorted(run.glob(name))]

    return example


def copied(source: str) -> Example:
    """Committed files: all of a folder, or one."""

    def example(folder: Path) -> list[Path]:
        path = RESULTS / source
        shutil.copytree(path, folder, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, folder)
        return sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".json", ".yaml", ".csv"))

    return example


def written(name: str, content: Any) -> Example:
    def example(folder: Path) -> list[Path]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return [path]

    return example


def search(folder: Path) -> list[Path]:
    runs()(folder)
    made = {int: 1, float: 0.5, str: "2026-01-01T00:00:00+00:00", bool: True}
    write_search(folder, SearchRow(**{name: made[base] for name, base in columns_of(SearchRow)}))
    return sorted((folder / "searches").glob("*.json"))


def weights(folder: Path) -> list[Path]:
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    return [folder / "model.safetensors", *written("model.safetensors.index.json", index)(folder)]


BOARD = {"host": "here", "pid": 3, "current": 0, "left": "1 s", "launches": [
    {"name": "x", "state": "running", "mode": "timed", "step": "1/2", "loss": 1.0, "peak_bytes": 1, "seconds": 0.5}
]}  # fmt: skip
GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32,
    "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
SUITE = {
    "about": {"code": "x", "torch": "2", "device_class": "cpu", "small": True},
    "sections": {"probe": {"cells": [{"name": "x", "status": "ok"}]}},
}

# -- readers ------------------------------------------------------------------------------------------------


def _load(folder: Path, path: Path) -> None:
    found = load(folder)
    assert any(name.startswith("zero2") for name in found.runs["run_id"]) or path.parent == folder, "the other is gone"
    assert found.memory is not None


def _colors(folder: Path, path: Path) -> None:
    found = load(folder)
    found.runs["strategy"] = "of-a-user"
    learn_colors(found, [folder])


def _weights(folder: Path, path: Path) -> None:
    for tensor in find_weights(path, 100).tensors.values():
        tensor.part(tensor.order, 0, min(4, prod(tensor.order.shape)))


def command(*words: str) -> Callable[[Path, Path], None]:
    """A command, whose message becomes the error of the reading."""
    return partial(_command, words)


def _command(words: tuple[str, ...], folder: Path, path: Path) -> None:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        code = cli.run([word.replace("FOLDER", str(folder)) for word in words])
    assert "Traceback" not in err.getvalue() + out.getvalue()
    assert code in (0, 1, 2)
    if code == 2:  # files that were left out, before the verb found nothing else
        left_out = [str(one.message) for one in warned]
        raise ValueError("; ".join([*left_out, err.getvalue().strip() or out.getvalue().strip()]))


@dataclass(frozen=True)
class Reader:
    """`read` takes the folder and the file. It may raise ValueError or OSError, with the file's name or its folder's.
    `imports`: for seconds, so that the campaign alone has it.
    """

    example: Example
    read: Callable[[Path, Path], Any]
    imports: bool = False


TABLES = runs("run.json", "*.parquet")
STAGES = copied("reference/cpu/stages")

READERS: dict[str, Reader] = {
    "run.json": Reader(runs("run.json"), _load),
    "tables of a run": Reader(runs("*.parquet"), _load),
    "provenance.json": Reader(runs("provenance.json"), _colors, imports=True),
    "collection": Reader(STAGES, command("export", "FOLDER", "--latest")),
    "searches": Reader(search, _load),
    "board": Reader(
        written(".sweep-3-x/board.json", BOARD), lambda folder, _: [read_board(one) for one in board_folders(folder)]
    ),
    "run, status": Reader(runs("run.json"), command("status", "FOLDER")),
    "run, show": Reader(TABLES, command("show", "zero1 tiny N=2 b=8", "--results", "FOLDER")),
    "run, compare": Reader(TABLES, command("compare", "FOLDER", "FOLDER"), imports=True),
    "events, replay": Reader(
        copied("replay"), command("replay", "FOLDER", "--worlds", "none", "--out", "FOLDER/page.html")
    ),
    "collection, report": Reader(STAGES, command("report", "FOLDER", "--out", "FOLDER/report.html"), imports=True),
    "budget": Reader(copied("budgets/gpt_tiny.yaml"), lambda _, path: read_budget(path)),
    "noise": Reader(copied("noise"), lambda folder, _: read_floors(folder)),
    "calibration": Reader(copied("calibration/cpu"), lambda _, path: load_calibration(path.parent)),
    "published runs": Reader(
        copied("published_runs/training.csv"), lambda _, path: published_runs.read(path, published_runs.SIMULATED)
    ),
    "table 1": Reader(
        copied("table1"), lambda _, path: store.read(path, CellRow if path.name == "cells.csv" else StatesRow)
    ),
    "suite": Reader(written("suite.json", SUITE), lambda _, path: suite._read(path)),
    "weights": Reader(weights, _weights, imports=True),
    "huggingface's config.json": Reader(
        written("config.json", GPT2), lambda _, path: read_config(str(path), {}), imports=True
    ),
    "text": Reader(
        written("text.txt", "a text of a few letters"),
        lambda _, path: (data.read_text(str(path), 4), data.text_hash(str(path))),
    ),
    "yaml": Reader(written("x.yaml", "a: {b: [1, 2], c: x}\nd: null\n"), lambda _, path: read_yaml(path)),
}
"""Name -> reader. A name with a comma is one file read by a verb."""

# -- damages ------------------------------------------------------------------------------------------------

WAYS = ("bits", "cut", "grow", "replace", "recode")
PLACES = ("folder", "missing", "link to itself", "link out", "pipe")
COLUMNS: tuple[Callable[[int], Any], ...] = (
    lambda n: ["x"] * n, lambda n: [b"\xff"] * n, lambda n: [[1]] * n, lambda n: [{"a": 1}] * n, lambda n: [2**62] * n,
    lambda n: [-(2**62)] * n, lambda n: [float("nan")] * n, lambda n: [float("inf")] * n, lambda n: [True] * n,
    lambda n: ["{"] * n, lambda n: ["\x00\x1b[2J"] * n, lambda n: [-1] * n, lambda n: [0.5] * n, lambda n: [None] * n,
    lambda n: pa.array(["x"] * n).dictionary_encode(), lambda n: pa.array([0] * n, pa.timestamp("ns")),
    lambda n: pa.array(np.arange(n) % 100, pa.int8()),
)  # fmt: skip


def damage(draw: st.DrawFn, path: Path) -> str:
    """Damages the bytes of a file, a value that its format holds, or its place in the folder. Returns the way."""
    way = draw(st.sampled_from((*WAYS, *["format"] * 6 * (path.suffix in OF_SUFFIX), "place")))
    if way == "place":
        return _misplace(draw(st.sampled_from(PLACES)), path, draw)
    if way == "format":
        OF_SUFFIX[path.suffix](draw, path)
        return way
    content = path.read_bytes()
    at = draw(st.integers(0, len(content)))
    if way == "bits":
        flipped = bytearray(content)
        flipped[min(at, len(content) - 1)] ^= 1 << draw(st.integers(0, 7))
        content = bytes(flipped)
    elif way == "cut":
        content = content[:at]
    elif way == "grow":
        content = content[:at] + draw(st.one_of(st.binary(max_size=100), st.just(content))) + content[at:]
    elif way == "replace":
        content = draw(st.sampled_from((*TEXTS, pickle.dumps(Canary()))))
    else:
        content = content.decode("latin-1").encode(draw(st.sampled_from(("utf-16", "utf-32", "utf-8-sig", "utf-7"))))
    path.write_bytes(content)
    return way


def _misplace(way: str, path: Path, draw: st.DrawFn) -> str:
    path.unlink()
    if way == "folder":
        path.mkdir()
    elif way == "pipe":
        os.mkfifo(path)
    elif way.startswith("link"):
        out = draw(st.sampled_from(("/etc/hostname", "/dev/null", "/no-such-file", "/proc/self/mem", "/")))
        path.symlink_to(path if way == "link to itself" else out)
    return way


def _changed(draw: st.DrawFn, value: Any) -> Any:
    """Changes a value, a key or a length somewhere; at the top too, but seldom."""
    places = [value]
    for one in places[:2000]:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        places += [part for part in inner if isinstance(part, dict | list) and part]
    where, new = draw(st.sampled_from(places)), draw(st.sampled_from(VALUES))
    if not isinstance(where, dict | list) or not where or draw(st.integers(0, 30)) == 30:
        return new
    key = draw(st.sampled_from(list(where) if isinstance(where, dict) else range(len(where))))
    way = draw(st.sampled_from(("change", "change", "change", "remove", "add")))
    if way == "change":
        where[key] = new
    elif way == "remove":
        del where[key]
    elif isinstance(where, dict):
        where[draw(st.sampled_from((f"{key}s", "", "schema_version", "name", "\x00")))] = new
    else:
        where.insert(key, new)
    return value


def _json(draw: st.DrawFn, path: Path) -> None:
    path.write_text(json.dumps(_changed(draw, json.loads(path.read_bytes()))), errors="surrogatepass")


def _yaml(draw: st.DrawFn, path: Path) -> None:
    text = yaml.safe_dump(_changed(draw, yaml.safe_load(path.read_bytes())), sort_keys=False)
    path.write_text(text, errors="surrogatepass")


def _csv(draw: st.DrawFn, path: Path) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = draw(st.sampled_from(rows))
    place, more = draw(st.integers(0, len(row) - 1)), draw(st.integers(0, 1))
    cells = ("", "-1", "nan", "1e999", "x", '"', "\x00", "9" * 6000, "é", "=1+1", '"a\nb"')
    row[place : place + more] = [draw(st.sampled_from(cells))]
    path.write_text("\n".join(map(",".join, rows)))


def _parquet(draw: st.DrawFn, path: Path) -> None:
    table = pq.read_table(path)
    place = draw(st.integers(0, table.num_columns - 1))
    name, way = table.column_names[place], draw(st.integers(0, 8))
    if way == 0:
        table = table.remove_column(place)
    elif way == 1:
        table = table.append_column(name, table.column(place))
    elif way == 2:
        table = table.slice(0, 1)
    elif way == 3:
        table = pa.concat_tables([table] * 3)
    elif way == 4:
        table = table.rename_columns([draw(st.sampled_from((one, "run_id"))) for one in table.column_names])
    elif way == 5:
        table = table.replace_schema_metadata({b"pandas": draw(st.sampled_from((b"{", b"[]", b"\xff")))})
    else:
        made = draw(st.sampled_from(COLUMNS))(table.num_rows)
        table = table.set_column(place, name, made if isinstance(made, pa.Array) else pa.array(made))
    path.unlink()
    pq.write_table(table, path)


def _safetensors(draw: st.DrawFn, path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(_changed(draw, json.loads(content[8 : 8 + length]))).encode("utf-8", "surrogatepass")
    count = draw(st.sampled_from((len(header), len(header), 2**63, 0, len(header) - 1)))
    path.write_bytes(count.to_bytes(8, "little") + header + content[8 + length :])


OF_SUFFIX = {".json": _json, ".yaml": _yaml, ".csv": _csv, ".parquet": _parquet, ".safetensors": _safetensors}

# -- cases --------------------------------------------------------------------------------------------------


@pytest.mark.shown(7)
@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_a_damaged_file_is_read_or_refused_by_its_name(name: str, tmp_path: Path) -> None:
    reader, home, room = READERS[name], tmp_path / "example", tmp_path / "room"
    if reader.imports and examples() < 100:
        pytest.skip("make fuzz has it")
    home.mkdir()
    room.mkdir()
    paths = [path.relative_to(home) for path in reader.example(home)]
    assert paths

    @settings(max_examples=examples())
    @given(st.data())
    def case(drawn: st.DataObject) -> None:
        folder = room / "files"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(home, folder, symlinks=True)
        path = folder / drawn.draw(st.sampled_from(paths))
        note(f"{path.name}: {damage(drawn.draw, path)}")
        read(reader, folder, path)

    case()


def read(reader: Reader, folder: Path, path: Path) -> None:
    """Reads a damaged file. A verb writes into the folder what it was asked for; nothing else does."""
    writes = isinstance(reader.read, partial)
    silent = io.StringIO()
    with redirect_stdout(silent), redirect_stderr(silent), watched(folder.parent, *([] if writes else [folder])):
        try:
            reader.read(folder, path)
            return
        except (ValueError, OSError) as error:
            message = str(error)
    assert any(printable(name) in printable(message) for name in (path.name, str(path.parent), path.parent.name))
    assert not PYTHONS.search(message)
