"""Hydra's own keys on a command line: those that mean something here, and a sentence for those that do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from . import launcher, sweeper

PARAMS = "hydra.sweeper.params"
"""The key of Hydra's basic sweeper for its axes: key -> values, a text as on the command line."""

VERBOSE = "hydra.verbose"

HEEDED = ("hydra.mode", PARAMS, VERBOSE, launcher.GROUP, launcher.SETTINGS, sweeper.GROUP)
"""Those of Hydra's own keys that mean something on a command line; what Hydra runs, writes and logs is not used."""

TARGET = "_target_"
"""The key by which a config of Hydra's names code to import."""


NAMES_CODE = (TARGET, "class", "()")
"""Keys by which a config names code: Hydra's, and two of logging's."""

FROM_CONFIGS = (
    "hydra.mode", "hydra.verbose", "hydra.sweeper", "hydra.launcher", "hydra.runtime", "hydra.overrides",
    "hydra.job.name", "hydra.job.id", "hydra.job.num", "hydra.job.override_dirname", "hydra.job.config_name",
)  # fmt: skip
"""Keys of Hydra's, or their beginnings, that an experiment may set or that follow from it."""

INSTANTIATED = ("hydra.launcher.", "hydra.sweeper.")
"""Parts of Hydra's config from which it makes objects."""

NO_CODE = "a config names no code to import; register it in a script of yours"

NO_EFFECT = "it has no effect: Hydra composes here, and zerobench runs, writes and logs; leave it out"


def launching(words: list[str]) -> tuple[str, ...]:
    """Returns the overrides that choose a launcher and its settings."""
    return tuple(word for word in words if word.lstrip("+").startswith((launcher.GROUP, f"{launcher.SETTINGS}.")))


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever it holds."""
    return QuotedString(text, Quote.single).with_quotes()


def problem_of(override: Override) -> str:
    """A sentence for an override that would have no effect, else nothing."""
    key = override.key_or_group
    if TARGET in (override.input_line or ""):
        return f"{override.input_line}: a command line names no code to import; register it in a script of yours"
    if key.startswith((launcher.GROUP, f"{launcher.SETTINGS}.")) and override.is_sweep_override():
        return f"{override.input_line}: a sweep has one launcher, and its jobs one setting; run the sweeps one by one"
    if key == launcher.GROUP:
        return launcher.problem_of_name(str(override.value()))
    if sweeper.sweeping([override.input_line or ""]) and not key.startswith(PARAMS):
        return sweeper.problem_of_override(override)
    if key.startswith(VERBOSE) and (key != VERBOSE or not isinstance(override.value(), bool | str | list)):
        return f"{override.input_line}: wants true, false, or names of loggers, as in [NAME, NAME]"
    if not any(key == one or key.startswith(f"{one}.") for one in HEEDED):
        return f"{override.input_line}: {NO_EFFECT}"
    return ""


def problem_of_choices(hydra: DictConfig, usual: DictConfig) -> str:
    """Returns a sentence on choices of an experiment or of a user's config that would import code, or that have no
    effect, else "". `usual`: Hydra's part of the config without them.
    """
    if problem := problem_of_code(hydra):
        return problem
    values, before = (dict(_leaves(OmegaConf.to_container(one, resolve=False), "hydra")) for one in (hydra, usual))
    changed = {key: value for key, value in values.items() if key not in before or before[key] != value}
    for key, value in changed.items():
        if key.split(".")[-1] in NAMES_CODE and isinstance(value, str) and not key.startswith(INSTANTIATED):
            return f"{key}={value}: {NO_CODE}"
    moved = next((key for key in changed if not key.startswith(FROM_CONFIGS)), "")
    return f"{moved}={changed[moved]}: {NO_EFFECT}" if moved else ""


def problem_of_code(hydra: DictConfig) -> str:
    """Returns a sentence for a launcher or a sweeper whose config names code that no installed plugin's does, or ""."""
    for key, value in _leaves(OmegaConf.to_container(hydra, resolve=False), "hydra"):
        if key.startswith(INSTANTIATED) and key.endswith(f".{TARGET}") and value not in sweeper.targets():
            return f"{key}={value}: {NO_CODE}"
    return ""


def _leaves(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yields key and value of everything below `node` that has no parts."""
    if not isinstance(node, dict | list) or not node:
        yield where, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{where}.{key}")


def spelled_out(arguments: list[str]) -> list[str]:
    """Returns the command line with the axes of `hydra.sweeper.params` as overrides of their own, before the others;
    what they name too has their values, as Hydra has it.
    """
    others = [one for one in arguments if PARAMS not in one]
    given = {one.lstrip("+").split("=")[0] for one in others}
    swept = [line for one in arguments if PARAMS in one for line in _lines_of(one)]
    return [line for line in swept if line.split("=")[0] not in given] + others


def _lines_of(argument: str) -> list[str]:
    try:
        override = OverridesParser.create().parse_override(argument)
    except HydraException:
        return [argument]  # the parser will be asked again, and answered for
    key = override.key_or_group
    value = argument.partition("=")[2] if override.is_sweep_override() else override.value()
    if key == PARAMS and isinstance(value, dict):
        return [f"{name!s}={_text(one)}" for name, one in value.items()]
    if key.startswith(f"{PARAMS}."):
        return [f"{key.removeprefix(f'{PARAMS}.')}={_text(value)}"]
    return [argument]


def _text(value: Any) -> str:
    """A value as a config's text has it."""
    if isinstance(value, QuotedString):
        return str(value.text)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
