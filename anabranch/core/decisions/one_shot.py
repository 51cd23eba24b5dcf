"""Decisions on one-shots: a whole transaction in one command, which commits at once, or is prepared.

Their events are in the command, so no journal and no receipts take part. A one-shot that moves positions of tasks
has a marked id (`protocol.ids`) and leaves no row of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import NamedTuple

from anabranch import errors
from anabranch.core import history_records
from anabranch.core import rows as k
from anabranch.core.authorize import check_right, writing
from anabranch.core.command_events import CommandEvents, EventRun, SomeEvents
from anabranch.core.decisions import positions, prepared
from anabranch.core.decisions.scopes import active_stream, check_served
from anabranch.core.decisions.transactions import (
    check_id_partition,
    check_open,
    check_same_partition,
    drop_epoch,
    earlier_outcome,
    finish,
    supersede,
)
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import conflicts, frozen, row_changes
from anabranch.core.locks.row_changes import Placed
from anabranch.core.memory import is_gone
from anabranch.core.round import Part, ReplyTo, StreamCommit
from anabranch.core.state import OpenTxn
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.core.stream_states import RECOVERING, state_of
from anabranch.core.transaction_states import born
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.ids import is_marked
from anabranch.protocol.legal_names import check_name, is_state
from anabranch.protocol.limits import NO_TIME, RESERVED
from anabranch.protocol.partitioner import place_of
from anabranch.protocol.schemas import records as r

TOGETHER_LEVEL = 3  # the feature level from which on parts of a commit come together
_KEEPALIVE_MS = 1_000  # in the row of a `PrepareEvents`, which no keepalive ends


def one_shot(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Commit a one-shot. Its events are placed by key in the active segments."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    if command.consumed is not None or is_marked(command.txn_id):
        _one_shot_of_tasks(turn, command, to)
        return
    row = turn.state.txn_row(command.txn_id)
    if row is not None:
        if row.state == "ABORTED":
            row = _instead_of(turn, row, command)
        elif (row.state, row.scope, row.name, row.committed) != (
            "COMMITTED",
            command.scope,
            command.name,
            _count(command),
        ):
            raise errors.InvalidArgument(
                "the transaction id is in use with other arguments: make a new one"
            )
        turn.answer(to, row)
        return
    turn.check_new_id(command.txn_id)
    placed = _place(turn, command)
    earlier = earlier_outcome(turn, command.scope, command.name, turn.lane)
    if earlier is not None:
        _give_way(turn, command, earlier, to)
        return
    judged = _judge(turn, command, placed)
    if isinstance(judged, r.Revalidate):
        turn.reply(to, judged)
        return
    supersede(turn, command.scope, command.name, command.txn_id)
    timestamp = _append_judged(turn, command, judged)
    row = born(
        "one_shot",
        command.txn_id,
        turn.wall_ms,
        scope=command.scope,
        name=command.name,
        commit_timestamp=timestamp,
        committed=_count(command),
        owner=turn.lane,
    )
    turn.put(k.txn_key(command.txn_id), row)
    if to is not None:
        turn.reply(to, _with_times(turn, command, turn.outcome(row, full=False)))


def _instead_of(turn: Turn, row: r.TxnRow, command: r.OneShot | r.PrepareEvents) -> r.TxnRow:
    """The commit to which an aborted transaction gave way. `TransactionAborted` if it was aborted otherwise."""
    with suppress(errors.NotAuthorized):
        earlier = earlier_outcome(turn, command.scope, command.name, row.owner)
        if earlier is not None:
            return earlier
    raise errors.TransactionAborted(f"the transaction is aborted ({row.reason}): begin a new one")


def _give_way(turn: Turn, command: r.OneShot, earlier: r.TxnRow, to: ReplyTo | None) -> None:
    """Answer with an earlier commit of the name, and log ABORTED.

    Without that row a repeated command could commit after the name is forgotten.
    """
    reason = f"the name {command.name!r} was committed before by {earlier.txn_id.hex()}"
    scope, owner = command.scope, turn.lane
    never = born("give_way", command.txn_id, turn.wall_ms, scope=scope, owner=owner, reason=reason)
    turn.put(k.txn_key(command.txn_id), never)
    turn.answer(to, earlier)


def prepare_events(turn: Turn, command: r.PrepareEvents, to: ReplyTo | None) -> None:
    """Prepare a transaction with all its events, which a row keeps until the coordinator decides."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    prepared.check_coordinator(command.prepare)
    if is_marked(command.txn_id) or command.consumed is not None or command.locks:
        raise errors.InvalidArgument("a prepared transaction takes no locks and moves no positions")
    row = turn.state.txn_row(command.txn_id)
    if row is not None:
        _prepared_before(turn, command, row, to)
        return
    turn.check_new_id(command.txn_id)
    events = CommandEvents.of(command.events)
    size = limits.FRAMING * len(events) + len(events.payload)
    if size > limits.PREPARED_EVENTS.value:
        raise errors.EventTooLarge(
            f"events of {size:,} bytes in one command that prepares, {limits.PREPARED_EVENTS.value:,} are allowed: "
            "write them to journals"
        )
    shot = r.OneShot(command.txn_id, command.scope, command.name, command.events)
    streams = sorted(_place(turn, shot))
    earlier = earlier_outcome(turn, command.scope, command.name, turn.lane)
    if earlier is not None:
        _give_way(turn, shot, earlier, to)
        return
    check_open(turn)
    prepared.check_count(turn, turn.lane)
    supersede(turn, command.scope, command.name, command.txn_id)
    row = born(
        "begin",
        command.txn_id,
        turn.wall_ms,
        scope=command.scope,
        name=command.name,
        keepalive_ms=_KEEPALIVE_MS,
        secret=command.secret,
        owner=turn.lane,
    )
    row = turn.move(row, "prepare", committed=len(events))
    turn.put(k.txn_key(command.txn_id), row)
    for stream in streams:
        epoch = turn.state.streams[stream].reference_epoch
        turn.put(k.participant_key(command.txn_id, stream), r.ParticipantRow(stream, epoch))
    kept = r.PreparedRow(command.prepare, turn.wall_ms, command.events)
    turn.put(k.prepared_key(command.txn_id), kept)
    if to is not None:
        turn.reply(to, turn.outcome(row, full=False, prepared=kept))


