"""The reference of groups and keys: default, range, unit, meaning, and names elsewhere, from the schemas."""

from __future__ import annotations

from functools import cache
from typing import Any, get_args, get_type_hints

from tools.docs.others import OTHERS, Names
from zerobench.config import bounds, help
from zerobench.config.compose import checker
from zerobench.config.meanings import GROUPS, KEYS
from zerobench.config.overrides import Overrides
from zerobench.config.resolve import CHOICES
from zerobench.config.schema import SCHEMAS
from zerobench.sizes import show_bytes

HEAD = "| key | default | range | meaning | DeepSpeed | torch | transformers |\n" + "|" + " --- |" * 7
LARGE = 2**60

RULES: dict[str, str] = {
    "node_size": "a divisor of `world_size`",
    "shard_group": "a divisor of `world_size`",
    "rank": "0 to `world_size` - 1",
    "micro_batch": "at least 1",
    "batch": "a multiple of `world_size` · `accumulation`",
    "clip": "above 0",
    "search.memory_limit": "a size, as `96 MiB`",
    "model.layers": "at least 1",
    "model.hidden": "a multiple of `heads`",
    "model.heads": "a divisor of `hidden`",
    "model.vocabulary": "at least that of the data",
    "model.positions": "at least `sequence`",
    "huggingface.options": "a mapping",
    "huggingface.config": "a config.json, or its folder",
    "launch.group_by": "keys, with commas between them, or all",
    "launch.retry": "a list of `crash`, `timeout`, `oom`",
    "huggingface.architecture": "a causal language model of transformers",
    "search.checkpointing": "a list of `false`, `true`",
    "results_dir": "a folder",
    "objective": "columns of numbers, with commas between them",
    "data.path": "a file",
    "offload.path": "a folder",
}
"""Key -> what is right, where it is no fixed range."""

WORDS: dict[str, tuple[str, ...]] = {
    "device": ("auto", "cpu", "cuda"),
    "backend": ("auto", "gloo", "nccl", "simulated"),
    "clip_norm": ("2", "inf"),
    "strategy.accumulate": ("every", "last"),
    "strategy.mode": ("own", "paper", "vendor"),
    "strategy.reduce_with": ("reduce_scatter", "all_reduce"),
    "strategy.construct": ("plain", "meta"),
    "strategy.keep_root": ("auto", "true", "false"),
    "optimizer.implementation": ("auto", "fused", "foreach", "loop"),
    "precision.gradient_dtype": ("fp32", "bf16", "fp16"),
    "precision.wire_dtype": ("fp32", "bf16", "fp16"),
    "measure.check_training": ("auto", "true", "false"),
}
"""Key -> the words that it takes, beside null where that is its default; a test tries each."""


def page() -> str:
    """Keys of their own, then each group with its choices and keys, then other sections."""
    check = checker([])
    usual, defaults = dict(help._leaves(check.config_of([]))), _defaults(check)
    sections = [
        "## Keys of a run",
        "Those that belong to no group.",
        _table({key: {(): usual[key]} for key in _alone()}),
    ]
    for group, choices in check.choices.items():
        sections += [f"## {group}", f"{_sentence(GROUPS[group])}{_elsewhere(group)}", _choices(group, choices, check)]
        if mine := defaults.get(group):
            sections.append(_table({key: _shared(values, len(choices)) for key, values in mine.items()}))
    for section in dict.fromkeys(key.split(".")[0] for key in KEYS if "." in key):
        if section not in check.choices:
            mine = {key: {(): usual[key]} for key in KEYS if key.startswith(f"{section}.") and key in usual}
            sections += [f"## {section}", f"{_sentence(GROUPS[section])}{_elsewhere(section)}", _table(mine)]
    return "\n\n".join(sections)


def _alone() -> list[str]:
    return [key for key in KEYS if "." not in key]


def _sentence(line: str) -> str:
    return f"{line[:1].upper()}{line[1:]}."


