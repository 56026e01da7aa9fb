"""Predicts a cell's needs before it runs, and whether they fit.

states        the model is built on torch's meta device, and theory replays the schedule of a sequential model. The run
              itself is compared with predictions for its real schedule
activations   of the model's forward and backward on fake tensors, observed by the ledger, without engine or ranks; the
              engine causes any excess in a run
fit           a run needs at least its states: a cell whose states do not fit runs out of memory, and on a CPU so do
              other processes. In a simulated world only one rank runs, and fake tensors need no memory
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import nn

from ..config.cell import Cell, CellConfig
from ..config.combinations import activation_policy
from ..config.schema import Gpt, GptMoe
from ..fake import world_of_tensors
from ..host.environment import FAKE, SIMULATED, gpu_bytes, machine_bytes
from ..sizes import show_bytes
from ..strategies import predicts, shape_of, spec_of
from ..theory.closed_forms import Formula, between_nodes_formula, explained_volume, floor_bytes, state_formulas
from ..theory.groups import GroupShape, tensor_parallel_bytes
from ..theory.replay.states import Prediction, explained, fullest_ranks, predict_states
from ..theory.replay.traffic import Links, predict_links, predict_traffic
from ..theory.shapes import OptimizerShape, PrecisionShape, Schedule, TierShape
from ..theory.strategy import StrategyShape
from ..zero import labels
from .build import ModelFacts, facts_if_any, facts_of, schedule_options


@dataclass(frozen=True)
class Estimate:
    """The prediction for a cell. `psi`: trainable parameters, `frozen`: others; bytes of the states on the rank that
    uses most, on the device, in host memory, in files; elements moved per step over psi; bytes that a rank sends to
    other nodes; bytes between tiers per step, over all ranks.

    All except `psi` and `frozen` are None for a strategy that theory has no schedule for.
    """

    psi: int
    frozen: int = 0
    states_bytes: int | None = None
    volume_psi: float | None = None
    host_bytes: int | None = None
    file_bytes: int | None = None
    down_bytes: int | None = None
    up_bytes: int | None = None
    between_bytes: int | None = None
    floor_bytes: int | None = None
    """The paper's formula for the states, without terms in flight."""


def training_shapes(config: CellConfig) -> tuple[OptimizerShape, PrecisionShape]:
    """Returns theory's view of a resolved cell's training."""
    return config.optimizer.theory_shape(), config.precision.theory_shape(config.data_ranks > 1)


Training = tuple[GroupShape, OptimizerShape, PrecisionShape, TierShape]


def _training(config: CellConfig) -> Training:
    return config.groups, *training_shapes(config), config.offload.theory_shape()


def theory_of(config: CellConfig) -> tuple[StrategyShape, Training]:
    """Returns theory's view of a resolved cell whose strategy it predicts: the strategy, and the rest of the cell."""
    return shape_of(config.strategy.values()), _training(config)


def estimate(config: CellConfig) -> Estimate:
    """Returns the prediction for a resolved cell. Errors of the model's builder propagate."""
    facts = facts_of(config)
    if not predicts(config.strategy.values()):
        return Estimate(facts.psi, facts.frozen)
    schedule, (strategy, rest) = _schedule_of(config, facts), theory_of(config)
    groups, _, precision, _ = rest
    states, links = predict_states(strategy, schedule, *rest), links_of(config, schedule)
    moved = predict_traffic(strategy, schedule, groups, precision)
    down, up = (links.down, links.up) if links is not None else (None, None)
    return Estimate(
        facts.psi, facts.frozen, states.states_bytes, moved.volume / facts.psi if facts.psi else 0.0,
        states.host_bytes, states.file_bytes, down, up, round(moved.between),
        floor_bytes(strategy, facts.shapes, *rest),
    )  # fmt: skip


def formulas_of(config: CellConfig, schedule: Schedule, states: Prediction | None = None) -> dict[str, Formula]:
    """Returns the closed forms of a resolved cell whose strategy theory predicts, with the terms in flight beyond them:
    for each category of states and their sum, for the volume, and for the bytes that ZeRO-3 sends between nodes.
    `states`: the replay's prediction, if known.
    """
    strategy, rest = theory_of(config)
    groups, _, precision, _ = rest
    states = states or predict_states(strategy, schedule, *rest)
    formulas = explained(state_formulas(strategy, schedule.shapes, *rest), states)
    formulas["volume"] = explained_volume(strategy, schedule, groups)
    if strategy.theory.parameters and groups.nodes[1] > 1:
        formulas["between nodes"] = between_nodes_formula(strategy, schedule, groups, precision)
    return formulas


def held_bytes(config: CellConfig) -> tuple[int, int] | None:
    """Returns the bytes of a resolved cell's states on the rank that uses most, on the device and in host memory; for
    another library that partitions like a stage, the paper's formula; None if theory has neither. Errors of the model's
    builder propagate.
    """
    facts = facts_of(config)
    if not predicts(config.strategy.values()):
        formula = closed_form(config, facts)
        return None if formula is None else (formula, 0)
    strategy, rest = theory_of(config)
    states = predict_states(strategy, _schedule_of(config, facts), *rest)
    return states.states_bytes, states.host_bytes


