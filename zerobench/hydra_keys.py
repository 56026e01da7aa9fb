"""Hydra's own keys on a command line: those that mean something here, and a sentence for those that do not."""

from __future__ import annotations

from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig

PARAMS = "hydra.sweeper.params"
"""What Hydra's basic sweeper sweeps over: key -> values, a text as on the command line."""

PLUGINS = {
    "hydra/launcher": "Hydra launches nothing here: zerobench starts every rank itself, one cell after the other, for"
    " cells that run at once disturb one another's times; leave it out",
    "hydra/sweeper": "the cells of a sweep are listed before the first one runs, by Hydra's basic sweeper alone; list"
    " the values, as in -m strategy=zero1,zero2",
}
"""Group of Hydra's -> why its choices, but for "basic", have no effect."""


def problem_of(override: Override) -> str:
    """A sentence for an override that would have no effect, else nothing."""
    key = override.key_or_group
    for group, why in PLUGINS.items():
        inside = key.startswith(group.replace("/", ".") + ".")
        if (key == group and override.value() != "basic") or (inside and not key.startswith(PARAMS)):
            return f"{override.input_line}: {why}"
    return ""


def problem_of_choices(hydra: DictConfig) -> str:
    """The same for what an experiment or a config of the user's chooses."""
    for group, why in PLUGINS.items():
        chosen = hydra.runtime.choices.get(group, "basic")
        if chosen != "basic":
            return f"{group}={chosen}: {why}"
    return ""


def spelled_out(arguments: list[str]) -> list[str]:
    """The same command line with what `hydra.sweeper.params` sweeps over as overrides of its own, before the others;
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
