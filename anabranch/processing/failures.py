"""Errors of handlers: changes are undone, the handler is retried, and in the end a dead letter is written."""

from __future__ import annotations

import asyncio
import logging
import math
import pickle
import signal
import threading
from collections.abc import Awaitable, Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from anabranch.backoff import Backoff
from anabranch.clock import SystemClock
from anabranch.controller.monitor import Numbers
from anabranch.errors import (
    AnabranchError,
    EventTooLarge,
    FixCallError,
    InvalidArgument,
    NotReady,
    UndecodableValue,
    read_back,
)
from anabranch.ports import TableError
from anabranch.presentation.rows import bytes_text
from anabranch.processing.batch import HandlerContext
from anabranch.processing.program import NotAHandler, Program
from anabranch.types import Event
from anabranch.values import dead_letters, place_of, text_of

log = logging.getLogger("anabranch.processor")

_KEY_BYTES = 100  # of a key in an error
_FIRST_PAUSE_S = 0.1  # between tries
_LONGEST_PAUSE_S = 2.0
_LASTING_S = (
    60.0  # how long errors of a kind are tried without pauses, after its pauses changed nothing
)
_MOST_KINDS = 1000
_HERE = str(Path(__file__).parent)
# Errors of handlers: a time-out may cancel their asyncio task, and a library may exit.
FAILURES = (Exception, asyncio.CancelledError, SystemExit)


