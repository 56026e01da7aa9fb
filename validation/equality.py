"""Fake execution next to real ranks, for every variant: not a byte may differ.

Runs every variant in real worlds (gloo, tensors with values, a process per rank), executes the first and the last of
their ranks on fake tensors (backend=simulated tensors=fake), and compares all that is recorded but construction:

memory    (tier, phase, category) -> bytes at the peak instant and most bytes; the step is one of the phases
traffic   every operation with its bytes; a transfer to or from a file without its phase, which the disk chooses
unseen    bytes of the allocator's total above the peak that was predicted: buffers that backends allocate in threads
attempt   a launch of a cell's real world: gloo's threads may keep a buffer of a peer a moment longer than its engine,
          and a machine that is busy elsewhere makes that moment long, so that a cell that differs is run again

    python -m validation fake-equality --rerun                 all of them, about an hour
    python -m validation fake-equality --only 'zero3*' --rerun
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pandas as pd

from zerobench.config.cell import CellConfig
from zerobench.host.terminal import progress_bar
from zerobench.rank_record import RankRecord
from zerobench.results.grid import Grid

from .runner import run_fake, run_real
from .store import Store
from .variants import ALL_SIZES, VARIANTS

AT_ONCE = 20
"""Variants in one launch; the tables are written after each."""

ATTEMPTS = 4

FOLDER = Path("results/fake_equality")

HEAD = """\
# Fake execution beside real ranks

Written by `make fake-equality`. A row of the table is a cell at all its world sizes, first and last rank; `rows off`
counts rows of memory (tier, phase, category) and of traffic that differ in any byte. What the ledger does not see is in
the allocator's total alone: buffers that gloo makes in its own threads (docs/explanation/fake-worlds.md). Each rank:
`equality.csv`.

