"""Reads the shape of model=huggingface from a local config.json in transformers' format. It is read as data: nothing in
it is executed, nothing is downloaded, and weights are random.

settings    the file's description of the architecture, without ABOUT_WEIGHTS: they go to the architecture's own config,
            whose defaults fill in missing settings
refused     keys that would need external code (auto_map, trust_remote_code) or that are not for training
            (quantization_config)
"""

from __future__ import annotations

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

from ..host.files import read_text

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
    settings = _parsed(path)
    for key in REFUSED.keys() & (settings.keys() | more.keys()):
        raise ValueError(f"huggingface.config={path}: {key} {REFUSED[key]}")
    kind = _check_kind(path, settings.get("model_type"))
    from transformers import CONFIG_MAPPING

    options = _without(settings, ABOUT_WEIGHTS) | more
    try:
        config = CONFIG_MAPPING[kind](**options)
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


def _parsed(path: str) -> dict[str, Any]:
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
    return settings


def _check_kind(path: str, kind: Any) -> str:
    """Returns the architecture's name. Raises ValueError unless transformers knows it as a causal language model."""
    try:
        import transformers
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as KNOWN
    except ImportError:
        raise ValueError("model=huggingface: transformers is not installed; pip install transformers") from None
    if not isinstance(kind, str):
        raise ValueError(f"huggingface.config={path}: it has no model_type, the name of its architecture")
    if kind in KNOWN:
        return kind
    if kind in transformers.CONFIG_MAPPING:
        problem = "is no causal language model; register the module in your own script"
        raise ValueError(f"huggingface.config={path}: model_type {kind} {problem}")
    near = get_close_matches(kind, list(KNOWN), n=1, cutoff=0.6)
    hint = f"did you mean {near[0]}?" if near else "a newer one may, or register the model in your own script"
    raise ValueError(
        f"huggingface.config={path}: transformers {transformers.__version__} knows no model_type {kind:.60}; {hint}"
    )


def _without(settings: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Returns settings without `names`, in subsections too, such as text_config, which keep their model_type."""
    kept = {key: value for key, value in settings.items() if key not in names}
    inner = tuple(name for name in names if name != "model_type")
    return {key: _without(value, inner) if isinstance(value, dict) else value for key, value in kept.items()}


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\b[A-Z]\w*Error: ", "", " ".join(lines))[:200] or type(error).__name__
