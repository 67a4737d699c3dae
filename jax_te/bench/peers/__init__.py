"""Peers in measurements: other libraries' layers, imported only if the library is installed."""

__all__: list[str] = []
