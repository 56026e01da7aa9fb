"""Lines of code that made storages, in forward, backward, hooks and recomputation; a leak, named to the byte."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zerobench
from zerobench.probes import source_lines

HIDDEN = 48


class Net(nn.Module):
    """Two layers, each on a line of its own; the second may be computed again in backward."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN), again

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).relu()  # line of the first
        return checkpoint(self.tail, h, use_reentrant=False) if self.again else self.tail(h)

    def tail(self, h: torch.Tensor) -> torch.Tensor:
        return self.second(h).tanh()  # line of the second


def line_of(comment: str) -> str:
    """The place in this file of a line with such a comment, as a table shows it."""
    lines = inspect.getsource(inspect.getmodule(line_of)).splitlines()  # type: ignore[arg-type]
    number = next(place for place, line in enumerate(lines, 1) if line.endswith(f"# {comment}"))
    return f"{source_lines.shown_path(__file__)}:{number} in"


def watched(model: nn.Module, kept: list[Any] | None = None, steps: int = 3) -> zerobench.Results:
    """The tables of a small loop; `kept`: where it keeps each step's output."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerobench.watch(model, optimizer, warmup=1, steps=2) as watch:
        for _ in range(steps):
            out = model(torch.randn(8, HIDDEN))  # line of the call
            out.square().sum().backward()
            if kept is not None:
                kept.append(out)
            optimizer.step()
            optimizer.zero_grad()
    return watch.results


@pytest.mark.shown(1)
@pytest.mark.slow
@pytest.mark.parametrize("again", [False, True])
def test_storages_are_made_by_the_line_that_a_reader_would_name(again: bool) -> None:
    lines = watched(Net(again)).lines
    made = lines[(lines["at"] == "peak") & (lines.category == "gradients")]  # a row per parameter
    made = made.groupby("source", as_index=False)[["bytes", "storages"]].sum()
    assert sorted(made.source) == [
        f"backward of {line_of('line of the first')} Net.forward",
        f"backward of {line_of('line of the second')} Net.tail",
    ]
    assert list(made.bytes) == [4 * HIDDEN * (HIDDEN + 1)] * 2
    assert list(made.storages) == [2, 2]


class Log:
    """What a logger of a user's keeps."""

    def __init__(self) -> None:
        self.seen_losses: list[torch.Tensor] = []
        self.by_step: dict[int, Any] = {}

    def note(self, step: int, loss: torch.Tensor) -> None:
        self.seen_losses += [loss]  # line that adds a loss

    def note_pair(self, step: int, loss: torch.Tensor) -> None:
        self.by_step[step] = (step, loss)  # line that adds a pair

    def note_twice(self, step: int, loss: torch.Tensor) -> None:
        twice = self.twice = getattr(self, "twice", [])
        twice.append(loss)
        twice.append(loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "keeper", "comment"),
    [
        ("note", "the list Log.seen_losses", "line that adds a loss"),
        ("note_pair", "the dict Log.by_step", "line that adds a pair"),
        ("note_twice", "the list Log.twice", ""),
    ],
)
def test_growth_names_its_keeper(way: str, keeper: str, comment: str) -> None:
    log, model = Log(), Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerobench.watch(model, optimizer) as watch:
        for step in range(3):
            loss = model(torch.randn(8, HIDDEN)).square().sum()
            loss.backward(retain_graph=True)
            getattr(log, way)(step, loss)
            optimizer.step()
            optimizer.zero_grad()
    line = f" ({line_of(comment).removesuffix(' in')})" if comment else ""
    rows = watch.results.lines
    kept_by = rows[rows["at"] == "growth"].set_index("category").kept_by
    # the loss has a tensor in the container; other activations are in its graph alone
    assert set(kept_by["activations"]) == {f"{keeper}{line}", f"a graph, by {keeper}{line}"}
    assert set(rows[rows["at"] == "peak"].kept_by) == {""}


def test_instruments_exist() -> None:
    assert [one for one in source_lines.INSTRUMENTS if not Path(one).exists()] == []


def test_paths_are_those_that_a_reader_knows(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    import numpy

    monkeypatch.chdir(tmp_path)
    source_lines.shown_path.cache_clear()
    shown = source_lines.shown_path
    assert shown(str(tmp_path / "src/train.py")) == "src/train.py"
    assert shown("/elsewhere/train.py") == "/elsewhere/train.py"
    assert shown(numpy.__file__) == "numpy/__init__.py"
    assert shown(zerobench.zero.__file__) == "zerobench/zero/__init__.py"
    for hidden in (torch.__file__, inspect.__file__, source_lines.__file__, "<frozen importlib>", "<string>"):
        assert shown(hidden) is None, hidden
    source_lines.shown_path.cache_clear()


def test_private_names_of_torch_are_there() -> None:
    x = torch.ones(2, requires_grad=True)
    before = torch._C._autograd._get_sequence_nr()
    y = x * 2
    assert y.grad_fn._sequence_nr() == before == torch._C._autograd._get_sequence_nr() - 1
    seen = []
    y.register_hook(lambda _: seen.append(torch._C._current_autograd_node()))
    y.sum().backward()
    assert seen[0].name().startswith("MulBackward")
    assert torch._C._current_autograd_node() is None
    assert torch.autograd.graph._engine_run_backward.__code__.co_filename == source_lines._BACKWARD[0]
