"""Resolves a user's config to a cell: derives every open value and checks everything."""

from __future__ import annotations

import math
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from .. import strategies
from ..data import TEXT_VOCABULARY, text_hash
from ..models import gpt_moe, huggingface, linears
from ..registry import DATA, MODELS
from ..sizes import parse_memory
from ..strategies import StrategyOptions, StrategySpec
from ..zero.options import AUTO, MODES, REDUCE_WITH, SHARDS, Options
from . import combinations, keys, world
from .cell import Cell, CellConfig, data_ranks
from .plugins import LauncherChoice
from .schema import OF_A_SWEEP, RETRIED, Config, Gpt, GptMoe, Huggingface, Model, Synthetic, Text
from .schema_training import NORMS, default_implementation


def resolve(
    draft: Config, model_name: str, stray: list[str], launcher: LauncherChoice | None = None, target: str = ""
) -> Cell:
    """Derives values that are left open and checks the others. `draft`: valid for its schema; it is changed. `stray`:
    error messages for unknown keys. `launcher`: the plugin whose jobs run the cell; None for this machine. `target`:
    the device that fake tensors act as, whose defaults the cell gets; empty: the cell's own.
    """
    problems = list(stray)
    draft.results_dir = os.path.expanduser(draft.results_dir)
    spec = strategies.spec_of(draft.strategy.name)
    draft.strategy = replace(draft.strategy, **spec.filled(draft.strategy.values()))
    measure = draft.measure
    measure.check_training = measure.check_training.lower()  # Hydra reads true as a truth value: "True"
    if strange := [word for word in draft.launch.retry if word not in RETRIED]:
        problems.append(
            f"launch.retry={','.join(strange)}: use {', '.join(RETRIED)}; other ends would be the same again"
        )
    chosen = {
        "measure.check_training": measure.check_training, "draw_on": draft.draw_on, "tensors": draft.tensors,
        "measure.passes": measure.passes, "measure.save": measure.save, "huggingface.loss": draft.huggingface.loss,
        "compile": draft.compile,
    }  # fmt: skip
    wrong = {key: word for key, word in chosen.items() if word not in keys.KEYS[key].words}
    problems += [f"{key}={word}: use one of {', '.join(keys.KEYS[key].words)}" for key, word in wrong.items()]
    own_threads = draft.launch.threads is not None
    on_machines = world.resolve_ranks(draft, problems, None if launcher is None or launcher.is_here else launcher)
    _resolve_batch(draft, problems)
    found_hash = _resolve_data(draft, problems)
    _resolve_model(draft, problems)
    _resolve_strategy(draft.strategy, spec, draft.model.kind, problems)
    _resolve_training(draft, target or draft.device, problems)
    own: dict[str, Any] = {field.name: getattr(draft, field.name) for field in fields(draft)}
    own = {key: value for key, value in own.items() if key not in OF_A_SWEEP} | on_machines
    if draft.model.kind != "huggingface":
        own["huggingface"] = None
    cell = CellConfig(**own, model_name=model_name, text_hash=found_hash, own_threads=own_threads)
    problems += world.problems_of_measure(cell) + _problems_of_strategy(cell, spec) + combinations.validate(cell)
    cell = combinations.resolved(cell)
    problems += keys.problems_of(cell)
    return Cell(cell, tuple(problems or combinations.problems_of_model(cell)))


def unresolved(config: Any, model_name: str, reason: str) -> Cell:
    """Returns a cell for a config that lacks values, with the parts that can be read, so that it becomes a row."""
    readable: dict[str, Any] = _without_interpolations(OmegaConf.to_container(config, resolve=False))
    model = readable["model"] if isinstance(readable["model"], dict) else {}
    readable["model"] = model | {"name": model_name}
    readable["results_dir"] = os.path.expanduser(readable["results_dir"] or "results/runs")
    if model.get("kind") != "huggingface":
        readable.pop("huggingface", None)
    return Cell(CellConfig.from_dict(readable), (reason,))


