"""Fetching for readers: batches of several partitions at once, decoded when they are given out."""

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
from anabranch.reading.fetched import Portion, portion_of_batches

log = logging.getLogger("anabranch.client")

FETCH_BYTES = 4 << 20
_ASIDE_S = 0.5  # what can't be read now is asked for again after so long
_WAIT_S = 0.1  # a member's fetch waits no longer for something new: the group may have news, too

Gone = Callable[[TopicPartition, int], None]
Look = Callable[[TopicPartition, Sequence[RawBatch]], None]


class Feed:
    """Committed records of some partitions, from given offsets on. One thread at a time, but for `close`.

    A fetch happens when `next` is called, and only of partitions of which nothing waits.
    """

    def __init__(
        self,
        source: CommittedLog,
        member: GroupMember | None = None,
        gone: Gone | None = None,
        look: Look | None = None,
    ) -> None:
        """``member``: the reader's in its group, which is heard while the feed waits.

        ``gone``: called when an offset is not there any more; it may raise. Else the log's beginning is next.
        ``look``: called with batches before they are given; it may raise.
        """
        self._source = source
        self._log = source.raw
        self._clock = source.clock
        self._member = member
        self._gone = gone
        self._look = look
        self._positions: dict[TopicPartition, int] = {}
        self._aside: dict[TopicPartition, float] = {}  # until when; they can't be read now
        self._term = 0

    def assign(self, places: Mapping[TopicPartition, int]) -> None:
        """Read exactly these, from these offsets on."""
        self._term += 1
        self._aside = {}
        self._positions = {TopicPartition(*place): offset for place, offset in places.items()}

    def add(self, topic: str, offsets: Mapping[int, int]) -> None:
        """Read partitions too (partition -> offset), or read them on elsewhere."""
        self._positions |= {TopicPartition(topic, p): offset for p, offset in offsets.items()}

    def next(self, deadline: float, waiting: Container[TopicPartition]) -> list[Portion]:
        """The next records; none if none came until the deadline (monotonic seconds), or a bit before.

        ``waiting``: partitions of which something was given already that has to wait; no more is needed of them. A
        partition that can't be read costs the others nothing; it is asked for again soon.

        Raises: FixCallError; UnknownStream, if a topic is gone, or another one.
        """
        self.serve()
        now = self._clock.monotonic()
        self._aside = {place: until for place, until in self._aside.items() if until > now}
        left = max(0.0, min([deadline, *self._aside.values()]) - now)
        wanted = {
            place: at
            for place, at in self._positions.items()
            if place not in waiting and place not in self._aside
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
                if self._look is not None:
                    self._look(place, fetched.batches)
                portions.append(portion_of_batches(place, fetched.batches, first, limit))
        return portions

    def _wait_for(self, place: TopicPartition, error: LogError) -> None:
        """Set a partition aside that can't be read now. Raises what no waiting mends."""
        log.info("reading %s[%d]: %s", place.topic, place.partition, error)
        now = self._clock.monotonic()
        if isinstance(error, OffsetOutOfRange):
            if self._pass_over(error):
                return
        elif not self._source.may_pass(place.topic, error):
            raise error
        self._aside[place] = now + _ASIDE_S

    def _pass_over(self, error: OffsetOutOfRange) -> bool:
        """Go on where the log begins now, if that is ahead. Else the broker is behind: there is no way back."""
        place = error.partition
        try:
            start = self._log.start_offsets([place])[place]
            self._source.check_read((place,))
        except LogUnavailable as unavailable:
            log.info("reading: %s", unavailable)
            return False
        if start <= error.position:
            log.warning("%s, and begins at %d: its broker is behind, or has lost it", error, start)
            return False
        if self._gone is not None:
            self._gone(place, error.position)
        self._positions[place] = start
        log.warning("%s: reading goes on at offset %d", error, start)
        return True

    def _rest(self, seconds: float) -> None:
        if self._member is not None:
            self._member.serve(min(seconds, _ASIDE_S))
        else:
            self._clock.sleep(min(seconds, _ASIDE_S))

    def serve(self) -> None:
        """Hear what is new in the group, if that does not bring records: call it every second or so."""
        if self._member is not None:
            self._member.serve(0.0)

    def positions(self, topic: str, partitions: Iterable[int]) -> dict[int, int]:
        """Partition -> offset of the next record, of those that are read."""
        places = [TopicPartition(topic, partition) for partition in partitions]
        return {p.partition: self._positions[p] for p in places if p in self._positions}
