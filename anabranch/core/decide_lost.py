"""Streams of which somebody deleted a topic (`docs/decisions/0011-lost-topics.md`).

A stream is given up in one round: its row says LOST, and every transaction with a part in it is aborted whole as
long as that is legal, so that none is torn. One past FINALIZE_IN_PROGRESS stays, with its trouble, until an
operator settles it (`docs/decisions/0012-ways-out-of-a-loss.md`).
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core.decide_admin import (
    ACTIVE,
    FORGETTING,
    LOST,
    RECOVERING,
    check_served,
    lost_error,
    stream_info,
    waiting_for,
)
from anabranch.core.decide_merge import TORN
from anabranch.core.decide_scale import asker
from anabranch.core.decide_txn import abort_txn
from anabranch.core.ids import split_stream
from anabranch.core.round import ReplyTo
from anabranch.core.states import TRANSITIONS, Verdict, judge
from anabranch.core.turn import Turn, refuse
from anabranch.errors import AnabranchError, IllegalState, NotReady, UnknownStream
from anabranch.schemas.records import RecoverStream, RetiredRow, Settle, StreamList


def give_up_stream(turn: Turn, stream: str, why: str) -> list[bytes]:
    """Log that a stream is lost, and abort what can't commit for that. Returns the transactions aborted.

    Repeating it changes nothing.
    """
    row = turn.state.streams.get(stream)
    if row is None or row.state != ACTIVE:
        return []
    lost = replace(row, state=LOST, scaling=None, wanted_partitions=row.partitions)
    turn.put(k.stream_key(stream), lost)
    if row.scaling is not None:
        turn.reply(asker(row.scaling), refuse(lost_error(stream)))
    aborted = []
    for txn_id in sorted(turn.state.open):
        txn = turn.state.open[txn_id]
        verdict = TRANSITIONS[txn.row.state, "begin_abort"]
        if stream in txn.participants and not isinstance(verdict, Verdict):
            abort_txn(turn, txn_id, f"{stream} is lost: {why}")
            aborted.append(txn_id)
    return aborted


def recover_stream(turn: Turn, command: RecoverStream, to: ReplyTo | None) -> None:
    """Log that a LOST stream is to be taken back; the shell looks whether its topics are the old ones."""
    check_served(turn, split_stream(command.stream)[0])
    row = turn.state.streams.get(command.stream)
    if row is None:
        raise UnknownStream(f"there is no stream {command.stream!r}")
    if row.state == ACTIVE:
        turn.reply(to, StreamList((stream_info(turn, row),)))
        return
    if row.state != LOST:
        raise NotReady(f"{command.stream} is {row.state}: ask again")
    if not row.topic_ids:
        raise IllegalState(
            f"{command.stream} can't be taken back: its topics had no ids to know them by"
        )
    turn.put(
        k.stream_key(command.stream),
        replace(
            row,
            state=RECOVERING,
            correlation_id=to.correlation_id if to is not None else b"",
            reply_partition=to.partition if to is not None else -1,
            command=to.command if to is not None else b"",
        ),
    )


def stream_recovered(turn: Turn, stream: str) -> None:
    """Its topics are those that it had: it goes on. What was aborted when it was given up stays so."""
    _end_recovery(turn, stream, ACTIVE, None)


def recovery_refused(turn: Turn, stream: str, error: AnabranchError) -> None:
    """They are not: it stays LOST."""
    _end_recovery(turn, stream, LOST, error)


def _end_recovery(turn: Turn, stream: str, state: str, error: AnabranchError | None) -> None:
    row = turn.state.streams[stream]
    after = replace(row, state=state, correlation_id=b"", reply_partition=-1, command=b"")
    turn.put(k.stream_key(stream), after)
    answer = StreamList((stream_info(turn, after),)) if error is None else refuse(error)
    turn.reply(waiting_for(row), answer)


def settle(turn: Turn, command: Settle, to: ReplyTo | None) -> None:
    """Abort a transaction whose merge can't go on, in all its streams. Repeating it is harmless.

    Chunks of it stand in other streams, committed natively. No history names them, and none ever may: so
    their partitions are used no more.
    """
    token = turn.token(command.token)
    row = turn.row(token.txn_id)
    if judge(row.state, "settle", row.reason) is not None:
        txn = turn.open(token.txn_id)
        torn = turn.memory.trouble(token.txn_id) == TORN
        if not torn and not any(_is_lost(turn, stream) for stream in txn.participants):
            raise IllegalState("no stream of the transaction is lost: its merge goes on by itself")
        if token.txn_id in turn.memory.carrying:
            raise NotReady("a chunk of the transaction is being carried: ask again")
        for (stream, _), carry in sorted(txn.carries.items()):
            if carry.count and not _is_lost(turn, stream):
                retired = RetiredRow(stream, carry.partition)
                turn.put(k.retired_key(stream, carry.partition), retired)
        abort_txn(turn, token.txn_id, command.reason or "settled by an operator", op="settle")
    turn.reply(to, turn.outcome(turn.row(token.txn_id)))


def _is_lost(turn: Turn, stream: str) -> bool:
    row = turn.state.streams.get(stream)
    return row is None or row.state in (LOST, FORGETTING, RECOVERING)
