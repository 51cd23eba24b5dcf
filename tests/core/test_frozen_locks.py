"""Frozen locks: who would break one waits for the end of a transaction that is staged; nobody else does."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions.merge import runs_to_stage
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.journal_index import extents_by_place
from anabranch.core.locks import frozen
from anabranch.core.locks.table_writes import FEW_KEYS, Keys
from anabranch.protocol.schemas import records as r
from tests.core.test_registered_locks import Long
from tests.core.test_table_locks import PLAIN, A, B

BIG = 2_000


class Big(Long):
    """Transactions of more than a chunk: T, and those that tests open."""

    def __init__(self) -> None:
        super().__init__(chunk_bytes=1_000)

    def writes(self, label: str, table: str, *keys: bytes, known: bool = True, **given: Any) -> str:
        """Its writes come to a journal."""
        self.touch(label, table)
        digest = Keys.of(keys).to_bytes() if known else b""
        self.write(label, label, table, size=given.get("size", BIG), digest=digest)
        return label

    def reads(self, label: str, *keys: bytes, table: str = A, span: Any = None) -> None:
        self.locked(*keys, label=label, writer=label, table=table, span=span)

    def commits(self, label: str) -> str:
        """Ask for its commit, and let it get as far as it can."""
        self.finish(label, label)
        self.commit(label)
        for _ in range(4):
            self.wait(60)
            self.grow()
        return self.state_of(label)

    def new(self, label: str) -> str:
        self.new_id(label)
        self.open(label)
        return label

    def grow(self) -> None:
        for stream, row in self.state.streams.items():
            if row.wanted_partitions > row.partitions:
                turn = self.new_turn()
                partitions_added(turn, stream, row.wanted_partitions)
                self.close(turn)
        self.wait(60)

    def carry(self, label: str) -> str:
        """A carrier puts all of it to its place; its last round comes, and rounds of those that waited."""
        txn_id = self.id(label)
        txn = self.state.open[txn_id]
        extents = extents_by_place(txn.pending.writers if txn.pending is not None else ())
        for (stream, number), row in txn.staged_merges.items():
            count = sum(run.records for run in runs_to_stage(self.index, row, extents))
            done = replace(row, cursor=1 << 40, first=0, end=count, count=count, done=True)
            self.log_rows([(k.staged_merge_key(txn_id, stream, number), done)])
        for _ in range(8):
            self.wait(300)
        return self.state_of(label)

    def state_of(self, label: str) -> str:
        """FROZEN, or a transaction's state."""
        return "FROZEN" if self.id(label) in self.state.locks.frozen else self.row(label).state

    def frozen(self, label: str, *read: bytes, wrote: tuple[bytes, ...] = (b"big",)) -> None:
        if label != "T":
            self.new(label)
        self.reads(label, *read)
        self.writes(label, B, *wrote)
        assert self.commits(label) == "FROZEN"


Ask = Callable[[Big, bytes], Any]


def one_shot(bank: Big, key: bytes) -> bool:
    shot = r.OneShot(bank.id("shot"), "nyc", None, (r.Event(A, -1, key, b"v", (), -1),), None, ())
    bank.ask("shot", shot)
    (result,) = [result for to, result in bank.said if to.correlation_id == b"shot"]
    assert isinstance(result, r.Outcome) or result.code == "NotReady"
    return isinstance(result, r.Outcome)


def journal(bank: Big, key: bytes) -> bool:
    if bank.state.txn_row(bank.id("J")) is None:
        bank.new("J")
        bank.writes("J", A, key, size=10)
        bank.commits("J")
    bank.wait(60)
    return bank.state_of("J") == "COMMITTED"


def plain_write(bank: Big, key: bytes) -> bool:
    if not bank.plain_runs:
        bank.write_plainly(A, digest=Keys.of([key]).to_bytes())
    bank.wait(60)
    return not bank.index.plain_waiting(bank.state)


def big(bank: Big, key: bytes) -> bool:
    if bank.state.txn_row(bank.id("C")) is None:
        bank.new("C")
        bank.writes("C", A, key)
        bank.commits("C")
    bank.wait(60)
    return bank.state_of("C") == "FROZEN" or bank.state_of("C") == "COMMITTED"


WAYS: dict[str, Ask] = {f.__name__: f for f in (one_shot, journal, plain_write, big)}


