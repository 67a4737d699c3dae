"""Models whose layers have experts."""

import contextlib
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig, TransformerConfig
from jax_te.layers import expert_metrics
from jax_te.models import BertModel, Execution, GPTModel, MegatronGPTModel, T5Model, generate
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import PipelinedLoss, abstract_train_state, create_train_state, make_eval_step, make_train_step
from tests.support.states import merging

H, F, E, TOPK, V, S = 32, 48, 4, 2, 64, 8
TOKENS = jax.random.randint(jax.random.key(7), (2, S), 0, V)
LABELS = jnp.roll(TOKENS, -1, axis=1)


def config(**fields):
    sizes = {"num_layers": 4, "hidden_size": H, "num_attention_heads": 4, "ffn_hidden_size": F}
    form = {"normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False}
    form |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    experts = {"num_moe_experts": E, "moe_router_topk": TOPK, "moe_layer_freq": [0, 1, 1, 0]}
    return TransformerConfig(**sizes | form | experts | fields)


def gpt(rngs=None, *, execution=None, **fields):
    return GPTModel(
        config(**fields),
        vocab_size=V,
        max_sequence_length=2 * S,
        execution=Execution() if execution is None else execution,
        rngs=nnx.Rngs(0) if rngs is None else rngs,
    )


@nnx.jit
def call(model, *args, **kwargs):
    return model(*args, **kwargs)


def loss_and_gradients(model, key=None):
    @nnx.jit
    def run(model):
        def loss(model):
            return merging(model).loss(TOKENS, LABELS, dropout_key=key)

        return nnx.value_and_grad(loss, argnums=nnx.DiffState(0, (nnx.Param, QuantizerState)))(model)

    loss, gradients = run(model)
    return float(loss), {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}


def assert_close(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for path, gradient in expected[1].items():
        np.testing.assert_allclose(found[1][path], gradient, rtol=1e-4, atol=1e-6, err_msg=str(path))


def with_equal_experts(model, dense):
    """Give every expert of ``model`` the kernels of the dense model's feed-forward blocks, and all else its weights."""
    for layer, plain in zip(model.layers, dense.layers, strict=True):
        nnx.update(layer.self_attention, nnx.state(plain.self_attention))
        if layer.mlp is None:
            nnx.update(layer.layernorm_mlp, nnx.state(plain.layernorm_mlp))
            continue
        block, experts = plain.layernorm_mlp, layer.mlp.experts
        layer.pre_mlp_layernorm.scale[...] = block.scale[...]
        for linear, kernel in ((experts.linear_fc1, block.wi_kernel), (experts.linear_fc2, block.wo_kernel)):
            linear.kernel[...] = jnp.broadcast_to(kernel[...], linear.kernel.shape)
    nnx.update(model.embedding, nnx.state(dense.embedding))
    nnx.update(model.position_embedding, nnx.state(dense.position_embedding))
    return model


@pytest.mark.slow
def test_equal_experts_are_the_dense_model():
    dense = gpt(num_moe_experts=None, moe_layer_freq=1)
    model = with_equal_experts(gpt(nnx.Rngs(1)), dense)
    assert [layer.mlp is not None for layer in model.layers] == [False, True, True, False]
    np.testing.assert_allclose(call(model, TOKENS), call(dense, TOKENS), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"moe_shared_expert_intermediate_size": 16, "moe_router_pre_softmax": True}])
def test_both_models_compute_the_same_and_megatrons_has_its_names(fields):
    model = gpt(**fields)
    theirs = MegatronGPTModel(
        config(**fields), None, V, 2 * S, share_embeddings_and_output_weights=True, rngs=nnx.Rngs(0)
    )
    np.testing.assert_allclose(call(theirs, TOKENS), call(model, TOKENS), rtol=1e-5, atol=1e-6)
    names = set(theirs.state_dict())
    of_layer = "decoder.layers.1.mlp"
    assert {"decoder.layers.1.pre_mlp_layernorm.weight", f"{of_layer}.router.weight"} <= names
    assert {f"{of_layer}.experts.linear_fc{n}.weight{e}" for n in (1, 2) for e in range(E)} <= names
    assert "decoder.layers.0.mlp.linear_fc1.weight" in names
    assert (f"{of_layer}.shared_experts.linear_fc1.weight" in names) == bool(fields)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["moe", "core_attn"]}


