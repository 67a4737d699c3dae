"""Modules whose calls can be captured as graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import jax.numpy as jnp
from flax import nnx

from jax_te._validation import check_positive, checked
from jax_te.config import TransformerConfig
from jax_te.layers import Rotary, drop_cached_kernels
from jax_te.megatron.captured import CapturedGraphs, OwnGraphs, is_array, is_traced, write_back
from jax_te.megatron.module import MegatronModule
from jax_te.sharding import constrain
from jax_te.typing import Array, Words

_Hook = tuple[tuple[Any, ...], Callable[..., Any]]
"""Path of a submodule, and the function that is called with it."""

_CONFIG = Words("a jax_te.config.TransformerConfig", error=AssertionError)  # Megatron-Core asserts this


@checked
class GraphableMegatronModule(MegatronModule):
    """A module whose calls outside of ``jax.jit`` run as graphs, captured once; a subclass defines ``forward``.

    A captured graph is an executable that XLA compiled ahead of time, for shapes, dtypes and shardings of all arrays,
    the module's configuration, static arguments, the ambient recipe and mesh, and ``is_first_microbatch``. It is
    forward, and where a derivative is taken forward and backward. On a GPU, XLA puts CUDA graphs into it.

    ======================  =========================================================================================
    ``cuda_graph_impl``     a call outside of ``jax.jit``
    ======================  =========================================================================================
    ``none``                calls ``forward``
    ``full_iteration``      calls ``forward``: the whole step is one program, a jitted `make_train_step`
    ``local``               runs the graph of this call; the first time captures it
    ``transformer_engine``  in training and once there are graphs, runs the graph of this call, or refuses;
                            else calls ``forward``. ``_te_cuda_graph_capture`` captures
    ======================  =========================================================================================

    Inside of ``jax.jit``, ``scan`` and ``vmap`` a call is ``forward`` in every case: the jitted function is the graph.

    Args:
        config: `jax_te.config.TransformerConfig`.
        vp_stage: option without effect, stored as an attribute, as in Megatron.

    Attributes:
        current_microbatch: index of the next microbatch of a step: set it before each, from 0. The first quantizes
            kernels, if the config quantizes; the others reuse them. Each module has its own, and a copy starts with
            its original's. It is static, so a function under ``jax.jit`` that gets the module is traced again when it
            changes: set it for calls that run as graphs.
        cuda_graphs: the calls that were captured, `CapturedGraphs`; ``len`` counts them.
        replay_hooks: path of a submodule and function of each hook, see ``cuda_graph_manual_hooks``.

    Raises:
        AssertionError: unless ``config`` is a TransformerConfig.
        ValueError: for a ``vp_stage`` that is not an integer.

    Source: ``megatron.core.transformer.module.GraphableMegatronModule``.

    >>> class Scale(GraphableMegatronModule):
    ...     def __init__(self, config):
    ...         super().__init__(config)
    ...         self.scale = nnx.Param(jnp.ones(8))
    ...     def forward(self, hidden_states):
    ...         return hidden_states * self.scale
    >>> sizes = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 1}
    >>> layer = Scale(TransformerConfig(**sizes, cuda_graph_impl="local"))
    >>> layer(jnp.ones((2, 4, 8))).shape, len(layer.cuda_graphs)
    ((2, 4, 8), 1)
    """

    cuda_graphs: Any = OwnGraphs()

    def __init__(self, config: Annotated[TransformerConfig, _CONFIG], vp_stage: int | None = None):
        super().__init__(config)
        self.vp_stage = vp_stage
        self.current_microbatch = 0
        self.cuda_graphs = CapturedGraphs()
        self.replay_hooks: tuple[_Hook, ...] = nnx.static(())

    def __setstate__(self, state: dict[str, Any]) -> None:  # of pickle, which fills attributes without setting them
        super().__setstate__(state)
        self.cuda_graphs = vars(self)["cuda_graphs"]

    @property
    def cuda_graph_manual_hooks(self) -> list[tuple[Callable[..., Any], tuple[Any, ...]]]:
        """Return the hooks: pairs of a function and its arguments, called before each replay."""
        return [(hook, (_at(self, path),)) for path, hook in self.replay_hooks]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result; defined by each subclass."""
        raise NotImplementedError(f"{type(self).__name__} must define forward, which __call__ runs or captures")

    def get_layer_static_inputs(self, seq_length: int, micro_batch_size: int) -> dict[str, Array]:
        """Return arguments to capture a call with: ``hidden_states`` of ones, ``[b, s, h]`` in the activations' dtype.

        Sizes are those of global arrays, sharded as activations are on the mesh in use; Megatron's are one rank's, and
        ``[s, b, h]``. A subclass with more arguments adds them.

        Args:
            seq_length: ``s``.
            micro_batch_size: ``b``.
        """
        check_positive(seq_length=seq_length, micro_batch_size=micro_batch_size)
        config: Any = self.config
        dtype = jnp.bfloat16 if config.bf16 else jnp.float16 if config.fp16 else config.compute_dtype
        ones = jnp.ones((micro_batch_size, seq_length, config.hidden_size), dtype)
        return {"hidden_states": constrain(ones, ("batch", "sequence", "hidden"))}

    def setup_manual_hooks(self, make_hook_func: Callable[[], Callable[[nnx.Module], Any]]) -> None:
        """Set ``cuda_graph_manual_hooks``: ``make_hook_func()`` for each submodule with its own parameters.

        Each replay calls ``hook(submodule)`` first, and reads the submodule's variables as the hook sets them.
        """
        covered = {
            id(module)
            for whole in self._get_submodules_under_cudagraphs()
            for _, module in nnx.iter_modules(whole)
            if any(isinstance(value, nnx.Param) for value in vars(module).values())
        }
        # By path: in a copy of the module, such as a transformation makes, they get the copy's submodules.
        self.replay_hooks = nnx.static(
            tuple((path, make_hook_func()) for path, module in nnx.iter_modules(self) if id(module) in covered)
        )

    def _get_submodules_under_cudagraphs(self) -> list[nnx.Module]:
        """Return the modules that a graph covers: here the module itself, as a whole."""
        return [self]

    def _te_cuda_graph_capture(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a call that is captured, if it is new, under the recipe and mesh in use.

        Microbatches after the first are captured after it, with ``current_microbatch`` 1: they have cached kernels.
        """
        args, kwargs = self._get_te_cuda_graph_replay_args(*args, **kwargs)
        first = kwargs.pop("is_first_microbatch")
        return self._run(args, kwargs, first=first, capture=True)

    def _te_cuda_graph_replay(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of a captured call, the one of ``current_microbatch``. Hooks run before.

        Raises:
            AssertionError: for an argument that is not an array, as in Megatron.
            ValueError: for a call that was not captured; before the hooks, unless they may change what is amiss, types
                and shardings of variables.
        """
        args, kwargs = self._get_te_cuda_graph_replay_args(*args, **kwargs)
        first = kwargs.pop("is_first_microbatch")
        return self._run(args, kwargs, first=first, capture=False)

    def _get_te_cuda_graph_replay_args(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a graph: arrays (`Rotary` too), ``hidden_states`` first; ``is_first_microbatch``."""
        _refuse_microbatch(kwargs)
        for name, value in (*enumerate(args), *kwargs.items()):
            # Megatron's rotary_pos_emb is one tensor; here it is the pytree of two arrays.
            allowed = is_array(value) or isinstance(value, Rotary)
            if not (allowed or (value is None and name in kwargs)):
                raise AssertionError(
                    f"CUDA graph accepts only Tensor inputs: argument {name!r} must be an array, got "
                    f"{type(value).__name__}; cuda_graph_impl='local' also takes trees of arrays and static values"
                )
        if not args:
            if "hidden_states" not in kwargs:
                raise AssertionError("hidden_states is required")
            args = (kwargs.pop("hidden_states"),)
        elif "hidden_states" in kwargs:
            raise AssertionError("hidden_states is given twice, by position and by name; give it once")
        return args, kwargs | {"is_first_microbatch": self.current_microbatch == 0}

    def _should_call_local_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call runs a graph that is captured when it is new."""
        return self.config.cuda_graph_impl == "local" and not self._traced(args, kwargs)

    def _should_call_te_cudagraph(self, *args: Any, **kwargs: Any) -> bool:
        """Return whether a call replays a graph that was captured before."""
        chosen = self.config.cuda_graph_impl == "transformer_engine" and self.training
        return chosen and len(self.cuda_graphs) > 0 and not self._traced(args, kwargs)

    def _traced(self, *inputs: Any) -> bool:
        # The program being traced is then the graph, and an executable cannot be part of it.
        return is_traced((inputs, nnx.state(self)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's result: of ``forward``, or of its captured graph, which has the same values."""
        if self._should_call_local_cudagraph(*args, **kwargs):
            _refuse_microbatch(kwargs)
            return self._run(args, kwargs, first=self.current_microbatch == 0, capture=True)
        if self._should_call_te_cudagraph(*args, **kwargs):
            return self._te_cuda_graph_replay(*args, **kwargs)
        return self.forward(*args, **kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, first: bool, capture: bool) -> Any:
        """Return the result of a call's graph; ``first``: whether this is a step's first microbatch."""
        hooks = self.cuda_graph_manual_hooks
        if hooks and not capture:
            # They change variables, so that a call is refused before them.
            self.cuda_graphs.check(self._called(first), (args, kwargs), first)
        for hook, arguments in hooks:
            hook(*arguments)
        out, changed = self.cuda_graphs.run(self._called(first), (args, kwargs), first, capture=capture)
        write_back(self, changed)
        return out

    def _called(self, first: bool) -> Any:
        """Return the module of which a graph is: a copy, with the same arrays, and without what selects a replay."""
        # That belongs neither to the graph nor to other calls.
        called = nnx.merge(*nnx.split(self))
        called._set_everywhere("current_microbatch", 0)
        called._set_everywhere("replay_hooks", nnx.static(()))
        if self._quantizes:
            called._set_everywhere("is_first_microbatch", first, unless="disable_parameter_transpose_cache")
            if first:
                # They are quantized again in any case, and a graph depends on the existing variables.
                drop_cached_kernels(called)
        return called


def _refuse_microbatch(kwargs: dict[str, Any]) -> None:
    """Refuse an explicit ``is_first_microbatch``, and take a None away: a graph is chosen by the module's count."""
    given = kwargs.pop("is_first_microbatch", None)
    if given is not None:
        raise ValueError(
            f"is_first_microbatch={given!r} is not supported by a call that runs as a graph: set the module's "
            "current_microbatch, 0 for the first of a step, and leave the argument out"
        )


def _at(module: Any, path: tuple[Any, ...]) -> Any:
    """Return the submodule at a path, as ``nnx.iter_modules`` gives it."""
    for part in path:
        module = module[part] if isinstance(part, int) else getattr(module, part)
    return module
