"""Saving and restoring: what comes back, on which mesh, and what is refused."""

from __future__ import annotations

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jax_te.checkpoint import TrainCheckpointer
from jax_te.checkpoint.tree import checksums, named_leaves, nest, records
from jax_te.errors import CheckpointMismatchError


def make_state(seed: int = 0):
    key = jax.random.key(seed)
    return {
        "params": nnx.State(
            {
                "layers": nnx.State(
                    {0: nnx.State({"kernel": nnx.Param(jax.random.normal(key, (8, 16)).astype(jnp.bfloat16))})}
                ),
                "scale": nnx.Param(jax.random.normal(key, (8,))),
            }
        ),
        "f8": jax.random.normal(key, (32,)).astype(jnp.float8_e4m3fn),
        "f8_grad": jax.random.normal(key, (4, 4)).astype(jnp.float8_e5m2),
        "f16": jnp.full((3,), jnp.nan, jnp.float16),
        "mask": jnp.array([True, False]),
        "rng": jax.random.key(seed + 1),
        "keys": jax.random.split(jax.random.key(seed + 2, impl="rbg"), 3),
        "step": jnp.int32(seed),
        "nothing": {},
        "none": None,
    }


def abstract(state, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), state)


def bits(tree):
    leaves = jax.tree.leaves(tree)
    plain = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in leaves]
    return [(str(x.dtype), x.shape, np.asarray(x).tobytes()) for x in plain]


def test_what_is_saved_comes_back(tmp_path):
    state = make_state()
    data = {"next_index": 7, "nested": {"a": [1, 2.5, "x", None, True]}, "large": 2**70}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, data, 10)
    with TrainCheckpointer(tmp_path) as checkpointer:
        restored, data_state, step = checkpointer.restore(abstract(state))
    assert (data_state, step) == (data, 10)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert restored["keys"].dtype == state["keys"].dtype
    assert jax.random.uniform(restored["rng"]) == jax.random.uniform(state["rng"])


def test_a_real_state_can_stand_for_its_description(tmp_path):
    state = make_state()
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 0)
        restored, data_state, _ = checkpointer.restore(make_state(3))
    assert data_state is None
    assert bits(restored) == bits(state)


def test_saving_does_not_wait_and_buffers_may_be_donated(tmp_path):
    """Each save is followed at once by a step that overwrites the buffers that were saved."""
    advance = jax.jit(lambda state: jax.tree.map(lambda leaf: leaf + 1.0, state), donate_argnums=0)
    state = {"a": jnp.zeros((256, 256)), "b": [jnp.zeros((1000,)) for _ in range(20)]}
    described = abstract(state)
    for step in range(4):
        with TrainCheckpointer(tmp_path) as checkpointer:
            saved = bits(state)
            checkpointer.save(state, None, step)
            for _ in range(3):
                state = advance(state)
            checkpointer.wait()
            restored, _, number = checkpointer.restore(described)
        assert number == step
        assert bits(restored) == saved


