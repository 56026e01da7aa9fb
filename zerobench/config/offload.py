"""Tiers in a resolved config: what makes no sense, and what engine, launcher and theory hear."""

from __future__ import annotations

from typing import Any

from .. import zero
from ..strategies import names_with, spec_of, specs
from ..theory.tiers import NOWHERE, TierShape
from ..zero.offload.disk import problems_of_path


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on tiers that cannot be; fills in, in place, what follows from the strategy."""
    section, strategy = plain.get("offload"), plain["strategy"]["name"]
    if section is None:
        return []
    name = f"offload={section['name']}"
    leave = spec_of(strategy).composes.offload
    if not leave:
        return [f"{name}: strategy={strategy} does not offload here; use one of {', '.join(names_with('offload'))}"]
    if section["name"] == "nvme" and section["parameters"] is None:
        section["parameters"] = "parameters" in leave
    if section["parameters"] and "parameters" not in leave:
        others = " or ".join(name for name, spec in specs().items() if "parameters" in spec.composes.offload)
        return [f"offload.parameters=true: strategy={strategy} has whole parameters on every rank; use {others}"]
    problems = problems_of_path(section["path"]) if section.get("path") else []
    problems = [f"offload.path={problem}" for problem in problems]
    if section.get("delayed") and plain["precision"]["name"] == "fp16":
        problems.append("offload.delayed=true: loss scaling must judge an update before the next; use bf16 or fp32")
    try:
        _offload_of(section).check(strategy, leave)
    except ValueError as error:
        problems.append(str(error))
    return problems


def shape_of(plain: dict[str, Any]) -> TierShape:
    """Returns theory's view of the tiers."""
    section = plain.get("offload")
    if section is None:
        return NOWHERE
    place = {"cpu": "host", "nvme": "nvme"}[section["name"]]
    names = ("optimizer", "gradients", "parameters", "fraction", "delayed", "block_bytes", "buffers", "direct")
    return TierShape(place, **{name: section[name] for name in names if name in section})


def files_in(plain: dict[str, Any], folder: str) -> str | None:
    """Where ranks make folders for the states that live in files: `offload.path`, or the run's own `folder`."""
    offload = plain.get("offload", {})
    return (offload["path"] or folder) if offload.get("name") == "nvme" else None


def engine_options(plain: dict[str, Any], folder: str | None) -> dict[str, Any]:
    """Keyword arguments for our engine. `folder`: for files, where the config names none."""
    return {"offload": _offload_of(plain["offload"], folder)} if "offload" in plain else {}


def _offload_of(section: dict[str, Any], folder: str | None = None) -> zero.Offload:
    chosen = {key: value for key, value in section.items() if key not in ("name", "delayed", "delayed_after")}
    if section["name"] == "nvme":
        return zero.NvmeOffload(**chosen | {"path": section["path"] or folder or "(the run's own folder)"})
    return zero.Offload(**chosen, delayed_after=section["delayed_after"] if section["delayed"] else None)
