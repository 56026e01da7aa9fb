"""A GPT with a mixture of experts: the MLP of each block is many MLPs, of which each token passes through `top_k`.

    router      (H, E), probabilities of the experts, softmax in fp32; the weights of the chosen ones add up to 1
    rows        T·k, each token once for each of its experts, ordered by expert; no expert has a capacity
    experts     (H, F) and (F, H) without biases, all of a block as two tensors, whose product is torch's grouped one,
                or each as a module, which ZeRO-3 gathers separately
    balance     E · Σ counts/T · mean probability over the experts, the mean over the blocks, times its coefficient
                (Switch Transformer, arXiv 2101.03961, equation 4); `top_k` if all experts get equally many rows

The balance is computed for a micro-batch of a rank, as in Mixtral: N ranks train like one process that accumulates the
same N micro-batches.

Every rank runs every expert, even without rows, so that all launch the same collectives whatever their tokens choose.
On tensors without values `learned` counts as balanced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from ..fake.operators import has_values
from .chunks import LossHead
from .gpt import GPT, Block, initialize

ROUTINGS = ("learned", "balanced", "skewed")
"""Values of `model.routing`. balanced: experts in turn; skewed: all tokens to the first `top_k` experts. The router is
trained in all three: the chosen experts are weighted by their probabilities.
"""


class Experts(nn.Module):
    """`count` experts, (E, H, F) and (E, F, H); None: one, (H, F) and (F, H), which is a unit of ZeRO-3."""

    def __init__(self, count: int | None, hidden: int, inner: int) -> None:
        super().__init__()
        self.is_unit = count is None
        stacked = () if count is None else (count,)
        self.weight_in = nn.Parameter(torch.empty(*stacked, hidden, inner))
        self.weight_out = nn.Parameter(torch.empty(*stacked, inner, hidden))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Maps (R, H), `counts` rows for each expert in order, to (R, H)."""
        inner = F.gelu(grouped_product(rows, self.weight_in, counts), approximate="tanh")
        return grouped_product(inner, self.weight_out, counts)


