"""Snapshots in torch's format, read by torch's functions, the ledger's to the byte; and events made by hand."""

import base64
import inspect
import json
import os
import pickle
import pickletools
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.cuda import _memory_viz as viewer

import zerobench
from tests.cells import cell
from zerobench.probes import intervals
from zerobench.probes.event_log import event_rows
from zerobench.probes.intervals import ASIDE, Birth, Event, History, Interval, StorageRecord
from zerobench.probes.ledger import Ledger
from zerobench.probes.snapshot import FOLDER, PROTOCOL, snapshot_of, snapshots, stamp
from zerobench.probes.traced_pass import STEP, Overlap, overlaps
from zerobench.ranks.start_ranks import Failure, LaunchError
from zerobench.records import CATEGORIES, EventRow
from zerobench.sweep import cell as cells
from zerobench.watching.held_tensors import leave_out
from zerobench.worker import RankJob
from zerobench.zero import labels

PAGE_READS = {
    "PROTO", "FRAME", "STOP", "MARK", "MEMOIZE", "BINGET", "LONG_BINGET", "EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE",
    "APPEND", "APPENDS", "SETITEM", "SETITEMS", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "BININT", "BININT1", "BININT2",
    "LONG1", "BINFLOAT", "NEWTRUE", "NEWFALSE", "NONE", "SHORT_BINUNICODE", "BINUNICODE",
}  # fmt: skip
"""Opcodes of pickle that the page's reader, which is its own, knows."""


def live(trace: list[dict[str, Any]]) -> Iterator[tuple[int, Counter[str]]]:
    """The page's way of adding up: time and live bytes by category after each entry; it fails on what overlaps."""
    blocks: dict[int, dict[str, Any]] = {}
    sums: Counter[str] = Counter(dict.fromkeys(CATEGORIES, 0))
    for entry in trace:
        if entry["action"] == "alloc":
            assert entry["addr"] not in blocks
            blocks[entry["addr"]] = entry
            sums[entry["category"]] += entry["size"]
        elif entry["action"] == "free_completed":
            begun = blocks.pop(entry["addr"])
            assert (begun["size"], begun["category"]) == (entry["size"], entry["category"])
            sums[begun["category"]] -= begun["size"]
        places = sorted((one["addr"], one["addr"] + one["size"]) for one in blocks.values())
        assert all(end <= begin for (_, end), (begin, _) in pairwise(places))
        yield entry["time_us"], Counter(sums)


def peak_of(trace: list[dict[str, Any]]) -> int:
    return max(sums.total() for _, sums in live(trace))


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    """A ledger after a step with all that storages do: change size and category, leave the device, be made aside."""
    monkeypatch.setattr(intervals, "INSTANTS", 10_000)
    with Ledger() as ledger:
        ledger.history = History()
        weight, gone = torch.ones(100), torch.ones(7)
        ledger.on_tensor(weight, labels.PARAMETERS, "weight")
        ledger.on_tensor(torch.ones(3), labels.OPTIMIZER, "dropped")
        ledger.begin()
        ledger.enter_phase("forward")
        state = weight[:50] * 2
        on_host = torch.ones(40)
        ledger.on_tensor(on_host, labels.OPTIMIZER, "offloaded", labels.HOST)
        ledger.on_file("states.bin", "swap", labels.MASTER, 4096)
        del gone
        weight.untyped_storage().resize_(0)
        ledger.enter_phase(ASIDE)
        left = [torch.ones(9), torch.ones(100_000)][0]
        ledger.enter_phase("backward")
        weight.untyped_storage().resize_(800)
        ledger.on_tensor(state, labels.GRADIENTS, "first")
        ledger.on_tensor(state, labels.MASTER, "then")
        ledger.on_file("states.bin", "swap", labels.MASTER, 0)
        large = torch.ones(300)
        del large, left
        ledger.enter_phase("update")
        ledger.end("step")
    return ledger


