"""An open cut: what handlers wrote and changed in it. Nothing of it has happened before the commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from contextvars import ContextVar
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from anabranch.client.receipt_account import check_event, check_headers, headers_size
from anabranch.core.partitioner import task_of
from anabranch.errors import EventTooLarge, IllegalState, InvalidArgument
from anabranch.processing.table import Table
from anabranch.types import Headers

if TYPE_CHECKING:
    import pyarrow as pa

Written: TypeAlias = "tuple[bytes | None, bytes | None, Headers | None, int | None]"
_ROW_BYTES = 48  # of an event or a row, besides its bytes
_KNOWN_KEYS = 20_000
_MISSING: Any = object()
_TIME = 8  # bytes of a time
_NUMBER = 2  # … and of a store's number
NO_LIMITS: Mapping[str, int] = {}
_NEVER = 1 << 63
_LAST = b"\xff" * (_TIME + 1)


class Cut:
    """Outputs and changed rows of one commit to come. One thread."""

    def __init__(
        self, below: Table | Cut, task_count: int, limits: Mapping[str, int] = NO_LIMITS
    ) -> None:
        """``below``: what is stored, or the cut that is being committed. ``limits``: bytes of a stream's event."""
        self.limits = limits
        self.open = True
        self.failed = False  # a handler raised, and nothing of it will be
        self.late = False  # it got full before all fired that is due
        self.size = 0  # bytes of outputs and changes, about
        self.outputs: dict[str, list[Written]] = {}
        self.batches: dict[str, list[pa.RecordBatch]] = {}
        self.rows: dict[int, dict[bytes, bytes | None]] = {}
        self.counts = Counter[tuple[str, ...]]()  # metrics, for when it is committed
        self._below = below
        self._task_count = task_count
        self.known: dict[bytes, int] = below.known
        self.due: dict[tuple[int, bytes], int] = below.due

    def lie_on(self, table: Table) -> None:
        """The cut below is stored by now."""
        self._below = table

    def write(self, stream: str, event: Written) -> None:
        """Add an event to the outputs.

        Raises: IllegalState (the cut is not open), InvalidArgument, EventTooLarge (no commit could have it).
        """
        if not self.open:
            _refuse()
        value, key, headers, timestamp = event
        check_event(key, value, timestamp)
        pairs = check_headers(headers)
        size, most = len(value or b"") + len(key or b""), self.limits.get(stream)
        if most is not None and size + headers_size(pairs) > most:
            raise EventTooLarge(
                f"an event of {size} bytes and headers; {stream} takes up to {most}"
            )
        found = self.outputs.get(stream)
        if found is None:
            if stream in self.batches:
                raise InvalidArgument(f"{stream}: write events or batches in one commit, not both")
            found = self.outputs[stream] = []
        found.append(event)
        self.size += size + _ROW_BYTES

    def write_batch(self, stream: str, batch: pa.RecordBatch) -> None:
        """Add the rows of a batch to the outputs. Raises: as `write`."""
        if not self.open:
            _refuse()
        if stream in self.outputs:
            raise InvalidArgument(f"{stream}: write events or batches in one commit, not both")
        self.batches.setdefault(stream, []).append(batch)
        self.size += batch.nbytes

    def task_of(self, key: bytes) -> int:
        """The task of a key."""
        task = self.known.get(key, -1)
        if task < 0:
            task = task_of(key, self._task_count)
            if len(self.known) < _KNOWN_KEYS:
                self.known[key] = task
        return task

    def get(self, task: int, row: bytes) -> bytes | None:
        """The value of a row of a task, as this cut sees it."""
        changed = self.rows.get(task)
        if changed is not None:
            value: bytes | None = changed.get(row, _MISSING)
            if value is not _MISSING:
                return value
        return self._below.get(task, row)

    def put(self, task: int, row: bytes, value: bytes | None) -> None:
        """Change a row; None: delete it. Raises: IllegalState (the cut is not open)."""
        if not self.open:
            _refuse()
        changed = self.rows.get(task)
        if changed is None:
            changed = self.rows[task] = {}
        if row not in changed:
            self.size += len(row) + _ROW_BYTES
        changed[row] = value
        self.size += len(value or b"")

    def put_due(self, task: int, kind: bytes, due: int, place: bytes, value: bytes) -> None:
        """Set a row of a kind of timers: what is due at a time."""
        self.put(task, kind + due.to_bytes(_TIME, "big") + place, value)
        if (task, kind) in self.due:
            self.due[task, kind] = min(self.due[task, kind], due)

    def soonest(self, task: int, kind: bytes, stores: Collection[bytes]) -> int:
        """Nothing of a kind, and of these stores, is due before this time."""
        found = self.due.get((task, kind))
        return self.look_soonest(task, kind, stores) if found is None else found

    def look_soonest(self, task: int, kind: bytes, stores: Collection[bytes]) -> int:
        """`soonest`, by the rows; those before the time known so far are other stores', maybe many."""
        low = len(kind)
        high = low + _TIME
        start = kind + self.due.get((task, kind), 0).to_bytes(_TIME, "big")
        rows = (row for row, _ in self.scan(task, start, kind + _LAST))
        row = next((row for row in rows if row[high : high + _NUMBER] in stores), None)
        due = _NEVER if row is None else int.from_bytes(row[low:high], "big")
        self.due[task, kind] = due
        return due

    def scan(
        self, task: int, low: bytes, high: bytes
    ) -> Generator[tuple[bytes, bytes], None, None]:
        """Rows from ``low`` up to ``high`` (not included), in their order, as they are at the first."""
        changed: Mapping[bytes, bytes | None] = self.rows.get(task, {})
        ours = sorted((row, changed[row]) for row in changed if low <= row < high)
        stored = self._below.scan(task, low, high)
        # This cut's rows come first, of equal ones.
        for row, same in groupby(merge(ours, stored, key=itemgetter(0)), itemgetter(0)):
            value = next(same)[1]
            if value is not None:
                yield row, value


