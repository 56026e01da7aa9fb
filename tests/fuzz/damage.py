"""Damages of a file: of its bytes, of its place in the folder, and of the values that its format holds."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from .canary import Canary

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**400, 0.5, -0.0, 1e308, float("inf"),
    float("nan"), "", "x",
    "x" * 10_000, "\ud800", "\x00", "\x1b[2J", "../../etc/passwd", "/dev/zero", "é", "${seed}", "None", "nan",
    "1e999", "9" * 5000,
    [], [1], ["a"], [[]], [None], {}, {"a": 1}, {"": None}, {"name": 3}, {"kind": []}, [float("nan")],
    {"a": {"b": {"c": []}}},
)  # fmt: skip
"""Values in the place of others."""

TEXTS: tuple[bytes, ...] = (
    b"", b"\x00" * 64, b"\xff\xfe", b"null", b"[]", b"{}", b"3", b'"x"', b"[" * 3000, b'{"a":' * 3000, b"9" * 6000,
    b"NaN",
    b"{", b"a: &a [*a]", b"!!python/object/apply:tests.fuzz.canary.sing []", b"- [1, 2", b"\x80\x04.",
    b"PK\x03\x04", b"PAR1",
    b"\x1f\x8b\x08\x00", b"\xef\xbb\xbf{}", b"a,b\n1,2\n", b"id\n", b'"', b"\r\n", b"\n\n\n",
    "\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 9)}]" for n in range(1,
    30))]).encode(),
)  # fmt: skip
"""Whole contents."""

Damage = Callable[[random.Random, Path], None]


def damage(draw: random.Random, path: Path) -> str:
    """Damages a file in one to three ways, of which one may be to its place; returns what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        ways = [*BYTES, *OF_SUFFIX.get(path.suffix, ()) * 4]
        way = draw.choice(ways)
        try:
            way(draw, path)
        except Exception:  # damaged so far that its format does not parse
            way = _flip
            way(draw, path)
        done.append(way.__name__.strip("_"))
    if draw.random() < 0.08:
        place = draw.choice(PLACES)
        place(draw, path)
        done.append(place.__name__.strip("_"))
    return ", ".join(done)


def _flip(draw: random.Random, path: Path) -> None:
    content = bytearray(path.read_bytes()) or bytearray(b"\x00")
    for _ in range(draw.choice((1, 1, 4, 30))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def _cut(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content) + 1)])


def _grow(draw: random.Random, path: Path) -> None:
    content, more = path.read_bytes(), bytes(draw.randrange(256) for _ in range(draw.choice((1, 8, 100))))
    place = draw.choice((0, draw.randrange(len(content) + 1), len(content)))
    path.write_bytes(content[:place] + draw.choice((more, content, b"\n", b"\x00")) + content[place:])


def _replace(draw: random.Random, path: Path) -> None:
    path.write_bytes(draw.choice((*TEXTS, pickle.dumps(Canary()))))


