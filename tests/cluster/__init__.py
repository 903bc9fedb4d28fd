"""Tries on clusters as they are, which scripts/cluster_tests.sh runs: Slurm, machines, stores."""
