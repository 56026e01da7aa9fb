"""`zerobench plan`: the search along an axis, what is recommended and why, bad input, settings for other systems."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cells import cell
from zerobench.commands.plan import fastest, search
from zerobench.commands.plan.answer import GOALS, nothing_fits, print_plan, recommended, sentence
from zerobench.commands.plan.candidates import SAME, Candidate, candidates
from zerobench.commands.plan.command import plan, progress
from zerobench.commands.plan.fastest import find_fastest, on_more_gpus, turn_of_gpus
from zerobench.commands.plan.search import FIXED, MICRO_BATCHES, Capacity, Plan, PlanAxis, PlanRow, with_model
from zerobench.commands.predict import costs_of
from zerobench.commands.simulated import SimulatedCell, Step, Work, whole_of
from zerobench.config.cell import Cell
from zerobench.config.compose import compose_cells
from zerobench.config.schema_training import Bf16, Fp32, Muon
from zerobench.simulation.execute import CUDA, Execution, execute
from zerobench.simulation.prediction import Reduced, StepInterval, with_few_micro_batches

MIB = 2**20

SMALL = ("--device", "cpu", "--reserve", "0", "--jobs", "1")
ANY = cell("zero3", 8)
TINY = ("model=gpt", "model.hidden=32", "model.heads=2", "model.vocabulary=64", "sequence=16")


def walked(axis: PlanAxis, load_of: Callable[[int], float]) -> tuple[int | None, list[int]]:
    """Runs a walk against a function of the value; returns the value found, and the values probed."""
    loads: dict[int, float] = {}
    while (place := search.next_index(axis, loads)) is not None:
        loads[place] = load_of(axis.values[place])
    found = max((place for place, load in loads.items() if load <= 1), default=None)
    return None if found is None else axis.values[found], [axis.values[place] for place in loads]


@pytest.mark.parametrize("wanted", [1, 2, 3, 7, 85, 300, 512])
def test_the_last_value_that_fits_is_found_with_few_probes(wanted: int) -> None:
    """The load has a step in it, as buckets and padding have; the answer and its neighbor are both probed."""

    def load(layers: int) -> float:
        return (0.1 + layers + (3 if layers > 40 else 0)) / (0.6 + wanted + (3 if wanted > 40 else 0))

    found, probed = walked(search.LAYERS, load)
    assert found == wanted
    assert {found, min(found + 1, 512)} <= set(probed)
    assert len(probed) <= 9


def test_a_search_of_gpus_follows_one_over_n() -> None:
    found, probed = walked(search.gpus_axis(cell("zero3", 1024)), lambda ranks: 0.3 + 60.3 / ranks)
    assert found == 87
    assert len(probed) <= 8
    assert walked(search.gpus_axis(cell("zero3", 8)), lambda ranks: 3.0)[0] is None


def test_the_family_of_zero_grows_in_parameters_and_has_the_paper_s_shapes() -> None:
    assert (sizes := [one.numel for one in search.shapes()]) == sorted(sizes)
    assert {(34, 1920), (72, 3072), (62, 4096), (88, 6144), (125, 8192)} <= {
        (s.layers, s.hidden) for s in search.shapes()
    }
    changed = search.family_axis(ANY).changed(ANY, 0).config.model
    assert (changed.layers, changed.hidden, changed.heads) == (1, 1920, 16)  # type: ignore[attr-defined]


def test_candidates_are_the_table_or_what_the_user_names() -> None:
    names = {row.name for row in candidates({})}
    assert {"ddp", "zero3 offload=nvme activation=checkpoint", "fsdp2 activation=checkpoint"} <= names
    assert not any(name.startswith("ddp offload") for name in names)
    chosen = candidates({"strategy": ("zero1",), "activation": ("none",)})
    assert [row.name for row in chosen] == ["zero1", "zero1 offload=cpu", "zero1 offload=nvme"]


def used(peak: int, psi: int = 1000, volume: float = 2.0, host: int = 0, value: int = 1, **more: Any) -> SimulatedCell:
    at_peak = {"parameters": peak // 3, "activations": peak - peak // 3}
    of = cell("ddp", 2, micro_batch=value)
    figures = {"psi": psi, "peak_bytes": peak, "host_bytes": host, "at_peak": at_peak, "volume_elements": volume * psi}
    return SimulatedCell(of, **figures, **more)


def row(name: str, peak: int | SimulatedCell | None, offload: str = "none", load: float = 1.0, **more: Any) -> PlanRow:
    """Returns a row whose search is over; its one cell fits if `load` is at most 1."""
    found = PlanRow(Candidate(name, offload), ANY, FIXED, over=True)
    if peak is None:
        found.problem, found.bound_bytes = search.TOO_LARGE, 10**9
    else:
        found.loads, found.probes = {0: load}, {0: used(peak, **more) if isinstance(peak, int) else peak}
    return found


def simulate_nothing(configs: list, tell: Any, **_: Any) -> list[Execution]:  # type: ignore[type-arg]
    for number, config in enumerate(configs):  # `tell` adds to them
        tell(number, Execution(config, 0, 0.0, None))
    return []


def plan_of(rows: Sequence[PlanRow], goal: str = "least_traffic", capacity: Capacity | None = None) -> Plan:
    """Returns a finished plan."""
    of = capacity or Capacity(100, reserve=0.0)
    return Plan(goal, of, simulate_nothing, rows={row.candidate: row for row in rows})


def test_the_cheapest_of_what_fits_is_recommended_and_a_peer_may_win() -> None:
    beside = [row("zero1", 10, offload="cpu"), row("fsdp2", 60, volume=3.0)]
    rows = [row("zero1", None), row("zero3", 50, volume=3.0), *beside]
    assert recommended(plan_of(rows)) is rows[1]
    said = sentence(plan_of(rows))
    assert "Take zero3: it sends the least of those that fit (3.00 ψ" in said
    assert "zero1 partitions less" in said
    words = GOALS["least_traffic"].detail(used(50, psi=1000, volume=3.0, frozen=33000))
    assert words.endswith("3.00 ψ a step between GPUs, 3,000 elements beside 33,000 frozen parameters")
    rows[1] = row("zero3", None)
    assert "Take fsdp2 (PyTorch's own, not a strategy of zerobench)" in sentence(plan_of(rows))
    assert recommended(plan_of([row("ddp", None)])) is None


def test_what_must_fit_is_what_the_allocator_reserves(capsys: pytest.CaptureFixture[str]) -> None:
    """37.5B under ZeRO-3 "fit" 80 GiB by its peak of 73.4 GiB, though the allocator reserves up to 87.4 GiB."""
    capacity, on_gpu = Capacity(100 * MIB), used(80 * MIB, reserved_high_bytes=95 * MIB)
    assert capacity.load(used(80 * MIB).bytes_in) <= 1, "a CPU's peak"
    assert capacity.load(on_gpu.bytes_in) > 1
    said = nothing_fits(plan_of([row("zero3", on_gpu, load=1.1)], capacity=capacity))
    assert "the least is zero3 with 95.0 MiB reserved, so the smallest device that would do has 103.3 MiB" in said
    fits = plan_of([row("zero3", replace(on_gpu, reserved_high_bytes=90 * MIB))], capacity=capacity)
    assert "leaves 2.0 MiB free" in sentence(fits)
    print_plan(fits)
    assert "a row fits if what the allocator reserves is at most 92.0 MiB of 100.0 MiB" in capsys.readouterr().out


def test_a_larger_model_wins_over_a_cheaper_row_and_the_sentence_names_both() -> None:
    rows = [row("ddp", 90, psi=2_000_000_000), row("zero3", 80, psi=9_000_000_000), row("zero2", 80, psi=8_990_000_000)]
    found = plan_of(rows, "largest_model")
    assert recommended(found) is rows[2]  # as large as zero3 within 2 %, and it moves less
    assert "ddp, which costs less, ends at 2.00B parameters" in sentence(found)


class MadeUpStep(Step):
    """A step with as many tokens per second on any cluster."""

    def rate(self, costs: Any = None) -> float:
        return float(self.tokens)


def stepping(rate: float, within: float = 1.05) -> Any:
    """Returns a step of 1 s, whose interval is `within` times it on both sides."""
    time = SimpleNamespace(step_s=1.0, exposed_s=0.0, host_s=0.0, binds="compute")
    return MadeUpStep(None, time, StepInterval(1 / within, within, "made up"), rate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ranks", "rates", "said"),
    [
        (8, {32: (1.1, 1.0), 128: (1.2, 1.0)}, "With the same micro-batches, on 32 and 128 GPUs zero1 is ahead."),
        (
            8,
            {32: (1.0, 1.04), 128: (1.0, 1.1)},
            "With the same micro-batches, on 32 GPUs it is a tie, on 128 GPUs zero3 is ahead.",
        ),
        (512, {}, ""),
    ],
)
def test_the_number_of_gpus_at_which_another_strategy_is_ahead(
    ranks: int, rates: dict[int, tuple[float, ...]], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fit(name: str, rate: float, **more: Any) -> Any:
        return replace(used(1), cell=cell(name, ranks), step=stepping(rate), **more)

    def simulate(of: Plan, chains: list[list[PlanRow]]) -> None:
        for (row,) in chains:
            number = names.index(row.candidate.strategy)
            row.probes, row.over = {0: fit("ddp", rates[row.cell.config.world_size][number])}, True

    names = ["zero1", "zero3"]
    monkeypatch.setattr(Plan, "simulate", simulate)
    rows = [row("zero1", fit("zero1", 3.0)), row("zero1", fit("zero1", 2.0), "cpu")]
    found = plan_of([*rows, row("zero3", fit("zero3", 1.0))])
    due = on_more_gpus(found)
    assert [one.candidate.name for one in due] == [name for name in names for _ in rates], "zero1's second is no leader"
    assert not on_more_gpus(found), "each is simulated once"
    found.simulate([[one] for one in due])
    assert turn_of_gpus(found)[0] == said
    assert turn_of_gpus(plan_of(rows)) == ("", [])


@pytest.mark.parametrize("most", [0, 1, 2, 16, 64])
@pytest.mark.parametrize("batch", [None, 8 * 64 * 3])
def test_the_largest_micro_batch_is_found_in_few_simulations(most: int, batch: int | None) -> None:
    """The load bends, as the peak moves to another instant."""

    def load(size: int) -> float:
        return 0.3 + 0.69 * size / most + (0.001 * size if size > 4 else 0.0) if most else 1.1 + size

    axis = search.timed_axis(ANY, batch)
    found, probed = walked(axis, load)
    assert found == max((size for size in axis.values if load(size) <= 1), default=None)
    assert len(probed) <= (5 if batch is None else 8)
    config = axis.changed(ANY, 4).config
    assert batch is None or config.micro_batch * config.accumulation * 8 == config.batch == batch


@pytest.mark.parametrize("samples", [1, 3, 4])
def test_few_micro_batches_of_a_given_batch_are_searched(samples: int) -> None:
    """A rank's part of the batch has fewer divisors than the index of the first probe."""
    axis = search.timed_axis(ANY, 8 * samples)
    for most in (0, *axis.values):
        assert walked(axis, lambda size, most=most: size / most if most else 2.0)[0] == (most or None)  # type: ignore


