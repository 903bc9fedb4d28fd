"""Checkpoints that training resumes from: their files, manifest, verification and compatibility."""