def _prepared_before(
    turn: Turn, command: r.PrepareEvents, row: r.TxnRow, to: ReplyTo | None
) -> None:
    """Answer a repeated `PrepareEvents`."""
    if row.state == "ABORTED":
        turn.answer(to, _instead_of(turn, row, command))
        return
    if row.secret is None or not compare_digest(row.secret, command.secret):
        raise errors.NotAuthorized("the transaction was begun with another secret")
    if row.state == "OPEN" or (row.scope, row.name) != (command.scope, command.name):
        raise errors.InvalidArgument(
            "the transaction id is in use with other arguments: make a new one"
        )
    prepared.check_same(turn, row, command.prepare)
    turn.answer(to, row, full=False)


def commit_events(turn: Turn, txn: OpenTxn, to: ReplyTo | None) -> None:
    """Commit a PREPARED transaction whose events are in a row; they are placed by key in the segments active now.

    Events of LOST streams are left out. `NotReady` while a stream is in trouble or being recovered.
    """
    txn_id, row = txn.row.txn_id, txn.row
    held = turn.state.prepared_row(txn_id)
    events = () if held is None else held.events
    check(len(events) == row.committed, "a PREPARED transaction lost its events")
    gone = {stream for stream in txn.participants if is_gone(turn.state, stream)}
    for stream in sorted(txn.participants.keys() - gone):
        if state_of(turn.state.streams.get(stream)) == RECOVERING:
            raise errors.NotReady(f"{stream} is being taken back: ask again")
        active_stream(turn, stream)
    all_events = CommandEvents.of(events)
    kept = {s: its for s, its in all_events.by_stream().items() if s not in gone}
    placed = _spread(turn, all_events, all_events.places, kept)
    frozen.check_free(turn, txn_id, placed)
    if gone:
        row = prepared.without(row, sum(event.stream in gone for event in events), gone)
    timestamp = _append(turn, txn_id, placed)
    row = turn.move(row, "begin_commit", commit_timestamp=timestamp, finished_ms=turn.wall_ms)
    row = turn.move(row, "finalize_commit")
    left = prepared.drop_events(turn, txn_id)
    for stream, epoch in [(s, e) for s, e in txn.participants.items() if s in placed]:
        now = r.ParticipantRow(stream, turn.state.streams[stream].reference_epoch)
        if now.reference_epoch != epoch:  # the stream was scaled since
            turn.put(k.participant_key(txn_id, stream), now)
            drop_epoch(turn, stream, epoch)
    finish(turn, row)
    if to is not None:
        # The streams are known here, so the table is not scanned for them.
        outcome = turn.outcome(row, full=False, prepared=left)
        turn.reply(to, outcome._replace(streams=tuple(sorted(txn.participants))))


