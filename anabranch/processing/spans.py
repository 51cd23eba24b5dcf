"""State by key and event time: sessions, sliding windows, versions, and rows that expire.

The first three have one row for each key, with entries in the order of event time (`Spans`). A row begins with the
time for which the key's timer is set, which is never later than the time at which the first entry is due, and
is moved only when it has come. So an event changes one row, however often it moves a due time. All of it is rows
and timers of `timers.TimeOfTasks`, which fires by due time, store and key.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any

from anabranch.errors import IllegalState, InvalidArgument, SnapshotExpired
from anabranch.processing.batch import HandlerContext, current_context
from anabranch.processing.failures import Case
from anabranch.processing.program import Input, Output, check_plain, check_result
from anabranch.processing.stores import Store, after
from anabranch.processing.timers import Timed, event_time
from anabranch.protocol.legal_names import check_type
from anabranch.values import Codec

if TYPE_CHECKING:
    from anabranch.processing.aggregates import Aggregate
    from anabranch.types import Event

_NUMBER = 2  # bytes of a store's number
HEAD = Struct(">Q")  # the time for which the key's timer is set; 0: no timer is set
ENTRY = Struct(">QI")  # of an entry: its time, and the bytes of its data, which follow
_END = Struct(">Q")  # of a session: its last event's time
# A sliding window's states.
_OPEN = b"\x00"
_CLOSED = b"\x01"
# A version's kinds.
_DELETED = b"\x00"
_SET = b"\x01"

Entry = tuple[int, bytes]  # its time in Unix milliseconds, and its data


def milliseconds(what: str, seconds: float, *, zero: bool = False) -> int:
    """Seconds as milliseconds. Raises: InvalidArgument (below 1 ms, unless ``zero``, or above 1e9 s)."""
    check_type(what, seconds, int, float)
    if not 0 <= seconds < 1e9 or (seconds < 0.001 and not (zero and seconds == 0)):
        raise InvalidArgument(f"{what}={seconds} seconds")
    return round(seconds * 1000)


class Row:
    """The row of a key, as an event or a timer changes it. ``armed``: the time of its timer; 0: none is set."""

    __slots__ = ("armed", "at", "entries", "row", "task")

    def __init__(self, at: HandlerContext, task: int, row: bytes) -> None:
        self.at, self.task, self.row = at, task, row
        self.armed = 0
        self.entries: list[Entry] = []  # `list[Entry]()` takes longer than reading a row
        data = at.batch.get(task, row)
        if data is None:
            return
        self.armed = int.from_bytes(data[: HEAD.size], "big")
        self.entries = entries_of(data)

    def packed(self) -> bytes:
        """The row's value."""
        parts = [HEAD.pack(self.armed)]
        for time, data in self.entries:
            parts += (ENTRY.pack(time, len(data)), data)
        return b"".join(parts)

    def add(self, time: int, data: bytes) -> None:
        """Add an entry, after those of the same time."""
        entries = self.entries
        if not entries or entries[-1][0] <= time:
            entries.append((time, data))
        else:
            entries.insert(bisect_right(entries, time, key=_time_of), (time, data))


def entries_of(data: bytes) -> list[Entry]:
    """The entries of a stored row."""
    found: list[Entry] = []
    place, end, unpack = HEAD.size, len(data), ENTRY.unpack_from
    while place < end:
        time, size = unpack(data, place)
        place += ENTRY.size + size
        found.append((time, data[place - size : place]))
    return found


def _time_of(entry: Entry) -> int:
    return entry[0]


