"""Provenance of a figure: code, versions, machine; and hashes that identify equal measurements."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .. import strategies
from ..config.cell import CellConfig
from ..host import job
from ..host.environment import nccl_version, usable_cores
from ..host.revisions import GitError, git, installed_version
from ..registry import DATA, MODELS

PACKAGE = Path(__file__).parent.parent
PACKAGES = ("zerobench", "torch", "numpy", "hydra-core", "transformers", "deepspeed")
"""Packages whose versions are recorded, besides the one that a strategy requires."""


@cache
def source_hash(model_kind: str, data_name: str = "", strategy: str = "", without: tuple[str, ...] = ()) -> str:
    """Hash of this package's code and of the files that build a user's model, data or strategy: 12 hex digits.
    `without`: folders and files of the package to leave out.
    """
    digest = hashlib.sha256()
    for path in sorted(path for kind in ("*.py", "*.cpp") for path in PACKAGE.rglob(kind)):
        if any(path.is_relative_to(PACKAGE / part) for part in without):
            continue
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    digest.update(MODELS.source_of(model_kind))
    digest.update(DATA.source_of(data_name))
    digest.update(strategies.user_source(strategy))
    return digest.hexdigest()[:12]


def source_of(config: CellConfig, without: tuple[str, ...] = ()) -> str:
    """The hash of the code that a resolved cell runs."""
    return source_hash(config.model.kind, config.data.name, config.strategy.name, without)


@cache
def device_class(device: str) -> str:
    """Returns "cpu", or the GPU's model; "cuda" on a machine without a GPU, whose cells are refused."""
    if device != "cuda":
        return "cpu"
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cuda"


def torch_minor(torch_version: str) -> str:
    """Returns "2.13" for "2.13.0+cpu": bytes and times are comparable within a minor version."""
    return ".".join(torch_version.split("+")[0].split(".")[:2])


def alloc_conf(device: str) -> str | None:
    """Returns the setting of CUDA's allocator, such as "expandable_segments:True"; None on other devices."""
    given = [os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    return next(filter(None, given), None) if device == "cuda" else None


def packages_of(config: CellConfig) -> list[str]:
    """Returns the packages besides zerobench that build and train a resolved cell's model, torch first."""
    spec = strategies.find(config.strategy.name)
    others = ("transformers" if config.model.kind == "huggingface" else None, spec.requires if spec else None)
    return ["torch", *filter(None, others)]


def environment_hash(config: CellConfig) -> str:
    """Hashes source, torch, device class and allocator of a resolved cell's run: 8 hex digits."""
    torch_version, *others = (installed_version(name) or "" for name in packages_of(config))
    parts = [source_of(config), torch_version, device_class(config.device), *others]
    if conf := alloc_conf(config.device):
        parts.append(conf)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:8]


def provenance(config: CellConfig) -> dict[str, Any]:
    """Collects the provenance of a resolved cell's run."""
    spec = strategies.find(config.strategy.name)
    described = machine(config.device, config.backend)
    described["versions"] |= {name: installed_version(name) for name in packages_of(config)}
    return {
        "source_hash": source_of(config),
        **({"look": {"label": spec.label, "color": spec.look.color}} if spec is not None and spec.of_user else {}),
        **started(config.nodes),
        **described,
    }


def started(nodes: int) -> dict[str, Any]:
    """Returns the launcher of the ranks, and their number of machines."""
    member = job.current_job()
    return {"launched_by": "zerobench" if member is None else member.job.launched_by, "nodes": nodes}


def machine(device: str, backend: str) -> dict[str, Any]:
    """Collects the provenance of any measurement: code, torch and machine."""
    import torch

    script = Path(sys.argv[0]).name
    program = "zerobench" if script in ("__main__.py", "zerobench") else script
    processor = platform.processor()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
        processor = next(names, platform.machine())
    return {
        "commit": ask_git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(ask_git("status", "--porcelain", "--", ".")),
        "command": shlex.join([program, *sys.argv[1:]]),
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
        "device_class": device_class(device),
        "backend_version": ".".join(map(str, nccl_version() or ()))
        if backend == "nccl"
        else f"{backend} of torch {version('torch')}",
        "cuda": torch.version.cuda,
        "processor": processor,
        "cores": usable_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
    }


@cache
def ask_git(*arguments: str, where: Path = PACKAGE) -> str | None:
    """Returns git's output on the checkout that contains `where`, by default this package, or None."""
    with suppress(GitError):
        return git(where, *arguments, timeout_s=10)
    return None


def versions(names: Sequence[str]) -> dict[str, str]:
    """Returns versions of packages; zerobench itself may run from a checkout and not be installed."""
    return {name: installed_version(name) or "not installed" for name in names}
