"""The files of a checkpoint: a folder of safetensors files and one JSON index, read and written through DCP.

[Note: the folder of a checkpoint]
    checkpoint.json             the index: each chunk's parameter, file and byte offset
    rank0-1f2e3d4c.safetensors  the chunks that rank 0 saved; the number identifies the save
    rank1-1f2e3d4c.safetensors  ...

The index holds the size and the SHA-256 of every file, and its own. The folder holds no code, and nothing in it is
unpickled, whereas torch's own file reader unpickles its metadata.

[Note: all or nothing]
A save becomes visible at one rename:

    1. write     every rank writes into `<folder>.partial-<number>`, next to the folder, and waits for the disk (fsync)
    2. finish    DCP calls `finish` on rank 0 only after all ranks have written; it writes the index there
    3. rename    a new checkpoint: the partial folder is renamed. An existing one: the new files are moved next to the
                 old ones, then the rename of the index replaces the checkpoint, and the old files are deleted

So the last good checkpoint is always complete, and the next save deletes the remains of an interrupted one.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from contextlib import suppress
from dataclasses import replace
from glob import escape
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from torch.distributed.checkpoint import LoadPlan, LoadPlanner, SavePlan, SavePlanner, StorageReader, StorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from .around_load import put
from .index import INDEX, File, FileOffset, write_index
from .safetensors import buffer_of, bytes_of, layout, sync

NUMBER = "[0-9a-f]" * 8
"""Pattern of a save's number. Files and folders of other names are a user's, and stay."""

OWN = f"rank[0-9]*-{NUMBER}.safetensors"
"""Pattern of a rank's file."""


class FolderWriter(StorageWriter):
    """Writes one file per rank and, once all are written, the index."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._partial: Path | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing: a writer writes once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the coordinator makes the folder once it has the plans."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Makes the folder, on the coordinator, and assigns every rank a file in it."""
        if not (self.path / INDEX).exists() and self.path.exists() and not _is_empty_folder(self.path):
            raise ValueError(f"{self.path}: the path exists and is not a checkpoint; choose another one")
        for stale in self.path.parent.glob(f"{escape(self.path.name)}.partial-{NUMBER}"):
            if all(path.match(OWN) or path.name == INDEX for path in stale.glob("*")):
                shutil.rmtree(stale, ignore_errors=True)
        number = uuid4().hex[:8]  # per save, so that new files never overwrite those of the checkpoint in place
        self._partial = self.path.parent / f"{self.path.name}.partial-{number}"
        self._partial.mkdir(parents=True)
        files = [self._partial / f"rank{rank}-{number}.safetensors" for rank in range(len(plans))]
        return [replace(plan, storage_data=file) for plan, file in zip(plans, files, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's chunks into its file and waits for the disk."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        return done

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        path: Path = plan.storage_data
        data = {_name(item.index): planner.resolve_data(item) for item in plan.items}
        tensors = {name: tensor for name, tensor in data.items() if isinstance(tensor, torch.Tensor)}
        head, begins = layout(tensors)
        digest = hashlib.sha256(head)
        with path.open("wb") as file:
            file.write(head)
            for name in begins:
                written = bytes_of(tensors[name])
                file.write(written)
                digest.update(written)
            size = file.tell()
        sync([path])
        whole = File(path.name, size, digest.hexdigest())
        return [WriteResult(item.index, 0, FileOffset(whole, begins[_name(item.index)])) for item in plan.items]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes the index and makes the folder the checkpoint, once all ranks have written."""
        assert self._partial is not None
        metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
        write_index(self._partial / INDEX, metadata)
        sync([self._partial])
        if (self.path / INDEX).exists():
            self._replace()
        else:
            os.rename(self._partial, self.path)
        sync([self.path.parent])

    def _replace(self) -> None:
        assert self._partial is not None
        new = [path.name for path in self._partial.iterdir() if path.name != INDEX]
        for name in new:
            os.rename(self._partial / name, self.path / name)
        sync([self.path])  # the new files' names are on the disk before the index that refers to them
        os.rename(self._partial / INDEX, self.path / INDEX)  # atomic: from here on it is the new checkpoint
        sync([self.path])
        with suppress(OSError):  # files that cannot be deleted now are deleted by the next save
            self._partial.rmdir()
            for old in self.path.glob(OWN):
                if old.name not in new:
                    old.unlink()

    def abandon(self) -> None:
        """Deletes the files of a save that has failed."""
        if self._partial is not None:
            shutil.rmtree(self._partial, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: DCP never chooses this class by itself."""
        return False


class FolderReader(StorageReader):
    """Reads chunks, or parts of them, from the files that `metadata` (from `read_index`) names."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        self.path = path
        self.metadata = metadata

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Does nothing."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the index, which has been read and checked already."""
        return self.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Does nothing."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Returns the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Returns the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads every item into the tensor that the planner names, through a buffer of the item's size."""
        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index].file.name, []).append(item)
        for name, items in by_file.items():
            with (self.path / name).open("rb") as file:
                for item in items:
                    dtype = self.metadata.state_dict_metadata[item.storage_index.fqn].properties.dtype  # type: ignore[union-attr]
                    buffer = torch.empty(item.lengths, dtype=dtype)
                    place = self.metadata.storage_data[item.storage_index]
                    file.seek(place.offset + item.storage_offsets[0] * dtype.itemsize)
                    if file.readinto(buffer_of(buffer)) != buffer.numel() * dtype.itemsize:
                        raise ValueError(f"{self.path / name}: it ends before {item.storage_index.fqn} does")
                    put(planner.resolve_tensor(item), buffer)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Returns False: DCP never chooses this class by itself."""
        return False


def _is_empty_folder(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _name(index: MetadataIndex) -> str:
    """Returns a chunk's name in its file; with its offset, since a rank may hold several chunks of one tensor."""
    assert index.offset is not None
    return f"{index.fqn}[{index.offset[0]}:]"
