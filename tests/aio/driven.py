"""The asyncio client behind the calls of the blocking one, so that one suite of tests runs over both.

An event loop runs in a thread of its own. Each call is awaited there, while the caller's thread waits.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from inspect import isawaitable
from typing import Any, Self

import anabranch.aio
from anabranch.aio.handles import Handle, Opening, OpeningRows, Rows

ASKED = ("cluster", "identity")  # properties of the blocking handles


class LoopThread:
    """An event loop in a thread."""

    def __init__(
        self, new_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    ) -> None:
        self.loop = new_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="loop", daemon=True)
        self._thread.start()

    def run(self, awaited: Awaitable[Any]) -> Any:
        """The result of something to be awaited."""

        async def main() -> Any:
            return await awaited

        return asyncio.run_coroutine_threadsafe(main(), self.loop).result()

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class Driven:
    """A handle of `anabranch.aio`, with the blocking handle's calls."""

    def __init__(self, thread: LoopThread, handle: Handle) -> None:
        self._thread = thread
        self._handle = handle

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._handle, name)
        if name in ASKED:
            return self._thread.run(found())
        return self._calls(found) if callable(found) else found

    def _calls(self, method: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            async def made() -> Any:
                found = method(*args, **named)
                if isinstance(found, Opening | OpeningRows) or isawaitable(found):
                    found = await found
                return found

            found = self._thread.run(made())
            return Driven(self._thread, found) if isinstance(found, Handle) else found

        return call

    def __repr__(self) -> str:
        return repr(self._handle)

    def __enter__(self) -> Self:
        self._thread.run(self._handle.__aenter__())
        return self

    def __exit__(self, *left: Any) -> None:
        self._thread.run(self._handle.__aexit__(*left))

    def __reduce__(self) -> Any:
        return self._handle.__reduce__()

    def __iter__(self) -> Iterator[Any]:
        if not isinstance(self._handle, Rows):
            raise TypeError(f"{self._handle!r} is no iterator")
        rows = [self._handle.__aiter__()]
        try:
            while True:
                yield self._thread.run(rows[0].__anext__())
        except StopAsyncIteration:
            return
        finally:
            self._thread.loop.call_soon_threadsafe(rows.clear)  # a greenlet ends in its own thread

    def __next__(self) -> Any:
        if not isinstance(self._handle, Rows):
            raise TypeError(f"{self._handle!r} is no iterator")
        try:
            return self._thread.run(self._handle.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None


def blocking(handle: Any) -> Any:
    """The handle of the blocking client, also of a driven one."""
    return handle._handle._blocking if isinstance(handle, Driven) else handle


def connect(thread: LoopThread, *args: Any, **named: Any) -> Driven:
    """A client of `anabranch.aio.connect`, behind the calls of the blocking one."""

    async def made() -> anabranch.aio.AsyncClient:
        return await anabranch.aio.connect(*args, **named)

    return Driven(thread, thread.run(made()))
