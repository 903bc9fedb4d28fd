"""Read a run's metrics back and show them: curves, sparklines, a page, comparisons."""
