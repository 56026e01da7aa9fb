"""Devices and clusters as described in zerobench/hardware/devices.yaml and clusters.yaml.

Every figure was measured or published by someone, named in `sources`, or it is stated, and the file says so. Only
`Scales` were fitted to published training runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..config.keys import nearest
from ..host.files import read_yaml

FOLDER = Path(__file__).parent.parent / "hardware"
TABLES = FOLDER / "tables"

GB_S, GBIT_S, US = 1e9, 1e9 / 8, 1e-6


@dataclass(frozen=True)
class Device:
    """A GPU. Rates in units of 1e9 or 1e12 per second, times in microseconds, fractions from 0 to 1. The defaults are
    stated, not measured: a roofline from the peak and the memory's bandwidth.
    """

    name: str
    peak_tflops: dict[str, float]
    """dtype -> dense peak of matrix products."""
    memory_gib: float
    memory_gb_s: float
    link_gb_s: float
    sources: dict[str, str]
    memory_efficiency: float = 0.8
    matmul_table: str = ""
    """A file of zerobench/hardware/tables, or a device of efficiency_by_shape.csv; empty: none."""
    matmul_efficiency: float = 0.7
    attention_forward: dict[int, float] = field(default_factory=lambda: {4096: 0.5})
    """Sequence length in tokens -> fraction of the peak, interpolated in logarithms."""
    attention_backward: dict[int, float] = field(default_factory=lambda: {4096: 0.45})
    collectives_table: str = ""
    """A device of collectives_in_node.csv; empty: none."""
    kernel_us: float = 2.5
    host_us: float = 8.0
    contention: float = 1.19

    @property
    def type(self) -> str:
        """The type of device, without memory and board: "a100" for a100-sxm-80gb."""
        return self.name.partition("-")[0]


@dataclass(frozen=True)
class Scales:
    """Measured over predicted time by type of device, fitted to published runs (validated.yaml). `compute`: for matrix
    products and attention, due to clocks under load and kernels slower than the tables'. `attention`: a further factor
    for attention, due to the kernels at the time of the runs. A type without runs gets the mean of the others.
    `products`, `unaligned`: for matrix products only, the second one if a side is not a multiple of ALIGNED elements;
    fitted only on one GPU (one_gpu).
    """

    compute: float = 1.0
    attention: float = 1.0
    products: float = 1.0
    unaligned: float = 1.0


@dataclass(frozen=True)
class Cluster:
    """Nodes of one type of device."""

    name: str
    device: str
    devices_per_node: int
    node_gbit_s: float
    sources: dict[str, str]
    network_efficiency: float = 0.6
    network_latency_us: float = 4.0


Kind = TypeVar("Kind", Device, Cluster)


def device(name: str) -> Device:
    """Returns a device. Raises ValueError, with the nearest name, if it is not described."""
    return _read(Device, "device", name)


def cluster(name: str) -> Cluster:
    """Returns a cluster by name, or from a user's yaml file. Raises ValueError, with the nearest name, if it is not
    described.
    """
    return _read(Cluster, "cluster", name)


def names(group: str) -> list[str]:
    """Returns the names of a group, `device` or `cluster`."""
    return sorted(_described(group))


@cache
def validated() -> dict[str, Any]:
    """Returns the figures fitted to runs: `compute` and `attention` scales, `intervals` by kind of run, and `one_gpu`,
    the rates of a rank without others.
    """
    path = FOLDER / "validated.yaml"
    return dict(read_yaml(path) or {}) if path.is_file() else {}


def scales_of(device: Device) -> Scales:
    """Returns the scales of a device."""
    return scales_by_type(validated().get("compute", {}), validated().get("attention", {}), device.type)


def scales_by_type(compute: Mapping[str, float], attention: Mapping[str, float], type: str) -> Scales:
    """Returns the scales of a type of device, from each scale by type."""

    def scale(by_type: Mapping[str, float]) -> float:
        return by_type.get(type) or math.exp(sum(map(math.log, by_type.values())) / max(len(by_type), 1))

    return Scales(scale(compute), scale(attention))


def _read(kind: type[Kind], group: str, name: str) -> Kind:
    described, path = _described(group), Path(name)
    names = sorted(described)
    if name in described:
        return _checked(kind, name, FOLDER / f"{group}s.yaml", described[name])
    if path.suffix != ".yaml":
        begins = [longer for longer in names if name and longer.startswith(name)]
        hint = f"; did you mean {' or '.join(begins[:2])}?" if begins else nearest(name, names)
        more = f"; there are {', '.join(names)}" if hint.endswith("?") else ""  # else it names them
        raise ValueError(f"{group} {name} is not described{hint}{more}; or name a yaml file of this form")
    if not path.is_file():
        raise ValueError(f"{group} {name}: there is no such file; a name is one of {', '.join(names)}")
    return _checked(kind, path.stem, path, read_yaml(path))


@cache
def _described(group: str) -> dict[str, Any]:
    return dict(read_yaml(FOLDER / f"{group}s.yaml"))


def _checked(kind: type[Kind], name: str, path: Path, section: Any) -> Kind:
    """Builds a dataclass from a file's mapping. Raises a ValueError that names file, key and value."""
    if not isinstance(section, Mapping):
        raise ValueError(f"{path}: a mapping of {kind.__name__.lower()} keys is wanted")
    hints = get_type_hints(kind)
    keys: dict[str, bool] = {}  # -> whether it is needed
    for own in fields(kind)[1:]:  # all but the name
        keys[own.name] = own.default is MISSING and own.default_factory is MISSING
    if unknown := sorted(map(str, section.keys() - keys.keys())):
        raise ValueError(f"{path}: {unknown[0]} is no key{nearest(unknown[0], {*keys})}")
    if missing := sorted(key for key, is_needed in keys.items() if is_needed and key not in section):
        raise ValueError(f"{path}: {missing[0]} is missing")
    for key, value in section.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if hints[key] in (int, float) and not (is_number and value > 0):
            raise ValueError(f"{path}: {key}={value!r}: a number above 0 is wanted")
    return kind(name=name, **section)
