"""Saving and restoring: what comes back, on which mesh, and what is refused."""

from __future__ import annotations

import errno
import gc
import shutil
import tempfile
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from orbax.checkpoint import v1 as ocp

from jax_te.checkpoint import TrainCheckpointer
from jax_te.checkpoint import checksums as checksums_module
from jax_te.checkpoint import restore as restore_module
from jax_te.checkpoint.checksums import checksums
from jax_te.checkpoint.steps import REMOVED
from jax_te.checkpoint.tree import FORMAT, named_leaves, nest, records
from jax_te.errors import CheckpointMismatchError
from jax_te.training import abstract_train_state, create_train_state
from tests.support.numerics import without_type_checker


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


KEYS = [
    "a/b",
    "a.b",
    "a%2Fb",
    "mlp/~/linear_0",
    "",
    ".",
    "..",
    "/",
    "a\\b",
    "new\nline",
    "ü",
    "\0",
    "\ud800",
    "x" * 300,
]


def test_a_key_may_contain_any_separator(tmp_path):
    """Also beside the nested keys that it would be without an escape."""
    state = {key: jnp.full(2, float(number)) for number, key in enumerate(KEYS)} | {"a": {"b": jnp.ones(3)}}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        assert bits(checkpointer.restore(state)[0]) == bits(state)


def test_a_model_whose_layers_have_separators_in_their_names(tmp_path):
    class Parts(nnx.Module):
        def __init__(self, rngs):
            self.parts = nnx.Dict({"enc/dec": nnx.Linear(2, 3, rngs=rngs), "enc.dec": nnx.Linear(2, 2, rngs=rngs)})

    tx = optax.adam(0.1)
    state = create_train_state(Parts, tx, key=jax.random.key(0))
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        assert bits(checkpointer.restore(abstract_train_state(Parts, tx))[0]) == bits(state)
        assert bits(checkpointer.restore_parameters(state.params)[0]) == bits(state.params)


WIDE = {
    "int64": [2**40 + 7, -1],
    "uint64": [2**64 - 1, 0],
    "float64": [1 / 3, 1e300],
    "complex128": [1 / 3 + 1j / 7, 2.0],
}


@pytest.mark.parametrize("dtype", WIDE)
def test_arrays_of_64_bits_come_back_as_they_were(tmp_path, dtype):
    """As arrays of NumPy, where JAX has none, and with checksums of all their bits."""
    state = {"a": np.array(WIDE[dtype], dtype), "scalar": np.array(WIDE[dtype][0], dtype)}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        for wanted in (state, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)):
            restored, _, _ = checkpointer.restore(wanted)
            assert bits(restored) == bits(state)
        kept, _, _ = checkpointer.restore(state | {"more": state["a"]}, allow={"missing"})
        assert bits(kept["more"]) == bits(state["a"])
    high, low = (checksums({("a",): np.array([2**40 * high + 7], np.int64)}) for high in (1, 2))
    assert high != low


def test_layers_of_64_bits_are_stacked_and_cast_from_64_bits(tmp_path):
    """The value lies just above the middle of two of fp32, to which a value of fp32 itself would be rounded down."""
    value = 1.0 + 2.0**-24 + 2.0**-50
    state = {"params": {"0": {"w": np.array([value])}, "1": {"w": np.array([1 / 3])}}}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        stacked, _, _ = checkpointer.restore({"params": {"w": np.zeros((2, 1))}})
        assert bits(stacked["params"]["w"]) == bits(np.array([[value], [1 / 3]]))
        described = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), state)
        cast, _, _ = checkpointer.restore(described, allow={"cast"})
        assert bits(cast) == bits(jax.tree.map(lambda leaf: leaf.astype(np.float32), state))


def test_a_large_array_of_numpy_has_the_checksum_of_an_array_of_jax(monkeypatch):
    values = np.arange(1000, dtype=np.float32)
    expected = checksums({("a",): jnp.asarray(values)})
    monkeypatch.setattr(checksums_module, "SMALL", 64)
    assert checksums({("a",): values}) == expected


