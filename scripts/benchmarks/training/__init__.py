"""Step time, traffic and memory of training beside the peers: `torchrun -m scripts.benchmarks.training`."""
