"""A certificate: the training that is expected, and the checks of a watched loop as rows, with a gate for tests.

Whatever is not declared is expected to equal the reference, if there is one. Else only an invariant of the engine is
expected; what most loops do (masters of float32, one update per step) is a heuristic, and its opposite unusual.

A run's folder has:
certificate.parquet   the rows, a table like the others of a run
certificate.json      the ranks' observations, from which another loop's certificate takes its expectations
updates.pt            initial values and first updates of a loop in one process, for comparisons with it as a reference
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Literal

import torch

from ..host.serialize import rebuild, to_plain
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


PARTITIONED = ("zero_redundancy", "zero1", "zero2", "zero3", "megatron", "fsdp1", "fsdp2", "deepspeed")
"""Strategies that partition optimizer states."""

REPLICATED = ("ddp", "zero_redundancy")
"""Strategies that keep equal parameters on all ranks; in a plain loop ranks may hold different experts."""

DATA_PARALLEL = (*PARTITIONED, "ddp")
"""Strategies whose ranks usually have samples of their own."""


@dataclass(frozen=True)
class ExpectedTraining:
    """The training that `zerobench.watch(..., verify=...)` expects. All fields are optional.

    masters        dtype of the tensors that the optimizer updates
    moments        dtype of their states
    gradients      dtype of the gradients that the optimizer gets
    computes       dtype that modules with parameters compute in
    wire           kind of collective -> its dtype, such as {"all_gather": "bfloat16"}
    optimizer      class of the optimizer, or pattern of parameters' names -> class; the first match counts
    accumulation   micro-batches per update
    reductions     times that each gradient is reduced over the ranks per update: 1 if only the last micro-batch does so
    copies         copies of each optimizer state in the job: 1 if states are partitioned over all ranks
    clip           the largest norm that the optimizer may get
    data           "distinct": each rank has samples of its own, so that losses differ between ranks
    reference      certificate, or folder, of the same training by plain torch in one process on the same global batches
    unlike         certificate, or folder, of a loop that is meant to differ: equal bytes, dtypes, collectives and
                   losses then mean that the option between them changed nothing
    """

    masters: str = ""
    moments: str = ""
    gradients: str = ""
    computes: str = ""
    wire: Mapping[str, str] = field(default_factory=dict)
    optimizer: str | Mapping[str, str] = ""
    accumulation: int | None = None
    reductions: int | None = None
    copies: float | None = None
    clip: float | None = None
    data: Literal["", "distinct"] = ""
    reference: Certificate | str | Path | None = None
    unlike: Certificate | str | Path | None = None

    def optimizer_of(self, name: str) -> str:
        """Returns the expected class of the optimizer of a parameter; empty if none is declared."""
        patterns = {"*": self.optimizer} if isinstance(self.optimizer, str) else self.optimizer
        return next((kind for pattern, kind in patterns.items() if fnmatch(name, pattern)), "")


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
        lines = [f"the watched loop {'is different or unusual' if strict else 'differs'} in {len(rows)}:"]
        for row in rows:
            source = f" ({row.source})" if row.source else ""
            lines.append(f"{row.check}: {row.subject}: {row.found}; expected {row.expected}: {row.why}{source}")
        if rows:
            raise CertificateError("\n".join(lines))

    def __str__(self) -> str:
        lines = []
        for row in self.rows:
            expected = f"; expected {row.expected}" if row.expected else ""
            lines.append(f"{row.verdict:<14}  {row.check}: {row.subject}: {row.found}{expected}")
            lines += [f"{'':16}{detail}" for detail in (row.why, row.source) if detail]
        return "\n".join(lines)

    def write(self, folder: Path) -> None:
        """Writes the observations and values into a run's folder."""
        plain = {"strategy": self.job.strategy, "name": self.job.name}
        (folder / OBSERVED).write_text(json.dumps(plain | {"ranks": to_plain(self.job.ranks)}))
        if self.values.values:
            torch.save(vars(self.values), folder / UPDATES)

    @classmethod
    def read(cls, where: str | Path) -> Certificate:
        """Reads the newest certificate of a run's or results folder. Raises FileNotFoundError or ValueError."""
        paths = [path for path in (Path(where) / OBSERVED, *Path(where).glob(f"*/{OBSERVED}")) if path.is_file()]
        if not paths:
            raise FileNotFoundError(f"{where}: no certificate; watch a loop with verify=True and to= that folder")
        newest = max(paths, key=lambda path: path.stat().st_mtime)
        try:
            plain: dict[str, Any] = json.loads(newest.read_text())
            ranks = rebuild(list[RankSeen], plain["ranks"])
            job = JobSeen(str(plain["strategy"]), ranks, str(plain["name"]))
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"{newest}: it is no certificate of this version: {error}") from error
        updates = newest.with_name(UPDATES)
        values = FirstUpdates(**torch.load(updates, weights_only=True)) if updates.is_file() else FirstUpdates()
        tensors = (tensor for named in (*values.values, values.noise) for tensor in named.values())
        not_of_loop.update(dict.fromkeys(tensors, True))
        return cls(job, values=values)