WITH_LOSSES = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}


@functools.cache
def unchanged():
    """Loss and gradients of the unrolled model without recomputation, without and with the losses of routers."""
    return loss_and_gradients(gpt()), loss_and_gradients(gpt(**WITH_LOSSES))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("execution", "fields"), [(Execution(scan_layers=True), {}), (Execution(), FULL), (Execution(), SELECTIVE)]
)
def test_loops_and_recomputation_change_neither_gradients_nor_counts(execution, fields):
    plain, expected = unchanged()
    assert_close(loss_and_gradients(gpt(execution=execution, **WITH_LOSSES, **fields)), expected)
    # The losses of routers reach the gradients, and the value is without them.
    path = ("layers", 1, "mlp", "router", "kernel")
    assert plain[0] == expected[0]
    assert np.abs(plain[1][path] - expected[1][path]).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [None, pytest.param(DelayedScaling(), marks=pytest.mark.slow)])
def test_a_train_step_counts_and_moves_the_bias_and_evaluation_does_not(recipe):
    fields = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True, "moe_aux_loss_coeff": 0.01}
    fields |= {"moe_input_jitter_eps": 0.01}

    def loss_fn(model, batch, key):
        return model.loss(batch["tokens"], batch["labels"], dropout_key=key)

    tx, batch = optax.adam(1e-2), {"tokens": TOKENS, "labels": LABELS}
    with autocast(recipe):
        state = create_train_state(lambda rngs: gpt(rngs, **fields), tx, key=jax.random.key(0))
        step, losses = make_train_step(loss_fn, tx, microbatches=2), []
        for _ in range(8):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        assert losses[-1] < 0.8 * losses[0]
        for number in (1, 2):
            counts = metrics[f"experts/layers.{number}.mlp.router/tokens_per_expert"]
            assert float(jnp.sum(counts)) == TOKENS.size * TOPK
            assert float(jnp.max(jnp.abs(state.model.layers[number].mlp.router.expert_bias[...]))) > 0.0
        before = jax.tree.map(np.asarray, nnx.state(state.model, QuantizerState))
        make_eval_step(loss_fn)(state, batch)
        jax.tree.map(np.testing.assert_array_equal, before, nnx.state(state.model, QuantizerState))
    assert float(expert_metrics(state.model)["aux_loss"]) > 0.0


@pytest.mark.parametrize("kind", [pytest.param("own", marks=pytest.mark.slow), "megatron"])
@pytest.mark.slow
def test_generation_with_a_cache_is_that_without(kind):
    rngs, fields = nnx.Rngs(3), {"init_method_std": 0.3}
    model = gpt(rngs, **fields) if kind == "own" else MegatronGPTModel(config(**fields), None, V, 2 * S, rngs=rngs)
    model.eval()
    prompt = TOKENS[:, :3]
    found = generate(model, prompt, steps=5, key=jax.random.key(0), temperature=0.0)
    whole = jnp.zeros((2, S), prompt.dtype).at[:, :3].set(prompt)  # one program: no token sees a later one
    for end in range(3, S):
        whole = whole.at[:, end].set(jnp.argmax(call(model, whole)[:, end - 1], axis=-1))
    np.testing.assert_array_equal(found, whole)


PADDING = jnp.arange(S)[None] >= jnp.array([[S - 3], [S]])  # True for padding, of the first sequence alone
BALANCED = {"num_layers": 2, "moe_layer_freq": [0, 1], "moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.01}
BALANCED |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}


def of_padded(kind, tokens, **fields):
    """The mean loss of the tokens that are no padding, with its gradients and the routers' counts."""
    built = BALANCED | fields
    model = gpt(**built) if kind == "own" else MegatronGPTModel(config(**built), None, V, 2 * S, rngs=nnx.Rngs(0))
    weights = (~PADDING).astype(jnp.float32)

    @nnx.jit
    def run(model):
        def loss(model):
            if kind == "own":
                return model.loss(tokens, LABELS, weights, padding_mask=PADDING)
            each = model(tokens, labels=LABELS, loss_mask=weights, padding_mask=PADDING)
            return jnp.sum(each * weights) / jnp.sum(weights)

        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        return nnx.value_and_grad(loss, argnums=wrt)(model)

    loss, gradients = run(model)
    return float(loss), {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(gradients)}


