"""Every column has a unit and a meaning."""

from dataclasses import dataclass

from zerobench.records import describe
from zerobench.records.describe import ROWS, columns_of
from zerobench.results.tables import ALL_TABLES, load

EVERY = [column for table in ROWS for column in columns_of(table)]


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
