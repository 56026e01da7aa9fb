"""ZeRO-R: activations between forward and backward: kept, recomputed, partitioned, offloaded."""
