"""Functions of torch.nn.functional whose CUDA kernels keep different tensors for backward than CPU kernels.

dropout      one kernel: keeps a mask of one byte per element, while a CPU keeps a factor in the input's dtype
layer_norm   keeps means and deviations in fp32, while a CPU keeps them in the input's dtype
rms_norm     one kernel: keeps its input and fp32 deviations, while a CPU runs plain operators
updates      of Adam and AdamW: one kernel, which is in Triton, an operator here

scaled_dot_product_attention uses one of three kernels, which keep different tensors for backward:

    math        plain operators, in fp32 for half precision: keeps the s x s scores after softmax and after dropout
    flash       keeps its output and fp32 log-sums of the scores, s per head; fp16 and bf16 only, heads of up to 256, no
                mask
    efficient   keeps the same as flash; also supports fp32 and masks

Flash and efficient are torch's own operators, with torch's shapes for CUDA and torch's own rule for the tensors kept
for backward (aten._scaled_dot_product_flash_attention and ..._efficient_attention). Scratch memory of their backward is
allocated separately: the queries' gradient in fp32 under flash (flash_api.cpp, mha_bwd), and a number per row under
both. Shapes: query (B, H, L, D), key and value (B, H_kv, S, D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

from ...zero.precision import UpdatedShare
from ..caching_allocator import round_up

HALVES = (torch.float16, torch.bfloat16)

MOST_FLASH_HEAD = 256
"""Largest head dimension that flash attention supports."""


class KernelRefusalError(ValueError):
    """A kernel does not support the call."""


@dataclass(frozen=True)
class Call:
    """The arguments of one call; `gqa`: key and value may have fewer heads."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None
    gqa: bool

    @property
    def keeps(self) -> bool:
        """Whether backward will run."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in (self.query, self.key, self.value))


@dataclass(frozen=True)
class Kernel:
    """`run`: returns a call's output, (B, H, L, D). `refusal`: why the kernel does not support a call, or ""."""

    run: Callable[[Call], torch.Tensor]
    refusal: Callable[[Call], str]


LIBRARY = torch.library.Library("zerobench", "DEF")
"""Operators in place of our own kernels."""

LIBRARY.define(
    "adam_(Tensor(a!)[] states, Tensor[] gradients, Tensor(b!)[] parameters, Tensor[] compared, Tensor[] factors) -> ()"
)
LIBRARY.define("squares(Tensor[] gradients) -> Tensor")

SUMMED = 2**12
"""Elements of a gradient per sum of squares."""


