"""A stream's history: its newest epochs and what was committed in them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anabranch.schemas.records import CommitRecord, EpochRecord

if TYPE_CHECKING:
    from anabranch.cli.session import Target


@dataclass(slots=True)
class History:
    """The newest epochs of a stream, oldest first, and their commits in order."""

    epochs: list[EpochRecord] = field(default_factory=list)
    commits: list[CommitRecord] = field(default_factory=list)

    def add(self, record: EpochRecord | CommitRecord, last: int) -> None:
        """Add a record; of more than ``last`` epochs the oldest is dropped, with its commits."""
        if isinstance(record, CommitRecord):
            self.commits.append(record)
            return
        if self.epochs and self.epochs[-1].stream_epoch == record.stream_epoch:
            return  # it is said again
        self.epochs.append(record)
        if len(self.epochs) > last:
            del self.epochs[:-last]
            first = self.epochs[0].stream_epoch
            self.commits = [c for c in self.commits if c.stream_epoch >= first]

    def of_epoch(self, stream_epoch: int) -> list[CommitRecord]:
        """The commits of an epoch."""
        return [c for c in self.commits if c.stream_epoch == stream_epoch]


def read_history(target: Target, stream: str, *, last: int) -> History:
    """The last so many epochs of a stream that exists.

    Raises:
        NotReady: the end was not reached within the target's timeout.
    """
    from anabranch.client.connect import reader_ports
    from anabranch.reading.history_search import HistorySearch

    ports = reader_ports(target.bootstrap, target.kafka)
    history = History()
    with closing(ports.committed_log(target.timeout)) as source:
        for record in HistorySearch(source, stream, target.timeout).newest_epochs(last):
            history.add(record, last)
    return history