def _without_interpolations(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _without_interpolations(value) for key, value in node.items()}
    return None if isinstance(node, str) and ("${" in node or node == "???") else node


def _resolve_batch(draft: Config, problems: list[str]) -> None:
    """batch = micro_batch · accumulation · world_size / tensor_parallel. A search chooses the first two itself."""
    search = draft.search
    if search.memory_limit is not None:
        try:
            parse_memory(search.memory_limit)
        except ValueError as error:
            problems.append(f"search.memory_limit: {error}")
        if draft.batch is None:
            problems.append(
                "search.memory_limit: give batch, the samples of a step that all combinations have in common"
            )
        if draft.micro_batch is not None or draft.accumulation != 1:
            problems.append("search.memory_limit: the search chooses micro_batch and accumulation; leave them out")
        if not search.checkpointing:
            problems.append("search.checkpointing=[]: name at least one of false and true")
    ranks, micro, batch = data_ranks(draft), draft.micro_batch, draft.batch
    parts = ranks * max(1, draft.accumulation)
    if micro is not None and batch is not None:
        problems.append(f"batch={batch}: give either batch or micro_batch={micro}, not both; the other is derived")
    elif batch is not None and batch % parts:
        shared = f" over tensor_parallel={draft.tensor_parallel}" if draft.tensor_parallel > 1 else ""
        of = f"world_size={draft.world_size or 1}{shared}"
        of += f" times accumulation={draft.accumulation}" if parts > ranks else ""
        problems.append(f"batch={batch}: {of} must divide it: every rank must get as many samples")
    micro = micro if micro is not None else batch // parts if batch is not None else 4
    draft.micro_batch, draft.batch = micro, batch if batch is not None else micro * parts
    if micro < 1:
        problems.append(f"micro_batch={micro}: every rank needs at least 1 sample")


def _resolve_data(draft: Config, problems: list[str]) -> str | None:
    """Makes the path of a text absolute and returns the text's hash."""
    data, kind = draft.data, draft.model.kind
    takes = kind in MODELS.own or MODELS.takes(kind, "sequence") or DATA.takes(data.name, "sequence")
    if data.name not in DATA.own and not takes:
        draft.sequence = 1  # a sample is one thing: tokens/s are samples/s
    if not isinstance(data, Text):
        return None
    if data.path is not None:
        where = Path(data.path).expanduser()
        if not os.path.isfile(where):  # a name that is too long is none either
            problems.append(f"data.path={data.path}: there is no such file; name a local text file")
            return None
        data.path = str(where.resolve())
        if where.stat().st_size <= draft.sequence:
            problems.append(f"data.path={data.path}: too short for sequence={draft.sequence}")
    return text_hash(data.path)


def _resolve_model(draft: Config, problems: list[str]) -> None:
    """Fills in vocabulary, positions and sequence from the data, for our models and users' models."""
    model, data = draft.model, draft.data
    where = "huggingface" if model.kind == "huggingface" else "model"
    shape: Any = draft.huggingface if model.kind == "huggingface" else model  # a user's has fields of its own
    if isinstance(shape, Huggingface) and shape.config is not None:
        try:
            sizes = huggingface.read_config(shape.config, shape.options)
            for name, value in sizes._asdict().items():  # the cell has it all, and needs the file no more
                setattr(shape, name, value)
        except ValueError as error:
            problems.append(str(error))
            return
    wanted = TEXT_VOCABULARY if isinstance(data, Text) else getattr(data, "vocabulary", None)
    if hasattr(shape, "vocabulary"):
        shape.vocabulary = shape.vocabulary if shape.vocabulary is not None else wanted or TEXT_VOCABULARY
        if wanted is not None and shape.vocabulary < wanted:
            problems.append(f"{where}.vocabulary={shape.vocabulary}: the data's tokens need at least {wanted}")
    if isinstance(data, Synthetic):
        data.vocabulary = wanted or getattr(shape, "vocabulary", None) or TEXT_VOCABULARY
    if hasattr(shape, "positions"):
        shape.positions = shape.positions if shape.positions is not None else draft.sequence
        if shape.positions < draft.sequence:
            own = "options.max_position_embeddings" if getattr(shape, "config", None) else "positions"
            why = f"the model has only {shape.positions} positions; add {where}.{own}={draft.sequence}"
            problems.append(f"sequence={draft.sequence}: {why}, or take sequence={shape.positions}")
    if model.kind in MODELS.own:
        problems += _problems_of_shape(where, shape) + _problems_of_parts(model, where, shape, draft.sequence)
    elif getattr(model, "sequence", 0) is None:
        shape.sequence = draft.sequence


