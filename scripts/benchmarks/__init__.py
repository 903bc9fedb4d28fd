"""Measurements for docs/benchmarks.md: training beside the peers, and the report of a GPU."""
