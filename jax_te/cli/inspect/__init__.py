"""The reports of ``jax-te inspect``, a module for each."""
