"""Training and evaluation as a property of modules."""

from __future__ import annotations

import logging

from flax import nnx

from jax_te.config.internal import log_once


class TrainingMode(nnx.Module):
    """Base of modules that tell whether they train, as torch's do.

    Attributes:
        deterministic: evaluation in place of training; Flax's ``model.eval()`` and ``model.train()`` set it.

    >>> class Block(TrainingMode):
    ...     pass
    >>> block = Block()
    >>> block.eval()
    >>> block.training
    False
    """

    # On the class: Flax sets the attribute of every module that has it, and most modules never see eval().
    deterministic: bool = False

    @property
    def training(self) -> bool:
        """Whether the module trains; False after ``model.eval()``."""
        return not self.deterministic

    def log_missing_key(self, dropout_key: object, *rates: float) -> None:
        """Log once that calls in training drop nothing, because they have no key.

        Megatron and Transformer Engine draw from a global random state, so a program written for them passes no key.

        Args:
            dropout_key: of the call.
            rates: probabilities of dropout.
        """
        if dropout_key is None and self.training and any(rates):
            # The same text for every layer: one that is made of others that ask is one message, too.
            log_once(
                "the model has dropout, and a call in training without dropout_key= drops nothing; give a key, set the "
                "rates to 0, or call eval()",
                logging.WARNING,
            )