def _refuse() -> NoReturn:
    raise IllegalState("this cut is not open any more: it is being committed, or is dropped")


class Doing:
    """A handler at work: its cut, the task, key, time and value of its event, as that came.

    ``over``: its event is done. ``own_key``: it may reach that key's rows alone, for others work beside it.
    ``strays``: where errors go of what goes on after the end.
    """

    __slots__ = ("cut", "key", "over", "own_key", "strays", "task", "timestamp", "value")

    def __init__(self, cut: Cut) -> None:
        self.cut = cut
        self.task = -1
        self.key: bytes | None = None
        self.timestamp: int | None = None
        self.value: bytes | None = None
        self.over = self.own_key = False
        self.strays: list[IllegalState] | None = None


_DOING: ContextVar[Doing | None] = ContextVar("doing", default=None)


def begin_doing(cut: Cut) -> Doing:
    """Let the handlers called from here on work on this cut."""
    at = Doing(cut)
    _DOING.set(at)
    return at


def doing() -> Doing:
    """The handler at work. `IllegalState`: none is, or it outlived its cut."""
    at = _DOING.get()
    if at is None or at.over or not at.cut.open:
        what = "" if at is None else "this task went on after its event was handled; "
        error = IllegalState(
            f"{what}stores and outputs are for handlers, while their event is handled: elsewhere write in a "
            "transaction of its own"
        )
        if at is not None and at.strays is not None and (at.over or not at.cut.failed):
            at.strays.append(error)
        raise error
    return at


def time_of(timestamp: int | None) -> int | None:
    """The time of an output, from that of an event: records of plain topics may have none."""
    return timestamp if timestamp is not None and timestamp > 0 else None


def outside() -> bool:
    """Whether no handler has called from here."""
    return _DOING.get() is None
