"""Calls with one wrong argument: each ends in a clear error, or has a stated meaning; refused, it changes nothing."""

from __future__ import annotations

import inspect
import os
import pickle
import random
import re
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jax_te import checkpoint, data, layers, linen, megatron, models, ops, quantize, te_pytorch, training
from jax_te._validation import brief
from jax_te.interop.huggingface import save_huggingface
from jax_te.interop.megatron import load_megatron, read_megatron, save_megatron
from jax_te.recipe import Float8CurrentScaling, autocast
from jax_te.remat import remat, selective_recompute
from jax_te.training.pipeline import split_layers
from tests.support.bad_values import VALUES, allows, calls_of
from tests.support.numerics import NO_DROPOUT, without_type_checker
from tests.support.public import public_callables
from tests.support.valid_calls import CALLS, CONFIG, IDS, KERNEL, KEY, MODEL, Call, X

NAN, INF = float("nan"), float("inf")
ARRAYS: list[Any] = [
    jnp.float32(1), jnp.int32(1), X, X[0], X[0, 0], X[..., None], X[:, :0], X[..., :15], X.astype(jnp.int32),
    X.astype(jnp.complex64), X.astype(bool), jnp.asarray(np.asarray(X, np.float16)), np.asarray(X),
    np.ones(2, np.float64), IDS, IDS.astype(jnp.float32), KERNEL, KEY, jnp.ones((2, 4, 2, 8), jnp.int8),
    jnp.array([0, 3, 2, 4]), np.array(["no"]),
    np.array([object()]), np.str_("no"), np.bool_(True), np.int32(-1), np.int64(3), np.float32(0.5), np.float32("nan"),
]  # fmt: skip
WRONG: list[Any] = [
    *ARRAYS, "no", "", b"1", None, True, False, 0, 1, -1, 2**70, 1.5, -0.5, NAN, INF, 1j, (), [], {}, ["no"],
    {"no": 1}, {1}, (1, 2), object(), object, len, slice(1), Path("not/there"), "not/there", "float8_e4m3fn", "int8",
    jnp.int4, jnp.float8_e5m2,
]  # fmt: skip

# Public functions and methods whose arguments `checked` does not look at, and why.
UNCHECKED = {
    "any pytree, whose leaves the function itself looks at": [
        "layers.lora_labels", "megatron.float16_to_fp32", "quantize.as_float32", "quantize.merge_quantizers",
        "quantize.with_max_gradients", "training.LossScale.unscale", "training.global_batch",
        "training.weight_decay_mask",
    ],
    "anything, which the function itself looks at": [
        "linen.quantization_report", "metrics.peak_flops",
    ],
    "arguments of a function or module that it calls": [
        "megatron.Float16Module.set_input_tensor", "megatron.GraphableMegatronModule.__call__",
        "megatron.GraphableMegatronModule.forward", "megatron.TransformerLayer.__call__",
        "models.MegatronGPTModel.__call__",
    ],
    "without effect": ["models.MegatronGPTModel.set_input_tensor", "megatron.Recipe.supports"],
    "interfaces, whose implementations are others'": [
        "quantize.Counting", "metrics.MetricsWriter", "metrics.Progress", "megatron.Matcher", "quantize.Quantizer",
        "layers.AttentionCore", "data.Objective",
    ],
    "steps of a layer's own call, which subclasses override": [
        "layers.QuantizableModule", "layers.TrainingMode", "layers.DotGeneral.stack_shape",
        "layers.DotGeneral.layer_path", "layers.GroupedLinear.axes_of", "layers.GroupedLinear.kernel_quantizer",
        "layers.MixtureOfExperts",
        "layers.LayerNormLinear.operand", "layers.LayerNormMLP.axes_of", "layers.Linear.axes_of",
        "layers.Linear.operand", "layers.Linear.output_axes",
    ],
    "JAX's own protocol": ["megatron.RNGStatesTracker.tree_unflatten", "training.DynamicLossScale.tree_unflatten"],
}  # fmt: skip
EXEMPT = [name for names in UNCHECKED.values() for name in names]


def hints_of(function: Any) -> dict[str, Any]:
    """Annotations of a function's named arguments."""
    hints, parameters = get_type_hints(function), inspect.signature(function).parameters
    return {
        name: hint for name, hint in hints.items() if name in parameters and parameters[name].kind.name != "VAR_KEYWORD"
    }


