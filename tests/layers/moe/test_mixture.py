"""The layer with experts: routing, permutation, experts, their sum; tests/moe compares its numbers with an oracle."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.config import RouterOptions
from jax_te.layers import Experts, GroupedLinear, GroupedLoRA, LayerNormMLP, MoE, SharedExperts, layer_output
from jax_te.ops import Activation, RowGroups, activation, row_bound
from jax_te.quantize import QuantizerState
from jax_te.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, autocast
from jax_te.remat import selective_recompute
from tests.support.numerics import TOLERANCE, assert_close, draw
from tests.support.states import merging

B, S, H, F, E = 2, 16, 32, 48, 4
X, G = draw("x", (B, S, H)), draw("g", (B, S, H))
WRT = nnx.DiffState(0, (nnx.Param, QuantizerState))


def make(router=None, **options):
    return MoE(H, F, RouterOptions(num_experts=E, **(router or {})), rngs=nnx.Rngs(0), **options)


def run(layer, x=X, g=G, **call):
    """Output, and gradients of input, parameters and states, of ``sum(y * g)``."""

    @nnx.jit
    def in_one_program(layer, x):
        def loss(layer, x):
            y = merging(layer)(x, **call)
            return jnp.sum(y * g), y

        return nnx.value_and_grad(loss, argnums=(WRT, 1), has_aux=True)(layer, x)

    (_, y), (grads, dx) = in_one_program(layer, x)
    return y, dx, nnx.to_pure_dict(grads)


@nnx.jit
def output(layer, x):
    return layer(x)


def assert_same(one, two, tolerance=0.0):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def experts_with(function):
    """Experts with biases, of whose second layer's output and bias ``function`` makes what it returns."""
    fc1 = GroupedLinear(2, 16, (1, 16), rngs=nnx.Rngs(0))
    inner = GroupedLinear(2, 16, 16, return_bias=True, rngs=nnx.Rngs(1))
    inner.bias.set_value(draw("bias", (2, 16)))

    class Own(nnx.Module):
        def __call__(self, *args, **kwargs):
            y, bias = inner(*args, **kwargs)
            return function(y, bias)

    groups = RowGroups(sizes=jnp.array([1, 1]), rows=2)  # two rows, which are no output and bias
    return Experts(fc1, Own(), Activation("gelu"))(draw("x", (2, 16)), jnp.array([0.25, 0.75]), groups)


@pytest.mark.slow
def test_the_second_layers_bias_is_read_by_name():
    expected = experts_with(lambda y, bias: (y, bias))
    named = collections.namedtuple("Named", ("y", "bias"))
    np.testing.assert_array_equal(experts_with(named), expected)
    plain = experts_with(lambda y, bias: y)
    np.testing.assert_array_equal(experts_with(lambda y, bias: (y, None)), plain)
    assert (np.asarray(plain) != np.asarray(expected)).any()
    with pytest.raises(ValueError, match="linear_fc2 returned gates"):
        experts_with(lambda y, bias: layer_output(y, gates=bias))
    fc1, fc2 = (GroupedLinear(2, 16, 16, rngs=nnx.Rngs(0)) for _ in range(2))
    with pytest.raises(ValueError, match="linear_fc2 adds its bias itself"):
        Experts(fc1, fc2, Activation("gelu"))


@pytest.mark.costly(slow=("gelu-False", "gelu-True", "swiglu-True"))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_equal_experts_are_one_dense_layer(name, bias):
    """Whatever the router does: a token's probabilities add up to 1."""
    layer = make({"topk": 3}, activation=name, bias=bias)
    for linear in (layer.experts.linear_fc1, layer.experts.linear_fc2):
        linear.kernel.set_value(jnp.broadcast_to(linear.kernel[:1], linear.kernel.shape))
        if bias:
            linear.bias.set_value(jnp.broadcast_to(draw("bias", linear.bias.shape[1:])[None], linear.bias.shape))
    fc1, fc2 = layer.experts.linear_fc1, layer.experts.linear_fc2

    def dense(x):
        hidden = jnp.tensordot(x, fc1.kernel[0], 1, precision="highest")
        z = activation(hidden + (fc1.bias[0][None, None] if bias else 0.0), name)
        return jnp.matmul(z, fc2.kernel[0], precision="highest") + (fc2.bias[0][None, None] if bias else 0.0)

    want, vjp = jax.vjp(jax.jit(dense), X)
    y, dx, grads = run(layer)
    assert_close(y, want, TOLERANCE["float32"])
    assert_close(dx, vjp(G)[0], 4 * TOLERANCE["float32"])
    assert np.abs(grads["router"]["kernel"]).max() < 1e-3  # no choice is better


