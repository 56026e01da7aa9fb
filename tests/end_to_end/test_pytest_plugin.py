"""The pytest plugin: limits by hand and recorded ones hold or fail with metric, bytes, category and line; in ranks too.

Most sessions run in this process. Their toy project is the same everywhere: a model, a loop, and faults to plant.
"""

import re
import textwrap
from glob import escape
from typing import Any

import pytest
import torch._dynamo  # noqa: F401  (a session in this process would load it again, which torch refuses)
import yaml
from torch import nn

import zerobench.budgets.ranks
import zerobench.budgets.verdict  # noqa: F401
from tests.end_to_end.command import ROOT
from zerobench.budgets.verdict import largest_unit_bytes

pytest_plugins = ["pytester"]

TOY = """
import torch
from torch import nn

WIDTH = 32
kept = []


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH)])
        self.head = nn.Linear(2 * WIDTH, 8)

    def forward(self, x):
        for block in self.blocks:
            x = torch.relu(block(x))
        return self.head(x)


def train(model, optimizer, steps=3, keep=0, wide=0):
    for _ in range(steps):
        loss = model(torch.ones(4, WIDTH)).square().mean()
        loss.backward()
        spare = torch.zeros(wide)
        optimizer.step()
        optimizer.zero_grad()
        if keep:
            kept.append(torch.zeros(keep))
        del spare


def make():
    torch.manual_seed(0)
    model = Toy()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)
"""
PSI = 33 * 32 + 33 * 64 + 65 * 8

TEST = """
import pytest, torch
from toy import make, train, Toy


@pytest.mark.zerobench({limits})
def test_step(zerobench_watch{more}):
    model, optimizer = make()
    with zerobench_watch(model, optimizer):
        train(model, optimizer, {faults})
"""


@pytest.fixture
def toy(pytester: pytest.Pytester) -> pytest.Pytester:
    """A project with the toy model; its tests are `write`'s."""
    pytester.makepyfile(toy=TOY)
    pytester.makeini("[pytest]\naddopts = --strict-markers -p no:cacheprovider")
    pytester.syspathinsert()
    return pytester


def write(toy: pytest.Pytester, limits: str = "", faults: str = "", more: str = "", also: str = "") -> None:
    """Writes the project's test file."""
    toy.makepyfile(test_toy=TEST.format(limits=limits, faults=faults, more=more) + textwrap.dedent(also))


def said(result: pytest.RunResult) -> str:
    """Joins the output of a session to one line."""
    return " ".join(" ".join(result.outlines).split())


def recorded(toy: pytest.Pytester, name: str) -> dict[str, Any]:
    """The cells that a test file's record has, of the one environment."""
    environments = yaml.safe_load((toy.path / f"{name}.zerobench.yaml").read_text())["environments"]
    assert len(environments) == 1
    cells: dict[str, Any] = next(iter(environments.values()))["cells"]
    return cells


def line_with(toy: pytest.Pytester, words: str) -> int:
    """The number of the toy's only line that begins so."""
    lines = (toy.path / "toy.py").read_text().splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if line.strip().startswith(words)]
    return number


