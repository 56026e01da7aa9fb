"""Problems of configs that Hydra composes: values that they lack, and errors in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import takewhile

from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .schema import SCHEMAS


def quoted(text: str) -> str:
    """Quotes any text as a value on Hydra's command line."""
    return QuotedString(text, Quote.single).with_quotes()


ENDLESS = "configs take one another in, or values name one another, without end"


_WRAPPED = re.compile(r"\b\w+ raised while (?:resolving interpolation|composing config): |^\w+Error: ")
"""The name of a Python exception before its message."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip() or "no message").splitlines()[0]


def reason(error: BaseException) -> str:
    """Returns the reason from a composition error: its first line, and the next line too if it ends with a colon."""
    if isinstance(error, RecursionError) or "RecursionError raised" in str(error):
        return ENDLESS
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    message = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    options = [number for number, line in enumerate(lines, 1) if line.startswith("Available options in ")]
    if options:
        message += f" (valid: {', '.join(takewhile(lambda line: ' ' not in line, lines[options[0] :]))})"
    key = getattr(error, "full_key", None)
    message = _WRAPPED.sub("", message)
    message = f"{key}: {message}" if key and key not in message else message
    is_plain = isinstance(error, HydraException | OmegaConfBaseException) or type(error) is ValueError
    return message if is_plain else f"{type(error).__name__}: {message}"


def not_composed(arguments: list[str], error: BaseException) -> str:
    """Returns the error message for a command line that Hydra cannot compose, or if a plugin fails to import."""
    if "mutable default <class 'hydra_plugins." in str(error):
        why = f"a Hydra plugin cannot be imported here: {reason(error)}"
        return f"{why}; uninstall it, or install a later version of it"
    return f"{' '.join(arguments)}: it cannot be composed: {reason(error)}"


def problem_of_names(config: DictConfig, keys: Iterable[str]) -> str:
    """Returns an error message if a yaml sets one of `keys`, each the name of a schema, to another name or without
    beginning with a schema, else "". All keys must have a value.
    """
    for key in keys:
        group, _, last = key.partition(".")
        schema = getattr(OmegaConf.get_type(config, group), last, None)
        said = config[group][last]
        if schema == MISSING:
            return f"{key}={said}: {_begun_with(group)}"
        if isinstance(schema, str) and said != schema:
            return f"{key}={said}: the schema of its yaml has {schema}; leave it out, or begin with another schema"
    return ""


def problem_of_missing(config: DictConfig) -> str:
    """Returns an error message for a key without a value, as in a yaml that does not begin with our schema, else ""."""
    missing = sorted(OmegaConf.missing_keys(config))
    if not missing:
        return ""
    group = missing[0].partition(".")[0]
    return f"{missing[0]}: it has no value; {_begun_with(group) if group in SCHEMAS else 'give it one'}"


def _begun_with(group: str) -> str:
    kinds = ", ".join(SCHEMAS[group])
    return f"begin its yaml with 'defaults: [/schema/{group}/KIND@_here_]', where KIND is one of {kinds}"
