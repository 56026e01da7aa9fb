"""Watching loops of two ranks: what is written by hand has the figures that the harness has for its own strategies, in
every tier, from the first step on or a later one; and certificates name failures between ranks.
"""

import gc
import inspect
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import zerobench
from tests.cells import MODELS, cell, sound
from tests.distributed.variants import engine_of
from tests.ranks import run_ranks
from zerobench import ExpectedTraining, worker
from zerobench.config.cell import CellConfig
from zerobench.config.schema import Gpt
from zerobench.config.schema_memory import CpuOffload, NvmeOffloadConfig, PartsOfZeropp
from zerobench.config.schema_training import Bf16
from zerobench.predict.build import build_model
from zerobench.probes.source_lines import shown_path
from zerobench.sweep.aggregate import join
from zerobench.sweep.cell import new_row
from zerobench.watching import WatchError
from zerobench.watching.held_tensors import BEFORE, leave_out
from zerobench.zero.modules.wrapping import default_units
from zerobench.zero.parameters import access

WARMUP, STEPS = 2, 2
STRATEGIES = ("ddp", "zero_redundancy", "zero1", "zero2", "zero3", "fsdp2")
REPEATED = (
    "zero_redundancy", "zero1", "zero2", "own parameter", "rounded first", "mixed", "factored",
    "pipeline", "head_added_later", "averaged_now_and_then",
)  # fmt: skip
"""Loops that wait for `make test-all`: every run has one whole, one in our shards and one in others' shards."""
EXACT = ("parameters", "gradients", "master", "optimizer", "communication", "activations", "states")
MOVED = ("rank", "phase", "operator", "collective", "kind", "unit", "group_size", "control")
OWN = {"zero1": [4, 160], "zero2": [4, 160], "zero3": [4, 160], "fsdp2": [4, 8]}
"""Bytes that an engine keeps beside the model's states, counted as temporary by the harness, too: flags of the ranks'
agreement, and the NaN in place of an absent parameter, which outlives its engine; FSDP2's mesh.
"""


