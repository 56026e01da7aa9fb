"""The command lines of a sweep under fire, and the kinds of launch: how they are started, and the cluster they need.

Losses of the cells repeat to the bit: one thread a rank, fixed seeds. Together the commands have 200 cells and 204
launches; 6 cells are refused, which makes no runs, and 16 fail by design, each in the same way every time.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass

SMALL = (
    "model.layers=1", "model.hidden=16", "sequence=16", "measure=quick", "measure.steps=2", "launch.threads=1",
    "device=cpu",
)  # fmt: skip
OWN = tuple(word for word in SMALL if not word.startswith("model."))


@dataclass(frozen=True)
class FiredCommand:
    """A command line. `cells`: how many it composes to."""

    name: str
    cells: int
    words: tuple[str, ...]
    small: tuple[str, ...] = SMALL

    @property
    def arguments(self) -> list[str]:
        """The arguments of the command, without its results folder."""
        return ["-m", *self.small, *self.words]


COMMANDS = (
    *(
        FiredCommand(f"{strategy} {model}", 12, (
            f"strategy={strategy}", f"model={model}", "world_size=1,2,3", "precision=fp32,bf16", "accumulation=1,2",
            "batch=12",
        ))
        for model in ("mlp", "gpt_tiny") for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    ),
    *(
        FiredCommand(f"{strategy} tiers", 12, (
            f"strategy={strategy}", "world_size=1,2,3", "model=mlp", "offload=cpu,nvme", "offload.block_bytes=64KiB",
            "precision=fp32,fp16",
        ))
        for strategy in ("zero1", "zero2", "zero3")
    ),
    FiredCommand("references", 12, (
        "strategy=zero2,zero3", "world_size=1,2", "model=mlp", "seed=7,8,9", "measure.check_training=true",
        "measure.passes=timed",
    )),
    FiredCommand("repeats", 4, (
        "strategy=ddp,zero1", "world_size=1,2", "model=mlp", "clip=0.5", "measure.repeats=2", "measure.trace=true",
    )),
    FiredCommand("invalid", 12, ("strategy=ddp,zero1,zero2", "world_size=1,2", "model=mlp,gpt_tiny", "batch=5")),
    FiredCommand("diverged", 4, (
        "strategy=ddp,zero3", "world_size=1,2", "model=mlp", "optimizer=sgd", "optimizer.lr=1e6",
    )),
    FiredCommand("failing", 12, (
        "strategy=ddp,zero3", "world_size=1,2", "model=raises,grabs,hangs", "launch.timeout_s=8",
    ), OWN),
)  # fmt: skip
"""The sweep. batch=5 is no whole micro-batch a rank, over two ranks."""

ONE = (FiredCommand("one", 4, ("strategy=zero1,zero3", "world_size=1,2", "model=mlp")),)
"""A sweep of seconds, to try the harness itself."""

MODULE = "validation.fire.models"

MEET_S = 40
"""Time in which torchrun's agents must have met."""


@dataclass(frozen=True)
class LaunchKind:
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
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
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
        LaunchKind("local", _local),
        LaunchKind("joblib", _launcher("joblib")),
        LaunchKind("submitit_local", _launcher("submitit_local")),
        LaunchKind("torchrun", _torchrun),
        LaunchKind("submitit_slurm", _slurm, on_slurm=True),
    )
}
