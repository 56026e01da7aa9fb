"""The table of strategies: one row says all, a user's row comes by the same call, a peer's null becomes a value."""

import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerobench
from tests.cells import cell
from zerobench import cli, strategies, zero
from zerobench.config.compose import RefusedError, compose_cells
from zerobench.config.flat import base_name, name_cells
from zerobench.predict.estimate import estimate
from zerobench.results import provenance
from zerobench.strategies import specs, table
from zerobench.sweep.cell import run_cell
from zerobench.theory.strategy import ZERO1

ROOT = Path(__file__).parents[2]
CELL = ("model=gpt_tiny", "world_size=2", "device=cpu")


class Mine:
    """A strategy of a test's."""

    def __init__(self, model: nn.Module, optimizer: Any, depth: int = 3, fast: bool = False, note: str | None = None):
        self.model, self.optimizer, self.options = model, optimizer, (depth, fast, note)
        self.calls: list[str] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.calls.append("step")
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.calls.append("zero_grad")
        self.model.zero_grad()


def wrapped(build: Any, clips: bool = False, **section: Any) -> Any:
    zerobench.register_strategy("mine", build)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return strategies.wrap({"name": "mine", **section}, model, optimizer, clips=clips, tile_bytes=7)


@pytest.mark.slow
def test_options_are_typed_keys_of_the_command_line_and_reach_the_builder() -> None:
    zerobench.register_strategy("mine", Mine, label="My own", color="#123456")
    row = strategies.spec_of("mine")
    assert asdict(row.options()) == {"name": "mine", "depth": 3, "fast": False, "note": None}
    assert (row.label, row.look.color, row.theory, row.of_user) == ("My own", "#123456", None, True)
    swept = compose_cells(["-m", "strategy=ddp,mine", "strategy.depth=1,2", *CELL])
    assert [c.config.section("strategy").get("depth") for c in swept] == [None, 1, 2]
    assert [c.problems for c in swept] == [()] * 3
    assert len({c.cell_id for c in swept}) == 3
    assert estimate(swept[1].config).psi == estimate(swept[0].config).psi
    assert estimate(swept[1].config).states_bytes is None
    engine = wrapped(Mine, depth=5, fast=True, note="x")
    assert engine._engine.options == (5, True, "x")


@pytest.mark.slow
def test_a_theory_fills_the_predicted_columns_of_a_users_strategy() -> None:
    """A strategy that holds and moves what ZeRO-1 does may say so; its options are those that theory reads."""

    def build(model: nn.Module, optimizer: Any, bucket_bytes: int = 2**20, accumulate: str = "last") -> Mine:
        return Mine(model, optimizer)

    zerobench.register_strategy("mine", build, theory=ZERO1)
    (one,) = compose_cells(["strategy=mine", "strategy.bucket_bytes=65536", *CELL])
    (ours,) = compose_cells(["strategy=zero1", "strategy.bucket_bytes=65536", *CELL])
    assert estimate(one.config) == estimate(ours.config)
    assert estimate(one.config).states_bytes
    (wrong,) = compose_cells(["strategy=mine", "strategy.accumulate=some", *CELL])
    assert wrong.problems == ("strategy.accumulate=some: use every or last",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("strategy.depht=2", "strategy.depht: no such key under strategy=mine; did you mean strategy.depth?"),
        ("strategy.depth=deep", "strategy.depth=deep: wants an integer, and 'deep' is none"),
        ("strategy=mien", "strategy=mien: no such strategy; did you mean mine? (all choices: "),
    ],
)
def test_a_wrong_option_is_answered_with_the_right_one(override: str, sentence: str) -> None:
    zerobench.register_strategy("mine", Mine)
    with pytest.raises(RefusedError) as refused:
        compose_cells(["strategy=mine", override, *CELL] if override[8] == "." else [override, *CELL])
    assert [problem.startswith(sentence) for problem in refused.value.problems] == [True]


@pytest.mark.slow
def test_a_key_in_bytes_takes_a_size_and_makes_the_cell_of_the_number() -> None:
    sizes = ["1MiB", "'0.5 mib'", "auto"]
    cells = compose_cells(["-m", "strategy=zero1", f"strategy.bucket_bytes={','.join(sizes)}", *CELL])
    numbers = [1048576, 524288, "auto"]
    assert [cell.config.strategy.values()["bucket_bytes"] for cell in cells] == numbers
    plain = compose_cells(["-m", "strategy=zero1", "strategy.bucket_bytes=1048576,524288,auto", *CELL])
    assert [cell.cell_id for cell in cells] == [cell.cell_id for cell in plain]
    (tile,) = compose_cells(["strategy=zero1", "precision=bf16", "precision.tile_bytes=64KiB", *CELL])
    assert tile.config.precision.tile_bytes == 65536


