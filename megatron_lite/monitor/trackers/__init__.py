"""Destinations of metrics: `metrics.jsonl`, the authoritative record, Weights & Biases and
TensorBoard."""
