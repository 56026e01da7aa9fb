"""Sweepers of Hydra's propose cells and are told their objective: what is refused, run, told and printed."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any

import pytest

from tests import made_up_sweeper
from zerobench.config import composer
from zerobench.config.cell import Cell
from zerobench.config.compose import RefusedError, compose, compose_cells
from zerobench.config.composer import Composer
from zerobench.records import RunRow
from zerobench.sweep.cell import new_row
from zerobench.sweep.command import run_proposed
from zerobench.sweep.sweep import Sweep

MIB = 2**20
TINY = ("model=gpt_tiny", "world_size=2")
BY_OPTUNA = ("-m", "hydra/sweeper=optuna", *TINY)
BY_MADE_UP = ("-m", "hydra/sweeper=made_up", *TINY)

needs_optuna = pytest.mark.skipif(
    find_spec("hydra_plugins") is None or find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="Hydra's plugin for Optuna is not installed: pip install hydra-optuna-sweeper",
)

composed: dict[tuple[Any, ...], tuple[Any, Any]] = {}
"""Configs that were composed already, with Hydra's loader: it takes a quarter of a second for each."""


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    real = Composer.compose_whole

    def once(self: Composer, overrides: list[str]) -> Any:
        key = (*self.folders, *overrides)
        if key not in composed:
            composed[key] = real(self, overrides), self.loader
        config, self.loader = composed[key]
        return copy.deepcopy(config)

    monkeypatch.setattr(Composer, "compose_whole", once)
    with made_up_sweeper.installed():
        yield


class MadeUp(Sweep):
    """Runs a cell by formula: 8 MiB per sequence, 80 MiB at most, 100 tokens/s less for each 8 sequences."""

    ran: list[int] = []  # noqa: RUF012
    ends_at, ending = 99, "stopped"

    def run_one(self, launch: Cell) -> RunRow | None:
        self.reporter.start(launch)
        if len(self.ran) == self.ends_at:
            setattr(self, self.ending, True)
            return None
        self.ran.append(launch.config.micro_batch)
        row = self.row(launch)
        self.take(launch, row)
        return row

    def row(self, cell: Cell) -> RunRow:
        size, repeat = cell.config.micro_batch, cell.repeat
        row = replace(new_row(cell), run_id=f"{cell.cell_id}-{repeat}", passes_agree=True)
        if cell.problems or size > 10:
            return replace(row, status="invalid" if cell.problems else "oom", reason="made up")
        if size == 7:
            return replace(row, status="crash", reason="made up")
        step = (1.0 + abs(size - 4)) * (1 + repeat / 10)
        times = {"step_s": step, "forward_s": step, "backward_s": step, "update_s": step}
        return replace(row, **times, status="ok", peak_bytes=size * 8 * MIB, tokens_per_s=1000 / step)


Ran = Callable[..., tuple[int, str]]


@pytest.fixture
def ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Ran:
    """Runs a command line by formula: its exit code, and what it printed."""

    def run(*words: str, kind: type[Sweep] = MadeUp) -> tuple[int, str]:
        MadeUp.ran.clear()
        made_up_sweeper.told.clear()
        composed = compose([*words, f"results_dir={tmp_path}"])
        assert composed.proposes
        capfd.readouterr()
        code = run_proposed(composed, None, kind, True)
        return code, "".join(capfd.readouterr())

    return run


def refusal(*words: str) -> str:
    with pytest.raises(RefusedError) as refused:
        compose([*words])
    return "; ".join(refused.value.problems)


