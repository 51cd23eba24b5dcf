"""Counts foreign records: those in a stream's topic that no controller wrote.

Between the data of two rounds on a partition there should only be a transaction marker and aborted data. If a gap
has more offsets than markers can explain, a helper thread reads it and counts its records. The count is a lower
bound: markers may arrive late, and a gap that markers may explain is not read.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.batches.format import read_header
from anabranch.ports import Log, LogError, LogUnavailable, TopicPartition, answered
from anabranch.processors.streams.helper_thread import helper
from anabranch.topics.names import stream_topic

log = logging.getLogger("anabranch.controller")

LOOK_EVERY_MS = 200
LOOK_BYTES = 256 << 10
# Most gaps that wait to be read, and most gaps of one partition that can't be judged yet; others are skipped.
MOST_WAITING = 1000
MOST_TRIES = 25
_TELL_EVERY_MS = 60_000
_FIRST_MARKERS = 2  # markers of former leaders that may precede this leader's first data


class Appended(NamedTuple):
    """The data that a round appended to a partition of a stream.

    ``first``: its first offset; ``known``: the end offset that the leader expected, so both should be equal.
    """

    stream: str
    partition: int
    known: int
    first: int


class _Gap(NamedTuple):
    stream: str
    partition: int
    first: int
    end: int
    tries: int = 0


@dataclass(slots=True)
class _Partition:
    """``markers``: how many markers may still be unseen. ``gaps``: the gaps found since that was last 0."""

    markers: int = 0
    gaps: deque[_Gap] = field(default_factory=lambda: deque(maxlen=MOST_WAITING))


class ForeignRecordScan:
    """Counts foreign records. ``found``: stream -> how many were found since this leader began."""

    def __init__(self, source: Log, *, threads: bool) -> None:
        self._log = source
        self.found: Counter[str] = Counter()
        self._helper = helper("anabranch-foreign", threads=threads)
        self._partitions: dict[tuple[str, int], _Partition] = {}
        self._waiting: deque[_Gap] = deque()
        self._under_way: tuple[_Gap, Future[tuple[int, int]]] | None = None
        self._look_ms = 0
        self._tell_ms: dict[str, int] = {}

    def appended(self, data: Iterable[Appended]) -> None:
        """Note the data of a committed round. Each of its partitions gets one marker for it."""
        touched = set()
        for stream, number, known, first in data:
            touched.add((stream, number))
            at = self._partitions.get((stream, number))
            if at is None:
                at = self._partitions[stream, number] = _Partition()
                if known and first - known <= _FIRST_MARKERS:
                    continue
            if first > known:
                at.gaps.append(_Gap(stream, number, known, first))
                at.markers -= first - known
            if at.markers < 0 and len(self._waiting) < MOST_WAITING:
                self._waiting.extend(at.gaps)
            if at.markers <= 0:
                at.gaps.clear()
                at.markers = 0
        for place in touched:
            self._partitions[place].markers += 1

    def look(self, now_ms: int, in_trouble: Container[str] = ()) -> None:
        """Count what was read of a gap, and begin to read the next one. Skip gaps of streams in trouble."""
        self._take_back(now_ms)
        if self._under_way is not None or now_ms < self._look_ms:
            return
        gap = next((gap for gap in self._waiting if gap.stream not in in_trouble), None)
        if gap is not None:
            self._look_ms = now_ms + LOOK_EVERY_MS
            self._waiting.remove(gap)
            self._under_way = gap, self._helper.submit(self._read, gap)
            self._take_back(now_ms)

    def forget_stream(self, stream: str) -> None:
        """Drop all about a stream: a new stream may get its name."""
        self._waiting = deque(gap for gap in self._waiting if gap.stream != stream)
        self._partitions = {at: p for at, p in self._partitions.items() if at[0] != stream}
        self._under_way = None  # its result must not count for the new stream
        self.found.pop(stream, None)
        self._tell_ms.pop(stream, None)

    def close(self) -> None:
        """End without waiting for a read under way."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def _read(self, gap: _Gap) -> tuple[int, int]:
        """Read the first part of a gap. Returns its number of records, and where the rest of the gap begins."""
        place = TopicPartition(stream_topic(gap.stream), gap.partition)
        try:
            found = answered(
                lambda failed: self._log.fetch(
                    {place: gap.first},
                    max_wait=0,
                    max_bytes=LOOK_BYTES,
                    committed=True,
                    failed=failed,
                )
            ).get(place)
        except LogUnavailable:
            found = None
        except LogError as error:
            log.info("a gap of %s is not looked into: %s", place.topic, error)
            return 0, gap.end
        if found is None:
            return 0, gap.first
        headers = [
            read_header(b.data, whole=False) for b in found.batches if b.base_offset < gap.end
        ]
        return sum(header.record_count for header in headers), found.next_offset

    def _take_back(self, now_ms: int) -> None:
        """Count the records of a finished read."""
        if self._under_way is None or not self._under_way[1].done():
            return
        (gap, work), self._under_way = self._under_way, None
        records, after = work.result()
        if after < gap.end and gap.tries < MOST_TRIES:
            tries = gap.tries + 1 if after == gap.first else 0
            self._waiting.appendleft(gap._replace(first=after, tries=tries))
        if not records:
            return
        self.found[gap.stream] += records
        if now_ms >= self._tell_ms.get(gap.stream, now_ms):
            self._tell_ms[gap.stream] = now_ms + _TELL_EVERY_MS
            log.warning(
                "%s[%d] has records of others at offset %d, %d so far: readers of this library leave them out, "
                "others do not; let only controllers write to that topic",
                stream_topic(gap.stream),
                gap.partition,
                gap.first,
                self.found[gap.stream],
            )
