"""Tiers: which part of the model states lives in host memory or in files."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .. import zero
from ..strategies import names_with, spec_of, specs
from ..theory.tiers import NOWHERE, TierShape
from ..zero.offload.disk import problems_of_path
from .axis import Axis, CellView

MIB = 2**20


@dataclass
class Offload(Axis):
    """Which part of the model states lives in another tier than the device: none."""

    name: str = "none"

    def resolved(self, strategy: str) -> Offload:
        """Returns the section with the options filled in that follow from the strategy."""
        return self

    def theory_shape(self) -> TierShape:
        """Returns the tier of each of the model states."""
        return NOWHERE

    def files_in(self, folder: str) -> str | None:
        """Returns where ranks make folders for states that live in files, or None: `path`, or the run's `folder`."""
        return None

    @property
    def updates_on_host(self) -> bool:
        """True where the CPU updates the optimizer's shard."""
        return False

    @property
    def exact_steps(self) -> int | None:
        """Number of steps whose updates are on time; None where all are."""
        return None

    @property
    def settles_after(self) -> int:
        """Number of steps before the first that every later one is like. The step after the last update on time makes
        none: its gradients are kept for the next.
        """
        return 0 if self.exact_steps is None else self.exact_steps + 1

    @property
    def label(self) -> str:
        """The choice as on a command line: "offload=cpu"."""
        return "" if self.name == "none" else f"offload={self.name}"

    def _refused(self, cell: CellView) -> list[str]:
        strategy = cell.strategy.name
        if spec_of(strategy).composes.offload:
            return []
        others = ", ".join(names_with("offload"))
        return [f"offload={self.name}: strategy={strategy} does not offload here; use one of {others}"]


@dataclass
class CpuOffload(Offload):
    """ZeRO-Offload (arXiv 2101.06840): the parts named here live in pinned host memory, and the update runs there.

    `fraction` of the optimizer's shard goes, the rest stays. `delayed`: from step `delayed_after` on the update runs
    behind the next step's forward and backward, whose parameters are one update older (delayed parameter update).
    """

    name: str = "cpu"
    optimizer: bool = True
    gradients: bool = True
    parameters: bool = False
    fraction: float = 1.0
    delayed: bool = False
    delayed_after: int = 40

    def validate(self, cell: CellView) -> list[str]:
        """Returns sentences on tiers that the strategy or the precision rules out."""
        if refused := self._refused(cell) or _whole_parameters(cell.strategy.name, self.parameters):
            return refused
        problems = []
        if self.delayed and cell.precision.name == "fp16":
            problems.append("offload.delayed=true: loss scaling must judge an update before the next; use bf16 or fp32")
        return problems + _problems_of_policy(self.policy(), cell.strategy.name)

    def engine_options(self, cell: CellView, folder: str | None = None) -> dict[str, Any]:
        """The engine's placement policy."""
        return {"offload": self.policy()}

    def policy(self) -> zero.Offload:
        """Returns the engine's policy."""
        delayed_after = self.delayed_after if self.delayed else None
        return zero.Offload(
            optimizer=self.optimizer, gradients=self.gradients, parameters=self.parameters, fraction=self.fraction,
            delayed_after=delayed_after,
        )  # fmt: skip

    def theory_shape(self) -> TierShape:
        """Returns the tier of each of the model states."""
        return TierShape("host", self.optimizer, self.gradients, self.parameters, self.fraction, delayed=self.delayed)

    @property
    def updates_on_host(self) -> bool:
        """True where the CPU updates the optimizer's shard."""
        return self.optimizer

    @property
    def exact_steps(self) -> int | None:
        """Number of steps whose updates are on time; None where all are."""
        return self.delayed_after if self.delayed else None


@dataclass
class NvmeOffload(Offload):
    """ZeRO-Infinity (arXiv 2104.07857): the parts live in files under `path` (null: a folder of the run's own beside
    the results), read and written in blocks of `block_bytes`, `depth` at a time, through a pool of `buffers` of them.

    `parameters`: null means under zero3. `direct`: past the page cache where the file system can. `checksums`: every
    block is checked as it is read.
    """

    name: str = "nvme"
    path: str | None = None
    optimizer: bool = True
    gradients: bool = True
    parameters: bool | None = None
    fraction: float = 1.0
    block_bytes: int = 4 * MIB
    buffers: int = 16
    depth: int = 8
    direct: bool = True
    checksums: bool = True

    def resolved(self, strategy: str) -> Offload:
        """Returns the section with `parameters` filled in, under a strategy that offloads."""
        leave = spec_of(strategy).composes.offload
        return replace(self, parameters="parameters" in leave) if self.parameters is None and leave else self

    def validate(self, cell: CellView) -> list[str]:
        """Returns sentences on tiers that the strategy or the file system rules out."""
        strategy = cell.strategy.name
        if refused := self._refused(cell) or _whole_parameters(strategy, bool(self.parameters)):
            return refused
        problems = problems_of_path(self.path) if self.path else []
        problems = [f"offload.path={problem}" for problem in problems]
        return problems + _problems_of_policy(self.policy(strategy), strategy)

    def engine_options(self, cell: CellView, folder: str | None = None) -> dict[str, Any]:
        """The engine's placement policy; its files lie in `folder` where the config names no path."""
        return {"offload": self.policy(cell.strategy.name, folder)}

    def policy(self, strategy: str, folder: str | None = None) -> zero.NvmeOffload:
        """Returns the engine's policy."""
        return zero.NvmeOffload(
            path=self.path or folder or "(the run's own folder)", optimizer=self.optimizer, gradients=self.gradients,
            parameters=_parameters_leave(strategy) if self.parameters is None else self.parameters,
            fraction=self.fraction,
            block_bytes=self.block_bytes, buffers=self.buffers, depth=self.depth, direct=self.direct,
            checksums=self.checksums,
        )  # fmt: skip

    def theory_shape(self) -> TierShape:
        """Returns the tier of each of the model states."""
        return TierShape(
            "nvme", self.optimizer, self.gradients, bool(self.parameters), self.fraction,
            block_bytes=self.block_bytes, buffers=self.buffers, direct=self.direct,
        )  # fmt: skip

    def files_in(self, folder: str) -> str | None:
        """Returns where ranks make folders for the states: `path`, or the run's `folder`."""
        return self.path or folder

    @property
    def updates_on_host(self) -> bool:
        """True where the CPU updates the optimizer's shard."""
        return self.optimizer


def _whole_parameters(strategy: str, parameters: bool) -> list[str]:
    if not parameters or _parameters_leave(strategy):
        return []
    others = " or ".join(name for name in specs() if _parameters_leave(name))
    return [f"offload.parameters=true: strategy={strategy} has whole parameters on every rank; use {others}"]


def _parameters_leave(strategy: str) -> bool:
    return "parameters" in spec_of(strategy).composes.offload


def _problems_of_policy(policy: zero.Offload | zero.NvmeOffload, strategy: str) -> list[str]:
    try:
        policy.check(strategy, spec_of(strategy).composes.offload)
    except ValueError as error:
        return [str(error)]
    return []
