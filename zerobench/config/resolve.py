"""A user's config -> a cell: everything derived, everything checked, and the identity of the result."""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from .. import strategies
from ..data import TEXT_VOCABULARY, text_hash
from ..models import huggingface
from ..registry import DATA, MODELS
from ..sizes import parse_bytes
from ..strategies import StrategySpec
from ..zero.options import AUTO, MODES, REDUCTIONS, Options
from . import activations, bounds, combinations, optimizers, precision, schema_memory, world
from .flat import LOCAL, VOLATILE
from .schema import Config
from .schema_training import ACCUMULATE, NORMS

CHECKS = ("auto", "true", "false")
"""Valid values of `measure.check_training`."""


@dataclass(frozen=True)
class Cell:
    """One point of a sweep. `config` is plain and complete; `problems` says in sentences what makes no sense."""

    config: dict[str, Any]
    problems: tuple[str, ...]

    @property
    def cell_id(self) -> str:
        """Hash of the config less what is volatile: 12 hex digits."""
        return _hash(self.config)

    def changed(self, **changes: Any) -> Cell:
        """Returns a copy of the cell with other values at the top level of its config."""
        return Cell({**self.config, **changes}, self.problems)


def work_id(config: dict[str, Any]) -> str:
    """Identity of the measured work on any machine: the hash of a resolved config without volatile and local keys."""
    kept: dict[str, Any] = json.loads(json.dumps(config))
    for key in LOCAL:
        *path, last = key.split(".")
        node = kept
        for part in path:
            node = node.get(part) or {}
        node.pop(last, None)
    return _hash(kept)


def _hash(config: dict[str, Any]) -> str:
    kept = {k: v for k, v in config.items() if k not in VOLATILE}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:12]


def resolve(config: Config, model_name: str, stray: list[str]) -> Cell:
    """Derives what is left open and checks the rest. `stray`: sentences about keys that do not belong."""
    problems = list(stray)
    plain = _plain(config)
    plain["model"]["name"] = model_name
    spec = strategies.spec_of(plain["strategy"]["name"])
    plain["strategy"] = spec.filled(plain["strategy"])
    if plain["check_training"] not in CHECKS:
        problems.append(f"measure.check_training={plain['check_training']}: use {', '.join(CHECKS)}")
    problems += bounds.leave_out_usual(plain)
    schema_memory.leave_out_usual(plain)
    world.resolve_ranks(plain, problems)
    _resolve_batch(plain, problems)
    _resolve_data(plain, problems)
    _resolve_model(plain, problems)
    _resolve_strategy(plain["strategy"], spec, plain["model"]["kind"], problems)
    _resolve_training(plain, problems)
    world.check_measure(plain, problems)
    problems += _problems_of_strategy(plain, spec) + combinations.problems_of(plain) + bounds.problems_of(plain)
    problems += [] if problems else activations.problems_of_units(plain)
    return Cell(plain, tuple(problems))


def unresolved(config: Any, model_name: str, reason: str) -> Cell:
    """A cell whose config lacks values, with what can be read of it, so that it becomes a row all the same."""
    from omegaconf import OmegaConf

    plain: dict[str, Any] = _without_interpolations(OmegaConf.to_container(config, resolve=False))
    launch = plain.pop("launch")
    plain["model"]["name"] = model_name
    plain["results_dir"] = plain["results_dir"] or "results/runs"
    more = {"threads": launch["threads"], "timeout_s": launch["timeout_s"]} | _of_launches(plain["measure"])
    return Cell(plain | more, (reason,))


def _of_launches(measure: dict[str, Any]) -> dict[str, Any]:
    """Takes out of a config's section what is no part of a launch: how many there are, and whether they are checked."""
    return {"repeats": measure.pop("repeats"), "check_training": str(measure.pop("check_training")).lower()}


def _without_interpolations(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_interpolations(value) for key, value in node.items()}
    return None if isinstance(node, str) and ("${" in node or node == "???") else node


