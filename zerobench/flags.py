"""The command line's flags, ours and Hydra's, told from overrides."""

from __future__ import annotations

from pathlib import Path

from .keys import nearest

FLAGS_WITH_VALUE = (
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
FLAGS_WITH_OPTIONAL_VALUE = ("--info", "-i")
FLAGS_ALONE = (
    "--help", "-h", "--multirun", "-m", "--run", "-r", "--resolve", "--version", "--hydra-help", "--dry-run",
    "--shell-completion", "-sc",
)  # fmt: skip


def unknown_flags(flags: list[str]) -> list[str]:
    """Sentences for flags that neither we nor Hydra have."""
    known = [*FLAGS_ALONE, *FLAGS_WITH_VALUE, *FLAGS_WITH_OPTIONAL_VALUE]
    wrong = [f for f in flags if f.startswith("-") and f.partition("=")[0] not in known]
    return [
        f"{flag}: no such flag{nearest(flag.partition('=')[0], [k for k in known if k[1] == '-'])}" for flag in wrong
    ]


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str], list[Path]]:
    """Hydra's flags with their values, the overrides, and folders of the user's that add choices (--config-dir)."""
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
        takes = name in FLAGS_WITH_VALUE and not value
        if takes or (name in FLAGS_WITH_OPTIONAL_VALUE and rest and "=" not in rest[0]):
            flags += rest[:1]
            value = rest.pop(0) if rest else ""
        if name in ("--config-dir", "-cd") and value:
            dirs.append(Path(value))
    return flags, overrides, dirs
