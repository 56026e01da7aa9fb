"""A stack of layers; hooks follow the size of what they compute."""

import torch
from torch import nn

import zerobench

WIDTH, LAYERS, BATCH = 64, 3, 32


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


def train(to):
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []

    def follow(_layer, _inputs, output):
        sizes.append(output.abs().max().item())

    for layer in model:
        layer.register_forward_hook(follow)
    with zerobench.watch(model, optimizer, to=to, name="hook") as watch:
        for _ in range(4):
            model(torch.randn(BATCH, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch
