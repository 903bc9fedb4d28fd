"""Checkpoints that training resumes from, and exports that other programs load."""