@pytest.mark.slow
@pytest.mark.wide("own")
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("own", {}),
        ("megatron", {"mtp_num_layers": 1}),
        ("own", {"num_layers": 3, "moe_layer_freq": [0, 1, 1], **FULL, "execution": Execution(scan_layers=True)}),
    ],
    ids=["own", "megatron", "recomputed in a loop"],
)
def test_padding_changes_neither_losses_counts_nor_other_tokens(kind, fields):
    expected = of_padded(kind, TOKENS, **fields)
    others = jnp.where(PADDING, (TOKENS + 1) % V, TOKENS)
    assert_close(of_padded(kind, others, **fields), expected)
    path = ("layers", 1, "mlp", "router", "last_step")
    path = path if kind == "own" else ("decoder", *path)
    assert float(expected[1][path][:E].sum()) == TOPK * int(np.sum(~PADDING))


@pytest.mark.slow
@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("kind", ["own", "megatron"])
def test_padding_on_a_mesh_is_that_of_one_device(kind, axis_type):
    """Sequences in zig-zag order over the context axis, and split over the tensor axis, too."""
    fields = {"ffn_hidden_size": 64}
    expected = of_padded(kind, TOKENS, **fields)
    fields |= {"cp_load_balanced": True, "sequence_parallel": True}
    fields |= {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "expert_model_parallel_size": 2}
    with jax.set_mesh(make_mesh(ParallelConfig(context=2, tensor=2, expert=2), axis_type=axis_type)):
        assert_close(of_padded(kind, TOKENS, **fields), expected)


