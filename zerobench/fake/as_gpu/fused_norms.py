"""RMS norms of transformers as one kernel: training codes often have fused ones, transformers has plain operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest import mock

import torch
from torch.nn import functional as F

NORMS = {"llama": "LlamaRMSNorm", "mistral": "MistralRMSNorm", "qwen2": "Qwen2RMSNorm", "qwen3": "Qwen3RMSNorm"}
"""Architecture -> its norm class."""


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
