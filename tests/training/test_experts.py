"""State of routers over steps: microbatches, skipped steps, loops, own loops, loss scales, checkpoints."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.config import ParallelConfig, RecomputeConfig, RouterOptions
from jax_te.layers import Linear, MoE, Router, expert_metrics, set_aux_loss_scale
from jax_te.layers.moe.router_state import ExpertBias
from jax_te.models import StackInput, run_layers
from jax_te.quantize import Counting, QuantizerState, merge_quantizers, write_back
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.sharding import make_mesh
from jax_te.training import (
    ConstantLossScale,
    DynamicLossScale,
    Optimizer,
    PipelinedLoss,
    create_train_state,
    inspect_precision,
    make_eval_step,
    make_train_step,
    value_and_grad,
)
from jax_te.training.state import abstract_train_state
from tests.support.numerics import draw

B, S, H, F, E = 4, 8, 16, 32, 4
X = draw("x", (B, S, H))
BIASED = {"score_function": "sigmoid", "enable_expert_bias": True, "bias_update_rate": 0.25}
GLOBAL = {"load_balancing_type": "global_aux_loss", "aux_loss_coeff": 0.5}


def loss_fn(model, batch, key):
    return jnp.mean((model(batch) - batch) ** 2)


def state_of(options, tx=None, *, scaler=None, factor=None, **layer):
    def build(rngs):
        model = MoE(H, F, RouterOptions(num_experts=E, **options), rngs=rngs, **layer)
        set_aux_loss_scale(model, factor)
        return model

    return create_train_state(build, optax.sgd(0.1) if tx is None else tx, key=jax.random.key(0), scaler=scaler)


def router_of(state) -> Router:
    return state.model.router


def loads(state, x=X):
    """Tokens of each expert as the model of this state routes them."""
    return np.bincount(np.asarray(router_of(state)(x).experts).reshape(-1), minlength=E)


def step_of(tx=None, **options):
    return make_train_step(loss_fn, optax.sgd(0.1) if tx is None else tx, **options)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [1, 2, 4])
def test_the_bias_goes_on_once_a_step_by_the_whole_batch(microbatches):
    state, expected = state_of(BIASED), np.zeros(E)
    step = step_of(microbatches=microbatches)
    for _ in range(3):
        load = loads(state)
        state, _ = step(state, X)
        expected = expected + 0.25 * np.sign(load.mean() - load)
        np.testing.assert_array_equal(router_of(state).expert_bias[...], expected)
        np.testing.assert_array_equal(router_of(state).last_step[:E], load)
    assert np.any(expected)


@pytest.mark.costly
def test_quantiles_are_the_mean_over_microbatches():
    from jax_te.ops.moe.routing import expert_quantiles

    options = {"load_balancing_type": "quantile_balancing", "quantile_balancing_ema": 0.5}
    state = state_of(options)
    router, bias = router_of(state), np.zeros(E)
    logits = [jnp.matmul(x.reshape(-1, H), router.kernel[...], precision="highest") for x in (X[:2], X[2:])]
    if router.bias is not None:
        logits = [each + router.bias[...][None] for each in logits]
    mean = np.mean([expert_quantiles(each, jnp.zeros(E), 2) for each in logits], axis=0)
    state, _ = step_of(microbatches=2)(state, X)
    want = 0.5 * bias + 0.5 * mean
    np.testing.assert_allclose(router_of(state).quantile_bias[...], [*(want - want.mean()), 0.0], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_later_microbatches_see_the_counts_of_earlier_ones():
    """As Megatron's: the second of two has the mean of both; the next step begins anew."""
    state = state_of(GLOBAL, bias=False)
    before = jax.tree.map(jnp.copy, state)

    def grads(x, counts):
        model = before.model
        model.router.counts_so_far.set_value(counts)
        wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
        found = nnx.grad(lambda model: loss_fn(model, x, None), argnums=wrt)(model)
        return found.router.kernel[...], found.router.counts_so_far[...]

    one, counts = grads(X[:2], jnp.zeros(E + 1))
    two, _ = grads(X[2:], counts)
    alone, _ = grads(X[2:], jnp.zeros(E + 1))
    assert counts[-1] == 1.0
    assert np.sum(counts[:-1]) == 2 * 2 * S
    assert np.abs(two - alone).max() > 1e-4
    after, _ = step_of(microbatches=2)(state, X)
    moved = before.params.router.kernel[...] - after.params.router.kernel[...]
    np.testing.assert_allclose(moved, 0.1 * (one + two) / 2, rtol=1e-4, atol=1e-7)
    np.testing.assert_array_equal(router_of(after).counts_so_far[...], np.zeros(E + 1))