def test_the_largest_unit_is_what_is_gathered_at_once() -> None:
    """By blocks, with what is in none as one more; in a model of FSDP2's by its groups."""

    class FSDPModule(nn.Sequential):
        """Named as the class that torch mixes into a module's own."""

    class Toy(nn.Module):
        def __init__(self, kind: type[nn.Sequential], head: int) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([kind(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Linear(4, 8)])
            self.head = nn.Linear(8, head)

    assert largest_unit_bytes(Toy(nn.Sequential, 1)) == 4 * (20 + 20)
    assert largest_unit_bytes(Toy(nn.Sequential, 32)) == 4 * 9 * 32
    assert largest_unit_bytes(Toy(FSDPModule, 1)) == 4 * (40 + 9), "the second block is not a group of its own"
    assert largest_unit_bytes(nn.Linear(3, 2)) == 4 * 8


def test_a_marker_holds_a_loop_and_names_what_breaks_it(toy: pytest.Pytester) -> None:
    """Metric, bytes, category and line of code, each limit for itself; a limit that holds is not told, and an exact one
    fails both ways.
    """
    write(toy, 'peak="<= 9 psi", gradients="4 psi", leaks=0, volume=0')
    toy.runpytest_inprocess().assert_outcomes(passed=1)
    write(toy, 'peak="<= 9 psi", gradients="4 psi", leaks=0, volume=0', faults="keep=256, wide=100_000")
    result = toy.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    line, grown = line_with(toy, "spare = "), line_with(toy, "kept.append")
    result.stdout.fnmatch_lines(
        [
            "test_step: peak_bytes, growth_bytes: 2 of 4 limits broken (plain, one rank on cpu)",
            f"  peak_bytes is * above its ceiling of {9 * PSI:,} B *; temporary * KiB",
            '    written as peak="<= 9 psi"',
            f"    toy.py:{line} in train: 390.6 KiB (*",
            "  growth_bytes is 2,048 B (2.0 KiB): 2,048 B (2.0 KiB) above its ceiling of 0 B",
            "    written as leaks=0; of the growth most is temporary: 2,048 B (2.0 KiB)",
            f"    toy.py:{grown} in train: 2.0 KiB (*",
        ]
    )
    assert "gradients_bytes" not in said(result)
    assert "Traceback" not in said(result)
    write(toy, 'gradients="5 psi", peak="<= 1e0 GiB"', also="def test_without():\n    pass\n")
    result = toy.runpytest_inprocess()
    result.assert_outcomes(failed=1, passed=1)
    below = f"  max_gradients_bytes is {4 * PSI:,} B *: {PSI:,} B *below its budget of {5 * PSI:,} B*"
    result.stdout.fnmatch_lines([below, '    written as gradients="5 psi"'])


@pytest.mark.thorough
def test_a_record_is_made_held_and_made_anew(toy: pytest.Pytester) -> None:
    """Recorded once, the same loop passes; a fault fails with the line that moved, and less is a note."""
    write(toy)
    result = toy.runpytest_inprocess()
    assert "test_step has no limit and no record; give its marker a limit, or record it with: pytest" in said(result)
    toy.runpytest_inprocess("--zerobench-record").assert_outcomes(passed=1)
    path = toy.path / "test_toy.zerobench.yaml"
    cells = recorded(toy, "test_toy")
    assert cells["test_step"]["limits"]["max_gradients_bytes"] == 4 * PSI
    assert cells["test_step"]["limits"]["growth_bytes"] == 0
    toy.runpytest_inprocess().assert_outcomes(passed=1)
    write(toy, faults="wide=50_000")
    result = toy.runpytest_inprocess()
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        ["  peak_bytes is *", f"    toy.py:{line_with(toy, 'spare = ')} in train: +195.3 KiB (*"]
    )
    result = toy.runpytest_inprocess("--zerobench-record")
    assert "test_step: peak_bytes" in said(result), "what moved is told"
    assert "1 record written" in said(result)
    write(toy)
    result = toy.runpytest_inprocess()
    result.assert_outcomes(passed=1)
    assert re.search("test_step: peak_bytes is .* below its budget", said(result))
    text = path.read_text()
    path.write_text(text.replace("cpu, torch", "tpu, torch"))
    assert "test_step has no record for cpu, torch 2." in said(toy.runpytest_inprocess())
    path.write_text(text.replace("peak_bytes", "peek_bytes"))
    assert "peek_bytes is none of" in said(toy.runpytest_inprocess())


