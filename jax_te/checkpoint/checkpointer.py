"""Saving and restoring of a run's states, one folder for each step."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
import tensorstore
from orbax.checkpoint import v1 as ocp

from jax_te._processes import (
    HEARTBEAT_FOLDER,
    Heartbeats,
    LinkedFolderError,
    gather_texts,
    in_thread,
    is_first,
    shortened,
)
from jax_te._validation import check_choice, check_positive, checked, warn_caller
from jax_te.checkpoint.checksums import start_checksums
from jax_te.checkpoint.folder import checked_folder
from jax_te.checkpoint.host import free, host_copies
from jax_te.checkpoint.read import DamagedError, chain, quiet_orbax, read_back
from jax_te.checkpoint.restore import Target, load
from jax_te.checkpoint.steps import FolderLock, FolderTakenError, StepNames, checkpoint_steps
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
from jax_te.checkpoint.write import Keep, call_orbax, new_writer, remove_others, size_of_save
from jax_te.typing import PyTree

_SOON = 0.002
"""Seconds between checks whether Orbax has begun to write, for which a step waits."""


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint could not be read and was set aside; the message names it and the one that was used."""


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
      `TrainCheckpointer` saves in a folder, from its first save until `close`, no other one can; all can restore.
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
            for a number to keep or a ``timeout`` that is not positive, and for another ``best``.

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
        if not timeout > 0:
            raise ValueError(f"timeout must be a number of seconds > 0, got {timeout}")
        self._directory = checked_folder(directory)
        self._metric = None if keep_best is None else metric
        self._keep = Keep(keep, keep_every, keep_best, metric, best)
        self._lock = FolderLock(self._directory)
        self._read_back = False
        self._can_pin = True
        self._writer: ocp.training.Checkpointer | None = None
        self._pending: _Save | None = None
        self._timeout = timeout
        self._heartbeats: Heartbeats | None = None
        self._own_heartbeats: Heartbeats | None = None
        self._damaged: set[int] = set()
        self._names = StepNames(self._directory, self._damaged)
        self._went_back: _WentBack | None = None

    def __enter__(self) -> TrainCheckpointer:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and jax.process_count() > 1:
            # Other processes may be gone, and would be waited for. A save under way becomes whole or is ignored.
            self._abandon()
        else:
            self.close()

    def share_heartbeats(self, heartbeats: Heartbeats) -> None:
        """Use the heartbeats that the run's processes already write, instead of new ones in the folder."""
        self._heartbeats = heartbeats

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
            data_state: JSON-serializable value, for example the state of a data iterator.
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
                is there and is not a checkpoint; if ``metrics`` lacks the metric by which the best ones are kept.
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
        self._check_new(step)
        arrays = array_leaves(state)
        leaves = named_leaves(state)
        # Before the writer is opened, which makes the folder, removes remains and renames damaged checkpoints: a
        # refused save has changed nothing.
        _check_storable(leaves)
        several = jax.process_count() > 1
        with contextlib.ExitStack() as quiet:
            # The log is filtered until everything is written, because Orbax writes, and logs, in its own threads.
            logged = quiet.enter_context(quiet_orbax())
            with self._explained(step):
                writer = self._opened_together(step, logged) if several else self._open_writer(step)
            # Before records and checksums of each leaf, which the host computes while devices copy.
            copies = self._copies(arrays)
            handed_over = False
            try:
                body = {"format": FORMAT, "step": step, "data": data, "arrays": records(leaves)}
                body["keys"] = key_kinds(leaves)
                missing = any(copy is None for copy in copies)
                pairs = zip(leaves.items(), copies, strict=True)
                stored = {name: leaf if copy is None else copy for (name, leaf), copy in pairs}
                call = partial(call_orbax, writer, step, stored, body, start_checksums(leaves, stored), numbers)
                with self._explained(step):
                    # Orbax copies the other arrays before its call returns. With several processes its call runs
                    # programs on all devices, which must start in one order with those of the steps: this thread waits
                    # for the call.
                    begun = threading.Event()
                    if missing and not several:
                        call = partial(_same, call())
                    written = in_thread(self._write, step, call, copies, quiet.pop_all(), begun)
                    handed_over = True  # `_write` frees the copies, also if this wait is interrupted
                    self._pending, self._went_back = _Save(step, written, logged), None
                    if several:
                        self._wait_for(self._pending, begun)
            except BaseException:
                if not handed_over:
                    free(copies)
                raise

    def wait(self) -> None:
        """Wait for the save under way, if any.

        Raises:
            OSError: if it could not be written.
        """
        save = self._pending
        if save is not None:
            with self._explained(save.step):
                self._wait_for(save)  # a wait that is interrupted leaves the save pending
                self._pending = None
                save.written.result()

    def check(self) -> None:
        """Raise the error of a save under way if it has failed by now, without waiting: a training loop calls it at
        each step.

        Raises:
            OSError: if it could not be written.
        """
        save = self._pending
        if save is None:
            return
        if save.written.done():
            self.wait()
        elif jax.process_count() > 1:
            with self._explained(save.step):
                self._raise_if_lost(save)

    def latest_step(self) -> int | None:
        """Return the newest checkpoint's step, after waiting for a save under way; None if there is no checkpoint."""
        self.wait()
        return max(self._steps(), default=None)

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
        return self._restore(Target(abstract_state, allow), step)

    def restore_parameters(
        self, abstract_params: PyTree, *, step: int | np.integer | None = None, allow: Collection[str] = ()
    ) -> tuple[PyTree, int]:
        """Restore only a `TrainState`'s parameters. Nothing else is read, except masters of parameters in another form.

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
        state, _, step = self._restore(Target({PARAMETERS: abstract_params}, allow, part=PARAMETERS), step)
        return state[PARAMETERS], step

    def close(self) -> None:
        """Wait for the save under way and free what Orbax holds.

        Raises:
            OSError: if the save could not be written.
        """
        try:
            self.wait()
        except BaseException:
            if jax.process_count() > 1:
                self._abandon()
            raise
        finally:
            with contextlib.ExitStack() as ends:  # each, whatever another one raises
                ends.callback(self._lock.release)
                ends.callback(self._end_heartbeats)
                ends.callback(self._drop_writer)

    def _steps(self) -> list[int]:
        """Finished checkpoints, without damaged ones: an unfinished one has a longer name."""
        return self._names.steps()

    def _check_new(self, step: int) -> None:
        """Raise ValueError for a step that is not after the others, or whose folder is not a checkpoint."""
        steps, back = self._steps(), self._went_back
        if back is not None and self._goes_back(step):
            steps = [each for each in steps if each <= back.step]
        if step in steps:
            raise ValueError(f"step {step} is already saved in {self._directory}")
        newest = max(steps, default=-1)
        if step < newest:
            raise ValueError(
                f"step {step} comes before the newest checkpoint in {self._directory}, that of step {newest}, with "
                "which a run would go on. To go on from an earlier step, restore it with restore(step=...) of this "
                "TrainCheckpointer, which sets the later ones aside; for another run, give another folder"
            )
        path = self._directory / str(step)
        if step not in checkpoint_steps(self._directory) and os.path.lexists(path):
            raise ValueError(f"{path} is there, and is not a checkpoint; save in another folder, or another step")

    def _goes_back(self, step: int) -> bool:
        """Return whether a run that went back to an earlier checkpoint saves where it had been before."""
        return self._went_back is not None and step <= self._went_back.newest

    def _restore(self, target: Target, step: Any) -> tuple[PyTree, Any, int]:
        """Return the filled state, the data state and the step."""
        self.wait()
        if step is not None:
            step = _check_step(step)
            # The first process's folder counts: a shared file system may show a checkpoint to some processes only.
            if gather_texts(str(step in self._steps()))[0] != "True":
                there = ", ".join(map(str, sorted(self._steps()))) or "none"
                raise FileNotFoundError(
                    errno.ENOENT, f"there is no checkpoint of step {step}, but of: {there}", str(self._directory)
                )
            newest = int(gather_texts(str(max(self._steps(), default=step)))[0])
            try:
                state, data = self._load(step, target)
            except DamagedError as error:
                self._raise_if_removed(step)
                raise ValueError(
                    f"checkpoint step {step} in {self._directory} is damaged: {error}. Restore another step"
                ) from None
            self._went_back = _WentBack(step, newest) if newest > step else None
            return state, data, step
        damaged: dict[int, str] = {}
        while newest := gather_texts(str(max(set(self._steps()) - damaged.keys(), default="")))[0]:
            step = int(newest)
            try:
                state, data = self._load(step, target)
            except DamagedError as error:
                damaged[step] = str(error)
                continue
            for bad, reason in damaged.items():
                # An older one was being removed, since the run that writes has saved the newer one meanwhile.
                if bad > step:
                    self._report_damaged(bad, f"{reason}; step {step} is used instead")
            self._went_back = None
            return state, data, step
        if damaged:
            listed = "; ".join(f"step {step}: {reason}" for step, reason in damaged.items())
            raise ValueError(f"no checkpoint in {self._directory} can be read: {listed}. Start again in another folder")
        raise FileNotFoundError(errno.ENOENT, "there is no checkpoint", str(self._directory))

    def _raise_if_removed(self, step: int) -> None:
        """Raise FileNotFoundError if the run that writes has removed a checkpoint while it was read."""
        if gather_texts(str(step in self._steps()))[0] != "True":
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

    def _opened_together(self, step: int, logged: list[BaseException]) -> ocp.training.Checkpointer:
        """Return the writer, which all processes open together."""
        if self._heartbeats is None:
            folder, run = self._directory / HEARTBEAT_FOLDER, gather_texts(uuid.uuid4().hex)[0]
            heartbeats = Heartbeats(folder, run, jax.process_index(), jax.process_count(), (self._timeout,))
            heartbeats.start()
            self._heartbeats = self._own_heartbeats = heartbeats
        self._heartbeats.measure(partial(size_of_save, self._directory, step))
        opened = in_thread(self._open_writer, step)
        self._wait_for(_Save(step, opened, logged))
        return opened.result()

    def _wait_for(self, save: _Save, begun: threading.Event | None = None) -> None:
        """Wait until a save has ended or begun.

        Raises:
            Exception: with several processes, if this one cannot write its part.
            TimeoutError: if another one cannot, is gone, or none makes progress.
        """
        if self._heartbeats is None:
            wait_for([save.written])
            return
        while not save.written.done() and not (begun is not None and begun.wait(_SOON)):
            if begun is None:
                wait_for([save.written], timeout=self._heartbeats.interval)
            self._raise_if_lost(save)

    def _raise_if_lost(self, save: _Save) -> None:
        if save.written.done() or self._heartbeats is None:
            return
        if save.logged:
            raise save.logged[0]
        lost = self._heartbeats.lost_process(self._timeout)
        if lost is not None:
            raise _LostProcessError(lost)
        line = self._heartbeats.standstill(self._timeout, clock="save_progress")
        if line is not None:
            raise TimeoutError(line)

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
            if not self._read_back:
                # This detects early a folder in which Orbax does not read what it wrote.
                self._damaged.add(step)
                read_back(self._directory / str(step))
                self._damaged.remove(step)
                self._read_back = True
            writer = self._writer
            if is_first() and writer is not None:
                remove_others(writer, self._directory, self._keep)
            if self._heartbeats is not None:
                self._heartbeats.measure(None)

    def _open_writer(self, step: int) -> ocp.training.Checkpointer:
        """Return the writer, after other checkpoints were moved out of the way of a step."""
        if is_first():  # one process locks for all of them
            self._lock.take()
        if self._damaged or self._goes_back(step):
            self._drop_writer()
            self._rename_damaged()
            self._set_later_aside(step)
        if self._writer is None:
            try:
                self._writer = new_writer(self._directory, self._names)
            except ValueError:
                # Orbax refuses a folder in which one checkpoint's metadata is malformed, so such ones are moved away.
                for other in self._steps():
                    try:
                        read_back(self._directory / str(other))
                    except DamagedError as error:
                        self._report_damaged(other, str(error))
                self._rename_damaged()
                self._writer = new_writer(self._directory, self._names)
        return self._writer

    def _drop_writer(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with quiet_orbax():
                writer.close()

    def _abandon(self) -> None:
        """Stop waiting: Orbax and its threads would wait for the other processes."""
        self._pending, self._writer = None, None
        self._end_heartbeats()

    def _end_heartbeats(self) -> None:
        heartbeats, self._own_heartbeats = self._own_heartbeats, None
        if heartbeats is not None:
            self._heartbeats = None
            heartbeats.stop()

    def _report_damaged(self, step: int, reason: str) -> None:
        self._damaged.add(step)
        if is_first():  # all of them found it damaged
            warn_caller(f"checkpoint step {step} in {self._directory} is damaged: {reason}", DamagedCheckpointWarning)

    def _rename_damaged(self) -> None:
        self._rename(sorted(self._damaged), "damaged")
        self._damaged.clear()

    def _set_later_aside(self, step: int) -> None:
        """Rename the checkpoints after the one to which the run went back, if it saves where it had been before."""
        back = self._went_back
        if back is None or not self._goes_back(step):
            return
        later = [each for each in self._steps() if each > back.step]
        self._rename(later, "abandoned")
        if is_first():
            names = ", ".join(f"{each}.abandoned" for each in later)
            text = "the run in %s went back to step %d; its later checkpoints are now %s"
            logging.getLogger("jax_te").warning(text, self._directory, back.step, names)

    def _rename(self, steps: list[int], suffix: str) -> None:
        # Several processes of a run share the folder: one of them renames.
        for step in steps if is_first() else ():
            target = self._directory / f"{step}.{suffix}"
            while target.exists():
                target = target.with_name(target.name + "+")
            (self._directory / str(step)).rename(target)
        gather_texts("renamed")  # none continues before

    @contextlib.contextmanager
    def _explained(self, step: int) -> Iterator[None]:
        """Turn the errors that Orbax and TensorStore raise for a failed write into one OSError."""
        try:
            yield
        except (OSError, RuntimeError, ValueError, DamagedError) as error:
            if self._heartbeats is None:
                # A writer that failed may fail again when it is closed.
                with contextlib.suppress(Exception):
                    self._drop_writer()
            if isinstance(error, FolderTakenError | LinkedFolderError):  # which say what to do themselves
                if self._heartbeats is not None:
                    self._heartbeats.fail(f"process {jax.process_index()}: {error}")
                    self._abandon()
                raise
            links = chain(error)
            full = any(_is_of(link, "No space left", errno.ENOSPC, errno.EDQUOT) for link in links)
            last = max(self._steps(), default=None)
            good = "there is no earlier checkpoint" if last is None else f"checkpoint step {last} is still good"
            cause = "no space left on the disk" if full else shortened(str(links[-1]))
            if isinstance(error, _LostProcessError):
                advice = "End this process and start all again"
            elif any(_is_of(link, "File exists", errno.EEXIST) for link in links):
                advice = "Another program seems to save in this folder: end it, or save elsewhere"
            else:
                advice = "Free some space, or save elsewhere"
            text = f"checkpoint step {step} could not be saved: {cause}; {good}. {advice}"
            if self._heartbeats is not None:
                self._heartbeats.fail(f"process {jax.process_index()}: {text}")
                self._abandon()
            raise OSError(errno.ENOSPC if full else errno.EIO, text, str(self._directory)) from error


def _is_of(error: BaseException, text: str, *numbers: int) -> bool:
    """Return whether an error is one of the operating system's.

    Args:
        error: error. TensorStore's are no OSErrors, and have the system's text alone.
        text: that text.
        numbers: the system's numbers.
    """
    number = getattr(error, "errno", None)
    return text in str(error) if number is None else number in numbers


class _LostProcessError(TimeoutError):
    """Another process of the run has failed, has ended, or shows no sign of life."""


class _Save(NamedTuple):
    """A save under way.

    Args:
        step: number of the step.
        written: future of the write.
        logged: errors of Orbax in this process, which wait for the other processes before anybody can raise them.
    """

    step: int
    written: Future[Any]
    logged: list[BaseException]


class _WentBack(NamedTuple):
    """A restore of an earlier checkpoint.

    Args:
        step: step of that checkpoint.
        newest: step of the newest one then.
    """

    step: int
    newest: int


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
