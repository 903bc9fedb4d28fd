"""A run's metrics read back and shown: curves, sparklines, a page, comparisons."""
