"""Taking a lost stream away, so that its name can be used again (`docs/decisions/0012-ways-out-of-a-loss.md`).

The intent is logged first; the shell deletes what is left of the topics, and then `stream_forgotten` takes away the
rows. The row that counts how often a name was forgotten stays, so that nobody takes what a table knows of
the old journal for the new one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core.decide_admin import FORGETTING, LOST, check_served, waiting_for
from anabranch.core.ids import split_stream, txn_text
from anabranch.core.round import ReplyTo
from anabranch.core.state import State
from anabranch.core.turn import Turn, refuse
from anabranch.errors import AnabranchError, IllegalState, NotReady, UnknownStream
from anabranch.schemas.records import ForgetStream, ForgottenRow, StreamList


def forget_stream(turn: Turn, command: ForgetStream, to: ReplyTo | None) -> None:
    """Log that a lost stream shall be forgotten; the answer comes when it is. Repeating it is harmless."""
    stream = command.stream
    check_served(turn, split_stream(stream)[0])
    row = turn.state.streams.get(stream)
    before = turn.state.forgotten.get(stream)
    asked_by = to.correlation_id if to is not None else b""
    if row is None and before is None:
        raise UnknownStream(f"there is no stream {stream!r}: nothing is to be forgotten")
    repeated = before is not None and bool(asked_by) and before.forgotten_by == asked_by
    if row is None or (repeated and row.state not in (LOST, FORGETTING)):
        turn.reply(to, StreamList(()))  # it is done
        return
    if row.state == FORGETTING:
        if not repeated and row.correlation_id:
            raise NotReady(f"{stream} is being forgotten: ask again")
        return  # it is answered when it is done
    if stream in turn.memory.waiting:
        raise NotReady(
            f"{stream}: {turn.memory.waiting[stream]}; it is not given up yet: ask again"
        )
    if row.state != LOST:
        raise IllegalState(f"{stream} is {row.state}: only a LOST stream can be forgotten")
    for txn_id in sorted(turn.state.open):
        if stream in turn.state.open[txn_id].participants:
            raise IllegalState(
                f"transaction {txn_text(txn_id)} has a part in {stream} and is not over: settle it first "
                "(`anabranch txn settle`)"
            )
    times = before.times + 1 if before is not None else 1
    turn.put(k.forgotten_key(stream), ForgottenRow(stream, times, asked_by))
    forgetting = replace(
        row,
        state=FORGETTING,
        correlation_id=asked_by,
        reply_partition=to.partition if to is not None else -1,
        command=to.command if to is not None else b"",
    )
    turn.put(k.stream_key(stream), forgetting)


def prove_lead(turn: Turn, stream: str) -> None:
    """Log again what is being done: the round's commit proves that nobody else led, and had done it, before.

    So the topics that were found before are leftovers, and not those of a stream that was created anew meanwhile.
    """
    turn.put(k.stream_key(stream), turn.state.streams[stream])


def stream_forgotten(turn: Turn, stream: str) -> None:
    """Nothing is left of its topics: take the stream's rows away."""
    row = turn.state.streams.get(stream)
    if row is None or row.state != FORGETTING:
        return
    for key in _rows_of(turn.state, stream):
        turn.put(key, None)
    times = turn.state.forgotten[stream].times
    for key, value in turn.index.drop_former(stream, times).items():
        if value is None:
            turn.state.drop(key)
        else:
            turn.state.keep(key, value)
    turn.forgotten.append(stream)
    turn.reply(waiting_for(row), StreamList(()))


def forget_refused(turn: Turn, stream: str, error: AnabranchError) -> None:
    """What is left of its topics can't be deleted: it is LOST again."""
    row = turn.state.streams[stream]
    lost = replace(row, state=LOST, correlation_id=b"", reply_partition=-1, command=b"")
    turn.put(k.stream_key(stream), lost)
    turn.reply(waiting_for(row), refuse(error))


def _rows_of(state: State, stream: str) -> Iterator[bytes]:
    yield k.stream_key(stream)
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