@pytest.mark.costly
def test_one_expert_is_a_feed_forward_block():
    layer = MoE(H, F, RouterOptions(num_experts=1, topk=1, pre_softmax=True), activation="swiglu", rngs=nnx.Rngs(0))
    block = LayerNormMLP(H, F, 1e-12, activation="swiglu", rngs=nnx.Rngs(1))
    for inner, prefix in ((layer.experts.linear_fc1, "wi"), (layer.experts.linear_fc2, "wo")):
        for part in ("kernel", "bias"):
            getattr(inner, part).set_value(getattr(block, f"{prefix}_{part}")[...][None])
    # Its norm of what has mean 0 and variance 1 is the identity.
    x = (X - X.mean(-1, keepdims=True)) / X.std(-1, keepdims=True)
    assert_close(output(layer, x), output(block, x), 8 * TOLERANCE["float32"])


@pytest.mark.costly
def test_an_expert_without_tokens_has_zero_gradients():
    layer = make({"topk": 1, "score_function": "sigmoid"})
    experts = jnp.where(jnp.arange(S)[None, :, None] % 2 == 0, 1, 3) * jnp.ones((B, 1, 1), jnp.int32)
    _, _, grads = run(layer, experts=experts.astype(jnp.int32))
    for part in ("kernel", "bias"):
        for linear in ("linear_fc1", "linear_fc2"):
            found = grads["experts"][linear][part]
            assert [bool(np.any(found[e])) for e in range(E)] == [False, True, False, True]


@pytest.mark.costly
def test_dropped_tokens_keep_their_other_experts():
    layer = make({"expert_capacity_factor": 0.5}, return_routing=True, bias=False)
    y, routing = output(layer, X)
    kept = np.asarray(routing.kept)
    assert {0, 1, 2} == set(kept.sum(-1).reshape(-1))
    np.testing.assert_array_equal(np.asarray(y)[~kept.any(-1)], 0.0)
    # A token's experts are not weighted anew.
    b, s = np.argwhere(kept.sum(-1) == 1)[0]
    slot = int(np.argmax(kept[b, s]))
    whole = make(return_routing=True, bias=False)
    e, p = int(routing.experts[b, s, slot]), float(routing.probs[b, s, slot])
    fc1, fc2 = whole.experts.linear_fc1.kernel[e], whole.experts.linear_fc2.kernel[e]
    z = p * activation(jnp.tensordot(X[b, s], fc1, 1, precision="highest"), "gelu")
    assert_close(y[b, s], z @ fc2, 4 * TOLERANCE["float32"])


@pytest.mark.slow
def test_padding_to_capacity_changes_nothing():
    router = {"expert_capacity_factor": 0.75, "score_function": "sigmoid", "enable_expert_bias": True}
    assert_same(run(make(router)), run(make(router | {"pad_expert_input_to_capacity": True})), 1e-6)
    once = {"topk": 1, **router}
    plain = run(make(once, apply_probs_on_input=True))
    assert_same(plain, run(make(once | {"pad_expert_input_to_capacity": True}, apply_probs_on_input=True)), 1e-6)


@pytest.mark.costly
def test_shared_experts_see_every_token():
    options = {"bias": False, "shared_expert_intermediate_size": 24, "shared_expert_gate": True, "activation": "swiglu"}
    layer = make(**options)
    shared = layer.shared_experts
    both = output(layer, X)
    layer.shared_experts = None
    gate = jax.nn.sigmoid(jnp.matmul(X, shared.gate_kernel[...]))
    shared.gate_kernel = None
    assert_close(both, output(layer, X) + gate * output(shared, X), TOLERANCE["float32"])
    assert isinstance(shared, SharedExperts)