@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_who_would_break_a_frozen_lock_waits_and_gets_through(way: str, lead: bool | None) -> None:
    for key in (b"read", b"other"):
        bank = Big()
        bank.frozen("T", b"read")
        if lead is not None:
            bank.lead(keep_table=lead)
            bank.wait(60)
        for _ in range(3):
            assert WAYS[way](bank, key) == (key == b"other")
        assert bank.state_of("T") == "FROZEN"
        bank.now_ms += 100
        assert bank.carry("T") == "COMMITTED"
        assert WAYS[way](bank, key)
        assert bank.memory.merging.waiting.as_dict() == {}


@pytest.mark.parametrize("way", WAYS)
def test_ranges_and_writes_that_are_not_known(way: str) -> None:
    bank = Big()
    bank.reads("T", span=(b"a", b"m"))
    bank.writes("T", B, b"x")
    assert bank.commits("T") == "FROZEN"
    assert not WAYS[way](bank, b"k")
    assert one_shot(bank, b"z") or way == "one_shot"


def test_a_waiting_plain_write_holds_later_ones_of_its_partition_alone() -> None:
    bank = Big()
    bank.frozen("T", b"read")
    for key in (b"before", b"read", b"behind"):
        bank.write_plainly(A, digest=Keys.of([key]).to_bytes())
    bank.write_plainly(A, partition=1, digest=Keys.of([b"beside"]).to_bytes())
    bank.wait(60)
    assert bank.plain() == f"{A} 0[0-1) 1[0-1)"
    bank.write_plainly(A, partition=1, digest=b"")
    bank.wait(60)
    assert bank.plain() == "", "its keys are not known: it waits, too"
    assert bank.carry("T") == "COMMITTED"
    assert not bank.index.plain_waiting(bank.state)


@pytest.mark.parametrize("known", [True, False])
def test_one_of_two_that_read_each_others_rows_commits(known: bool) -> None:
    bank = Big()
    bank.new("U")
    bank.reads("T", b"a", table=A)
    bank.reads("U", b"b", table=B)
    bank.writes("T", B, b"b", known=known)
    bank.writes("U", A, b"a", known=known)
    assert bank.commits("T") == "FROZEN"
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    assert bank.carry("T") == "COMMITTED"
    if known:
        assert bank.state_of("U") == "ABORTED"
    else:
        assert bank.end("U") == "Revalidate", "a doubt costs a look"


@pytest.mark.parametrize("sided", ["its writes", "its locks"])
def test_who_would_break_a_frozen_one_s_locks_or_be_broken_by_it_is_not_frozen(sided: str) -> None:
    """F1, frozen, writes what F2 read: were F2 frozen, F1 could neither commit nor abort."""
    bank = Big()
    bank.new("U")
    if sided == "its writes":
        bank.reads("T", b"a", table=A)
        bank.writes("T", B, b"x")
        bank.writes("U", A, b"a")
    else:
        bank.writes("T", B, b"b")
        bank.reads("U", b"b", table=B)
        bank.writes("U", A, b"y")
    assert bank.commits("T") == "FROZEN"
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    assert bank.carry("T") == "COMMITTED"
    bank.grow()
    assert bank.state_of("U") == ("FROZEN" if sided == "its writes" else "ABORTED")


@pytest.mark.parametrize("read", [0, 1])
def test_a_new_leader_freezes_no_commit_before_it_has_read_what_frozen_ones_wrote(
    read: int,
) -> None:
    """T, frozen, wrote two runs: with ``read`` of them known, nothing tells that it breaks a lock of U."""
    bank = Big()
    bank.new("U")
    bank.writes("T", B, b"x")
    bank.writes("T", B, b"b")
    bank.reads("U", b"b", table=B)
    bank.writes("U", PLAIN, b"y")
    assert bank.commits("T") == "FROZEN"
    bank.lead(keep_table=False)
    end, runs = bank.ends[B, 0], bank.journals[B, 0]
    bank.ends[B, 0], bank.journals[B, 0] = end - 2 + read, runs[:read]
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    bank.ends[B, 0], bank.journals[B, 0] = end, runs
    bank.wait(60)
    assert bank.carry("T") == "COMMITTED"
    assert bank.state_of("U") == "ABORTED"


def away(bank: Big, *streams: str) -> None:
    """These streams wait, no other one does."""
    bank.memory.waiting = dict.fromkeys(streams, "a partition has no leader")


def force(bank: Big, label: str = "T") -> str:
    return bank.ask("force", r.Force(bank.id(label), ""))


