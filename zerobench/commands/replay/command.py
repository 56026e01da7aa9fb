"""`zerobench replay`: its options, the files that it writes, and the page.

The page is one self-contained HTML file with its style, code and data, which makes no requests.

Its data are columns of small numbers and one table of strings, deflated. A column of a stream has a number per event: a
category or a name as its index in the strings, a storage as its number plus 1 (0: none), ticks and microseconds as
differences from the previous event. A column of zeros is left out. `page/model.js` decodes it.
"""

from __future__ import annotations

import base64
import json
import re
import zlib
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ...host.pipes import print_line, print_note, write_text
from ...ranks import fork_server
from ...records.palette import CATEGORIES
from ...results import tables
from ...results.options import RESULTS, Parser, add_jobs, add_options, verb
from ...sizes import show_bytes, show_count
from ..predict import costs_of
from .worlds import (
    EXECUTED,
    MEASURED,
    TICKS,
    Panel,
    ReplayWorld,
    common_ticks,
    executed_worlds,
    phase_ticks,
    recorded_worlds,
    setting_words,
    with_ranks,
)

LIMIT_BYTES = 3 * 2**20
SCRIPTS = ("model.js", "layout.js", "draw.js", "words.js", "stage.js", "scale.js", "page.js")
"""The page's code, in order."""


def write_page(to: Path, worlds: list[ReplayWorld]) -> int:
    """Writes the page and returns its size in bytes. Raises ValueError if it would exceed LIMIT_BYTES."""
    text = page_text(worlds)
    size = len(text.encode())
    if size > LIMIT_BYTES:
        remedy = "leave ranks or numbers of ranks out: --ranks 0, --worlds none"
        raise ValueError(f"--out {to}: the page would be {show_bytes(size)}, above {show_bytes(LIMIT_BYTES)}; {remedy}")
    write_text(text, to)
    return size


def page_text(worlds: list[ReplayWorld]) -> str:
    """Returns the page as text."""
    panels = worlds[0].panels
    # a message on which numbers of ranks were measured and which were simulated
    by_how = {how: [f"{world.ranks:,}" for world in worlds if world.how == how] for how in (MEASURED, EXECUTED)}
    scale = [f"Measured with real ranks: N = {', '.join(by_how[MEASURED])}."] if by_how[MEASURED] else []
    if by_how[EXECUTED]:
        ns = ", ".join(by_how[EXECUTED])
        scale.append(f"Simulated on fake tensors, the rank with the most, each rank keeping its micro-batch: N = {ns}.")
    parts = {
        "title": escape(f"One training step, recorded: {panels[0].row['model']}"),
        "setting": escape(setting_words(panels)),
        "style": part("step.css"),
        "script": "\n".join(part(name) for name in SCRIPTS),
        "data": deflated(page_data(worlds, {"scale_words": " ".join(scale)})),
    }
    return re.sub(r"<!--(\w+)-->", lambda mark: parts[mark[1]], part("step.html"))


def part(name: str) -> str:
    """Returns a file of the page."""
    return (files(__package__) / "page" / name).read_text(encoding="utf-8")


WORDS = (
    "kind", "phase", "category", "previous", "name", "unit", "module", "source", "tier", "collective", "operator",
    "dtype",
)  # fmt: skip
"""Columns of words."""
NUMBERS = ("bytes", "elements", "group_size", "micro_batch", "calls", "between_bytes")
"""Columns of integers."""
LETTERS = dict(zip(CATEGORIES, "PGMOCAIT", strict=True))
"""Category -> the letter for it where a pattern would be too small."""


def deflated(data: dict[str, Any]) -> str:
    """Returns base64 of deflated JSON."""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(zlib.compress(text.encode(), 9)).decode()


def page_data(worlds: list[ReplayWorld], beside: dict[str, Any]) -> dict[str, Any]:
    """Returns the page's data. `beside`: additional entries."""
    strings = {"": 0}  # string -> its number; new ones get the next
    world_data = [_world(world, strings) for world in worlds]
    categories = [{"name": n, "color": c, "hatch": h, "letter": LETTERS[n]} for n, (c, h) in CATEGORIES.items()]
    return {"ticks": TICKS, "categories": categories, "worlds": world_data, "strings": list(strings), **beside}


def _world(world: ReplayWorld, strings: dict[str, int]) -> dict[str, Any]:
    streams = [stream for panel in world.panels for stream in panel.streams.values()]
    clocks = iter(common_ticks(streams)) if streams else iter(())
    panels: list[dict[str, Any]] = []
    phases: list[tuple[str, int]] = []
    for panel in world.panels:
        panel_streams = []
        for rank, stream in panel.streams.items():
            ticks = next(clocks)
            phases = phases or phase_ticks(stream, ticks)
            panel_streams.append({"rank": rank, "length": len(stream), "columns": _columns(stream, ticks, strings)})
        panels.append(_facts(panel) | {"streams": panel_streams})
    return {"n": world.ranks, "how": world.how, "phases": phases, "panels": panels}


def _facts(panel: Panel) -> dict[str, Any]:
    """Returns the facts on a panel other than its events."""
    theory, formulas = panel.theory, panel.formulas
    forms = {
        name: {"equation": form.equation, "value": form.value, "numbers": dict(form.numbers),
               "beside": [[term.name, term.size] for term in form.beyond]}
        for name, form in formulas.items()
    }  # fmt: skip
    kept = ("run_id", "peak_bytes", "states_bytes", "wire_bytes", "volume_psi", "command", "commit", "torch_version")
    return {
        "key": panel.key, "label": panel.label, "color": panel.color, "problem": panel.problem, "formulas": forms,
        "states_source": theory.states_source if theory else "",
        "volume_source": theory.volume_source if theory else "",
        **{name: panel.row.get(name) for name in kept},
    }  # fmt: skip


