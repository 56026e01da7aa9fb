"""Known architectures from transformers, with random weights: nothing is downloaded, no external code is executed.

Their shape may come from a local config.json in transformers' format, which is read as data.

settings    the file's description of the architecture, without ABOUT_WEIGHTS: they go to the architecture's own config,
            whose defaults fill in missing settings
refused     keys that would need external code (auto_map, trust_remote_code) or that are not for training
            (quantization_config)
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..host.files import read_text
from .chunks import LossHead, fused_cross_entropy, in_chunks

NAME = "config.json"

MOST_BYTES = 2**22
"""Largest size in bytes of a file that is read."""

ABOUT_WEIGHTS = (
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "_name_or_path", "use_cache",
    "attn_implementation", "_attn_implementation", "_attn_implementation_internal",
)  # fmt: skip
"""Keys on how weights were stored or run; here `precision` and the device decide that."""

REFUSED = {
    "auto_map": "names code of its own, which is not run; register the model in your own script, or remove the"
    " key if transformers' own code is what you train",
    "trust_remote_code": "asks for external code, which is not run; register the model in your own script",
    "quantization_config": "describes quantized weights, which are not trained; remove the key",
}
"""Key -> why a file with it is refused, and what to do."""


SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
"""transformers' names of the sizes that every causal language model has."""

ANY_LENGTH = 2**20
"""Positions of a model whose file does not limit them."""


class Shape(NamedTuple):
    """The shape that a file describes. `options`: all its settings."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    vocabulary: int
    positions: int
    options: dict[str, Any]


def read_config(path: str, more: dict[str, Any]) -> Shape:
    """Reads a config.json, or the one in a folder. `more`: settings that replace the file's. Raises ValueError, with an
    error message, for a file that is not a config, needs external code, or is not for a causal language model.
    """
    file = Path(path).expanduser()
    file = file / NAME if file.is_dir() else file
    try:
        if file.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has {file.stat().st_size} bytes; at most {MOST_BYTES} are read")
        settings = json.loads(read_text(file))
    except FileNotFoundError:
        raise ValueError(f"huggingface.config={path}: there is no such file; nothing is downloaded") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"huggingface.config={path}: it is no JSON that can be read: {_first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"huggingface.config={path}: it holds no mapping, as a {NAME} does")
    for key in REFUSED.keys() & (settings.keys() | more.keys()):
        raise ValueError(f"huggingface.config={path}: {key} {REFUSED[key]}")
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    except ImportError:
        raise ValueError("model=huggingface: transformers is not installed; pip install transformers") from None
    kind = settings.get("model_type")
    if not isinstance(kind, str):
        raise ValueError(f"huggingface.config={path}: it has no model_type, the name of its architecture")
    if kind not in CAUSAL and kind in transformers.CONFIG_MAPPING:
        problem = "is no causal language model; register the model in your own script"
        raise ValueError(f"huggingface.config={path}: model_type {kind} {problem}")
    if kind not in CAUSAL:
        hint = _nearest(kind, list(CAUSAL), 0.6) or "; a newer one may, or register the model in your own script"
        raise ValueError(
            f"huggingface.config={path}: transformers {transformers.__version__} knows no model_type {kind:.60}{hint}"
        )
    options = _without(settings, ABOUT_WEIGHTS) | more
    try:
        config = transformers.CONFIG_MAPPING[kind](**options)
        text = config.get_text_config()
        sizes = [getattr(text, name) for name in SIZES]
    except Exception as error:  # transformers checks values in many ways
        raise ValueError(f"huggingface.config={path}: no config of {kind}: {_first_line(error)}") from error
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"huggingface.config={path}: layers, hidden size, heads and vocabulary are {sizes}, not sizes")
    layers, hidden, heads, vocabulary = sizes
    positions = getattr(text, "max_position_embeddings", None)
    positions = positions if isinstance(positions, int) else ANY_LENGTH
    return Shape(kind, layers, hidden, heads, vocabulary, positions, options)


def _without(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns settings without `names`, in subsections too, such as text_config, which keep their model_type."""
    kept = {key: value for key, value in settings.items() if key not in names}
    inner = tuple(name for name in names if name != "model_type")
    return {key: _without(value, inner) if isinstance(value, dict) else value for key, value in kept.items()}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\b[A-Z]\w*Error: ", "", " ".join(lines))[:200] or type(error).__name__


