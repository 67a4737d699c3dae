"""The configuration of a preset, or of a ``config.json``, that ``jax-te bench`` measures, and its sizes."""

from __future__ import annotations

from jax_te.bench import Sizes
from jax_te.cli.memory import check_fits, least_memory
from jax_te.cli.model_config import described_form, read_model_config
from jax_te.cli.options import POLICIES
from jax_te.cli.resolve import new_config
from jax_te.cli.run_config import RunConfig
from jax_te.models import GPTModel
from jax_te.sharding import make_mesh


def read_decoder(path: str, command: str) -> str:
    """Return the text of the ``config.json`` of ``--model-config``, of a decoder.

    Args:
        path: path of the file, or of its folder.
        command: name of the command that is for decoders alone.

    Raises:
        ValueError: for a file that cannot be read, and for an unsupported model or one of another kind.
    """
    text = read_model_config(path)
    kind = described_form(text)[0]
    if kind.model is not GPTModel:
        raise ValueError(f"{command} is for decoders, and --model-config is of a {kind.model_type}; give a decoder's")
    return text


def preset_config(preset: str, recipe: str, way: str = "none", **fields: object) -> RunConfig:
    """Return the configuration of a preset in bf16 under a recipe.

    Args:
        preset, recipe: names of a preset and a recipe. The preset is not read if there is a ``model_config``.
        way: way of recomputation, as `jax_te.cli.bench.options.recompute` reads it.
        fields: other fields of `RunConfig`. None: the preset's.

    Raises:
        ValueError: for conflicting values.
    """
    # The dtype of a GPU, also where this runs on a CPU.
    given: dict[str, object] = {"preset": preset, "recipe": recipe, "params_dtype": "bfloat16"}
    given["dropout"] = 0.0  # a config.json may have rates, and the peers are measured without
    given |= {name: value for name, value in fields.items() if value is not None}
    if "model_config" in given:
        del given["preset"]
    if way in POLICIES:
        given |= {"recompute_granularity": "full", "recompute_policy": way}
    elif ":" in way:
        method, _, count = way.partition(":")
        given |= {"recompute_granularity": "full", "recompute_method": method, "recompute_num_layers": int(count)}
    elif way != "none":
        given |= {"recompute_granularity": "selective", "recompute_modules": way}
    return new_config(given)


def check_parameters_fit(config: RunConfig) -> None:
    """Raise ValueError, before any allocation, for a model whose parameters exceed the memory."""
    sizes = config.parallel_config()
    devices = 1 if sizes is None else sizes.num_devices
    check_fits(least_memory(config), devices, "lower --num-layers or --vocab-size, or take a smaller --preset")


def sizes_of(config: RunConfig) -> Sizes:
    """Return the sizes of a configuration's train step."""
    parallel = config.parallel_config()
    return Sizes(
        config=config.transformer_config(),
        vocabulary=config.vocab_size,
        batch=config.batch_size,
        sequence=config.seq_len,
        microbatches=config.microbatches,
        mesh=None if parallel is None else make_mesh(parallel),
        distributed_optimizer=config.distributed_optimizer,
        tied=config.tie_embeddings,
        positions=config.position_embedding,
    )
