"""The contracts of imports in pyproject.toml see planted faults; packages stand on what they declare."""

import ast
import shutil
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent

MAY_IMPORT = {
    "zerobench.records": set(),
    "zerobench.theory": set(),
    "zerobench.zero": {"torch", "triton"},
    "zerobench": {
        *("torch", "numpy", "hydra", "omegaconf", "yaml", "pandas", "pyarrow", "matplotlib", "rich", "scipy", "psutil"),
        *("filelock", "jinja2", "triton"),  # the last comes with torch's builds for CUDA
        *("transformers", "peft", "deepspeed", "hydra_plugins", "lightning", "pytest"),  # a user may have
    },
}
"""Package -> the distributions that its modules may import, beside Python's own."""

PLANTED = {
    "upwards": (
        "records/names.py",
        "def f():\n    from ..sweep import cell",
        "zerobench.records is not allowed to import",
    ),
    "upwards, for a type": (
        "zero/comm/base.py",
        "if TYPE_CHECKING:\n    from ..units.unit import Unit",
        "zerobench.zero.comm is not allowed to import",
    ),
    "a circle": ("results/selection.py", "from .tables import load", "No cycles are allowed in zerobench.results"),
    "a module without a layer": ("stray.py", "", "zerobench.stray"),
}


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("zerobench", include_external_packages=True, cache_dir=None)


@pytest.mark.shown(2)
@pytest.mark.slow
@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_import_breaks_a_contract(tmp_path: Path, planted: str) -> None:
    path, line, message = PLANTED[planted]
    shutil.copytree(ROOT / "zerobench", tmp_path / "zerobench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "zerobench" / path).open("a") as file:
        file.write(f"\n{line}\n")
    lint = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    done = subprocess.run([sys.executable, "-c", lint, "--no-cache"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split())


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_what_it_declares(package: str) -> None:
    graph = imports()
    imported = {
        name.partition(".")[0]
        for module in {package} | graph.find_descendants(package)
        for name in graph.find_modules_directly_imported_by(module)
        if not name.startswith(package)
    }
    assert imported - sys.stdlib_module_names <= MAY_IMPORT[package]


def test_analysis_stands_on_tables_alone() -> None:
    for path in (ROOT / "analysis").glob("*.py"):
        text = path.read_text()
        for forbidden in ("zerobench.zero", "zerobench.worker", "zerobench.launch", "zerobench.probes"):
            assert forbidden not in text, f"{path.name} imports {forbidden}"


@pytest.mark.slow
def test_no_class_name_has_two_meanings() -> None:
    modules = defaultdict(list)
    for path in (ROOT / "zerobench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].append(path)
    assert {name: paths for name, paths in modules.items() if len(paths) > 1} == {}
