"""Decisions on one-shots: a whole transaction in one command, which commits at once, or is prepared.

Their events are in the command, so no journal and no receipts take part. A one-shot that moves positions of tasks
and has no name has a marked id (`protocol.ids`) and leaves no row of its own: the rows of its tasks prove it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest

from anabranch import errors
from anabranch.core import derivations, history_records, parts
from anabranch.core import rows as k
from anabranch.core.authorize import check_right, check_writes, writing
from anabranch.core.command_events import CommandEvents, EventRun, SomeEvents
from anabranch.core.decisions import claims, positions, prepared
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.scopes import active_stream, check_leads, check_served
from anabranch.core.decisions.transactions import (
    check_id_partition,
    check_open,
    drop_epoch,
    earlier_outcome,
    end_pending,
    finish,
)
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.locks import conflicts, frozen, locked_segments, row_changes, row_turns
from anabranch.core.locks.lock_table import bytes_of
from anabranch.core.locks.row_changes import Placed
from anabranch.core.locks.table_writes import Write
from anabranch.core.memory import is_gone
from anabranch.core.round import Part, ReplyTo, StreamCommit
from anabranch.core.state import OpenTxn
from anabranch.core.stream_settings import MAX_MESSAGE
from anabranch.core.stream_states import RECOVERING, state_of
from anabranch.core.transaction_states import born
from anabranch.errors import check
from anabranch.protocol import limits
from anabranch.protocol.ids import is_marked, segment_number
from anabranch.protocol.legal_names import check_name, is_state
from anabranch.protocol.limits import NO_TIME, RESERVED
from anabranch.protocol.partitioner import place_of
from anabranch.protocol.schemas import records as r

_KEEPALIVE_MS = 1_000  # in the row of a `PrepareEvents`, which no keepalive ends
OTHERS = "the transaction id is in use with other arguments: make a new one"


def one_shot(turn: Turn, command: r.OneShot, to: ReplyTo | None) -> None:
    """Commit a one-shot. Its events are placed by key in the active segments."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    marked, consumed = is_marked(command.txn_id), command.consumed
    if marked != (consumed is not None and command.name is None):
        raise errors.InvalidArgument(
            "the id of a one-shot is marked if it moves positions and has no name, and no other one is"
        )
    if _answered_before(turn, command, to, marked=marked):
        return
    if not marked:
        turn.check_new_id(command.txn_id)
    ending = ending_of(command, turn.lane)
    if not parts.check(turn, ending):
        instead(turn, command, ending, to)
        return
    # No part of the commit refuses it. If a client waits for the answer, it may still be advised to take a turn.
    if to is not None and (advice := row_turns.advice(turn, command)) is not None:
        turn.reply(to, advice)
        return
    at = None
    if turn.holds.in_use and (at := holding.admit(turn, command, to, ending.placed)) is None:
        return
    parts.hold(turn, ending)
    timestamp = _append_all(turn, command, ending, at)
    if command.turn_to is not None:
        row_turns.pass_on(turn, command, command.turn_to)
    committed = count(command)
    tables: tuple[r.TableTime, ...] = ()
    if command.locks:
        tables = conflicts.table_times(turn, conflicts.named(command.locks))
    proof = None
    if consumed is not None:
        state = _state_of(ending.placed)
        proof = positions.move(turn, consumed, command.txn_id, timestamp, committed, state)
    if proof is not None and marked:
        outcome = positions.outcome(command.scope, proof, turn.lane)._replace(tables=tables)
    else:
        row = born(
            "one_shot",
            command.txn_id,
            turn.wall_ms,
            scope=command.scope,
            commit_timestamp=timestamp,
            committed=committed,
            owner=turn.lane,
            **ending.gains,
        )
        turn.put(k.txn_key(command.txn_id), row)
        outcome = turn.outcome(row, full=False, tables=tables)
    turn.reply(to, outcome)


def _append_all(turn: Turn, command: r.OneShot, ending: parts.Ending, at: int | None) -> int:
    """Put the events and changes of a one-shot into the round. Returns their commit timestamp (None: a new one)."""
    if not command.changes:
        return append(turn, command.txn_id, ending.placed, at)
    placed = row_changes.filled(command, ending.values, ending.placed)
    timestamp = append(turn, command.txn_id, placed, at)
    row_changes.keep(turn, command, ending.values, timestamp)
    return timestamp


