"""What a cell cannot be is refused before ranks start: one error message that names the key, the value and the cure."""

import math
from typing import Any

import pytest

from tests.cells import MODELS, cell
from zerobench.config.schema import Gpt, GptMoe, Huggingface, HuggingfaceModel, Measure, Model, Search
from zerobench.config.schema_memory import (
    AllOfZeropp,
    CheckpointActivations,
    CpuOffload,
    FusedBuffers,
    NvmeOffloadConfig,
    OffloadActivations,
    PartitionActivations,
    Qgz,
    Qwz,
    SelectiveActivations,
)
from zerobench.config.schema_training import Adamw8bit, AdamwBf16, Bf16, Fp16, Fp32, Muon, NAdam, Rprop, Sgd

TINY = {"layers": 1, "hidden": 12, "heads": 2}
EXPERTS = {"layers": 2, "hidden": 16, "heads": 2, "experts": 4, "top_k": 2, "expert_hidden": 24}
CHUNKED = HuggingfaceModel(loss_chunks=4)
OFFLOADED, RECOMPUTED, FUSED = OffloadActivations(), CheckpointActivations(), FusedBuffers()
COMPILED = {"compile": "blocks"}
LIMITED = {"search": Search(memory_limit="9 MiB"), "batch": 4}

REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    # optimizers, precisions, clipping
    ("zero2", 2, {"optimizer": NAdam(implementation="fused")}, "torch has no fused nadam (it has sgd, adam, adamw,"),
    ("zero2", 2, {"optimizer": Adamw8bit(implementation="foreach")}, "adamw8bit has a loop only; use loop"),
    ("zero2", 2, {"optimizer": Sgd(implementation="quick")}, "use auto, fused, foreach, loop"),
    ("zero2", 2, {"optimizer": Sgd(nesterov=True)}, "optimizer.nesterov=true: it needs optimizer.momentum above 0"),
    ("zero2", 2, {"optimizer": Rprop(step_min=2, step_max=1)}, "optimizer.step_min=2: it must be below"),
    ("zero2", 2, {"clip": 0.0}, "clip=0: a norm to clip at must be above 0 and finite"),
    ("zero2", 2, {"clip": math.nan}, "clip=nan: a norm to clip at"),
    ("zero2", 2, {"clip": 1.0, "clip_norm": "1"}, "clip_norm=1: use 2 or inf"),
    ("zero2", 2, {"precision": Bf16(wire_dtype="int8")}, "precision.wire_dtype=int8: use one of fp32, bf16, fp16"),
    ("zero2", 2, {"precision": Bf16(gradient_dtype="fp16")}, "of a bf16 model are accumulated in bf16 or fp32"),
    ("zero2", 2, {"precision": Fp32(gradient_dtype="bf16")}, "gradients of a fp32 model are accumulated in fp32"),
    ("zero2", 2, {"precision": Fp16(initial_scale=None)}, "precision.initial_scale=null: fp16 needs loss scaling"),
    ("zero2", 2, {"precision": Fp16(initial_scale=2, minimum_scale=4)}, "at least precision.minimum_scale=4"),
    ("zero2", 2, {"precision": Fp16(backoff=1.5)}, "precision.backoff=1.5: must be at most 1"),
    ("zero2", 2, {"optimizer": Adamw8bit(), "offload": NvmeOffloadConfig()}, "optimizer=adamw8bit: offload=nvme has"),
    ("fsdp2", 2, {"optimizer": Adamw8bit()}, "strategy=fsdp2 has no rule to cut its states; use strategy=ddp, zero1,"),
    ("zero_redundancy", 2, {"optimizer": AdamwBf16()}, "strategy=zero_redundancy has no rule"),
    # Muon, whose matrices are owned whole
    ("fsdp2", 4, {"optimizer": Muon()}, "optimizer=muon: strategy=fsdp2 cuts its matrices, which Muon needs whole"),
    ("zero_redundancy", 4, {"optimizer": Muon()}, "optimizer=muon: strategy=zero_redundancy cuts"),
    ("zero2", 4, {"optimizer": Muon(), "node_size": 2}, "node_size=2: Muon's matrices are owned whole by one rank"),
    ("zero3", 4, {"optimizer": Muon(), "shard_group": 2}, "shard_group=2: Muon's"),
    ("zero3", 4, {"optimizer": Muon(), "zeropp": Qwz()}, "zeropp=qwz: Muon's"),
    ("zero2", 4, {"optimizer": Muon(), "offload": CpuOffload(fraction=0.5)}, "offload.fraction=0.5: Muon's"),
    ("zero2", 4, {"optimizer": Muon(), "offload": NvmeOffloadConfig()}, "offload=nvme: Muon's"),
    ("zero2", 4, {"optimizer": Muon(adjust_lr="mine")}, "optimizer.adjust_lr=mine: use original or match_rms_adamw"),
    # groups of ranks, ZeRO++, tensor parallelism
    ("zero2", 4, {"shard_group": 1}, "shard_group=1: must be a divisor of world_size=4, and at least 2"),
    ("ddp", 4, {"node_size": 2}, "node_size=2: strategy=ddp knows no groups of ranks"),
    ("megatron", 4, {"shard_group": 2}, "shard_group=2: strategy=megatron knows no groups"),
    ("fsdp2", 4, {"zeropp": Qwz()}, "zeropp=qwz: it is for zero3"),
    ("zero3", 4, {"zeropp": Qwz(weight_block=4)}, "zeropp.weight_block=4: must be at least 8"),
    ("zero3", 4, {"zeropp": Qwz(quantize_weights=False)}, "zeropp.quantize_weights=false: zeropp=qwz means that"),
    ("zero3", 4, {"zeropp": AllOfZeropp(differences=True)}, "zeropp: differences are from secondary"),
    ("zero3", 4, {"zeropp": Qwz(bits_within=8)}, "zeropp: bits_within is for quantized gradients"),
    ("zero3", 4, {"zeropp": Qgz(bits_within=6)}, "zeropp: bits_within is 6; use 4 or 8"),
    ("zero3", 4, {"zeropp": AllOfZeropp(secondary_shards=False)}, "zeropp.secondary_shards=false: zeropp=all"),
    ("zero2", 8, {"tensor_parallel": 8}, "tensor_parallel=8: a rank has whole heads, so it must be a divisor of"),
    ("zero2", 3, {"tensor_parallel": 2}, "tensor_parallel=2: must be a divisor of world_size=3"),
    ("zero2", 4, {"tensor_parallel": 0}, "tensor_parallel=0: must be at least 1"),
    ("zero2", 4, {"tensor_parallel": 2, "model": "mlp"}, "tensor_parallel=2: model=mlp does not support tensor"),
    ("fsdp2", 4, {"tensor_parallel": 2}, "tensor_parallel=2: strategy=fsdp2 takes all ranks for itself; use one of"),
    ("zero2", 4, {"tensor_parallel": 2, "clip": 1.0}, "tensor_parallel=2: clip=1.0 does not work with tensor"),
    ("zero2", 4, {"tensor_parallel": 2, "precision": Fp16()}, "tensor_parallel=2: precision=fp16 does not"),
    ("zero2", 4, {"tensor_parallel": 2} | COMPILED, "tensor_parallel=2: compile=blocks does not"),
    ("zero2", 4, {"tensor_parallel": 2, "strategy": {"construct": "meta"}}, "tensor_parallel=2: strategy.construct=me"),
    ("zero2", 4, {"tensor_parallel": 2, "activation": SelectiveActivations()}, "tensor_parallel=2: activation=selecti"),
    ("zero2", 4, {"activation": PartitionActivations()}, "activation=partition: it is for ranks that"),
    ("zero2", 4, {"tensor_parallel": 2, "batch": 5}, "batch=5: world_size=4 over tensor_parallel=2 must divide it"),
    # activations, buffers, graphs
    ("zero2", 2, {"model": "checkpointed", "activation": OFFLOADED}, "say activation=checkpoint_offload for both"),
    ("zero2", 2, {"model": "checkpointed", "activation": SelectiveActivations()}, "leave one of the two out"),
    ("zero2", 2, {"activation": OffloadActivations(least_bytes=-1)}, "activation.least_bytes=-1: must be at"),
    ("ddp", 2, {"arena": True}, "arena=true: strategy=ddp manages its own memory; use one of zero1, zero2, zero3"),
    ("ddp", 2, {"buffers": FUSED}, "buffers=fused: strategy=ddp has buffers of its own"),
    ("fsdp2", 2, {"buffers": FUSED}, "buffers=fused: strategy=fsdp2 has buffers of its own"),
    ("zero3", 2, {"buffers": FUSED}, "there is nothing to fuse; use precision=bf16"),
    ("ddp", 2, {"compile": "model"}, "compile=model: use one of none, blocks"),
    ("zero2", 2, COMPILED | {"activation": OFFLOADED}, "compile=blocks: activation=offload would move tensors of a"),
    ("zero2", 2, COMPILED | {"arena": True}, "compile=blocks: arena=true has no slots for tensors that a graph keeps"),
    ("zero3", 2, COMPILED | {"model": "tiles"}, "compile=blocks: model.tiles are gathered separately"),
    ("deepspeed_zero1", 2, COMPILED, "compile=blocks: strategy=deepspeed_zero1 compiles by a call of its own"),
    ("deepspeed_zero1", 2, {"clip": 1.0}, "clip=1: strategy=deepspeed_zero1 clips inside its own step, unseen; leave"),
    # options of models
    ("zero3", 2, {"model": Gpt(**TINY, loss_chunks=33)}, "model.loss_chunks=33: a sequence of 32 tokens has no more"),
    ("zero3", 2, {"model": Gpt(**TINY, mlp_chunks=0)}, "model.mlp_chunks=0: must be at least 1"),
    ("zero3", 2, {"model": Gpt(**TINY, mlp_chunks=2, tiles=3)}, "model.mlp_chunks=2: with model.tiles=3 each tile"),
    ("zero3", 2, {"model": Gpt(**TINY, tiles=0)}, "model.tiles=0: must be at least 1"),
    ("zero3", 2, {"model": Gpt(**TINY, tiles=13)}, "model.tiles=13: a matrix of 12 rows"),
    ("zero3", 2, {"model": Gpt(**TINY, lora=13)}, "model.lora=13: an adapter's rank is at most the width"),
    ("zero3", 2, {"model": Gpt(**TINY, lora=-1)}, "model.lora=-1: must be at least 0"),
    ("zero3", 2, {"model": HuggingfaceModel(lora=129)}, "model.lora=129: an adapter's rank is at most the width, hugg"),
    ("zero3", 2, {"model": CHUNKED, "huggingface": Huggingface("gemma2")}, "model.loss_chunks=4: gemma2 may scale or"),
    ("zero3", 2, {"model": CHUNKED, "huggingface": Huggingface(loss="kept")}, "model.loss_chunks=4: the parts have a"),
    ("zero3", 2, {"model": HuggingfaceModel(mlp_chunks=2), "huggingface": Huggingface("opt")}, "model.mlp_chunks=2: t"),
    ("zero3", 2, {"model": GptMoe(**EXPERTS | {"top_k": 5})}, "model.top_k=5: a token passes through 1 to"),
    ("zero3", 2, {"model": GptMoe(**EXPERTS, routing="even")}, "model.routing=even: use learned, balanced, skewed"),
    ("zero3", 2, {"model": GptMoe(**EXPERTS | {"expert_hidden": 20})}, "model.expert_hidden=20: a grouped product"),
    # passes, searches, batches, worlds
    ("zero2", 2, {"measure": Measure(3, 2, passes="none")}, "measure.passes=none: use one of both, both_once, timed"),
    ("zero2", 2, {"measure": Measure(3, 2, passes="accounted", trace=True)}, "measure.trace=true: a trace needs"),
    ("zero2", 2, {"measure": Measure(3, 2, passes="timed", snapshot=True)}, "a snapshot belongs to the accounted pass"),
    ("zero2", 2, {"measure": Measure(3, 2, trace=True), "backend": "simulated"}, "measure.trace=true: a simulated"),
    ("zero2", 2, {"measure": Measure(3, 2, passes="timed"), "backend": "simulated"}, "backend=simulated has no"),
    ("zero2", 2, {"measure": Measure(3, 2, passes="both_once")} | LIMITED, "search.memory_limit: a search weighs"),
    ("zero2", 2, {"activation": RECOMPUTED} | LIMITED, "a search tries all of search.checkpointing; let that be"),
    ("zero2", 2, {"activation": OFFLOADED} | LIMITED, "let that be [false]"),
    ("zero2", 2, {"search": Search(memory_limit="9 furlongs"), "batch": 4}, "'9 furlongs' is no size"),
    ("zero2", 2, {"search": Search(memory_limit="9 MiB")}, "give batch"),
    ("zero2", 2, LIMITED | {"accumulation": 2}, "the search chooses micro_batch and accumulation"),
    ("zero2", 2, LIMITED | {"search": Search("9 MiB", checkpointing=[])}, "at least one of false and true"),
    ("zero2", 2, {"batch": 6, "accumulation": 2}, "world_size=2 times accumulation=2 must divide it"),
    ("zero1", 2, {"tensors": "fake"}, "tensors=fake: ranks of a real world send values; use backend=simulated"),
]  # fmt: skip


@pytest.mark.parametrize(("strategy", "ranks", "more", "words"), REFUSED, ids=[row[-1][:40] for row in REFUSED])
def test_what_cannot_be_has_one_error_message(
    strategy: str, ranks: int, more: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(more.get("model"), Model):
        monkeypatch.setitem(MODELS, "bad", more["model"])
        more = more | {"model": "bad"}
    problems = [one for one in cell(strategy, ranks, **more).problems if "which is not installed" not in one]
    assert len(problems) == 1, problems
    assert words in problems[0]
