"""A certificate: the training that is expected, the observations of all ranks as those of one job, and the checks of a
watched loop as rows, with a gate for tests.

In a job a replica counts once: the squares of a gradient that k ranks hold are divided by k.

Whatever is not declared is expected to equal the reference, if there is one. Else only an invariant of the engine is
expected; what most loops do (masters of float32, one update per step) is a heuristic, and its opposite unusual.

A run's folder has:
certificate.parquet   the rows, a table like the others of a run
certificate.json      the ranks' observations, from which another loop's certificate takes its expectations
updates.pt            initial values and first updates of a loop in one process, for comparisons with it as a reference
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import cached_property
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import torch

from ..host.job import rebuild, to_plain
from ..records import CertificateRow
from .held_tensors import not_of_loop
from .observed import REDUCTIONS, Deviation, FirstUpdates, PartSeen, RankSeen

SAME, DIFFERENT, UNUSUAL, UNKNOWN = "same", "different", "unusual", "cannot be told"
"""Verdicts, in order: equal within a stated bound; contradicts a declaration, the reference or an invariant of the
engine in use; differs from what most loops do, which need not be an error; not compared.
"""

FIRST = (DIFFERENT, UNUSUAL)
"""Verdicts whose rows come first."""

OBSERVED, UPDATES = "certificate.json", "updates.pt"
"""Files in a run's folder."""


@dataclass(frozen=True)
class ExpectedTraining:
    """The training that `zerobench.watch(..., verify=...)` expects. All fields are optional; a dtype or
    class may be given as itself or by its name. Raises ValueError for what is no dtype.

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

    def __post_init__(self) -> None:
        own = {name: _dtypes(name, getattr(self, name)) for name in ("masters", "moments", "gradients", "computes")}
        vars(self).update(own, wire={kind: _dtypes(f"wire[{kind!r}]", dtype) for kind, dtype in self.wire.items()})

    def optimizer_class(self, name: str) -> str:
        """Returns the expected class of the optimizer of a parameter; empty if none is declared."""
        patterns = self.optimizer if isinstance(self.optimizer, Mapping) else {"*": self.optimizer}
        kind = next((kind for pattern, kind in patterns.items() if fnmatch(name, pattern)), "")
        return str(getattr(kind, "__name__", kind))


def _dtypes(field: str, given: Any) -> str:
    """Returns dtypes, comma-separated, by torch's own names. Raises ValueError for what is no dtype."""
    text = str(given or "").replace("torch.", "")
    dtypes = [getattr(torch, name, None) for name in text.split(", ")] if text else []
    if not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError(f'watch: ExpectedTraining: {field}={text!r} is no dtype; write one such as "float32"')
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


NARROW = ("float16", "bfloat16", "float32")
"""dtypes from the one with the smallest range to the widest; the first one that occurs sets the bounds."""


