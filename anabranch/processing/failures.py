"""Handlers that fail: their changes are taken back, they are tried again, and finally a dead letter is written."""

from __future__ import annotations

import asyncio
import logging
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from anabranch.core.limits import HEADERS, RESERVED
from anabranch.errors import (
    AnabranchError,
    EventTooLarge,
    FixCallError,
    InvalidArgument,
    read_back,
)
from anabranch.ports import TableError
from anabranch.processing.cut import Doing, time_of
from anabranch.processing.program import NotAHandler, Program
from anabranch.processors.numbers import Numbers
from anabranch.types import Event

log = logging.getLogger("anabranch.processor")

_ERROR_BYTES = 1024
_PAUSE_S, _LONGEST_S = 0.1, 2.0  # between tries
# Errors that count as a handler's failure: a time-out may cancel its task, and a library may call `sys.exit`.
FAILURES = (Exception, asyncio.CancelledError, SystemExit)


class HandlerFailed(FixCallError):
    """A handler raised: ``event`` (None: of a timer or a batch) is the one that the handler was called with."""

    def __init__(self, event: Event | None, error: BaseException, place: str = "") -> None:
        super().__init__(f"{place}{': ' if place else ''}{text_of(error)}")
        self.event = event
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """As for all errors; an error of the program that can't be pickled is replaced by its text."""
        error = self.error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - its class may raise anything
            error = AnabranchError(text_of(error))
        return read_back, (type(self), self.args, self.__dict__ | {"error": error})


class Case(NamedTuple):
    """The arguments of a failed call, for a dead letter. ``place``: where to find them again."""

    place: str
    value: bytes | None
    key: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp: int | None
    event: Event | None = None

    @classmethod
    def of(cls, event: Event) -> Case:
        """An event, as it came."""
        place = f"{event.stream}[{event.partition}]@{event.offset}"
        return cls(place, event.value, event.key, event.headers, event.timestamp, event)


class Failures:
    """Decides what follows from a handler's error. One thread; `stop`, once set, ends pauses between tries."""

    def __init__(self, app: Program, metrics: Numbers, stop: threading.Event) -> None:
        self._app, self._metrics, self._stop = app, metrics, stop
        self._lasting = set[
            type[BaseException]
        ]()  # classes of errors that outlasted all tries, and were not healed since
        self.exits: list[SystemExit] = []  # those that counted as failures

    def settle(
        self, at: Doing, case: Callable[[], Case], attempt: Callable[[], BaseException | None],
        error: BaseException | None = None,
    ) -> bool:  # fmt: skip
        """Try until ``attempt`` returns no failure. False: a dead letter was written.

        ``error``: the failure of a first try. Raises: HandlerFailed, and as `judge`.
        """
        lasting = self.tries(at, case, attempt, error)
        if lasting is not None:
            self.bury(at, case(), lasting)
        return lasting is None

    def tries(
        self, at: Doing, case: Callable[[], Case], attempt: Callable[[], BaseException | None],
        error: BaseException | None = None, *, retries: int | None = None,
    ) -> BaseException | None:  # fmt: skip
        """As `settle`, but returns the failure of the last try. ``retries``: None: the processor's."""
        tried, error = 0, error or attempt()
        while error is not None:
            tried += 1
            pause = self.judge(at, case, error, tried, retries)
            if pause is None:
                return error
            self._stop.wait(pause)
            before, error = error, attempt()
            if error is None:
                self.healed(before)
        return None

    def judge(
        self, at: Doing, case: Callable[[], Case], error: BaseException, tried: int,
        retries: int | None = None,
    ) -> float | None:  # fmt: skip
        """Take a failed try back. Returns seconds to wait before the next try; None: try no more.

        Raises: the error itself, if the cause is not the handler's event.
        """
        if isinstance(error, TableError | NotAHandler) or is_from_outside(error):
            raise error
        at.take_back()
        if isinstance(error, SystemExit):
            self.exits.append(error)
        self._metrics.add("processor_failures")
        trace = error if tried == 1 else None
        text = "%s: the handler of %s failed: %s"
        log.warning(text, self._app.name, case().place, text_of(error), exc_info=trace)
        kind = type(error)
        if tried <= (self._app.retries if retries is None else retries):
            # A producer may make the same mistake in all of its events: waiting for the first one is enough.
            return 0.0 if kind in self._lasting else min(_LONGEST_S, _PAUSE_S * 2 ** (tried - 1))
        self._lasting.add(kind)
        return None

    def healed(self, error: BaseException) -> None:
        """Note that the try after this error succeeded."""
        self._lasting.discard(type(error))

    def bury(self, at: Doing, case: Case, error: BaseException) -> None:
        """Write a dead letter. Raises: HandlerFailed (no stream is set for it); EventTooLarge, InvalidArgument."""
        stream = self._app.dead_letter
        if stream is None:
            raise HandlerFailed(case.event, error, case.place) from error
        headers = [
            *headers_of_copy(case.headers)[: HEADERS.value - 2],
            ("error", text_of(error).encode("utf-8", "replace")[:_ERROR_BYTES]),
            ("from", case.place.encode()),
        ]
        time = time_of(case.timestamp)
        try:
            # The stream may refuse the letter because of its time alone.
            if failure_of(at.write, stream, (case.value, case.key, headers, time)) is not None:
                at.write(stream, (case.value, case.key, headers, None))
        except (EventTooLarge, InvalidArgument) as refused:
            raise type(refused)(f"{case.place} can't be a dead letter: {refused}") from refused
        at.count("processor_dead_letters")
        at.undo.clear()


def headers_of_copy(
    headers: Sequence[tuple[str, bytes | None]],
) -> list[tuple[str, bytes | None]]:
    """Headers that a stream accepts: plain topics may have reserved names, and names that are not UTF-8."""
    return [
        (name.encode("utf-8", "replace").decode(), value)
        for name, value in headers
        if not name.startswith(RESERVED)
    ]


def text_of(error: BaseException) -> str:
    """Its class and message."""
    return f"{type(error).__name__}: {error}"


def failure_of(call: Callable[..., Any], *args: Any) -> BaseException | None:
    """The failure that a call raises, or None."""
    try:
        call(*args)
    except FAILURES as error:
        return error
    return None


async def failure_in(work: Awaitable[Any]) -> BaseException | None:
    """As `failure_of`."""
    try:
        await work
    except FAILURES as error:
        return error
    return None


def is_from_outside(error: BaseException) -> bool:
    """Whether a signal handler of the program raised it: then it is about the process, not the event."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {getattr(getattr(one, "__func__", one), "__code__", None) for one in handlers}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