def _columns(stream: pd.DataFrame, ticks: NDArray[np.int64], strings: dict[str, int]) -> dict[str, list[Any]]:
    columns: dict[str, list[Any]] = {"tick": _steps(ticks)}
    columns["us"] = _steps(np.rint(stream["seconds"].to_numpy(dtype="float64") * 1e6).astype(np.int64))
    for name in ("storage", "operation"):
        columns[name] = (stream[name].astype("float64").fillna(-1).to_numpy().astype(np.int64) + 1).tolist()
    for name in NUMBERS:
        columns[name] = np.rint(stream[name].fillna(0).to_numpy(dtype="float64")).astype(np.int64).tolist()
    sizes = stream["wire_bytes"].fillna(0)
    columns["wire_bytes"] = [int(size) if float(size).is_integer() else float(size) for size in sizes]
    columns["control"] = stream["control"].fillna(False).astype(int).tolist()
    for name in WORDS:
        texts = (text if isinstance(text, str) else "" for text in stream[name])
        columns[name] = [strings.setdefault(text, len(strings)) for text in texts]
    return {name: column for name, column in columns.items() if any(column)}


def _steps(values: NDArray[np.int64]) -> list[int]:
    """Returns the differences between neighbors; the first value is relative to 0."""
    return [int(step) for step in np.diff(values, prepend=0)]


MOST = 1024
EVERY, NONE = "all", "none"

DESCRIPTION = """\
Writes an animated HTML page of one recorded step under several strategies side by side: memory by category and by
tensor, units gathered and freed, gradients, shards, and each collective between the ranks. Every number on it was
recorded. The page works offline, with a mouse, a keyboard or a touch screen.

The runs need a table of events: measure.events=true."""

EPILOG = """\
examples:
  zerobench -m strategy=ddp,zero1,zero2,zero3 model=gpt_tiny world_size=2 measure.events=true   record a step
  zerobench replay results/runs --out step.html           the page, with N = 2 to 1,024 simulated on fake tensors
  zerobench replay results/runs --out step.html --worlds none         without simulations
  zerobench replay results/runs --out step.html --worlds 8,64 --where model=gpt_tiny
  zerobench replay results/runs --out step.html --worlds 64 --cluster h100-3200       with predicted times

Exit code: 0, or 2 if there is nothing to show."""


@verb
def replay(arguments: list[str]) -> int:
    """Runs the verb. Returns the exit code: 0, 2 if refused, 130 if interrupted."""
    parser = Parser("zerobench replay", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("runs", nargs="?", type=Path, default=Path(RESULTS), help="a results folder or a run (default: %(default)s)")
    add("--out", type=Path, metavar="FILE", default=Path("step.html"), help="the page (default: %(default)s)")
    worlds_help = (
        f"numbers of ranks to simulate next to the recorded ones: {EVERY} (2, 4, ... {MOST:,}), {NONE}, or a list: 8,64"
    )
    add("--worlds", default=EVERY, metavar="N,...", help=f"{worlds_help} (default: %(default)s)")
    cluster_help = "give simulated steps the times predicted for this cluster (zerobench predict --help)"
    add("--cluster", metavar="NAME", help=cluster_help)
    add("--ranks", default=EVERY, metavar="R,...", help="recorded ranks to show, such as 0,1 (default: %(default)s)")
    add_jobs(parser)
    add_options(parser, attempts=False)
    chosen = parser.parse_args(arguments)
    try:
        presets = {EVERY: None, NONE: list[int]()}  # all powers of two, or no simulation
        wanted = presets[chosen.worlds] if chosen.worlds in presets else _numbers("--worlds", chosen.worlds, 1, MOST)
        if wanted != []:
            fork_server.start()
        results, _ = tables.load(chosen.runs).chosen(chosen.where)
        ranks = None if chosen.ranks == EVERY else _numbers("--ranks", chosen.ranks, 0, MOST - 1)
        worlds = [with_ranks(world, ranks) for world in recorded_worlds(results)]
        costs = None if chosen.cluster is None else costs_of(chosen.cluster, None)
        powers = [2**power for power in range(1, MOST.bit_length())]
        simulated = [n for n in (powers if wanted is None else wanted) if n not in {world.ranks for world in worlds}]
        if chosen.cluster is not None and not simulated:
            why = f"it times simulated steps, and --worlds {chosen.worlds} simulates none"
            raise ValueError(f"--cluster {chosen.cluster}: {why}; give other numbers of ranks, or no --cluster")
        made = executed_worlds(worlds[0].panels, simulated, chosen.jobs, costs) if simulated else []
        for world in made:
            for problem in {panel.problem for panel in world.panels if panel.problem}:
                print_note(f"zerobench replay: N={world.ranks}: {problem}")
        worlds = sorted([*worlds, *made], key=lambda world: world.ranks)
        size, cells = write_page(chosen.out, worlds), sum(len(world.panels) for world in worlds)
        numbers = ", ".join(str(world.ranks) for world in worlds)
        print_line(f"page: {chosen.out} ({show_bytes(size)}, {show_count(cells, 'cell')}, N = {numbers})")
    except KeyboardInterrupt:
        print_note("zerobench replay: stopped; no page is written")
        return 130
    return 0


def _numbers(flag: str, text: str, least: int, most: int) -> list[int]:
    numbers = []
    for word in text.split(","):
        if not word.isdecimal() or not least <= int(word) <= most:
            raise ValueError(f"{flag} {text}: {word!r} is no number from {least} to {most:,}; write {EVERY} or a list")
        numbers.append(int(word))
    return sorted(set(numbers))