def test_an_array_in_the_byte_order_of_another_machine_is_refused(tmp_path):
    with TrainCheckpointer(tmp_path) as checkpointer, pytest.raises(TypeError, match=r"a has dtype >f4, .* to float32"):
        checkpointer.save({"a": np.ones(2, ">f4")}, None, 1)


def test_a_key_goes_into_no_key_of_another_implementation(tmp_path):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": jax.random.key(3, impl="rbg")}, None, 1)
        with pytest.raises(CheckpointMismatchError, match="a is a key of rbg there, of unsafe_rbg here"):
            checkpointer.restore({"a": jax.random.key(0, impl="unsafe_rbg")})


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


def test_every_kth_and_the_best_are_kept_too(tmp_path):
    def steps():
        return sorted(int(path.name) for path in tmp_path.iterdir())

    many = {"keep": 1, "keep_every": 10, "keep_best": 1}
    with TrainCheckpointer(tmp_path, **many) as checkpointer:
        for step, loss in ((1, 0.5), (10, 0.9), (11, 0.2), (12, float("nan")), (13, 0.3)):
            checkpointer.save(make_state(step), {"at": step}, step, metrics={"loss": jnp.float32(loss), "other": step})
    assert steps() == [10, 11, 13]
    with TrainCheckpointer(tmp_path, **many) as checkpointer:
        with pytest.raises(ValueError, match=r"kept by 'loss'; give it in metrics, got \['accuracy'\]"):
            checkpointer.save(make_state(), None, 14, metrics={"accuracy": 1.0})
        checkpointer.save(make_state(14), {"at": 14}, 14, metrics={"loss": 0.4})
    assert steps() == [10, 11, 14]  # the metric of step 11 is known from the disk
    with TrainCheckpointer(tmp_path, keep=1, keep_best=2, metric="loss", best="max") as checkpointer:
        checkpointer.save(make_state(15), {"at": 15}, 15, metrics={"loss": 0.1})
        assert bits(checkpointer.restore(abstract(make_state()))[0]) == bits(make_state(15))
    assert steps() == [10, 14, 15]


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


def test_other_folders_with_numbers_as_names_are_left_alone(tmp_path):
    """Those of years and of jobs, and checkpoints that another program wrote through Orbax."""
    for name in ("2021", "2024", "007"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "photo.jpg").write_text("mine")
    with ocp.training.Checkpointer(tmp_path) as other:
        other.save_checkpointables(3000, {"state": {"theirs": jnp.zeros(1)}})
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with TrainCheckpointer(tmp_path, keep=1) as checkpointer:
        assert checkpointer.latest_step() is None
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            checkpointer.restore({"a": jnp.zeros(1)})
        for step in (1, 2):
            checkpointer.save({"a": jnp.full(1, step)}, None, step)
        assert checkpointer.restore({"a": jnp.zeros(1, jnp.int32)})[2] == checkpointer.latest_step() == 2
        for taken in (2021, 3000):
            with pytest.raises(ValueError, match=f"{taken} is there, and is not a checkpoint; save in another folder"):
                checkpointer.save({"a": jnp.zeros(1)}, None, taken)
    after = sorted(str(path) for path in tmp_path.rglob("*") if tmp_path / "2" not in (path, *path.parents))
    assert after == before


def test_a_step_before_the_newest_is_refused(tmp_path):
    with TrainCheckpointer(tmp_path, keep=2) as checkpointer:
        checkpointer.save({"a": jnp.ones(1)}, None, 20)
        with pytest.raises(ValueError, match=r"step 10 comes before the newest .* of step 20, .*restore\(step"):
            checkpointer.save({"a": jnp.ones(1)}, None, 10)
        assert checkpointer.latest_step() == 20


