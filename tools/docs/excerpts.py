"""Excerpts of the code for the explanations: a definition by its file and name, as it stands today."""

from __future__ import annotations

import ast
import textwrap
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def excerpt(path: str, name: str) -> str:
    """The lines of a class, function, method or module-level value, dedented; for __doc__ the module's docstring.

    Raises ValueError if the file or the name does not exist.
    """
    file = HERE / path
    if not file.is_file():
        raise ValueError(f"{path}: a page quotes this file, and it does not exist")
    text = file.read_text()
    node: ast.AST = ast.parse(text)
    if name == "__doc__":
        assert isinstance(node, ast.Module)
        return ast.get_docstring(node) or ""
    for part in name.split("."):
        inner = [one for one in getattr(node, "body", []) if part in _names_of(one)]
        if not inner:
            raise ValueError(f"{path}: a page quotes {name}, which is not there")
        node = inner[0]
    assert isinstance(node, ast.stmt)
    first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", []))])
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : node.end_lineno]))


def _names_of(node: ast.AST) -> list[str]:
    """Names that a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def fenced(path: str, name: str) -> str:
    """The block `source PATH NAME` of a page. Raises ValueError as `excerpt`."""
    language = "text" if name == "__doc__" else "python"
    return f'```{language} title="{path}"\n{excerpt(path, name)}\n```'
