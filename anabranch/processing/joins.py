"""Joins: of two streams within a time, and of two tables by a foreign key.

Both are stores with handlers of their inputs. A `Join` keeps the events of a key that wait for others in one row
(`spans.Spans`). A `KeyJoin` sends events to itself by a stream, since a foreign key's rows belong to another task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Any
from zlib import crc32

from anabranch.errors import InvalidArgument
from anabranch.processing.batch import HandlerContext, current_context
from anabranch.processing.failures import Case
from anabranch.processing.program import Input, Output, check_plain, check_result
from anabranch.processing.spans import (
    ENTRY,
    HEAD,
    Entry,
    Row,
    Spans,
    entries_of,
    milliseconds,
)
from anabranch.processing.stores import Keyed, after
from anabranch.processing.timers import event_time
from anabranch.protocol.limits import NAME
from anabranch.types import Event
from anabranch.values import RAW

# A waiting event: flags; commit timestamp, segment, partition, offset. Its value follows.
_WAITING = Struct(">BQQIQ")
# The same as an entry of a row, which begins with its time and size; and that up to the flags.
_ADDED = Struct(">QIBQQIQ")
_FLAGGED = Struct(">QIB")
_NO_ROW = bytes(HEAD.size)
# Flags of a waiting event: it is of the right side; it has found another; it has a value.
_RIGHT = 1
_MATCHED = 2
_HAS_VALUE = 4
_PLACE = Struct(">QIQ")  # of a row's change: commit timestamp, partition, offset
_SIZE = Struct(">H")  # bytes of a key
_KINDS = ("inner", "left", "outer")
Pair = Callable[[Any, Any], Any]
_make = tuple.__new__  # makes an `Event`, faster than its class does


@dataclass(frozen=True, slots=True)
class Within:
    """When two events of a key are a pair: the right one's time is in ``-before`` to ``after`` of the left one's.

    All in milliseconds. ``kind``: whose events are given alone if they found no other: 'inner', 'left' or 'outer'.
    """

    before: int
    after: int
    grace: int
    kind: str

    @classmethod
    def of(cls, within: Any, grace: float, kind: str) -> Within:
        """Raises: InvalidArgument."""
        before, after = (
            within if isinstance(within, tuple) and len(within) == 2 else (within, within)
        )
        if kind not in _KINDS:
            raise InvalidArgument(f"kind={kind!r} of a join is {', '.join(_KINDS)}")
        return cls(
            milliseconds("within", before, zero=True),
            milliseconds("within", after, zero=True),
            milliseconds("grace", grace, zero=True),
            kind,
        )

    def reach(self, right: int) -> int:
        """How long after its own time an event finds others."""
        return (self.before if right else self.after) + self.grace

    def is_alone(self, right: int) -> bool:
        """Whether an event of a side that has found no other is given alone."""
        return self.kind == "outer" or (self.kind == "left" and not right)


class Join(Spans):
    """Pairs of events of two inputs, which have the same key and are near in event time."""

    def __init__(
        self, name: str, left: Input, right: Input, within: Within, late: Output | None, call: Pair
    ) -> None:  # fmt: skip
        """Raises: InvalidArgument."""
        super().__init__(name, RAW)
        if left.stream == right.stream:
            raise InvalidArgument(
                f"join {name}: {left.stream} is on both sides: give it a store, or write it twice"
            )
        if left.key.spec != right.key.spec:
            raise InvalidArgument(f"join {name}: both inputs need the same codec of keys")
        check_plain(f"join {name}:", call)
        self.keys = left.key
        self._sides, self._within, self.late, self._call = (left, right), within, late, call
        # For each side: how long its events wait, and how long before and after such an event the other one may be.
        self._reach = within.reach(0), within.reach(_RIGHT)
        self._near = (within.before, within.after), (within.after, within.before)

    @property
    def kind(self) -> str:
        """As of `Keyed`. Times and kind of the join may change; a row does not say which stream is a side."""
        found = f"a join's events of {self._sides[0].stream} and {self._sides[1].stream}"
        return found if len(found) <= NAME.value else f"{found[:200]} {crc32(found.encode()):08x}"

    def take_left(self, event: Event) -> None:
        """Handle an event of the left input. Raises: InvalidArgument (no key), EventTooLarge (too many wait)."""
        self._take(0, event)

    def take_right(self, event: Event) -> None:
        """Handle an event of the right input. Raises: as `take_left`."""
        self._take(1, event)

    def _take(self, right: int, event: Event) -> None:
        at = current_context()
        batch = at.batch
        task, place = self.place_of(at, event)
        time = max(event.timestamp, 0)
        over = time + self._reach[right]
        if over < event_time(batch, task) or batch.is_ahead(event):
            self.note_late(at, event)
            return
        # Most rows are looked up once more at most, for the other event of a pair.
        row = batch.get(task, place, keep=False) or _NO_ROW
        found, end = self._found(row, right, time)
        data = bytearray(row)
        (armed,) = HEAD.unpack_from(row)
        if not armed or over + 1 < armed:
            HEAD.pack_into(data, 0, self.arm(at, task, place, armed, over + 1))
        value, flags = at.value, right
        if value is not None:
            flags |= _HAS_VALUE
        if found:
            flags |= _MATCHED
            for begin in found:
                data[begin + ENTRY.size] |= _MATCHED
        head = _ADDED.pack(
            time, _WAITING.size + len(value or b""), flags, event.commit_timestamp, event.segment_id,
            event.partition, event.offset,
        )  # fmt: skip
        before, rest = (data, b"") if end == len(data) else (data[:end], data[end:])
        self._set(at, task, place, b"".join((before, head, value or b"", rest)))
        if found:
            self._call_with(at, right, event, row, found)

    def _call_with(
        self, at: HandlerContext, right: int, event: Event, row: bytes, found: Sequence[int]
    ) -> None:
        """Call the function with an event and each event that waited for it. ``found``: their places in the row."""
        own, call, key = at.timestamp, self._call, event.key
        for place in found:
            first, _ = at.waited = self._waited(row, place, key)
            at.timestamp = max(event.timestamp, first.timestamp)
            result = call(first, event) if right else call(event, first)
            if result is not None:
                check_result(call, result)
        at.timestamp, at.waited = own, None

    def _found(self, row: bytes, right: int, time: int) -> tuple[list[int], int]:
        """The places in a row of the other side's events that are near a time, and the place for a new event.

        ``right``: the side of the new event, whose place is after those of the same time. ``time``: its time.
        """
        before, after_it = self._near[right]
        found: list[int] = []
        place, end, unpack = HEAD.size, len(row), _FLAGGED.unpack_from
        own = end
        while place < end:
            when, size, flags = unpack(row, place)
            if when > time and own == end:
                own = place
            if flags & _RIGHT != right and -before <= when - time <= after_it:
                found.append(place)
            place += ENTRY.size + size
        return found, own

    def _waited(self, row: bytes, place: int, key: Any) -> tuple[Event[Any, Any], bytes | None]:
        """An event that waited, decoded, without headers and transaction; and its undecoded value.

        ``place``: where its entry begins in the row.
        """
        time, size, flags, commit, segment, partition, offset = _ADDED.unpack_from(row, place)
        side = self._sides[flags & _RIGHT]
        value = raw = None
        if flags & _HAS_VALUE:
            raw = row[place + _ADDED.size : place + ENTRY.size + size]
            value = side.codec.decode(raw)
        fields: Any = side.stream, key, value, [], time, None, commit, segment, partition, offset
        return _make(Event, fields), raw

    def _due_of(self, entry: Entry) -> int:
        return entry[0] + self._reach[entry[1][0] & _RIGHT] + 1

    def first_due(self, entries: list[Entry]) -> int | None:
        # Entries are in order of time, so that of each side the first one is due first.
        dues = dict[int, int]()
        for entry in entries:
            if (right := entry[1][0] & _RIGHT) not in dues:
                dues[right] = self._due_of(entry)
                if len(dues) == len(self._sides):
                    break
        return min(dues.values())

    def call_due(self, row: Row, key: bytes, due: int) -> None:
        if self._within.kind == "inner":
            # No call is due for events without a match, so all that wait no longer may go at once.
            now = event_time(row.at.batch, row.task)
            row.entries = [entry for entry in row.entries if self._due_of(entry) > now]
            return
        entry = self._take_due(row, due)
        right = entry[1][0] & _RIGHT
        if not entry[1][0] & _MATCHED and self._within.is_alone(right):
            name = self._sides[right].key.decode(key)
            event, _ = row.at.waited = self._waited(_packed(entry), 0, name)
            check_result(self._call, self._call(*((None, event) if right else (event, None))))

    def drop_due(self, row: Row, due: int) -> None:
        self._take_due(row, due)

    def _take_due(self, row: Row, due: int) -> Entry:
        at = next(n for n, entry in enumerate(row.entries) if self._due_of(entry) == due)
        return row.entries.pop(at)

    def case(self, place: str, row: bytes, due: int, data: bytes | None) -> Case:
        """As of `Timed`: the event that found no other."""
        some = (rest for time, rest in entries_of(data or b"") if self._due_of((time, rest)) == due)
        return Case(place, next(some, b"")[_WAITING.size :], row, (), due)

    def entry(self, row: bytes, data: bytes) -> tuple[bytes, list[tuple[str, int, Any]]]:
        """As of `Keyed`: a key, and stream, time and value of the events that wait."""
        events = (self._waited(_packed(entry), 0, row)[0] for entry in entries_of(data))
        return row, [(event.stream, event.timestamp, event.value) for event in events]


def _packed(entry: Entry) -> bytes:
    """An entry as it is in a row."""
    time, data = entry
    return ENTRY.pack(time, len(data)) + data


class KeyJoin(Keyed):
    """Rows of a left table with those rows of a right table whose keys they name. Both are inputs.

    A change of a left row goes to its foreign key's task, by the stream ``via``, and subscribes there. The other
    task answers it, and each later change of the right row, by the same stream. An answer names the change of the
    left row that it is for, so that one for an earlier change has no effect.
    """

    def __init__(
        self, name: str, left: Input, right: Input, via: tuple[Input, Output],
        by: Callable[[Any], Any], call: Callable[[Any, Any, Any], Any],
    ) -> None:  # fmt: skip
        """``call``: with a left key, its row or None, and the right row or None."""
        super().__init__(name, RAW)
        check_plain(f"join {name}:", call)
        check_plain(f"by= of join {name}:", by)
        self._left, self._right, self._by, self._call = left, right, by, call
        self.source, self._via = via

    @property
    def kind(self) -> str:
        return "rows of a join by key"

    def take_left(self, event: Event) -> None:
        """Handle a change of a left row. Raises: InvalidArgument (no key, or ``by`` gives no key)."""
        at, key = self._begin(event)
        place = self._row(at, b"l", key)
        row, before = self._left_row(event), at.batch.get(*place)
        old = None if before is None else _foreign(before)
        change = _PLACE.pack(event.commit_timestamp, event.partition, event.offset)
        new = None if row is None else self._foreign_key(row)
        if old is not None and old != new:
            self._send(at, old, b"u" + key)
        if row is None:
            at.put(*place, None)
            if before is not None:
                check_result(self._call, self._call(event.key, None, None))
            return
        at.put(*place, change + _SIZE.pack(len(new or b"")) + (new or b"") + (at.value or b""))
        if new:
            self._send(at, new, b"s" + change + key)
        else:
            check_result(self._call, self._call(event.key, row, None))

    def take_right(self, event: Event) -> None:
        """Handle a change of a right row: answer to all left rows that name it."""
        at, key = self._begin(event)
        place = self._row(at, b"r", key)
        at.put(*place, at.value)
        prefix = self._subscribed(at, key, b"")[1]
        for row, change in list(at.batch.scan(at.task, prefix, after(prefix))):
            self._answer(at, row[len(prefix) :], change, at.value)

    def take_sent(self, event: Event) -> None:
        """Handle what came by the stream ``via``. Its value begins with what it is:

        - ``s`` with a change and a left key: that row names the key of this event from now on (it *subscribes*);
        - ``u`` with a left key: it names this key no more;
        - ``a`` with a change, and ``r`` and the right row, or ``n``: the answer to a left row.
        """
        at, key = self._begin(event)
        what, rest = (at.value or b"")[:1], (at.value or b"")[1:]
        change, rest = rest[: _PLACE.size], rest[_PLACE.size :]
        if what == b"u":
            at.put(*self._subscribed(at, key, change + rest), None)
        elif what == b"s":
            at.put(*self._subscribed(at, key, rest), change)
            self._answer(at, rest, change, at.batch.get(*self._row(at, b"r", key)))
        else:
            data = at.batch.get(*self._row(at, b"l", key))
            if data is not None and data.startswith(change):
                left = self._left.codec.decode(
                    data[_PLACE.size + _SIZE.size + len(_foreign(data)) :]
                )
                right = self._right.codec.decode(rest[1:]) if rest[:1] == b"r" else None
                name = self._left.key.decode(key)
                check_result(self._call, self._call(name, left, right))

    def entry(self, row: bytes, data: bytes) -> tuple[tuple[str, bytes], bytes]:
        """As of `Keyed`: 'l', 'r' or 's' for rows of the left, of the right, and for subscriptions."""
        return (row[:1].decode(), row[1:]), data

    def is_of(self, row: bytes, key: bytes) -> bool:
        return row in (b"l" + key, b"r" + key)

    def shown(self, rows: Mapping[bytes, bytes]) -> dict[str, bytes] | None:
        """As of `Keyed`: the left and the right row of a key."""
        return {row[:1].decode(): data for row, data in sorted(rows.items())} or None

    def _begin(self, event: Event) -> tuple[HandlerContext, bytes]:
        at = current_context()
        if at.key is None:
            raise InvalidArgument(f"{self.name} is by key, and the event has none")
        return at, at.key

    def _left_row(self, event: Event) -> Any:
        return event.value

    def _foreign_key(self, row: Any) -> bytes:
        found = self._by(row)
        if found is None:
            return b""
        if self._right.key is not RAW:
            found = self._right.key.encode(found)
        elif isinstance(found, str):
            found = found.encode()
        if not isinstance(found, bytes) or not 1 <= len(found) < 1 << 16:
            raise InvalidArgument(
                f"join {self.name}: by= gave {found!r:.100}: a key of {self._right.stream}, or None"
            )
        return found

    def _row(self, at: HandlerContext, part: bytes, key: bytes) -> tuple[int, bytes]:
        task, _ = self._place(at, key)
        return task, self.prefix + part + key

    def _subscribed(self, at: HandlerContext, foreign: bytes, key: bytes) -> tuple[int, bytes]:
        task, _ = self._place(at, foreign)
        return task, self.prefix + b"s" + _SIZE.pack(len(foreign)) + foreign + key

    def _answer(self, at: HandlerContext, key: bytes, change: bytes, right: bytes | None) -> None:
        rest = b"n" if right is None else b"r" + right
        self._send(at, key, b"a" + change + rest)

    def _send(self, at: HandlerContext, key: bytes, what: bytes) -> None:
        self._via.write(what, key=key)


def _foreign(data: bytes) -> bytes:
    """The foreign key of a stored left row."""
    (size,) = _SIZE.unpack_from(data, _PLACE.size)
    begin = _PLACE.size + _SIZE.size
    return data[begin : begin + size]
