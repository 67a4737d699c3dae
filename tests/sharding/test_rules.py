import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_te.config import ParallelConfig
from jax_te.sharding import (
    ShardingRules,
    auto_region,
    axis_ranks,
    constrain,
    current_mesh,
    logical_to_spec,
    make_mesh,
    named_sharding,
    use_rules,
)
from tests.support.numerics import without_type_checker

MESH = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"))
ALL = ParallelConfig(data=2, fsdp=2, tensor=2)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        (("batch", "sequence", "hidden"), P(("data", "fsdp"), None, None)),
        (("batch", "sequence_parallel", "hidden"), P(("data", "fsdp"), "tensor", None)),
        (("batch", "sequence", "ffn"), P(("data", "fsdp"), None, "tensor")),
        (("batch", "sequence", "heads", None), P(("data", "fsdp"), None, "tensor", None)),
        (("fsdp", "components", "heads"), P("fsdp", None, "tensor")),
        (("ffn", "fsdp"), P("tensor", "fsdp")),
        (("ffn_fsdp", None), P(("tensor", "fsdp"), None)),
        (("heads_fsdp", None), P(("tensor", "fsdp"), None)),
        (("vocab", "fsdp"), P("tensor", "fsdp")),
        (("norm",), P(None)),
        ((), P()),
    ],
)
def test_logical_to_spec(axes, spec):
    assert logical_to_spec(axes, MESH) == spec


def test_the_context_axis_splits_the_sequence_and_tensor_ranks_split_it_further():
    mesh = make_mesh(ParallelConfig(fsdp=2, context=2, tensor=2))
    whole = jnp.arange(8)
    positions = {}
    for name in ("sequence", "sequence_parallel"):
        sharding = named_sharding((name,), mesh)
        parts = sharding.devices_indices_map((8,))
        positions[name] = {device.id: set(whole[index].tolist()) for device, (index,) in parts.items()}
    for rank in range(0, 8, 2):  # a tensor group
        together = positions["sequence_parallel"][rank] | positions["sequence_parallel"][rank + 1]
        assert positions["sequence"][rank] == positions["sequence"][rank + 1] == together
    assert positions["sequence"][0] == {0, 1, 2, 3}
    with jax.set_mesh(mesh):
        assert (axis_ranks("sequence"), axis_ranks("sequence_parallel"), axis_ranks("batch")) == (2, 4, 2)


def test_axes_that_the_mesh_lacks_are_left_out():
    mesh = AbstractMesh((2,), ("data",))
    assert logical_to_spec(("batch", "ffn"), mesh) == P("data", None)


def test_axes_of_size_1_are_left_out():
    mesh = AbstractMesh((2, 1, 1, 4), ("data", "fsdp", "context", "tensor"))
    assert logical_to_spec(("batch", "sequence", "ffn"), mesh) == P("data", None, "tensor")
    assert logical_to_spec(("fsdp", "ffn"), mesh) == P(None, "tensor")
    with pytest.raises(ValueError, match=r"'batch' and 'fsdp' .* mesh axis 'fsdp'"):
        logical_to_spec(("batch", "fsdp"), mesh)  # it would be wrong on a larger mesh


def test_two_dimensions_on_one_mesh_axis():
    with pytest.raises(
        ValueError,
        match=r"logical axes 'heads' and 'ffn' .* both map to mesh axis 'tensor'; .*change one of the two rules",
    ):
        logical_to_spec(("heads", "ffn"), MESH)
    with pytest.raises(ValueError, match=r"'batch' and 'fsdp' .* mesh axis 'fsdp'"):
        logical_to_spec(("batch", "fsdp"), MESH)


def test_unknown_logical_axis():
    with pytest.raises(
        ValueError,
        match=r"unknown logical axis 'mlp' .* allowed: batch, components, expert, ffn, ffn_fsdp, ffn_fsdp_replicas, "
        "fsdp, fsdp_replicas, heads, heads_fsdp, heads_fsdp_replicas, hidden, norm, replicas, sequence, "
        "sequence_parallel, tokens, vocab",
    ):
        logical_to_spec(("mlp",), MESH)


def test_rules():
    rules = ShardingRules(sequence=("tensor",))
    assert logical_to_spec(("batch", "sequence"), MESH, rules) == P(("data", "fsdp"), "tensor")
    with use_rules(rules):
        assert logical_to_spec(("batch", "sequence"), MESH) == P(("data", "fsdp"), "tensor")
    assert logical_to_spec(("batch", "sequence"), MESH) == P(("data", "fsdp"), None)
    for wrong in ("tensor", ["tensor"], (1,), None):
        with without_type_checker(), pytest.raises(TypeError, match="rule 'ffn' must be a tuple of mesh axis names"):
            ShardingRules(ffn=wrong)
    with (
        without_type_checker(),
        pytest.raises(TypeError, match="rules must be a ShardingRules"),
        use_rules({"ffn": ()}),
    ):
        pass


