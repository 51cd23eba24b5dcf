"""Reading a stream's history for people: its newest epochs and their commits."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field

from anabranch.core import defaults
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history import HistorySearch
from anabranch.schemas.records import CommitRecord, EpochRecord


@dataclass(slots=True)
class History:
    """The newest epochs of a stream, oldest first, and their commits in order."""

    epochs: list[EpochRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)

    def add(self, record: EpochRecord | CommitRecord, last: int) -> None:
        """Add a record. Beyond ``last`` epochs, the oldest epoch is dropped, with its commits."""
        if isinstance(record, CommitRecord):
            self.commits.append(record)
            return
        if self.epochs and self.epochs[-1].stream_epoch == record.stream_epoch:
            return  # an epoch that is logged again
        self.epochs.append(record)
        if len(self.epochs) > last:
            del self.epochs[:-last]
            first = self.epochs[0].stream_epoch
            self.commits = [c for c in self.commits if c.stream_epoch >= first]

    def of_epoch(self, stream_epoch: int) -> list[CommitRecord]:
        """The commits of an epoch."""
        return [c for c in self.commits if c.stream_epoch == stream_epoch]


def read_history(
    ports: ReaderPorts, stream: str, *, last: int, timeout: float = defaults.TIMEOUT_S
) -> History:
    """The newest epochs of a stream that exists. ``last``: at most this many. ``timeout``: seconds.

    Raises:
        NotReady: the end was not reached within the timeout.
    """
    history = History()
    with closing(ports.committed_log(timeout)) as source:
        for record in HistorySearch(source, stream, timeout).newest_epochs(last):
            history.add(record, last)
    return history


class Follower:
    """Follows a stream's history, and keeps only the newest records. For one thread; `close` it."""

    EPOCHS, RECORDS = 40, 3000

    def __init__(self, ports: ReaderPorts, stream: str, timeout: float) -> None:
        """``timeout``: seconds for each request of a `read`."""
        self._source = ports.committed_log(timeout)
        self._search = HistorySearch(self._source, stream, timeout)
        self._next = self._end = 0
        self.history = History()

    def read(self) -> History:
        """The newest epochs and commits as of now. Raises: NotReady, SnapshotExpired, NotAuthorized."""
        self._search.last()
        end = self._search.end
        if end == self._end:
            return self.history
        if end - self._next > self.RECORDS:
            self._next, self.history = end - self.RECORDS, History()
        found = list(self._search.since(self._next))
        if found and not self.history.epochs and (epoch := self._search.epoch(found[0])):
            self.history.add(epoch, self.EPOCHS)
        for at in found:
            self.history.add(at.record, self.EPOCHS)
            self._next = at.offset + 1
        del self.history.commits[: -self.RECORDS]
        self._end = end
        return self.history

    def close(self) -> None:
        """Close the connections."""
        self._source.close()
