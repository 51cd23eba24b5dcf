"""Lists of transactions: nothing is decided, and nobody else waits long for them."""

from __future__ import annotations

from collections.abc import Iterator

from anabranch.core import limits
from anabranch.core import rows as k
from anabranch.core.round import ReplyTo
from anabranch.core.turn import Turn
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import ListTransactions, Outcome, TransactionList, TxnRow

MAX_LISTED = 10_000
MAX_LOOKED_AT = 5_000  # status keys; some 20 ms


def list_transactions(turn: Turn, command: ListTransactions, to: ReplyTo | None) -> None:
    """The open ones, the oldest first; or all, the newest first. A bounded part of them in one answer.

    Nobody else is served meanwhile, so only so many rows are looked at; the answer has the key to go on from.
    """
    if not 1 <= command.limit <= MAX_LISTED:
        raise InvalidArgument(f"a list has 1 to {MAX_LISTED} transactions")
    if command.include_finished:
        rows = turn.state.txn_rows_below(command.before)
    else:
        rows = _open_after(turn, command.before or b"")
    found: list[Outcome] = []
    last, size = None, 0
    for looked_at, (key, row) in enumerate(rows):
        full = len(found) == command.limit or size >= limits.ANSWER.value // 2
        if full or looked_at == MAX_LOOKED_AT:
            break
        if row is not None and command.scope in (None, row.scope):
            found.append(turn.outcome(row, full=False))
            size += limits.weight(found[-1])
        last = key
    else:
        last = None
    turn.reply(to, TransactionList(tuple(found), last))


def _open_after(turn: Turn, key: bytes) -> Iterator[tuple[bytes, TxnRow | None]]:
    for txn_id in sorted(turn.state.open):
        if k.txn_key(txn_id) > key:
            yield k.txn_key(txn_id), turn.state.open[txn_id].row
