"""Questions whose answers decide nothing: lists of transactions, and which timestamps are safe."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from anabranch.core import hybrid_time, limits
from anabranch.core import rows as k
from anabranch.core.authorize import sees
from anabranch.core.decisions.commits.prepared import proves
from anabranch.core.decisions.scopes import check_served
from anabranch.core.decisions.turn import Turn
from anabranch.core.ids import TXN_ID_SIZE
from anabranch.core.round import ReplyTo
from anabranch.errors import InvalidArgument, NotReady
from anabranch.schemas.records import (
    ListTransactions,
    Outcome,
    SafeTime,
    SafeTimeIs,
    TransactionList,
    TxnRow,
)

MAX_LISTED = 10_000
MAX_LOOKED_AT = 5_000  # status keys; some 20 ms


def list_transactions(turn: Turn, command: ListTransactions, to: ReplyTo | None) -> None:
    """List the open or prepared ones, oldest first; or all, newest first: the lane's own, or all it may operate.

    All other commands wait meanwhile, so only so many rows are looked at, and the answer has the key to go on from.
    """
    if not 1 <= command.limit <= MAX_LISTED:
        raise InvalidArgument(f"a list has 1 to {MAX_LISTED} transactions")
    if command.prepared:
        rows = _open_after(turn, turn.state.prepared, command.before or b"")
    elif command.include_finished:
        rows = turn.state.txn_rows_below(command.before)
    else:
        rows = _open_after(turn, turn.state.open, command.before or b"")
    found: list[Outcome] = []
    last, size = None, 0
    for looked_at, (key, row) in enumerate(rows):
        turn.look(1)
        full = len(found) == command.limit or size >= limits.ANSWER.value // 2
        if full or looked_at == MAX_LOOKED_AT:
            last = _between(turn, last, key)
            break
        wanted = row is not None and command.scope in (None, row.scope)
        shown = command.secret if command.prepared else None
        if row is not None and wanted and _may_list(turn, row, shown):
            found.append(turn.outcome(row, full=False))
            size += limits.weight(found[-1])
        last = key
    else:
        last = None
    turn.reply(to, TransactionList(tuple(found), last))


def _may_list(turn: Turn, row: TxnRow, secret: bytes | None) -> bool:
    if secret is not None:
        return proves(turn.state.prepared_row(row.txn_id), secret)
    return sees(turn.state, turn.lane, row)


def _between(turn: Turn, last: bytes | None, key: bytes) -> bytes | None:
    """The place where a list goes on, behind the key looked at last: it tells no id that the lane may not see."""
    txn_id = (last or b"")[:TXN_ID_SIZE]
    row = turn.state.txn_row(txn_id)
    if last is None or (row is not None and sees(turn.state, turn.lane, row)):
        return last
    if key.startswith(txn_id):  # the rest of that transaction is passed over
        key = next((key for key, _ in turn.state.txn_rows_below(k.txn_key(txn_id))), b"")
    same = next(i for i in range(TXN_ID_SIZE) if last[i : i + 1] != key[i : i + 1])
    return max(last, key)[: same + 1]


def _open_after(
    turn: Turn, txn_ids: Iterable[bytes], key: bytes
) -> Iterator[tuple[bytes, TxnRow | None]]:
    for txn_id in sorted(txn_ids):
        if k.txn_key(txn_id) > key:
            yield k.txn_key(txn_id), turn.state.open[txn_id].row


def safe_time(turn: Turn, command: SafeTime, to: ReplyTo | None) -> None:
    """Make a timestamp safe, so that a snapshot at it never changes. A future one is refused: `NotReady`.

    A timestamp is safe when all commits at or below it are on the log and all later ones exceed it. Timestamps rise
    from the hybrid time of the state, which each round logs in its `RoundRow`. So for this leader and all after it
    one condition is enough: hybrid time has reached the timestamp in the round that logs the answer. No request
    moves hybrid time beyond the clock, or all later commits would be dated ahead.
    """
    check_served(turn, command.scope)
    present = max(turn.hybrid_time, hybrid_time.from_us(turn.now_us))
    at = present if command.at is None else command.at
    if not 0 <= at <= hybrid_time.MAX:
        raise InvalidArgument(f"timestamp {at}: a hybrid time, or null for now")
    if at > present:
        ahead_ms = (hybrid_time.to_us(at) - hybrid_time.to_us(present)) / 1000
        raise NotReady(
            f"the time {hybrid_time.to_text(at)} is not reached yet: {ahead_ms:,.0f} ms are missing "
            "by the controller's clock"
        )
    turn.hybrid_time = max(turn.hybrid_time, at)
    turn.reply(to, SafeTimeIs(command.scope, at))
