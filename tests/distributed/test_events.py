"""The table of events: replayed, it gives the table of memory to the byte; its launches are the traffic."""

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import zerobench
from tests.cells import cell
from tests.distributed.variants import account, run_all
from zerobench.commands.perfetto import live_bytes
from zerobench.config.schema import Measure
from zerobench.config.schema_memory import CpuOffload
from zerobench.probes import event_log
from zerobench.rank_record import RankRecord
from zerobench.records import CATEGORIES, LINKS, STATES, EventRow
from zerobench.records.long_rows import EVENTS, OF_STORAGES
from zerobench.sweep import cell as cells

SUMS = (*CATEGORIES, "states", "total")


def asked(**more: Any) -> Measure:
    return Measure(steps=1, warmup=2, passes="accounted", **{"events": True, **more})


TWO_RANKS = {
    "ddp": cell("ddp", 2, measure=asked()),
    "zero1": cell("zero1", 2, measure=asked(), accumulation=2),
    "fsdp2": cell("fsdp2", 2, measure=asked()),
    "offload": cell("zero3", 2, measure=asked(), offload=CpuOffload()),
}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[RankRecord]]:
    records = account([one.config for one in TWO_RANKS.values()], tmp_path_factory.mktemp("ranks"))
    return dict(zip(TWO_RANKS, records, strict=True))


def maxima_of(rows: Iterable[EventRow]) -> Counter[tuple[str, str, str]]:
    """Returns (tier, phase or "step", category or sum) -> largest bytes, by a plain replay that checks each event; what
    lives after the last is the phase "end".
    """
    live: dict[int, tuple[int, str]] = {}
    sums: dict[str, Counter[str]] = {}
    highest: Counter[tuple[str, str, str]] = Counter()
    for row in rows:
        if row.kind in OF_STORAGES:
            assert row.storage is not None
            assert row.bytes > 0
            size, category = live.get(row.storage, (0, row.category))
            totals = sums.setdefault(row.tier, Counter())
            if row.kind == "label":
                assert (size, category) == (row.bytes, row.previous)
                assert category != row.category
                totals.update({category: -size, row.category: size})
            else:
                assert category == row.category, "a category changes by an event"
                size += -row.bytes if row.kind == "free" else row.bytes
                totals[category] += -row.bytes if row.kind == "free" else row.bytes
            assert size >= 0
            live[row.storage] = size, row.category
        for tier, totals in sums.items():
            whole = totals | {"states": sum(totals[name] for name in STATES), "total": totals.total()}
            for name, size in whole.items():
                for phase in (row.phase, "step"):
                    highest[tier, phase, name] = max(highest[tier, phase, name], size)
                highest[tier, "end", name] = size
    return highest


def check(record: RankRecord) -> None:
    """Holds a rank's events against its tables of memory and traffic."""
    rows = record.events
    assert [row.index for row in rows] == list(range(len(rows)))
    assert [row.seconds for row in rows] == sorted(row.seconds for row in rows)
    assert {row.kind for row in rows} <= set(EVENTS)
    assert {row.phase for row in rows} == {"data", "forward", "backward", "update"}
    found = maxima_of(rows)
    table = [m for m in record.memory if m.phase != "init" and m.category in SUMS]
    assert {(m.tier, m.phase, m.category): m.max_bytes for m in table} == {
        (m.tier, m.phase, m.category): found[m.tier, "end" if m.phase == "between" else m.phase, m.category]
        for m in table
    }
    frame = pd.DataFrame([asdict(row) for row in rows])
    sums = live_bytes(frame)
    assert {c: sums["device", c].max() for c in CATEGORIES} == {c: found["device", "step", c] for c in CATEGORIES}
    assert {key: sums[key].iloc[-1] for key in sums} == {(tier, c): found[tier, "end", c] for tier, c in sums}
    last = max(t.step for t in record.traffic)
    traffic = [t for t in record.traffic if t.step == last]
    sent, moved = [t for t in traffic if t.kind not in LINKS], [t for t in traffic if t.kind in LINKS]
    for name, column in (("bytes", "payload_bytes"), ("wire_bytes", "wire_bytes"), ("elements", "elements"),
                         ("between_bytes", "between_bytes"), ("calls", "calls")):  # fmt: skip
        assert frame[frame.kind == "launch"][name].sum() == pytest.approx(sum(getattr(t, column) for t in sent))
    moves = frame[frame.kind == "move"].groupby("collective")["bytes"].sum().to_dict()
    assert moves == {kind: sum(t.payload_bytes for t in moved if t.kind == kind) for kind in {t.kind for t in moved}}


@pytest.mark.parametrize("name", TWO_RANKS)
def test_events_replayed_are_the_tables_of_each_rank(two_ranks: dict[str, list[RankRecord]], name: str) -> None:
    for record in two_ranks[name]:
        check(record)


