"""The gate over other people's loops: faults of the kind that reached users are replanted in projects outside of the
package, and each is caught, with its category, its bytes and its line.

    project     a training loop in tests/projects/, copied to a folder of its own
    fault       one statement of it, replaced
    gate        the loop watched, `zerobench budget record`, and `budget check` after the change
"""

import os
import re
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import zerobench
from tests.ranks import run_ranks
from zerobench.commands.budget import budget

pytestmark = pytest.mark.thorough

PROJECTS = Path(__file__).parents[1] / "projects"


@dataclass(frozen=True)
class Fault:
    """`was`, a statement of the project, `becomes` another. `line`: the one that then makes `more` bytes of
    `category`, as the gate should find them in `metric`.
    """

    project: str
    was: str
    becomes: str
    category: str
    metric: str
    more: int
    line: str
    ranks: int = 1


LOGITS = Fault(
    "logits", "log.append(loss.item())", "log.append((loss.item(), logits))",
    "activations", "growth_bytes", 2 * 4 * 8 * 16 * 512, "return self.head(hidden)",
)  # fmt: skip
"""Logits are kept for logging: those of each step."""


BUCKET = Fault(
    "bucket", "[torch.zeros(size)]", "[torch.zeros(size), torch.zeros(size)]",
    "communication", "max_communication_bytes", 4 * (2 * 64 * 256 + 64 + 256), "self.buckets = [torch.zeros(size), ",
    ranks=2,
)  # fmt: skip
"""A gradient bucket is allocated twice."""


FAULTS = [LOGITS, BUCKET]


def planted(folder: Path, fault: Fault | None = None, project: str = "") -> Path:
    """A copy of the project, with the fault; returns its file."""
    name = fault.project if fault else project
    text = (PROJECTS / f"{name}.py").read_text()
    if fault:
        assert text.count(fault.was) == 1
        text = text.replace(fault.was, fault.becomes)
    folder.mkdir(parents=True)
    (folder / f"{name}.py").write_text(text)
    return folder / f"{name}.py"


def trained(file: Path, to: Path) -> zerobench.Results | None:
    """The tables of the project's loop, run in its own folder as its user would; None on ranks above 0."""
    spec = spec_from_file_location(f"project_{file.stem}", file)
    module = module_from_spec(spec)
    here = Path.cwd()
    os.chdir(file.parent)
    try:
        spec.loader.exec_module(module)
        return module.train(to).results
    finally:
        os.chdir(here)


def _trained_rank(_rank: int, _ranks: int, file: Path, to: Path) -> None:
    trained(file, to)


def watched(file: Path, ranks: int = 1, to: str = "watched") -> Path:
    folder = file.parent / to
    if ranks == 1:
        trained(file, folder)
    else:
        run_ranks(ranks, _trained_rank, file, folder)
    return folder


def check(file: Path, runs: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code of the check, and the sentences of its regressions."""
    capsys.readouterr()
    report = runs.with_suffix(".xml")
    code = budget(["check", str(file), "--runs", str(runs), "--junit", str(report)])
    causes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("regression: ")]
    assert len(causes) == bool(code), "one fault is one headline"
    return code, [failure.get("message", "") for failure in ElementTree.parse(report).iter("failure")]


def only_row(runs: Path) -> dict[str, Any]:
    return zerobench.load(runs).runs.iloc[-1].to_dict()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.project)
def test_a_replanted_fault_is_caught_with_category_bytes_and_line(fault: Fault, tmp_path: Path, capsys) -> None:
    sound = planted(tmp_path / "sound", project=fault.project)
    before, again = watched(sound, fault.ranks), watched(sound, fault.ranks, "again")
    limits = tmp_path / "limits.yaml"
    assert budget(["record", "--file", str(limits), "--runs", str(before)]) == 0
    assert check(limits, again, capsys) == (0, [])
    changed = planted(tmp_path / "changed", fault)
    after = watched(changed, fault.ranks)
    code, alarms = check(limits, after, capsys)
    assert code == 1
    number = next(n for n, text in enumerate(changed.read_text().splitlines(), 1) if fault.line in text)
    for metric in ("peak_bytes", fault.metric):
        [alarm] = [one for one in alarms if f": {metric} is " in one]
        assert re.findall(r"; ([^;]+:[0-9]+) in ", alarm)[0] == f"{fault.project}.py:{number}"
        assert fault.category in metric or f"; {fault.category} moved most" in alarm
    assert only_row(after)[fault.metric] - only_row(before)[fault.metric] == fault.more
