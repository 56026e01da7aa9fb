"""`python -m validation`: every proof explains itself and has its target."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from validation.__main__ import NAMES, main
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


def test_there_are_at_most_fourteen_verbs() -> None:
    assert len(cli.VERBS) <= 14
