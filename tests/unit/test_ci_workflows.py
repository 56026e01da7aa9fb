"""The workflows of examples/ci: pinned actions, least permissions, no text of a stranger in a shell."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_budget_of_a_loop import HERE, KEPT, loops, recorded
from tests.unit.test_documents import FENCE, ROOT
from zerobench.judging.reports import MARKER

FOLDER = ROOT / "examples/ci"
GATE, CALLER, TREND = (FOLDER / f"{name}.yml" for name in ("memory-gate", "pull-request", "trend"))
PAGE = ROOT / "docs/how-to/ci-gate.md"
PINNED = re.compile(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}")

fixtures = loops, recorded


def read(path: Path) -> dict[str, Any]:
    content: dict[Any, Any] = yaml.safe_load(path.read_text())
    return {"on" if key is True else str(key): value for key, value in content.items()}  # yaml 1.1: on is true


def steps(job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(job.get("steps", []))


def test_permissions_are_the_least() -> None:
    gate = read(GATE)
    assert gate["permissions"] == read(CALLER)["permissions"] == {}
    assert {name: job["permissions"] for name, job in gate["jobs"].items()} == {
        "check": {"contents": "read"}, "comment": {"pull-requests": "write"},
    }  # fmt: skip
    (caller,) = read(CALLER)["jobs"].values()
    assert caller["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert set(read(CALLER)["on"]) == {"pull_request", "push"}, "pull_request_target would give strangers a token"
    assert not any("run" in step for step in steps(gate["jobs"]["comment"])), "what may write runs no code of others"
    (checkout,) = [step for step in steps(gate["jobs"]["check"]) if "checkout" in step.get("uses", "")]
    assert checkout["with"]["persist-credentials"] is False
    assert "head.repo.full_name == github.repository" in gate["jobs"]["comment"]["if"]


def test_actions_are_pinned_and_scripts_take_no_expression() -> None:
    for job in [*read(GATE)["jobs"].values(), *read(TREND)["jobs"].values()]:
        assert job["timeout-minutes"]
        for step in steps(job):
            if "uses" in step:
                assert PINNED.fullmatch(step["uses"]), step
            assert "${{" not in step.get("run", "") + step.get("with", {}).get("script", ""), step
    for line in (GATE.read_text() + TREND.read_text()).splitlines():
        assert "uses:" not in line or re.search(r"# v\d+\.\d+\.\d+$", line), "the version beside its hash"


def test_the_job_that_pushes_the_trend_runs_no_code_of_the_project() -> None:
    """And the tool reads the file that the check writes, in the form that write_benchmark has."""
    trend = read(TREND)
    assert trend["permissions"] == {}
    assert {name: job["permissions"] for name, job in trend["jobs"].items()} == {
        "measure": {"contents": "read"}, "chart": {"contents": "write"},
    }  # fmt: skip
    assert not any("run" in step for step in steps(trend["jobs"]["chart"]))
    tool = steps(trend["jobs"]["chart"])[-1]["with"]
    assert tool["tool"] == "customSmallerIsBetter"
    (figures,) = [step["run"] for step in steps(trend["jobs"]["measure"]) if step.get("name") == "Figures"]
    assert f"--benchmark-json {tool['output-file-path']}" in figures


def test_the_caller_gives_inputs_that_the_gate_has() -> None:
    inputs = read(GATE)["on"]["workflow_call"]["inputs"]
    assert all("default" in one and "type" in one for one in inputs.values())
    (caller,) = read(CALLER)["jobs"].values()
    assert caller["uses"] == f"./.github/workflows/{GATE.name}"
    assert set(caller["with"]) <= set(inputs)
    used = set(re.findall(r"inputs\.([\w-]+)", GATE.read_text()))
    assert used == set(inputs)
    block = next(block for language, block in FENCE.findall(PAGE.read_text()) if "memory-gate.yml" in block)
    (shown,) = yaml.safe_load(block)["jobs"].values()
    assert shown == caller, "the page shows the example"


def test_the_marker_of_the_script_is_that_of_the_comment() -> None:
    (script,) = [
        step["with"]["script"] for step in steps(read(GATE)["jobs"]["comment"]) if "script" in step.get("with", {})
    ]
    assert f"'{MARKER}'" in script


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_the_step_of_the_check_runs(loops: Path, recorded: Path, tmp_path: Path) -> None:
    """As a runner runs it: bash -e, its inputs in the environment."""
    (step,) = [step for step in steps(read(GATE)["jobs"]["check"]) if step.get("name") == "Check"]
    variables = {"MEASURE": "python train.py", "RUNS": str(loops / "after"), "BUDGETS": str(recorded), "STRICT": "true"}
    assert set(variables) == set(step["env"])
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    around = {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(ROOT), "PYTHONPATH": str(ROOT), "PATH": path}
    environment = os.environ | around | variables | {"GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md")}
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"].replace("budget/", f"{tmp_path}/budget/")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert f"::error file={HERE.relative_to(ROOT)},line={KEPT}," in done.stdout
    assert {path.name for path in (tmp_path / "budget").iterdir()} == {"junit.xml", "comment.md", "benchmark.json"}
    assert (tmp_path / "summary.md").read_text().startswith("### Memory and traffic: ")