def is_exempt(name: str) -> bool:
    return name in EXEMPT or name.rsplit(".", 1)[0] in EXEMPT


CHECKED = {
    name: function
    for name, function in public_callables().items()
    # Linen's modules make their NNX modules, whose calls check.
    if not is_exempt(name)
    and not name.startswith("linen.")
    and {*inspect.signature(function).parameters} - {"self", "cls"}
}


@pytest.mark.parametrize("name", CHECKED)
def test_no_body_runs_before_a_refusal(name: str) -> None:
    """One argument is given, and it is wrong: the refusal comes before Python misses the others."""
    function, refused = CHECKED[name], 0
    parameters = inspect.signature(function).parameters
    with without_type_checker():
        for argument, hint in hints_of(function).items():
            for value in [value for value in VALUES if not allows(hint, value)][:3]:
                by_place = parameters[argument].kind.name in ("POSITIONAL_ONLY", "VAR_POSITIONAL")
                before = [None] * list(parameters).index(argument) if by_place else []
                given = {} if by_place else {argument: value}
                with (
                    calls_of(function) as entered,
                    pytest.raises((ValueError, TypeError), match=rf"\b{argument}\b") as caught,
                ):
                    function(*before, *([value] if by_place else []), **given)
                assert "missing" not in str(caught.value), (argument, value)
                assert entered == [], (argument, value)
                refused += 1
    assert refused


WITHOUT_A_CALL = {
    "checkpoint.TrainCheckpointer.share_heartbeats": "heartbeats of several processes",
    "metrics.kernel_times": "a trace of a GPU",
    "models.run_layers": "layers and arrays that a model puts together",
    "remat.selective_recompute": "names alone, which may be any number",
    "sharding.Network.measured": "collectives of several devices, which take seconds",
    "training.LossScale.update": "abstract; its subclasses are here",
    "quantize.NVFP4Quantizer.quantize_tiles": "tiles of groups' rows, which grouped_dense makes",
    "quantize.TensorQuantizer.quantize_tiles": "tiles of groups' rows, which grouped_dense makes",
    "training.keep_compiled_programs": "changes JAX's configuration for all tests behind it",
}  # fmt: skip


def test_every_public_callable_has_a_valid_call() -> None:
    assert CHECKED.keys() - CALLS.keys() == WITHOUT_A_CALL.keys()
    assert CALLS.keys() <= public_callables().keys()


# Words of a message that name an argument in another way than by its name.
ALSO_SAID = {
    "context": "encoder_output", "context_mask": "enc_dec_attn_mask", "abstract_state": "state",
    "abstract_params": "state", "model_or_state": "tree", "state": "the data is not that of the run",
    "equation": "einsum subscripts", "m_splits": "group_sizes",
}  # fmt: skip


def says(message: str, argument: str, value: Any) -> bool:
    """Whether a message names an argument, or a part of its name, or what was given in its place."""
    words = {argument, *(part for part in argument.split("_") if len(part) > 3), type(value).__name__}
    words |= {getattr(value, "__name__", argument), ALSO_SAID.get(argument, argument)}
    if any(re.search(rf"(?<![a-zA-Z]){re.escape(word)}", message) for word in words):
        return True
    given = [
        value,
        *(sum(value.items(), ()) if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()),
    ]
    if any(text in message for part in given for text in (repr(part), str(part), brief(part)) if text):
        return True
    shape = str(getattr(value, "shape", None))
    words_of_arrays = r"shape|axes|array|rows|dtype|features|operand"
    if shape == "None":
        return False
    return shape in message or str(value.dtype) in message or re.search(words_of_arrays, message) is not None


