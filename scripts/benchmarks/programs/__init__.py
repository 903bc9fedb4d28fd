"""Whole training programs, ours and the peers' own, in turns on the same machine: see
__main__.py."""
