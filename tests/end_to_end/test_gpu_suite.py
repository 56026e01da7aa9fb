"""The GPU suite end to end on a CPU: every section, and what a plain checkout needs."""

import io
import json
import os
import subprocess
import sys
from contextlib import chdir, redirect_stdout
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import zerobench as package
from tests.end_to_end.command import ROOT
from validation.__main__ import main as validate
from validation.gpu_suite import SECTIONS
from validation.gpu_suite.suite import NONE

PACKAGES = (
    "torch", "pandas", "pyarrow", "matplotlib", "rich", "scipy", "psutil", "transformers", "hydra-core", "omegaconf",
    "antlr4-python3-runtime",
)  # fmt: skip
"""What the documents say that a plain checkout needs."""


def needed() -> set[str]:
    """PACKAGES and what they need themselves, here."""
    found: set[str] = set()
    todo = list(PACKAGES)
    while todo:
        name = canonicalize_name(todo.pop())
        if name not in found:
            found.add(name)
            wanted = [Requirement(line) for line in distribution(name).requires or []]
            todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def test_the_documents_list_what_a_checkout_needs() -> None:
    text = " ".join((ROOT / "docs/how-to/gpu-suite.md").read_text().split())
    assert f"given {', '.join(PACKAGES[:-1])} and {PACKAGES[-1]}" in text


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment with PACKAGES and nothing else, zerobench least of all: it is found by its path alone."""
    site, packages = tmp_path_factory.mktemp("site"), Path(torch.__file__).parents[1]
    for name in needed():
        parts = {path.parts[0] for path in distribution(name).files or [] if path.parts[0] != ".."}
        for part in parts - {"__pycache__"}:
            if not (site / part).exists():
                (site / part).symlink_to(packages / part)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(site)])}


SMALL = ("--small", "--device", "cpu", "--minutes", "1000")
"""The minutes count from the start of this process."""


def told(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "suite.json").read_text())["sections"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The whole suite, in this process: one of its own would load torch twice again."""
    out, printed = tmp_path_factory.mktemp("suite") / "the suite", io.StringIO()
    with chdir(out.parent), redirect_stdout(printed):
        assert validate(["gpu-suite", *SMALL, "--out", str(out)]) == 0
    return out, printed.getvalue()


def test_without_being_installed_it_says_so(checkout: dict[str, str], tmp_path: Path) -> None:
    version = [sys.executable, "-S", "-m", "zerobench", "--version"]
    done = subprocess.run(version, env=checkout, capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.startswith("zerobench not installed, torch 2."), done.stderr


@pytest.mark.slow
def test_every_section_has_its_answer(whole: tuple[Path, str]) -> None:
    out, printed = whole
    sections = told(out)
    assert list(sections) == list(SECTIONS)
    for name, section in sections.items():
        assert {cell["status"] for cell in section["cells"]} == {"ok"}, name
        assert section["title"] in printed
        assert section["table"]["rows"]
        assert not section["differs"]
    assert "not reached: 0" in printed
    summary = (out / "summary.md").read_text()
    assert [line[3:] for line in summary.splitlines() if line.startswith("## ")] == [s.title for s in SECTIONS.values()]


@pytest.mark.slow
def test_its_answers_are_right(whole: tuple[Path, str]) -> None:
    """Ours equal DDP to the bit; FSDP2 in bf16 does not, which shows that a difference is seen."""
    out, _ = whole
    tables = {name: section["table"]["rows"] for name, section in told(out).items()}
    equal = {row[0]: row[2] for row in tables["parity"]}
    assert all("to the bit" in words for name, words in equal.items() if name.startswith("zero"))
    assert equal["fsdp2 bf16"].startswith("within ")
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
