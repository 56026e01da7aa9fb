"""A strategy of one's own: ZeRO stage 1 in fifty lines, beside DDP and the strategies that are there.

    python examples/own_strategy.py -m strategy=ddp,toy_zero1,zero1 world_size=2
    python examples/own_strategy.py -m strategy=toy_zero1 strategy.overlap=false,true world_size=2

What the harness has to be told is at the bottom, two lines. An engine needs four methods: a call, `backward`, `step`
and `zero_grad`; `no_sync` and the rest are optional (zerobench/strategies/engine.py says what stands in for them).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim

import zerobench


class ToyZero1:
    """Each parameter has an owner, the rank that has least so far: it alone has its optimizer states (P_os of ZeRO)."""

    shares_gradients = True  # between backward and step a rank holds a part of the gradients, disjoint from the others'

    def __init__(self, model: nn.Module, optimizer: optim.Optimizer, overlap: bool = False) -> None:
        """`overlap`: all reductions are started before the first is waited for."""
        self.module, self.optimizer, self.overlap = model, optimizer, overlap
        self.synchronizes = True
        load = [0] * dist.get_world_size()
        self.owners = {}
        for p in sorted((p for p in model.parameters() if p.requires_grad), key=torch.numel, reverse=True):
            self.owners[p] = load.index(min(load))
            load[self.owners[p]] += p.numel()
        mine = {p for p, owner in self.owners.items() if owner == dist.get_rank()}
        for group in optimizer.param_groups:  # states are made by the first step, of what is left here
            group["params"] = [p for p in group["params"] if p in mine]

    def __call__(self, *inputs: Any, **named: Any) -> torch.Tensor:
        """Parameters are whole on every rank, and equal, for all ranks built the model from one seed."""
        return self.module(*inputs, **named)

    def backward(self, loss: torch.Tensor) -> None:
        """Backpropagates, and has each gradient's mean on its owner and nowhere else."""
        loss.backward()
        if not self.synchronizes:
            return
        works = []
        for p, owner in self.owners.items():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad.div_(dist.get_world_size())
            works.append(dist.reduce(p.grad, dst=owner, async_op=self.overlap))
        for (p, owner), work in zip(self.owners.items(), works, strict=True):
            if work is not None:
                work.wait()
            if owner != dist.get_rank():
                p.grad = None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around the micro-batches before a step's last: whole gradients add up on every rank."""
        self.synchronizes = False
        try:
            yield
        finally:
            self.synchronizes = True

    def step(self) -> None:
        """Each owner updates its parameters and sends them to the others."""
        self.optimizer.step()
        for p, owner in self.owners.items():
            dist.broadcast(p.detach(), src=owner)

    def zero_grad(self) -> None:
        """Called after each step."""
        self.module.zero_grad()


zerobench.register_strategy("toy_zero1", ToyZero1, label="toy ZeRO-1", color="#CC79A7")
zerobench.main()