def _recode(draw: random.Random, path: Path) -> None:
    text = path.read_bytes().decode("latin-1")
    path.write_bytes(text.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig", "utf-7"))))


BYTES: tuple[Damage, ...] = (_flip, _flip, _cut, _grow, _replace, _recode)


def _folder(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.mkdir()


def _missing(draw: random.Random, path: Path) -> None:
    path.unlink()


def _link_to_itself(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


def _link_out(draw: random.Random, path: Path) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/etc/hostname", "/dev/null", "/no-such-file", "/proc/self/mem", "/")))


def _pipe(draw: random.Random, path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


PLACES: tuple[Damage, ...] = (_folder, _missing, _link_to_itself, _link_out, _pipe)


# -- values -------------------------------------------------------------------------------------------------


def _json(draw: random.Random, path: Path) -> None:
    text = json.dumps(changed(draw, json.loads(path.read_bytes())), indent=draw.choice((None, 1)))
    if draw.random() < 0.1:  # a key twice
        text = text.replace(",", draw.choice((', "schema_version": 3,', ', "name": 3,')), 1)
    path.write_text(text, errors="surrogatepass")


def _json_lines(draw: random.Random, path: Path) -> None:
    lines = path.read_text().splitlines()
    place = draw.randrange(len(lines))
    lines[place] = json.dumps(changed(draw, json.loads(lines[place])))
    path.write_text("\n".join(lines), errors="surrogatepass")


def _yaml(draw: random.Random, path: Path) -> None:
    path.write_text(
        yaml.safe_dump(changed(draw, yaml.safe_load(path.read_bytes())), sort_keys=False), errors="surrogatepass"
    )


def changed(draw: random.Random, value: Any) -> Any:
    """Changes a value, a key or a length somewhere; at the top too, but seldom."""
    places = [value]
    for one in places:
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        places += [part for part in inner if isinstance(part, dict | list) and part]
        if len(places) > 2000:
            break
    where = draw.choice(places)
    if not isinstance(where, dict | list) or draw.random() < 0.03:
        return draw.choice(VALUES)
    key = draw.choice(list(where) if isinstance(where, dict) else range(len(where)))
    way = draw.random()
    if way < 0.6:
        where[key] = draw.choice(VALUES)
    elif way < 0.8:
        del where[key]
    elif isinstance(where, dict):
        where[draw.choice((f"{key}s", "", "schema_version", "name", "\x00"))] = draw.choice(
            (where[key], draw.choice(VALUES))
        )
    else:
        where.insert(key, draw.choice((where[key], draw.choice(VALUES))))
    return value


def _csv(draw: random.Random, path: Path) -> None:
    rows = [line.split(",") for line in path.read_text().splitlines()]
    row = draw.choice(rows[: draw.choice((1, len(rows)))])
    place = draw.randrange(len(row))
    row[place : place + draw.choice((0, 1, 1, 1))] = [
        draw.choice(("", "-1", "nan", "1e999", "x", '"', "\x00", "9" * 6000, "é", "=1+1", '"a\nb"'))
    ]
    path.write_text("\n".join(map(",".join, rows)))


def _parquet(draw: random.Random, path: Path) -> None:
    table = pq.read_table(path)
    place = draw.randrange(table.num_columns)
    name, rows = table.column_names[place], table.num_rows
    way = draw.randrange(9)
    if way == 0:
        table = table.remove_column(place)
    elif way == 1:
        table = table.append_column(name, table.column(place))
    elif way == 2:
        table = table.slice(0, draw.choice((0, 1)))
    elif way == 3:
        table = pa.concat_tables([table] * 3)
    elif way == 4:
        table = table.rename_columns([draw.choice((one, one, one, "run_id", "x")) for one in table.column_names])
    elif way == 5:
        table = table.replace_schema_metadata(
            {b"pandas": draw.choice((b"{", b"[]", b'{"index_columns": ["x"]}', b"\xff"))}
        )
    else:
        table = table.set_column(place, name, _column(draw, rows))
    path.unlink()
    pq.write_table(table, path, compression=draw.choice(("snappy", "gzip", "none", "zstd")))


def _column(draw: random.Random, rows: int) -> pa.Array:
    return draw.choice((
        lambda: pa.array(["x"] * rows), lambda: pa.array([b"\xff"] * rows), lambda: pa.nulls(rows),
        lambda: pa.array([[1]] * rows, pa.list_(pa.int64())), lambda: pa.array([{"a": 1}] * rows, pa.struct([("a",
        pa.int64())])),
        lambda: pa.array([2**62] * rows), lambda: pa.array([-(2**62)] * rows), lambda: pa.array([float("nan")] * rows),
        lambda: pa.array([float("inf")] * rows), lambda: pa.array([True] * rows), lambda: pa.array([0] * rows,
        pa.timestamp("ns")),
        lambda: pa.array(["x"] * rows).dictionary_encode(), lambda: pa.array([None] * rows, pa.int64()),
        lambda: pa.array(["{"] * rows), lambda: pa.array(["\x00\x1b[2J"] * rows), lambda: pa.array([-1] * rows),
        lambda: pa.array([0.5] * rows), lambda: pa.array(np.arange(rows), pa.int8()),
        lambda: pa.array([None] * rows, pa.string()),
    ))()  # fmt: skip


def _safetensors(draw: random.Random, path: Path) -> None:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(changed(draw, json.loads(content[8 : 8 + length]))).encode("utf-8", "surrogatepass")
    count = draw.choice((len(header), len(header), len(header), 2**63, 0, len(header) - 1))
    path.write_bytes(count.to_bytes(8, "little") + header + content[8 + length :])


OF_SUFFIX: dict[str, tuple[Damage, ...]] = {
    ".json": (_json,), ".jsonl": (_json_lines,), ".yaml": (_yaml,), ".csv": (_csv,), ".parquet": (_parquet,),
    ".safetensors": (_safetensors,),
}  # fmt: skip


def clear(folder: Path) -> None:
    """Removes a folder that may hold anything."""
    shutil.rmtree(folder, ignore_errors=True)
    assert not folder.exists()
