"""A file of published runs: a CSV with a row per run and the columns of docs/reference/validated.md.

empty cell       the source does not say
columns          those of PublishedRun, in any order; others are ignored, and those of NEEDED are required
peak_kind        the kind of published figure: allocated, reserved, or `?` if the source does not say
model            its architecture is recognized by part of the printed name; its shape is the row's
"""

from __future__ import annotations

import csv
import io
import math
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from ..config.schema import Huggingface
from ..config.unknown_keys import nearest
from ..host.files import read_text
from ..sections import known
from ..sizes import printable

KINDS = ("allocated", "reserved", "?")
"""Values of peak_kind, if there is a peak."""

NEEDED = ("id", "strategy", "model", "gpus", "seq", "micro_batch", "peak_mem_gib", "peak_kind")
"""Required columns; a file without them has another schema."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run. Numbers are None and texts empty if the source does not give them; units are the file's."""

    id: str = ""
    source: str = ""
    system: str = ""
    strategy: str = ""
    model: str = ""
    params: int | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int | None = None
    seq: int | None = None
    micro_batch: int | None = None
    grad_accum: int | None = None
    gpus: int | None = None
    gpus_per_node: int | None = None
    gpu: str = ""
    gpu_mem_gib: float | None = None
    interconnect: str = ""
    precision: str = ""
    optimizer: str = ""
    act_ckpt: str = ""
    compile: str = ""
    tokens_s_gpu: float | None = None
    peak_mem_gib: float | None = None
    peak_kind: str = ""
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    notes: str = ""
    date: str = ""

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the source reports running out of memory: the notes begin with OOM."""
        return self.notes.startswith("OOM")


def read(path: Path, needed: Sequence[str] = NEEDED) -> list[PublishedRun]:
    """Reads the runs of a file, which must have the columns `needed`. Raises ValueError, with row and column, for
    anything that does not match the schema.
    """
    try:
        table = list(csv.reader(io.StringIO(read_text(path), newline=""), strict=True))
    except csv.Error as error:
        raise ValueError(f"{path}: this is no CSV file in UTF-8: {error}") from error
    if not table:
        raise ValueError(f"{path}: the file is empty; its first row names the columns {', '.join(needed)} and others")
    header = table[0]
    for name in needed:
        if name not in header:
            raise ValueError(
                f"{path}: there is no column {name}{nearest(name, header) or f'; {len(header)} others are'}"
            )
    runs = [_run(path, number, header, row) for number, row in enumerate(table[1:], 2) if any(row)]
    seen: set[str] = set()
    for number, run in enumerate(runs, 2):
        if not run.id or run.id in seen:
            raise ValueError(f"{path}, row {number}, id={printable(run.id)}: each row needs an id of its own")
        seen.add(run.id)
    return runs


def _run(path: Path, number: int, header: Sequence[str], row: Sequence[str]) -> PublishedRun:
    where = f"{path}, row {number}"
    if len(row) != len(header):
        raise ValueError(f"{where}: it has {len(row)} cells, and the header {len(header)}; quote texts with commas")
    cells = dict(zip(header, (text.strip() for text in row), strict=True))
    hints = get_type_hints(PublishedRun)
    values = {
        one.name: _value(where, one.name, cells.get(one.name, ""), hints[one.name]) for one in fields(PublishedRun)
    }
    run = PublishedRun(**values)
    if run.peak_mem_gib is not None and run.peak_kind not in KINDS:
        words = f"peak_kind={printable(run.peak_kind)}: use one of {', '.join(KINDS)}"
        raise ValueError(f"{where}, {words}")
    return run


def _value(where: str, column: str, text: str, hint: Any) -> Any:
    if hint is str:
        return text
    if not text:
        return None
    whole = isinstance(hint, types.UnionType) and int in get_args(hint)
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number <= 0 or (whole and number != int(number)):
        right = "a whole number above 0" if whole else "a number above 0"
        raise ValueError(f"{where}, {column}={printable(text)}: write {right}, or nothing if the source gives none")
    return int(number) if whole else number


class NotGivenError(Exception):
    """The configuration of a run is incomplete or not supported here; the message says which."""


SHAPE = ("layers", "hidden", "heads", "vocab")
"""Columns that every model needs."""


@dataclass(frozen=True)
class Family:
    """An architecture. `names`: a pattern for printed names. `ffn`, `kv_heads`: its settings for these columns, empty
    if it has none; `options`: settings of its published models; `ties`: whether embeddings are tied.
    """

    architecture: str
    names: str
    ffn: str = ""
    kv_heads: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    ties: bool = False


FAMILIES = (
    Family("qwen3", r"qwen-?3", "intermediate_size", "num_key_value_heads"),
    Family("qwen2", r"qwen-?2", "intermediate_size", "num_key_value_heads"),
    Family("mistral", r"mistral", "intermediate_size", "num_key_value_heads"),
    Family("llama", r"llama|granite-7b", "intermediate_size", "num_key_value_heads"),
    Family("mpt", r"\bmpt", ties=True),
    Family("gpt_neox", r"neox|pythia", "intermediate_size"),
    Family("bloom", r"bloom", ties=True),
    Family("falcon", r"falcon", "ffn_hidden_size", ties=True),
    Family("gpt2", r"gpt", "n_inner", ties=True),
)
"""Architectures in the order in which names are matched."""

OTHERS = {
    r"\bt5": "an encoder with a decoder, which is not simulated here: its loss is of another kind",
    r"bert": "an encoder with a loss over masked tokens, which is not simulated here",
}
"""Pattern of a name -> why it cannot be estimated."""


def shape_of(run: PublishedRun) -> Huggingface:
    """Returns the architecture and shape of a run's model. Raises NotGivenError, with the reason, if there is none."""
    name = run.model.lower()
    for pattern, reason in OTHERS.items():
        if re.search(pattern, name):
            raise NotGivenError(f"{run.model}: {reason}")
    if missing := [column for column in SHAPE if getattr(run, column) is None]:
        raise NotGivenError(f"the row does not give {', '.join(missing)}")
    family = next((one for one in FAMILIES if re.search(one.names, name)), None)
    if family is None:
        names = ", ".join(one.architecture for one in FAMILIES)
        raise NotGivenError(f"model={run.model}: no architecture is known by that name; known are {names}")
    layers, hidden, heads, vocab = (known(getattr(run, column)) for column in SHAPE)
    options: dict[str, Any] = dict(family.options)
    for setting, size in ((family.ffn, run.ffn), (family.kv_heads, run.kv_heads)):
        if setting and size is not None:
            options[setting] = size
    options |= _like_falcon(run) if family.architecture == "falcon" else {}
    options["tie_word_embeddings"] = family.ties or re.search(r"\btied embeddings", run.notes) is not None
    return Huggingface(family.architecture, layers, hidden, heads, vocab, run.seq, options)


def _like_falcon(run: PublishedRun) -> dict[str, Any]:
    return {"multi_query": run.kv_heads == 1, "new_decoder_architecture": (run.kv_heads or 1) > 1}
