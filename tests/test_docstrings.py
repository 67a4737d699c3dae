"""Every example in a docstring of jax_te runs and gives what it says."""

import doctest
import importlib
import inspect
import pkgutil
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jax_te
from tests.support.numerics import without_type_checker

NEEDS_TE = ("jax_te.ops.te.", "jax_te.bench.peers.")  # their modules import Transformer Engine


def modules() -> list[str]:
    names = ["jax_te", *(info.name for info in pkgutil.walk_packages(jax_te.__path__, "jax_te."))]
    return [
        name
        for name in names
        if not name.endswith("__main__") and (not name.startswith(NEEDS_TE) or name.endswith(".load"))
    ]


class Runner(doctest.DocTestRunner):
    """Runs examples; an error of XLA is raised as it is, since conftest.py skips what XLA lacks on a CPU."""

    def report_unexpected_exception(self, out, test, example, exc_info):
        if isinstance(exc_info[1], jax.errors.JaxRuntimeError):
            raise exc_info[1]
        super().report_unexpected_exception(out, test, example, exc_info)


# Modules whose examples take a second or more. Other tests of the default run call what they show.
COSTLY = (
    "layers.attention.multi_latent_attention", "layers.attention.qk_clip", "layers.flax.drop_in",
    "layers.moe.experts", "layers.moe.mixture", "linen", "linen.layers", "linen.loss_scale", "linen.quantization",
    "megatron.cross_entropy", "megatron.mla_self_attention", "megatron.moe",
    "models.bert", "models.megatron_gpt", "models.stack", "models.t5",
    "ops.moe.losses", "ops.moe.permute", "ops.moe.routing",
    "quantize.block", "quantize.hadamard", "quantize.nvfp4", "quantize.observe",
    "te_pytorch.linear", "te_pytorch.transformer", "training.inspection",
)  # fmt: skip


@pytest.mark.costly(*(f"jax_te.{name}" for name in COSTLY))
@pytest.mark.parametrize("name", modules())
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    tests = [test for test in doctest.DocTestFinder(exclude_empty=True).find(module, name) if test.examples]
    output: list[str] = []
    runner = Runner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    # As a reader runs them, not as strictly as the other tests.
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        without_type_checker(),
        warnings.catch_warnings(action="default"),
    ):
        for test in tests:
            test.globs = {**test.globs, "jax": jax, "jnp": jnp, "nnx": nnx}
            runner.run(test, out=output.append)
    assert runner.failures == 0, "".join(output)


def test_public_functions_and_classes_have_docstrings():
    missing = []
    for name in modules():
        module = importlib.import_module(name)
        for attribute, value in vars(module).items():
            function = inspect.isfunction(value) and attribute.islower()
            public = not attribute.startswith("_") and (function or inspect.isclass(value))
            if public and value.__module__ == name and not (value.__doc__ or "").strip():
                missing.append(f"{name}.{attribute}")
    assert not missing
