"""Measurements for docs/benchmarks.md: training beside the peers, and the GPU report."""