def _plain(config: Config) -> dict[str, Any]:
    from omegaconf import OmegaConf

    plain: dict[str, Any] = OmegaConf.to_container(OmegaConf.structured(config), resolve=True)  # type: ignore[assignment]
    launch = plain.pop("launch")
    if plain["model"]["kind"] != "huggingface":
        del plain["huggingface"]
    return plain | {"threads": launch["threads"], "timeout_s": launch["timeout_s"]} | _of_launches(plain["measure"])


def _resolve_batch(plain: dict[str, Any], problems: list[str]) -> None:
    """batch = micro_batch · accumulation · world_size. A search chooses the first two itself."""
    searching = plain["search"]["memory_limit"] is not None
    if searching:
        _check_search(plain, problems)
    ranks, micro, batch = max(1, plain["world_size"] or 1), plain["micro_batch"], plain["batch"]
    parts = ranks * max(1, plain["accumulation"])
    if micro is not None and batch is not None:
        problems.append(f"batch={batch}: give either batch or micro_batch={micro}, not both; the other is derived")
    elif batch is not None and batch % parts:
        of = f"world_size={ranks}" + (f" times accumulation={plain['accumulation']}" if parts > ranks else "")
        problems.append(f"batch={batch}: {of} must divide it: every rank must get as many sequences")
    micro = micro if micro is not None else batch // parts if batch is not None else 4
    plain["micro_batch"], plain["batch"] = micro, batch if batch is not None else micro * parts
    if micro < 1:
        problems.append(f"micro_batch={micro}: every rank needs at least 1 sequence")


def _check_search(plain: dict[str, Any], problems: list[str]) -> None:
    search = plain["search"]
    try:
        parse_bytes(search["memory_limit"])
    except ValueError as error:
        problems.append(f"search.memory_limit: {error}")
    if plain["batch"] is None:
        problems.append("search.memory_limit: give batch, the sequences a step that all combinations have in common")
    if plain["micro_batch"] is not None or plain["accumulation"] != 1:
        problems.append("search.memory_limit: micro_batch and accumulation are what is searched for; leave them out")
    if not search["checkpointing"]:
        problems.append("search.checkpointing=[]: name at least one of false and true")


def _resolve_data(plain: dict[str, Any], problems: list[str]) -> None:
    data = plain["data"]
    if data["name"] not in DATA.own and not _has_sequences(plain):
        plain["sequence"] = 1  # a sample is one thing: tokens/s are samples/s
    if data["name"] != "text":
        return
    if data["path"] is not None:
        where = Path(data["path"]).expanduser()
        if not os.path.isfile(where):  # a name that is too long is none either
            problems.append(f"data.path={data['path']}: there is no such file; name a local text file")
            return
        data["path"] = str(where.resolve())
        if where.stat().st_size <= plain["sequence"]:
            problems.append(f"data.path={data['path']}: too short for sequence={plain['sequence']}")
    data["text_hash"] = text_hash(data["path"])


def _has_sequences(plain: dict[str, Any]) -> bool:
    """Returns True where this model, or the user's data, has the key `sequence`."""
    kind = plain["model"]["kind"]
    return kind in MODELS.own or MODELS.takes(kind, "sequence") or DATA.takes(plain["data"]["name"], "sequence")


def _resolve_model(plain: dict[str, Any], problems: list[str]) -> None:
    model, data = plain["model"], plain["data"]
    shape = plain["huggingface"] if model["kind"] == "huggingface" else model
    wanted = TEXT_VOCABULARY if data["name"] == "text" else data.get("vocabulary")
    if "vocabulary" in shape:
        shape["vocabulary"] = shape["vocabulary"] if shape["vocabulary"] is not None else wanted or TEXT_VOCABULARY
        if wanted is not None and shape["vocabulary"] < wanted:
            name = "huggingface" if model["kind"] == "huggingface" else "model"
            problems.append(f"{name}.vocabulary={shape['vocabulary']}: the data's tokens need at least {wanted}")
    if data["name"] in DATA.own:
        data["vocabulary"] = wanted or shape.get("vocabulary") or TEXT_VOCABULARY
    if "positions" in shape:
        shape["positions"] = shape["positions"] if shape["positions"] is not None else plain["sequence"]
        if shape["positions"] < plain["sequence"]:
            problems.append(f"sequence={plain['sequence']}: the model has only {shape['positions']} positions")
    if model["kind"] not in MODELS.own:
        if "sequence" in model and model["sequence"] is None:
            model["sequence"] = plain["sequence"]
        return
    where = "huggingface" if model["kind"] == "huggingface" else "model"
    too_small = [k for k in ("layers", "hidden", "heads", "vocabulary") if k in shape and shape[k] < 1]
    problems += [f"{where}.{k}={shape[k]}: must be at least 1" for k in too_small]
    if not too_small and "heads" in shape and shape["hidden"] % shape["heads"]:
        problems.append(f"{where}.heads={shape['heads']}: it must divide hidden={shape['hidden']}")
    if "tiles" in model and model["tiles"] > model["hidden"]:
        problems.append(f"model.tiles={model['tiles']}: a matrix of {model['hidden']} rows has no more tiles than that")
    if model["kind"] == "huggingface":
        problems += huggingface.problems_of(shape["architecture"], shape["options"])


