"""Work on a helper thread, or, without threads (in the simulator), at once in the caller's."""

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
        except Exception as error:  # noqa: BLE001 the result's taker gets it
            done.set_exception(error)
        return done


def helper(name: str, *, threads: bool) -> Executor:
    """One helper thread: an absent broker must not stop the rounds. Without ``threads``: no thread."""
    return ThreadPoolExecutor(1, name) if threads else _AtOnce()
