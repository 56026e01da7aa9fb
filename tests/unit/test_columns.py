"""Every column has a unit and a meaning, and `zerobench columns` prints them."""

import csv
import io
import json
from dataclasses import dataclass

import pytest

from zerobench import cli
from zerobench.records import describe
from zerobench.records.describe import ROWS, columns_of
from zerobench.results.tables import ALL_TABLES, load

EVERY = [column for table in ROWS for column in columns_of(table)]


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.run(["columns", *arguments]) == 0
    return capsys.readouterr().out


def test_tables_are_those_that_load_gives() -> None:
    assert ROWS == ALL_TABLES


def test_columns_are_those_of_the_frames() -> None:
    results = load("results/reference/cpu/stages")
    for table in ROWS:
        assert {column.name for column in columns_of(table)} == set(getattr(results, table).columns), table


def test_every_column_has_a_meaning_and_every_number_a_unit() -> None:
    for column in EVERY:
        assert len(column.meaning) > 5, column
        assert column.meaning.endswith("."), column
        assert bool(column.unit) == (column.kind in ("int", "float")), column


def test_units_are_of_columns_that_there_are() -> None:
    assert set(describe.UNITS) <= {column.name for column in EVERY}
    for end in describe.SUFFIXES:
        assert any(column.name.endswith(end) for column in EVERY), end


def test_a_field_without_a_docstring_has_no_meaning() -> None:
    """The tests above would find it: a meaning is the field's own docstring, not its neighbor's."""

    @dataclass
    class Row:
        described: int
        """Said."""
        bare: int
        other: int
        """Said too."""

    assert describe.meanings_of(Row) == {"described": "Said.", "other": "Said too."}


def test_parts_units_and_tables_choose(capsys) -> None:
    names = [line.split()[0] for line in printed(capsys, "states_bytes", "--table", "runs").splitlines()[2:]]
    assert {"states_bytes", "predicted_states_bytes", "floor_states_bytes"} <= set(names)
    assert "peak_bytes" not in names
    of_steps = json.loads(printed(capsys, "--table", "steps", "--unit", "s", "--format", "json"))
    assert {one["name"] for one in of_steps} >= {"seconds", "forward_s", "exposed_s"}
    assert {one["unit"] for one in of_steps} == {"s"}
    found = json.loads(printed(capsys, "--find", "oneDNN", "--find", "handed out or kept", "--format", "json"))
    assert [one["name"] for one in found] == ["pinned_bytes"]


def test_every_format_has_every_column(capsys) -> None:
    rows = list(csv.DictReader(io.StringIO(printed(capsys, "--format", "csv"))))
    assert [(row["table"], row["name"]) for row in rows] == [(one.table, one.name) for one in EVERY]
    assert [one["meaning"] for one in json.loads(printed(capsys, "--format", "json"))] == [c.meaning for c in EVERY]
    markdown = printed(capsys, "--format", "markdown")
    assert markdown.count("\n| `") == len(EVERY)
    text = printed(capsys)
    assert max(len(line) for line in text.splitlines()) <= 120
    assert all(f"  {column.name} " in text for column in EVERY)


def test_a_narrow_terminal_has_the_meaning_below(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    text = printed(capsys, "floor_states_bytes")
    assert max(len(line) for line in text.splitlines()[2:]) <= 50
    assert "without buffers in flight" in " ".join(text.split())


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["statse_bytes"], "statse_bytes: no such column; did you mean states_bytes?"),
        (["states_bytes", "--table", "steps"], "states_bytes: no such column of steps"),
        (["--table", "run"], "--table run: no such table; did you mean runs?"),
        (["--unit", "furlong"], "--unit furlong: use one of"),
        (["--find", "zzz"], "--find zzz: no such column"),
    ],
)
def test_what_means_no_column_is_one_sentence_and_exit_2(arguments: list[str], sentence: str, capsys) -> None:
    assert cli.run(["columns", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert sentence in err
    assert err.count("\n") == 1
