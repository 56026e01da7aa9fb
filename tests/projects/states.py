"""A model with an optimizer of the project's own."""

import torch
from torch import nn

import zerobench

WIDTH, HIDDEN = 64, 256


class Adam(torch.optim.Optimizer):
    def __init__(self, parameters, lr=1e-3):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                    state["square"] = torch.zeros_like(p)
                state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                p.sub_(state["mean"] / (state["square"].sqrt() + 1e-8), alpha=group["lr"])


def train(to):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    optimizer = Adam(model.parameters())
    with zerobench.watch(model, optimizer, to=to, name="states") as watch:
        for _ in range(4):
            model(torch.randn(16, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch
