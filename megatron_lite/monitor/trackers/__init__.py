"""Destinations of metrics: `metrics.jsonl`, the authoritative record, Weights & Biases and TensorBoard."""

from megatron_lite.monitor.trackers.metrics_file import METRICS_FILE as METRICS_FILE
from megatron_lite.monitor.trackers.metrics_file import MetricsFile as MetricsFile
from megatron_lite.monitor.trackers.metrics_file import read_metrics as read_metrics
from megatron_lite.monitor.trackers.opening import Trackers as Trackers
from megatron_lite.monitor.trackers.opening import check_trackers as check_trackers
from megatron_lite.monitor.trackers.opening import open_trackers as open_trackers
