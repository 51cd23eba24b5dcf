"""What the naive model of transactions remembers: who is open, decided or ended, who holds a name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.decisions.turn import WAITING
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import peek
from tests.core.harness import World

OPEN, DECIDED, COMMITTED, ABORTED = "OPEN", "COMMIT_IN_PROGRESS", "COMMITTED", "ABORTED"
PARTITIONS = (0, 1)
STREAMS = ("nyc/a", "nyc/b")
CHECK_MS = 250

Place = tuple[str, int]
Merged = tuple[str, dict[Place, list[Any]]]


class Refused(Exception):
    """The command is refused with this code."""


def latest(known: r.Receipt | None, receipt: r.Receipt) -> r.Receipt:
    """The later receipt of a writer; it has all that the earlier one tells of, and no two have one number."""
    if known is None or known == receipt:
        return receipt
    early, late = sorted((known, receipt), key=lambda x: x.sequence)
    if early.sequence == late.sequence or not has_all(late, early):
        raise Refused("ReceiptMismatch")
    return late


def has_all(one: r.Receipt | None, other: r.Receipt) -> bool:
    """Whether a receipt covers all events of another one: the same events, or these offsets and more."""
    told = {} if one is None else {(e.stream, e.partition): e for e in one.extents}
    for e in other.extents:
        found = told.get((e.stream, e.partition))
        if found is None or e.first < found.first:
            return False
        same = (found.count, found.crc_sum) == (e.count, e.crc_sum)
        if not same and (found.count <= e.count or found.end < e.end):
            return False
    return True


class Batch(NamedTuple):
    """Records of one writer in a journal."""

    place: Place
    writer: int
    first: int
    end: int
    crc_sum: int
    size: int


@dataclass
class Pending:
    asked: list[str]
    writers: list[r.Receipt]
    name: str | None
    number: int | None
    deadline_ms: int

    def takes(self, batch: Batch) -> bool:
        return any(
            receipt.writer == batch.writer
            and (extent.stream, extent.partition) == batch.place
            and extent.first <= batch.first
            and batch.end <= extent.end
            for receipt in self.writers
            for extent in receipt.extents
        )


@dataclass
class Txn:
    label: str
    name: str | None
    keepalive_ms: int
    state: str
    streams: set[str] = field(default_factory=set)
    receipts: dict[int, r.Receipt] = field(default_factory=dict)
    batches: list[Batch] = field(default_factory=list)
    late: int = 0  # records rejected so far
    pending: Pending | None = None
    committed: int = 0
    left_out: int = 0
    rejected: int = 0
    reason: str = ""
    finished_ms: int = 0
    yielded: tuple[str, int | None, int | None, str] | None = None  # claimed, highest, by whom

    @property
    def ended(self) -> bool:
        return self.state in (COMMITTED, ABORTED)


class Ledger:
    """Transactions, names and series, and what may be said of them; `World` has clocks, labels and journals."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.txns: dict[str, Txn] = {}
        self.names: dict[str, str] = {}
        self.series: dict[str, tuple[int, str]] = {}  # what is committed: number, label
        self.read: dict[Place, int] = {}
        self.heard: dict[str, int] = {}
        self.since_ms = world.now_ms
        self.next_check_ms = 0
        self.known_ended: set[str] = set()
        self.horizon_ms = 0
        self.said: list[tuple[str, str]] = []
        self.merged: list[Merged] = []

    def _refuse(self, txn: Txn, code: str) -> None:
        """A commit that waited is refused; the transaction stays open, its keepalive afresh."""
        assert txn.pending is not None
        self.said += [(name, code) for name in txn.pending.asked]
        txn.pending = None
        self.heard[txn.label] = self.world.now_ms

    def _end_aborted(self, txn: Txn, reason: str) -> None:
        if txn.pending:
            self.said += [(name, "TransactionAborted") for name in txn.pending.asked]
        txn.state, txn.pending, txn.reason = ABORTED, None, reason
        txn.rejected, txn.committed, txn.left_out = txn.late, 0, 0
        txn.finished_ms = self.world.wall_ms

    def _earlier(self, name: str | None) -> Txn | None:
        holder = self.txns.get(self.names.get(name or "", ""))
        if holder is None or holder.state in (OPEN, ABORTED):
            return None
        if holder.state == DECIDED:
            raise Refused("NotReady")
        return holder

    def _too_late(
        self, txn: Txn, pending: Pending
    ) -> tuple[str, int | None, int | None, str] | None:
        """What this commit has to give way to: what it claims, where a series is, and by whom."""
        name, number = pending.name, pending.number
        if name and number is not None:
            for other in self.txns.values():
                claim = other.pending if other.state == DECIDED else None
                if claim and claim.number is not None and claim.name == name:
                    raise Refused("NotReady")
            highest, label = self.series.get(name, (-1, ""))
            return (name, number, highest, label) if number <= highest else None
        earlier = self._earlier(name) if name != txn.name else None
        return (name, None, None, earlier.label) if name and earlier else None

    def _told(self, txn: Txn) -> str | None:
        """What an aborted one's commit gave way to; None: it is just aborted."""
        if txn.yielded is None:
            return None
        _, number, highest, label = txn.yielded
        if number == highest and label in self.txns:
            return self._text(self.txns[label])
        if number is None:
            return None
        raise Refused("AlreadyCommitted")

    def _why_yielded(self, name: str, number: int | None, highest: int | None, label: str) -> str:
        by = self.world.id(label).hex()
        if number is None:
            return f"the name {name!r} was committed before by {by}"
        if number == highest:
            return f"number {number} of the series {name!r} was committed before by {by}"
        return (
            f"the series {name!r} was at number {highest} before, committed by {by}: "
            f"{number} comes too late"
        )

    def _take_name(self, name: str | None, label: str) -> None:
        if name is None:
            return
        holder = self.txns.get(self.names.get(name, ""))
        if holder is not None and holder.label != label and not holder.ended:
            self._end_aborted(holder, f"superseded by a newer transaction named {name!r}")
        self.names[name] = label

    def _learn(self, txn: Txn, receipt: r.Receipt) -> None:
        txn.receipts[receipt.writer] = latest(txn.receipts.get(receipt.writer), receipt)

    def _check_receipts(self, txn: Txn, receipts: Sequence[r.Receipt]) -> None:
        for receipt in receipts:
            for e in receipt.extents:
                if e.stream not in txn.streams:
                    raise Refused("UnknownStream")
                if e.partition not in PARTITIONS or e.count > e.end - e.first:
                    raise Refused("InvalidArgument")

    def _open(self, token: bytes) -> Txn:
        txn = self._by_token(token)
        if txn.state != OPEN:
            codes = {ABORTED: "TransactionAborted", COMMITTED: "AlreadyCommitted"}
            raise Refused(codes.get(txn.state, "OutcomeUnknown"))
        return txn

    def _by_token(self, token: bytes) -> Txn:
        """What was never begun has no secret to make a token by."""
        txn = self._known(self._label(token))
        if not txn.keepalive_ms:
            raise Refused("UnknownTransaction")
        return txn

    def _known(self, label: str) -> Txn:
        if label not in self.txns:
            expired = self._made_ms(label) <= self.horizon_ms
            raise Refused("Expired" if expired else "UnknownTransaction")
        return self.txns[label]

    def _check_new(self, label: str) -> None:
        kept_ms = self.world.wall_ms - self.world.settings.retention_ms
        if self._made_ms(label) <= max(self.horizon_ms, kept_ms):
            raise Refused("Expired")

    def _made_ms(self, label: str) -> int:
        return int.from_bytes(self.world.id(label)[2:8], "big")

    def _label(self, token: bytes) -> str:
        return self.world.label(peek(token).txn_id)

    def _by_id(self, txns: dict[str, Txn]) -> list[Txn]:
        return sorted(txns.values(), key=lambda txn: self.world.id(txn.label))

    def _text(self, txn: Txn) -> str:
        waits = txn.state == OPEN and txn.pending is not None
        text = f"{txn.label} {DECIDED if waits else txn.state}"
        if txn.state == COMMITTED:
            text += f" {txn.committed}"
        elif txn.committed:
            text += f" (but {txn.committed} committed at 0)"
        text += f", {txn.left_out} left out" if txn.left_out else ""
        text += f", {txn.rejected} rejected" if txn.rejected else ""
        reason = txn.reason or (WAITING if waits else "")
        return text + (f" ({reason})" if reason else "")