class Spans(Timed):
    """One row for each key, with entries by time. Subclasses say what is due, and when."""

    grace = 0

    def first_due(self, entries: list[Entry]) -> int | None:
        """When the timer has to be called, for these entries of a key, of which there is at least one."""
        raise NotImplementedError

    def call_due(self, row: Row, key: bytes, due: int) -> None:
        """Do one thing that is due at ``due``, and change the entries."""
        raise NotImplementedError

    def drop_due(self, row: Row, due: int) -> Any:
        """Change the entries as `call_due`, without calling the program."""
        raise NotImplementedError

    def row_of(self, event: Event) -> Row:
        """The row of an event's key. Raises: as `place_of`."""
        at = current_context()
        return Row(at, *self.place_of(at, event))

    def place_of(self, at: HandlerContext, event: Event) -> tuple[int, bytes]:
        """Task and row of an event's key. Raises: InvalidArgument (it has no key, or belongs to another task)."""
        key: Any = event.key
        if key.__class__ is not bytes:
            self.key_of(event)
            key = self.raw_of(event, at.key)
        return self._place(at, key)

    def arm(self, at: HandlerContext, task: int, place: bytes, armed: int, due: int) -> int:
        """Set the timer of a row, in which an entry is due then. Returns its time. ``armed``: as of `Row`."""
        if armed and due < armed:
            self.cancel_due(at, task, place, armed)
            armed = 0
        if not armed:
            self.set_due(at, task, place, due)
            armed = due
        return armed

    def save(self, row: Row, *, firing: bool = False, added: int | None = None) -> None:
        """Store the row, and set its timer. Raises: EventTooLarge.

        ``firing``: after its timer. ``added``: when the entry is due that an event has added, or moved to a later
        time, if that is all that has changed.
        """
        at, task, place = row.at, row.task, row.row
        due = added
        if due is None:
            due = self.first_due(row.entries) if row.entries else None
        if firing:
            row.armed = due or 0
            if due is not None:
                self.set_due(at, task, place, due, firing=True)
        elif due is not None:
            row.armed = self.arm(at, task, place, row.armed, due)
        elif row.armed:
            self.cancel_due(at, task, place, row.armed)
            row.armed = 0
        if row.entries:
            self._set(at, task, place, row.packed())
        else:
            at.put(task, place, None)

    def fire(self, key: bytes, due: int) -> None:
        at = current_context()
        row = Row(at, at.task, self.prefix + key)
        if row.entries and self.first_due(row.entries) == due:
            self.call_due(row, key, due)
        self.save(row, firing=True)

    def drop(self, at: HandlerContext, place: bytes, due: int) -> None:
        row = Row(at, at.task, place)
        if row.entries and self.first_due(row.entries) == due:
            self.drop_due(row, due)
        self.save(row, firing=True)

    def next_due(self, at: HandlerContext, place: bytes) -> int | None:
        data = at.batch.get(at.task, place)
        return None if data is None else HEAD.unpack_from(data)[0] or None

    def name_of(self, key: bytes) -> Any:
        """A key as handlers see it."""
        return self.keys.decode(key)


class Session:
    """A session of a key: from its first event's time to its last one's (Unix milliseconds, both included)."""

    def __init__(
        self, of: Sessions, row: Row | None, key: Any, entry: tuple[int, int, Any]
    ) -> None:
        """``row``: None once the session is closed. ``entry``: start, end, and the state or None."""
        self.key = key
        self.start, self.end, self._state = entry
        self._of, self._row = of, row

    @property
    def value(self) -> Any:
        """The value; None if it is not set yet. Setting it raises `IllegalState` once the session is closed."""
        return self._of.result(self._state)

    @value.setter
    def value(self, value: Any) -> None:
        if self._row is None:
            raise IllegalState(
                f"session {self.start} of {self._of.name} is closed: its value would be lost"
            )
        row = Row(current_context(), self._row.task, self._row.row)
        self._state = value
        self._of.replace(row, self.start, (self.start, self.end, value))


