"""Standard output and error: lines with text from outside, and readers that close early: `zerobench status | head`."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path
from typing import TextIO

from ..sizes import printable


def print_line(text: object) -> None:
    """Prints a line on standard output; a text from outside cannot add lines or control the terminal."""
    print(printable(text))


def print_note(text: object) -> None:
    """Prints a line on standard error, as `print_line` does on standard output."""
    print(printable(text), file=sys.stderr)


def write_text(text: str, out: Path | None) -> None:
    """Writes a text to a file, whose folder is made, or to standard output."""
    if out is None:
        sys.stdout.write(text)
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip() or "no message").splitlines()[0]


class Patient(io.FileIO):
    """A descriptor for writing that discards output after the reader has closed it; other errors are raised."""

    def write(self, data: bytes) -> int:  # type: ignore[override]
        """Writes as FileIO does; discards the data once the reader is gone."""
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)


def patient(stream: TextIO) -> TextIO:
    """Returns the stream over a Patient descriptor, so that a command completes and keeps its own exit code. A
    character that the encoding lacks, as in the locale C, becomes "?".
    """
    if stream is None or stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # replaced by a caller, such as a test
    stream.flush()
    raw = Patient(os.dup(stream.fileno()), "w")
    return io.TextIOWrapper(
        io.BufferedWriter(raw),  # type: ignore[type-var]
        encoding=stream.encoding,
        errors=stream.errors if codecs.lookup(stream.encoding).name == "utf-8" else "replace",
        line_buffering=stream.line_buffering or stream.isatty(),
        write_through=stream is sys.__stderr__,
    )
