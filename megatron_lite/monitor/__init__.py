"""What a run tells its user: metrics, log lines and files, metrics.jsonl, Weights & Biases, a progress bar."""