@pytest.mark.slow
def test_the_gradient_at_other_parameters_reads_the_counts_that_the_step_reads():
    def update(grads, state, params, *, grad_fn, **_):
        at = grad_fn(params, 0)
        return jax.tree.map(jnp.zeros_like, grads), (optax.tree.norm(jax.tree.map(jnp.subtract, at, grads)))

    tx = optax.GradientTransformationExtraArgs(lambda params: jnp.zeros(()), update)
    state, metrics = step_of(tx, microbatches=2)(state_of(GLOBAL, tx), X)
    # Another program of the same fp32 arithmetic.
    assert float(state.opt_state) < 1e-5 * float(metrics["grad_norm"])


@pytest.mark.slow
def test_a_skipped_step_changes_nothing():
    state, _ = step_of(microbatches=2)(state_of(BIASED | GLOBAL), X)
    before = jax.tree.map(np.asarray, (state.params, state.quantizers))
    state, metrics = step_of(microbatches=2)(state, X.at[0, 0, 0].set(jnp.nan))
    assert metrics["skipped"] == 1.0
    jax.tree.map(np.testing.assert_array_equal, (state.params, state.quantizers), before)


@pytest.mark.costly
def test_evaluation_counts_nothing():
    state = state_of(BIASED)
    make_eval_step(loss_fn)(state, X)
    assert not np.any(router_of(state).expert_bias[...])


