"""The launcher of a sweep whose jobs this process runs in: `local`, ours, unless a plugin of Hydra's has started it.

A job may be ended by its launcher: preempted, canceled, out of time. The launcher may start it again, and only the
composing process learns of that; so a launch that the *launcher* ends has no row of the job's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOCAL = "local"

_by: list[tuple[str, Callable[[], bool]]] = [(LOCAL, lambda: True)]


@contextmanager
def by(launcher: str, is_stopped: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Records the plugin that has started this process, for the duration of the context.

    `is_stopped`: True where the user, not the launcher, ends the launches of this process.
    """
    _by.append((launcher, is_stopped))
    try:
        yield
    finally:
        _by.pop()


def launcher() -> str:
    """Returns the launcher's name."""
    return _by[-1][0]


def leaves_row() -> bool:
    """Returns True where a launch that is interrupted has a row of its own."""
    return _by[-1][1]()
