"""Clients that repeat: after an error that says "call again" they call once more, as a user's program does."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.errors import RetryError
from tests.sim.world import World

_PAUSE_S = 0.3  # mean


def repeating(world: World, client: Client) -> Client:
    """A client that repeats each call of itself and of its handles once after a `RetryError`."""
    return cast("Client", _Repeating(world, client))


class _Repeating:
    def __init__(self, world: World, handle: Any) -> None:
        self._repeating = world, handle

    def __getattr__(self, name: str) -> Any:
        world, handle = self.__dict__["_repeating"]
        found = getattr(handle, name)
        if name.startswith("_") or not callable(found):
            return found
        return _again(world, found)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *how: Any) -> Any:
        return self._repeating[1].__exit__(*how)


def _again(world: World, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def repeated(*given: Any, **named: Any) -> Any:
        try:
            found = call(*given, **named)
        except RetryError as error:
            world.note(world.running_name, f"again, after {type(error).__name__}")
            world.sleep(world.random.expovariate(1 / _PAUSE_S))
            found = call(*given, **named)
        return _Repeating(world, found) if isinstance(found, Transaction | Writer) else found

    return repeated
