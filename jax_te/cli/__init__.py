"""The command line: ``jax-te train | sample | doctor``."""
