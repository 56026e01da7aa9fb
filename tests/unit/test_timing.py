"""Predicted time: the stream of operators, the layout of a schedule, measured times, clusters, published runs."""

from functools import cache
from pathlib import Path

import pytest
import yaml

from tests.cells import cell
from zerobench.commands.predict import costs_of
from zerobench.commands.simulated import ask
from zerobench.config.schema_training import Fp16, Muon
from zerobench.predict.flops import step_flops
from zerobench.records import EventRow
from zerobench.simulation import hardware, prediction
from zerobench.simulation.costs import GpuCosts, Transfer
from zerobench.simulation.execute import CPU, CUDA, Execution, execute, execute_all
from zerobench.simulation.prediction import StepSchedule, interval_of, reduced, schedule_of
from zerobench.simulation.timeline import Declared, lay_out


class Units:
    """A device on which an operator takes `flops` seconds and a collective `bytes`."""

    one_stream, order_s, loop_s = False, 0.0, 0.0

    def __init__(self, host_s: float = 0.0, contention: float = 1.0) -> None:
        self.host_s, self.contention = host_s, contention

    def compute(self, event: EventRow) -> float:
        return float(event.flops)

    def transfer(self, event: EventRow) -> Transfer:
        return Transfer(self.host_s, float(event.bytes))


def row(kind: str, **facts: object) -> EventRow:
    return EventRow(0, 0, 0.0, "backward", kind, 0, **facts)  # type: ignore[arg-type]


def work(seconds: int, stream: int = 0) -> EventRow:
    return row("compute", flops=seconds, stream=stream)


def launch(operation: int, seconds: int, stream: int = 0, kind: str = "reduce_scatter") -> EventRow:
    return row(
        "launch", operation=operation, bytes=seconds, stream=stream, group="world", group_size=2, collective=kind
    )


def wait(operation: int, stream: int = 0) -> EventRow:
    return row("wait", operation=operation, stream=stream)


def gather(operation: int, seconds: int, unit: str) -> EventRow:
    return row(
        "launch", operation=operation, bytes=seconds, unit=unit, stream=1, group="world", collective="all_gather"
    )


ORDERED = [
    work(4),
    row("order", operator="record", stream=0, elements=9), row("order", operator="wait", stream=1, elements=9),
    launch(0, 2, 1), work(1), wait(0),
]  # fmt: skip
"""A stream waits for the event that another recorded, before its collective begins."""


@pytest.mark.parametrize(
    ("step", "device", "step_s", "exposed_s"),
    [
        ([launch(0, 5), work(3), wait(0), work(1)], Units(), 6, 2),
        ([launch(0, 5, 1), launch(1, 5, 2), work(1), wait(1)], Units(), 10, 9),
        (ORDERED, Units(), 6, 1),
        ([ORDERED[0], *ORDERED[3:]], Units(), 5, 0),
        ([launch(0, 6, 1), work(4), wait(0)], Units(contention=1.5), 6, 0),
        ([launch(0, 3, 1), work(4), wait(0)], Units(contention=1.5), 5, 0),
        ([work(4), launch(0, 3, 1), wait(0)], Units(contention=1.5), 5, 0),
        ([*(work(2) for _ in range(3)), launch(1, 3, 2), *ORDERED[1:3], launch(0, 6, 1), wait(0)],
         Units(contention=1.5), 13, 6),
        ([launch(0, 5, 2), wait(0, 2), work(1)], Units(), 5, 0),
        ([launch(0, 2, 1), wait(0), row("order", operator="late", unit="bucket 0"), gather(7, 4, "bucket 0")],
         Units(), 6, 6),
    ],
    ids=[
        "a collective hides behind compute", "collectives of a group run one after the other", "an event is waited for",
        "without the wait it starts at once", "compute beside a collective is slower", "until the collective ends",
        "whichever was issued first", "which delays whatever waits for the compute",
        "a stream waits while another computes", "what the step before left keeps the lane busy",
    ],
)  # fmt: skip
def test_where_collectives_hide_and_what_a_step_waits_for(
    step: list[EventRow], device: Units, step_s: float, exposed_s: float
) -> None:
    made = lay_out(step, device)
    assert (made.step_s, made.exposed_s) == pytest.approx((step_s, exposed_s))


