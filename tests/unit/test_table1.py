"""Table 1, executed: what the paper prints, what is written, and the tables that are committed."""

from collections import Counter
from pathlib import Path

import pytest

from validation import table1
from validation.__main__ import main
from validation.published.equations import states_per_parameter
from validation.store import read
from validation.table1 import GB, CellRow, StatesRow, TableCell, matching, place_of, places

COMMITTED = Path(__file__).parents[2] / "results" / "table1"

TABLE = [(size, ranks, stage) for size in table1.SIZES for ranks in table1.RANKS for stage in table1.STAGES]


def test_all_54_printed_numbers_agree_with_the_formula_within_one_unit() -> None:
    """The rule for all cells; which columns are rounded, and which are cut off; that a wrong number is seen."""
    assert len(TABLE) == 54
    how: dict[str, Counter[str]] = {size: Counter() for size in table1.SIZES}
    for size, ranks, stage in TABLE:
        text, value = table1.printed(size, ranks, stage), table1.SIZES[size] * states_per_parameter(stage, ranks) / GB
        assert table1.how_printed(text, value) != "misprint", (size, ranks, stage)
        how[size][table1.how_printed(text, value)] += 1
    assert how["7.5B"]["cut off"] == 0
    assert how["128B"]["cut off"] + how["1T"]["cut off"] > 0
    assert not any(one["misprint"] for one in how.values())
    assert [table1.how_printed(text, 4187.5) for text in ("4187", "4188", "4186")] == ["cut off", "rounded", "misprint"]


def test_places_are_the_table_figure_1_and_variants_and_words_choose_among_them() -> None:
    """54 cells without a name of a variant; a word that is none is refused."""
    every = places()
    assert len(set(every)) == len(every)
    assert {(p.size, p.ranks, p.strategy) for p in every if p.strategy != "ddp" and not p.variant} == set(TABLE)
    assert [str(p) for p in matching(every, ["7.5B", "N=64"])][:2] == ["7.5B ddp N=64", "7.5B zero1 N=64"]
    with pytest.raises(ValueError, match=r"--only 8B: no such cell; use words of 7.5B, 128B, 1T"):
        matching(every, ["8B"])


def test_the_committed_rows_are_the_papers_cells_and_their_parts_add_up() -> None:
    """Printed numbers and formulas as of today; the executed states are the formula, what is in flight, and the sum of
    their lines; the replay expects them to a millionth.
    """
    rows = read(COMMITTED / "cells.csv", CellRow)
    parts = Counter[TableCell]()
    for part in read(COMMITTED / "in_flight.csv", StatesRow):
        parts[place_of(part)] += part.bytes
    assert rows
    assert {place_of(row) for row in rows} == set(parts) <= set(places())
    for row in rows:
        assert row.printed_gb == table1.printed(row.size, row.ranks, row.strategy)
        assert row.paper_formula_bytes == round(table1.SIZES[row.size] * states_per_parameter(row.strategy, row.ranks))
        assert row.formula_bytes == pytest.approx(row.psi * states_per_parameter(row.strategy, row.ranks), rel=1e-9)
        assert parts[place_of(row)] == row.executed_bytes >= row.formula_bytes
        assert row.replayed_bytes == pytest.approx(row.executed_bytes, rel=1e-6)
        assert row.resident_bytes < 4 * 2**30


@pytest.mark.thorough
@pytest.mark.slow
def test_the_verb_executes_what_is_not_there_and_parts_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a small model: rows with formula, executed and replayed; a second run has nothing to do."""
    monkeypatch.setitem(table1.MODELS, "7.5B", "gpt_tiny")
    command = ["table1", "--only", "7.5B", "N=4", "zero3", "--out", str(tmp_path)]
    assert main(command) == 0
    assert "1 cells simulated" in capsys.readouterr().out
    [row] = read(tmp_path / "cells.csv", CellRow)
    assert place_of(row) == TableCell("7.5B", 4, "zero3")
    assert row.executed_bytes > row.formula_bytes == -(-16 * row.psi // 4)
    parts = read(tmp_path / "in_flight.csv", StatesRow)
    assert sum(part.bytes for part in parts) == row.executed_bytes
    assert (row.printed_gb, row.how_printed, row.paper_formula_bytes) == ("30", "exact", 30 * GB)
    assert main(command) == 0
    assert "0 cells simulated" in capsys.readouterr().out
    (tmp_path / "cells.csv").write_text("a,b\n1,2\n")
    assert main(command) == 2
    assert "its columns are not those of this version" in capsys.readouterr().err