def _schedule_of(config: CellConfig, facts: ModelFacts) -> Schedule:
    return replace(Schedule.sequential(facts.shapes, config.accumulation), **schedule_options(config))


def closed_form(config: CellConfig, facts: ModelFacts) -> int | None:
    """Returns the paper's formula for the states of a resolved cell, in bytes, also for other libraries that partition
    like a stage; None if there is none.
    """
    section = config.strategy.values()
    spec = spec_of(section["name"])
    theory = spec_of(spec.partitions_as).theory if spec.partitions_as else spec.theory
    if theory is None:
        return None
    return floor_bytes(StrategyShape.of(theory, section), facts.shapes, *_training(config))


def links_of(config: CellConfig, schedule: Schedule) -> Links | None:
    """Returns the bytes between tiers in a step of a resolved cell, over all ranks, for a strategy that theory
    predicts; None if activations that cannot be predicted move to host memory.
    """
    activations = moved_bytes(config)
    if activations is None:
        return None
    states, moved = links_of_states(config, schedule), activations * config.world_size
    return replace(states, down=states.down + moved, up=states.up + moved)


def links_of_states(config: CellConfig, schedule: Schedule, rank: int | None = None) -> Links:
    """Returns the bytes of states between tiers in a step, over all ranks or for one."""
    strategy, rest = theory_of(config)
    return predict_links(strategy, schedule, *rest, norms_of(config), rank)


def simulated_ranks(config: CellConfig, facts: ModelFacts | None = None) -> list[int]:
    """Returns the ranks of a simulated world one of which has the peak, the rank with the largest states first: the
    cell's own `rank`, or all that theory cannot exclude. `facts`: about the model, if known. Errors of the model's
    builder are left to the simulated rank, which reports them.
    """
    if config.rank is not None:
        return [config.rank]
    facts = facts or facts_if_any(config)
    if facts is None:
        return [0]
    if not predicts(config.strategy.values()):
        optimizer = config.optimizer.theory_shape()
        return [spec_of(config.strategy.name).fullest_rank(facts.shapes, config.world_size, optimizer)]
    strategy, rest = theory_of(config)
    ranks = fullest_ranks(strategy, _schedule_of(config, facts), *rest)
    return [rank * config.tensor_parallel for rank in ranks]


def host_bytes_beyond(config: CellConfig, schedule: Schedule, rank: int) -> int:
    """Returns by how many bytes the rank that uses most host memory exceeds `rank`: the simulated rank is the one that
    uses most device memory, which may be another. 0 if the cell names a rank.
    """
    if config.rank is not None or not predicts(config.strategy.values()):
        return 0
    strategy, rest = theory_of(config)
    if rest[-1].medium is None:
        return 0
    fullest, own = (predict_states(strategy, schedule, *rest, number).host_bytes for number in (None, rank))
    return fullest - own


def norms_of(config: CellConfig) -> int:
    """Returns how often a step of a resolved cell computes the norm of gradients."""
    return int(config.clip is not None or config.precision.scales)


def tensor_axis_bytes(config: CellConfig) -> dict[str, int]:
    """Returns collective -> bytes that a rank of a resolved cell sends in a step to the ranks that share its model."""
    ranks, model, policy = config.tensor_parallel, config.model, activation_policy(config)
    if ranks == 1 or not isinstance(model, Gpt):
        return {}
    size = config.micro_batch * config.sequence * model.hidden * config.precision.dtype.itemsize
    partitions = policy.partition and size >= policy.least_bytes
    return tensor_parallel_bytes(ranks, model.layers, size, config.recomputes, partitions, config.accumulation)


# -- activations -----------------------------------------------------------------------------------


def predict_activations(config: CellConfig, batches: Any, build: Callable[[CellConfig], nn.Module]) -> int | None:
    """Returns the peak bytes on the device, for the model that `build` makes from a resolved cell. None if there is no
    prediction: for GPUs, whose kernels keep other tensors, for users' models and data, whose activations may depend on
    values, as separate experts with learned routing do, for tensor parallelism, if a policy moves activations, and for
    fake tensors, whose run is itself such a prediction.
    """
    moved = config.activation.name != "none" or config.arena or config.tensor_parallel > 1  # no groups are there now
    if config.device != "cpu" or config.tensors == FAKE or moved:
        return None
    if config.model.kind not in ("gpt", "gpt_moe", "mlp") or config.data.name not in ("text", "synthetic"):
        return None
    if isinstance(config.model, GptMoe) and config.model.separate_experts and config.model.routing == "learned":
        return None
    return activation_bytes(lambda: build(config), batches.batch(0, 0))


