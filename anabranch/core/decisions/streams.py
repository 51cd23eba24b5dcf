"""Decisions on a stream's life: it is created, altered, truncated, lost, recovered, deleted.

The stream's row logs each intent first. Then the shell changes the topics; the result is logged and answered.

If a stream loses a topic, one round gives it up (docs/inside/decisions/0011): its row becomes LOST, and every
transaction that touched it is aborted as a whole where that is legal, so that none commits in part. A transaction
in FINALIZE_IN_PROGRESS is stuck until an operator forces its end. A LOST stream is recovered, or forgotten so that
its name is free again (0012). The row that counts how often a name was forgotten stays: it distinguishes index rows
of the old journal from those of the new one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

from anabranch import errors
from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import Right, rights_of, table_of
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.positions import processor_of
from anabranch.core.decisions.questions import make_safe
from anabranch.core.decisions.scale import asked, asker
from anabranch.core.decisions.scopes import (
    active_stream,
    check_names,
    check_room,
    check_served,
    consuming,
    processor_blocker,
    stream_info,
    text_of,
)
from anabranch.core.decisions.times import admit_change, check_informed, is_repeated, note_change
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.decisions.turn import Turn, refuse
from anabranch.core.derivations import (
    LEVEL,
    check_in_force,
    is_asynchronous,
    pass_plain_writes,
    resolved,
    source_of,
)
from anabranch.core.locks import locked_segments
from anabranch.core.memory import way_to_end
from anabranch.core.round import NewEpoch, ReplyTo
from anabranch.core.segments import create
from anabranch.core.state import State
from anabranch.core.stream_settings import (
    BASE,
    DERIVE,
    DERIVED,
    EXCLUSIVE,
    FIXED,
    KNOWN,
    PROCESSOR,
    TOPIC,
    check_settings,
    derived_from,
    derived_table,
    descriptions_differ,
    differences,
    in_force,
    is_table,
    segments_differ,
)
from anabranch.core.stream_states import (
    ACTIVE,
    CREATING,
    FORGETTING,
    FORGOTTEN,
    LOST,
    STREAMS,
    StreamOp,
    lost_error,
    state_of,
)
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import count_of
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.ids import txn_text
from anabranch.protocol.legal_names import BASE as BASES
from anabranch.protocol.legal_names import STATE, base_stream, is_state, split_stream, state_stream
from anabranch.protocol.partitioner import even_ranges
from anabranch.protocol.schemas import records as r

_MOST_NAMED = 250  # characters of a list in a refusal, so that what follows the list is not cut off


def _move(
    turn: Turn, row: r.StreamRow, op: StreamOp, to: ReplyTo | None = None, **changes: Any
) -> r.StreamRow | None:
    """Put the stream's row after a legal op; None if the op is applied already. Raises the error of an illegal op.

    ``to``: the asker that waits for the shell's work on the topics.
    """
    state = STREAMS.judge(row.state, op, row.stream)
    if state is None:
        return None
    moved = replace(row, state=state, **asked(to), **changes)
    turn.put(k.stream_key(row.stream), moved if state != FORGOTTEN else None)
    return moved


def _end(turn: Turn, stream: str, op: StreamOp, error: errors.AnabranchError | None = None) -> None:
    """Log that the work on the topics is done, or was refused, and answer the asker."""
    row = turn.state.streams[stream]
    moved = _move(turn, row, op)
    if moved is not None:
        turn.audited(stream, done=error is None)
        answer = r.StreamList((stream_info(turn, moved),)) if error is None else refuse(error)
        turn.reply(asker(row), answer)


# -- created --------------------------------------------------------------------------------------------


def create_stream(turn: Turn, command: r.CreateStream, to: ReplyTo | None) -> None:
    """Log the intent; the shell creates the topics and calls `stream_created`. The command may be repeated."""
    scope, _ = split_stream(command.stream)
    check_served(turn, scope)
    even_ranges(command.segments)  # raises for an impossible count
    check_settings(command.settings)
    if EXCLUSIVE in command.settings:
        turn.state.check_enabled(locked_segments.LEVEL, "an exclusive stream")
    _check_derived(turn, command)
    limits.DESCRIPTION.check(len(command.description), f"the description of {command.stream}")
    _check_state(turn, command)
    check_companion(turn, command)
    row = turn.state.streams.get(command.stream)
    known = rights_of(turn.state, turn.lane, command.stream) & Right.DESCRIBE
    known |= is_state(command.stream)  # for a state, the right on its processor is enough
    if row is not None and row.owner != turn.lane and not known:
        raise errors.StreamExists(
            f"{command.stream} exists; lane {turn.lane!r} has no right to see it"
        )
    if row is None:
        _check_no_derived(turn, command.stream)
        check_names(turn, command.stream)
        check_room(turn, turn.lane, 1, command.segments)
        row = _without_topics(command, turn.lane)
    moves = STREAMS.judge(row.state, "begin_create", command.stream) is not None
    unlike = segments_differ(command.segments, row.segment_count)
    unlike += differences(command.settings, row.settings)
    unlike += descriptions_differ(command.description, row.description)
    if unlike:
        raise errors.StreamExists(f"{command.stream} exists, but {', '.join(unlike)}")
    if row.state == CREATING and row.correlation_id:
        if is_repeated(turn, k.stream_key(command.stream), to):
            return  # the answer comes when it is done
        raise errors.NotReady(f"{command.stream} is being made: ask again")
    if moves:
        admit_change(turn, k.stream_key(command.stream), to)
        _move(turn, row, "begin_create", to, adopt=command.adopt)
    else:
        turn.reply(to, r.StreamList((stream_info(turn, row),)))


def _check_derived(turn: Turn, command: r.CreateStream) -> None:
    """`UnsupportedSetting` if a derivation is in force from the beginning, `InvalidArgument` for a wrong name."""
    if in_force(command.settings):
        raise errors.UnsupportedSetting(
            f"{command.stream}: create the table first, then `client.derive`"
        )
    derived = derived_from(command.settings)
    if derived is not None:
        turn.state.check_enabled(LEVEL, "a derivation")
        if command.stream != derived_table(derived.of):
            raise errors.InvalidArgument(
                f"{command.stream} with setting {DERIVED}={derived.text}: the table is named "
                f"{derived_table(derived.of)}; `client.derive` makes it"
            )


def _check_no_derived(turn: Turn, stream: str) -> None:
    """`IllegalState` if a table is derived from a lost source of this name: look-ups would read it."""
    for table, dues in turn.state.derivations.items():
        if table != stream and any(due.source == stream for due in dues):
            raise errors.IllegalState(
                f"{table} has rows of a former table {stream}: delete it first (`client.delete_stream`)"
            )


def _check_state(turn: Turn, command: r.CreateStream) -> None:
    """`InvalidArgument` if another stream would have the name, or the setting, of a processor's state."""
    processor = command.settings.get(PROCESSOR)
    if processor is None and not is_state(command.stream):
        return
    if processor is None or command.stream != state_stream(processor):
        raise errors.InvalidArgument(
            f"{command.stream} with setting {PROCESSOR}={processor}: the state of a processor is named "
            "scope/processor.state and has that setting, and no other stream is; `create_processor` makes it"
        )
    tasks = processor_of(turn, processor).tasks
    if command.segments != tasks or command.adopt:
        raise errors.InvalidArgument(
            f"{command.stream} has {count_of(tasks, 'segment')}, one for each task, and begins empty"
        )