def test_units_collectives_and_modules_are_told(two_ranks: dict[str, list[RankRecord]]) -> None:
    found = {name: two_ranks[name][0].events for name in TWO_RANKS}
    units = {"(root)", "blocks.0", "blocks.1", "blocks.2"}
    for name in ("fsdp2", "offload"):
        rows = found[name]
        for kind in ("unit_gathered", "unit_freed"):
            assert {row.unit for row in rows if row.kind == kind} == units, (name, kind)
        gathers = {row.unit for row in rows if row.kind == "launch" and row.collective == "all_gather"}
        assert gathers == units
        assert {row.unit for row in rows if row.kind == "update"} == units
        twice = Counter(row.unit for row in rows if row.kind == "unit_gathered")
        assert twice == dict.fromkeys(units, 2) | {"(root)": 1}, "in forward and in backward, but for the root"
    for name, rows in found.items():
        launched, waited = ([r.operation for r in rows if r.kind == kind] for kind in ("launch", "wait"))
        assert len(waited) == len(set(waited))
        if name == "ddp":
            assert not waited, "C++ waits for DDP's buckets"
        else:
            late = {r.collective for r in rows if r.kind == "launch" and r.operation in set(launched) - set(waited)}
            assert late <= ({"all_gather"} if name == "zero1" else set()), "the next forward waits for these"
    begun = [row.name for row in found["zero1"] if row.kind == "module" and row.operator == "forward"]
    ended = [row.name for row in found["zero1"] if row.kind == "module_end"]
    assert sorted(begun) == sorted(ended)
    assert "blocks.1.mlp_in" in begun
    backward = [row.name for row in found["zero1"] if row.kind == "module" and row.operator == "backward"]
    assert backward.index("blocks.2") < backward.index("blocks.1") < backward.index("blocks.0")
    batches = {row.micro_batch for row in found["zero1"] if row.phase == "forward"}
    assert batches == {0, 1}
    assert {row.micro_batch for row in found["zero1"] if row.phase == "update"} == {1}
    assert {row.tier for row in found["offload"] if row.kind == "update"} == {"host"}
    sources = [row.source for row in found["offload"] if row.kind in ("launch", "unit_freed", "birth")]
    assert all(" in " in source for source in sources)


def test_events_change_nothing_that_is_measured(two_ranks: dict[str, list[RankRecord]], tmp_path: Path) -> None:
    """Without the key a cell, in a simulated world as well, has equal tables, and no table of events."""
    world: dict[str, Any] = {"backend": "simulated", "results_dir": str(tmp_path)}
    plain = cell("zero3", 2, measure=asked(events=False), **world)
    told = cell("zero3", 2, measure=asked(), **world)
    without, found = (cells.run_cell(one, lambda _: None) for one in (plain, told))
    assert not (tmp_path / without.run_id / "events.parquet").exists()
    results = zerobench.load(tmp_path)
    first, second = (results.of([row.run_id]) for row in (without, found))
    assert first.events.empty
    assert set(second.events["rank"]) == {0}
    for name in ("memory", "traffic", "tensors", "lines"):
        one, other = (getattr(part, name).drop(columns="run_id").reset_index(drop=True) for part in (first, second))
        pd.testing.assert_frame_equal(one, other)
    own = second.events.drop(columns="run_id").astype(object).where(second.events.notna(), None).to_dict("records")
    assert maxima_of(EventRow(**row) for row in own)["device", "step", "total"] == found.peak_bytes
    config = json.loads(without.config)
    assert "events" not in config["measure"], "the cell is the one that it was before there was a key"


def test_events_of_nodes_in_a_simulated_world(tmp_path: Path) -> None:
    one = cell("zero3", 4, measure=asked(), node_size=2, backend="simulated")
    (record,) = run_all(([one.config], "accounted", 0, str(tmp_path)), lambda _: None)
    check(record)
    gathers = [row for row in record.events if row.collective == "all_gather" and row.kind == "launch"]
    hops = {(row.group_size, row.between_bytes > 0) for row in gathers}
    assert hops == {(2, False), (2, True)}, "one hop inside the node, one between nodes"


def test_what_is_patched_is_put_back() -> None:
    c10d: Any = torch._C._distributed_c10d
    before = dict(vars(c10d.Work)), dict(vars(c10d.ProcessGroup))  # a method that is read from its class does not bind
    with event_log.works_watched(lambda: None, lambda _: None):
        assert vars(c10d.Work)["wait"] is not before[0]["wait"]
    after = dict(vars(c10d.Work)), dict(vars(c10d.ProcessGroup))
    assert after == before
    assert all(mine[name] is one[name] for mine, one in zip(after, before, strict=True) for name in one)