def activations_depend_on(config: CellConfig) -> str:
    """Returns as text all that `predict_activations` depends on: with equal texts it is the same."""
    cast = None if config.precision.name == "fp32" else (config.precision, config.strategy.name)
    model = config.model_options, config.model.kind, config.data, config.micro_batch, config.sequence, config.compile
    return repr((model, cast, config.activation, config.arena, config.device, config.tensors, config.deterministic))


def activation_bytes(build: Callable[[], nn.Module], inputs: Sequence[torch.Tensor]) -> int:
    """Returns the peak bytes of activations in a forward and backward of the model, which returns a loss, on `inputs`,
    of which only shapes and dtypes are used. Propagates the error of a model that reads values.
    """
    from ..probes.ledger import ShapesOnly  # not needed by the timed pass, which imports this module, too

    with world_of_tensors(fake=True) as world:
        with world.building():
            model = build()
        # a view of a tensor with values would load torch's compiler when it becomes fake, which takes seconds
        batch = world.take([torch.zeros(tensor.shape, dtype=tensor.dtype) for tensor in inputs])
        with ShapesOnly("cpu") as ledger:
            for name, parameter in model.named_parameters():
                ledger.on_tensor(parameter, labels.PARAMETERS, name)
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: ledger.on_tensor(gradient, labels.GRADIENTS, ""))
            for tensor in batch:
                ledger.on_tensor(tensor, labels.INPUTS, "batch")
            ledger.begin()
            ledger.enter_phase("forward")
            loss = model(*batch)
            ledger.enter_phase("backward")
            loss.backward()
            ledger.end("step")
    return ledger.sums.extremes["step"].highest[labels.ACTIVATIONS]


def moved_bytes(config: CellConfig) -> int | None:
    """Returns the bytes of activations that a rank sends to host memory in a step, and fetches back. None if there is
    no prediction: for models other than our GPT, with adapters, with chunked MLPs, or with tensor parallelism unless
    blocks are recomputed. All layers except the last send the tensors that they keep: Korthikanti et al., Reducing
    Activation Recomputation, arXiv 2205.05198, section 4, without dropout and with fused attention.
    """
    model, policy = config.model, activation_policy(config)
    if policy.keep != "host":
        return 0
    recomputes = config.recomputes or policy.recompute
    is_cut = config.tensor_parallel > 1 and not recomputes
    if not isinstance(model, Gpt) or model.lora or model.mlp_chunks > 1 or is_cut:
        return None
    tokens = config.sequence * config.micro_batch
    stream = config.precision.dtype.itemsize * tokens * model.hidden
    norms_and_attention, mlp = [stream] * 5, [4 * stream] * 2
    kept = [*norms_and_attention, 3 * stream, 4 * model.heads * tokens, *mlp]  # queries, keys and values; log-sum-exp
    if recomputes:
        kept = [stream]
    parts = config.tensor_parallel if policy.partition else 1
    moved = sum(size for size in kept if size >= policy.least_bytes) // parts
    return config.accumulation * (model.layers - 1) * moved


# -- fit -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fit:
    """`memory_bytes` of memory of `owner`, and the states in it: at most `rank_bytes` for each of `ranks` ranks."""

    owner: str
    memory_bytes: int
    ranks: int
    rank_bytes: int

    @property
    def share(self) -> float:
        """The fraction of the memory that the states fill; above 1 if they do not fit."""
        return self.ranks * self.rank_bytes / self.memory_bytes

    @property
    def text(self) -> str:
        """Describes the needed and the available memory."""
        together = f", {show_bytes(self.ranks * self.rank_bytes)} for {self.ranks} ranks" if self.ranks > 1 else ""
        memory = f"{self.owner} has {show_bytes(self.memory_bytes)}"
        return f"its states need {show_bytes(self.rank_bytes)} per rank{together}, and {memory}"


def fit_of(config: CellConfig) -> Fit | None:
    """Returns the local memory that a resolved cell's states fill most; None if they cannot be predicted or need none.
    A GPU has its own memory; without one, states in host memory and on the device share the machine's memory.
    """
    if config.tensors == FAKE:
        return None
    try:
        held = held_bytes(config)
    except Exception:  # a user's builder may do things that a model without memory cannot
        return None
    if held is None:
        return None
    device, host = held
    ranks = 1 if config.backend == SIMULATED else ceil(config.world_size / config.nodes)
    if config.device != "cuda":
        return Fit("this machine", machine_bytes(), ranks, device + host)
    on_gpu = Fit("a GPU here", gpu_bytes(), config.ranks_per_gpu, device)
    return max(on_gpu, Fit("this machine", machine_bytes(), ranks, host), key=lambda fit: fit.share)


def refuse_unfit(cell: Cell) -> Cell:
    """Returns the cell, with a problem if its states do not fit into memory here, unless launch.check_memory is off."""
    if cell.problems or not cell.config.launch.check_memory:
        return cell
    fit = fit_of(cell.config)
    if fit is None or fit.share <= 1:
        return cell
    problem = f"model={cell.config.model_name}: {fit.text}; launch.check_memory=false runs it all the same"
    return Cell(cell.config, (problem,))
