"""Decisions on scaling: which segments are sealed, which are opened, and the partitions that they need.

A scaling never waits for a transaction. If partitions are missing, the intent is logged first, the shell adds
partitions to the topics, and `partitions_added` continues. Segments are named by number, because rolling commits in
between change their ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anabranch.core import limits, work
from anabranch.core import rows as k
from anabranch.core import segments as seg
from anabranch.core.authorize import Right, rights_of
from anabranch.core.decisions.quotas import partitions_of
from anabranch.core.decisions.scopes import active_stream, check_room, stream_info
from anabranch.core.decisions.times import check_informed, is_repeated, note_change
from anabranch.core.decisions.transactions import drop_epoch
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.ids import segment_number
from anabranch.core.legal_names import is_state
from anabranch.core.round import NewEpoch, ReplyTo
from anabranch.errors import AnabranchError, InvalidArgument, NotReady, TopicMisconfigured
from anabranch.schemas.records import (
    EpochRow,
    KeyRange,
    Scale,
    Scaling,
    SegmentRange,
    StreamList,
    StreamRow,
)

MAX_PARTITIONS = limits.STREAM_PARTITIONS.value
PASSING = (
    NotReady,
    TopicMisconfigured,
)  # partitions may have been added all the same, so the request is repeated
GROWTH = 4  # one scaling may multiply the number of segments by this
FEW = 64  # this many segments are always allowed
GROW_AGAIN_MS = 5_000  # pause before merges ask again for partitions that the broker did not add


def scale(turn: Turn, command: Scale, to: ReplyTo | None) -> None:
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
        turn.reply(to, StreamList((stream_info(turn, row),)))  # it was done before
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


def _check_growth(turn: Turn, row: StreamRow, count: int) -> None:
    """`InvalidArgument` for a scaling to far more segments, unless the lane may operate the stream.

    Partitions can't be removed, so a typing error should not create many of them.
    """
    most = max(FEW, GROWTH * len(row.segments))
    free = turn.state.trusts(turn.lane)
    if count > most and not (free or rights_of(turn.state, turn.lane, row.stream) & Right.OPERATE):
        raise InvalidArgument(
            f"{row.stream} has {len(row.segments)} segments, so one scaling gives it at most {most}: scale it "
            "again after that, or let a lane with the right 'operate' do it"
        )


def start(
    turn: Turn,
    row: StreamRow,
    seal: Sequence[int],
    ranges: Sequence[KeyRange],
    to: ReplyTo | None,
) -> None:
    """Scale at once, or log the intent and the partitions that it needs."""
    turn.charge(work.of_items(len(row.segments) + len(seal)) + work.LOOK * len(ranges))
    if not ranges:
        turn.reply(to, StreamList((stream_info(turn, row),)))
        return
    scaling = Scaling(seal=tuple(seal), ranges=tuple(ranges), **asked(to))
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

    A count above the limit is not logged: the merge that needs it waits until a scaling leaves it some.
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
        # A staged merge took some meanwhile: ask for more.
        try:
            wanted = check_partitions(row.partitions + len(row.scaling.ranges))
        except InvalidArgument as error:
            partitions_refused(turn, stream, error)
        else:
            want_partitions(turn, stream, wanted)


def partitions_refused(turn: Turn, stream: str, error: AnabranchError, there: int = 0) -> None:
    """Cancel the scaling: partitions can't be added to the topics, or not now.

    If the error may pass, the partitions are still asked for: some may exist, and plain writes go to these.
    Otherwise the row keeps the number that is ``there``, in the journal.
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


def idle_partitions(turn: Turn, row: StreamRow) -> list[int]:
    """Partitions without an active segment, a staged merge or a stray chunk."""
    taken = {s.partition for s in row.segments} | turn.state.reserved(row.stream)
    taken |= turn.state.retired(row.stream)
    return [p for p in range(row.partitions) if p not in taken]


def _perform(turn: Turn, row: StreamRow, scaling: Scaling) -> bool:
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
    turn.put(k.epoch_key(row.stream, epoch), EpochRow(row.stream, epoch, layout))
    drop_epoch(turn, row.stream, former)
    at = note_change(turn, k.segments_key(row.stream), asked_by)
    turn.round.history.append(NewEpoch(row.stream, epoch, epoch, at, layout, sealed))
    turn.reply(asked_by, StreamList((stream_info(turn, scaled),)))
    return True


def asker(of: Scaling | StreamRow) -> ReplyTo | None:
    """The asker that waits for a scaling, or for the work on a stream's topics."""
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


def duplicate_active(row: StreamRow, epoch: int) -> tuple[SegmentRange, ...]:
    """A copy of the active layout for a later epoch, on the same partitions."""
    places = {segment_number(s.segment_id): s.partition for s in row.segments}
    return seg.duplicate(row.segments, epoch, places)
