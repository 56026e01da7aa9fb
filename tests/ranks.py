"""Functions on N real ranks, for tests: `run_ranks` returns a value a rank, `on_ranks` makes a test of a function.

The ranks come from the product's own launcher. A function must be importable; it gets its rank's number and N first.
"""

import inspect
import secrets
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from zerobench.host.environment import rank_environment
from zerobench.ranks.start_ranks import LaunchError, launch


def free_port() -> int:
    """Below the ports that the kernel gives to connections: none of them takes it before the test does."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


def wait_until(seen: Callable[[], object], within_s: float = 300) -> None:
    """Waits for another process or thread, and fails after a time: no machine is so busy."""
    deadline = time.monotonic() + within_s
    while not seen():
        assert time.monotonic() < deadline, "what was waited for did not come"
        time.sleep(0.02)


@contextmanager
def one_thread() -> Iterator[None]:
    """torch computes in one thread, as a rank does: the order of sums may depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_ranks(n: int, function: Callable[..., Any], *arguments: Any, timeout_s: float = 300) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        jobs = [(rank, n, f"{folder}/rendezvous", arguments) for rank in range(n)]
        try:
            return launch(partial(_in_group, function), jobs, Path(folder) / "logs", timeout_s)
        except LaunchError as error:
            logs = "\n".join(p.read_text()[-3000:] for p in sorted((Path(folder) / "logs").glob("*.log")))
            raise AssertionError(f"{error}\n{logs}") from None


def on_ranks(n: int, *more: int, timeout_s: float = 300) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function that each of `n` ranks calls: it fails if a rank raises.

    Parameters after the rank and N are fixtures' values. `more`: other numbers of ranks, in `make test-all`.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def test(n: int = n, **fixtures: Any) -> None:
            run_ranks(n, _call, function.__module__, function.__name__, fixtures, timeout_s=timeout_s)

        parameters = list(inspect.signature(function).parameters.values())[1 if more else 2 :]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        worlds = [n, *(pytest.param(other, marks=pytest.mark.thorough) for other in more)]
        return pytest.mark.parametrize("n", worlds)(test) if more else test

    return decorate


def _call(rank: int, n: int, module: str, name: str, fixtures: dict[str, Any]) -> None:
    """What is importable by the name is the test, not the function that it was made of."""
    getattr(import_module(module), name).__wrapped__(rank, n, **fixtures)


def _in_group(function: Callable[..., Any], job: tuple[int, int, str, tuple[Any, ...]], tell: Any) -> Any:
    rank, n, rendezvous, arguments = job
    with rank_environment(rank, n, "cpu", "gloo", rendezvous, threads=1, timeout_s=100):
        return function(rank, n, *arguments)
