"""Streams of which somebody deleted a topic (`docs/decisions/0011-lost-topics.md`).

A stream is given up in one round: its row says LOST, and every transaction with a part in it is aborted whole as
long as that is legal, so that none is torn. One past FINALIZE_IN_PROGRESS stays, with its trouble.
"""

from __future__ import annotations

from dataclasses import replace

from anabranch.core import rows as k
from anabranch.core.decide_admin import ACTIVE, LOST, lost_error
from anabranch.core.decide_txn import abort_txn
from anabranch.core.plan import ReplyTo
from anabranch.core.states import TRANSITIONS, Verdict
from anabranch.core.turn import Turn, refuse


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