def made_of(ledger: Ledger) -> dict[str, Any]:
    return snapshot_of(ledger.history.step)


def test_live_bytes_are_the_ledgers_at_every_instant(uneven: Ledger) -> None:
    traces = made_of(uneven)["device_traces"]
    shown = dict(live(traces[0]))  # the last of entries with equal times
    instants = {round(i.seconds * 1e6): i for i in uneven.sums.timeline}
    assert len(instants) > 10
    for time_us, instant in instants.items():
        last = max(before for before in shown if before <= time_us)
        assert +shown[last] == +Counter(instant.totals)
    assert peak_of(traces[0]) == uneven.sums.extremes["step"].peak
    assert [peak_of(trace) for trace in traces[1:]] == [
        uneven.sums.elsewhere[tier, "step"].peak for tier in (labels.HOST, labels.NVME)
    ]


def test_torchs_functions_read_it(uneven: Ledger) -> None:
    made = made_of(uneven)
    assert [segment["device"] for segment in made["segments"]] == [0, 1, 2]
    assert "total_allocated: 1.1KiB" in viewer.segsum(made)  # of all tiers; it also adds up each segment
    assert viewer.calc_active(made["segments"][0]) == 800 + 200
    assert viewer.trace(made).count("Device ") == 3
    flames = viewer.memory(made, lambda lines: lines).splitlines()
    weight = next(line for line in flames if "label:0:weight" in line)
    assert weight.startswith("stream_0;active_allocated;category:0:parameters;phase:0:init;module:0:none;")
    assert weight.endswith(f"test_memory_viz.py:{line_of('weight, gone')}:uneven;label:0:weight 800")
    for plot in (viewer.trace_plot(made), viewer.segment_plot(made)):
        [embedded] = json.loads(plot.split("const local_files = ")[1].split("\n")[0])
        assert pickle.loads(base64.b64decode(embedded["base64"])) == made
    lasting = viewer.filter_alloc_free_pairs(made)["device_traces"][0]
    assert sum(one["size"] for one in lasting if one["action"] == "alloc") == 800 + 200


def test_the_page_can_unpickle_and_color_it(uneven: Ledger) -> None:
    made = made_of(uneven)
    assert {code.name for code, _, _ in pickletools.genops(pickle.dumps(made, protocol=PROTOCOL))} <= PAGE_READS
    first = made["device_traces"][0]
    colors = list(
        dict.fromkeys(one["category"] for trace in made["device_traces"] for one in trace if "category" in one)
    )
    assert colors == [*CATEGORIES, "unknown"]
    assert len(colors) <= 10  # the page's colors
    phases = [one["user_metadata"] for one in first if one["action"] == "snapshot" and "category" not in one]
    assert phases == ["phase: forward", "phase: backward", "phase: update"]
    assert [(one["name"], one["stage"]) for one in made["external_annotations"]] == [
        (phase, stage) for phase in ("forward", "backward", "update") for stage in ("START", "END")
    ]
    moved = [one["user_metadata"] for one in first if one["action"] == "alloc" and one["size"] == 200]
    assert moved == [f"{category} | no module | forward | then" for category in ("gradients", "master")]


