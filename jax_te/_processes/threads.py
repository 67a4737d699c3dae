"""Calls in a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import jax

T = TypeVar("T")


def in_thread(call: Callable[..., T], *args: Any) -> Future[T]:
    """Return the future of a call in its own thread.

    At exit a process waits for the thread, unless the thread could wait for another process.
    """
    if jax.process_count() > 1:
        future = Future[T]()
        threading.Thread(target=_fill, args=(future, call, args), name="jax_te-save", daemon=True).start()
        return future
    executor = ThreadPoolExecutor(1, "jax_te-save")
    try:
        return executor.submit(call, *args)
    finally:
        executor.shutdown(wait=False)


def _fill(future: Future[T], call: Callable[..., T], args: tuple[Any, ...]) -> None:
    try:
        future.set_result(call(*args))
    except BaseException as error:
        future.set_exception(error)
