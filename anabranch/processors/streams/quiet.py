"""Streams that no round comes to: if brokers lost a marker there, what it left open is ended.

A producer looks for that in a partition before it appends there. To a quiet stream nothing is appended, and its
readers would stand. So where a last stable offset stays below the log's end, all transactional ids look, those of
carriers too. A stream's offsets are compared once in a lead, and once after rounds to it: so that work is bounded
by the rounds'. At streams that go on after trouble all ids look without that. docs/inside/decisions/0013 says why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from concurrent.futures import Future

from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE
from anabranch.ports import Log, LogError, LogRefused, LogUnavailable, TopicPartition
from anabranch.processors.carrier import Carriers
from anabranch.processors.leadership import Lease
from anabranch.processors.streams.helper_thread import helper
from anabranch.processors.streams.trouble import StreamTrouble, places_of

log = logging.getLogger("anabranch.controller")

QUIET_MS = 3_000  # since the last round to a stream
LOOK_EVERY_MS = 1_000
AGAIN_MS = 10_000  # where something is open, or partitions can't be reached
_MOST_PLACES = 500  # in one look


class Quiet:
    """The streams of one leader. Times are monotonic milliseconds."""

    def __init__(
        self, source: Log, trouble: StreamTrouble, state: State, now_ms: int, *, threads: bool
    ) -> None:
        self._log = source
        self._trouble = trouble
        self._helper = helper("anabranch-quiet", threads=threads)
        self._due: dict[str, int] = {}  # when to look at a stream
        self._next_ms = 0
        self._looking: Future[dict[str, bool]] | None = None
        self.touched(state.streams, now_ms)  # a former leader may have left it so

    def touched(self, streams: Iterable[str], now_ms: int) -> None:
        """A native transaction writes to these streams, or tries to."""
        self._due.update(dict.fromkeys(streams, now_ms + QUIET_MS))

    def forget_stream(self, stream: str) -> None:
        """Drop a stream."""
        self._due.pop(stream, None)

    def close(self) -> None:
        """Leave a look under way."""
        self._helper.shutdown(wait=False, cancel_futures=True)

    def step(self, state: State, lease: Lease, carriers: Carriers, now_ms: int) -> list[str]:
        """End what lacks markers; returns the streams where it was looked for.

        Raises: LogError: the leader must lead again.
        """
        rested, self._trouble.rested = self._trouble.rested, []
        streams = [*rested, *(s for s in self._found(now_ms) if s not in rested)]
        for stream in streams:
            if stream not in state.streams or stream in self._trouble.waiting:
                continue
            places = places_of(state, stream)
            carriers.check(places)
            try:
                lease.check(places)
            except (LogRefused, LogUnavailable) as error:
                if not self._trouble.find(state, error):
                    raise
        if self._looking is None and now_ms >= self._next_ms:
            self._next_ms = now_ms + LOOK_EVERY_MS
            self._look(state, now_ms)
        return streams

    def _found(self, now_ms: int) -> list[str]:
        """The streams where the last look found something open, and no round came since."""
        if self._looking is None or not self._looking.done():
            return []
        unclean, self._looking = self._looking.result(), None
        again = {stream: is_open for stream, is_open in unclean.items() if stream not in self._due}
        self._due.update(dict.fromkeys(again, now_ms + AGAIN_MS))
        return [stream for stream, is_open in again.items() if is_open]

    def _look(self, state: State, now_ms: int) -> None:
        """Begin to compare the ends of streams that are due."""
        places: dict[TopicPartition, str] = {}
        for stream in [stream for stream, due_ms in self._due.items() if due_ms <= now_ms]:
            if len(places) >= _MOST_PLACES:
                break
            del self._due[stream]
            row = state.streams.get(stream)
            if row is not None and row.state == ACTIVE and stream not in self._trouble.waiting:
                places |= dict.fromkeys(places_of(state, stream), stream)
        if places:
            self._looking = self._helper.submit(self._compare, places)

    def _compare(self, places: Mapping[TopicPartition, str]) -> dict[str, bool]:
        """Streams to look at again, and whether something is open there."""
        failed: dict[TopicPartition, LogError] = {}
        try:
            ends = self._log.end_offsets(places, committed=False, failed=failed)
            stable = self._log.end_offsets(ends, committed=True, failed=failed)
        except LogError as error:
            log.info("it can't be told whether readers get by: %s", error)
            return dict.fromkeys(places.values(), False)
        unclean = {places[place]: False for place in failed}
        open_ = [place for place, end in ends.items() if stable.get(place, end) < end]
        return unclean | {places[place]: True for place in open_}
