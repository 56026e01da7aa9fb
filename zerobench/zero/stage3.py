"""ZeRO-3, P_os+g+p: parameters are partitioned too (ZeRO, arXiv 1910.02054, section 5.3).

A unit is a module group (units/gathered_unit.py): a transformer block, or the root, which holds the rest. Each rank
keeps 1/N of every unit; the full parameters exist only while they are read::

    before forward     unshard (all-gather), the next unit ahead of its use           ψ sent
    after forward      reshard
    before backward    unshard, the previous unit ahead of its use                    ψ sent
    backward passed    reshard, reduce as in stage 2                                  ψ sent
    update             the optimizer sees the shards; nothing to gather

The root unit is in use at both ends of forward and backward, and stays between them: 3ψ minus its size.
In bytes per rank, for Adam: 16ψ/N in fp32. In half precision, if masters are the only shards, 14ψ/N, of which 12ψ/N
exist when backward starts. A gather reads 4 bytes per element of a shard and writes 2. With shards of parameters
as well: 16ψ/N, as in the paper. In flight: two adjacent units, the root, a unit's gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils import _pytree as pytree

from . import labels
from .bucket import GradientBucket
from .layout import one_unit
from .modules import wrapping
from .options import AUTO, MASTERS
from .parameters.access import Hiding, allow_fast_path_checks
from .stage2 import Stage2
from .units.gathered_unit import FREED, IN_PARTS, SECOND_ORDER, UNHEARD, GatheredUnit, GathersAhead, stored_dtype
from .units.root import Root
from .units.unit import Unit, align_numel
from .writes import WRITTEN

TAIL_NUMEL = 8
"""Elements kept free at the end of a unit. The theory and the recorded budgets count them."""

KEPT = "(kept)"
"""The unit of the small parameters that stay whole."""


class Stage3(Stage2):
    """Optimizer states, gradients and parameters partitioned."""

    stage = 3

    # -- adopt: module groups become units --------------------------------------------------------------

    def adopt(self) -> None:
        self._order: wrapping.UnitOrder[GatheredUnit] = wrapping.UnitOrder()
        self._done: set[GatheredUnit] = set()  # passed by the present backward
        self._warned = False
        self._recording = False  # the present forward will be followed by a backward
        self._is_second_order = False  # autograd.grad with create_graph has gone through an open forward
        self._all_units: list[GatheredUnit] = []
        self._units_at: dict[nn.Module, list[GatheredUnit]] = {}
        self._standalone: list[GatheredUnit] = []  # gathered by the present backward for a standalone call
        self._followed = Hiding(None, lets_write=True, lets_detach=True, on_read=self._follow_read)  # all are whole
        self._follows = False
        self.hiding = Hiding(self.refuse, lets_write=True)
        # memory for a gather: the bucket that is being sent has arrived, and its memory is free
        self._ahead = GathersAhead(lambda: self.gradients.wait_all())
        chosen = self.options.units
        modules = wrapping.default_units(self.module) if chosen is None else wrapping.named_units(self.module, chosen)
        unit_of = {p: unit for p, unit in wrapping.unit_of_parameters(self.module, modules).items() if p in self.orders}
        kept = [p for p in unit_of if 0 < p.numel() <= self.options.persistence_numel]
        self._all_units += self._adopt_group(KEPT, kept, stays=True)
        for name, module in [(wrapping.ROOT, self.module), *modules]:
            members = [p for p, unit in unit_of.items() if unit == name and p.numel() > self.options.persistence_numel]
            units = self._adopt_group(name or "(root)", members)
            self._all_units += units
            self._units_at[module] = units
            if module is self.module:
                frees = self.options.keep_root == AUTO
                self._root = Root(module, units, bool(modules), frees, self._backward_at_root)
            if units or module is self.module:
                self._hook(module, units)
        self.units = [unit for unit in self._all_units if unit.trainable]
        self._unit_of = {p: unit for unit in self._all_units for p in unit.parameters}
        allow_fast_path_checks(self.module, self.hiding)

    def adopt_unfrozen(self, numbers: Sequence[int]) -> None:
        self.close_forwards()
        self._order.restart()
        trained = {self.trainable[number] for number in numbers}
        for old in [unit for unit in self._all_units if not trained.isdisjoint(unit.parameters)]:
            old.unshard_exactly()
            # parameters that stay frozen keep the unit's name; the unfrozen ones become a unit of their own
            frozen, unfrozen = ([p for p in old.parameters if (p in trained) is value] for value in (False, True))
            name_of_unfrozen = f"{old.name} part {len(self._all_units) + 1}" if frozen else old.name
            new = self._adopt_group(old.name, frozen, old.is_kept)
            new += self._adopt_group(name_of_unfrozen, unfrozen, old.is_kept)
            old.dissolve()
            for units in (self._all_units, *self._units_at.values()):
                if old in units:
                    units[units.index(old) : units.index(old) + 1] = new
            self.units += [unit for unit in new if unit.trainable]
            self._unit_of |= {p: unit for unit in new for p in unit.parameters}

    def _adopt_group(self, name: str, parameters: list[nn.Parameter], stays: bool = False) -> list[GatheredUnit]:
        """Returns the units of the group `name`. `stays`: they are always whole."""
        kinds: dict[tuple[Any, ...], list[nn.Parameter]] = {}
        for p in parameters:
            kinds.setdefault((p.requires_grad, stored_dtype(p), p.device, p in self.owners), []).append(p)
        index = {p: i for i, p in enumerate(self.trainable)}
        units = []
        for number, members in enumerate(kinds.values(), start=1):
            owners = None
            if members[0] in self.owners:
                members = sorted(members, key=self.owners.__getitem__)
                owners = {index[p]: self.owners[p] for p in members}
            dtype = stored_dtype(members[0])
            numels = [(index.get(p, -1), p.numel() * p.element_size() // dtype.itemsize) for p in members]
            layout = one_unit(numels, self.comm.size, align_numel(self.optimizer, dtype.itemsize), TAIL_NUMEL, owners)
            dtypes = self.options.dtypes_for(dtype, self.comm.averaged_ranks)
            keeps_masters = self.options.shards == MASTERS and not (stays or self.placement.is_tiered)
            if keeps_masters and not index.keys().isdisjoint(members):
                dtypes = replace(dtypes, shard=dtypes.master)
            unit_name = name if number == 1 else f"{name} part {number}"
            orders = {p: self.orders[p] for p in members}
            unit = GatheredUnit(
                unit_name, layout, self.comm, dtypes, self.placement, orders, stays, self.broadcast_initial, self.hiding
            )
            if unit.trainable:
                unit.gradients = self.new_bucket(unit)
                labels.label(unit.gradients.shard, labels.GRADIENTS, unit_name)
            units.append(unit)
        return units

    def _hook(self, module: nn.Module, units: list[GatheredUnit]) -> None:
        is_root = module is self.module

        def before(_module: nn.Module, _inputs: Any) -> None:
            if is_root and not wrapping.inside_backward():
                self._recording = torch.is_grad_enabled()
                if self._recording:
                    self._order.begin_forward()
            self.before_forward(units)
            if is_root and self._recording and not wrapping.inside_backward():
                self._root.begin_forward(lambda: self._order.end)

        inner = list(module.modules())

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if is_root:
                self.after_root_forward(output)
            else:
                self.after_forward(units, output, inner)

        if is_root:
            self._around_root = before, after
        module.register_forward_pre_hook(wrapping.Hook(before), prepend=True)
        module.register_forward_hook(wrapping.Hook(after))

    def run_forward(self, run: Callable[[], Any]) -> Any:
        try:
            return super().run_forward(run)
        except BaseException:
            if not self.running:  # a failed forward does not reach `after_root_forward`
                self._recording = False
            raise

    def run_registered(self, module: nn.Module, run: Callable[[], Any]) -> Any:
        inside = self.running or self._recording or wrapping.inside_backward()
        if module is self.module and not inside:
            return self.run_forward(partial(_run_between, *self._around_root, run))
        inner = {unit for each in module.modules() if each is not module for unit in self._units_at.get(each, ())}
        read = dict.fromkeys(self._unit_of[p] for p in module.parameters() if p in self._unit_of)
        units = [unit for unit in read if unit not in inner and not unit.stays]
        absent, whole = ([unit for unit in units if unit.is_whole is value] for value in (False, True))

        def after(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if absent:
                self.after_forward(absent, output, list(module.modules()))
            self._hook_standalone(whole, output)  # whole for an outer forward, or since one

        return _run_between(lambda *_: self.before_forward(absent), after, run)

    def new_bucket(self, unit: Unit) -> GradientBucket:
        bucket = super().new_bucket(unit)
        bucket.check = partial(self.check_gradient, unit)
        return bucket

    def check_gradient(self, unit: Unit) -> None:
        """Raises RuntimeError if a gradient of `unit` has come although its parameters, which it needs, are absent."""
        assert isinstance(unit, GatheredUnit)
        if not (unit.is_whole or self._root.is_on_demand(unit)):
            raise RuntimeError(f"{unit.name}: backward {self._why_absent}")

    @property
    def _why_absent(self) -> str:
        return SECOND_ORDER if self._is_second_order else f"came {UNHEARD}"

    def store(self, parameter: nn.Parameter, values: torch.Tensor) -> None:
        if parameter.numel():
            self._unit_of[parameter].store(parameter, values)

    def read(self, parameter: nn.Parameter) -> torch.Tensor:
        with self.whole(self._unit_of[parameter]):
            return super().read(parameter)

    # -- queries ----------------------------------------------------------------------------------------

    def gathered_units(self) -> list[Unit]:
        return list(self._all_units)

    def parameters_of(self, unit: Unit) -> list[nn.Parameter]:
        assert isinstance(unit, GatheredUnit)
        return unit.parameters

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        assert isinstance(unit, GatheredUnit)
        was_whole = unit.is_whole
        unit.unshard_exactly()
        unit.held += 1  # modules may be run inside, whose hooks would reshard
        try:
            yield
        finally:
            unit.held -= 1
            if not was_whole:
                unit.free()  # what was written inside has been kept (writes.py)

    @contextmanager
    def following_reads(self) -> Iterator[None]:
        follows = torch.is_grad_enabled() and not self._follows
        read = [p for unit in self._all_units if follows and not unit.stays for p in unit.parameters]
        self._follows = self._follows or follows
        for parameter in read:
            self._followed.intercept(parameter)
        try:
            yield
        finally:
            self._follows = self._follows and not follows
            self._followed.stop_intercepting(read)

    def _follow_read(self, read: list[nn.Parameter], result: Any) -> Any:
        """Hooks backward to gather the units of `read`. A view is copied: it would be read before its own hook runs."""
        units = list(dict.fromkeys(self._unit_of[p] for p in read))
        held = {_address(unit.full_parameters) for unit in units}

        def copied_if_view(value: Any) -> Any:
            is_computed = isinstance(value, torch.Tensor) and value.grad_fn is not None
            return value.clone() if is_computed and _address(value) in held else value

        if torch.is_grad_enabled():
            result = pytree.tree_map(copied_if_view, result)
            self._hook_standalone(units, result)
        return result

    # -- the events -------------------------------------------------------------------------------------

    def before_forward(self, units: list[GatheredUnit]) -> None:
        """Unshards units before their module runs, for the first time or again inside backward to recompute."""
        for unit in units:
            unit.unshard()
        # only then the next one: its gather runs while this module computes, and must not delay this one's
        if self._recording and units and not wrapping.inside_backward():
            use = max(self._order.record(unit) for unit in units)
            for following in self._order.ahead(use, self.options.prefetch):
                following.launch_unshard()

    def after_forward(self, units: list[GatheredUnit], output: Any, inner: list[nn.Module]) -> None:
        """Reshards units after their module and its `inner` modules ran; hooks backward to unshard them again."""
        recomputed = wrapping.inside_backward()
        if not recomputed and (self.options.reshard_after_forward or not self._recording):
            for unit in units:
                unit.reshard()
        if not torch.is_grad_enabled():
            return
        if not (recomputed or self._recording):
            self._hook_standalone(units, (output, wrapping.tensors_left_in(inner)))
        if not self._recording and (not recomputed or units[0] in self._standalone):
            return
        use = self._order.only_use(units[0]) if recomputed else self._order.end - 1
        tensors = list(wrapping.tensors_that_require_grad((output, wrapping.tensors_left_in(inner))))
        learns = any(p.requires_grad for unit in units for p in unit.parameters)  # now: it may have been frozen since
        if learns and not tensors:
            wrapping.check_visible(units[0].name, output)
        if not tensors and use is not None:
            self._order.end_before(use, len(units))
        elif use is not None:
            hook = partial(self.before_backward, units, use, self._order.forward_of(use))
            register_multi_grad_hook(tensors, hook, mode="any")

    def after_root_forward(self, output: Any) -> None:
        """Called after the whole model has run. The root stays for the backward, if there will be one."""
        if wrapping.inside_backward():
            return
        if self._recording:
            if not self._warned:
                self._warned = True
                wrapping.warn_of_modules_not_called(
                    [u.name for u in self._all_units if not u.stays and u not in self._order.uses]
                )
            self._root.end_forward()
            # with one rank a gather sends nothing
            if not self.options.keep_root or (self._root.frees_in_backward and self.comm.size == 1):
                for unit in self._root.units:
                    unit.reshard()
            tensors = list(wrapping.tensors_that_require_grad(output))
            if tensors:
                register_multi_grad_hook(tensors, partial(self._before_root_backward, self._order.forward), mode="any")
        self._recording = False
        if not self._order.uses:
            self._reshard_all()

    def before_backward(
        self, units: list[GatheredUnit], use: int, forward: wrapping.Forward | None, gradient: torch.Tensor
    ) -> None:
        """Called when backward reaches this use of these units: it is done with all units that it has passed."""
        self._check_age(forward, gradient)
        self.gradients.begin_plain()
        self._ahead.launch()
        self._end_standalone(units)
        self._finish(self._order.passed(use))
        self._root.reshard_in_backward()
        for unit in units:
            unit.unshard()
        # a module's units are consecutive uses, of which `use` is the last
        preceding = self._order.behind(use - len(units) + 1, self.options.prefetch)
        preceding = [unit for unit in preceding if not self._root.is_on_demand(unit)]
        learns = any(unit.trainable for unit in units)
        self._ahead.enter(units, preceding, must_wait=bool(self.gradients.in_flight) and learns)

    def _before_root_backward(self, forward: wrapping.Forward | None, gradient: torch.Tensor) -> None:
        self._check_age(forward, gradient)
        self.gradients.begin_plain()
        if not self._root.is_last:
            self._root.unshard()
        # if a head comes first, the last unit is gathered during its backward: before it, the loss's temporaries peak
        last = self._order.behind(self._order.end, self.options.prefetch)
        self._ahead.enter(self._root.units, last, must_wait=self._root.is_last)

    def _backward_at_root(self) -> None:
        self.gradients.begin_plain()
        self._ahead.launch()

    def _hook_standalone(self, units: list[GatheredUnit], output: Any) -> None:
        """Hooks backward to gather `units`, which were read outside of the engine's forward, or without a hook."""
        tensors = [t for t in wrapping.tensors_that_require_grad(output) if t.grad_fn is not None] if units else []
        if tensors and torch.is_grad_enabled():
            register_multi_grad_hook(tensors, partial(self._before_standalone_backward, [*units]), mode="any")

    def _before_standalone_backward(self, units: list[GatheredUnit], _gradient: torch.Tensor) -> None:
        freed = next((unit.name for unit in units if not (unit.stays or unit.held)), None)
        if torch.is_grad_enabled() and freed is not None:
            raise RuntimeError(f"{freed}: backward {SECOND_ORDER}")
        if any(self._unit_of[unit.parameters[0]] is not unit for unit in units):
            raise RuntimeError(
                f"{units[0].name}: parameters of it were unfrozen between a call of it and its backward; unfreeze them"
                " before the call"
            )
        self.gradients.begin_plain()
        self._ahead.launch()
        self._end_standalone(units)
        self._standalone = units
        for unit in units:
            unit.unshard()
        self._done.difference_update(units)

    def _end_standalone(self, units: list[GatheredUnit]) -> None:
        """Reshards the units of earlier standalone calls, and reduces those that no open forward uses as well."""
        left, self._standalone = [u for u in self._standalone if u not in units], []
        for unit in left:
            if unit in self._root.units:  # whose modules may still be read
                continue
            if unit in self._order.uses:
                unit.reshard()
            else:
                self._finish([unit])

    def _check_age(self, forward: wrapping.Forward | None, _gradient: torch.Tensor) -> None:
        self._is_second_order = self._is_second_order or torch.is_grad_enabled()
        if not self._order.reach(forward):
            raise RuntimeError(
                "backward through a forward that a backward has gone through, or a step: zero3 has given its parameters"
                " back; go through each forward once, and before the step"
            )

    def _finish(self, units: Iterable[GatheredUnit]) -> None:
        """Reshards units that backward has passed, and reduces their gradients."""
        for unit in units:
            if unit not in self._done:
                unit.reshard()
                if not self.gradients.in_backward:  # another's: nothing to reduce
                    continue
                self._done.add(unit)
                if unit.trainable and self.gradients.synchronizing:
                    self.gradients.reduce([unit])

    def backward(self, loss: torch.Tensor, retain_graph: bool = False) -> None:
        try:
            super().backward(loss, retain_graph)
        except BaseException as error:
            why = self._why_absent
            self.abandon_backward()
            if FREED in str(error):
                raise RuntimeError(f"backward: it {why}") from error
            raise

    def abandon_backward(self) -> None:
        super().abandon_backward()
        self._end_backward(closes_all=True)

    def due(self, unit: Unit) -> Iterable[Unit]:
        """Backward's progress decides when a unit is sent, so that all ranks send in one order."""
        self._ahead.written(unit)
        return ()

    def left_over(self) -> Iterable[Unit]:
        self._reshard_all()  # backward is over: the last gradients need not lie beside parameters
        only_standalone = not self._order.is_reached and any(unit.gradients.filled for unit in self.units)
        kept = (u for u in self._all_units if u.stays)
        for unit in () if only_standalone else dict.fromkeys([*reversed(self._order.uses), *kept]):
            if unit.trainable and unit not in self._done:
                yield unit
        for remaining in self.units:
            # gradients that came late, or from under no_sync
            if remaining.gradients.filled and not remaining.gradients.is_in_flight:
                yield remaining

    def finish_backward(self) -> None:
        super().finish_backward()
        self._reshard_all()  # no full parameters are read before the next forward, which gathers new ones
        self._end_backward()

    def _end_backward(self, closes_all: bool = False) -> None:
        self._done.clear()
        self._ahead.forget()
        self._standalone = []
        self._is_second_order = False
        self._order.end_backward(closes_all)

    def _reshard_all(self) -> None:
        for unit in self._all_units:
            unit.reshard()

    def close_forwards(self) -> None:
        for unit in self._all_units:
            unit.free()
        self._end_backward(closes_all=True)

    def after_update(self) -> None:
        self.close_forwards()
        for unit in self._all_units:
            if unit.trainable:
                unit.refresh()

    def send_parameters(self) -> None:
        super().send_parameters()
        for unit in self._all_units:
            if not unit.trainable:
                unit.refresh()

    def refuse(self, parameter: nn.Parameter, writes: bool = False) -> None:
        """Raises RuntimeError: `parameter` is about to be read or written to while this rank has only a part of it."""
        name = next((name for name, p in self.module.named_parameters() if p is parameter), "a parameter")
        if writes:
            raise RuntimeError(f"{name}: {WRITTEN}")
        unit = self._unit_of[parameter]
        in_hook = wrapping.inside_backward() and self._root.is_on_demand(unit)
        way = "; a hook that reads it in backward needs keep_root=True" if in_hook else ""
        raise RuntimeError(f"{name}: it is read outside of the forward of {unit.name}, {IN_PARTS}{way}")


def _address(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # inside of a transform of torch.func, which ends while the parameters are whole
        return 0


def _run_between(before: Callable[..., None], after: Callable[..., None], run: Callable[[], Any]) -> Any:
    """Runs a method like a module's forward, between its hooks."""
    wrapping.Hook(before)(None, ())
    output = run()
    wrapping.Hook(after)(None, (), output)
    return output
