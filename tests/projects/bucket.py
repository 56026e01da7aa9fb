"""Data parallelism by hand: gradients are averaged in one flat bucket."""

import torch
import torch.distributed as dist
from torch import nn

import zerobench

WIDTH, HIDDEN = 64, 256


class Averaged:
    def __init__(self, parameters):
        self.parameters, self.buckets, self.rounds = list(parameters), [], 0

    def reduce(self):
        size = sum(p.numel() for p in self.parameters)
        if not self.buckets:
            self.buckets = [torch.zeros(size)]
        bucket = self.buckets[self.rounds % len(self.buckets)]
        self.rounds += 1
        places = bucket.split([p.numel() for p in self.parameters])
        for place, p in zip(places, self.parameters, strict=True):
            place.copy_(p.grad.flatten())
        dist.all_reduce(bucket)
        for place, p in zip(places, self.parameters, strict=True):
            p.grad.copy_(place.view_as(p)).div_(dist.get_world_size())


def train(to):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    averaged = Averaged(model.parameters())
    with zerobench.watch(model, optimizer, to=to, name="bucket") as watch:
        for _ in range(4):
            model(torch.randn(16, WIDTH)).square().mean().backward()
            averaged.reduce()
            optimizer.step()
            optimizer.zero_grad()
    return watch