def _resolve_strategy(strategy: dict[str, Any], spec: StrategySpec, model: str, problems: list[str]) -> None:
    """Options that were left open become what the mode says, or the engine's default."""
    ours = {key: strategy.get(key) for key in spec.read_by_harness}
    accumulate, mode, construct = (ours.get(key) for key in ("accumulate", "mode", "construct"))
    if construct not in (None, "plain", "meta"):
        problems.append(f"strategy.construct={construct}: use plain or meta")
    if construct == "meta" and model == "huggingface":
        words = "transformers' models initialize themselves in ways that cannot be replayed; use construct=plain"
        problems.append(f"strategy.construct=meta: {words}")
    if accumulate is not None and accumulate not in ACCUMULATE:
        problems.append(f"strategy.accumulate={accumulate}: use {' or '.join(ACCUMULATE)}")
    if mode is None:
        return
    if mode not in MODES:
        problems.append(f"strategy.mode={mode}: use one of {', '.join(MODES)}")
    chosen = {one.name: one.default for one in fields(Options)} | MODES.get(mode, {})
    strategy |= {key: chosen[key] for key, value in strategy.items() if value is None}
    if strategy.get("keep_root") not in (None, True, False, AUTO):
        problems.append(f"strategy.keep_root={strategy['keep_root']}: use true, false or {AUTO}")
    if strategy.get("reduce_with") not in (None, *REDUCTIONS):
        problems.append(f"strategy.reduce_with={strategy['reduce_with']}: use {' or '.join(REDUCTIONS)}")


def _problems_of_strategy(plain: dict[str, Any], spec: StrategySpec) -> list[str]:
    """Sentences where what the strategy needs is not installed, or it cannot do what is asked."""
    problems = []
    if not spec.installed:
        how = f"; {spec.install}" if spec.install else ""
        problems.append(f"strategy={spec.name}: needs {spec.requires}, which is not installed{how}")
    if plain["clip"] is not None and not spec.composes.clip:
        words = "clips inside its own step, unseen; leave it out"
        problems.append(f"clip={plain['clip']:g}: strategy={spec.name} {words}")
    return problems


def _resolve_training(plain: dict[str, Any], problems: list[str]) -> None:
    """The optimizer, the precision, clipping."""
    optimizer, strategy = plain["optimizer"], plain["strategy"]["name"]
    updated_by = "cuda" if plain["device"] == "cuda" and not plain.get("offload", {}).get("optimizer") else "cpu"
    if optimizer["implementation"] == "auto":
        optimizer["implementation"] = optimizers.default_implementation(optimizer["name"], updated_by)
    problems += optimizers.problems_of(optimizer)
    precision.fill_in(plain["precision"], strategy, updated_by)
    problems += precision.problems_of(plain["precision"], strategy)
    if plain["clip"] is not None and not 0 < plain["clip"] < math.inf:
        problems.append(f"clip={plain['clip']:g}: a norm to clip at must be above 0 and finite; null clips nothing")
    if plain["clip_norm"] not in NORMS:
        problems.append(f"clip_norm={plain['clip_norm']}: use {' or '.join(NORMS)}")
