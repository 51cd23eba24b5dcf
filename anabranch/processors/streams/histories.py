"""How far histories may be cut: the offsets that brokers still have, against the vectors of EPOCH records."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import NamedTuple

from anabranch.batches.records import decode_records
from anabranch.core.legal_names import is_state
from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.ports import CorruptBatch, Log, LogError, OffsetOutOfRange, TopicPartition, answered
from anabranch.schemas.codec import decode
from anabranch.schemas.records import EpochRecord
from anabranch.topics.names import history_topic, stream_topic

log = logging.getLogger("anabranch.controller")

_FETCH_BYTES = 1 << 20
_MOST_FETCHES = 64  # per history in one look; the next look goes on


class _Walk(NamedTuple):
    """How far a history was looked through. ``spare``: the last EPOCH record that it may begin with.

    The record is the first one behind a COMMIT: by its `previous` readers see that nothing is lost. ``commits``:
    whether one came since. ``ahead``: the next EPOCH record, at ``read_to``: its vector is still above the deleted
    events.
    """

    read_to: int
    spare: int
    commits: bool = False
    ahead: Mapping[int, int] | None = None


class Histories:
    """Walks each history once, from its beginning, as far as the stream's events are deleted.

    The history of a stream with all its events is not read. One thread at a time.
    """

    def __init__(self, source: Log) -> None:
        self._log = source
        self._walks: dict[str, _Walk] = {}
        self.missed: set[str] = set()  # by the last call of `spare`

    def forget_stream(self, stream: str) -> None:
        """Drop a forgotten stream."""
        self._walks.pop(stream, None)

    def spare(self, streams: Mapping[str, int]) -> dict[str, int]:
        """Stream -> the offset of an EPOCH record before which its history names deleted events only.

        ``streams``: the partitions of each. Those that can't be looked at now are left out, and noted in `missed`.
        """
        found = {}
        self.missed = set()
        for stream, partitions in streams.items():
            try:
                at = self._look(stream, partitions)
            except (LogError, CorruptBatch, OffsetOutOfRange) as error:
                log.info("it can't be told how far the history of %s may be cut: %s", stream, error)
                self._walks.pop(stream, None)
                self.missed.add(stream)
                continue
            if at is not None:
                found[stream] = at
        return found

    def _look(self, stream: str, partitions: int) -> int | None:
        topic = stream_topic(stream)
        history = TopicPartition(history_topic(stream), 0)
        places = [TopicPartition(topic, p) for p in range(partitions)]
        starts = answered(lambda failed: self._log.start_offsets([*places, history], failed=failed))
        begins = starts.pop(history)
        if is_state(stream):  # its topic is read whole; the history's end is its leader's alone
            starts = dict.fromkeys(starts, sys.maxsize)
        if not any(starts.values()):
            return None
        firsts = {place.partition: start for place, start in starts.items()}
        walk = self._walks.get(stream)
        if walk is None or walk.read_to < begins:
            walk = _Walk(begins, begins)
        self._walks[stream] = walk = self._walk(history, firsts, walk)
        return walk.spare if walk.spare > begins else None

    def _walk(self, history: TopicPartition, firsts: Mapping[int, int], walk: _Walk) -> _Walk:
        """Walk on while the events before the next EPOCH record are deleted."""
        position, spare, commits, _ = walk
        if walk.ahead is not None and not _passed(walk.ahead, firsts):
            return walk
        for _ in range(_MOST_FETCHES):
            failed: dict[TopicPartition, LogError] = {}
            fetched = self._log.fetch(
                {history: position},
                max_wait=0.0,
                max_bytes=_FETCH_BYTES,
                committed=True,
                failed=failed,
            ).get(history)
            for error in failed.values():
                raise error
            if fetched is None:
                break
            for batch in fetched.batches:
                for record in decode_records(batch.data):
                    if record.offset < position or record.key:
                        commits |= record.offset >= position
                        continue
                    vector = _vector(record.value)
                    if vector is not None and not _passed(vector, firsts):
                        return _Walk(record.offset, spare, commits, vector)
                    if vector is not None and commits:
                        spare, commits = record.offset, False
            position = fetched.next_offset
        return _Walk(position, spare, commits)


def _vector(value: bytes | None) -> Mapping[int, int] | None:
    """The vector of an EPOCH record; None: the value is none."""
    try:
        record = decode(value or b"")
    except (MalformedRecord, UnsupportedVersion):
        return None  # foreign
    if not isinstance(record, EpochRecord):
        return None
    return {position.partition: position.offset for position in record.vector}


def _passed(vector: Mapping[int, int], firsts: Mapping[int, int]) -> bool:
    """Whether all events below a vector were deleted."""
    return all(firsts.get(partition, 0) >= end for partition, end in vector.items())
