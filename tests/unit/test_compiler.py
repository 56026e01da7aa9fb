"""torch's compiler: what stands in for it until code compiles, in processes of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cells import cell
from zerobench.fake import compiler
from zerobench.ranks.start_ranks import launch_each
from zerobench.simulation.execute import execute

EAGER = """
import torch
from torch.utils.checkpoint import checkpoint
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.AdamW(model.parameters())
checkpoint(model, torch.ones(1, 2), use_reentrant=False).sum().backward()
optimizer.step()
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
torch.nn.parallel.DistributedDataParallel(model)(torch.ones(1, 2)).sum().backward()
assert not is_loaded()
"""

DISABLED = """
import torch
@torch._dynamo.disable
def alone(value):
    return value + 1
assert alone(1) == 2 and not is_loaded()
try:
    torch.compile(lambda value: alone(value) * 2, backend="eager", fullgraph=True)(torch.ones(1))
except torch._dynamo.exc.Unsupported as error:
    assert "disable" in str(error), error
else:
    raise AssertionError("a disabled function was traced")
"""

LOADED = """
import sys, torch
def known(value):
    return value
held, config = torch._dynamo, torch._dynamo.config
assert held.allow_in_graph(known) is known
{words}
assert is_loaded() and sys.modules["torch._dynamo"] is torch._dynamo is not held
assert all(getattr(module, "__spec__", 1) for name, module in sys.modules.items() if name.startswith("torch._dynamo"))
assert torch._dynamo.exc is sys.modules["torch._dynamo.exc"] and held.exc is torch._dynamo.exc
assert torch._dynamo.config is config is held.config and torch._inductor.config
assert held.disable is torch._dynamo.disable and torch._dynamo.trace_rules.is_callable_allowed(known)
assert torch.compile(known, backend="eager")(torch.ones(1)) == 1
"""


def assert_runs(words: str) -> None:
    """Asserts that code ends well in a process in which the compiler has a stand-in."""
    begin = "from zerobench.fake.compiler import is_loaded, stand_in\nstand_in()\n"
    done = subprocess.run([sys.executable, "-c", begin + words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("words", [EAGER, DISABLED], ids=["eager", "disabled"])
def test_code_that_does_not_compile_loads_no_compiler(words: str) -> None:
    assert_runs(words)


@pytest.mark.slow
@pytest.mark.shown(2)
@pytest.mark.parametrize(
    "words",
    [
        "import torch._inductor.config",
        "from torch._dynamo.exc import Unsupported",
        "torch.fx.experimental.proxy_tensor.make_fx(known, tracing_mode='symbolic')(torch.ones(3))",
    ],
)
def test_any_other_name_loads_the_compiler_once(words: str) -> None:
    assert_runs(LOADED.format(words=words))


def test_the_names_that_are_stood_in_for_are_where_they_were() -> None:
    assert_runs(
        "import torch\nstand_in = vars(torch._dynamo)['_names']\nmode = torch._dynamo.utils.get_optimize_ddp_mode()\n"
        "torch._dynamo.reset()\nassert all(hasattr(torch._dynamo, name) for name in stand_in), stand_in\n"
        "assert torch._dynamo.source.ConstantSource('a').name == 'a' and torch._dynamo.source.RandomValueSource\n"
        "assert torch._dynamo.utils.get_optimize_ddp_mode() == mode\nassert torch._dynamo.trace_rules.clear_lru_cache\n"
    )


@pytest.mark.slow
def test_simulations_load_no_compiler(tmp_path: Path) -> None:
    strategies = ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    results = launch_each(simulated, strategies, tmp_path, 300.0, 2)
    assert results == [("", False)] * len(strategies)


def simulated(strategy: str, _tell: object) -> tuple[str, bool]:
    """The problem of a simulated cell, and whether its process has loaded the compiler."""
    found = execute(cell(strategy, 2, "checkpointed").config)
    return found.problem, compiler.is_loaded()
