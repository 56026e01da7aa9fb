"""Files that zerobench reads: cut, empty, of another format, a folder, or missing. The error names the file."""

import io
import json
import re
import shutil
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cells import cell
from tests.unit.test_status_show_prune import make
from validation import store
from validation.gpu_suite import suite
from validation.published_runs import rows as published_runs
from validation.table1 import CellRow, StatesRow
from zerobench import cli, data
from zerobench.budgets.budget_file import read_budget
from zerobench.budgets.comparison import read_floors
from zerobench.host.files import read_yaml
from zerobench.models.huggingface import read_config
from zerobench.plots.marks import learn_colors
from zerobench.ranks.collectives import load_calibration
from zerobench.records import SearchRow
from zerobench.results.folders import write_search
from zerobench.results.frames import base_types
from zerobench.results.tables import load
from zerobench.sweep.cell import find_reusable, run_prefix
from zerobench.zero.checkpoint.save_load import find_weights

RESULTS = Path(__file__).parent.parent.parent / "results"
Example = Callable[[Path], list[Path]]

PYTHONS = re.compile(r"\b((Attribute|Type|Key|Index|Assertion|Recursion|Name|Runtime|Overflow)Error|Traceback)\b")
"""Words that an error message must not have."""


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
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
        return [folder / name]

    return example


def search(folder: Path) -> list[Path]:
    runs()(folder)
    values = {int: 1, float: 0.5, str: "2026-01-01T00:00:00+00:00", bool: True}
    write_search(folder, SearchRow(**{name: values[base] for name, base in base_types(SearchRow)}))
    return sorted((folder / "searches").glob("*.json"))


def weights(folder: Path) -> list[Path]:
    from safetensors.torch import save_file

    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(0), "c": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    return [folder / "model.safetensors", *written("model.safetensors.index.json", index)(folder)]


GPT2 = {
    "model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 32,
    "architectures": ["GPT2LMHeadModel"],
}  # fmt: skip
SUITE = {
    "about": {"code": "x", "torch": "2", "device_class": "cpu", "small": True},
    "sections": {"probe": {"cells": [{"name": "x", "status": "ok"}]}},
}


def _load(folder: Path, path: Path) -> None:
    results = load(folder)
    assert any(name.startswith("zero2") for name in results.runs["run_id"]) or path.parent == folder
    assert results.memory is not None


def _colors(folder: Path, path: Path) -> None:
    results = load(folder)
    results.runs["strategy"] = "of-a-user"
    learn_colors(results, [folder])


def _weights(folder: Path, path: Path) -> None:
    for tensor in find_weights(path, 100).tensors.values():
        tensor.part(tensor.order, 0, min(4, prod(tensor.order.shape)))


def command(*arguments: str) -> Callable[[Path, Path], None]:
    """A command, whose message becomes the error of the reading."""

    def run(folder: Path, path: Path) -> None:
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            code = cli.run([argument.replace("FOLDER", str(folder)) for argument in arguments])
        assert "Traceback" not in err.getvalue() + out.getvalue()
        assert code in (0, 1, 2)
        if code == 2:  # files that were left out, before the verb found nothing else
            left_out = [str(warning.message) for warning in warned]
            raise ValueError("; ".join([*left_out, err.getvalue().strip() or out.getvalue().strip()]))

    return run


@dataclass(frozen=True)
class Reader:
    """`read` takes the folder and the file. It may raise an error that names the file or its folder."""

    example: Example
    read: Callable[[Path, Path], Any]


STAGES = copied("reference/cpu/stages")

READERS: dict[str, Reader] = {
    "run.json": Reader(runs("run.json"), _load),
    "tables of a run": Reader(runs("*.parquet"), _load),
    "provenance.json": Reader(runs("provenance.json"), _colors),
    "collection": Reader(STAGES, command("export", "FOLDER", "--latest")),
    "searches": Reader(search, _load),
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
    "weights": Reader(weights, _weights),
    "huggingface's config.json": Reader(written("config.json", GPT2), lambda _, path: read_config(str(path), {})),
    "text": Reader(
        written("text.txt", "a text of a few letters"),
        lambda _, path: (data.read_text(str(path), 4), data.text_hash(str(path))),
    ),
    "yaml": Reader(written("x.yaml", "a: {b: [1, 2], c: x}\nd: null\n"), lambda _, path: read_yaml(path)),
}
"""Name -> reader. A name with a comma is one file read by a verb."""


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def into_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": cut,
    "empty": lambda path: path.write_bytes(b""),
    "of another format": lambda path: path.write_bytes(b"\x80\x04\xff PAR1"),
    "a folder": into_folder,
    "missing": Path.unlink,
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", READERS)
def test_damaged_file_is_read_or_refused_by_its_name(name: str, tmp_path: Path, thorough: bool) -> None:
    reader, original = READERS[name], tmp_path / "original"
    original.mkdir()
    paths = [path.relative_to(original) for path in reader.example(original)]
    assert paths
    damages = [*DAMAGES.items()]
    if not thorough:  # the commonest, and the others by turns
        damages = [damages[0], *damages[1 + [*READERS].index(name) % 2 :: 2]]
    for number, (damage, apply) in enumerate(damages):
        folder, path = tmp_path / "files", paths[number % len(paths)]
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(original, folder)
        apply(folder / path)
        try:
            reader.read(folder, folder / path)
        except (ValueError, OSError) as error:
            message = str(error)
            parent = (folder / path).parent
            assert any(part in message for part in (path.name, str(parent), parent.name)), (damage, path)
            assert not PYTHONS.search(message), (damage, path, message)


