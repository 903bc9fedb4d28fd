"""Models in and out of Hugging Face's format."""
