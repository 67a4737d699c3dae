import jax
import pytest
from jax.sharding import AxisType

from jax_te.config import ParallelConfig
from jax_te.sharding import make_mesh
from tests.support.numerics import without_type_checker


def test_axes_sizes_and_order():
    mesh = make_mesh(ParallelConfig(fsdp=2, context=2, tensor=2))
    assert mesh.axis_names == ("pipeline", "data", "fsdp", "expert", "context", "tensor")
    assert mesh.devices.shape == (1, 1, 2, 1, 2, 2)
    assert [device.id for device in mesh.devices.flat] == [device.id for device in jax.devices()[:8]]
    first = mesh.devices[0, 0, 0, 0, 0, 0].id
    assert mesh.devices[0, 0, 0, 0, 0, 1].id == first + 1, "tensor ranks are neighbours"
    assert mesh.devices[0, 0, 0, 0, 1, 0].id == first + 2, "context ranks are the next"
    assert mesh.devices[0, 0, 1, 0, 0, 0].id == first + 4


@pytest.mark.parametrize(("name", "kind"), [("auto", AxisType.Auto), ("explicit", AxisType.Explicit)])
def test_axis_types(name, kind):
    assert set(make_mesh(ParallelConfig(data=2), axis_type=name).axis_types) == {kind}


def test_takes_the_first_devices_or_those_given():
    assert make_mesh(ParallelConfig(tensor=2)).size == 2
    chosen = jax.devices()[4:]
    mesh = make_mesh(ParallelConfig(tensor=2), devices=chosen)
    assert list(mesh.devices.flat) == chosen[:2]


def test_too_few_devices():
    with pytest.raises(
        ValueError,
        match=r"the mesh pipeline=1, data=8, .*context=1, tensor=2 takes 16 devices, but there are 8; .*device_count",
    ):
        make_mesh(ParallelConfig(data=8, tensor=2))


def test_unknown_axis_type():
    with (
        without_type_checker(),
        pytest.raises(ValueError, match="axis_type must be one of 'auto', 'explicit', got 'manual'"),
    ):
        make_mesh(ParallelConfig(), axis_type="manual")