class Sessions(Spans):
    """State by key and session. A gap without events of the key ends a session; a late event may join two."""

    def __init__(
        self, name: str, codec: Codec, gap: float, *, grace: float, late: Output | None,
        merge: Callable[[Any, Any], Any] | None, into: Aggregate | None,
    ) -> None:  # fmt: skip
        super().__init__(name, codec)
        if (merge is None) == (into is None):
            raise InvalidArgument(
                f"sessions {name}: give into=, or merge=, a function of the values of two sessions that become one"
            )
        if merge is not None:
            check_plain(f"merge= of sessions {name}:", merge)
        self._gap = milliseconds("gap", gap)
        self.grace = milliseconds("grace", grace, zero=True)
        self.late, self._into = late, into
        self._merge: Any = into.merge if into is not None else merge
        self._closed: Callable[[Session], Any] | None = None

    @property
    def kind(self) -> str:
        """As of `Keyed`. Gap and grace may change."""
        what = self._codec.name or "values"
        return f"sessions of {what}" + (f", {self._into.name}" if self._into else "")

    def on_close(self, call: Callable[[Session], Any]) -> Callable[[Session], Any]:
        """Decorate a function of a `Session` that is called once, when it closes. Raises: InvalidArgument."""
        check_plain(f"on_close of {self.name}:", call)
        self._closed = call
        return call

    def of(self, event: Event) -> Iterator[Session]:
        """The session of an event, which now ends at the event's time or later; none if the event is late.

        Raises: InvalidArgument (the event has no key), EventTooLarge (the key has too many open sessions).
        """
        row, entry = self._joined(event)
        if entry is not None:
            self.replace(row, None, entry)
            yield Session(self, row, event.key, entry)

    def add(self, event: Event) -> Any:
        """Add an event to its session by ``into``. Returns the session's value; None if the event is late.

        Raises: as `of`.
        """
        if self._into is None:
            raise InvalidArgument(f"sessions {self.name} have no into=")
        row, entry = self._joined(event)
        if entry is None:
            return None
        start, end, state = entry
        state = self._into.after(state, event)
        self.replace(row, None, (start, end, state))
        return self._into.result(state)

    def result(self, state: Any) -> Any:
        """A state's value for users."""
        return state if state is None or self._into is None else self._into.result(state)

    def replace(self, row: Row, start: int | None, entry: tuple[int, int, Any]) -> None:
        """Store a session. ``start``: the begin of the session that it replaces; None: it replaces no session."""
        if start is not None:
            at = next((n for n, (time, _) in enumerate(row.entries) if time == start), None)
            if at is None:
                raise IllegalState(
                    f"session {start} of {self.name} has been joined with another one"
                )
            del row.entries[at]
        begin, end, state = entry
        data = _END.pack(end) + (b"" if state is None else self._codec.encode(state))
        row.add(begin, data)
        self.save(row, added=self._due_of(data))

    def _joined(self, event: Event) -> tuple[Row, tuple[int, int, Any] | None]:
        """The sessions that an event joins, as one, taken out of the row; None for a late event."""
        row = self.row_of(event)
        now, time = event_time(row.at.batch, row.task), max(event.timestamp, 0)
        near: list[Entry] = []
        others: list[Entry] = []
        gap = self._gap
        for entry in row.entries:
            is_near = entry[0] - gap < time < int.from_bytes(entry[1][: _END.size], "big") + gap
            (near if is_near else others).append(entry)
        is_closed = not near and time + self._gap + self.grace <= now
        if is_closed or row.at.batch.is_ahead(event):
            self.note_late(row.at, event)
            return row, None
        row.entries = others
        start = end = time
        state: Any = None
        for begin, data in near:
            start, end = min(start, begin), max(end, _END.unpack_from(data)[0])
            part = self._state(data)
            state = part if state is None else state if part is None else self._merge(state, part)
        return row, (start, end, state)

    def _state(self, data: bytes) -> Any:
        return None if len(data) == _END.size else self._codec.decode(data[_END.size :])

    def _due_of(self, data: bytes) -> int:
        return int(_END.unpack_from(data)[0]) + self._gap + self.grace

    def first_due(self, entries: list[Entry]) -> int | None:
        return min(self._due_of(data) for _, data in entries)

    def call_due(self, row: Row, key: bytes, due: int) -> None:
        start, data = self.drop_due(row, due)
        if self._closed is not None:
            entry = start, _END.unpack_from(data)[0], self._state(data)
            check_result(self._closed, self._closed(Session(self, None, self.name_of(key), entry)))

    def drop_due(self, row: Row, due: int) -> Entry:
        at = next(n for n, (_, data) in enumerate(row.entries) if self._due_of(data) == due)
        return row.entries.pop(at)

    def case(self, place: str, row: bytes, due: int, data: bytes | None) -> Case:
        """As of `Timed`: the value of the session that closes."""
        found = (rest for _, rest in entries_of(data or b"") if self._due_of(rest) == due)
        value = next(found, b"")[_END.size :]
        return Case(place, value, row, (), due)

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, list[tuple[int, int, Any]]]:
        """As of `Keyed`: a key, and start, end and value of its open sessions."""
        return row, [
            (start, _END.unpack_from(rest)[0], self.result(self._state(rest)))
            for start, rest in entries_of(data)
        ]


class SlidingWindow:
    """A closed sliding window of a key: after ``start`` up to ``end`` (Unix milliseconds), when an event came."""

    __slots__ = ("end", "key", "start", "value")

    def __init__(self, key: Any, start: int, end: int, value: Any) -> None:
        self.key, self.start, self.end, self.value = key, start, end, value