def test_an_operator_ends_a_frozen_one_that_waits_for_one_of_its_streams() -> None:
    bank = Big()
    bank.writes("T", PLAIN, b"p", size=10)
    bank.frozen("T", b"read")
    assert force(bank) == "IllegalState"
    away(bank, PLAIN)
    bank.wait(60)
    since_ms = bank.now_ms
    assert not one_shot(bank, b"read")
    bank.now_ms += 3_600_000
    assert not one_shot(bank, b"read"), "it waits with the merge"
    bank.get("T")
    assert bank.result.reason == (
        "its commit is decided, but its merge makes no progress: nyc/plain: a partition has no leader; "
        f"`anabranch txn force {bank.id('T').hex()}` ends it"
    )
    bank.ask("describe", r.ListOpen(None, bank.id("T"), 1))
    (info,) = bank.result.transactions
    assert info.waits == r.WaitInfo(
        "stream", PLAIN, f"{PLAIN}: a partition has no leader", bank.now_ms - since_ms
    )
    assert (info.locks, info.frozen, set(info.journals)) == (1, True, {B, PLAIN})
    assert info.ends == f"anabranch txn force {bank.id('T').hex()}"
    ended = "T ABORTED (forced by an operator: its merge made no progress: nyc/plain: a partition has no leader)"
    assert force(bank) == f"[commit T] TransactionAborted; {ended}"
    assert one_shot(bank, b"read")
    assert bank.state.retired(B) == set(), "no chunk was carried yet"


def test_big_commits_pass_one_that_waits_for_another_stream() -> None:
    """Partitions that are let go soon are waited for; new ones are added where a merge keeps its own for long."""
    bank = Big()
    bank.writes("T", PLAIN, b"p", size=10)
    bank.frozen("T")
    for label in "UVW":
        bank.new(label)
        bank.writes(label, B, label.encode())
    assert bank.commits("V") == "COMMIT_IN_PROGRESS", "T goes on, and has the only idle partition"
    away(bank, PLAIN)
    bank.wait(60)
    bank.grow()
    assert (bank.state_of("V"), bank.state.streams[B].partitions) == ("FROZEN", 4)
    assert bank.carry("V") == "COMMITTED"
    away(bank)
    assert bank.commits("W") == "FROZEN", "V's partition is idle now"
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    assert bank.carry("T") == bank.carry("W") == "COMMITTED"
    bank.wait(60)
    assert bank.carry("U") == "COMMITTED"
    assert bank.state.streams[B].partitions == 4


def test_who_reads_nothing_of_a_journal_that_is_not_read_freezes() -> None:
    """After a takeover without the folder the journal of the stream in trouble can't be read."""
    for table, state in ((A, "FROZEN"), (B, "COMMIT_IN_PROGRESS")):
        bank = Big()
        bank.writes("T", A, b"x")
        bank.frozen("T", b"read")
        end, runs = bank.ends[B, 0], bank.journals[B, 0]
        bank.lead(keep_table=False)
        bank.ends[B, 0], bank.journals[B, 0] = 0, []
        away(bank, B)
        bank.new("U")
        bank.reads("U", b"else", table=table)
        bank.writes("U", PLAIN, b"y")
        assert bank.commits("U") == state
        bank.ends[B, 0], bank.journals[B, 0] = end, runs
        away(bank)
        bank.wait(2_000)
        assert bank.carry("T") == "COMMITTED"


def test_a_frozen_one_is_not_in_doubt() -> None:
    """A successor has not seen the big commit; but had that been able to break a lock, it would have waited."""
    bank = Big()
    bank.reads("T", span=(b"1", b"2"))
    bank.writes("T", B, b"x")
    assert bank.commits("T") == "FROZEN"
    assert bank.put(*((A, b"%03d" % n) for n in range(FEW_KEYS + 1))) == "COMMITTED"
    bank.lead()
    bank.wait(60)
    assert bank.carry("T") == "COMMITTED"


def test_locks_are_validated_before_they_freeze() -> None:
    bank = Big()
    bank.lock_reads(b"k", writer="T")
    bank.writes("T", B, b"x")
    bank.finish("T", "T")
    assert bank.commit("T") == "revalidate"
    bank.validate(writer="T")
    assert bank.commits("T") == "FROZEN"


def test_a_doubt_between_the_decision_and_the_first_chunk() -> None:
    bank = Big()
    bank.reads("T", b"k")
    bank.writes("T", B, b"x")
    bank.finish("T", "T")
    bank.turn(("commit", bank.committing("T")))
    bank.write_plainly(A)
    bank.wait(60)
    assert bank.state_of("T") == "COMMIT_IN_PROGRESS"
    bank.write_plainly(A, digest=Keys.of([b"k"]).to_bytes())
    bank.wait(60)
    assert bank.state_of("T") == "ABORTED", "until the first chunk it can be broken"