@pytest.mark.costly("save1-3", "save0-2", "save0-3")
@pytest.mark.parametrize("keep", [2, 3])
@pytest.mark.parametrize("save", [[110, 120], [200]])
def test_a_run_that_goes_back_leaves_the_later_checkpoints(tmp_path, keep, save):
    """And goes on from its own ones, whatever is kept."""
    wanted = {"a": jax.ShapeDtypeStruct((), jnp.float32)}
    with TrainCheckpointer(tmp_path, keep=3) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save({"a": jnp.float32(step)}, None, step)
    with TrainCheckpointer(tmp_path, keep=keep) as checkpointer:
        checkpointer.restore(wanted, step=100)
        for step in save:
            checkpointer.save({"a": jnp.float32(-step)}, None, step)
    with TrainCheckpointer(tmp_path, keep=keep) as checkpointer:
        state, _, step = checkpointer.restore(wanted)
    assert (step, float(state["a"])) == (save[-1], -save[-1])
    kept = [100, *save][-keep:]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        map(str, [*kept, "200.abandoned", "300.abandoned"])
    )
    with TrainCheckpointer(tmp_path, keep=9) as checkpointer:  # one that was only looked at
        checkpointer.restore(wanted, step=kept[0])
        checkpointer.save({"a": jnp.float32(0)}, None, 400)
        assert checkpointer.latest_step() == 400
    assert (tmp_path / str(save[-1])).is_dir()