class Snapshot(NamedTuple):
    """What a refused call must leave as it is: modules, objects, files, globals of the package, the environment."""

    modules: list[Any]
    leaves: list[int]
    objects: list[dict[str, int]]
    files: dict[str, tuple[int, int]]
    package: dict[str, dict[str, int]]
    process: tuple[Any, ...]

    @classmethod
    def of(cls, call: Call, folder: Path) -> Snapshot:
        owner = getattr(call.function, "__self__", call.function)
        things = [owner, *call.kwargs.values()]
        split = [nnx.split(thing) for thing in things if isinstance(thing, nnx.Module | nnx.Rngs)]
        # Arrays are known by their addresses: a new value is another array.
        leaves = [id(leaf) for _, state in split for leaf in jax.tree.leaves(state)]
        # Those of the package: JAX's keep what they have computed.
        own = [thing for thing in things if type(thing).__module__.startswith("jax_te.")]
        plain = [thing for thing in own if hasattr(thing, "__dict__") and not isinstance(thing, nnx.Module)]
        objects = [{name: id(value) for name, value in vars(thing).items()} for thing in plain]
        stats = {str(path): path.stat() for path in folder.rglob("*")}
        files = {path: (stat.st_size, stat.st_mtime_ns) for path, stat in stats.items()}
        package = {
            name: {key: id(value) for key, value in vars(module).items()}
            for name, module in [*sys.modules.items()]
            if name.startswith("jax_te.") and module is not None
        }
        process = (dict(os.environ), Path.cwd(), id(sys.unraisablehook), jax.sharding.get_abstract_mesh())
        return cls([graphdef for graphdef, _ in split], leaves, objects, files, package, process)

    def changes(self, now: Snapshot) -> list[str]:
        return [name for name, a, b in zip(self._fields, self, now, strict=True) if a != b]


# What a callable raises as its reference does: Megatron-Core's assertion, the tracker's RuntimeError and KeyError,
# Flax's error for variables that a module lacks.
OTHER_ERRORS: dict[str, type[Exception]] = {
    "linen.to_nnx": flax.errors.FlaxError,
    "megatron.MegatronModule.set_symmetric_ar": AssertionError,
    "megatron.RNGStatesTracker.add": RuntimeError,
    "megatron.RNGStatesTracker.fork": KeyError,
    "megatron.InferenceCudaRNGStatesTracker.fork": KeyError,
}


def outcome(call: Call, name: str, argument: str, value: Any, hint: Any, folder: Path) -> tuple[str, bool]:
    """What is wrong with how a call ends, and whether it was refused."""
    before = Snapshot.of(call, folder)
    what = f"{name}({argument}={value!r:.60})".replace("\n", "")
    errors = (ValueError, TypeError, OSError, OTHER_ERRORS.get(name, ValueError))
    try:
        call.run(**{argument: value})
    except errors as error:
        if callable(value) and allows(hint, value):
            return "", True  # its own error, from where it is called
        if not says(str(error), argument, value):
            return f"{what} does not say what is wrong: {error!r:.300}", True
        changed = before.changes(Snapshot.of(call, folder))
        return (f"{what} is refused, and has changed {changed}" if changed else ""), True
    except Exception as error:
        return f"{what} raises {error!r:.300}", True
    # A scalar array may be traced, and is a number.
    number = getattr(value, "shape", None) == () and allows(hint, 0.5)
    return ("" if allows(hint, value) or number else f"{what} is accepted"), False


