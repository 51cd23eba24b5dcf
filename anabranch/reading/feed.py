"""Fetching for readers: committed batches of several partitions at once, decoded when they are returned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from anabranch.ports import (
    GroupMember,
    LogDenied,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    RawBatch,
    TopicPartition,
)
from anabranch.reading.committed_log import CommittedLog, client_errors
from anabranch.reading.decoded import Portion, portion_of_batches

log = logging.getLogger("anabranch.client")

FETCH_BYTES = 4 << 20
_RETRY_S = 0.5  # pause before a partition that can't be read is fetched again
_WAIT_S = 0.1  # the longest wait of a group member's fetch, because the group has to be served, too

Gone = Callable[[TopicPartition, int], None]
Check = Callable[[TopicPartition, Sequence[RawBatch]], None]


class Feed:
    """Committed records of some partitions, from given offsets on. One thread at a time, except for `close`.

    `next` fetches. Partitions with waiting records are not fetched.
    """

    def __init__(
        self,
        source: CommittedLog,
        member: GroupMember | None = None,
        gone: Gone | None = None,
        check: Check | None = None,
    ) -> None:
        """``member``: the reader's member of its group, which is served while the feed waits.

        ``gone``: called when an offset is deleted. If it does not raise, reading resumes at the log's beginning.
        ``check``: called with batches before they are returned; it may raise.
        """
        self._source = source
        self._log = source.raw
        self._clock = source.clock
        self._member = member
        self._gone = gone
        self._check = check
        self._positions: dict[TopicPartition, int] = {}
        self._paused: dict[TopicPartition, float] = {}  # until when; they can't be read now
        self._term = 0

    def assign(self, places: Mapping[TopicPartition, int]) -> None:
        """Read exactly these partitions, from these offsets on."""
        self._term += 1
        self._paused = {}
        self._positions = {TopicPartition(*place): offset for place, offset in places.items()}

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Also read these partitions (partition -> offset), or continue at another offset."""
        self._positions |= {TopicPartition(topic, p): offset for p, offset in offsets.items()}

    def next(self, deadline: float, waiting: Container[TopicPartition]) -> list[Portion]:
        """The next records; empty if nothing came until the deadline (monotonic seconds), or a little earlier.

        ``waiting``: partitions with returned records that have to wait; these are not fetched. A partition that
        can't be read does not delay other partitions, and is fetched again soon.

        Raises: FixCallError; UnknownStream (a topic was deleted or replaced).
        """
        self.serve()
        now = self._clock.monotonic()
        self._paused = {place: until for place, until in self._paused.items() if until > now}
        left = max(0.0, min([deadline, *self._paused.values()]) - now)
        wanted = {
            place: at
            for place, at in self._positions.items()
            if place not in waiting and place not in self._paused
        }
        if not wanted:
            self._rest(left)
            return []
        term = self._term
        failed: dict[TopicPartition, LogError] = {}
        wait = left if self._member is None else min(left, _WAIT_S)
        with client_errors():
            try:
                found = self._source.take_ahead(wanted) or self._log.fetch(
                    wanted, max_wait=wait, max_bytes=FETCH_BYTES, committed=True, failed=failed
                )
                self._source.check_read(found, wanted)
            except LogDenied:
                raise
            except LogUnavailable as error:
                log.info("reading: %s", error)
                self._rest(left)
                return []
            if term != self._term:
                return []
            for place, problem in failed.items():
                self._wait_for(place, problem)
        portions, limit = [], self._source.max_event_bytes
        for place, fetched in found.items():
            first = self._positions[place]
            self._positions[place] = fetched.next_offset
            if fetched.batches:
                if self._check is not None:
                    self._check(place, fetched.batches)
                portions.append(portion_of_batches(place, fetched.batches, first, limit))
        return portions

    def _wait_for(self, place: TopicPartition, error: LogError) -> None:
        """Pause a partition that can't be read now. Raises errors that are not transient."""
        log.info("reading %s[%d]: %s", place.topic, place.partition, error)
        now = self._clock.monotonic()
        if isinstance(error, OffsetOutOfRange):
            if self._pass_over(error):
                return
        elif not self._source.may_pass(place.topic, error):
            raise error
        self._paused[place] = now + _RETRY_S

    def _pass_over(self, error: OffsetOutOfRange) -> bool:
        """Continue where the log begins now, if that is later. Otherwise the broker lags; never read backwards."""
        place = error.partition
        try:
            start = self._log.start_offsets([place])[place]
            self._source.check_read((place,))
        except LogUnavailable as unavailable:
            log.info("reading: %s", unavailable)
            return False
        if start <= error.position:
            log.warning("%s, and begins at %d: its broker lags, or has lost it", error, start)
            return False
        if self._gone is not None:
            self._gone(place, error.position)
        self._positions[place] = start
        log.warning("%s: reading continues at offset %d", error, start)
        return True

    def _rest(self, seconds: float) -> None:
        if self._member is not None:
            self._member.serve(min(seconds, _RETRY_S))
        else:
            self._clock.sleep(min(seconds, _RETRY_S))

    def serve(self) -> None:
        """Serve the group without fetching records: call it every second or so."""
        if self._member is not None:
            self._member.serve(0.0)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Partition -> offset of the next record, for partitions that are read."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        return {p.partition: self._positions[p] for p in places if p in self._positions}
