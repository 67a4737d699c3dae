"""The command line: ``jax-te train | sample | inspect | doctor | bench``."""