"""

ALLOCATOR = ("allocated", "outside_ledger")
FILES = ("read", "write")

Memory = dict[tuple[str, str, str], tuple[int | None, int]]


@dataclass(frozen=True)
class Difference:
    """One rank of one cell, real beside fake. `memory_rows`, `traffic_rows`: how many differ. `unseen_bytes`: None
    if the machine has no compiler for the allocator's hook.
    """

    cell: str
    strategy: str
    world_size: int
    rank: int
    real_states_bytes: int
    fake_states_bytes: int
    real_peak_bytes: int
    fake_peak_bytes: int
    real_wire_bytes: float
    fake_wire_bytes: float
    memory_rows: int
    traffic_rows: int
    allocated_bytes: int | None
    unseen_bytes: int | None

    @property
    def is_none(self) -> bool:
        return not self.memory_rows and not self.traffic_rows


def compare(cell: str, strategy: str, world_size: int, real: RankRecord, fake: RankRecord) -> Difference:
    """Returns what differs between a rank and its execution on fake tensors."""
    theirs, ours = _memory(real), _memory(fake)
    different = sum(theirs.get(key, (0, 0)) != ours.get(key, (0, 0)) for key in theirs.keys() | ours.keys())
    sent, expected = _traffic(real), _traffic(fake)
    allocated = next((row.max_bytes for row in real.memory if (row.phase, row.category) == ("step", "allocated")), None)
    in_memory = sum(_most(ours, "total", tier) for tier in ("device", "host"))
    return Difference(
        cell, strategy, world_size, real.rank,
        _most(theirs, "states"), _most(ours, "states"), _most(theirs, "total"), _most(ours, "total"),
        _wire(real), _wire(fake), different, (sent - expected).total() + (expected - sent).total(),
        allocated, None if allocated is None else allocated - in_memory,
    )  # fmt: skip


def _memory(record: RankRecord) -> Memory:
    return {
        (row.tier, row.phase, row.category): (row.at_peak_bytes, row.max_bytes)
        for row in record.memory
        if row.phase != "init" and row.category not in ALLOCATOR
    }


def _most(memory: Memory, category: str, tier: str = "device") -> int:
    return memory.get((tier, "step", category), (0, 0))[1]


def _traffic(record: RankRecord) -> Counter[tuple[tuple[str, Any], ...]]:
    counts: Counter[tuple[tuple[str, Any], ...]] = Counter()
    for row in record.traffic:
        one = asdict(row)
        calls = one.pop("calls")
        if row.kind in FILES:  # rows of two phases are one, by the size of a transfer
            one |= {"phase": "", "step": 0}
            one |= {key: one[key] / calls for key in ("elements", "payload_bytes", "wire_bytes", "volume_elements")}
        else:
            one["calls"] = calls
        counts[tuple(sorted(one.items()))] += calls if row.kind in FILES else 1
    return counts


def _wire(record: RankRecord) -> float:
    return sum(row.wire_bytes for row in record.traffic)


def hold(configs: Mapping[str, CellConfig], folder: Path, attempts: int = ATTEMPTS) -> list[Difference]:
    """Returns what differs between real ranks and their executions, in each rank's attempt that differed least.
    `configs`: of one world size. Raises ValueError with the sentence of a cell that cannot be executed.
    """
    fake, left = run_fake(configs, folder / "executed"), dict(configs)
    rows: dict[tuple[str, int], Difference] = {}
    off = lambda row: (row.memory_rows + row.traffic_rows, row.real_peak_bytes)  # noqa: E731
    for attempt in range(attempts):
        real = run_real(left, folder / f"attempt-{attempt}") if left else {}
        for name, config in left.items():
            for rank, ours in fake[name].items():
                theirs = real[name][rank]
                if isinstance(theirs, str) or isinstance(ours, str):
                    problem = theirs if isinstance(theirs, str) else ours
                    raise ValueError(f"{name}, rank {rank} of {config.world_size}: {problem}")
                row = compare(name, config.strategy.name, config.world_size, theirs, ours)
                rows[name, rank] = min(row, rows.get((name, rank), row), key=off)
        left = {name: left[name] for name in left if not all(rows[name, rank].is_none for rank in fake[name])}
    return [rows[name, rank] for name in configs for rank in fake[name]]


def summary(rows: Sequence[Difference]) -> str:
    """Returns what the rows say together, and a line per cell."""
    frame = pd.DataFrame(map(asdict, rows)).astype({"allocated_bytes": "float64", "unseen_bytes": "float64"})
    for figure in ("states", "peak", "wire"):
        frame[f"{figure}_off"] = (frame[f"fake_{figure}_bytes"] - frame[f"real_{figure}_bytes"]).abs()
    frame["rows_off"] = frame["memory_rows"] + frame["traffic_rows"]
    lines = [
        f"- {frame['cell'].nunique()} cells, {len(rows)} ranks of real worlds, each executed on fake tensors as well",
        f"- every row of memory and of traffic, phase by phase, equal to the byte: {(frame['rows_off'] == 0).sum()} of"
        f" {len(rows)} ranks",
        f"- states: {(frame['states_off'] > 0).sum()} ranks differ; bytes on the wire: {(frame['wire_off'] > 0).sum()}"
        " ranks differ",
        f"- peak: {(frame['peak_off'] > 0).sum()} ranks differ, the most by {frame['peak_off'].max()} bytes",
    ]
    unseen = frame["unseen_bytes"].fillna(0) / frame["allocated_bytes"].fillna(1)
    if unseen.any():
        lines.append(
            f"- the allocator's own total is within 0.1 % of the execution for {(unseen < 1e-3).sum()} of {len(rows)}"
            f" ranks, and at most {100 * unseen.max():.1f} % above it"
        )
    header, cells = ["cell", "ranks", "world sizes", "states off", "peak off", "wire off", "rows off"], []
    for cell, group in frame.groupby("cell"):
        sizes = ", ".join(str(size) for size in sorted(group["world_size"].unique()))
        states, peak, wire, most = group[["states_off", "peak_off", "wire_off", "unseen_bytes"]].max()
        off = f"{states:.0f}", f"{peak:.0f}", f"{wire:g}", f"{group['rows_off'].sum()}"
        cells.append([f"{cell}", f"{len(group)}", sizes, *off, "-" if pd.isna(most) else f"{most:.0f}"])
    table = Grid([*header, "unseen by the ledger, at most"], cells, ("cell", "world sizes"))
    return "\n".join([*lines, "", table.markdown(is_markdown=True)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", default=["*"], metavar="NAME", help="variants by name or pattern")
    parser.add_argument("--rerun", action="store_true", help="run also what the csv has")


def run(chosen: argparse.Namespace) -> int:
    """Runs what is due and writes the tables. Returns 1 if a rank differs."""
    store = Store(FOLDER / "equality.csv", Difference, lambda row: (row.cell, row.world_size))
    names = [name for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in chosen.only)]
    if not names:
        raise ValueError(f"--only {' '.join(chosen.only)}: no variant has that name")
    wanted = {(name, n): VARIANTS[name].config(n) for n in ALL_SIZES for name in names if n in VARIANTS[name].sizes}
    due = [cell for cell in wanted if chosen.rerun or cell not in store.found]
    of_size = [[cell for cell in due if cell[1] == n] for n in ALL_SIZES]
    batches = [cells[at : at + AT_ONCE] for cells in of_size for at in range(0, len(cells), AT_ONCE)]
    with progress_bar("fake-equality", len(batches), "launches") as advance:
        for cells in batches:
            with tempfile.TemporaryDirectory() as folder:
                store.put(hold({cell[0]: wanted[cell] for cell in cells}, Path(folder)))
            (FOLDER / "equality.md").write_text(HEAD + summary(store.rows))
            advance()
    rows = [row for cell in wanted for row in store.found[cell]]
    different = [row for row in rows if not row.is_none]
    for row in different:
        words = f"{row.memory_rows} rows of memory and {row.traffic_rows} of traffic differ"
        print(f"{row.cell}, rank {row.rank} of {row.world_size}: {words}")
    print(f"{len(rows) - len(different)} of {len(rows)} ranks are equal; {FOLDER}")
    return int(bool(different))