def test_parameters_are_read_without_a_change_of_what_is_saved_next(tmp_path):
    """Whether they are those of an earlier step or, after the run has gone back, the newest."""
    state, parameters = {"params": {"a": jnp.zeros(2)}}, {"a": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with TrainCheckpointer(tmp_path, keep=9) as checkpointer:
        for step in (100, 200, 300):
            checkpointer.save(state, None, step)
        assert checkpointer.restore_parameters(parameters, step=100)[1] == 100
        for taken in (150, 200):
            with pytest.raises(ValueError, match=f"step {taken} (comes before the newest|is already saved)"):
                checkpointer.save(state, None, taken)
        assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["100", "200", "300"]
        checkpointer.restore(state, step=200)
        assert checkpointer.restore_parameters(parameters)[1] == 300
        checkpointer.save(state, None, 250)
        assert checkpointer.latest_step() == 250


def test_a_save_after_close_takes_the_folder_until_the_next_close(tmp_path):
    first, second, state = TrainCheckpointer(tmp_path), TrainCheckpointer(tmp_path), {"a": jnp.ones(1)}
    first.save(state, None, 1)
    first.close()
    first.save(state, None, 2)
    with pytest.raises(OSError, match="another TrainCheckpointer, of this process, saves in this folder"):
        second.save(state, None, 3)
    first.close()
    second.save(state, None, 3)
    second.close()
    assert first.restore(state)[2] == 3


def test_a_second_one_that_saves_in_a_folder_is_told_so(tmp_path):
    first, second, state = TrainCheckpointer(tmp_path), TrainCheckpointer(tmp_path), {"a": jnp.ones(1)}
    first.save(state, None, 1)
    first.wait()
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(OSError, match="another TrainCheckpointer, of this process, saves in this folder: close it"):
        second.save(state, None, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert second.restore(state)[2] == 1  # reading is for all
    first.close()
    second.save(state, None, 2)
    second.wait()
    del second  # one that nobody closes
    gc.collect()
    with TrainCheckpointer(tmp_path) as third:
        third.save(state, None, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "3"]


def test_where_locks_are_not_seen_a_second_one_that_saves_is_told_so_too(tmp_path, monkeypatch):
    monkeypatch.setattr("jax_te.checkpoint.steps.fcntl.flock", _no_locks)
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": jnp.ones(1)}, None, 1)
        checkpointer.wait()

        def fail(*args, **options):
            raise FileExistsError(errno.EEXIST, "File exists", "2")

        monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", fail)
        checkpointer.save({"a": jnp.ones(1)}, None, 2)
        with pytest.raises(OSError, match=r"File exists.*Another program seems to save in this folder: end it, or"):
            checkpointer.wait()


def _no_locks(*_):
    raise OSError(errno.ENOTSUP, "Operation not supported")


def test_a_checkpoint_that_is_removed_while_it_is_read_is_not_damaged(tmp_path, monkeypatch):
    """The run that writes has saved a newer one."""
    state = {"a": jnp.ones(1)}
    with TrainCheckpointer(tmp_path) as writer:
        for step in (1, 2):
            writer.save(state, None, step)
    (tmp_path / "2").rename(tmp_path / "hidden")
    begin = restore_module.read_metadata

    def read(path):
        if path.name == "1":
            shutil.rmtree(tmp_path / "1")
            (tmp_path / "hidden").rename(tmp_path / "2")
        return begin(path)

    monkeypatch.setattr(restore_module, "read_metadata", read)
    with warnings.catch_warnings(), TrainCheckpointer(tmp_path) as reader:
        warnings.simplefilter("error")
        assert reader.restore(state)[2] == 2
    (tmp_path / "2").rename(tmp_path / "hidden")
    shutil.copytree(tmp_path / "hidden", tmp_path / "1")
    with TrainCheckpointer(tmp_path) as reader, pytest.raises(FileNotFoundError, match="of step 1 was removed while"):
        reader.restore(state, step=1)


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
    # The last but one is a removal that was killed.
    for name in ("2.orbax-checkpoint-tmp", "3.orbax-checkpoint-tmp-1700000000", f"0.{REMOVED}-{'a1' * 16}", "notes"):
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


@pytest.mark.costly("AxisType.Auto")
@pytest.mark.parametrize("kind", list(jax.sharding.AxisType)[:2])
def test_arrays_may_be_on_other_devices_than_the_mesh_that_is_set(tmp_path, kind, monkeypatch):
    """On some of them, on all in another order, and on one."""
    monkeypatch.setattr(checksums_module, "SMALL", 0)  # so that devices compute the checksums
    devices = np.array(jax.devices())
    meshes = [
        jax.sharding.Mesh(grid, ("x", "y"), axis_types=(kind,) * 2)
        for grid in (devices.reshape(2, 4), devices.reshape(4, 2).T, devices[2:4].reshape(1, 2))
    ]
    targets = [
        *(jax.NamedSharding(mesh, jax.P("x", "y")) for mesh in meshes),
        jax.sharding.SingleDeviceSharding(devices[3]),
    ]
    state = {str(i): jax.device_put(jnp.arange(32.0).reshape(4, 8), target) for i, target in enumerate(targets)}
    for mesh in meshes:
        with jax.set_mesh(mesh), TrainCheckpointer(tmp_path / str(meshes.index(mesh))) as checkpointer:
            checkpointer.save(state, None, 1)
            restored, _, _ = checkpointer.restore(abstract(state))
        assert bits(restored) == bits(state)
        assert [leaf.sharding for leaf in restored.values()] == targets


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
    with pytest.raises(TypeError, match="directory must be a path, got ''"):
        TrainCheckpointer("")
    for wrong in ({"keep": 0}, {"keep_every": 0}, {"keep_best": -1}, {"best": "most"}):
        with without_type_checker(), pytest.raises(ValueError, match=f"^{next(iter(wrong))} must be"):
            TrainCheckpointer(tmp_path, **wrong)
    for idle in ({"metric": "heldout_loss"}, {"best": "max"}):
        with pytest.raises(ValueError, match="give keep_best, their number, too"):
            TrainCheckpointer(tmp_path, **idle)
    with TrainCheckpointer(tmp_path / "runs") as checkpointer:
        # Without the type checker of the tests, which users do not have.
        save = TrainCheckpointer.save
        while hasattr(save, "__wrapped__"):
            save = save.__wrapped__
        for bad in (-1, 1.0, True, None, "1", "../../escaped", np.float32(1), jnp.int32(1)):
            with pytest.raises(ValueError, match=r"step must be an integer >= 0, got "):
                save(checkpointer, {"a": jnp.zeros(1)}, None, bad)
        checkpointer.save({"a": jnp.zeros(1)}, None, np.int64(0))
        assert checkpointer.latest_step() == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "runs"]
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


NAMES = [
    "exp[1]",
    "[!a]*",
    "a**b",
    "wh?t",
    " sp ace ",
    "ü-日本",
    "new\nline",
    "100%20#x",
    "'\"",
    "{a}",
    "$HOME",
    "x" * 255,
]


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_may_have_any_name(tmp_path, name):
    """Beside one that the name, read as a pattern, would mean."""
    for folder in (tmp_path / "exp1", tmp_path / name):
        with TrainCheckpointer(folder) as checkpointer:
            checkpointer.save({"params": jnp.arange(3.0) + len(folder.name)}, None, 1)
    with TrainCheckpointer(tmp_path / name) as checkpointer:
        restored, _, _ = checkpointer.restore({"params": jax.ShapeDtypeStruct((3,), jnp.float32)})
    assert restored["params"].tolist() == [len(name), len(name) + 1, len(name) + 2]


def test_a_folder_behind_a_link_and_a_relative_one(tmp_path, monkeypatch):
    (tmp_path / "target[1]").mkdir()
    (tmp_path / "link").symlink_to("target[1]")
    monkeypatch.chdir(tmp_path)
    for step, folder in enumerate(("link", "target[1]/../link", "target[1]/.")):
        with TrainCheckpointer(folder) as checkpointer:
            checkpointer.save({"a": jnp.full(2, step)}, None, step)
    with TrainCheckpointer(tmp_path / "target[1]") as checkpointer:
        assert checkpointer.restore({"a": jnp.zeros(2, jnp.int32)})[0]["a"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        ("back\\slash", "has a backslash"),
        ("latin-\udce9", "not Unicode"),
        ("x" * 256, "is too long a name"),
        ("/".join(["x" * 250] * 20), "is too long a name"),
        ("gs://bucket/run", "address of a service"),
        ("/gs/bucket/run", "address of a service"),
    ],
)
def test_a_folder_in_which_orbax_would_lose_its_files_is_refused_at_once(tmp_path, monkeypatch, folder, reason):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"checkpoints need a folder, and [^;]* {reason}[^;]*; give another one"):
        TrainCheckpointer(folder)


