"""The update rule of each optimizer, on shards."""
