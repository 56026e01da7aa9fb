"""Parameters keep the strides that they had, whatever becomes of them: a world of one."""

import pytest
import torch
from torch import nn

from zerobench.zero import STAGES, Offload, initialize
from zerobench.zero.layout import MemoryOrder

TENSORS = {
    "rows": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "channels last": torch.arange(72.0).view(2, 3, 4, 3).to(memory_format=torch.channels_last),
    "one channel": torch.arange(18.0).view(2, 1, 3, 3).to(memory_format=torch.channels_last),
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3, 2).transpose(0, 1),
    "columns of a wider one": torch.arange(48.0).view(8, 6)[:, ::2],
    "rows of a wider one, transposed": torch.arange(48.0).view(8, 6)[:4, :3].t(),
    "expanded": torch.arange(3.0).expand(4, 3),
}


@pytest.mark.parametrize("name", TENSORS)
def test_elements_lie_as_in_a_tensor_that_torch_makes_like_it(name: str) -> None:
    tensor = TENSORS[name]
    like = torch.empty_like(tensor).copy_(tensor)
    order = MemoryOrder.of(tensor)
    assert order.strides == like.stride()
    memory = like.as_strided((like.numel(),), (1,))
    assert torch.equal(order.flatten(tensor), memory)
    assert order.flatten(tensor).is_contiguous()
    assert torch.equal(order.view(memory), tensor)
    if tensor.stride() == like.stride() and tensor.numel():
        assert order.flatten(tensor).data_ptr() == tensor.data_ptr()
    saved = MemoryOrder.from_dims(tensor.shape, order.dims)
    assert saved.agrees(order)
    assert torch.equal(saved.view(memory), tensor)
    assert order.is_row_major == torch.equal(memory, tensor.reshape(-1))


class Strided(nn.Module):
    """Parameters of every order, some frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Conv2d(6, 8, 3), nn.Conv2d(8, 6, 3).requires_grad_(False)])
        self.layers.to(memory_format=torch.channels_last)
        self.head = nn.Linear(6, 37, bias=False)
        self.head.weight = nn.Parameter(torch.randn(6, 37).t())
        self.cut = nn.Linear(37, 5)
        self.cut.weight = nn.Parameter(torch.randn(10, 37)[::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.cut(self.head(x.mean((2, 3)))).square().mean()


@pytest.mark.parametrize("strategy", [*STAGES, "offloaded"])
def test_every_parameter_keeps_its_strides_and_trains_with_them(strategy: str) -> None:
    """Equal to the bit to plain torch, whose kernels see the same strides, on any CPU."""
    offload = {"offload": Offload(optimizer=True, gradients=True)} if strategy == "offloaded" else {}
    plain, model = Strided(), Strided()
    strides = {name: torch.empty_like(p).stride() for name, p in plain.named_parameters()}
    plain.cut.weight.data = plain.cut.weight.data.contiguous()
    optimizers = [torch.optim.Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.1) for m in (plain, model)]
    engine = initialize(model, optimizers[1], strategy.replace("offloaded", "zero2"), bucket_bytes=1024, **offload)
    for step in range(3):
        x = torch.randn(2, 6, 9, 9, generator=torch.Generator().manual_seed(step)).to(memory_format=torch.channels_last)
        loss, other = plain(x), engine(x)
        loss.backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        engine.backward(other)
        engine.step()
        assert loss.item() == other.item()
    with engine.full_parameters() as module:
        assert {name: p.stride() for name, p in module.named_parameters()} == strides
    state = engine.full_state_dict()
    assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())


def test_a_rank_state_of_other_strides_is_refused() -> None:
    states = []
    for order in (torch.channels_last, torch.contiguous_format):
        model = nn.Sequential(nn.Conv2d(6, 8, 3)).to(memory_format=order)
        engine = initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), "zero2")
        states.append((engine, engine.state_dict()))
    (first, mine), (_, other) = states
    first.load_state_dict(mine)
    other.pop("orders")  # as it was written before orders were
    with pytest.raises(ValueError, match=r"state_dict: the memory order of 0\.weight differs"):
        first.load_state_dict(other)
