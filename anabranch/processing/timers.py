"""Timers and windows: rows of a hidden store, set and fired in commits like any change.

A task's event time is a row, too. The end of each input transaction advances it; then the due timers fire in the
order of (due, store, key). So the results do not depend on where batches begin and end.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from heapq import heappop, heappush
from math import inf
from typing import TYPE_CHECKING, Any, NoReturn, cast

from anabranch.errors import IllegalState, InvalidArgument
from anabranch.processing.batch import HandlerContext, TaskRows, WorkBatch, current_context
from anabranch.processing.failures import Case, Failures, failure_of
from anabranch.processing.program import Output, TimerHandler, check_plain, check_result
from anabranch.processing.stores import TIME, Keyed, after, prefix_of
from anabranch.protocol.hybrid_time import to_ms
from anabranch.protocol.legal_names import check_type, is_plain
from anabranch.protocol.limits import copied_name, copied_time
from anabranch.values import RAW, Codec

if TYPE_CHECKING:
    from anabranch.processing.aggregates import Aggregate
    from anabranch.types import Event

_NOW = prefix_of(TIME) + b"e"
# Followed by a scope. The value: event time so far and timestamp of an input commit of which a part was handled.
_PART = prefix_of(TIME) + b"p"
_DUE = prefix_of(TIME) + b"d"
_WALL = prefix_of(TIME) + b"w"
_NUMBER = 2  # bytes of a store's number
_SIZE = 8  # bytes of a time


def _time(ms: int) -> bytes:
    return ms.to_bytes(_SIZE, "big")


def event_time(batch: WorkBatch, task: int) -> int:
    """The event time of a task, in Unix milliseconds; 0 before the first event."""
    found = batch.times.get(task)
    if found is None:
        found = batch.times[task] = int.from_bytes(batch.get(task, _NOW) or b"", "big")
    return found


def _put_due(at: HandlerContext, task: int, kind: bytes, due: int, row: bytes) -> None:
    """Set a timer's row. If it is due already, its value is the event time: a later event time has to fire it.

    So the timer fires at the same event time wherever batches end.
    """
    now = event_time(at.batch, task) if kind == _DUE else -1
    at.put_due(task, kind, due, row, _time(now) if due <= now else b"")


class Timed(Keyed):
    """A store that follows the event time of its tasks. `TimeOfTasks` calls its methods."""

    late: Output | None = None

    def begin_batch(self, at: HandlerContext, now_ms: int) -> None:
        """Begin a batch for the context's task. ``now_ms``: of the wall clock."""

    def before_due(self, at: HandlerContext, now: int) -> None:
        """Note the new event time of the context's task, before what is due fires."""

    def fire(self, key: bytes, due: int) -> None:
        """Do what is due at a time for the rest of a row's key."""

    def case(self, place: str, row: bytes, due: int, data: bytes | None) -> Case:
        """The arguments of a failed call, for a dead letter. ``data``: the value of the row as stored."""
        return Case(place, data, row, (), due)

    def drop(self, at: HandlerContext, place: bytes, due: int) -> None:
        """Delete what is due at this place, because it failed."""
        at.put(at.task, place, None)

    def set_due(
        self, at: HandlerContext, task: int, place: bytes, due: int, *, firing: bool = False
    ) -> None:
        """Let a place fire at an event time. ``firing``: it fires now, and may do so again at once."""
        if firing:
            at.put_due(task, _DUE, due, place, b"")
        else:
            _put_due(at, task, _DUE, due, place)

    def cancel_due(self, at: HandlerContext, task: int, place: bytes, due: int) -> None:
        """Take back `set_due`."""
        at.put(task, _DUE + _time(due) + place, None)

    def next_due(self, at: HandlerContext, place: bytes) -> int | None:
        """The next time of a place that has fired, if it is for the same call of `TimeOfTasks`."""
        return None

    def note_late(self, at: HandlerContext, event: Event) -> None:
        """Count a late event, and write it to the stream for such, unchanged.

        ``event``: the event that is handled, or an event that waited for it in a join.
        """
        at.count("processor_late_events", self.name)
        if self.late is not None:
            headers = [(copied_name(name), value) for name, value in event.headers]
            when = copied_time(event.timestamp)
            waited = at.waited
            value = waited[1] if waited is not None and waited[0] is event else at.value
            at.write(self.late.stream, (value, at.key, headers, when))


