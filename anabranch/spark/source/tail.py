"""A stream's history, read on as a streaming query goes on."""

from __future__ import annotations

from collections import deque

from anabranch.reading.committed_log import CommittedLog
from anabranch.reading.history import Found, HistoryCursor
from anabranch.schemas.records import CommitRecord
from anabranch.spark.source.admission import NotYet

# For what is committed, and is to be seen at once: a leader may be moving. The next trigger asks again.
_PATIENCE_S = 2.0


class HistoryTail:
    """The records behind a position, one after the other. One thread."""

    def __init__(self, source: CommittedLog, stream: str) -> None:
        self._clock = source.clock
        self._cursor = HistoryCursor(source, stream)
        self._base = -2  # all commits between it and `_read` are in `_ahead`
        self._read = -1
        self._ahead: deque[Found] = deque()
        self._until = 0
        self.bound = 0

    def begin(self, after: int, bound: int, until: int) -> None:
        """Stand behind the record ``after``. See as far as ``until``; take what is below ``bound``."""
        self.bound, self._until = bound, until
        if self._base <= after < self._read:
            while self._ahead and self._ahead[0].offset <= after:
                self._ahead.popleft()
        else:
            self._ahead.clear()
            self._read = after + 1
            self._cursor.seek(after + 1)
        self._base = after

    def peek(self, patience: float = _PATIENCE_S) -> Found | None:
        """The next record, None: there is none. `NotYet`: the history can't be read as far, in ``patience`` s."""
        deadline = self._clock.monotonic() + patience
        while not self._ahead and self._read < self._until:
            batch = self._cursor.next(deadline)
            self._ahead.extend(batch)
            if batch:
                self._read = batch[-1].offset + 1
            elif self._cursor.ended_at > self._read:
                self._read = self._cursor.ended_at
            elif self._clock.monotonic() >= deadline:
                raise NotYet(f"{self._cursor.place.topic} can't be read up to {self._until}")
        return self._ahead[0] if self._ahead and self._ahead[0].offset < self._until else None

    def pop(self) -> None:
        """The next record is taken."""
        found = self._ahead.popleft()
        if isinstance(found.record, CommitRecord):
            self._base = found.offset  # an epoch with no event behind it may be passed again