class CausalLM(nn.Module):
    """`forward(tokens, targets)` returns the mean cross-entropy in fp32 of a transformers causal language model, plus
    the loss that balances its experts if the option `output_router_logits` is true. `loss`: one of LOSSES.
    """

    def __init__(self, model: nn.Module, loss: str = "plain") -> None:
        super().__init__()
        self.model = model
        self.loss = loss
        self._kept: torch.Tensor | None = None

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the loss of predicting `targets`, both (B, S)."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        if isinstance(head, LossHead):
            hidden = self.model.base_model(input_ids=tokens, use_cache=False)[0]  # type: ignore[operator]
            return head(hidden.flatten(0, 1), targets.flatten())  # type: ignore[no-any-return]
        out = self.model(input_ids=tokens, use_cache=False)
        loss, balance = self._cross_entropy(out.logits.flatten(0, 1), targets.flatten()), getattr(out, "aux_loss", None)
        return loss if balance is None else loss + self.model.config.router_aux_loss_coef * balance  # type: ignore

    def _cross_entropy(self, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if self.loss == "fused":
            return fused_cross_entropy(logits, targets)
        logits = logits.float()
        if self.loss == "kept":
            self._kept = logits.detach()
        return nn.functional.cross_entropy(logits, targets)


LOSSES = ("plain", "kept", "fused")
"""Values of `huggingface.loss`."""

HEAD_ALONE = ("gpt2", "gpt_neox", "llama", "mistral", "mixtral", "olmo", "opt", "phi", "phi3", "qwen2", "qwen3")
"""Architectures whose logits are the head's output for the base model's output, as the loss in parts requires."""

MLP_ALONE = ("gpt2", "gpt_neox", "llama", "mistral", "olmo", "phi", "phi3", "qwen2", "qwen3")
"""Architectures whose blocks have a module `mlp` from (B, S, H) to (B, S, H), as MLPs in parts require."""


SHAPE_KEYS = {
    "num_hidden_layers": "huggingface.layers",
    "hidden_size": "huggingface.hidden",
    "num_attention_heads": "huggingface.heads",
    "vocab_size": "huggingface.vocabulary",
    "max_position_embeddings": "huggingface.positions",
    "torch_dtype": "precision",
    "dtype": "precision",
}
"""transformers' names of options that have their own key here."""

ATTENTION = "attn_implementation"
ATTENTIONS = ("sdpa", "eager")
"""Values of the option ATTENTION: the ones that need no package of kernels for one kind of GPU."""

UNLISTED = ("head_dim", ATTENTION)
"""Options that models of transformers read, although some of their configs do not list them."""


def problems_of(architecture: str, options: dict[str, Any]) -> list[str]:
    """Returns error messages with the reasons why `architecture` with `options` cannot be built."""
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return ["model=huggingface: transformers is not installed; pip install transformers"]
    architectures = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if architecture not in architectures:
        hint = _nearest(architecture, architectures)
        return [f"huggingface.architecture={architecture}: no causal language model of that name{hint}"]
    plain = CONFIG_MAPPING[architecture]()
    aliases = getattr(plain, "attribute_map", {})
    ours = {alias: SHAPE_KEYS[name] for name, alias in aliases.items() if name in SHAPE_KEYS} | SHAPE_KEYS
    unknown = [name for name in options if not hasattr(plain, name) and name not in (*ours, *UNLISTED)]
    attention = options.get(ATTENTION, ATTENTIONS[0])
    if attention not in ATTENTIONS:
        choices = f"{', '.join(ATTENTIONS)}, which need no other package"
        return [f"huggingface.options.{ATTENTION}={attention}: must be one of {choices}"]
    return [f"huggingface.options.{name}: set {ours[name]} instead" for name in options if name in ours] + [
        f"huggingface.options.{name}: {architecture} has no such setting{_nearest(name, list(plain.to_dict()))}"
        for name in unknown
    ]


def problems_of_chunks(chunks: int, of_mlp: int, architecture: str, loss: str, balances: bool) -> list[str]:
    """Returns the reasons why the loss of `architecture`, or its MLPs, cannot be computed in parts."""
    if of_mlp > 1 and architecture not in MLP_ALONE:
        problem = f"the MLP of {architecture}'s blocks is no module `mlp` alone; known: {', '.join(MLP_ALONE)}"
        return [f"model.mlp_chunks={of_mlp}: {problem}"]
    if chunks > 1 and architecture not in HEAD_ALONE:
        problem = f"{architecture} may scale or cap what its head makes; known not to: {', '.join(HEAD_ALONE)}"
        return [f"model.loss_chunks={chunks}: {problem}"]
    if chunks > 1 and loss != "plain":
        return [f"model.loss_chunks={chunks}: the parts have a loss of their own; leave out huggingface.loss={loss}"]
    if chunks > 1 and balances:
        problem = "the loss that balances the experts is computed with whole logits; leave one of the two out"
        return [f"model.loss_chunks={chunks}: huggingface.options.output_router_logits=true: {problem}"]
    return []


def _nearest(name: str, names: list[str], cutoff: float = 0.4) -> str:
    near = get_close_matches(name, names, n=1, cutoff=cutoff)
    return f"; did you mean {near[0]}?" if near else ""


def build(
    architecture: str, layers: int, hidden: int, heads: int, vocabulary: int, positions: int, options: dict[str, Any],
    loss: str = "plain", config: str | None = None, lora: int = 0, loss_chunks: int = 1, mlp_chunks: int = 1,
) -> nn.Module:  # fmt: skip
    """Builds a causal language model of `architecture` ("gpt2", "llama", ...) that `problems_of` accepts. If its shape
    comes from a file, `config`, `options` are all its settings.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    shape: dict[str, Any] = {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": 4 * hidden}
    shape |= {"num_attention_heads": heads, "num_key_value_heads": heads}
    shape |= {"vocab_size": vocabulary, "max_position_embeddings": positions}
    shape |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    plain = CONFIG_MAPPING[architecture]()
    settings = options if config else {k: v for k, v in shape.items() if hasattr(plain, k)} | options
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[architecture](**settings))
    if lora:  # at the scale of LoRALinear
        from peft import LoraConfig, inject_adapter_in_model

        transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's own Linear
        adapters = LoraConfig(r=lora, lora_alpha=lora, target_modules="all-linear", fan_in_fan_out=transposed)
        inject_adapter_in_model(adapters, model)
    if loss_chunks > 1:
        model.set_output_embeddings(LossHead.of(model.get_output_embeddings(), loss_chunks))
    if mlp_chunks > 1:
        for name, module in model.named_modules():
            if name.endswith(".mlp"):
                module.forward = partial(_mlp_in_chunks, module.forward, mlp_chunks)
    return CausalLM(model, loss)


def _mlp_in_chunks(forward: Callable[[torch.Tensor], torch.Tensor], chunks: int, x: torch.Tensor) -> torch.Tensor:
    return in_chunks(lambda part: forward(part.contiguous()), x, chunks)  # which GPT-2's own Linear relies on
