"""A stream's history, read on as a streaming query goes on."""

from __future__ import annotations

import time
from collections import deque

from anabranch.librdkafka.group_member import CommittedConsumer
from anabranch.reading.history_search import Found, history_record
from anabranch.schemas.records import CommitRecord
from anabranch.spark.admission import NotYet
from anabranch.topics.names import history_topic

_PATIENCE_S = 2.0  # for what is committed, and is to be seen at once: a leader may be moving


class HistoryTail:
    """The records behind a position, one after the other. One consumer, kept where it is. One thread."""

    def __init__(self, consumer: CommittedConsumer, stream: str) -> None:
        """``consumer``: one that keeps its `ended_at`; it is closed here."""
        self._topic = history_topic(stream)
        self._consumer = consumer
        self._base = -2  # all commits between it and `_read` are in `_ahead`
        self._read = -1
        self._ahead: deque[Found] = deque()
        self._until = 0
        self._rests = False
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
            self._consumer.assign({(self._topic, 0): after + 1})
            self._rests = False
        self._base = after

    def peek(self) -> Found | None:
        """The next record, None: there is none. `NotYet`: the history can't be read as far."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self._ahead and self._read < self._until:
            if self._rests:
                self._rests = False
                self._consumer.assign({(self._topic, 0): self._read})
            batch = self._consumer.next_batch(deadline)
            self._ahead.extend(Found(m.offset(), history_record(m)) for m in batch)
            if batch:
                self._read = batch[-1].offset() + 1
            elif self._consumer.ended_at > self._read:
                self._read = self._consumer.ended_at
            elif time.monotonic() >= deadline:
                raise NotYet(f"{self._topic} can't be read up to {self._until}")
        return self._ahead[0] if self._ahead and self._ahead[0].offset < self._until else None

    def pop(self) -> None:
        """The next record is taken."""
        found = self._ahead.popleft()
        if isinstance(found.record, CommitRecord):
            self._base = found.offset  # an epoch with no event behind it may be passed again

    def rest(self) -> None:
        """Fetch nothing until there is something new; what is known to be there goes on coming."""
        if not self._rests and self._read >= self._until:
            self._rests = True
            self._consumer.unassign()  # quicker to begin again than a pause

    def close(self) -> None:
        """Free everything."""
        self._consumer.close()
