"""Import, export and conversion of Hugging Face models."""
