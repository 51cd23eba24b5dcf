"""Decisions on writers: their receipts and labels, and which writers a commit takes.

Receipts are cumulative: of two receipts of a writer, the one with the higher sequence counts, in whichever command
it came. A touch makes a writer known with an empty receipt of sequence 0.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from heapq import nsmallest

from anabranch.core import rows as k
from anabranch.core import work
from anabranch.core.authorize import Right, check_writes, refusal
from anabranch.core.decisions import quotas
from anabranch.core.decisions.turn import Turn
from anabranch.core.journal_index import segment_on
from anabranch.core.journal_runs import covers
from anabranch.core.round import ReplyTo
from anabranch.core.state import OpenTxn, State
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.errors import InvalidArgument, ReceiptMismatch, UnknownStream, WritersUnfinished
from anabranch.protocol import limits
from anabranch.protocol.messages import size_of
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights

_NAMED = 10  # writers, in a message


def register(turn: Turn, command: r.Register, to: ReplyTo | None) -> None:
    """Store a writer's receipt, unless a newer one is known. A writer belongs to the lane that first named it."""
    row = turn.transaction(command.token, Rights.WRITE)
    TRANSACTIONS.judge(row.state, "register", row.reason)
    check_writes(turn.state, row)
    lane = turn.open(row.txn_id).lanes.get(command.receipt.writer, turn.lane)
    if lane != turn.lane:
        raise refusal(turn.lane, Right.WRITE, row.scope)
    check_receipts(turn, row.txn_id, (command.receipt,))
    known = turn.open(row.txn_id).writers.get(command.receipt.writer)
    if known is None:
        quotas.check_uncommitted(turn, row.owner, row.txn_id)
    counts = command.receipt if known is None else newer(known, command.receipt)
    turn.hear(row.txn_id)
    if counts is not known:
        put_receipt(turn, counts, lane)
    turn.reply(to, r.Registered(counts.sequence))


def label(turn: Turn, command: r.LabelWriter, to: ReplyTo | None) -> None:
    """Give a known writer a label for people. Other lanes than the writer's may not."""
    row = turn.transaction(command.token, Rights.WRITE, anywhere=turn.settings.across)
    TRANSACTIONS.judge(row.state, "touch", row.reason)
    check_writes(turn.state, row)
    limits.LABEL.check(len(command.label), "the label of a writer")
    if not command.label.isprintable():
        raise InvalidArgument("the label of a writer has characters that can't be printed")
    txn = turn.open(row.txn_id)
    known = txn.writers.get(command.writer)
    if known is None:
        raise InvalidArgument(f"no writer {writer_text(command.writer)} is known: touch a stream")
    if txn.lanes[command.writer] != turn.lane:
        raise refusal(turn.lane, Right.WRITE, row.scope)
    turn.hear(row.txn_id)
    if label_of(turn.state, row.txn_id, command.writer) != command.label:
        turn.put(k.label_key(row.txn_id, command.writer), r.LabelRow(command.label))
    turn.reply(to, r.Registered(known.sequence))


def label_of(state: State, txn_id: bytes, writer: int) -> str:
    """The label of a writer; empty if it has none. Its row is deleted with the transaction's."""
    row = state.get(k.label_key(txn_id, writer))
    return "" if row is None else str(row.label)


def put_receipt(turn: Turn, receipt: r.Receipt, lane: str) -> None:
    turn.put(k.writer_key(receipt.txn_id, receipt.writer), r.WriterRow(receipt, lane))


def newer(one: r.Receipt, other: r.Receipt) -> r.Receipt:
    """The receipt that counts, of two receipts of a writer. `ReceiptMismatch`: they contradict each other."""
    if one.sequence == other.sequence and one != other:
        raise ReceiptMismatch(
            f"two receipts of writer {writer_text(one.writer)} have sequence {one.sequence} and differ: give "
            "each receipt of a writer a higher one"
        )
    first, last = (one, other) if other.sequence > one.sequence else (other, one)
    if not covers(last, first):
        raise ReceiptMismatch(
            f"receipt {last.sequence} of writer {writer_text(one.writer)} does not cover receipt {first.sequence}: "
            "receipts of a writer are cumulative"
        )
    return last


def check_room(turn: Turn, txn: OpenTxn, receipts: Collection[r.Receipt]) -> None:
    """`InvalidArgument` if the transaction would have too many writers, or too many bytes of receipts."""
    known = [txn.writers[one.writer] for one in receipts if one.writer in txn.writers]
    limits.WRITERS.check(len(txn.writers) + len(receipts) - len(known), "the transaction")
    size = txn.receipt_bytes - size_of(known) + size_of(receipts)
    what = "what a transaction's writers have registered, about,"
    limits.RECEIPTS.check(size, what, turn.settings.receipt_bytes)


