"""Measures this machine's GPU, in sections ordered so that a run that is cut has the main answers. Offline, 8 minutes.

What is finished is kept as it goes; the same command again reuses it.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import psutil

from zerobench.config.keys import nearest
from zerobench.host.job import find_job

from . import SECTIONS
from .suite import NOT_RUN, WAITING, GpuSuite, SuiteSetup

MINUTES = 8.0
RESERVE_S = 15.0
"""Part of the user's minutes that is kept for after the last launch: stacks of cut ranks, and the last tables."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options, and to the help the sections."""
    lines = [f"  {one.name:<11}{one.asks} ({one.about_s} s on an H100)" for one in SECTIONS.values()]
    parser.epilog = "\n".join(["sections, the most wanted first:", *lines])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the folder that everything is written to")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: %(default)s")
    add("--small", action="store_true", help="tiny models and few steps: to see that all of it runs")
    add("--only", help="some sections, with commas, as in update,parity")
    words = "for all of it, from the start of the process (default: %(default)g)"
    add("--minutes", type=float, default=MINUTES, help=words)


def run(chosen: argparse.Namespace) -> int:
    """Runs the sections, and prints their tables. Returns 1 if a launch failed, differed from DDP or was not reached:
    out of memory is an answer in memory, peaks and tiers. Raises KeyboardInterrupt when the user interrupts.
    """
    setup, names = _checked(chosen)
    age_s = max(0.0, time.time() - psutil.Process().create_time())  # the imports are part of the user's minutes
    suite = GpuSuite(setup, list(SECTIONS), time.monotonic() - age_s + 60 * chosen.minutes - RESERVE_S)
    for name in names:
        suite.run(SECTIONS[name])
        if suite.stopped:
            break
    print(suite.markdown(list(suite.done)))
    done = [(name, one) for name, launches in suite.done.items() for one in launches]
    failures = [
        f"{name}: {one.name}: {one.message}"
        for name, one in done
        if one.status not in SECTIONS[name].answers and (one.status == NOT_RUN or not SECTIONS[name].may_fail(one))
    ]
    wrong = list(dict.fromkeys([*suite.differs, *failures]))
    left = sum(one.status in (NOT_RUN, WAITING) for _, one in done)
    print(*wrong, f"\nlaunches: {len(done)}, not reached: {left}", sep="\n")
    print(f"{setup.out}: summary.md, suite.json, and all runs as tables   (zerobench.load)")
    if suite.stopped:
        raise KeyboardInterrupt
    return int(bool(wrong))


def _checked(chosen: argparse.Namespace) -> tuple[SuiteSetup, list[str]]:
    """Returns the setup, and the names of the sections. Raises ValueError for what cannot be."""
    import torch

    if find_job(os.environ) is not None:
        raise ValueError("it starts ranks of its own on one machine; run it without torchrun, srun or mpirun")
    names = list(SECTIONS) if chosen.only is None else chosen.only.split(",")
    if not chosen.minutes > 0:
        raise ValueError(f"--minutes {chosen.minutes:g}: must be above 0")
    for name in names:
        if name not in SECTIONS:
            raise ValueError(f"--only {name}: no such section{nearest(name, list(SECTIONS))}")
    has_gpu = torch.cuda.device_count() > 0
    if chosen.device == "cuda" and not has_gpu:
        raise ValueError("--device cuda: this machine has no GPU that torch can use")
    device = "cuda" if has_gpu and chosen.device != "cpu" else "cpu"
    if device == "cpu" and not chosen.small:
        raise ValueError("--device cpu: its models are of a GPU's size; add --small, or run it where there is a GPU")
    if device == "cuda":
        try:
            torch.cuda.init()
        except RuntimeError as error:  # a driver that torch is too new for, or a GPU that another process has to itself
            reason = (str(error).splitlines() or ["no reason given"])[0]
            raise ValueError(f"--device {chosen.device}: CUDA does not start: {reason}") from error
    chosen.out.mkdir(parents=True, exist_ok=True)
    setup = SuiteSetup(chosen.out.resolve(), device, chosen.small)
    return setup, [name for name in SECTIONS if name in names]
