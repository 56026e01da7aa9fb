"""The wheel works elsewhere: conf/ and the examples travel in it, and nothing in it needs a checkout."""

import os
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from tests.end_to_end.command import ROOT, SMALL
from zerobench.plots import MODULES as FIGURES

DRAW = f"""
import sys
sys.path.remove({str(ROOT)!r})  # where this environment finds the checkout
from zerobench.cli import run
sys.exit(max(run(["plot", name, "results/runs", "--out", name + ".pdf"]) for name in {FIGURES}))
"""


def test_the_wheel_holds_what_a_command_needs_and_nothing_else(tmp_path: Path) -> None:
    with zipfile.ZipFile(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"]))) as wheel:
        names = set(wheel.namelist())
        (points,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
        assert "zerobench = zerobench:main" in wheel.read(points).decode()
    assert {f"zerobench/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")} <= names
    for suffix in ("py", "html", "css", "js", "txt"):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / "zerobench").rglob(f"*.{suffix}")} <= names
    assert any(name.endswith("share/zerobench/examples/own_strategy.py") for name in names)
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"zerobench", "zerobench_zero"}


def commands_of_the_page(*beginnings: str) -> list[str]:
    """The first command of docs/install.md with each beginning. Without a network a test adds what needs none."""
    lines = (ROOT / "docs/install.md").read_text().splitlines()
    return [next(line for line in lines if line.startswith(beginning)) for beginning in beginnings]


@pytest.mark.thorough
def test_the_wheel_runs_from_another_folder(tmp_path: Path) -> None:
    site = tmp_path / "a site"
    build, install, offline = commands_of_the_page("pip wheel", "pip install dist/", "pip install --no-index")
    here = f"{shlex.quote(sys.executable)} -m pip --quiet --disable-pip-version-check"
    more = f"--no-deps --target {shlex.quote(str(site))}"
    build = build.replace("pip wheel", f"{here} wheel --no-build-isolation").replace(" .", f" {shlex.quote(str(ROOT))}")
    installs = [line.replace("pip install", f"{here} install --upgrade {more}") for line in (install, offline)]
    (tmp_path / "packages").mkdir()
    for command in (build, *installs):
        subprocess.run(command, shell=True, cwd=tmp_path, check=True, timeout=300)
    assert (site / "zerobench/conf/config.yaml").is_file()
    assert (site / "zerobench/commands/replay/page/step.html").is_file()
    assert not [name for name in ("validation", "tools", "tests") if (site / name).exists()]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    where = "import zerobench; print(zerobench.__file__)"
    seen = subprocess.run([sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert str(site) in seen.stdout
    command = [sys.executable, "-m", "zerobench", "strategy=zero3", "world_size=2", *SMALL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    draw = [sys.executable, "-c", DRAW]
    drawn = subprocess.run(draw, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert drawn.returncode == 0, drawn.stderr
    assert {path.stem for path in tmp_path.glob("*.pdf")} == {*FIGURES}
    assert (site / "share/zerobench/examples/own_strategy.py").is_file()
