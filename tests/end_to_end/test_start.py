"""Start-up: the commands that run no cell load no more than they need, and a run composes its config once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.command import heed_ctrl_c
from tests.ranks import wait_until

COUNTED = """
import os, sys, time
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from zerobench.cli import run

composed, load = [], ConfigLoaderImpl._load_configuration_impl
ConfigLoaderImpl._load_configuration_impl = lambda *a, **k: (composed.append(1), load(*a, **k))[1]
code = run(sys.argv[1:])
loaded = [name for name in ("torch", "torch._dynamo", "scipy.stats") if name in sys.modules]
print("STARTED", code, len(composed), *loaded, file=sys.stderr)
"""


def started(*arguments: str, cwd: Path) -> list[str]:
    """The exit code, how often Hydra composed, and which of the slow modules a command has loaded."""
    command = [sys.executable, "-c", COUNTED, *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)
    return next(line.split()[1:] for line in done.stderr.splitlines() if line.startswith("STARTED"))


def test_a_dry_run_of_one_cell_composes_twice_and_loads_no_compiler(tmp_path: Path) -> None:
    """Once to check the overrides, once for the cell."""
    assert started("strategy=zero2", "model=gpt_tiny", "--dry-run", cwd=tmp_path) == ["0", "2", "torch"]


LOADS = """
import os, sys
from zerobench.cli import fork_server, run
code = run(sys.argv[1:])
fork_server.end()
slow = ["matplotlib", "transformers", "pyarrow", "pandas", "scipy.stats", "scipy.optimize"]
slow += ["torch._inductor", "torch._dynamo.eval_frame"]
print("LOADED", code, *(name for name in slow if name in sys.modules), file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        ("plan --device-memory 1GiB --gpus 2 model=gpt_tiny strategy=zero3", []),
        ("predict --cluster h100-3200 strategy=zero3 model=gpt_tiny", ["pandas", "pyarrow"]),
        ("status runs", ["pandas", "pyarrow"]),
    ],
)
def test_a_command_loads_what_it_uses(arguments: str, loaded: list[str], tmp_path: Path) -> None:
    """No figures, no models of others, no compiler; tables of runs alone are pandas'."""
    command = [sys.executable, "-c", LOADS, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    told = next(line.split()[2:] for line in done.stderr.splitlines() if line.startswith("LOADED"))
    assert sorted(told) == loaded, done.stderr


def test_what_needs_no_torch_takes_half_a_second_of_cpu(tmp_path: Path) -> None:
    before = os.times()
    subprocess.run(
        [sys.executable, "-m", "zerobench", "status", "--help"], cwd=tmp_path, check=True, capture_output=True
    )
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent <= 0.5


STARTS = """
import gc, sys
from zerobench import cli
started = lambda: print("STARTED", "torch" in sys.modules, file=sys.stderr)
cli.fork_server.start = started
cli.run(sys.argv[1:])
assert gc.isenabled() and gc.get_freeze_count()
"""


@pytest.mark.parametrize("arguments", ["estimate strategy=zero5", "plan --help", "-m --dry-run"])
def test_the_fork_server_loads_torch_while_the_command_does(arguments: str, tmp_path: Path) -> None:
    """Help and a dry run start none. The collector runs after the imports, whose objects it does not visit."""
    command = [sys.executable, "-c", STARTS, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if line.startswith("STARTED")]
    assert (done.returncode, told[:1]) == (0, ["STARTED False"] * ("zero5" in arguments))


def test_a_refused_command_leaves_no_fork_server(tmp_path: Path) -> None:
    """The server, which would load for ten minutes, goes with the command that asked for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\ntime.sleep(600 * ('forkserver' in str(sys.orig_argv)))\n"
    )
    alone = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "zerobench", "strategy=zero5"]
    # without a pipe, whose end would be the server's end
    done = subprocess.run(command, env=alone, stderr=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 2
    wait_until(lambda: not any(_has(p, str(tmp_path).encode()) for p in Path("/proc").glob("[0-9]*/environ")), 60)


def _has(environ: Path, word: bytes) -> bool:
    try:
        return word in environ.read_bytes()
    except OSError:  # another user's, or gone by now
        return False


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


@pytest.mark.parametrize(("where", "how"), [("zerobench.cluster.job", "raised"), ("torch", "lost")])
def test_ctrl_c_during_imports_ends_a_command_quietly(where: str, how: str, tmp_path: Path) -> None:
    """An import may pass over an exception, as parts of numpy and torch do."""
    command = [sys.executable, "-c", INTERRUPTED, where, how, "strategy=zero2", "model=gpt_tiny"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, preexec_fn=heed_ctrl_c,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (130, "")
