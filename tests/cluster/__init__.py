"""Tries on clusters as they are, which scripts/cluster_tests.sh runs: a real Slurm."""
