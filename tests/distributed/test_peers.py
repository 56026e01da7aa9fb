"""The peers under the harness: they train what DDP trains, and are counted as what they are known for."""

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.cells import cell, sound
from tests.distributed.training import assert_close, assert_same
from tests.distributed.variants import engine_of, measured
from tests.ranks import on_ranks
from zerobench import strategies
from zerobench.config.schema import Measure
from zerobench.config.schema_training import IMPLEMENTATIONS, KINDS, AdamW, Bf16, Fp16, Fp32, Rprop, Sgd
from zerobench.data import build_batches
from zerobench.predict.build import build_model, shapes_of
from zerobench.records import CATEGORIES, RunRow
from zerobench.results.tables import Results
from zerobench.strategies.options import WITHOUT_RULE
from zerobench.zero import STAGES

needs_deepspeed = pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra `peers`")
PEERS = {name: spec for name, spec in strategies.specs().items() if spec.tuning}
TORCHS = [name for name, spec in PEERS.items() if spec.requires is None]
NEEDS = [name for name in PEERS if name not in TORCHS]
STEPS = 3
ACCOUNTED = Measure(steps=1, warmup=2, passes="accounted")


def train(
    rank: int, n: int, name: str, tuned: bool, accumulation: int = 1, clip: float | None = None, **more: Any
) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = sound(name, n, tuned=tuned, accumulation=accumulation, **more).config
    engine = engine_of(config)
    batches, losses = build_batches(config.batching, rank, torch.device("cpu")), []
    for step in range(STEPS):
        total = 0.0
        for micro in range(accumulation):
            how = config.strategy.reduces
            with strategies.synchronizing(engine, how, last=micro == accumulation - 1):
                loss = engine(*batches.batch(step, micro)) / accumulation
                engine.backward(loss)
            total += loss.item()
        if clip is not None:
            losses.append(engine.clip_grad_norm_(clip).item())
        engine.step()
        losses.append(total)
    engine.module.train()
    with torch.no_grad():
        losses.append(engine(*batches.batch(0, 0)).item())
    ours = name in STAGES
    return losses, engine.full_state_dict() if ours else whole_state(engine.module)


def whole_state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of the plain module's state, gathered: FSDP2's are DTensors, DeepSpeed's stage 3 leaves empty tensors."""
    from_deepspeed: AbstractContextManager[Any] = nullcontext()
    if any(hasattr(p, "ds_id") for p in module.parameters()):
        from deepspeed import zero

        from_deepspeed = zero.GatheredParameters(list(module.parameters()))
    with from_deepspeed:
        state = {k: v.full_tensor() if isinstance(v, DTensor) else v for k, v in module.state_dict().items()}
        return {name: value.detach().clone() for name, value in state.items()}


def compare(
    rank: int, n: int, sides: Iterable[tuple[str, bool]], exact: bool = False, near: float = 1e-6, **options: Any
) -> None:
    """Trains strategies, tuned or not, as DDP does; weights are compared if `exact`, and else have the same shapes."""
    expected = train(rank, n, "ddp", False, **options)
    assert len(set(expected[0])) > STEPS // 2
    for side in sides:
        found = train(rank, n, *side, **options)
        assert_close(found, expected, near, inf, side)
        if exact:
            assert_same(found, expected, side)


@on_ranks(2, 3, 4)
def test_torchs_peers_train_as_ddp(rank: int, n: int) -> None:
    """Bit for bit at N = 2, where a sum has one order."""
    compare(rank, n, product(TORCHS, (False, True)), exact=n == 2)


@pytest.mark.thorough
@on_ranks(2)
def test_torchs_peers_accumulate_clip_and_take_tiles_and_what_is_refused_fails(rank: int, n: int) -> None:
    """Tiles of matrices are units inside units."""
    compare(rank, n, product(TORCHS, (False, True)), accumulation=2, clip=0.5)
    compare(rank, n, [(name, False) for name in TORCHS if name.startswith("fsdp2")], exact=True, model="tiles")
    errors = {f"{name}/{how}": error_of(name, how) for name, hows in WITHOUT_RULE.items() for how in hows}
    assert errors.keys() == {"sgd/fused", "adagrad/fused", "rprop/foreach", "rprop/loop"}
    assert all("strateg" in error for error in errors.values()), "torch has rules now: refuse no longer"


