"""Training beside PyTorch and Hugging Face: `torchrun -m scripts.benchmarks.training`."""
