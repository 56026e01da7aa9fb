"""Watching a loop in one process, or the loop of a trainer: figures of an instrument that was there from the start, and
nothing left behind."""

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.optim import optimizer as optimizer_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

import zerobench
from zerobench.commands.show import setting_of
from zerobench.probes import AccountedPass
from zerobench.probes.traffic import RAW
from zerobench.watching import WatchError
from zerobench.watching.held_tensors import BEFORE, leave_out
from zerobench.zero import labels

HIDDEN, BATCH, WARMUP, STEPS = 24, 8, 1, 2
EXACT = ("parameters", "gradients", "master", "optimizer", "communication", "activations", "states", "total")
CPU = torch.device("cpu")

pytestmark = pytest.mark.slow

Phase = Callable[[str], AbstractContextManager[Any]]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Tensors that other tests of this process have left are no part of a loop."""
    with leave_out():
        yield


class Net(nn.Module):
    """Two layers and a buffer. `again`: the second is computed again in backward, reentrant or not."""

    def __init__(self, again: bool | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        self.register_buffer("seen", torch.zeros(3))
        self.again = again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()
        return self.tail(h) if self.again is None else checkpoint(self.tail, h, use_reentrant=self.again)

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(h).tanh()


@dataclass
class Loop:
    """A training loop of plain torch: how it is built, and one step of it. `phase` says what an oracle is told."""

    again: bool | None = None
    accumulation: int = 1
    set_to_none: bool = True
    autocast: bool = False
    scaled: bool = False
    skips: tuple[int, ...] = ()
    halves: bool = False

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net(self.again)
        parts = [self.model.first, self.model.second] if self.halves else [self.model]
        self.optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-3) for part in parts]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=self.scaled)
        self.losses: list[float] = []

    def step(self, number: int, phase: Phase) -> None:
        """Trains on one batch, drawn from the step's number."""
        for micro in range(self.accumulation):
            with phase("data"):
                x = torch.randn(BATCH, HIDDEN, generator=torch.Generator().manual_seed(10 * number + micro))
                labels.label(x, labels.INPUTS, "batch")
            with phase("forward"), torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = self.model(x).square().sum()
                loss = loss * float("inf") if number in self.skips else loss
                loss = self.scaler.scale(loss)
            with phase("backward"):
                loss.backward()
        with phase("update"):
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.scaler.update()
        self.losses.append(loss.item())
        del loss, x
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.set_to_none)


def nothing(_: str) -> AbstractContextManager[None]:
    return nullcontext()


def seen_by_the_oracle(steps: int = WARMUP + STEPS, **how: Any) -> AccountedPass:
    """An instrument that is there before the model, is told every phase, and labels what the harness labels."""
    with AccountedPass(CPU, witness=False) as probe:
        with probe.phase("init"):
            loop = Loop(**how)
            probe.adopt(loop.model)

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            with probe.phase(name):
                yield
                if name == "backward":
                    probe.after_backward(loop.model)
            if name == "update":
                for optimizer in loop.optimizers:
                    probe.after_update(optimizer)

        for number in range(steps):
            with probe.step(number >= steps - STEPS):
                loop.step(number, phase)

    return probe


def watched(loop: Loop, steps: int = WARMUP + STEPS, spare: int = 1, **how: Any) -> zerobench.Results:
    optimizers = loop.optimizers if len(loop.optimizers) > 1 else loop.optimizers[0]
    with zerobench.watch(loop.model, optimizers, **how) as watch:
        for number in range(steps + spare):
            loop.step(number, nothing)
            if how.get("ends") == "step":
                watch.step()
    return watch.results


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept gradients": {"set_to_none": False},
    "accumulation": {"accumulation": 3},
    "autocast": {"autocast": True},
    "checkpoint": {"again": False},
    "reentrant checkpoint": {"again": True},
    "two optimizers": {"halves": True, "accumulation": 2},
    "scaled": {"scaled": True, "accumulation": 2},
    "a skipped update": {"scaled": True, "skips": (2,)},
}


