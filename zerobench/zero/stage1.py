"""ZeRO-1, P_os: the optimizer states are partitioned (ZeRO, arXiv 1910.02054, section 5.1).

Parameters are contiguous in buckets, and so are their gradients; each rank owns 1/N of every bucket::

    reduce    this rank's slice of a bucket's gradients := mean over ranks    ψ sent, as it fills
    update    the optimizer sees only this rank's slices                      optimizer states: 1/N
    gather    the slices of the updated parameters are sent to all            ψ sent

In bytes per rank (ψ: number of parameters; sent volumes are in elements), in fp32: 4ψ parameters + 4ψ gradients +
8ψ/N optimizer states for Adam. In half precision with fp32 masters: 2ψ + 2ψ + 12ψ/N.
A bucket's gradients have memory from the first gradient to the update, and none in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn, optim

from . import labels
from .bucket import GradientBucket
from .comm.base import Comm, Handle
from .layout import Layout, buckets
from .modules.wrapping import Hook, blocks
from .options import Options
from .parameters.access import Hiding, placeholder
from .precision import TRAINED
from .strategy import Strategy
from .units.unit import Unit, align_numel

MEGATRON: dict[str, Any] = {
    "bucket_bytes": 25 * 2**20, "gradient_dtype": torch.float32, "overlap_gather": True, "tile_bytes": None
}  # fmt: skip
"""The defaults of options that Megatron has of its own."""


class WholeBucket(GradientBucket):
    """Gradients that are whole from the first one to the update: the reduction writes to this rank's slice.

    `full` is one tensor object for life, whose storage is resized to nothing after each update; `shard` is a view of
    it. With `main`, a (padded_numel,) part of a larger buffer, `full` is that part, and is never freed.
    """

    _carried: torch.Tensor | None = None  # the sum of earlier micro-batches, while a further one is reduced
    _cast: torch.Tensor | None = None  # the gradients in the wire's dtype, while in flight, if that is another

    def __init__(self, unit: Unit, comm: Comm, reduce_with: str, main: torch.Tensor | None = None) -> None:
        super().__init__(unit, comm, reduce_with)
        self._keeps_memory = main is not None
        if main is None:
            main = torch.empty(unit.layout.padded_numel, dtype=unit.dtypes.gradients, device=unit.device)
        self.full: torch.Tensor = main
        self.shard = unit.own_slice(main)
        # reduced in place on a stream: no buffer is taken or freed, so it need not wait for another reduction
        self.reduces_in_place = comm.on_streams and unit.dtypes.wire == unit.dtypes.gradients
        self.release()

    def open(self, sends: bool) -> None:
        if not self._keeps_memory:
            self.unit.heap.restore(self.full)
        if self.is_reduced and self._carried is None:
            # a further micro-batch will be reduced into the slice that contains the sum so far
            self._carried = labels.label(self.shard.clone(), labels.GRADIENTS, self.unit.name)

    def prepare(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        if not self.filled:
            self.open(sends=True)
        self.zero_missing()
        if self.full.dtype == self.unit.dtypes.wire:
            return self.full, None
        self._cast = self.take_memory(self.unit.dtypes.wire, labels.COMMUNICATION).copy_(self.full)
        return self._cast, None

    def store(self, mean: torch.Tensor) -> None:
        cast, self._cast = self._cast, None
        if cast is not None:
            self.shard.copy_(mean)
        if self._carried is not None:
            self.shard.add_(self._carried)
            self._carried = None
        # ZeRO-1: the other ranks' slices stay in memory until the update; a copy that was cast is freed
        if cast is not None:
            self.unit.heap.give_back(cast)
        self.end_round()

    def drop(self, offset: int, numel: int) -> None:
        (self.shard if self._carried is None else self._carried).narrow(0, offset, numel).zero_()

    def release(self) -> None:
        super().release()
        self._carried = self._cast = None
        if not self._keeps_memory:  # the forward, and the start of backward, where memory is scarcest, need none
            self.unit.heap.release(self.full)


def waiting_modules(root: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """Yields the modules that wait before their forward, with the parameters that they wait for: the root, each block
    for all parameters inside it, and each module outside of blocks that reads parameters itself.
    """
    whole = {block for _, block in blocks(root)}
    inside = {module for block in whole for module in block.modules()}
    for module in root.modules():
        if module in whole:
            yield module, list(module.parameters())
        elif module not in inside:
            read = list(module.parameters(recurse=False))
            for child in module.children():  # those that its own forward reads, since they are not called
                if isinstance(module, nn.MultiheadAttention) or isinstance(child, nn.ParameterList | nn.ParameterDict):
                    read += child.parameters()
            if read or module is root:
                yield module, read


class OverlappedParamGathers:
    """Gathers of updated parameters that may still run during the next forward, by unit, oldest first::

        launched   `unit.full_parameters` is being filled; with overlap its parameters are hidden (parameters/access.py)
        waited     the parameters have the new values

    Without overlap all gathers are waited for at the end of `step`. With overlap, a block (modules/wrapping.py) waits
    for the units of its parameters before it runs, and a module outside of blocks for the units of its own. Any other
    read of a parameter, in a forward or between steps, waits for that parameter; the engine's own accesses wait for
    all. An evaluation waits for all: torch's own layers then use fast paths that read their children's weights.
    """

    def __init__(
        self, root: nn.Module, comm: Comm, units: Iterable[tuple[Unit, list[nn.Parameter]]], overlap: bool
    ) -> None:  # fmt: skip
        self._comm = comm
        self._overlap = overlap
        self._handles: dict[Unit, Handle] = {}
        self._parameters: dict[Unit, list[nn.Parameter]] = {}
        self._units: dict[nn.Parameter, list[Unit]] = {}  # a large one is cut into several
        self._hiding = Hiding(self.wait_for_parameter)
        # hidden parameter -> its real data; `.data` itself is the NaN placeholder meanwhile
        self._hidden: dict[nn.Parameter, torch.Tensor] = {}
        self._holes: dict[nn.Parameter, torch.Tensor] = {}
        self.add(root, units)

    def add(self, root: nn.Module, units: Iterable[tuple[Unit, list[nn.Parameter]]]) -> None:
        """Adds units, with their parameters, for which the modules of `root` wait from now on."""
        new = dict(units)
        self._parameters |= new
        for unit, parameters in new.items():
            for parameter in parameters:
                self._units.setdefault(parameter, []).append(unit)
        if self._overlap and self._comm.size > 1:
            # created now, not at the first launch: their memory is made once per process, and a zerobench.watch that
            # starts in between would count it for the first engine only
            with torch.inference_mode(False):  # an engine may be made in that mode, and trained outside of it
                self._holes |= {p: placeholder(p) for parameters in new.values() for p in parameters}
        for module, read in waiting_modules(root) if self._overlap else ():
            awaited = {unit: None for p in read for unit in self._units.get(p, []) if unit in new}
            if awaited:
                module.register_forward_pre_hook(Hook(partial(self._before_module, list(awaited))), prepend=True)

    def launch(self, unit: Unit) -> None:
        """Starts sending this rank's slice of the unit's parameters to all ranks."""
        self.wait(unit)
        self._comm.launches.add("gather", unit.name)
        self._handles[unit] = self._comm.all_gather(unit.full_parameters, unit.name, unit.layout.sizes)
        for parameter in self._parameters[unit] if self._holes else []:
            # other reads than by its own module's forward must wait, too: reads of the NaN in its place are noticed
            if parameter not in self._hidden:
                self._hidden[parameter] = parameter.data
                self._hiding.hide(parameter, self._holes[parameter])

    def wait(self, unit: Unit) -> None:
        """Waits until the unit's parameters have the new values."""
        handle = self._handles.pop(unit, None)
        if handle is None:
            return
        handle.wait()
        for parameter in self._parameters[unit] if self._hidden else []:
            # a parameter that is cut into several units is shown when the last of its gathers is done
            if not any(other in self._handles for other in self._units[parameter]):
                self._hiding.show(parameter, self._hidden.pop(parameter))

    def wait_all(self) -> None:
        """Waits until all parameters have the new values."""
        for unit in list(self._handles):
            self.wait(unit)

    def wait_for_parameter(self, parameter: nn.Parameter) -> None:
        """Waits for a hidden parameter that is about to be read outside of its own module, or between steps."""
        for unit in self._units[parameter]:
            self.wait(unit)

    def _before_module(self, units: list[Unit], *_: Any) -> None:
        for unit in units:
            self.wait(unit)


