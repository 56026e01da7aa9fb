"""Nothing of another process or of a file is unpickled, or made an object by another loader that can run code.

Held by reading the source, and by a run of every strategy in which torch may unpickle nothing.
"""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import distributed_c10d

from tests.cells import cell
from tests.ranks import run_ranks
from zerobench.ranks.start_ranks import launch
from zerobench.worker import RankJob, run_rank

ROOT = Path(__file__).parents[2]
FOLDERS = ("zerobench", "analysis", "tools/docs", "examples")

MODULES = ("marshal", "shelve", "dill", "cloudpickle", "jsonpickle", "torch.package")

LOADERS = {
    "pickle": ("load", "loads", "Unpickler"),
    "yaml": ("load", "load_all", "full_load", "unsafe_load", "full_load_all", "unsafe_load_all"),
    "joblib": ("load",),
    "torch": ("load",),
    "pd": ("read_pickle",),
}
"""Module -> its functions that can run code from data; torch's only where it does not say `weights_only=True`."""

ALLOWED = {
    ("zerobench/ranks/rank_main.py", "pickle.loads"): "jobs of the parent, through a pipe",
    ("zerobench/ranks/start_ranks.py", "pickle.loads"): "messages of own children, through a pipe",
    ("zerobench/host/files.py", "yaml.load"): "OnceLoader, a SafeLoader",
    ("tools/docs/render.py", "eval"): "fields of the templates beside it, which are code of this repository",
}


def unsafe(tree: ast.AST) -> Iterator[str]:
    """Yields the dotted name of each call, and of each import, that could run code from data."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"import {name}" for name in names if name in MODULES)
        elif isinstance(node, ast.Call) and _runs_code(node):
            yield ast.unparse(node.func)


def _runs_code(call: ast.Call) -> bool:
    owner, _, name = ast.unparse(call.func).rpartition(".")
    given = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if given.get("allow_pickle", "False") != "False" or given.get("weights_only", "True") != "True":
        return True
    if name.endswith(("_object", "_object_list")) and name.startswith(("all_gather", "gather", "broadcast", "scatter")):
        return True  # torch's collectives of objects, which travel as pickles
    if name == "recv" and not call.args:
        return True  # of multiprocessing's connections; torch's takes a tensor
    if name in LOADERS.get(owner.split(".")[-1], ()):
        return "weights_only" not in given
    return name in ("eval", "exec") and not owner


@pytest.mark.slow
def test_the_source_unpickles_nothing_but_messages_of_own_children() -> None:
    found = {
        (str(path.relative_to(ROOT)), name)
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for name in unsafe(ast.parse(path.read_text()))
    }
    assert found == set(ALLOWED)


def refuse(*_: Any) -> Any:
    raise AssertionError("torch unpickles what came over the network")


def step_of_each(job: Any, tell: Any) -> list[str]:
    """One rank of all strategies, one after another, with an Unpickler that unpickles nothing."""
    rank, folder, names = job
    distributed_c10d._unpickler = refuse  # type: ignore[assignment]  # torch-private: the test fails where it moves
    return [
        run_rank(RankJob(cell(name, 2).config, "accounted", rank, f"{folder}/{name}", folder), tell).mode
        for name in names
    ]


def gather_objects(rank: int, n: int) -> str:
    distributed_c10d._unpickler = refuse  # type: ignore[assignment]
    try:
        distributed_c10d.all_gather_object([None] * n, rank)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.thorough
def test_no_strategy_has_torch_unpickle(tmp_path: Path) -> None:
    """The peers' as well. That the trap works is seen on a collective of objects."""
    names = ("ddp", "zero1", "zero2", "zero3", "megatron", "fsdp2", "zero_redundancy")
    results = launch(step_of_each, [(rank, str(tmp_path), names) for rank in range(2)], tmp_path / "logs", 200)
    assert results == [["accounted"] * len(names)] * 2
    assert all(run_ranks(2, gather_objects))
