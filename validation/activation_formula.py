"""Bytes of a GPT's activations: Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, section 4.

With s tokens, b sequences, h hidden, a heads, L layers, V vocabulary, and e bytes an element (the paper's 2)::

    a layer, in the paper         sbh (34 + 5as/h)           equation 1, e = 2, with dropout and a materialized softmax
    less two dropout masks        - 2sbh                     our GPT has none
    less 5as/h                                               a fused attention kernel keeps 4asb bytes in its place
    so, in e bytes an element     16 e sbh + 4asb

    recomputed                    e sbh a layer; and while backward is in a layer that one as above, with the gradients
                                  inside its MLP, 4 e sbh                                          section 5
    in host memory                what is offloaded, of all layers but the last: storages of `least_bytes` and more,
                                  16 e sbh a layer; recomputed e sbh
    offloaded, on the device      the last layer and, while backward is in it, the one before; 5 e sbh of gradients
    where backward begins         2 e sbh for the last norm and the head, and 12 sbV: the logits' logarithms in fp32 and
                                  two gradients of them at once (section 4.3 counts the first)
"""

from __future__ import annotations

from dataclasses import dataclass

from zerobench.config.cell import CellConfig
from zerobench.config.combinations import activation_policy
from zerobench.config.schema import Gpt
from zerobench.sections import known


@dataclass(frozen=True)
class GptShape:
    """A GPT and its batch. `micro_batch`: sequences on a rank in one forward; `element_bytes`: of the model's dtype.
    `offload`: what layers keep waits in host memory, storages of `least_bytes` and more.
    """

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    element_bytes: int
    checkpointing: bool
    offload: bool = False
    least_bytes: int = 64 * 1024

    @property
    def tokens(self) -> int:
        """Tokens of one forward on one rank."""
        return self.sequence * self.micro_batch


def layer_bytes(shape: GptShape) -> int:
    """Bytes that forward keeps of one layer for the backward."""
    return sum(_storages(shape))


def _storages(shape: GptShape) -> list[int]:
    """Bytes of each storage that a layer keeps: inputs and outputs of two norms, the output of attention, its three
    inputs in one, its log-sum-exp in fp32, and the activation function's input and output.
    """
    stream = shape.element_bytes * shape.tokens * shape.hidden
    return [*[stream] * 5, 3 * stream, 4 * shape.heads * shape.tokens, 4 * stream, 4 * stream]


def activation_bytes(shape: GptShape) -> int:
    """Returns the largest sum of activations and of their gradients on the device: where backward begins, or while it
    is in a layer that is recomputed, or in the last one while the one before comes back.
    """
    stream, layer = shape.element_bytes * shape.tokens * shape.hidden, layer_bytes(shape)
    kept = _storages(shape)[:1] if shape.checkpointing else _storages(shape)
    moved = sum(size for size in kept if size >= shape.least_bytes) if shape.offload else 0
    at_the_end = 2 * stream + 12 * shape.tokens * shape.vocabulary
    coming = moved * (shape.layers > 1)
    if shape.checkpointing:
        inputs = shape.layers * (stream - moved)
        return inputs + moved + max(at_the_end, layer + 4 * stream + coming)
    if not shape.offload:
        return shape.layers * layer + at_the_end
    return shape.layers * (layer - moved) + moved + max(at_the_end, coming + 5 * stream)


def shape_of(config: CellConfig) -> GptShape:
    """Returns the shape of a resolved cell with a GPT."""
    model, policy = config.model, activation_policy(config)
    assert isinstance(model, Gpt)
    return GptShape(
        model.layers, model.hidden, model.heads, known(model.vocabulary), config.sequence, config.micro_batch,
        config.precision.dtype.itemsize, model.checkpointing or policy.recompute, policy.keep == "host",
        policy.least_bytes,
    )  # fmt: skip
