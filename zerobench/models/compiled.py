"""Blocks compiled by torch.compile: each forward is one graph, made by inductor, before a strategy wraps the model.

forward      of a block, under its activation policy: a graph, whose backward is a second one
hooks        of the block run before and after the graph, so that a strategy gathers and reduces around it; modules
             inside of it are no longer called
kept         between the two: the tensors that AOTAutograd's partitioner chooses, by a minimum cut through both
             (min_cut_rematerialization_partition); it recomputes cheap operators

Blocks of one class share a graph. A block that breaks into several graphs, or needs a new graph for each instance, ends
the run with an error: the rest would run eagerly. DDP's own splitting of graphs at buckets is off, so that all
strategies run the same graphs.
"""

from __future__ import annotations

import threading
from typing import Any

from torch import nn

from ..fake.compiler import dispatch_buffers, modes_active
from ..zero.activations.policies import Forward, Wrapped
from ..zero.modules.wrapping import blocks


class CompiledForward(Wrapped):
    """A forward that is one graph, compiled at its first call. `name`: its module's name."""

    is_one_graph = True
    """True because the modules inside are not called."""

    def __init__(self, forward: Forward, name: str) -> None:
        super().__init__(forward)
        self._name = name
        self._graph: Forward | None = None

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Runs the graph. Raises RuntimeError, with torch's reason, for a forward that is not a single graph."""
        import torch._dynamo.exc  # takes seconds: only for a model that is compiled
        import torch._inductor.config

        if self._graph is None:
            from torch.hub import (
                tqdm,  # torch's progress bars, which are off: their lock is a semaphore that would stay
            )

            tqdm.set_lock(threading.RLock())
            torch._dynamo.config.optimize_ddp = False
            torch._inductor.config.compile_threads = 1  # compile here: worker processes would outlive the compilation
            if modes_active():
                dispatch_buffers()
            self._graph = torch.compile(self.forward, fullgraph=True, dynamic=False)

        try:
            return self._graph(*inputs, **named_inputs)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = " ".join(str(error).split("\n\n")[0].split())
            raise RuntimeError(
                f"compile=blocks: {self._name}: torch.compile cannot make one graph of this block; use compile=none"
                f" ({reason})"
            ) from error


def compile_blocks(model: nn.Module) -> None:
    """Compiles the forward of each block of `model`."""
    for name, block in blocks(model):
        block.forward = CompiledForward(block.forward, name)
