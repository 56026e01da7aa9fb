"""Reads yaml files, with errors that name the file."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import yaml

from ..host.files import read_text


class OnceLoader(yaml.SafeLoader):
    """yaml's safe loader, except that a duplicate key is an error instead of replacing the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = [key for number, key in enumerate(keys) if key in keys[:number]]
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", node.start_mark)
        mapping: dict[Any, Any] = super().construct_mapping(node, deep)
        return mapping


def read_yaml(path: Path) -> Any:
    """Returns the content of a file. Raises ValueError or OSError."""
    text = read_text(path)
    try:
        return yaml.load(text, Loader=OnceLoader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        raise ValueError(f"{path}: it is no yaml: {' '.join(str(error).split())[:200]}") from error


def problems_of_folders(folders: Iterable[Path], groups: Collection[str]) -> list[str]:
    """Returns an error message for each damaged yaml file in these config folders. A file in a folder of `groups` is a
    choice, which holds a mapping.
    """
    problems = []
    for path in [
        path for folder in folders for pattern in ("*.yaml", "*/*.yaml", "*/*/*.yaml") for path in folder.glob(pattern)
    ]:
        group = path.parent.name
        try:
            content = read_yaml(path)
        except (OSError, ValueError) as error:
            problems.append(str(error))
            continue
        if group in groups and not isinstance(content, dict | None):
            problems.append(f"{path}: it holds {str(content)[:40]!r}; a choice of {group} has KEY: VALUE")
    return problems
