"""What jax_te is measured beside: other libraries' own layers, imported only where the library is there."""

__all__: list[str] = []