def test_compute_is_that_of_the_models_stream() -> None:
    """A copy on another stream runs beside the model: 39.6 ms of compute in a step of 33.7 ms was FSDP2's."""
    made = lay_out([work(3, stream=2), launch(0, 1, 2), work(2), wait(0)], Units())
    assert (made.compute_s, made.exposed_s, made.step_s) == (2, 2, 4)


def test_a_slow_host_starves_the_device() -> None:
    made = lay_out([work(1), work(1), work(1)], Units(host_s=2.0))
    assert made.step_s == 7
    assert made.host_s == 4


def test_a_declared_engine_reduces_after_its_backward() -> None:
    step = [row("phase", name="backward"), launch(0, 5), work(5), wait(0), row("phase", name="update"), work(1)]
    assert lay_out(step, Units()).step_s == 6
    assert lay_out(step, Units(), Declared(reduces_after_backward=True)).step_s == 11
    assert lay_out(step, Units(), Declared(True, gradient_factor=2.0)).step_s == 16


def test_a_group_with_a_rank_on_each_node_shares_its_nodes_network() -> None:
    cluster = hardware.cluster("h100-3200")
    costs = GpuCosts(hardware.device(cluster.device), cluster)
    inter = row("launch", collective="all_gather", bytes=2**30, group_size=8, stride=8)
    assert costs.transfer(inter).wire_s > 8 * 2**30 * 7 / 8 / (3200e9 / 8), "its eight like it send at once"


def test_a_collective_in_two_hops_is_priced_hop_by_hop() -> None:
    """As in zero/comm/hierarchical.py: 1/8 of the tensor between 8 nodes, the whole inside; flat is as slow as both."""
    cluster = hardware.cluster("h100-3200")
    costs = GpuCosts(hardware.device(cluster.device), cluster)

    def seconds(size: int, ranks: int, stride: int, kind: str = "all_gather") -> float:
        return costs.transfer(row("launch", collective=kind, bytes=size, group_size=ranks, stride=stride)).wire_s

    between, inside, flat = seconds(2**30, 8, 8), seconds(2**33, 8, 1), seconds(2**33, 64, 1)
    assert flat == pytest.approx(max(between, inside), rel=0.01)
    assert between > seconds(2**30, 8, 1), "the same size inside a node"
    assert seconds(2**30, 4, 4) < between, "two of its ranks are on each node, so that four groups share a network"
    assert seconds(2**30, 64, 1, "all_to_all") > 7 * seconds(2**30, 64, 1), "every rank sends each other one a part"
    functional = row("launch", operator="all_to_all_single", bytes=2**30, group_size=64, stride=1)
    assert costs.transfer(functional).wire_s == seconds(2**30, 64, 1, "all_to_all")


def test_ring_takes_longer_with_every_node_and_tree_by_their_logarithm() -> None:
    cluster = hardware.cluster("h100-3200")
    costs = GpuCosts(hardware.device(cluster.device), cluster)

    def microseconds(kind: str, ranks: int, size: int = 0) -> float:
        return costs.transfer(row("launch", collective=kind, bytes=size, group_size=ranks)).wire_s * 1e6

    assert microseconds("all_gather", 128) == pytest.approx(112 * 0.6 + 16 * 2.7)
    assert microseconds("reduce_scatter", 4096) == pytest.approx(32 * microseconds("all_gather", 128))
    assert microseconds("all_reduce", 4096) == pytest.approx(2 * (7 * 0.6 + 9 * 2.7))
    in_flight = 2**28 * 15 / 16 / (3200e9 / 8 * 0.6) * 1e6
    assert microseconds("all_gather", 128, 2**28) == pytest.approx(112 * 1.9 + 16 * 4 + in_flight), "the other protocol"