IN_EVERY_RUN = ("accumulation", "checkpoint", "two optimizers")


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    "name", [pytest.param(one, marks=() if one in IN_EVERY_RUN else pytest.mark.thorough) for one in CASES]
)
def test_a_late_watch_sees_what_an_instrument_sees_that_was_there_from_the_start(name: str) -> None:
    oracle, seen = seen_by_the_oracle(**CASES[name]), Loop(**CASES[name])
    results = watched(seen)
    expected = {row.category: row for row in oracle.memory_rows(0) if row.phase == "step"}
    rows = results.memory.query("phase == 'step'").set_index("category")
    for category in EXACT:
        assert rows.max_bytes[category] == expected[category].max_bytes, category
        assert rows.at_peak_bytes[category] == expected[category].at_peak_bytes, category
    run, lines = results.runs.iloc[0], results.lines
    assert (run.peak_bytes, run.strategy, run.accumulation) == (expected["total"].max_bytes, "plain", seen.accumulation)
    assert lines[lines["at"] == "peak"].bytes.sum() == run.peak_bytes
    assert run.psi == sum(p.numel() for p in Net().parameters())
    assert run.growth_bytes == oracle.memory["growth_bytes"] == 0
    assert not (results.tensors.name == BEFORE).any()
    # and it changes nothing, to the bit
    unseen = Loop(**CASES[name])
    for number in range(WARMUP + STEPS + 1):
        unseen.step(number, nothing)
    assert unseen.losses == seen.losses
    for mine, other in zip(unseen.model.parameters(), seen.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_account_has_no_setting_that_a_watch_cannot_know() -> None:
    row = watched(Loop(), warmup=0, steps=1).runs.iloc[0].to_dict()
    assert dict(setting_of(row))["training"] == 'fp32, adamw (implementation="auto"); data watched'


def patched() -> dict[str, Any]:
    """All that a watch puts elsewhere while it observes."""
    return {
        "backward": torch.autograd.backward,
        "resize": torch.UntypedStorage.resize_,
        "thread": threading.Thread.start,
        "scaler": torch.amp.GradScaler.step,
        "before forwards": dict(module_hooks._global_forward_pre_hooks),
        "after forwards": dict(module_hooks._global_forward_hooks),
        "before updates": dict(optimizer_hooks._global_optimizer_pre_hooks),
        "after updates": dict(optimizer_hooks._global_optimizer_post_hooks),
        "modes": _get_current_dispatch_mode(),
        "labels": list(labels._observers),
        "backend": {name: getattr(torch._C._distributed_c10d.Backend, name, None) for name in RAW},
    }


def hooks_of(loop: Loop) -> list[Any]:
    model, optimizers = loop.model, loop.optimizers
    found: list[Any] = [hook for module in model.modules() for hook in module._forward_pre_hooks.values()]
    found += [hook for p in model.parameters() for hook in (p._backward_hooks or {}).values()]
    for one in optimizers:
        found += [*one._optimizer_step_pre_hooks.values(), *one._optimizer_step_post_hooks.values()]
        found += ["step"] * ("step" in vars(one))
    return found


class Stop(Exception):
    """The error of a loop that fails."""


@pytest.mark.parametrize(
    "ends", [*(pytest.param(end, marks=pytest.mark.thorough) for end in ("over", "early")), "error"]
)
def test_nothing_is_left_where_a_watch_has_been(ends: str) -> None:
    before, loop = patched(), Loop(halves=True)
    watch = zerobench.watch(loop.model, loop.optimizers)
    assert patched() == before  # a watch that has not started is none
    with pytest.raises(Stop) if ends == "error" else nullcontext(), watch:
        assert all(patched()[name] != before[name] for name in before)
        assert hooks_of(loop)
        for number in range(2 if ends == "early" else WARMUP + STEPS):
            loop.step(number, nothing)
            if number == 1 and ends == "error":
                raise Stop("here")
        if ends == "over":  # the last measured step is over, the loop is not
            assert (patched(), hooks_of(loop)) == (before, [])
            loop.step(9, nothing)
    assert (patched(), hooks_of(loop)) == (before, [])
    assert watch.results.runs.status.item() == ("crash" if ends == "error" else "ok")
    model = [weakref.ref(one) for one in (loop.model, *loop.optimizers, loop.model.first.weight)]
    del loop
    assert [one() for one in model] == [None] * 4  # by reference counts alone


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_tensors_that_are_not_dense_count_with_their_parts() -> None:
    """A cast of a sparse gradient, rows in compressed form, and a layout whose memory torch does not show."""
    model = nn.Embedding(50, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters())
    with zerobench.watch(model, optimizer) as watch:
        for number in range(3):
            model(torch.tensor([3, 7, number])).sum().backward()
            wide = model.weight.grad.to(torch.float64)
            rows = torch.eye(8).to_sparse_csr().clone()
            oneDNN = torch.eye(8).to_mkldnn()
            optimizer.step()
            optimizer.zero_grad()
            del wide, rows, oneDNN
    assert watch.results.runs.max_gradients_bytes.item() >= 3 * (8 * 4 + 8)


def test_micro_batches_whose_forwards_come_first_are_counted() -> None:
    loop = Loop()
    expected = zerobench.ExpectedTraining(accumulation=2)
    with zerobench.watch(loop.model, loop.optimizers, verify=expected) as watch:
        for _ in range(WARMUP + STEPS):
            for loss in [loop.model(torch.randn(BATCH, HIDDEN)).square().mean() for _ in range(2)]:
                loss.backward()
            loop.optimizers[0].step()
            loop.optimizers[0].zero_grad()
    watch.certificate.check(strict=True)


def test_a_thread_that_outlives_the_watch_is_heard_no_more() -> None:
    loop, go = Loop(), threading.Event()
    made: list[torch.Tensor] = []

    def load() -> None:
        made.append(torch.zeros(100))
        go.wait(timeout=60)
        made.append(torch.zeros(200))

    with zerobench.watch(loop.model, loop.optimizers[0]) as watch:
        for number in range(4):
            loop.step(number, nothing)
            if number == 0:
                thread = threading.Thread(target=load, name="loader")
                thread.start()
                while not made:
                    thread.join(0.01)
        ledger = watch.probe.ledger
        assert ledger.knows(made[0])
        go.set()
        thread.join()
        assert not ledger.knows(made[1])
    lines = watch.results.lines.query("at == 'peak' and bytes == 400")
    assert list(lines.module) == ["thread loader"]


class DeepSpeedEngine(nn.Module):
    """The face of DeepSpeed's engine, which takes its step with every second micro-batch."""

    def __init__(self, loop: Loop) -> None:
        super().__init__()
        self.module, self.optimizer, self.calls = loop.model, loop.optimizers[0], 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x).square().sum() / 2

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.calls += 1
        if self.calls % 2 == 0:
            self.optimizer.step()
            self.optimizer.zero_grad()


