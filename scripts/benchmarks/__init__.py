"""Measurements for docs/benchmarks.md: ours compared with the peers, on CPUs and on one GPU."""
