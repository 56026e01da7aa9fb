"""Image classification: a small convolutional network and images, both of one's own, under every strategy.

    python examples/images.py -m model=convnet data=images strategy=ddp,zero1,zero2,zero3 world_size=2

What the harness has to be told is at the bottom, three lines. The images are made up, so that there is nothing to
download: each class is a pattern, under noise. For your own files read them in `images` and return a DataLoader with
`DistributedSampler(dataset, world_size, rank, seed=seed)` and `drop_last=True`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

import zerobench

CHANNELS, SIZE = 3, 16
Batch = tuple[torch.Tensor, torch.Tensor]


class ConvNet(nn.Module):
    """`forward(images, labels)` returns the mean cross-entropy: (B, 3, 16, 16) float and (B,) int64 -> scalar.

    The blocks are in a ModuleList: stage 3 gathers them one by one, and activation=checkpoint recomputes them.
    """

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(CHANNELS, width, kernel_size=3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(4, width), nn.ReLU(), nn.Conv2d(width, width, kernel_size=3, padding=1))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a batch."""
        x = self.stem(images)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x.mean(dim=(2, 3)))
        return F.cross_entropy(logits.float(), labels)


def convnet(width: int = 32, depth: int = 4, classes: int = 10) -> nn.Module:
    """A residual network of `depth` convolutions of `width` channels. Its options are keys: model.width and so on."""
    return ConvNet(width, depth, classes)


def images(
    classes: int = 10, noise: float = 0.5, *, rank: int, world_size: int, micro_batch: int, accumulation: int, seed: int
) -> Callable[[int, int], Batch]:
    """Noisy patterns, one for each of `classes`. Its options are keys, data.classes and data.noise; the run fills in
    what stands after the *.

    Every rank draws the whole step's samples, from the seed and the step alone, and takes its part: so N ranks
    together train on what one rank would.
    """
    patterns = torch.randn(classes, CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    samples = micro_batch * accumulation * world_size

    def batch(step: int, micro: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        labels = torch.randint(classes, (samples,), generator=generator)
        drawn = torch.randn(samples, CHANNELS, SIZE, SIZE, generator=generator)
        first = (rank * accumulation + micro) * micro_batch
        mine = slice(first, first + micro_batch)
        return patterns[labels[mine]] + noise * drawn[mine], labels[mine]

    return batch


zerobench.register_model("convnet", convnet)
zerobench.register_data("images", images)
zerobench.main()