@pytest.mark.costly
def test_no_optimizer_sees_the_states():
    seen = []

    def update(updates, opt_state, params=None):
        seen.append({".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)})
        return updates, opt_state

    tx = optax.chain(optax.adamw(0.1, weight_decay=10.0), optax.GradientTransformation(lambda params: (), update))
    state = state_of(BIASED, tx)
    state, metrics = step_of(tx)(state, X)
    assert np.max(np.abs(router_of(state).expert_bias[...])) == 0.25
    assert {"router.kernel", "router.bias"} <= seen[0]
    assert not any("expert_bias" in name or "last_step" in name for name in seen[0])
    # And no norm counts tokens.
    assert metrics["grad_norm"] < 10.0


@pytest.mark.costly
def test_routers_and_biases_can_be_groups_of_the_optimizer():
    def labels(params):
        return nnx.from_flat_state(
            [(path, variable.replace("router" if "router" in path else "rest"))
             for path, variable in nnx.to_flat_state(params)]
        )  # fmt: skip

    tx = optax.multi_transform({"router": optax.set_to_zero(), "rest": optax.sgd(0.1)}, labels)
    before = state_of(BIASED, tx)
    kept = jax.tree.map(np.asarray, before.params)
    after, _ = step_of(tx)(before, X)
    np.testing.assert_array_equal(after.params.router.kernel[...], kept.router.kernel[...])
    assert np.any(np.asarray(after.params.experts.linear_fc1.kernel[...]) != kept.experts.linear_fc1.kernel[...])


@pytest.mark.costly("scaler1", slow=["scaler0"])
@pytest.mark.parametrize("scaler", [ConstantLossScale(scale=64.0), DynamicLossScale(initial_scale=2.0**12)])
def test_losses_are_scaled_as_the_models_loss(scaler):
    options = {"aux_loss_coeff": 0.5, "z_loss_coeff": 0.5}
    plain, _ = step_of(microbatches=2)(state_of(options), X)
    scaled, _ = step_of(microbatches=2)(state_of(options, scaler=scaler), X)
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(scaled.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    model = state_of(options).model
    loss, grads = value_and_grad(lambda model: loss_fn(model, X, None), scaler=scaler)(model)
    want_loss, want = value_and_grad(lambda model: loss_fn(model, X, None))(model)
    np.testing.assert_allclose(loss, want_loss)
    np.testing.assert_allclose(grads.router.kernel[...], want.router.kernel[...], rtol=1e-5, atol=1e-7)


@pytest.mark.costly
def test_a_factor_of_losses_is_multiplied_by_the_loss_scale():
    """A factor that ``loss_fn`` has on top of the scaler's, also if it changes it itself."""
    router = Router(H, RouterOptions(num_experts=E, aux_loss_coeff=0.5), rngs=nnx.Rngs(0))

    @functools.partial(nnx.jit, static_argnames=("scaler", "inside"))
    def gradient(router, factor, scaler, inside):
        set_aux_loss_scale(router, 1.0 if inside else factor)

        def loss_fn(router):
            if inside:
                set_aux_loss_scale(router, factor)
            return factor * jnp.mean(router(X).probs ** 2)

        return value_and_grad(loss_fn, scaler=scaler)(router)[1].kernel[...]

    plain = gradient(router, jnp.float32(1.0), ConstantLossScale(), inside=False)
    for inside in (False, True):
        found = gradient(nnx.clone(router), jnp.float32(3.0), ConstantLossScale(scale=8.0), inside=inside)
        np.testing.assert_allclose(found, 3.0 * plain, rtol=1e-5, atol=1e-7)


def test_inspection_scales_the_losses_of_routers():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.first = Linear(H, H, rngs=rngs)
            self.router = Router(H, RouterOptions(num_experts=E, aux_loss_coeff=0.5), rngs=rngs)

        def __call__(self, x):
            return self.router(self.first(x)).probs

    model = Model(nnx.Rngs(0))
    with autocast(Float8CurrentScaling()):
        one, scaled = (
            inspect_precision(model, lambda model, x, key: jnp.mean(model(x) ** 2), X, loss_scale=scale)
            for scale in (1.0, 4.0)
        )
    amaxes = [[tensor.amax for tensor in found if tensor.role == "grad"] for found in (one, scaled)]
    np.testing.assert_allclose(amaxes[1], 4.0 * np.asarray(amaxes[0]), rtol=1e-5)


@pytest.mark.costly("True", slow=("False",))
@pytest.mark.parametrize("own", [False, True])
def test_own_loops(own):
    """`value_and_grad` with `Optimizer`, and Flax's with the states among what is differentiated."""
    options = BIASED | GLOBAL
    expected, _ = step_of()(state_of(options), X)
    model = state_of(options).model
    optimizer = Optimizer(model, optax.sgd(0.1))

    @nnx.jit
    def train_step(model, optimizer, x):
        loss = lambda model: loss_fn(model, x, None)  # noqa: E731
        if own:
            wrt = nnx.DiffState(0, (nnx.Param, QuantizerState))
            optimizer.update(model, nnx.grad(loss, argnums=wrt)(model))
        else:
            optimizer.update(model, value_and_grad(loss)(model)[1])

    train_step(model, optimizer, X)
    got = nnx.state(model, QuantizerState)
    for (path, a), (_, b) in zip(nnx.to_flat_state(got), nnx.to_flat_state(expected.quantizers), strict=True):
        np.testing.assert_allclose(a[...], b[...], rtol=1e-6, err_msg=str(path))
    np.testing.assert_allclose(model.router.kernel[...], expected.params.router.kernel[...], rtol=1e-5, atol=1e-7)


@pytest.mark.costly
def test_resumed_bit_by_bit(tmp_path):
    step, tx = step_of(optax.adam(0.01), microbatches=2), optax.adam(0.01)
    options = BIASED | GLOBAL

    def build(rngs):
        return MoE(H, F, RouterOptions(num_experts=E, **options), rngs=rngs)

    whole = create_train_state(build, tx, key=jax.random.key(0))
    for number in range(4):
        whole, _ = step(whole, X)
        if number == 1:
            with TrainCheckpointer(tmp_path) as checkpointer:
                checkpointer.save(whole, None, 2)
    with TrainCheckpointer(tmp_path) as checkpointer:
        resumed, _, _ = checkpointer.restore(abstract_train_state(build, tx))
    for _ in range(2):
        resumed, _ = step(resumed, X)
    for a, b in zip(
        jax.tree.leaves(dataclasses.replace(whole, rng=0)),
        jax.tree.leaves(dataclasses.replace(resumed, rng=0)),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


class Block(nnx.Module):
    """A layer of a stack: experts with a residual connection."""

    def __init__(self, rngs):
        self.moe = MoE(H, F, RouterOptions(num_experts=E, **BIASED, aux_loss_coeff=0.5), rngs=rngs)

    def __call__(self, x, dropout_key=None):
        return x + self.moe(x)


class Stack(nnx.Module):
    def __init__(self, rngs, **how):
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.how = nnx.static(how)

    def __call__(self, x):
        return run_layers(list(self.layers), x, [None, None], **self.how)


FULL = RecomputeConfig(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [{"scan": True}, {"scan": False, "recompute": FULL}, {"scan": True, "recompute": FULL}, {"batch_parts": 2}],
    ids=["scanned", "unrolled, recomputed", "scanned, recomputed", "batch in parts"],
)
def test_stacks_of_layers_count_alike(how):
    """Unrolled and scanned, recomputed, and with a batch in parts, which are losses of their own."""
    if "batch_parts" in how:
        how = how | {"scan": True}

    def after(**how):
        state = create_train_state(lambda rngs: Stack(rngs, **how), optax.sgd(0.1), key=jax.random.key(0))
        return step_of()(state, X)[0]

    plain, other = after(scan=False), after(**how)
    found = nnx.to_flat_state(other.quantizers)
    for (path, a), (_, b) in zip(found, nnx.to_flat_state(plain.quantizers), strict=True):
        if path[-1] == "last_step" and "batch_parts" in how:
            a, b = a[:E], b[:E]
        np.testing.assert_allclose(a[...], b[...], rtol=1e-5, err_msg=str(path))
    assert sum(path[-1] == "expert_bias" and bool(np.any(state[...])) for path, state in found) == 2


@pytest.mark.slow
def test_a_layer_that_is_called_twice_counts_both():
    state = state_of(BIASED)

    def twice(model, batch, key):
        return jnp.mean(model(batch) ** 2) + jnp.mean(model(-batch) ** 2)

    load = loads(state) + loads(state, -X)
    state, _ = make_train_step(twice, optax.sgd(0.1))(state, X)
    np.testing.assert_array_equal(router_of(state).last_step[:E], load)
    np.testing.assert_array_equal(router_of(state).expert_bias[...], 0.25 * np.sign(load.mean() - load))


@pytest.mark.slow
def test_metrics():
    options = {"expert_capacity_factor": 0.75, "aux_loss_coeff": 0.1, "z_loss_coeff": 0.1}
    state = state_of(options)
    routings = [router_of(state)(x) for x in (X[:2], X[2:])]
    state, _ = step_of(microbatches=2)(state, X)
    found = expert_metrics(state.model)
    kept = np.concatenate([np.asarray(r.experts)[np.asarray(r.kept)] for r in routings])
    load = np.bincount(kept, minlength=E)
    np.testing.assert_array_equal(found["router/tokens_per_expert"], load)
    assert 0.0 < found["dropped_share"] == pytest.approx(1.0 - len(kept) / (2 * B * S))
    assert found["max_over_mean_load"] == pytest.approx(load.max() / load.mean())
    for name in ("aux_loss", "z_loss"):
        want = np.mean([r.losses[name] for r in routings])
        np.testing.assert_allclose(found[name], want, rtol=1e-5)
        np.testing.assert_allclose(found[f"router/{name}"], want, rtol=1e-5)


@pytest.mark.slow
def test_metrics_of_a_step():
    """Means over layers, tokens of each expert, and a layer's own where it says so."""
    names = {"experts/aux_loss", "experts/dropped_share", "experts/max_over_mean_load"}
    tokens, own = "experts/router/tokens_per_expert", {name.replace("/", "/router/") for name in names}
    for per_layer in (False, True):
        state = state_of({"aux_loss_coeff": 0.1, "per_layer_logging": per_layer})
        state, metrics = step_of()(state, X)
        assert {name for name in metrics if "experts" in name} == names | {tokens} | (own if per_layer else set())
        np.testing.assert_array_equal(metrics[tokens], expert_metrics(state.model)["router/tokens_per_expert"])
        assert np.sum(metrics[tokens]) == 2 * B * S
    assert metrics["experts/router/aux_loss"] == metrics["experts/aux_loss"]


LAYERS = 2


def scanned(stack, x):
    return nnx.scan(lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, stack)


class Layers(nnx.Module):
    """Layers that differ, stacked by ``nnx.vmap`` and run by ``nnx.scan``, or one by one."""

    def __init__(self, key, options, *, stacked):
        make = lambda key: MoE(H, F, RouterOptions(num_experts=E, **options), rngs=nnx.Rngs(key))  # noqa: E731
        keys = jax.random.split(key, LAYERS)
        self.layers = nnx.vmap(make)(keys) if stacked else nnx.List([make(key) for key in keys])

    def __call__(self, x):
        if not isinstance(self.layers, nnx.List):
            return scanned(self.layers, x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.slow
@pytest.mark.wide("quantiles")
@pytest.mark.parametrize(
    "options",
    [
        BIASED | {"expert_capacity_factor": 0.5, "aux_loss_coeff": 0.5},
        {"load_balancing_type": "quantile_balancing", "quantile_balancing_ema": 0.5},
    ],
    ids=["bias", "quantiles"],
)
def test_a_stack_is_its_layers(options):
    """States, gradients of scaled losses, and metrics: of each layer by itself."""
    found = {}
    for stacked in (False, True):
        build = lambda rngs, stacked=stacked: Layers(jax.random.key(0), options, stacked=stacked)  # noqa: E731
        scaler = ConstantLossScale(scale=8.0)
        state = create_train_state(build, optax.sgd(0.1), key=jax.random.key(0), scaler=scaler)
        found[stacked], metrics = step_of(microbatches=2)(state, X)
    plain, stack = (found[stacked] for stacked in (False, True))
    for name in ("params", "quantizers"):
        of_layers = [nnx.to_pure_dict(getattr(plain, name)["layers"][i]) for i in range(LAYERS)]
        want = jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_layers)
        got = nnx.to_pure_dict(getattr(stack, name)["layers"])
        for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=str(path))
    one_by_one = expert_metrics(plain.model)
    for name, value in expert_metrics(stack.model).items():
        of_layer = re.sub(r"layers\.router\[(\d)\]", r"layers.\1.router", name)
        np.testing.assert_allclose(value, one_by_one[of_layer], rtol=1e-5, err_msg=name)
    assert metrics["experts/layers.router[1]/tokens_per_expert"].shape == (E,)


# --- the rules themselves


@dataclasses.dataclass(frozen=True)
class Sum(Counting):
    factor: float

    def advance(self, old, total):
        return old + self.factor * total


@pytest.mark.costly
def test_counts_merge_by_sums_and_scales_by_maxima():
    counted = QuantizerState(jnp.zeros(2), counting=Sum(2.0))
    history = QuantizerState(jnp.array([1.0, 0.0]))
    old = nnx.State({"a": counted, "q": {"scale": QuantizerState(jnp.ones(())), "amax_history": history}})
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf + 1.0, leaf + 3.0]), old)
    # A step's amax is the newest, and the older ones have moved on.
    stacked["q"]["amax_history"].set_value(jnp.array([[2.0, 1.0], [4.0, 1.0]]))
    merged = merge_quantizers(stacked)
    np.testing.assert_array_equal(merged["a"][...], [4.0, 4.0])
    assert merged["q"]["scale"][...] == 4.0
    new = write_back(old, merged)
    np.testing.assert_array_equal(new["a"][...], [8.0, 8.0])
    assert new["q"]["scale"][...] == 4.0
    kept = write_back(old, merged, keep_old=jnp.array(True))
    jax.tree.map(np.testing.assert_array_equal, kept, old)


def test_biases_of_a_stack_follow_their_own_layers_mean():
    bias = ExpertBias(1.0).advance(jnp.zeros((2, 2)), jnp.array([[3.0, 1.0], [9.0, 7.0]]))
    np.testing.assert_array_equal(bias, [[-1.0, 1.0], [-1.0, 1.0]])


@pytest.mark.slow
def test_what_a_pipeline_cannot_count_is_refused():
    loss = PipelinedLoss(lambda model, x, key: StackInput(x), lambda model, y, x, key: jnp.mean(y))
    with jax.set_mesh(make_mesh(ParallelConfig(pipeline=2))):
        state = state_of(GLOBAL)
        with pytest.raises(ValueError, match="reads the counts of a step's earlier microbatches"):
            make_train_step(loss, optax.sgd(0.1), microbatches=2)(state, X)
        state = state_of({"aux_loss_coeff": 0.5}, factor=2.0)
        with pytest.raises(ValueError, match=r"call set_aux_loss_scale\(model, None\)"):
            make_train_step(loss, optax.sgd(0.1), microbatches=2)(state, X)
