"""What pages quote: a definition of the code as it stands today, an entry of the Python API, a command's output.

An entry is the signature and the docstring of an object and of its members, as Markdown. Docstrings are written for a
terminal: a line that begins with a name and two spaces or more, or with a name in backticks and a colon, begins an
item; the lines up to the next item or an empty line continue it.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from tools.docs.render import table
from zerobench.records.describe import column_meanings

HERE = Path(__file__).resolve().parents[2]
RECORDED = HERE / "results/published/questions"

ITEM = re.compile(r"^(?:(`[^`]+`(?:, `[^`]+`)*)(?: {2,}|: )|(\w+) {2,})(\S.*)$")
WIDTH = 100


# -- definitions -----------------------------------------------------------------------------------


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
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [one.id for one in targets if isinstance(one, ast.Name)]


def fenced(path: str, name: str) -> str:
    """The block `source PATH NAME` of a page. Raises ValueError as `excerpt`."""
    language = "text" if name == "__doc__" else "python"
    return f'```{language} title="{path}"\n{excerpt(path, name)}\n```'


# -- recorded output -------------------------------------------------------------------------------


def output(name: str) -> str:
    """The block `output NAME`: a command and what it printed, as `make questions` recorded them."""
    command, _, printed = (RECORDED / f"{name}.txt").read_text().partition("\n")
    return "```bash\n{}\n```\n\n```text\n{}\n```".format(command.removeprefix("$ "), printed.strip("\n"))


# -- entries of the API ----------------------------------------------------------------------------


def entry(name: str, members: str = "") -> str:
    """The block `api NAME MEMBER,MEMBER`: an object by its dotted name, with some of its members.

    Raises ValueError if it does not exist.
    """
    try:
        found = resolve_name(name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"a page documents {name}, which does not exist") from error
    parts = [f"### {name}", described(found, name.rpartition(".")[2])]
    for member in filter(None, members.split(",")):
        one = inspect.getattr_static(found, member, None)
        said = described(one, member) if one is not None else attribute(found, member)
        parts += [f"#### {name.rpartition('.')[2]}.{member}", said]
    return "\n\n".join(parts)


def attribute(kind: type, name: str) -> str:
    """An attribute that `__init__` sets, and the docstring below it. Raises ValueError if there is none."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind.__init__))).body[0].body
    for node, after in pairwise(body):
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if getattr(target, "attr", "") != name or not isinstance(after, ast.Expr):
            continue
        if isinstance(after.value, ast.Constant):
            kind_of = f": {ast.unparse(node.annotation)}" if isinstance(node, ast.AnnAssign) else ""
            return f"```text\n{name}{kind_of}\n```\n\n{inspect.cleandoc(str(after.value.value))}"
    raise ValueError(f"a page documents {kind.__name__}.{name}, which has no docstring")


def described(found: Any, name: str) -> str:
    """Signature, docstring, and of a dataclass whose fields have docstrings a table of these."""
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    code = f"```text\n{signature(found, name)}\n```"
    fields = column_meanings(found) if isinstance(found, type) else {}
    rows = [[f"`{field}`", meaning] for field, meaning in fields.items() if meaning]
    parts = [code, listed(inspect.getdoc(found) or ""), table(["field", "meaning"], rows, 2) if rows else ""]
    return "\n\n".join(filter(None, parts))


def signature(found: Any, name: str) -> str:
    """The signature on one line if it fits, else an argument per line; a property is its name and type."""
    if isinstance(found, property) or not callable(found):
        getter = getattr(found, "fget", None) or getattr(found, "func", None)
        kind = getattr(getter, "__annotations__", {}).get("return", "")
        return f"{name}: {kind}" if kind else name
    shown = inspect.signature(found)
    parameters = [one for one in shown.parameters.values() if one.name not in ("self", "cls")]
    arguments = [argument(one) for one in parameters]
    first = next((n for n, one in enumerate(parameters) if one.kind is one.KEYWORD_ONLY), None)
    if first is not None and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        arguments.insert(first, "*")
    plain = isinstance(found, type) or shown.return_annotation is inspect.Signature.empty
    returned = "" if plain else f" -> {shown.return_annotation}"
    line = f"{name}({', '.join(arguments)}){returned}"
    return line if len(line) <= WIDTH else f"{name}(\n    {f',{chr(10)}    '.join(arguments)},\n){returned}"


def argument(one: inspect.Parameter) -> str:
    """An argument with its annotation, as the code has it, and its default."""
    stars = {one.VAR_POSITIONAL: "*", one.VAR_KEYWORD: "**"}.get(one.kind, "")
    kind = "" if one.annotation is one.empty else f": {one.annotation}"
    if one.default is one.empty:
        return f"{stars}{one.name}{kind}"
    default = "..." if " object at " in repr(one.default) or "<" in repr(one.default) else repr(one.default)
    return f"{one.name}{kind} = {default}"


def listed(text: str) -> str:
    """A docstring with its aligned lists, and its paragraphs on one argument each, as lists of Markdown."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        if found := ITEM.match(line):
            name = found[1] or f"`{found[2]}`"
            lines += [""] * (not inside and bool(lines) and bool(lines[-1])) + [f"- {name}: {found[3]}"]
            inside = True
        elif inside and line:
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line)
            inside = False
    return "\n".join(lines)