def _problems_of_shape(where: str, shape: Any) -> list[str]:
    """Fills in the width of an expert; returns error messages for shapes that cannot be run."""
    sizes = {key: getattr(shape, key) for key in ("layers", "hidden", "heads", "vocabulary") if hasattr(shape, key)}
    problems = [f"{where}.{key}={size}: must be at least 1" for key, size in sizes.items() if size < 1]
    if isinstance(shape, Huggingface) and shape.config is not None:
        return problems  # the file's own architecture has checked it
    if not problems and "heads" in sizes and shape.hidden % shape.heads:
        problems.append(f"{where}.heads={shape.heads}: it must divide hidden={shape.hidden}")
    if isinstance(shape, Gpt) and shape.tiles > shape.hidden:
        problems.append(f"model.tiles={shape.tiles}: a matrix of {shape.hidden} rows has no more tiles than that")
    if isinstance(shape, GptMoe):
        shape.expert_hidden = shape.expert_hidden if shape.expert_hidden is not None else 4 * shape.hidden
        if not 1 <= shape.top_k <= shape.experts:
            experts = f"model.experts={shape.experts} experts"
            problems.append(f"model.top_k={shape.top_k}: a token passes through 1 to {experts}")
        if shape.routing not in gpt_moe.ROUTINGS:
            problems.append(f"model.routing={shape.routing}: use {', '.join(gpt_moe.ROUTINGS)}")
        for key, width in {"hidden": shape.hidden, "expert_hidden": shape.expert_hidden}.items():
            if width % GROUPED_WIDTH and not shape.separate_experts:
                why = f"a grouped product takes multiples of {GROUPED_WIDTH}; or use model.separate_experts=true"
                problems.append(f"model.{key}={width}: {why}")
    if isinstance(shape, Huggingface):
        problems += huggingface.problems_of(shape.architecture, shape.options)
    return problems


GROUPED_WIDTH = 8
"""Rows of the factors of torch's grouped product begin at multiples of 16 bytes."""


def _problems_of_parts(model: Model, where: str, shape: Any, sequence: int) -> list[str]:
    """Returns error messages for adapters and sequence chunks that the model cannot have."""
    values, by_peft = model.options, isinstance(shape, Huggingface)
    problems = linears.lora_problems(values.get("lora", 0), getattr(shape, "hidden", 0), where, by_peft)
    for key in ("loss_chunks", "mlp_chunks"):
        if (parts := values.get(key, 1)) > sequence:
            problems.append(f"model.{key}={parts}: a sequence of {sequence} tokens has no more parts than that")
    if values.get("mlp_chunks", 1) > 1 and getattr(shape, "tiles", 1) > 1:
        why = "each tile would be gathered once per part; leave one of the two out"
        problems.append(f"model.mlp_chunks={shape.mlp_chunks}: with model.tiles={shape.tiles} {why}")
    if isinstance(shape, Huggingface):
        chunks = values["loss_chunks"], values["mlp_chunks"]
        balances = bool(shape.options.get("output_router_logits"))
        problems += huggingface.problems_of_chunks(*chunks, shape.architecture, shape.loss, balances)
    return problems


