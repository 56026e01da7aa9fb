"""Values of keys: sensible ones, those at and beyond a bound, and words that no key should take."""

from __future__ import annotations

import random
import types
from dataclasses import fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints

from zerobench.config.bounds import LIMITS
from zerobench.config.schema import SCHEMAS, Config

WORDS: dict[str, tuple[str, ...]] = {
    "strategy.accumulate": ("every", "last"),
    "strategy.mode": ("own", "paper", "vendor"),
    "strategy.reduce_with": ("reduce_scatter", "all_reduce", "null"),
    "strategy.construct": ("plain", "meta"),
    "strategy.keep_root": ("true", "false", "auto", "null"),
    "strategy.bucket_bytes": ("auto", "65536", "1MiB", "25MiB", "null"),
    "precision.gradient_dtype": ("fp32", "bf16", "fp16", "null"),
    "precision.wire_dtype": ("fp32", "bf16", "fp16", "null"),
    "optimizer.implementation": ("auto", "fused", "foreach", "loop"),
    "huggingface.architecture": ("gpt2", "llama", "opt"),
    "huggingface.loss": ("plain", "kept", "fused"),
    "measure.check_training": ("auto", "true", "false"),
    "measure.passes": ("both", "timed", "accounted"),
    "search.memory_limit": ("96MiB", "'1 GiB'", "null"),
    "search.checkpointing": ("[true]", "[false,true]", "[]"),
    "device": ("cpu", "auto", "cuda"),
    "backend": ("gloo", "auto", "simulated", "nccl"),
    "draw_on": ("cpu", "device"),
    "tensors": ("real", "fake"),
    "clip_norm": ("'2'", "inf"),
    "results_dir": ("results/runs", "/tmp", "nowhere/deep"),
    "data.path": ("null", "no-such-file", "/dev/null", "/etc/hostname"),
    "offload.path": ("null", "/tmp", "/no-such-folder"),
}
"""Key -> words that it takes, or may be given by mistake."""

HOSTILE = (
    "", "null", "~", "nan", "inf", "-inf", "1e400", "1e-400", "-1", "-0.0", "0", "0x10", "1_000", "9" * 18, "9" * 19,
    "9" * 400, "1e17", "3.7", "true", "yes", "'a b'", "''", '"\\""', "'", "[]", "[1,[2]]", "{}", "{a:1}",
    "{a:{b:[1]}}",
    "{_target_:tests.fuzz.canary.sing}", "{class:tests.fuzz.canary.Canary}", "???", "auto", "none",
    "${seed}", "${nothing}", "${oc.env:HOME}", "${oc.env:NO_SUCH_VARIABLE}", "${oc.create:{a:1}}",
    "${oc.decode:'[1]'}",
    "${oc.select:model}", "${oc.dict.keys:model}", "${hydra:runtime.cwd}", "${hydra:job.num}", "${model}", "${.}",
    "${..x}", "${}", "${", "${${seed}}", "a=b", "a,b", "1,", ",", "1,2", "range(1,4)", "range(1,inf)", "range(3,1)",
    "range(0,1,0)", "choice(1,2)", "choice()", "glob(*)", "glob([a,b],exclude=c)", "interval(0,1)", "sort(3,1,2)",
    "shuffle(1,2)", "shuffle(range(1,3))", "tag(x,choice(1,2))", "sort(range(1,3),reverse=true)", "extend_list(1)",
    "int(3.7)", "int('x')", "int(1,2)", "float(1)", "bool(x)", "str(1)", "json_str('[1]')", "nope(1)", "int(",
    "é", "日本語", "\u202eabc", "\x00", "a\x00b", "\x1b[2J", "a\nb", "a\tb", "\udc80", "\ud800", "a" * 300,
    "a" * 19_000,
    "a" * 20_001, "[" * 60, "[" * 40 + "]" * 40, "{a:" * 40, "../../etc/passwd", "~/x", "~nobody-here/x", "/dev/zero",
    "/dev/stdin", "/proc/self/mem", "/proc/self/environ", "/", "file:///x", "s3://x/y", "%s%n%d", "{0}", "$(touch x)",
    "`touch x`", "; touch x", "!!python/object/apply:os.system [x]", "*x", "&x", "|", ">", "#", "@", "1MiB", "1 MiB",
    "1e9GiB", "-1MiB", "2.5KiB", "1,2MiB", "0.0000001", "1e308", "2147483648", "9223372036854775808",
)  # fmt: skip
"""Texts in the place of a value."""


def keys_of(section: str, schema: Any) -> dict[str, Any]:
    """Key -> type of a dataclass of the config's."""
    hints = get_type_hints(schema)
    prefix = f"{section}." if section else ""
    return {f"{prefix}{one.name}": hints[one.name] for one in fields(schema) if one.name not in ("name", "kind")}


TOP = {key: kind for key, kind in keys_of("", Config).items() if not (isinstance(kind, type) and is_dataclass(kind))}
SECTIONS = {
    name: keys_of(name, get_type_hints(Config)[name]) for name in ("measure", "launch", "search", "huggingface")
}
GROUPS = {
    group: {name: keys_of(group, schema) for name, schema in schemas.items()}
    for group, schemas in SCHEMAS.items()
    if group != "measure"
}


def every_key() -> list[str]:
    """All keys of all choices."""
    found = [*TOP, *(key for keys in SECTIONS.values() for key in keys)]
    found += [key for choices in GROUPS.values() for keys in choices.values() for key in keys]
    return list(dict.fromkeys(found))


def value(draw: random.Random, key: str, kind: Any) -> str:
    """A value of a key's type, most often within its bounds."""
    if key in WORDS:
        return draw.choice(WORDS[key])
    kinds = get_args(kind) if get_origin(kind) in (types.UnionType, Union) else (kind,)
    if type(None) in kinds and draw.random() < 0.15:
        return "null"
    base = next((one for one in (bool, int, float, str) if one in kinds), kinds[0])
    if base is bool:
        return draw.choice(("true", "false"))
    if base in (int, float):
        return _number(draw, key, base)
    return draw.choice(("a", "'b c'", "null", "auto"))


def _number(draw: random.Random, key: str, base: type) -> str:
    least, most = LIMITS.get(key, (0, 64))
    if draw.random() < 0.1:  # at the bounds and just beyond
        found = draw.choice((least, most, least - 1, most + 1, 0, -1))
        return f"{int(found)}" if base is int else f"{found:g}"
    if base is float:
        return f"{draw.choice((least, min(most, 1.0), min(most, 0.5), min(most, max(least, 0.001)))):g}"
    small = [one for one in (1, 2, 3, 4, 8, 16, 64, 256, 4096, 65536) if least <= one <= most][:6]
    return str(draw.choice(small or [int(least)]))
