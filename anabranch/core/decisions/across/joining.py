"""How a transaction of another control partition gets a part here: by its first touch, or its first locks.

The command waits in memory while its coordinator is asked (`Enlist`), and is decided when that has answered
(`Enlisted`). Nothing is logged before: only the answer, which the command's token proves, shows that there is such
a transaction. `docs/inside/across.md`, section 4, has the rules.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from anabranch import errors
from anabranch.core.across.messages import LEVEL
from anabranch.core.decisions import transactions
from anabranch.core.decisions.across.participating import open_part
from anabranch.core.decisions.across.parts_of_one_shots import check_room
from anabranch.core.decisions.scopes import active_stream, check_leads
from anabranch.core.decisions.transactions import check_open
from anabranch.core.decisions.turn import FORGOTTEN, Turn, attempt, refuse
from anabranch.core.locks import registering
from anabranch.core.locks.conflicts import check_table, named
from anabranch.core.memory import WaitingCommand
from anabranch.core.round import ReplyTo
from anabranch.protocol.ids import TXN_ID_SIZE, control_partition_of
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import id_named, is_genuine, peek

WAIT_MS = 5_000  # how long a command waits for the coordinator

_DECISIONS: dict[type, Callable[[Turn, Any, ReplyTo | None], None]] = {
    r.Touch: transactions.touch,
    r.LockReads: registering.lock_reads,
}


def touch(turn: Turn, command: r.Touch, to: ReplyTo | None) -> None:
    """Touch a stream here. If the transaction is another control partition's, its coordinator is asked first."""
    _decide(turn, command, (command.stream,), to)


def lock_reads(turn: Turn, command: r.LockReads, to: ReplyTo | None) -> None:
    """Register locks here. Otherwise as `touch`: so a transaction may have a part here without a stream."""
    _decide(turn, command, tuple(sorted({*named(command.locks), *command.tables})), to)


def has_joined(turn: Turn, txn_id: bytes, stream: str) -> bool:
    """Whether no coordinator need be asked before the transaction touches a stream here.

    A coordinator sends receipts by the scopes that it was asked for, so it is asked for each scope that is written.
    """
    if txn_id not in turn.state.promised:
        return control_partition_of(txn_id) == turn.settings.control_partition
    scope = split_stream(stream)[0]
    return any(split_stream(one)[0] == scope for one in turn.open(txn_id).participants)


def _decide(
    turn: Turn, command: r.Touch | r.LockReads, streams: tuple[str, ...], to: ReplyTo | None
) -> None:
    txn_id = id_named(command.token)
    is_own = control_partition_of(txn_id) == turn.settings.control_partition
    if isinstance(command, r.Touch):
        is_known = has_joined(turn, txn_id, command.stream)
    else:
        is_known = txn_id in turn.state.promised or not streams
    row = turn.state.txn_row(txn_id)
    has_ended = row is not None and txn_id not in turn.state.promised  # this is refused
    if is_own or is_known or has_ended or not turn.settings.across:
        _DECISIONS[type(command)](turn, command, to)
        return
    turn.state.check_enabled(LEVEL, "a transaction over several control partitions")
    _check(turn, command, txn_id, streams)
    if to is not None:
        _wait(turn, command, split_stream(streams[0])[0], to)


def _check(
    turn: Turn, command: r.Touch | r.LockReads, txn_id: bytes, streams: tuple[str, ...]
) -> None:
    """Check what needs no word of the coordinator."""
    if len(command.token) == TXN_ID_SIZE or control_partition_of(txn_id) >= turn.control_partitions:
        raise errors.InvalidToken(
            "streams and tables of another control partition are touched and locked with a token of the transaction"
        )
    if turn.is_forgotten(txn_id):
        raise errors.Expired(FORGOTTEN)
    if txn_id not in turn.state.promised:
        check_open(turn)  # once its coordinator counts on a part here, a commit needs its vote
    for stream in streams:
        check_leads(turn, stream)
        if isinstance(command, r.Touch):
            active_stream(turn, stream)
        else:
            check_table(turn, stream)


def _wait(turn: Turn, command: r.Touch | r.LockReads, scope: str, to: ReplyTo) -> None:
    txn_id, here = id_named(command.token), turn.settings.control_partition
    key = txn_id, scope
    waiting = turn.across.joining.get(key, ())
    same = [one for one in waiting if one.to == to]
    size = min(turn.command_bytes, turn.settings.command_bytes)
    if not same:
        check_room(turn, [o for its in turn.across.joining.as_dict().values() for o in its], size)
    waits = WaitingCommand(command, turn.lane, to, turn.now_ms + WAIT_MS, size)
    turn.across.joining.put(key, (*[one for one in waiting if one not in same], waits))
    asks = r.Enlist(txn_id, here, scope, command.token, turn.lane)
    turn.send(control_partition_of(txn_id), asks, None)


def enlisted(turn: Turn, message: r.Enlisted) -> None:
    """Decide the commands that waited for this answer, or refuse them with the coordinator's refusal.

    Only the commands' tokens prove the answer: the secret in it has to explain them. So without a command that
    waits, nothing is done.
    """
    key = message.txn_id, message.scope
    waiting = turn.across.joining.get(key, ())
    if not waiting:
        return
    if message.refusal is not None or message.head is None:
        turn.across.joining.put(key, None)
        for one in waiting:
            turn.reply(one.to, message.refusal)
        return
    head = message.head
    proven = [one for one in waiting if is_genuine(peek(one.command.token), head.secret)]
    if not proven:
        turn.round.ignored.append("forged")
        return
    turn.across.joining.put(key, tuple(one for one in waiting if one not in proven) or None)
    for one in proven:
        if turn.state.txn_row(message.txn_id) is None:
            turn.lane = head.owner
            try:
                check_open(turn)
            except errors.AnabranchError as error:
                turn.reply(one.to, refuse(error))
                continue
            open_part(turn, message.txn_id, head)
        turn.lane = one.lane
        decision = _DECISIONS[type(one.command)]
        attempt(turn, one.to, partial(decision, turn, one.command, one.to))


def refuse_late(turn: Turn) -> None:
    """Refuse the commands for which the coordinator did not answer in time."""
    for key, waiting in turn.across.joining.as_dict().items():
        late = [one for one in waiting if turn.now_ms >= one.until_ms]
        for one in late:
            home = control_partition_of(key[0])
            text = f"control partition {home}, which coordinates the transaction, did not answer: ask again"
            turn.reply(one.to, refuse(errors.NotReady(text)))
        if late:
            rest = tuple(one for one in waiting if one not in late)
            turn.across.joining.put(key, rest or None)
