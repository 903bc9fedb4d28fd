"""Names of files in an experiment directory that programs read which import no torch."""

METRICS_FILE = "metrics.jsonl"
