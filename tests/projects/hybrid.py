"""Hybrid sharding by FSDP2: parameters are sharded within a node and replicated over nodes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import zerobench

WIDTH, LAYERS = 128, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).relu()
        return x


def sharded(model):
    shards = min(2, dist.get_world_size())
    mesh = init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(to):
    torch.manual_seed(0)
    model = sharded(Model())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with zerobench.watch(model, optimizer, to=to, name="hybrid") as watch:
        for _ in range(4):
            model(torch.randn(4, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return watch