def error_of(name: str, implementation: str) -> str:
    """The kind of error with which torch's optimizer ends its first update of DTensors."""
    model = torch.nn.Linear(4, 4)
    optimizer = KINDS[name].make(model.parameters(), **IMPLEMENTATIONS[implementation])
    engine = strategies.wrap(sound("fsdp2", 2).config.strategy.values(), model, optimizer)
    engine.backward(engine(torch.ones(2, 4)).sum())
    try:
        engine.step()
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"optimizer": Sgd()}, "fsdp2 with sgd/fused; use optimizer.implementation=foreach or loop"),
        ({"optimizer": Rprop()}, "DTensors of strategy=fsdp2 with rprop/loop; use another optimizer"),
        ({"optimizer": Sgd(implementation="loop")}, ""),
        ({"optimizer": AdamW()}, ""),
        ({"precision": Fp16()}, "precision=fp16: strategy=fsdp2 scales no losses here; use bf16 or fp32"),
        ({"precision": Bf16(gradient_dtype="fp32")}, "whole gradients in bf16 and their shards in fp32; leave it out"),
        ({"precision": Fp32(wire_dtype="bf16")}, "precision.wire_dtype=bf16: strategy=fsdp2 reduces in fp32"),
    ],
)
def test_what_fsdp2_cannot_have_is_refused_before_ranks_start(more: dict[str, Any], words: str) -> None:
    problems = cell("fsdp2", 2, **more).problems
    assert bool(problems) == bool(words)
    assert words in "; ".join(problems)
    assert not cell("zero3", 2, **more).problems


@needs_deepspeed
@pytest.mark.parametrize("accumulation", [1, 2])
@on_ranks(2, 3)
def test_deepspeed_trains_as_ddp(rank: int, n: int, accumulation: int) -> None:
    """Stage 3 adds in another order."""
    compare(rank, n, product(NEEDS, (False, True)), near=3e-6, accumulation=accumulation)


def counted(tmp_path: Path, name: str, **more: Any) -> tuple[RunRow, Results]:
    row, results = measured(tmp_path, name, 2, "wide", **more)
    assert row.passes_agree is not False
    assert row.predicted_states_bytes is row.floor_states_bytes is row.predicted_volume_psi is None
    assert sum(getattr(row, f"peak_{category}_bytes") for category in CATEGORIES) == row.peak_bytes
    assert results.traffic.known.all()
    assert results.memory.predicted_bytes.isna().all()
    return row, results


def root_share(name: str, model: str) -> float:
    """The part of ψ that is in no unit."""
    shapes = shapes_of(build_model(sound(name, 2, model=model).config))
    return sum(shape.numel for shape in shapes if not shape.unit) / sum(shape.numel for shape in shapes)


def test_fsdp2_is_counted(tmp_path) -> None:
    """The MLP's layers divide by two, so nothing is padded: 2ψ + 2ψ + 4ψ bytes of shards, gathers of 1ψ each way. What
    crosses the loopback interface is at least what the strategy sends.
    """
    reshard, results = counted(tmp_path, "fsdp2", measure=ACCOUNTED)
    keep, _ = counted(tmp_path, "fsdp2_no_reshard")
    psi, root = keep.psi, root_share("fsdp2", "wide")
    assert keep.wire_bytes == 4 * psi
    # no less, for others may use the interface meanwhile; gloo's reduce-scatter is an all-reduce: half as much again
    assert keep.loopback_bytes >= 0.98 * 6 * psi
    assert keep.volume_psi == 2
    assert reshard.volume_psi == pytest.approx(3 - root)
    assert (reshard.volume_reduce_scatter_psi, keep.volume_all_gather_psi) == (1, 1)
    assert keep.max_parameters_bytes == 6 * psi
    assert reshard.max_parameters_bytes < keep.max_parameters_bytes
    for row in (keep, reshard):
        assert row.max_optimizer_bytes == pytest.approx(4 * psi, rel=0.001)
        assert 2 * psi <= row.max_gradients_bytes < 6 * psi
        assert row.max_communication_bytes > 0
        assert row.max_master_bytes == 0
        assert row.states_bytes < 16 * psi
    made = results.tensors[results.tensors.category == "parameters"]
    assert "layers.0.weight" in set(made.name)


@pytest.mark.parametrize("tuned", [pytest.param(tuned, marks=pytest.mark.thorough) for tuned in (False, True)])
def test_zero_redundancy_is_counted(tmp_path, tuned: bool) -> None:
    """All-reduce 2ψ and broadcasts 1ψ, half of Adam's states; tuned, no second copy of the gradients as buckets."""
    row, _ = counted(tmp_path, "zero_redundancy", tuned=tuned, measure=ACCOUNTED)
    assert (row.volume_psi, row.volume_all_reduce_psi, row.volume_other_psi) == (3, 2, 1)
    assert row.max_parameters_bytes == 4 * row.psi
    assert row.max_optimizer_bytes == pytest.approx(4 * row.psi, rel=0.2), "whole parameters are shared out"
    assert row.max_communication_bytes == (0 if tuned else 4 * row.psi)
