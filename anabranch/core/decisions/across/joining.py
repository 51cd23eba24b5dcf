"""How a transaction of another control partition gets a part here (`docs/inside/across.md`, section 4).

A client's first touch, or its first locks, opens the part (`touch`, `lock_reads`). The command waits in memory
while the coordinator is asked (`Enlist`), and is decided when the answer has come (`on_enlisted`); after `WAIT_MS`
without an answer it is refused (`refuse_late`). Nothing is logged before the answer: only that shows that there is
such a transaction, and the command's token proves it (M3). `coordinating.on_enlist` is the other side (O1).

A one-shot opens its part in another way: see `parts_of_one_shots`.
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

WAIT_MS = 5_000  # how long a command waits for the coordinator's answer

# The decisions within one control partition: once a transaction has its part here, they are the same.
_DECISIONS: dict[type, Callable[[Turn, Any, ReplyTo | None], None]] = {
    r.Touch: transactions.touch,
    r.LockReads: registering.lock_reads,
}


def touch(turn: Turn, command: r.Touch, to: ReplyTo | None) -> None:
    """Decide a `Touch`. If the transaction is of another control partition, its coordinator is asked first."""
    _decide_or_ask(turn, command, (command.stream,), to)


def lock_reads(turn: Turn, command: r.LockReads, to: ReplyTo | None) -> None:
    """Decide a `LockReads`, as `touch` does. So a transaction may have a part here without a stream."""
    _decide_or_ask(turn, command, tuple(sorted({*named(command.locks), *command.tables})), to)


def has_joined(turn: Turn, txn_id: bytes, stream: str) -> bool:
    """Whether the transaction may touch a stream here without a question to its coordinator.

    A coordinator sends receipts by the scopes that it was asked for, so it is asked for each scope that is written.
    """
    if txn_id not in turn.state.promised:
        return control_partition_of(txn_id) == turn.settings.control_partition
    scope = split_stream(stream)[0]
    return any(split_stream(touched)[0] == scope for touched in turn.open(txn_id).participants)


def _decide_or_ask(
    turn: Turn, command: r.Touch | r.LockReads, streams: tuple[str, ...], to: ReplyTo | None
) -> None:
    """Decide a command, or let it wait while the coordinator is asked. ``streams``: what it touches or locks."""
    txn_id = id_named(command.token)
    is_own = control_partition_of(txn_id) == turn.settings.control_partition
    if isinstance(command, r.Touch):
        joined = has_joined(turn, txn_id, command.stream)
    else:
        joined = txn_id in turn.state.promised or not streams
    row = turn.state.txn_row(txn_id)
    has_ended = row is not None and txn_id not in turn.state.promised  # its decision refuses it
    if is_own or joined or has_ended or not turn.settings.across:
        _DECISIONS[type(command)](turn, command, to)
        return
    turn.state.check_enabled(LEVEL, "a transaction over several control partitions")
    _check_before_asking(turn, command, txn_id, streams)
    if to is not None:
        _wait_and_ask(turn, command, split_stream(streams[0])[0], to)


def _check_before_asking(
    turn: Turn, command: r.Touch | r.LockReads, txn_id: bytes, streams: tuple[str, ...]
) -> None:
    """Check a command as far as that is possible without the coordinator's answer."""
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


def _wait_and_ask(turn: Turn, command: r.Touch | r.LockReads, scope: str, to: ReplyTo) -> None:
    """Keep a command in memory, and send `Enlist`. A repeated command replaces its former copy."""
    txn_id, here = id_named(command.token), turn.settings.control_partition
    key, joining = (txn_id, scope), turn.across.waiting_commands
    waiting = joining.get(key, ())
    others = [before for before in waiting if before.to != to]
    size = min(turn.command_bytes, turn.settings.command_bytes)
    if len(others) == len(waiting):
        everyone = [before for commands in joining.as_dict().values() for before in commands]
        check_room(turn, everyone, size)
    until_ms = turn.now_ms + WAIT_MS
    joining.put(key, (*others, WaitingCommand(command, turn.lane, to, until_ms, size)))
    question = r.Enlist(txn_id, here, scope, command.token, turn.lane)
    turn.send(control_partition_of(txn_id), question, None)


def on_enlisted(turn: Turn, message: r.Enlisted) -> None:
    """Decide the commands that waited for this answer, or refuse them with the coordinator's refusal.

    Only the commands' tokens prove the answer: the secret in it has to explain them (M3). So without a command that
    waits, nothing is done.
    """
    key = message.txn_id, message.scope
    waiting, head = turn.across.waiting_commands.get(key, ()), message.head
    if not waiting:
        return
    if message.refusal is not None or head is None:
        turn.across.waiting_commands.put(key, None)
        for waited in waiting:
            turn.reply(waited.to, message.refusal)
        return
    proven = [waited for waited in waiting if is_genuine(peek(waited.command.token), head.secret)]
    if not proven:
        turn.round.ignored.append("forged")
        return
    turn.across.waiting_commands.put(
        key, tuple(waited for waited in waiting if waited not in proven) or None
    )
    for waited in proven:
        _join(turn, message.txn_id, head, waited)


def _join(turn: Turn, txn_id: bytes, head: r.TxnHead, waited: WaitingCommand) -> None:
    """Open the part here if the transaction has no row, and decide a command that waited."""
    if turn.state.txn_row(txn_id) is None:
        turn.lane = head.owner
        try:
            check_open(turn)
        except errors.AnabranchError as error:
            turn.reply(waited.to, refuse(error))
            return
        open_part(turn, txn_id, head)
    turn.lane = waited.lane
    decision = _DECISIONS[type(waited.command)]
    attempt(turn, waited.to, partial(decision, turn, waited.command, waited.to))


def refuse_late(turn: Turn) -> None:
    """Refuse the commands for which the coordinator did not answer in time. `receiving.advance` calls it."""
    for (txn_id, scope), waiting in turn.across.waiting_commands.as_dict().items():
        late = [command for command in waiting if turn.now_ms >= command.until_ms]
        for command in late:
            home = control_partition_of(txn_id)
            text = f"control partition {home}, which coordinates the transaction, did not answer: ask again"
            turn.reply(command.to, refuse(errors.NotReady(text)))
        if late:
            rest = tuple(command for command in waiting if command not in late)
            turn.across.waiting_commands.put((txn_id, scope), rest or None)
