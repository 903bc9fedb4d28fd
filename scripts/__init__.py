"""Commands that users type, writers of generated documents, and benchmarks."""
