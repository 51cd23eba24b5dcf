"""Decisions on scaling: which segments end, which begin, and the partitions that they need.

A scaling never waits for a transaction. If partitions are missing, the intent is logged first, the shell grows
the topics, and `partitions_added` goes on. Segments are named by number, as rolling commits may come in between.
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
from anabranch.core.decisions.times import check_told, is_repeated, note_change
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
PASSING = (NotReady, TopicMisconfigured)  # the topics may have grown, and are asked for again
GROWTH = 4  # times the segments that there are, by one scaling
FEW = 64  # segments that are never too many
GROW_AGAIN_MS = 5_000  # how soon merges ask again for partitions that the broker did not add


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
        turn.reply(to, StreamList((stream_info(turn, row),)))  # done already
        return
    if command.segments:
        if command.seal or command.ranges:
            raise InvalidArgument("give a number of segments, or what to seal and open: not both")
        seal, ranges = seg.even_plan(row.segments, command.segments)
        if ranges:
            check_told(turn, thing, to)
    else:
        check_told(turn, thing, to)
        seal, ranges = seg.hand_plan(row.segments, command.seal, command.ranges)
    _check_growth(turn, row, len(row.segments) - len(seal) + len(ranges))
    start(turn, row, seal, ranges, to)


def _check_growth(turn: Turn, row: StreamRow, count: int) -> None:
    """`InvalidArgument` for a scaling to far more segments than there are, but by those who may operate the stream.

    Partitions can't be taken away again: a slip of the pen should cost few of them.
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
    """Log that a stream shall have ``count`` partitions; the shell adds them.

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
    """The topics have grown: a scaling that waited goes on."""
    row = replace(turn.state.streams[stream], partitions=partitions)
    turn.put(k.stream_key(stream), row)
    turn.merging.may_grow_ms.put(stream, None)
    if row.scaling is not None and not _perform(turn, row, row.scaling):
        # A carried merge took some meanwhile: ask for more.
        try:
            wanted = check_partitions(row.partitions + len(row.scaling.ranges))
        except InvalidArgument as error:
            partitions_refused(turn, stream, error)
        else:
            want_partitions(turn, stream, wanted)


def partitions_refused(turn: Turn, stream: str, error: AnabranchError, there: int = 0) -> None:
    """Take the scaling back: the topics can't be grown, or not now.

    If that may pass, the partitions stay wanted: some may be there, and plain writes come to these. Else those
    that are ``there``, in the journal, stay so.
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
    """Partitions without an active segment, a carried merge or a stray chunk."""
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
    """The active layout again, on its own partitions, for a later epoch."""
    places = {segment_number(s.segment_id): s.partition for s in row.segments}
    return seg.duplicate(row.segments, epoch, places)
