"""Training and evaluation as a property of modules."""

from __future__ import annotations

from flax import nnx

from jax_te.typing import Array, Key


class TrainingMode(nnx.Module):
    """Base of modules that know whether they are in training mode, as torch's do.

    Attributes:
        deterministic: whether to evaluate instead of training; Flax's ``model.eval()`` and ``model.train()`` set it.
        without_dropout: whether dropout is off in training, too, whatever the rates:
            ``model.set_attributes(without_dropout=True)`` sets it in all layers, as measurements of training do.

    >>> class Block(TrainingMode):
    ...     pass
    >>> block = Block()
    >>> block.eval()
    >>> block.training
    False
    """

    # On the class: Flax sets the attribute of every module that has it, and most modules never see eval().
    deterministic: bool = False
    without_dropout: bool = False

    def set_view(self, deterministic: bool | None = None) -> None:
        """Set the mode for ``nnx.view(model, deterministic=True)``, as ``model.eval()`` does.

        Args:
            deterministic: mode; None leaves it. Other options of ``nnx.view`` are not this module's.

        >>> module = TrainingMode()
        >>> nnx.view(module, deterministic=True, raise_if_not_found=False).training, module.training
        (False, True)
        """
        if deterministic is not None:
            self.deterministic = deterministic

    @property
    def training(self) -> bool:
        """Whether the module trains; False after ``model.eval()``."""
        return not self.deterministic

    def used_dropout_key(self, dropout_key: Key | None, **rates: float) -> Array | None:
        """Return the key that a call draws dropout from; None if it drops nothing.

        Args:
            dropout_key: the call's argument.
            **rates: dropout probabilities, by the names of the module's attributes.

        Raises:
            ValueError: in training, for a rate above 0 without a key, as in ``flax.nnx.Dropout``.

        >>> TrainingMode().used_dropout_key(None, hidden_dropout=0.1)
        Traceback (most recent call last):
        ValueError: TrainingMode has hidden_dropout=0.1, and this call in training has no key to draw from: give ...
        """
        given = {name: rate for name, rate in rates.items() if rate}
        if self.deterministic or self.without_dropout or not given:
            return None
        if dropout_key is None:
            named = " and ".join(f"{name}={rate}" for name, rate in given.items())
            raise ValueError(
                f"{type(self).__name__} has {named}, and this call in training has no key to draw from: give "
                'dropout_key= (in Linen rngs={"dropout": key}), another one at each step; or set the rates to 0, or '
                "evaluate: model.eval() (in Linen deterministic=True in the call)"
            )
        return dropout_key
