"""Decisions on scaling: which segments are sealed, which are opened, and the partitions that they need.

A scaling never waits for a transaction. If partitions are missing, the intent is logged first, the shell adds
partitions to the topics, and `partitions_added` continues. Segments are named by number, because rolling commits in
between change their ids.

A policy over the load of each segment (`propose`), like Pravega's, scales streams automatically, with several
averaging windows (shorter ones have higher thresholds) and a cool-down. Three rules keep it from splitting and
merging again and again:

- A segment is split if its load is more than 1.5 times its target over a whole cool-down, or sooner if the load is
  far above (`_RULES`), but never within a cool-down after it was opened.
- Neighbours are merged only if the merged segment would have stayed below a third of every threshold, at every
  moment of the last four cool-downs. So a constant load never splits a merged segment again, and `_MIN_WIDTH` or
  the samples bound how often segments are split.
- A segment whose load comes from one key is not split: no split would help.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, NamedTuple

from anabranch.core import rows as k
from anabranch.core import segments as seg
from anabranch.core import work
from anabranch.core.authorize import Right, rights_of
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.quotas import partitions_of
from anabranch.core.decisions.scopes import active_stream, check_room, stream_info
from anabranch.core.decisions.times import check_informed, is_repeated, note_change
from anabranch.core.decisions.transactions import drop_epoch
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.round import NewEpoch, ReplyTo
from anabranch.core.stream_settings import (
    BYTES,
    EVENTS,
    HISTORY,
    MIN_SEGMENTS,
    SEGMENT_BYTES,
    Policy,
)
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, TopicMisconfigured, count_of
from anabranch.protocol import limits
from anabranch.protocol.ids import segment_number
from anabranch.protocol.legal_names import is_state
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r

MAX_PARTITIONS = limits.STREAM_PARTITIONS.value
# Errors that may pass. The broker may have added partitions all the same, so the request is repeated.
PASSING = (
    NotReady,
    TopicMisconfigured,
)
GROWTH = 4  # one scaling may multiply the number of segments by this
FEW = 64  # this many segments are always allowed
GROW_AGAIN_MS = 5_000  # pause before merges ask again for partitions that the broker did not add


def scale(turn: Turn, command: r.Scale, to: ReplyTo | None) -> None:
    """Scale a stream, now or as soon as it has the partitions. Repeating the command is harmless."""
    row = active_stream(turn, command.stream)
    if is_state(command.stream):
        raise InvalidArgument(
            f"{command.stream} is the state of a processor: it has one segment for each task"
        )
    thing = k.segments_key(command.stream)
    repeated = is_repeated(turn, thing, to)
    if row.scaling is not None:
        if repeated:
            return  # the answer comes when it is done
        raise NotReady(f"{command.stream} is being scaled: ask again")
    numbers = {segment_number(s.segment_id) for s in row.segments}  # rolling commits change the ids
    if repeated and not numbers.issuperset(map(segment_number, command.seal)):
        turn.reply(to, r.StreamList((stream_info(turn, row),)))  # it was done before
        return
    if command.segments:
        if command.seal or command.ranges:
            raise InvalidArgument("give a number of segments, or what to seal and open: not both")
        seal, ranges = seg.even_plan(row.segments, command.segments)
        if ranges:
            check_informed(turn, thing, to)
    else:
        check_informed(turn, thing, to)
        seal, ranges = seg.hand_plan(row.segments, command.seal, command.ranges)
    _check_growth(turn, row, len(row.segments) - len(seal) + len(ranges))
    start(turn, row, seal, ranges, to)


def _check_growth(turn: Turn, row: r.StreamRow, count: int) -> None:
    """`InvalidArgument` for a scaling to far more segments, unless the lane may operate the stream.

    Partitions can't be removed, so a typing error should not create many of them.
    """
    most = max(FEW, GROWTH * len(row.segments))
    free = turn.state.trusts(turn.lane)
    if count > most and not (free or rights_of(turn.state, turn.lane, row.stream) & Right.OPERATE):
        raise InvalidArgument(
            f"{row.stream} has {count_of(len(row.segments), 'segment')}, so one scaling gives it at most {most:,}: "
            "scale it again after that, or let a lane with the right 'operate' do it"
        )


def start(
    turn: Turn,
    row: r.StreamRow,
    seal: Sequence[int],
    ranges: Sequence[r.KeyRange],
    to: ReplyTo | None,
) -> None:
    """Scale at once, or log the intent to scale and the number of partitions that it needs."""
    turn.charge(work.of_items(len(row.segments) + len(seal)) + work.LOOK * len(ranges))
    if not ranges:
        turn.reply(to, r.StreamList((stream_info(turn, row),)))
        return
    scaling = r.Scaling(seal=tuple(seal), ranges=tuple(ranges), **asked(to))
    if not _perform(turn, row, scaling):
        lacking = len(ranges) - len(seal) - len(idle_partitions(turn, row))
        wanted = check_partitions(row.partitions + lacking)
        check_room(turn, row.owner, 0, max(0, wanted - partitions_of(row)))
        note_change(turn, k.segments_key(row.stream), to)
        turn.put(
            k.stream_key(row.stream),
            replace(row, scaling=scaling, wanted_partitions=max(wanted, row.wanted_partitions)),
        )


def want_partitions(turn: Turn, stream: str, count: int) -> None:
    """Log that a stream needs ``count`` partitions; the shell adds them.

    A count above the limit is not logged: the merge that needs them waits until partitions become idle.
    """
    row = turn.state.streams[stream]
    if turn.now_ms < turn.merging.may_grow_ms.get(stream, 0):
        return
    if count > MAX_PARTITIONS:
        turn.merging.may_grow_ms.put(stream, turn.now_ms + GROW_AGAIN_MS)
    elif count > row.wanted_partitions:
        turn.put(k.stream_key(stream), replace(row, wanted_partitions=count))


def check_partitions(count: int) -> int:
    """The count; `InvalidArgument` beyond what a stream may have."""
    if count > MAX_PARTITIONS:
        raise InvalidArgument(f"a stream has at most {MAX_PARTITIONS:,} partitions")
    return count


def partitions_added(turn: Turn, stream: str, partitions: int) -> None:
    """Continue a scaling that waited for partitions: the topics have them now."""
    row = replace(turn.state.streams[stream], partitions=partitions)
    turn.put(k.stream_key(stream), row)
    turn.merging.may_grow_ms.put(stream, None)
    if row.scaling is not None and not _perform(turn, row, row.scaling):
        # A staged merge took some of the partitions meanwhile: ask for more.
        try:
            wanted = check_partitions(row.partitions + len(row.scaling.ranges))
        except InvalidArgument as error:
            partitions_refused(turn, stream, error)
        else:
            want_partitions(turn, stream, wanted)


def partitions_refused(turn: Turn, stream: str, error: AnabranchError, there: int = 0) -> None:
    """Cancel the scaling, because partitions can't be added to the topics, or can't be added now.

    If the error may pass (`PASSING`), the stream's row still asks for the partitions: some of them may exist
    already, and take plain writes. Otherwise the row asks for the number that the journal has now (``there``).
    """
    row = turn.state.streams[stream]
    wanted = row.wanted_partitions
    if not isinstance(error, PASSING):
        wanted = max(row.partitions, min(there, wanted))
    left = replace(row, wanted_partitions=wanted, scaling=None)
    if left != row:
        turn.put(k.stream_key(stream), left)
    turn.merging.may_grow_ms.put(stream, turn.now_ms + GROW_AGAIN_MS)
    if row.scaling is not None:
        turn.reply(asker(row.scaling), refuse(error))


def idle_partitions(turn: Turn, row: r.StreamRow) -> list[int]:
    """Partitions that have no active segment and no staged merge, and are not retired."""
    taken = {s.partition for s in row.segments} | turn.state.reserved(row.stream)
    taken |= turn.state.retired(row.stream)
    return [p for p in range(row.partitions) if p not in taken]


def _perform(turn: Turn, row: r.StreamRow, scaling: r.Scaling) -> bool:
    """Put the new layout; False if there are too few partitions."""
    epoch = row.stream_epoch + 1
    layout = seg.scale(
        row.segments,
        scaling.seal,
        scaling.ranges,
        epoch=epoch,
        next_number=row.next_number,
        idle=idle_partitions(turn, row),
    )
    if layout is None:
        return False
    former, asked_by = row.reference_epoch, asker(scaling)
    seal = set(scaling.seal)
    sealed = tuple(s for s in row.segments if segment_number(s.segment_id) in seal)
    scaled = replace(
        row,
        stream_epoch=epoch,
        reference_epoch=epoch,
        segments=layout,
        next_number=row.next_number + len(scaling.ranges),
        scaling=None,
    )
    turn.put(k.stream_key(row.stream), scaled)
    turn.put(k.epoch_key(row.stream, epoch), r.EpochRow(row.stream, epoch, layout))
    drop_epoch(turn, row.stream, former)
    at = note_change(turn, k.segments_key(row.stream), asked_by)
    at = holding.epoch_time(turn, row.stream, at)
    turn.round.history.append(NewEpoch(row.stream, epoch, epoch, at, layout, sealed))
    turn.reply(asked_by, r.StreamList((stream_info(turn, scaled),)))
    return True


def asker(of: r.Scaling | r.StreamRow) -> ReplyTo | None:
    """The address for the reply about a scaling, or about work on a stream's topics; None: no command waits."""
    if not of.correlation_id:
        return None
    return ReplyTo(of.correlation_id, of.reply_partition, of.command, of.reply_lane)