def test_an_engine_that_accumulates_by_itself_is_watched_by_marked_steps() -> None:
    engine = DeepSpeedEngine(Loop())
    with zerobench.watch(engine, ends="step") as watch:
        for number in range(8):
            engine.backward(engine(torch.randn(BATCH, HIDDEN)))
            engine.step()
            if number % 2:
                watch.step()
    results = watch.results
    run, expected = results.runs.iloc[0], watched(Loop()).runs.iloc[0]
    assert (run.strategy, run.model, run.optimizer) == ("deepspeed", "Net", expected.optimizer)
    assert (run.accumulation, run.batch, run.growth_bytes) == (2, 2 * BATCH, 0)
    for name in ("max_parameters_bytes", "max_optimizer_bytes", "psi"):
        assert run[name] == expected[name], name
    gradients = results.memory.query("category == 'gradients'").set_index("phase").max_bytes
    assert gradients["data"] == gradients["update"] == 4 * run.psi  # kept between micro-batches, and read by the update


def sentence(act: Callable[[], Any], error: type[Exception] = WatchError) -> str:
    with pytest.raises(error) as caught:
        act()
    assert patched() == sentence.clean  # type: ignore[attr-defined]
    return str(caught.value)


sentence.clean = patched()  # type: ignore[attr-defined]