def line_of(words: str) -> int:
    return next(
        n for n, line in enumerate(Path(__file__).read_text().splitlines(), 1) if line.strip().startswith(words)
    )


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def trained(folder: Path, model: nn.Module, batches: tuple[int, ...]) -> zerobench.Results:
    optimizer = torch.optim.Adam(model.parameters())
    with zerobench.watch(model, optimizer, to=folder, steps=len(batches) - 1, snapshot=True) as watch:
        for batch in batches:
            model(torch.randn(batch, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch.results


def loaded(run: Path) -> list[dict[str, Any]]:
    return [pickle.loads(path.read_bytes()) for path in sorted((run / "snapshots").iterdir())]


@pytest.mark.slow
def test_a_watch_writes_the_step_of_its_peak(tmp_path: Path) -> None:
    with leave_out():  # what other tests have left in this process
        results = trained(tmp_path, Net(), (16, 16, 256, 16))
    [run] = tmp_path.iterdir()
    [made] = loaded(run)
    [trace] = made["device_traces"]
    assert peak_of(trace) == results.runs.peak_bytes.item()
    assert max(one["size"] for one in trace) == 4 * 256 * 64
    by_category = max((sums for _, sums in live(trace)), key=Counter.total)
    assert {name: by_category[name] for name in CATEGORIES} == {
        name: results.runs[f"peak_{name}_bytes"].item() for name in CATEGORIES
    }
    assert any(one.get("user_metadata") == "gradients | no module | backward | second.bias" for one in trace)


def test_a_watch_needs_a_folder_for_it() -> None:
    with pytest.raises(ValueError, match=r"^watch: snapshot=True writes a file into the run's folder; give to="):
        zerobench.watch(Net(), None, snapshot=True)


def test_labels_are_stamped_into_torchs_own_snapshot() -> None:
    frame = [{"filename": "train.py", "line": 3, "name": "step"}]

    def entry(action: str, addr: int, time_us: int, **more: Any) -> dict[str, Any]:
        return {"action": action, "addr": addr, "size": 512, "stream": 0, "time_us": time_us, "frames": frame, **more}

    def born(address: int, seconds: float, category: str) -> Birth:
        return Birth(address, seconds, StorageRecord(400, category, f"{category} here", "blocks.3", "backward"))

    def freed(addr: int, time_us: int) -> list[dict[str, Any]]:
        return [entry("free_requested", addr, time_us), entry("free_completed", addr, time_us)]

    trace = [
        entry("segment_alloc", 1024, 1000), *freed(5120, 1500),
        entry("alloc", 1024, 2000, user_metadata="theirs"), entry("alloc", 2048, 2100), *freed(1024, 3000),
        entry("alloc", 1024, 4000),
    ]  # fmt: skip
    blocks = [
        {"address": 1024, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": frame},
        {"address": 1536, "size": 512, "requested_size": 0, "state": "inactive", "frames": []},
    ]
    taken = {"device_traces": [[], trace], "segments": [{"device": 1, "address": 1024, "total_size": 1024, "stream": 0,
             "blocks": blocks, "allocated_size": 512}]}  # fmt: skip
    births = [born(5120, 0.0001, "inputs"), born(5120, 0.0011, "activations"), born(1024, 0.0023, "gradients"),
              born(1024, 0.0044, "optimizer"), born(1024, 0.0045, "master")]  # fmt: skip
    assert stamp(taken, births, clock_us=-200.0) == 2
    shown = [one["category"] for one in trace if one["action"] == "alloc" or one["action"] == "free_completed"]
    assert shown == ["activations", "gradients", "unknown", "gradients", "optimizer"]
    assert [one.get("category") for one in trace[:9]] == [*CATEGORIES, "unknown"]
    first = next(one for one in trace if one["action"] == "alloc")
    assert first["user_metadata"] == "theirs | gradients | blocks.3 | backward | gradients here"
    assert [f"{one['filename']}:{one['name']}" for one in first["frames"]] == [
        "train.py:step", "module:blocks.3", "phase:backward", "category:gradients",
    ]  # fmt: skip
    assert len(frame) == 1
    assert viewer.memory(taken, lambda lines: lines).startswith(
        "stream_0;active_allocated;category:0:master;phase:0:backward;module:0:blocks.3;train.py:3:step 400"
    )
    assert stamp({"device_traces": [[]], "segments": []}, births, 0.0) == 0


GPU = torch.device("cuda", 0)


def test_torch_has_the_private_functions() -> None:
    impl = inspect.signature(torch.cuda.memory._record_memory_history_impl).parameters
    assert {"enabled", "stacks", "max_entries"} <= set(impl)
    assert "enabled" in inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert callable(torch.cuda.memory._snapshot)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **how: calls.append(how.get("enabled", "all"))
    )
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": [[]]})
    return calls


def test_out_of_memory_leaves_a_snapshot_in_any_case(told: list[Any], tmp_path: Path) -> None:
    with pytest.raises(torch.OutOfMemoryError), snapshots(tmp_path, 1, GPU, requested=False):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    assert (told, os.listdir(tmp_path / FOLDER)) == ([], ["rank1.pickle"])


def test_a_snapshot_that_fails_does_not_hide_the_error(told: list[Any], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(torch.OutOfMemoryError) as raised, snapshots(tmp_path, 1, GPU, requested=True):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert raised.value.__notes__ == ["no snapshot of the allocator could be written: disk full"]
    assert (told, [*tmp_path.glob(f"{FOLDER}/rank*")]) == (["all", None], [])


def test_the_row_of_a_run_out_of_memory_names_the_snapshot(tmp_path: Path, monkeypatch) -> None:
    def launch(_worker: Any, jobs: list[RankJob], *_: Any) -> None:
        for job in jobs:
            (Path(job.folder) / FOLDER).mkdir(exist_ok=True)
            (Path(job.folder) / FOLDER / f"rank{job.rank}.pickle").write_bytes(b"")
        raise LaunchError([Failure(0, "oom", "raised OutOfMemoryError: CUDA out of memory")], 60.0)

    monkeypatch.setattr(cells, "launch", launch)
    row = cells.run_cell(cell("ddp", 2, results_dir=str(tmp_path)), lambda _: None)
    assert row.status == "oom"
    assert row.reason.endswith("CUDA out of memory; the allocator then: snapshots/rank0.pickle")
    assert sorted(os.listdir(tmp_path / row.run_id / FOLDER)) == ["rank0.pickle", "rank1.pickle"]


MAIN, OTHER, STREAM = 11, 12, 7


def event(cat: str, name: str, begin: float, end: float, tid: int = MAIN) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin}


def step(begin: float, end: float) -> dict[str, Any]:
    return event("user_annotation", STEP, begin, end)


def in_us(one: Overlap) -> tuple[float, ...]:
    return tuple(round(value * 1e6, 3) for value in one)


def test_on_a_cpu_the_main_threads_operators_hide_what_gloo_does() -> None:
    trace = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0},
        step(0, 100),
        step(100, 200),
        event("user_annotation", "gloo:all_reduce", 10, 50, OTHER),
        event("user_annotation", "gloo:all_reduce", 30, 60, OTHER + 1),  # two at a time are one
        event("cpu_op", "c10d::allreduce_", 8, 10),  # its launch is communication
        event("cpu_op", "aten::mm", 20, 40),
        event("cpu_op", "aten::addmm", 20, 45),  # nested: not twice
        event("cpu_op", "aten::mm", 50, 60, OTHER),  # not the main thread's
        event("cpu_op", "autograd::engine::evaluate_function: AddmmBackward0", 8, 100),  # a wrapper computes nothing
        event("cpu_op", "AddmmBackward0", 8, 100),
        event("user_annotation", "gloo:send", 90, 130),  # from one step into the next
        event("cpu_op", "c10d::send", 88, 92),
        event("cpu_op", "aten::clone", 89, 91),  # within a collective's operator
        event("cpu_op", "aten::mm", 120, 125),
    ]
    first, second = overlaps(trace, "cpu")
    assert in_us(first) == (100, 52 + 12, 52 - 25 + 12)
    assert in_us(second) == (100, 30, 25)


