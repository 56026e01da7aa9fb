"""Hydra's own keys on a command line, error messages for those without effect here, and plain words for errors from
Hydra and OmegaConf.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from . import launcher, sweeper
from .schema import SCHEMAS

PARAMS = "hydra.sweeper.params"
"""Key for the axes of the basic sweeper in Hydra: key -> values, as text as on the command line."""

VERBOSE = "hydra.verbose"

HEEDED = ("hydra.mode", PARAMS, VERBOSE, launcher.GROUP, launcher.SETTINGS, sweeper.GROUP)
"""Hydra keys that have an effect on a command line; Hydra's own jobs, files and logs are not used."""

TARGET = "_target_"
"""The key by which a Hydra config names code to import."""


NAMES_CODE = (TARGET, "class", "()")
"""Keys by which a config names code: Hydra's, and two of logging's."""

FROM_CONFIGS = (
    "hydra.mode", "hydra.verbose", "hydra.sweeper", "hydra.launcher", "hydra.runtime", "hydra.overrides",
    "hydra.job.name", "hydra.job.id", "hydra.job.num", "hydra.job.override_dirname", "hydra.job.config_name",
)  # fmt: skip
"""Hydra keys, or prefixes of keys, that an experiment may set or that follow from it."""

INSTANTIATED = ("hydra.launcher.", "hydra.sweeper.")
"""Parts of Hydra's config from which it makes objects."""

NO_CODE = "a config names no code to import; register it in your own script"

NO_EFFECT = "it has no effect: Hydra composes here, and zerobench runs, writes and logs; leave it out"


def launching(words: list[str]) -> tuple[str, ...]:
    """Returns the overrides that choose a launcher and its settings."""
    return tuple(word for word in words if word.lstrip("+").startswith((launcher.GROUP, f"{launcher.SETTINGS}.")))


def quoted(text: str) -> str:
    """Quotes any text as a value on Hydra's command line."""
    return QuotedString(text, Quote.single).with_quotes()


def problem_of(override: Override) -> str:
    """Returns an error message for an override that is not allowed or would have no effect, else ""."""
    key = override.key_or_group
    if TARGET in (override.input_line or ""):
        return f"{override.input_line}: a command line names no code to import; register it in your own script"
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
    """Returns an error message for choices of an experiment or a user's config that would import code or have no
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
    """Returns an error message for a launcher or sweeper whose config names code of no installed plugin, else ""."""
    for key, value in _leaves(OmegaConf.to_container(hydra, resolve=False), "hydra"):
        if key.startswith(INSTANTIATED) and key.endswith(f".{TARGET}") and value not in sweeper.targets():
            return f"{key}={value}: {NO_CODE}"
    return ""


def _leaves(node: Any, where: str) -> Iterator[tuple[str, Any]]:
    if not isinstance(node, dict | list) or not node:
        yield where, node
        return
    for key, value in node.items() if isinstance(node, dict) else enumerate(node):
        yield from _leaves(value, f"{where}.{key}")


def spelled_out(arguments: list[str]) -> list[str]:
    """Returns the command line with the axes of `hydra.sweeper.params` as separate overrides, before the others, which
    take precedence, as in Hydra.
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
    """Formats a value as a config writes it."""
    if isinstance(value, QuotedString):
        return str(value.text)
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


ENDLESS = "configs take one another in, or values name one another, without end"


_WRAPPED = re.compile(r"\b\w+ raised while (?:resolving interpolation|composing config): |^\w+Error: ")
"""The name of a Python exception before its message."""

_NAME_ALONE = re.compile(r"\w*(Error|Exception|Interrupt|Exit)")
"""What remains of an error without a message."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message."""
    return (str(error).strip() or "no message").splitlines()[0]


def reason(error: BaseException) -> str:
    """Returns the reason from a composition error: its first line, and the next line too if it ends with a colon."""
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
    """Returns the error message for a command line that Hydra cannot compose, or if a plugin fails to import."""
    if "mutable default <class 'hydra_plugins." in str(error):
        why = f"a Hydra plugin cannot be imported here: {reason(error)}"
        return f"{why}; uninstall it, or install a later version of it"
    return f"{' '.join(words)}: it cannot be composed: {reason(error)}"


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


def sentence_of(said: str) -> str:
    """Returns an error message made from Hydra's output, without its hints and traceback."""
    lines = [line.strip() for line in said.splitlines() if line.strip() and not line.startswith((" ", "Traceback"))]
    if any("Expecting one subcommand" in line for line in lines):
        return "--shell-completion: say what to do, as in --shell-completion install=bash, uninstall=bash or query=bash"
    told = [line for line in lines if not line.startswith(("Set the environment variable", "See http", "usage:"))]
    if not told or _NAME_ALONE.fullmatch(told[-1]):
        return "Hydra gave up without a word"
    return f"Hydra: {_WRAPPED.sub('', told[-1] if told[0].startswith('Error executing') else told[0])}"