def _answered_before(turn: Turn, command: r.OneShot, to: ReplyTo | None, *, marked: bool) -> bool:
    """Answer a repeated one-shot from its row or, if its id is ``marked``, from the row of one of its tasks."""
    if marked and command.consumed is not None:
        moved = positions.moved_by(turn, command.consumed, command.txn_id)
        if moved is not None:
            turn.reply(to, positions.outcome(command.scope, moved, turn.lane))
        return moved is not None
    row = turn.state.txn_row(command.txn_id)
    if row is None:
        return False
    if row.state == "ABORTED":
        turn.reply(to, gave_way_to(turn, row, command))
        return True
    digest = None if command.consumed is None else positions.digest_of(command.consumed)
    if (row.state, row.scope, row.name, row.committed, row.consumes) != (
        "COMMITTED",
        command.scope,
        command.name,
        count(command),
        digest,
    ):
        raise errors.InvalidArgument(OTHERS)
    turn.answer(to, row)
    return True


def gave_way_to(turn: Turn, row: r.TxnRow, command: r.OneShot | r.PrepareEvents) -> r.Outcome:
    """The outcome of the commit to which an aborted transaction gave way.

    Raises: TransactionAborted (it was aborted otherwise), AlreadyCommitted (`claims.earlier`).
    """
    with suppress(errors.NotAuthorized):
        before = earlier_outcome(turn, command.scope, command.name, row.owner)
        if before is not None:
            return claims.earlier(turn, before, moves=command.consumed is not None)
    raise errors.TransactionAborted(f"the transaction is aborted ({row.reason}): begin a new one")


def instead(
    turn: Turn, command: r.OneShot | r.PrepareEvents, ending: parts.Ending, to: ReplyTo | None
) -> None:
    """Answer a command that is not carried out: it asks for a validation of locks, or gives way.

    If it gives way, ABORTED is logged: else a repeated command could commit after the name is forgotten.
    """
    if ending.instead is None:
        turn.reply(to, ending.again)
        return
    before = turn.row(ending.instead.txn_id)
    reason = f"the name {command.name!r} was committed before by {before.txn_id.hex()}"
    scope, owner = command.scope, turn.lane
    consumed = command.consumed
    never = born(
        "give_way",
        command.txn_id,
        turn.wall_ms,
        scope=scope,
        owner=owner,
        reason=reason,
        consumes=None if consumed is None else positions.digest_of(consumed),
    )
    turn.put(k.txn_key(command.txn_id), never)
    try:
        turn.reply(to, claims.earlier(turn, before, moves=consumed is not None))
    except errors.AlreadyCommitted as error:
        turn.reply(to, refuse(error))


def prepare_events(turn: Turn, command: r.PrepareEvents, to: ReplyTo | None) -> None:
    """Prepare a transaction with all its events, which a row keeps until the coordinator decides."""
    check_served(turn, command.scope)
    check_id_partition(turn, command.txn_id)
    check_name(command.name)
    prepared.check_coordinator(command.prepare)
    if is_marked(command.txn_id):
        raise errors.InvalidArgument("ids like this one are of one-shots that move positions")
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
    size = bytes_of(command.locks)
    if size > limits.LOCK_BYTES.value:
        raise errors.EventTooLarge(
            f"locks of {size:,} bytes in one command that prepares, {limits.LOCK_BYTES.value:,} are allowed: "
            "begin the transaction, and register them"
        )
    row = born(
        "begin",
        command.txn_id,
        turn.wall_ms,
        scope=command.scope,
        keepalive_ms=_KEEPALIVE_MS,
        secret=command.secret,
        owner=turn.lane,
    )
    # A commit through journals also has such a row, with its positions.
    moves = r.PendingCommitRow(
        (), True, (), command.name, None, 0, command.consumed, command.prepare
    )
    ending = parts.Ending(
        txn_id=command.txn_id,
        scope=command.scope,
        owner=turn.lane,
        named=None,
        name=command.name,
        number=None,
        consumed=command.consumed,
        prepare=command.prepare,
        check_events=partial(_check_events, command),
        writes=_writes_placed,
        locks=command.locks,
        pending=moves if command.consumed is not None else None,
        events=command.events,
    )
    if not parts.check(turn, ending):
        instead(turn, command, ending, to)
        return
    check_open(turn)
    turn.put(k.txn_key(command.txn_id), row)
    parts.hold(turn, ending)
    row = turn.move(row, "prepare", committed=len(events), **ending.gains)
    turn.put(k.txn_key(command.txn_id), row)
    for stream in sorted(ending.placed):
        epoch = turn.state.streams[stream].reference_epoch
        segments = [segment_number(its.segment_id) for its, _ in ending.placed[stream]]
        its = locked_segments.participant(turn, stream, epoch, segments)
        turn.put(k.participant_key(command.txn_id, stream), its)
    if to is not None:
        kept = turn.state.prepared_row(command.txn_id)
        turn.reply(to, turn.outcome(row, full=False, prepared=kept))