class Timer(Timed):
    """Calls a function at times that handlers set, one for each key."""

    def __init__(self, name: str, call: TimerHandler, *, wall: bool) -> None:
        super().__init__(name, RAW)
        self._call = call
        self._kind = _WALL if wall else _DUE

    @property
    def kind(self) -> str:
        return "a timer by the wall clock" if self._kind == _WALL else "a timer by event time"

    def set(self, key: bytes | str, at: float) -> None:
        """Call the function for this key at ``at`` (Unix milliseconds). This replaces an earlier setting."""
        check_type("a timer's time", at, int, float)
        if not 0 <= at < 1 << 63:
            raise InvalidArgument(f"a timer at {at!r}: Unix milliseconds from 0")
        due = _time(int(at))
        context = current_context()
        self.cancel(key)
        task, row = self._place(context, key)
        self._set(context, task, row, due)
        _put_due(context, task, self._kind, int(at), row)

    def cancel(self, key: bytes | str) -> None:
        """Delete the time of this key, if one is set."""
        at = current_context()
        task, row = self._place(at, key)
        due = at.batch.get(task, row)
        if due is not None:
            at.put(task, row, None)
            at.put(task, self._kind + due + row, None)

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, int]:
        """As of `Keyed`: a key, and its time in Unix milliseconds."""
        return row, int.from_bytes(data, "big")

    def fire(self, key: bytes, due: int) -> None:
        at = current_context()
        at.put(at.task, self.prefix + key, None)
        check_result(self._call, self._call(self.keys.decode(key), due))

    def case(self, place: str, row: bytes, due: int, _: bytes | None) -> Case:
        """The arguments of the timer's function, for a dead letter."""
        return Case(place, None, row, (), due)


class Periodic(Timed):
    """Calls a function in each task when a time passes a multiple of a period; once, if it passes several."""

    def __init__(
        self, name: str, call: Callable[[int], Any], seconds: float, *, wall: bool
    ) -> None:
        super().__init__(name, RAW, local=True)
        check_type("a period", seconds, int, float)
        if not 0.001 <= seconds < 1e9:
            raise InvalidArgument(f"{name}: every {seconds} seconds")
        self._call = call
        self._period = round(seconds * 1000)
        self._kind = _WALL if wall else _DUE
        self._wall_ms = 0

    @property
    def kind(self) -> str:
        """As of `Keyed`. The period may change."""
        return f"a periodic call by {'the wall clock' if self._kind == _WALL else 'event time'}"

    def begin_batch(self, at: HandlerContext, now_ms: int) -> None:
        self._wall_ms = now_ms
        if self._kind == _WALL:
            self._keep(at, now_ms)

    def before_due(self, at: HandlerContext, now: int) -> None:
        if self._kind == _DUE:
            self._keep(at, now)

    def fire(self, key: bytes, due: int) -> None:
        at = current_context()
        now = self._now(at, due)
        self._set_next(at, now)
        check_result(self._call, self._call(now - now % self._period))

    def drop(self, at: HandlerContext, place: bytes, due: int) -> None:
        self._set_next(at, self._now(at, due))

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, int]:
        """As of `Keyed`: an empty key, and the next time in Unix milliseconds."""
        return row, int.from_bytes(data, "big")

    def _now(self, at: HandlerContext, due: int) -> int:
        now = self._wall_ms if self._kind == _WALL else event_time(at.batch, at.task)
        return max(now, due)

    def _keep(self, at: HandlerContext, now: int) -> None:
        """Set the next call, if no call is set, or if a former program with a longer period has set it."""
        data = at.batch.get(at.task, self.prefix)
        if data is not None:
            if int.from_bytes(data, "big") <= now + self._period:
                return
            at.put(at.task, self._kind + data + self.prefix, None)
        self._set_next(at, now)

    def _set_next(self, at: HandlerContext, now: int) -> None:
        due = now - now % self._period + self._period
        at.put(at.task, self.prefix, _time(due))
        at.put_due(at.task, self._kind, due, self.prefix, b"")


