"""ZeRO-R: activations are kept, recomputed, partitioned or offloaded between forward and backward."""
