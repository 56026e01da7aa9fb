"""A rank's loop knows an engine and a probe by their protocols alone, and every engine and probe has all of them."""

from __future__ import annotations

import inspect

import pytest

from zerobench.probes import PASSES, Probe
from zerobench.strategies import Engine
from zerobench.strategies.ddp import DdpEngine
from zerobench.strategies.ddp_masters import MasterDdpEngine
from zerobench.strategies.deepspeed import DeepspeedEngine
from zerobench.strategies.fsdp2 import Fsdp2Engine
from zerobench.strategies.peer_engine import AdaptedEngine
from zerobench.strategies.zero_redundancy import ZeroRedundancyEngine
from zerobench.zero import STAGES

ENGINES = [
    *STAGES.values(), DdpEngine, MasterDdpEngine, Fsdp2Engine, ZeroRedundancyEngine, DeepspeedEngine, AdaptedEngine
]  # fmt: skip

OF_INSTANCES = {"module", "optimizer", "scaler", "peak_bytes", "may_wait"}
"""Members that may be attributes, which a class need not have."""


def members(protocol: type) -> set[str]:
    return {
        name for name in vars(protocol) if not name.startswith("_") or name in ("__call__", "__enter__", "__exit__")
    }


@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_has_all_that_is_asked_of_it(engine: type) -> None:
    asked = members(Engine)
    assert {"__call__", "backward", "step", "settle", "reduced_gradients", "gradient_holders"} <= asked
    missing = {name for name in asked - OF_INSTANCES if not hasattr(engine, name)}
    assert not missing
    for name in asked - OF_INSTANCES:
        asks, has = inspect.getattr_static(Engine, name), inspect.getattr_static(engine, name)
        assert isinstance(asks, property) == isinstance(has, property), name


@pytest.mark.parametrize("mode", PASSES)
def test_a_probe_has_all_that_it_is_told(mode: str) -> None:
    missing = {name for name in members(Probe) - OF_INSTANCES if not hasattr(PASSES[mode], name)}
    assert not missing
