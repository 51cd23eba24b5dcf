"""A naive model of transactions: what every command should answer and every round should merge.

Lists and dicts, whole batches, no rows, no fold, no index. It gets the commands, the ticks of the clocks
and what is in the journals, and gives the texts that `World` gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from anabranch.core.decisions.transactions import PURGE_SHARE
from anabranch.core.decisions.turn import WAITING
from anabranch.protocol.partitioner import SPACE, position_of
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


class Model:
    """The naive twin of a `World`, of which it reads clocks, labels and journals only."""

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

    # -- what happens ------------------------------------------------------------------------------

    def take_over(self, *, keep_table: bool) -> None:
        self.heard.clear()
        self.since_ms, self.next_check_ms = self.world.now_ms, 0
        if not keep_table:  # the journals are read again
            self.read.clear()
            for txn in self.txns.values():
                txn.batches.clear()
                txn.late = 0

    def turn(self, asked: Sequence[tuple[str, Any]]) -> str:
        """One round, as the texts of its answers."""
        self.said, self.merged = [], []
        if not self.world.held:
            self._read_journals()
        for name, command in asked:
            try:
                answer = self._command(name, command)
            except Refused as refused:
                answer = str(refused)
            if answer:
                self.said.append((name, answer))
        self._due()
        alone = asked[0][0] if len(asked) == 1 else None
        return "; ".join(x if name == alone else f"[{name}] {x}" for name, x in self.said)

    def _read_journals(self) -> None:
        for place, written in self.world.journals.items():
            for run in [w.run for w in written if w.run.first >= self.read.get(place, 0)]:
                batch = Batch(place, run.writer, run.first, run.end, run.crc_sum, run.batch_size)
                txn = self.txns.get(self.world.label(run.txn_id))
                if txn is not None and not txn.ended:
                    welcome = (
                        place[0] in txn.streams
                        and place[1] in PARTITIONS
                        and run.stream_epoch == 0
                        and (txn.state != DECIDED or (txn.pending and txn.pending.takes(batch)))
                    )
                    if welcome:
                        txn.batches.append(batch)
                    else:
                        txn.late += run.records
            self.read[place] = self.world.ends[place]

    # -- commands ----------------------------------------------------------------------------------

    def _command(self, name: str, c: Any) -> str:
        if isinstance(c, r.Begin):
            return self._begin(c)
        if isinstance(c, r.Touch):
            return self._touch(c)
        if isinstance(c, r.Register):
            return self._register(c)
        if isinstance(c, r.Commit):
            return self._commit(name, c)
        if isinstance(c, r.OneShot):
            return self._one_shot(c)
        if isinstance(c, r.Abort):
            return self._abort(c)
        if isinstance(c, r.Force):
            return self._force(c)
        if isinstance(c, r.Heartbeat):
            return self._heartbeat(c)
        if isinstance(c, r.Resolve):
            return self._resolve(c)
        if isinstance(c, r.GetState):
            return self._text(self._known(self.world.label(c.txn_id)))
        if isinstance(c, r.ListTransactions):
            return ", ".join(self._text(t) for t in reversed(self._by_id(self.txns))) or "none"
        return ", ".join(f"{stream} ACTIVE 2" for stream in STREAMS)

    def _begin(self, c: r.Begin) -> str:
        label = self.world.label(c.txn_id)
        txn = self.txns.get(label)
        if txn is not None:
            if txn.state == ABORTED:
                told = self._told(txn)
                if told is None:
                    raise Refused("TransactionAborted")
                return told
            name = txn.name if txn.state == OPEN or c.name else None
            if (name, txn.keepalive_ms) != (c.name, c.keepalive_ms):
                raise Refused("InvalidArgument")
            if txn.state == COMMITTED:
                return self._text(txn)
            self.heard[label] = self.world.now_ms
            return f"begun {label}"
        self._check_new(label)
        earlier = self._earlier(c.name)
        if earlier is not None:
            return self._text(earlier)
        unfinished = [t for t in self.txns.values() if not t.ended]
        room = self.world.settings.max_open - len(unfinished)
        if room + (c.name in [t.name for t in unfinished if t.name]) <= 0:
            raise Refused("TooManyTransactions")
        self._take_name(c.name, label)
        self.txns[label] = Txn(label, c.name, c.keepalive_ms, OPEN)
        self.heard[label] = self.world.now_ms
        return f"begun {label}"

    def _touch(self, c: r.Touch) -> str:
        txn = self._open(c.token)
        self.heard[txn.label] = self.world.now_ms  # refused or not
        if c.stream not in STREAMS:
            raise Refused("UnknownStream")
        txn.streams.add(c.stream)
        return f"touched {c.stream} epoch 0 on 0,1"

    def _register(self, c: r.Register) -> str:
        txn = self._open(c.token)
        self._check_receipts(txn, [c.receipt])
        self._learn(txn, c.receipt)
        self.heard[txn.label] = self.world.now_ms
        return f"registered {txn.receipts[c.receipt.writer].sequence}"

    def _commit(self, name: str, c: r.Commit) -> str:
        txn = self._by_token(c.token)
        named = [*c.own, *(c.receipts or ())]
        if txn.state == COMMITTED:
            if self._behind(named, txn.receipts):
                raise Refused("AlreadyCommitted")
            return self._text(txn)
        if txn.state == ABORTED:
            if txn.yielded and txn.yielded[:2] == (c.name, c.number):
                told = self._told(txn)
                if told is not None:
                    return told
            if c.number is not None:
                raise Refused("TransactionAborted")
            # Of one that was only resolved not even the scope is known.
            earlier = None if txn.reason.startswith("it was resolved") else self._earlier(c.name)
            if earlier is None:
                raise Refused("TransactionAborted")
            return self._text(earlier)
        self.heard[txn.label] = self.world.now_ms
        if txn.state == DECIDED and self._behind(named, txn.receipts):
            raise Refused("OutcomeUnknown")
        if txn.pending and name in txn.pending.asked:
            return ""
        if txn.state == OPEN:
            if c.number is None and c.name and txn.name and c.name != txn.name:
                raise Refused("InvalidArgument")
            if c.number is not None and not c.name:
                raise Refused("InvalidArgument")
            self._check_receipts(txn, named)
            writers = self._choose(txn, c)
            former = txn.pending
            if former and (
                (former.name, former.number) != (c.name, c.number)
                or self._behind(former.writers, {x.writer: x for x in writers})
            ):
                self._refuse(txn, "OutcomeUnknown")
            asked = txn.pending.asked if txn.pending else []
            deadline_ms = self.world.wall_ms + c.wait_ms
            txn.pending = Pending(asked, writers, c.name, c.number, deadline_ms)
        assert txn.pending is not None
        txn.pending.asked.append(name)
        return ""

    def _choose(self, txn: Txn, c: r.Commit) -> list[r.Receipt]:
        own = [receipt.writer for receipt in c.own]
        others = c.receipts
        if others is None:
            others = tuple(txn.receipts.values())
        best: dict[int, r.Receipt] = {}
        for receipt in (*c.own, *others):
            known = best.get(receipt.writer) or txn.receipts.get(receipt.writer)
            best[receipt.writer] = latest(known, receipt)
        if c.receipts is None and any(not x.finished and x.writer not in own for x in others):
            raise Refused("WritersUnfinished")
        return list(best.values())

    def _behind(self, wanted: Sequence[r.Receipt], taken: dict[int, r.Receipt]) -> bool:
        """Whether a receipt has events that none of these receipts has."""
        return not all(has_all(taken.get(x.writer), x) for x in wanted)

    def _one_shot(self, c: r.OneShot) -> str:
        label = self.world.label(c.txn_id)
        txn = self.txns.get(label)
        if txn is not None:
            if txn.state == ABORTED:
                earlier = self._earlier(c.name)
                if earlier is None:
                    raise Refused("TransactionAborted")
                return self._text(earlier)
            if (txn.state, txn.name, txn.committed) != (COMMITTED, c.name, len(c.events)):
                raise Refused("InvalidArgument")
            return self._text(txn)
        self._check_new(label)
        earlier = self._earlier(c.name)
        if earlier is not None:
            by = self.world.id(earlier.label).hex()
            txn = self.txns[label] = Txn(label, None, 0, ABORTED)
            txn.reason = f"the name {c.name!r} was committed before by {by}"
            txn.finished_ms = self.world.wall_ms
            return self._text(earlier)
        self._take_name(c.name, label)
        where: dict[Place, list[Any]] = {}
        for e in c.events:
            if e.key is None:
                partition = e.segment_id if e.segment_id in PARTITIONS else 0
            else:
                partition = int(position_of(e.key) >= SPACE // 2)
            where.setdefault((e.stream, partition), []).append(e.value)
        if where:
            self.merged.append((label, where))
        txn = Txn(label, c.name, 0, COMMITTED, committed=len(c.events))
        txn.finished_ms = self.world.wall_ms
        self.txns[label] = txn
        return self._text(txn)

    def _abort(self, c: r.Abort) -> str:
        txn = self._by_token(c.token)
        if txn.state == COMMITTED:
            raise Refused("AlreadyCommitted")
        if txn.state != ABORTED:
            self._end_aborted(txn, "aborted by a client")
        return self._text(txn)

    def _force(self, c: r.Force) -> str:
        """It is for big ones that lost a stream; here none is carried."""
        txn = self._known(self._label(c.token))
        if txn.state == COMMITTED:
            raise Refused("AlreadyCommitted")
        if txn.state != ABORTED:
            raise Refused("IllegalState")
        return self._text(txn)

    def _heartbeat(self, c: r.Heartbeat) -> str:
        gone = []
        refused: Refused | None = None
        for token in c.tokens:
            try:
                txn = self._by_token(token)
            except Refused as error:
                refused = error
                continue
            if txn.ended:
                gone.append(self._text(txn))
            else:
                self.heard[txn.label] = self.world.now_ms
        if refused and not gone:
            raise refused
        return f"not open: {', '.join(gone)}" if gone else ""

    def _resolve(self, c: r.Resolve) -> str:
        label = self.world.label(c.txn_id)
        if label not in self.txns:
            self._check_new(label)
            reason = "it was resolved before any other command of it arrived"
            at_ms = self.world.wall_ms
            self.txns[label] = Txn(label, None, 0, ABORTED, reason=reason, finished_ms=at_ms)
        return self._text(self.txns[label])

    # -- what is due -------------------------------------------------------------------------------

    def _due(self) -> None:
        merged_bytes = 0
        waiting = self._by_id({x: t for x, t in self.txns.items() if t.pending})
        for txn in [txn for txn in waiting if txn.state == DECIDED]:
            if txn.pending is None or not self._covers(txn.pending):
                continue
            if merged_bytes < self.world.settings.round_bytes:
                merged_bytes += self._merge(txn, txn.pending)
        for txn in waiting:
            if txn.state == OPEN and txn.pending is not None:
                self._try_decide(txn, txn.pending)
        most = 0
        if self.world.now_ms >= self.next_check_ms:
            self.next_check_ms = self.world.now_ms + CHECK_MS
            most = self.world.settings.purge_per_look
            for txn in self._by_id(self.txns):
                silent_ms = self.world.now_ms - self.heard.get(txn.label, self.since_ms)
                if txn.state == OPEN and txn.pending is None and silent_ms > txn.keepalive_ms:
                    self._end_aborted(txn, f"stale: no heartbeat for {silent_ms:,} ms")
        ended = {label for label, txn in self.txns.items() if txn.ended}
        self._forget(most + PURGE_SHARE * len(ended - self.known_ended))
        self.known_ended = ended

    def _covers(self, pending: Pending) -> bool:
        return all(
            self.read.get((e.stream, e.partition), 0) >= e.end
            for receipt in pending.writers
            for e in receipt.extents
        )

    def _try_decide(self, txn: Txn, pending: Pending) -> None:
        late = self.world.wall_ms >= pending.deadline_ms
        if not self._covers(pending):
            if late:
                self._refuse(txn, "ReceiptsNotCovered")
            return
        for receipt in pending.writers:
            for e in receipt.extents:
                alone = Pending([], [r.Receipt(b"", receipt.writer, 0, True, (e,))], None, None, 0)
                batches = [b for b in txn.batches if alone.takes(b)]
                count, crc_sum = (
                    sum(b.end - b.first for b in batches),
                    sum(b.crc_sum for b in batches),
                )
                if (count, crc_sum % (1 << 63)) != (e.count, e.crc_sum):
                    self._refuse(txn, "ReceiptMismatch")
                    return
        try:
            txn.yielded = self._too_late(txn, pending)
        except Refused as refused:
            if late:
                self._refuse(txn, str(refused))
            return
        if txn.yielded is not None:
            try:
                told = self._told(txn)
            except Refused as refused:
                told = str(refused)
            self.said += [(name, told or "") for name in pending.asked]
            txn.pending = None
            self._end_aborted(txn, self._why_yielded(*txn.yielded))
            return
        if pending.name and pending.number is None and pending.name != txn.name:
            self._take_name(pending.name, txn.label)
            txn.name = pending.name
        taken = sum(b.end - b.first for b in txn.batches if pending.takes(b))
        txn.state, txn.committed = DECIDED, taken
        txn.receipts = {x.writer: x for x in pending.writers}
        txn.left_out = sum(b.end - b.first for b in txn.batches) - taken

    def _merge(self, txn: Txn, pending: Pending) -> int:
        batches = [b for b in txn.batches if pending.takes(b)]
        found = sum(b.end - b.first for b in batches)
        if found != txn.committed:
            reason = f"its journals show {found} of the {txn.committed} records decided"
            self._end_aborted(txn, reason)
            return 0
        where: dict[Place, list[Any]] = {}
        for b in sorted(batches, key=lambda b: (b.place, b.first)):
            where.setdefault(b.place, []).append((b.writer, b.first, b.end))
        if where:
            self.merged.append((txn.label, where))
        txn.state, txn.rejected, txn.finished_ms = COMMITTED, txn.late, self.world.wall_ms
        if pending.name and pending.number is not None:
            self.series[pending.name] = pending.number, txn.label
        txn.pending = None
        self.said += [(name, self._text(txn)) for name in pending.asked]
        return sum(b.size for b in batches)

    def _forget(self, most: int) -> None:
        before_ms = self.world.wall_ms - self.world.settings.retention_ms
        old = [t for t in self._by_id(self.txns) if t.ended and t.finished_ms < before_ms]
        old.sort(key=lambda t: t.finished_ms)
        for txn in old[:most]:
            del self.txns[txn.label]
            if txn.name and self.names.get(txn.name) == txn.label:
                del self.names[txn.name]
            self.horizon_ms = max(self.horizon_ms, self._made_ms(txn.label))

    # -- what is remembered ------------------------------------------------------------------------

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
