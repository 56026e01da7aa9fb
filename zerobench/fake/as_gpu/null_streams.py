"""Streams that order nothing: torch.cuda's part that the engine uses, over torch.cpu's placeholders.

current stream   torch.cpu's, so that FSDP2, which uses these placeholders itself, and the engine share it: an
                 allocation belongs to the stream that is current when it is made
event            is there, and over: what waits for it goes on
"""

from __future__ import annotations

import torch


class NullEvent:
    """The end of work that is over."""

    def wait(self) -> None:
        """Goes on."""

    def synchronize(self) -> None:
        """Goes on."""


class NullStream(torch.cpu.Stream):
    """A stream whose events exist, as a GPU's do: memory that is held until an event is held here."""

    def record_event(self) -> NullEvent:  # type: ignore[override]
        """Returns an event."""
        return NullEvent()

    def synchronize(self) -> None:
        """Returns at once."""


class NullCuda:
    """Stands for the module torch.cuda."""

    Stream = NullStream
    stream = staticmethod(torch.cpu.stream)
    current_stream = staticmethod(torch.cpu.current_stream)
