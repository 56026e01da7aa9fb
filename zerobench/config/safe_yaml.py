"""Reads untrusted yaml: it cannot name code, and files whose aliases expand too far are rejected first."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from ..host.files import read_text

MOST_BYTES = 2**23
MOST_NODES = 200_000
"""Limit on a file's nodes with aliases expanded: a few lines can stand for 10¹² nodes."""


class OnceLoader(yaml.SafeLoader):
    """yaml's safe loader, except that a duplicate key is an error instead of replacing the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep)
        return made


def read_yaml(path: Path) -> Any:
    """Returns the content of a file. Raises ValueError or OSError."""
    text, _ = check_yaml(path)
    try:
        return yaml.load(text, Loader=OnceLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: it is no yaml: {' '.join(str(error).split())[:200]}") from error


def check_yaml(path: Path) -> tuple[str, yaml.Node | None]:
    """Returns the text of a yaml file and its root node, None if it is empty. Raises ValueError for a file that is not
    yaml or expands too far, or OSError.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path}: it has {path.stat().st_size} bytes; at most {MOST_BYTES} are read")
    text = read_text(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        count = _count(root, {})
    except RecursionError:
        raise ValueError(f"{path}: it has lists within lists without end") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{path}: it is no yaml: {' '.join(str(error).split())[:200]}") from error
    if count > MOST_NODES:
        raise ValueError(f"{path}: its aliases (*name) stand for {count:,} values; at most {MOST_NODES:,} are read")
    return text, root


def problems_of_folders(folders: Iterable[Path], groups: Collection[str]) -> list[str]:
    """Returns an error message for each unusable yaml file in these config folders. Files in folders of `groups` are
    choices, which must have keys.
    """
    found = []
    for path in [
        path for where in folders for pattern in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in where.glob(pattern)
    ]:
        try:
            text, root = check_yaml(path)
            if path.parent.name in groups and (problem := _problem_of_choice(path.parent.name, text, root)):
                found.append(f"{path}: {problem}")
        except (OSError, ValueError) as error:
            found.append(str(error))
    return found


def _problem_of_choice(group: str, text: str, root: yaml.Node | None) -> str:
    """Returns the end of an error message if a choice's content is no mapping, or replaces all of `hydra`; else ""."""
    if root is None:
        return ""
    if not isinstance(root, yaml.MappingNode):
        return f"it holds {text.strip()[:40]!r}; a choice of {group} has KEY: VALUE"
    whole = any(key.value == "hydra" and not isinstance(value, yaml.MappingNode) for key, value in root.value)
    return "hydra: it has parts; set one of them, as hydra: {sweeper: {params: ...}}" if whole else ""


def _count(node: Any, known: dict[int, float]) -> float:
    """Returns the number of nodes below `node` with aliases expanded; infinite if a node contains itself."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = float("inf")  # while it is counted: a node that has it again is below it
        parts = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_count(one, known) for one in parts)
    return known[id(node)]
