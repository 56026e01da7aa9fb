"""Hydra's own keys on a command line: those that mean something here, and a sentence for those that do not."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

PARAMS = "hydra.sweeper.params"
"""The key of Hydra's basic sweeper for its axes: key -> values, a text as on the command line."""

PLUGINS = {
    "hydra/launcher": "Hydra launches nothing here: zerobench starts every rank itself, one cell after the other, for"
    " cells that run at once disturb one another's times; leave it out",
    "hydra/sweeper": "the cells of a sweep are listed before the first one runs, by Hydra's basic sweeper alone; list"
    " the values, as in -m strategy=zero1,zero2",
}
"""Group of Hydra's -> why its choices, but for "basic", have no effect."""


HEEDED = ("hydra.mode", PARAMS, "hydra.verbose", *PLUGINS)
"""Those of Hydra's own keys that mean something on a command line; what Hydra runs, writes and logs is not used."""

TARGET = "_target_"
"""The key by which a config of Hydra's names code to import."""


def quoted(text: str) -> str:
    """A text as a value on Hydra's command line, whatever it holds."""
    return QuotedString(text, Quote.single).with_quotes()


def problem_of(override: Override) -> str:
    """A sentence for an override that would have no effect, else nothing."""
    key = override.key_or_group
    if TARGET in (override.input_line or ""):
        return f"{override.input_line}: a command line names no code to import; register it in a script of yours"
    for group, why in PLUGINS.items():
        inside = key.startswith(group.replace("/", ".") + ".")
        if (key == group and override.value() != "basic") or (inside and not key.startswith(PARAMS)):
            return f"{override.input_line}: {why}"
    if not any(key == one or key.startswith(f"{one}.") for one in HEEDED):
        words = "it has no effect: Hydra composes here, and zerobench runs, writes and logs"
        return f"{override.input_line}: {words}; leave it out"
    return ""


def problem_of_choices(hydra: DictConfig) -> str:
    """Returns a sentence on choices of an experiment or of a user's config that would import code, or ""."""
    for group, why in PLUGINS.items():
        chosen = hydra.runtime.choices.get(group, "basic")
        if chosen != "basic":
            return f"{group}={chosen}: {why}"
    foreign = _foreign_code(OmegaConf.to_container(hydra, resolve=False), "hydra")
    return f"{foreign}: a config names no code to import; register it in a script of yours" if foreign else ""


def _foreign_code(node: Any, where: str) -> str:
    """The first key below `node` that names code which is neither Hydra's own nor logging's, with that."""
    for key, value in node.items() if isinstance(node, dict) else ():
        names_code = key in (TARGET, "class", "()") and isinstance(value, str)
        if names_code and not value.startswith(("hydra._internal.", "logging.", "hydra_plugins.")):
            return f"{where}.{key}={value}"
        if found := _foreign_code(value, f"{where}.{key}"):
            return found
    return ""


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
