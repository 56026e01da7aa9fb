"""The command lines of a sweep under fire. Losses of their cells repeat to the bit: one thread a rank, fixed seeds.

Together they have 200 cells and 204 launches; 6 cells are refused, which makes no runs, and 16 fail by design, each in
the same way every time.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL = (
    "model.layers=1", "model.hidden=16", "sequence=16", "measure=quick", "measure.steps=2", "launch.threads=1",
    "device=cpu",
)  # fmt: skip
OWN = tuple(word for word in SMALL if not word.startswith("model."))


@dataclass(frozen=True)
class Command:
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
        Command(f"{strategy} {model}", 12, (
            f"strategy={strategy}", f"model={model}", "world_size=1,2,3", "precision=fp32,bf16", "accumulation=1,2",
            "batch=12",
        ))
        for model in ("mlp", "gpt_tiny") for strategy in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    ),
    *(
        Command(f"{strategy} tiers", 12, (
            f"strategy={strategy}", "world_size=1,2,3", "model=mlp", "offload=cpu,nvme", "offload.block_bytes=64KiB",
            "precision=fp32,fp16",
        ))
        for strategy in ("zero1", "zero2", "zero3")
    ),
    Command("references", 12, (
        "strategy=zero2,zero3", "world_size=1,2", "model=mlp", "seed=7,8,9", "measure.check_training=true",
        "measure.passes=timed",
    )),
    Command("repeats", 4, (
        "strategy=ddp,zero1", "world_size=1,2", "model=mlp", "clip=0.5", "measure.repeats=2", "measure.trace=true",
    )),
    Command("invalid", 12, ("strategy=ddp,zero1,zero2", "world_size=1,2", "model=mlp,gpt_tiny", "batch=5")),
    Command("diverged", 4, (
        "strategy=ddp,zero3", "world_size=1,2", "model=mlp", "optimizer=sgd", "optimizer.lr=1e6",
    )),
    Command("failing", 12, (
        "strategy=ddp,zero3", "world_size=1,2", "model=raises,grabs,hangs", "launch.timeout_s=8",
    ), OWN),
)  # fmt: skip
"""The sweep. batch=5 is no whole micro-batch a rank, over two ranks."""

ONE = (Command("one", 4, ("strategy=zero1,zero3", "world_size=1,2", "model=mlp")),)
"""A sweep of seconds, to try the harness itself."""
