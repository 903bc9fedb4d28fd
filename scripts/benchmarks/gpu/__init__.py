"""The report of a GPU, which `bash scripts/gpu_report.sh` writes."""
