"""Training and evaluation as a property of modules."""

from __future__ import annotations

from flax import nnx


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
