"""Checks the contents of an index before anything is loaded: any program may have written it, with a correct SHA-256.

Every check raises ValueError with the end of a sentence. JSON's `true` is not taken for 1, and every byte of a file
belongs to one chunk, so that an offset cannot point elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import prod
from typing import Any

from .metadata import decode, is_elements
from .safetensors import DTYPES

FIRST_BYTE = 8
"""Bytes at the start of a file that hold the length of its header."""

FACTS = {
    "stage": int, "world_size": int, "torch": str, "parameters": dict, "buffers": dict, "optimizer": dict,
    "extra": dict, "user": dict,
}  # fmt: skip
OF_OPTIMIZER = {"class": str, "options": list, "groups": dict, "states": dict}


def check_contents(contents: Any) -> None:
    """Raises ValueError where files, tensors or facts break the notes in index.py, contents.py and metadata.py."""
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
    """Checks a tensor's entry. `sizes`: elements of every parameter and buffer, by the names that tensors end with."""
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
    """Checks that a file's chunks lie end to end up to its end, as `safetensors.layout` places them."""
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
            continue
        try:
            decode(value)
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
            raise ValueError(f"{where} has {key} = {value!r:.60}, which is not a value") from None


def _sizes(facts: dict[str, Any]) -> dict[str, int]:
    found = {f"buffer.{name}": prod(one["shape"]) for name, one in facts["buffers"].items()}
    for kind in ("master", "optimizer", "frozen", "pending"):
        found |= {f"{kind}.{name}": prod(one["shape"]) for name, one in facts["parameters"].items()}
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
