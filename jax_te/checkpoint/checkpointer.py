"""Saving and restoring of a run's states, one folder for each step."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Literal

import jax
import numpy as np
import tensorstore

from jax_te._processes import Heartbeats, checksum, gather_texts, in_thread
from jax_te._validation import check_choice, check_positive, checked
from jax_te.checkpoint.checksums import start_checksums
from jax_te.checkpoint.folder import checked_folder
from jax_te.checkpoint.host import free, host_copies
from jax_te.checkpoint.read import DamagedError, quiet_orbax
from jax_te.checkpoint.restore import Target, load
from jax_te.checkpoint.run_steps import RunSteps
from jax_te.checkpoint.tree import (
    FORMAT,
    PARAMETERS,
    Name,
    array_leaves,
    check_named,
    is_key,
    key_kinds,
    named_leaves,
    records,
)
from jax_te.checkpoint.write import Keep, call_orbax
from jax_te.checkpoint.writer import Save, Writer
from jax_te.typing import PyTree


@checked
class TrainCheckpointer:
    """The checkpoints of a training run, one folder ``<directory>/<step>`` each.

    A state is any pytree of arrays, such as a `TrainState`: typed keys, FP8 arrays and arrays sharded over a mesh
    included. Static fields (a graph definition) are not stored: `restore` takes them from the state that it fills.

    - Saving returns once copies of the arrays to the host are under way; the rest is done in a separate thread. An
      error there is raised by the next call, also by `check`, `wait` and `close`.
    - A checkpoint appears whole or not at all; the remains of a killed save are ignored, and the next run's first save
      removes them. A process that ends without `close` or `wait` may lose the save under way.
    - A save takes as much memory of the host as this process's devices hold of the state, replicas counted once.
    - Every array is stored with a checksum, and restored only if its checksum is right.
    - A folder is a checkpoint if it has this package's metadata; others are left alone, whatever their names. While one
      `TrainCheckpointer` saves in a folder, from its first save until `close`, no other one can; all can restore. A
      save after `close` takes the folder again, until the next `close`.
    - The newest checkpoint is that of the largest step.

    Args:
        directory: folder of the checkpoints, created by the first save.
        keep: number of newest checkpoints to keep, >= 1.
        keep_every: interval of steps: checkpoints whose step is a multiple of it are kept, too.
        keep_best: number of best checkpoints to keep, too, by a metric that each save is given.
        metric: name of that metric.
        best: whether its smallest or its largest value is the best; nan is the worst.
        timeout: seconds without progress after which a save of several processes has failed: none of them has written
            anything. A slow save may take any time.

    Raises:
        ValueError: if ``directory`` is a file or a link to nothing, or has a name that Orbax would take for another;
            for a number to keep or a ``timeout`` that is not positive, and for another ``best``;
            for a ``metric`` or ``best`` without ``keep_best``.

    >>> import tempfile, jax.numpy as jnp
    >>> folder = tempfile.TemporaryDirectory()
    >>> with TrainCheckpointer(folder.name) as checkpointer:
    ...     checkpointer.save({"weight": jnp.ones(2)}, {"next": 7}, step=10)
    ...     state, data_state, step = checkpointer.restore({"weight": jax.ShapeDtypeStruct((2,), jnp.float32)})
    >>> state["weight"].tolist(), data_state, step
    ([1.0, 1.0], {'next': 7}, 10)
    >>> folder.cleanup()
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: int | None = None,
        metric: str = "loss",
        best: Literal["min", "max"] = "min",
        timeout: float = 60.0,
    ):
        numbers = {"keep": keep, "keep_every": keep_every, "keep_best": keep_best}
        check_positive(**{name: number for name, number in numbers.items() if number is not None})
        check_choice(("min", "max"), best=best)
        if keep_best is None and (metric, best) != ("loss", "min"):
            raise ValueError(
                f"metric={metric!r} and best={best!r} say which checkpoints are the best ones to keep; give keep_best, "
                "their number, too, or leave both out"
            )
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, got {timeout}")
        self._directory = checked_folder(directory)
        self._metric = None if keep_best is None else metric
        self._can_pin = True
        self._steps = RunSteps(self._directory)
        kept = Keep(keep, keep_every, keep_best, metric, best)
        self._writer = Writer(self._directory, self._steps, kept, timeout)

    def __enter__(self) -> TrainCheckpointer:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and jax.process_count() > 1:
            # Other processes may be gone, and would be waited for. A save under way becomes whole or is ignored.
            self._writer.abandon()
        else:
            self.close()

    def share_heartbeats(self, heartbeats: Heartbeats) -> None:
        """Use the heartbeats that the run's processes already write, instead of new ones in the folder."""
        self._writer.heartbeats = heartbeats

    def save(
        self, state: PyTree, data_state: Any, step: int | np.integer, *, metrics: Mapping[str, Any] | None = None
    ) -> None:
        """Start saving. The state may be donated or deleted as soon as this returns.

        Devices copy it to pinned memory of the host, and this returns before they are done, except the first time. It
        waits for the save before it. It also waits for the copies that Orbax makes itself: of arrays with replicas in
        several processes, of types below eight bits, on devices without pinned memory, and where there is too little of
        it. With several processes it waits for Orbax to begin writing, too.

        Args:
            state: pytree of arrays.
            data_state: JSON-serializable value, for example the state of a data iterator; the same in all processes. Of
                states that differ, gather a list first, of which each process takes its own after `restore`.
            step: name of the checkpoint, an integer >= 0 above the newest one's. After `restore` of an earlier step
                that is named, the run goes back: the first save of a step that it had passed renames the checkpoints
                after the restored one to ``<step>.abandoned``, which count no more and are never removed.
            metrics: numbers by name, stored with the arrays.

        Raises:
            OSError: if the save before this one could not be written, e.g. to a full disk, or the folder cannot be
                opened, or another `TrainCheckpointer` saves there; with several processes also if another one cannot
                write its part, is gone, or shows no progress within ``timeout``. Earlier checkpoints are still there.
                If this save fails, a later call raises.
            ValueError: if the step is saved already, is below the newest one, or is not an integer >= 0; if its folder
                is there and is not a checkpoint; if ``metrics`` lacks the metric by which the best ones are kept;
                with several processes, if the folder ``.processes`` beside the checkpoints is a symbolic link, or if
                data state, metrics or an array of this process alone are not those of process 0.
            TypeError: if JSON cannot hold ``data_state``, or Orbax an array's dtype or its size of zero; for a leaf of
                the state that is not an array.
        """
        step = _check_step(step)
        self.wait()
        data = _through_json(data_state)
        numbers: dict[str, Any] = {name: float(value) for name, value in (metrics or {}).items()}
        if self._metric is not None and self._metric not in numbers:
            given = sorted(numbers) or "none"
            raise ValueError(f"the best checkpoints are kept by {self._metric!r}; give it in metrics, got {given}")
        self._steps.check_new(step)
        arrays = array_leaves(state)
        leaves = named_leaves(state)
        # Before the writer is opened, which makes the folder, removes remains and renames damaged checkpoints: a
        # refused save has changed nothing.
        _check_storable(leaves)
        self._writer.check_same(step, _values_of_processes(data, numbers, leaves))
        several = jax.process_count() > 1
        with contextlib.ExitStack() as quiet:
            # The log is filtered until everything is written, because Orbax writes, and logs, in its own threads.
            logged = quiet.enter_context(quiet_orbax())
            with self._writer.explained(step):
                orbax = self._writer.open(step, logged)
            # Before records and checksums of each leaf, which the host computes while devices copy.
            copies = self._copies(arrays)
            handed_over = False
            try:
                body = {"format": FORMAT, "step": step, "data": data, "arrays": records(leaves)}
                body["keys"] = key_kinds(leaves)
                missing = any(copy is None for copy in copies)
                pairs = zip(leaves.items(), copies, strict=True)
                stored = {name: leaf if copy is None else copy for (name, leaf), copy in pairs}
                call = partial(call_orbax, orbax, step, stored, body, start_checksums(leaves, stored), numbers)
                with self._writer.explained(step):
                    # Orbax copies the other arrays before its call returns. With several processes its call runs
                    # programs on all devices, which must start in one order with those of the steps: this thread waits
                    # for the call.
                    begun = threading.Event()
                    if missing and not several:
                        call = partial(_same, call())
                    written = in_thread(self._write, step, call, copies, quiet.pop_all(), begun)
                    handed_over = True  # `_write` frees the copies, also if this wait is interrupted
                    save = self._writer.pending = Save(step, written, logged)
                    self._steps.go_on()
                    if several:
                        self._writer.wait_for(save, begun)
            except BaseException:
                if not handed_over:
                    free(copies)
                raise

    def wait(self) -> None:
        """Wait for the save under way, if any.

        Raises:
            OSError: if it could not be written.
        """
        self._writer.wait()

    def check(self) -> None:
        """Raise the error of a save under way if it has failed by now, without waiting: a training loop calls it at
        each step.

        Raises:
            OSError: if it could not be written.
        """
        self._writer.check()

    def latest_step(self) -> int | None:
        """Return the newest checkpoint's step, after waiting for a save under way; None if there is no checkpoint."""
        self.wait()
        return max(self._steps.steps(), default=None)

    def restore(
        self, abstract_state: PyTree, *, step: int | np.integer | None = None, allow: Collection[str] = ()
    ) -> tuple[PyTree, Any, int]:
        """Restore the newest checkpoint that can be read, or that of a step.

        A damaged checkpoint is skipped with a `DamagedCheckpointWarning` if there is an older one to use instead; the
        next save renames it to ``<step>.damaged``. With several processes, all must call this, and all take the same
        checkpoint: one that none of them finds damaged.

        Args:
            abstract_state: a pytree like the saved one, of ``jax.ShapeDtypeStruct`` or of arrays, with the shardings to
                restore to (on any mesh, whatever it was saved from). A leaf without one, such as ``jax.eval_shape``
                gives, gets that of its Variable's logical axes on the mesh of ``jax.set_mesh``, or is replicated. A
                leaf of 64 bits where JAX has none, without ``jax_enable_x64``, is restored as an array of NumPy.
            step: step of the checkpoint; None: the newest. A damaged checkpoint that is named is an error. What later
                saves do after an earlier step, see `save`.
            allow: names of conversions that lose or add something, which are refused otherwise:

                - ``"cast"``: ``value.astype(dtype)``, where no master holds the value.
                - ``"dequantize"``: kernels stored quantized, of which there are no masters, as ``data * scale``.
                - ``"missing"``: what the checkpoint lacks stays as it is in ``abstract_state``, if that has an array
                  there: adapters. An array of another shape is not missing.
                - ``"quantizers"``: delayed scaling is begun anew with scales of 1 and histories of 0, or left out; of
                  another length, histories keep their newest amaxes or are filled with 0.
                - ``"requantize"``: kernels are stored quantized under the ambient recipe, as the train step quantizes
                  masters; for a `TrainState`.
                - ``"unexpected"``: what ``abstract_state`` lacks is left out, and not read: the optimizer's state.

                What loses nothing is converted without: layers stacked by ``nnx.vmap`` or each for itself, query, key
                and value fused or not, a `LoRA`'s base, parameters of another dtype or form whose masters hold the
                values. The log of ``jax_te`` lists at level INFO what was converted.

        Returns:
            State, data state, step.

        Raises:
            FileNotFoundError: if there is no checkpoint, or none of ``step``.
            CheckpointMismatchError: if the newest readable one, or that of ``step``, differs from ``abstract_state`` in
                names, shapes, dtypes or implementations of typed keys.
            ValueError: if none of the checkpoints, or not that of ``step``, can be read, if it has another format than
                this version of the package writes, or for a dimension that does not divide over its mesh axes.

        >>> import optax, tempfile
        >>> from dataclasses import replace
        >>> from jax_te.training import abstract_train_state, create_train_state
        >>> model, tx = lambda rngs: nnx.Linear(2, 3, rngs=rngs), optax.adam(0.1)
        >>> with tempfile.TemporaryDirectory() as folder, TrainCheckpointer(folder) as checkpointer:
        ...     checkpointer.save(create_train_state(model, tx, key=jax.random.key(0)), None, 1)
        ...     without_optimizer = replace(abstract_train_state(model, tx), opt_state=())
        ...     state, _, step = checkpointer.restore(without_optimizer, step=1, allow={"unexpected"})
        >>> state.model(jnp.ones(2)).shape
        (3,)
        """
        check_named(abstract_state)
        return self._restore(Target(abstract_state, allow), step, goes_on=True)

    def restore_parameters(
        self, abstract_params: PyTree, *, step: int | np.integer | None = None, allow: Collection[str] = ()
    ) -> tuple[PyTree, int]:
        """Restore only a `TrainState`'s parameters. Nothing else is read, except masters of parameters in another form.

        A run does not go on from parameters alone: later saves are as without this call, whichever step it names.

        Args:
            abstract_params: the ``params`` of a `TrainState`, or a model's ``nnx.state(model, nnx.Param)``, as in
                `restore`. Of a model with other state, restore that by ``restore``, too.
            step, allow: see `restore`.

        Returns:
            Parameters, step.

        Raises:
            FileNotFoundError, CheckpointMismatchError, ValueError: see `restore`.

        >>> import optax, tempfile
        >>> from jax_te.training import create_train_state
        >>> build = lambda rngs: nnx.Linear(2, 3, rngs=rngs)
        >>> with tempfile.TemporaryDirectory() as folder, TrainCheckpointer(folder) as checkpointer:
        ...     checkpointer.save(create_train_state(build, optax.adam(0.1), key=jax.random.key(0)), None, 1)
        ...     model = build(nnx.Rngs(1))
        ...     params, step = checkpointer.restore_parameters(nnx.state(model, nnx.Param))
        ...     nnx.update(model, params)
        """
        check_named(abstract_params)
        target = Target({PARAMETERS: abstract_params}, allow, part=PARAMETERS)
        state, _, step = self._restore(target, step, goes_on=False)
        return state[PARAMETERS], step

    def close(self) -> None:
        """Wait for the save under way and free what Orbax holds.

        Raises:
            OSError: if the save could not be written.
        """
        self._writer.close()

    def _restore(self, target: Target, step: Any, *, goes_on: bool) -> tuple[PyTree, Any, int]:
        """Return the filled state, the data state and the step.

        Args:
            target: state to fill.
            step: step of the checkpoint; None: the newest that can be read.
            goes_on: whether the run goes on from this state, so that the next saves come after it.
        """
        self.wait()
        if step is not None:
            step = _check_step(step)
            # The first process's folder counts: a shared file system may show a checkpoint to some processes only.
            if gather_texts(str(step in self._steps.steps()))[0] != "True":
                there = ", ".join(map(str, sorted(self._steps.steps()))) or "none"
                raise FileNotFoundError(
                    errno.ENOENT, f"there is no checkpoint of step {step}, but of: {there}", str(self._directory)
                )
            newest = int(gather_texts(str(max(self._steps.steps(), default=step)))[0])
            try:
                state, data = self._load(step, target)
            except DamagedError as error:
                self._raise_if_removed(step)
                raise ValueError(
                    f"checkpoint step {step} in {self._directory} is damaged: {error}. Restore another step"
                ) from None
            if goes_on:
                self._steps.go_back(step, newest)
            return state, data, step
        damaged: dict[int, str] = {}
        while newest := gather_texts(str(max(set(self._steps.steps()) - damaged.keys(), default="")))[0]:
            step = int(newest)
            try:
                state, data = self._load(step, target)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            for bad, reason in damaged.items():
                # An older one was being removed, since the run that writes has saved the newer one meanwhile.
                if bad > step:
                    self._steps.report_damaged(bad, f"{reason}; step {step} is used instead")
            if goes_on:
                self._steps.go_on()
            return state, data, step
        if damaged:
            listed = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise ValueError(f"no checkpoint in {self._directory} can be read: {listed}. Start again in another folder")
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(self._directory))

    def _raise_if_removed(self, step: int) -> None:
        """Raise FileNotFoundError if the run that writes has removed a checkpoint while it was read."""
        if gather_texts(str(step in self._steps.steps()))[0] != "True":
            text = f"the checkpoint of step {step} was removed while it was read"
            raise FileNotFoundError(errno.ENOENT, text, str(self._directory))

    def _load(self, step: int, target: Target) -> tuple[PyTree, Any]:
        return load(self._directory / str(step), f"checkpoint step {step} in {self._directory}", target)

    def _copies(self, leaves: list[Any]) -> list[Any]:
        """Return copies in host memory; None for those that Orbax has to make."""
        if self._can_pin:
            try:
                return host_copies(leaves)
            except jax.errors.JaxRuntimeError as error:
                self._stop_pinning(error)
        return [None] * len(leaves)

    def _stop_pinning(self, error: Exception) -> None:
        self._can_pin = False
        logging.getLogger("jax_te").warning(
            "a save will block the loop while arrays are copied through pageable memory, because there is too little "
            "that can be pinned (XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB): %s",
            str(error)[:300],
        )

    def _write(
        self,
        step: int,
        call: Callable[[], Any],
        copies: list[Any],
        quiet: contextlib.ExitStack,
        begun: threading.Event,
    ) -> None:
        """Call Orbax and wait for it, in a thread of its own."""
        with quiet:
            try:
                try:
                    jax.block_until_ready(copies)
                except jax.errors.JaxRuntimeError as error:
                    # This state is lost; the next save does not need it.
                    self._stop_pinning(error)
                    raise
                response = call()
                begun.set()
                response.result()
            finally:
                free(copies)
            self._writer.end_save(step)


