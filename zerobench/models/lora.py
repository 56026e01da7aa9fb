"""LoRA (Hu et al., arXiv 2106.09685): next to each frozen Linear a trained product of two thin matrices.

    y = W x + b + B (A x)    W (out, in), b (out,) frozen; A (rank, in) drawn like nn.Linear's weight; B (out, rank) 0

With B = 0 the model starts as the frozen one. The paper's scale, alpha / rank, is 1. Adapters are placed as in QLoRA
and peft's "all-linear": at every Linear of the blocks, not at the head. Everything else is frozen.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from ..host.revisions import installed_version
from ..zero.modules.tiled_linear import TiledLinear


class LoRALinear(nn.Module):
    """A frozen Linear, tiled or not, with its adapter: (..., in) -> (..., out). The adapter has no values yet."""

    def __init__(self, base: nn.Linear | TiledLinear, rank: int) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(torch.empty(rank, base.in_features))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, rank))
        self.base = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps (..., in) to (..., out)."""
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b)  # type: ignore[no-any-return]


def initialize(module: nn.Module) -> None:
    """Initializes the adapter of `module`; leaves a module without one unchanged."""
    if isinstance(module, LoRALinear):
        nn.init.kaiming_uniform_(module.lora_a, a=math.sqrt(5))
        nn.init.zeros_(module.lora_b)


def base_of(linear: nn.Module) -> nn.Module:
    """Returns the frozen part of a LoRALinear; for another module, the module itself."""
    return linear.base if isinstance(linear, LoRALinear) else linear


def add_adapters(model: nn.Module, blocks: nn.Module, rank: int) -> None:
    """Freezes `model`, and adds an adapter to every Linear in its `blocks`."""
    model.requires_grad_(False)
    for parent in list(blocks.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | TiledLinear):
                setattr(parent, name, LoRALinear(child, rank))


def add_adapters_of_peft(model: nn.Module, rank: int) -> None:
    """Does the same to a transformers model, in place, using peft, at the same scale."""
    from peft import LoraConfig, inject_adapter_in_model

    transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's own Linear
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear", fan_in_fan_out=transposed)
    inject_adapter_in_model(config, model)


def problems_of(rank: int, hidden: int, where: str, by_peft: bool) -> list[str]:
    """Returns an error message if `rank` exceeds the width `hidden`, or if peft is needed but not installed."""
    if rank > hidden:
        width = f"{where}.hidden={hidden}; use 1 to {hidden}, or 0 for none"
        return [f"model.lora={rank}: an adapter's rank is at most the width, {width}"]
    if rank > 0 and by_peft and installed_version("peft") is None:
        return [f"model.lora={rank}: with model=huggingface it needs peft, which is not installed; pip install peft"]
    return []
