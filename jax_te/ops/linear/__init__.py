"""Linear layers, norms and activation functions as differentiable functions on arrays."""
