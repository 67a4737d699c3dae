"""Tests against Transformer Engine itself, in its pure-JAX mode on CPU (NVTE_JAX_CUSTOM_CALLS=false).

Eight CPU devices do no harm; where TE asks all of them for their capability, see `one_device_answers`.
"""

import importlib.util

import pytest

if importlib.util.find_spec("transformer_engine") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def one_device_answers(monkeypatch):
    """`te.autocast` asks every local device for its capability; without a GPU only number 0 gets an answer."""
    import transformer_engine.jax.quantize as te_quantize  # not above: it may not be installed

    modes = (te_quantize.ScalingMode.DELAYED_TENSOR_SCALING, te_quantize.ScalingMode.CURRENT_TENSOR_SCALING)
    answers = {mode: te_quantize.helper.is_scaling_mode_supported(mode, gpu_id=0) for mode in modes}
    monkeypatch.setattr(te_quantize.helper, "_is_scaling_mode_supported", {m: ok for m, (ok, _) in answers.items()})
    monkeypatch.setattr(te_quantize.helper, "_reason_for_no_scaling_mode", {m: why for m, (_, why) in answers.items()})
