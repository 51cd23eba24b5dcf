"""Lists of transactions: nothing is decided, and nobody else waits long for them."""

from __future__ import annotations

from itertools import islice

from anabranch.core.plan import ReplyTo
from anabranch.core.turn import Turn
from anabranch.errors import InvalidArgument
from anabranch.schemas.records import ListTransactions, TransactionList, TxnRow

MAX_LISTED = 10_000
MAX_LOOKED_AT = 5_000  # status keys; some 20 ms


def list_transactions(turn: Turn, command: ListTransactions, to: ReplyTo | None) -> None:
    """The open ones, the oldest first; or all, the newest first, a bounded part of them in one answer."""
    if not 1 <= command.limit <= MAX_LISTED:
        raise InvalidArgument(f"a list has 1 to {MAX_LISTED} transactions")
    if command.before is not None and not command.include_finished:
        raise InvalidArgument("a list of open transactions is one answer: `before` must be null")
    if command.include_finished:
        found, more = _newest(turn, command)
    else:
        rows = (turn.state.open[txn_id].row for txn_id in sorted(turn.state.open))
        found = list(islice((row for row in rows if _is_of(row, command)), command.limit))
        more = None
    outcomes = tuple(turn.outcome(row, full=False) for row in found)
    turn.reply(to, TransactionList(outcomes, more))


def _newest(turn: Turn, command: ListTransactions) -> tuple[list[TxnRow], bytes | None]:
    """Rows, and the key to go on from. Nobody else is served meanwhile, so only so many keys are looked at."""
    found: list[TxnRow] = []
    last = None
    for looked_at, (key, row) in enumerate(turn.state.txn_rows_below(command.before)):
        if looked_at == MAX_LOOKED_AT or len(found) == command.limit:
            return found, last
        if row is not None and _is_of(row, command):
            found.append(row)
        last = key
    return found, None


def _is_of(row: TxnRow, command: ListTransactions) -> bool:
    return command.scope is None or row.scope == command.scope