class HandlerFailed(FixCallError):
    """A handler raised an error, or the codec of its input did. ``event``: the event that failed; None for a timer
    or Arrow batch.
    """

    to_do = (
        'repair the handler or the codec; or give the processor dead_letter="SCOPE/STREAM", a stream for '
        "events that fail"
    )

    def __init__(self, event: Event | None, error: BaseException, place: str = "") -> None:
        super().__init__(f"{place}{': ' if place else ''}{text_of(error)}")
        self.event = event
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error as others are. If the program's own error can't be pickled, its text replaces it."""
        error = self.error
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # noqa: BLE001 - its class may raise anything
            error = AnabranchError(text_of(error))
        return read_back, (type(self), self.args, self.__dict__ | {"error": error})


class Case(NamedTuple):
    """The arguments of a failed call, for a dead letter. ``place``: where they came from."""

    place: str
    value: bytes | None
    key: bytes | None
    headers: Sequence[tuple[str, bytes | None]]
    timestamp: int | None
    event: Event | None = None

    @classmethod
    def of(cls, event: Event) -> Case:
        """An event, undecoded."""
        return cls(place_of(event), event.value, event.key, event.headers, event.timestamp, event)


class Failures:
    """Retries failed handlers, and writes dead letters. For one thread. No try begins after ``stop`` is set.

    All other events wait in a pause. So if the pauses for one event changed nothing, other events with an error of
    the same kind (class, and lines of code) are retried at once: a producer of bad events would stop the worker.
    An `OSError` (connections, time-outs) is no such kind: an outage is one error for all events.
    """

    def __init__(
        self, app: Program, metrics: Numbers, stop: threading.Event, *, pauses: bool = True
    ) -> None:
        """``pauses`` False: retry at once."""
        self._app, self._metrics, self._stop = app, metrics, stop
        self._pauses, self._clock = pauses, SystemClock()
        self._lasting: dict[Hashable, float] = {}  # kind of error -> until when it gets no pauses

    def try_or_bury(
        self, at: HandlerContext, case: Callable[[], Case], attempt: Callable[[], BaseException | None],
        error: BaseException | None = None,
    ) -> bool:  # fmt: skip
        """Try until ``attempt`` returns no failure. Returns False if a dead letter was written instead.

        ``error``: the error of a first try, if there was one. Raises: HandlerFailed, and as `retry`.
        """
        lasting = self.retry(at, case, attempt, error)
        if lasting is not None:
            self.bury(at, case(), lasting)
        return lasting is None

    def retry(
        self, at: HandlerContext, case: Callable[[], Case], attempt: Callable[[], BaseException | None],
        error: BaseException | None = None, *, retries: int | None = None,
    ) -> BaseException | None:  # fmt: skip
        """As `try_or_bury`, but returns the error of the last try (None: it succeeded), and writes no dead letter.

        ``retries``: the processor's by default.

        Raises: as `judge` and `check_not_stopping`.
        """
        pauses, error = new_pauses(), attempt() if error is None else error
        while error is not None:
            pause = self.judge(at, case, error, pauses, retries)
            if pause is None:
                return error
            if pause:
                self._stop.wait(pause)
            self.check_not_stopping()
            failed, error = error, attempt()
            if error is None:
                self.passed(failed)
        return None

    def judge(
        self, at: HandlerContext, case: Callable[[], Case], error: BaseException, pauses: Backoff,
        retries: int | None = None,
    ) -> float | None:  # fmt: skip
        """Undo a failed try. Returns the seconds to wait before the next try, or None to try no more.

        ``pauses``: the pauses between the tries so far.

        Raises: the error itself, if the event is not its cause.
        """
        kind = _kind_of(error)
        if isinstance(error, TableError | NotAHandler) or (
            kind not in self._lasting and is_from_outside(error)
        ):
            raise error
        if at.batch.tables is not None:
            at.batch.tables.check()
        at.take_back()
        self._metrics.add("processor_failures")
        is_last = pauses.count >= (self._app.retries if retries is None else retries)
        now = self._clock.monotonic()
        is_lasting = self._lasting.get(kind, -math.inf) > now
        if is_last or not is_lasting:  # a line for each try would be too many
            trace = None if pauses.count or is_lasting else error
            text = "%s: the handler of %s failed: %s"
            log.warning(text, self._app.name, case().place, text_of(error), exc_info=trace)
        if is_last:
            if pauses.count and not is_lasting and not isinstance(error, OSError):
                while len(self._lasting) >= _MOST_KINDS:
                    del self._lasting[next(iter(self._lasting))]
                self._lasting[kind] = now + _LASTING_S
            return None
        pause = pauses.begin()
        return 0.0 if is_lasting or not self._pauses else pause

    def passed(self, error: BaseException) -> None:
        """Note that a retry after this error succeeded: errors of its kind get their pauses."""
        self._lasting.pop(_kind_of(error), None)

    def check_not_stopping(self) -> None:
        """Raise `NotReady` if the worker stops: retries without pauses would make dead letters of good events."""
        if self._stop.is_set():
            raise NotReady("the worker ends; what failed is tried in its next life")

    def bury(self, at: HandlerContext, case: Case, error: BaseException) -> None:
        """Write a dead letter. Raises: HandlerFailed (no stream takes it), EventTooLarge, InvalidArgument."""
        stream = self._app.dead_letter
        if stream is None:
            raise HandlerFailed(case.event, error, self._cause(case, error)) from error
        fields = (case.value, case.key, case.headers, case.timestamp)
        letters = list(dead_letters(fields, case.place, error))
        for letter in letters[:-1]:
            if failure_of(at.write, stream, letter) is None:
                break
        else:
            try:
                at.write(stream, letters[-1])
            except (EventTooLarge, InvalidArgument) as refused:
                raise type(refused)(f"{case.place} can't be a dead letter: {refused}") from refused
        at.count("processor_dead_letters")
        at.undo.clear()

    def _cause(self, case: Case, error: BaseException) -> str:
        """Place, key and handlers of a failed event; empty if its codec failed: that error has its own place."""
        event = case.event
        if event is None:
            return case.place
        if isinstance(error, UndecodableValue) and error.event is event:
            return ""
        key = "" if event.key is None else f", key {bytes_text(event.key[:_KEY_BYTES])}"
        called = (one.call for one in self._app.handlers.get(event.stream, ()))
        names = " or ".join(
            getattr(call, "__qualname__", repr(call)[:_KEY_BYTES]) for call in called
        )
        return f"{case.place}{key}, handler {names}" if names else f"{case.place}{key}"


def _kind_of(error: BaseException) -> Hashable:
    """The class of an error, and the lines of code that it passed."""
    lines: list[tuple[object, int]] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if lines or not code.co_filename.startswith(
            _HERE
        ):  # first tries and retries are called differently
            lines.append((code, trace.tb_lineno))
        trace = trace.tb_next
    return type(error), tuple(lines)


def new_pauses() -> Backoff:
    """The pauses between the tries of one event."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, SystemClock())


def failure_of(call: Callable[..., Any], *args: Any) -> BaseException | None:
    """The error that a call raises, or None."""
    try:
        call(*args)
    except FAILURES as error:
        return error
    return None


async def failure_in(work: Awaitable[Any]) -> BaseException | None:
    """The error that an awaitable raises, or None."""
    try:
        await work
    except FAILURES as error:
        return error
    return None


def is_from_outside(error: BaseException) -> bool:
    """Whether a signal handler of the program raised an error, which then concerns the process, not the event."""
    handlers = (signal.getsignal(number) for number in signal.valid_signals())
    codes = {_code_of(one) for one in handlers if callable(one)}
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False


def _code_of(call: Any) -> object:
    """The code object of a function, method, partial or callable object; None for a built-in."""
    call = getattr(call, "func", call)
    call = call if hasattr(call, "__code__") else type(call).__call__
    return getattr(call, "__code__", None)