# -- runs: each damaged one is left out with an error message by every verb, no other is ------------------------------


def set_row(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        path = run / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def set_config(**changes: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        config = json.loads(json.loads((run / "run.json").read_text())["config"])
        set_row(config=json.dumps(config | changes))(run)

    return change


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content) and None


def flip(run: Path) -> None:
    path = run / "memory.parquet"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)


def lose(*columns: str) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        row = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({name: row[name] for name in row if name not in columns}))

    return change


RUN_DAMAGES: dict[str, Callable[[Path], None]] = {
    "no peak": lose("peak_bytes"),
    "a version to come": set_row(schema_version=10**9),
    "config no json": set_row(config="{"),
    "config a list": set_row(config="[]"),
    "config deep": set_row(config="[" * 5000),
    "config of a version to come": set_config(schema_version=10**9),
    "row cut": lambda run: (run / "run.json").write_bytes((run / "run.json").read_bytes()[:-9]) and None,
    "row deep": write("run.json", b"[" * 5000),
    "row of another code": write("run.json", b"\xff\xfe{"),
    "row empty": write("run.json", b""),
    "table flipped": flip,
    "table cut": lambda run: (run / "steps.parquet").write_bytes((run / "steps.parquet").read_bytes()[:-9]) and None,
    "table empty": write("traffic.parquet", b""),
}

OF_ROWS = [name for name in RUN_DAMAGES if not name.startswith("table")]
"""What verbs that read no table see, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, a copy of it, a bad one of each kind, searches that are none."""
    home = tmp_path_factory.mktemp("runs")
    for number in range(3):
        make(home, "zero2", repeat=number, floor_states_bytes=2**20)
    for name, damage in RUN_DAMAGES.items():
        path = make(home, "zero1")
        damage(path)
        path.rename(home / name.replace(" ", "-"))
    copy = home / "a-copy"
    copy.mkdir()
    (copy / "run.json").write_bytes((next(home.glob("zero2-*-1-x*")) / "run.json").read_bytes())
    (home / "searches").mkdir()
    for number, content in enumerate((b"[" * 5000, b"\xff", b'{"schema_version": 1000000000}', b'{"run_ids": 3}')):
        (home / "searches" / f"{number}.json").write_bytes(content)
    return home


def test_each_is_left_out_with_a_sentence(folder: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = load(folder)
    assert found.runs.strategy.tolist() == ["zero2"] * 3
    assert set(found.memory.run_id) == set(found.runs.run_id)
    told = [str(warning.message) for warning in caught]
    for name in (*RUN_DAMAGES, "a copy"):
        mine = [sentence for sentence in told if f"/{name.replace(' ', '-')}" in sentence.split(":")[0]]
        assert len(mine) == 1, (name, told)
        assert "left out" in mine[0]
        assert len(mine[0].removeprefix(str(folder))) < 400


@pytest.mark.shown(3)
@pytest.mark.filterwarnings("ignore:.*left out")
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["status", "RUNS"], 0),
        (["show", "zero2 tiny N=2 b=8", "--results", "RUNS"], 0),
        (["export", "RUNS"], 0),
        (["export", "RUNS", "--format", "markdown", "--latest"], 0),
        (["export", "RUNS", "--format", "parquet", "--out", "OUT/collection"], 0),
        (["export", "RUNS", "--table", "searches"], 0),
        (["compare", "RUNS", "RUNS"], 0),
        (["budget", "record", "--runs", "RUNS", "--file", "OUT/budget.yaml"], 0),
        (["budget", "check", "OUT/budget.yaml", "--runs", "RUNS"], 0),
        (["noise", "record", "--runs", "RUNS", "--noise", "OUT/noise"], 0),
        (["prune", "RUNS", "--dry-run"], 0),
        (["strategy=zero2", "results_dir=RUNS", "--dry-run"], 0),
    ],
)
def test_every_verb_does_what_it_does_for_the_others(folder: Path, tmp_path_factory, words, code, capsys) -> None:
    out = tmp_path_factory.getbasetemp() / "out"
    given = [word.replace("RUNS", str(folder)).replace("OUT", str(out)) for word in words]
    assert cli.run(given) == code, capsys.readouterr().err
    shown = capsys.readouterr()
    assert "Traceback" not in shown.err
    if words[0] == "status":
        assert "ok ×3" in shown.out
        for name in OF_ROWS:
            assert f"/{name.replace(' ', '-')}/run.json" in shown.out
    if words[0] == "prune":
        assert "damaged search" in shown.out
        assert not any(name.replace(" ", "-") in shown.out.split("kept:")[0] for name in OF_ROWS), "bad runs are kept"


def test_a_run_whose_tables_are_damaged_is_measured_again(tmp_path: Path) -> None:
    one = cell("zero2", 2, results_dir=str(tmp_path), model="tiny")
    run = make(tmp_path, "zero2")
    run = run.rename(tmp_path / f"{run_prefix(one)}-1")
    assert find_reusable(one) is not None
    flip(run)
    assert find_reusable(one) is None