@pytest.mark.parametrize("group", ["device", "cluster"])
def test_every_file_of_the_hardware_binds_by_type(group: str) -> None:
    names = hardware.names(group)
    assert names
    for name in names:
        found = getattr(hardware, group)(name)
        assert found.sources
        if group == "cluster":
            assert hardware.device(found.device)


@pytest.mark.parametrize(
    ("text", "words"), [("node_gbit_s: 0", "node_gbit_s=0: a number above 0"), ("nod: 1", "nod is no key")]
)
def test_a_wrong_file_is_refused_by_its_key(tmp_path: Path, text: str, words: str) -> None:
    good = yaml.safe_dump(hardware._described("cluster")["h100-3200"], sort_keys=False)
    key = text.partition(":")[0]
    lines = [line for line in good.splitlines() if not line.startswith(f"{key}:")]
    (tmp_path / "mine.yaml").write_text("\n".join([*lines, text]))
    with pytest.raises(ValueError, match=words):
        hardware.cluster(str(tmp_path / "mine.yaml"))


def test_a_deep_model_and_many_micro_batches_are_executed_in_part_with_the_buckets_of_the_whole() -> None:
    words = ["model=gpt", "model.layers=32", "strategy=zero2", "precision=bf16", "accumulation=8", "world_size=8"]
    config = ask(words).cells[0].config
    cell = reduced(config)
    assert [one.model.layers for one in cell.configs] == [4, 8]  # type: ignore[attr-defined]
    assert {one.accumulation for one in cell.configs} == {3}
    assert (cell.whole_blocks, cell.whole_micro_batches) == (32, 8)
    words = ["model=gpt2_1_5b", "strategy=zero1,zero3", "precision=bf16", "world_size=512"]
    zero1, zero3 = (reduced(cell.config).configs for cell in ask(words).cells)
    assert {one.strategy.bucket_bytes for one in zero1} == {25 * 2**20}  # type: ignore[attr-defined]
    assert all(one.strategy == ask(words).cells[1].config.strategy for one in zero3)


def test_fitted_scales_are_of_kernels_that_compute() -> None:
    costs = GpuCosts(hardware.device("a100-sxm-80gb"), hardware.cluster("a100-80gb-1600"), scales=hardware.Scales())
    scaled = costs.scaled(hardware.Scales(compute=2.0, attention=3.0))
    attention = row("compute", operator="flash", flops=10**12, sizes="4x8x512x512x64", dtype="bfloat16")
    product = row("compute", operator="mm", flops=2 * 4096**3, sizes="1x4096x4096x4096", dtype="bfloat16")
    for event, factor in ((row("compute", operator="add", bytes=10**9), 1.0), (product, 2.0), (attention, 6.0)):
        assert scaled.compute(event) == pytest.approx(factor * costs.compute(event))


def test_scales_of_a_type_without_published_runs_are_the_mean_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        hardware, "validated", lambda: {"compute": {"a100": 1.0, "h100": 4.0}, "attention": {"h100": 1.1}}
    )
    assert hardware.scales_of(hardware.device("b200-sxm-180gb")).compute == pytest.approx(2.0)
    assert hardware.scales_of(hardware.device("h100-sxm-80gb")).compute == 4.0
    assert hardware.scales_of(hardware.device("l40s-48gb")).attention == pytest.approx(1.1)


def test_an_operator_without_a_formula_is_named_and_its_step_is_not_validated() -> None:
    sizes = {"copy_": 900, "add": 50, "mine.experts": 30, "mine.gemm": 1, "mine.small": 5, "mv": 1}
    step = [row("compute", operator=name, bytes=size) for name, size in sizes.items()]
    known = [row("compute", operator=name, flops=9) for name in ("mm", "mine.attention")]
    one = StepSchedule(reduced(cell("zero1", 8).config), (tuple(step + known),))
    assert one.without_formula == ["mine.experts", "mine.gemm", "mv"]
    costs, config = GpuCosts(hardware.device("h100-sxm-80gb"), hardware.cluster("h100-3200")), one.cell.configs[0]
    usual, wide = interval_of(costs, config), interval_of(costs, config, ["mine.gemm"])
    assert wide.basis == "not validated: no formula for the time of mine.gemm; 2 times as wide"
    assert (wide.low, wide.high) == (usual.low**2, usual.high**2)
    alone = interval_of(costs, cell("zero1", 1).config, ["mine.gemm"])
    assert alone.basis.endswith("; 2 times as wide; no formula for the time of mine.gemm")