@pytest.mark.slow
@pytest.mark.parametrize("modules", [("moe",), ("moe_act",), ("shared_experts",), ("moe_act", "shared_experts")])
def test_recomputation_changes_nothing_and_counts_once(modules):
    router = {"score_function": "sigmoid", "enable_expert_bias": True, "aux_loss_coeff": 0.1}
    layer = make(router, bias=False, shared_expert_intermediate_size=24)
    plain = run(layer)
    with selective_recompute(*modules):
        assert_same(run(layer), plain, 1e-6)
        assert "remat" in str(jax.make_jaxpr(lambda layer, x: layer(x))(layer, X))
    assert np.sum(plain[2]["router"]["expert_bias"]) == 2 * B * S


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        DelayedScaling(amax_history_len=2),
        *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in (Float8CurrentScaling(), Float8BlockScaling())),
    ],
)
def test_recipes(recipe):
    """Close to high precision, with rows aligned for the recipe, and each expert's state its own."""
    with autocast(recipe):
        layer = make(activation="swiglu")
        y, dx, grads = run(layer)
        alignment = layer.experts.alignment
    exact = run(make(activation="swiglu"))
    assert alignment == (128 if isinstance(recipe, Float8BlockScaling) else 16)
    for got, want in ((y, exact[0]), (dx, exact[1])):
        assert np.linalg.norm(got - want) < 0.2 * np.linalg.norm(want)
    if isinstance(recipe, DelayedScaling):
        histories = grads["experts"]["linear_fc1"]["quantizers"]["x"]["amax_history"]
        assert histories.shape == (E, 2)
        assert len(set(np.asarray(histories[:, 0]).tolist())) > 1


@pytest.mark.slow
def test_backward_keeps_no_permuted_rows_in_high_precision():
    """Only the tokens, of which it makes the rows again: there are ``topk`` as many, and padding. An adapter reads
    rows, and keeps them."""
    layer = make({"topk": 3}, bias=False)
    rows = row_bound(3 * B * S, E, alignment=layer.experts.alignment)

    def kept(layer):
        graphdef, state = nnx.split(layer)
        _, backward = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), state, X)
        return [leaf.shape for leaf in jax.tree.leaves(backward) if leaf.size == rows * H]

    assert kept(layer) == []
    layer.experts.linear_fc1 = GroupedLoRA(layer.experts.linear_fc1, 4, rngs=nnx.Rngs(1))
    assert kept(layer) != []


class Ragged(GroupedLinear):
    """A user's layer, whose call reads rows."""

    def __call__(self, x, group_sizes, is_first_microbatch=None):
        e, k, *n = self.kernel.shape
        return jax.lax.ragged_dot(x, self.kernel[...].reshape(e, k, -1), group_sizes.sizes).reshape(-1, *n)


class Doubled(Experts):
    """A user's experts, whose call reads rows."""

    def __call__(self, x, probs, groups, is_first_microbatch=None):
        assert len(x) == groups.rows
        return 2 * super().__call__(x, probs, groups, is_first_microbatch)


@pytest.mark.costly("router1")
@pytest.mark.parametrize(
    "router",
    # As many rows as tokens, so that a wrong one of both would fit; and more.
    [
        {"score_function": "sigmoid", "topk": 1, "expert_capacity_factor": 1.0, "pad_expert_input_to_capacity": True},
        {"topk": 2, "expert_capacity_factor": 2.0, "pad_expert_input_to_capacity": True},
    ],
)
def test_calls_of_a_user_s_classes_read_rows(router):
    layer = make(router, bias=False)
    x = draw("x", (4, 16, H))
    expected = output(layer, x)
    layer.experts.linear_fc1.__class__ = Ragged
    assert_close(output(layer, x), expected, TOLERANCE["float32"])
    layer.experts.__class__ = Doubled
    assert_close(output(layer, x), 2 * expected, TOLERANCE["float32"])


