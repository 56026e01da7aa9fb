"""The optimizer over shards: segments, precision, loss scaling, the update, whole, tiled or delayed."""
