"""The old package of meshes, remat and random streams. Its names work, with a warning, until the next minor version."""

from jax_te._names import late_names

__getattr__ = late_names(__name__)
