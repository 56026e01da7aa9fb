"""Imports run downwards only, between packages and inside them, without a circle; the engine depends on torch alone."""

from __future__ import annotations

import ast
import shutil
import sys
from collections.abc import Collection
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "zerobench"

LAYERS = {
    "zerobench": [
        {"records", "theory", "zero", "sizes", "sections", "cluster", "registry"},
        {"host", "strategies", "fake"},
        {"data", "probes"},
        {"models"},
        {"config"},
        {"results", "calibrate", "predict"},
        {"rank_record", "plots", "judging"},
        {"worker"},
        {"launch", "fake_execution"},
        {"sweep"},
        {"watching", "timing"},
        {"commands"},
        {"cli", "gate"},
        {"__init__"},
        {"__main__"},
    ],
    "zerobench.zero": [
        {"labels", "layout", "low_bit", "precision"},
        {"comm", "arena"},
        {"modules"},
        {"parameters", "activations", "unit_tensors"},
        {"offload"},
        {"units"},
        {"optim"},
        {"engine", "options"},
        {"gradients", "writes", "attributes"},
        {"checkpoint"},
        {"strategy"},
        {"stage1"},
        {"stage2", "megatron"},
        {"stage3"},
        {"__init__"},
    ],
    "zerobench.theory": [
        {"shapes", "activations", "tensor_parallel", "tiers"},
        {"layout", "strategy"},
        {"groups"},
        {"closed_forms"},
        {"replay"},
        {"strategies"},
        {"__init__"},
    ],
}
"""From the bottom up, by package: what lies in it may import its own layer and those below, as long as no circle
comes of it. Inside other packages it is enough that there is none."""

OTHERS = {
    *("torch", "numpy", "hydra", "omegaconf", "yaml", "pandas", "pyarrow", "matplotlib", "rich", "scipy", "psutil"),
    "filelock",
    *("jinja2", "transformers", "peft", "deepspeed", "hydra_plugins", "lightning", "pytest"),
}
"""Packages that ours may import: what pyproject.toml requires and what that brings, then what a user may have."""

Graph = dict[str, set[str]]


def name_of(path: Path, package: Path) -> str:
    """The dotted name of a module, a package's own being its __init__."""
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted names and files of its modules."""
    return {name_of(path, package): path for path in package.rglob("*.py")}


def imports_of(path: Path, package: Path, modules: Collection[str]) -> set[str]:
    """Dotted names of everything that a file imports, wherever in it, but for types alone (`if TYPE_CHECKING:`).

    Of the package's own `modules` the files' names, packages as their __init__; of others the first word.
    """
    here = name_of(path, package).split(".")
    found: set[str] = set()
    for node in _imports(path.read_text()):
        if isinstance(node, ast.Import):
            found |= {_file(alias.name, modules) or alias.name.split(".")[0] for alias in node.names}
        else:
            base = [*here[: -node.level or None], *filter(None, [node.module])] if node.level else [str(node.module)]
            dotted = ".".join(base)
            for alias in node.names:
                inner = _file(f"{dotted}.{alias.name}", modules) or _file(dotted, modules)
                found.add(inner or dotted.split(".")[0])
    for name in _imported_by_name(path.read_text()):
        above = len(name) - len(name.lstrip("."))
        dotted = ".".join([*here[: -above or None], name.lstrip(".")]) if above else name
        found.add(_file(dotted, modules) or dotted.split(".")[0])
    return found


@cache
def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    """The statements of a file that run, once for all copies of it."""
    tree = ast.parse(text)
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
    return [node for node in found if id(node) not in for_types]


@cache
def _imported_by_name(text: str) -> list[str]:
    """The constant names that a file gives to `import_module`: imports that no statement shows."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call) and node.args)
    names = [call.args[0] for call in calls if ast.unparse(call.func).split(".")[-1] == "import_module"]
    return [str(name.value) for name in names if isinstance(name, ast.Constant)]


def _file(name: str, modules: Collection[str]) -> str | None:
    return next((found for found in (name, f"{name}.__init__") if found in modules), None)


def graph_of(package: Path) -> Graph:
    """Each module of the package, and the modules of it that it imports."""
    paths = modules_of(package)
    return {name: imports_of(path, package, paths) & paths.keys() - {name} for name, path in paths.items()}


def children(graph: Graph, parent: str) -> Graph:
    """`graph` as seen from one package: its modules and sub-packages, each sub-package as one."""

    def child(name: str) -> str | None:
        return name.removeprefix(f"{parent}.").split(".")[0] if name.startswith(f"{parent}.") else None

    seen: Graph = {}
    for name, imported in graph.items():
        if me := child(name):
            seen.setdefault(me, set()).update({other for each in imported if (other := child(each))} - {me})
    return seen


