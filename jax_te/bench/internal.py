"""Names of `jax_te.bench` for the other packages of jax_te. Not for users: they may change without notice."""

from jax_te.bench.attention import AttentionSizes, bench_attention
from jax_te.bench.checkpoints import bench_checkpoints
from jax_te.bench.layers import Case, bench_layer
from jax_te.bench.megatron import check_megatron
from jax_te.bench.microbatches import bench_microbatches
from jax_te.bench.settings import Row, Settings, Shape, Sizes
from jax_te.bench.train_steps import Variant, bench_train_steps, created

__all__ = [
    "AttentionSizes",
    "Case",
    "Row",
    "Settings",
    "Shape",
    "Sizes",
    "Variant",
    "bench_attention",
    "bench_checkpoints",
    "bench_layer",
    "bench_microbatches",
    "bench_train_steps",
    "check_megatron",
    "created",
]