class Stage1(Strategy):
    """Optimizer states partitioned."""

    stage = 1

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer, comm: Comm, options: Options) -> None:
        self._next = 0  # how many buckets have been sent in the present backward
        super().__init__(module, optimizer, comm, options)
        units = [(unit, self.parameters_of(unit)) for unit in self.units]
        self.gathers = OverlappedParamGathers(module, comm, units, self.options.overlap_gather)

    # -- adopt: parameters move into buckets, one buffer after the other ----------------------------------

    def adopt(self) -> None:
        for parameter in self.frozen:
            order = self.orders[parameter]
            if parameter.stride() != order.strides:  # a placeholder gets memory
                parameter.data = order.view(order.flatten(parameter.data).clone())
            flat = order.flatten(parameter.data)
            self.broadcast_initial(flat if flat.dtype in TRAINED else flat.view(torch.uint8))
        self.adopt_trainable(range(len(self.trainable)))

    def adopt_trainable(self, numbers: Sequence[int]) -> None:
        """Moves trainable parameters into new units."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        first = len(self.units)
        for i in reversed(numbers):  # in the order in which gradients come
            p = self.trainable[i]
            kinds.setdefault((p.dtype, p.device, p in self.owners), []).append(i)
        runs: list[tuple[list[Layout], nn.Parameter]] = []  # the units of one buffer, and a parameter of their kind
        for indices in kinds.values():
            like = self.trainable[indices[0]]
            align = align_numel(self.optimizer, like.element_size())
            bucket_numel = int(self.options.bucket_bytes) // like.element_size()
            numels = [(i, self.trainable[i].numel()) for i in indices]
            owners = {i: self.owners[self.trainable[i]] for i in indices} if like in self.owners else None
            runs += [(layouts, like) for layouts in buckets(numels, bucket_numel, self.comm.size, align, owners)]
        # buckets are sent in this order, and one is complete when the gradient of its first parameter has come
        runs.sort(key=lambda run: -min(piece.parameter for layout in run[0] for piece in layout.pieces))
        for layouts, like in runs:
            flat = like.new_zeros(sum(layout.padded_numel for layout in layouts))
            dtypes = self.options.dtypes_for(like.dtype, self.comm.averaged_ranks)
            start = 0
            for layout in layouts:
                unit = Unit(f"bucket {len(self.units)}", layout, self.comm, dtypes, self.placement)
                unit.full_parameters = flat.narrow(0, start, layout.padded_numel)
                unit.parameter_shard = unit.own_slice(unit.full_parameters)
                labels.label(unit.full_parameters, labels.PARAMETERS, unit.name)
                self.units.append(unit)
                for piece in layout.pieces:
                    # the units of a divided parameter share one buffer: it moves as a whole, with its first piece
                    if piece.start == 0:
                        parameter = self.trainable[piece.parameter]
                        whole = flat.narrow(0, start + piece.offset, parameter.numel())
                        view = self.orders[parameter].view(whole)
                        view.copy_(parameter.detach())
                        parameter.data = view
                start += layout.padded_numel
            self.broadcast_initial(flat)
        self.allocate_gradients(self.units[first:])

    def adopt_unfrozen(self, numbers: Sequence[int]) -> None:
        first = len(self.units)
        self.adopt_trainable(numbers)
        self.gathers.add(self.module, [(unit, self.parameters_of(unit)) for unit in self.units[first:]])

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        parameter.copy_(values)

    # -- gradients -----------------------------------------------------------------------------------------

    def allocate_gradients(self, units: list[Unit]) -> None:
        """Allocates gradients after the parameters have moved, so that adoption needs no more memory than a step."""
        for unit in units:
            unit.gradients = self.new_bucket(unit)
            labels.label(unit.gradients.shard, labels.GRADIENTS, unit.name)

    def new_bucket(self, unit: Unit) -> GradientBucket:
        """Returns the gradient bucket of a unit under this stage."""
        return WholeBucket(unit, self.comm, self.options.reduce_with)

    # -- buckets are sent in one order on all ranks, as they fill --------------------------------------

    def due(self, unit: Unit) -> Iterable[Unit]:
        # a complete bucket waits for those before it: ranks whose gradients come in another order would pair different
        # buckets
        while self._next < len(self.units) and self.units[self._next].gradients.has_all_gradients:
            yield self.units[self._next]
            self._next += 1

    def left_over(self) -> Iterable[Unit]:
        sent, self._next = self._next, 0
        # late: gradients came after their bucket was sent; ranks may disagree, since one may send the bucket later
        late = [bool(unit.gradients.filled) and not unit.gradients.is_in_flight for unit in self.units[:sent]]
        yield from self.units[sent:]
        if self.gradients.repeats and self.comm.size > 1:
            device = self.comm.flags_device or self.units[0].device
            flags = torch.tensor(late + [False] * (len(self.units) - sent), dtype=torch.int32, device=device)
            self.comm.meet("a backward in which gradients came twice")
            self.comm.maximum(flags)
            late = flags.tolist()
        if any(late):
            self.gradients.wait_all()
        yield from (unit for unit, is_late in zip(self.units, late, strict=False) if is_late)

    def forget(self) -> None:
        self._next = 0

    # -- the updated parameters are sent to all ranks ---------------------------------------------------

    def after_update(self) -> None:
        # all are launched before the first is waited for, so that they share the link; the next forward needs the last
        # bucket first, since buckets are in the order in which gradients come
        for unit in reversed(self.units):
            self.gathers.launch(unit)
        if not self.options.overlap_gather:
            self.gathers.wait_all()

    def settle(self) -> None:
        self.gathers.wait_all()


class MegatronStage(Stage1):
    """Megatron-core's distributed optimizer: optimizer states are partitioned, as in ZeRO-1, with its own choices.

    Gradients are accumulated over the micro-batches in one contiguous buffer, in fp32 regardless of the model's dtype
    (main gradients), and each rank owns 1/N of every bucket of this buffer::

        reduce    buckets are reduce-scattered in the last micro-batch            ψ sent
        update    fp32 masters; gradients in half precision are cast whole
        gather    buckets are sent while the next forward runs                    ψ sent

    Bytes per parameter on each rank, according to its documentation (dist_optimizer.md, N data-parallel ranks):

        parameters fp16, gradients fp16    4 + 16/N
        parameters bf16, gradients fp32    6 + 12/N
        parameters fp32, gradients fp32    8 + 8/N
    """

    def allocate_gradients(self, units: list[Unit]) -> None:
        """Allocates one contiguous buffer per dtype; the units' gradients are views of it."""
        for dtype in {unit.dtypes.gradients: None for unit in units}:
            alike = [unit for unit in units if unit.dtypes.gradients == dtype]
            numel = sum(unit.layout.padded_numel for unit in alike)
            flat = torch.zeros(numel, dtype=dtype, device=alike[0].parameter_shard.device)
            labels.label(flat, labels.GRADIENTS, "main gradients")
            start = 0
            for unit in alike:
                main = flat.narrow(0, start, unit.layout.padded_numel)
                unit.gradients = WholeBucket(unit, self.comm, self.options.reduce_with, main)
                start += unit.layout.padded_numel
