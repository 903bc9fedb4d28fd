"""Reports of a run: banner, log, metrics, trackers, progress bar, tensor logs, and the export
callback."""
