"""The verbs that look after results: what they say of hand-made runs, and what they remove."""

import itertools
import json
import os
import re
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import zerobench
from tests.cells import cell
from zerobench import cli
from zerobench.commands.folder_contents import look
from zerobench.host.temporary import is_claimed, lease_path
from zerobench.records import ALLOCATOR, CATEGORIES, SCHEMA_VERSION, MemoryRow, RunRow, TensorRow, TrafficRow
from zerobench.results.folders import PARTIAL, claim_folder, write_run
from zerobench.results.printed_table import print_failures, print_results
from zerobench.results.tables import collect, load
from zerobench.sweep.cell import new_row

clock = itertools.count()


def make(where: Path, strategy: str = "zero2", logs: dict[str, str] | None = None, **more: Any) -> Path:
    """A run in `where`, each begun a second after the one before; returns its folder."""
    one = cell(strategy, 2)
    row = new_row(one)
    now = next(clock)
    row.started = f"2026-01-01T00:{now // 60:02}:{now % 60:02}.000+00:00"
    row.status, row.psi, row.peak_bytes, row.states_bytes = "ok", 1000, 5 * 2**20, 3 * 2**20
    row.predicted_states_bytes, row.volume_psi, row.predicted_volume_psi, row.wire_bytes = 3 * 2**20, 2.0, 2.0, 4000
    row.step_s, row.forward_s, row.backward_s, row.update_s, row.tokens_per_s = 0.25, 0.0625, 0.125, 0.03125, 1024.0
    row.loss_first, row.loss_last, row.passes_agree = 5.5, 2.25, True
    for name, value in more.items():
        assert name in {f.name for f in fields(RunRow)}
        setattr(row, name, value)
    aside = claim_folder(where, f"{strategy}-tiny-n2-{row.cell_id}-code")
    for name, text in (logs or {}).items():
        (aside.path / "logs" / name).parent.mkdir(parents=True, exist_ok=True)
        (aside.path / "logs" / name).write_text(text)
    tables = _tables(row.device) if row.status == "ok" else {}
    return write_run(aside, f"{strategy}-tiny-n2-{row.cell_id}-code", row, one.config, {}, tables)


def _tables(device: str) -> dict[str, list[Any]]:
    """Rank 1 is the fullest, by 1 MiB, of which theory knows nothing."""
    memory = []
    for rank in (0, 1):
        for phase, size in (("forward", 4 + rank), ("step", 4 + rank)):
            memory += [MemoryRow(rank, phase, c, 0, 0, 0) for c in CATEGORIES if c not in ("gradients", "activations")]
            memory.append(MemoryRow(rank, phase, "gradients", 2 * 2**20, 0, (2 + rank) * 2**20, 2 * 2**20))
            memory.append(MemoryRow(rank, phase, "activations", 2 * 2**20, 0, 2 * 2**20))
            memory.append(MemoryRow(rank, phase, "states", 2 * 2**20, 0, (2 + rank) * 2**20, 2 * 2**20))
            memory.append(MemoryRow(rank, phase, "total", size * 2**20, 0, size * 2**20))
            if device == "cuda":
                sizes = zip(ALLOCATOR, (7 + rank, 9, 2, 2, 1, 12), strict=True)
                memory += [MemoryRow(rank, phase, name, None, None, one * 2**20) for name, one in sizes]
    sums = {"calls": 3, "elements": 500, "payload_bytes": 2000, "wire_bytes": 1000.0, "volume_elements": 1000.0}
    names = {"operator": "send", "collective": "reduce_scatter", "kind": "reduce_scatter", "unit": "u"}
    more = {"phase": "backward", "dtype": "float32", "group_size": 2, "control": False, "known": True}
    traffic = [TrafficRow(rank=r, step=s, **names, **sums, **more) for r in (0, 1) for s in (0, 1)]  # type: ignore[arg-type]
    block = TensorRow(1, 2**20, "activations", "", "blocks.7", "forward")
    return {"memory": memory, "traffic": traffic, "tensors": [block, TensorRow(0, 9, "inputs", "x", "", "data")]}


def names(where: Path) -> set[str]:
    return {p.name for p in where.iterdir()}


def prune(*arguments: str | Path) -> int:
    return cli.run(["prune", *map(str, arguments)])


