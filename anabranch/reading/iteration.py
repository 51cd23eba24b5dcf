"""Iterating, closing and forking: the base of all readers, and the open readers of a client."""

from __future__ import annotations

import sys
import weakref
from abc import abstractmethod
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing
from typing import Any, Generic, Self, TypeVar

from anabranch.errors import (
    AnabranchError,
    InvalidArgument,
    RetryError,
    UndecodableValue,
    UnsupportedSetting,
)
from anabranch.ports import GroupMember
from anabranch.protocol.legal_names import check_text, check_type
from anabranch.reading.committed_log import CommittedLog, Groups, ReaderPorts

T = TypeVar("T")
R = TypeVar("R", bound="Iteration[Any]")


class Iteration(Iterator[T], Generic[T]):
    """A reader: an iterator to be closed, or used as a context manager. One thread at a time, except for `close`.

    A loop references only the generator, and the generator the reader, so leaving the loop frees both at once.
    """

    _member: GroupMember | None = None  # of the reader's group, if it has one
    # After such an error `next` continues.
    _resumes_after: type[AnabranchError] | tuple[type[AnabranchError], ...] = (
        RetryError,
        UndecodableValue,
    )

    def __init__(self) -> None:
        self._closed = True  # until `__init__` of the subclass is done
        self._generator: Generator[T, None, None] | None = None

    @abstractmethod
    def _run(self) -> Generator[T, None, None]:
        """Yield everything from the reader's position on."""

    @abstractmethod
    def _free(self) -> None:
        """Free everything. Called by `close`, after the reader is marked as closed."""

    def __iter__(self) -> Generator[T, None, None]:
        return self._run()

    def __next__(self) -> T:
        if self._generator is None:
            self._generator = self._run()
        try:
            return next(self._generator)
        except self._resumes_after:
            self._generator = None
            raise

    def __del__(self) -> None:
        # A process that ends has closed its clients already, while modules still existed.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything. A member of a group first commits what is processed. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._free()

    def _is_closed(self) -> bool:
        """Whether the reader is closed, perhaps by another thread."""
        return self._closed

    def after_fork(self) -> None:
        """In a forked child: never free anything."""
        self._closed = True
        if self._member is not None:
            self._member.leak()


class Readers:
    """The open readers of one client. ``timeout``: seconds that a reader's question may take."""

    def __init__(self, ports: ReaderPorts, timeout: float) -> None:
        self.ports = ports
        self.timeout = timeout
        self._open: weakref.WeakSet[Iteration[Any]] = weakref.WeakSet()

    def add(self, reader: R) -> R:
        """Close this reader when the client closes; returns it."""
        self._open.add(reader)
        return reader

    @property
    def groups(self) -> Groups:
        """Consumer groups. Raises: UnsupportedSetting."""
        if self.ports.groups is None:
            raise UnsupportedSetting("this client has no view of consumer groups")
        return self.ports.groups

    def source(self) -> AbstractContextManager[CommittedLog]:
        """A new log for a few questions, apart from the logs of readers; leaving the ``with`` block closes it."""
        return closing(self.ports.committed_log(self.timeout))

    def close(self) -> None:
        for reader in list(self._open):
            reader.close()

    def after_fork(self) -> None:
        """In a forked child: never free anything."""
        for reader in list(self._open):
            reader.after_fork()


def check_group(group: str | None) -> str | None:
    """The name of a group, checked by `check_text`; None without a group."""
    return None if group is None else check_text("a group's name", group)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, or None for no limit."""
    if timeout is not None:
        check_type("a timeout, in seconds,", timeout, int, float)
    if timeout is not None and not 0 <= timeout < 1e9:
        raise InvalidArgument(f"timeout {timeout!r}: seconds, or None for ever")
    return timeout
