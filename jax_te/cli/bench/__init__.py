"""The measurements of ``jax-te bench``, a module for each."""
