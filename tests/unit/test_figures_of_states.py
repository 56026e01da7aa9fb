"""Figures of where model states and activations are, and of what is sent for it, from rows made by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module

import pandas as pd
import pytest

from tests.made_up import MIB, figure_of, results_of, run
from zerobench.plots.marks import name_cells, rows_of_labels
from zerobench.plots.page import Sheet


def test_a_policys_bar_says_what_becomes_of_activations() -> None:
    axes = figure_of("activation", results_of([run("zero2", 2)])).axes[1]
    (whisker,) = axes.collections[0].get_segments()
    assert list(whisker[:, 1]) == pytest.approx([90, 120])
    policy_of = import_module("analysis.activation").policy_of
    labels = ("zero2", "zero2 recomputed", "zero2 activation=offload a=2", "zero2 activation=checkpoint_offload")
    assert [policy_of(label) for label in labels] == ["kept", "recomputed", "offloaded", "both"]


def test_what_leaves_the_device_is_one_word() -> None:
    offload = import_module("analysis.offload")
    labels = {
        "zero2 adam": "none", "zero2 offload=cpu": "both",
        "zero2 offload=cpu optimizer=true gradients=false": "optimizer",
        "zero2 offload=cpu optimizer=false gradients=true": "gradients",
    }  # fmt: skip
    assert [offload.what_leaves(label) for label in labels] == list(labels.values())
    rows = offload.table(pd.DataFrame({"label": ["zero2", "zero2 offload=cpu", "zero2 offload=nvme"]}))
    assert rows == {"offloaded": ["none", "both", "both"], "to": ["–", "host", "files"]}


def test_buffers_are_lines_over_the_models_sizes() -> None:
    small, large = (
        {"max_gradients_bytes": n * MIB, "max_communication_bytes": 8 * MIB, "psi": n * 10**6} for n in (1, 4)
    )
    rows = [run("zero2", 2, **small), run("zero2", 4, **large)]
    rows[1] = replace(rows[1], world_size=2, batch=rows[0].batch)
    axes = figure_of("buffers", results_of(rows)).axes
    assert len(axes) == 1, "a setting is one panel, whatever the model's size"
    lines = {line.get_linestyle(): list(line.get_ydata()) for line in axes[0].lines}
    assert lines == {"-": [8, 8], ":": [1, 4], "--": pytest.approx([4e6 / MIB, 16e6 / MIB])}


def test_states_of_shard_groups_have_no_collectives_color() -> None:
    states, volume = figure_of("shard_group", results_of([run("zero2", 2)])).axes
    colors = [{bar.get_facecolor() for bar in axes.patches if bar.get_height()} for axes in (states, volume)]
    assert not colors[0] & colors[1]


def test_nodes_draw_what_crosses_of_what_a_rank_sends() -> None:
    """Flat: two of the three others are in the other node. In two hops the meter has told."""
    flat = run("zero2", 4, wire_bytes=6 * 10**6)
    config = json.dumps(json.loads(flat.config) | {"node_size": 2})
    told = {"between_nodes_bytes": 2 * 10**6, "predicted_between_nodes_bytes": 2 * 10**6}
    hops = replace(flat, config=config, cell_id="two hops", run_id="two hops", **told)
    axes = figure_of("nodes", results_of([flat, hops])).axes[0]
    assert [bar.get_height() for bar in axes.patches] == pytest.approx([4, 2, 2, 4])
    assert [text.get_text() for text in axes.texts if text.get_gid()] == ["4.00\nof 6.00", "2.00\nof 6.00"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["flat", "two hops"]
    assert axes.collections[0].get_segments()[0][0][1] == pytest.approx(2)


def test_a_legend_lists_what_is_drawn() -> None:
    (legend,) = figure_of("volume", results_of([run("zero3", 2)])).legends
    assert [text.get_text() for text in legend.get_texts()] == ["reduce_scatter", "all_gather", "predicted"]


def test_names_are_a_table_of_what_differs_or_upright_words() -> None:
    axes = Sheet(1, 2.0, "Made up.").subplots()
    name_cells(axes, ["zero2", "zero2"], rows_of_labels(["zero2 simulated bucket_bytes=65536", "zero2 simulated"]))
    assert [label.get_text() for label in axes.get_xticklabels()] == ["64.0 KiB", "–"]
    assert [text.get_text() for text in axes.texts] == ["bucket_bytes", "zero2"], "once; what all share is left out"
    many = Sheet(1, 2.0, "Made up.").subplots()
    name_cells(many, ["zero2"] * 40, {"parts": [f"checkpoint_offload_{n}" for n in range(40)]})
    assert {label.get_rotation() for label in many.get_xticklabels()} == {90}
    assert many.get_xticklabels()[3].get_text() == "zero2 parts=checkpoint_offload_3"
