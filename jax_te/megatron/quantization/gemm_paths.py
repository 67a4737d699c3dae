"""Names of GEMMs for the rules of a quantization file: this package's and Megatron's."""

from __future__ import annotations

import re

from jax_te.layers import QuantizableModule

_MEGATRON = (
    # A model's stacks: GPT's own, and T5's two.
    (re.compile(r"^layers\.(?=\d)"), "decoder.layers."),
    (re.compile(r"^(encoder|decoder)_layers\."), r"\1.layers."),
    (re.compile(r"\binter_attention\b"), "cross_attention"),
    (re.compile(r"(?<=attention\.)(q|kv)_(up|down)$"), r"linear_\1_\2_proj"),
    # Of latent attention, whose queries may have no latent; other self-attention of the models has one projection.
    (re.compile(r"(?<=self_attention\.)query$"), "linear_q_proj"),
    (re.compile(r"(?<=attention\.)query$"), "linear_q"),
    (re.compile(r"(?<=attention\.)key_value$"), "linear_kv"),
    (re.compile(r"(?<=attention\.)(qkv|proj|key|value)$"), r"linear_\1"),
    (re.compile(r"\blayernorm_mlp\.(?=w[io]_kernel$)"), "mlp."),
    # The kernels of a LayerNormMLP, whatever the name of its attribute.
    (re.compile(r"\bwi_kernel$"), "linear_fc1"),
    (re.compile(r"\bwo_kernel$"), "linear_fc2"),
)


def megatron_path(path: str) -> str:
    """Return Megatron's name of a layer, or of a kernel of a LayerNormMLP, from its path here.

    >>> megatron_path("layers.0.self_attention.qkv"), megatron_path("decoder_layers.1.layernorm_mlp.wo_kernel")
    ('decoder.layers.0.self_attention.linear_qkv', 'decoder.layers.1.mlp.linear_fc2')
    """
    for pattern, name in _MEGATRON:
        path = pattern.sub(name, path)
    return path


def kernel_paths(path: str, layer: QuantizableModule) -> dict[str, tuple[str, ...]]:
    """Return the names of each of a layer's kernels: the layer's path, the kernel's where it has two, and Megatron's.

    >>> from flax import nnx
    >>> from jax_te.layers import LayerNormMLP
    >>> kernel_paths("layers.0.layernorm_mlp", LayerNormMLP(16, 16, rngs=nnx.Rngs(0)))["wo_kernel"]
    ('layers.0.layernorm_mlp', 'layers.0.layernorm_mlp.wo_kernel', 'decoder.layers.0.mlp.linear_fc2')
    """
    names = {}
    for kernel in layer.kernels:
        own = (path,) if len(layer.kernels) == 1 else (path, f"{path}.{kernel}".lstrip("."))
        names[kernel] = tuple(dict.fromkeys((*own, megatron_path(own[-1]))))
    return names
