"""Names that DeepSpeed, torch (DDP, FSDP2) and transformers have for a key of ours.

DeepSpeed's are keys of its JSON config, those without a dot of `zero_optimization` or the top level; transformers' are
of TrainingArguments, with `fsdp_config` for keys inside of that. A dash: no such thing, or no such name.
"""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """One key elsewhere, in Markdown."""

    deepspeed: str = "–"
    torch: str = "–"
    transformers: str = "–"


OTHERS: dict[str, Names] = {
    "world_size": Names("`deepspeed --num_gpus`", "`torchrun --nproc-per-node`"),
    "shard_group": Names("`mics_shard_size` (removed in 0.19.8)", "`fully_shard(mesh=)`, 2-D: HSDP", "`fsdp`"),
    "arena": Names("`activation_checkpointing.contiguous_memory_optimization`"),
    "backend": Names("`init_distributed(dist_backend)`", "`init_process_group(backend)`", "`ddp_backend`"),
    "seed": Names("–", "`torch.manual_seed`", "`seed`"),
    "deterministic": Names("–", "`torch.use_deterministic_algorithms`", "`full_determinism`"),
    "micro_batch": Names("`train_micro_batch_size_per_gpu`", "–", "`per_device_train_batch_size`"),
    "accumulation": Names("`gradient_accumulation_steps`", "–", "`gradient_accumulation_steps`"),
    "batch": Names("`train_batch_size`"),
    "clip": Names("`gradient_clipping`", "`clip_grad_norm_(max_norm)`", "`max_grad_norm`"),
    "clip_norm": Names("–", "`clip_grad_norm_(norm_type)`"),
    "results_dir": Names("–", "–", "`output_dir`"),
    "strategy": Names("`stage`", "`fully_shard`, `DistributedDataParallel`", "`deepspeed`, `fsdp`"),
    "strategy.bucket_bytes": Names(
        "`reduce_bucket_size`, `allgather_bucket_size` (elements)", "DDP `bucket_cap_mb` (MiB)", "`ddp_bucket_cap_mb`"
    ),
    "strategy.gradient_as_bucket_view": Names("`contiguous_gradients`", "DDP `gradient_as_bucket_view`"),
    "strategy.find_unused_parameters": Names("–", "DDP `find_unused_parameters`", "`ddp_find_unused_parameters`"),
    "strategy.broadcast_buffers": Names("–", "DDP `broadcast_buffers`", "`ddp_broadcast_buffers`"),
    "strategy.accumulate": Names("by the stage: 1 last, 2 and 3 every", "`no_sync`, `set_requires_gradient_sync`"),
    "strategy.reduce_with": Names("`reduce_scatter`, `use_multi_rank_bucket_allreduce`"),
    "strategy.overlap_gather": Names("–", "Megatron-core: `--overlap-param-gather`"),
    "strategy.construct": Names("`deepspeed.zero.Init`", '`torch.device("meta")`'),
    "strategy.prefetch": Names(
        "`stage3_prefetch_bucket_size` (elements)",
        "`set_modules_to_forward_prefetch`, `set_modules_to_backward_prefetch`",
        "`fsdp_config`: forward_prefetch, backward_prefetch",
    ),
    "strategy.persistence_numel": Names("`stage3_param_persistence_threshold`"),
    "strategy.keep_root": Names("–", "`fully_shard(reshard_after_forward=None)` on the root"),
    "strategy.reshard_after_forward": Names(
        "`stage3_max_reuse_distance`, nearly",
        "`fully_shard(reshard_after_forward=)`",
        "`fsdp_config`: reshard_after_forward",
    ),
    "strategy.async_gather": Names("–", "`_set_unshard_async_op`"),
    "strategy.sum_gradients": Names("–", "`set_force_sum_reduction_for_comms`"),
    "strategy.parameters_as_bucket_view": Names("–", "ZeroRedundancyOptimizer `parameters_as_bucket_view`"),
    "strategy.reduce_bucket_numel": Names("`reduce_bucket_size`"),
    "strategy.multi_rank_allreduce": Names("`use_multi_rank_bucket_allreduce`"),
    "strategy.overlap_comm": Names("`overlap_comm`"),
    "strategy.prefetch_numel": Names("`stage3_prefetch_bucket_size`"),
    "strategy.max_live_numel": Names("`stage3_max_live_parameters`"),
    "strategy.max_reuse_numel": Names("`stage3_max_reuse_distance`"),
    "model.checkpointing": Names("`activation_checkpointing`", "`torch.utils.checkpoint`", "`gradient_checkpointing`"),
    "model.tiles": Names("`deepspeed.zero.TiledLinear`"),
    "optimizer.lr": Names("`optimizer.params.lr`", "`lr`", "`learning_rate`"),
    "optimizer.implementation": Names("–", "`fused=`, `foreach=`", "`optim`"),
    "optimizer.weight_decay": Names("`optimizer.params.weight_decay`", "`weight_decay`", "`weight_decay`"),
    "optimizer.beta1": Names("`optimizer.params.betas`", "`betas[0]`", "`adam_beta1`"),
    "optimizer.beta2": Names("`optimizer.params.betas`", "`betas[1]`", "`adam_beta2`"),
    "optimizer.eps": Names("`optimizer.params.eps`", "`eps`", "`adam_epsilon`"),
    "precision": Names("`bf16.enabled`, `fp16.enabled`", "`MixedPrecisionPolicy(param_dtype)`", "`bf16`, `fp16`"),
    "precision.gradient_dtype": Names("`data_types.grad_accum_dtype`"),
    "precision.wire_dtype": Names("`communication_data_type`", "`MixedPrecisionPolicy(reduce_dtype)`"),
    "precision.tile_bytes": Names("`sub_group_size` (elements)"),
    "precision.initial_scale": Names("`fp16.initial_scale_power` (of 2)", "`GradScaler(init_scale)`"),
    "precision.growth": Names("–", "`GradScaler(growth_factor)`"),
    "precision.backoff": Names("–", "`GradScaler(backoff_factor)`"),
    "precision.interval": Names("`fp16.loss_scale_window`", "`GradScaler(growth_interval)`"),
    "precision.minimum_scale": Names("`fp16.min_loss_scale`"),
    "measure.steps": Names("–", "–", "`max_steps`"),
    "measure.trace": Names("`comms_logger`", "`torch.profiler`"),
    "measure.snapshot": Names("–", "`torch.cuda.memory._record_memory_history`"),
    "offload": Names("`offload_optimizer.device`, `offload_param.device`", "`CPUOffloadPolicy`", "`fsdp`"),
    "offload.optimizer": Names("`offload_optimizer`", "`CPUOffloadPolicy`"),
    "offload.gradients": Names("with `offload_optimizer`", "`CPUOffloadPolicy`"),
    "offload.parameters": Names("`offload_param`", "`CPUOffloadPolicy`"),
    "offload.fraction": Names("`offload_optimizer.ratio`"),
    "offload.path": Names("`offload_optimizer.nvme_path`"),
    "offload.block_bytes": Names("`aio.block_size`"),
    "offload.buffers": Names("`offload_optimizer.buffer_count`"),
    "offload.depth": Names("`aio.queue_depth`"),
    "activation": Names(
        "`activation_checkpointing.cpu_checkpointing`",
        "`torch.utils.checkpoint`, `torch.autograd.graph.save_on_cpu`",
        "`gradient_checkpointing`",
    ),
    "zeropp.quantize_weights": Names("`zero_quantized_weights`"),
    "zeropp.secondary_shards": Names("`zero_hpz_partition_size`", "`fully_shard(reshard_after_forward=int)`"),
    "zeropp.quantize_gradients": Names("`zero_quantized_gradients`"),
    "search": Names("`autotuning`"),
}
"""Group or key -> its names elsewhere; what is not here has none."""
