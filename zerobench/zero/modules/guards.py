"""Checks for ranks and modules that cannot be put under an engine, before the modules are changed.

They include tensors that share memory with a parameter before `initialize`, which moves parameters.

Weights that are tied by `.data`, a buffer that is `weight.data`, a view kept in an attribute: torch trains them as one
tensor. Under an engine the parameter gets other memory, and the rest would keep the old values. A parameter that is
registered in several modules is one tensor, and is tied.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ..comm.base import Comm
from ..precision import FROZEN, TRAINED

_ENGINE_OF: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Parameter -> its engine's strategy, and whether that also moves frozen parameters. Copies are not in it."""


def mark(parameters: Iterable[nn.Parameter], strategy: str, moves_frozen: bool) -> None:
    """Records that `parameters` are under an engine."""
    for parameter in parameters:
        _ENGINE_OF[parameter] = strategy, moves_frozen


def check_process_group() -> None:
    """Raises RuntimeError if a launcher started several ranks that are not connected: each would train on its own."""
    ranks = os.environ.get("WORLD_SIZE", "")
    if ranks.isdecimal() and int(ranks) > 1 and not dist.is_initialized():
        raise RuntimeError(
            f"initialize: WORLD_SIZE={ranks}, but there is no process group, so that each rank would train a model of"
            " its own; call torch.distributed.init_process_group() first"
        )


def check_alike(
    named: Iterable[tuple[str, torch.Tensor]], ignored: set[nn.Parameter], comm: Comm, device: torch.device
) -> None:
    """Raises ValueError, on all ranks, if their models have different tensors, even if units have equal sizes."""
    alike = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad) for name, tensor in named if tensor not in ignored
    ]
    checksum = crc32(repr(alike).encode())
    ends = torch.tensor([checksum, -checksum], device=comm.flags_device or device)
    comm.maximum(ends)
    if ends.sum() != 0:
        raise ValueError(
            "model: names, shapes, dtypes or requires_grad of its parameters or buffers differ between the ranks; build"
            " the same model on every rank"
        )


def check_ignored(model: nn.Module, ignored: set[nn.Parameter]) -> None:
    """Raises ValueError for parameters that no engine of `model` can leave as they are."""
    strangers = len(ignored - {*model.parameters()})
    if strangers:
        raise ValueError(f"ignored_parameters: {strangers} of them are not parameters of the model")
    if ignored and any(p.is_meta for p in model.parameters()):
        raise ValueError("ignored_parameters: a model on the meta device is drawn whole; build it on a device")


