"""A user's script ends as Python scripts end, with its own exit code, whatever an engine has in flight.

Forked children of a process with torch run the scripts and, unlike the product's ranks, finalize their interpreters.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import distributed as dist
from torch import nn

import zerobench

ENDS = {
    "plain": (0, 0),
    "destroy": (0, 0),
    "exit": (3, 3),
    "error": (1, 1),
    "error on rank 1": (0, 1),
    "error on rank 1 within a step": (1, 1),  # rank 0 waits for collectives of a rank that has ended
    "dropped engine": (0, 0),
    "save": (0, 0),
}
"""How the script ends -> the exit codes of ranks 0 and 1."""

CASES = {
    "zero1": ({}, [], ["plain", "error"]),
    "zero2": ({}, [], ["plain", "error", "error on rank 1 within a step"]),
    "zero3": (
        {},
        ["exit", "error on rank 1 within a step", "save"],
        ["plain", "destroy", "dropped engine", "error", "error on rank 1"],
    ),
    "megatron": ({}, [], ["plain", "error"]),
    "zero3 offload": ({"offload": "cpu"}, [], ["plain", "error", "error on rank 1 within a step"]),
}
"""Name, which begins with the strategy -> its options, how its scripts end, and how also in `make test-all`."""


def ends_of(name: str, thorough: bool) -> list[str]:
    _, ends, more = CASES[name]
    return ends + more * thorough


WITHIN_S = 120
"""Longest life of both ranks, most of it on a busy machine's account. A hang lasts forever."""


def train(name: str, end: str, rank: int, folder: str) -> None:
    """Trains as README's loop does, and ends the script."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    engine = zerobench.initialize(model, optimizer, name.split()[0], **CASES[name][0])
    for step in range(3):
        loss = engine(torch.randn(8, 64)).square().mean()
        engine.backward(loss)
        if step == 2 and end == "error on rank 1 within a step" and rank == 1:
            raise RuntimeError("the user's own error")
        engine.step()
    match end:
        case "save":
            engine.save(f"{folder}/checkpoint", asynchronous=True)
        case "destroy":
            dist.destroy_process_group()
        case "dropped engine":
            del engine, loss
        case "exit":
            sys.exit(3)
        case "error":
            raise RuntimeError("the user's own error")
        case "error on rank 1" if rank == 1:
            raise RuntimeError("the user's own error")


def start(name: str, end: str, rank: int, folder: str) -> int:
    """Forks a rank and returns its process number, in the parent; in the child, raises what the script raises."""
    if child := os.fork():
        return child
    log = os.open(f"{folder}/rank{rank}.log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    train(name, end, rank, folder)
    sys.exit()


def exit_codes(children: list[int], within_s: float) -> list[int | str]:
    """Waits for processes; kills those that still run after `within_s`."""
    _, hanging = psutil.wait_procs(processes := [psutil.Process(child) for child in children], within_s)
    for process in hanging:
        process.kill()
        process.wait()
    return ["hangs" if process in hanging else process.wait() for process in processes]


def run_all(folder: Path, thorough: bool) -> None:
    """Runs every case and prints its exit codes, as a JSON list per case."""
    import zerobench.ranks.frozen  # noqa: F401  loads once what each script would load

    for name in CASES:
        for end in ends_of(name, thorough):
            own = folder / f"{name} {end}"
            own.mkdir()
            children = [start(name, end, rank, str(own)) for rank in range(2)]
            print(json.dumps([name, end, exit_codes(children, WITHIN_S)]), flush=True)


@pytest.fixture(scope="module")
def codes(tmp_path_factory: pytest.TempPathFactory, thorough: bool) -> dict[str, dict[str, list[int | str]]]:
    """Exit codes of ranks 0 and 1, by case and end."""
    command = [sys.executable, "-m", __name__, str(tmp_path_factory.mktemp("scripts")), *["thorough"] * thorough]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    codes: dict[str, dict[str, list[int | str]]] = {name: {} for name in CASES}
    for name, end, ended in map(json.loads, output.splitlines()):
        codes[name][end] = ended
    return codes


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if CASES[name][1] else pytest.mark.thorough) for name in CASES]
)
def test_script_ends_with_its_own_exit_code(
    name: str, codes: dict[str, dict[str, list[int | str]]], thorough: bool
) -> None:
    assert codes[name] == {end: [*ENDS[end]] for end in ends_of(name, thorough)}


if __name__ == "__main__":
    run_all(Path(sys.argv[1]), thorough="thorough" in sys.argv)
