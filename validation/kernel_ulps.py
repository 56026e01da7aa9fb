"""Masters updated by our kernel beside those of torch's fused AdamW, over 100 steps of a small GPT in bf16, on a CPU.

PYTHONPATH=build/triton python -m validation kernel-ulps

The kernel is interpreted. Both start each step from the same masters, gradients and their own moments; *drift* is of a
run of its own, whose masters are never set to torch's.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from tests import zoo

from .store import write

OUT = Path("results/kernel_ulps.csv")
STEPS, LR = 100, 1e-3


@dataclass(frozen=True)
class UlpsRow:
    """Masters of all steps, by the difference in units in the last place, in percent; `drift`: the largest difference
    after the last step, in learning rates.
    """

    optimizer: str
    equal: float
    one: float
    more: float
    most: int
    drift: float


def run(_: argparse.Namespace) -> int:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    write(OUT, UlpsRow, [_row("Adam", weight_decay=0.0), _row("AdamW", weight_decay=0.1)])
    print(OUT.read_text())
    return 0


def _row(name: str, **options: float) -> UlpsRow:
    from zerobench.zero.optim import adam_kernel
    from zerobench.zero.optim.one_pass import new_state
    from zerobench.zero.precision import UpdatedShare

    model = zoo.build("tied").bfloat16()
    parameters = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in parameters])
    other = torch.nn.Parameter(flat.float())
    optimizer = getattr(torch.optim, name)([other], lr=LR, fused=True, **options)
    masters = [flat.float(), flat.float()]  # set to torch's after each step, and not
    group = optimizer.param_groups[0]
    parts = [UpdatedShare(m, flat.clone(), None, new_state(m, False), group, 0) for m in masters]
    counts = torch.zeros(2**16, dtype=torch.int64)  # of differences, the last of larger ones too
    for number in range(STEPS):
        loss = model(*zoo.tokens(0, 1, number))
        gradient = torch.cat([one.flatten() for one in torch.autograd.grad(loss, parameters)])
        other.grad = gradient.float()
        optimizer.step()
        for part in parts:
            part.gradient.copy_(gradient)
            adam_kernel.update([part], None, None, None)
        differ = (masters[0].view(torch.int32) - other.detach().view(torch.int32)).abs().clamp(max=len(counts) - 1)
        counts += differ.bincount(minlength=len(counts))
        masters[0].copy_(other.detach())
        with torch.no_grad():
            for p, values in zip(parameters, other.detach().split([p.numel() for p in parameters]), strict=True):
                p.copy_(values.view(p.shape))
    equal, one, more = (round(100 * int(n) / int(counts.sum()), 4) for n in (counts[0], counts[1], counts[2:].sum()))
    drift = round(float((masters[1] - other.detach()).abs().max()) / LR, 5)
    return UlpsRow(name, equal, one, more, int(counts.nonzero().max()), drift)