def check_companion(turn: Turn, command: r.CreateStream) -> None:
    """`InvalidArgument` if another stream would have the name, or the setting, of a table's companion.

    A table has to begin empty, because replicas and bases contain only what commits wrote.
    """
    stream, table = command.stream, command.settings.get(BASE)
    if table is not None:
        if table not in turn.state.tables or stream != base_stream(table) or command.adopt:
            raise errors.InvalidArgument(
                f"{stream} with setting {BASE}={table}: the companion of a table is named as that with {BASES} "
                "behind, and begins empty; `compact_table` makes it"
            )
    elif stream.endswith(BASES) and is_a_table(turn.state.streams.get(stream.removesuffix(BASES))):
        raise errors.InvalidArgument(
            f"{stream} is the name of a table's companion: choose another one"
        )
    elif is_table(command.settings):
        if command.adopt:
            raise errors.InvalidArgument(
                f"{stream}: a table begins empty: create it without adopting, and write the old records to it"
            )
        companion = base_stream(stream)
        split_stream(companion)  # refuses a name that is too long for a companion
        if companion in turn.state.streams and table_of(turn.state, companion) != stream:
            raise errors.InvalidArgument(
                f"there is a stream {companion}, which would be the companion of {stream}: choose another name"
            )


def is_a_table(row: r.StreamRow | None) -> bool:
    """Whether a stream is, or will be, a table."""
    return row is not None and is_table(row.settings)


