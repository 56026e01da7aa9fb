"""Kinds of launch: how a sweep's command is started, and the cluster that it needs, as a row each."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from tests.ranks import free_port

MODULE = "tests.fire.models"

MEET_S = 40
"""Time in which torchrun's agents must have met."""


@dataclass(frozen=True)
class Kind:
    """`command_lines`: arguments -> the command lines of the processes that a user starts. `on_slurm`: jobs run in the
    queue of a SLURM of two nodes, which is the campaign's own.
    """

    name: str
    command_lines: Callable[[list[str]], list[list[str]]]
    on_slurm: bool = False


def _local(arguments: list[str]) -> list[list[str]]:
    return [[sys.executable, "-m", MODULE, *arguments]]


def _launcher(name: str, *words: str) -> Callable[[list[str]], list[list[str]]]:
    return lambda arguments: _local([*arguments, f"hydra/launcher={name}", *words])


def _torchrun(arguments: list[str]) -> list[list[str]]:
    """Two agents, of two ranks and one; the first has the store. An agent whose other is killed before they have met
    waits for it on its own, ten minutes by default: that is torchrun's, and no hang of a sweep.
    """
    port = str(free_port())
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--master-addr", "127.0.0.1",
             "--master-port", port, "--rdzv-conf", f"timeout={MEET_S}"]  # fmt: skip
    return [
        [*agent, "--node-rank", str(node), "--nproc-per-node", str(ranks), "-m", MODULE, *arguments]
        for node, ranks in enumerate((2, 1))
    ]


OF_SLURM = ("hydra.launcher.tasks_per_node=2", "hydra.launcher.cpus_per_task=1", "launch.group_by=world_size")
"""The cells of a command are a job per world size."""

ON_TWO_NODES = {"world_size=1,2,3": "world_size=1,2,4", "batch=12": "batch=16"}
"""Three ranks are no multiple of two nodes; four are on both, two on each."""


def _slurm(arguments: list[str]) -> list[list[str]]:
    placed = [ON_TWO_NODES.get(word, word) for word in arguments]
    return _launcher("submitit_slurm", *OF_SLURM)(placed)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("local", _local),
        Kind("joblib", _launcher("joblib")),
        Kind("submitit_local", _launcher("submitit_local")),
        Kind("torchrun", _torchrun),
        Kind("submitit_slurm", _slurm, on_slurm=True),
    )
}
