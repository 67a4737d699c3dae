"""A table for each architecture: which tensors of Hugging Face are which parameters."""
