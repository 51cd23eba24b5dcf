"""Iterating, closing and forking: what all readers have in common."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Generator, Iterator
from typing import Generic, Self, TypeVar

from anabranch.core.legal_names import check_text, check_type
from anabranch.errors import AnabranchError, InvalidArgument, RetryError
from anabranch.ports import GroupMember

T = TypeVar("T")


class Iteration(Iterator[T], Generic[T]):
    """An iterator that is closed, or used as a context manager. One thread at a time, but for `close`.

    A loop holds only the generator, and that the reader: leaving the loop frees both, at once.
    """

    _member: GroupMember | None = None  # of the reader's group, if it has one
    _resumes_after: type[AnabranchError] = RetryError  # the call after such an error goes on

    def __init__(self) -> None:
        self._closed = True  # until all is made
        self._generator: Generator[T, None, None] | None = None

    @abstractmethod
    def _run(self) -> Generator[T, None, None]:
        """Everything from the reader's position on."""

    @abstractmethod
    def _free(self) -> None:
        """Free everything: the reader counts as closed already."""

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
        # At its end a process closes its client first, while modules are there to do it with.
        if not getattr(self, "_closed", True) and not sys.is_finalizing():
            self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free everything; with a group, commit what is processed first. Harmless if closed already."""
        if not self._closed:
            self._closed = True
            self._free()

    def _is_closed(self) -> bool:
        """Whether it is closed by now, perhaps by another thread."""
        return self._closed

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        self._closed = True
        if self._member is not None:
            self._member.leak()


def check_group(group: str | None) -> str | None:
    """The name of a group, checked by `check_text`; None: there is no group."""
    return None if group is None else check_text("a group's name", group)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, or None: without end."""
    if timeout is not None:
        check_type("a timeout, in seconds,", timeout, int, float)
    if timeout is not None and not 0 <= timeout < 1e9:
        raise InvalidArgument(f"timeout {timeout!r}: seconds, or None for ever")
    return timeout
