"""One control partition of the model: its rows, the memory of its leader, and what a pass does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from anabranch.core.across import coordinator, holds, messages, participant
from anabranch.core.across.coordinator import Step
from anabranch.core.across.holds import Holds
from anabranch.core.across.messages import Meeting
from anabranch.core.across.participant import Action
from anabranch.core.transaction_states import born
from anabranch.errors import ClockSkew, InvariantViolation
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode

SKEW_MS = 1_000
Row = tuple[str, str]  # stream, row


class Bad(Exception):
    """Something that must hold does not."""


class Merge(NamedTuple):
    """A transaction's events in a stream. ``rows``: row -> value; a changed row has its number."""

    timestamp: int
    txn_id: bytes
    rows: dict[str, int]


@dataclass
class Share:
    """What a transaction does at one control partition."""

    puts: dict[Row, int] = field(default_factory=dict)
    adds: dict[Row, int] = field(default_factory=dict)
    reads: set[Row] = field(default_factory=set)
    big: bool = False
    events: int = 0  # written to journals, and acknowledged

    @property
    def writes(self) -> set[Row]:
        return {*self.puts, *self.adds}

    @property
    def locks(self) -> set[Row]:
        """A change of a row counts as a lock (L5)."""
        return {*self.reads, *self.adds}

    @property
    def streams(self) -> list[str]:
        return sorted({stream for stream, _ in self.writes})

    @property
    def tables(self) -> list[str]:
        return sorted({stream for stream, _ in self.reads})


@dataclass
class Txn:
    """A transaction, as its client knows it."""

    txn_id: bytes
    shares: dict[int, Share]
    since: int  # its snapshot
    long: bool = False
    secret: bytes = b""

    @property
    def others(self) -> list[int]:
        home = int.from_bytes(self.txn_id[:2], "big")
        return sorted(self.shares.keys() - {home})


@dataclass
class Ask:
    """A snapshot that a client asks for. ``must``: what it was told before."""

    streams: list[str]
    seen: int
    must: list[bytes]
    since: int  # the world's pass
    at: int | None = None
    answers: dict[int, int] = field(default_factory=dict)
    ready: set[int] = field(default_factory=set)


class Shared:
    """What all control partitions of a model see: time, chance, and what clients do and were told."""

    def __init__(self, seed: int) -> None:
        self.rnd = Random(seed)
        self.now_ms = 1_700_000_000_000
        self.calm = False  # nothing is lost any more, and no command has a deadline
        self.part_of: dict[str, int] = {}  # stream -> control partition
        self.txns: dict[bytes, Txn] = {}
        self.commands: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        self.told: dict[bytes, int] = {}  # committed -> commit timestamp
        self.told_decided: dict[bytes, int] = {}
        self.touched: set[tuple[bytes, int]] = set()
        self.records: dict[str, int] = {}  # stream -> `CommitRecord.safe` of its newest record
        self.chunks: list[bytes] = []  # transactions of which chunks are in streams
        self.forged = self.refused = 0


