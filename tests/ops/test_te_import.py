"""The import of Transformer Engine, of which a package in its place tells what is imported."""

import os
import subprocess
import sys

import pytest

TOP = """
try:
    from . import pytorch
except ImportError:
    pass
from . import jax
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "transformer_engine"
    for name, text in (("", TOP), ("jax", ""), ("pytorch", "print('PyTorch')")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "__init__.py").write_text(text)
    return tmp_path


def run(package, program):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(package), os.getcwd()]), "JAX_PLATFORMS": "cpu"}
    return subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=120
    ).stdout.split()


USE = "from jax_te.ops import explain_backend; explain_backend('dense')"


@pytest.mark.costly
def test_its_pytorch_half_stays_out(package):
    assert run(package, f"import jax_te; {USE}; import sys; print('transformer_engine.jax' in sys.modules)") == ["True"]


@pytest.mark.slow
def test_its_pytorch_half_is_found_later(package):
    assert run(package, f"import jax_te; {USE}; print('later'); import transformer_engine.pytorch") == [
        "later",
        "PyTorch",
    ]


@pytest.mark.costly
def test_who_imported_it_before_keeps_it(package):
    found = run(package, f"import transformer_engine, jax_te, sys; {USE}; print(transformer_engine.pytorch.__name__)")
    assert found == ["PyTorch", "transformer_engine.pytorch"]


@pytest.mark.slow
def test_tensorboard_imports_no_pytorch(package):
    torch = package / "torch"
    torch.mkdir()
    (torch / "__init__.py").write_text("print('torch')")
    write = f"from jax_te.metrics import MetricsLog; MetricsLog('{package}/run', writers=['tensorboard']).close()"
    assert run(package, f"{write}; print('later'); import torch") == ["later", "torch"]