def asked(to: ReplyTo | None) -> dict[str, Any]:
    """The fields of a row that name the asker; `asker` reads them."""
    return {
        "correlation_id": to.correlation_id if to is not None else b"",
        "reply_partition": to.partition if to is not None else -1,
        "reply_lane": to.lane if to is not None else "",
        "command": to.command if to is not None else b"",
    }


def duplicate_active(row: r.StreamRow, epoch: int) -> tuple[r.SegmentRange, ...]:
    """A copy of the active layout for a later epoch, on the same partitions."""
    places = {segment_number(s.segment_id): s.partition for s in row.segments}
    return seg.duplicate(row.segments, epoch, places)


# -- the policy of automatic scaling ------------------------------------------------------------

_SAMPLES = 256  # sampled key positions kept for each segment
# (buckets, times the target): a segment is split if its mean load in one of these windows is higher.
_RULES = ((2, 5.0), (4, 2.5), (8, 1.5))
_QUIET = 1 / 3
_MAX_PARTS = 8
_MIN_WIDTH = SPACE >> 16
_ENOUGH_SAMPLES = 64
_USEFUL = 1 / 8  # least share of the samples on the lighter side of a split


class Load(NamedTuple):
    """The load of one segment. Both series are of whole buckets, oldest first, `HISTORY` of them.

    ``taken_bytes``: the bytes that this leader counted since the segment was opened.
    ``positions``: a sample of key positions.
    """

    age_ms: int
    taken_bytes: int
    events: Sequence[int]
    sizes: Sequence[int]
    positions: Sequence[int] = ()

    def plus(self, other: Load) -> Load:
        """The load of both as one segment, without positions."""
        return Load(
            min(self.age_ms, other.age_ms),
            self.taken_bytes + other.taken_bytes,
            [a + b for a, b in zip(self.events, other.events, strict=True)],
            [a + b for a, b in zip(self.sizes, other.sizes, strict=True)],
        )