def _sums(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    return gradients[0].new_empty(sum(-(-gradient.numel() // SUMMED) for gradient in gradients), dtype=torch.float64)


torch.library.register_fake("zerobench::adam_", lambda *_: None, lib=LIBRARY)
torch.library.register_fake("zerobench::squares", _sums, lib=LIBRARY)


class UpdateKernels:
    """The kernels of an update (zero/optim/one_pass.py) on fake tensors."""

    def __init__(self, device: torch.device) -> None:
        self.squares = torch.ops.zerobench.squares

    def update(
        self, parts: Sequence[UpdatedShare], factor: torch.Tensor | None, found_inf: torch.Tensor | None,
        flags: torch.Tensor | None,
    ) -> None:  # fmt: skip
        """Updates `parts`; the parameters are read, too, if they are compared."""
        states = [tensor for part in parts for tensor in (part.master, *part.state.values())]
        rounded = [part.parameter for part in parts if part.parameter is not None]
        factors = [tensor for tensor in (factor, found_inf) if tensor is not None]
        compared = [] if flags is None else rounded
        torch.ops.zerobench.adam_(states, [part.gradient for part in parts], rounded, compared, factors)


def run_math(call: Call) -> torch.Tensor:
    """Runs the operators of torch's _scaled_dot_product_attention_math, one by one: the scaling of queries and keys
    before the product, the mask added in place, a softmax that is 0 if all is masked.
    """
    query, key, value = call.query, call.key, call.value
    if query.dtype in HALVES:
        query, key, value = query.float(), key.float(), value.float()
    mask, scale = call.mask, (query.size(-1) ** -0.5 if call.scale is None else call.scale) ** 0.5
    query = query * scale
    if call.is_causal:
        mask = torch.ones(query.size(-2), key.size(-2), dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if call.gqa and key.size(-3) != query.size(-3):
        repeats = query.size(-3) // key.size(-3)
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    scores = query @ (key.transpose(-2, -1) * scale)
    if mask is not None:
        scores.add_(mask)
    weights = _safe_softmax(scores)
    del scores
    if call.dropout > 0:
        weights = torch.native_dropout(weights, call.dropout, True)[0]
    return (weights @ value).to(call.query.dtype)


def _safe_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Runs torch's operator and allocates its temporaries: a plain softmax, and the mask of masked scores."""
    with torch.no_grad():
        temporary = [torch.empty_like(scores), torch.empty_like(scores, dtype=torch.bool)]
    weights = torch.ops.aten._safe_softmax(scores, -1)
    temporary.clear()
    return weights


def run_flash(call: Call) -> torch.Tensor:
    """Runs flash attention; heads are padded to a multiple of 8, as torch does before it."""
    head = call.query.size(-1)
    tensors = (call.query, call.key, call.value)
    if head % 8:
        query, key, value = (F.pad(x, (0, -head % 8)) for x in tensors)
    else:
        query, key, value = tensors
    run = torch.ops.aten._scaled_dot_product_flash_attention
    mixed = run(query, key, value, call.dropout, call.is_causal, False, scale=call.scale)[0]
    _during_backward(mixed, partial(_flash_scratch, query.shape, key.shape, query.dtype, query.device))
    return mixed[..., :head] if head % 8 else mixed


def _flash_scratch(
    query: torch.Size, key: torch.Size, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:  # fmt: skip
    """Returns the tensors that flash attention's backward allocates in addition to its results (mha_bwd): dq_accum,
    softmax_d, and, if keys and values have fewer heads, their gradients for each head of the queries.
    """
    batch, heads, length, head = query
    rows, padded = round_up(length, 128), round_up(head, 32) if head <= 192 else 256
    made = [torch.empty(batch, heads, rows, device=device), torch.empty(batch, rows, heads, padded, device=device)]
    if key[1] != heads:
        made += [torch.empty(batch, key[2], heads, head, dtype=dtype, device=device) for _ in range(2)]
    return made


def run_efficient(call: Call) -> torch.Tensor:
    """Runs memory-efficient attention; a mask is cast to the queries' dtype, its rows aligned to 16 elements."""
    bias = call.mask
    if bias is not None:
        if bias.dtype == torch.bool:
            bias = torch.zeros_like(bias, dtype=call.query.dtype).masked_fill_(bias.logical_not(), float("-inf"))
        if bias.size(-1) % 16:
            bias = F.pad(bias, (0, -bias.size(-1) % 16))[..., : bias.size(-1)]
        bias = bias.expand(call.query.size(0), call.query.size(1), call.query.size(2), call.key.size(2))
    run = torch.ops.aten._scaled_dot_product_efficient_attention
    mixed = run(call.query, call.key, call.value, bias, call.keeps, call.dropout, call.is_causal, scale=call.scale)[0]
    rows, device = call.query.shape[:3], call.query.device
    _during_backward(mixed, lambda: [torch.empty(rows, device=device)])  # an fp32 number per row of the scores
    return mixed


def _during_backward(output: torch.Tensor, allocate: Callable[[], list[torch.Tensor]]) -> None:
    """Allocates scratch memory while the backward of the operator that made `output` runs; none in a torch.compile
    graph, where operators have no such nodes.
    """
    if torch.compiler.is_compiling():
        return
    node, held = output.grad_fn, []
    if node is not None:
        node.register_prehook(lambda _: held.extend(allocate()))
        node.register_hook(lambda *_: held.clear())


def _refused_by_flash(call: Call) -> str:
    if call.query.dtype not in HALVES:
        return f"takes fp16 and bf16, and queries here are {str(call.query.dtype).removeprefix('torch.')}"
    if call.query.size(-1) > MOST_FLASH_HEAD:
        return f"takes heads of up to {MOST_FLASH_HEAD}, and they have {call.query.size(-1)} here"
    if call.mask is not None:
        return "takes no mask, and one is given here"
    if call.is_causal and call.query.size(-2) != call.key.size(-2):
        return "takes is_causal for queries and keys of one length, and their lengths differ here"
    return _refused_by_both(call)


def _refused_by_efficient(call: Call) -> str:
    if refusal := _refused_by_both(call):
        return refusal
    unit = 8 if call.query.dtype in HALVES else 4
    if any(x.size(-1) % unit for x in (call.query, call.key, call.value)):
        return f"takes heads of a multiple of {unit}, and they have {call.query.size(-1)} here"
    if call.key.size(-3) != call.query.size(-3):
        return "takes as many heads of keys as of queries, and there are fewer here"
    return ""


def _refused_by_both(call: Call) -> str:
    return "" if call.query.dim() == 4 else f"takes (B, H, L, D), and queries here have {call.query.dim()} dimensions"


KERNELS: dict[str, Kernel] = {
    "flash": Kernel(run_flash, _refused_by_flash),
    "efficient": Kernel(run_efficient, _refused_by_efficient),
    "math": Kernel(run_math, lambda _: ""),
}
"""Kernels in torch's order of preference; torch takes the first that supports a call."""


def attend(
    chosen: str | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Replaces scaled_dot_product_attention by the `chosen` kernel; None: the first that supports the call.

    Raises KernelRefusalError if the chosen kernel does not support it.
    """
    call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    if chosen is None:
        return next(kernel for kernel in KERNELS.values() if not kernel.refusal(call)).run(call)
    if refusal := KERNELS[chosen].refusal(call):
        able = [name for name, kernel in KERNELS.items() if not kernel.refusal(call)]
        raise KernelRefusalError(f"attention={chosen}: this kernel {refusal}; use attention={' or '.join(able)}")
    return KERNELS[chosen].run(call)


# -- dropout and norms -----------------------------------------------------------------------------


_dropout, _layer_norm, _rms_norm = F.dropout, F.layer_norm, F.rms_norm


def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Replaces dropout. CUDA also uses plain operators in place, and graphs have the same operators on all devices."""
    if torch.compiler.is_compiling() or inplace or not training or not 0 < p < 1:
        return _dropout(input, p, training, inplace)
    return torch.native_dropout(input, p, True)[0]


class _Norm(torch.autograd.Function):
    """A normalization in one kernel. `statistics`: number of fp32 values that it keeps per row."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, dims: int, statistics: int
    ) -> torch.Tensor:
        rows = [*x.shape[: x.dim() - dims], *[1] * dims]
        kept = [torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(statistics)]
        ctx.save_for_backward(x, weight, bias, *kept)
        return x.clone()  # reads and writes what the kernel does

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        given = ctx.saved_tensors[:3]
        wanted = zip(given, ctx.needs_input_grad, strict=False)
        made = [torch.empty_like(x) if x is not None and needed else None for x, needed in wanted]
        if made[0] is not None:
            torch.add(gradients[0], given[0], out=made[0])  # reads and writes what the kernel does
        return *made, None, None


def layer_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None, eps: float = 1e-5,
) -> torch.Tensor:  # fmt: skip
    """Replaces layer_norm; in fp32 CPU and CUDA keep the same."""
    if torch.compiler.is_compiling() or input.dtype not in HALVES:
        return _layer_norm(input, list(normalized_shape), weight, bias, eps)
    return _Norm.apply(input.contiguous(), weight, bias, len(normalized_shape), 2)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """Replaces rms_norm; if dtypes differ CUDA runs plain operators too."""
    if torch.compiler.is_compiling() or (weight is not None and weight.dtype != input.dtype):
        return _rms_norm(input, list(normalized_shape), weight, eps)
    return _Norm.apply(input.contiguous(), weight, None, len(normalized_shape), 1)


# -- norms of transformers --------------------------------------------------------------------------


NORMS = {"llama": "LlamaRMSNorm", "mistral": "MistralRMSNorm", "qwen2": "Qwen2RMSNorm", "qwen3": "Qwen3RMSNorm"}
"""Architecture of transformers -> its RMS norm, which runs plain operators; training codes often have a fused one."""


@contextmanager
def fused_rms_norms() -> Iterator[None]:
    """Replaces every norm in NORMS by torch's rms_norm, which is one kernel on a GPU."""
    with ExitStack() as stack:
        for architecture, name in NORMS.items():
            module = import_module(f"transformers.models.{architecture}.modeling_{architecture}")
            stack.enter_context(mock.patch.object(getattr(module, name), "forward", _fused))
        yield


def _fused(norm: Any, x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)
