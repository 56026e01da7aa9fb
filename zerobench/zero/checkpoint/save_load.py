"""Saves and loads an engine's checkpoint by DCP's planners and storage."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata

from .. import labels
from . import operations
from .around_load import before_load
from .consensus import Ranks, SaveHandle, ranks_of
from .contents import Targets, tensors_of
from .export import export_safetensors
from .index import check_files, read_index
from .metadata import differences, facts_of, merge
from .planner import Flat, LoadPlanner, SavePlanner
from .storage import FolderReader, FolderWriter
from .weights import load_weights

if TYPE_CHECKING:
    from ..strategy import Strategy

__all__ = ["SaveHandle", "export_safetensors", "load", "load_weights", "save"]


def save(
    engine: Strategy, path: str | os.PathLike[str], asynchronous: bool, user_state: Mapping[str, Any]
) -> SaveHandle | None:
    """Writes a checkpoint, as `Strategy.save` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    tensors, facts = ranks.agree(lambda: _take(engine, asynchronous, user_state))
    write = partial(_write, ranks, FolderWriter(folder), SavePlanner(facts, merge), tensors)
    if asynchronous:
        ranks.in_flight = SaveHandle(write)
        return ranks.in_flight
    with labels.collective("control"):
        write()
    return None


def load(engine: Strategy, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads a checkpoint, as `Strategy.load` specifies."""
    engine.settle()
    ranks, folder = ranks_of(engine), Path(path).absolute()
    # Everything is checked on all ranks before anything is changed; each rank hashes every Nth file.
    metadata = ranks.agree(lambda: _check(engine, folder, slice(ranks.rank, None, ranks.size)))
    engine.zero_grad()
    before_load(engine)
    targets = Targets(engine, metadata.planner_data, _pending_in(metadata))
    planner, reader = LoadPlanner(), FolderReader(folder, metadata)
    with labels.collective("control"):
        _run(f"load: {folder} was not read", partial(operations.load, ranks, targets.flats, reader, planner))
    targets.finish()
    return metadata.planner_data["user"]


def _take(engine: Strategy, copy: bool, user_state: Mapping[str, Any]) -> tuple[dict[str, Flat], dict[str, Any]]:
    if engine.update.used:
        raise ValueError("save: there are gradients, which a checkpoint does not hold; save after step()")
    engine.schedule.check_saveable()
    return tensors_of(engine, copy), facts_of(engine, user_state)


def _write(ranks: Ranks, writer: FolderWriter, planner: SavePlanner, tensors: dict[str, Flat]) -> None:
    try:
        _run(f"save: {writer.path} was not written", partial(operations.save, ranks, tensors, writer, planner))
    except RuntimeError:
        writer.abandon()
        raise


def _check(engine: Strategy, folder: Path, share: slice) -> Metadata:
    """Returns the checkpoint's metadata. Raises ValueError if it is damaged, or of another model or optimizer."""
    metadata = read_index(folder)
    for sentence in differences(engine, metadata):
        raise ValueError(f"{folder}: {sentence}")
    check_files(folder, metadata, share)
    return metadata


def _pending_in(metadata: Metadata) -> dict[str, torch.dtype]:
    """Returns parameter name -> dtype of its pending gradient, for those that the checkpoint holds."""
    found: dict[str, Any] = metadata.state_dict_metadata
    head = "pending."
    return {name[len(head) :]: kind.properties.dtype for name, kind in found.items() if name.startswith(head)}


def _run(failure: str, operation: Callable[[], None]) -> None:
    """Runs an operation over the ranks. Raises RuntimeError, the same sentence on all ranks, where it fails."""
    try:
        operation()
    except Exception as error:
        raise RuntimeError(f"{failure}: {error}") from error