class Clock:
    """The event time of tasks, for handlers."""

    @property
    def event_time(self) -> int:
        """The event time of the task that is at work, in Unix milliseconds; 0 before its first input transaction.

        Raises: IllegalState (no handler runs), InvalidArgument (an Arrow batch is of several tasks).
        """
        at = current_context()
        if at.task < 0:
            raise InvalidArgument(
                "a batch of a stream has events of several tasks: handle single events"
            )
        return event_time(at.batch, at.task)


class Window:
    """The value of a key in a window, from ``start`` up to ``end`` (Unix milliseconds). For handlers only."""

    __slots__ = ("_at", "_closed", "_found", "_row", "_task", "_windows", "end", "raw", "start")

    def __init__(
        self, windows: Windows, key: bytes, start: int, at: HandlerContext | None = None,
        *, closed: bool = False,
    ) -> None:  # fmt: skip
        """``at``: the call of a handler, if the key is known to be of its task."""
        self.start, self.end = start, start + windows.size
        self._windows, self.raw, self._closed = windows, key, closed
        self._at = at  # the last call
        self._found = -1  # `HandlerContext.removals` when the last read has found a value
        if at is not None:
            self._task, self._row = at.task, windows.prefix + _time(start) + key
        else:
            self._task, self._row = -1, b""

    @property
    def key(self) -> Any:
        """The key, as events have it."""
        return self._windows.keys.decode(self.raw)

    @property
    def value(self) -> Any:
        """The value; None if it is not set yet. Setting it raises `IllegalState` once the window is closed."""
        at = current_context()
        if at is not self._at or at.task != self._task:
            self._find(at)
        data = at.batch.get(self._task, self._row)
        if data is None:
            return None
        self._found = at.removals
        windows = self._windows
        state = windows.decoded(data)
        return state if windows.into is None else windows.result(state)

    @value.setter
    def value(self, value: Any) -> None:
        if self._closed:
            self._windows.refuse(self.start)
        at = current_context()
        if at is not self._at or at.task != self._task:
            self._find(at)
        exists = self._found == at.removals
        self._windows.put(at, self._row, self.start, value, exists=exists)
        self._found = at.removals

    def _find(self, at: HandlerContext) -> None:
        """Compute the window's row, for the present call of a handler."""
        self._task, self._row = self._windows.row(at, self.raw, self.start)
        self._at, self._found = at, -1