class Gauge:
    """Counts the load of one segment, in buckets of time; the last bucket is the current one."""

    __slots__ = ("_bucket", "_events", "_since_ms", "_sizes", "_taken", "positions")

    def __init__(self, now_ms: int, bucket: int) -> None:
        self._since_ms = now_ms
        self._bucket = bucket
        self._taken = 0
        self._events = deque([0] * (HISTORY + 1), HISTORY + 1)
        self._sizes = deque([0] * (HISTORY + 1), HISTORY + 1)
        self.positions: deque[int] = deque(maxlen=_SAMPLES)

    def add(self, events: int, size: int, bucket: int) -> None:
        """Count events and bytes in a bucket. If that bucket is over, count them in the current bucket."""
        self._reach(bucket)
        self._events[-1] += events
        self._sizes[-1] += size
        self._taken += size

    def load(self, now_ms: int, bucket: int) -> Load:
        """The load in the buckets before this one."""
        self._reach(bucket)
        return Load(
            now_ms - self._since_ms,
            self._taken,
            tuple(self._events)[:-1],
            tuple(self._sizes)[:-1],
            tuple(self.positions),
        )

    def _reach(self, bucket: int) -> None:
        passed = min(bucket - self._bucket, HISTORY + 1)
        if passed > 0:
            self._events.extend([0] * passed)
            self._sizes.extend([0] * passed)
            self._bucket = bucket


class Proposal(NamedTuple):
    """Segments to seal, by number, ranges to open over the same keys, and the reason for people."""

    seal: tuple[int, ...]
    ranges: tuple[r.KeyRange, ...]
    why: str


