"""`zerobench plan`: the search along an axis, what is recommended and why, bad input, settings for other systems."""

import ast
import importlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cells import cell
from zerobench.commands.plan import search
from zerobench.commands.plan.answer import GOALS, commands_of, nothing_fits, print_plan, recommended, sentence
from zerobench.commands.plan.candidates import SAME, Candidate, candidates
from zerobench.commands.plan.command import plan, progress
from zerobench.commands.plan.search import FIXED, Capacity, Plan, PlanAxis, PlanRow
from zerobench.commands.plan.settings import SYSTEMS
from zerobench.commands.simulated import SimulatedCell, Work
from zerobench.config import schema_memory
from zerobench.config.cell import CellConfig
from zerobench.config.compose import compose_cells
from zerobench.config.schema_memory import CheckpointActivations
from zerobench.config.schema_training import Bf16
from zerobench.simulation.execute import CUDA, Execution, execute
from zerobench.strategies.options import Zero2

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


def test_loads_of_few_blocks_are_scaled_by_what_all_blocks_take() -> None:
    """All blocks take 4 % more than few. Unscaled, the search would go on one value at a time."""
    found, capacity = PlanRow(Candidate("zero3"), ANY, search.LAYERS), Capacity(1000, reserve=0)
    while (work := found.advance(capacity)) is not None:
        size = 100 + 3 * work.cell.config.model.layers  # type: ignore[attr-defined]
        found.take(used(round(size * (1.04 if work.whole else 1.0)), whole=work.whole), capacity)
    assert found.fit.whole
    assert search.LAYERS.values[found.last] == 287
    assert found.ran <= 10


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
    for name, count in (("zero3", 2), ("fsdp2", 1)):
        lines = commands_of(plan_of([]), row(name, replace(used(MIB), cell=cell(name, 12))))
        assert len(lines) == count, "no peer is simulated on a device"
        assert "--nnodes 2 " in lines[-1]
        assert "--nproc-per-node 6 " in lines[-1]
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


STATES = [
    *((name, ()) for name in ("zero3", "ddp", "zero1", "zero2", "megatron", "fsdp2", "fsdp2_no_reshard")),
    ("zero_redundancy", ("precision=fp32",)), ("zero1", ("offload=cpu",)), ("zero2", ("offload=cpu",)),
    ("zero3", ("offload=cpu",)), ("zero3", ("offload=nvme",)), ("zero3", ("precision=fp16", "clip=1.0")),
    ("zero2", ("accumulation=2",)), ("zero3", ("model.lora=4",)), ("zero3", ("optimizer=sgd",)),
    ("zero3", ("shard_group=2",)), ("zero3", ("strategy.construct=meta",)),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.shown(1)
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

    def run(configs: list, tell: Any, operators: Any, settings: Any) -> list[Execution]:  # type: ignore[type-arg]
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
    """All candidates have the same problem; the reason of zero_redundancy alone is left out."""
    words = ["model=gpt2_124m", "sequence=4096", "strategy=zero1,zero_redundancy", "offload=none", "activation=none"]
    assert plan(["--device-memory", "80 GiB", "--gpus", "8", *words]) == 2
    said, mend = capsys.readouterr(), "add model.positions=4096, or take sequence=1024"
    first, *error = said.err.splitlines()
    assert first == "2 candidates: theory's bounds first", "a line says so before they are composed"
    assert error == [f"zerobench plan: sequence=4096: the model has only 1024 positions; {mend}"]
    assert not said.out


STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "fsdp2_no_reshard")

DEEPSPEED = {
    "stage", "contiguous_gradients", "overlap_comm", "reduce_bucket_size", "reduce_scatter", "allgather_bucket_size",
    "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
    "stage3_param_persistence_threshold", "offload_optimizer", "offload_param",
}  # fmt: skip
"""Documented keys of `zero_optimization` (deepspeed.ai/docs/config-json)."""

DEEPSPEED_TOP = {
    "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping", "bf16",
    "fp16", "data_types", "zero_optimization", "activation_checkpointing",
}  # fmt: skip

