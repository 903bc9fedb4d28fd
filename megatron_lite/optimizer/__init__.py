"""Updates of the shards: rules (AdamW, ...), guards, loss scaling; learning-rate schedules."""