def _without_topics(command: r.CreateStream, owner: str) -> r.StreamRow:
    return r.StreamRow(
        stream=command.stream,
        state=FORGOTTEN,
        segment_count=command.segments,
        settings=dict(command.settings),
        stream_epoch=0,
        reference_epoch=0,
        segments=(),
        next_number=0,
        partitions=0,
        wanted_partitions=0,
        scaling=None,
        topic_ids=(),
        owner=owner,
        description=command.description,
        **asked(None),
    )


def stream_created(
    turn: Turn, stream: str, starts: dict[int, int], topic_ids: tuple[str, ...] = ()
) -> None:
    """Open the first epoch, as the topics exist. ``starts``: the present end offset of each partition."""
    row = turn.state.streams[stream]
    segments = create(row.segment_count)
    active = _move(
        turn,
        row,
        "finalize_create",
        segments=segments,
        next_number=len(segments),
        partitions=len(starts),
        wanted_partitions=len(starts),
        topic_ids=topic_ids,
    )
    if active is None:
        return
    turn.put(k.epoch_key(stream, 0), r.EpochRow(stream, 0, segments))
    made = turn.next_timestamp()
    if is_table(row.settings):
        turn.put(k.table_key(stream), r.TableRow(made))
    turn.round.history.append(NewEpoch(stream, 0, 0, made, segments, starts=starts))
    turn.reply(asker(row), r.StreamList((stream_info(turn, active),)))


def stream_refused(turn: Turn, stream: str, error: errors.AnabranchError) -> None:
    """Delete the intent, because the topics can't be created as asked."""
    _end(turn, stream, "refuse_create", error)


# -- lost, and recovered --------------------------------------------------------------------------------


def give_up_stream(turn: Turn, stream: str, why: str) -> list[bytes]:
    """Log that a stream is lost, and abort transactions that can't commit without it. Returns these.

    Those whose coordinator is elsewhere stay: a participant votes no, and then the coordinator aborts them (O2).
    Repeating it changes nothing.
    """
    row = turn.state.streams.get(stream)
    if row is None or not STREAMS.moves(row.state, "give_up"):
        return []
    note_change(turn, k.stream_key(stream))
    turn.audited(stream, done=False)
    _move(turn, row, "give_up", scaling=None, change=None, wanted_partitions=row.partitions)
    for waits in (row.scaling, row if row.change is not None else None):
        if waits is not None:
            turn.reply(asker(waits), refuse(lost_error(stream)))
    aborted = []
    for txn_id in sorted(turn.state.open):
        txn = turn.state.open[txn_id]
        has_part = stream in txn.participants or stream in turn.state.locks.of(txn_id).tables
        is_own = txn.promised is None
        if has_part and is_own and TRANSACTIONS.moves(txn.row.state, "lose_stream"):
            abort_txn(turn, txn_id, f"{stream} is lost: {why}", op="lose_stream")
            aborted.append(txn_id)
    return aborted


def recover_stream(turn: Turn, command: r.RecoverStream, to: ReplyTo | None) -> None:
    """Log that a LOST stream is to be recovered; then the shell checks whether its topics are the old ones."""
    stream = command.stream
    check_served(turn, split_stream(stream)[0])
    state = state_of(turn.state.streams.get(stream))
    moves = STREAMS.judge(state, "begin_recover", stream) is not None
    row = turn.state.streams[stream]
    if not moves:
        turn.reply(to, r.StreamList((stream_info(turn, row),)))
        return
    if not row.topic_ids:
        raise errors.IllegalState(
            f"{stream} can't be taken back: its topics had no ids to know them by"
        )
    admit_change(turn, k.stream_key(stream), to)
    turn.audit_later(command, stream, stream)
    _move(turn, row, "begin_recover", to)


def stream_recovered(turn: Turn, stream: str) -> None:
    """Log that the stream is active again: its topics are the old ones. Aborted transactions stay aborted."""
    _end(turn, stream, "finalize_recover")


