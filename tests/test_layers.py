"""Packages import the distributions that they declare; pyproject.toml has the contracts between packages."""

import sys
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


@cache
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("zerobench", include_external_packages=True, cache_dir=None)


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
