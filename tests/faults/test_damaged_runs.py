"""Damaged runs: each is left out with an error message by every verb, no other is."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_status_show_prune import make
from zerobench import cli
from zerobench.results.tables import load


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


DAMAGES: dict[str, Callable[[Path], None]] = {
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

OF_ROWS = [name for name in DAMAGES if not name.startswith("table")]
"""What verbs that read no table see, too."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good run, a copy of it, a bad one of each kind, searches that are none."""
    home = tmp_path_factory.mktemp("runs")
    for number in range(3):
        make(home, "zero2", repeat=number, floor_states_bytes=2**20)
    for name, damage in DAMAGES.items():
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
    for name in (*DAMAGES, "a copy"):
        mine = [sentence for sentence in told if f"/{name.replace(' ', '-')}" in sentence.split(":")[0]]
        assert len(mine) == 1, (name, told)
        assert "left out" in mine[0]
        assert len(mine[0].removeprefix(str(folder))) < 400


@pytest.mark.shown(6)
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
    from tests.cells import cell
    from zerobench.sweep.cell import find_reusable, run_prefix

    one = cell("zero2", 2, results_dir=str(tmp_path), model="tiny")
    run = make(tmp_path, "zero2")
    run = run.rename(tmp_path / f"{run_prefix(one)}-1")
    assert find_reusable(one) is not None
    flip(run)
    assert find_reusable(one) is None
