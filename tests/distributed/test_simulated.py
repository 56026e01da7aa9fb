"""A simulated world against real ones: bytes by phase, traffic by operation; fake tensors as well, to the byte."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.cells import cell
from tests.distributed.variants import measured
from validation.equality import AT_ONCE, hold
from validation.variants import VARIANTS
from zerobench.config import schema_memory
from zerobench.config.schema import Measure
from zerobench.config.schema_training import Bf16, Fp16
from zerobench.fake.compiler import is_loaded
from zerobench.host.environment import SIMULATED, rank_environment
from zerobench.ranks.start_ranks import launch
from zerobench.theory.closed_forms import from_json
from zerobench.worker import RankJob, run_rank
from zerobench.zero.comm.hierarchical import connect

ACCOUNTED = Measure(steps=2, warmup=2, passes="accounted")


def of_rank(rank: int, table: pd.DataFrame, *dropped: str) -> pd.DataFrame:
    mine = table[(table["rank"] == rank) & (table["phase"] != "init")].drop(
        columns=["run_id", "predicted_bytes", *dropped], errors="ignore"
    )
    return mine.reset_index(drop=True)


def test_a_rank_of_a_simulated_world_is_one_of_a_real_world(tmp_path: Path) -> None:
    """Every variant, on fake tensors as well: test_a_fake_rank_is_one_of_a_real_world."""
    more: dict[str, Any] = {"zeropp": schema_memory.AllOfZeropp(), "node_size": 2, "precision": Bf16()}
    real, there = measured(tmp_path, "zero3", 4, "words", measure=ACCOUNTED, **more)
    simulated, here = measured(tmp_path, "zero3", 4, "words", backend="simulated", rank=0, **more)
    assert set(here.memory["rank"]) == {0}
    ours, theirs = (of_rank(0, one.memory).drop(columns="allocations") for one in (here, there))
    pd.testing.assert_frame_equal(ours, theirs)  # what lives for a moment in an exchange is the backend's
    pd.testing.assert_frame_equal(of_rank(0, here.traffic), of_rank(0, there.traffic))
    assert simulated.passes_agree is None  # it is accounted, no more
    assert set(here.steps["mode"]) == {"accounted"}
    assert simulated.volume_psi == real.volume_psi
    assert simulated.volume_psi == pytest.approx(simulated.predicted_volume_psi, rel=1e-12)
    assert simulated.predicted_states_bytes == real.predicted_states_bytes
    for name in ("step_s", "tokens_per_s", "loss_first", "loss_last", "loopback_bytes", "resident_bytes"):
        assert getattr(simulated, name) is None


def test_a_rank_is_one_of_a_simulated_world() -> None:
    words = "rank=1: in a real world every rank runs; leave it out, or use backend=simulated"
    assert cell("zero1", 2, rank=1).problems == (words,)
    assert cell("zero1", 2, rank=2, backend="simulated").problems == ("rank=2: must be from 0 to 1, below world_size",)


@pytest.mark.parametrize("strategy", [pytest.param("megatron", marks=pytest.mark.thorough), "zero3"])
def test_large_worlds_are_as_predicted(tmp_path: Path, strategy: str) -> None:
    row, results = measured(tmp_path, strategy, 64, "wide", backend="simulated")
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)
    assert row.volume_psi == pytest.approx(row.predicted_volume_psi, rel=1e-12)
    assert results.memory["rank"].nunique() == 1
    formulas = from_json(row.formulas)
    assert formulas["states"].value == row.floor_states_bytes
    wholes = {name: one.value + sum(term.size for term in one.beyond) for name, one in formulas.items()}
    assert wholes["states"] == row.predicted_states_bytes
    assert wholes["volume"] == pytest.approx(row.volume_psi * row.psi, rel=1e-12)


def ran_deterministic(job: RankJob, tell: Any) -> tuple[bool, bool]:
    """In a process of its own: what a rank has asked torch for when it is done, and whether it loaded the compiler."""
    run_rank(job, tell)
    return torch.are_deterministic_algorithms_enabled(), is_loaded()


def test_deterministic_kernels_are_asked_for_in_the_rank(tmp_path: Path, thorough: bool) -> None:
    for wanted in (False, True) if thorough else (True,):  # torch sets an option of its compiler, too
        one = cell("zero2", 2, "mlp", backend="simulated", deterministic=wanted, measure=Measure(steps=1, warmup=2))
        jobs = [RankJob(one.config, "accounted", 0, str(tmp_path / "rendezvous"), str(tmp_path))]
        assert launch(ran_deterministic, jobs, tmp_path / "logs", 60) == [(wanted, wanted)]


def test_a_larger_world_asks_no_more_of_an_exchange(tmp_path: Path) -> None:
    """As many operators at 1 024 ranks as at 8: a send stands for all that the others would get."""
    jobs = [(n, str(tmp_path / str(n))) for n in (8, 1024)]
    small, large = launch(operators, jobs, tmp_path / "logs", 60)
    assert small == large
    assert max(large) < 20


@pytest.mark.thorough
def test_megatron_with_half_precision_gradients_holds_4_and_16_over_n_bytes(tmp_path: Path) -> None:
    """As its documentation has it (zero/stage1.py): `precision.gradient_dtype=fp16` beside the default fp32."""
    row, _ = measured(tmp_path, "megatron", 4, "wide", backend="simulated", precision=Fp16(gradient_dtype="fp16"))
    assert row.floor_states_bytes == pytest.approx((4 + 16 / 4) * row.psi, rel=1e-6)
    assert row.states_bytes == pytest.approx(row.predicted_states_bytes, rel=0.01)


class Counted(TorchDispatchMode):
    """Counts operators."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def operators(job: tuple[int, str], tell: Any) -> list[int]:
    """Counts operators of a reduce-scatter, an all-gather and an all-to-all among `n` ranks, on the last of them."""
    n, folder = job
    with rank_environment(n - 1, n, "cpu", SIMULATED, folder, threads=1, timeout_s=60) as device:
        comm = connect(None, device)
        full, here = torch.ones(n * 512), torch.empty(n * 512)
        found = []
        for launch in (
            lambda: comm.reduce_scatter(full),
            lambda: comm.all_gather(full),
            lambda: comm.all_to_all(full, here, "reduce_scatter"),
        ):
            with Counted() as counted:
                launch().wait()
            found.append(counted.calls)
        assert full[-512:].eq(1).all()
        assert full[:-512].eq(0).all()
        assert here[:-512].eq(0).all()
        return found


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 3, 4])
def test_a_fake_rank_is_one_of_a_real_world(tmp_path: Path, n: int) -> None:
    """Each variant in one of its worlds; `make fake-equality` has all."""
    chosen = [name for at, (name, one) in enumerate(VARIANTS.items()) if one.sizes[at % len(one.sizes)] == n]
    for at in range(0, len(chosen), AT_ONCE):
        rows = hold({name: VARIANTS[name].config(n) for name in chosen[at : at + AT_ONCE]}, tmp_path / str(at))
        assert [row for row in rows if not row.is_none] == []