@pytest.mark.costly("by position", "at random")
@pytest.mark.parametrize(
    "fields",
    [
        {"moe_input_jitter_eps": 0.3},
        {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
        {"moe_router_force_load_balancing": True},
    ],
    ids=["jitter", "by position", "at random"],
)
def test_a_router_goes_by_positions_in_zigzag_order(fields):
    def losses(**more):
        model, key = gpt(num_layers=1, moe_layer_freq=1, **fields, **more), jax.random.key(1)
        return nnx.jit(lambda model: model.loss(TOKENS, LABELS, dropout_key=key, reduction="none"))(model)

    expected = losses()
    with jax.set_mesh(make_mesh(ParallelConfig(context=2), devices=jax.devices()[:2])):
        np.testing.assert_allclose(losses(cp_load_balanced=True), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_choice_is_replayed_by_positions_in_zigzag_order():
    choice = jnp.stack([TOKENS % E, (TOKENS + 1) % E], axis=-1)

    def logits(**more):
        fields = {"num_layers": 1, "moe_layer_freq": 1, "moe_enable_routing_replay": True}
        model = MegatronGPTModel(config(**fields, **more), None, V, 2 * S, rngs=nnx.Rngs(0))
        model.decoder.layers[0].mlp.router.set_target_indices(choice)
        return call(model, TOKENS)

    expected = logits()
    with jax.set_mesh(make_mesh(ParallelConfig(context=2), devices=jax.devices()[:2])):
        np.testing.assert_allclose(logits(cp_load_balanced=True), expected, rtol=1e-4, atol=1e-5)


AXES = ("data", "fsdp", "expert", "context", "tensor")
PAIRS = [{one: 2, other: 2} for one, other in itertools.combinations(AXES, 2)]


@pytest.mark.costly(*("-".join(sizes) for sizes in PAIRS if set(sizes) != {"context", "tensor"}))
@pytest.mark.parametrize("sizes", PAIRS, ids="-".join)
def test_every_layer_has_a_type_on_an_explicit_mesh(sizes):
    """Traced, not run: shardings are part of types, which tracing checks. Gradients have those of the parameters."""
    rows = jnp.concatenate([TOKENS, TOKENS])

    def loss(model):
        return model.loss(rows, rows, dropout_key=jax.random.key(0), padding_mask=rows == 0)

    with jax.set_mesh(make_mesh(ParallelConfig(**sizes), axis_type="explicit")):
        fields = {"num_layers": 1, "moe_layer_freq": 1, "mtp_num_layers": 1, "moe_z_loss_coeff": 0.1}
        model = nnx.eval_shape(functools.partial(gpt, hidden_dropout=0.1, **fields))
        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        gradients = nnx.eval_shape(nnx.grad(loss, argnums=wrt), model)
    found, params = (dict(nnx.to_flat_state(tree)) for tree in (gradients, nnx.state(model, nnx.Param)))
    assert {path: found[path].sharding.spec for path in params} == {path: p.sharding.spec for path, p in params.items()}


@pytest.mark.slow
def test_training_under_a_recipe_on_an_explicit_mesh_is_that_on_an_auto_one():
    rows = jnp.concatenate([TOKENS, TOKENS])

    def trained(axis_type):
        tx = optax.sgd(0.1)
        with jax.set_mesh(make_mesh(ParallelConfig(fsdp=2, expert=2), axis_type=axis_type)), autocast(DelayedScaling()):
            build = functools.partial(gpt, num_layers=1, moe_layer_freq=1, moe_aux_loss_coeff=0.1)
            state = create_train_state(build, tx, key=jax.random.key(0))
            step = make_train_step(lambda model, batch, key: model.loss(batch, batch), tx)
            for _ in range(2):
                state, metrics = step(state, rows)
        values = {path: np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(nnx.state(state.model, nnx.Param))}
        return float(metrics["loss"]), values

    assert_close(trained("explicit"), trained("auto"))


@pytest.mark.slow
def test_a_stage_of_a_pipeline_of_ones_own_takes_the_padding():
    fields = BALANCED | {"moe_layer_freq": 1}
    build = functools.partial(MegatronGPTModel, config(**fields), None, V, 2 * S)
    first, last = (build(n == 0, n == 1, stage_layers=range(n, n + 1), rngs=nnx.Rngs(0)) for n in (0, 1))

    def loss(first, last):
        x = first(TOKENS, padding_mask=PADDING)
        return jnp.sum(last(decoder_input=x, labels=LABELS, padding_mask=PADDING))

    states = nnx.jit(nnx.grad(loss, argnums=tuple(nnx.DiffState(n, (nnx.Param, QuantizerState)) for n in (0, 1))))
    for gradient in states(first, last):
        assert float(gradient.decoder.layers[0].mlp.router.last_step[:E].sum()) == TOPK * int(np.sum(~PADDING))


@pytest.mark.costly("mask0-TypeError-padding_mask must be bool")
@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (PADDING.astype(jnp.float32), TypeError, "padding_mask must be bool"),
        (PADDING[:, 1:], ValueError, "padding_mask must be"),
    ],
)
def test_other_masks_of_padding_are_refused(mask, error, words):
    for model in (gpt(), gpt(num_moe_experts=None, moe_layer_freq=1)):
        for call in (model, lambda *args, model=model, **kwargs: model.loss(*args, LABELS, **kwargs)):
            with pytest.raises(error, match=words):
                call(TOKENS, padding_mask=mask)


def after_steps(frequency, *, mesh=None, **fields):
    """Parameters and states after two steps of two microbatches, on a pipeline of two stages or on one device."""

    def build(rngs):
        return gpt(rngs, moe_layer_freq=frequency, moe_aux_loss_coeff=0.1, **fields)

    loss_fn = PipelinedLoss(
        lambda model, batch, key: model.embed_inputs(batch["tokens"], padding_mask=batch["padding"]),
        lambda model, y, batch, key: model.compute_loss(y, batch["labels"]),
    )
    tx = optax.sgd(0.1)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh)):
        state = create_train_state(build, tx, key=jax.random.key(0))
        step = make_train_step(loss_fn, tx, microbatches=2)
        for _ in range(2):
            state, _ = step(state, {"tokens": TOKENS, "labels": LABELS, "padding": PADDING})
        return jax.tree.map(np.asarray, nnx.to_flat_state(state.params)), jax.tree.map(
            np.asarray, nnx.to_flat_state(state.quantizers)
        )