@pytest.mark.slow
@pytest.mark.shown(1)
@pytest.mark.parametrize("strategy", ["zero3", "fsdp2"])
def test_every_operator_of_a_common_step_has_a_formula(strategy: str) -> None:
    more = {"precision": Fp16(), "clip": 1.0, "optimizer": Muon(), "backend": "simulated", "tensors": "fake"}
    for target in (CPU, CUDA):
        config = reduced(cell(strategy, 2, "tiny", target.kind, **more).config)
        assert schedule_of(config, [execute(config.configs[0], target=target, operators=True)]).without_formula == []


def test_on_one_gpu_streams_share_the_memory_and_unaligned_products_are_slow() -> None:
    here = costs_of("h100-3200", None)
    alone = here.alone()
    copies = [row("compute", bytes=10**9, stream=stream) for stream in (0, 1)]
    both, first = (lay_out(events, alone).step_s for events in (copies, copies[:1]))
    assert both == pytest.approx(2 * first)
    assert lay_out(copies, alone).issued_s == 2 * alone.host_s
    assert alone.compute(row("compute", operator="add", bytes=1)) == pytest.approx(alone.launch_s, rel=0.01)
    sizes = [row("compute", flops=1, dtype="bfloat16", sizes=f"1x8192x{words}x768") for words in (50257, 50304)]
    assert alone.compute(sizes[0]) > 5 * alone.compute(sizes[1])
    assert here.compute(sizes[0]) == pytest.approx(here.compute(sizes[1]), rel=0.01), "not known of clusters"


