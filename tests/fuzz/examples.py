"""Valid files of each reader, made in an empty folder: an example returns those that are to be damaged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.unit.test_status_show_prune import make

RESULTS = Path(__file__).parent.parent.parent / "results"

GPT2 = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 32,
    "n_head": 2,
    "vocab_size": 64,
    "n_positions": 32,
    "architectures": ["GPT2LMHeadModel"],
}
SUITE = {
    "about": {"code": "x", "torch": "2", "device_class": "cpu", "small": True},
    "sections": {"probe": {"cells": [{"name": "x", "status": "ok"}]}},
}


def two_runs(folder: Path) -> Path:
    """Two runs, of which the first is damaged."""
    make(folder, "zero2")
    return make(folder, "zero1")


def run_file(*names: str) -> Callable[[Path], list[Path]]:
    def example(folder: Path) -> list[Path]:
        run = two_runs(folder)
        (run / "provenance.json").write_text(json.dumps({"look": {"color": "red"}, "versions": {"torch": "2"}}))
        found = [path for name in names for path in sorted(run.glob(name))]
        assert found
        return found

    return example


def copied(*sources: str) -> Callable[[Path], list[Path]]:
    """Committed files: of each folder all, of each file that."""

    def example(folder: Path) -> list[Path]:
        for source in sources:
            path = RESULTS / source
            if path.is_dir():
                shutil.copytree(path, folder, dirs_exist_ok=True)
            else:
                shutil.copy(path, folder)
        return sorted(path for path in folder.rglob("*") if path.suffix in (".parquet", ".json", ".yaml", ".csv"))

    return example


def written(name: str, content: Any) -> Callable[[Path], list[Path]]:
    def example(folder: Path) -> list[Path]:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return [path]

    return example


def search(folder: Path) -> list[Path]:
    from zerobench.records import SearchRow
    from zerobench.results.folders import write_search
    from zerobench.results.row_checks import columns_of

    two_runs(folder)
    made = {int: 1, float: 0.5, str: "2026-01-01T00:00:00+00:00", bool: True}
    write_search(folder, SearchRow(**{name: made[base] for name, base in columns_of(SearchRow)}))
    return sorted((folder / "searches").glob("*.json"))


def cached(folder: Path) -> list[Path]:
    from zerobench.records import MemoryRow, RunRow
    from zerobench.results import run_files
    from zerobench.results.frames import write_frame
    from zerobench.results.tables import load, run_folders

    two_runs(folder)
    runs = run_folders(folder)
    index = {one.name: run_files.signature(one) for one in runs}
    found = load(folder)
    run_files.keep(folder, "runs", index, lambda path: write_frame(path, found.runs, RunRow, False))
    run_files.keep(folder, "memory", index, lambda path: write_frame(path, found.memory, MemoryRow, True))
    return sorted(path for kept in folder.glob(".tables-*") for path in kept.iterdir())


def board(folder: Path) -> list[Path]:
    launch = {
        "name": "x",
        "state": "running",
        "mode": "timed",
        "step": "1/2",
        "loss": 1.0,
        "peak_bytes": 1,
        "seconds": 0.5,
    }
    said = {"host": "here", "pid": 3, "current": 0, "left": "1 s", "launches": [launch]}
    return written(".sweep-3-x/board.json", said)(folder)


def job(folder: Path) -> list[Path]:
    from tests.cells import cell
    from zerobench.dispatch.job_folder import JobFolder
    from zerobench.sweep.sweep import CellLaunch

    job = JobFolder.make(folder, 0, [CellLaunch("zero2", cell("zero2", 2), 0)], "local")
    job.write_rows([{"status": "ok", "run_id": "x", "peak_bytes": 3}])
    return [job.path / "order.json", job.path / "rows.json"]


def weights(folder: Path) -> list[Path]:
    from safetensors.torch import save_file

    tensors = {
        "a.weight": torch.arange(6.0).reshape(2, 3),
        "b.bias": torch.zeros(0),
        "c": torch.ones(3, dtype=torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return [folder / "model.safetensors", folder / "model.safetensors.index.json"]