def _prepared_before(
    turn: Turn, command: r.PrepareEvents, row: r.TxnRow, to: ReplyTo | None
) -> None:
    """Answer a repeated `PrepareEvents`."""
    if row.state == "ABORTED":
        turn.reply(to, gave_way_to(turn, row, command))
        return
    if row.secret is None or not compare_digest(row.secret, command.secret):
        raise errors.NotAuthorized("the transaction was begun with another secret")
    digest = None if command.consumed is None else positions.digest_of(command.consumed)
    known = row.scope, row.name, row.consumes
    if row.state == "OPEN" or known != (command.scope, command.name, digest):
        raise errors.InvalidArgument(OTHERS)
    prepared.check_same(turn, row, command.prepare)
    turn.answer(to, row, full=False)


def commit_events(turn: Turn, txn: OpenTxn, to: ReplyTo | None) -> None:
    """Commit a PREPARED transaction whose events are in a row; they are placed by key in the segments active now.

    Events of LOST streams are left out. `NotReady` while a stream is in trouble or being recovered, or while a
    staged merge has read what they write.
    """
    txn_id = txn.row.txn_id
    kept = turn.state.prepared_row(txn_id)
    row, placed = _place_kept(turn, txn, () if kept is None else kept.events)
    frozen.check_free(turn, txn_id, lambda: _writes(turn, placed))
    holding.check_free(turn, txn_id, placed)
    timestamp = append(turn, txn_id, placed)
    row = turn.move(row, "begin_commit", commit_timestamp=timestamp, finished_ms=turn.wall_ms)
    row = turn.move(row, "finalize_commit")
    consumed = None if txn.pending is None else txn.pending.consumed
    if consumed is not None:
        positions.move(turn, consumed, txn_id, timestamp, row.committed, _state_of(placed))
    end_pending(turn, txn_id, None)
    left = prepared.drop_events(turn, txn_id)
    _pin_active(turn, txn, placed)
    finish(turn, row)
    if to is not None:
        # The streams are known here, so the table is not scanned for them.
        outcome = turn.outcome(row, full=False, prepared=left)
        turn.reply(to, outcome._replace(streams=tuple(sorted(txn.participants))))


def _place_kept(turn: Turn, txn: OpenTxn, kept: Sequence[r.Event]) -> tuple[r.TxnRow, Placed]:
    """A transaction's row without the events of LOST streams, and the other events in the segments active now.

    Raises: NotReady (a stream is in trouble, or being recovered).
    """
    row, events = txn.row, CommandEvents.of(kept)
    check(len(events) == row.committed, "a transaction lost the events that a row keeps")
    gone = {stream for stream in txn.participants if is_gone(turn.state, stream)}
    by_stream = events.by_stream()
    for stream in sorted(by_stream.keys() - gone):
        if state_of(turn.state.streams.get(stream)) == RECOVERING:
            raise errors.NotReady(f"{stream} is being taken back: ask again")
        active_stream(turn, stream)
    there = {s: its for s, its in by_stream.items() if s not in gone}
    placed = _spread(turn, events, there, [s for s in there if is_state(s)])
    if gone:
        left_out = sum(len(its) for s, its in by_stream.items() if s in gone)
        row = prepared.without(row, left_out, gone)
    return row, placed


def _pin_active(turn: Turn, txn: OpenTxn, placed: Placed) -> None:
    """Let the transaction's streams have their present reference epochs: its events were placed by these."""
    for stream, epoch in [(s, e) for s, e in txn.participants.items() if s in placed]:
        now = r.ParticipantRow(stream, turn.state.streams[stream].reference_epoch)
        if now.reference_epoch != epoch:  # the stream was scaled since
            turn.put(k.participant_key(txn.row.txn_id, stream), now)
            drop_epoch(turn, stream, epoch)


def ending_of(command: r.OneShot, owner: str) -> parts.Ending:
    """A one-shot while it is decided. A part of one (`across.parts_of_one_shots`) is checked as if it were all."""
    return parts.Ending(
        txn_id=command.txn_id,
        scope=command.scope,
        owner=owner,
        named=None,
        name=command.name,
        number=None,
        consumed=command.consumed,
        prepare=None,
        check_events=partial(_check_events, command),
        writes=_writes_placed,
        locks=command.locks,
        follows=command.follows,
        changes=command.changes,
        at_once=True,
    )


# -- parts of one-shots over several control partitions (`across.parts_of_one_shots`) -------------------


def events_of_part(command: r.OneShot, ending: parts.Ending) -> Sequence[r.Event]:
    """The events of a checked part, with those of its changes."""
    if command.changes:
        return row_changes.with_values(command, ending.values, ending.placed)
    return command.events


