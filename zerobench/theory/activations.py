"""Bytes of a GPT's activations: Korthikanti et al., Reducing Activation Recomputation, arXiv 2205.05198, section 4.

With s tokens, b sequences, h hidden, a heads, L layers, V vocabulary, and e bytes an element (the paper's 2)::

    a layer, in the paper         sbh (34 + 5as/h)           equation 1, e = 2, with dropout and a materialised softmax
    less two dropout masks        - 2sbh                     our GPT has none
    less 5as/h                                               a fused attention kernel keeps 4asb bytes in its place
    so, in e bytes an element     16 e sbh + 4asb

    recomputed                    e sbh a layer; and while backward is in a layer that one as above, with the gradients
                                  inside its MLP, 4 e sbh                                          section 5
    where backward begins         2 e sbh for the last norm and the head, and 12 sbV: the logits' logarithms in fp32 and
                                  two gradients of them at once (section 4.3 counts the first)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GptShape:
    """A GPT and its batch. `micro_batch`: sequences on a rank in one forward; `element_bytes`: of the model's dtype."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    micro_batch: int
    element_bytes: int
    checkpointing: bool

    @property
    def tokens(self) -> int:
        """Of one forward on one rank."""
        return self.sequence * self.micro_batch


def layer_bytes(shape: GptShape) -> int:
    """What forward keeps of one layer for the backward."""
    return shape.tokens * (16 * shape.element_bytes * shape.hidden + 4 * shape.heads)


def activation_bytes(shape: GptShape) -> int:
    """The most that is alive of activations and of their gradients: where backward begins, or while it is in a layer
    that is recomputed.
    """
    stream = shape.element_bytes * shape.tokens * shape.hidden
    at_the_end = 2 * stream + 12 * shape.tokens * shape.vocabulary
    if not shape.checkpointing:
        return shape.layers * layer_bytes(shape) + at_the_end
    return shape.layers * stream + max(at_the_end, layer_bytes(shape) + 4 * stream)
