"""`python -m validation`: every proof explains itself and has its target; verbs that became proofs name it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from validation.__main__ import NAMES, main
from validation.store import Store, read
from zerobench import cli

ROOT = Path(__file__).parents[2]


def test_every_proof_has_a_target_and_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert main([]) == 0
    listed = capsys.readouterr().out
    for name in NAMES:
        assert f"  {name} " in listed
        assert re.search(rf"^{name}: setup\n(?:\t.*\n)*\t\$\(VALIDATE\) {name} ", makefile, re.MULTILINE), name
        assert f"make {name} " in makefile
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"usage: python -m validation {name}" in capsys.readouterr().out
    assert main(["tabel1"]) == 2
    assert capsys.readouterr().err == "validation tabel1: no such proof; did you mean table1?\n"


@pytest.mark.parametrize("name", cli.REMOVED)
def test_a_verb_that_is_gone_names_what_does_it_now(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = name.split()
    assert words[0] not in cli.VERBS or words[1:]
    assert cli.run([*words, "x"]) == cli.run([words[0], *(f"{flag}=x" for flag in words[1:])]) == 2
    message = capsys.readouterr().err.splitlines()
    assert len(message) == 2
    assert message[0].startswith(f"zerobench {name}: removed; use `{cli.REMOVED[name]}`")
    target = cli.REMOVED[name].removeprefix("make ").partition(" ")[0]
    assert target in NAMES or not cli.REMOVED[name].startswith("make ")


def test_there_are_at_most_fifteen_verbs() -> None:
    assert len(cli.VERBS) <= 15


@dataclass(frozen=True)
class Measured:
    cell: str
    bytes: int
    share: float | None = None


def test_rows_of_a_cell_are_kept_in_order_and_other_files_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "new" / "rows.csv"
    store = Store(file, Measured, lambda row: row.cell, ["a", "b"])
    store.put([Measured("b", 1, 0.5), Measured("b", 2)])
    store.put([Measured("a", 3)])
    again = Store(file, Measured, lambda row: row.cell, ["a", "b"])
    assert again.rows == store.rows == [Measured("a", 3), Measured("b", 1, 0.5), Measured("b", 2)]
    again.put([Measured("b", 4)])
    assert read(file, Measured) == [Measured("a", 3), Measured("b", 4)]
    file.write_text("cell,bytes,share\na,x,\n")
    with pytest.raises(ValueError, match="line 2: it is damaged"):
        read(file, Measured)
    file.write_text("cell,bytes\n")
    with pytest.raises(ValueError, match="its columns are not those of this version"):
        read(file, Measured)