def test_status_tells_what_is_there_and_what_next(tmp_path: Path, capsys) -> None:
    make(tmp_path, status="crash", reason="rank 0 raised")
    make(tmp_path)
    make(tmp_path, "ddp", source_hash="0" * 12)
    make(tmp_path, "zero1", status="crash", reason="rank 0 raised")
    alive = claim_folder(tmp_path, "zero3-tiny-n2")
    (tmp_path / ".partial-dead-n2-0badcafe").mkdir()
    assert cli.run(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    lines = {line.split()[0]: line for line in shown.splitlines() if line.strip()}
    assert all(word in lines["zero2"] for word in ("zero2 tiny N=2 b=8", "ok", " d ", "current", "5.0 MiB", "250.0 ms"))
    assert "older" in lines["ddp"]
    assert "crash" in lines["zero1"]
    assert "4 runs of 3 cells: 2 ok, 2 crash; 1 superseded;" in shown
    assert "being written now: zero3-tiny-n2\n" in shown
    assert "1 leftover of dead processes" in shown
    assert (
        f"1 run not ok: `zerobench show RUN --results {tmp_path}` shows why; `zerobench prune {tmp_path}` removes it;"
        " the same sweep resumes" in shown
    )
    assert "1 cell by older code" in shown
    assert cli.run(["status", str(tmp_path), "--where", "status!=ok"]) == 0
    assert "1 run not ok" in capsys.readouterr().out
    alive.release()


@pytest.mark.slow
def test_status_of_collections_damaged_runs_and_nothing(tmp_path: Path, capsys, recwarn) -> None:
    make(tmp_path / "runs")
    collect(load(tmp_path / "runs"), tmp_path / "collection")
    assert cli.run(["status", str(tmp_path / "collection")]) == 0
    shown = capsys.readouterr().out
    assert "1 run of 1 cell: 1 ok" in shown
    assert "prune" not in shown
    (make(tmp_path / "runs", "ddp") / "run.json").write_text("{")
    assert cli.run(["status", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert sum("cannot be read" in line for line in shown.splitlines()) == 1
    assert not recwarn.list
    (tmp_path / "empty").mkdir()
    assert cli.run(["status", str(tmp_path / "empty")]) == 0
    assert "no runs here" in capsys.readouterr().out
    assert cli.run(["status", str(tmp_path / "nowhere")]) == 2
    assert "there is no such results folder" in capsys.readouterr().err


def test_show_accounts_for_memory_traffic_time_and_loss(tmp_path: Path, capsys) -> None:
    folder = make(tmp_path)
    assert cli.run(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert lines[0] == "zero2 tiny N=2 b=8: ok"
    assert "Memory in a step, rank 1, the largest of 2" in lines
    assert "gradients 2.0 MiB 3.0 MiB 2.0 MiB 1.0 MiB" in lines
    assert "activations 2.0 MiB 2.0 MiB – –" in lines
    assert "0 4.0 MiB 2.0 MiB 2.0 MiB 0 B" in lines
    assert "1 5.0 MiB 3.0 MiB 2.0 MiB 1.0 MiB" in lines
    assert "forward 5.0 MiB 3.0 MiB" in lines
    assert "activations blocks.7 forward 1.0 MiB" in lines
    assert "inputs x" not in shown, "rank 0's tensors"
    assert "backward reduce_scatter 3 2.0 KiB 1000 B 1.000" in lines, "per step: there are two"
    assert "volume 2 ψ 2 ψ 0 ψ" in lines
    assert any("step 250.0 ms, too few steps for an interval; 1,024 tokens/s" in line for line in lines)
    assert any("5.5000 at the first step, 2.2500 at the last step; the losses of all" in line for line in lines)


@pytest.mark.slow
def test_data_without_a_length_are_counted_in_samples_by_every_verb(tmp_path: Path, capsys) -> None:
    where = tmp_path / "runs"
    first, *_ = (make(where, name, sequence=1) for name in ("ddp", "zero2"))
    out = {form: str(tmp_path / form) for form in ("page.html", "figures", "table.tex")}
    said = []
    for words in (
        ["show", str(first)],
        ["report", str(where), "--out", out["page.html"]],
        ["export", str(where), "--format", "latex", "--out", out["table.tex"]],
        ["plot", "throughput", str(where), "--out", out["figures"], "--format", "svg"],
    ):
        assert cli.run(words) == 0
        said.append(capsys.readouterr().out)
    said += [path.read_text() for name in out.values() for path in sorted([*Path(name).glob("*.svg"), Path(name)])
             if path.is_file()]  # fmt: skip
    results = load(where)
    print_results(results.runs.to_dict("records"))
    said += [capsys.readouterr().out, repr(results), repr(results.run(first.name))]
    everything = "\n".join(said)
    assert ["samples/s" in text or "samples / s" in text for text in said].count(True) >= 6
    assert not re.search("tokens ?/ ?s", everything)
    assert f"batch {results.runs.batch[0]}" in everything
    assert "of 1 tokens" not in everything


def test_what_no_prediction_explains_is_said_by_show_and_by_a_sweep(tmp_path: Path, capsys) -> None:
    said = "all_reduce: 65,536 B above the prediction of 0 B of wire; control: 4 B above the prediction of 256 B"
    more = {"predicted_wire_bytes": 0, "control_bytes": 260, "predicted_control_bytes": 256, "loopback_bytes": 2700,
            "predicted_loopback_bytes": 2666, "wire_bytes": 2000}  # fmt: skip
    make(tmp_path, unexplained=said, **more)
    snapshots = next(tmp_path.glob("*/run.json")).parent / "snapshots"
    snapshots.mkdir()
    (snapshots / "rank1.pickle").touch()
    assert cli.run(["show", "zero2", "--results", str(tmp_path)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert f"for torch's memory viewer: {snapshots}/rank1.pickle" in lines
    at = lines.index("Unexplained: a bug, or what kernels, a model of your own or its data hold")
    assert lines[at + 1 : at + 3] == said.split("; ")
    assert "control traffic 260 B 256 B 4 B" in lines
    assert "sent by a rank in the mean 2.0 KiB 0 B 2.0 KiB" in lines
    assert (
        "loopback 2.6 KiB, 1.35 of what a rank sends: gloo carries a reduce-scatter as an all-reduce, 2.6 KiB in all"
        in lines
    )
    print_failures(("the cell", row) for row in load(tmp_path).runs.to_dict("records"))
    assert f"unexplained: {said}" in capsys.readouterr().out


@pytest.mark.slow
def test_show_sets_the_allocator_beside_the_ledger(tmp_path: Path, capsys) -> None:
    """Also of a run in a collection, where what is missing comes as pandas has it."""
    sizes = {"allocated_bytes": 8 * 2**20, "fragmentation_bytes": 2**20, "outside_ledger_bytes": 3 * 2**20}
    clocks = {"sm_clock_mhz": 1755, "sm_clock_max_mhz": 1980, "throttle": "power cap"}
    clocks |= {"gpu_temperature_c": 61, "gpu_power_w": 698.6, "model_flops": 10**14, "mfu": 0.4, "hfu": 0.5}
    traced = {"alloc_retries": 2, "traced_step_s": 0.5, "communication_s": 0.2, "exposed_s": 0.05, "overlap": 0.75}
    make(tmp_path / "runs", device="cuda", **sizes, **clocks, **traced)
    collect(load(tmp_path / "runs"), tmp_path / "collection")
    for where in ("runs", "collection"):
        assert cli.run(["show", "zero2", "--results", str(tmp_path / where)]) == 0
        lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
        beside = "allocated reserved outside the ledger fragmentation pinned device used"
        assert f"phase peak states at most {beside}" in lines
        assert "forward 5.0 MiB 3.0 MiB 8.0 MiB 9.0 MiB 2.0 MiB 2.0 MiB 1.0 MiB 12.0 MiB" in lines
        at = lines.index("outside the ledger 3.0 MiB")
        more = ["allocated on the GPU 8.0 MiB", "reserved beyond allocated 1.0 MiB", "retries of the allocator 2"]
        assert lines[at + 1 : at + 4] == more
        at = next(number for number, line in enumerate(lines) if line.startswith("step 250.0 ms"))
        assert lines[at + 2 : at + 4] == [
            "400 TFLOP/s a rank, MFU 40.0%, HFU 50.0%",
            "SM clock 1755 of 1980 MHz, 61 °C, 699 W before or after the steps; held down by: power cap",
        ]
        words = "communication in 200.0 ms of 500.0, exposed 50.0 ms, 75% hidden"
        assert f"traced, which slows a step down: {words}" in lines


@pytest.mark.slow
def test_a_run_of_an_older_version_lacks_columns_and_is_there(tmp_path: Path, capsys) -> None:
    """Newer columns are None; of the same version a run that lacks a column is damaged."""
    later = ("throttle", "overlap", "communication_s", "outside_ledger_bytes", "pinned_bytes", "sm_clock_mhz")
    for version in (SCHEMA_VERSION - 1, SCHEMA_VERSION):
        path = make(tmp_path / str(version)) / "run.json"
        row = {k: v for k, v in json.loads(path.read_text()).items() if k not in later}
        path.write_text(json.dumps(row | {"schema_version": version}))
    older = load(tmp_path / str(SCHEMA_VERSION - 1)).runs
    assert older["states_bytes"].tolist() == [3 * 2**20]
    assert older[list(later)].isna().all(axis=None)
    assert cli.run(["show", "zero2", "--results", str(tmp_path / str(SCHEMA_VERSION - 1))]) == 0
    assert "SM clock" not in capsys.readouterr().out
    with pytest.warns(UserWarning, match="lacks outside_ledger_bytes|lacks pinned_bytes"):
        assert load(tmp_path / str(SCHEMA_VERSION)).runs.empty


def test_show_of_a_failed_run_ends_with_its_logs(tmp_path: Path, capsys) -> None:
    long = "".join(f"line {number}\n" for number in range(30))
    folder = make(
        tmp_path, status="crash", reason="rank 1 fell", logs={"timed/rank0.log": "\n", "timed/rank1.log": long}
    )
    assert cli.run(["show", folder.name, "--results", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("zero2 tiny N=2 b=8: crash: rank 1 fell")
    assert "Log timed/rank1.log, the last 20 of 30 lines" in shown
    assert "line 10\n" in shown
    assert "line 9\n" not in shown
    assert "rank0" not in shown
    assert "Memory" not in shown


def test_damaged_run_replaces_no_whole_one(tmp_path: Path, capsys) -> None:
    """Neither as a newer attempt of its launch, nor as a run by newer code."""
    whole = [make(tmp_path), make(tmp_path, "ddp", source_hash="0" * 12)]
    damaged = [make(tmp_path), make(tmp_path, "ddp")]
    for folder in damaged:
        (folder / "steps.parquet").write_bytes(b"x")
    assert prune(tmp_path, "--older-code", "--yes") == 0
    shown = capsys.readouterr().out
    assert "nothing to prune" in shown
    assert all(f"kept: {folder} has a damaged table" in shown for folder in damaged)
    assert names(tmp_path) == {folder.name for folder in (*whole, *damaged)}
    with pytest.warns(UserWarning, match="has a damaged table and is left out"):
        assert {*load(tmp_path).runs["run_id"]} == {folder.name for folder in whole}
    newest = make(tmp_path)
    assert prune(tmp_path, "--yes") == 0
    assert names(tmp_path) == {newest.name, whole[1].name, damaged[1].name}


def test_prune_removes_superseded_and_failed_runs_and_leftovers(tmp_path: Path, capsys) -> None:
    old, new = make(tmp_path), make(tmp_path)
    repeat = make(tmp_path, repeat=1)
    other = make(tmp_path, torch_version="1.0")
    make(tmp_path, "zero1", status="crash", logs={"timed/rank0.log": "x" * 4096})
    (tmp_path / ".partial-dead-0badcafe").mkdir()
    (tmp_path / "notes").mkdir()
    before = names(tmp_path)
    assert prune(tmp_path, "--dry-run") == 0
    shown = capsys.readouterr().out
    assert "superseded" in shown
    assert "crash" in shown
    assert prune(tmp_path) == 2, "nobody to ask"
    assert "add --yes" in capsys.readouterr().err
    assert names(tmp_path) == before
    assert prune(tmp_path, "--yes") == 0
    assert "removed 3 of 3" in capsys.readouterr().out
    assert names(tmp_path) == {new.name, repeat.name, other.name, "notes"}
    assert old.name not in names(tmp_path)
    assert len(zerobench.load(tmp_path).runs) == 3
    assert prune(tmp_path) == 0
    assert "nothing to prune" in capsys.readouterr().out


def test_prune_keeps_older_code_unless_told_and_never_the_only_measurement(tmp_path: Path, capsys) -> None:
    make(tmp_path, source_hash="0" * 12)
    alone = make(tmp_path, "ddp", source_hash="0" * 12)
    new = make(tmp_path)
    assert prune(tmp_path, "--yes") == 0
    assert "1 ok run by older code kept" in capsys.readouterr().out
    assert len(names(tmp_path)) == 3
    assert prune(tmp_path, "--yes", "--older-code") == 0
    assert names(tmp_path) == {alone.name, new.name}


def test_prune_leaves_what_is_claimed_linked_or_no_run(tmp_path: Path, capsys) -> None:
    where = tmp_path / "runs"
    elsewhere = make(tmp_path / "elsewhere", status="crash")
    where.mkdir()
    (where / "link").symlink_to(elsewhere)
    (where / ".partial-link").symlink_to(tmp_path / "elsewhere")
    (where / ".pruned-fresh-0badcafe").mkdir()
    (where / ".pruned-old-0badcafe").mkdir()
    os.utime(where / ".pruned-old-0badcafe", (time.time() - 7200,) * 2)
    alive = claim_folder(where, "zero2")
    (where / "searches").mkdir()
    (where / "searches/bad.json").write_text("{")
    (where / "searches/good.json").write_text('{"run_ids": ""}')
    assert prune(where, "--yes") == 0
    assert names(where) == {
        "link",
        ".partial-link",
        ".pruned-fresh-0badcafe",
        alive.path.name,
        lease_path(alive.path).name,
        "searches",
    }
    assert names(where / "searches") == {"good.json"}
    assert (elsewhere / "run.json").is_file()
    alive.release()


def test_prune_keeps_what_a_search_names(tmp_path: Path) -> None:
    old, new = make(tmp_path), make(tmp_path)
    (tmp_path / "searches").mkdir()
    (tmp_path / "searches/found.json").write_text(f'{{"run_ids": "{old.name}"}}')
    assert look(tmp_path).verdicts() == ["", ""]
    assert prune(tmp_path, "--yes") == 0
    assert {old.name, new.name} <= names(tmp_path)


def test_prune_asks_on_a_terminal_and_leaves_what_changed_meanwhile(tmp_path: Path, monkeypatch, capsys) -> None:
    failed = make(tmp_path, status="crash")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: "")
    assert prune(tmp_path) == 0
    assert failed.is_dir()

    def replace(_question: str) -> str:
        failed.rename(tmp_path / "aside")
        (tmp_path / "aside").rename(tmp_path.parent / f"{tmp_path.name}-moved")
        make(tmp_path).rename(failed)  # an older version gave the name again
        return "y"

    monkeypatch.setattr("builtins.input", replace)
    assert prune(tmp_path) == 0
    assert "removed 0 of 1" in capsys.readouterr().out
    assert list(load(tmp_path).runs.status) == ["ok"]


def test_prune_refuses_collections_and_single_runs(tmp_path: Path, capsys) -> None:
    run = make(tmp_path / "runs", status="crash")
    collect(load(tmp_path / "runs"), tmp_path / "collection")
    assert prune(tmp_path / "collection", "--yes") == 2
    assert "nothing to prune" in capsys.readouterr().err
    assert prune(run, "--yes") == 2
    assert "is one run" in capsys.readouterr().err
    assert prune(tmp_path / "nowhere") == 2
    assert (tmp_path / "collection/runs.parquet").is_file()
    assert run.is_dir()


def test_a_dead_owner_on_this_machine_is_known_at_once(tmp_path: Path) -> None:
    claiming = f"""
import sys
from pathlib import Path
from zerobench.host.temporary import claim
aside = claim(Path({str(tmp_path)!r}), {PARTIAL!r}, "zero1")
print(aside.path, flush=True)
sys.stdin.read()"""
    with subprocess.Popen(
        [sys.executable, "-c", claiming], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        seen = Path(one.stdout.readline().strip())
        assert is_claimed(seen)
        one.kill()
        one.wait()
        assert not is_claimed(seen)