class Sliding(Spans):
    """A window for each time at which a key has an event: it has the events of ``size`` up to that time."""

    def __init__(
        self, name: str, codec: Codec, size: float, *, grace: float, late: Output | None, into: Aggregate
    ) -> None:  # fmt: skip
        super().__init__(name, codec)
        self._size = milliseconds("size", size)
        self.grace = milliseconds("grace", grace, zero=True)
        self.late, self._into = late, into
        self._closed: Callable[[SlidingWindow], Any] | None = None

    @property
    def kind(self) -> str:
        """As of `Keyed`. Size and grace may change."""
        return f"sliding windows of {self._codec.name or 'values'}, {self._into.name}"

    def on_close(self, call: Callable[[SlidingWindow], Any]) -> Callable[[SlidingWindow], Any]:
        """Decorate a function of a `SlidingWindow`, called once, when it closes. Raises: InvalidArgument."""
        check_plain(f"on_close of {self.name}:", call)
        self._closed = call
        return call

    def add(self, event: Event) -> Any:
        """Add an event. Returns the value of the window that ends at its time, as it is now; None if it is late.

        Raises: InvalidArgument (the event has no key), EventTooLarge (a window of the key has too many events).
        """
        row = self.row_of(event)
        now, time = event_time(row.at.batch, row.task), max(event.timestamp, 0)
        if time + self.grace < now or row.at.batch.is_ahead(event):
            self.note_late(row.at, event)
            return None
        entries = row.entries
        at = bisect_right(entries, time, key=_time_of)
        same = at > 0 and entries[at - 1][0] == time
        state = self._codec.decode(entries[at - 1][1][1:]) if same else None
        data = _OPEN + self._codec.encode(self._into.after(state, event))
        if same:
            entries[at - 1] = time, data
        else:
            entries.insert(at, (time, data))
        self.save(row, added=time + self.grace + 1)
        return self._value(entries, time)

    def _value(self, entries: list[Entry], end: int) -> Any:
        state: Any = None
        for time, data in entries:
            if end - self._size < time <= end:
                part = self._codec.decode(data[1:])
                state = part if state is None else self._into.merge(state, part)
        return self._into.result(state)

    def first_due(self, entries: list[Entry]) -> int | None:
        for time, data in entries:
            if data[:1] == _OPEN:
                return time + self.grace + 1
        return entries[-1][0] + self._size + self.grace + 1  # then no window needs them

    def call_due(self, row: Row, key: bytes, due: int) -> None:
        end = due - self.grace - 1
        if self._closed is not None and self._ends(
            row, end
        ):  # else entries are deleted, of no window
            value = self._value(row.entries, end)
            window = SlidingWindow(self.name_of(key), end - self._size, end, value)
            check_result(self._closed, self._closed(window))
        self.drop_due(row, due)

    def drop_due(self, row: Row, due: int) -> None:
        """Close the window that is due, and delete the entries that no later window has."""
        end = due - self.grace - 1
        row.entries = [
            (time, _CLOSED + data[1:] if time == end else data)
            for time, data in row.entries
            if time > end - self._size
        ]

    def _ends(self, row: Row, end: int) -> bool:
        return any(time == end and data[:1] == _OPEN for time, data in row.entries)

    def case(self, place: str, row: bytes, due: int, data: bytes | None) -> Case:
        """As of `Timed`: the value of the window that closes."""
        value: bytes | None = None
        with suppress(Exception):  # the aggregate itself may be what has failed
            value = self._codec.encode(self._value(entries_of(data or b""), due - self.grace - 1))
        return Case(place, value, row, (), due)

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, list[tuple[int, Any]]]:
        """As of `Keyed`: a key, and its times with the state of the events at each of them."""
        return row, [(time, self._codec.decode(rest[1:])) for time, rest in entries_of(data)]


class Latest(Store):
    """The last value of each key of an input, as that input's handler keeps it: a table of this processor."""

    def __init__(self, name: str, source: Input) -> None:
        super().__init__(name, source.codec)
        self.keys = source.key

    @property
    def kind(self) -> str:
        return f"the latest of {self._codec.name or 'values'}"

    def note(self, event: Event) -> None:
        """Keep an event's value, or delete that of its key. Raises: InvalidArgument (it has no key)."""
        at = current_context()
        task, row = self._place(at, self.key_of(event))
        if at.value is None:
            at.put(task, row, None)
        else:
            self._set(at, task, row, at.value)


