"""The device that an executed cell stands for.

cpu    as this harness runs there: gloo's exchange in pieces, CPU kernels
cuda   as it would run on GPUs: NCCL's collectives on streams, the kernels and defaults that CUDA has
       (fake/as_gpu), memory from the caching allocator
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from ..config.cell import CellConfig
from ..config.schema_training import default_implementation
from ..fake.as_gpu import ATTENTION_KERNELS, BLAS_WORKSPACE, Allocations, as_gpu

KINDS = ("cpu", "cuda")


@dataclass(frozen=True)
class Target:
    """`attention`: the kernel of scaled_dot_product_attention on a GPU: math, flash, efficient; None: torch's choice.
    `architecture`: of the GPU, hopper and later or ampere and earlier, for the size of cuBLAS's workspaces.

    Raises ValueError with a sentence for what is unknown.
    """

    kind: str = "cpu"
    attention: str | None = None
    architecture: str = "hopper"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"device={self.kind}: use one of {', '.join(KINDS)}")
        if self.attention is not None and self.attention not in ATTENTION_KERNELS:
            raise ValueError(f"attention={self.attention}: use one of {', '.join(ATTENTION_KERNELS)}")
        if self.attention is not None and self.kind != "cuda":
            raise ValueError(f"attention={self.attention}: kernels of attention are a GPU's to choose; use device=cuda")
        if self.architecture not in BLAS_WORKSPACE:
            raise ValueError(f"architecture={self.architecture}: use one of {', '.join(BLAS_WORKSPACE)}")

    def defaults(self, config: CellConfig) -> CellConfig:
        """Returns a cell, resolved for a CPU, with the defaults that depend on the device as this one has them. A value
        that was given stays, also where it equals the CPU's default.
        """
        if self.kind == "cpu" or config.offload.updates_on_host:
            return config
        optimizer, precision = config.optimizer, config.precision
        if "optimizer.implementation" in config.left_open:
            optimizer = replace(optimizer, implementation=default_implementation(optimizer.name, self.kind))
        if "precision.tile_bytes" in config.left_open:
            precision = replace(precision, tile_bytes=None).resolved(config.strategy.name, self.kind)
        return replace(config, optimizer=optimizer, precision=precision)

    @contextmanager
    def stands_in(self) -> Iterator[Allocations | None]:
        """Makes fake tensors of the CPU act as those of this device; yields a GPU's allocations."""
        if self.kind == "cpu":
            yield None
            return
        with as_gpu(self.attention, BLAS_WORKSPACE[self.architecture]) as allocations:
            yield allocations


CPU = Target()

CUDA = Target("cuda")
