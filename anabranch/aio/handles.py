"""The bases of the handles in `anabranch.aio`: each has a handle of the blocking client, and calls it."""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
)
from inspect import isawaitable
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from anabranch.aio.loop import END, LoopWaits, park
from anabranch.errors import InvalidArgument

B = TypeVar("B")
T = TypeVar("T")
H = TypeVar("H", bound="Handle")


class Handle:
    """A handle of the blocking client, whose calls run in greenlets of an event loop."""

    __slots__ = ("__weakref__", "_blocking", "_waits")

    _blocking: Any  # each subclass says of which class

    def __init__(self, waits: LoopWaits, blocking: Any) -> None:
        self._waits = waits
        self._blocking = blocking

    def __repr__(self) -> str:
        return f"<aio {self._blocking!r}>"

    def __reduce__(self) -> Any:
        self._blocking.__reduce__()  # a snapshot says what to pickle instead
        raise TypeError(f"{self!r} can't be pickled: it belongs to an event loop")

    async def __aenter__(self) -> Self:
        self._blocking.__enter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._waits.call(self._blocking.__exit__, kind, error, trace)


class Rows(Handle, AsyncIterator[T]):
    """An iterator of the blocking client, for ``async for``."""

    __slots__ = ()

    def __init__(self, waits: LoopWaits, blocking: Iterator[T]) -> None:
        super().__init__(waits, blocking)

    def __aiter__(self) -> AsyncIterator[T]:
        # A reader's `iter` is not itself: see `reading.iteration.Iteration`.
        return Iterating(self._waits, iter(self._blocking))

    async def __anext__(self) -> T:
        found: T = await self._waits.call(next, self._blocking, END)
        if found is END:
            raise StopAsyncIteration
        return found


class Iterating(AsyncIterator[T]):
    """One loop over rows, in a greenlet of its own: an item then takes two thirds of the time."""

    __slots__ = ("_items", "_waits")

    def __init__(self, waits: LoopWaits, rows: Iterator[T]) -> None:
        self._waits = waits
        self._items = waits.items(rows)

    async def __anext__(self) -> T:
        found: T = await self._waits.next(self._items)
        if found is END:
            raise StopAsyncIteration
        return found


class Opening(Generic[H]):
    """A handle that is yet to be made: await it, or use it in ``async with``."""

    def __init__(self, make: Callable[[], Coroutine[Any, Any, H]]) -> None:
        self._make = make
        self._made: H | None = None

    def __await__(self) -> Generator[Any, None, H]:
        return self._make().__await__()

    async def __aenter__(self) -> H:
        self._made = made = await self._make()
        return await made.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._made is not None:
            await self._made.__aexit__(kind, error, trace)


class OpeningReader(Opening[H], Generic[H, T]):
    """A reader that is yet to be made. ``async for`` makes it, and closes it at the end."""

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        async with self as reader:
            events: Any = reader
            async for event in events:
                yield event


def opening(
    waits: LoopWaits, kind: Callable[[LoopWaits, B], H], make: Callable[[], B]
) -> Opening[H]:
    """The `Opening` of a handle that a blocking call makes."""

    async def made() -> H:
        return kind(waits, await waits.call(make))

    return Opening(made)


def opening_reader(
    waits: LoopWaits, kind: Callable[[LoopWaits, B], H], make: Callable[[], B]
) -> OpeningReader[H, Any]:
    """The `OpeningReader` of a reader that a blocking call makes."""

    async def made() -> H:
        return kind(waits, await waits.call(make))

    return OpeningReader(made)


class OpeningRows(Generic[T]):
    """Rows that are yet to be read: await them for an iterator, or read them by ``async for``."""

    def __init__(self, waits: LoopWaits, make: Callable[[], Iterator[T]]) -> None:
        self._waits = waits
        self._make = make

    async def _opened(self) -> Rows[T]:
        return Rows(self._waits, iter(await self._waits.call(self._make)))

    def __await__(self) -> Generator[Any, None, Rows[T]]:
        return self._opened().__await__()

    async def __aiter__(self) -> AsyncGenerator[T, None]:
        async for row in await self:
            yield row


def opening_client(kind: Callable[[LoopWaits, B], H], make: Callable[[], B]) -> Opening[H]:
    """The `Opening` of a client of the event loop that runs when it is made."""

    async def made() -> H:
        waits = LoopWaits(asyncio.get_running_loop())
        return kind(waits, await waits.call(make))

    return Opening(made)


def in_loop(function: Callable[[H], Awaitable[T]], handle: H) -> T:
    """Await an async function of the caller's, from a greenlet. Raises: InvalidArgument (it is not async)."""
    awaited: object = function(handle)
    if not isawaitable(awaited):
        raise InvalidArgument("give an async function: the event loop runs it")
    found: T = park(awaited)
    return found


def blocking(handle: Handle | None) -> Any:
    """The handle of the blocking client that an asyncio handle calls; None for None."""
    return getattr(handle, "_blocking", handle)
