"""Helpers of several tests: one tiny configuration, starting ranks and programs, models and
meters."""