def test_the_first_save_is_read_back(tmp_path, monkeypatch):
    """As if the file system had lost the arrays, or Orbax written them elsewhere."""
    save = ocp.training.Checkpointer.save_checkpointables_async

    def save_and_lose(*args, **options):
        response = save(*args, **options)
        response.result()
        (tmp_path / "1" / "state" / "manifest.ocdbt").unlink()
        return response

    with TrainCheckpointer(tmp_path) as checkpointer:
        monkeypatch.setattr(ocp.training.Checkpointer, "save_checkpointables_async", save_and_lose)
        checkpointer.save({"params": jnp.ones(3)}, None, 1)
        with pytest.raises(OSError, match=r"step 1 could not be saved: .*arrays are not there.; there is no earlier"):
            checkpointer.wait()
        monkeypatch.undo()
        checkpointer.save({"params": jnp.ones(3)}, None, 1)
        assert checkpointer.latest_step() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "1.damaged"]


def test_arrays_of_every_dtype_that_orbax_stores(tmp_path):
    values = jax.random.normal(jax.random.key(0), (4, 6)) * 3.0
    dtypes = ["int4", "int2", "float4_e2m1fn", "float8_e8m0fnu", "complex64", "uint16", "int8"]
    state = {dtype: jax.lax.convert_element_type(values, dtype) for dtype in dtypes}
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(state, None, 1)
        restored, _, _ = checkpointer.restore(abstract(state))
    assert bits(restored) == bits(state)


