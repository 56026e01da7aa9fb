"""Standard output and error whose reader may leave: `zerobench status | head`."""

from __future__ import annotations

import io
import os
import sys
from typing import TextIO


class Patient(io.FileIO):
    """A descriptor for writing. What is written after its reader has left goes nowhere; other errors are raised."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """As FileIO's."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def patient(stream: TextIO) -> TextIO:
    """The same stream over a Patient descriptor, so that a command comes to its own end and to its own exit code."""
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # somebody's own, a test's say
    stream.flush()
    raw = Patient(os.dup(stream.fileno()), "w")
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering or stream.isatty(),
        write_through=stream is sys.__stderr__,
    )