def recovery_refused(turn: Turn, stream: str, error: errors.AnabranchError) -> None:
    """Log that the stream stays LOST: its topics are not the old ones."""
    _end(turn, stream, "refuse_recover", error)


# -- forgotten ------------------------------------------------------------------------------------------


def forget_stream(turn: Turn, command: r.ForgetStream | r.DeleteStream, to: ReplyTo | None) -> None:
    """Log that a stream is to be forgotten; the answer comes when it is. Repeating the command is harmless.

    A stream that is deleted is given up in the same round, and then forgotten like a LOST one.
    """
    stream, deletes = command.stream, isinstance(command, r.DeleteStream)
    check_served(turn, split_stream(stream)[0])
    row = turn.state.streams.get(stream)
    before = turn.state.forgotten.get(stream)
    if row is None and before is None:
        raise errors.UnknownStream(f"there is no stream {stream!r}: nothing is to be taken away")
    if row is None:
        turn.reply(to, r.StreamList(()))  # done already
        return
    # A sender that did not know of the last change may mean a former stream of this name.
    check_informed(turn, k.stream_key(stream), to)
    if row.state == FORGETTING:
        if row.correlation_id and not is_repeated(turn, k.stream_key(stream), to):
            raise errors.NotReady(f"{stream} is being forgotten: ask again")
        return  # the answer comes when it is done
    if stream in turn.memory.waiting:
        raise errors.NotReady(
            f"{stream}: {turn.memory.waiting[stream]}; it is not given up yet: ask again"
        )
    lives = deletes and row.state == ACTIVE
    despite = command.despite if isinstance(command, r.DeleteStream) else ()
    if lives:
        _check_unread(turn, stream, despite)
    else:
        STREAMS.judge(row.state, "begin_forget", stream)
    txns = turn.state.open
    turn.charge(work.of_items(len(txns)))
    parts = sorted([txn_id for txn_id, txn in txns.items() if stream in txn.participants])
    if parts:
        ways = limits.cut(", ".join([f"`{way_to_end(turn.state, each)}`" for each in parts]))
        raise errors.IllegalState(
            f"{stream} has a part in transactions that are not over: commit or abort them first ({ways})"
        )
    lose = [text_of(processor_blocker(turn, one)) for one in consuming(turn, stream).values()]
    aborted = []
    if is_table(row.settings):
        aborted += end_stream(turn, base_stream(stream), "its table is deleted")
    if lives:
        aborted += give_up_stream(turn, stream, "it is deleted")
    _begin_forget(turn, stream, to)
    what = f"{stream}, an input of {', '.join(lose)}" if lose else stream
    turn.audit(command, with_aborted(what, aborted))


def with_aborted(what: str, aborted: Sequence[bytes]) -> str:
    """The text of an audit row, with the transactions that the command has aborted."""
    return f"{what}; aborts {', '.join(map(txn_text, aborted))}" if aborted else what


def _check_unread(turn: Turn, stream: str, despite: Collection[str]) -> None:
    """`IllegalState` if a table or a processor needs a stream.

    ``despite``: processors that may lose the stream as an input, although their positions become meaningless.
    """
    if (table := table_of(turn.state, stream)) in turn.state.tables:
        raise errors.IllegalState(f"{stream} has the base of {table}: it goes with that table")
    if source := source_of(turn.state, stream):
        raise errors.IllegalState(
            f"{stream} has the rows of a derivation of {source}: let `client.drop_derivation` end that first"
        )
    if stream in turn.state.processors and is_asynchronous(turn.state, stream):
        raise errors.IllegalState(
            f"processor {stream} derives the rows of {stream}, and a new table would lack older rows: delete the "
            f"processor first (`anabranch processor delete {stream}`)"
        )
    if derived := in_force(turn.state.streams[stream].settings):
        raise errors.IllegalState(
            f"{stream} is the source of derivation {min(derived).removeprefix(DERIVE)!r}, whose table would still "
            "count as ready: let `client.drop_derivation` end that first"
        )
    if is_state(stream) and (row := turn.state.processors.get(stream.removesuffix(STATE))):
        blocker = text_of(processor_blocker(turn, row))
        raise errors.IllegalState(f"{stream} belongs to {blocker}: delete that first")
    held = {name: row for name, row in consuming(turn, stream).items() if name not in despite}
    if held:
        them = ", ".join(text_of(processor_blocker(turn, row)) for row in held.values())
        how = " ".join(f"--despite {name}" for name in held)
        raise errors.IllegalState(
            f"{stream} is read by {limits.cut(them, _MOST_NAMED)}: delete that first, or let it lose its input: "
            f"`anabranch stream delete {stream} {limits.cut(how, _MOST_NAMED)}`"
        )