class MoeBlock(Block):
    """A block with experts in place of the MLP; `separate`: each expert is a module."""

    def __init__(
        self, hidden: int, heads: int, experts: int, top_k: int, inner: int, separate: bool, routing: str
    ) -> None:
        nn.Module.__init__(self)  # without the MLP
        self.heads, self.top_k, self.routing = heads, top_k, routing
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention_in = nn.Linear(hidden, 3 * hidden)
        self.attention_out = nn.Linear(hidden, hidden)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.router = nn.Linear(hidden, experts, bias=False)
        parts = [None] * experts if separate else [experts]
        self.experts = nn.ModuleList([Experts(count, hidden, inner) for count in parts])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """Maps (B, S, H) to (B, S, H); also returns the balance of the block, a scalar."""
        x = x + self.attend(self.attention_norm(x))
        out, balance = self.mix(self.mlp_norm(x).flatten(0, 1))
        return x + out.view_as(x), balance

    def mix(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sends (T, H) through the experts: (T, H), and the balance."""
        probabilities = self.router(x).float().softmax(1)
        chosen = self.choose(probabilities)
        weights = probabilities.gather(1, chosen)
        weights = (weights / weights.sum(1, keepdim=True)).to(x.dtype)
        order, experts = chosen.flatten().argsort(stable=True), chosen.flatten()
        counts = chosen.new_zeros(probabilities.size(1)).scatter_add_(0, experts, torch.ones_like(experts))
        # each row is read once, so that no gradient depends on the order of concurrent additions
        rows = x[:, None].expand(-1, self.top_k, -1).flatten(0, 1).index_select(0, order)
        out = self.run_experts(rows, counts).index_select(0, order.argsort()).unflatten(0, chosen.shape)
        balance = (counts * probabilities.mean(0)).sum() * (len(counts) / len(x))
        return (out * weights[:, :, None]).sum(1), balance

    def choose(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Returns the experts of each token, (T, k)."""
        chosen = probabilities.topk(self.top_k).indices
        if self.routing == "balanced":
            turns = torch.arange(chosen.numel(), device=chosen.device)
            chosen.copy_(turns.remainder_(probabilities.size(1)).view_as(chosen))
        elif self.routing == "skewed":
            chosen.copy_(torch.arange(self.top_k, device=chosen.device))
        return chosen

    def run_experts(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Maps the ordered rows, (T·k, H), to (T·k, H)."""
        if not self.experts[0].is_unit:
            return self.experts[0](rows, counts)  # type: ignore[no-any-return]
        parts = rows.split(self.counts_on_host(counts, len(rows)))
        return torch.cat([expert(part, counts) for expert, part in zip(self.experts, parts, strict=True)])

    def counts_on_host(self, counts: torch.Tensor, rows: int) -> list[int]:
        """Returns the number of rows of each expert."""
        if has_values(counts):
            return counts.tolist()
        used = self.top_k if self.routing == "skewed" else len(counts)
        return [rows // used + (number < rows % used) if number < used else 0 for number in range(len(counts))]


class GPTMoe(GPT):
    """`forward(tokens, targets)` returns the loss plus `balance` times the mean of the blocks' balances.

    `expert_hidden`: width of an expert; None: four times `hidden`.
    """

    def __init__(
        self, layers: int, hidden: int, heads: int, vocabulary: int, positions: int, tied: bool, checkpointing: bool,
        experts: int, top_k: int, expert_hidden: int | None, separate_experts: bool, balance: float, routing: str,
        loss_chunks: int = 1,
    ) -> None:  # fmt: skip
        inner = expert_hidden or 4 * hidden
        self._new_block = partial(MoeBlock, hidden, heads, experts, top_k, inner, separate_experts, routing)
        size = layers, hidden, heads, vocabulary, positions
        super().__init__(*size, tied, checkpointing, loss_chunks=loss_chunks)
        self.balance = balance

    def new_block(self, *shape: int) -> MoeBlock:
        return self._new_block()

    def initializers(self) -> Iterator[tuple[nn.Module, Callable[[nn.Module], None]]]:
        smaller = 0.02 / (2 * len(self.blocks)) ** 0.5
        for module in self.modules():
            yield module, partial(_draw, smaller=smaller) if isinstance(module, Experts) else initialize
        for block in self.blocks:
            assert isinstance(block, MoeBlock)
            yield block.attention_out, lambda linear: nn.init.normal_(linear.weight, std=smaller)  # type: ignore

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        positions, balances = torch.arange(tokens.size(1), device=tokens.device), []
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x, balance = block(x)
            balances.append(balance)
        x, balance = self.norm(x), self.balance * torch.stack(balances).mean()
        if isinstance(self.head, LossHead):
            return self.head(x.flatten(0, 1), targets.flatten()) + balance  # type: ignore[no-any-return]
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), targets.flatten()) + balance


def grouped_product(rows: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiplies each expert's rows, (R, I) in order, with its matrix of (E, I, O), or all with (I, O): (R, O)."""
    if weights.dim() == 2:
        return rows @ weights
    if has_grouped_product(rows.device):
        return F.grouped_mm(rows, weights, offs=counts.cumsum(0, dtype=torch.int32))
    parts = rows.split(counts.tolist())
    return torch.cat([part @ weight for part, weight in zip(parts, weights.unbind(), strict=True)])


def has_grouped_product(device: torch.device) -> bool:
    """Returns whether torch's grouped product runs on the device: not on GPUs before Ampere."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _draw(experts: nn.Module, smaller: float) -> None:
    assert isinstance(experts, Experts)
    stacked = (weight.view(-1, *weight.shape[-2:]) for weight in (experts.weight_in, experts.weight_out))
    for weight_in, weight_out in zip(*stacked, strict=True):  # each apart, so that all layouts have the same values
        nn.init.normal_(weight_in, std=0.02)
        nn.init.normal_(weight_out, std=smaller)
