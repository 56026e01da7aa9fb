"""All keys of the command line by their names, from the schemas that declare them: the check of their limits, and error
messages for keys that a config does not have, with the nearest valid names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_origin

from omegaconf import DictConfig, OmegaConf

from ..sections import KEY, Key, Section, keys_of
from ..strategies import spec_of
from .schema import SCHEMAS, SECTIONS, Config

GROUPS: dict[str, Key] = {
    **{name: key for name, key in keys_of(Config).items() if name in SCHEMAS},
    "experiment": Key("a sweep or setting that comes with zerobench; the head of its file explains it"),
    **{name: key for name, key in keys_of(Config).items() if name in SECTIONS},
}
"""Group, or section of keys -> its Key."""


def _fields() -> Iterator[tuple[str, Field[Any]]]:
    schemas: list[tuple[str, type]] = [("", Config)]
    schemas += [(f"{group}.", schema) for group, choices in SCHEMAS.items() for schema in choices.values()]
    schemas += [(f"{section}.", schema) for section, schema in SECTIONS.items()]
    for prefix, schema in schemas:
        yield from ((f"{prefix}{field.name}", field) for field in fields(schema) if KEY in field.metadata)


KEYS: dict[str, Key] = {name: field.metadata[KEY] for name, field in _fields() if name not in GROUPS}
"""Key -> its declaration, the same in all choices of its group."""


def omitted() -> dict[str, Any]:
    """Returns the default of each key that an identity leaves out at its default; for a group, the default choice."""
    defaults: dict[str, Any] = {}
    for name, field in _fields():
        if field.metadata[KEY].omitted:
            default = field.default_factory() if field.default_factory is not MISSING else field.default
            in_group = name in GROUPS
            defaults[f"{name}.name" if in_group else name] = getattr(default, "name", None) if in_group else default
    return defaults


AUTO = "auto"
"""The word for a number derived from the model."""


def problems_of(cell: Config) -> list[str]:
    """Returns error messages for values of a cell that are out of range."""
    problems = []
    holders: dict[str, Any] = {"": cell} | {
        name: part for name, part in vars(cell).items() if isinstance(part, Section)
    }
    if spec_of(cell.strategy.name).of_user:  # an equal name may mean something else there
        del holders["strategy"]
    named = ((section, holder, *pair) for section, holder in holders.items() for pair in keys_of(holder).items())
    for section, holder, name, key in named:
        value, path = getattr(holder, name), f"{section}.{name}".lstrip(".")
        if key.limits is None or value is None or str(value) in key.words:
            continue
        least, most = key.limits
        if isinstance(value, str):
            problems.append(f"{path}={value}: use {AUTO} or bytes, at least {least:g}, as in 25MiB")
        elif not least <= value <= most:
            why = "; memory is counted from the third step on, when optimizer states exist" if "warmup" in path else ""
            bound = f"at most {most:g}" if value > most else f"at least {least:g}"
            problems.append(f"{path}={value}: must be {bound}{why}")
    return problems


IDENTITY = ("name", "kind")
"""Keys that name a section's choice; they are set through the group."""

RUNS = ("run", "train", "bench", "benchmark", "sweep", "start", "launch", "exec", "multirun")
"""Words that other tools use for runs, which need no verb here."""

OTHER_VERBS = {"list": "status", "ls": "status", "diff": "compare", "clean": "prune", "info": "show", "check": "budget"}
"""Verbs of other tools -> ours."""

_DTYPE = "precision, as in precision=bf16"
_STAGE = "strategy, as in strategy=zero3"
_BATCH = "micro_batch (samples per rank in one forward) or batch (samples of a step over all ranks)"
_BLOCKS = "activation=checkpoint"

OTHER_WORDS: dict[str, str] = {
    **dict.fromkeys(("dtype", "amp", "mixed_precision", "fp32", "fp16", "bf16", "torch_dtype"), _DTYPE),
    **dict.fromkeys(("stage", "zero_stage", "zero", "ddp", "fsdp", "sharding", "parallel"), _STAGE),
    **dict.fromkeys(("batch_size", "bs", "train_batch_size"), _BATCH),
    **dict.fromkeys(
        ("micro_batch_size", "train_micro_batch_size_per_gpu", "per_device_train_batch_size"), "micro_batch"
    ),
    **dict.fromkeys(("gradient_accumulation_steps", "gradient_accumulation", "grad_accum"), "accumulation"),
    **dict.fromkeys(("gpus", "num_gpus", "ranks", "nproc", "nproc_per_node", "num_processes", "n"), "world_size"),
    **dict.fromkeys(("seq_len", "seq_length", "sequence_length", "block_size", "context", "max_length"), "sequence"),
    **dict.fromkeys(("learning_rate", "optimizer.learning_rate"), "optimizer.lr"),
    **dict.fromkeys(("betas", "optimizer.betas"), "optimizer.beta1 and optimizer.beta2"),
    **dict.fromkeys(("momentum_factor",), "optimizer.momentum"),
    **dict.fromkeys(("grad_clip", "gradient_clipping", "max_norm", "max_grad_norm", "clip_grad"), "clip"),
    **dict.fromkeys(("activation_checkpointing", "gradient_checkpointing", "recompute"), _BLOCKS),
    **dict.fromkeys(("epochs", "max_steps", "num_steps", "iterations"), "measure.steps"),
    **dict.fromkeys(("n_layer", "n_layers", "num_layers", "depth"), "model.layers"),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "width"), "model.hidden"),
    **dict.fromkeys(("n_head", "n_heads", "num_heads", "num_attention_heads"), "model.heads"),
    **dict.fromkeys(("vocab_size", "vocab"), "model.vocabulary"),
    **dict.fromkeys(
        ("bucket_size", "bucket_cap_mb", "reduce_bucket_size", "allgather_bucket_size"), "strategy.bucket_bytes"
    ),
    **dict.fromkeys(("dataset", "corpus", "text", "train_data"), "data, as in data=text data.path=FILE"),
    **dict.fromkeys(("out", "output", "output_dir", "out_dir", "results", "logdir"), "results_dir"),
    **dict.fromkeys(("optim", "opt"), "optimizer, as in optimizer=sgd"),
    **dict.fromkeys(("cpu_offload", "offload_optimizer", "offload_param"), "offload, as in offload=cpu"),
    "architecture": "huggingface.architecture, with model=huggingface",
    "memory_limit": "search.memory_limit",
    "gpu": "device, as in device=cuda",
}
"""Another tool's name for an option -> ours; with a dot if the last part alone is ambiguous."""