def _begin_forget(turn: Turn, stream: str, to: ReplyTo | None = None) -> None:
    before = turn.state.forgotten.get(stream)
    times = before.times + 1 if before is not None else 1
    note_change(turn, k.stream_key(stream), to)
    # A late copy of a scaling must not scale a later stream of that name.
    note_change(turn, k.segments_key(stream))
    turn.put(k.forgotten_key(stream), r.ForgottenRow(stream, times))
    _move(turn, turn.state.streams[stream], "begin_forget", to)


def end_stream(turn: Turn, stream: str, why: str) -> list[bytes]:
    """Give up a stream that belongs to a deleted processor or table, and begin to delete its topics.

    Returns the aborted transactions. `NotReady`: not possible now. `IllegalState`: a prepared transaction has to
    end first.
    """
    row = turn.state.streams.get(stream)
    if row is None or row.state == FORGETTING:
        return []
    if row.state not in (ACTIVE, LOST) or stream in turn.memory.waiting:
        raise errors.NotReady(f"the topics of {stream} are worked on, or in trouble: ask again")
    for txn in turn.state.open.values():
        is_kept = txn.promised is not None or not TRANSACTIONS.moves(txn.row.state, "lose_stream")
        if stream in txn.participants and is_kept:
            which = f"transaction {txn_text(txn.row.txn_id)}, which has a part in {stream}"
            if txn.row.state == "PREPARED":
                raise errors.IllegalState(
                    f"{which}, is prepared: commit or abort it first (`{way_to_end(turn.state, txn.row.txn_id)}`)"
                )
            how = "is being merged" if txn.promised is None else "is another control partition's"
            raise errors.NotReady(f"{which}, {how}: ask again when it is over")
    aborted = give_up_stream(turn, stream, why)
    _begin_forget(turn, stream)
    return aborted


def prove_leadership(turn: Turn, stream: str) -> None:
    """Log the stream's row again: if the round commits, no other leader has done the work on its topics meanwhile.

    So topics that were found before are leftovers, and do not belong to a stream that was created again.
    """
    turn.put(k.stream_key(stream), turn.state.streams[stream])


def stream_forgotten(turn: Turn, stream: str) -> None:
    """Delete the stream's rows, as its topics are deleted."""
    row = turn.state.streams.get(stream)
    if row is None or not STREAMS.moves(row.state, "finalize_forget"):
        return
    _move(turn, row, "finalize_forget")
    for key in _rows_of(turn.state, stream):
        turn.put(key, None)
    times = turn.state.forgotten[stream].times
    for key, value in turn.index.drop_former(stream, times).items():
        turn.state.keep(key, value)
    turn.forgotten.append(stream)
    turn.reply(asker(row), r.StreamList(()))


def forget_refused(turn: Turn, stream: str, error: errors.AnabranchError) -> None:
    """Set the stream LOST again, because the rest of its topics can't be deleted."""
    _end(turn, stream, "refuse_forget", error)


def _rows_of(state: State, stream: str) -> Iterator[bytes]:
    """Keys of a stream's rows, except its own row and the count of how often it was forgotten."""
    for epoch in list(state.epochs.get(stream, ())):
        yield k.epoch_key(stream, epoch)
    for name, partition in list(state.low_water):
        if name == stream:
            yield k.low_water_key(stream, partition)
    for name, partition in list(state.plain):
        if name == stream:
            yield k.plain_key(stream, partition)
    for partition in state.retired(stream):
        yield k.retired_key(stream, partition)
    by_name = (
        (state.tables, k.table_key),
        (state.bases, k.base_key),
        (state.rejected, k.rejected_row_key),
    )
    for rows, key in by_name:
        if stream in rows:
            yield key(stream)


# -- altered: other settings, and events deleted up to a time --------------------------------------


