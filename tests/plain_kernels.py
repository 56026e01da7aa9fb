"""The kernels of an update on a GPU (zero/optim/one_pass.py) in plain torch, for engines on a CPU."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import torch

from zerobench.zero import writes
from zerobench.zero.optim import one_pass
from zerobench.zero.optim.one_pass import Kernels
from zerobench.zero.precision import UpdatedShare


class PlainKernels:
    """Kernels whose bits are those of torch's fused optimizer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def update(
        self, parts: Sequence[UpdatedShare], factor: torch.Tensor | None, found_inf: torch.Tensor | None,
        flags: torch.Tensor | None,
    ) -> None:  # fmt: skip
        for part in parts:
            state, group = part.state, part.group
            state["step"] += 1 if found_inf is None else 1 - found_inf
            if found_inf:
                continue
            if flags is not None and part.parameter is not None:
                flags[part.number] |= not torch.equal(bits(part.parameter), bits(part.master.to(part.parameter.dtype)))
            lists = [[part.master], [part.gradient.float() * (1 if factor is None else factor)]]
            names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step")
            lists += [[value] if (value := state.get(name)) is not None else [] for name in names]
            options = {key: group[key] for key in ("lr", "weight_decay", "eps", "amsgrad", "maximize")}
            beta1, beta2 = group["betas"]
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(*lists, **options, beta1=beta1, beta2=beta2)
            if part.parameter is not None:
                part.parameter.copy_(part.master)

    def squares(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([gradient.double().square().sum() for gradient in gradients])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


@contextmanager
def acts_as_gpu(kernels: Callable[[torch.device], Kernels] = PlainKernels) -> Iterator[None]:
    """Updates on the CPU are made by `kernels`, and the host asks for no results of comparisons."""
    with mock.patch.dict(writes.HOST_MAY_COMPARE, {"cpu": False}), mock.patch.dict(one_pass.KERNELS, {"cpu": kernels}):
        yield