def run(loop: Loop, steps: int, **how: Any) -> None:
    with zerobench.watch(loop.model, loop.optimizers[0], **how):
        for number in range(steps):
            loop.step(number, nothing)


def test_a_loop_that_shows_too_little_gets_a_sentence(monkeypatch) -> None:
    monkeypatch.setattr("zerobench.watching.watch.CALLBACKS", {"transformers.trainer": "trainer_callback"})
    monkeypatch.setitem(sys.modules, "transformers.trainer", sys)
    assert sentence(lambda: run(Loop(), 3, ends="step")).endswith(
        "was not called; a Trainer is watched by callbacks=[zerobench.trainer_callback()]"
    )
    monkeypatch.setattr("zerobench.watching.watch.CALLBACKS", {})
    assert sentence(lambda: run(Loop(), 0)) == "watch: the loop ended without a step: the optimizer took no step"
    assert sentence(lambda: run(Loop(), 3, ends="step")) == (
        "watch: the loop ended without a step: watch.step() was not called"
    )
    assert sentence(lambda: run(Loop(), 1)) == (
        "watch: the loop ended after 1 step, and the first 1 are not accounted; give it more steps"
    )
    assert sentence(lambda: run(Loop(), 2, warmup=3)) == (
        "watch: the loop ended after 2 steps, and the first 3 are not accounted; give it more steps"
    )


def test_what_is_replaced_midway_is_named(monkeypatch) -> None:
    monkeypatch.setattr("zerobench.watching.watch.CALLBACKS", {})

    def replace(optimizer_too: bool) -> None:
        loop = Loop()
        with zerobench.watch(loop.model, loop.optimizers[0]):
            for number in range(3):
                loop.step(number, nothing)
                loop.model = Net() if number == 0 else loop.model
                if optimizer_too and number == 0:
                    loop.optimizers = [torch.optim.SGD(loop.model.parameters())]

    assert sentence(lambda: replace(optimizer_too=False)) == (
        "watch: the watched Net was not called in step 2; was it replaced? Watch the model that the loop calls"
    )
    assert sentence(lambda: replace(optimizer_too=True)) == (
        "watch: the loop ended after 1 step of the watched AdamW, while another SGD stepped; were model and optimizer"
        " replaced? Watch the ones that the loop uses"
    )


def test_a_watch_is_used_once_and_alone() -> None:
    loop = Loop()
    watch = zerobench.watch(loop.model, loop.optimizers[0])
    assert sentence(watch.stop).startswith("watch.stop: the watch has not started")
    assert sentence(watch.step).startswith("watch.step: the optimizer's step ends a step here")
    assert sentence(zerobench.watch(loop.model).step).startswith("watch.step: the watch has not started")
    with watch:
        with pytest.raises(WatchError, match="another one observes this process; leave it, or stop"):
            zerobench.watch(loop.model, loop.optimizers[0]).start()
        for number in range(3):
            loop.step(number, nothing)
        assert watch.state == "over"
        run(loop, 3)  # it observes no more
    assert sentence(watch.start) == "watch: it is stopped; make a new one for another loop"
    watch.stop()  # again: nothing happens