@pytest.mark.slow
def test_help_and_completion_know_a_users_strategy(capsys: Any, monkeypatch: Any) -> None:
    zerobench.register_strategy("mine", Mine, label="My own")
    assert cli.run(["--help", "strategy=mine"]) == 0
    said = capsys.readouterr().out
    assert "My own: A strategy of a test's." in said
    assert "strategy.depth=3" in said
    assert "strategy.note=null" in said
    monkeypatch.setenv("COMP_LINE", "zerobench strategy=mi")
    assert cli.run(["-sc", "query=bash"]) == 0
    assert capsys.readouterr().out.split() == ["strategy=mine"]


@dataclass
class Options:
    """Options as a dataclass."""

    depth: int = 4


@dataclass
class Untyped:
    depth: list[int] | None = None


def no_optimizer(model: nn.Module) -> None: ...
def no_default(model: nn.Module, optimizer: Any, depth: int) -> None: ...
def a_list(model: nn.Module, optimizer: Any, depth: list[int] | None = None) -> None: ...
def nothing(model: nn.Module, optimizer: Any) -> None: ...


@pytest.mark.parametrize(
    ("name", "build", "more", "sentence"),
    [
        ("zero2", Mine, {}, "the name 'zero2' is taken"),
        ("my own", Mine, {}, "'my own' is no usable name; use letters, digits and _"),
        ("mine", 3, {}, "mine needs a function that builds it, not 3"),
        ("mine", no_optimizer, {}, "mine's builder must be build(model, optimizer, ...), with options after these"),
        ("mine", no_optimizer, {"options": Options}, "mine's builder must be build(model, optimizer, ...)"),
        ("mine", no_default, {}, "mine's parameter depth needs a default and a type among int, float, str, bool"),
        ("mine", a_list, {}, "mine's parameter depth needs a default and a type among"),
        ("mine", a_list, {"options": Untyped}, "mine's option depth needs a default and a type among"),
        ("mine", nothing, {"options": Options}, "mine's builder takes no parameter depth, which is one of its options"),
        ("mine", Mine, {"options": 3}, "mine: options must be a dataclass, not 3"),
        ("mine", Mine, {"hue": "red"}, "mine: hue is no field of StrategySpec"),
    ],
)
def test_what_cannot_be_registered_is_one_sentence(name: str, build: Any, more: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=r"^register_strategy: ") as refused:
        zerobench.register_strategy(name, build, **more)
    assert sentence in str(refused.value)
    assert "mine" not in strategies.specs()


def test_a_dataclass_may_say_the_options() -> None:
    zerobench.register_strategy("mine", Mine, options=Options)
    assert asdict(strategies.spec_of("mine").options()) == {"name": "mine", "depth": 4}
    zerobench.register_strategy("mine", Mine, options=Options)  # the same again: a script that is imported twice


class Lacking:
    def __init__(self, model: nn.Module, optimizer: Any) -> None: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def step(self) -> None: ...


def test_an_engine_that_lacks_a_method_is_told_which_before_the_first_step() -> None:
    words = r"^strategy=mine: its engine, Lacking, has no method backward and no zero_grad$"
    with pytest.raises(TypeError, match=words):
        wrapped(Lacking)


def test_clipping_wants_an_engine_that_clips() -> None:
    with pytest.raises(TypeError, match=r"Mine, has no method clip_grad_norm_; clip needs it$"):
        wrapped(Mine, clips=True)


def test_what_an_engine_leaves_out_is_completed() -> None:
    engine = wrapped(Mine)
    assert not isinstance(engine, Mine)
    engine.backward(engine(torch.ones(1, 2)))
    with engine.no_sync():
        engine.backward(engine(torch.ones(1, 2)))
    engine.step()
    engine.settle()
    assert engine._engine.calls == ["step", "zero_grad"]
    assert (engine.module, engine.optimizer) == (engine._engine.model, engine._engine.optimizer)
    assert not engine.shares_gradients


@pytest.mark.shown(2)
@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ("precision=bf16", "precision=bf16: strategy=mine has no fp32 master weights here; use precision=fp32"),
        ("offload=cpu", "offload=cpu: strategy=mine does not offload here; use one of zero1, zero2, zero3"),
        ("node_size=1", "node_size=1: strategy=mine knows no groups of ranks; leave it out, or use zero1, zero2,"),
        ("backend=simulated", "strategy=mine: a simulated world supports ddp, zero1, zero2, zero3, megatron"),
        ("precision.wire_dtype=bf16", "precision.wire_dtype=bf16: strategy=mine keeps and sends gradients in"),
    ],
)
def test_what_it_does_not_compose_with_is_said_before_ranks_start(more: str, sentence: str) -> None:
    zerobench.register_strategy("mine", Mine)
    (one,) = compose_cells(["strategy=mine", more, *CELL])
    assert any(sentence in problem for problem in one.problems), one.problems


