"""ZeRO-R on the command line: what a config becomes, what is refused, and what a run is called."""

from dataclasses import replace

import pytest
from torch import nn

import zerobench
from tests.cells import MODELS, cell, sound
from zerobench.config import combinations
from zerobench.config import schema as schemas
from zerobench.config import schema_memory as memory
from zerobench.config.flat import base_name
from zerobench.config.schema_training import Bf16
from zerobench.registry import MODELS as REGISTRY
from zerobench.simulation.execute import execute
from zerobench.zero.activations.policies import POLICIES

CHECKPOINT, OFFLOAD = memory.CheckpointActivations(), memory.OffloadActivations()
BOTH, FUSED = memory.CheckpointOffloadActivations(), memory.FusedBuffers()


def no_blocks(vocabulary: int = 256) -> nn.Module:
    model = nn.Module()
    model.head = nn.Linear(vocabulary, vocabulary)
    return model


def needs_memory(vocabulary: int = 256) -> nn.Module:
    model = no_blocks(vocabulary)
    model.scale = model.get_parameter("head.bias").sum().item()
    return model


for builder in (no_blocks, needs_memory):
    zerobench.register_model(builder.__name__, builder)
    MODELS[builder.__name__] = REGISTRY.schema_of(builder.__name__, builder, schemas.Model)()


def test_checkpointing_is_one_thing_with_one_name() -> None:
    """A model may have checkpointing as an option; FLOPs, names and searches treat it as the policy."""
    by_policy = sound("zero2", 2, "tiny", activation=CHECKPOINT).config
    by_model = sound("zero2", 2, "checkpointed").config
    assert replace(by_policy, model_name="checkpointed") == by_model
    assert combinations.activation_policy(by_model) == POLICIES["none"]  # the model does it
    both = sound("zero2", 2, "tiny", activation=BOTH).config
    assert both.model.checkpoints is True
    assert combinations.activation_policy(both) == POLICIES["offload"]
    assert base_name(both) == "zero2 tiny N=2 b=8 activation=checkpoint_offload"


def test_fused_buffers_are_one_bucket_and_one_tile() -> None:
    config = sound("zero1", 2, buffers=FUSED).config
    assert config.strategy.bucket_bytes == combinations.UNBOUNDED_BYTES
    assert config.precision.tile_bytes is None
    assert base_name(config).endswith("buffers=fused")
    assert sound("zero3", 2, buffers=FUSED, precision=Bf16()).config.precision.tile_bytes is None


def test_a_model_without_blocks_is_refused_before_ranks_start() -> None:
    """Unless it cannot be seen before: then in the ranks, in the same words (combinations.apply)."""
    for policy in (CHECKPOINT, OFFLOAD, BOTH):
        problems = cell("zero3", 2, "no_blocks", activation=policy).problems
        assert len(problems) == 1
        assert problems[0].startswith(f"activation={policy.name}: Module has no blocks to apply it to; put them into")
        assert not cell("zero3", 2, "needs_memory", activation=policy).problems
    assert not cell("zero3", 2, "no_blocks").problems


def test_tiles_are_in_the_name_of_a_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "cut", schemas.Gpt(layers=1, hidden=12, heads=2, tiles=3))
    assert base_name(sound("zero3", 2, "cut").config) == "zero3 cut N=2 b=8 tiles=3"


@pytest.mark.thorough
def test_without_masters_every_state_of_fsdp2_is_in_the_models_dtype() -> None:
    states = {}
    for masters in (True, False):
        config = sound("fsdp2", 4, "tiny", precision=Bf16(masters=masters), backend="simulated", tensors="fake").config
        record = execute(config).record
        states[masters] = {m.category: m.max_bytes for m in record.memory if (m.phase, m.tier) == ("step", "device")}
    for category in ("optimizer", "gradients"):
        assert states[False][category] < 0.51 * states[True][category], category
    assert "masters=false" in config.precision.label
    (refused,) = cell("zero1", 2, precision=Bf16(masters=False)).problems
    assert refused.startswith("precision.masters=false: precision=bf16 with strategy=zero1 has no other way")
    (refused,) = cell("fsdp2", 2, precision=Bf16(masters=False, wire_dtype="fp32")).problems
    assert "reduces in bf16" in refused