def _resolve_strategy(strategy: StrategyOptions, spec: StrategySpec, model: str, problems: list[str]) -> None:
    """Sets options that were left open to the mode's value, or to the engine's default."""
    chosen = strategy.values()
    ours = {key: chosen.get(key) for key in spec.read_by_harness}
    accumulate, mode, construct = (ours.get(key) for key in ("accumulate", "mode", "construct"))
    if construct not in (None, "plain", "meta"):
        problems.append(f"strategy.construct={construct}: use plain or meta")
    if construct == "meta" and model == "huggingface":
        why = "transformers' models initialize themselves in ways that cannot be replayed; use construct=plain"
        problems.append(f"strategy.construct=meta: {why}")
    choices = keys.KEYS["strategy.accumulate"].words
    if accumulate is not None and accumulate not in choices:
        problems.append(f"strategy.accumulate={accumulate}: use {' or '.join(choices)}")
    if mode is None:
        return
    if mode not in MODES:
        problems.append(f"strategy.mode={mode}: use one of {', '.join(MODES)}")
    defaults = {field.name: field.default for field in fields(Options)} | MODES.get(mode, {})
    for key in [key for key, value in chosen.items() if value is None]:
        setattr(strategy, key, defaults[key])
    if (keep_root := getattr(strategy, "keep_root", None)) not in (None, True, False, AUTO):
        problems.append(f"strategy.keep_root={keep_root}: use true, false or {AUTO}")
    for key, words in {"shards": SHARDS, "reduce_with": REDUCE_WITH}.items():
        if (word := getattr(strategy, key, None)) not in (None, *words):
            problems.append(f"strategy.{key}={word}: use {' or '.join(words)}")


def _problems_of_strategy(cell: CellConfig, spec: StrategySpec) -> list[str]:
    problems = []
    if not spec.installed:
        how = f"; {spec.install}" if spec.install else ""
        problems.append(f"strategy={spec.name}: needs {spec.requires}, which is not installed{how}")
    if cell.clip is not None and not spec.composes.clip:
        problems.append(f"clip={cell.clip:g}: strategy={spec.name} clips inside its own step, unseen; leave it out")
    few = getattr(cell.strategy, "reshard_ranks", None)
    if few is not None and (few < 1 or cell.world_size % few or few == cell.world_size or spec.name != "fsdp2"):
        why = f"it must divide world_size={cell.world_size}, be from 1 to below it, and strategy be fsdp2; leave it out"
        problems.append(f"strategy.reshard_ranks={few}: {why}")
    return problems


def _resolve_training(draft: Config, device: str, problems: list[str]) -> None:
    """Resolves the optimizer and precision for `device`, clipping, offload, and the warm-up that the offload needs."""
    optimizer, strategy = draft.optimizer, draft.strategy.name
    updated_by = "cuda" if device == "cuda" and not draft.offload.updates_on_host else "cpu"
    if optimizer.implementation == "auto":
        optimizer.implementation = default_implementation(optimizer.name, updated_by)
    problems += optimizer.problems()
    draft.precision = draft.precision.resolved(strategy, updated_by, optimizer)
    problems += draft.precision.problems(strategy)
    draft.offload = draft.offload.resolved(strategy)
    # Measured steps must be alike, so delayed updates begin before the first measured step.
    draft.measure.warmup = max(draft.measure.warmup, draft.offload.settles_after)
    if draft.clip is not None and not 0 < draft.clip < math.inf:
        problems.append(f"clip={draft.clip:g}: a norm to clip at must be above 0 and finite; null clips nothing")
    if draft.clip_norm not in NORMS:
        problems.append(f"clip_norm={draft.clip_norm}: use {' or '.join(NORMS)}")
    elif draft.clip is None and draft.clip_norm != "2":
        problems.append(f"clip_norm={draft.clip_norm}: it has no effect without clip; add clip=1.0, or leave it out")
