"""Layouts drawn at random, short runs on ranks of this machine, and what differs between them:
`prove_layouts.py`."""