ACCELERATE = {
    "compute_environment", "debug", "downcast_bf16", "machine_rank", "main_training_function", "num_machines",
    "num_processes", "mixed_precision", "rdzv_backend", "same_network", "use_cpu", "distributed_type", "fsdp_config",
    "deepspeed_config", "fsdp_version", "fsdp_auto_wrap_policy", "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_reshard_after_forward", "fsdp_activation_checkpointing", "fsdp_offload_params",
    "fsdp_cpu_ram_efficient_loading", "fsdp_state_dict_type", "zero_stage", "gradient_accumulation_steps",
    "gradient_clipping", "offload_optimizer_device", "offload_param_device", "zero3_init_flag",
    "offload_optimizer_nvme_path", "offload_param_nvme_path",
}  # fmt: skip
"""Documented keys of accelerate's config file (huggingface.co/docs/accelerate)."""


@pytest.fixture(scope="module")
def chosen() -> dict[str, CellConfig]:
    """One resolved cell per strategy and tier, with blocks recomputed."""
    tiers = {"none": STRATEGIES, "cpu": ("zero2", "zero3"), "nvme": ("zero3",)}
    schemas = schema_memory.SCHEMAS["offload"]
    same = {"precision": Bf16(), "activation": CheckpointActivations(), "clip": 1.0, "accumulation": 2}
    cells = {
        f"{name} {tier}": cell(name, 4, bucket_bytes=25 * MIB, offload=schemas[tier](), **same)
        for tier, names in tiers.items()
        for name in names
    }
    assert not any(one.problems for one in cells.values())
    return {name: one.config for name, one in cells.items()}


@pytest.mark.parametrize("system", SYSTEMS)
def test_settings_are_valid_and_have_documented_names_alone(system: str, chosen: dict[str, CellConfig]) -> None:
    for name, config in chosen.items():
        found = SYSTEMS[system](config)
        (text,) = found.files.values()
        CHECKS[system](text)
        assert SYSTEMS[system](config) == found, name
        assert all("\n" not in note for note in found.notes)


def _valid_python(text: str) -> None:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            assert all(hasattr(module, alias.name) for alias in node.names)


def _valid_deepspeed(text: str) -> None:
    found = json.loads(text)
    assert set(found) <= DEEPSPEED_TOP
    assert set(found["zero_optimization"]) <= DEEPSPEED
    assert found["train_batch_size"] == 4 * found["train_micro_batch_size_per_gpu"] * 2


def _valid_accelerate(text: str) -> None:
    found = yaml.safe_load(text)
    keys = set(found) | set(found.get("fsdp_config", {})) | set(found.get("deepspeed_config", {}))
    assert keys <= ACCELERATE
    assert ("fsdp_config" in found) == (found["distributed_type"] == "FSDP")


CHECKS = {"fsdp2": _valid_python, "deepspeed": _valid_deepspeed, "accelerate": _valid_accelerate}


def test_settings_say_what_the_cell_is(chosen: dict[str, CellConfig]) -> None:
    zero = {name: json.loads(SYSTEMS["deepspeed"](chosen[name]).files["ds_config.json"]) for name in chosen}
    assert [zero[f"{one} none"]["zero_optimization"]["stage"] for one in STRATEGIES] == [0, 1, 2, 3, 1, 3, 3]
    assert zero["zero2 cpu"]["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_param" not in zero["zero3 cpu"]["zero_optimization"]
    assert zero["zero3 nvme"]["zero_optimization"]["offload_param"]["nvme_path"]
    shard = {name: SYSTEMS["fsdp2"](chosen[name]).files["shard.py"] for name in chosen}
    assert "reshard_after_forward=True" in shard["zero3 none"]
    assert "reshard_after_forward=False" in shard["fsdp2_no_reshard none"]
    assert "param_dtype=torch.bfloat16" in shard["fsdp2 none"]
    assert "CPUOffloadPolicy()" in shard["zero3 cpu"]
    assert "DistributedDataParallel(" in shard["ddp none"]
    assert SYSTEMS["fsdp2"](chosen["zero1 none"]).notes
    strategy = chosen["zero2 none"].strategy
    assert isinstance(strategy, Zero2)
    whole = replace(chosen["zero2 none"], strategy=replace(strategy, bucket_bytes=MIB))
    again = json.loads(SYSTEMS["deepspeed"](whole).files["ds_config.json"])
    assert again["zero_optimization"]["reduce_bucket_size"] == MIB // 2
