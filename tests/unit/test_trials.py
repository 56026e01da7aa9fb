"""Sweepers of Hydra's propose cells and are told their objective: what is refused, run, told, printed and written."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.plugins import Plugins

from tests import made_up_sweeper
from zerobench.config import overrides
from zerobench.config.cell import Cell
from zerobench.config.compose import RefusedError, compose, compose_cells
from zerobench.config.overrides import Composer
from zerobench.config.sweeper import targets
from zerobench.sweep.cell import _blank_row
from zerobench.sweep.sweep import CellLaunch, Sweep
from zerobench.trials.command import run_proposed

MIB = 2**20
TINY = ("model=gpt_tiny", "world_size=2")
BY_OPTUNA = ("-m", "hydra/sweeper=optuna", *TINY)
BY_MADE_UP = ("-m", "hydra/sweeper=made_up", *TINY)

needs_optuna = pytest.mark.skipif(
    find_spec("hydra_plugins") is None or find_spec("hydra_plugins.hydra_optuna_sweeper") is None,
    reason="Hydra's plugin for Optuna is not installed: pip install hydra-optuna-sweeper",
)
needs_nevergrad = pytest.mark.skipif(
    find_spec("hydra_plugins") is None or find_spec("hydra_plugins.hydra_nevergrad_sweeper") is None,
    reason="Hydra's plugin for Nevergrad is not installed; docs/how-to/search-with-optuna.md says how",
)


INSTANTIATE = Plugins.instantiate_launcher

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

    ran: list[str] = []  # noqa: RUF012
    ends_at, ending = 99, "stopped"

    def run_one(self, launch: CellLaunch) -> dict[str, Any] | None:
        assert Plugins.instantiate_launcher is INSTANTIATE, "jobs of the sweep have the launcher that was chosen"
        self.reporter.start(launch)
        if len(self.ran) == self.ends_at:
            setattr(self, self.ending, True)
            return None
        self.ran.append(launch.name)
        row = self.row(launch.cell, launch.repeat)
        self.take(launch, row)
        return row

    def row(self, cell: Cell, repeat: int) -> dict[str, Any]:
        size = cell.config.micro_batch
        row = asdict(_blank_row(cell, repeat)) | {"run_id": f"{cell.cell_id}-{repeat}", "passes_agree": True}
        if cell.problems or size > 10:
            return row | {"status": "invalid" if cell.problems else "oom", "reason": "made up"}
        if size == 7:
            return row | {"status": "crash", "reason": "made up"}
        step = (1.0 + abs(size - 4)) * (1 + repeat / 10)
        times = {"step_s": step, "forward_s": step, "backward_s": step, "update_s": step}
        return row | times | {"status": "ok", "peak_bytes": size * 8 * MIB, "tokens_per_s": 1000 / step}


Ran = Callable[..., tuple[int, dict[str, Any], str]]


@pytest.fixture
def ran(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Ran:
    """Runs a command line by formula: its exit code, its account, and what it printed."""

    def run(*words: str, kind: type[Sweep] = MadeUp) -> tuple[int, dict[str, Any], str]:
        MadeUp.ran.clear()
        made_up_sweeper.told.clear()
        composed = compose([*words, f"results_dir={tmp_path}"])
        assert composed.proposed is not None
        capfd.readouterr()
        try:
            code = run_proposed(composed.proposed, composed.check, True, None, kind)
        finally:
            said = "".join(capfd.readouterr())
        newest = max((tmp_path / "searches").glob("*.yaml"), key=lambda path: path.stat().st_mtime_ns)
        return code, yaml.safe_load(newest.read_text()), said

    return run


def refusal(*words: str) -> str:
    with pytest.raises(RefusedError) as refused:
        compose([*words])
    return "; ".join(refused.value.problems)


@pytest.mark.slow
def test_a_sweeper_gets_each_cells_objective_and_infeasible_ones_as_failed(ran: Ran) -> None:
    words = ("objective=tokens_per_s", "micro_batch=2,4,16,0", "hydra.sweeper.n_trials=6", "hydra.sweeper.n_jobs=4")
    code, account, said = ran(*BY_MADE_UP, *words)
    assert made_up_sweeper.told == [-1000 / 3, -1000, None, None, -1000 / 3, -1000], (
        "it minimizes, unless it can be told"
    )
    assert MadeUp.ran == [f"micro_batch={size}" for size in (2, 4, 16, 0)], "no cell is run twice"
    assert [one["status"] for one in account["trials"]] == ["ok", "ok", "oom", "invalid", "ok", "ok"]
    assert account["best"][0]["values"] == {"tokens_per_s": 1000.0}
    assert account["found"] == {"name": "made_up"}
    assert "6 trials of made_up, 2 of them repeated; infeasible: 1 oom, 1 invalid" in said
    assert "best: micro_batch=4: tokens_per_s 1000 tokens / s" in said
    assert "zerobench model=gpt_tiny world_size=2" in said
    assert "micro_batch=4 measure.repeats=3 rerun=true" in said, "the best of many times is measured again"
    assert "1000 tokens / s best" in said, "its row is marked"
    assert "Error executing job" not in said
    assert code == 0, "not to fit is an answer"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_memory_limit_launches_of_a_cell_and_a_crash(ran: Ran) -> None:
    words = ("objective=tokens_per_s", "micro_batch=4,2", "measure.repeats=3")
    code, account, said = ran(*BY_MADE_UP, *words, "search.memory_limit=20MiB", "hydra.sweeper.n_trials=2")
    assert [one["status"] for one in account["trials"]] == ["over the limit", "ok"]
    geometric = 1000 / 3 / (1.1 * 1.2) ** (1 / 3)
    assert account["best"][0]["values"]["tokens_per_s"] == pytest.approx(geometric), "as tables have it"
    assert len(account["best"][0]["runs"]) == 3
    assert "search.memory_limit" not in account["best"][0]["command"]
    assert code == 0
    assert "infeasible: 1 over the limit" in said
    code, account, said = ran(*BY_MADE_UP, "objective=peak_bytes", "micro_batch=7,2", "hydra.sweeper.n_trials=2")
    assert code == 1, "a crash is no answer"
    assert "peak_bytes 16.0 MiB" in said
    assert "measure.repeats" not in account["best"][0]["command"], "bytes need no second launch"


@pytest.mark.thorough
def test_what_ends_a_sweep_early_keeps_what_is_there(ran: Ran, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*BY_MADE_UP, "micro_batch=2,4,6", "hydra.sweeper.n_trials=3")
    monkeypatch.setattr(MadeUp, "ends_at", 2)
    code, account, said = ran(*words, "objective=peak_bytes")
    assert (code, account["best"][0]["values"]) == (130, {"peak_bytes": 16 * MIB})
    assert "3 trials of made_up; not run: 1" in said
    assert "zerobench status" in said
    monkeypatch.setattr(MadeUp, "ending", "failed_fast")
    assert ran(*words, "objective=peak_bytes")[0] == 1
    monkeypatch.setattr(MadeUp, "ends_at", 99)
    code, account, said = ran(*BY_MADE_UP, "objective=peak_bytes", "micro_batch=16,17", "hydra.sweeper.n_trials=2")
    assert (code, account["best"]) == (1, [])
    assert "none is feasible, so none is best by peak_bytes" in said
    limited = ("objective=peak_bytes", "micro_batch=2,16", "hydra.sweeper.max_failure_rate=0.5")
    code, account, said = ran(*BY_MADE_UP, *limited)
    assert (code, [one["status"] for one in account["trials"]]) == (1, ["ok", "oom"])
    permits = "hydra.sweeper.max_failure_rate permits, as micro_batch=16: oom: made up"
    assert f"hydra/sweeper=made_up gave up: more trials of a batch failed than {permits}" in said


@pytest.mark.slow
def test_a_figure_that_no_run_has_ends_the_sweep_with_a_sentence(ran: Ran) -> None:
    with pytest.raises(RefusedError, match="objective=overlap: seed=1 ran and has no such figure"):
        ran(*BY_MADE_UP, "objective=overlap", "seed=1,2")
    assert len(MadeUp.ran) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("objective=peak_bytes", "seed=1,2"), "no sweeper asks for it; add hydra/sweeper=optuna, or leave it out"),
        ((*BY_MADE_UP, "seed=1,2"), "hydra/sweeper=made_up: it needs an objective; add objective=COLUMN"),
        ((*BY_MADE_UP, "objective=peak_byte", "seed=1,2"), "no such column of numbers; did you mean peak_bytes?"),
        ((*BY_MADE_UP, "objective=strategy", "seed=1,2"), "its column is str, not a number"),
        ((*BY_MADE_UP, "objective=psi", "seed=1,2"), "is more psi better, or less? its direction is not known"),
        ((*BY_MADE_UP, "objective=peak_bytes,step_s", "seed=1,2"), "hydra/sweeper=made_up takes one objective"),
        ((*BY_MADE_UP, "objective=peak_bytes"), "nothing to choose from; give keys several values"),
        ((*BY_MADE_UP[1:], "objective=peak_bytes"), "a sweeper proposes the cells of a sweep; add -m"),
        ((*BY_MADE_UP, "objective=peak_bytes", "sed=1,2"), "sed: no such key"),
        ((*BY_MADE_UP, "objective=peak_bytes", "seed=interval(1,9)"), "of whole numbers it is seed=int(interval(1,9))"),
        (("-m", "clip=interval(1,3)"), "an interval has no end of values; list them, or have a sweeper choose"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra.sweeper.n_trial=3"), "did you mean hydra.sweeper.n_trials?"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra.sweeper.n_trials=0"), "n_trials=0: must be at least 1"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra.sweeper.n_trials=x"), "hydra.sweeper.n_trials=x: Value 'x' of"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra.sweeper.n_jobs=1,2"), "a sweep has one sweeper"),
        (("-m", "hydra.sweeper.n_trials=3", "seed=1,2"), "no Hydra sweeper is chosen; add hydra/sweeper="),
        (("-m", "hydra/sweeper=mad_up", "seed=1,2"), "hydra/sweeper=mad_up: no such choice; did you mean made_up?"),
        ((*BY_MADE_UP, "objective=peak_bytes", "hydra/sweeper/sampler=none"), "sampler=none: no such choice"),
        ((*BY_MADE_UP, "objective=peak_bytes", "+hydra.sweeper.storage=redis://x"), "the same command again"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_a_sentence(words: tuple[str, ...], sentence: str) -> None:
    assert sentence in refusal(*words)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:[\\s\\S]*is validated against ConfigStore schema")
def test_code_that_no_installed_plugin_names_is_not_imported(tmp_path: Path) -> None:
    assert "builtins.dict" in targets()
    folder = tmp_path / "hydra/sweeper/sampler"
    folder.mkdir(parents=True)
    (folder / "made_up.yaml").write_text("_target_: builtins.print\n")
    words = (*BY_MADE_UP, "objective=peak_bytes", "seed=1,2", "+hydra/sweeper/sampler=made_up")
    assert compose([*words]).proposed is not None
    shadowed = refusal(*words, "--config-dir", str(tmp_path))
    assert "hydra.sweeper.sampler._target_=builtins.print: a config names no code to import" in shadowed
    assert "names no code to import" in refusal(*words, "hydra.sweeper.sampler._target_=builtins.print")


def test_a_plugin_that_cannot_be_imported_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Composer, overrides: list[str]) -> Any:
        raise ValueError("mutable default <class 'hydra_plugins.hydra_nevergrad_sweeper.config.OptimConf'>")

    monkeypatch.setattr(Composer, "compose_whole", fails)
    overrides.compositions_of.cache_clear()
    assert "a Hydra plugin cannot be imported here: mutable default" in refusal("-m", "seed=1,2")


@pytest.mark.slow
def test_an_axis_has_the_values_that_were_written_and_other_commands_refuse_it() -> None:
    words = ("micro_batch=range(1,9)", "strategy=glob(zero?)", "clip=tag(log,interval(0.1,2))", "seed=range(0,9,3)")
    sized = ("strategy.bucket_bytes=choice(1MiB,4MiB)", "batch=range(8,9)", "sequence=64")
    proposed = compose([*BY_MADE_UP, "objective=peak_bytes", *words, *sized]).proposed
    assert proposed is not None
    assert proposed.axes == (
        "micro_batch=int(interval(1,8))", "strategy=choice(zero1,zero2,zero3)", "clip=tag(log,interval(0.1,2))",
        "seed=choice(0,3,6)", "strategy.bucket_bytes=choice(1048576,4194304)", "batch=choice(8)",
    )  # fmt: skip
    assert proposed.fixed == (*TINY, "sequence=64")
    assert proposed.changes(one_by_one=True) == {"n_jobs": 1, "max_failure_rate": 1.0, "seed": 0}
    assert "n_jobs" not in proposed.changes(one_by_one=False), "jobs run side by side"
    with pytest.raises(RefusedError, match="only a sweep of the command line is proposed so"):
        compose_cells([*BY_MADE_UP, "objective=peak_bytes", *words])


@pytest.mark.thorough
@needs_optuna
def test_optuna_finds_what_is_best_and_fails_what_is_infeasible(ran: Ran) -> None:
    words = ("micro_batch=range(0,13)", "strategy=ddp,zero3", "strategy.bucket_bytes=1MiB,4MiB")
    _, account, said = ran(*BY_OPTUNA, "objective=tokens_per_s", "hydra.sweeper.n_trials=6", *words)
    values = [one["values"]["tokens_per_s"] for one in account["trials"] if one["status"] == "ok"]
    assert account["found"]["best_value"] == max(values) == account["best"][0]["values"]["tokens_per_s"]
    assert len(values) < 6 == len(account["trials"]), "some were infeasible"
    assert {one["parameters"][0] for one in account["trials"]} <= {f"micro_batch={size}" for size in range(13)}
    assert "Study" not in said
    storage = "hydra.sweeper.storage=sqlite:///x"
    assert "the same command again resumes it" in refusal(*BY_OPTUNA, "objective=peak_bytes", "seed=1,2", storage)
    opposite = refusal(*BY_OPTUNA, "objective=peak_bytes", "seed=1,2", "hydra.sweeper.direction=maximize")
    assert "smaller values of objective=peak_bytes are better" in opposite


@needs_optuna
@pytest.mark.thorough
def test_optuna_takes_several_objectives_and_goes_through_a_grid(ran: Ran) -> None:
    words = (*BY_OPTUNA, "objective=peak_bytes,tokens_per_s", "micro_batch=range(1,9)", "hydra.sweeper.n_trials=12")
    front = ran(*words)[1]
    found = {tuple(one["values"]) for one in front["found"]["solutions"]}
    assert {tuple(one["values"].values()) for one in front["best"]} == found
    assert len(found) > 1
    assert ran(*words)[1] == front, "the same command proposes the same cells"
    grid = ran(*BY_OPTUNA, "hydra/sweeper/sampler=grid", "objective=peak_bytes", "micro_batch=range(1,4)")[1]
    assert sorted(one["parameters"] for one in grid["trials"]) == [[f"micro_batch={size}"] for size in (1, 2, 3)]


@needs_nevergrad
@pytest.mark.thorough
def test_nevergrad_finds_what_is_best_too(ran: Ran) -> None:
    by_nevergrad = ("-m", "hydra/sweeper=nevergrad", *TINY, "hydra.sweeper.optim.budget=12")
    code, account, _ = ran(*by_nevergrad, "objective=tokens_per_s", "micro_batch=range(1,13)", "strategy=ddp,zero3")
    ok = [one["values"]["tokens_per_s"] for one in account["trials"] if one["status"] == "ok"]
    assert account["found"]["best_evaluated_result"] == max(ok) == account["best"][0]["values"]["tokens_per_s"]
    assert code in (0, 1)
    assert "takes one objective" in refusal(*by_nevergrad, "objective=step_s,peak_bytes", "seed=1,2")


@needs_optuna
@pytest.mark.thorough
def test_a_real_sweep_of_simulated_cells_is_taken_up_again(tmp_path: Path) -> None:
    words = ["-m", "hydra/sweeper=optuna", "objective=peak_bytes", "strategy=ddp,zero1,zero2,zero3", "world_size=4"]
    words += ["model=gpt_tiny", "backend=simulated", "tensors=fake", "hydra.sweeper.n_trials=4"]
    words += [f"results_dir={tmp_path}"]
    said = [
        subprocess.run([sys.executable, "-m", "zerobench", *words], capture_output=True, text=True) for _ in range(2)
    ]
    assert [one.returncode for one in said] == [0, 0], said[0].stderr
    assert "reused" not in said[0].stderr.split("[2/2]", maxsplit=1)[0]
    ends = [line for line in said[1].stderr.splitlines() if ": ok, " in line]
    assert len(ends) >= 2
    assert all("reused an earlier run" in line for line in ends), "no cell is run again"
    best = [line for line in said[0].stdout.splitlines() if line.startswith("best: ")]
    assert best == [line for line in said[1].stdout.splitlines() if line.startswith("best: ")]