def test_a_rule_with_an_axis_that_no_mesh_of_ours_has():
    message = r"rule of logical axis 'ffn' has mesh axis 'tensr', and the mesh's axes are data, fsdp, tensor; name one"
    with use_rules(ShardingRules(ffn=("tensr",))):
        for axes in (("ffn",), ("ffn_fsdp",)):
            with pytest.raises(ValueError, match=message.replace("'ffn'", repr(axes[0]))):
                logical_to_spec(axes, MESH)
        with jax.set_mesh(make_mesh(ALL)), pytest.raises(ValueError, match="has mesh axis 'tensr'"):
            constrain(jnp.ones((4, 4)), ("batch", "ffn"))
        assert logical_to_spec(("batch", "heads"), MESH) == P(("data", "fsdp"), "tensor")
    own = AbstractMesh((2, 4), ("rows", "model"))
    rules = ShardingRules(ffn=("model",), batch=("rows", "data"))
    assert logical_to_spec(("batch", "ffn", "heads"), own, rules) == P("rows", "model", None)


def test_rules_are_part_of_the_jit_cache_key():
    traces = []
    mesh = make_mesh(ALL)

    @jax.jit
    def f(x):
        traces.append(None)
        return constrain(x, ("batch", "sequence"))

    x = jnp.ones((4, 4))
    with jax.set_mesh(mesh):
        plain = f(x)
        with use_rules(ShardingRules(sequence=("tensor",))):
            split = f(x)
        f(x)
    assert len(traces) == 2
    assert plain.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"))), 2)
    assert split.sharding.is_equivalent_to(NamedSharding(mesh, P(("data", "fsdp"), "tensor")), 2)


def test_current_mesh():
    assert current_mesh() is None
    with jax.set_mesh(make_mesh(ALL)):
        assert current_mesh().axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert current_mesh() is None


def test_constrain_without_a_mesh_or_axes_is_the_identity():
    x = jnp.ones((4, 4))
    assert constrain(x, ("batch", "hidden")) is x
    with jax.set_mesh(make_mesh(ALL)):
        assert constrain(x, None) is x
    with pytest.raises(ValueError, match=r"1 logical axes \('batch',\) for an array of shape \(4, 4\)"):
        constrain(x, ("batch",))


@pytest.mark.parametrize("axis_type", ["auto", "explicit"])
@pytest.mark.parametrize("jit", [False, True])
def test_constrain(axis_type, jit):
    mesh = make_mesh(ALL, axis_type=axis_type)
    x = jnp.arange(32.0).reshape(4, 8)
    with jax.set_mesh(mesh):

        def f(x):
            return constrain(x, ("batch", "ffn"))

        y = (jax.jit(f) if jit else f)(x)
        assert y.sharding.is_equivalent_to(named_sharding(("batch", "ffn"), mesh), 2)
        if axis_type == "explicit":
            assert jax.typeof(y).sharding.spec == P(("data", "fsdp"), "tensor")
    assert jnp.array_equal(jax.device_get(y), x)


def test_constrain_is_differentiable_on_explicit_axes():
    with jax.set_mesh(make_mesh(ALL, axis_type="explicit")):
        x = jnp.arange(32.0).reshape(4, 8)
        gradient = jax.jit(jax.grad(lambda x: jnp.sum(constrain(x * 3.0, ("batch", "ffn")))))(x)
    assert jax.device_get(gradient).tolist() == [[3.0] * 8] * 4


def test_constrain_leaves_manual_axes_alone():
    mesh = make_mesh(ALL)
    f = jax.shard_map(
        lambda x: constrain(x, ("batch", "ffn")),
        mesh=mesh,
        in_specs=P(("data", "fsdp"), "tensor"),
        out_specs=P(("data", "fsdp"), "tensor"),
    )
    x = jnp.arange(32.0).reshape(4, 8)
    assert jnp.array_equal(jax.device_get(jax.jit(f)(x)), x)


def test_constrain_inside_a_partly_manual_region():
    mesh = make_mesh(ALL)
    f = jax.shard_map(
        lambda x: constrain(x * 2.0, ("batch", "ffn")),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        axis_names={"data"},
    )
    x = jnp.arange(32.0).reshape(4, 8)
    assert jnp.array_equal(jax.device_get(jax.jit(f)(x)), x * 2.0)


def test_constrain_on_a_mesh_of_mixed_axis_types():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto))
    x = jnp.arange(32.0).reshape(4, 8)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, ("batch", "ffn")))(x)
        assert jax.typeof(y).sharding.spec[0] == "data"
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "tensor")), 2)


def test_auto_region_is_the_function_itself_without_explicit_axes():
    def f(x):
        return x

    assert auto_region(f, None) is f
    with jax.set_mesh(make_mesh(ALL)):
        assert auto_region(f, None) is f


def test_auto_region_on_explicit_axes():
    def f(x):
        assert current_mesh() is None or all(kind == AxisType.Auto for kind in current_mesh().axis_types)
        return {"double": x * 2.0, "rows": jnp.sum(x, axis=1)}

    x = jnp.arange(32.0).reshape(4, 8)
    with jax.set_mesh(make_mesh(ALL, axis_type="explicit")):
        out = auto_region(f, {"double": ("batch", "ffn"), "rows": ("batch",)})(x)
        assert jax.typeof(out["double"]).sharding.spec == P(("data", "fsdp"), "tensor")
        assert jax.typeof(out["rows"]).sharding.spec == P(("data", "fsdp"))
        gradient = jax.grad(
            lambda x: jnp.sum(auto_region(f, {"double": ("batch", "ffn"), "rows": ("batch",)})(x)["double"])
        )(x)
        with pytest.raises(ValueError, match="pass out_axes, for example"):
            auto_region(f, None)
    assert jnp.array_equal(jax.device_get(out["double"]), x * 2.0)
    assert set(jax.device_get(gradient).ravel().tolist()) == {2.0}