def stray_keys(
    config: DictConfig, elsewhere: Collection[str] = (), schema: type = Config, prefix: str = ""
) -> list[str]:
    """Returns error messages for keys of a composed config that its schema lacks, except keys of `elsewhere`."""
    names = [field.name for field in fields(schema)]
    problems = []
    for key in config:
        name = f"{prefix}{key!s}"
        if key not in names:
            if name not in elsewhere:
                problems.append(f"{name}: no such key{nearest(str(key), names, prefix.rstrip('.'))}")
            continue
        node = config._get_node(key)
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if isinstance(node, DictConfig) and kind is not None and is_dataclass(kind):
            problems += stray_keys(node, elsewhere, kind, f"{name}.")
    return problems


def nearest(name: str, names: Collection[str], prefix: str = "") -> str:
    """Returns the end of an error message: the name nearest to a mistyped one or, if none is near, the valid names."""
    kin = [other for other in names if _letters(other) == _letters(name) != name]
    if kin and not any({*other} == {*name} for other in kin):  # another number, such as fp8, is no slip of the hand
        return f"; there are {', '.join(names if len(names) < 9 else kin)}"
    near = get_close_matches(name, names, n=1, cutoff=0.6)
    if near:
        return f"; did you mean {f'{prefix}.{near[0]}' if prefix else near[0]}?"
    return f" (valid: {', '.join(names)})" if names else ""


def _letters(name: str) -> str:
    return "".join(letter for letter in name if not letter.isdigit())


def meant(key: str, names: Collection[str], prefix: str = "") -> str:
    """Returns the end of an error message for an unknown key: our key for another tool's name, a key of the same name
    elsewhere, the nearest key in the same section, or else the valid keys there.
    """
    last = key.split(".")[-1]
    if ours := OTHER_WORDS.get(key) or OTHER_WORDS.get(last):
        return f"; did you mean {ours}?"
    elsewhere = [path for path in KEYS if "." in path and path.split(".")[-1] == last]
    if elsewhere and not get_close_matches(last, names, n=1, cutoff=0.8):
        return f"; did you mean {' or '.join(elsewhere[:2])}?"
    settable = [name for name in names if name not in IDENTITY]
    return nearest(last, settable, prefix) or "; this choice has no keys of its own"


def meant_flag(flag: str, flags: Collection[str]) -> str:
    """Returns the end of an error message: a key, which has no dashes, or the nearest flag."""
    key = flag.lstrip("-").partition("=")[0].replace("-", "_")
    if is_key(key):
        return f"; a key has no dashes: {key}=VALUE"
    if key in OTHER_WORDS:
        return f"; did you mean the key {OTHER_WORDS[key]}?"
    return nearest(flag.partition("=")[0], flags)


def is_key(word: str) -> bool:
    """Whether `word` is a group, or a key of any choice."""
    return word in GROUPS or word in KEYS


def spaced(arguments: Sequence[str]) -> str:
    """Returns an error message for KEY = VALUE, three words, or "" if there is none."""
    triples = zip(arguments, arguments[1:], arguments[2:], strict=False)
    joined = [f"{key}={value}" for key, equals, value in triples if equals == "="]
    return f"=: neither KEY=VALUE nor a verb; write {' '.join(joined)}, without spaces" if joined else ""


def meant_verb(word: str, verbs: Collection[str]) -> str:
    """Suggests words for a first word that is neither an override nor a verb."""
    if is_key(word):
        return f"; write {word}=VALUE, without spaces around ="
    if word in RUNS:
        return ": a run is zerobench KEY=VALUE ..., a sweep zerobench -m KEY=VALUE,VALUE ..., without a verb"
    return nearest(OTHER_VERBS.get(word, word), verbs)


def type_name(node: Any) -> str:
    """Returns the type of a config node, in words."""
    kind = node._metadata.ref_type if hasattr(node, "_metadata") else Any
    names: dict[Any, str] = {
        int: "an integer", float: "a number", bool: "true or false", str: "text",
        int | str: "an integer or auto", bool | str: "true, false or auto",
    }  # fmt: skip
    name = "a list, as '[one,other]'" if get_origin(kind) is list else names.get(kind, str(kind))
    return name + (" or null" if node._is_optional() else "")
