"""Streams of which somebody deleted a topic (`docs/decisions/0011-lost-topics.md`).

A stream is given up in one round: its row says LOST, and every transaction with a part in it is aborted whole as
long as that is legal, so that none is torn. One past FINALIZE_IN_PROGRESS stays, with its trouble, until an
operator settles it (`docs/decisions/0012-ways-out-of-a-loss.md`).
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core.decide_admin import ACTIVE, FORGETTING, LOST, lost_error
from anabranch.core.decide_txn import abort_txn
from anabranch.core.plan import ReplyTo
from anabranch.core.states import TRANSITIONS, Verdict, judge
from anabranch.core.turn import Turn, refuse
from anabranch.errors import IllegalState, NotReady
from anabranch.schemas.records import RetiredRow, Settle


def give_up_stream(turn: Turn, stream: str, why: str) -> list[bytes]:
    """Log that a stream is lost, and abort what can't commit for that. Returns the transactions aborted.

    Repeating it changes nothing.
    """
    row = turn.state.streams.get(stream)
    if row is None or row.state != ACTIVE:
        return []
    lost = replace(row, state=LOST, scaling=None, wanted_partitions=row.partitions)
    turn.put(k.stream_key(stream), lost)
    if row.scaling is not None and row.scaling.correlation_id:
        asker = ReplyTo(row.scaling.correlation_id, row.scaling.reply_partition)
        turn.reply(asker, refuse(lost_error(stream)))
    aborted = []
    for txn_id in sorted(turn.state.open):
        txn = turn.state.open[txn_id]
        verdict = TRANSITIONS[txn.row.state, "begin_abort"]
        if stream in txn.participants and not isinstance(verdict, Verdict):
            abort_txn(turn, txn_id, f"{stream} is lost: {why}")
            aborted.append(txn_id)
    return aborted


def settle(turn: Turn, command: Settle, to: ReplyTo | None) -> None:
    """Abort a transaction whose merge can't go on, in all its streams. Repeating it is harmless.

    Chunks of it stand in other streams, committed natively. No history names them, and none ever may: so
    their partitions are used no more.
    """
    token = turn.token(command.token)
    row = turn.row(token.txn_id)
    if judge(row.state, "settle", row.reason) is not None:
        txn = turn.open(token.txn_id)
        if not any(_is_lost(turn, stream) for stream in txn.participants):
            raise IllegalState("no stream of the transaction is lost: its merge goes on by itself")
        if token.txn_id in turn.hearing.carrying:
            raise NotReady("a chunk of the transaction is being carried: ask again")
        for (stream, _), carry in sorted(txn.carries.items()):
            if carry.count and not _is_lost(turn, stream):
                retired = RetiredRow(stream, carry.partition)
                turn.put(k.retired_key(stream, carry.partition), retired)
        abort_txn(turn, token.txn_id, command.reason or "settled by an operator", op="settle")
    turn.reply(to, turn.outcome(turn.row(token.txn_id)))


def _is_lost(turn: Turn, stream: str) -> bool:
    row = turn.state.streams.get(stream)
    return row is None or row.state in (LOST, FORGETTING)
