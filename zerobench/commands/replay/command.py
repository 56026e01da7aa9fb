"""`zerobench replay`: its options, and the files that it writes."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...host.pipes import print_line, print_note
from ...launch import fork_server
from ...results import tables
from ...results.options import RESULTS, Parser, add_jobs, add_options, verb
from ...sizes import show_bytes, show_count
from ..predict import costs_of
from .page import write_page
from .worlds import ReplayWorld, executed_worlds, recorded_worlds, with_ranks

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
    chosen = _parser().parse_args(arguments)
    try:
        presets = {EVERY: None, NONE: list[int]()}  # all powers of two, or no simulation
        wanted = presets[chosen.worlds] if chosen.worlds in presets else _numbers("--worlds", chosen.worlds, 1, MOST)
        if wanted != []:
            fork_server.start()
        results, _ = tables.load(chosen.runs).chosen(chosen.where)
        ranks = None if chosen.ranks == EVERY else _numbers("--ranks", chosen.ranks, 0, MOST - 1)
        worlds = [with_ranks(world, ranks) for world in recorded_worlds(results)]
        _write_page(chosen.out, worlds, wanted, chosen)
    except KeyboardInterrupt:
        print_note("zerobench replay: stopped; no page is written")
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
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
    return parser


def _numbers(flag: str, text: str, least: int, most: int) -> list[int]:
    numbers = []
    for word in text.split(","):
        if not word.isdecimal() or not least <= int(word) <= most:
            raise ValueError(f"{flag} {text}: {word!r} is no number from {least} to {most:,}; write {EVERY} or a list")
        numbers.append(int(word))
    return sorted(set(numbers))


def _write_page(to: Path, worlds: list[ReplayWorld], wanted: list[int] | None, chosen: argparse.Namespace) -> None:
    costs = None if chosen.cluster is None else costs_of(chosen.cluster, None)
    there = {world.ranks for world in worlds}
    powers = [2**power for power in range(1, MOST.bit_length())]
    ranks = [n for n in (powers if wanted is None else wanted) if n not in there]
    made = executed_worlds(worlds[0].panels, ranks, chosen.jobs, costs) if ranks else []
    for world in made:
        for problem in {panel.problem for panel in world.panels if panel.problem}:
            print_note(f"zerobench replay: N={world.ranks}: {problem}")
    whole = sorted([*worlds, *made], key=lambda world: world.ranks)
    size = write_page(to, whole)
    cells = sum(len(world.panels) for world in whole)
    numbers = ", ".join(str(world.ranks) for world in whole)
    print_line(f"page: {to} ({show_bytes(size)}, {show_count(cells, 'cell')}, N = {numbers})")
