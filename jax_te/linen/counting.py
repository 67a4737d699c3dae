"""Rules of the counting states of Linen modules, which collections do not hold."""

from __future__ import annotations

import jax
from flax import nnx

from jax_te.quantize import Counting, QuantizerState, counting_of

Path = tuple[str, ...]


class RulesOfStates:
    """Rules of the states that the layers of one loss count, by the layers' own paths."""

    def __init__(self) -> None:
        self._found: dict[Path, set[Counting]] = {}
        self._asked_for: set[Path] = set()

    def add(self, scope: Path, module: nnx.Module) -> None:
        """Note the rules of an NNX module that stands at ``scope`` of the model that a loss applies."""
        for path, variable in nnx.to_flat_state(nnx.state(module, QuantizerState)):
            rule = counting_of(variable)
            if rule is not None:
                self._found.setdefault((*scope, *map(str, path)), set()).add(rule)

    def of(self, path: Path) -> Counting | None:
        """Return the rule of the state at a path of the collection; None if no layer has read it.

        A loss may apply a part of a model to its part of the collection: then the layer's own path is the end of
        ``path``.

        Raises:
            ValueError: if several layers with other rules end in the same way.
        """
        places = {path} & self._found.keys() or {own for own in self._found if path[-len(own) :] == own}
        self._asked_for |= places
        rules = set().union(*(self._found[own] for own in places))
        if len(rules) > 1:
            raise ValueError(
                f"the loss applies parts of a model that have different rules for {'/'.join(path)}: "
                f"{', '.join(sorted(map(str, rules)))}; apply the model as one, model.apply(params, ...)"
            )
        return next(iter(rules), None)

    def check_all_were_asked_for(self) -> None:
        """Raise ValueError for a layer whose states the collection has under another path, if at all."""
        missing = self._found.keys() - self._asked_for
        if missing:
            names = ", ".join(sorted("/".join(path) for path in missing))
            raise ValueError(
                f"a layer of the loss counts {names}, and the collection that is differentiated has no such state; "
                "give the variables to the model under their own names"
            )


rules_of_states = jax.make_user_context(None)
"""The `RulesOfStates` of the loss that is differentiated, in which counts of several calls of a layer add up; None: the
gradient of a counting state is its next value."""
