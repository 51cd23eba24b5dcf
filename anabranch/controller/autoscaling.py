"""Automatic scaling: a leader measures the load that rounds merge into each stream, and starts scalings.

The policy is `anabranch.core.decisions.scale`. Loads are not logged, so a new leader has to measure again:
segments are not split during its first cool-down, and not merged during its first four.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.core.command_events import SomeEvents
from anabranch.core.decisions.scale import Autoscaler, start
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import Tail
from anabranch.core.journal_index import JournalIndex
from anabranch.core.round import NewEpoch, Part, Round, StreamCommit
from anabranch.core.state import State
from anabranch.core.stream_settings import parse_policy
from anabranch.core.stream_states import ACTIVE
from anabranch.errors import FixCallError, InvalidArgument
from anabranch.protocol.ids import segment_number
from anabranch.protocol.schemas.records import SegmentRange, StreamRow

log = logging.getLogger("anabranch.controller")

ASK_MS = 1_000
_SAMPLED = 16  # the key of one in this many events is sampled
_MOST_SAMPLES = 256  # per part: a segment's statistics keep no more
_GOLDEN = 0.6180339887498949  # the fractional parts of its multiples are spread evenly over [0, 1)


class Taken(NamedTuple):
    """The load that a round merges into a segment. ``positions``: the positions of sampled keys."""

    number: int
    partition: int
    events: int
    size: int
    positions: tuple[int, ...] = ()


@dataclass(slots=True)
class StreamLoad:
    """The load that a round merges into one stream.

    ``plain``: records and bytes of plain writes. Their segments are only known once they are written: from
    ``ends``, the partitions' end offsets before the round, and ``layout``, the segments by which they are placed.
    """

    taken: list[Taken] = field(default_factory=list)
    plain: tuple[int, int] = (0, 0)
    layout: tuple[SegmentRange, ...] = ()
    ends: dict[int, int] = field(default_factory=dict)


class _Asked(NamedTuple):
    """A scaling that was started. The same scaling is not started again before ``until_ms``.

    ``numbers``: the segments before the scaling. If the segments have changed, the pause does not apply.
    """

    numbers: frozenset[int]
    until_ms: int


class Autoscaling:
    """The policies and loads of a leader's streams. Times are the turns' times: monotonic milliseconds."""

    def __init__(self) -> None:
        self._scalers: dict[str, Autoscaler | None] = {}
        self._settings: dict[str, Mapping[str, str]] = {}  # from which the policies are made
        self._any = False  # whether any stream has a policy; if not, rounds are not measured
        self._ask_at_ms = 0
        self._asked: dict[str, _Asked] = {}
        self._events = 0  # counted so far, for sampling

    # -- what rounds merge ----------------------------------------------------------------------------

    def weigh(
        self, round_: Round, state: State, index: JournalIndex, tails: Mapping[str, Tail]
    ) -> dict[str, StreamLoad]:
        """The load that this round will merge into streams with a policy. Call it before the round is written."""
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
        """Count the load of a round once it is written. ``tails``: the histories' tails after the round."""
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
            positions = tuple(self._positions(part.events))
            return Taken(number, part.partition, len(part.events), part.events.size, positions)
        if part.staged is None:
            records = sum(run.records for run in part.runs)
            size = sum(run.batch_size for run in part.runs)
        else:
            records = part.staged.records
            runs = index.runs(commit.txn_id, commit.stream, part.source)
            size = sum(run.batch_size for run in runs)  # an estimate: it includes left-out records
        return Taken(number, part.partition, records, size, self._spread(segment, records))

    def _positions(self, events: SomeEvents) -> Iterator[int]:
        for place in events.places:
            self._events += 1
            if self._events % _SAMPLED == 0 and place >= 0:
                yield place

    def _spread(self, segment: SegmentRange, records: int) -> tuple[int, ...]:
        """Evenly spread positions for records whose keys are not decoded.

        Without these positions, the few keys that are decoded would decide alone where the segment is split.
        """
        first = self._events // _SAMPLED
        self._events += records
        last = min(self._events // _SAMPLED, first + _MOST_SAMPLES)
        width = segment.high - segment.low
        return tuple(segment.low + int(n * _GOLDEN % 1.0 * width) for n in range(first, last))

    def forget_stream(self, stream: str) -> None:
        """Drop everything about a forgotten stream: a new stream of its name has its own settings."""
        self._scalers.pop(stream, None)
        self._settings.pop(stream, None)
        self._asked.pop(stream, None)

    # -- scalings to start ----------------------------------------------------------------------------

    def decide(self, turn: Turn) -> dict[str, _Asked] | None:
        """Start the scalings that the policies ask for, at most once a second. This is part of a round's decisions.

        Returns what to give to `has_asked` once the round is written; None: it was not time yet.
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
        """Note that the round with these scalings is written."""
        self._ask_at_ms = now_ms + ASK_MS
        self._asked.update(asked)

    def _scaler(self, row: StreamRow) -> Autoscaler | None:
        if self._settings.get(row.stream) != row.settings and row.state == ACTIVE:
            self._settings[row.stream] = row.settings
            try:
                policy = parse_policy(row.settings)
            except InvalidArgument as error:  # another version checked the settings by other rules
                log.warning(
                    "%s is not scaled by itself: %s",
                    row.stream,
                    error,
                    extra={"stream": row.stream},
                )
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
            return  # the brokers did not add the partitions: wait before the next try
        asks[stream] = _Asked(numbers, turn.now_ms + scaler.policy.cooldown_ms)
        log.info(
            "scaling %s: %s; %d segments instead of %d",
            stream, proposal.why, len(proposal.ranges), len(proposal.seal), extra={"stream": stream},
        )  # fmt: skip
        try:
            start(turn, row, proposal.seal, proposal.ranges, None)
        except FixCallError as error:
            log.warning("%s is not scaled: %s", stream, error, extra={"stream": stream})


def _ranges(round_: Round, commit: StreamCommit, row: StreamRow) -> dict[int, SegmentRange]:
    """Segments by id: the active ones, and those of the stream epochs that this round opens."""
    found = {s.segment_id: s for s in row.segments}
    if any(part.segment_id not in found for part in commit.parts):
        opened = (step for step in round_.history if isinstance(step, NewEpoch))
        for epoch in opened:
            if epoch.stream == commit.stream:
                found |= {s.segment_id: s for s in (*epoch.sealed, *epoch.segments)}
    return found


def _plain(load: StreamLoad, tail: Tail) -> Iterator[Taken]:
    """Divide plain writes among segments, by how far each partition's end moved because of them."""
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
