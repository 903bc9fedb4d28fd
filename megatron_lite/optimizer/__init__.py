"""AdamW on shards, learning-rate schedules, loss scaling."""