FAULTS = {
    "nothing is measured": (
        "@pytest.mark.zerobench(leaks=0)\ndef test():\n    pass",
        "takes no zerobench_watch, so nothing would be measured",
    ),
    "no marker": ("def test(zerobench_watch):\n    pass", "takes zerobench_watch and has no limits"),
    "no name": ("'<= 1 GiB'", "'<= 1 GiB' has no name; write limits as peak="),
    "no number": ("peak='much'", "'much' is no size; write a number and a unit"),
    "a volume in bytes": ("volume='<= 2 MiB'", "a volume is counted in psi"),
    "twice": ("peak='1 GiB', peak_bytes='2 GiB'", "peak_bytes has two limits"),
    "no ranks": ("leaks=0, ranks=0", "ranks=0; it is a whole number from 1 to"),
    "nothing to hold": ("recorded=False", "recorded=False and no limit"),
    "not called": ("leaks=0", "the test did not call zerobench_watch"),
    "no step": ("leaks=0 #\n    with zerobench_watch(*make()):\n        pass", "watch: the loop ended without a step"),
    "never left": ("leaks=0 #\n    watch = zerobench_watch(*make()).start()", "is warming; leave it: write it as"),
    "an error": (
        "leaks=0 #\n    with pytest.raises(OSError), zerobench_watch(*make()):\n        raise OSError('no data')",
        "crash: OSError: no data; nothing was judged",
    ),
    "a TestCase": (
        "import unittest\nclass TestIt(unittest.TestCase):\n"
        "    @pytest.mark.zerobench(leaks=0)\n    def test(self):\n        pass",
        "a method of unittest.TestCase takes no fixtures",
    ),
}  # fmt: skip


@pytest.mark.thorough
def test_what_is_wrong_is_one_sentence(toy: pytest.Pytester) -> None:
    """Each in a file of its own, in one session; a sentence stands alone, without a traceback."""
    head = "import pytest\nfrom toy import make\n"
    for number, (body, _) in enumerate(FAULTS.values()):
        if "def test" not in body:
            arguments, _, inside = body.partition("#")
            inside = inside.strip("\n") or "    pass"
            body = f"@pytest.mark.zerobench({arguments})\ndef test(zerobench_watch):\n{inside}"
        (toy.path / f"test_fault{number}.py").write_text(f"{head}{body}\n")
    result = toy.runpytest_inprocess("-v")
    assert "Traceback" not in said(result)
    outcomes = result.parseoutcomes()
    assert outcomes.get("passed", 0) == 0
    assert outcomes["failed"] + outcomes["errors"] == len(FAULTS)
    for name, (_, sentence) in FAULTS.items():
        assert sentence in said(result), name


RANKS = """
import pytest, os, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from toy import make, train


@pytest.fixture
def wrapped():
    model, optimizer = make()
    return DistributedDataParallel(model), optimizer


@pytest.mark.zerobench(volume=2, all_reduce=2, leaks=0, recorded=True, ranks=2)
@pytest.mark.parametrize("times", [1])
def test_holds(zerobench_watch, wrapped, tmp_path, times):
    assert os.environ["WORLD_SIZE"] == "2" and dist.get_world_size() == 2
    ports = [None, None]
    dist.all_gather_object(ports, os.environ["MASTER_PORT"])
    assert ports[0] == ports[1] and os.environ["RANK"] == str(dist.get_rank())
    (tmp_path / "own").touch(exist_ok=False)
    with zerobench_watch(*wrapped):
        train(*wrapped)


@pytest.mark.zerobench(volume=1, ranks=2)
def test_breaks(zerobench_watch, wrapped):
    with zerobench_watch(*wrapped):
        train(*wrapped)


@pytest.mark.zerobench(leaks=0, ranks=2)
def test_one_fails(zerobench_watch, wrapped):
    print("said by", dist.get_rank())
    assert dist.get_rank() == 0, "only rank 0 goes on"
    with zerobench_watch(*wrapped):
        train(*wrapped)


@pytest.mark.zerobench(leaks=0, ranks=2)
def test_one_dies(zerobench_watch):
    if dist.get_rank() == 1:
        os.abort()
    dist.barrier()


@pytest.mark.zerobench(leaks=0, ranks=1)
def test_skips(zerobench_watch):
    pytest.skip("not here")

"""


