"""How each optimizer turns gradients into updates of shards."""