class Windows(Timed):
    """State by key and window of event time, deleted when the window closes."""

    def __init__(
        self, name: str, codec: Codec, size: float, every: float | None, grace: float,
        late: Output | None, *, into: Aggregate | None = None,
    ) -> None:  # fmt: skip
        super().__init__(name, codec)
        self.into = into
        for what, value in (("size", size), ("every", every or size), ("grace", grace)):
            check_type(what, value, int, float)
            if not 0 <= value < 1e9 or (value < 0.001 and what != "grace"):
                raise InvalidArgument(f"windows {name}: {what}={value} seconds")
        if every is not None and every > size:
            raise InvalidArgument(
                f"windows {name}: every={every} is above size={size}, so that some events fell into no window"
            )
        self.size = round(size * 1000)
        self._every = round((every or size) * 1000)
        self._grace = round(grace * 1000)
        self._kept = self.size + self._grace  # from the start of a window until it closes
        self.late, self.decoded = late, codec.decode
        self._closed: Callable[[Window], Any] | None = None

    @property
    def kind(self) -> str:
        """As of `Keyed`. The grace is left out, because it may change."""
        what = self._codec.name or "values"
        return f"windows of {self.size} ms every {self._every} ms, of {what}" + (
            f", {self.into.name}" if self.into else ""
        )

    def on_close(self, call: Callable[[Window], Any]) -> Callable[[Window], Any]:
        """Decorate a function of a `Window` that is called once, when it closes. Raises: InvalidArgument."""
        check_plain(f"on_close of {self.name}:", call)
        self._closed = call
        return call

    def of(self, event: Event) -> Iterator[Window]:
        """The open windows of an event's time, the earliest first; none for an event too far ahead (``ahead``).

        Raises: InvalidArgument (it has no key).
        """
        at = current_context()
        key: Any = event.key
        if key.__class__ is not bytes:
            key = self._raw(at, event)
        if at.placed and key is at.key:
            known: HandlerContext | None = at
        else:
            known = at if at.batch.known.get(key) == at.task and not at.own_key else None
        return iter([Window(self, key, start, known) for start in self._open(at, event)])

    def add(self, event: Event) -> None:
        """Add an event to all of its open windows by ``into``. Raises: InvalidArgument, EventTooLarge."""
        into = self.into
        if into is None:
            raise InvalidArgument(f"windows {self.name} have no into=")
        at = current_context()
        key = self._raw(at, event)
        for start in self._open(at, event):
            _, row = self.row(at, key, start)
            self.put(at, row, start, into.after(self.state(at, row), event))

    def _raw(self, at: HandlerContext, event: Event) -> bytes:
        given = cast("Any", event.key)
        if given is None:
            raise InvalidArgument(f"windows {self.name} are by key, and the event has none")
        return given if given.__class__ is bytes else self.raw_of(event, at.key)

    def _open(self, at: HandlerContext, event: Event) -> Sequence[int]:
        """The starts of the open windows of an event's time. If it is late for any, it is noted as late."""
        if at.batch.is_ahead(event):
            self.note_late(at, event)
            return ()
        # Windows that begin at this time or earlier are closed.
        over = event_time(at.batch, at.task) - self._kept
        time, every = max(event.timestamp, 0), self._every
        last = time - time % every
        if every == self.size and last > over:
            return (last,)
        first = max(0, last - (self.size - 1) // every * every)
        starts = [start for start in range(first, last + 1, every) if start + self.size > time]
        found = [start for start in starts if start > over]
        if len(found) < len(starts):
            self.note_late(at, event)
        return found

    def entry(self, row: bytes, data: bytes) -> tuple[tuple[bytes, int], Any]:
        """As of `Keyed`: a key with the window's start, and the window's value."""
        start = int.from_bytes(row[:_SIZE], "big")
        return (row[_SIZE:], start), self.result(self._codec.decode(data))

    def is_of(self, row: bytes, key: bytes) -> bool:
        return row[_SIZE:] == key

    def shown(self, rows: Mapping[bytes, bytes]) -> list[tuple[int, Any]] | None:
        """As of `Keyed`: start and value of each window of a key."""
        entries = (self.entry(row, data) for row, data in sorted(rows.items()))
        return [(start, value) for (_, start), value in entries] or None

    def result(self, state: Any) -> Any:
        """A state's value for users."""
        return state if state is None or self.into is None else self.into.result(state)

    def state(self, at: HandlerContext, row: bytes) -> Any:
        """The state in a window's row; None without one."""
        data = at.batch.get(at.task, row)
        return None if data is None else self.decoded(data)

    def put(
        self, at: HandlerContext, row: bytes, start: int, state: Any, *, exists: bool = False
    ) -> None:
        """Set the state in a window's row. The first one also sets the timer that closes the window.

        ``exists``: whether there is a row for certain. Raises: IllegalState (the window is closed), EventTooLarge.
        """
        task = at.task
        if not exists and at.batch.get(task, row) is None:
            closes = start + self._kept
            if closes <= event_time(at.batch, task):
                self.refuse(start)
            _put_due(at, task, _DUE, closes, row)
        self._set(at, task, row, self._codec.encode(state))

    def row(self, at: HandlerContext, key: bytes, start: int) -> tuple[int, bytes]:
        """The task, which is that of the call, and the row of a key's window. Raises: as `_place`."""
        task, _ = self._place(at, key)
        return task, self.prefix + _time(start) + key

    def refuse(self, start: int) -> NoReturn:
        """Refuse a change of a closed window. Raises: IllegalState."""
        raise IllegalState(
            f"window {start} of {self.name} is closed: a value that is set now would be lost"
        )

    def fire(self, key: bytes, _: int) -> None:
        """Close the window of a row's key: call the function, and delete the value."""
        start, of = int.from_bytes(key[:_SIZE], "big"), key[_SIZE:]
        at = current_context()
        if self._closed is not None:
            at.key = of
            check_result(self._closed, self._closed(Window(self, of, start, closed=True)))
        at.put(at.task, self.prefix + key, None)

    def case(self, place: str, row: bytes, due: int, data: bytes | None) -> Case:
        """The arguments of `on_close`, for a dead letter. ``data``: the value as stored."""
        return Case(place, data, row[_SIZE:], (), due)


class TimeOfTasks:
    """Advances the tasks' event time, and fires the timers that are due."""

    def __init__(
        self,
        timers: Iterable[Timed],
        failures: Failures,
        idle: float | None,
        is_over: Callable[[WorkBatch], bool],
        ahead: float | None = None,
    ) -> None:
        """``idle``, ``ahead``: as in `Processor`. ``is_over``: whether a batch may fire no more timers."""
        self._is_over = is_over
        self._ahead_ms = None if ahead is None else ahead * 1000
        self._idle_ms = None if idle is None else idle * 1000
        self._wall_ms = self._latest = 0
        self._last_event_ms: dict[int, int] = {}  # when a task's last event came, by the wall clock
        self._timers = {one.prefix: one for one in timers}
        self._begun = [one for one in self._timers.values() if _has(one, Timed.begin_batch)]
        self._noting = [one for one in self._timers.values() if _has(one, Timed.before_due)]
        self._failures = failures
        # Tasks and scopes that may have a row of `_PART`; the batch has the row or not.
        self._parted = set[tuple[int, bytes]]()

    def resume(self, table: TaskRows, tasks: Collection[int]) -> None:
        """Begin with these tasks, and find the tasks that have handled a part of an input transaction."""
        end = after(_PART)
        table.due.clear()
        self._last_event_ms = {}
        times = (table.get(task, _NOW) or b"" for task in tasks)
        self._latest = max((int.from_bytes(time, "big") for time in times), default=0)
        self._parted = {
            (task, row[len(_PART) :]) for task in tasks for row, _ in table.scan(task, _PART, end)
        }

    def is_ahead(self, event: Event) -> bool:
        """Whether an event's time is too far after its commit, or, of a plain topic, after the worker's clock."""
        if self._ahead_ms is None:
            return False
        return event.timestamp > self.latest_of(event.stream, event.commit_timestamp)

    def latest_of(self, stream: str, commit: int) -> float:
        """The highest time of an event of an input commit that is not too far ahead, in Unix milliseconds.

        ``commit``: its commit timestamp.
        """
        if self._ahead_ms is None:
            return inf
        return (self._wall_ms if is_plain(stream) else to_ms(commit)) + self._ahead_ms

    def before(self, at: HandlerContext, scope: str, commit: int) -> None:
        """End earlier input commits of the scope before this one begins. ``commit``: its commit timestamp.

        A task without events in the last part of an input commit has not seen its end in `move`.
        """
        part = scope.encode()
        for task in sorted(self._in_parts(at.batch, part, commit - 1)):
            self._end(at, task, part, 0)

    def move(
        self, at: HandlerContext, scope: str, commit: int, latest: dict[int, int], *, whole: bool
    ) -> None:
        """At the end of an input commit (``whole``), advance event times, and fire due timers. Else note the part.

        ``latest``: task -> the latest event time of the commit's part that was handled now.
        """
        part = scope.encode()
        self._last_event_ms |= dict.fromkeys(latest, self._wall_ms)
        if whole:
            for task in sorted(latest.keys() | self._in_parts(at.batch, part, commit)):
                self._end(at, task, part, latest.get(task, 0))
            return
        for task, timestamp in latest.items():
            seen = at.batch.get(task, _PART + part) or b""
            timestamp = max(timestamp, int.from_bytes(seen[:_SIZE], "big"))
            at.put(task, _PART + part, _time(timestamp) + _time(commit))
            self._parted.add((task, part))

    def _in_parts(self, batch: WorkBatch, part: bytes, commit: int) -> set[int]:
        """Tasks that have handled a part, but not the end, of an input commit of the scope up to this one."""
        return {
            task
            for task, of in self._parted
            if of == part
            and (row := batch.get(task, _PART + part)) is not None
            and int.from_bytes(row[_SIZE:], "big") <= commit
        }

    def _end(self, at: HandlerContext, task: int, part: bytes, timestamp: int) -> None:
        """End an input commit for a task. ``timestamp``: the latest of the events in the commit's last part."""
        batch, row = at.batch, _PART + part
        if (task, part) in self._parted and (seen := batch.get(task, row)) is not None:
            timestamp = max(timestamp, int.from_bytes(seen[:_SIZE], "big"))
            at.put(task, row, None)
        self._latest = max(self._latest, timestamp)
        self._advance(at, task, timestamp)

    def _parts(self, task: int) -> Iterator[tuple[int, bytes]]:
        return ((of, _PART + part) for of, part in self._parted if of == task)

    def _advance(self, at: HandlerContext, task: int, timestamp: int) -> None:
        if timestamp > event_time(at.batch, task):
            at.task = task
            at.put(task, _NOW, _time(timestamp))
            at.batch.times[task] = timestamp
            for one in self._noting:
                one.before_due(at, timestamp)
            self._fire(at, task, _DUE, timestamp)

    def fire_wall(self, at: HandlerContext, task: int, now_ms: int) -> None:
        """Fire timers that the previous batch had no room for, then timers that are due by the wall clock.

        In between, an idle task advances to the worker's latest event time.
        """
        self._wall_ms = now_ms
        at.batch.is_ahead = self.is_ahead
        at.task = task
        for one in self._begun:
            one.begin_batch(at, now_ms)
        self._fire(at, task, _DUE, event_time(at.batch, task))
        if (
            self._idle_ms is not None
            and now_ms - self._last_event_ms.setdefault(task, now_ms) >= self._idle_ms
            and all(at.batch.get(*place) is None for place in self._parts(task))
        ):
            self._advance(at, task, self._latest)
        self._fire(at, task, _WALL, now_ms)

    def _fire(self, at: HandlerContext, task: int, kind: bytes, until: int) -> None:
        batch = at.batch
        if (soonest := batch.soonest(task, kind, self._timers)) > until:
            return
        # Timers that a handler sets meanwhile wait for the next call, so that this one ends.
        size, now, moved = len(kind), _time(until), list[bytes]()
        # An iterator left open by a handler's error would keep the folder from being opened again.
        with closing(batch.scan(task, kind + _time(soonest), kind + _time(until + 1))) as rows:
            for row in _in_order((row for row, _ in rows), moved):
                place = row[size + _SIZE :]
                timer = self._timers.get(place[:_NUMBER])
                if timer is None or batch.get(task, row) in (None, now):
                    continue  # of another program, cancelled by an earlier timer, or set when it was due already
                if batch.is_ended or self._is_over(batch):
                    batch.is_ended = True
                    return  # the next batch begins with the timers that are left
                at.task = task
                self._call(at, timer, row, size)
                again = timer.next_due(at, place)
                if again is not None and again <= until:
                    heappush(moved, kind + _time(again) + place)
        batch.look_soonest(task, kind, self._timers)

    def _call(self, at: HandlerContext, timer: Timed, row: bytes, size: int) -> None:
        """Fire one timer, or write a dead letter instead. ``size``: bytes before the time in a row."""
        due, place = int.from_bytes(row[size : size + _SIZE], "big"), row[size + _SIZE :]

        at.seen, at.placed = 0, False
        at.removals += 1

        def fire() -> None:
            at.undo.clear()
            at.key, at.timestamp = place[_NUMBER:], due
            at.put(at.task, row, None)
            timer.fire(place[_NUMBER:], due)

        def case() -> Case:
            data = at.batch.get(at.task, place)
            return timer.case(f"{timer.name}@{due}", place[_NUMBER:], due, data)

        if not self._failures.try_or_bury(at, case, partial(failure_of, fire)):
            at.put(at.task, row, None)
            timer.drop(at, place, due)


def _has(one: Timed, method: Any) -> bool:
    """Whether a store has a method of its own in place of this one of `Timed`."""
    return getattr(type(one), method.__name__) is not method


def _in_order(rows: Iterator[bytes], moved: list[bytes]) -> Iterator[bytes]:
    """Rows in order, with those of a heap to which the caller adds rows that are not before the last one."""
    for row in rows:
        while moved and moved[0] < row:
            yield heappop(moved)
        yield row
    while moved:
        yield heappop(moved)
