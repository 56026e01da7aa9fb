"""Trainer, accelerate and the script of examples/train learn under the stages what they learn under DDP."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import zerobench
from tests.ranks import run_ranks
from zerobench.zero import STAGES

EXAMPLE = Path(__file__).parents[2] / "examples/train"

SIZES = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}


def tiny() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    off = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**SIZES, **off, bos_token_id=0, eos_token_id=0))


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = (torch.arange(16) * (i + 1)) % 64
        return {"input_ids": tokens, "labels": tokens}


def subclass(strategy: str) -> Any:
    """The page's class, for a stage."""
    page = (EXAMPLE.parents[1] / "docs/how-to/huggingface.md").read_text()
    source = page.partition("```python\nclass ZeroTrainer")[2].partition("```")[0]
    names: dict[str, Any] = {
        "transformers": pytest.importorskip("transformers"),
        "zerobench": zerobench,
        "torch": torch,
    }
    exec("class ZeroTrainer" + source.replace('"zero2"', f'"{strategy}"'), names)
    return names["ZeroTrainer"]


def trained(strategy: str, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a run, which must be those of a run that goes on from its checkpoint."""
    import transformers

    folder = f"{folder}/{strategy}"
    kind = transformers.Trainer if strategy == "ddp" else subclass(strategy)
    arguments = transformers.TrainingArguments(
        folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4, logging_steps=1,
        eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=2, report_to=[], use_cpu=True,
        learning_rate=1e-2, max_grad_norm=1e9, disable_tqdm=True, ddp_backend="gloo", dataloader_pin_memory=False,
    )  # fmt: skip
    found = []
    for checkpoint in (None, *([f"{folder}/checkpoint-2"] if strategy != "ddp" else [])):
        model = tiny()
        trainer = kind(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens())
        trainer.train(resume_from_checkpoint=checkpoint)
        losses = [row.get("loss", row.get("eval_loss")) for row in trainer.state.log_history[:-1]]
        state = model.state_dict() if strategy == "ddp" else trainer.model_wrapped.full_state_dict()
        found.append((losses, {name: value.detach().clone() for name, value in state.items()}))
    losses, state = found[0]
    for again, resumed in found[1:]:
        assert losses == again, strategy
        assert all(torch.equal(resumed[name], value) for name, value in state.items()), strategy
    return losses, state


def accelerated(strategy: str, rank: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    called = model = tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    if strategy == "ddp":
        called, optimizer = accelerator.prepare(model, optimizer)
    else:
        called = zerobench.initialize(model, optimizer, strategy)
        optimizer = accelerator.prepare(optimizer)
    losses = []
    for step in range(4):
        tokens = (torch.arange(16)[None] * (2 * step + rank + 1)) % 64
        with accelerator.accumulate(called):
            loss = called(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    state = model.state_dict() if strategy == "ddp" else called.full_state_dict()
    return losses, {name: value.detach().clone() for name, value in state.items()}


def trainers(rank: int, n: int, folder: str, thorough: bool) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }  # as torchrun does
    for train in (lambda strategy: trained(strategy, folder), lambda strategy: accelerated(strategy, rank)):
        losses, weights = train("ddp")
        for stage in STAGES if thorough else ("zero3",):
            ours, theirs = train(stage)
            assert ours == losses, stage
            assert all(torch.equal(theirs[name], value) for name, value in weights.items()), stage


def test_trainers_train_as_under_ddp(tmp_path: Path, thorough: bool) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    run_ranks(2, trainers, str(tmp_path), thorough)


def changed_lines() -> list[tuple[str, str]]:
    """The lines of zero.diff, as pairs of an old and a new one."""
    lines = (EXAMPLE / "zero.diff").read_text().splitlines()[2:]
    old, new = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
    return list(zip(old, new, strict=True))


def scripts(rank: int, n: int, stages: tuple[str, ...]) -> None:
    script = (EXAMPLE / "train.py").read_text()
    text = torch.frombuffer(bytearray(script.encode() * 2), dtype=torch.uint8)

    def learned(source: str) -> tuple[list[float], float]:
        names: dict[str, Any] = {"__name__": "train"}
        exec(compile(source, "train.py", "exec"), names)
        return names["train"](text, 2, torch.device("cpu"))  # type: ignore[no-any-return]

    losses, last = learned(script)
    for old, new in changed_lines():
        assert script.count(old + "\n") == 1, old
        script = script.replace(old + "\n", new + "\n")
    for stage in stages:
        ours, our_last = learned(script.replace("zero3", stage))
        assert ours == pytest.approx(losses, rel=1e-6), stage  # a norm is summed over shards
        assert our_last == pytest.approx(last, rel=1e-6), stage


def test_a_script_needs_three_lines(thorough: bool) -> None:
    assert len(changed_lines()) == 3
    page = (EXAMPLE.parents[1] / "docs/how-to/library.md").read_text()
    for lines in changed_lines():
        assert "\n-{}\n+{}\n".format(*lines) in page
    run_ranks(2, scripts, STAGES if thorough else ("zero3",))
