"""A test in ranks: N fresh processes that run this test alone, in a gloo group on this machine's loopback interface.

    job       what a rank needs to run the same session as this one, with this test alone
    report    how the test ended on a rank: passed, failed or skipped, its words and its output
    verdict   rank 0 has the tables, and judges; the first rank that failed is what the test's failure tells

The ranks come from zerobench's launcher: they end with this process, and when one fails the others are ended.
"""

from __future__ import annotations

import os
import re
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ..host.temporary import temporary_folder
from ..launch.start_ranks import launch
from .rank_process import RankJob, RankReport, run_rank

LAST = 3000
"""Characters of a rank's output that a failure shows."""

_BELOW = re.compile(
    r' *File ".*(/_pytest/|/pluggy/|/pytest/|/multiprocessing/|/zerobench/(gate|launch)/|<string>)|Extension modules:'
)
"""Lines of a stack that are the same in every rank."""


def run(item: pytest.Function, ranks: int, timeout_s: float) -> RankReport:
    """Runs a test in ranks. Returns rank 0's report, or one of a failure in words that stand for all ranks."""
    with temporary_folder() as folder:
        jobs = _jobs(item, ranks, folder, timeout_s)
        outcome = launch(run_rank, jobs, folder / "logs", timeout_s)
        failed = [report for job in jobs if (report := job.failure()) is not None]
        logs = {rank: _end_of(folder / "logs" / f"rank{rank}.log") for rank in range(ranks)}
    if jobs[0].shown:
        print("".join(f"rank {rank}:\n{log}\n" for rank, log in logs.items() if log))
    if outcome.status == "ok":
        first: RankReport = outcome.results[0]
        return first
    died = [one for one in outcome.failures if one.rank not in {report.rank for report in failed}]
    if failed and all(one.status == "timeout" for one in died):
        return _reported(min(failed, key=lambda report: report.at), ranks)
    if outcome.status == "timeout":
        late = ", ".join(str(one.rank) for one in died)
        words = f"zerobench: timeout_s={timeout_s:g} was over and rank {late} of {ranks} still ran"
    else:
        words = f"zerobench: rank {died[0].rank} {died[0].text}" if died else f"zerobench: {outcome.reason}"
    shown = [f"-- end of the output of rank {rank} --\n{log}" for rank, log in logs.items() if log]
    return RankReport(0, "failed", "\n".join([words, *shown]))


def _reported(first: RankReport, ranks: int) -> RankReport:
    """Returns the report of the rank that failed first, with its output among its words."""
    output = [f"-- {title}, rank {first.rank} --\n{text.rstrip()[-LAST:]}" for title, text in first.sections]
    head = "" if first.told else f"on rank {first.rank} of {ranks}:\n"  # a verdict is on all ranks
    return replace(first, words="\n".join([f"{head}{first.words}", *output]))


def _jobs(item: pytest.Function, ranks: int, folder: Path, timeout_s: float) -> list[RankJob]:
    config, classes = item.config, [node.name for node in item.listchain() if isinstance(node, pytest.Class)]
    variables = dict(os.environ) | _meeting(ranks)
    return [
        RankJob(
            rank, ranks, str(folder), "::".join([str(item.path), *classes, item.originalname]), item.nodeid,
            tuple(str(argument) for argument in config.invocation_params.args), str(config.invocation_params.dir),
            variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)}, tuple(sys.path),
            config.pluginmanager.hasplugin("pytest_cov"), config.getoption("capture", "fd") == "no", timeout_s,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def _meeting(ranks: int) -> dict[str, str]:
    """Returns the variables of all ranks, for code that reads them; the port is free, and the group does not use it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **world}


def _end_of(log: Path) -> str:
    """Returns the end of a rank's output; of its stacks the frames of code that is neither pytest's nor ours."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if not _BELOW.match(line))[-LAST:].strip()