def test_a_checksum_notices_any_one_element():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, jnp.bfloat16, jnp.float8_e5m2, np.int32, np.bool_, np.uint8):
        array = rng.normal(size=(7, 9)).astype(dtype)
        before = checksums({("a",): jnp.asarray(array)})["a"]
        raw = array.view(np.uint8)
        place = tuple(rng.integers(0, size) for size in raw.shape)
        raw[place] ^= np.uint8(1) if dtype == np.bool_ else np.uint8(1 << rng.integers(0, 8))
        assert checksums({("a",): jnp.asarray(array)})["a"] != before


CHECKED = ["float32", "bfloat16", "float16", "float8_e5m2", "int4", "float4_e2m1fn", "int32", "uint8", "complex64"]


@pytest.mark.costly("float4_e2m1fn", "complex64", "bfloat16")
@pytest.mark.wide("bfloat16", "float4_e2m1fn", "int4", "complex64")
@pytest.mark.parametrize("dtype", CHECKED)
def test_a_checksum_sees_order_and_no_mesh(dtype, monkeypatch):
    """Host and devices compute the same; an array of the same bits in another order has another."""
    array = jax.lax.convert_element_type(3.0 * jax.random.normal(jax.random.key(0), (4, 8)), dtype)

    def checksum(leaf):
        return checksums({("a",): leaf})["a"]

    others = [array[::-1], array[:, ::-1], array.T, array.reshape(8, 4).T, array[jnp.array([1, 0, 2, 3])]]
    assert len({checksum(array), *map(checksum, others)}) == 6
    kinds = [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit]
    meshes = [jax.make_mesh(shape, ("x", "y"), axis_types=(kind,) * 2) for shape in ((2, 2), (1, 4)) for kind in kinds]
    sharded = [jax.device_put(array, jax.NamedSharding(mesh, jax.P("x", "y"))) for mesh in meshes]
    small = {checksum(leaf) for leaf in (array, *sharded)}
    monkeypatch.setattr(checksums_module, "SMALL", 0)
    assert {checksum(leaf) for leaf in (array, *sharded)} == small
    assert len(small) == 1


def test_a_checksum_sees_numbers_of_opposite_sign_change_places():
    """Their words differ by 2**31, which a product with an even number would lose."""
    signs = jnp.tile(jnp.array([1.0, -1.0]), 512)
    orders = [jnp.roll(signs, 1), signs.at[:2].set(signs[1::-1]), jnp.sort(signs), signs]
    assert len({checksums({("a",): order})["a"] for order in orders}) == 4


@pytest.mark.parametrize("format_number", [FORMAT - 1, FORMAT + 1])
def test_a_checkpoint_of_another_format_is_refused(format_number, tmp_path, monkeypatch):
    with TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save({"a": jnp.zeros(1)}, None, 1)
        monkeypatch.setattr("jax_te.checkpoint.checkpointer.FORMAT", format_number)
        checkpointer.save({"a": jnp.zeros(1)}, None, 2)
        checkpointer.wait()
        monkeypatch.undo()
        with pytest.raises(ValueError, match=rf"step 2 in .* has format {format_number}, and .* format {FORMAT};"):
            checkpointer.restore({"a": jnp.zeros(1)})


def test_a_first_save_and_restore_compile_nothing(tmp_path, caplog):
    """Of small arrays, whatever their shapes: compiling a checksum for each took seconds of a run's first save."""
    state = {f"{n}": np.arange(n, dtype=np.float32).reshape(1, n) for n in range(1, 30)}
    arrays = jax.device_put(state)
    with jax.log_compiles(), TrainCheckpointer(tmp_path) as checkpointer:
        checkpointer.save(arrays, None, 1)
        restored, _, _ = checkpointer.restore(arrays)
    assert "Finished XLA compilation" not in caplog.text
    assert bits(restored) == bits(state)
