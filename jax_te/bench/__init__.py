"""Measurements of layers, attention, train steps and models next to their peers."""

from jax_te.bench.attention import AttentionSizes, bench_attention, with_fp8_attention
from jax_te.bench.checkpoints import bench_checkpoints
from jax_te.bench.experts import ExpertsCase, bench_experts
from jax_te.bench.layers import Case, bench_layer
from jax_te.bench.megatron import check_megatron, check_same_form
from jax_te.bench.microbatches import bench_microbatches
from jax_te.bench.plain_flax import PlainForm, PlainSizes, bench_plain_flax
from jax_te.bench.prediction import predict_step
from jax_te.bench.settings import Row, Settings, Sizes
from jax_te.bench.tilings import bench_tilings, grouped_shapes
from jax_te.bench.train_steps import Variant, bench_train_steps, create_bench_state

__all__: list[str] = []  # the names above are for the other packages of jax_te, none is for users
