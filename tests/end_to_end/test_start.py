"""Start-up: the commands that run no cell load no more than they need, and a run composes its config once."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.command import heed_ctrl_c


def run_script(script: str, *arguments: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    """A script that stands for the program `zerobench`, with a command's arguments."""
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, **more)


LOADS = """
import sys
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from zerobench.cli import fork_server, run

composed, load = [], ConfigLoaderImpl._load_configuration_impl
ConfigLoaderImpl._load_configuration_impl = lambda *a, **k: (composed.append(1), load(*a, **k))[1]
run(sys.argv[1:])
ranks = ["fork server"] * (fork_server.process_id() is not None)
fork_server.end()
slow = ["matplotlib", "transformers", "pyarrow", "pandas", "scipy.stats", "scipy.optimize"]
slow += ["torch._inductor", "torch._dynamo.eval_frame"]
print("LOADED", len(composed), *ranks, *(name for name in slow if name in sys.modules), sep=",", file=sys.stderr)
"""


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        ("strategy=zero2 model=gpt_tiny --dry-run", ["pandas", "pyarrow"]),
        ("status runs", ["pandas", "pyarrow"]),
        ("plan --device-memory 1GiB --gpus 2 model=gpt_tiny strategy=zero3", ["fork server"]),
        ("predict --cluster h100-3200 strategy=zero3 model=gpt_tiny", ["fork server", "pandas", "pyarrow"]),
    ],
)
def test_a_command_loads_what_it_uses(arguments: str, loaded: list[str], tmp_path: Path) -> None:
    """No figures, no models of others, no compiler; pandas for tables of runs, the fork server for ranks alone. A dry
    run composes twice, to check the overrides and for the cell.
    """
    done = run_script(LOADS, *arguments.split(), cwd=tmp_path)
    composed, *told = next(line.split(",")[1:] for line in done.stderr.splitlines() if line.startswith("LOADED"))
    assert sorted(told) == loaded, done.stderr
    assert composed == "2" or "--dry-run" not in arguments


def test_what_needs_no_torch_takes_half_a_second_of_cpu(tmp_path: Path) -> None:
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "zerobench", "status", "--help"], cwd=tmp_path, check=True, capture_output=True
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent <= 0.5


INTERRUPTED = """
import contextlib, os, signal, sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == where:
            with contextlib.suppress(*lost):
                os.kill(os.getpid(), signal.SIGINT)

where, lost = sys.argv.pop(1), [BaseException] * (sys.argv.pop(1) == "lost")
sys.meta_path.insert(0, CtrlC())
from zerobench import main
main()
"""


@pytest.mark.parametrize(
    ("where", "how"), [("zerobench.host.job", "raised"), pytest.param("torch", "lost", marks=pytest.mark.thorough)]
)
def test_ctrl_c_during_imports_ends_a_command_quietly(where: str, how: str, tmp_path: Path) -> None:
    """An import may pass over an exception, as parts of numpy and torch do."""
    words = (where, how, "strategy=zero2", "model=gpt_tiny")
    done = run_script(INTERRUPTED, *words, cwd=tmp_path, preexec_fn=heed_ctrl_c)
    assert (done.returncode, done.stderr) == (130, "")