def check_receipts(turn: Turn, txn_id: bytes, receipts: tuple[r.Receipt, ...]) -> None:
    """Refuse receipts that are malformed, or of another transaction, or of streams that it never touched.

    Raises: InvalidArgument, UnknownStream.
    """
    txn = turn.open(txn_id)
    touched, elsewhere = txn.participants, scopes_elsewhere(txn)
    turn.charge(work.of_receipts(receipts))
    check_room(turn, txn, receipts)
    for receipt in receipts:
        if receipt.txn_id != txn_id:
            raise InvalidArgument("a receipt is of another transaction")
        if receipt.writer == 0 or receipt.sequence < 1:
            raise InvalidArgument(
                f"a receipt is of writer {receipt.writer} with sequence {receipt.sequence}: a writer is not 0, and "
                "sequences begin at 1"
            )
        places = [(e.stream, e.partition) for e in receipt.extents]
        if len(set(places)) != len(places):
            raise InvalidArgument("a receipt names a journal partition twice")
        for extent in receipt.extents:
            most = extent.end - extent.first
            if extent.first < 0 or not 0 <= extent.count <= most or extent.crc_sum < 0:
                raise InvalidArgument(
                    f"a receipt's extent of {extent.stream} is out of range: {extent.count:,} events in "
                    f"[{extent.first:,}, {extent.end:,})"
                )
            if extent.stream not in touched:
                if elsewhere and extent.stream.partition("/")[0] in elsewhere:
                    continue  # its participant checks it
                raise UnknownStream(
                    f"a receipt names {extent.stream}, which the transaction never touched"
                )
            epoch = touched[extent.stream]
            if segment_on(turn.state, extent.stream, epoch, extent.partition) is None:
                raise InvalidArgument(
                    f"{extent.stream} has no journal partition {extent.partition} in stream epoch {epoch}"
                )


def scopes_elsewhere(txn: OpenTxn) -> set[str]:
    """The scopes of a transaction's streams that other control partitions serve."""
    return {scope for row in txn.partitions.values() for scope in row.scopes}


def receipts_of(receipts: Iterable[r.Receipt], scopes: Collection[str]) -> tuple[r.Receipt, ...]:
    """The receipts, with the extents of streams of these scopes alone. No writer is left out."""
    return tuple(
        replace(one, extents=tuple(e for e in one.extents if e.stream.partition("/")[0] in scopes))
        for one in receipts
    )


def receipts_here(txn: OpenTxn, receipts: tuple[r.Receipt, ...]) -> tuple[r.Receipt, ...]:
    """The receipts of a commit, with the extents of this control partition's streams alone."""
    if not txn.partitions:
        return receipts
    return receipts_of(receipts, {stream.partition("/")[0] for stream in txn.participants})


def choose_writers(turn: Turn, txn: OpenTxn, command: r.Commit) -> tuple[r.Receipt, ...]:
    """The receipts that a commit takes: of each writer in the command, the newer of the command's receipt and the
    registered one. If the command has no list of receipts, the commit also takes all other writers.

    Raises: WritersUnfinished (without a list, another writer has not finished), ReceiptMismatch.
    """
    chosen: dict[int, r.Receipt] = {}
    for receipt in (*command.own, *(command.receipts or ())):
        known = chosen.get(receipt.writer) or txn.writers.get(receipt.writer)
        chosen[receipt.writer] = receipt if known is None else newer(known, receipt)
    if command.receipts is None:
        turn.charge(work.of_items(len(txn.writers)))
        unfinished = [w for w, one in txn.writers.items() if w not in chosen and not one.finished]
        if unfinished:
            few = nsmallest(_NAMED, unfinished)
            labels = {writer: label_of(turn.state, txn.row.txn_id, writer) for writer in few}
            raise WritersUnfinished(
                f"not finished: writer {writers_text(unfinished, labels)}; "
                "give the receipts to take, or let it finish. The handle that began the transaction never does: if "
                "that one has written, commit by it, or let only handles of `join` write"
            )
        chosen = dict(txn.writers) | chosen
    return tuple(chosen[writer] for writer in sorted(chosen))


def take_exactly(turn: Turn, txn: OpenTxn, receipts: Iterable[r.Receipt]) -> None:
    """Keep the rows of exactly these receipts, so that each outcome names the writers that the commit took."""
    taken = {receipt.writer: receipt for receipt in receipts}
    for writer in sorted(txn.writers.keys() - taken.keys()):
        turn.put(k.writer_key(txn.row.txn_id, writer), None)
    for writer, receipt in taken.items():
        if txn.writers.get(writer) != receipt:
            put_receipt(turn, receipt, txn.lanes.get(writer, txn.row.owner))


def writer_text(writer: int) -> str:
    """How people see a writer: 16 hexadecimal digits."""
    return f"{writer & (1 << 64) - 1:016x}"


def writers_text(writers: Collection[int], labels: Mapping[int, str] | None = None) -> str:
    """A few writers, for a message, with their labels."""
    names = [
        writer_text(writer) + (f" ({labels[writer]})" if labels and labels.get(writer) else "")
        for writer in nsmallest(_NAMED, writers)
    ]
    more = len(writers) - _NAMED
    return ", ".join(names) + (f" and {more} more" if more > 0 else "")
