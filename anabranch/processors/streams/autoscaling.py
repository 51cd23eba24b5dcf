"""Automatic scaling of the streams that one leader serves: from the loads that rounds merged to scalings.

The policy is `anabranch.core.decisions.autoscale`. Nothing here is logged: a new leader begins afresh, so for a
cool-down after a change of leadership no segment is split, and for four none is merged.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.core.decisions.autoscale import Autoscaler
from anabranch.core.decisions.scale import start
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import Tail
from anabranch.core.ids import segment_number
from anabranch.core.journal.index import JournalIndex
from anabranch.core.partitioner import position_of
from anabranch.core.round import NewEpoch, Part, Round, StreamCommit
from anabranch.core.state import State
from anabranch.core.stream_settings import parse_policy
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import FixCallError, InvalidArgument
from anabranch.schemas.records import Event, SegmentRange, StreamRow

log = logging.getLogger("anabranch.controller")

ASK_MS = 1_000
_SAMPLED = 16  # one of this many events is a sample of the keys
_MOST_SAMPLES = 256  # per part: no gauge keeps more
_GOLDEN = 0.6180339887498949  # the fractions of its multiples lie evenly


class Taken(NamedTuple):
    """The load that a round merges into a segment. ``positions``: of some keys."""

    number: int
    partition: int
    events: int
    size: int
    positions: tuple[int, ...] = ()


@dataclass(slots=True)
class StreamLoad:
    """The load that a round merges into one stream.

    ``plain``: records and bytes of plain writes; only the log tells into which segments they went. ``ends``: of the
    partitions before the round. ``layout``: the segments they were placed by.
    """

    taken: list[Taken] = field(default_factory=list)
    plain: tuple[int, int] = (0, 0)
    layout: tuple[SegmentRange, ...] = ()
    ends: dict[int, int] = field(default_factory=dict)


class _Asked(NamedTuple):
    """A proposal that was followed: it is not made again before a time, unless the segments change."""

    numbers: frozenset[int]
    until_ms: int


class Autoscaling:
    """The policies and loads of a leader's streams. Times are those of the turns, monotonic ms."""

    def __init__(self) -> None:
        self._scalers: dict[str, Autoscaler | None] = {}
        self._settings: dict[str, Mapping[str, str]] = {}  # … are made of
        self._any = False  # so that rounds without such streams cost nothing
        self._ask_at_ms = 0
        self._asked: dict[str, _Asked] = {}
        self._events = 0  # seen so far

    # -- what rounds merge ----------------------------------------------------------------------------

    def weigh(
        self, round_: Round, state: State, index: JournalIndex, tails: Mapping[str, Tail]
    ) -> dict[str, StreamLoad]:
        """The load that this round, not yet written, merges into streams with a policy."""
        loads: dict[str, StreamLoad] = {}
        if not self._any:
            return loads
        for commit in round_.commits:
            if self._scalers.get(commit.stream) is None:
                continue
            load = loads.setdefault(commit.stream, StreamLoad())
            if commit.plain:
                runs = [run for writes in commit.plain for run in writes.runs]
                load.plain = sum(r.records for r in runs), sum(r.batch_size for r in runs)
                load.layout = commit.layout
                load.ends = dict(tails[commit.stream].vector)
                continue
            ranges = _ranges(round_, commit, state.streams[commit.stream])
            load.taken += [
                self._taken(commit, part, ranges[part.segment_id], index) for part in commit.parts
            ]
        return loads

    def add(
        self,
        loads: Mapping[str, StreamLoad],
        state: State,
        tails: Mapping[str, Tail],
        now_ms: int,
    ) -> None:
        """The round is written: count what it merged. ``tails``: as they are now."""
        for stream, load in loads.items():
            scaler = self._scalers[stream]
            if scaler is None:
                continue
            scaler.track(state.streams[stream].segments, now_ms)
            for taken in (*load.taken, *_plain(load, tails[stream])):
                scaler.add(taken.number, taken.events, taken.size, now_ms)
                scaler.sample(taken.number, taken.positions)

    def _taken(
        self, commit: StreamCommit, part: Part, segment: SegmentRange, index: JournalIndex
    ) -> Taken:
        number = segment_number(segment.segment_id)
        if part.events:
            size = sum(len(event.key or b"") + len(event.value or b"") for event in part.events)
            positions = tuple(self._positions(part.events))
            return Taken(number, part.partition, len(part.events), size, positions)
        if part.carried is None:
            records = sum(run.records for run in part.runs)
            size = sum(run.batch_size for run in part.runs)
        else:
            records = part.carried.records
            runs = index.runs(commit.txn_id, commit.stream, part.source)
            size = sum(run.batch_size for run in runs)  # about: with left-out records
        return Taken(number, part.partition, records, size, self._spread(segment, records))

    def _positions(self, events: tuple[Event, ...]) -> Iterator[int]:
        for event in events:
            self._events += 1
            if self._events % _SAMPLED == 0 and event.key is not None:
                yield position_of(event.key)

    def _spread(self, segment: SegmentRange, records: int) -> tuple[int, ...]:
        """Positions spread evenly, for keys that are not looked at: a few others must not decide the cut."""
        first = self._events // _SAMPLED
        self._events += records
        last = min(self._events // _SAMPLED, first + _MOST_SAMPLES)
        width = segment.high - segment.low
        return tuple(segment.low + int(n * _GOLDEN % 1.0 * width) for n in range(first, last))

    def forget_stream(self, stream: str) -> None:
        """Drop a forgotten stream: another one of its name has settings of its own."""
        self._scalers.pop(stream, None)
        self._settings.pop(stream, None)
        self._asked.pop(stream, None)

    # -- what shall be done ---------------------------------------------------------------------------

    def decide(self, turn: Turn) -> dict[str, _Asked] | None:
        """About once a second: start the scalings that the policies ask for. A part of a round's decisions.

        Returns what `has_asked` takes when the round is written.
        """
        if turn.now_ms < self._ask_at_ms:
            return None
        asked: dict[str, _Asked] = {}
        for stream, row in list(turn.state.streams.items()):
            scaler = self._scaler(row)
            if scaler is not None and row.scaling is None and turn.usable(stream):
                self._scale(turn, row, scaler, asked)
        return asked

    def has_asked(self, asked: Mapping[str, _Asked], now_ms: int) -> None:
        """Take in that the round with these scalings happened."""
        self._ask_at_ms = now_ms + ASK_MS
        self._asked.update(asked)

    def _scaler(self, row: StreamRow) -> Autoscaler | None:
        if self._settings.get(row.stream) != row.settings and row.state == ACTIVE:
            self._settings[row.stream] = row.settings
            try:
                policy = parse_policy(row.settings)
            except InvalidArgument as error:  # checked by other rules when the stream was made
                log.warning("%s is not scaled by itself: %s", row.stream, error)
                policy = None
            self._scalers[row.stream] = Autoscaler(policy) if policy is not None else None
            self._any |= policy is not None
        return self._scalers.get(row.stream)

    def _scale(
        self, turn: Turn, row: StreamRow, scaler: Autoscaler, asks: dict[str, _Asked]
    ) -> None:
        stream = row.stream
        proposal = scaler.propose(row.segments, turn.now_ms)
        if proposal is None:
            return
        numbers = frozenset(segment_number(s.segment_id) for s in row.segments)
        asked = self._asked.get(stream)
        if asked is not None and asked.numbers == numbers and turn.now_ms < asked.until_ms:
            return  # the broker did not add the partitions: wait before asking again
        asks[stream] = _Asked(numbers, turn.now_ms + scaler.policy.cooldown_ms)
        log.info(
            "scaling %s: %s; %d segments instead of %d",
            stream, proposal.why, len(proposal.ranges), len(proposal.seal),
        )  # fmt: skip
        try:
            start(turn, row, proposal.seal, proposal.ranges, None)
        except FixCallError as error:
            log.warning("%s is not scaled: %s", stream, error)


def _ranges(round_: Round, commit: StreamCommit, row: StreamRow) -> dict[int, SegmentRange]:
    """Segments by id: those of the active layout, and those of the epochs that this round opens."""
    found = {s.segment_id: s for s in row.segments}
    if any(part.segment_id not in found for part in commit.parts):
        opened = (step for step in round_.history if isinstance(step, NewEpoch))
        for epoch in opened:
            if epoch.stream == commit.stream:
                found |= {s.segment_id: s for s in (*epoch.sealed, *epoch.segments)}
    return found


def _plain(load: StreamLoad, tail: Tail) -> Iterator[Taken]:
    """Share plain writes out by how far the partitions' ends moved, less the other data that went there."""
    records, size = load.plain
    if not records:
        return
    moved = {
        s.partition: tail.vector.get(s.partition, 0) - load.ends.get(s.partition, 0)
        for s in load.layout
    }
    for taken in load.taken:
        if taken.partition in moved:
            moved[taken.partition] -= taken.events
    whole = sum(max(0, each) for each in moved.values())
    for s in load.layout:
        share = max(0, moved[s.partition]) / whole if whole else 1 / len(load.layout)
        number = segment_number(s.segment_id)
        yield Taken(number, s.partition, round(records * share), round(size * share))
