"""Published figures: rows, formulas, slopes and the tables. Executions of all rows are `thorough`."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cells import cell
from validation.__main__ import main
from validation.published.command import COLUMNS, record_of, write
from validation.published.figure import Reproduced, reproduce
from validation.published.sources import SOURCES
from zerobench.fake_execution import Execution

ROWS = [(name, row) for name, source in SOURCES.items() for row in source.rows]
ROOT = Path(__file__).parents[2]


def test_formulas_are_what_is_printed_where_nothing_is_said_against_it() -> None:
    for name, row in ROWS:
        if not (row.misprint or row.note):
            assert row.formula == pytest.approx(row.value, abs=row.digit or 1e-9), (name, row.quantity)
    assert [row.quantity for _, row in ROWS if row.misprint and abs(row.formula - row.value) < 1] == [
        "checkpoints of 100B, 125 layers, b = 32, s = 1024"  # the number is right, and its unit is not
    ]


@pytest.mark.slow
def test_a_row_that_differs_says_so_and_one_without_execution_says_why() -> None:
    name, row = "zero", replace(SOURCES["zero"].rows[1], note="why")
    assert Reproduced(name, row, row.value + 2 * row.margin).verdict == "no; why"
    assert Reproduced(name, row, row.value + row.margin / 2).verdict == "yes"
    failed = reproduce([(name, row)], lambda work: [_failed for _ in work])[0]
    assert failed.verdict == "not executed: it has no values"


_failed = Execution(cell("zero1", 2).config, 0, 0.0, None, "it has no values")


def test_formulas_are_listed_and_written_without_execution(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["published", "--list", "--only", "offload,zeropp"]) == 0
    said = capsys.readouterr().out
    assert "arXiv 2101.06840" in said
    assert "misprint, right is 2M" in said
    assert main(["published", "--list", "--out", str(tmp_path / "new")]) == 0
    rows = list(csv.DictReader((tmp_path / "new/published.csv").read_text().splitlines()))
    assert [row["quantity"] for row in rows] == [row.quantity for _, row in ROWS]
    assert set(rows[0]) == set(COLUMNS)
    assert (tmp_path / "new/published.md").read_text().count("## ") == len(SOURCES)
    assert main(["published", "--list", "--only", "megaton"]) == 2
    assert "published: --only megaton: no such source; did you mean megatron?" in capsys.readouterr().err


@pytest.mark.thorough
def test_every_row_is_executed_as_in_the_committed_table(tmp_path: Path) -> None:
    """`make published` writes the table; values are exact, and the same on every machine."""
    recorded = list(csv.DictReader((ROOT / "results/published/published.csv").read_text().splitlines()))
    found = reproduce(ROWS)
    assert [one.problem for one in found if one.problem] == []
    write(found, tmp_path)
    assert (tmp_path / "published.md").read_text() == (ROOT / "results/published/published.md").read_text()
    for one, row in zip(found, recorded, strict=True):
        assert {key: str(value) for key, value in record_of(one).items() if value is not None} == {
            key: value for key, value in row.items() if value
        }
    disagreeing = [one.row.quantity for one in found if not one.is_within and not one.row.note]
    assert disagreeing == []
