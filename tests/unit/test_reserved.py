"""Reserved bytes by cause: sequences whose causes are known, and snapshots in torch's format, good and bad."""

import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from zerobench.commands.reserved import reserved_table, saving_of
from zerobench.commands.show import show
from zerobench.fake.as_gpu import Allocations, DeviceMemory
from zerobench.fake.caching_allocator import CachingAllocator
from zerobench.fake.observers import Growth, IntervalMark
from zerobench.zero import labels

MIB = 2**20
BEGIN, END = IntervalMark("begin"), IntervalMark("end", "step")


def storage() -> Any:
    return SimpleNamespace(tier=labels.DEVICE)


def memory(*events: Any, workspace_bytes: int = 0) -> DeviceMemory:
    """Memory after these events, each on the main stream, or a pair with the number of another."""
    pairs = [event if isinstance(event, tuple) else (event, 0) for event in events]
    return Allocations(workspace_bytes, pairs).memory()


def nonzero(causes: dict[str, int]) -> dict[str, int]:
    return {cause: size for cause, size in causes.items() if size}


def test_causes_of_rounding_pieces_free_segments_small_blocks_and_streams() -> None:
    allocator = CachingAllocator()
    freed = allocator.allocate(30 * MIB)
    allocator.allocate(100)
    allocator.allocate(5 * MIB)
    allocator.allocate(4 * MIB, stream=1)
    allocator.free(freed)
    allocator.allocate(40 * MIB - 1)  # does not fit the 30 MiB that are free
    assert nonzero(allocator.causes(0)) == {
        "requested": 100 + 5 * MIB + 4 * MIB + 40 * MIB - 1, "rounding": 412 + 1, "other streams": 16 * MIB,
        "small blocks": 2 * MIB - 512, "pieces": 15 * MIB, "free segments": 30 * MIB,
    }  # fmt: skip


def test_oversize_blocks_are_neither_split_nor_taken_by_smaller_requests() -> None:
    """torch's rules under max_split_size_mb:128, with the default max_non_split_rounding_mb:20."""
    allocator = CachingAllocator(most_split=128 * MIB)
    allocator.free(allocator.allocate(200 * MIB))
    allocator.allocate(100 * MIB)
    assert allocator.reserved == 300 * MIB
    assert allocator.allocate(170 * MIB).size == 170 * MIB
    assert allocator.reserved == 470 * MIB, "200 MiB exceed 170 by 20 or more"
    assert allocator.allocate(180 * MIB + 512).size == 200 * MIB
    assert allocator.reserved == 470 * MIB


def test_causes_are_those_of_the_fullest_instant_of_the_measured_step() -> None:
    held, parts, late = storage(), storage(), storage()
    found = memory(
        BEGIN, IntervalMark("phase", "forward"), Growth(parts, 60 * MIB), Growth(parts, -60 * MIB),
        BEGIN, IntervalMark("phase", "backward"), Growth(held, 70 * MIB), Growth(late, 20 * MIB),
        Growth(late, -20 * MIB), Growth(held, -70 * MIB), END, BEGIN,
    )  # fmt: skip
    assert nonzero(found.causes) == {"requested": 90 * MIB, "pieces": 40 * MIB}
    assert sum(found.causes.values()) == found.reserved_by_default == 130 * MIB
    assert found.allocated_bytes == 90 * MIB
    assert found.grew_last == "step 2 of 2, backward, for 70.0 MiB"


def test_memory_that_is_freed_by_a_resize_counts_until_the_new_block_is_there() -> None:
    grown = storage()
    found = memory(BEGIN, Growth(grown, 20 * MIB), Growth(grown, 10 * MIB), END)
    assert nonzero(found.causes) == {"requested": 50 * MIB}


def test_settings_that_save_memory_are_found_by_replays() -> None:
    first, second, other = storage(), storage(), storage()
    cached = (BEGIN, Growth(first, 60 * MIB), Growth(first, -60 * MIB), BEGIN, Growth(second, 70 * MIB), END)
    found = memory(*cached)
    assert found.by_setting == {
        "": 130 * MIB, "expandable_segments:True": 80 * MIB, "max_split_size_mb:128": 130 * MIB,
        "empty_cache() after step 1": 70 * MIB,
    }  # fmt: skip
    assert saving_of(found) == "empty_cache() after step 1, 60.0 MiB less"
    # backward's workspace splits the segment of the logits, which the next step reserves again
    logits = Growth(first, 200 * MIB)
    split = (BEGIN, logits, Growth(first, -200 * MIB), IntervalMark("matmul"), BEGIN, Growth(second, 200 * MIB), END)
    assert saving_of(memory(*split, workspace_bytes=32 * MIB)) == "max_split_size_mb:128, 168.0 MiB less"
    streams = memory(BEGIN, (Growth(first, 50 * MIB), 1), (Growth(first, -50 * MIB), 1), Growth(other, 50 * MIB), END)
    assert nonzero(streams.causes) == {"requested": 50 * MIB, "other streams": 50 * MIB}
    assert saving_of(streams) == "one stream, 50.0 MiB less"


def test_table_leaves_out_causes_that_no_row_has() -> None:
    held = storage()
    table = reserved_table({"zero3": memory(BEGIN, Growth(held, 64 * MIB), END)})
    assert list(table.header) == ["", "reserved", "requested", "expandable", "grew last"]
    assert list(table.rows[0]) == ["zero3", "64.0 MiB", "64.0 MiB", "80.0 MiB", "step 1 of 1, init, for 64.0 MiB"]


# -- snapshots -------------------------------------------------------------------------------------