def test_what_few_blocks_use_gives_what_all_use() -> None:
    small = Reduced((cell("zero3", 8).config,) * 2, (4, 8), 32, 1)
    found = whole_of(small, [used(300, host=4), used(500, host=8)])
    assert (found.peak_bytes, found.host_bytes) == (500 + 6 * 200, 8 + 6 * 4)
    assert sum(found.at_peak.values()) == pytest.approx(found.peak_bytes, abs=8)


Answer = Callable[[Work], SimulatedCell]


def simulated_as(answer: Answer, monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """Replaces the answers of simulations by `answer`. Returns the list to which the work is added."""
    ran: list[Work] = []

    def answered(work: Work, *_: Any) -> SimulatedCell:
        ran.append(work)
        return answer(work)

    monkeypatch.setattr(Work, "answer", answered)
    return ran


@pytest.mark.parametrize(
    ("named", "fitting", "ran", "bounds"),
    [
        ([], {"ddp", "zero3"}, ["ddp", "zero3"], 6),
        ([], {"zero3 offload=cpu"}, [
            "ddp", "ddp activation=checkpoint", "zero3", "zero3 activation=checkpoint", "zero3 offload=cpu"], 3),
        (["activation"], {"ddp", "zero3", "zero3 activation=checkpoint"}, [
            "ddp", "ddp activation=checkpoint", "zero3", "zero3 activation=checkpoint"], 4),
    ],
)  # fmt: skip
def test_of_a_strategy_no_row_is_simulated_after_one_that_fits(
    named: list[str], fitting: set[str], ran: list[str], bounds: int, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A row that costs more than one that fits cannot win; a value that the user names is simulated."""
    rows = candidates({"strategy": ("ddp", "zero3")})
    cells = {row: cell(row.strategy, 2, micro_batch=number + 1) for number, row in enumerate(rows)}
    names = {number + 1: row.name for number, row in enumerate(rows)}
    peaks = {number: 90 if name in fitting else 200 for number, name in names.items()}
    seen = simulated_as(lambda work: used(peaks[work.cell.config.micro_batch]), monkeypatch)
    monkeypatch.setattr(search, "bound_of", lambda _: 70)
    found = replace(plan_of([]), named=named)
    found.search(cells, lambda _: FIXED)
    assert sorted(names[work.cell.config.micro_batch] for work in seen) == sorted(ran)
    bounded = [row for row in found.rows.values() if row.reason == search.DOMINATED]
    assert len(bounded) == bounds
    assert {row.bound_bytes for row in bounded} == {70}
    assert {row.candidate.name for row in found.fitting} == fitting
    print_plan(found)
    said = capsys.readouterr().out
    assert f"not simulated: {', '.join(row.candidate.name for row in bounded)}: fits without it" in said
    assert said.count("bound ") == bounds == said.count("states 70 B")


def test_a_row_whose_bound_is_too_large_is_not_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = simulated_as(lambda work: used(90), monkeypatch)
    monkeypatch.setattr(search, "bound_of", lambda cell: {"ddp": 101, "zero3": 100}[cell.config.strategy.name])
    found = plan_of([])
    found.search({Candidate(name): cell(name, 2) for name in ("ddp", "zero3")}, lambda _: FIXED)
    assert [work.cell.config.strategy.name for work in ran] == ["zero3"]
    assert [(row.problem, row.bound_bytes) for row in found.rows.values()] == [(search.TOO_LARGE, 101), ("", 100)]


DEEP = with_model(cell("zero3", 8), layers=48)


@pytest.mark.parametrize("whole", [10, 9, 12])
def test_a_bracket_is_found_with_few_blocks_and_its_ends_have_all(whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """10 samples fit by few blocks; all blocks may take more memory, or less."""

    def answer(work: Work) -> SimulatedCell:
        size = work.cell.config.micro_batch
        most = whole if work.whole else 10
        return replace(used(int(30 + 70 * size / (most + 0.5)), value=size), whole=work.whole)

    ran = simulated_as(answer, monkeypatch)
    monkeypatch.setattr(search, "bound_of", lambda _: 25)
    found = plan_of([], "largest_batch")
    found.search({Candidate("zero3"): DEEP}, lambda _: MICRO_BATCHES)
    (only,) = found.rows.values()
    assert (only.best.cell.config.micro_batch, only.beyond.cell.config.micro_batch) == (whole, whole + 1)
    assert only.best.whole
    assert only.beyond.whole
    assert 2 <= sum(work.whole for work in ran) <= 4


@pytest.mark.parametrize("reserved", [1.0, 1.3])
@pytest.mark.parametrize("most", [2, 5, 8, 31, 64])
def test_goal_fastest_judges_its_leaders_with_all_blocks_by_reserved_bytes(
    most: int, reserved: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By its peak zero1 is the fastest; what the allocator reserves for it leaves room for less, or for none. zero2 is
    slower in any case, and no simulation with all its blocks is spent on it.
    """
    speeds = {"zero1": 2.0, "zero3": 1.9, "zero2": 0.5}

    def answer(work: Work) -> SimulatedCell:
        config = work.cell.config
        peak = int(100 * max(0.6, 0.3 + 0.7 * config.micro_batch / most))  # the update's instant, then the activations'
        held = int(peak * reserved) if config.strategy.name == "zero1" else peak
        found = replace(used(peak, reserved_high_bytes=held), cell=work.cell, whole=work.whole)
        speed = speeds[config.strategy.name] * (1 - 0.2 * config.recomputes)
        return replace(found, step=stepping(config.micro_batch * speed, 1.2)) if work.timed else found

    ran = simulated_as(answer, monkeypatch)
    monkeypatch.setattr(search, "bound_of", lambda _: 25)
    monkeypatch.setattr(fastest, "turn_of_network", lambda *_: ("", []))
    costs = costs_of("h100-3200", None)
    found = replace(plan_of([], "fastest"), costs=costs)
    cells = {Candidate(name): with_model(cell(name, 8), layers=48) for name in ("zero3", "zero1", "zero2")}
    find_fastest(found, costs, cells, None, ())
    sizes = (1, 2, 4, 8, 16, 32, 64)
    fits = {
        name: max((n for n in sizes if max(0.6, 0.3 + 0.7 * n / most) * (reserved if name == "zero1" else 1) <= 1.0),
                  default=0)
        for name in speeds
    }  # fmt: skip
    by_name = {row.candidate.strategy: row for row in found.ranked}
    assert {name: row.fit.cell.config.micro_batch for name, row in by_name.items()} == {
        k: v for k, v in fits.items() if v
    }
    best = max(speeds, key=lambda name: speeds[name] * fits[name])
    assert recommended(found) is found.ranked[0] is by_name[best]
    judged = {name for name, row in by_name.items() if row.fit.whole}
    assert judged == {"zero1", "zero3"}
    assert {work.cell.config.strategy.name for work in ran if work.whole} == judged
    assert all(row.fit.reserved_high_bytes <= 100 for row in found.ranked[:2])
    print_plan(found)
    said = capsys.readouterr().out
    assert said.count("≤") == 2, "zero2's row, and the line that explains it"
    assert ("a tie" in said) is (fits["zero1"] == fits["zero3"])


@pytest.mark.parametrize(
    ("precision", "given", "tried"), [(Bf16(), (), 1), (Fp32(), (), 0), (Bf16(), ["strategy.shards"], 0)]
)
def test_shards_beside_masters_are_a_variant_in_half_precision(precision: Any, given: list[str], tried: int) -> None:
    row: Any = SimpleNamespace(
        candidate=Candidate("zero3"), fit=SimpleNamespace(cell=cell("zero3", 8, precision=precision))
    )
    variants = fastest._variants(row, costs_of("h100-3200", None), given)
    assert [one.more for one in variants].count(("strategy.shards=parameters",)) == tried


def test_few_blocks_stand_for_many_and_a_model_without_blocks_is_whole() -> None:
    for few in (Work.of(DEEP, whole=False), Work.of_step(DEEP)):
        assert [one.model.layers for one in few.small.configs] == [4, 8]  # type: ignore[attr-defined]
        assert not few.whole
    for of in (with_model(DEEP, layers=24), cell("zero3", 8, "mlp")):
        work = Work.of(of, whole=False)
        assert work.whole
        assert work.small.configs == (of.config,)
    (config,) = Work.of(DEEP.changed(accumulation=5), whole=True, with_step=True).small.configs
    assert (config.model, config.accumulation) == (DEEP.config.model, 3)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=zero1", "model.layers=26"), ("strategy=zero3", "model.layers=26", "activation=checkpoint"),
        ("strategy=fsdp2", "model.layers=26", "accumulation=4"), ("strategy=ddp", "model.layers=3"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_one_simulation_gives_the_memory_and_the_step_that_two_give(words: tuple[str, ...]) -> None:
    line = [*TINY, *SAME, "world_size=4", "micro_batch=1", "data=synthetic", "precision=bf16", *words]
    (only,) = compose_cells(line, target="cuda")
    costs = costs_of("a100-80gb-1600", None)

    def answer(work: Work) -> SimulatedCell:
        executions = [execute(config, target=CUDA, operators=work.timed) for config in work.small.configs]
        for event in (event for execution in executions for event in execution.result.events):
            event.seconds = 0.0  # of the simulation
        return replace(work.answer(executions, costs), seconds=0.0)

    both, step = answer(Work.of(only, whole=False, with_step=True)), answer(Work.of_step(only))
    few = with_few_micro_batches(only.config)
    memory = answer(replace(Work.of(Cell(few, ()), whole=False), cell=only))
    assert replace(both, step=None) == memory
    assert both.timed == step.timed


def test_steps_of_an_optimizer_of_whole_matrices_are_simulated_alone() -> None:
    """Any rank may have its peak, and a step is one rank's."""
    muon = replace(DEEP, config=replace(DEEP.config, optimizer=Muon()))
    assert Work.of(DEEP, whole=False, with_step=True).timed
    assert not Work.of(muon, whole=False, with_step=True).timed


@pytest.mark.parametrize("most", [1, 2, 4, 16, 64])
def test_a_row_begins_where_the_load_of_one_with_the_same_activations_leads(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """zero3 has the least states and is simulated first; the activations that its load shows are zero1's, too."""
    bounds = {"zero1": 40, "zero3": 10}

    def answer(work: Work) -> SimulatedCell:
        config = work.cell.config
        peak = bounds[config.strategy.name] + int(59.5 * config.micro_batch / most)
        return replace(used(peak), cell=work.cell, whole=work.whole, step=stepping(1.0))

    ran = simulated_as(answer, monkeypatch)
    monkeypatch.setattr(search, "bound_of", lambda cell: bounds[cell.config.strategy.name])
    found = replace(plan_of([], "fastest"), costs=costs_of("h100-3200", None))
    found.search({Candidate(name): with_model(cell(name, 8), layers=48) for name in bounds}, search.timed_axis)
    sizes = {
        name: [work.cell.config.micro_batch for work in ran if work.cell.config.strategy.name == name]
        for name in bounds
    }
    assert ran[0].cell.config.strategy.name == "zero3"
    assert sizes["zero3"][0] == 8, "which is known of none"
    assert sizes["zero1"] == [most, 2 * most][: 1 + (most < 64)]
    assert found.rows[Candidate("zero1")].fit.cell.config.micro_batch == most


def test_rows_whose_peak_fits_and_whose_reserved_bytes_do_not_are_not_recommended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The allocator takes 20 MiB at a time from the device."""
    (only,) = compose_cells(
        [*TINY, *SAME, "world_size=2", "micro_batch=1", "data=synthetic", "strategy=zero3"], target="cuda"
    )
    simulated = SimulatedCell.of(only, execute(only.config, target=CUDA))
    reserved = simulated.held_bytes
    assert simulated.device_peak_bytes < reserved
    for size, fits in ((reserved - 1, False), (reserved, True)):
        assert simulated.device_peak_bytes <= size
        line = ["--device-memory", f"{size} b", "--gpus", "2", "--reserve", "0", "--jobs", "1", "--goal", "fastest"]
        line += ["--cluster", "h100-3200", *TINY, "precision=fp32", "strategy=zero3", "activation=none", "batch=2"]
        assert plan(line) == int(not fits)
        printed = capsys.readouterr().out
        assert ("Take zero3" in printed) is fits
        assert ("nothing fits" in printed and "reserved" in printed) is not fits


STATES = [
    *((name, ()) for name in ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "fsdp2_no_reshard")),
    ("zero_redundancy", ("precision=fp32",)), ("zero1", ("offload=cpu",)), ("zero2", ("offload=cpu",)),
    ("zero3", ("offload=cpu",)), ("zero3", ("offload=nvme",)), ("zero3", ("precision=fp16", "clip=1.0")),
    ("zero2", ("accumulation=2",)), ("zero3", ("model.lora=4",)), ("zero3", ("optimizer=sgd",)),
    ("zero3", ("shard_group=2",)), ("zero3", ("strategy.construct=meta",)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.shown(6)
@pytest.mark.parametrize("case", STATES, ids=lambda case: " ".join((case[0], *case[1])))
def test_no_simulation_has_a_lower_peak_than_the_bound(case: tuple[str, tuple[str, ...]]) -> None:
    words = {"precision": "precision=bf16", "activation": "activation=none,checkpoint"}
    words |= {word.partition("=")[0]: word for word in (f"strategy={case[0]}", *case[1])}
    line = ["-m", *TINY, "model.layers=3", *SAME, "world_size=4", "micro_batch=1", "data=synthetic", *words.values()]
    for one in compose_cells(line, target="cuda"):
        found = execute(one.config, target=CUDA)
        assert not found.problem
        bound = search.bound_of(one)
        assert bound or "nvme" in one.config.offload.name
        assert bound <= (found.allocated_bytes or 0)


def test_a_candidate_is_told_when_it_is_done_and_ctrl_c_leaves_the_done_ones(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe reads: lines go to standard error before the round of all candidates is over."""
    names, capacity = ("ddp", "zero1", "zero3"), Capacity(100 * MIB)
    monkeypatch.setattr(
        SimulatedCell, "of", lambda cell, *_: used(200 * MIB if cell.config.strategy.name == "ddp" else MIB)
    )

    def run(configs: list, tell: Any, operators: bool) -> list[Execution]:  # type: ignore[type-arg]
        for number, config in enumerate(configs[:2]):
            tell(number, Execution(config, 0, 0.0, None))
        assert "zero1: fits, 2.00 ψ a step between GPUs, 1.0 MiB at its peak; 1 to go" in capfd.readouterr().err
        raise KeyboardInterrupt

    found = Plan("least_traffic", capacity, run)
    with progress(found):
        found.search({Candidate(name): cell(name, 2) for name in names}, lambda _: FIXED)
    assert found.interrupted
    print_plan(found)
    said = capfd.readouterr().out
    assert "not simulated: zero3: the plan was interrupted" in said
    assert [row.best is not None for row in found.rows.values()] == [False, True, False]
    assert not any(line.strip().startswith("zero3") for line in said.splitlines()), "its row would say that it fits not"
    assert "Take" not in said
    assert recommended(found) is None


def test_where_nothing_fits_a_sentence_says_what_would_do_and_what_would_help() -> None:
    probe = used(92 * MIB)
    said = nothing_fits(plan_of([row("zero3", probe, load=2.0)], capacity=Capacity(50 * MIB, reserve=0.08)))
    assert "the smallest device that would do has 100.0 MiB" in said
    assert "activation=checkpoint" in said
    hosted = used(MIB, host=90 * MIB)
    hosting = Capacity(50 * MIB, host_bytes=10 * MIB)
    said = nothing_fits(plan_of([row("zero3", hosted, "cpu", load=9.0)], capacity=hosting))
    assert "raise --host-memory" in said


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
    "bytes that are meant as GiB": (["--device-memory", "80"], "80 without a unit is 80 bytes; did you"),
    "all of it reserved": (["--reserve", "1"], "--reserve 1: a fraction of the device"),
    "a world": (["world_size=4"], "give the number of GPUs as --gpus 4"),
    "layers that are looked for": (["--goal", "largest_model", "model.layers=3"], "model.layers: is what --goal"),
    "a family without its goal": (["--family", "zero"], "tried by --goal largest_model alone"),
    "a sweep of another key": (["sequence=16,32"], "a plan takes several values of strategy, offload, activation"),
    "a price of no time": (["--price", "2.50"], "--price: is of a time, which --goal fastest predicts"),
}


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
    first, *error = said.err.splitlines()
    assert first == "24 candidates: theory's bounds first", "a line says so before they are composed"
    assert error == [f"zerobench plan: sequence=4096: the model has only 1024 positions; {mend}"]
    assert not said.out
