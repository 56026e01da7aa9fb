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
from pathlib import Path
from typing import Any

import pytest

from ..host.temporary import temporary_folder
from ..launch.processes import Outcome, launch
from .rank_process import RankJob, RankReport, run_rank

LAST = 3000
"""Characters of a rank's output that a failure shows."""

_BELOW = re.compile(
    r' *File ".*(/_pytest/|/pluggy/|/pytest/|/multiprocessing/|/zerobench/(gate|launch)/|<string>)|Extension modules:'
)
"""Lines of a stack that are the same in every rank."""


def run(item: pytest.Function, ranks: int, timeout_s: float) -> dict[str, Any]:
    """Runs a test in ranks and returns what rank 0 has told. Fails or skips the test of this process as they do."""
    with temporary_folder() as folder:
        jobs = [_job(item, rank, ranks, folder, timeout_s) for rank in range(ranks)]
        outcome = launch(run_rank, jobs, folder / "logs", timeout_s)
        failed = [report for job in jobs if (report := job.failure()) is not None]
        logs = {rank: _end_of(folder / "logs" / f"rank{rank}.log") for rank in range(ranks)}
    if jobs[0].shown:
        print("".join(f"rank {rank}:\n{log}" for rank, log in logs.items() if log))
    if outcome.status != "ok":
        failed.sort(key=lambda report: report.at)
        pytest.fail(_words(outcome, failed, logs, ranks, timeout_s), pytrace=False)
    reports: list[RankReport] = outcome.results
    if reports[0].outcome == "skipped":
        pytest.skip(reports[0].words)
    return reports[0].told


def _job(item: pytest.Function, rank: int, ranks: int, folder: Path, timeout_s: float) -> RankJob:
    config = item.config
    names = [item.originalname, *(node.name for node in reversed(item.listchain()) if isinstance(node, pytest.Class))]
    return RankJob(
        rank, ranks, str(folder),
        "::".join([str(item.path), *reversed(names)]), item.nodeid,
        tuple(str(argument) for argument in config.invocation_params.args), str(config.invocation_params.dir),
        dict(os.environ) | _world(rank, ranks), tuple(sys.path), config.pluginmanager.hasplugin("pytest_cov"),
        config.getoption("capture", "fd") == "no", timeout_s,
    )  # fmt: skip


def _world(rank: int, ranks: int) -> dict[str, str]:
    """Returns the variables of a rank, for code that reads them; the port is free, and the group does not use it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    return {"MASTER_ADDR": "127.0.0.1", **{name: str(number) for name, number in numbers.items()}}


def _words(outcome: Outcome, failed: list[RankReport], logs: dict[int, str], ranks: int, timeout_s: float) -> str:
    """Returns the failure's words: how a rank died, or else those of the first rank that reported one."""
    died = {one.rank for one in outcome.failures if one.status != "timeout"} - {report.rank for report in failed}
    if failed and not died:
        first = failed[0]
        output = [f"-- {title}, rank {first.rank} --\n{text.rstrip()[-LAST:]}" for title, text in first.sections]
        head = "" if first.rank == 0 and first.told else f"on rank {first.rank} of {ranks}:\n"
        return "\n".join([f"{head}{first.words}", *output])
    if outcome.status == "timeout":
        late = ", ".join(str(one.rank) for one in outcome.failures)
        words = f"zerobench: timeout_s={timeout_s:g} was over and rank {late} of {ranks} still ran"
    else:
        words = f"zerobench: {outcome.reason}"
    shown = [f"-- end of the output of rank {rank} --\n{log}" for rank, log in logs.items() if log]
    return "\n".join([words, *shown])


def _end_of(log: Path) -> str:
    """Returns the end of a rank's output; of its stacks the frames of code that is neither pytest's nor ours."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    return "\n".join(line for line in lines if not _BELOW.match(line))[-LAST:].strip()
