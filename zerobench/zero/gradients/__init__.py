"""The life of a gradient, from autograd to the shards."""
