"""Updates of the shards: rules (AdamW, Lion, Muon, SGD), guards, averages, loss scale."""
