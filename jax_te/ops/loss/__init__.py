"""Losses of language models."""