class Autoscaler:
    """A stream's policy and the loads of its active segments. Times are ms of one monotonic clock."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._gauges: dict[int, Gauge] = {}
        self._asked: tuple[int, frozenset[int]] | None = None

    def track(self, segments: Sequence[r.SegmentRange], now_ms: int) -> None:
        """Set the active segments. They are known by number: a copy of the layout changes nothing."""
        bucket = now_ms // self.policy.bucket_ms
        self._gauges = {
            number: self._gauges.get(number) or Gauge(now_ms, bucket)
            for number in (segment_number(s.segment_id) for s in segments)
        }

    def add(self, number: int, events: int, size: int, now_ms: int) -> None:
        """Count events and bytes merged into a segment. Unknown numbers are skipped."""
        gauge = self._gauges.get(number)
        if gauge is not None:
            gauge.add(events, size, now_ms // self.policy.bucket_ms)

    def sample(self, number: int, positions: Iterable[int]) -> None:
        """Add positions of some keys that were merged into a segment; optional, for better splits."""
        gauge = self._gauges.get(number)
        if gauge is not None:
            gauge.positions.extend(positions)

    def propose(self, segments: Sequence[r.SegmentRange], now_ms: int) -> Proposal | None:
        """The change to make now, or None. ``segments``: the active ones, as for `track`.

        The loads are checked once in each bucket, and when the segments change: a proposal that was not carried out
        is made again in the next bucket.
        """
        self.track(segments, now_ms)
        bucket = now_ms // self.policy.bucket_ms
        asked = bucket, frozenset(self._gauges)
        if asked == self._asked:
            return None
        self._asked = asked
        loads = {number: gauge.load(now_ms, bucket) for number, gauge in self._gauges.items()}
        return propose(self.policy, segments, loads)


def propose(
    policy: Policy | None, segments: Sequence[r.SegmentRange], loads: Mapping[int, Load]
) -> Proposal | None:
    """The most needed change, or None. ``loads``: by segment number; a segment without a load is not changed.

    The least number of segments comes first, then a split of the segment with the highest load, then a merge.
    """
    if policy is None:
        return None
    ordered = sorted(segments, key=lambda s: s.low)
    if len(ordered) < policy.min_segments:
        return _fill(policy, ordered)
    return _split(policy, ordered, loads) or _merge(policy, ordered, loads)


# -- splits ---------------------------------------------------------------------------------------------


def _fill(policy: Policy, segments: Sequence[r.SegmentRange]) -> Proposal | None:
    """Halve the widest segments until there are enough."""
    ranges = [r.KeyRange(s.low, s.high) for s in segments]
    while len(ranges) < policy.min_segments:
        widest = max(range(len(ranges)), key=lambda i: ranges[i].high - ranges[i].low)
        one = ranges[widest]
        middle = (one.low + one.high) // 2
        ranges[widest : widest + 1] = [r.KeyRange(one.low, middle), r.KeyRange(middle, one.high)]
    kept = {(s.low, s.high) for s in segments} & {(one.low, one.high) for one in ranges}
    return Proposal(
        tuple(segment_number(s.segment_id) for s in segments if (s.low, s.high) not in kept),
        tuple(one for one in ranges if (one.low, one.high) not in kept),
        f"{len(segments)} segments are less than {MIN_SEGMENTS}={policy.min_segments}",
    )


class _Heat(NamedTuple):
    score: float  # load / threshold; above 1, the segment is to be split
    parts: int
    why: str


def _split(
    policy: Policy, segments: Sequence[r.SegmentRange], loads: Mapping[int, Load]
) -> Proposal | None:
    room = policy.max_segments - len(segments) + 1
    if room < 2:
        return None
    hot = []
    for s in segments:
        load = loads.get(segment_number(s.segment_id))
        if load is not None and load.age_ms >= policy.cooldown_ms:
            heat = _heat(policy, load)
            if heat.score > 1:
                hot.append((heat, s, load))
    hot.sort(key=lambda each: (-each[0].score, each[1].low))
    for heat, s, load in hot:
        ranges = cut(s.low, s.high, min(heat.parts, room), load.positions)
        if len(ranges) > 1:
            number = segment_number(s.segment_id)
            return Proposal((number,), ranges, f"segment {number} takes {heat.why}")
    return None


def _heat(policy: Policy, load: Load) -> _Heat:
    found = _Heat(0.0, 2, "")
    for name, target, series in _rates(policy, load):
        rates = [sum(series[-n:]) * 1000 / (n * policy.bucket_ms) for n, _ in _RULES]
        above = [
            rate for rate, (_, times) in zip(rates, _RULES, strict=True) if rate > target * times
        ]
        if above:
            score = max(rate / target / n for rate, (_, n) in zip(rates, _RULES, strict=True))
            # The longest window gives the best estimate of the parts needed.
            parts = max(found.parts, min(ceil(above[-1] / target), _MAX_PARTS))
            found = max(found, _Heat(score, parts, f"{above[-1]:,.0f}/s, {name}={target}"))
    if policy.segment_bytes is not None:
        score = load.taken_bytes / policy.segment_bytes
        if score > max(1.0, found.score):
            why = f"{load.taken_bytes:,} bytes, {SEGMENT_BYTES}={policy.segment_bytes}"
            found = _Heat(score, found.parts, why)
    return found


def _rates(policy: Policy, load: Load) -> Iterable[tuple[str, int, Sequence[int]]]:
    if policy.events_per_s is not None:
        yield EVENTS, policy.events_per_s, load.events
    if policy.bytes_per_s is not None:
        yield BYTES, policy.bytes_per_s, load.sizes


def cut(low: int, high: int, parts: int, positions: Sequence[int]) -> tuple[r.KeyRange, ...]:
    """Up to ``parts`` ranges that tile [low, high); a single range if no split is useful.

    With enough samples, the part with the most samples is split at its median, repeatedly; a part with a single key
    is not split. With fewer samples, the parts are even, down to a least width.
    """
    inside = sorted(p for p in positions if low <= p < high)
    if len(inside) < _ENOUGH_SAMPLES:
        count = min(parts, (high - low) // _MIN_WIDTH)
        if count < 2:
            return (r.KeyRange(low, high),)
        bounds = [low + (high - low) * i // count for i in range(count + 1)]
    else:
        bounds = _balanced(low, high, parts, inside)
    return tuple(r.KeyRange(a, b) for a, b in pairwise(bounds))


def _balanced(low: int, high: int, parts: int, positions: Sequence[int]) -> list[int]:
    bounds = [low, high]
    whole: set[tuple[int, int]] = set()  # parts that no split improves
    while len(bounds) <= parts:
        open_parts = [
            (bisect_left(positions, b) - bisect_left(positions, a), a, b)
            for a, b in pairwise(bounds)
            if (a, b) not in whole
        ]
        if not open_parts:
            break
        _, a, b = max(open_parts, key=lambda part: (part[0], -part[1]))
        at = _best_cut(a, b, positions)
        if at is None:
            whole.add((a, b))
        else:
            bounds.insert(bounds.index(b), at)
    return bounds


def _best_cut(low: int, high: int, positions: Sequence[int]) -> int | None:
    """A position near the median with a useful share of the samples on both sides, or None."""
    first, end = bisect_left(positions, low), bisect_left(positions, high)
    if end - first < 2:
        return None
    median = positions[(first + end) // 2]
    lighter = [
        (min(bisect_left(positions, at) - first, end - bisect_left(positions, at)), at)
        for at in (median, median + 1)
        if low < at < high
    ]
    share, at = max(lighter, default=(0, 0))
    return at if share >= max(1.0, (end - first) * _USEFUL) else None


# -- merges ---------------------------------------------------------------------------------------------


def _merge(
    policy: Policy, segments: Sequence[r.SegmentRange], loads: Mapping[int, Load]
) -> Proposal | None:
    """Merge the longest run of neighbours that together are quiet, down to the least number of segments."""
    if policy.events_per_s is None and policy.bytes_per_s is None:
        return None
    most = len(segments) - policy.min_segments + 1
    best: list[r.SegmentRange] = []
    run: list[r.SegmentRange] = []
    together: Load | None = None
    for s in segments:
        own = loads.get(segment_number(s.segment_id))
        if own is None or not _is_quiet(policy, own):
            run, together = [], None
            continue
        both = own if together is None else together.plus(own)
        if len(run) < most and _is_quiet(policy, both):
            run, together = [*run, s], both
        else:
            run, together = [s], own
        if len(run) > len(best):
            best = run
    if not 2 <= len(best) <= most:
        return None
    numbers = tuple(segment_number(s.segment_id) for s in best)
    return Proposal(
        numbers,
        (r.KeyRange(best[0].low, best[-1].high),),
        f"segments {', '.join(map(str, numbers))} are idle",
    )


def _is_quiet(policy: Policy, load: Load) -> bool:
    """Whether the load was below a third of every threshold, at every moment of the last four cool-downs.

    If the policy splits by size, a segment with events is never quiet: a merged segment would soon be full again.
    """
    if load.age_ms < HISTORY * policy.bucket_ms:
        return False
    if policy.segment_bytes is not None and (any(load.events) or any(load.sizes)):
        return False
    for _, target, series in _rates(policy, load):
        sums = [0, *accumulate(series)]
        for buckets, times in _RULES:
            peak = max(b - a for a, b in zip(sums, sums[buckets:], strict=False))
            rate = peak * 1000 / (buckets * policy.bucket_ms)
            if rate >= target * times * _QUIET:
                return False
    return True