def check_module(model: nn.Module, moves_frozen: bool, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raises ValueError for a module that an engine cannot handle. `moves_frozen`: it partitions frozen parameters."""
    for path, module in model.named_modules():
        name = path or "model"
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ValueError(
                f"{name}: it is a ScriptModule, which takes no hooks; give initialize() the module as it was before"
                " torch.jit, and compile it with torch.compile (docs/how-to/compile.md)"
            )
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise ValueError(f"{name}: it asks for sparse gradients, which flat buffers do not hold; use sparse=False")
        for own, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
            if is_lazy(tensor):
                raise ValueError(
                    f"{name}.{own}: {type(module).__name__} has not made it yet; call the model once with a batch,"
                    " which makes it, then build the optimizer and call initialize()"
                )
    for name, parameter in model.named_parameters():
        if parameter not in ignored:
            _check_parameter(name, parameter, moves_frozen)
    for name, buffer in model.named_buffers():
        if kind := _strange_kind(buffer):
            raise ValueError(
                f"{name}: this buffer is {kind}, so that no rank can receive it; keep it in a plain attribute"
            )
        if any(size > 1 and stride == 0 for size, stride in zip(buffer.shape, buffer.stride(), strict=True)):
            raise ValueError(
                f"{name}: this buffer of shape {tuple(buffer.shape)} is expanded, several elements being one in memory,"
                " so that no rank can receive it; register buffer.contiguous()"
            )


def check_gradients(trainable: dict[nn.Parameter, str]) -> None:
    """Raises ValueError for existing gradients of trainable parameters, given with their names, and for optimizers that
    step in backward. (`_in_backward_optimizers` is torch-private; tested.)
    """
    for parameter, name in trainable.items():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise ValueError(
                f"{name}: _apply_optimizer_in_backward gave it an optimizer that steps in backward, which would never"
                " run here, as gradients are reduced first; leave it out, and give initialize() the one optimizer"
            )
        if parameter.grad is not None:
            raise ValueError(
                f"{name}: it has a gradient in .grad, which the engine would not read; call optimizer.zero_grad()"
                " before initialize()"
            )


def check_units(model: nn.Module) -> None:
    """Raises ValueError for a module that zero3 cannot handle."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise ValueError(f"{name}: max_norm writes to the weight in forward, which zero3 would lose; use zero2")


def _strange_kind(tensor: torch.Tensor) -> str:
    """Names the kind of a tensor whose elements are not in one dense piece of memory; empty for a plain one."""
    if tensor.layout is not torch.strided:
        return f"of layout {tensor.layout}, not dense"
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ or hasattr(tensor, "fake_mode"):  # simulated
        return ""
    return "a DTensor" if kind.__name__ == "DTensor" else f"a {kind.__name__}, a tensor subclass that wraps others"


def _check_parameter(name: str, parameter: nn.Parameter, moves_frozen: bool) -> None:
    if kind := _strange_kind(parameter):
        way = "give initialize() a module of plain dense parameters"
        if kind == "a DTensor":
            way = "torch's tensor parallelism and fully_shard() are not supported; give initialize() the plain module"
        raise ValueError(f"{name}: it is {kind}, which the engine cannot divide into shards; {way}")
    if parameter.dtype not in TRAINED and (parameter.requires_grad or parameter.dtype not in FROZEN):
        raise ValueError(
            f"{name}: its dtype is {parameter.dtype}; the engine takes floating point of 16 to 64 bits, and frozen ones"
            " of integers and 8 bits; ignored_parameters= leaves others as they are"
        )
    if parameter.is_inference():
        raise ValueError(
            f"{name}: it was made, or converted, inside torch.inference_mode(), and torch cannot train with it; build"
            " and convert the module outside, under torch.no_grad() if need be"
        )
    other, was_moved = _ENGINE_OF.get(parameter, ("", False))
    if other and (parameter.requires_grad or moves_frozen or was_moved):
        raise ValueError(
            f"{name}: it is under an engine already ({other}), and a parameter has one engine; put modules that share"
            " parameters into one module and call initialize() for that, or give each its own by copy.deepcopy() before"
        )


_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)

Extent = tuple[int, int, int]
"""Storage, first byte, and the byte after the last one."""


def check_memory(model: nn.Module, moves_frozen: bool, ignored: Collection[nn.Parameter] = ()) -> None:
    """Raises ValueError for the first parameter to be moved that shares memory with another tensor of the model."""
    parameters = {p: name for name, p in model.named_parameters() if has_memory(p)}
    held = [
        (byte_range(p), name, p not in ignored and (moves_frozen or p.requires_grad)) for p, name in parameters.items()
    ]
    storages = {extent[0] for extent, *_ in held}
    others = [(byte_range(tensor), name, False) for name, tensor in _others(model) if tensor not in parameters]
    end: Extent = (0, 0, 0)
    last: tuple[str, bool] = ("", False)
    for extent, name, is_moved in sorted([*held, *(other for other in others if other[0][0] in storages)]):
        overlaps = extent[0] == end[0] and extent[1] < end[2]
        if overlaps and (is_moved or last[1]):
            raise ValueError(
                f"{name}: it shares memory with {last[0]}, and the engine moves parameters, which would separate the"
                f" two; tie modules by one Parameter (`head.weight = embedding.weight`), and read {last[0]} or {name}"
                " in the forward instead of keeping a view of it"
            )
        if not overlaps or extent[2] > end[2]:
            end, last = extent, (name, is_moved)


def has_memory(tensor: torch.Tensor) -> bool:
    """Returns True for a plain tensor with elements in memory, unlike meta and fake tensors."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and tensor.numel() > 0 and tensor.data_ptr() != 0


def byte_range(tensor: torch.Tensor) -> Extent:
    """Returns the bytes of memory between a tensor's first and last element."""
    length = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    first = tensor.data_ptr()
    return tensor.untyped_storage().data_ptr(), first, first + length * tensor.element_size()


def _others(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields buffers, and tensors in the modules' attributes, by name."""
    for path, module in model.named_modules():
        # a weight that torch's spectral_norm computes from weight_orig is recomputed before each forward
        attributes = {n: value for n, value in vars(module).items() if f"{n}_orig" not in module._parameters}
        values: dict[str, Any] = {**attributes, "_parameters": (), "_modules": (), "_buffers": (), **module._buffers}
        for name, value in values.items():
            for leaf in pytree.tree_leaves(value):
                if isinstance(leaf, torch.Tensor) and has_memory(leaf):
                    yield f"{path}.{name}" if path else name, leaf
