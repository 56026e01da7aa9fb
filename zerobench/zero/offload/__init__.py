"""Tiers: where a shard's states live and gradients go: device, host memory (ZeRO-Offload), files (ZeRO-Infinity)."""