def alter_stream(turn: Turn, command: r.AlterStream, to: ReplyTo | None) -> None:
    """Log a stream's new settings and description; the shell then alters the topics. Repeating it is harmless."""
    row = idle_row(turn, command.stream, to)
    if row is None:
        return
    named = command.settings.keys() | set(command.unset)
    if fixed := sorted(named & FIXED):
        raise errors.UnsupportedSetting(f"{', '.join(fixed)} can't be altered: make a new stream")
    settings = resolved(row, command)
    wrong = set(command.unset) - KNOWN | set(command.unset) & command.settings.keys()
    if wrong:
        raise errors.UnsupportedSetting(
            f"{limits.cut(', '.join(sorted(wrong)))} can't be taken back: no such setting, or given, too"
        )
    check_settings(settings)
    check_in_force(turn, row, settings)
    wanted = [f"{name}={settings.get(name, '')}" for name in sorted(named)]
    description = row.description
    if command.description is not None:
        description = command.description
        limits.DESCRIPTION.check(len(description), f"the description of {command.stream}")
        wanted.append(f"description={description}")
    admit_change(turn, k.stream_key(row.stream), to)
    what = f"{command.stream}: {', '.join(wanted)}"
    changed = replace(row, settings=settings, description=description)
    if named & TOPIC.keys():  # also for unchanged values: the topic may have been altered by hand
        turn.audit_later(command, row.stream, what)
        begin_change(turn, changed, change_of(row), to)
    else:
        turn.audit(command, what)
        if in_force(row.settings) and not in_force(settings):
            pass_plain_writes(turn, row.stream)
        turn.put(k.stream_key(row.stream), changed)
        turn.reply(to, r.StreamList((stream_info(turn, changed),)))


def truncate_stream(turn: Turn, command: r.TruncateStream, to: ReplyTo | None) -> None:
    """Log that a stream's events up to a commit timestamp are to be deleted. Repeating the command is harmless."""
    row = idle_row(turn, command.stream, to)
    if row is None:
        return
    if is_state(command.stream):
        raise errors.InvalidArgument(
            f"{command.stream} is the state of a processor: reset that instead"
        )
    if command.stream in turn.state.tables:
        raise errors.InvalidArgument(
            f"{command.stream} is a table: delete rows instead, or compact it (`anabranch table compact`)"
        )
    if table := table_of(turn.state, command.stream):
        raise errors.InvalidArgument(
            f"{command.stream} has the base of table {table}: compact that again instead"
        )
    until = make_safe(turn, command.until)
    if not holding.is_safe(turn, until, (command.stream,)):
        raise errors.NotReady(holding.NOT_READY)
    admit_change(turn, k.stream_key(row.stream), to)
    turn.audit_later(command, row.stream, f"{command.stream} up to {until}, {to_text(until)}")
    begin_change(turn, row, change_of(row, until), to)


def idle_row(turn: Turn, stream: str, to: ReplyTo | None) -> r.StreamRow | None:
    """The row of a stream without a change under way; None if this command's own change is under way.

    `NotReady`: a change of another command is under way.
    """
    check_served(turn, split_stream(stream)[0])
    row = active_stream(turn, stream)
    if row.change is None:
        return row
    if is_repeated(turn, k.stream_key(stream), to):
        return None
    raise errors.NotReady(f"{stream} is being altered or truncated: ask again")


def change_of(row: r.StreamRow, until: int = 0, base: bytes | None = None) -> r.StreamChange:
    """A change of the topics of a stream. ``row``: before it, as it is restored if brokers refuse the change."""
    return r.StreamChange(row.settings, until, base, row.description)


def begin_change(turn: Turn, row: r.StreamRow, change: r.StreamChange, to: ReplyTo | None) -> None:
    """Log a change of the stream's topics that the shell makes, and the asker that waits for it."""
    turn.put(k.stream_key(row.stream), replace(row, change=change, **asked(to)))


def stream_changed(turn: Turn, stream: str, error: errors.AnabranchError | None = None) -> None:
    """Log that the topics are changed, or, with an ``error``, restore what was before; answer the asker."""
    row = turn.state.streams[stream]
    if row.change is None:
        return
    kept = row if error is None else row.change
    done = replace(
        row, settings=kept.settings, description=kept.description, change=None, **asked(None)
    )
    turn.put(k.stream_key(stream), done)
    turn.audited(stream, done=error is None)
    answer = r.StreamList((stream_info(turn, done),)) if error is None else refuse(error)
    turn.reply(asker(row), answer)
