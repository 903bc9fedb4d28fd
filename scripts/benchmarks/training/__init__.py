"""Training compared with PyTorch and Hugging Face: `torchrun -m scripts.benchmarks.training`."""