def test_experts_of_a_user_s_own_read_rows():
    class Own(nnx.Module):
        alignment = 16

        def placement(self, *_):
            return None

        def __call__(self, x, probs, groups, first):
            return x * probs[:, None]

    layer = make(bias=False)
    layer.experts = Own()
    assert_close(output(layer, X), X, TOLERANCE["float32"])  # probabilities add up to 1


def test_one_program_for_all_loads():
    layer = make()
    call = jax.jit(lambda layer, x, experts: layer(x, experts=experts))
    for chosen in (0, 2):
        call(layer, X, jnp.stack([jnp.full((B, S), chosen), jnp.full((B, S), 3)], -1).astype(jnp.int32))
    assert call._cache_size() == 1


@pytest.mark.costly
def test_half_precision_and_latent_experts():
    layer = make(latent_size=16, activation="swiglu")
    assert layer.experts.linear_fc1.kernel.shape == (E, 16, 2, F)
    y = output(layer, X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    assert_close(y, output(layer, X), 4 * TOLERANCE["bfloat16"])


@pytest.mark.costly
def test_what_does_not_go_together():
    with pytest.raises(ValueError, match="one expert a token"):
        make(apply_probs_on_input=True)
    with pytest.raises(ValueError, match="shared experts have no biases"):
        make(shared_expert_intermediate_size=16)


@pytest.mark.costly
def test_experts_read_no_rows_of_padding_unless_the_caller_promises_zeros():
    """Rows of padding with nan, as a buffer of a user's own may have."""
    fc1 = GroupedLinear(2, 16, (1, 32), bias=False, rngs=nnx.Rngs(0))
    fc2 = GroupedLinear(2, 32, 16, bias=False, return_bias=True, rngs=nnx.Rngs(1))
    experts, groups = Experts(fc1, fc2, Activation("gelu")), RowGroups(sizes=jnp.array([2, 1]), rows=4)
    x, probs = jnp.ones((4, 16)), jnp.array([1.0, 1.0, 1.0, 0.0])
    expected = experts(x.at[3].set(0.0), probs, groups)
    np.testing.assert_array_equal(experts(x.at[3].set(jnp.nan), probs, groups), expected)


OUTSIDE = [-1, E, 2**31 - 1]


@pytest.mark.costly("two--1", "one--1", slow=("capacity--1", "two-4", "one-4", "capacity-4"))
@pytest.mark.parametrize("outside", OUTSIDE)
@pytest.mark.parametrize("options", [{}, {"topk": 1}, {"expert_capacity_factor": 0.5}], ids=["two", "one", "capacity"])
def test_a_token_of_a_number_that_no_expert_has_is_nan(options, outside):
    """In jit, where a number cannot be refused; the other tokens are as they were."""
    layer = make({"score_function": "sigmoid", **options}, bias=False)
    layer.eval()
    k = layer.router.options.topk
    experts = jnp.broadcast_to(jnp.arange(k, dtype=jnp.int32) + 1, (B, S, k))
    call = jax.jit(lambda layer, x, experts: layer(x, experts=experts))
    want = np.array(call(layer, X, experts))
    found = np.asarray(call(layer, X, experts.at[1, 3, 0].set(outside)))
    assert np.isnan(found[1, 3]).all()
    if "expert_capacity_factor" in options:  # the token may have taken another one's room
        assert np.isfinite(np.delete(found.reshape(B * S, H), S + 3, axis=0)).all()
        return
    want[1, 3] = np.nan
    np.testing.assert_array_equal(found, want)


@pytest.mark.costly("-1")
@pytest.mark.parametrize("outside", OUTSIDE)
def test_a_known_number_that_no_expert_has_is_refused(outside):
    experts = jnp.zeros((B, S, 2), jnp.int32).at[1, 3, 0].set(outside)
    with pytest.raises(ValueError, match=rf"numbers from 0 to num_experts - 1 = 3, got {outside}"):
        make()(X, experts=experts)
