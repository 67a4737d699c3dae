"""A Megatron-Core model, ported line by line, on 8 CPU devices with tensor parallelism 2.

Above each ported statement that differs stands, as a comment, what it is in Megatron-Core on PyTorch; where nothing
stands, it is the same but for `rngs`. What differs everywhere:

- `rngs` comes in where layers are made: JAX has no global random state.
- activations are [b, s, h], Megatron's are [s, b, h].
- sizes are those of whole arrays. A mesh, not a process group, says how many ranks split them; there is one process.
- the FP8 context is opened where the model is built and called, by whoever does so.

    python examples/megatron_port.py

prints where the kernels lie and the losses, which are those of one device up to rounding in bf16.
"""

import jax
import jax.numpy as jnp
import optax

from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.megatron import (
    AttnMaskType,
    Float16Module,
    MegatronModule,
    TEDotProductAttention,
    TELayerNormColumnParallelLinear,
    TENorm,
    TERowParallelLinear,
    recipe_from_config,
)
from jax_te.recipe import autocast
from jax_te.sharding import make_mesh
from jax_te.training import create_train_state, make_train_step

STEPS, BATCH, LENGTH = 12, 8, 32


class SelfAttention(MegatronModule):
    # def __init__(self, config, layer_number):
    def __init__(self, config, layer_number, *, rngs):
        super().__init__(config=config)
        self.linear_qkv = TELayerNormColumnParallelLinear(
            config.hidden_size,
            3 * config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            rngs=rngs,
        )
        self.core_attention = TEDotProductAttention(
            config, layer_number, AttnMaskType.causal, attention_type="self", rngs=rngs
        )
        self.linear_proj = TERowParallelLinear(
            config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            rngs=rngs,
        )

    # def forward(self, hidden_states, attention_mask):
    def __call__(self, hidden_states, attention_mask=None):
        mixed_qkv, _ = self.linear_qkv(hidden_states)
        # mixed_qkv.view(s, b, num_attention_heads // tp_size, 3 * kv_channels)
        heads = mixed_qkv.reshape(*mixed_qkv.shape[:2], self.config.num_attention_heads, 3 * self.config.kv_channels)
        # query, key, value = torch.split(heads, kv_channels, dim=-1)
        query, key, value = jnp.split(heads, 3, axis=-1)
        context = self.core_attention(query, key, value, attention_mask)
        return self.linear_proj(context)


class MLP(MegatronModule):
    def __init__(self, config, *, rngs):
        super().__init__(config=config)
        self.linear_fc1 = TELayerNormColumnParallelLinear(
            config.hidden_size,
            config.ffn_hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc1",
            rngs=rngs,
        )
        self.linear_fc2 = TERowParallelLinear(
            config.ffn_hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="fc2",
            rngs=rngs,
        )

    def __call__(self, hidden_states):
        intermediate, bias = self.linear_fc1(hidden_states)
        # F.gelu(intermediate + bias)
        return self.linear_fc2(jax.nn.gelu(intermediate + bias))


class Block(MegatronModule):
    def __init__(self, config, layer_number=1, *, rngs):
        super().__init__(config=config)
        self.self_attention = SelfAttention(config, layer_number, rngs=rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.final_layernorm = TENorm(config, config.hidden_size, config.layernorm_epsilon)

    def __call__(self, hidden_states):
        # output, bias = ...; bias_dropout_add(training, fused)((output, bias), hidden_states, hidden_dropout)
        output, bias = self.self_attention(hidden_states)
        hidden_states = hidden_states + output + bias
        output, bias = self.mlp(hidden_states)
        hidden_states = hidden_states + output + bias
        return self.final_layernorm(hidden_states)


def config(tensor_ranks):
    # params_dtype=torch.bfloat16, pipeline_dtype=torch.bfloat16
    return TransformerConfig(
        num_layers=1,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        init_method_std=0.1,
        bf16=True,
        params_dtype="bfloat16",
        fp8="hybrid",
        fp8_amax_history_len=16,
        fp8_amax_compute_algo="max",
        tensor_model_parallel_size=tensor_ranks,
        sequence_parallel=tensor_ranks > 1,
    )


def loss_fn(model, batch, key):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def train(config):
    """Return the losses and the last state. Under a mesh its arrays are sharded; the code knows nothing of it."""
    x = jax.random.normal(jax.random.key(1), (BATCH, LENGTH, config.hidden_size))
    batch = {"x": x, "y": jnp.roll(x, 1, axis=1)}
    # optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", bf16=True, ...), [model])
    tx = optax.adam(1e-2)  # fp32 masters are in the train state
    # with get_fp8_context(config): ..., in Megatron's transformer block
    with autocast(recipe_from_config(config)):
        # model = Float16Module(config, Block(config).cuda())
        build = lambda rngs: Float16Module(config, Block(config, rngs=rngs))  # noqa: E731
        state = create_train_state(build, tx, key=jax.random.key(0))
        # zero_grad_buffer, forward_backward_func(...), finalize_model_grads, optimizer.step(): one compiled function
        step, losses = make_train_step(loss_fn, tx), []
        for _ in range(STEPS):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
    return losses, state


def main():
    # torchrun --nproc-per-node 8
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    one, _ = train(config(tensor_ranks=1))
    # parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    with jax.set_mesh(make_mesh(ParallelConfig(data=4, tensor=2))):
        eight, state = train(config(tensor_ranks=2))
    kernels = {n: a for n, a in state.model.state_dict().items() if n.endswith(".kernel")}
    for name, kernel in kernels.items():
        local = kernel.addressable_shards[0].data.shape
        print(f"{name:35} {kernel.dtype} {kernel.shape}, on each of {len(kernel.devices())} devices {local}")
    print("one device   ", *(f"{loss:.3f}" for loss in one[::3]), f"{one[-1]:.3f}")
    print("eight devices", *(f"{loss:.3f}" for loss in eight[::3]), f"{eight[-1]:.3f}")
    if any(2 * kernel.addressable_shards[0].data.size != kernel.size for kernel in kernels.values()):
        raise SystemExit("each device should hold half of every kernel")
    if not eight[-1] < 0.7 * eight[0]:
        raise SystemExit(f"the loss should fall, went from {eight[0]:.3f} to {eight[-1]:.3f}")
    if not max(abs(a - b) for a, b in zip(one, eight, strict=True)) < 0.05:
        raise SystemExit("the losses should not depend on the mesh")
    print("ok: kernels are split over two tensor ranks, and the losses are one device's")


if __name__ == "__main__":
    main()
