"""Models of published runs as transformers architectures: by a part of the printed name, with the row's shape."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from ....config.schema import Huggingface
from ....sections import known
from .rows import Run
from .said import NotGivenError

SHAPE = ("layers", "hidden", "heads", "vocab")
"""Columns that every model needs."""


@dataclass(frozen=True)
class Family:
    """An architecture. `names`: a pattern of printed names. `ffn`, `kv_heads`: its settings for these columns, empty
    where it has none; `options`: settings that its published models have; `ties`: a setting that ties embeddings.
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
"""In the order in which names are tried."""

OTHERS = {
    r"\bt5": "an encoder with a decoder, which is not executed here: its loss is of another kind",
    r"bert": "an encoder with a loss over masked tokens, which is not executed here",
}
"""Pattern of a name -> a reason why it cannot be estimated."""


def shape_of(run: Run) -> Huggingface:
    """Returns the architecture and shape of a run's model. Raises NotGivenError with the reason where there is none."""
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
    options["tie_word_embeddings"] = family.ties
    return Huggingface(family.architecture, layers, hidden, heads, vocab, run.seq, options)


def _like_falcon(run: Run) -> dict[str, Any]:
    return {"multi_query": run.kv_heads == 1, "new_decoder_architecture": (run.kv_heads or 1) > 1}
