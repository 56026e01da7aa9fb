"""Checkpoints on real ranks: resharded, asynchronous, agreed upon, from tier to tier; saves in measured steps, which
change no loss.
"""

import warnings
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests import zoo
from tests.cells import cell
from tests.distributed.training import assert_equal, loss_of, train_on
from tests.ranks import on_ranks, run_ranks
from zerobench.config.schema import Measure
from zerobench.results.tables import Results, load
from zerobench.sweep.cell import run_cell
from zerobench.zero import STAGES, LossScaling, NvmeOffload, Offload, Zeropp, initialize
from zerobench.zero.checkpoint import storage
from zerobench.zero.checkpoint.contents import facts_of, merge, saved_tensors
from zerobench.zero.checkpoint.save_load import ranks_of

BATCH = 12
BUCKETS = {"zero1": 4096, "zero2": 2048, "zero3": 4096, "megatron": 8192}


def fresh(
    model_name: str, optimizer_name: str, stage: str, shift: float = 0.0, dtype: Any = None, **options: Any
) -> Any:
    """An engine; with `shift` its weights are others than every engine's in these tests."""
    model = zoo.build(model_name).to(dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(shift)
    optimizer = zoo.OPTIMIZERS[optimizer_name](model.parameters())
    return initialize(model, optimizer, stage, bucket_bytes=BUCKETS[stage], **options)


def steps(engine: Any, numbers: range, clip: float | None = None) -> list[float]:
    """Losses of the whole batch, which is the same at every N; the mean over this engine's ranks."""
    n, losses = engine.comm.averaged_ranks, []
    rank = dist.get_rank(engine.comm.group) if n > 1 else 0
    for number in numbers:
        engine.module.calls = number  # what a model with unused parameters uses of them
        loss = loss_of(engine(*zoo.tokens(rank, n, number, rows=BATCH // n)))
        engine.backward(loss)
        if clip is not None:
            engine.clip_grad_norm_(clip)
        engine.step()
        losses.append(sum(gathered(engine, loss.item())) / n)
    return losses


def gathered(engine: Any, value: Any) -> list[Any]:
    if engine.comm.averaged_ranks == 1:
        return [value]
    values = [None] * engine.comm.averaged_ranks
    dist.all_gather_object(values, value, group=engine.comm.group)
    return values


def whole_state(engine: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Everything that training goes on from, put together from all ranks of the engine."""
    chunks: dict[str, dict[int, torch.Tensor]] = {}
    with engine.placement.in_memory(write_back=False):
        parts = gathered(engine, (saved_tensors(engine, copy=True), facts_of(engine, {})))
    for flats, _ in deepcopy(parts):
        for name, own in flats.items():
            chunks.setdefault(name, {}).update(own)
    tensors = {name: torch.cat([own[start] for start in sorted(own)]) for name, own in chunks.items()}
    return tensors, merge([facts for _, facts in deepcopy(parts)])["optimizer"]


def assert_same(here: Any, there: Any) -> None:
    (tensors, optimizer), (others, other_optimizer) = here, there
    assert tensors.keys() == others.keys()
    assert_equal(others, tensors)
    assert optimizer == other_optimizer


def groups_of(rank: int) -> dict[int, Any]:
    """Process groups of 1, 2 and 3 of three ranks; that of 2 does not begin with rank 0."""
    groups = {1: dist.new_group([0]), 2: dist.new_group([1, 2]), 3: dist.group.WORLD}
    members = {1: [0], 2: [1, 2], 3: [0, 1, 2]}
    return {n: groups[n] for n in groups if rank in members[n]}


ALL = [(stage, size) for stage in STAGES for size in (1, 2, 3)]
SOME = [("zero1", 3), ("zero2", 1), ("zero3", 2), ("megatron", 3)]


def reshard(rank: int, n: int, folder: str, kinds: list[tuple[str, int]], models: dict[str, str]) -> int:
    """Each model, saved under each (stage, N) and loaded under some of them. Returns how many were loaded."""
    mine = groups_of(rank)
    return sum(reshard_one(mine, Path(folder) / model, kinds, model, models[model]) for model in models)


def reshard_one(mine: dict[int, Any], folder: Path, kinds: list[tuple[str, int]], model: str, optimizer: str) -> int:
    loaded, every = 0, len(kinds) // 4 + 1
    for number, (stage, size) in enumerate(kinds):
        path, outcome = folder / f"{stage}-{size}", None
        if size in mine:
            engine = fresh(model, optimizer, stage, group=mine[size])
            steps(engine, range(2))
            assert engine.save(path, user_state={"stage": stage}) is None
            outcome = whole_state(engine), steps(engine, range(2, 4))
        state, losses = shared(outcome, source=2 if size == 2 else 0)
        for other_stage, other_size in kinds[number % every :: every]:
            if other_size in mine:
                engine = fresh(model, optimizer, other_stage, group=mine[other_size], shift=1.0)
                assert engine.load(path) == {"stage": stage}
                assert_same(whole_state(engine), state)
                alike = (other_stage, other_size) == (stage, size)
                check_losses(steps(engine, range(2, 4)), losses, exactly=alike, model=model, sizes={size, other_size})
                loaded += 1
    return loaded


def check_losses(mine: list[float], theirs: list[float], exactly: bool, model: str, sizes: set[int]) -> None:
    if exactly:
        assert mine == theirs
    elif model != "convolutions" or len(sizes) == 1:  # BatchNorm's statistics are of the micro-batch
        assert mine == pytest.approx(theirs, rel=1e-6), f"N = {sizes}"


def shared(value: Any, source: int) -> Any:
    values = [value]
    dist.broadcast_object_list(values, src=source)
    return values[0]


@on_ranks(2)
def test_training_goes_on_while_a_save_is_written(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    """A save that fails says so on all ranks and harms nothing."""
    write = storage.write
    for stage in STAGES if thorough else ("zero3",):
        path = tmp_path / stage
        engine = fresh("tied", "adamw", stage)
        steps(engine, range(1))
        handle = engine.save(path, asynchronous=True)
        state = whole_state(engine)
        losses = steps(engine, range(1, 4))
        handle.wait()
        assert handle.done()
        second = engine.save(path, asynchronous=True)  # over the first; load waits for it
        newer = whole_state(engine)
        engine.load(path)
        assert second.done()
        assert_same(whole_state(engine), newer)
        engine.save(path)
        steps(engine, range(2))

        storage.write = fails if rank == n - 1 else write
        failing = engine.save(path, asynchronous=True)
        with pytest.raises(RuntimeError, match=f"was not written: rank {n - 1}: .*disk is full"):
            failing.wait()
        engine.save(tmp_path / f"other-{stage}", asynchronous=True)
        with pytest.raises(RuntimeError, match="disk is full"):  # it was not waited for: the next one raises it
            engine.save(path)
        with pytest.raises(RuntimeError, match="disk is full"):
            engine.save(path)
        storage.write = write
        engine.load(path)
        assert_same(whole_state(engine), newer)
        dist.barrier()
        assert not [one for one in tmp_path.iterdir() if "partial" in one.name or "other" in one.name]
        fourth = fresh("tied", "adamw", stage)
        steps(fourth, range(1))
        assert_same(whole_state(fourth), state)
        assert steps(fourth, range(1, 4)) == losses
        dist.barrier()


def fails(*_: Any) -> None:
    raise OSError("the disk is full")


@on_ranks(2)
def test_what_one_rank_sees_all_refuse(rank: int, n: int, tmp_path: Path) -> None:
    """With one sentence, and nothing is changed."""
    engine = fresh("tied", "adamw", "zero3")
    steps(engine, range(1))
    engine.save(tmp_path / "good")
    state = whole_state(engine)
    steps(engine, range(1, 2))
    changed = whole_state(engine)
    with pytest.raises(ValueError, match=r"it has no checkpoint\.json"):
        engine.load(tmp_path / ("good" if rank == 0 else "not there"))
    assert_same(whole_state(engine), changed)
    engine.save(tmp_path / "newer")
    for weights_only in (False, True):  # as if another process saved while rank 1 had not read the index yet
        with pytest.raises(ValueError, match="the ranks read different saves"):
            engine.load(tmp_path / ("good" if rank == 0 else "newer"), weights_only=weights_only)
    assert_same(whole_state(engine), changed)
    if rank == 1:  # a gradient on one rank only
        engine.update.used.add(0)
    with pytest.raises(ValueError, match="save after step"):
        engine.save(tmp_path / "never")
    with pytest.raises(RuntimeError, match=r"rank 1: .*set is not JSON serializable"):
        ranks_of(engine).each(lambda: {1} if rank == 1 else [1])
    engine.zero_grad()
    engine.load(tmp_path / "good")
    assert_same(whole_state(engine), state)


def export(rank: int, n: int, folder: str, kinds: list[tuple[str, str]]) -> None:
    """Exports the weights of each model under a stage, beside its full state."""
    for model, stage in kinds:
        engine = fresh(model, "adamw", stage)
        steps(engine, range(1))
        engine.export_safetensors(f"{folder}/{model}-{stage}.safetensors")
        state = engine.full_state_dict()
        if rank == 0:
            torch.save(state, f"{folder}/{model}-{stage}.pt")


@on_ranks(2)
def test_masters_and_loss_scale(rank: int, n: int, tmp_path: Path) -> None:
    """Masters of fp16 are saved under one stage, and loaded into other segments of another and into fp32."""
    half = {"dtype": torch.float16, "loss_scaling": LossScaling(initial=512.0, interval=2)}
    first = fresh("tied", "adamw", "zero2", tile_bytes=1024, **half)
    steps(first, range(3))
    first.save(tmp_path / "half")
    state = whole_state(first)
    third = fresh("tied", "adamw", "zero3", persistence_numel=60, **half)
    for other in (third, fresh("tied", "adamw", "megatron", **half)):
        other.load(tmp_path / "half")
        assert_same(whole_state(other), state)
        assert other.loss_scale == first.loss_scale == 1024.0
        assert_equal(other.full_state_dict(), first.full_state_dict())
    wide = fresh("tied", "adamw", "zero1")
    wide.load(tmp_path / "half")
    assert_same(whole_state(wide), state)
    assert steps(first, range(3, 5)) == steps(third, range(3, 5))


@pytest.mark.parametrize(("kinds", "least"), [(SOME, 12), pytest.param(ALL, 40, marks=pytest.mark.thorough)])
def test_any_stage_and_n_loads_what_any_other_saved(tmp_path: Path, kinds: list[tuple[str, int]], least: int) -> None:
    assert sum(run_ranks(3, reshard, str(tmp_path), kinds, {"tied": "adamw"})) > least


@pytest.mark.thorough
def test_models_of_every_kind(tmp_path: Path) -> None:
    models = {
        "unused": "sgd_momentum", "rich": "adagrad", "convolutions": "nadam", "adapted": "asgd", "lists": "adam_amsgrad"
    }  # fmt: skip
    assert sum(run_ranks(3, reshard, str(tmp_path), SOME, models)) > 40


def test_exported_weights_are_the_plain_modules(tmp_path: Path, thorough: bool) -> None:
    """Each model under one stage by turns, unless all are asked for."""
    models, stages = ("tied", "unused", "rich", "convolutions", "lists"), list(STAGES)
    kinds = [(model, stage) for model in models for stage in stages]
    kinds = kinds if thorough else [(model, stages[number % 4]) for number, model in enumerate(models)]
    run_ranks(2, export, str(tmp_path), kinds)
    for model, stage in kinds:
        exported = load_file(tmp_path / f"{model}-{stage}.safetensors")
        expected = torch.load(tmp_path / f"{model}-{stage}.pt", weights_only=True)
        assert exported.keys() == expected.keys()
        assert_equal(exported, expected)
        zoo.build(model).load_state_dict(exported, strict=True)
    assert not list(tmp_path.glob("*partial*"))


def test_a_save_deletes_what_saves_have_left_and_nothing_of_the_users(tmp_path: Path) -> None:
    engine = fresh("tied", "adamw", "zero2")
    path = tmp_path / "ck"
    users = [tmp_path / "ck.partial-mine", tmp_path / "ck.partial-0badcafe", path / "rank0-best.safetensors"]
    left = tmp_path / "ck.partial-1f2e3d4c/rank0-1f2e3d4c.safetensors"
    engine.save(path)
    users[0].mkdir()
    for kept in (users[1] / "notes", users[2], left):
        kept.parent.mkdir(exist_ok=True)
        kept.touch()
    engine.save(path)
    assert all(one.exists() for one in users)
    assert not left.parent.exists()
    assert len(list(path.glob("rank0-*"))) == 2, "the new one, and the user's"


HOW = ("none", "blocking", "asynchronous")
RANKS = 2


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saves")


@pytest.fixture(scope="module")
def measured(where: Path) -> Results:
    """A run each, with a save after the second of three measured steps."""
    for how in HOW:
        measure = Measure(steps=3, warmup=2, save=how, save_every=2)
        run = run_cell(cell("zero2", RANKS, "wide", measure=measure, results_dir=str(where)), lambda _: None)
        assert (run.status, run.unexplained) == ("ok", "")
    return load(where)


def test_a_save_has_its_times_and_the_step_that_it_ends(measured: Results) -> None:
    none, blocking, asynchronous = measured.runs.to_dict("records")
    assert all(pd.isna(none[name]) for name in ("save_s", "save_done_s", "save_step_s", "checkpoint_bytes"))
    assert 0 < blocking["save_s"] == blocking["save_done_s"] < blocking["save_step_s"]
    assert 0 < asynchronous["save_s"] <= asynchronous["save_done_s"]
    steps = measured.steps[measured.steps["mode"] == "timed"]
    for run in (blocking, asynchronous):
        held = steps[(steps["run_id"] == run["run_id"]) & steps["save_s"].notna()]
        assert set(held["step"]) == {1, 3}, "the warm-up's last step, and each second measured one"
        assert (held["save_s"] < held["seconds"]).all()
        assert held["save_in_flight"].all()
    others = steps[(steps["run_id"] == blocking["run_id"]) & steps["save_s"].isna()]
    assert not others["save_in_flight"].any(), "a blocking save has ended when the next step begins"


def test_an_asynchronous_save_copies_the_states_of_a_rank(measured: Results) -> None:
    none, blocking, asynchronous = measured.runs.to_dict("records")
    assert none["save_peak_bytes"] is None
    assert blocking["peak_bytes"] == pytest.approx(none["peak_bytes"], abs=4096)
    assert blocking["checkpoint_bytes"] == asynchronous["checkpoint_bytes"]
    states = 12 * none["psi"]  # fp32 parameters and two moments
    assert blocking["checkpoint_bytes"] == pytest.approx(states, rel=0.02)
    copied = asynchronous["save_peak_bytes"] - blocking["save_peak_bytes"]
    assert copied == pytest.approx(states / RANKS, rel=0.1)


def test_saves_change_no_loss_and_leave_no_file(measured: Results, where: Path) -> None:
    losses = {tuple(rows.sort_values(["mode", "rank", "step"])["loss"]) for _, rows in measured.steps.groupby("run_id")}
    assert len(losses) == 1
    assert measured.runs["passes_agree"].all()
    assert len(list(where.glob("*/run.json"))) == len(HOW)
    assert not [*where.rglob("saves"), *where.rglob("*.safetensors")]


def test_a_save_that_cannot_be_is_refused() -> None:
    def problems(strategy: str = "zero2", measure: Measure | None = None, **more: object) -> str:
        measure = measure or Measure(steps=5, warmup=2, save="blocking")
        return " ".join(cell(strategy, RANKS, measure=measure, **more).problems)

    assert problems() == ""
    assert problems("ddp") == "measure.save=blocking: strategy=ddp writes no checkpoint here; use zero1, zero2, zero3"
    assert "only one rank has states to write" in problems(backend="simulated")
    assert "leave tensor_parallel out" in problems(tensor_parallel=2)
    few = Measure(steps=4, warmup=2, save="asynchronous")
    assert problems(measure=few).endswith("measure.save_every=5 is above measure.steps=4, so none would begin")


# -- tiers: checkpoints know nothing of them ---------------------------------------------------------------------

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "zero2": ("zero2", {}),
    "zero2 cpu": ("zero2", {"offload": Offload()}),
    "zero3 nvme": ("zero3", {"offload": NvmeOffload(parameters=True)}),
    "zero3 cpu": ("zero3", {"offload": Offload(parameters=True)}),
    "zero1 part": ("zero1", {"offload": Offload(fraction=0.4)}),
    "zero3 groups": ("zero3", {"shard_group": 2}),
    "zero3 zeropp": ("zero3", {"zeropp": Zeropp(True, True, True, 64, 64), "node_size": 2}),
}


def engine_of(kind: str, folder: str, shift: float = 0.0) -> Any:
    strategy, options = OPTIONS[kind]
    offload = options.get("offload")
    if isinstance(offload, NvmeOffload):
        files = {"path": folder, "block_bytes": 8192, "buffers": 10, "depth": 2}
        options = options | {"offload": NvmeOffload(**vars(offload) | files)}
    return fresh("unused", "adamw", strategy, shift, tile_bytes=4096, **options)


def save_all(rank: int, n: int, folder: str) -> None:
    """Leaves, of each kind, what was saved and the losses that come after."""
    found = {}
    for kind in OPTIONS:
        engine = engine_of(kind, folder)
        steps(engine, range(3))
        engine.save(f"{folder}/{kind} 4")
        found[kind] = whole_state(engine), steps(engine, range(3, 6))
    for kind in ("zero2 cpu", "zero3 nvme", "zero3 cpu", "zero1 part"):
        assert_same(found[kind][0], found["zero2"][0])
        assert found[kind][1] == found["zero2"][1]
    if rank == 0:
        torch.save(found, f"{folder}/found.pt")


def load_all(rank: int, n: int, folder: str, back: bool) -> int:
    """Each checkpoint under some kinds, and saved again under the last of them; `back`: these again."""
    loaded, saved = 0, torch.load(f"{folder}/found.pt", weights_only=False)
    for number, (kind, (state, losses)) in enumerate(saved.items()):
        kinds = [list(OPTIONS)[(number + step) % len(OPTIONS)] for step in ((0, 3) if back else (1, 2, 5))]
        for other in kinds:
            engine = engine_of(other, folder, shift=1.0)
            engine.load(f"{folder}/{kind} {2 if back else 4}")
            assert_same(whole_state(engine), state)
            if other == kinds[-1] and not back:
                engine.save(f"{folder}/{kind} 2")
            after = steps(engine, range(3, 6))
            if "zeropp" in kind + other:  # lossy, and otherwise at another N
                assert after == pytest.approx(losses, abs=0.3)
            else:
                assert after == pytest.approx(losses, rel=2e-6), (kind, other)
            if back and other == kind:
                assert after == losses, kind
            loaded += 1
    return loaded


@pytest.mark.thorough
@on_ranks(2)
def test_an_update_that_is_pending_is_part_of_the_state(rank: int, n: int, tmp_path: Path) -> None:
    """It goes along with a checkpoint; where there is no delay it is made."""
    for strategy in ("zero1", "zero2", "zero3"):
        engine_of, late = partial(fresh, "unused", "adamw", strategy, tile_bytes=4096), Offload(delayed_after=2)
        straight = engine_of(offload=late)
        losses = steps(straight, range(8), clip=0.1)
        first = engine_of(offload=late)
        assert steps(first, range(4), clip=0.1) == losses[:4]
        folder_of = tmp_path / strategy
        first.save(folder_of)
        first.save(folder_of)  # changes nothing
        kept = first.state_dict()
        for how in ("folder", "dict"):
            second = engine_of(offload=late)
            steps(second, range(5), clip=0.1)  # of which an update is pending, too
            second.load(folder_of) if how == "folder" else second.load_state_dict(kept)
            assert steps(second, range(4, 8), clip=0.1) == losses[4:], (strategy, how)
        early = engine_of(offload=late)
        steps(early, range(1), clip=0.1)
        early.save(f"{folder_of}-early")
        second.load(f"{folder_of}-early")  # from here on nothing is pending, and a step is left before delay
        assert steps(second, range(1, 8), clip=0.1) == losses[1:], strategy
        plain = engine_of()
        plain.load(folder_of)
        assert first.update.complete()
        assert not first.update.complete()
        first.placement.round_masters()
        first.after_update()
        assert_same(whole_state(plain), whole_state(first))
        assert_equal(plain.full_state_dict(), first.full_state_dict())
        loss = straight(*zoo.tokens(rank, n, 8, rows=BATCH // n))
        with pytest.raises(ValueError, match="a delayed update is running since the last forward"):
            straight.save(folder_of)
        straight.backward(loss)
        straight.step()
        dist.barrier()


@pytest.mark.thorough
def test_checkpoints_go_from_tier_to_tier_and_from_4_ranks_to_2_and_back(tmp_path: Path) -> None:
    run_ranks(4, save_all, str(tmp_path))
    assert run_ranks(2, load_all, str(tmp_path), False) == [3 * len(OPTIONS)] * 2
    assert run_ranks(4, load_all, str(tmp_path), True) == [2 * len(OPTIONS)] * 4


# -- checkpoints that hold less, or more, than the model: in an accumulation, without frozen parameters -----------


def model_of(seed: int = 0, **more: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(seed)
    base = nn.Linear(6, 6).requires_grad_(False)
    return nn.ModuleDict({"base": base, "norm": nn.BatchNorm1d(6), "adapter": nn.Linear(6, 6), **more})


class Layers(nn.Module):
    """Runs the layers one after another; `layers` are in units of zero3 of their own."""

    def __init__(self, layers: nn.ModuleDict) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x)
        return x.square().mean()


def layers_engine(strategy: str, layers: nn.ModuleDict) -> Any:
    model = Layers(layers)
    units: Any = {"units": tuple(layers.values())} if strategy == "zero3" else {}
    return initialize(model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True), strategy, **units)


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def train(engine: Any, rank: int, steps: range) -> dict[str, torch.Tensor]:
    train_on(engine, ((batch(rank, step),) for step in steps))
    return engine.full_state_dict()


def equal_where_both(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor], but: str = "running") -> bool:
    """Compares tensors that both have; running statistics are rank 0's in a checkpoint, and each rank's own here."""
    return all(
        torch.equal(state[name], other[name])
        for name in state
        if name in other and but not in name and "running" not in name
    )


def in_an_accumulation(rank: int, strategy: str, folder: str) -> None:
    """The gradients stay for the next step; the checkpoint has none, and is that of the last step."""
    for waits in (False, True):
        states = []
        for saves in (False, True):
            engine = layers_engine(strategy, model_of())
            before = train(engine, rank, range(1))
            with engine.no_sync() if waits else nullcontext():
                engine.backward(engine(batch(rank, 1)))
            if saves:
                with pytest.raises(ValueError, match=r"save: there are gradients, .* or with without_gradients=True"):
                    engine.save(folder)
                engine.save(folder, without_gradients=True, user_state={"waits": waits})
            states.append(train(engine, rank, range(2, 3)))
        assert equal_where_both(states[0], states[1]), strategy
        fresh = layers_engine("zero1", model_of(1))
        assert fresh.load(folder) == {"waits": waits}
        loaded = fresh.full_state_dict()
        parameters = {name: loaded[name] for name, _ in fresh.named_parameters()}
        assert equal_where_both(parameters, before)
        assert loaded["layers.norm.num_batches_tracked"] == 2  # the forward in between counts


def without_frozen(rank: int, strategy: str, folder: str) -> None:
    engine = layers_engine(strategy, model_of())
    saved = train(engine, rank, range(2))
    engine.save(folder, exclude_frozen=True)
    expected = train(engine, rank, range(2, 3))
    other = layers_engine("zero3" if strategy == "zero2" else "zero2", model_of(1))
    before = other.full_state_dict()
    missing = r"layers\.base\.weight: the model has this parameter, the checkpoint has not; strict=False keeps"
    with pytest.raises(ValueError, match=missing):
        other.load(folder)
    assert equal_where_both(before, other.full_state_dict())
    with pytest.warns(UserWarning, match=missing) if rank == 0 else warnings.catch_warnings():
        other.load(folder, strict=False)
    state = other.full_state_dict()
    assert equal_where_both(state, saved, but="base")
    assert torch.equal(state["layers.base.weight"], before["layers.base.weight"])
    keys = other.load_weights(folder, strict=False)
    assert keys.missing_keys == ["layers.base.weight", "layers.base.bias"]
    same = layers_engine("zero3", model_of())  # the same base: goes on to the bit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        same.load(folder, strict=False)
    assert equal_where_both(train(same, rank, range(2, 3)), expected)


def of_another_model(rank: int, strategy: str, folder: str) -> None:
    """Without `strict` only what both have is loaded, with its states; the rest keeps its values and states."""
    engine = layers_engine(strategy, model_of(out=nn.Linear(6, 2)))
    saved = train(engine, rank, range(2))
    engine.save(folder)
    for more, shape in (({"new": nn.Linear(6, 3)}, None), ({"out": nn.Linear(6, 3)}, "shape")):
        other = layers_engine(strategy, model_of(1, **more))
        before = train(other, rank, range(1))
        states = {key: value.clone() for key, value in _states(other).items()}
        if shape:
            with pytest.raises(ValueError, match=r"layers\.out\.weight: its shape is \[2, 6\] in the checkpoint"):
                other.load(folder, strict=False)
            assert equal_where_both(before, other.full_state_dict())
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            other.load(folder, strict=False)
        state = other.full_state_dict()
        assert equal_where_both(state, saved)
        assert all(torch.equal(state[name], before[name]) for name in ("layers.new.weight", "layers.new.bias"))
        theirs, now = _states(engine), _states(other)
        for name, value in now.items():
            assert torch.equal(value, (states if "new" in name else theirs)[name]), name
        train(other, rank, range(3))


def _states(engine: Any) -> dict[str, torch.Tensor]:
    names = ((engine.names[one.span.parameter], one) for one in engine.segments)
    return {f"{name} {one.span.start}": engine.optimizer.state[one.tensor]["exp_avg"] for name, one in names}


@on_ranks(2)
def test_partial_checkpoints(rank: int, n: int, tmp_path: Path) -> None:
    for scenario in (in_an_accumulation, without_frozen, of_another_model):
        for strategy in ("zero2", "zero3"):
            scenario(rank, strategy, f"{tmp_path}/{scenario.__name__}-{strategy}")
