"""Where restored arrays go, which checkpoint they are of, and what is read for them."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import DelayedScaling, ParallelConfig, autocast, make_mesh
from jax_te.checkpoint import TrainCheckpointer
from jax_te.errors import CheckpointMismatchError
from jax_te.layers import Linear
from jax_te.sharding import shardings_of
from jax_te.training import abstract_train_state, create_train_state
from tests.support.meshes import MODES, use_mesh
from tests.support.storage import bytes_read
from tests.support.toy import Toy, assert_same, values

TX = optax.adam(0.1)


def random_state(model=Toy):
    """A train state whose optimizer state is random, and so does not compress."""
    state = create_train_state(model, TX, key=jax.random.key(1))
    draw = iter(jax.random.split(jax.random.key(2), 99))
    filled = jax.tree.map(
        lambda leaf: jax.random.normal(next(draw), leaf.shape) if leaf.ndim > 1 else leaf, state.opt_state
    )
    return replace(state, opt_state=filled)


def plain(state):
    """Shapes and dtypes alone, as `jax.eval_shape` gives them without a mesh."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with a train state of a `Toy` at steps 1 and 2, and that of step 2."""
    folder = tmp_path_factory.mktemp("saved")
    state = random_state()
    with TrainCheckpointer(folder) as checkpointer:
        checkpointer.save(replace(state, step=jnp.int32(1)), {"at": 1}, 1)
        checkpointer.save(replace(state, step=jnp.int32(2)), {"at": 2}, 2)
    return folder, replace(state, step=jnp.int32(2))


@pytest.mark.costly("auto", slow=["no mesh"])
@pytest.mark.parametrize("mode", MODES)
def test_shapes_alone_go_where_their_logical_axes_put_them(saved, mode):
    folder, state = saved
    with use_mesh(mode), TrainCheckpointer(folder) as checkpointer:
        restored, _, _ = checkpointer.restore(plain(state))
        expected = abstract_train_state(Toy, TX)
        assert [x.sharding for x in jax.tree.leaves(restored)] == [x.sharding for x in jax.tree.leaves(expected)]
        # The optimizer's state of a parameter, too, is on each device in parts alone.
        kernel = restored.opt_state[0].mu["w_in"].get_value()
        assert kernel.addressable_shards[0].data.shape == ((16, 32) if mode == "no mesh" else (8, 16))
    assert [x.tobytes() for x in values(restored)] == [x.tobytes() for x in values(state)]


@pytest.mark.parametrize("mode", MODES[1:])
def test_shapes_traced_under_the_mesh_name_no_devices(saved, mode):
    """On an Auto mesh their specs are empty, whatever the axes; on an Explicit one those of the axes."""
    folder, _ = saved
    with use_mesh(mode), TrainCheckpointer(folder) as checkpointer:
        params = nnx.state(nnx.eval_shape(lambda: Toy(nnx.Rngs(0))), nnx.Param)
        restored, _ = checkpointer.restore_parameters(params)
        mesh = jax.sharding.get_mesh()
        assert [x.sharding for x in jax.tree.leaves(restored)] == shardings_of(params, mesh)
        given = jax.NamedSharding(mesh.abstract_mesh, jax.P("data"))
        wanted = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=given), params)
        wanted["bias"] = params["bias"]
        restored, _ = checkpointer.restore_parameters(wanted)
        assert restored["w_in"].get_value().sharding.is_equivalent_to(jax.NamedSharding(mesh, jax.P("data")), 2)


def test_a_sharding_that_is_given_counts_and_axes_that_do_not_divide_are_refused(saved):
    folder, state = saved
    with jax.set_mesh(make_mesh(ParallelConfig(tensor=8))), TrainCheckpointer(folder) as checkpointer:
        one = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
        restored, _, _ = checkpointer.restore(one)
        assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(restored)} == {1}
        odd = nnx.State({"w": nnx.Param(jax.ShapeDtypeStruct((3, 12), jnp.float32), logical_axes=("fsdp", "ffn"))})
        with pytest.raises(ValueError, match=r"params/w of shape \(3, 12\): dimension 1 \('ffn'\) does not divide"):
            checkpointer.restore_parameters(odd)