@pytest.mark.slow
@pytest.mark.parametrize("frequency", [[0, 1, 0, 1], [0, 1, 1], [0, 0, 1, 1, 1]], ids=str)
def test_stages_of_a_pipeline_have_dense_layers_and_layers_with_experts(frequency):
    """Stages that differ each compute the layers that both have, and the others' kinds, which they leave out."""
    expected = after_steps(frequency, num_layers=len(frequency))
    found = after_steps(frequency, num_layers=len(frequency), mesh=ParallelConfig(pipeline=2))
    for mine, theirs in zip(found, expected, strict=True):
        assert [path for path, _ in mine] == [path for path, _ in theirs]
        for (path, a), (_, b) in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(a[...], b[...], rtol=2.0**-16, atol=2.0**-18, err_msg=str(path))


ROWS = jnp.concatenate([TOKENS, TOKENS[:, ::-1], TOKENS + 1, TOKENS[:, ::-1] + 2]) % V
STAGES: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "expert": ("pipeline=2,expert=2", "own", DelayedScaling(amax_history_len=2), {}),
    "data": ("pipeline=2,data=2,expert=2", "own", None, {}),
    "tensor": (
        "pipeline=2,tensor=2,expert=2",
        "megatron",
        None,
        {"sequence_parallel": True, "tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
    ),
}
"""Mesh, model, recipe and options on the mesh."""


def trained_in_stages(kind, recipe, mesh=None, **fields):
    """Losses, gradient norms, parameters and states of two steps, on an Explicit mesh or one device."""
    fields |= {"moe_layer_freq": [0, 1, 0, 1], "ffn_hidden_size": 64}
    fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    fields |= {"moe_aux_loss_coeff": 0.1}

    def build(rngs):
        if kind == "own":
            return gpt(rngs, **fields)
        return MegatronGPTModel(config(**fields), None, V, 2 * S, rngs=rngs)

    loss_fn = PipelinedLoss(
        lambda model, batch, key: model.embed_inputs(batch),
        lambda model, y, batch, key: model.compute_loss(y, jnp.roll(batch, -1, axis=1)),
    )
    place, tx = contextlib.nullcontext(), optax.sgd(0.5)
    if mesh is not None:
        place = jax.set_mesh(make_mesh(ParallelConfig.parse(mesh), axis_type="explicit"))
    with place, autocast(recipe):
        state = create_train_state(build, tx, key=jax.random.key(0))
        step, found = make_train_step(loss_fn, tx, microbatches=2), []
        for _ in range(2):
            state, metrics = step(state, ROWS)
            found.append({name: np.asarray(metrics[name]) for name in ("loss", "grad_norm")})
    values = jax.tree.map(np.asarray, (nnx.to_pure_dict(state.params), nnx.to_pure_dict(state.quantizers)))
    return found, *values


@pytest.mark.slow
@pytest.mark.parametrize("case", STAGES)
def test_stages_on_an_explicit_mesh_train_as_one_device(case):
    """Each stage has a dense layer and one with experts."""
    mesh, kind, recipe, options = STAGES[case]
    wanted = trained_in_stages(kind, recipe)
    found = trained_in_stages(kind, recipe, mesh, **options)
    # Without a recipe 1e-5 is what is promised; with one, a value on the other side of a tie beside as many other
    # values, as in tests/moe/test_every_mesh.py.
    tolerance = 1e-5 if recipe is None else 2.0**-3 / (ROWS.size * H) ** 0.5
    for (path, mine), theirs in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        error, size = (np.linalg.norm(np.ravel(x.astype(np.float64))) for x in (mine - theirs, theirs))
        assert error <= tolerance * size, f"{jax.tree_util.keystr(path)}: {error / size:.1e}"


@pytest.mark.slow
def test_stages_that_would_compute_all_layers_are_refused():
    with pytest.raises(ValueError, match="each stage, which runs one program, would compute all 4 of them"):
        after_steps([0, 0, 1, 1], mesh=ParallelConfig(pipeline=2))


def test_experts_on_another_number_of_devices_than_the_mesh_has_are_refused():
    model, message = gpt(expert_model_parallel_size=2), "expert_model_parallel_size is 2, and the mesh in use splits"
    with jax.set_mesh(make_mesh(ParallelConfig(expert=4))):
        for call in (lambda: gpt(expert_model_parallel_size=2), lambda: model(jnp.zeros((4, S), jnp.int32))):
            with pytest.raises(ValueError, match=message):
                call()


