"""Programs that users type, the writers of generated documents, and the benchmarks."""