@pytest.mark.slow
def test_sweeper_gets_signed_objective_of_each_cell_and_inf_if_infeasible(ran: Ran) -> None:
    words = ("objective=-tokens_per_s", "micro_batch=2,4,16,0", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=4")
    code, said = ran(*BY_MADE_UP, *words)
    assert made_up_sweeper.told == [-1000 / 3, -1000, inf, inf, -1000 / 3, -1000]
    assert MadeUp.ran == [2, 4, 16, 0], "no cell is run twice"
    assert "made_up: 4 cells: 2 ok, 1 oom, 1 invalid" in said
    assert "name: made_up" in said, "the sweeper's own account"
    assert "Error executing job" not in said
    assert code == 0, "not to fit is an answer"
    ran(*BY_MADE_UP, "objective=+tokens_per_s", *words[1:])
    assert made_up_sweeper.told == [1000 / 3, 1000, -inf, -inf, 1000 / 3, 1000]


@pytest.mark.thorough
def test_a_memory_limit_launches_of_a_cell_and_a_crash(ran: Ran) -> None:
    words = ("objective=-tokens_per_s", "micro_batch=4,2", "measure.repeats=3")
    code, said = ran(*BY_MADE_UP, *words, "search.memory_limit=20MiB", "hydra.sweeper.n_trials=2")
    geometric = 1000 / 3 / (1.1 * 1.2) ** (1 / 3)
    assert made_up_sweeper.told == [inf, pytest.approx(-geometric)], "as tables have it"
    assert code == 0
    assert "1 over the limit, 1 ok" in said
    code, said = ran(*BY_MADE_UP, "objective=peak_bytes", "micro_batch=7,2", "hydra.sweeper.n_trials=2")
    assert code == 1, "a crash is no answer"
    assert made_up_sweeper.told == [inf, 16 * MIB]


@pytest.mark.slow
def test_a_figure_that_no_run_has_ends_the_sweep_with_a_sentence(ran: Ran) -> None:
    with pytest.raises(RefusedError, match="objective=overlap: a run has no such figure"):
        ran(*BY_MADE_UP, "objective=-overlap", "seed=1,2")
    assert len(MadeUp.ran) <= 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("objective=peak_bytes", "seed=1,2"), "no sweeper asks for it; add hydra/sweeper=optuna, or leave it out"),
        ((*BY_MADE_UP, "seed=1,2"), "hydra/sweeper=made_up: it needs an objective; add objective=COLUMN"),
        ((*BY_MADE_UP, "objective=peak_byte", "seed=1,2"), "no such column of numbers; did you mean peak_bytes?"),
        ((*BY_MADE_UP, "objective=tokens_per_s", "seed=1,2"), "write objective=-tokens_per_s, or +tokens_per_s if"),
        ((*BY_MADE_UP[1:], "objective=peak_bytes"), "hydra/sweeper=made_up: it needs a sweep; add -m"),
        ((*BY_MADE_UP, "objective=peak_bytes", "sed=1,2"), "sed: no such key"),
        ((*BY_MADE_UP, "objective=peak_bytes", "seed=interval(1,9)"), "of whole numbers it is seed=int(interval(1,9))"),
        (("-m", "clip=interval(1,3)"), "an interval has no end of values; list them, or have a sweeper choose"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra.sweeper.n_trial=3"), "Key 'n_trial' not in 'MadeUpConfig'"),
        (("-m", "hydra/sweeper=mad_up", "seed=1,2"), "Could not find 'hydra/sweeper/mad_up'"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*words)


def test_a_plugin_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Composer, overrides: list[str]) -> Any:
        raise ValueError("mutable default <class 'hydra_plugins.hydra_nevergrad_sweeper.config.OptimConf'>")

    monkeypatch.setattr(Composer, "compose_whole", fails)
    composer.composition_cache.cache_clear()
    assert "a Hydra plugin cannot be imported here: mutable default" in refusal("-m", "seed=1,2")


@pytest.mark.slow
def test_a_sweeper_gets_the_keys_with_several_values_alone() -> None:
    words = ("micro_batch=range(1,9)", "strategy=glob(zero?)", "clip=tag(log,interval(0.1,2))")
    sized = ("strategy.bucket_bytes=choice(1MiB,4MiB)", "sequence=64")
    composed = compose([*BY_MADE_UP, "objective=peak_bytes", *words, *sized])
    swept = ("strategy=zero1,zero2,zero3", "strategy.bucket_bytes=choice(1048576,4194304)")
    assert composed.swept == (words[0], swept[0], words[2], swept[1])
    assert composed.fixed == (*TINY, "sequence=64")
    with pytest.raises(RefusedError, match="only a sweep of the command line is proposed so"):
        compose_cells([*BY_MADE_UP, "objective=peak_bytes", *words])


@pytest.mark.thorough
@needs_optuna
def test_optuna_finds_what_is_best_and_fails_what_is_infeasible(ran: Ran) -> None:
    words = ("micro_batch=range(0,13)", "strategy=ddp,zero3", "strategy.bucket_bytes=1MiB,4MiB")
    _, said = ran(
        *BY_OPTUNA, "objective=-tokens_per_s", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=1", *words
    )
    best = max(1000 / (1.0 + abs(size - 4)) for size in MadeUp.ran if 0 < size <= 10 and size != 7)
    assert f"best_value: {-best}" in said
    assert "Study" not in said
    first = list(MadeUp.ran)
    ran(*BY_OPTUNA, "objective=-tokens_per_s", "hydra.sweeper.n_trials=6", "hydra.sweeper.sampler.seed=1", *words)
    assert first == MadeUp.ran, "the same seed proposes the same cells"
    several = ("objective=peak_bytes,-tokens_per_s", "micro_batch=range(1,6)", "hydra.sweeper.n_trials=8")
    several = (*several, "hydra.sweeper.direction=[minimize,minimize]")
    assert "solutions:" in ran(*BY_OPTUNA, *several)[1]