def generated(names: list[str], calls: int, folder: Path) -> tuple[int, list[str]]:
    """Number of calls with one wrong argument each, the same ones at each run, and what is wrong with them."""
    made, wrong = 0, []
    for index, name in enumerate(names):
        draw, call = random.Random(f"{name} {calls}"), CALLS[name](folder)
        function = CHECKED.get(name)
        hints = hints_of(function) if function else {}
        for _ in range(-(-calls * (index + 1) // len(names)) - -(-calls * index // len(names))):
            argument, value = draw.choice(sorted(call.kwargs)), draw.choice(WRONG)
            problem, refused = outcome(call, name, argument, value, hints.get(argument, Any), folder)
            made, wrong = made + 1, wrong + [problem] * (problem != "")
            call = call if refused and not problem else CALLS[name](folder)
    return made, wrong


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to work in, with the package as a user runs it, and JAX as it comes."""
    monkeypatch.chdir(tmp_path)
    with without_type_checker(), jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield tmp_path


def layer(**options: Any) -> Any:
    return layers.TransformerLayer(16, 16, 2, **NO_DROPOUT, **options, rngs=nnx.Rngs(0))


# Calls that once were accepted, or ended in an error that named nothing, and what each says now.
MENDED: dict[str, Any] = {
    "checkpoint_core_attention must be True or False": [
        lambda: layer()(X, checkpoint_core_attention="no"),
        lambda: layers.MultiheadAttention(16, 2, attention_dropout=0.0, rngs=nnx.Rngs(0))(
            X, checkpoint_core_attention="no"
        ),
    ],
    "interleaved must be True or False": [lambda: layers.rotary_embedding(jnp.arange(4), 8, interleaved="no")],
    "post_norm must be True or False": [
        lambda: models.transformer_layer(CONFIG, post_norm="no", rngs=nnx.Rngs(0)),
    ],
    "only_marked must be True or False": [lambda: layers.quantize_parameters(layer(), only_marked="no")],
    "strict must be True or False": [lambda: megatron.load_state_dict(layer(), {}, strict="no")],
    "gated must be True or False": [lambda: read_megatron("not/there", gated="no")],
    "has_aux must be True or False": [
        lambda: linen.value_and_grad(len, has_aux="no"),
        lambda: training.deferred_vjp(len, layer(), X, has_aux="no"),
    ],
    "use_reentrant must be True or False": [lambda: te_pytorch.checkpoint(jnp.sin, X, use_reentrant="no")],
    "unsharded must be text": [lambda: ops.explain_backend("dense", unsharded=1)],
    "takes no enc_dec_attn_mask_type; build it": [lambda: layer()(X, enc_dec_attn_mask_type="padding")],
    "takes no encoder_lengths; build it": [lambda: layer()(X, encoder_lengths=jnp.ones(2, jnp.int32))],
    "recipe must be a Recipe or None": [
        lambda: layers.prepare_quantization(layer(), "delayed"),
        lambda: ops.explain_backend("dense", recipe="delayed"),
    ],
    "microbatches must be an integer": [lambda: training.make_inspection(len, microbatches="x")],
    "loss_fn must be a function": [lambda: training.make_eval_step(5)],
    "num_splits must be an integer": [
        lambda: megatron.TEDotProductAttention(CONFIG, 1, "causal", "self")(IDS, num_splits="x"),
    ],
    "dtype must be one of float32, bfloat16, float16": [
        lambda: save_megatron(models.GPTModel(**MODEL, rngs=nnx.Rngs(0)), "saved", dtype="int8"),
        lambda: save_megatron(models.GPTModel(**MODEL, rngs=nnx.Rngs(0)), "saved", dtype="float8_e4m3fn"),
        lambda: save_huggingface(models.GPTModel(**MODEL, rngs=nnx.Rngs(0)), "saved", dtype="int32"),
        lambda: save_huggingface(models.GPTModel(**MODEL, rngs=nnx.Rngs(0)), "saved", dtype="complex64"),
    ],
    "4 layers do not split into": [lambda: split_layers(4, 10**15)],
    "chunks must be an integer": [lambda: split_layers(4, 0)],
    "num_layers must be an integer": [lambda: split_layers(4.0, 2)],
    "vocab_size must be an integer": [lambda: load_megatron("not/there", vocab_size=1.5)],
    "args must be a mapping": [lambda: load_megatron("not/there", args=[1])],
    "window_attn_skip_freq": [
        lambda: megatron.is_layer_window_attention((1, 0), 0, 1),
        lambda: megatron.is_layer_window_attention((1, 0), [], 1),
    ],
    "axis must be one of": [lambda: ops.reorder_to_zigzag(jnp.ones(4)), lambda: ops.undo_zigzag(jnp.ones(4))],
    "x must have 1 axes or more": [lambda: layers.LayerNormLinear(16, 16, rngs=nnx.Rngs(0))(jnp.float32(1))],
    "query must have 3 axes or more": [lambda: megatron.TEDotProductAttention(CONFIG, 1, "causal", "self")(X[0])],
    "encoded must be [b, s, 16]": [
        lambda: models.BertModel(**MODEL, add_pooler=True, rngs=nnx.Rngs(0)).pool(X[..., :8]),
        lambda: models.BertModel(**MODEL, add_pooler=True, rngs=nnx.Rngs(0)).pool(X[0]),
    ],
    "statistics must have a value for each of": [
        lambda: quantize.Observer().record("a", "x", quantize.TensorQuantizer(dtype=jnp.float8_e4m3fn), {}),
    ],
    "quantizers must be states in float32": [lambda: quantize.with_max_gradients({"scale": jnp.ones(2, jnp.int32)})],
    "layer must be in [0, 1)": [
        lambda: CONFIG.has_experts(1), lambda: CONFIG.has_experts(-1), lambda: CONFIG.has_window(-1),
        lambda: CONFIG.cp_comm_type_of(-1),
    ],
    "x must be an array": [lambda: ops.reorder_to_zigzag(np.ndarray, 1)],
    "documents must be a sequence": [lambda: data.ByteTokenizer().encode_documents(np.array([object()]))],
    "recipe_path must be a path": [lambda: megatron.load_quantization_recipe(True)],
    "a state must be a pytree of named arrays": [lambda: checkpoint.TrainCheckpointer("folder").save(X, {}, 1)],
}  # fmt: skip


@pytest.mark.costly(
    "checkpoint_core_attention must be True or False",
    "encoded must be [b, s, 16]",
    "dtype must be one of float32, bfloat16, float16",
)
@pytest.mark.parametrize("message", MENDED)
def test_what_was_accepted_or_obscure_is_refused(message: str, quiet: Path) -> None:
    for call in MENDED[message]:
        with pytest.raises((ValueError, TypeError), match=re.escape(message)):
            call()


def test_a_file_whose_keys_are_no_text_is_no_checkpoint(quiet: Path) -> None:
    with zipfile.ZipFile("model.pt", "w") as file:
        file.writestr("model/data.pkl", pickle.dumps({1: 2}, protocol=2))
        file.writestr("model/version", "3")
    with pytest.raises(ValueError, match="no state dict"):
        read_megatron("model.pt")


def test_a_refused_constructor_draws_no_keys() -> None:
    """Inner layers refuse what is out of range after others have drawn theirs."""
    rngs = nnx.Rngs(0)
    wrong: dict[str, Any] = {"layernorm_epsilon": -1.0, "ffn_hidden_size": 0, "normalization": "no", "activation": "no"}
    for name, value in wrong.items():
        sizes: dict[str, Any] = {"hidden_size": 16, "ffn_hidden_size": 16, "num_attention_heads": 2} | {name: value}
        with pytest.raises(ValueError, match=r"epsilon|ffn_hidden_size|normalization|activation"):
            layers.TransformerLayer(**sizes, rngs=rngs)
        assert int(rngs.params.count[...]) == 0, name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of NumPy and JAX about what is computed with wrong values
def test_a_sample_of_wrong_calls_is_refused_clearly(quiet: Path) -> None:
    names = random.Random(0).sample(sorted(CALLS), 40)
    made, wrong = generated(names, 200, quiet)
    assert wrong == []
    assert made == 200


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_2000_wrong_calls_are_refused_clearly_or_have_a_meaning(quiet: Path) -> None:
    by_name = [name for name in sorted(CALLS) if CALLS[name](quiet).kwargs]  # data.Tokenizer.find is called by position
    made, wrong = generated(by_name, 2000, quiet)
    print(f"{made} calls of {len(CALLS)} functions and methods")
    assert wrong == []
    assert made == 2000


WITH_KERNELS = [
    name
    for name, function in CHECKED.items()
    if name.endswith("__call__") and "is_first_microbatch" in inspect.signature(function).parameters
]


@pytest.mark.costly(
    "te_pytorch.GroupedLinear.__call__",
    slow=(
        "layers.GroupedLinear.__call__",
        "layers.MultiheadAttention.__call__",
        "megatron.MoELayer.__call__",
        "te_pytorch.TransformerLayer.__call__",
        "megatron.MLP.__call__",
        "te_pytorch.MultiheadAttention.__call__",
        "megatron.TEGroupedLinear.__call__",
        "layers.TransformerLayer.__call__",
        "layers.GroupedLoRA.__call__",
        "layers.MoE.__call__",
        "layers.LayerNormLinear.__call__",
        "layers.LayerNormMLP.__call__",
        "layers.LoRA.__call__",
    ),
)
@pytest.mark.parametrize("name", WITH_KERNELS)
@pytest.mark.filterwarnings("ignore")
def test_a_refused_call_keeps_the_cached_kernels(name: str, quiet: Path) -> None:
    """Also where it is refused late, after some of a layer's kernels were quantized."""
    call, hints, refusals = CALLS[name](quiet), hints_of(CHECKED[name]), 0
    call = call._replace(kwargs=call.kwargs | {"is_first_microbatch": True})
    with autocast(Float8CurrentScaling()):
        call.run()
        owner: Any = getattr(call.function, "__self__", call.function)
        cached = [module.kernel_cache for _, module in layers.quantizable_modules(owner)]
        assert any(cache is not None for cache in cached)
        for argument in call.kwargs.keys() - {"is_first_microbatch"}:
            for value in (X[..., :15], X[0, 0, :3], jnp.ones((3, 2, 5))):
                problem, refused = outcome(call, name, argument, value, hints.get(argument, Any), quiet)
                assert not problem.endswith("]"), problem  # it has changed something
                refusals += refused
    assert refusals


@pytest.mark.slow
def test_a_refused_call_that_reached_inner_layers_keeps_their_kernels() -> None:
    """Of a layer that is recomputed, too, whose inner layers are copies."""
    layer, wrong = layers.TransformerLayer(16, 16, 2, **NO_DROPOUT, rngs=nnx.Rngs(0)), jnp.ones((2, 4, 3, 7))
    x = jnp.sin(jnp.arange(X.size, dtype=X.dtype)).reshape(X.shape)
    with autocast(Float8CurrentScaling()):
        layer(x, is_first_microbatch=True)
        kept = layer(x, is_first_microbatch=False)
        kernel = layer.self_attention.qkv.kernel
        kernel.set_value(2 * kernel.get_value())
        with selective_recompute("mlp", "core_attn"), pytest.raises(TypeError, match="mask must be bool"):
            layer(x, wrong, self_attn_mask_type="arbitrary", is_first_microbatch=True)
        np.testing.assert_array_equal(layer(x, is_first_microbatch=False), kept)
        remade = remat(lambda layer, x: layer(x, is_first_microbatch=True), layer, x)
        assert (remade != kept).any()
        kept = layer(x, is_first_microbatch=False)
        kernel.set_value(2 * kernel.get_value())

        wanted: Any = {"self_attn_mask_type": "arbitrary"}

        class Refusing(nnx.Module):
            def __call__(self, x: Any, mask: Any) -> Any:
                return remat(lambda layer, x: layer(layer(x, is_first_microbatch=True), mask, **wanted), layer, x)

        with pytest.raises(TypeError, match="mask must be bool"):
            Refusing()(x, wrong)
        np.testing.assert_array_equal(layer(x, is_first_microbatch=False), kept)


class Changed(nnx.Module):
    """Counts its calls before it refuses them."""

    def __init__(self) -> None:
        self.weight, self.calls = nnx.Param(jnp.ones(2)), nnx.Variable(jnp.zeros(()))

    def __call__(self, x: Any) -> Any:
        self.calls.set_value(self.calls.get_value() + 1.0)
        return jnp.sum(self.weight[...]) * x


def loss_of_changed(model: Any, batch: Any, key: Any) -> Any:
    return model(batch)  # no scalar


def test_a_refused_step_leaves_its_state() -> None:
    """Donated buffers, too, and what the model's call had changed by then; an optimizer's moments stay."""
    tx = optax.adam(0.1)
    state = training.create_train_state(lambda rngs: Changed(), tx, key=jax.random.key(0))
    batch, model = jnp.ones((4, 2)), Changed()
    optimizer = training.Optimizer(model, tx)
    other = nnx.State({"weight": nnx.Param(jnp.ones((3, 2)))})
    held_by_state = (state.params, state.rest, state.opt_state, state.step)
    calls: list[tuple[Any, Any]] = [
        (held_by_state, lambda: training.make_train_step(loss_of_changed, tx)(state, batch)),
        (held_by_state, lambda: training.make_train_step(loss_of_changed, tx, microbatches=3)(state, batch)),
        (model, lambda: training.value_and_grad(lambda model: loss_of_changed(model, batch, None))(model)),
        ((model, optimizer), lambda: optimizer.update(model, {"weight": jnp.ones(2)})),
        ((model, optimizer), lambda: optimizer.update(model, other)),
    ]
    for held, call in calls:
        before = jax.tree.map(np.asarray, jax.tree.leaves((held,)))
        with pytest.raises((ValueError, TypeError)):
            call()
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves((held,)), before)
