"""A certificate: the checks of a watched loop as rows, with a gate for tests; kept in the run's folder.

certificate.parquet   the rows, a table like the others of a run
certificate.json      the ranks' observations, from which another loop's certificate takes its expectations
updates.pt            initial values and first updates of a loop in one process, for comparisons with it as a reference
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..cluster.serialize import rebuild, to_plain
from ..records import CertificateRow
from .held_tensors import not_of_loop
from .job_seen import JobSeen
from .observed import FirstUpdates, RankSeen

SAME, DIFFERENT, UNUSUAL, UNKNOWN = "same", "different", "unusual", "cannot be told"
"""Verdicts: compared, and equal within a stated bound; contradicts a declaration, a reference or an invariant of the
engine in use; a heuristic's evidence, which accuses nobody; not compared.
"""

FIRST = (DIFFERENT, UNUSUAL)
"""Verdicts whose rows come first."""

OBSERVED, UPDATES = "certificate.json", "updates.pt"
"""Files in a run's folder."""


class CertificateError(AssertionError):
    """A watched loop differs from the training that was expected; the message has a line per difference."""


@dataclass
class Certificate:
    """The checks of one watched loop. `job`: the ranks' observations; `values`: of the first updates, if kept."""

    job: JobSeen
    rows: list[CertificateRow] = field(default_factory=list)
    values: FirstUpdates = field(default_factory=FirstUpdates)

    @property
    def different(self) -> list[CertificateRow]:
        """The checks whose finding contradicts a declaration, the reference or an invariant of the engine."""
        return [row for row in self.rows if row.verdict == DIFFERENT]

    @property
    def unusual(self) -> list[CertificateRow]:
        """The checks whose finding is worth a look, and contradicts nothing."""
        return [row for row in self.rows if row.verdict == UNUSUAL]

    def check(self, strict: bool = False) -> None:
        """Raises CertificateError if any check is different, or with `strict` unusual: a gate for pytest."""
        rows = self.different + (self.unusual if strict else [])
        lines = [
            f"{row.check}: {row.subject}: {row.found}; expected {row.expected}: {row.why}"
            + (f" ({row.source})" if row.source else "")
            for row in rows
        ]
        if lines:
            differs = f"the watched loop differs in {len(lines)}:"
            if strict:
                differs = f"the watched loop is different or unusual in {len(lines)}:"
            raise CertificateError("\n".join([differs, *lines]))

    def __str__(self) -> str:
        return "\n".join(map(_lines_of, self.rows))

    def write(self, folder: Path) -> None:
        """Writes the observations and values into a run's folder."""
        plain = {"strategy": self.job.strategy, "name": self.job.name}
        (folder / OBSERVED).write_text(json.dumps(plain | {"ranks": to_plain(self.job.ranks)}))
        if self.values.values:
            torch.save(vars(self.values), folder / UPDATES)

    @classmethod
    def read(cls, where: str | Path) -> Certificate:
        """Reads the certificate of a run's folder, or of the newest run in a results folder.

        Raises FileNotFoundError if there is none, ValueError if it is damaged.
        """
        found = [Path(where) / OBSERVED, *Path(where).glob(f"*/{OBSERVED}")]
        there = sorted((one for one in found if one.is_file()), key=lambda one: one.stat().st_mtime)
        if not there:
            raise FileNotFoundError(f"{where}: no certificate; watch a loop with verify=True and to= that folder")
        try:
            plain: dict[str, Any] = json.loads(there[-1].read_text())
            ranks = rebuild(list[RankSeen], plain["ranks"])
            job = JobSeen(str(plain["strategy"]), ranks, str(plain["name"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{there[-1]}: it is no certificate of this version: {error}") from error
        path = there[-1].with_name(UPDATES)
        values = FirstUpdates(**torch.load(path, weights_only=True)) if path.is_file() else FirstUpdates()
        tensors = (tensor for named in (*values.values, values.noise) for tensor in named.values())
        not_of_loop.update(dict.fromkeys(tensors, True))
        return cls(job, values=values)


def certificate_of(given: Certificate | str | Path) -> Certificate:
    """Returns a certificate that was given itself or by its folder."""
    return given if isinstance(given, Certificate) else Certificate.read(given)


def _lines_of(row: CertificateRow) -> str:
    expected = f"; expected {row.expected}" if row.expected else ""
    text = f"{row.verdict:<14}  {row.check}: {row.subject}: {row.found}{expected}"
    details = [one for one in (row.why, row.source) if one]
    return "\n".join([text, *(f"{'':16}{one}" for one in details)])