def test_objects_that_cannot_be_watched_are_refused(tmp_path: Path) -> None:
    model, optimizer = Net(), torch.optim.SGD(Net().parameters())

    def refused(*objects: Any, **how: Any) -> str:
        return sentence(lambda: zerobench.watch(*objects, to=tmp_path, **how), ValueError)

    assert refused(lambda x: x, optimizer).startswith("watch: model is function; give the torch.nn.Module")
    assert refused(model, object()) == "watch: optimizer is object, which has no step"
    assert refused(model, ends="optimizer").startswith('watch: ends="optimizer" needs the optimizer')
    assert refused(model, optimizer, ends="epoch") == 'watch: ends=\'epoch\'; it is "optimizer" or "step"'
    assert refused(model, optimizer, steps=0) == "watch: steps=0; it is a whole number from 1 on"
    assert refused(model, optimizer, warmup=-1) == "watch: warmup=-1; it is a whole number from 0 on"
    assert not list(tmp_path.iterdir())
    assert "/dev/null/x" in sentence(zerobench.watch(model, optimizer, to="/dev/null/x").start, NotADirectoryError)


LENGTH, ROWS = 16, 2


def tiny() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "n_positions": LENGTH, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(
        GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    )


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(LENGTH) + i) % 64
        return {"input_ids": tokens, "labels": tokens}


def check(results: zerobench.Results, model: nn.Module, accumulation: int) -> None:
    run = results.runs.iloc[0]
    parameters = sum(p.nbytes for p in model.parameters())
    assert run.max_parameters_bytes == parameters == 4 * run.psi
    assert run.max_optimizer_bytes == 2 * parameters + 4 * len(list(model.parameters()))
    assert run.max_gradients_bytes >= parameters
    assert (run.micro_batch, run.accumulation, run.growth_bytes) == (ROWS, accumulation, 0)
    assert results.lines[results.lines["at"] == "peak"].bytes.sum() == run.peak_bytes
    assert list(results.steps.warmup) == [True, False, False]


class Recorded(TrainerCallback):
    """Another callback beside the watch's."""


@pytest.mark.slow
def test_the_callback_hears_what_transformers_tells_its_callbacks() -> None:
    """Without accelerate there is no Trainer: its events come from its own handler, over a loop of ours."""
    model = tiny()
    optimizer = torch.optim.AdamW(model.parameters())
    callback = zerobench.trainer_callback()
    assert callback.results is None
    handler = CallbackHandler([Recorded(), callback], model, None, optimizer, None)
    arguments: Any = None
    state, control, data = TrainerState(), TrainerControl(), Tokens()
    handler.on_train_begin(arguments, state, control)
    for step in range(4):
        handler.on_step_begin(arguments, state, control)
        for micro in range(2):
            rows = [data[4 * step + 2 * micro + row] for row in range(ROWS)]
            batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
            (model(**batch).loss / 2).backward()
            del batch
        optimizer.step()
        model.zero_grad()
        handler.on_step_end(arguments, state, control)
    handler.on_train_end(arguments, state, control)
    check(callback.results, model, accumulation=2)


@pytest.mark.filterwarnings("default")  # of its own, of a newer torch
@pytest.mark.parametrize("accumulation", [1, 2])
def test_lightnings_trainer_is_watched(accumulation: int) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss: torch.Tensor = self.model(**batch).loss
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    class Failing(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            if fails and self.trainer.global_step == 3:
                raise RuntimeError("here")

    fails = 0
    quiet: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    for module, callback in ((Failing(), zerobench.lightning_callback()), (Failing(), zerobench.lightning_callback())):
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", enable_model_summary=False, callbacks=[callback],
            accumulate_grad_batches=accumulation, **quiet,
        )  # fmt: skip
        with pytest.raises(RuntimeError, match="here") if fails else nullcontext():
            trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=ROWS))
        if not fails:
            check(callback.results, module.model, accumulation)
        fails = 1
    assert callback.results.runs.reason.item() == "RuntimeError: here"  # its watch is over: the next one may begin
