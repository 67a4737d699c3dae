"""Tests. They mirror jax_te/; `oracles` and `numerics` are what they share."""