def test_on_cuda_other_kernels_hide_nccls_and_copies_do_not() -> None:
    trace = [
        step(0, 100),
        event(
            "kernel", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", 10, 40, STREAM
        ),
        event("kernel", "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", 60, 70, STREAM),
        event("kernel", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n", 20, 25, STREAM + 1),
        event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 30, 40, STREAM + 1),
        event("gpu_memset", "Memset (Device)", 60, 62, STREAM + 1),
        event("gpu_user_annotation", "nccl:all_reduce", 0, 100, STREAM),
        event("cpu_op", "c10d::_reduce_scatter_base_", 0, 5),
        event("cpu_op", "aten::mm", 0, 100),
        event("kernel", "ncclDevKernel_AllReduce", 150, 160, STREAM),  # after the step
    ]
    [found] = overlaps(trace, "cuda")
    assert in_us(found) == (100, 40, 35)


def test_a_trace_without_steps_or_without_communication() -> None:
    assert overlaps([event("cpu_op", "aten::mm", 0, 5)], "cpu") == []
    assert [in_us(one) for one in overlaps([step(0, 9), event("cpu_op", "aten::mm", 0, 5)], "cpu")] == [(9, 0, 0)]


def storage(name: str, category: str = "activations") -> StorageRecord:
    return StorageRecord(0, category, name, "block.0", "forward", source="a.py:1 in f", first_name=name)


