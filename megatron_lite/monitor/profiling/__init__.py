"""Profile a few iterations: PyTorch's profiler, and the time of each step of the schedule."""
