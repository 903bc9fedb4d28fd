"""Training data: token files, the order of samples, blends of data sets, loader workers,
tokenizers."""
