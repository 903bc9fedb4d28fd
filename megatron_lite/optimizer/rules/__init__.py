"""The update rules of the optimizers, on shards."""
