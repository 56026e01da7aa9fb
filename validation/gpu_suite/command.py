"""Measures this machine's GPU, in sections ordered so that a run that is cut has the main answers. Offline, 8 minutes.

What is finished is kept as it goes; the same command again reuses it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import psutil

from zerobench.config.keys import nearest
from zerobench.host.job import find_job
from zerobench.host.terminal import stdout_console
from zerobench.results.grid import Grid

from . import SECTIONS
from .suite import NOT_RUN, WAITING, Deadline, GpuSuite, SuiteRecord, SuiteSection, SuiteSetup

MINUTES = 8.0
RESERVE_S = 15.0
"""Part of the user's minutes that is kept for after the last launch: stacks of cut ranks, and the last tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and to the help the sections."""
    lines = [f"  {one.name:<11}{one.asks} ({one.expected_s} s on an H100)" for one in SECTIONS.values()]
    parser.epilog = "\n".join(["sections, the most wanted first:", *lines])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder that everything is written to")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: %(default)s")
    add("--small", action="store_true", help="tiny models and few steps: to see that all of it runs")
    add("--only", help="some sections, with commas, as in update,parity")
    words = "for all of it, from the start of the process (default: %(default)g)"
    add("--minutes", type=float, default=MINUTES, help=words)


def run(chosen: argparse.Namespace) -> int:
    """Runs the sections. Returns 1 if a launch failed, differed from DDP or was not reached: out of memory is an answer
    in memory and largest. Raises KeyboardInterrupt when the user interrupts; the tables so far are printed then.
    """
    setup, sections = _check(chosen)
    end = time.monotonic() - age_s() + 60 * chosen.minutes - RESERVE_S
    suite = GpuSuite(setup, SuiteRecord(setup, SECTIONS), Deadline(end))
    for section in sections:
        print(f"{section.name}: about {section.expected_s} s on an H100", file=sys.stderr)
        suite.run(section)
        if suite.stopped:
            break
    _print(suite, sections)
    if suite.stopped:
        raise KeyboardInterrupt
    return int(bool(suite.differs or _failures(suite)))


def age_s() -> float:
    """Seconds since this process was started: its imports are part of the user's minutes."""
    return max(0.0, time.time() - psutil.Process().create_time())


def _check(chosen: argparse.Namespace) -> tuple[SuiteSetup, list[SuiteSection]]:
    """Raises ValueError for what cannot be."""
    if find_job(os.environ) is not None:
        raise ValueError("it starts ranks of its own on one machine; run it without torchrun, srun or mpirun")
    names = list(SECTIONS) if chosen.only is None else [name.strip() for name in chosen.only.split(",") if name.strip()]
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"--only {name}: no such section{nearest(name, list(SECTIONS))}")
    if not names:
        raise ValueError(f"--only: name at least one section (valid: {', '.join(SECTIONS)})")
    if not 0 < chosen.minutes < 24 * 60:
        raise ValueError(f"--minutes {chosen.minutes:g}: must be above 0 and below a day")
    device = _device(chosen.device)
    if device == "cpu" and not chosen.small:
        raise ValueError("--device cpu: its models are of a GPU's size; add --small, or run it where there is a GPU")
    chosen.out.mkdir(parents=True, exist_ok=True)
    setup = SuiteSetup(chosen.out.resolve(), device, chosen.small)
    return setup, [SECTIONS[name] for name in SECTIONS if name in names]


def _device(wanted: str) -> str:
    """The device. Raises ValueError for one that is not there."""
    import torch

    there = torch.cuda.device_count() > 0
    if wanted == "cuda" and not there:
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    if wanted == "cpu" or not there:
        return "cpu"
    try:
        torch.cuda.init()
    except RuntimeError as error:  # a driver that torch is too new for, or a GPU that another process has to itself
        reason = (str(error).splitlines() or ["no reason given"])[0]
        raise ValueError(f"--device {wanted}: CUDA does not start: {reason}") from error
    return "cuda"


def _failures(suite: GpuSuite) -> list[str]:
    """A sentence for each launch that ended in no answer."""
    return [
        f"{name}: {one.name}: {one.message}"
        for name, done in suite.done.items()
        for one in done
        if one.status not in SECTIONS[name].answers and (one.status == NOT_RUN or not SECTIONS[name].may_fail(one))
    ]


def _print(suite: GpuSuite, sections: list[SuiteSection]) -> None:
    console = stdout_console()

    def say(words: str, style: str = "") -> None:
        console.print(words, style=style, markup=False, highlight=False, soft_wrap=True)

    for section in sections:
        told = suite.record.sections.get(section.name)
        if section.name not in suite.done or told is None:
            continue
        say(f"\n{section.title}", "bold")
        console.print(Grid(told["table"]["header"], told["table"]["rows"]))
        for note in told["table"]["notes"]:
            say(note, "dim")
    for sentence in dict.fromkeys([*suite.differs, *_failures(suite)]):
        say(sentence)
    done = [one for launches in suite.done.values() for one in launches]
    left = sum(one.status in (NOT_RUN, WAITING) for one in done)
    say(f"\nlaunches: {len(done)}, not reached: {left}")
    say(f"{suite.setup.out}: summary.md, suite.json, and all runs as tables   (zerobench.load)")
