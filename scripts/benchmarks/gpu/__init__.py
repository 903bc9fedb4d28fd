"""Tests and measurements on one GPU, collected by `bash scripts/gpu_report.sh`."""