def test_the_newest_are_kept(tmp_path):
    with TrainCheckpointer(tmp_path, keep=2) as checkpointer:
        assert checkpointer.latest_step() is None
        for step in (1, 5, 10, 11):
            checkpointer.save(make_state(step), {"at": step}, step)
            assert checkpointer.latest_step() == step
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "11"]
    with TrainCheckpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save(make_state(12), {"at": 12}, 12)
        state, data_state, step = checkpointer.restore(abstract(make_state()))
    assert (int(state["step"]), data_state, step) == (12, {"at": 12}, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["11", "12"]


def test_nothing_is_made_before_the_first_save(tmp_path):
    folder = tmp_path / "runs" / "a"
    with TrainCheckpointer(folder) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            checkpointer.restore(abstract(make_state()))
    assert not folder.exists()
    with TrainCheckpointer(folder) as checkpointer:
        checkpointer.save(make_state(), None, 1)
    assert [path.name for path in folder.iterdir()] == ["1"]


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpointer = TrainCheckpointer("here")
    with tempfile.TemporaryDirectory() as elsewhere:
        monkeypatch.chdir(elsewhere)
        checkpointer.save(make_state(), None, 1)
        checkpointer.close()
        monkeypatch.chdir(tmp_path)
    assert (tmp_path / "here" / "1").is_dir()


def test_leftovers_of_a_killed_save_do_not_count(tmp_path):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(make_state(1), None, 1)
    for name in ("2.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1700000000", "notes"):
        (tmp_path / name / "params").mkdir(parents=True)
    (tmp_path / "4").write_text("a file, no checkpoint")
    with TrainCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.latest_step() == 1
        assert checkpointer.restore(abstract(make_state()))[2] == 1
        assert (tmp_path / "2.orbax-checkpoint-tmp").exists()  # reading changes nothing: someone else may be writing
        checkpointer.save(make_state(2), None, 2)
        assert checkpointer.latest_step() == 2
    assert not list(tmp_path.glob("*tmp*"))
    assert (tmp_path / "notes").exists()


@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_arrays_move_between_meshes(tmp_path, kind):
    types = {"auto": jax.sharding.AxisType.Auto, "explicit": jax.sharding.AxisType.Explicit}

    def sharding(shape, names, spec):
        mesh = jax.make_mesh(shape, names, axis_types=(types[kind],) * len(names))
        return jax.NamedSharding(mesh, jax.P(*spec))

    value = jax.random.normal(jax.random.key(0), (16, 24)).astype(jnp.float8_e4m3fn)
    state = {"a": jax.device_put(value, sharding((4, 2), ("x", "y"), ("x", "y"))), "rng": jax.random.key(3)}
    targets = [
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
        sharding((2, 3), ("y", "z"), ("y", "z")),
        sharding((8,), ("x",), (None, "x")),
        sharding((2, 2), ("x", "y"), ()),
    ]
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        for target in targets:
            description = {
                "a": jax.ShapeDtypeStruct((16, 24), value.dtype, sharding=target),
                "rng": abstract(state)["rng"],
            }
            restored, _, _ = checkpointer.restore(description)
            assert restored["a"].sharding.is_equivalent_to(target, 2)
            assert bits(restored) == bits(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": jnp.float32(0)}, r"step is int32\[\] there, float32\[\] here"),
        ({"f8": jnp.zeros((32,), jnp.bfloat16)}, r"f8 is float8_e4m3fn\[32\] there, bfloat16\[32\] here"),
        ({"f8": jnp.zeros((16,), jnp.float8_e4m3fn)}, r"f8 is float8_e4m3fn\[32\] there, float8_e4m3fn\[16\] here"),
        ({"more": jnp.zeros(2)}, r"more is absent there, float32\[2\] here"),
        ({"mask": None}, r"mask is bool\[2\] there, absent here"),
        ({"rng": jax.random.key(0, impl="rbg")}, r"rng is uint32\[2\] there, uint32\[4\] here"),
        (
            {"params": {"layers": {0: {"kernel": jnp.zeros((8, 16))}}, "scale": jnp.zeros((8,))}},
            r"params/layers/0/kernel is bfloat16\[8, 16\] there, float32\[8, 16\] here",
        ),
    ],
)
def test_another_structure_shape_or_dtype_is_refused(tmp_path, change, message):
    state = make_state()
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        with pytest.raises(CheckpointMismatchError, match=message):
            checkpointer.restore(abstract({**state, **change}))
        assert bits(checkpointer.restore(abstract(state))[0]) == bits(state)


def test_many_differences_are_cut_short(tmp_path):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({f"a{i}": jnp.zeros(1) for i in range(20)}, None, 1)
        with pytest.raises(CheckpointMismatchError, match=r"; and 12 more. Use the configuration it was saved with"):
            checkpointer.restore({f"a{i}": jnp.zeros(2) for i in range(20)})


def test_wrong_use(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"need a folder, and .*file is a file"):
        TrainCheckpointer(tmp_path / "file")
    with pytest.raises(ValueError, match="keep"):
        TrainCheckpointer(tmp_path, keep=0)
    with TrainCheckpointer(tmp_path) as checkpointer:
        for bad in (object(), {1: 2}, (1, 2)):
            with pytest.raises(TypeError, match="data_state must be what JSON gives back"):
                checkpointer.save({"a": jnp.zeros(1)}, bad, 1)
        checkpointer.save({"a": jnp.zeros(1)}, None, 1)
        with pytest.raises(ValueError, match="step 1 is already saved"):
            checkpointer.save({"a": jnp.zeros(1)}, None, 1)


def test_names_shapes_and_checksums():
    state = make_state()
    leaves = named_leaves(state)
    assert list(leaves)[-1] == ("step",)
    assert ("params", "layers", "0", "kernel") in leaves
    assert records(leaves)["params/layers/0/kernel"] == ["bfloat16", [8, 16]]
    assert nest(leaves)["params"]["layers"]["0"]["kernel"].shape == (8, 16)
    with pytest.raises(ValueError, match="the same name"):
        named_leaves(_Twins())


@jax.tree_util.register_pytree_with_keys_class
class _Twins:
    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey("x")
        return ((key, 1), (key, 2)), None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls()


def test_a_checksum_notices_any_one_element():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, jnp.float8_e5m2, np.int32, np.bool_, np.uint8):
        array = rng.normal(size=(7, 9)).astype(dtype)
        before = checksums({("a",): jnp.asarray(array)})["a"]
        raw = array.view(np.uint8)
        place = tuple(rng.integers(0, size) for size in raw.shape)
        raw[place] ^= np.uint8(1) if dtype == np.bool_ else np.uint8(1 << rng.integers(0, 8))
        assert checksums({("a",): jnp.asarray(array)})["a"] != before
