"""Messages about arguments that are accepted, each logged once a process."""

from __future__ import annotations

import functools
import logging


def log_hints(**hints: object) -> None:
    """Log which hints to CUDA's speed were given (are true): nothing here reads them. Each is logged once a process.

    Args:
        hints: argument or field -> its value, negated where the default is True.
    """
    for name, given in hints.items():
        if given:
            # Programs written for Megatron pass these everywhere, and their authors have nothing to change.
            log_once(f"{name} tunes CUDA kernels and has no effect in JAX; see docs/parity.md", logging.INFO)


@functools.cache
def log_once(message: str, level: int = logging.WARNING) -> None:
    """Log a message, once a process.

    Args:
        message: the message.
        level: WARNING, which Python shows unless a program sets up logging, for what a user asked for and does not get,
            and for numbers that differ; INFO for what changes no number, and for what the programs of Megatron-Core and
            Transformer Engine give in every call or for every recipe, and these ignore as well.
    """
    logging.getLogger("jax_te").log(level, message)
