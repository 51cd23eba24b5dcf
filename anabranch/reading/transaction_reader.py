"""Reading whole transactions of a stream in commit order: `Client.read_transactions`.

A group's position is an offset in the stream's *history*, the topic with one record for each commit. Its one
partition is assigned to one member.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Generator
from typing import Any, Generic

from anabranch.errors import (
    RetryError,
    SnapshotExpired,
)
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas.records import CommitRecord
from anabranch.reading.commit_feed import CommitFeed
from anabranch.reading.committed_log import (
    ReaderPorts,
    partitions_of,
)
from anabranch.reading.history import HistorySearch, Start, check_start
from anabranch.reading.iteration import Iteration, check_group, check_timeout
from anabranch.topics.names import history_topic
from anabranch.types import Committed, Events, K, V
from anabranch.values import DecodedEvents, Decoder

log = logging.getLogger("anabranch.client")

_PACE_S = 0.25  # the group is served this often while nothing comes
_TICK_S = 0.5  # the same while transactions are processed


class TransactionReader(Iteration[Committed[K, V]], Generic[K, V]):
    """Whole transactions in commit order. An iterator; close it, or use it as a context manager.

    A group has one active member; another member resumes where that one stopped. A transaction counts as processed
    when the next transaction is requested; then the position is committed. So each transaction comes at least once.
    One thread at a time.
    """

    def __init__(
        self,
        ports: ReaderPorts,
        stream: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        ask_timeout: float,
        *,
        whole: bool = False,
        decoder: Decoder | None = None,
    ) -> None:
        """``decoder``: of the events, if the stream was given by a handle.

        ``whole``: raise `SnapshotExpired` where events are deleted, instead of skipping such transactions.
        """
        super().__init__()
        self._decoder = decoder
        split_stream(stream)
        self._clock = ports.clock
        self._ask_timeout = ask_timeout
        self._stream = stream
        self._place = TopicPartition(history_topic(stream), 0)
        check_group(group)
        self._timeout = check_timeout(timeout)
        self._start = check_start(start)
        self._done: int | None = None
        self._term = 0  # rises when the history's partition is revoked
        self._assigned_by = self._clock.monotonic() + ask_timeout
        self._assigned = group is None
        self._gains = group is None  # the history is assigned, and its reading has not begun yet
        self._owned = False  # the history is assigned, and is being read
        self._next_tick = 0.0
        self._given: int | None = None
        self._member = None if group is None else ports.member(group)
        self._source = ports.committed_log(ask_timeout)
        self._whole = whole
        self._feed = CommitFeed(self._source, stream, ask_timeout, whole=whole)
        self._closed = False
        partitions_of(self._source, [stream], self._assigned_by)
        if self._member is None:
            self._begin()
        else:
            self._member.join([self._place.topic], self._gained, self._lost)

    @property
    def skipped(self) -> int:
        """As `Reader.skipped`; of the events that were iterated over."""
        return 0 if self._decoder is None else self._decoder.skipped

    def _free(self) -> None:
        self._commit(wait=True)
        self._source.close()
        if self._member is not None:
            self._member.close()

    # -- transactions ---------------------------------------------------------------------------------

    def _run(self) -> Generator[Committed[Any, Any], None, None]:
        if self._given is not None:
            self._processed(self._given)
            self._given = None
        while not self._closed:
            try:
                if not self._tick() or not (self._feed.records or self._read_on()):
                    break
                offset, record = self._feed.first
                # If the events of a commit can't be read now, it stays the next one.
                committed = self._committed(record) if isinstance(record, CommitRecord) else None
            except (RuntimeError, RetryError):  # closed by another thread, with its connections
                if not self._is_closed():
                    raise
                break
            self._feed.advance()
            term = self._term
            if committed is not None:
                if self._done is None:
                    self._processed(offset)  # so that other readers see the group's position
                try:
                    yield committed
                except GeneratorExit:
                    self._given = offset + 1
                    raise
            if term != self._term:
                continue  # another member resumes at the committed position
            if isinstance(record, CommitRecord):
                self._processed(offset + 1)
            # With ``whole``, a reader that returned nothing commits nothing.
            elif not self._whole or self._done is not None:
                self._done = offset + 1

    def _committed(self, record: CommitRecord) -> Committed[Any, Any] | None:
        events = self._feed.events()
        if events is None and self._whole:
            raise SnapshotExpired(f"events of a transaction in {self._stream} are deleted")
        if events is None:
            log.warning("passed over: %s", self._feed.parts.expired(record))
            return None
        txn_id = None if record.txn_id == NO_TXN else record.txn_id
        given: Events[Any, Any] = events
        if self._decoder is not None:
            given = DecodedEvents(events, self._decoder)
        return Committed(txn_id, record.timestamp, self._stream, given)

    def _processed(self, after: int) -> None:
        self._done = after
        self._commit(wait=False)

    def _tick(self) -> bool:
        """Serve the group if that is due. Returns whether the reader is open."""
        now = self._clock.monotonic()
        if self._member is not None and now >= self._next_tick:
            self._next_tick = now + _TICK_S
            self._member.serve(0.0)
        return not self._closed

    def _read_on(self) -> bool:
        """Read more. Returns False if nothing came for the reader's timeout, or the reader is closed."""
        give_up = None
        while not self._closed:
            if self._gains:
                self._begin()
            now = self._clock.monotonic()
            if give_up is None and (self._assigned or now >= self._assigned_by):
                give_up = math.inf if self._timeout is None else now + self._timeout
            until = min(math.inf if give_up is None else give_up, now + _PACE_S)
            if self._owned:
                self._feed.read_on(until)
            if self._member is not None:
                self._member.serve(0.0 if self._owned else max(0.0, until - now))
            if self._feed.records:
                return True
            if give_up is not None and self._clock.monotonic() >= give_up:
                self._commit(wait=True)
                break
        return False

    # -- positions ------------------------------------------------------------------------------------

    def _gained(self, partitions: list[TopicPartition]) -> None:
        """Note whether the history is assigned to this member. Reading begins outside of this callback."""
        self._owned = False
        self._gains = bool(partitions)
        self._assigned = True

    def _begin(self) -> None:
        """Begin at the group's position, or at the start."""
        place = self._place
        known = self._member.committed([place]) if self._member is not None else {}
        first = known[place] if place in known else self._first()
        self._feed.seek(first)
        self._gains, self._owned = False, True
        if self._start == "end" and place not in known:
            self._done = (
                first  # so that another member, which would begin at a later end, skips nothing
            )
            self._commit(wait=True)

    def _first(self) -> int:
        """The offset in the history at which a reader without a group's position begins.

        For the start "end" this is the history's end, otherwise the offset after the last record as of the start.
        """
        if self._start == "end":
            deadline = self._clock.monotonic() + self._ask_timeout
            return self._source.end_offsets([self._place], deadline)[self._place]
        search = HistorySearch(self._source, self._stream, self._ask_timeout)
        found = search.as_of(self._start)
        return 0 if found is None else found.offset + 1

    def _lost(self, partitions: list[TopicPartition], may_commit: bool) -> None:
        if may_commit:
            self._commit(wait=True)
        self._done = None
        self._given = None
        self._gains = self._owned = False
        self._feed.clear()
        self._term += 1

    def _commit(self, *, wait: bool) -> None:
        if self._member is not None and self._done is not None and not self._source.is_gone:
            self._member.commit({self._place: self._done}, wait=wait)
