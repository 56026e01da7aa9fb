"""Signals that end a command. The first one interrupts it as Ctrl-C does; later ones do not disturb its cleanup.

Python raises an interruption between any two instructions, and library code can lose it: a `finally` of omegaconf fails
on a name that is not yet bound, and Hydra takes that error for a config without a mode. So `raise_if_interrupted`
raises a lost interruption again: at each cell, and inside `repeat_interruption` by a timer.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

TERMINATE, HANG_UP, INTERRUPT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT

ENDING = (INTERRUPT, TERMINATE, HANG_UP)
"""Signals that end a command."""

AGAIN_S = 0.25

INTERRUPTED = 130
"""Exit code of a command that was interrupted."""

_pending: list[signal.Signals] = []
"""The signal that has interrupted the command, until the command has ended."""


def raise_if_interrupted() -> None:
    """Raises KeyboardInterrupt if a signal has interrupted the command."""
    if _pending:
        raise KeyboardInterrupt


def interrupted_by() -> signal.Signals:
    """Returns the signal that has interrupted the command: SIGINT if Python's own handler raised KeyboardInterrupt."""
    return _pending[0] if _pending else INTERRUPT


@contextlib.contextmanager
def repeat_interruption() -> Iterator[None]:
    """Raises an interruption repeatedly in this block, which needs no cleanup, until the interruption ends it.

    Does nothing in a thread, or if a caller uses the timer itself, for example for a timeout.
    """
    taken = threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL))
    if taken:
        yield
        return
    before = signal.signal(signal.SIGALRM, lambda _signal, _frame: raise_if_interrupted())
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
    try:
        yield
        raise_if_interrupted()
    except BaseException:
        raise_if_interrupted()  # an error, or Hydra's exit, may have replaced the interruption
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def interrupt_on(numbers: Iterable[signal.Signals]) -> Iterator[None]:
    """Makes the first signal of `numbers` raise KeyboardInterrupt in this block. Does nothing in a thread."""
    numbers = list(numbers) if threading.current_thread() is threading.main_thread() else []

    def interrupt(number: int, _frame: object) -> NoReturn:
        ignore(numbers)
        _pending.append(signal.Signals(number))
        raise KeyboardInterrupt

    try:
        with _handled(numbers, interrupt):
            yield
    finally:
        _pending.clear()


@contextlib.contextmanager
def _handled(numbers: Iterable[signal.Signals], handler: Callable[[int, Any], NoReturn]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def ignore(numbers: Iterable[signal.Signals]) -> None:
    """Ignores the signals from now on: a finished command has nothing to interrupt."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def exit_when_interrupted(cleanup: Callable[[], None]) -> Iterator[None]:
    """Ends the process, after `cleanup`, at an interruption in this block, which imports; does nothing in a thread.

    In the middle of an import an exception can get lost, or abort C++ code that it passes through.
    """

    def leave(_signal: int, _frame: object) -> NoReturn:
        cleanup()
        os._exit(INTERRUPTED)

    handlers = {number: signal.getsignal(number) for number in ENDING}
    raising = [  # KeyboardInterrupt, by Python's handler or by one of `interrupt_on`
        number
        for number, handler in handlers.items()
        if handler is signal.default_int_handler or getattr(handler, "__module__", None) == __name__
    ]
    with _handled(raising if threading.current_thread() is threading.main_thread() else [], leave):
        yield


def unclaimed(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Returns the signals of `numbers` that are neither ignored, as under nohup, nor handled by other code."""
    return [number for number in numbers if signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)]


def end_with_parent() -> None:
    """Makes the kernel kill this process when the thread that started it ends; Linux only."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