@pytest.mark.costly(slow=["megatron-fields0", "own-fields0", "own-fields2", "megatron-fields1", "own-fields1"])
@pytest.mark.parametrize("fields", [{}, {"moe_token_dispatcher_type": "alltoall"}, {"expert_tensor_parallel_size": 1}])
@pytest.mark.parametrize("kind", ["own", "megatron"])
def test_experts_on_several_devices_compute_what_one_device_does(kind, fields):
    """Losses and gradients; the expert axis shards the experts, and the tensor axis their kernels or not."""

    def found(**on_mesh):
        options = {"moe_aux_loss_coeff": 0.1, "ffn_hidden_size": 64} | on_mesh
        if kind == "own":
            return loss_and_gradients(gpt(**options))
        return loss_and_gradients(MegatronGPTModel(config(**options), None, V, 2 * S, rngs=nnx.Rngs(0)))

    expected = found()
    with jax.set_mesh(make_mesh(ParallelConfig(expert=2, tensor=2))):
        assert_close(found(tensor_model_parallel_size=2, expert_model_parallel_size=2, **fields), expected)


@pytest.mark.slow
def test_a_checkpoint_keeps_experts_biases_counts_and_scales_for_another_mesh(tmp_path):
    """Bitwise, and the next step on the first mesh is the one that was not interrupted."""
    fields = {"num_layers": 2, "moe_layer_freq": [0, 1], "ffn_hidden_size": 64}
    fields |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    fields |= {"moe_router_load_balancing_type": "global_aux_loss", "moe_aux_loss_coeff": 0.1}
    tx = optax.adam(1e-2)
    tokens = jax.random.randint(jax.random.key(8), (8, S), 0, V)
    batch = {"tokens": tokens, "labels": jnp.roll(tokens, -1, axis=1)}
    step = make_train_step(lambda model, batch, key: model.loss(batch["tokens"], batch["labels"]), tx, microbatches=2)

    def values(state):
        arrays = jax.tree.map(np.asarray, (state.params, state.quantizers, state.opt_state))
        return jax.tree.leaves_with_path(arrays)

    def assert_equal(found, expected):
        assert [path for path, _ in found] == [path for path, _ in expected]
        for (path, a), (_, b) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=str(path))

    with autocast(DelayedScaling()):
        state, _ = step(create_train_state(lambda rngs: gpt(rngs, **fields), tx, key=jax.random.key(0)), batch)
        with TrainCheckpointer(tmp_path) as checkpoints:
            checkpoints.save(state, None, 1)
        saved = values(state)
        after, _ = step(state, batch)
        for mesh in (None, ParallelConfig(data=2, fsdp=2, tensor=2), ParallelConfig(expert=4, tensor=2)):
            with contextlib.nullcontext() if mesh is None else jax.set_mesh(make_mesh(mesh)):
                target = abstract_train_state(lambda rngs: gpt(rngs, **fields), tx)
                with TrainCheckpointer(tmp_path) as checkpoints:
                    restored, _, _ = checkpoints.restore(target)
                assert_equal(values(restored), saved)
                if mesh is None:
                    assert_equal(values(step(restored, batch)[0]), values(after))


@pytest.mark.slow
def test_jitter_needs_a_key_in_training():
    model = gpt(moe_input_jitter_eps=0.1)
    with pytest.raises(ValueError, match=r"input_jitter_eps=0\.1"):
        model(TOKENS)
    first, second = (call(model, TOKENS, dropout_key=jax.random.key(seed)) for seed in (0, 1))
    assert float(jnp.max(jnp.abs(first - second))) > 0.0


def test_what_does_not_go_with_experts_is_refused():
    with pytest.raises(ValueError, match="build the model with Execution"):
        gpt(execution=Execution(batch_parts=2))
    with pytest.raises(ValueError, match="moe_enable_routing_replay=True; MegatronGPTModel does"):
        gpt(moe_enable_routing_replay=True)
    with pytest.raises(ValueError, match="num_moe_experts=4; GPTModel and MegatronGPTModel do"):
        BertModel(config(), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="num_moe_experts=4; GPTModel and MegatronGPTModel do"):
        T5Model(config(), vocab_size=V, max_sequence_length=S, rngs=nnx.Rngs(0))
