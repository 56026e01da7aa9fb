"""Parses and formats sizes: "24 GiB" <-> bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from numbers import Real

SIZES = {
    "b": 1,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip

LONGEST = 2000
"""Maximum length of a text in a message, in characters."""

_SIZE = re.compile(r"([0-9]*\.?[0-9]+)\s*([a-z]*)", re.IGNORECASE)


def parse_bytes(text: str | int) -> int:
    """Parses "96 MiB" -> 100663296. A bare number is bytes. Raises a ValueError that names valid forms."""
    match = _SIZE.fullmatch(str(text).strip())
    unit = (match[2].lower() or "b") if match else ""
    if match is None or unit not in SIZES or not math.isfinite(float(match[1]) * SIZES[unit]):
        raise ValueError(f"{text!r:.60} is no size; write bytes or a number and a unit, as in 96 MiB or 24 GiB")
    return round(float(match[1]) * SIZES[unit])


def parse_memory(text: str | int, name: str = "") -> int:
    """Parses the memory of a device, a host or a disk as `parse_bytes` does. Raises ValueError for a number below 1 MiB
    without a unit: whoever writes "80" means 80 GiB, and 80 bytes would produce an answer, too, but a wrong one.
    `name`: begins the message.
    """
    try:
        size, number = parse_bytes(text), str(text).strip()
    except ValueError as error:
        raise ValueError(f"{name}{error}") from None
    if 0 < size < SIZES["mib"] and not number[-1].isalpha():
        raise ValueError(f"{name}{number} without a unit is {number} bytes; did you mean {number} GiB?")
    return size


def show_bytes(size: float | None) -> str:
    """Formats bytes in the largest binary unit that fits: "1.50 GiB", "96.0 MiB", "512 B"; None as a dash."""
    if not isinstance(size, Real) or size != size:
        return "–"
    for unit, digits in (("tib", 2), ("gib", 2), ("mib", 1), ("kib", 1)):
        if abs(size) >= SIZES[unit]:
            return f"{size / SIZES[unit]:.{digits}f} {unit[0].upper()}iB"
    return f"{size:.0f} B"


def show_ms(seconds: float | None) -> str:
    """Formats seconds as "205.3 ms"; NaN or None as a dash."""
    return "–" if seconds is None or seconds != seconds else f"{seconds * 1000:.1f} ms"


def show_left(seconds: float) -> str:
    """Formats remaining seconds: "about 40 s left", "about 3 min left", "about 1.8 h left"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {seconds / 60:.0f} min left" if seconds < 5400 else f"about {seconds / 3600:.1f} h left"


def show_count(count: int, noun: str) -> str:
    """Formats a count with its noun: "1 run", "2 runs"."""
    return f"{count} {noun}" + "s" * (count != 1)


def show_samples(count: int, sequence: int) -> str:
    """Formats a batch: "8 sequences of 128 tokens"; "8 samples" if they have no length, which is a sequence of 1."""
    return show_count(count, "sample") if sequence == 1 else f"{show_count(count, 'sequence')} of {sequence} tokens"


def show_length(sequence: int) -> str:
    """Formats the end of a title that names a batch: " × 128"; nothing if samples have no length."""
    return "" if sequence == 1 else f" × {sequence}"


def counted(sequences: Iterable[int]) -> str:
    """Returns the noun for the `tokens_per_s` of cells with these values of `sequence`: tokens, samples, or both."""
    nouns = {"samples" if sequence == 1 else "tokens" for sequence in sequences}
    return " or ".join(sorted(nouns, reverse=True)) or "tokens"


def show_rate(rate: float, sequence: int) -> str:
    """Formats a `tokens_per_s`: "2,909 tokens/s", "425 samples/s"."""
    return f"{rate:,.0f} {counted([sequence])}/s"


def escape_control(text: str) -> str:
    """Returns a text as one line, uncut, with control characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def printable(text: object) -> str:
    """Returns a text as one line: control characters are escaped, and the middle of a long text is cut."""
    shown = escape_control(str(text))
    return shown if len(shown) <= LONGEST else f"{shown[: LONGEST // 2]} … {shown[-LONGEST // 4 :]}"
