"""Speeds of this machine, for the predictions of `--dry_run=1 --machine_speeds=FILE`."""