def _check_step(step: Any) -> int:
    # bool is a subclass of int; NumPy's integers are none.
    if isinstance(step, bool) or not isinstance(step, int | np.integer) or step < 0:
        raise ValueError(f"step must be an integer >= 0, got {step!r}")
    return int(step)


def _check_storable(leaves: dict[Name, Any]) -> None:
    """Raise TypeError for an array whose dtype or whose size of zero Orbax cannot store."""
    for name, leaf in leaves.items():
        # Typed keys are stored as their data, unsigned integers.
        if not is_key(leaf.dtype):
            _check_dtype("/".join(name), np.dtype(leaf.dtype))
        if 0 in leaf.shape:
            raise TypeError(
                f"{'/'.join(name)} has shape {tuple(leaf.shape)}, and Orbax stores no empty arrays; leave it out"
            )


def _values_of_processes(data: Any, numbers: dict[str, Any], leaves: dict[Name, Any]) -> dict[str, object]:
    """Return what must be the same in all processes, by what a message calls it: process 0's alone is stored."""
    if jax.process_count() == 1:  # reads no array
        return {}
    local = {
        name: leaf for name, leaf in leaves.items() if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
    }
    data_state = "data_state (of states that differ, gather a list first)"
    values: dict[str, object] = {data_state: json.dumps(data, sort_keys=True), "metrics": numbers}
    return values | {
        "/".join(name): checksum([np.asarray(jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf)])
        for name, leaf in local.items()
    }


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if not dtype.isnative:
        native = dtype.newbyteorder("=")
        raise TypeError(f"{name} has dtype {dtype}, bytes in the order of another machine; convert it to {native}")
    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        raise TypeError(f"{name} has dtype {dtype}, which Orbax cannot store; convert it to another one") from None


def _through_json(data_state: Any) -> Any:
    """Return a copy of a JSON-serializable value."""
    with contextlib.suppress(TypeError, ValueError):
        copy = json.loads(json.dumps(data_state))
        if copy == data_state:
            return copy
    # Tuples and integer keys come back as lists and strings: a run would resume from another state than it saved.
    raise TypeError(f"data_state must be what JSON gives back as it was, got {data_state!r}")


def _same(value: Any) -> Any:
    return value
