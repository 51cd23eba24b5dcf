"""An open database: half-read rows end with it, and in a forked child nothing of it is freed."""

from __future__ import annotations

import ctypes
import os
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from functools import wraps
from itertools import chain
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from anabranch.errors import IllegalState, NotForkSafe

_AGAIN = 1000  # tries to end rows that another thread takes a step of, a millisecond apart
_held: weakref.WeakSet[Held] = weakref.WeakSet()
_opener = [0]  # the process that opened the first database
_SPAWN = "open one in a process that is started anew (multiprocessing's 'spawn')"
T = TypeVar("T")
P = ParamSpec("P")


class Held:
    """A database, and the rows that readers take from it."""

    _db: Any = None

    def __init__(self) -> None:
        """Raises: NotForkSafe (it would wait for threads that no fork takes along)."""
        _opener[0] = _opener[0] or os.getpid()
        if _opener[0] != os.getpid():
            raise NotForkSafe(f"a replica was opened before a fork: {_SPAWN}")
        self.forked = False
        self._closed = False
        self._half_read: weakref.WeakSet[Generator[Any, None, None]] = weakref.WeakSet()
        _held.add(self)

    def check_fork(self) -> None:
        """`NotForkSafe` in a forked child."""
        if self.forked:
            raise NotForkSafe(f"these tables were opened before a fork: {_SPAWN}")

    def after_fork(self) -> None:
        """In a forked child: freeing it would wait for threads that are not there."""
        self.forked = True
        for thing in (self._db, *self._half_read):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))

    def give(self, rows: Generator[T, None, None]) -> Iterator[T]:
        """Rows for a reader, who may stop in their middle."""
        self._half_read.add(rows)
        return chain(rows, self._end())

    def _end(self) -> Iterator[Any]:
        self.check_open()
        yield from ()

    def check_open(self) -> None:
        """`IllegalState` once it is closed; `NotForkSafe`."""
        self.check_fork()
        if self._closed:
            raise IllegalState("the replica is closed: open another one")

    def end_half_read(self) -> None:
        """Free all rows that were given: they would keep the folder locked. Their readers get an error."""
        self._closed = True
        for rows in list(self._half_read):
            for _ in range(_AGAIN):
                try:
                    rows.close()
                except ValueError:  # another thread is in it
                    time.sleep(0.001)
                else:
                    break


H = TypeVar("H", bound=Held)


def given(
    read: Callable[Concatenate[H, P], Iterator[T]],
) -> Callable[Concatenate[H, P], Iterator[T]]:
    """Let a method's generator end with its database."""

    @wraps(read)
    def method(self: H, /, *args: P.args, **named: P.kwargs) -> Iterator[T]:
        return self.give(cast("Generator[T, None, None]", read(self, *args, **named)))

    return method


def _after_fork_in_child() -> None:
    for each in list(_held):
        each.after_fork()
    # RocksDB's own end of the process would wait for its threads, which are not there: the child ends before it.
    if _opener[0] and hasattr(libc := ctypes.CDLL(None), "on_exit"):  # glibc
        libc.on_exit(libc["_exit"], None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)
