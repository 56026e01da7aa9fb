"""The index of a checkpoint: DCP's metadata as JSON, and the checks that a folder matches its index.

    {"format": "zerobench checkpoint", "version": 2, "sha256": of the contents,
     "contents": {
        "facts": {...},                                               see contents.py
        "tensors": {name: {"dtype": "float32", "numel": 5, "chunks": [[first element, elements, file, byte], ...]}},
        "files": {name: [bytes, sha256]}}}

Every tensor is flat: its shape is among the facts and, since version 2, so is the order of its elements unless it is
row-major. A checkpoint with only row-major tensors is written as version 1, so that older releases can read it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from .index_checks import check_contents
from .safetensors import DTYPES, sync

INDEX = "checkpoint.json"
FORMAT = "zerobench checkpoint"
VERSIONS = (1, 2)

_BLOCK_BYTES = 2**24


@dataclass(frozen=True)
class File:
    """A file of a checkpoint: its size in bytes and the SHA-256 of all of them."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class FileOffset:
    """The byte offset at which a chunk begins in a file."""

    file: File
    offset: int


def write_index(path: Path, metadata: Metadata) -> None:
    """Writes `metadata`, with the facts as planner data and a FileOffset per chunk, and waits for the disk."""
    places: dict[MetadataIndex, FileOffset] = metadata.storage_data
    tensors = {name: _to_json(name, tensor, places) for name, tensor in metadata.state_dict_metadata.items()}
    files = {place.file.name: [place.file.size, place.file.sha256] for place in places.values()}
    contents = {"facts": metadata.planner_data, "tensors": tensors, "files": files}
    version = 2 if any("order" in kind for kind in metadata.planner_data["parameters"].values()) else 1
    whole = {"format": FORMAT, "version": version, "sha256": _digest(contents), "contents": contents}
    path.write_text(json.dumps(whole))
    sync([path])


def _to_json(name: str, tensor: Any, places: dict[MetadataIndex, FileOffset]) -> dict[str, Any]:
    chunks = []
    for chunk in tensor.chunks:
        place = places[MetadataIndex(name, chunk.offsets)]
        chunks.append([chunk.offsets[0], chunk.sizes[0], place.file.name, place.offset])
    dtype = str(tensor.properties.dtype).removeprefix("torch.")
    return {"dtype": dtype, "numel": tensor.size[0], "chunks": chunks}


def read_index(folder: Path) -> Metadata:
    """Reads the metadata of `write_index`. Raises ValueError where there is none, or where a check fails."""
    path = folder / INDEX
    if not path.is_file():
        raise ValueError(f"{folder}: it is not a checkpoint: it has no {INDEX}")
    _check_within(folder, INDEX)
    try:
        whole = json.loads(path.read_bytes())
        if whole["format"] != FORMAT:
            raise ValueError(whole["format"])
        version, contents, digest = whole["version"], whole["contents"], whole["sha256"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path}: it is not the index of a checkpoint, or a damaged one ({error})") from None
    if version not in VERSIONS or isinstance(version, bool):
        known = " and ".join(map(str, VERSIONS))
        raise ValueError(f"{path}: its format is of version {version}, and this zerobench reads versions {known}")
    if digest != _digest(contents):
        raise ValueError(f"{path}: it is damaged: the SHA-256 of its contents is not the recorded one")
    try:
        check_contents(contents)
    except ValueError as error:
        raise ValueError(f"{path}: it is not the index of a checkpoint: {error}") from None
    return _from_json(contents)


def _from_json(contents: dict[str, Any]) -> Metadata:
    files = {name: File(name, *entry) for name, entry in contents["files"].items()}
    tensors: dict[str, Any] = {}
    places = {}
    for name, entry in contents["tensors"].items():
        chunks = []
        for start, numel, file, byte in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size([start]), torch.Size([numel])))
            places[MetadataIndex(name, (start,))] = FileOffset(files[file], byte)
        properties = TensorProperties(DTYPES[entry["dtype"]])
        tensors[name] = TensorStorageMetadata(properties, torch.Size([entry["numel"]]), chunks)
    return Metadata(tensors, planner_data=contents["facts"], storage_data=places)


def check_files(folder: Path, metadata: Metadata, share: slice) -> None:
    """Raises ValueError where a file is missing or cut short, or one of this rank's `share` of them is damaged."""
    files = sorted({place.file for place in metadata.storage_data.values()}, key=lambda file: file.name)
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise ValueError(f"{path}: it is missing")
        _check_within(folder, file.name)
        if path.stat().st_size != file.size:
            raise ValueError(f"{path}: it has {path.stat().st_size} bytes where the index says {file.size}")
    for file in files[share]:
        if _digest_of_file(folder / file.name) != file.sha256:
            raise ValueError(f"{folder / file.name}: it is damaged: its SHA-256 is not the one in the index")


def _check_within(folder: Path, name: str) -> None:
    """Raises ValueError for a symbolic link that would have a file outside of the folder read."""
    if (folder / name).resolve().parent != folder.resolve():
        raise ValueError(f"{folder / name}: it is a link to {(folder / name).resolve()}, outside of the checkpoint")


def _digest(contents: Any) -> str:
    return hashlib.sha256(json.dumps(contents, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _digest_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for block in iter(lambda: file.read(_BLOCK_BYTES), b""):
            digest.update(block)
    return digest.hexdigest()
