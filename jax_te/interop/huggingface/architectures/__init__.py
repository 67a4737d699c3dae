"""A table for each architecture, which maps Hugging Face tensors to parameters."""
