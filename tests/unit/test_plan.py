"""`zerobench plan`: the search along an axis, what is recommended and why, bad input, settings for other systems."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from analysis import largest_model
from tests.cells import cell
from zerobench.commands.plan import command, fastest, search
from zerobench.commands.plan.candidates import Candidate, Capacity, Used, candidates
from zerobench.commands.plan.command import plan
from zerobench.commands.plan.fastest import TriedRow, whole_used
from zerobench.commands.plan.recommend import GOALS, nothing_fits, recommended, sentence
from zerobench.commands.plan.search import (
    ExecutedCell,
    PlanAxis,
    PlanRow,
    family_axis,
    gpus_axis,
    layers_axis,
    micro_batch_axis,
    run_searches,
    shapes,
    walk,
)
from zerobench.config.cell import Cell
from zerobench.config.compose import compose_cells
from zerobench.fake_execution import Execution, execute
from zerobench.timing.prediction import Reduced

MIB = 2**20

SMALL = ("--device", "cpu", "--reserve", "0", "--jobs", "1")
TINY = ("model=gpt", "model.hidden=32", "model.heads=2", "model.vocabulary=64", "sequence=16")


def walked(axis: PlanAxis, load_of: dict[int, float] | object, end: int | None = None) -> tuple[int | None, list[int]]:
    """Runs a walk against a function of the value; returns the place found, and the places probed."""
    search, probed, load = walk(axis, len(axis.values) if end is None else end), [], None
    try:
        while True:
            place = search.send(load) if load is not None else next(search)
            probed.append(place)
            load = load_of(axis.values[place])  # type: ignore[operator]
    except StopIteration as stop:
        return stop.value, probed


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 85, 300, 512])
def test_the_last_value_that_fits_is_found_with_few_probes(wanted: int) -> None:
    """The load has a step in it, as buckets and padding have; the answer and its neighbor are both probed."""
    axis = layers_axis()

    def load(layers: int) -> float:
        return (0.1 + layers + (3 if layers > 40 else 0)) / (0.6 + wanted + (3 if wanted > 40 else 0))

    found, probed = walked(axis, load)
    assert found is not None
    assert axis.values[found] == wanted
    assert {found, min(found + 1, len(axis.values) - 1)} <= set(probed)
    assert len(probed) <= 9


def test_a_search_of_gpus_follows_one_over_n() -> None:
    found, probed = walked(gpus_axis(1024), lambda ranks: 0.3 + 60.3 / ranks)
    assert found is not None
    assert gpus_axis(1024).values[found] == 87
    assert len(probed) <= 8
    assert walked(gpus_axis(8), lambda ranks: 3.0)[0] is None


def test_a_coordinate_that_stands_still_gives_way_to_the_places() -> None:
    axis = replace(layers_axis(), coordinate=lambda layers: 7.0)  # states that are all in files
    found, probed = walked(axis, lambda layers: (3 + layers) / 123.5)
    assert axis.values[found or 0] == 120
    assert len(probed) <= 9


def test_a_strange_load_is_bracketed_all_the_same() -> None:
    found, _ = walked(micro_batch_axis(), lambda size: 0.5 if size < 1000 else 2.0)
    assert micro_batch_axis().values[found or 0] == 999


def test_the_family_of_zero_grows_in_parameters_and_has_the_paper_s_shapes() -> None:
    sizes = [one.numel for one in shapes()]
    assert sizes == sorted(sizes)
    assert {(34, 1920), (72, 3072), (62, 4096), (88, 6144), (125, 8192)} <= {(s.layers, s.hidden) for s in shapes()}
    changed = family_axis().changed(cell("zero3", 8), 0).config.model
    assert (changed.layers, changed.hidden, changed.heads) == (1, 1920, 16)  # type: ignore[attr-defined]


def test_candidates_are_the_table_or_what_the_user_names() -> None:
    names = {row.name for row in candidates({})}
    assert {"ddp", "zero3 offload=nvme activation=checkpoint", "fsdp2 activation=checkpoint"} <= names
    assert not any(name.startswith("ddp offload") for name in names)
    chosen = candidates({"strategy": ("zero1",), "activation": ("none",)})
    assert [row.name for row in chosen] == ["zero1", "zero1 offload=cpu", "zero1 offload=nvme"]


def used(peak: int, psi: int = 1000, volume: float = 2.0, host: int = 0) -> Used:
    return Used(psi, peak, host, 0, {"parameters": peak // 3, "activations": peak - peak // 3}, None, volume, 0.0)


def row(name: str, peak: int | None, value: int = 1, offload: str = "none", **more: float) -> PlanRow:
    candidate = Candidate(name, offload, "none")
    if peak is None:
        return PlanRow(candidate, problem="states alone", bound_bytes=10**9)
    of = used(peak, **more)  # type: ignore[arg-type]
    return PlanRow(candidate, best=ExecutedCell(value, cell("ddp", 2), of))


def test_the_cheapest_of_what_fits_is_recommended_and_a_peer_may_win() -> None:
    goal = GOALS["least_traffic"]
    rows = [
        row("zero1", None),
        row("zero3", 50, volume=3.0),
        row("zero1", 10, offload="cpu"),
        row("fsdp2", 60, volume=3.0),
    ]
    best = recommended(rows, goal)
    assert best is rows[1]
    assert "Take zero3: it sends the least of those that fit (3.00 ψ" in sentence(rows, goal, 100)
    assert "zero1 partitions less" in sentence(rows, goal, 100)
    frozen = ExecutedCell(1, cell("ddp", 2), replace(used(50, psi=1000, volume=3.0), frozen=33000))
    assert goal.words(frozen).endswith("3.00 ψ a step between GPUs, 3,000 elements beside 33,000 frozen parameters")
    rows[1] = row("zero3", None)
    assert "Take fsdp2 (PyTorch's own, not a strategy of zerobench)" in sentence(rows, goal, 100)
    assert recommended([row("ddp", None)], goal) is None


def test_a_plan_of_bytes_alone_says_how_to_ask_for_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("ddp", 90), row("zero1", 50)]
    for goal, said in (("least_traffic", True), ("largest_batch", False)):
        command._print(rows, Capacity(100), GOALS[goal], [], "cuda", None)
        assert ("--goal fastest --cluster NAME" in capsys.readouterr().out) is said


def test_what_must_fit_is_what_the_allocator_reserves(capsys: pytest.CaptureFixture[str]) -> None:
    """37.5B under ZeRO-3 "fit" 80 GiB by its peak of 73.4 GiB, though the allocator reserves up to 87.4 GiB."""
    capacity, on_gpu = Capacity(100 * MIB), replace(used(80 * MIB), reserved_bytes=95 * MIB)
    assert capacity.fits(used(80 * MIB)), "a CPU's peak"
    assert not capacity.fits(on_gpu)
    assert capacity.smallest_device(on_gpu) == math.ceil(95 * MIB / 0.92)
    beyond = PlanRow(Candidate("zero3", "none", "none"), beyond=ExecutedCell(1, cell("zero3", 2), on_gpu))
    said = nothing_fits([replace(beyond, probes=(beyond.beyond,))], capacity)  # type: ignore[arg-type]
    assert "the least is zero3 with 95.0 MiB reserved, so the smallest device that would do has 103.3 MiB" in said
    fits = replace(beyond, best=ExecutedCell(1, cell("zero3", 2), replace(on_gpu, reserved_bytes=90 * MIB)))
    assert "leaves 2.0 MiB free" in sentence([fits], GOALS["least_traffic"], capacity.usable_bytes)
    command._print([fits, beyond], capacity, GOALS["least_traffic"], [], "cuda", None)
    assert "a row fits if what the allocator reserves is at most 92.0 MiB of 100.0 MiB" in capsys.readouterr().out


def test_a_larger_model_wins_over_a_cheaper_row_and_the_sentence_names_both() -> None:
    goal = GOALS["largest_model"]
    rows = [row("ddp", 90, psi=2_000_000_000), row("zero3", 80, psi=9_000_000_000), row("zero2", 80, psi=8_990_000_000)]
    assert recommended(rows, goal) is rows[2]  # as large as zero3 within 2 %, and it moves less
    assert "ddp, which costs less, ends at 2.00B parameters" in sentence(rows, goal, 100)


@pytest.mark.parametrize(
    ("ranks", "steps", "said"),
    [
        (8, {32: (1.0, 1.1), 128: (1.0, 1.05)}, "On 32 and 128 GPUs with the same micro-batches zero1 stays ahead."),
        (8, {32: (1.0, 0.995), 128: (1.0, 0.9)}, "On 128 GPUs with the same micro-batches zero3 is ahead."),
        (128, {512: (1.0, 1.1)}, "On 512 GPUs with the same micro-batches zero1 stays ahead."),
        (512, {}, ""),
    ],
)
def test_the_number_of_gpus_at_which_another_strategy_is_ahead(
    ranks: int, steps: dict[int, tuple[float, ...]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class MoreGpus:
        costs = None

        def schedules(self, cells: list[Cell]) -> list[SimpleNamespace]:
            assert len(cells) == 2, "zero1's second row is no leader"
            return [SimpleNamespace(problem="", step_s=step) for step in steps[cells[0].config.world_size]]

    monkeypatch.setattr(fastest, "step_time", lambda schedule, _: schedule)
    names = ("zero1", "zero1", "zero3")
    ranked: Any = [
        fastest.Timed(Candidate(name, "none", "none"), cell(name, ranks), None, None, None, None)  # type: ignore[arg-type]
        for name in names
    ]
    assert fastest.turn_of_gpus(ranked, MoreGpus()) == said  # type: ignore[arg-type]
    assert fastest.turn_of_gpus(ranked[:2], MoreGpus()) == ""  # type: ignore[arg-type]


@pytest.mark.parametrize("guessed", [(0.0, 0.0), (0.3, 0.02), (0.5, 0.2)])
@pytest.mark.parametrize("most", [0, 1, 2, 16, 64])
def test_the_largest_micro_batch_is_found_in_few_executions(most: int, guessed: tuple[float, float]) -> None:
    """`guessed`: the line of another row, too low, right, or too high; the load bends, as the peak moves to another
    instant."""

    def load(size: int) -> float:
        return 0.3 + 0.69 * size / most + (0.001 * size if size > 4 else 0.0) if most else 1.1 + size

    held, slope = guessed
    row = TriedRow(
        Candidate("zero3", "none", "none"), cell("zero3", 8), (1, 2, 4, 8, 16, 32, 64), held=held, slope=slope
    )
    while (size := row.wanted()) is not None and size not in row.probes:
        row.probes[size], row.loads[size] = ExecutedCell(size, row.cell, used(1)), load(size)
    fitting = [size for size in row.sizes if load(size) <= 1]
    assert (row.best.value if row.best else None) == max(fitting, default=None)
    assert len(row.probes) <= 7
    if guessed == (0.3, 0.02) and most == 16:
        assert len(row.probes) <= 3


def test_what_few_blocks_use_gives_what_all_use() -> None:
    small = Reduced((cell("zero3", 8).config,) * 2, (4, 8), 32, 1)
    found = whole_used(small, [used(300, host=4), used(500, host=8)])
    assert (found.peak_bytes, found.host_bytes) == (500 + 6 * 200, 8 + 6 * 4)
    assert sum(found.at_peak.values()) == pytest.approx(found.peak_bytes, abs=8)


@pytest.mark.slow
def test_a_search_executes_neighbors_and_prunes_by_the_states() -> None:
    """Executed in this process: the layers that fit 3 MiB, under a strategy that theory bounds."""
    words = ["-m", *TINY, "strategy=zero3", "world_size=4", "backend=simulated", "tensors=fake", "device=cpu"]
    start = compose_cells([*words, "precision=bf16", "data=synthetic", "micro_batch=1"])[0]
    executed: list[str] = []

    def run(configs: list, tell: Any = lambda *_: None) -> list[Execution]:  # type: ignore[type-arg]
        executed.extend(config.cell_id for config in configs)
        done = [execute(config) for config in configs]
        for number, one in enumerate(done):
            tell(number, one)
        return done

    capacity = Capacity(MIB // 4, reserve=0.0)
    candidate, twin = (Candidate("zero3", "none", name) for name in ("none", "twin"))
    found, same = run_searches({candidate: start, twin: start}, layers_axis(), capacity, run)
    assert found.best is not None
    assert found.beyond is not None
    assert found.best.value + 1 == found.beyond.value
    assert found.best.used.peak_bytes <= capacity.device_bytes < found.beyond.used.peak_bytes
    assert sum(found.best.used.at_peak.values()) == found.best.used.peak_bytes
    assert len(executed) == len(set(executed)) == len(found.probes)
    assert same.best is not None
    tiny = Capacity(1024, reserve=0.0)
    told: list[PlanRow | None] = []
    (least,) = run_searches({candidate: start}, layers_axis(), tiny, run, lambda *news: told.append(news[-1]))
    assert "states alone" in told[0].problem  # type: ignore[union-attr]
    assert len(executed) == len(found.probes) + 1, "one was simulated after all: the device that would do is named"
    assert "nothing fits 1.0 KiB: the least is zero3 with" in nothing_fits([least], tiny)


def test_a_candidate_is_told_when_it_is_done_and_ctrl_c_leaves_the_done_ones(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe reads: lines go to standard error before the round of all candidates is over."""
    goal, names, capacity = GOALS["least_traffic"], ("ddp", "zero1", "zero3"), Capacity(100 * MIB)
    monkeypatch.setattr(
        search, "used_by", lambda cell, _: used(200 * MIB if cell.config.strategy.name == "ddp" else MIB)
    )

    def run(configs: list, tell: Any) -> list[Execution]:  # type: ignore[type-arg]
        for number, config in enumerate(configs[:2]):
            tell(number, Execution(config, 0, 0.0, None))
        assert "zero1: fits, 2.00 ψ a step between GPUs, 1.0 MiB at its peak; 1 to go" in capfd.readouterr().err
        raise KeyboardInterrupt

    cells = {Candidate(name, "none", "none"): cell(name, 2) for name in names}
    with command.progress(goal) as tell:
        rows = run_searches(cells, goal.axis(2), capacity, run, tell)
    command._print(rows, capacity, goal, [], "cuda", None)
    said = capfd.readouterr().out
    assert "not simulated: zero3: the plan was interrupted" in said
    assert [row.best is not None for row in rows] == [False, True, False]
    assert not any(line.strip().startswith("zero3") for line in said.splitlines()), "its row would say that it fits not"
    assert "Take" not in said
    assert recommended(rows, goal) is None