@pytest.mark.thorough
def test_ranks(toy: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh gloo ranks: rank 0 judges and records; the first failure and a death are told."""
    toy.makepyfile(test_ranks=RANKS)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = toy.runpytest_inprocess("--zerobench-record")
    result.stdout.fnmatch_lines(["::error title=volume_psi of test_breaks::*"])
    result.assert_outcomes(passed=1, failed=3, skipped=1)
    words = said(result)
    assert "test_breaks: volume_psi: 1 of 1 limits broken (ddp, 2 ranks on gloo) volume_psi is 2 ψ: 1 ψ" in words
    assert "all_reduce in backward: 2 ψ" in words
    assert "on rank 1 of 2: wrapped = " not in words
    assert "AssertionError: only rank 0 goes on" in words
    assert "-- Captured stdout call, rank 1 -- said by 1" in words
    assert "rank 1 was killed by signal 6 (SIGABRT)" in words
    cells = recorded(toy, "test_ranks")
    assert list(cells) == ["test_holds[1]"]
    assert cells["test_holds[1]"]["limits"]["volume_psi"] == 2


@pytest.mark.thorough
def test_the_tutorial_is_what_happens(pytester: pytest.Pytester) -> None:
    """Its project passes once it is recorded; with its change the session prints what the page shows."""
    page = (ROOT / "docs/tutorials/memory-gate.md").read_text()
    blocks = dict(re.findall(r'^```\w+ title="(.*?)"\n(.*?)^```', page, re.MULTILINE | re.DOTALL))
    for name in ("train.py", "test_memory.py"):
        (pytester.path / name).write_text(blocks[name])
    pytester.syspathinsert()
    here = ("-k", "not ddp", "-p", "no:cacheprovider")
    pytester.runpytest_inprocess("--zerobench-record", *here).assert_outcomes(passed=2, deselected=1)
    change = blocks["the change"].strip()
    code = re.sub(r"history\.append\(loss.*", change, blocks["train.py"])
    assert code != blocks["train.py"]
    (pytester.path / "train.py").write_text(code)
    pytester.runpytest_inprocess(*here).stdout.fnmatch_lines([escape(line) for line in blocks["pytest"].splitlines()])


@pytest.mark.thorough
def test_workers_of_xdist_write_one_file(toy: pytest.Pytester) -> None:
    """Two workers record four tests; each holds its own afterwards, in one process."""
    also = """
    @pytest.mark.zerobench
    @pytest.mark.parametrize("steps", range(3, 6))
    def test_many(zerobench_watch, steps):
        model, optimizer = make()
        with zerobench_watch(model, optimizer):
            train(model, optimizer, steps)
    """
    write(toy, also=also)
    result = toy.runpytest_subprocess("-n2", "--zerobench-record")
    result.assert_outcomes(passed=4)
    assert "4 records written" in said(result)
    cells = recorded(toy, "test_toy")
    assert len(cells) == 4
    peaks = {cell["limits"]["peak_bytes"] for cell in cells.values()}
    assert len(peaks) == 1, "neither the worker nor what ran before changes a figure"
    toy.runpytest_inprocess().assert_outcomes(passed=4)


@pytest.mark.thorough
def test_a_session_without_such_tests_loads_nothing(toy: pytest.Pytester) -> None:
    """Neither torch nor pandas; without the plugin at all nothing of it is there."""
    toy.makepyfile(
        test_plain="""
        import sys

        def test_plain():
            assert "zerobench.budgets.plugin" in sys.modules
            assert not {"torch", "pandas", "zerobench.budgets.verdict", "zerobench.watching"} & set(sys.modules)
        """
    )
    toy.runpytest_subprocess("-p", "no:xdist").assert_outcomes(passed=1)
    result = toy.runpytest_subprocess("-p", "no:zerobench")
    result.assert_outcomes(failed=1)
