"""All that composes trains the same as the plain stage."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests import compositions, zoo
from tests.compositions import Combination, cell_of
from tests.distributed.variants import engine_of
from tests.ranks import run_ranks
from zerobench import strategies
from zerobench.config.cell import CellConfig
from zerobench.config.schema_training import NORMS
from zerobench.zero.offload.nvme import FilePlacement


def test_every_choice_of_every_strategy_trains_as_the_plain_stage_does(tmp_path: Path, thorough: bool) -> None:
    """In every run every second combination, of which each has a choice that none before it has."""
    assert wrong_of(compositions.by_strategy(2)[:: 1 if thorough else 2], 2, tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize("n", [2, 4])
def test_states_of_fewer_bits_go_with_every_choice(n: int, tmp_path: Path) -> None:
    """On four ranks, which take longer, only groups that share a shard."""
    rows = [row for row in compositions.low_bit(n) if n == 2 or row["shard_group"] == "2"]
    assert wrong_of(rows, n, tmp_path) == []


@pytest.mark.thorough
@pytest.mark.parametrize(("n", "count"), [(4, 40), (2, 80), (1, 40)])
def test_combinations_at_random_train_as_the_plain_stage_does(n: int, count: int, tmp_path: Path) -> None:
    assert wrong_of(compositions.drawn_at_random(n, count), n, tmp_path) == []


def wrong_of(rows: list[Combination], n: int, folder: Path) -> list[str]:
    """What is wrong with the combinations on any rank."""
    return [wrong for of_rank in run_ranks(n, compare_all, rows, str(folder)) for wrong in of_rank]


STEPS = 3

REORDERS = ("node_size", "shard_group")
"""Axes after which sums are the same but for rounding."""

CHANGES = ("strategy", "options", "precision", "zeropp", "clip", "accumulation", "optimizer", "model")
"""Axes that make another training of it; the rest only says where things are."""

LATE = "cpu, delayed"
"""The choice of `offload` that makes another training as well."""

NEAR, NEAR_IN_HALF = (1e-6, 2e-4), (2e-2, 6e-2)
"""Tolerances of losses and norms, relative, and of weights, if sums are in another order: Adam steps by roundings."""

Outcome = tuple[list[float], dict[str, torch.Tensor]]


def train(rank: int, n: int, config: CellConfig, folder: str) -> Outcome:
    """(losses and norms, the full state at the end) of a resolved cell, over the zoo's data, built as a run is."""
    engine = engine_of(config, folder)
    heard = []
    for step in range(STEPS):
        for micro in range(config.accumulation):
            last = micro == config.accumulation - 1
            with strategies.synchronizing(engine, config.strategy.reduces, last):
                loss = engine(*zoo.tokens(rank, n, 2 * step + micro))
                engine.backward(loss / config.accumulation)
            heard.append(loss.item())
        if config.clip is not None:
            heard.append(engine.clip_grad_norm_(config.clip, NORMS[config.clip_norm]).item())
        engine.step()
    if isinstance(engine.placement, FilePlacement):
        engine.placement.settle()
        assert engine.placement.pool.taken == 0, "buffers of the pool did not come back"
    return heard, engine.full_state_dict()


class References:
    """Trainings without anything that should not matter, each made once."""

    def __init__(self, rank: int, n: int, folder: str) -> None:
        self._place = rank, n
        self._folder = folder
        self._made: dict[tuple[Any, ...], Outcome] = {}

    def of(self, chosen: Combination, axes: tuple[str, ...]) -> Outcome:
        """Returns `chosen` in these axes, defaults elsewhere."""
        kept = {axis: chosen[axis] for axis in axes if chosen[axis] != "none"}
        key = tuple(kept.items())
        if key not in self._made:
            rank, n = self._place
            self._made[key] = train(rank, n, cell_of(kept, n).config, self._folder)
        return self._made[key]


def compare_all(rank: int, n: int, rows: list[Combination], folder: str) -> list[str]:
    """Trains each combination; a sentence for each that does not train as it should."""
    references, wrong = References(rank, n, folder), []
    for row in rows:
        config = cell_of(row, n).config
        try:
            found = train(rank, n, config, folder)
        except Exception as error:
            raise RuntimeError(f"{row}: {error!r}") from error
        # alone, where nothing leaves, each use of a tied parameter adds to the sum of all micro-batches in turn
        alone = n == 1 and row["model"] == "tied" and row["accumulation"] != "1"
        # torch's all-reduce adds in an order that depends on the place in the buffer
        places = ("buffers",) if getattr(config.strategy, "reduce_with", None) == "all_reduce" else ()
        near = NEAR if row["precision"] == "fp32" else NEAR_IN_HALF
        changes = (*CHANGES, "offload") if row["offload"] == LATE else CHANGES
        wanted = references.of(row, (*changes, *REORDERS, *places))
        wrong += [f"{row}: {words}" for words in differences(found, wanted, *(near if alone else (0, 0)))]
        if row["zeropp"] == "none" and any(row[axis] != "none" for axis in REORDERS):
            plain = references.of(row, changes)
            wrong += [f"{row}: beside no groups: {words}" for words in differences(found, plain, *near)]
    return wrong


def differences(found: Outcome, wanted: Outcome, of_losses: float, of_weights: float) -> list[str]:
    """Sentences; losses and norms are compared relatively."""
    (losses, state), (wanted_losses, wanted_state) = found, wanted
    off = max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(losses, wanted_losses, strict=True))
    heard = [] if off <= of_losses else [f"losses or norms are off by {off:.2g}: {losses} and {wanted_losses}"]
    assert state.keys() == wanted_state.keys()
    offs = {key: (state[key].double() - wanted_state[key].double()).abs().max().item() for key in state}
    worst = max(offs, key=lambda key: offs[key])
    return heard + ([] if offs[worst] <= of_weights else [f"{worst} is off by {offs[worst]:.2g}"])