def test_an_interrupted_search_of_the_fastest_keeps_its_complete_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C comes after the pilots; only the row without another micro-batch to try is complete."""
    done, still = (TriedRow(Candidate(name, "none", "none"), cell(name, 8), (1,)) for name in ("zero1", "zero3"))

    class Search:
        row = staticmethod(lambda one, _: done if one.strategy == "zero1" else still)
        timed = staticmethod(lambda row: row.best and SimpleNamespace(tokens_per_s=1.0, row=row))

        def pilots(self, _: object) -> None:
            done.probes[1], done.loads[1] = ExecutedCell(1, done.cell, used(MIB)), 0.5
            raise KeyboardInterrupt

    found = fastest.find({row.candidate: row.cell for row in (done, still)}, Search())  # type: ignore[arg-type]
    assert found.interrupted
    assert [row.problem for row in found.rows] == ["", search.INTERRUPTED]
    assert [one.row for one in found.timed] == [done]  # type: ignore[attr-defined]


def test_where_nothing_fits_a_sentence_says_what_would_do_and_what_would_help() -> None:
    probe = ExecutedCell(1, cell("zero3", 4), used(92 * MIB))
    rows = [PlanRow(Candidate("zero3", "none", "none"), beyond=probe, probes=(probe,))]
    said = nothing_fits(rows, Capacity(50 * MIB, reserve=0.08))
    assert "the smallest device that would do has 100.0 MiB" in said
    assert "activation=checkpoint" in said
    hosted = ExecutedCell(1, cell("zero3", 4), used(MIB, host=90 * MIB))
    rows = [PlanRow(Candidate("zero3", "cpu", "none"), beyond=hosted, probes=(hosted,))]
    assert "raise --host-memory" in nothing_fits(rows, Capacity(50 * MIB, host_bytes=10 * MIB))


@pytest.mark.slow
def test_a_plan_is_told_as_json_with_settings_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--device-memory", "1 MiB", "--gpus", "2", *SMALL, "--format", "json", *TINY, "model.layers=1"]
    words += ["strategy=ddp,fsdp2", "activation=checkpoint", "--settings", "deepspeed", "--out", str(tmp_path)]
    assert plan(words) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["strategy"] for one in told["rows"]] == ["ddp", "fsdp2"]
    assert told["recommended"] == "ddp activation=checkpoint"
    assert told["rows"][1]["best"]["peak_bytes"] <= told["usable_bytes"] == MIB
    written = (tmp_path / "ds_config.json").read_text()
    assert json.loads(written)["zero_optimization"] == {"stage": 0}
    assert told["settings"]["files"] == {"ds_config.json": written}
    assert all("model.layers=1" in command for command in told["commands"])


WRONG = {
    "a size without a unit that there is": (["--device-memory", "80 GB/s"], "--device-memory: '80 GB/s' is no size"),
    "no device": (["--device-memory", "0 GiB"], "--device-memory 0 GiB: must be above 0"),
    "all of it reserved": (["--reserve", "1"], "--reserve 1: a fraction of the device"),
    "no GPUs": (["--gpus", "0"], "--gpus 0: must be at least 1"),
    "a world": (["world_size=4"], "give the number of GPUs as --gpus 4"),
    "layers that are looked for": (["--goal", "largest_model", "model.layers=3"], "model.layers: is what --goal"),
    "a batch that is looked for": (["--goal", "largest_batch", "micro_batch=2"], "leave them out"),
    "a model without layers": (["--goal", "largest_model", "model=mlp"], "use model=gpt with model.hidden"),
    "a family without its goal": (["--family", "zero"], "tried by --goal largest_model alone"),
    "a sweep of another key": (["sequence=16,32"], "a plan takes several values of strategy, offload, activation"),
    "a folder for nothing": (["--out", "x"], "--out: is for settings"),
    "an unknown key": (["modle=gpt"], "modle"),
}


@pytest.mark.shown(5)
@pytest.mark.slow
@pytest.mark.parametrize("wrong", WRONG)
def test_bad_input_is_a_sentence(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    more, words = WRONG[wrong]
    base = ["--device-memory", "1 MiB", "--gpus", "2", *SMALL, "strategy=zero1", "offload=none", "activation=none"]
    assert plan([*base, *more]) == 2  # composing takes the time, of one row
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out


@pytest.mark.slow
def test_what_no_candidate_can_have_is_said_once_with_the_key_that_mends_it(capsys: pytest.CaptureFixture[str]) -> None:
    """All 24 candidates have the same problem; the reason of zero_redundancy alone is left out."""
    assert plan(["--device-memory", "80 GiB", "--gpus", "8", "model=gpt2_124m", "sequence=4096"]) == 2
    said, mend = capsys.readouterr(), "add model.positions=4096, or take sequence=1024"
    assert said.err == f"zerobench plan: sequence=4096: the model has only 1024 positions; {mend}\n"
    assert not said.out


def test_the_largest_models_become_a_figure_and_a_table_with_the_paper_s_beside_it(tmp_path: Path) -> None:
    """Plans made by hand: one without a neighbor, whose states are too large, and one of the paper's world."""
    probe = {"psi": 2_400_000_000, "shape": "54 x 1920", "gpus": 8, "peak_bytes": 36 * 2**30, "host_bytes": 0,
             "reserved_bytes": 37 * 2**30, "binds": "optimizer"}  # fmt: skip
    same = {"device_bytes": 40 * 2**30, "usable_bytes": 37 * 2**30}
    row = {"strategy": "ddp", "offload": "none", "best": probe, "beyond": None}
    hosted = row | {"strategy": "zero3", "offload": "cpu", "best": probe | {"host_bytes": 2**30}, "beyond": probe}
    none = row | {"strategy": "zero1", "best": None}
    (tmp_path / "a.json").write_text(json.dumps(same | {"rows": [row, none, hosted]}))
    world = {"device_bytes": 32 * 10**9, "usable_bytes": 29 * 10**9, "rows": [row | {"best": probe | {"gpus": 64}}]}
    (tmp_path / "b.json").write_text(json.dumps(world))
    assert largest_model.main([str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    endings = ("md", "png", "svg", "txt")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {f"largest_model.{e}" for e in endings}
    text = (tmp_path / "out/largest_model.md").read_text()
    assert (
        "| 8 × 40 GiB | DDP | 2.40B | 54 × 1920 | 36.00 GiB | 37.00 GiB | – | optimizer | – (the states alone) |"
        in text
    )
    assert "ZeRO-3 + cpu" in text
    assert "| ddp | 2.0B | 2.0B | 1.3B | 2.40B (54 × 1920) |" in text
    assert "| zero1 | 7.6B | 7.6B | 6.2B | – |" in text
    assert largest_model.main([str(tmp_path / "nowhere")]) == 2


@pytest.mark.parametrize("strategy", largest_model.TABLE_2)
def test_the_formula_gives_the_paper_s_theoretical_column(strategy: str) -> None:
    theoretical, _ = largest_model.TABLE_2[strategy]
    assert round(largest_model.by_formula(strategy), 1) == theoretical
