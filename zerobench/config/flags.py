"""The command line's flags, ours and Hydra's, distinguished from overrides."""

from __future__ import annotations

import os
from pathlib import Path

FLAGS_WITH_VALUE = (
    "--columns",
    "--price",
    "--config-dir",
    "-cd",
    "--config-path",
    "-cp",
    "--config-name",
    "-cn",
    "--package",
    "-p",
    "--cfg",
    "-c",
    "--experimental-rerun",
)
FLAGS_WITH_OPTIONAL_VALUE = {"--info": "all", "-i": "all"}
"""Flag -> its value if none is given."""

FLAGS_ALONE = (
    "--help", "-h", "--multirun", "-m", "--run", "-r", "--resolve", "--version", "--hydra-help", "--dry-run",
    "--shell-completion", "-sc", "--quiet", "-q",
)  # fmt: skip

NOT_HERE = {
    **dict.fromkeys(
        ("--config-name", "-cn", "--config-path", "-cp"),
        "zerobench has one primary config; put what differs into your own experiment, FOLDER/experiment/NAME.yaml,"
        " and use --config-dir FOLDER experiment=NAME",
    ),
    "--experimental-rerun": "it unpickles a file, which can run code; a run's config.yaml says what to repeat",
}
"""Rejected Hydra flag -> the reason."""

CONFIG_DIR = ("--config-dir", "-cd")

FLAGS_OF_RUNS = ("--multirun", "-m", "--run", "-r", *CONFIG_DIR)
"""Flags of commands that run cells; all other flags ask Hydra for something else."""

COLUMNS, PRICE = "--columns", "--price"


def take_value(arguments: list[str], flag: str) -> tuple[list[str], str | None]:
    """Takes a flag with its value, such as --columns NAME,NAME, out of a command line. Returns the rest, and the value,
    or None if it is absent.
    """
    for index, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name == flag:
            rest = arguments[index + 1 :]
            rest, later = take_value(rest if equals else rest[1:], flag)  # the last one counts
            value = value if equals else "".join(arguments[index + 1 : index + 2])
            return arguments[:index] + rest, value if later is None else later
    return arguments, None


def only_compose(flags: list[str]) -> bool:
    """Whether `flags` ask Hydra only to compose configs."""
    return all(flag.partition("=")[0] in FLAGS_OF_RUNS for flag in flags if flag.startswith("-"))


def asks_for_config(flags: list[str]) -> bool:
    """Whether `flags` ask for the composed config alone: --cfg job."""
    arguments = " ".join(flags).replace("=", " ").split()
    return arguments[:2] in (["--cfg", "job"], ["-c", "job"]) and only_compose(arguments[2:])


def not_a_verb(arguments: list[str], verbs: tuple[str, ...]) -> list[str]:
    """Returns an error message for a first word that is neither a verb, a flag nor KEY=VALUE. It is checked before the
    flags, which may belong to a misspelled verb.
    """
    word = arguments[0] if arguments else "-"
    if not word.replace("-", "_").isidentifier() or word.startswith("-") or arguments[1:2] == ["="]:
        return []
    from .keys import meant_verb  # it loads torch, which takes a second

    return [f"{word}: neither KEY=VALUE nor a verb{meant_verb(word, verbs)}; see zerobench --help"]


def unknown_flags(flags: list[str]) -> list[str]:
    """Returns error messages for flags that do not exist or are rejected, and for a --config-dir without a folder."""
    valid = [*FLAGS_ALONE, *FLAGS_WITH_VALUE, *FLAGS_WITH_OPTIONAL_VALUE]
    wrong = [f for f in flags if f.startswith("-") and f.partition("=")[0] not in valid]
    sentences = []
    if wrong:
        from .keys import meant_flag  # it loads torch, which takes a second

        spelled_out = [flag for flag in valid if flag[1] == "-"]
        sentences = [f"{flag}: no such flag{meant_flag(flag, spelled_out)}" for flag in wrong]
    sentences += [f"{flag}: {NOT_HERE[name]}" for flag in flags if (name := flag.partition("=")[0]) in NOT_HERE]
    for flag, following in zip(flags, [*flags[1:], ""], strict=False):
        name, equals, value = flag.partition("=")
        value = value if equals else following
        if name in CONFIG_DIR and not os.path.isdir(value):
            sentences.append(f"{f'{name} {value:.200}'.strip()}: there is no such folder; name one that has yaml files")
    return sentences


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str], list[Path]]:
    """Returns Hydra's flags with their values, the overrides, and a user's folders that add choices (--config-dir)."""
    flags: list[str] = []
    overrides: list[str] = []
    dirs: list[Path] = []
    rest = list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("-"):
            overrides.append(argument)
            continue
        flags.append(argument)
        name, _, value = argument.partition("=")
        last = not rest or "=" in rest[0] or rest[0].startswith("-")
        alone = name in FLAGS_WITH_OPTIONAL_VALUE and not value and last
        if alone:
            flags.append(FLAGS_WITH_OPTIONAL_VALUE[name])
        elif name in (*FLAGS_WITH_VALUE, *FLAGS_WITH_OPTIONAL_VALUE) and not value:
            flags += rest[:1]
            value = rest.pop(0) if rest else ""
        if name in CONFIG_DIR and value:
            dirs.append(Path(value))
    return flags, overrides, dirs