def _one_shot_of_tasks(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Commit a one-shot that moves positions. The rows of its tasks prove that it is committed."""
    consumed = command.consumed
    if consumed is None or command.name is not None or not is_marked(command.txn_id):
        raise errors.InvalidArgument(
            "a one-shot moves positions if its id is marked so, and then has no name"
        )
    before = positions.moved_by(turn, consumed, command.txn_id)
    if before is not None:
        turn.reply(to, positions.outcome(command.scope, before, turn.lane))
        return
    positions.judge(turn, consumed, command.txn_id, command.scope, turn.lane)
    placed = _place(turn, command)
    if command.locks:
        turn.state.check_enabled(TOGETHER_LEVEL, "a one-shot with positions and locks")
    judged = _judge(turn, command, placed)
    if isinstance(judged, r.Revalidate):
        turn.reply(to, judged)
        return
    timestamp = _append_judged(turn, command, judged)
    state = _state_of(command, placed)
    moved = positions.move(turn, consumed, command.txn_id, timestamp, _count(command), state)
    turn.reply(to, _with_times(turn, command, positions.outcome(command.scope, moved, turn.lane)))


def _with_times(turn: Turn, command: r.OneShot, outcome: r.Outcome) -> r.Outcome:
    """The outcome of a one-shot with the times of the tables that its locks name."""
    if not command.locks:
        return outcome
    return outcome._replace(tables=conflicts.table_times(turn, conflicts.named(command.locks)))


def _state_of(command: r.OneShot, placed: Placed) -> dict[str, set[int]]:
    """The tasks whose state a one-shot writes, by state stream."""
    return {
        stream: {event.segment_id for _, events in by_segment for event in events}
        for stream, by_segment in placed.items()
        if is_state(stream)
    }


def _size_of(event: r.Event) -> int:
    """The least number of bytes of a record batch with only this event."""
    size = limits.FRAMING + len(event.key or b"") + len(event.value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in event.headers)


def _count(command: r.OneShot) -> int:
    """The number of events that a one-shot commits."""
    return len(command.events) + len(command.changes)


class _Judged(NamedTuple):
    """A one-shot that may commit now. ``values``: of the rows that its changes write."""

    placed: Placed
    values: list[int]


def _judge(turn: Turn, command: r.OneShot, placed: Placed) -> _Judged | r.Revalidate:
    """Check locks and changes of rows as of now. `Revalidate` asks the client to do that first. Puts nothing.

    Raises: NotReady (it would break a frozen lock), NotANumber, NumberOverflow; as `conflicts.judge`.
    """
    if command.locks and (again := conflicts.judge(turn, command)) is not None:
        return again
    values = row_changes.values_of(turn, command)
    if values is None:
        return conflicts.again(turn, command)
    if values:
        placed = row_changes.filled(command, values, placed)
    frozen.check_free(turn, command.txn_id, placed)
    return _Judged(placed, values)


def _append_judged(turn: Turn, command: r.OneShot, judged: _Judged) -> int:
    """Put the events of a one-shot into the round. Returns their commit timestamp."""
    timestamp = _append(turn, command.txn_id, judged.placed)
    row_changes.keep(turn, command, judged.values, timestamp)
    return timestamp


def _append(turn: Turn, txn_id: bytes, placed: Placed) -> int:
    """Put the events of a one-shot into the round. Returns their commit timestamp."""
    timestamp = turn.next_timestamp()
    for stream, by_segment in placed.items():
        parts = tuple(
            [
                Part(segment.segment_id, segment.partition, events=events)
                for segment, events in by_segment
            ]
        )
        target = turn.state.streams[stream]
        epoch = target.stream_epoch
        # The size of the history record, about; in wide streams not every record has the vector.
        wide = history_records.FEW + target.partitions // history_records.EVERY
        turn.size += 16 * min(target.partitions, wide)
        conflicts.merge(turn, StreamCommit(txn_id, stream, epoch, timestamp, parts))
    return timestamp


def _place(turn: Turn, command: r.OneShot) -> Placed:
    """Check the events of a one-shot, and group them by stream and present segment of their key, in order.

    Raises: NotAuthorized, InvalidArgument, EventTooLarge, CrossScope; NotReady, StreamLost, UnknownStream.
    """
    events, state = row_changes.events_of(turn, command), turn.state
    most: dict[str, int] = {}
    tables: dict[str, list[EventRun]] = {}
    of_state = []
    begin = 0
    for run in events.runs:
        stream = run.stream
        if stream not in most:
            if stream not in state.streams:
                check_same_partition(turn, stream, command.scope)
            if is_state(stream):
                of_state.append(stream)
            else:
                check_right(state, turn.lane, *writing(state, stream))
            active_stream(turn, stream)
            settings = state.streams[stream].settings
            most[stream] = int(settings.get(MAX_MESSAGE, limits.MESSAGE.value))
        if stream in state.tables:
            tables.setdefault(stream, []).append(run)
        latest = turn.latest_time(stream)
        fits = limits.FRAMING + run.biggest <= most[stream]
        in_time = run.earliest >= NO_TIME and run.latest <= latest
        if not (fits and in_time) or run.reserved or run.most_headers > limits.HEADERS.value:
            for event in SomeEvents(events, range(begin, run.end)):
                _check_event(event, most[stream], latest)
        begin = run.end
    for table, runs in tables.items():
        limits.ROW_KEY.check(max(run.longest_key for run in runs), f"a key of {table}")
        if not min(run.shortest_key for run in runs):
            raise errors.InvalidArgument(
                f"{table} is a table: each row has a key, which is not empty"
            )
    by_stream, places = events.by_stream(), events.places
    for stream in of_state:
        rows = SomeEvents(events, by_stream[stream])
        places = _state_places(turn, command, stream, rows, places)
    return _spread(turn, events, places, by_stream)


def _check_event(event: r.Event, most: int, latest: int) -> None:
    """Raise the error of an event that its stream does not accept. ``most``: bytes; ``latest``: Unix time in ms."""
    if not NO_TIME <= event.timestamp <= latest:
        limits.check_ahead(event.timestamp, latest, event.stream)
    limits.HEADERS.check(len(event.headers), "an event")
    size = _size_of(event)
    if size > most:
        raise errors.EventTooLarge(
            f"an event of {size:,} bytes; {event.stream} takes up to {most:,} (its setting {MAX_MESSAGE})"
        )
    for name, _ in event.headers:
        if name.startswith(RESERVED):
            raise errors.InvalidArgument(f"header {name!r}: names that begin so are reserved")


def _state_places(
    turn: Turn, command: r.OneShot, stream: str, rows: SomeEvents, places: Sequence[int]
) -> Sequence[int]:
    """Check the rows of a processor's state. Returns all places: these rows go to the segments that they name."""
    events = list(rows)
    positions.check_state(command.consumed, {stream: {row.segment_id for row in events}})
    if any(row.key is None for row in events):
        raise errors.InvalidArgument(f"{stream}: each row of a state has a key")
    positions.check_state_size(turn, rows.size)
    found = list(places)
    for number, row in zip(rows.numbers, events, strict=True):
        found[number] = place_of(None, row.segment_id)
    return found


def _spread(
    turn: Turn, events: CommandEvents, places: Sequence[int], by_stream: Mapping[str, Sequence[int]]
) -> Placed:
    """Group events by stream and present segment. ``by_stream``: their numbers."""
    layouts = turn.state.layouts
    return {
        stream: [
            (segment, SomeEvents(events, some))
            for segment, some in layouts[stream].spread(places, numbers)
        ]
        for stream, numbers in by_stream.items()
    }