def batch_of(config: CellConfig, rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    tokens = torch.randint(256, (config.micro_batch, config.sequence + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def built(name: str, config: CellConfig) -> tuple[Any, Any]:
    """The two objects that a user's loop has: what is called, and what has the step."""
    if name == "fsdp2":
        return sharded(config=config)
    options = config.strategy.values()
    bucket = options.get("bucket_bytes", 0)
    model = build_model(config)
    adam: dict[str, Any] = {"lr": 1e-3, "fused": True}
    if name.startswith("zero") and name != "zero_redundancy":
        sizes = {"bucket_bytes": bucket} if bucket else {}
        return (zerobench.initialize(model, torch.optim.AdamW(model.parameters(), **adam), strategy=name, **sizes),) * 2
    optimizer: Any = torch.optim.AdamW(model.parameters(), **adam)
    if name == "zero_redundancy":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, **adam)
    views = options["gradient_as_bucket_view"]
    return DistributedDataParallel(model, bucket_cap_mb=bucket / 2**20, gradient_as_bucket_view=views), optimizer


def train(rank: int, config: CellConfig, called: Any, optimizer: Any, steps: int = WARMUP + STEPS + 1) -> list[float]:
    losses = []
    for step in range(steps):
        tokens, targets = batch_of(config, rank, step)
        loss = called(tokens, targets)
        if optimizer is called:
            called.backward(loss)
            called.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        del loss, tokens, targets
    return losses


def watched(rank: int, n: int, name: str) -> dict[str, Any] | None:
    """Watches the steps of a loop alone, and returns what is found."""
    config = cell(name, n).config
    called, optimizer = built(name, config)
    with zerobench.watch(called, optimizer, warmup=WARMUP, steps=STEPS) as watch:
        ledger = watch.probe.ledger
        before = sorted(one.bytes for one in ledger._live.values() if one.name == BEFORE and one.bytes)
        losses = train(rank, config, called, optimizer)
    if watch.results is None:
        return None
    run, results = watch.results.runs.iloc[0].to_dict(), watch.results
    peaks = results.lines[results.lines["at"] == "peak"].groupby("rank").bytes.sum()
    totals = results.memory.query("phase == 'step' and category == 'total'").set_index("rank").max_bytes
    made = results.tensors[results.tensors.category.isin(("activations", "temporary"))]
    assert (made.source != "").all()
    assert made.module.str.startswith("blocks.").any()  # "" is the root
    return {
        "run": run, "before": before, "losses": losses, "traffic": moved(results.traffic.to_dict("records")),
        "lines": dict(peaks) == dict(totals), "watched": results.steps.query("rank == 0").loss.tolist(),
    }  # fmt: skip


def measured(rank: int, config: CellConfig, folder: str = "") -> Any:
    """The accounted pass of an ordinary run, on a rank of the same strategy."""
    access._nan.clear()  # a process has them once, and an engine before would have made them
    job = worker.RankJob(config, "accounted", rank, None, folder)
    with mock.patch.object(worker, "rank_environment", return_value=nullcontext(torch.device("cpu"))):
        return worker.run_rank(job, lambda _: None)


def moved(rows: list[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    found: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        key = tuple(row[column] for column in MOVED)
        found[*key, "calls"] += row["calls"]
        found[*key, "payload"] += row["payload_bytes"]
        found[*key, "volume"] += round(row["volume_elements"])
    return found


def sentence(rank: int, leaves: str) -> str:
    """The sentence that this rank gets where rank 1 does as `leaves` says: it has no step, an error, or no end."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    watch = zerobench.watch(model, optimizer, timeout_s=0.3 if leaves == "no end" else 60)
    try:
        with nullcontext(watch.start()) if leaves == "no end" and rank else watch:
            for _ in range(3 if rank == 0 or leaves == "no end" else 0):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            if rank and leaves == "an error":
                raise ValueError("here")
    except (WatchError, ValueError) as error:
        return str(error)
    finally:
        dist.barrier()  # no end before rank 0 has waited
        if watch.state != "stopped":
            watch.stop()
    return ""


def inside_of_ddp(rank: int, n: int) -> dict[str, Any] | None:
    """A loop over DDP whose watch is given the model inside, as a trainer's callback is."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    ddp, optimizer = DistributedDataParallel(model), torch.optim.SGD(model.parameters(), lr=0.1)
    with zerobench.watch(model, optimizer) as watch:
        for _ in range(4):
            ddp(torch.randn(4, 8)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return None if watch.results is None else watch.results.runs.iloc[0].to_dict()


def loops_and_records(rank: int, n: int) -> tuple[dict[str, Any], dict[str, Any]]:
    loops = {name: watched(rank, n, name) for name in STRATEGIES}
    gc.collect()
    return loops, {name: measured(rank, cell(name, n).config) for name in STRATEGIES}


def sentences_and_inside(rank: int, n: int) -> tuple[dict[str, str], dict[str, Any] | None]:
    sentences = {leaves: sentence(rank, leaves) for leaves in ("no step", "an error", "no end")}
    return sentences, inside_of_ddp(rank, n)


@pytest.fixture(scope="module")
def both() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return run_ranks(2, loops_and_records, timeout_s=300)


@pytest.fixture(scope="module")
def early() -> list[tuple[dict[str, str], dict[str, Any] | None]]:
    return run_ranks(2, sentences_and_inside)


@pytest.mark.thorough
@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loop_written_by_hand_costs_what_the_harness_says(name: str, both: list[Any]) -> None:
    loop, records = both[0][0][name], [mine[1][name] for mine in both]
    row = new_row(cell(name, 2))
    tables = join(row, cell(name, 2).config, records)
    run = loop["run"]
    assert run["strategy"] == name
    assert loop["lines"]
    # the harness holds nothing that it did not make: what the watch met has nothing of the model's
    assert loop["before"] == OWN.get(name, [])
    others = 4 if name == "fsdp2" else 0
    assert run["kept_bytes"] == row.kept_bytes + others == sum(loop["before"])
    assert run["peak_bytes"] == row.peak_bytes + others
    for category in EXACT:
        key = f"max_{category}_bytes" if category != "states" else "states_bytes"
        assert run[key] == getattr(row, key), category
        if category != "states":
            assert run[f"peak_{category}_bytes"] == getattr(row, f"peak_{category}_bytes"), category
    assert loop["watched"] == loop["losses"][:-1]
    assert run["growth_bytes"] == row.growth_bytes == 0
    assert (run["psi"], run["volume_psi"]) == (row.psi, row.volume_psi)
    assert loop["traffic"] == moved([asdict(one) for one in tables["traffic"]])


def test_a_rank_that_leaves_early_is_named(early: list[Any]) -> None:
    (zero, _), (one, _) = early
    without = "the loop ended without a step: the optimizer took no step"
    assert (zero["no step"], one["no step"]) == (f"watch: rank 1: {without}", f"watch: {without}")
    assert (zero["an error"], one["an error"]) == ("watch: rank 1: it left the loop with ValueError", "here")
    words = "watch: no record came from rank 1 within 0.3 s; every rank must watch its loop to the end"
    assert (zero["no end"], one["no end"]) == (words, "")


def test_a_model_is_known_to_be_in_ddp_whose_buffers_are_control_traffic(early: list[Any]) -> None:
    run = early[0][1]
    assert (run["strategy"], run["model"], run["volume_psi"]) == ("ddp", "Sequential", 2.0)
    assert run["control_bytes"] == 4 * 2 * 8 + 8  # mean and variance of 8 features, and a count
    assert run["growth_bytes"] == 0


MICRO, CLIP, UPDATES = 2, 0.5, 3
MODELS["one_block"] = Gpt(layers=1, hidden=16, heads=2)
CONFIG = cell("ddp", 2, "one_block", bucket_bytes=8192).config
PARAMETERS = 16
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(
    policy: MixedPrecisionPolicy | None = None, dtype: torch.dtype = torch.float32, config: CellConfig = CONFIG
) -> tuple[Any, Any]:
    model, options = build_model(config).to(dtype), {"mesh": init_device_mesh("cpu", (2,))}
    options |= {"mp_policy": policy} if policy else {}  # type: ignore[dict-item]
    for unit in (*(unit for _, unit in default_units(model)), model):
        fully_shard(unit, **options)  # type: ignore[call-overload]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def train_in_parts(
    called: Any, optimizer: Any, ranks: Any, syncs: bool = False, local_norm: bool = False, averages: bool = False
) -> None:
    """Steps of MICRO micro-batches; `syncs`: each of them is reduced. `local_norm`: of the rank's own shards.
    `averages`: the loop itself averages gradients.
    """
    for step in range(UPDATES):
        for micro in range(MICRO):
            parts = [batch_of(CONFIG, rank, 10 * step + micro) for rank in ranks]
            inputs, is_last = [torch.cat(some) for some in zip(*parts, strict=True)], micro == MICRO - 1
            if hasattr(called, "set_requires_gradient_sync"):
                called.set_requires_gradient_sync(is_last or syncs)
            delays = hasattr(called, "no_sync") and not (is_last or syncs)
            with called.no_sync() if delays else nullcontext():
                loss = called(*inputs) / MICRO
                (called if optimizer is called else torch.autograd).backward(loss)
        for parameter in called.parameters() if averages else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2
        if optimizer is called:
            called.clip_grad_norm_(CLIP)
        elif local_norm:
            norm = sum(p.grad.to_local().square().sum() for p in called.parameters()).sqrt()
            torch._foreach_mul_([p.grad.to_local() for p in called.parameters()], float(CLIP / norm))
        else:
            torch.nn.utils.clip_grad_norm_(called.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()


def certificate_of(rank: int, expected: ExpectedTraining, build: Callable[[], Any], **how: Any) -> Any:
    with leave_out():  # the loops before
        torch.manual_seed(0)
        called, optimizer = build()
        with zerobench.watch(called, optimizer, verify=expected) as watch:
            train_in_parts(called, optimizer, [rank], **how)
        return watch.certificate


def summed() -> tuple[Any, Any]:
    """DDP whose gradients are the sum over the ranks: a division is missing."""
    model, optimizer = built("ddp", CONFIG)
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: 2 * gradient)
    return model, optimizer


def noisy() -> tuple[Any, Any]:
    """DDP whose optimizer adds noise, and each rank draws its own."""
    model, optimizer = built("ddp", CONFIG)
    torch.manual_seed(dist.get_rank())

    def add_noise(*_: object) -> None:
        for parameter in model.parameters():
            parameter.grad.add_(1e-3 * torch.randn_like(parameter))

    optimizer.register_step_pre_hook(add_noise)
    return model, optimizer


def leaving_out() -> tuple[Any, Any]:
    """DDP that leaves a parameter to each rank, such as an expert's."""
    model = build_model(CONFIG)
    name = next(name for name, parameter in model.named_parameters() if parameter.dim() > 1)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, [name])
    return DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=1e-3)


def plain() -> tuple[Any, Any]:
    model = build_model(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def rounded() -> tuple[Any, Any]:
    """A model whose weights are rounded before the engine makes its masters."""
    model = build_model(CONFIG).bfloat16()
    engine = zerobench.initialize(model, torch.optim.AdamW(model.parameters(), lr=1e-3), strategy="zero1")
    return engine, engine


def train_simply(rank: int, build: Callable[[], tuple[Any, Any, Any]], expected: Any = True) -> Any:
    """Watches three updates of a small loop. `build` returns what is watched, the function that makes a loss of a
    batch, and the optimizer.
    """
    with leave_out():
        torch.manual_seed(0)
        watched, forward, optimizer = build()
        with zerobench.watch(watched, optimizer, verify=expected) as watch:
            for step in range(UPDATES):
                x = torch.randn(4, 16, generator=torch.Generator().manual_seed(10 * step + rank))
                forward(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return watch.certificate


def small(kind: Any = torch.optim.AdamW) -> tuple[Any, Any]:
    ddp = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4)))
    return ddp, kind(ddp.parameters(), 1e-2)


def never_synchronized() -> tuple[Any, Any, Any]:
    ddp, optimizer = small()

    def forward(x: torch.Tensor) -> torch.Tensor:
        ddp.require_backward_grad_sync = False  # as in no_sync()
        return ddp(x)

    return ddp, forward, optimizer


def bypassed() -> tuple[Any, Any, Any]:
    ddp, optimizer = small()
    return ddp.module, lambda x: ddp.module(x), optimizer


def head_added_later() -> tuple[Any, Any, Any]:
    ddp, _ = small()
    ddp.module.append(torch.nn.Linear(4, 2))
    return ddp, ddp, torch.optim.AdamW(ddp.parameters(), 1e-2)


def factored() -> tuple[Any, Any, Any]:
    ddp, optimizer = small(torch.optim.Adafactor)
    return ddp, ddp, optimizer


def averaged_now_and_then() -> tuple[Any, Any, Any]:
    ddp, _ = small()
    own = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp.register_comm_hook(PostLocalSGDState(None, own, start_localSGD_iter=1), post_localSGD_hook)
    averager = PeriodicModelAverager(period=8, warmup_steps=1)
    return ddp, ddp, PostLocalSGDOptimizer(torch.optim.SGD(ddp.parameters(), 0.1), averager)


def pipeline() -> tuple[Any, Any, Any]:
    """Half a model on each rank."""
    rank = dist.get_rank()
    model = torch.nn.Linear(16, 8) if rank == 0 else torch.nn.Linear(8, 4)

    def forward(x: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            y = model(x)
            dist.send(y.detach(), 1)
            return y
        y = torch.empty(4, 8)
        dist.recv(y, 0)
        return model(y)

    return model, forward, torch.optim.AdamW(model.parameters(), 1e-3)


SIMPLE = (never_synchronized, bypassed, head_added_later, factored, averaged_now_and_then, pipeline)


def judged(rank: int, n: int, reference: Path, thorough: bool) -> dict[str, list[str]]:
    """Loop -> checks that differ, as found; only rank 0 has them."""
    honest = ExpectedTraining(reference=reference, accumulation=MICRO, reductions=1, clip=CLIP)
    wire = ExpectedTraining(wire={"all_gather": "bfloat16"}, accumulation=MICRO)
    names = [name for name in STRATEGIES if thorough or name not in REPEATED]
    made = {name: certificate_of(rank, honest, partial(built, name, CONFIG)) for name in names}
    made["fsdp2, no delay"] = certificate_of(rank, honest, sharded, syncs=True)
    made["sum"] = certificate_of(rank, ExpectedTraining(reference=reference), summed)
    made["noise"] = certificate_of(rank, ExpectedTraining(), noisy)
    made["own loop"] = certificate_of(rank, ExpectedTraining(reference=reference, clip=CLIP), plain, averages=True)
    made["local norm"] = certificate_of(rank, ExpectedTraining(clip=CLIP), sharded, local_norm=True)
    if thorough:
        made["no delay"] = certificate_of(rank, honest, partial(built, "ddp", CONFIG), syncs=True)
        made["mixed"] = certificate_of(rank, wire, partial(sharded, MIXED))
        made["ignored wire"] = certificate_of(rank, wire, sharded)
        made["low masters"] = certificate_of(rank, ExpectedTraining(), partial(sharded, dtype=torch.bfloat16))
        made["own parameter"] = certificate_of(rank, ExpectedTraining(), leaving_out)
        made["rounded first"] = certificate_of(rank, ExpectedTraining(reference=reference, clip=CLIP), rounded)
    made |= {
        build.__name__: train_simply(rank, build) for build in SIMPLE if thorough or build.__name__ not in REPEATED
    }
    made["same data"] = train_simply(0, lambda: ((all_of := small())[0], *all_of))
    declared = ExpectedTraining(data="distinct")
    made["same data, declared"] = train_simply(0, lambda: ((all_of := small())[0], *all_of), declared)
    found = {
        name: [f"{row.subject}: {row.found}; {row.why}" for row in one.different + one.unusual] if one else []
        for name, one in made.items()
    }
    for name in ("ddp", "own loop"):
        rows = made[name].rows if made[name] else ()
        found[f"{name}, lines"] = [row.source for row in rows if "per step and rank" in row.subject]
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> dict[str, list[str]]:
    folder = tmp_path_factory.mktemp("reference")
    torch.manual_seed(0)
    model = build_model(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with zerobench.watch(model, optimizer, to=folder, verify=True):
        train_in_parts(model, optimizer, range(2))
    result: dict[str, list[str]] = run_ranks(2, judged, folder, thorough)[0]
    return result


HONEST = ("mixed", "own loop", "own parameter", "rounded first", "factored", "pipeline")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in REPEATED else ()) for name in (*STRATEGIES, *HONEST)],
)
def test_an_honest_loop_gets_no_accusation(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


def test_collectives_are_named_by_the_line_of_the_loop(found: dict[str, list[str]]) -> None:
    lines, first = inspect.getsourcelines(train_in_parts)
    backward, average = (
        next(number for number, line in enumerate(lines, first) if words in line)
        for words in (".backward(loss)", "dist.all_reduce")
    )
    where = f"{shown_path(__file__)}:{{}} in train_in_parts"
    assert found["ddp, lines"] == [where.format(backward)]
    assert found["own loop, lines"] == [where.format(average)]


def test_ranks_that_train_apart_are_named(found: dict[str, list[str]], thorough: bool) -> None:
    values, reductions = found["never_synchronized"]
    assert values.startswith(
        "values of all 4 parameters on all ranks: they differ in all 4 parameters from step 1 on; "
    )
    assert reductions == (
        "each gradient is reduced over the ranks: 0 times in a step; DDP reduces each gradient at least once per update"
    )
    assert found["bypassed"][1].endswith("wrapper was not called, only the module in it: its gradients are not reduced")
    if thorough:
        (head,) = found["head_added_later"]
        assert "they differ in 3.weight, 3.bias from step 1 on" in head
        averaged, _ = found["averaged_now_and_then"]
        assert "a hook of DDP reduces" in averaged


def test_ranks_with_the_same_samples_are_unusual_and_different_if_declared(found: dict[str, list[str]]) -> None:
    words = "losses of the ranks: equal to the bit in every step on several ranks; "
    assert found["same data"] == [f"{words}nothing is declared; have these ranks the same samples?"]
    assert found["same data, declared"] == [f"{words}it is declared"]


@pytest.mark.thorough
def test_lower_dtypes_than_declared_are_named(found: dict[str, list[str]]) -> None:
    assert [line.split(" bytes in ")[1] for line in found["ignored wire"]] == ["float32; it is declared"]
    *dtypes, lost = found["low masters"]
    assert [line.split(";")[0] for line in dtypes] == [
        f"{kind} of all {PARAMETERS} parameters: bfloat16" for kind in ("masters", "moments")
    ]
    assert "norm.weight" in lost  # 1 + the learning rate is 1 in bf16
    assert ": never changed;" in lost


def test_failures_between_ranks_are_named(found: dict[str, list[str]], thorough: bool) -> None:
    for name in ("no delay", "fsdp2, no delay")[0 if thorough else 1 :]:  # the same collectives in each micro-batch
        (again,) = found[name]
        said, each = again.split(" times: ")[0], re.findall(r"1 \(([\d,]+ collectives, [\d,]+ bytes)\)", again)
        assert said == "each gradient is reduced over the ranks: 2"
        assert len(each) == MICRO
        assert len(set(each)) == 1
        assert ") in its micro-batches, 0 (" in again
    diverged, *later = found["noise"]
    assert diverged.startswith(f"values of all {PARAMETERS} parameters on all ranks: they differ in ")
    assert later == []
    assert "it is 2 times the reference's, as a sum over 2 ranks in place of the mean" in found["sum"][0]
    assert [line.split(":")[0] for line in found["local norm"]] == ["after backward → at the update"]


LATE = 3
"""Steps before a watch that comes late."""
FILES: dict[str, Any] = {"block_bytes": 8192, "buffers": 10, "depth": 2}
DIFFERENCES = PartsOfZeropp(secondary_shards=True, differences=True)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2, host": ("zero2", {"offload": CpuOffload()}),
    "zero2, a part, late updates": ("zero2", {"offload": CpuOffload(delayed=True, delayed_after=1)}),
    "zero1, a part": ("zero1", {"offload": CpuOffload(gradients=False, fraction=0.4)}),
    "zero3, host, bf16": ("zero3", {"offload": CpuOffload(parameters=True), "precision": Bf16()}),
    "zero2, files": ("zero2", {"offload": NvmeOffloadConfig(**FILES)}),
    "zero3, files, bf16": ("zero3", {"offload": NvmeOffloadConfig(parameters=True, **FILES), "precision": Bf16()}),
    "zero3, differences": ("zero3", {"zeropp": DIFFERENCES, "precision": Bf16(), "node_size": 1}),
}
SHOWN = "zero2, host"
"""In every run, with a checkpoint loaded on the way."""
Sizes = dict[tuple[str, str], tuple[int, int | None]]
"""Tier and category -> largest bytes, and bytes at the peak."""


