"""Configuration dataclasses: frozen, keyword-only, checked once when built."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import jax.numpy as jnp

from jax_te.typing import DTypeLike

MESH_AXES = ("data", "fsdp", "tensor")
"""Mesh axis names in the order devices are laid out; the last one changes fastest."""

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "gelu": ("gelu",),
    "relu": ("relu",),
    "silu": ("silu",),
    "geglu": ("gelu", "linear"),
    "reglu": ("relu", "linear"),
    "swiglu": ("silu", "linear"),
}
"""Activation names and the functions applied to each component of the first MLP projection."""

_FLOAT_DTYPES = ("float32", "bfloat16", "float16")


def float_dtype(name: str, value: DTypeLike) -> jnp.dtype:
    """``value`` as a dtype, or a ValueError that names the argument ``name`` unless it is fp32, bf16 or fp16."""
    try:
        dtype = jnp.dtype(value)
    except TypeError:
        raise ValueError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {value!r}") from None
    if dtype.name not in _FLOAT_DTYPES:
        raise ValueError(f"{name} must be one of {', '.join(_FLOAT_DTYPES)}, got {dtype.name}")
    return dtype


def check_positive(**sizes: int) -> None:
    """Raise ValueError for a size that is not an integer >= 1."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {size!r}")


def check_rate(**rates: float) -> None:
    """Raise ValueError for a probability outside [0, 1)."""
    for name, rate in rates.items():
        if not 0.0 <= rate < 1.0:
            raise ValueError(f"{name} must be in [0, 1), got {rate!r}")


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """Sizes and choices of a stack of transformer layers, in Megatron-Core's words.

    Args:
        num_layers: transformer layers.
        hidden_size: ``h``.
        num_attention_heads: query heads ``n``.
        num_query_groups: key/value heads ``g``; must divide ``n``. None: ``n`` (multi-head attention).
        ffn_hidden_size: ``f``. None: ``4 h``.
        kv_channels: size ``d`` of a head. None: ``h / n``.
        normalization: ``"LayerNorm"`` or ``"RMSNorm"``.
        layernorm_epsilon: added to the variance.
        layernorm_zero_centered_gamma: store the norm's scale as an offset from 1.
        activation: a key of `ACTIVATIONS`; the gated ones have two components.
        add_bias_linear: biases in all linear layers.
        attention_dropout, hidden_dropout: probabilities in [0, 1).
        init_method_std: standard deviation of initial weights; the output projections of attention and MLP use
            ``init_method_std / sqrt(2 num_layers)``.
        params_dtype: dtype parameters are stored in.
        compute_dtype: dtype of activations. None: ``params_dtype``.
        first_last_layers_bf16: keep the first and last layers in high precision, whatever the ambient recipe is.
        num_layers_at_start_in_bf16, num_layers_at_end_in_bf16: how many, if so; each in [0, ``num_layers``].

    Raises:
        ValueError: for a size that is not positive or does not divide, or an unknown name.

    Source: ``megatron.core.transformer.TransformerConfig``.

    >>> TransformerConfig(num_layers=2, hidden_size=64, num_attention_heads=4).ffn_hidden_size
    256
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int | None = None
    ffn_hidden_size: int | None = None
    kv_channels: int | None = None
    normalization: Literal["LayerNorm", "RMSNorm"] = "LayerNorm"
    layernorm_epsilon: float = 1e-5
    layernorm_zero_centered_gamma: bool = False
    activation: str = "gelu"
    add_bias_linear: bool = True
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    init_method_std: float = 0.02
    params_dtype: DTypeLike = jnp.float32
    compute_dtype: DTypeLike | None = None
    first_last_layers_bf16: bool = False
    num_layers_at_start_in_bf16: int = 1
    num_layers_at_end_in_bf16: int = 1

    def __post_init__(self) -> None:
        check_positive(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_attention_heads=self.num_attention_heads,
        )
        fill = object.__setattr__
        groups, ffn, channels = self.num_query_groups, self.ffn_hidden_size, self.kv_channels
        groups = self.num_attention_heads if groups is None else groups
        ffn = 4 * self.hidden_size if ffn is None else ffn
        if channels is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them or give kv_channels"
                )
            channels = self.hidden_size // self.num_attention_heads
        check_positive(num_query_groups=groups, ffn_hidden_size=ffn, kv_channels=channels)
        if self.num_attention_heads % groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_query_groups {groups}"
            )
        fill(self, "num_query_groups", groups)
        fill(self, "ffn_hidden_size", ffn)
        fill(self, "kv_channels", channels)
        if self.normalization not in ("LayerNorm", "RMSNorm"):
            raise ValueError(f"normalization must be 'LayerNorm' or 'RMSNorm', got {self.normalization!r}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}; allowed: {', '.join(ACTIVATIONS)}")
        if not self.layernorm_epsilon > 0.0:
            raise ValueError(f"layernorm_epsilon must be > 0, got {self.layernorm_epsilon!r}")
        check_rate(attention_dropout=self.attention_dropout, hidden_dropout=self.hidden_dropout)
        for name in ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= self.num_layers:
                raise ValueError(f"{name} must be an integer in [0, num_layers = {self.num_layers}], got {count!r}")
        fill(self, "params_dtype", float_dtype("params_dtype", self.params_dtype))
        compute = self.params_dtype if self.compute_dtype is None else self.compute_dtype
        fill(self, "compute_dtype", float_dtype("compute_dtype", compute))

    def in_high_precision(self, layer: int) -> bool:
        """Whether layer number ``layer``, from 0, is one of the first and last that stay in high precision.

        >>> config = TransformerConfig(num_layers=3, hidden_size=8, num_attention_heads=1, first_last_layers_bf16=True)
        >>> [config.in_high_precision(layer) for layer in range(3)]
        [True, False, True]
        """
        first, last = self.num_layers_at_start_in_bf16, self.num_layers - self.num_layers_at_end_in_bf16
        return self.first_last_layers_bf16 and (layer < first or layer >= last)


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Sizes of the device mesh's axes.

    Args:
        data: replicas that split the batch and hold all parameters.
        fsdp: ranks that split the batch and the parameters (ZeRO-3).
        tensor: ranks that split heads, feed-forward and vocabulary (Megatron's tensor parallel size).

    >>> ParallelConfig(data=2, tensor=4).num_devices
    8
    """

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    axis_names: tuple[str, ...] = field(default=MESH_AXES, init=False, repr=False)

    def __post_init__(self) -> None:
        check_positive(data=self.data, fsdp=self.fsdp, tensor=self.tensor)

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes in the order of `MESH_AXES`."""
        return tuple(getattr(self, name) for name in MESH_AXES)

    @property
    def num_devices(self) -> int:
        """Devices the mesh takes."""
        return self.data * self.fsdp * self.tensor

    @classmethod
    def parse(cls, text: str) -> ParallelConfig:
        """From ``"data=2,fsdp=2,tensor=2"``; axes left out are 1.

        Raises:
            ValueError: for an unknown or repeated axis, or a size that is not an integer >= 1.

        >>> ParallelConfig.parse("tensor=2")
        ParallelConfig(data=1, fsdp=1, tensor=2)
        """
        sizes: dict[str, int] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            if name not in MESH_AXES:
                raise ValueError(f"unknown mesh axis {name!r} in {text!r}; allowed: {', '.join(MESH_AXES)}")
            if name in sizes:
                raise ValueError(f"mesh axis {name!r} is given twice in {text!r}")
            if not value.isdigit():
                raise ValueError(f"mesh axis {name!r} needs an integer size >= 1, got {value!r} in {text!r}")
            sizes[name] = int(value)
        return cls(**sizes)