@dataclass
class Part:
    """A control partition: rows, which are on the log, and the memory of its leader."""

    world: Shared
    number: int
    skew_ms: int
    clock: int = 0
    rows: dict[bytes, r.TxnRow] = field(default_factory=dict)
    its: dict[bytes, r.CoordinatorRow] = field(default_factory=dict)
    votes: dict[bytes, r.VotesRow] = field(default_factory=dict)
    partners: dict[bytes, dict[int, r.PartitionRow]] = field(default_factory=dict)
    pending: dict[bytes, r.PendingCommitRow] = field(default_factory=dict)
    # Events of each participant that the commit names; those that a participant has in its journals.
    named: dict[bytes, dict[int, int]] = field(default_factory=dict)
    indexed: dict[bytes, int] = field(default_factory=dict)
    values: dict[bytes, dict[Row, int]] = field(default_factory=dict)  # numbers decided with a vote
    staging: dict[bytes, int] = field(
        default_factory=dict
    )  # passes that a staged merge still takes
    merged: dict[str, list[Merge]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Become leader: what was in memory is gone, holds are made from rows."""
        self.answered: dict[bytes, dict[int, r.Vote]] = defaultdict(dict)
        self.first_ms: dict[bytes, int] = {}
        self.again_ms: dict[bytes, int] = {}
        self.alone: list[bytes] = []  # one-shots of this control partition that wait
        self.out: list[tuple[int, Any]] = []
        self.held = Holds()
        self.newest: dict[str, int] = {}  # streams with records of this pass -> the newest one
        for txn_id in self.rows:
            self.hold(txn_id)

    # -- what it knows -------------------------------------------------------------------------------

    @property
    def now_us(self) -> int:
        return (self.world.now_ms + self.skew_ms) * 1000

    def next(self) -> int:
        self.clock = hybrid_time.next_after(self.clock, self.now_us)
        return self.clock

    def share(self, txn_id: bytes) -> Share:
        return self.world.txns[txn_id].shares.get(self.number, Share())

    def hold(self, txn_id: bytes) -> None:
        row = self.rows[txn_id]
        entry = holds.entry_of(row, self.its.get(txn_id), self.votes.get(txn_id))
        self.held.put(txn_id, self.share(txn_id).streams, entry)

    def put(self, txn_id: bytes, **changes: Any) -> None:
        self.rows[txn_id] = self.rows[txn_id]._replace(**changes)
        self.hold(txn_id)

    def others(self, txn_id: bytes) -> Iterator[tuple[bytes, bool, bool]]:
        """What has begun to end here, and is not over: id, whether it is decided, and its locks frozen."""
        for other, row in self.rows.items():
            if row.state == "PREPARED":
                yield other, False, True
            elif row.state == "FINALIZE_IN_PROGRESS" and not self.is_merged(other):
                yield other, True, True
        yield from ((other, True, False) for other in self.alone if self.held.of(other))
        yield from ((other, True, True) for other in self.staging if other not in self.rows)

    def is_merged(self, txn_id: bytes) -> bool:
        votes = self.votes.get(txn_id)
        return votes is not None and votes.own_merged

    def broken(self, txn_id: bytes) -> bool:
        """Whether a row that it read has changed since."""
        since = self.world.txns[txn_id].since
        return any(
            merge.timestamp > since and row in merge.rows and merge.txn_id != txn_id
            for stream, row in self.share(txn_id).reads
            for merge in self.merged[stream]
        )

    def meets(self, txn_id: bytes) -> Meeting | None:
        """What a vote does because of other transactions here (L2, L3, L5)."""
        mine, found = self.share(txn_id), None
        for other, decided, frozen in self.others(txn_id):
            its = self.share(other)
            clash = its.writes & mine.locks or (frozen and mine.writes & its.locks)
            if other != txn_id and clash:
                met = messages.meet(txn_id, other, decided=decided)
                found = met if found is not Meeting.AGAIN else found
        return found

    def bars(self, txn_id: bytes) -> bool:
        """Whether a commit here would break a frozen lock."""
        mine = self.share(txn_id)
        return any(
            mine.writes & self.share(other).locks
            for other, _, frozen in self.others(txn_id)
            if frozen and other != txn_id
        )

    # -- messages --------------------------------------------------------------------------------------

    def send(self, to: int, message: Any) -> None:
        self.out.append((to, message))

    def receive(self, sender: int, payload: Any, mac: bytes | None, brought: int) -> None:
        txn = self.world.txns[payload.txn_id]
        if not messages.is_genuine(txn.secret, sender, self.number, encode(payload), mac):
            self.world.forged += 1
            return
        try:
            self.clock = messages.raised(self.clock, brought, self.now_us, SKEW_MS)
        except ClockSkew:
            if not isinstance(payload, r.Decide):
                return
        try:
            getattr(self, f"on_{type(payload).__name__.lower()}")(payload, sender)
        except InvariantViolation as error:
            raise Bad(f"a message that can't be: {error}") from error

    def on_enlist(self, message: r.Enlist, sender: int) -> None:
        row = self.rows.get(message.txn_id)
        if row is None or not coordinator.may_enlist(row, self.pending.get(message.txn_id)):
            return
        partners = self.partners[message.txn_id]
        partners.setdefault(sender, r.PartitionRow((message.scope,)))
        self.send(sender, r.Enlisted(message.txn_id, message.scope, head_of(row)))

    def on_enlisted(self, message: r.Enlisted, sender: int) -> None:
        if message.txn_id not in self.rows:
            self.rows[message.txn_id] = row_of(message.txn_id, message.head)
            self.its[message.txn_id] = r.CoordinatorRow(0)

    def on_askvote(self, ask: r.AskVote, sender: int) -> None:
        txn_id = ask.txn_id
        action = participant.asked(self.rows.get(txn_id), self.its.get(txn_id), ask)
        if action in (Action.VOTE, Action.REOPEN) and txn_id not in self.rows:
            self.rows[txn_id] = row_of(txn_id, ask.head)
        if action is Action.REOPEN:
            self.its[txn_id] = participant.reopened(self.its.get(txn_id), ask)
            self.values.pop(txn_id, None)
            self.put(txn_id, state="OPEN")
            self.answer(txn_id, "NO")
        elif action is Action.ANSWER:
            self.answer(txn_id, "NO")
        elif action is Action.VOTE:
            self.vote(txn_id, ask)
        elif action is Action.PROMISE:
            self.promise(txn_id, ask)
        elif action is Action.IMPOSSIBLE:
            raise Bad(
                f"a question that no coordinator asks: {ask.asks} in {self.rows[txn_id].state}"
            )

    def vote(self, txn_id: bytes, ask: r.AskVote) -> None:
        self.its[txn_id] = participant.next_promise(
            self.its.get(txn_id), ask._replace(asks="VOTE"), staged=True, fresh=0
        )
        wanted = sum(one.sequence for one in ask.receipts)
        met = self.meets(txn_id)
        if self.world.txns[txn_id].long and self.indexed.get(txn_id, 0) < wanted:
            self.answer(txn_id, "WAITING")
        elif self.broken(txn_id):
            self.answer(txn_id, "NO", r.Refusal("LocksBroken", ""))
        elif met is not None:
            self.answer(txn_id, "WAITING" if met is Meeting.WAIT else "AGAIN")
        else:
            self.values[txn_id] = self.added(self.share(txn_id))
            self.put(txn_id, state="PREPARED")
            self.its[txn_id] = self.its[txn_id]._replace(staged=not self.share(txn_id).big)
            self.promise(txn_id, ask)

    def promise(self, txn_id: bytes, ask: r.AskVote) -> None:
        its = self.its[txn_id]
        fresh = self.next()
        # A prepare timestamp may be ahead of the clock (H9).
        ahead_us = self.now_us + 1000 * (0, 4, 40)[txn_id[-1] % 3]
        fresh = hybrid_time.next_after(fresh - 1, ahead_us)
        self.its[txn_id] = participant.next_promise(its, ask, staged=its.staged, fresh=fresh)
        self.hold(txn_id)
        self.answer(txn_id, "YES")

    def answer(self, txn_id: bytes, said: r.VoteAnswer, error: r.Refusal | None = None) -> None:
        its = self.its.get(txn_id, r.CoordinatorRow(0))
        self.send(home_of(txn_id), participant.vote(txn_id, self.number, its, said, error=error))

    def on_decide(self, message: r.Decide, sender: int) -> None:
        txn_id, row = message.txn_id, self.rows.get(message.txn_id)
        action = participant.decided(row, message)
        if action is Action.IMPOSSIBLE:
            raise Bad(f"{message.verdict} in state {row and row.state}")
        if action is Action.ABORT:
            self.rows.setdefault(txn_id, row_of(txn_id, message.head))
            self.put(txn_id, state="ABORTED")
        elif action is Action.STAGE:
            self.put(txn_id, state="FINALIZE_IN_PROGRESS")
            self.begin_staging(txn_id)
        elif action is Action.MERGE:
            self.clock = max(self.clock, message.timestamp)
            self.put(txn_id, state="FINALIZE_IN_PROGRESS", commit_timestamp=message.timestamp)
        if action in (Action.ABORT, Action.DONE):
            self.send(sender, r.Done(txn_id, self.number, 0, 0, 0, ""))

    def begin_staging(self, txn_id: bytes) -> None:
        if self.share(txn_id).big:
            self.staging.setdefault(txn_id, self.world.rnd.randint(1, 6))
            self.world.chunks.append(txn_id)
        else:
            self.its[txn_id] = self.its[txn_id]._replace(staged=True)

    def on_vote(self, vote: r.Vote, sender: int) -> None:
        if vote.txn_id in self.rows and coordinator.counts(self.votes.get(vote.txn_id), vote):
            self.answered[vote.txn_id][sender] = vote

    def on_done(self, message: r.Done, sender: int) -> None:
        partners = self.partners.get(message.txn_id)
        if partners is not None:
            partners[sender] = partners[sender]._replace(done=True)

    # -- commands --------------------------------------------------------------------------------------

    def command(self, what: str, txn_id: bytes, *more: Any) -> None:
        getattr(self, f"do_{what}")(txn_id, *more)

    def do_begin(self, txn_id: bytes) -> None:
        self.rows.setdefault(txn_id, row_of(txn_id, None, self.world.txns[txn_id].secret))
        self.partners.setdefault(txn_id, {})

    def do_touch(self, txn_id: bytes) -> None:
        row = self.rows.get(txn_id)
        if row is None:
            scope = f"s{self.number}"
            self.send(home_of(txn_id), r.Enlist(txn_id, self.number, scope, txn_id, "open"))
        elif row.state == "OPEN":
            self.world.touched.add((txn_id, self.number))

    def do_write(self, txn_id: bytes, number: int) -> None:
        """Index an event of a journal. It was acknowledged."""
        row = self.rows[txn_id]
        if row.state == "OPEN" or self.keeps(row):
            self.indexed[txn_id] = max(self.indexed.get(txn_id, 0), number)
        elif row.state not in ("ABORTED", "FINALIZE_IN_PROGRESS", "COMMITTED"):
            raise Bad("an acknowledged event was rejected before the decision")

    def keeps(self, row: r.TxnRow) -> bool:
        """What writers add to a prepared part is kept until the decision (C5)."""
        return row.state == "PREPARED"

    def do_commit(self, txn_id: bytes, names: dict[int, int]) -> None:
        """Commit across. A one-shot brings its participants along, a long transaction has enlisted them."""
        txn = self.world.txns[txn_id]
        if txn_id not in self.rows:
            if txn.long:
                return
            self.do_begin(txn_id)
            self.partners[txn_id] = {other: r.PartitionRow((f"s{other}",)) for other in txn.others}
        if self.rows[txn_id].state != "OPEN" or txn_id in self.pending:
            return
        if names.keys() - self.partners[txn_id].keys():
            return
        deadline_ms = self.world.now_ms + self.world.rnd.randint(40, 400)
        self.pending[txn_id] = r.PendingCommitRow((), False, (), None, None, deadline_ms)
        self.named[txn_id] = names
        self.ask(txn_id, "TIMESTAMP")

    def do_one_shot(self, txn_id: bytes) -> None:
        if txn_id not in self.alone and txn_id not in self.rows:
            self.alone.append(txn_id)

    def do_stage(self, txn_id: bytes) -> None:
        """Begin a staged merge of this control partition alone, if its locks hold and can be frozen."""
        if txn_id in self.rows or txn_id in self.staging or self.broken(txn_id):
            return
        if self.meets(txn_id) is None:
            self.staging[txn_id] = self.world.rnd.randint(2, 8)

    def do_abort(self, txn_id: bytes) -> None:
        row = self.rows.get(txn_id)
        if row is None:
            self.do_begin(txn_id)
        if self.rows[txn_id].state == "OPEN":
            self.pending.pop(txn_id, None)
            self.put(txn_id, state="ABORT_IN_PROGRESS")

    # -- what a coordinator does -----------------------------------------------------------------------

    def ask(self, txn_id: bytes, asks: r.Asks) -> None:
        """Log the next round of votes: former votes do not count any more."""
        self.votes[txn_id] = coordinator.raise_round(self.votes.get(txn_id), asks)
        self.answered[txn_id].clear()
        self.first_ms.pop(txn_id, None)

    def coordinate(self, txn_id: bytes) -> None:
        row, votes = self.rows[txn_id], self.votes.get(txn_id)
        undecided = row.state == "OPEN" and txn_id in self.pending
        later = row.state == "FINALIZE_IN_PROGRESS" and not row.commit_timestamp
        if votes is None or not (undecided or later):
            return
        if undecided and votes.asks == "REOPEN":
            if self.world.now_ms >= self.again_ms.get(txn_id, 0):
                self.ask(txn_id, "TIMESTAMP")
            return
        answered = self.answered[txn_id]
        if any(one.timestamp for one in answered.values()):
            self.first_ms.setdefault(txn_id, self.world.now_ms)
        step = coordinator.next_step(
            votes.asks,
            self.partners[txn_id],
            answered,
            late=undecided and self.is_late(txn_id),
            held_ms=self.world.now_ms - self.first_ms.get(txn_id, self.world.now_ms),
            decided=later,
        )
        if step in (Step.DECIDE, Step.DECIDE_LATER) and undecided:
            step = self.own(txn_id, step)
        self.carry_out(txn_id, step)

    def is_late(self, txn_id: bytes) -> bool:
        return not self.world.calm and self.world.now_ms >= self.pending[txn_id].deadline_ms

    def own(self, txn_id: bytes, step: Step) -> Step:
        """The coordinator's own part votes last (L4)."""
        if self.broken(txn_id):
            return Step.REFUSE
        met = self.meets(txn_id)
        if met is Meeting.WAIT:
            held = self.world.now_ms - self.first_ms.get(txn_id, self.world.now_ms)
            return Step.TAKE_BACK if held >= coordinator.HELD_MS else Step.WAIT
        return step if met is None else Step.AGAIN

    def carry_out(self, txn_id: bytes, step: Step) -> None:
        if step is Step.TIMESTAMPS:
            self.votes[txn_id] = coordinator.with_timestamps(self.votes[txn_id])
        elif step is Step.TAKE_BACK:
            self.ask(txn_id, "VOTE")
        elif step in (Step.AGAIN, Step.REFUSE):
            self.ask(txn_id, "REOPEN")
            self.again_ms[txn_id] = self.world.now_ms + self.world.rnd.randint(5, 30)
            if step is Step.REFUSE:
                del self.pending[txn_id]
                self.world.refused += 1
                if not self.world.txns[txn_id].long:
                    self.put(txn_id, state="ABORT_IN_PROGRESS")
        elif step is Step.DECIDE_LATER:
            self.values[txn_id] = self.added(self.share(txn_id))
            self.ask(txn_id, "VOTE")
            self.put(txn_id, state="FINALIZE_IN_PROGRESS")
        elif step is Step.DECIDE:
            at = coordinator.commit_timestamp(self.answered[txn_id], self.next())
            self.clock = max(self.clock, at)
            if self.rows[txn_id].state == "OPEN":
                self.values[txn_id] = self.added(self.share(txn_id))
            self.put(txn_id, state="FINALIZE_IN_PROGRESS", commit_timestamp=at)
            self.world.told_decided.setdefault(txn_id, at)

    def finish(self, txn_id: bytes) -> None:
        row, votes = self.rows[txn_id], self.votes.get(txn_id)
        partners = self.partners[txn_id]
        if row.state == "ABORT_IN_PROGRESS" and all(one.done for one in partners.values()):
            self.put(txn_id, state="ABORTED")
        elif (
            row.state == "FINALIZE_IN_PROGRESS"
            and row.commit_timestamp
            and votes is not None
            and coordinator.is_over(row, votes, partners)
        ):
            self.put(txn_id, state="COMMITTED")
            self.world.told.setdefault(txn_id, row.commit_timestamp)

    def due(self) -> Iterator[tuple[int, Any]]:
        """The messages that follow from the rows."""
        for txn_id, partners in self.partners.items():
            row, votes = self.rows[txn_id], self.votes.get(txn_id)
            for partition, what in coordinator.due(row, votes, partners, self.answered[txn_id]):
                yield partition, self.message(row, votes, partition, what)

    def message(self, row: r.TxnRow, votes: r.VotesRow | None, partition: int, what: str) -> Any:
        head = head_of(row)
        if what == "ask" and votes is not None:
            count = self.named.get(row.txn_id, {}).get(partition, 0)
            taken = (r.Receipt(row.txn_id, 1, count, True, ()),)
            return r.AskVote(row.txn_id, head, votes.votes_round, votes.asks, True, taken)
        if what == "abort":
            return r.Decide(row.txn_id, head, "ABORT", 0, "")
        at = row.commit_timestamp if what == "commit" else 0
        return r.Decide(row.txn_id, head, "COMMIT", at, "")

    # -- merges ----------------------------------------------------------------------------------------

    def added(self, share: Share) -> dict[Row, int]:
        """The numbers that changed rows get, from the rows as they are now."""
        return {row: self.value(*row) + by for row, by in share.adds.items()}

    def value(self, stream: str, row: str) -> int:
        return next((m.rows[row] for m in reversed(self.merged[stream]) if row in m.rows), 0)

    def append(self, txn_id: bytes, at: int, values: dict[Row, int]) -> None:
        share = self.share(txn_id)
        for stream in share.streams:
            log = self.merged[stream]
            if log and (log[-1].timestamp, log[-1].txn_id) >= (at, txn_id):
                raise Bad("order: a stream's merges are not in the order of timestamps")
            puts = {row: value for (s, row), value in share.puts.items() if s == stream}
            adds = {row: value for (s, row), value in values.items() if s == stream}
            log.append(Merge(at, txn_id, puts | adds))
            self.newest[stream] = at

    def merge(self) -> None:
        """Merge what is decided, in the order of timestamps."""
        again = True
        while again:
            again = False
            for entry in sorted(set(self.held.on())):
                row = self.rows.get(entry.txn_id)
                if row is None or not entry.fixed:
                    continue
                if self.held.may_go(
                    entry.timestamp, entry.txn_id, self.share(entry.txn_id).streams
                ):
                    self.append(entry.txn_id, entry.timestamp, self.values.get(entry.txn_id, {}))
                    self.over(entry.txn_id)
                    again = True
        for txn_id, row in list(self.rows.items()):
            decided = row.state == "FINALIZE_IN_PROGRESS" and row.commit_timestamp
            if decided and not self.is_merged(txn_id) and not self.share(txn_id).streams:
                self.over(txn_id)

    def over(self, txn_id: bytes) -> None:
        if txn_id in self.partners:
            self.votes[txn_id] = self.votes[txn_id]._replace(own_merged=True)
            self.hold(txn_id)
        else:
            self.put(txn_id, state="COMMITTED")
            self.send(home_of(txn_id), r.Done(txn_id, self.number, 0, 0, 0, ""))

    def one_shots(self) -> None:
        """Merge the commits of this control partition alone that may go."""
        for txn_id in self.held.expire(self.world.now_ms):
            if txn_id in self.alone:
                self.refuse(txn_id)
        for txn_id in list(self.alone):
            share = self.share(txn_id)
            if self.broken(txn_id) or (self.held.of(txn_id) is None and self.bars(txn_id)):
                self.refuse(txn_id)
                continue
            at = self.held.admit(
                txn_id, share.streams, share.tables, self.world.now_ms, self.next()
            )
            if at is not None:
                self.alone.remove(txn_id)
                self.commit_alone(txn_id, at)
            else:
                self.note_idle(txn_id, share)
        for txn_id in [
            one for one in self.staging if one not in self.rows and not self.staging[one]
        ]:
            share = self.share(txn_id)
            at = self.held.admit(
                txn_id, share.streams, share.tables, self.world.now_ms, self.next()
            )
            if at is not None:
                del self.staging[txn_id]
                self.commit_alone(txn_id, at)

    def note_idle(self, txn_id: bytes, share: Share) -> None:
        """A one-shot waits only for streams that it touches, and not for what waits for too long itself."""
        ahead = [e for e in self.held.on([*share.streams, *share.tables]) if e.txn_id != txn_id]
        if any(0 <= e.since_ms < self.world.now_ms - 2 * holds.KEPT_MS for e in ahead):
            raise Bad("chain: a commit waits for one that has waited for long")
        if not ahead:
            raise Bad("stopped: a one-shot waits, and its streams are free")

    def commit_alone(self, txn_id: bytes, at: int) -> None:
        values = self.added(self.share(txn_id))
        row = row_of(txn_id, None, self.world.txns[txn_id].secret)
        self.rows[txn_id] = row._replace(state="COMMITTED", commit_timestamp=at)
        self.append(txn_id, at, values)
        self.world.told.setdefault(txn_id, at)

    def refuse(self, txn_id: bytes) -> None:
        """`NotReady`, or `Revalidate`: the client sends it again, unless what it read has changed."""
        self.alone.remove(txn_id)
        self.held.give_up(txn_id)
        if not self.broken(txn_id):
            self.world.commands[self.number].append(("one_shot", txn_id))

    # -- a pass ----------------------------------------------------------------------------------------

    def step(self, incoming: list[Any], commands: list[Any], asks: list[Ask]) -> None:
        for message in incoming:
            self.receive(*message)
        self.merge()
        for command in commands:
            self.command(*command)
        for txn_id, left in list(self.staging.items()):
            self.staging[txn_id] = max(0, left - 1)
            if left <= 1 and txn_id in self.rows:
                del self.staging[txn_id]
                self.its[txn_id] = self.its[txn_id]._replace(staged=True)
        for txn_id in list(self.partners):
            self.coordinate(txn_id)
        self.merge()
        for txn_id in list(self.partners):
            self.finish(txn_id)
        self.one_shots()
        for ask in asks:
            self.safe(ask)
        for stream, at in self.newest.items():
            self.world.records[stream] = self.cut(at)
        self.newest.clear()
        if self.clock > hybrid_time.from_us(self.now_us + 4 * SKEW_MS * 1000):
            raise Bad("clock: hybrid time runs away")

    def cut(self, at: int) -> int:
        """`CommitRecord.safe` of a record at a timestamp (T4)."""
        return min(at, self.held.safe_time(self.clock))

    def safe(self, ask: Ask) -> None:
        """Answer `SafeTime` of now, whose time is fixed by that, or of a time."""
        streams = [s for s in ask.streams if self.world.part_of[s] == self.number]
        if ask.at is None:
            self.clock = max(self.clock, hybrid_time.from_us(self.now_us))
            ask.answers[self.number] = self.clock
        elif self.clock >= ask.at or ask.at <= hybrid_time.from_us(self.now_us + SKEW_MS * 1000):
            self.clock = max(self.clock, ask.at)
            if self.held.safe_time(self.clock, streams) >= ask.at:
                ask.ready.add(self.number)

    def report(self, stream: str) -> int | None:
        """The time through which a table is reported to be complete; None: it is held, and left out (T3)."""
        return None if any(self.held.on([stream])) else self.clock


def head_of(row: r.TxnRow) -> r.TxnHead:
    return r.TxnHead(row.scope, row.owner, 1000, 0, row.secret or b"", 0)


def row_of(txn_id: bytes, head: r.TxnHead | None, secret: bytes = b"") -> r.TxnRow:
    secret = secret if head is None else head.secret
    return born("begin", txn_id, 0, scope=f"s{home_of(txn_id)}", owner="open", secret=secret)


def home_of(txn_id: bytes) -> int:
    return int.from_bytes(txn_id[:2], "big")
