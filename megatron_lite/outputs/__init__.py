"""Produce a run's outputs as they fall due: log lines, evaluations and samples, checkpoints and
exports, exit status."""
