"""Selection of the parameters that Muon orthogonalizes, and of their axes."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax.tree_util import DictKey
from optax.contrib import MuonDimensionNumbers

from jax_te.typing import PyTree


def muon_dimension_numbers(params: PyTree) -> PyTree:
    """Return the matrix axes of each kernel, and None for parameters that Adam updates.

    It is the argument ``muon_weight_dimension_numbers`` of ``optax.contrib.muon``, which without it takes all
    arrays of two axes, embeddings among them, and no fused kernel. Here a kernel is a parameter with two or more
    axes whose name ends in "kernel", except the output head's, ``output_kernel`` or inside of ``output_layer``.
    Its first axis is what the GEMM sums over, its last the output. The axes between them index separate matrices:
    query, key and value in ``[h, r + 2, g·d]``, gate and up in ``[h, n_act, f]``. The kernel of a mixture's router,
    ``[h, e]``, and the gate of its shared experts, ``[h, 1]``, are kernels like others, as in Megatron-Core, whose Muon
    takes every matrix but embeddings and heads. Norms, biases, embeddings, heads and adapters of `jax_te.layers.LoRA`
    are updated by Adam.

    Args:
        params: nested dictionaries, or a state of Variables as `make_train_step` gives it to the optimizer. Of layers
            that ``nnx.vmap`` stacked, and of experts in one array, a Variable's logical axes say which axes are the
            kernel's.

    Source: Jordan 2024, "Muon: an optimizer for hidden layers in neural networks";
    ``megatron.core.optimizer.emerging_optimizers``.

    >>> import jax.numpy as jnp
    >>> params = {"qkv": {"kernel": jnp.ones((4, 3, 8)), "bias": jnp.ones((3, 8))}, "embedding": jnp.ones((9, 4))}
    >>> muon_dimension_numbers(params)["qkv"]
    {'bias': None, 'kernel': MuonDimensionNumbers(reduction_axis=-3, output_axis=-1)}
    >>> import optax
    >>> tx = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=muon_dimension_numbers)
    """

    def decide(path: Any, leaf: Any) -> Any:
        names = [str(entry.key) for entry in path if isinstance(entry, DictKey)]
        variable = leaf if isinstance(leaf, nnx.Variable) else None
        value = leaf if variable is None else variable.get_value()
        axes = None if variable is None else variable.get_metadata().get("logical_axes")
        # Inside of Muon, Adam's parameters have no value, hence the 0.
        count = getattr(value, "ndim", 0)
        # An axis of experts indexes separate matrices, like that of a stack of layers.
        own = count if axes is None else min(count, len(axes)) - (axes[0] == "expert")
        head = {"output_kernel", "output_layer"} & {*names}
        kernel = bool(names) and names[-1].endswith("kernel") and not head and own > 1
        numbers = MuonDimensionNumbers(-own, -1) if kernel else None
        return numbers if variable is None else variable.replace(numbers)

    return jax.tree_util.tree_map_with_path(decide, params, is_leaf=lambda node: isinstance(node, nnx.Variable))
