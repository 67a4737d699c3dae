"""The rules of a precision file, ``--precision-config``, for the precision of a model's layers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from flax import nnx

from jax_te._validation import read_text
from jax_te.layers import prepare_quantization, quantizable_modules
from jax_te.megatron import QuantizationReport, RecipeConfig, apply_quantization_config
from jax_te.megatron.quantization import parse_yaml
from jax_te.recipe import current_recipe


def read_rules(path: str | Path) -> str:
    """Return the text of a precision file, which `quantization_rules` takes.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it contains no valid rules.
    """
    # Checked here, where the file has a name; a run keeps its text only.
    with _naming(f"--precision-config {path}"):
        text = read_text(path)
        RecipeConfig.from_config_dict(parse_yaml(text, str(path)))
    return text


def quantization_rules(text: str, factory_modules: str | None = None) -> RecipeConfig:
    """Return the rules of a precision file's text, see `jax_te.megatron.RecipeConfig`.

    Args:
        text: text of the file.
        factory_modules: modules, separated by commas, whose functions the rules may name; a file alone makes no code
            run.

    Raises:
        ValueError: if it is invalid.

    >>> quantization_rules("configs: {}").matchers
    ()
    """
    with _naming("--precision-config"):
        return RecipeConfig.from_config_dict(parse_yaml(text), (factory_modules or "").split(","))


def apply_rules(model: nnx.Module, rules: RecipeConfig) -> QuantizationReport:
    """Give every layer of ``model`` its precision, and the quantizer state it then needs under the ambient recipe.

    Returns:
        The rule of each layer, and the rules that matched none.

    Raises:
        ValueError: if a rule that applies is invalid, see `apply_quantization_config`; for ``fp8_param`` and
            ``fp4_param``, which a run has for all of its layers or for none (``--fp8-param``).

    >>> from jax_te.layers import Linear
    >>> apply_rules(Linear(16, 16, rngs=nnx.Rngs(0)), quantization_rules("")).ambient
    ('',)
    """
    with _naming("--precision-config"):
        report = apply_quantization_config(model, rules)
        for path, module in quantizable_modules(model):
            for own in map(module.own_recipe, module.kernels):
                if own is not None and (own.fp8_param or own.fp4_param):
                    raise ValueError(
                        f"the rule for {path} sets {'fp8_param' if own.fp8_param else 'fp4_param'}; a run holds all "
                        "quantized kernels so, or none: leave it out and give --fp8-param"
                    )
    # The layers were built without their rules: a rule may call for state that the ambient recipe does not.
    prepare_quantization(model, current_recipe())
    return report


def rules_without_effect(report: QuantizationReport) -> str | None:
    """Return one line about the parts of a precision file without effect on a model; None if all have one.

    >>> from jax_te.layers import Linear
    >>> rules_without_effect(apply_rules(Linear(16, 16, rngs=nnx.Rngs(0)), quantization_rules("")))
    'no layer has a rule'
    """
    texts = [f"{reason}: {', '.join(names)}" for reason, names in report.without_effect().items()]
    if len(report.ambient) == len(report.modules):
        texts.insert(0, "no layer has a rule")
    return "; ".join(texts) or None


@contextlib.contextmanager
def _naming(what: str) -> Iterator[None]:
    """Turn errors about a precision file into a ValueError that names the option."""
    try:
        yield
    except (AssertionError, NotImplementedError, KeyError, TypeError, ValueError) as error:
        # The text of a KeyError is the repr of its message.
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ValueError(f"{what}: {text}") from error
