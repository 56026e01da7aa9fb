"""Trainer, accelerate and the script of examples/train learn under the stages what they learn under DDP."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

import zerobench
from tests.distributed.training import assert_same
from tests.ranks import on_ranks
from zerobench.zero import STAGES

EXAMPLE = Path(__file__).parents[2] / "examples/train"

SIZES = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}


def tiny() -> Any:
    import transformers

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
    import transformers

    names = {"transformers": transformers, "zerobench": zerobench, "torch": torch}
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
    assert_same(found[-1], found[0], strategy)
    return found[0]


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


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs the extra `hf`")
@on_ranks(2)
def test_trainers_train_as_under_ddp(rank: int, n: int, tmp_path: Path, thorough: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(n)}  # as torchrun does
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for train in (lambda strategy: trained(strategy, str(tmp_path)), lambda strategy: accelerated(strategy, rank)):
        expected = train("ddp")
        for stage in STAGES if thorough else ("zero3",):
            assert_same(train(stage), expected, stage)


def changed_lines() -> list[tuple[str, str]]:
    """The lines of zero.diff, as pairs of an old and a new one."""
    lines = (EXAMPLE / "zero.diff").read_text().splitlines()[2:]
    old, new = ([line[1:] for line in lines if line.startswith(sign)] for sign in "-+")
    return list(zip(old, new, strict=True))


@on_ranks(2)
def test_a_script_needs_three_lines(rank: int, n: int, thorough: bool) -> None:
    page = (EXAMPLE.parents[1] / "docs/how-to/library.md").read_text()
    assert len(changed_lines()) == 3
    script = (EXAMPLE / "train.py").read_text()
    text = torch.frombuffer(bytearray(script.encode() * 2), dtype=torch.uint8)

    def learned(source: str) -> tuple[list[float], float]:
        names: dict[str, Any] = {"__name__": "train"}
        exec(compile(source, "train.py", "exec"), names)
        return names["train"](text, 2, torch.device("cpu"))  # type: ignore[no-any-return]

    losses, last = learned(script)
    for old, new in changed_lines():
        assert f"\n-{old}\n+{new}\n" in page
        assert script.count(old + "\n") == 1, old
        script = script.replace(old + "\n", new + "\n")
    for stage in STAGES if thorough else ("zero3",):
        ours, our_last = learned(script.replace("zero3", stage))
        assert ours == pytest.approx(losses, rel=1e-6), stage  # a norm is summed over shards
        assert our_last == pytest.approx(last, rel=1e-6), stage
