"""What the processes of one JAX program do together. Not for users."""

from jax_te._processes.meeting import meet, wait_until