class Versions(Spans):
    """As `Latest`, with the values of the last ``keep`` seconds of event time, for joins as of a time."""

    def __init__(self, name: str, source: Input, keep: float, late: Output | None) -> None:
        super().__init__(name, source.codec)
        self.keys, self.late = source.key, late
        self._keep = milliseconds("keep", keep)

    @property
    def kind(self) -> str:
        return f"versions of {self._codec.name or 'values'}"

    def note(self, event: Event) -> None:
        """Keep an event's value as of its time; one without a value deletes the key as of then.

        Raises: InvalidArgument (it has no key), EventTooLarge (the key has too many versions).
        """
        row = self.row_of(event)
        now, time = event_time(row.at.batch, row.task), max(event.timestamp, 0)
        if time + self._keep < now or row.at.batch.is_ahead(event):
            self.note_late(row.at, event)
            return
        value = row.at.value
        row.add(time, _DELETED if value is None else _SET + value)
        self._prune(row, now)
        self.save(row)

    def get(self, key: Any, default: Any = None, *, at: float | None = None) -> Any:
        """The value of a key at an event time (Unix milliseconds), or ``default``; None: the newest value.

        Raises: InvalidArgument (another task's key), SnapshotExpired (``at`` is more than ``keep`` before the
        task's event time).
        """
        context = current_context()
        entries = Row(context, *self._place(context, key)).entries
        count = len(entries)
        if at is not None:
            if at + self._keep < event_time(context.batch, context.task):
                raise SnapshotExpired(
                    f"{self.name} keeps values for {self._keep / 1000:g} s, and {at:.0f} is earlier: raise keep="
                )
            count = bisect_right(entries, at, key=_time_of)
        if count == 0 or entries[count - 1][1] == _DELETED:
            return default
        return self._codec.decode(entries[count - 1][1][1:])

    def _prune(self, row: Row, now: int) -> None:
        """Delete versions that no event time may ask for any more."""
        first = bisect_right(row.entries, now - self._keep, key=_time_of) - 1
        if first > 0:
            del row.entries[:first]

    def first_due(self, entries: list[Entry]) -> int | None:
        """Only a row whose key is deleted is due: others are pruned when they change."""
        time, data = entries[-1]
        return time + self._keep + 1 if data == _DELETED else None

    def call_due(self, row: Row, key: bytes, due: int) -> None:
        self.drop_due(row, due)

    def drop_due(self, row: Row, due: int) -> None:
        row.entries.clear()

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, list[tuple[int, Any]]]:
        """As of `Keyed`: a key, and its versions; None where it was deleted."""
        return row, [
            (time, None if rest == _DELETED else self._codec.decode(rest[1:]))
            for time, rest in entries_of(data)
        ]


class Expiring(Store, Timed):
    """A store whose rows expire some event time after they were set. A row begins with the time of its setting.

    Expired rows are not found by handlers. They are deleted by sweeps: a batch begins with a look at two rows for
    each row that the one before has set, so that a sweep has seen all rows when half of them are new.
    """

    def __init__(
        self, name: str, codec: Codec, *, local: bool, into: Aggregate | None, ttl: float
    ) -> None:  # fmt: skip
        super().__init__(name, codec, local=local, into=into)
        self._ttl = milliseconds("ttl", ttl)
        self._unswept: dict[int, int] = {}  # task -> rows to sweep in the next batch
        self._next: dict[int, bytes] = {}  # task -> where its sweep is

    @property
    def kind(self) -> str:
        return super().kind + ", expiring"

    def begin_batch(self, at: HandlerContext, now_ms: int) -> None:
        """Sweep two rows for each row that was set since the last call."""
        most = self._unswept.pop(at.task, 0)
        if not most:
            return
        first = self._next.get(at.task, self.prefix)
        with closing(at.batch.scan(at.task, first, after(self.prefix))) as rows:
            found = list(islice(rows, most))
        for row, data in found:
            if self._value(at, data) is None:
                at.put(at.task, row, None)
        self._next[at.task] = self.prefix if len(found) < most else found[-1][0] + b"\0"

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, Any]:
        return row, self._result(data[HEAD.size :])

    def _find(self, at: HandlerContext, task: int, row: bytes) -> bytes | None:
        data = at.batch.get(task, row)
        return None if data is None else self._value(at, data)

    def _value(self, at: HandlerContext, data: bytes) -> bytes | None:
        (since,) = HEAD.unpack_from(data)
        return None if since + self._ttl <= event_time(at.batch, at.task) else data[HEAD.size :]

    def _stored(self, at: HandlerContext, value: bytes) -> bytes:
        self._unswept[at.task] = self._unswept.get(at.task, 0) + 2
        since = max(event_time(at.batch, at.task), at.timestamp or 0)
        return HEAD.pack(since) + value