def circle_in(graph: Graph) -> list[str]:
    """One circle of imports; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def faults_of(package: Path) -> list[str]:
    """An error message for each import that runs upwards or leaves the package, and for a circle in each package."""
    graph, faults = graph_of(package), []
    for parent in sorted({name.rpartition(".")[0] for name in graph}):
        seen = children(graph, parent)
        if circle := circle_in(seen):
            faults.append(f"{parent}: a circle: {' imports '.join(reversed(circle))}")
        layers = LAYERS.get(parent, [])
        level = {name: number for number, layer in enumerate(layers) for name in layer}
        for name in sorted(seen) if layers else []:
            faults += [] if name in level else [f"{parent}.{name} has no layer in tests/test_layers.py"]
            upwards = sorted(other for other in seen[name] if level.get(other, 0) > level.get(name, 0))
            faults += [f"{parent}.{name} imports {other} from above" for other in upwards]
    paths = modules_of(package)
    for name, path in paths.items():
        left = imports_of(path, package, paths) - paths.keys() - sys.stdlib_module_names - OTHERS
        faults += [f"{name} imports {other}, which a wheel does not have" for other in sorted(left)]
    return faults


def test_imports_run_downwards_and_there_is_no_circle() -> None:
    assert faults_of(PACKAGE) == []


@pytest.mark.slow
def test_no_module_imports_one_that_imports_it() -> None:
    graph = graph_of(PACKAGE)
    modules = {n: {i for i in found if not i.endswith("__init__")} for n, found in graph.items()}
    assert circle_in(modules) == []


PLANTED = {
    "upwards, between packages": (
        "theory/shapes.py",
        "from ..config import schema",
        "theory imports config from above",
    ),
    "upwards, in a function": ("records/names.py", "def f():\n    from ..sweep import cell", "records imports sweep"),
    "upwards, absolute": ("host/pipes.py", "import zerobench.sweep.cell", "host imports sweep from above"),
    "upwards, inside the engine": ("zero/labels.py", "from . import stage3", "zero.labels imports stage3 from above"),
    "upwards, between its packages": ("zero/comm/base.py", "from ..units.unit import Unit", "comm imports units"),
    "upwards, by import_module": (
        "records/names.py",
        'def f():\n    importlib.import_module("..sweep.cell", __package__)',
        "records imports sweep from above",
    ),
    "a circle inside a package": ("results/selection.py", "from .tables import load", "results: a circle"),
    "a circle inside a deep one": (
        "zero/offload/disk/io_threads.py",
        "from . import file_store",
        "offload.disk: a circle",
    ),
    "a module without a layer": ("stray.py", "", "zerobench.stray has no layer"),
    "out of the package": (
        "plots/marks.py",
        "def f():\n    from analysis.bars import highest",
        "imports analysis, which",
    ),
}


def test_an_import_for_types_alone_may_run_upwards(tmp_path: Path) -> None:
    path = tmp_path / "flow.py"
    path.write_text("if TYPE_CHECKING:\n    from torch import nn\nelse:\n    import numpy\nimport ast\n")
    assert imports_of(path, tmp_path, ()) == {"numpy", "ast"}


@pytest.mark.shown(5)
@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_import_is_seen(tmp_path: Path, planted: str) -> None:
    where, line, sentence = PLANTED[planted]
    package = tmp_path / "zerobench"
    shutil.copytree(PACKAGE, package, ignore=lambda _, names: [n for n in names if n == "__pycache__"])
    with (package / where).open("a") as file:
        file.write(f"\n{line}\n")
    assert any(sentence in fault for fault in faults_of(package))


def test_the_bottom_layer_knows_nobody() -> None:
    modules = modules_of(PACKAGE)
    for name in ("records", "theory", "zero"):
        for path in (PACKAGE / name).rglob("*.py"):
            allowed = set(sys.stdlib_module_names) | ({"torch"} if name == "zero" else set())
            others = {one for one in imports_of(path, PACKAGE, modules) if not one.startswith(f"zerobench.{name}.")}
            assert others <= allowed, path


def classes_of(package: Path) -> dict[str, list[str]]:
    """Name of each public class -> modules that define one of that name."""
    found: dict[str, list[str]] = {}
    for name, path in modules_of(package).items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found.setdefault(node.name, []).append(name)
    return found


@pytest.mark.slow
def test_no_class_name_has_two_meanings(tmp_path: Path) -> None:
    assert {name: modules for name, modules in classes_of(PACKAGE).items() if len(modules) > 1} == {}
    for name in ("one", "other"):
        (tmp_path / f"{name}.py").write_text("class Planted: ...\nclass _Own: ...\n")
    assert {name: len(modules) for name, modules in classes_of(tmp_path).items()} == {"Planted": 2}


def test_analysis_stands_on_tables_alone() -> None:
    for path in (PACKAGE.parent / "analysis").glob("*.py"):
        text = path.read_text()
        for forbidden in ("zerobench.zero", "zerobench.worker", "zerobench.launch", "zerobench.probes"):
            assert forbidden not in text, f"{path.name} imports {forbidden}"
