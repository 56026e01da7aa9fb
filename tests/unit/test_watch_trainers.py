"""Watching where a trainer has the loop: transformers' Trainer and Lightning's, where they are installed."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

import zerobench

LENGTH, BATCH = 16, 2


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
    assert (run.micro_batch, run.accumulation, run.growth_bytes) == (BATCH, accumulation, 0)
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
            rows = [data[4 * step + 2 * micro + row] for row in range(BATCH)]
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
            trainer.fit(module, torch.utils.data.DataLoader(Tokens(), batch_size=BATCH))
        if not fails:
            check(callback.results, module.model, accumulation)
        fails = 1
    assert callback.results.runs.reason.item() == "RuntimeError: here"  # its watch is over: the next one may begin
