"""The line below a table says by which code it was recorded, and which defaults are others today."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd

from tools.docs.blocks import BLOCKS, EXPERIMENT, MADE, UNDATED
from tools.docs.recorded import other_defaults, recorded

REFERENCE = Path(__file__).parents[2] / "results/reference/cpu"


def runs_of(**section: object) -> pd.DataFrame:
    return pd.DataFrame({"config": [json.dumps({"strategy": section})]})


def test_defaults_that_changed_since_are_named_with_both_values() -> None:
    runs = runs_of(name="zero2", mode="own", bucket_bytes=4096, broadcast_buffers=True)
    assert other_defaults(runs, "experiment=stages") == {"bucket_bytes": (4096, "auto")}


def test_what_was_chosen_or_is_a_peers_is_no_default() -> None:
    assert other_defaults(runs_of(name="zero2", mode="own", bucket_bytes=4096), "strategy.bucket_bytes=4096") == {}
    assert other_defaults(runs_of(name="zero2", mode="vendor", bucket_bytes=4096), "") == {}
    assert other_defaults(runs_of(name="fsdp2", prefetch=7), "") == {}


def test_a_table_of_earlier_code_says_so_from_its_own_provenance() -> None:
    words = recorded(REFERENCE, "tiling")
    runs = pd.read_parquet(REFERENCE / "tiling/runs.parquet")
    assert runs["commit"].iloc[0][:7] in words
    assert runs["started"].iloc[0][:10] in words
    earlier = bool(other_defaults(runs, ""))
    assert ("`zerobench experiment=tiling --dry-run` predicts them" in words) == earlier


def test_every_block_of_an_experiment_has_the_line() -> None:
    assert set(BLOCKS) == set(MADE)
    assert set(UNDATED) | set(EXPERIMENT) <= set(MADE)
    assert all((REFERENCE / EXPERIMENT.get(name, name)).is_dir() for name in set(MADE) - set(UNDATED))
