"""A helper thread for slow work. The simulator has no threads: there, the caller's thread does the work at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any


class _AtOnce(Executor):
    """An executor that runs each call before `submit` returns."""

    def submit(self, call: Callable[..., Any], /, *given: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(call(*given, **named))
        except Exception as error:  # noqa: BLE001 raised by `result`
            done.set_exception(error)
        return done


def helper(name: str, *, threads: bool) -> Executor:
    """An executor with one thread, so that a slow broker delays no round. ``threads`` False: without a thread."""
    return ThreadPoolExecutor(1, name) if threads else _AtOnce()
