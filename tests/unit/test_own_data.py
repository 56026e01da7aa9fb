"""Data of a user's: what is registered, what a rank gets of it, and what a model is told that cannot take it."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import zerobench
from zerobench.config.compose import compose_cells
from zerobench.data import OwnBatches, build_batches
from zerobench.models import Called, loss_of
from zerobench.probes.labeling import tensors_in
from zerobench.ranks import rank_main

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "first second")


def own(source: Any, dtype: torch.dtype = torch.float32) -> OwnBatches:
    return OwnBatches("mine", source, CPU, dtype)


def test_batches_of_any_structure_keep_it_and_floats_become_the_models_dtype() -> None:
    made = {"x": torch.ones(2), "y": [torch.ones(2, dtype=torch.int64), Pair(torch.ones(1), "text")], "z": None}
    batch = own(lambda step, micro: made, torch.bfloat16).batch(0)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["y"][0].dtype == torch.int64
    assert type(batch["y"][1]) is Pair
    assert batch["y"][1].second == "text"
    assert batch["z"] is None
    assert len([*tensors_in(batch)]) == 3


def test_an_iterable_is_begun_again_and_an_empty_one_is_refused() -> None:
    loader = own(DataLoader(TensorDataset(torch.arange(6)), batch_size=2))
    assert [loader.batch(step)[0].tolist() for step in range(4)] == [[0, 1], [2, 3], [4, 5], [0, 1]]
    with pytest.raises(ValueError, match="data=mine: its iterable is empty"):
        own([]).batch(0)
    once = own(iter([torch.ones(1)]))
    once.batch(0)
    with pytest.raises(ValueError, match="gone through only once"):
        once.batch(1)
    with pytest.raises(TypeError, match="num_workers 0"):
        own(DataLoader(TensorDataset(torch.arange(6)), num_workers=1))
    with pytest.raises(TypeError, match=r"returned int; return a function of \(step, micro\) or an iterable"):
        own(3)


def numbers(scale: float = 2.0, path: str | None = None, *, rank: int, world_size: int, micro_batch: int):
    def batch(step: int, micro: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((micro_batch, 3), scale * rank + step), "y": torch.full((1,), world_size)}

    return batch


def line(width: int = 3) -> torch.nn.Module:
    return torch.nn.Linear(width, 1)


@pytest.mark.slow
def test_registered_data_has_typed_keys_and_is_told_of_the_run() -> None:
    zerobench.register_data("numbers", numbers)
    zerobench.register_model("line", line)
    cells = compose_cells(["-m", "data=numbers", "model=line", "data.scale=2,3", "world_size=2", "device=cpu"])
    assert [cell.problems for cell in cells] == [(), ()]
    config = cells[1].config
    assert config.data.values() == {"name": "numbers", "scale": 3.0, "path": None}
    assert config.sequence == 1, "tokens per second are samples per second"
    batch = build_batches(config.batching, 1, CPU).batch(4)
    assert batch["x"].tolist() == [[7.0] * 3] * 4
    assert batch["y"].tolist() == [2]
    assert cells[0].cell_id != cells[1].cell_id
    assert compose_cells(["data=numbers", "model=gpt_tiny", "device=cpu"])[0].config.sequence == 128


@pytest.mark.parametrize(
    ("name", "build", "words"),
    [
        ("text", numbers, "register_data: the name 'text' is taken"),
        ("mine", lambda width: 0, "parameter width needs a default and a type"),
    ],
)
def test_what_cannot_be_registered_is_refused(name: str, build: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        zerobench.register_data(name, build)


CALLED = Called("mine", "mine", "text")
TERMS = "model=mine is called as forward(float32 (2, 3), int64 (2,)) with data=text, and must return the loss"


def missing(images: Any, labels: Any, mask: Any) -> None:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("forward", "words"),
    [
        (missing, "missing 1 required positional argument: 'mask'"),
        (lambda a, b: (a.sum(), a), "forward returned tuple"),
        (lambda a, b: a, "forward returned a tensor of shape (2, 3)"),
        (lambda a, b: a.sum(), "depends on no trainable parameter"),
        (lambda a, b: a @ a, "shapes cannot be multiplied"),
    ],
)
def test_a_model_that_breaks_the_contract_is_told_of_it(forward: Any, words: str) -> None:
    """As the row's reason has it: what Python said, then how the model was called."""
    batch = torch.ones(2, 3), torch.ones(2, dtype=torch.int64)
    with pytest.raises((TypeError, RuntimeError)) as raised:
        loss_of(forward, batch, CALLED)
    status, reason = rank_main._classify(raised.value)
    assert status == "crash"
    assert words in reason
    assert TERMS in reason


def test_a_lack_of_memory_and_our_own_models_keep_their_words() -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError) as raised:
        loss_of(full, (torch.ones(1),), CALLED)
    line = f"tests/unit/test_own_data.py:{full.__code__.co_firstlineno + 1} in full"
    assert rank_main._classify(raised.value) == ("oom", f"raised OutOfMemoryError: CUDA out of memory; at {line}")
    ours = Called("gpt", "gpt_tiny", "text")
    with pytest.raises(TypeError) as raised:
        loss_of(missing, (torch.ones(1), torch.ones(1)), ours)
    assert "called as" not in rank_main._classify(raised.value)[1]


def test_what_the_batches_raise_names_the_data() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        own(lambda step, micro: 1 // micro).batch(0)
    assert "the batches of data=mine" in rank_main._classify(raised.value)[1]