@pytest.mark.slow
def test_what_it_says_that_it_composes_with_its_builder_is_given() -> None:
    given: dict[str, Any] = {}

    def build(model: nn.Module, optimizer: Any, node_size: int, tile_bytes: int) -> Mine:
        given.update(node_size=node_size, tile_bytes=tile_bytes)
        return Mine(model, optimizer)

    zerobench.register_strategy("mine", build, composes=strategies.Composition(groups=True), half="masters")
    (one,) = compose_cells(["strategy=mine", "node_size=1", "precision=bf16", *CELL])
    assert one.problems == ()
    section, model = one.config.section("strategy"), nn.Linear(2, 2)
    assert set(section) == {"name"}
    optimizer = torch.optim.SGD(model.parameters())
    strategies.wrap(section, model, optimizer, node_size=1, tile_bytes=7, wire_dtype=torch.bfloat16)
    assert given == {"node_size": 1, "tile_bytes": 7}


def test_the_users_code_is_part_of_a_runs_source_and_of_no_other_strategys() -> None:
    ours = cell("zero1", 2).config
    before = provenance.source_of(ours)
    zerobench.register_strategy("mine", Mine)
    mine = replace(ours, strategy=strategies.spec_of("mine").options())
    assert provenance.source_of(mine) != before == provenance.source_of(ours)
    assert strategies.find("somebody_elses") is None
    with pytest.raises(ValueError, match="strategy=somebody_elses: it is none of ddp, zero1"):
        strategies.spec_of("somebody_elses")


@pytest.mark.slow
def test_an_installed_package_offers_a_strategy_by_an_entry_point(monkeypatch: Any) -> None:
    point = SimpleNamespace(name="packaged", load=lambda: Mine)
    monkeypatch.setattr(table, "installed", lambda _: (point,))
    (one,) = compose_cells(["strategy=packaged", "strategy.depth=2", *CELL])
    assert one.config.section("strategy") == {"name": "packaged", "depth": 2, "fast": False, "note": None}
    assert one.problems == ()


def test_the_table_and_the_library_agree() -> None:
    """The engine is a library of its own below the table, and has its own names."""
    assert set(zero.STAGES) <= set(strategies.built_in())
    offload = {name: row.composes.offload for name, row in strategies.built_in().items() if row.composes.offload}
    assert offload == zero.OFFLOADS
    for name, defaults in zero.DEFAULTS.items():
        said = strategies.spec_of(name).precision_defaults
        assert {key: defaults[key] for key in said} == {
            key: {"fp32": torch.float32}.get(value, value) for key, value in said.items()
        }
    assert [spec.name for spec in strategies.specs().values() if spec.reference is not None] == ["ddp"]


def test_the_table_is_read_without_torch() -> None:
    code = "import sys, zerobench.strategies as s; assert len(s.specs()) > 9; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout == "False\n"


PEERS = {name: spec for name, spec in specs().items() if spec.tuning}

OPTIONAL = {"reshard_ranks"}
"""Options that may stay null in a resolved cell."""


@pytest.mark.parametrize("name", sorted(PEERS))
def test_null_follows_tuned_and_a_value_stands(name: str) -> None:
    spec = PEERS[name]
    section = asdict(spec.options())
    assert {key for key, value in section.items() if value is None} - OPTIONAL == set(spec.tuning)
    plain, best = (spec.filled({**section, "tuned": tuned}) for tuned in (False, True))
    assert {key for key, value in plain.items() if value is None} <= OPTIONAL
    assert plain != {**best, "tuned": False}
    key, (default, _) = next(iter(spec.tuning.items()))
    assert spec.filled({**section, "tuned": True, key: default})[key] == default


def test_what_is_tuned_is_in_the_cell_and_in_its_name() -> None:
    plain, best = cell("fsdp2", 2), cell("fsdp2", 2, tuned=True)
    assert (plain.config.strategy.prefetch, best.config.strategy.prefetch) == (0, 1)
    assert plain.cell_id != best.cell_id
    assert base_name(best.config) == base_name(plain.config) + " tuned"
    assert name_cells([plain.config, best.config]) == ["fsdp2 tiny N=2 b=8", "fsdp2 tiny N=2 b=8 tuned"]


def test_what_is_not_installed_is_said_before_ranks_start(tmp_path, monkeypatch) -> None:
    lacking = replace(specs()["zero2"], requires="no_such_module", install="pip install it")
    monkeypatch.setitem(table._SPECS, "zero2", lacking)
    one = cell("zero2", 2, results_dir=str(tmp_path))
    row = run_cell(one, lambda _: None)
    assert row.status == "invalid"
    assert row.reason.startswith("strategy=zero2: needs no_such_module, which is not installed")
    assert "pip install" in row.reason