def sizes_of(rows: list[Any]) -> Sizes:
    kept = [row for row in rows if row.phase == "step" and row.category not in ("allocated", "outside_ledger")]
    return {(row.tier, row.category): (row.max_bytes, row.at_peak_bytes) for row in kept}


def watched_sizes(rank: int, config: CellConfig, folder: str, before: int, saves: bool = False) -> Sizes:
    access._nan.clear()
    with leave_out():
        engine = engine_of(config, folder)
        train(rank, config, engine, engine, before)
        if saves:
            engine.save(f"{folder}/saved")
            engine = engine_of(config, folder)
            engine.load(f"{folder}/saved")
        with zerobench.watch(engine, warmup=WARMUP, steps=STEPS) as watch:
            train(rank, config, engine, engine)
    return sizes_of(watch.probe.memory_rows(rank))


def all_sizes(rank: int, n: int, cases: list[str], folder: str) -> dict[str, list[Sizes]]:
    found = {}
    for name in cases:
        strategy, options = CASES[name]
        config = sound(strategy, n, "one_block", **options).config
        found[name] = [sizes_of(measured(rank, config, folder).memory)]
        found[name] += [watched_sizes(rank, config, folder, before) for before in (0, LATE)]
        if name == SHOWN:
            found[name].append(watched_sizes(rank, config, folder, LATE, saves=True))
    return found


@pytest.fixture(scope="module")
def sizes(thorough: bool, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Sizes]]]:
    return run_ranks(2, all_sizes, [*CASES] if thorough else [SHOWN], str(tmp_path_factory.mktemp("files")))


@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one == SHOWN else pytest.mark.thorough) for one in CASES]
)
def test_watched_and_measured_runs_agree_to_the_byte(name: str, sizes: list[dict[str, list[Sizes]]]) -> None:
    for of_rank in sizes:
        run, first, late, *loaded = of_rank[name]
        tiers = {tier for (tier, _), (most, _) in run.items() if most}
        expected = {"device"} if "zeropp" in CASES[name][1] else {"device", "host"}
        assert tiers == (expected | {"nvme"} if "files" in name else expected)
        assert first == run
        assert late == run
        for watch in loaded:  # a load leaves a flag, which is temporary
            states = {key: size for key, size in run.items() if key[1] not in ("temporary", "total")}
            assert {key: watch[key] for key in states} == states