def test_a_chosen_step(saved):
    folder, state = saved
    with TrainCheckpointer(folder) as checkpointer:
        for step in (1, np.int64(2), None):
            restored, data, found = checkpointer.restore(plain(state), step=step)
            assert found == (step or 2)
            assert (int(restored.step), data) == (found, {"at": found})
        assert checkpointer.restore_parameters(plain(state.params), step=1)[1] == 1
        with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 3, but of: 1, 2"):
            checkpointer.restore(plain(state), step=3)
        with pytest.raises(ValueError, match="step must be an integer >= 0, got -1"):
            checkpointer.restore(plain(state), step=-1)


def test_parameters_alone_are_all_that_is_read(tmp_path):
    def build(rngs):
        return Linear(256, 512, rngs=rngs)

    state = random_state(build)
    size = 4 * 256 * 512
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        checkpointer.wait()
        with bytes_read() as everything:
            checkpointer.restore(plain(state))
        assert everything[0] > 2.7 * size  # of three: parameters and two moments
        for wanted in (state.params, nnx.state(nnx.eval_shape(lambda: build(nnx.Rngs(0))), nnx.Param)):
            with bytes_read() as some:
                params, _ = checkpointer.restore_parameters(plain(wanted))
            assert size < 1.2 * some[0] < 1.3 * size
            assert_same(params, state.params)
        with bytes_read() as some:
            part, _, _ = checkpointer.restore(plain(replace(state, opt_state=())), allow={"unexpected"})
        assert some[0] < 1.1 * size
        assert_same(part.model(jnp.ones((2, 256))), state.model(jnp.ones((2, 256))))


@pytest.mark.parametrize("allow", [set(), {"missing"}])
def test_an_array_of_another_shape_is_not_missing(tmp_path, allow):
    """Neither advised nor kept as given."""
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": jnp.zeros(2)}, None, 1)
        with pytest.raises(CheckpointMismatchError, match=r"a is float32\[2\] there, float32\[3\] here") as caught:
            checkpointer.restore({"a": jnp.ones(3)}, allow=allow)
    assert "missing" not in str(caught.value)


def test_what_is_left_out_must_be_allowed_and_what_is_missing_is_not(tmp_path):
    with autocast(DelayedScaling(amax_history_len=2)):
        state = create_train_state(lambda rngs: Linear(16, 16, rngs=rngs), TX, key=jax.random.key(1))
    fewer, more = nnx.State({"kernel": state.params["kernel"]}), nnx.State({**state.params, "extra": jnp.zeros(2)})
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        with pytest.raises(CheckpointMismatchError, match="params/bias"):
            checkpointer.restore_parameters(plain(fewer))
        assert_same(checkpointer.restore_parameters(plain(fewer), allow={"unexpected"})[0], fewer)
        for allow in ((), {"unexpected"}):
            with pytest.raises(CheckpointMismatchError, match="params/extra"):
                checkpointer.restore_parameters(plain(more), allow=allow)
        with pytest.raises(CheckpointMismatchError, match="quantizers/quantizers/x/scale"):
            checkpointer.restore(plain(replace(state, quantizers=nnx.State({}))))
        with pytest.raises(ValueError, match=r"allow must be a set of names among .*, got .'all'"):
            checkpointer.restore(plain(state), allow={"all"})
        with pytest.raises(TypeError, match=r"allow must be a collection .each text., got 'unexpected'"):
            checkpointer.restore(plain(state), allow="unexpected")


def test_a_restore_that_fills_no_parameter_says_so(tmp_path, caplog):
    def of(name):
        made = lambda rngs: nnx.Dict({name: nnx.Linear(2, 2, rngs=rngs)})  # noqa: E731
        return create_train_state(made, TX, key=jax.random.key(0))

    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(of("encoder"), None, 1)
        checkpointer.restore(of("encoder"), allow={"missing", "unexpected"})
        assert "none of the state's parameters" not in caplog.text
        checkpointer.restore(of("enc"), allow={"missing", "unexpected"})
    assert "has none of the state's parameters, which all keep their values: params/" in caplog.text