def _elsewhere(group: str) -> str:
    names = OTHERS.get(group, Names())
    said = [f"{system} {what}" for system, what in zip(("DeepSpeed", "torch", "transformers"), names, strict=True)]
    return f" Elsewhere: {'; '.join(one for one in said if not one.endswith('–'))}." if group in OTHERS else ""


def _choices(group: str, choices: list[str], check: Overrides) -> str:
    lines = [f"| `{group}={name}` | {_cell(help._line_of(group, name, check))} |" for name in choices]
    return "\n".join(["| choice | |", "| --- | --- |", *lines])


def _defaults(check: Overrides) -> dict[str, dict[str, dict[str, Any]]]:
    """Group -> key -> choice -> default. One choice of each group is composed at a time, of all groups at once."""
    groups = {group: choices for group, choices in check.choices.items() if group != "experiment"}
    found: dict[str, dict[str, dict[str, Any]]] = {group: {} for group in groups}
    for number in range(max(map(len, groups.values()))):
        chosen = {group: choices[number] for group, choices in groups.items() if number < len(choices)}
        for key, value in help._leaves(check.config_of([f"{group}={choice}" for group, choice in chosen.items()])):
            if (group := key.split(".")[0]) in chosen and "." in key:
                found[group].setdefault(key, {})[chosen[group]] = value
    return found


def _shared(values: dict[str, Any], number: int) -> dict[tuple[str, ...], Any]:
    shown = {choice: repr(value) for choice, value in values.items()}
    alike = {text: tuple(c for c, other in shown.items() if other == text) for text in shown.values()}
    if len(alike) == 1 and len(values) == number:
        return {(): next(iter(values.values()))}
    return {choices: values[choices[0]] for choices in alike.values()}


def _table(defaults: dict[str, dict[tuple[str, ...], Any]]) -> str:
    return "\n".join([HEAD, *(_row(key, values) for key, values in defaults.items())])


def _row(key: str, values: dict[tuple[str, ...], Any]) -> str:
    unit, meaning = KEYS.get(key, ("", "an option of its builder"))
    said = _cell(meaning) + f" [{unit}]" * bool(unit)
    shown = "; ".join(f"`{show(key, value)}`" + f" ({', '.join(of)})" * bool(of) for of, value in values.items())
    cells = [f"`{key}`", shown, range_of(key, next(iter(values.values()))), said, *OTHERS.get(key, Names())]
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def show(key: str, value: Any) -> str:
    """A default as a command line has it, of bytes also in words."""
    if value is None:
        return "null"
    sized = isinstance(value, int) and key.endswith("_bytes") and value >= 1024
    return f"{value} ({show_bytes(value)})" if sized else help._show(value)


def range_of(key: str, default: Any) -> str:
    """Least and greatest value, or the words; empty where only the meaning says what is right."""
    if words := WORDS.get(key) or CHOICES.get(key):
        return ", ".join(f"`{help._show(one)}`" for one in words)
    if isinstance(default, bool) or key in _flags():
        return "`false`, `true`"
    if key not in bounds.LIMITS:
        return RULES.get(key, RULES.get(key.replace("huggingface.", "model."), ""))
    least, most = (_number(one, key.endswith("_bytes")) for one in bounds.LIMITS[key])
    return f"{least} to {most}" + f", or `{bounds.AUTO}`" * (key in bounds.MAY_BE_AUTO)


@cache
def _flags() -> set[str]:
    """Keys of true and false that may be null."""
    schemas = [(group, schema) for group, choices in SCHEMAS.items() for schema in choices.values()]
    hints = {f"{group}.{name}": kind for group, one in schemas for name, kind in get_type_hints(one).items()}
    return {key for key, kind in hints.items() if set(get_args(kind)) == {bool, type(None)}}


def _number(value: float, is_size: bool) -> str:
    if is_size:
        return show_bytes(value) if value else "0"
    return f"{value:,.0f}".replace(",", " ") if value >= 1 and value == int(value) and value < LARGE else f"{value:g}"