def noted(number: int, phase: str, kind: str, **facts: Any) -> tuple[int, Event]:
    """An event that changes no storage, after `number` that do."""
    return number, Event(phase, number + 0.5, source="b.py:2 in g", kind=kind, facts=facts)


def rows_of(
    sizes: dict[StorageRecord, int], events: list[Event], *others: tuple[int, Event],
    first: dict[Any, str] | None = None,
) -> list[EventRow]:  # fmt: skip
    every = [*sizes, *(event.stored for event in events if event.stored is not None)]
    categories = {one: one.category for one in every} | (first or {})
    log = []
    for number, event in enumerate([*events, None]):
        log += [other for after, other in others if after == number or (event is None and after > number)]
        log += [] if event is None else [event]
    return event_rows(3, Interval(0.0, sizes, categories, events, log))


def short(rows: list[EventRow]) -> list[tuple[str, str, int, str]]:
    return [(row.phase, row.kind, row.bytes, row.name) for row in rows if row.kind != "phase"]


def test_what_the_harness_leaves_is_told_where_the_next_phase_begins() -> None:
    gone, left, old = storage("gone"), storage("left"), storage("old", "gradients")
    rows = rows_of(
        {old: 8},
        [
            Event("backward", 1.0), Event(ASIDE, 2.0), Event(ASIDE, 2.1, gone, grown=64),
            Event(ASIDE, 2.2, left, grown=4), Event(ASIDE, 2.3, gone, grown=-64), Event(ASIDE, 2.4, old, grown=-8),
            Event("update", 3.0),
        ],
        noted(3, ASIDE, "launch", collective="all_reduce", operation=1, unit="", operator="allreduce_",
                  group_size=2, group="", control=True),
        noted(3, ASIDE, "module", name="block.0"),
    )  # fmt: skip
    assert short(rows) == [
        ("data", "live", 8, "old"), ("backward", "launch", 0, ""),
        ("update", "free", 8, "old"), ("update", "birth", 4, "left"),
    ]  # fmt: skip
    assert [row.name for row in rows if row.kind == "phase"] == ["backward", "update"]
    assert {row.rank for row in rows} == {3}


def test_a_wait_has_what_its_launch_has_and_the_first_counts() -> None:
    launch: dict[str, Any] = {"collective": "all_gather", "unit": "block.0", "operator": "send", "group_size": 2,
                              "group": "0", "control": False}  # fmt: skip
    rows = rows_of(
        {}, [Event("forward", 0.0)],
        noted(1, "forward", "wait", operation=40), noted(1, "forward", "launch", operation=41, **launch),
        noted(1, "forward", "launch", operation=41, **launch), noted(1, "forward", "wait", operation=41),
        noted(1, "forward", "wait", operation=41),
    )  # fmt: skip
    told = [(row.kind, row.operation, row.unit, row.collective) for row in rows if row.kind != "phase"]
    assert told == [("launch", 0, "block.0", "all_gather")] * 2 + [("wait", 0, "block.0", "all_gather")]