def test_who_waits_for_long_is_not_passed_by_later_readers() -> None:
    """T6: readers whose locks overlap in time would keep a writer out for ever."""
    bank = Big()
    bank.frozen("T", b"read")
    assert not one_shot(bank, b"read")
    bank.new("U")
    bank.reads("U", b"read", table=A)
    bank.writes("U", PLAIN, b"x")
    assert bank.commits("U") == "FROZEN", "it has not waited for long"
    assert bank.carry("T") == "COMMITTED"
    assert not one_shot(bank, b"read")
    bank.wait(frozen.BARS_MS)
    assert not one_shot(bank, b"read")
    bank.new("V")
    bank.reads("V", b"read", table=A)
    bank.writes("V", B, b"y")
    assert bank.commits("V") == "COMMIT_IN_PROGRESS"
    bank.new("W")
    bank.reads("W", b"else", table=A)
    bank.writes("W", B, b"z")
    assert bank.commits("W") == "FROZEN", "only that lock is barred"
    assert bank.carry("U") == "COMMITTED"
    assert one_shot(bank, b"read")
    assert bank.carry("W") == "COMMITTED"
    assert bank.state_of("V") == "ABORTED"


def test_one_shots_that_are_not_sent_again_bar_no_reader() -> None:
    bank = Big()
    bank.frozen("T", b"read")
    assert not one_shot(bank, b"read")
    bank.wait(frozen.HEARD_MS)
    bank.new("U")
    bank.reads("U", b"read", table=A)
    bank.writes("U", PLAIN, b"x")
    assert bank.commits("U") == "FROZEN"


def test_random_transactions_come_to_an_end_and_no_read_is_broken() -> None:
    """Big and small ones that read and write few rows, takeovers in between: nobody waits for ever."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    keys = [b"%d" % i for i in range(5)]
    frozen_ones = 0
    for _ in range(12):
        bank = Big()
        written: dict[tuple[str, bytes], list[str]] = {}
        plans: dict[str, tuple[Any, Any]] = {}
        for n in range(5):
            label = f"X{n}"
            bank.new(label)
            reads = [(draw.choice((A, B)), draw.choice(keys)) for _ in range(draw.randrange(3))]
            writes = [(draw.choice((A, B)), draw.choice(keys)) for _ in range(draw.choice((1, 2)))]
            for table, key in reads:
                bank.reads(label, key, table=table)
            for table, key in writes:
                bank.writes(label, table, key, size=draw.choice((10, BIG)))
            plans[label] = reads, writes
        for label in draw.sample(sorted(plans), len(plans)):
            if bank.state_of(label) == "OPEN":
                bank.commits(label)
            if draw.random() < 0.2:
                bank.lead(keep_table=draw.random() < 0.5)
        for _ in range(40):
            bank.grow()
            for label in plans:
                if bank.state_of(label) == "FROZEN" and draw.random() < 0.5:
                    frozen_ones += 1
                    bank.carry(label)
        states = {label: bank.state_of(label) for label in plans}
        assert set(states.values()) <= {"COMMITTED", "ABORTED"}, f"seed {seed}: {states}"
        order = sorted(
            (bank.row(label).commit_timestamp, label)
            for label in plans
            if states[label] == "COMMITTED"
        )
        for _, label in order:
            reads, writes = plans[label]
            for row in reads:
                assert written.get(row, [label])[-1] == label, f"seed {seed}: {label} {row}"
            for row in writes:
                written.setdefault(row, []).append(label)
    assert frozen_ones > 5


def test_locks_are_listed_with_the_transactions_they_wait_for() -> None:
    bank = Big()
    bank.frozen("T", b"read", b"more")
    assert not one_shot(bank, b"read")
    bank.write_plainly(A, digest=Keys.of([b"more"]).to_bytes())
    bank.new("U")
    bank.reads("U", b"big", table=B)
    bank.writes("U", A, b"read")
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    bank.ask("list", r.ListTableLocks("nyc", 10))
    t, u, zeros = bank.id("T"), bank.id("U"), bytes(16)
    assert bank.result.locks == (
        r.TableLockInfo(t, A, 2, 0, True, False, (zeros, zeros), ()),
        r.TableLockInfo(u, B, 1, 0, False, False, (), (t,)),
    )
    assert bank.carry("T") == "COMMITTED"
    assert bank.state_of("U") == "ABORTED"
    bank.ask("list", r.ListTableLocks("nyc", 10))
    assert bank.result.locks == ()
