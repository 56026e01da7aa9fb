"""The index of a checkpoint: DCP's metadata as JSON, and the checks that a folder matches its index.

    {"format": "zerobench checkpoint", "version": 2, "sha256": of the contents,
     "contents": {
        "facts": {...},                                               see contents.py
        "tensors": {name: {"dtype": "float32", "numel": 5, "chunks": [[first element, elements, file, byte], ...]}},
        "files": {name: [bytes, sha256]}}}

Every tensor is flat. Its shape is among the facts and, since version 2, so is the order of its elements unless it is
row-major; version 3 adds optimizer states with one element per block of a parameter. A checkpoint is written as the
lowest version that it fits, so that older releases can read it.

The contents of an index are checked before anything is loaded: any program may have written it, with a correct SHA-256.

Every check raises ValueError with the end of an error message. JSON's `true` is not accepted as 1, and every byte of a
file belongs to one chunk, so that an offset cannot point elsewhere.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import prod
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

from .metadata import decode, is_blocks, is_elements
from .safetensors import DTYPES, sync

FIRST_BYTE = 8
"""Bytes at the start of a file that hold the length of its header."""

FACTS = {
    "stage": int, "world_size": int, "torch": str, "parameters": dict, "buffers": dict, "optimizer": dict,
    "extra": dict, "user": dict,
}  # fmt: skip
OF_OPTIMIZER = {"class": str, "options": list, "groups": dict, "states": dict}


def check_contents(contents: Any) -> None:
    """Raises ValueError if files, tensors or facts break the notes in index.py, contents.py and metadata.py."""
    _check_types("contents", contents, {"facts": dict, "tensors": dict, "files": dict})
    for name, entry in contents["files"].items():
        _require(name not in ("", ".", "..") and "/" not in name and "\0" not in name, f"{name!r} is not a file name")
        _require(
            isinstance(entry, list) and len(entry) == 2 and _is_count(entry[0]) and isinstance(entry[1], str),
            f"its entry of {name} is {entry!r:.60}, not a size and a SHA-256",
        )
    _check_facts(contents["facts"])
    sizes = _sizes(contents["facts"])
    for name, entry in contents["tensors"].items():
        _check_tensor(name, entry, sizes)
    _check_bytes(contents)


def _check_tensor(name: str, entry: Any, sizes: dict[str, int]) -> None:
    """Checks a tensor's entry. `sizes`: elements of every parameter and buffer, by the prefixes of tensor names."""
    _check_types(name, entry, {"dtype": str, "numel": int, "chunks": list})
    _require(entry["dtype"] in DTYPES, f"{name} has dtype {entry['dtype']!r:.60}")
    known = [numel for owner, numel in sizes.items() if name == owner or name.startswith(f"{owner}.")]
    _require(entry["numel"] in known, f"{name} has {entry['numel']} elements, and no parameter or buffer has so many")
    end = 0
    for chunk in entry["chunks"]:
        fits = isinstance(chunk, list) and len(chunk) == 4 and isinstance(chunk[2], str)
        fits = fits and all(_is_count(one) for one in (chunk[0], chunk[1], chunk[3]))
        _require(fits, f"a chunk of {name} is {chunk!r:.60}, not first element, elements, file and byte")
    for start, numel, *_ in sorted(entry["chunks"], key=lambda chunk: chunk[0]):
        _require(start == end and numel > 0, f"the chunks of {name} overlap or leave a gap at element {end}")
        end = start + numel
    _require(end == entry["numel"], f"the chunks of {name} end at element {end} of {entry['numel']}")


def _check_bytes(contents: dict[str, Any]) -> None:
    """Checks that a file's chunks are contiguous up to its end, as `safetensors.layout` places them."""
    ranges: dict[str, list[tuple[int, int, str]]] = {name: [] for name in contents["files"]}
    for name, entry in contents["tensors"].items():
        itemsize = DTYPES[entry["dtype"]].itemsize
        for _, numel, file, byte in entry["chunks"]:
            _require(file in ranges, f"{name} is in {file!r:.60}, which the index does not list")
            ranges[file].append((byte, byte + numel * itemsize, name))
    for file, found in ranges.items():
        _require(found != [], f"{file} holds nothing")
        found.sort()
        _require(
            found[0][0] >= FIRST_BYTE, f"{found[0][2]} begins at byte {found[0][0]} of {file}, where its header is"
        )
        for (_, end, _), (begin, _, name) in pairwise(found):
            _require(begin == end, f"{name} begins at byte {begin} of {file}, where byte {end} is next")
        size = contents["files"][file][0]
        _require(found[-1][1] == size, f"{found[-1][2]} ends at byte {found[-1][1]} of {file}, which has {size}")


