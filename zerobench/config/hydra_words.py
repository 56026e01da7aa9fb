"""Errors of Hydra and OmegaConf in words that a person can use."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .schema import SCHEMAS

ENDLESS = "configs take one another in, or values name one another, without end"


_WRAPPED = re.compile(r"\b\w+ raised while (?:resolving interpolation|composing config): |^\w+Error: ")
"""The name of an exception of Python's before its message."""

_NAME_ALONE = re.compile(r"\w*(Error|Exception|Interrupt|Exit)")
"""The rest of an error without a message."""


def first_line(error: BaseException) -> str:
    """Returns an error's message, in one line."""
    return (str(error).strip() or "no message").splitlines()[0]


def reason(error: BaseException) -> str:
    """Returns the end of a sentence that an error of composing makes: its first line, with what a colon announces."""
    if isinstance(error, RecursionError) or "RecursionError raised" in str(error):
        return ENDLESS
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    words = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    key = getattr(error, "full_key", None)
    words = _WRAPPED.sub("", words)
    words = f"{key}: {words}" if key and key not in words else words
    known = isinstance(error, HydraException | OmegaConfBaseException) or type(error) is ValueError
    return words if known else f"{type(error).__name__}: {words}"


def not_composed(words: list[str], error: BaseException) -> str:
    """Returns a sentence for a command line that Hydra cannot compose, be it for a plugin, all of which it imports."""
    if "mutable default <class 'hydra_plugins." in str(error):
        why = f"a plugin of Hydra's cannot be imported here: {reason(error)}"
        return f"{why}; uninstall it, or install a later version of it"
    return f"{' '.join(words)}: it cannot be composed: {reason(error)}"


def problem_of_names(config: DictConfig, keys: Iterable[str]) -> str:
    """Returns a sentence for one of `keys`, each the name of a schema, that a yaml has set to another name, or that it
    has set where it begins with no schema, or "". All have a value.
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
    """Returns a sentence for a key that has no value yet, as in a yaml that does not begin with our schema, or ""."""
    missing = sorted(OmegaConf.missing_keys(config))
    if not missing:
        return ""
    group = missing[0].partition(".")[0]
    return f"{missing[0]}: it has no value; {_begun_with(group) if group in SCHEMAS else 'give it one'}"


def _begun_with(group: str) -> str:
    kinds = ", ".join(SCHEMAS[group])
    return f"begin its yaml with 'defaults: [/schema/{group}/KIND@_here_]', where KIND is one of {kinds}"


def sentence_of(said: str) -> str:
    """Returns Hydra's output before its error, without its hints and the lines of a traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
    if any("Expecting one subcommand" in line for line in lines):
        return "--shell-completion: say what to do, as in --shell-completion install=bash, uninstall=bash or query=bash"
    told = [line for line in lines if not line.startswith(("Set the environment variable", "See http", "usage:"))]
    if not told or _NAME_ALONE.fullmatch(told[-1]):
        return "Hydra gave up without a word"
    return f"Hydra: {_WRAPPED.sub('', told[-1] if told[0].startswith('Error executing') else told[0])}"