def check_kept(txn: OpenTxn, turn: Turn, _: parts.Ending) -> None:
    """Check again what may have changed since the events were put into a row: the streams, and the rights."""
    for stream in sorted(txn.participants):
        active_stream(turn, stream)
    check_writes(turn.state, txn.row, txn.participants)


def merge_kept(turn: Turn, txn: OpenTxn, kept: r.PreparedRow) -> r.TxnRow:
    """Merge the events that a row keeps at the decided timestamp, and drop them. Returns the transaction's row.

    Raises: NotReady (a stream is being recovered); then nothing was changed.
    """
    row, placed = _place_kept(turn, txn, kept.events)
    append(turn, row.txn_id, placed, row.commit_timestamp)
    _pin_active(turn, txn, placed)
    turn.put(k.prepared_key(row.txn_id), None)
    return row


def _check_events(command: r.OneShot | r.PrepareEvents, turn: Turn, ending: parts.Ending) -> None:
    ending.placed = _place(turn, command)


def _writes_placed(turn: Turn, ending: parts.Ending) -> frozen.Writes:
    return _writes(turn, ending.placed)


def _writes(turn: Turn, placed: Placed) -> frozen.Writes:
    """The writes of placed events, by table."""
    tables = placed.keys() & turn.state.tables.keys()
    keys = {table: [key for _, its in placed[table] for key in its.keys] for table in tables}
    return {table: Write.of(0, its) for table, its in keys.items()}


def _state_of(placed: Placed) -> dict[str, set[int]]:
    """The tasks whose state a one-shot writes, by state stream."""
    return {
        stream: {event.segment_id for _, events in by_segment for event in events}
        for stream, by_segment in placed.items()
        if is_state(stream)
    }


def count(command: r.OneShot) -> int:
    """The number of events that a one-shot commits."""
    return len(command.events) + len(command.changes)


def _size_of(event: r.Event) -> int:
    """The least number of bytes of a record batch with only this event."""
    size = limits.FRAMING + len(event.key or b"") + len(event.value or b"")
    return size + sum(len(name) + len(content or b"") for name, content in event.headers)


def append(turn: Turn, txn_id: bytes, placed: Placed, at: int | None = None) -> int:
    """Put the events of a one-shot into the round. Returns their commit timestamp: ``at``, or a new one."""
    timestamp = turn.next_timestamp() if at is None else at
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


def _place(turn: Turn, command: r.OneShot | r.PrepareEvents) -> Placed:
    """Check the events of a one-shot, and group them by stream and present segment of their key, in order.

    Raises: NotAuthorized, InvalidArgument, EventTooLarge, CrossScope; NotReady, StreamLost, UnknownStream.
    """
    state = turn.state
    if isinstance(command, r.OneShot) and command.changes:
        events = row_changes.events_of(turn, command)
        derivations.check_changes(state, command.changes)
    else:
        events = CommandEvents.of(command.events)
    most: dict[str, int] = {}
    tables: dict[str, list[EventRun]] = {}
    of_state = []
    begin = 0
    for run in events.runs:
        stream = run.stream
        if stream not in most:
            if stream not in state.streams:
                check_leads(turn, stream)
            if is_state(stream):
                of_state.append(stream)
            else:
                check_right(state, turn.lane, *writing(state, stream))
            if stream in state.derivations:
                derivations.check(state, stream, command.derivations)
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
    by_stream = events.by_stream()
    for stream in of_state:
        _check_state(turn, command.consumed, stream, SomeEvents(events, by_stream[stream]))
    return _spread(turn, events, by_stream, of_state)


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


def _check_state(turn: Turn, consumed: r.Consumed | None, stream: str, rows: SomeEvents) -> None:
    """`InvalidArgument` unless a command may write these rows of a processor's state."""
    events = list(rows)
    positions.check_state(consumed, {stream: {row.segment_id for row in events}})
    if any(row.key is None for row in events):
        raise errors.InvalidArgument(f"{stream}: each row of a state has a key")
    positions.check_state_size(turn, rows.size)


def _spread(
    turn: Turn,
    events: CommandEvents,
    by_stream: Mapping[str, Sequence[int]],
    of_state: Sequence[str],
) -> Placed:
    """Group events by stream and present segment. ``by_stream``: the numbers of the events.

    ``of_state``: the streams with a processor's state, whose rows go to the segments that they name.
    """
    layouts, places = turn.state.layouts, events.places
    if of_state:
        found = list(places)
        for stream in of_state:
            numbers = by_stream[stream]
            for number, row in zip(numbers, SomeEvents(events, numbers), strict=True):
                found[number] = place_of(None, row.segment_id)
        places = found
    return {
        stream: [
            (segment, SomeEvents(events, some))
            for segment, some in layouts[stream].spread(places, numbers)
        ]
        for stream, numbers in by_stream.items()
    }