def _check_facts(facts: dict[str, Any]) -> None:
    _check_types("facts", facts, FACTS)
    for kind in ("parameters", "buffers"):
        for name, one in facts[kind].items():
            _check_types(
                name, one, {"shape": list, "dtype": str} | ({"trainable": bool} if kind == "parameters" else {})
            )
            _require(all(map(_is_count, one["shape"])), f"{name} has shape {one['shape']!r:.60}")
            _require(one["dtype"] in DTYPES, f"{name} has dtype {one['dtype']!r:.60}")
    optimizer = facts["optimizer"]
    _check_types("optimizer", optimizer, OF_OPTIMIZER)
    for number, options in enumerate(optimizer["options"]):
        _check_values(f"group {number}", options)
    for name, group in optimizer["groups"].items():
        _require(group is None or _is_count(group), f"the group of {name} is {group!r:.60}")
    for name, states in optimizer["states"].items():
        _check_values(name, states)
    pending = facts["extra"].get("pending", {"options": []})
    _check_types("extra.pending", pending, {"options": list})


def _check_values(where: str, values: Any) -> None:
    """Checks that `decode` can restore the options of a group, or the states of a parameter."""
    _require(isinstance(values, dict), f"{where} has {values!r:.60} for names and values")
    for key, value in values.items():
        if is_elements(value):
            _require(value["elements"] in DTYPES, f"{where} has {key} in dtype {value['elements']!r:.60}")
            block = value.get("block", 1)
            _require(_is_count(block) and block > 0, f"{where} has {key} in blocks of {block!r:.60} elements")
            continue
        try:
            decode(value)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"{where} has {key} = {value!r:.60}, which is not a value") from None


def _sizes(facts: dict[str, Any]) -> dict[str, int]:
    found = {f"buffer.{name}": prod(one["shape"]) for name, one in facts["buffers"].items()}
    for kind in ("master", "optimizer", "frozen", "pending"):
        found |= {f"{kind}.{name}": prod(one["shape"]) for name, one in facts["parameters"].items()}
    for name, states in facts["optimizer"]["states"].items():
        numel, blocks = found.get(f"optimizer.{name}", 0), {k: v["block"] for k, v in states.items() if is_blocks(v)}
        found |= {f"optimizer.{name}.{key}": -(-numel // block) for key, block in blocks.items()}
    return found


def _check_types(where: str, value: Any, types: Mapping[str, Any]) -> None:
    _require(isinstance(value, dict), f"{where} is {value!r:.60}, not a mapping")
    for key, kind in types.items():
        found = value.get(key)
        right = isinstance(found, kind) and (kind is bool or not isinstance(found, bool))
        _require(right and (kind is not int or _is_count(found)), f"{where}: {key} is {found!r:.60}")


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _require(right: bool, words: str) -> None:
    if not right:
        raise ValueError(words)


INDEX = "checkpoint.json"
FORMAT = "zerobench checkpoint"
VERSIONS = (1, 2, 3)

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
    facts = metadata.planner_data
    contents = {"facts": facts, "tensors": tensors, "files": files}
    has_order = any("order" in kind for kind in facts["parameters"].values())
    states = (one for mine in facts["optimizer"]["states"].values() for one in mine.values())
    version = 3 if any(map(is_blocks, states)) else 2 if has_order else 1
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
    """Reads the metadata that `write_index` wrote. Raises ValueError if there is none, or if a check fails."""
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
    """Raises ValueError if a file is missing or cut short, or if a file in this rank's `share` is damaged."""
    files = sorted({place.file for place in metadata.storage_data.values()}, key=lambda file: file.name)
    for file in files:
        path = folder / file.name
        if not path.is_file():
            raise ValueError(f"{path}: it is missing")
        _check_within(folder, file.name)
        if path.stat().st_size != file.size:
            raise ValueError(f"{path}: it has {path.stat().st_size} bytes, but the index says {file.size}")
    for file in files[share]:
        if _digest_of_file(folder / file.name) != file.sha256:
            raise ValueError(f"{folder / file.name}: it is damaged: its SHA-256 is not the one in the index")


def _check_within(folder: Path, name: str) -> None:
    """Raises ValueError for a symbolic link to a file outside of the folder."""
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
