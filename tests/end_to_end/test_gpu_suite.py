"""The GPU suite end to end on a CPU: every section, and what a plain checkout needs."""

import io
import json
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import zerobench as package
from validation.__main__ import main as validate
from validation.gpu_suite import SECTIONS
from validation.gpu_suite.suite import NONE

SMALL = ("--small", "--device", "cpu", "--minutes", "1000")
"""The minutes count from the start of this process."""


def told(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "suite.json").read_text())["sections"])


SHORT = ("parity",)
"""Sections that every run of the tests has; the others wait for `make test-all`."""


@pytest.fixture(scope="module")
def whole(thorough: bool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The suite in this process: one of its own would load torch twice again."""
    out, printed = tmp_path_factory.mktemp("suite") / "the suite", io.StringIO()
    only = () if thorough else ("--only", ",".join(SHORT))
    with chdir(out.parent), redirect_stdout(printed):
        assert validate(["gpu-suite", *SMALL, *only, "--out", str(out)]) == 0
    return out, printed.getvalue()


@pytest.mark.slow
def test_every_section_has_its_answer(whole: tuple[Path, str], thorough: bool) -> None:
    out, printed = whole
    sections, expected = told(out), list(SECTIONS) if thorough else list(SHORT)
    assert list(sections) == expected
    for name, section in sections.items():
        assert {cell["status"] for cell in section["cells"]} == {"ok"}, name
        assert section["title"] in printed
        assert section["table"]["rows"]
        assert not section["differs"]
    assert "not reached: 0" in printed
    titles = [line[3:] for line in (out / "summary.md").read_text().splitlines() if line.startswith("## ")]
    assert titles == [SECTIONS[name].title for name in expected]


@pytest.mark.thorough
def test_its_answers_are_right(whole: tuple[Path, str]) -> None:
    """Ours equal DDP to the bit; FSDP2 in bf16 does not, which shows that a difference is seen."""
    out, _ = whole
    tables = {name: section["table"]["rows"] for name, section in told(out).items()}
    equal = {row[0]: row[2] for row in tables["parity"]}
    assert all("to the bit" in words for name, words in equal.items() if name.startswith("zero"))
    (other,) = [words for name, words in equal.items() if name.startswith("fsdp2") and "bf16" in name]
    assert other.startswith("within ")
    runs = package.load(out).runs
    memory = runs[runs.backend == "simulated"]
    assert set(memory.world_size) == {8, 64}
    memory = memory[memory.strategy == "zero3"]
    assert ((memory.states_bytes / memory.predicted_states_bytes - 1).abs() < 0.01).all()
    assert memory.step_s.isna().all()
    speed = [cell["run_id"] for cell in told(out)["speed"]["cells"]]
    timed = runs[runs.run_id.isin(speed)]
    assert list(timed.sort_values("started").strategy) == ["ddp", "zero3"] * 2, "two launches each, in turns"
    assert len(tables["peaks"]) == 2
    assert all(row[1] == row[2] != NONE for row in tables["peaks"]), "peaks are estimated to the byte"
    assert {row[0] for row in tables["profile"]} == {"257", "320"}
    assert [row[1] for row in tables["profile"] if row[3] != NONE].count("busy") == 2
    kept = {row[0]: (float(row[1]), int(row[2])) for row in tables["tiers"] if row[2] != NONE}
    assert [paper for _, paper in kept.values()] == [16, 2]
    assert all(paper <= mine < paper + 1 for mine, paper in kept.values()), kept
    assert sum(row[3] != NONE for row in tables["tiers"]) == 2, "steps: files, activations"