def block(address: int, size: int, state: str = "inactive", line: str = "", requested: int = 0) -> dict[str, Any]:
    frames = [{"filename": "/x/lib/python3.11/site-packages/torch/nn/functional.py", "line": 9, "name": "linear"}]
    frames += [{"filename": line, "line": 12, "name": "step"}] if line else []
    return {
        "address": address, "size": size, "requested_size": requested, "state": state,
        "frames": frames if requested else [],
    }  # fmt: skip


def segment(address: int, stream: int, kind: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    """A segment as torch.cuda.memory._snapshot() has it (torch 2.13)."""
    live = [one for one in blocks if one["state"] == "active_allocated"]
    return {
        "device": 0, "address": address, "total_size": sum(one["size"] for one in blocks), "stream": stream,
        "segment_type": kind, "segment_pool_id": (0, 0), "allocated_size": sum(one["size"] for one in live),
        "active_size": sum(one["size"] for one in blocks if one["state"] != "inactive"),
        "requested_size": sum(one["requested_size"] for one in blocks), "is_expandable": False, "frames": [],
        "blocks": list(blocks),
    }  # fmt: skip


def entry(action: str, address: int, size: int, stream: int = 0) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 0, "frames": []}


def snapshot(scale: int = 1) -> dict[str, Any]:
    """60 MiB, freed before 70 MiB were reserved; a block that waits for a stream, and that stream's free one."""
    live = scale * 70 * MIB
    return {
        "segments": [
            segment(0, 0, "large", block(0, 60 * MIB)),
            segment(2**30, 0, "large", block(2**30, live, "active_allocated", "train.py", live - 12)),
            segment(2**31, 0, "small", block(2**31, MIB, "active_pending_free", "", MIB), block(2**31 + MIB, MIB)),
            segment(2**32, 7, "large", block(2**32, 20 * MIB)),
        ],
        "device_traces": [[
            entry("segment_alloc", 0, 60 * MIB), entry("alloc", 0, 60 * MIB), entry("free_requested", 0, 60 * MIB),
            entry("free_completed", 0, 60 * MIB), entry("segment_alloc", 2**30, live),
            entry("alloc", 2**30, live - 12), entry("alloc", 2**32, 20 * MIB, 7),
            entry("free_completed", 2**32, 20 * MIB, 7),
        ]],
        "allocator_settings": {"expandable_segments": False},
    }  # fmt: skip


def written(path: Path, content: object) -> str:
    path.write_bytes(pickle.dumps(content, protocol=4))
    return str(path)


def test_snapshot_shows_causes_savings_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    written(Path("one.pickle"), snapshot())
    assert show(["one.pickle"]) == 0
    out = capsys.readouterr().out
    table, lines = out.split("lines with the most")
    shown = " ".join(table.split())
    assert "reserved requested rounding waiting other streams small blocks free segments expandable saves most" in shown
    assert "one.pickle 152.0 MiB 70.0 MiB 12 B 1.0 MiB 20.0 MiB 1.0 MiB 60.0 MiB 102.0 MiB expandable_segments" in shown
    assert "50.0 MiB less" in shown
    assert "segment_alloc of" in shown
    assert "train.py:12 in step" in lines
    assert "70.0 MiB" in lines
    assert "functional.py:9 in linear" in lines, "no line of the user"


def test_several_ranks_name_the_one_with_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # names short enough for every table
    names = [written(Path(f"rank{rank}.pickle"), snapshot(rank + 1)) for rank in range(3)]
    assert show(names) == 0
    table, lines = capsys.readouterr().out.split("lines with the most")
    assert all(name in table for name in names)
    (line,) = (line for line in lines.splitlines() if "train.py:12" in line)
    assert "210.0 MiB" in line
    assert names[2] in line


def test_snapshot_in_which_nothing_is_alive_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cached = {"segments": [segment(0, 0, "large", block(0, 20 * MIB))], "device_traces": [[]]}
    assert show([written(tmp_path / "cached.pickle", cached)]) == 0
    out = capsys.readouterr().out
    assert "free segments" in out
    assert "the 0 of 0 lines" in out


def test_snapshot_of_a_step_on_a_cpu_shows_lines_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ours = snapshot() | {"allocator_settings": {"device 0": "tier device"}}
    assert show([written(tmp_path / "rank0.pickle", ours)]) == 0
    out = capsys.readouterr().out
    assert "train.py:12" in out
    assert "reserved" not in out


class Harmful:
    def __reduce__(self) -> Any:
        return os.system, ("touch harmed",)


def test_pickle_that_names_code_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert show([written(tmp_path / "x.pickle", snapshot() | {"segments": [Harmful()]})]) == 2
    error = capsys.readouterr().err
    assert f"UnpicklingError: it names {os.system.__module__}.system, which was not loaded" in error
    assert error.count("\n") == 1
    assert not (tmp_path / "harmed").exists()


def test_damaged_and_other_files_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = pickle.dumps(snapshot(), protocol=4)
    (tmp_path / "cut.pickle").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.pickle").write_text("no pickle")
    written(tmp_path / "list.pickle", [1])
    written(tmp_path / "hollow.pickle", {"segments": [{"device": 0}]})
    written(tmp_path / "empty.pickle", {"segments": [], "device_traces": []})
    for name in ("cut", "text", "list", "hollow", "empty"):
        assert show([str(tmp_path / f"{name}.pickle")]) == 2
        error = capsys.readouterr().err
        assert f"{name}.pickle: is no snapshot of torch's allocator, or a damaged one: " in error
        assert error.count("\n") == 1
    assert show([str(tmp_path / "cut.pickle"), "absent.pickle"]) == 2
    assert "absent.pickle: name one run, or files of snapshots" in capsys.readouterr().err