@pytest.mark.parametrize(("operator", "in_memory", "counted"), [("_foreach_copy_", 6, 10), ("_fused_adamw_", 28, 32)])
def test_list_of_few_blocks_waits_for_latency_on_one_gpu(operator: str, in_memory: int, counted: int) -> None:
    def seconds(blocks: int) -> float:
        elements = blocks * 2**16
        size = {"bytes": counted * elements, "elements": elements, "dtype": "float32"}
        return alone.compute(row("compute", operator=operator, **size)) / (in_memory * elements)

    alone = costs_of("h100-3200", None).alone()
    assert seconds(5000) == pytest.approx(1 / 2.67e12, rel=0.1)
    assert seconds(40) > (2.5 if operator == "_foreach_copy_" else 1.1) * seconds(5000), "40 of 132 multiprocessors"
    launches, before = 5000 * 2**16 * in_memory * seconds(5000), alone.most_blocks
    alone.most_blocks = 2240
    fewer = 5000 * 2**16 * in_memory * seconds(5000)
    assert (launches - fewer) / alone.launch_s == pytest.approx(-(-5000 // before) - 3), "16 and 3 launches"


def test_interval_is_wider_beyond_published_runs() -> None:
    costs = GpuCosts(hardware.device("h100-sxm-80gb"), hardware.cluster("h100-3200"))
    usual, far = (interval_of(costs, cell("zero1", ranks).config) for ranks in (512, 1024))
    assert far.basis == "not validated: world_size=1,024, and no published run has more than 512; 2 times as wide"
    assert (far.low, far.high) == (usual.low**2, usual.high**2)


def test_a_prediction_for_one_gpu_says_that_no_published_run_is_on_one() -> None:
    costs = GpuCosts(hardware.device("h100-sxm-80gb"), hardware.cluster("h100-3200"))
    alone, node = (interval_of(costs, cell("zero1", ranks).config) for ranks in (1, 8))
    assert alone.basis == "not validated: no published run on h100, one GPU; 2 times as wide"
    assert node.basis.endswith("published runs on h100, one node")
    assert alone.low < node.low < 1 < node.high < alone.high


def test_unknown_cluster_names_those_that_begin_alike() -> None:
    with pytest.raises(ValueError, match="cluster h20 is not described; did you mean h20-3200 or h200-3200"):
        hardware.cluster("h20")


MODEL = ("model=gpt", "model.layers=2", "model.hidden=64", "model.heads=2", "model.vocabulary=128", "sequence=32")


@cache
def executed(strategy: str, *words: str, device: str = "cuda") -> Execution:
    attention = "flash" if device == "cuda" else None
    question = ask([*MODEL, f"strategy={strategy}", "precision=bf16", "world_size=4", *words], device, attention)
    found = execute(question.cells[0].config, target=question.target, operators=True)
    assert not found.problem
    return found


SCORES_AGAIN = 2 * (2 * 4 * 2 * 32 * 32 * 32)
"""FLOPs of the scores that flash attention computes again in backward, in two blocks; the model's count has none."""


def computed(found: Execution) -> list[EventRow]:
    return [event for event in found.result.events if event.kind == "compute"]


@pytest.mark.shown(1)
@pytest.mark.parametrize(("strategy", "device"), [("zero3", "cuda"), ("ddp", "cuda"), ("ddp", "cpu")])
def test_flops_of_the_operators_are_those_of_the_model(strategy: str, device: str) -> None:
    found = executed(strategy, device=device)
    flops = step_flops(found.config)
    assert sum(event.flops for event in computed(found)) == flops.model + SCORES_AGAIN


def test_experts_have_the_flops_of_the_rows_that_they_are_given() -> None:
    shape = ("layers=1", "hidden=64", "heads=2", "vocabulary=128")
    words = ["model=huggingface", "huggingface.architecture=mixtral", *(f"huggingface.{one}" for one in shape)]
    question = ask([*words, "strategy=ddp", "precision=bf16", "world_size=4", "sequence=32"], "cuda")
    found = execute(question.cells[0].config, target=question.target, operators=True)
    products = [event for event in computed(found) if event.operator == "_grouped_mm"]
    rows, weights = 4 * 32 * 2, 3 * 64 * 256  # two of 8 experts a token, three matrices an expert
    assert sum(event.flops for event in products) == 3 * 2 * rows * weights, "forward, and both factors in backward"
    assert products[0].sizes == f"8x{rows // 8}x512x64"
    assert products[0].dtype == "bfloat16"


def whole_and_reduced(monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[float, float]:
    """Seconds of a step that is executed whole, and of the same that is executed in part."""
    question = ask([*MODEL, "precision=bf16", "world_size=8", *words], "cuda", "flash")
    config = question.cells[0].config
    costs = costs_of("a100-80gb-1600", None)
    part = prediction.reduced(config)
    monkeypatch.setattr(prediction, "MODEL_LAYERS", (4, 64))
    monkeypatch.setattr(prediction, "MOST_MICRO_BATCHES", 64)
    whole = prediction.reduced(config)
    assert whole.configs == (config,) != part.configs
    executed = [execute_all(small.configs, question.target, 1, operators=True) for small in (whole, part)]
    schedules = map(schedule_of, (whole, part), executed)
    both = [prediction.step_time(schedule, costs) for schedule in schedules]
    assert both[0].exposed_s == pytest.approx(both[1].exposed_s, rel=0.01, abs=1e-6)
    assert both[0].compute_s == pytest.approx(both[1].compute_s, rel=0.01)
    return both[0].step_s, both[1].step_s


@pytest.mark.shown(1)
@pytest.mark.parametrize(
    "words",
    [
        ("strategy=zero3", "model.layers=10", "accumulation=4"),
        ("strategy=zero1", "model.layers=14", "model.hidden=1024", "model.heads=8", "world_size=64"),
        ("strategy=zero2", "model.layers=14", "model.hidden=1024", "model.heads=8", "world_size=64"),
    ],
)
def test_a_step_that_is_executed_in_part_takes_as_long(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]) -> None:
    whole, part = whole_and_reduced(monkeypatch, *words)
    assert part == pytest.approx(whole, rel=0.01)
