"""The whole cross product of what composes: what is refused is refused in a sentence, and the engine agrees."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import compositions
from tests.cells import cell
from tests.compositions import CORE, core, problems_of
from zerobench.config import combinations as composition
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig
from zerobench.config.schema_training import Fp16
from zerobench.host.environment import rank_environment
from zerobench.zero import initialize
from zerobench.zero.offload.disk import DiskError

SENTENCE = re.compile(r"[a-z_.]+(=\S+)?: [^\n]+[^.\n]")
"""`key=value: what is wrong; what would be right`."""

LEAVE = ("cpu, parameters", "cpu, parameters alone", "nvme, parameters alone")
"""Where parameters are asked to leave."""

RULES = {
    "whole parameters on every rank; use zero3": lambda c: c["offload"] in LEAVE and c["strategy"] != "zero3",
    "there is nothing to fuse": lambda c: (
        (c["strategy"], c["buffers"]) == ("zero3", "fused") and c["precision"] in ("fp32", "bf16, wide")
    ),
    "it is for zero3": lambda c: c["zeropp"] != "none" and c["strategy"] != "zero3",
    "loss scaling must judge": lambda c: (c["offload"], c["precision"]) == ("cpu, delayed", "fp16"),
    "all 4 ranks are one node": lambda c: (
        (c["strategy"], c["zeropp"], c["node_size"], c["shard_group"]) == ("zero3", "hpz", "none", "none")
    ),
    "its shards are over all ranks": lambda c: (
        c["zeropp"] != "none" and c["strategy"] == "zero3" and c["shard_group"] != "none"
    ),
}
"""Part of a sentence -> of which combinations it is to be said."""


@pytest.mark.slow
def test_what_makes_no_sense_is_refused_in_a_sentence_each_and_nothing_else(thorough: bool) -> None:
    """In every run every seventh combination: no axis has a multiple of seven choices, so all choices occur."""
    refused, every = 0, 1 if thorough else 7
    for one in islice(core(), None, None, every):
        problems = problems_of(one, 4)
        wanted = [words for words, applies in RULES.items() if applies(one)]
        refused += bool(problems)
        assert len(problems) == len(wanted), (one, problems)
        assert all(SENTENCE.fullmatch(problem) for problem in problems), problems
        assert all(any(words in problem for problem in problems) for words in wanted), (one, problems)
    assert 10_000 < refused * every < 50_000


@pytest.fixture(scope="module")
def world() -> Iterator[None]:
    """Four ranks, of which this is one and the others are not there."""
    with rank_environment(0, 4, "cpu", "simulated", "", threads=torch.get_num_threads(), timeout_s=10):
        yield


def refusal(strategy: str, **options: Any) -> str:
    """Returns the engine's refusal, or nothing."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    try:
        initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), strategy, **options)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.usefixtures("world")
def test_the_engine_refuses_what_the_config_refuses_and_no_more(tmp_path: Path) -> None:
    """But for buffers, which are a word of the config's alone."""
    seen: set[Any] = set()
    for one in core():
        key = tuple(one[axis] for axis in ("strategy", "offload", "node_size", "shard_group", "zeropp"))
        if one["buffers"] == "fused" or key in seen:
            continue
        seen.add(key)
        config = compositions.config_of(one, 4)
        problems = composition.validate(config)
        heard = refusal(one["strategy"], **composition.engine_options(config, str(tmp_path)))
        assert bool(problems) == bool(heard), (one, problems, heard)
        assert "\n" not in heard
    assert len(seen) == 3 * len(CORE["offload"]) * 2 * 2 * len(CORE["zeropp"])


ODD: list[tuple[str, dict[str, Any], str]] = [
    ("zero2", {"offload": CpuOffload(optimizer=False, gradients=False)}, "nothing is selected"),
    ("zero2", {"offload": CpuOffload(optimizer=False, fraction=0.5)}, "offload.fraction: 0.5 applies to the optimizer"),
    ("zero2", {"offload": CpuOffload(fraction=0.0)}, "offload.fraction=0.0: must be at least 1e-09"),
    ("zero2", {"offload": CpuOffload(delayed=True, fraction=0.5)}, "offload.delayed_after"),
    ("zero2", {"offload": CpuOffload(delayed=True), "precision": Fp16()}, "use bf16 or fp32"),
    ("zero2", {"offload": NvmeOffloadConfig(optimizer=False)}, "they need an optimizer there"),
    ("zero2", {"offload": NvmeOffloadConfig(block_bytes=5000)}, "use a multiple of 4096"),
    ("zero2", {"offload": NvmeOffloadConfig(buffers=7)}, "offload.buffers=7: must be at least 8"),
    ("zero2", {"offload": NvmeOffloadConfig(path="/no/such/folder")}, "there is no such folder"),
    ("zero2", {"offload": NvmeOffloadConfig(parameters=True)}, "use zero3"),
    ("ddp", {"offload": CpuOffload()}, "strategy=ddp does not offload here"),
    ("megatron", {"offload": NvmeOffloadConfig()}, "strategy=megatron does not offload here"),
    ("fsdp2", {"node_size": 2}, "strategy=fsdp2 knows no groups of ranks"),
    ("zero1", {"node_size": 3}, "node_size=3: must be a divisor of world_size=4"),
    ("zero1", {"node_size": 4, "shard_group": 2}, "a shard group must be a node"),
]


@pytest.mark.parametrize(("strategy", "more", "words"), ODD)
def test_values_that_cannot_be_are_refused_before_ranks_start(strategy: str, more: dict[str, Any], words: str) -> None:
    problems = cell(strategy, 4, "mlp", **more).problems
    assert any(words in problem for problem in problems), problems
    assert all(SENTENCE.fullmatch(problem) for problem in problems), problems


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(("strategy", "more", "words"), [one for one in ODD if one[0] == "zero2" or one[0] == "zero1"])
def test_the_engine_refuses_them_as_well(strategy: str, more: dict[str, Any], words: str, tmp_path: Path) -> None:
    config = cell(strategy, 4, "mlp", **more).config
    options = composition.engine_options(config, str(tmp_path))
    options |= config.precision.options_of(strategy)
    try:
        heard = refusal(strategy, **options)
    except DiskError as error:  # the path is looked at when it is used
        heard = str(error)
    assert heard
    assert "\n" not in heard
