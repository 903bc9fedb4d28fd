"""Tries of what a cluster does to a run, on one machine, as root, under names of their own."""