@dataclass
class JobSeen:
    """All ranks' observations, and facts of the run."""

    strategy: str
    ranks: list[RankSeen]
    name: str = ""
    sizes: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.sizes = self.ranks[0].sizes

    @property
    def steps(self) -> int:
        """Number of steps that all ranks observed."""
        return min(len(rank.steps) for rank in self.ranks)

    @cached_property
    def parts(self) -> dict[str, PartSeen]:
        """Parameter -> its largest shard, with elements summed over the ranks, and counts of the rank with the most."""
        parts: dict[str, PartSeen] = {}
        for name in dict.fromkeys(chain.from_iterable(rank.parts for rank in self.ranks)):
            shards = [rank.parts[name] for rank in self.ranks if name in rank.parts]
            shards.sort(key=lambda shard: -shard.elements)  # an empty shard shows nothing
            joined = parts[name] = PartSeen(**vars(shards[0]))
            for field_name in ("elements", "moment_elements"):
                setattr(joined, field_name, sum(getattr(shard, field_name) for shard in shards))
            for field_name in ("gradients", "lost", "changes", "reach", "not_finite"):
                setattr(joined, field_name, max(getattr(shard, field_name) for shard in shards))
            joined.updates = [max(counts) for counts in zip(*(shard.updates for shard in shards), strict=False)]
        return parts

    def loss(self, step: int) -> float:
        """Returns the mean of the ranks' losses of a step: of each rank the sum over its micro-batches."""
        return fmean(rank.steps[step].loss for rank in self.ranks)

    def squares(self, step: int, at_update: bool = False) -> dict[str, float]:
        """Returns parameter -> the square of its gradient's norm, over the ranks."""
        total, numbers = defaultdict[str, float](float), defaultdict[str, float](float)
        for rank in self.ranks:
            squares = rank.steps[step].at_update if at_update else rank.steps[step].before
            for name, (value, number) in squares.items():
                total[name] += value
                numbers[name] += number
        sizes = {name: self.sizes.get(name) or number / len(self.ranks) or 1 for name, number in numbers.items()}
        return {name: total[name] / max(1, round(numbers[name] / sizes[name])) for name in total}

    def norm(self, step: int, at_update: bool = False, without: Collection[str] = ()) -> float:
        """Returns the norm of all gradients of a step, after backward or as the optimizer got them."""
        return math.sqrt(sum(s for name, s in self.squares(step, at_update).items() if name not in without))

    @property
    def copies(self) -> float | None:
        """Copies of each state in the job: 1.0 if they are partitioned over all ranks. None without states."""
        moments = {name: seen.moment_elements for name, seen in self.parts.items() if name in self.sizes}
        moments = {name: numel for name, numel in moments.items() if numel}
        return sum(moments.values()) / sum(self.sizes[name] for name in moments) if moments else None

    @cached_property
    def held(self) -> set[str]:
        """Names of the trainable parameters that a watched optimizer has, on any rank."""
        return set(chain.from_iterable(rank.held for rank in self.ranks))

    @property
    def names(self) -> set[str]:
        """Names of all parameters of the model, trainable or frozen."""
        return {*self.sizes, *self.ranks[0].frozen}

    @cached_property
    def updates_copies_alone(self) -> bool:
        """Whether the optimizer updates copies of parameters, such as masters, but the parameters never change."""
        after_steps, bits = self.ranks[0].values[1:], []
        for name, seen in self.parts.items():
            if seen.is_copy and seen.changes > 0 and all(name in values for values in after_steps):
                bits.append({values[name] for values in after_steps})
        return self.steps > 1 and bool(bits) and all(len(distinct) == 1 for distinct in bits)

    @cached_property
    def reduces_by_hand(self) -> bool:
        """Whether a plain loop reduces all gradients over the ranks after backward, as if parameters were equal."""
        return self.reduces_late and self.reductions(self.steps - 1)[-1] > 0.9

    @property
    def skipped(self) -> list[int]:
        """Numbers of the steps whose update a scaler skipped."""
        return [number for number, step in enumerate(self.ranks[0].steps) if step.skipped]

    def unequal(self, kind: str, number: int) -> list[str]:
        """Returns the `values` or `buffers`, whole, whose bits differ between ranks after step `number`; 0: before."""
        by_rank: list[dict[str, int]] = [getattr(rank, kind)[number] for rank in self.ranks]
        return [name for name in by_rank[0] if len({bits[name] for bits in by_rank if name in bits}) > 1]

    def shared(self, kind: str) -> list[str]:
        """Returns the names of `values` or `buffers` that all ranks have whole."""
        first, *others = (getattr(rank, kind)[0] for rank in self.ranks)
        return [name for name in first if all(name in other for other in others)]

    @property
    def changed_frozen(self) -> list[str]:
        """Frozen parameters whose bits changed in the watched steps."""
        rank = self.ranks[0]
        return [name for name in rank.frozen if len({values[name] for values in rank.values if name in values}) > 1]

    @property
    def reduces_late(self) -> bool:
        """Whether the loop reduces gradients by itself after backward, so that norms after backward are of one rank."""
        if self.strategy in ("ddp", "zero_redundancy") and len(self.ranks) > 1:
            *in_backward, after = self.reductions(self.steps - 1)
            return sum(in_backward) < 0.05 and after > 0.9
        return self.strategy == "plain" and len(self.ranks) > 1

    def reductions(self, step: int) -> list[float]:
        """Returns how often each gradient is reduced in each micro-batch, then in the rest of the step."""
        own, moved = self.ranks[0].own, self.ranks[0].steps[step].moved
        psi = sum(size for name, size in self.sizes.items() if name not in own) or 1
        return [max(section.get(kind, 0) for kind in REDUCTIONS) / psi for section in moved]

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Kind and dtype of each collective of the last step -> payload bytes of the first rank."""
        return self.ranks[0].steps[self.steps - 1].sent

    @cached_property
    def computes(self) -> dict[str, dict[str, int]]:
        """dtype that modules with parameters computed in -> module -> elements of its matrix, if it has one."""
        dtypes = sorted({dtype for rank in self.ranks for dtype in rank.computes})
        return {dtype: dict(chain(*(rank.computes.get(dtype, {}).items() for rank in self.ranks))) for dtype in dtypes}

    @property
    def precision(self) -> str:
        """The narrowest dtype that computes or stores; bfloat16 in Muon's Newton-Schulz iteration."""
        stored = ((seen.in_model, seen.master, seen.gradient) for seen in self.parts.values())
        dtypes = {*self.computes, *chain.from_iterable(stored)}
        dtypes |= {"bfloat16" for seen in self.parts.values() if "Muon" in seen.optimizer}
        return next((dtype for dtype in NARROW if dtype in dtypes), "float32")

    def deviations(self, number: int) -> dict[str, Deviation]:
        """Returns parameter -> deviation from the reference after update `number`; 0: of the initial values."""
        total: dict[str, Deviation] = {}
        for rank in self.ranks:
            for name, own in rank.deviations[number].items() if number < len(rank.deviations) else ():
                total[name] = total[name].joined(own) if name in total else own
        return total


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
    def read(cls, where: str | Path, with_updates: bool = False) -> Certificate:
        """Reads a folder's newest certificate, or newest `with_updates`. Raises FileNotFoundError or ValueError."""
        paths = [path for path in (Path(where) / OBSERVED, *Path(where).glob(f"*/{OBSERVED}")) if path.is_file()]
        if not paths:
            raise FileNotFoundError(f"{where}: no certificate; watch a loop with verify=True and to= that folder")
        has = {path: with_updates and path.with_name(UPDATES).is_file() for path in paths}
        reading = max(paths, key=lambda path: (has[path], path.stat().st_mtime))
        try:
            plain: dict[str, Any] = json.loads(reading.read_text())
            ranks = rebuild(list[RankSeen], plain["ranks"])
            job = JobSeen(str(plain["strategy"]), ranks, str(plain["name"]))
            reading = reading.with_name(UPDATES)
            values = FirstUpdates(**torch.load(reading, weights_only=True)) if reading.is_file() else FirstUpdates()
        except Exception as error:  # torch.load raises those of many kinds
            raise ValueError(f"{reading}: it is no certificate of this version: {error!r:.160}") from error
        tensors = (tensor for named in (*values.values, values.noise) for tensor in named.values())
        not_of_loop.update(dict.fromkeys(tensors, True))
        return cls(job, values=values)
