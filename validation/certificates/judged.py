"""Classes of certificates, and the rows of the tables.

An honest loop is clean, `unusual` (a row says so) or accused (a row is `different`). A planted failure is

named            a row that is `different` or `unusual` is about its cause
misnamed         there are such rows, and none of them is
cannot be told   there is none, and a row about the failure says that it cannot be told
missed           nothing of these

A run is `wrongly_same` if a row about the planted failure says `same`, whatever other rows say. Loops that end with an
exception are refused (an error of the watch) or crashed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zerobench.records import CertificateRow
from zerobench.watching import WatchError

from .loops import Plant

ACCUSING = ("different", "unusual")
SEPARATOR = " | "


@dataclass(frozen=True)
class CertificateOfLoop:
    """A run of a loop. `kind`: its class; `named_by`: the verdict of the row that names a planted failure; `rows`: the
    rows that are different or unusual, or the error message.
    """

    loop: str
    ranks: int
    reference: str
    kind: str
    named_by: str
    wrongly_same: str
    same: int
    different: int
    unusual: int
    untold: int
    rows: str
    seed: int


@dataclass(frozen=True)
class CertificateCount:
    """Runs of each class, of one kind of loop."""

    loops: str
    runs: int
    clean: int
    unusual: int
    different: int
    misnamed: int
    untold: int
    missed: int
    failed: int
    wrongly_same: int


def text_of(row: CertificateRow) -> str:
    """Returns a row as one line."""
    return f"{row.check}: {row.subject}: {row.found}; expected {row.expected or 'nothing'}: {row.why}"


def judged(
    loop: str, ranks: int, reference: str, rows: Sequence[CertificateRow], seed: int, plant: Plant | None
) -> CertificateOfLoop:
    """Returns the class of a certificate. `plant`: the planted failure; None for an honest loop."""
    accusing = [row for row in rows if row.verdict in ACCUSING]
    about = [row for row in rows if plant is not None and re.search(plant.about, f"{row.check}: {row.subject}")]
    naming = [row.verdict for row in accusing if plant is not None and re.search(plant.causes, text_of(row))]
    named_by, wrongly = min(naming, default=""), [row for row in about if row.verdict == "same"]
    if plant is None:
        verdicts = {row.verdict for row in accusing}
        kind = "accused" if "different" in verdicts else "unusual" if verdicts else "clean"
    elif accusing:
        kind = "named" if named_by else "misnamed"
    else:
        kind = "cannot be told" if any(row.verdict == "cannot be told" for row in about) else "missed"
    number = Counter(row.verdict for row in rows)
    shown = SEPARATOR.join(f"{row.verdict}: {text_of(row)}" for row in accusing)
    wrong = SEPARATOR.join(map(text_of, wrongly))
    return CertificateOfLoop(
        loop, ranks, reference, kind, named_by, wrong, number["same"], number["different"], number["unusual"],
        number["cannot be told"], shown, seed,
    )  # fmt: skip


def failed(loop: str, ranks: int, reference: str, error: BaseException, seed: int) -> CertificateOfLoop:
    """Returns the row of a loop that ended with an exception."""
    kind = "refused" if isinstance(error, WatchError) or str(error).startswith("watch") else "crashed"
    shown = " ".join(f"{type(error).__name__}: {error}".split())[:400]
    return CertificateOfLoop(loop, ranks, reference, kind, "", "", 0, 0, 0, 0, shown, seed)


def counted(kind: str, rows: Iterable[CertificateOfLoop]) -> CertificateCount:
    """Returns the summary of some runs."""
    rows = list(rows)
    number = Counter(row.named_by if row.kind == "named" else row.kind for row in rows)
    return CertificateCount(
        kind, len(rows), number["clean"], number["unusual"], number["different"] + number["accused"],
        number["misnamed"], number["cannot be told"], number["missed"], number["refused"] + number["crashed"],
        sum(bool(row.wrongly_same) for row in rows),
    )  # fmt: skip
