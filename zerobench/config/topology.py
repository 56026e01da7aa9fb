"""Nodes, shard groups and ZeRO++ in a resolved config: what makes no sense, and what engine and theory hear."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ..strategies import names_with, spec_of
from ..theory.groups import GroupShape
from ..zero.comm.zeropp import Zeropp
from . import schema_memory


def problems_of(plain: dict[str, Any]) -> list[str]:
    """Sentences on groups of ranks, and codes, that cannot be."""
    name, ranks, problems = plain["strategy"]["name"], plain["world_size"] or 1, []
    composes = spec_of(name).composes
    for key, least in (("node_size", 1), ("shard_group", 2)):
        size = plain.get(key)
        if size is None:
            continue
        if not composes.groups:
            known = ", ".join(names_with("groups"))
            problems.append(f"{key}={size}: strategy={name} knows no groups of ranks; leave it out, or use {known}")
        elif size < least or ranks % size:
            problems.append(f"{key}={size}: must be a divisor of world_size={ranks}, and at least {least}")
    node_size, shard_group = plain.get("node_size"), plain.get("shard_group")
    if None not in (node_size, shard_group) and node_size != shard_group:
        problems.append(f"shard_group={shard_group}: beside node_size={node_size} a shard group must be a node")
    if "zeropp" in plain:
        problems += _problems_of_zeropp(plain, name)
    return problems


def _problems_of_zeropp(plain: dict[str, Any], name: str) -> list[str]:
    words = f"zeropp={plain['zeropp']['name']}"
    if not spec_of(name).composes.zeropp:
        known = " or ".join(names_with("zeropp"))
        return [
            f"{words}: it is for {known}, whose gathers and reductions it shortens; leave it out with strategy={name}"
        ]
    if "shard_group" in plain:
        return [f"{words}: its shards are over all ranks; leave shard_group={plain['shard_group']} out"]
    return _parts_missing(plain["zeropp"]) or _one_node(plain)


def _parts_missing(section: dict[str, Any]) -> list[str]:
    """A sentence for each part that a choice is named after, and that is switched off."""
    named = asdict(schema_memory.SCHEMAS["zeropp"][section["name"]]())
    others = ", ".join(name for name in schema_memory.SCHEMAS["zeropp"] if name not in (section["name"], "all"))
    words = f"zeropp={section['name']} means that part; use one of {others}, and add what else is wanted"
    return [f"zeropp.{part}=false: {words}" for part, on in named.items() if on is True and not section[part]]


def _one_node(plain: dict[str, Any]) -> list[str]:
    """A sentence where secondary shards, all there is of ZeRO++, are shared by as many ranks as the first ones."""
    section, ranks = plain["zeropp"], plain["world_size"] or 1
    codes = section["quantize_weights"] or section["quantize_gradients"]
    if codes or ranks == 1 or plain.get("node_size") not in (None, ranks):
        return []
    words = f"all {ranks} ranks are one node, so that its gathers would be plain zero3's"
    return [f"zeropp={section['name']}: {words}; let node_size be a divisor of world_size={ranks} below it"]


def engine_options(plain: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for our engine, where a resolved config has groups or codes."""
    options: dict[str, Any] = {key: plain[key] for key in ("node_size", "shard_group") if key in plain}
    if "zeropp" in plain:
        options["zeropp"] = Zeropp(**{key: value for key, value in plain["zeropp"].items() if key != "name"})
    return options


def ranks_a_node(plain: dict[str, Any]) -> int:
    """`node_size`; without it those on one machine, of a job on several the ranks being spread evenly."""
    return plain.get("node_size") or -(-plain["world_size"] // plain.get("nodes", 1))


def shape_of(plain: dict[str, Any]) -> GroupShape:
    """Returns theory's view of the groups."""
    codes = plain.get("zeropp", {})
    return GroupShape(
        plain["world_size"],
        plain.get("node_size"),
        plain.get("shard_group"),
        codes["weight_block"] if codes.get("quantize_weights") else None,
        codes["gradient_block"] if codes.get("quantize_gradients") else None,
        bool(codes.get("secondary_shards")),
    )
