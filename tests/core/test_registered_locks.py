"""Registered locks: rows that each commit is held against, in the round that gives its timestamp."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.core.decisions import scopes
from anabranch.core.decisions.decide import decide
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.locks.table_writes import FEW_KEYS, Keys, fingerprint
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import from_s, to_s
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.core.tables import fold
from tests.core.test_table_locks import PLAIN, A, B, Bank, told

Ask = Callable[["Long"], str]


class Long(Bank):
    """A bank in which T is open at a snapshot; its handle is writer "w", another's "v"."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.at: dict[tuple[str, str], int] = {}
        self.open("T")

    def open(self, label: str, **given: Any) -> str:
        begin = replace(self.beginning(label, **given), snapshot=self.told()[0])
        return self.ask(f"begin {label}", begin)

    def lock_reads(
        self,
        *keys: bytes,
        label: str = "T",
        writer: str = "w",
        sequence: int | None = None,
        table: str = A,
        span: Any = None,
        read_from: tuple[r.WriterAt, ...] = (),
    ) -> str:
        """Register a set; ReadsLocked, or the refusal."""
        sequence = sequence or self.state.locks.of(self.id(label)).last(self.writer(writer)) + 1
        ranges = () if span is None else (r.LockedRange(*span),)
        points = tuple(sorted(map(fingerprint, keys)))
        locks = (r.TableLocks(table, 0, 0, points, ranges),) if points or ranges else ()
        command = r.LockReads(self.token(label), self.writer(writer), sequence, locks, read_from)
        self.ask(f"lock {label}", command)
        if isinstance(self.result, r.ReadsLocked):
            self.at[label, writer] = self.result.timestamp
        return told(self.result)

    def named(self, *tables: str, label: str = "T", lane: str | None = None) -> str:
        """The transaction reads these tables: ReadsLocked, or the refusal."""
        command = r.LockReads(self.token(label), self.writer("w"), 0, tables=tables)
        self.ask(f"name {label}", command, lane=lane)
        return told(self.result)

    def oldest(self, table: str = A) -> int:
        """The least time at which a table is promised to be readable."""
        self.describe(stream=table)
        return int(self.result.streams[0].oldest_snapshot)

    def blockers(self, table: str, lane: str = "admin") -> list[tuple[str, str, str]]:
        """What holds a table, and whose it is, as a lane is told, and the command that ends it."""
        with self.by(lane):
            self.describe(stream=table)
        return [(h.name, h.lane, h.ends) for h in self.result.streams[0].blockers]

    def validate(self, *, label: str = "T", writer: str = "w", through: int | None = None) -> str:
        """The client has looked, through the time that it was told last."""
        last = self.state.locks.of(self.id(label)).last(self.writer(writer))
        word = r.Validated(self.writer(writer), last, through or self.at[label, writer])
        self.ask(
            "validate", r.LockReads(self.token(label), self.writer(writer), 0, validated=(word,))
        )
        return told(self.result)

    def locked(self, *keys: bytes, **given: Any) -> None:
        """Register, and validate."""
        assert self.lock_reads(*keys, **given) == "ReadsLocked"
        who = {name: given[name] for name in ("label", "writer") if name in given}
        assert self.validate(**who) == "ReadsLocked"

    def wrote(self, key: bytes, stream: str = PLAIN, label: str = "T", writer: str = "w") -> None:
        """A write to the journal, and its receipt."""
        self.touch(label, stream)
        self.write(label, writer, stream)
        self.finish(label, writer)

    def end(self, label: str = "T", **given: Any) -> str:
        """Commit, with as many rounds as it takes: how it ended, or what it was answered."""
        self.commit(label, **given)
        for _ in range(4):
            if self.said:
                return told(self.said[-1][1])
            self.wait(10)
        return "nothing"

    def commit_to(self, table: str, key: bytes, label: str = "C", *, scaled: bool = False) -> None:
        """Another's commit by the journal, with a digest; ``scaled``: a rolling one."""
        self.new_id(label)
        self.begin(label)
        self.touch(label, table)
        if scaled:
            self.ask("scale", r.Scale(table, 1, (), ()))
        self.write(label, label, table, digest=Keys.of([key]).to_bytes())
        self.finish(label, label)
        assert self.end(label) == "COMMITTED"


def test_a_set_may_name_a_table_of_which_it_locks_nothing() -> None:
    """It outlives the sets that lock something, and ends with the transaction."""
    bank = Long()
    bank.locked(b"k")
    nothing = r.LockReads(bank.token("T"), bank.writer("w"), 2, (r.TableLocks(A, 0, 0, (), ()),))
    bank.ask("lock nothing", nothing)
    assert told(bank.result) == "ReadsLocked"
    bank.lead(keep_table=False)
    bank.ask("abort", r.Abort(bank.token("T"), "enough"))
    assert told(bank.result) == "ABORTED"
    assert (bank.state.locks.count, bank.put((A, b"k"))) == (0, "COMMITTED")


def test_a_table_that_is_given_up_is_not_locked_any_more() -> None:
    """Nor does a transaction outlive it that locked it before."""
    bank = Long()
    turn = bank.new_turn()
    give_up_stream(turn, A, "a test")
    bank.close(turn)
    assert bank.lock_reads(b"k") == "StreamLost"
    assert bank.put((B, b"k"), locks=(r.TableLocks(A, 0, 0, (1,), ()),)) == "StreamLost"
    assert bank.lock_reads(b"k", table=B) == "ReadsLocked"


def test_registered_validated_and_committed_through_takeovers() -> None:
    bank = Long()
    for number in range(10):
        bank.locked(*(b"k%d" % n for n in range(100 * number, 100 * number + 100)))
    assert bank.state.locks.count == 1000
    bank.wrote(b"x")
    for keep in (True, False):
        assert bank.put((A, b"other")) == "COMMITTED"
        bank.lead(keep_table=keep)
        assert bank.state.locks.count == 1000
    word = r.Validated(bank.writer("w"), 10, bank.at["T", "w"])
    commit = replace(bank.committing("T"), validated=(word,))
    bank.ask("commit", commit)
    bank.wait(10)
    bank.ask("again", commit)
    assert told(bank.result) == "COMMITTED", "a repeated one is answered; its locks are gone"
    assert bank.state.locks.count == 0
    assert not [key for key in bank.table.rows if key[17:18] == bytes((k.Entry.READ_LOCK,))]


WRITERS: dict[str, Callable[[Long], object]] = {
    "one-shot": lambda bank: bank.put((A, b"k7")),
    "journal": lambda bank: bank.commit_to(A, b"k7"),
    "rolling": lambda bank: bank.commit_to(A, b"k7", scaled=True),
    "plain write": lambda bank: (
        bank.write_plainly(A, digest=Keys.of([b"k7"]).to_bytes()),
        bank.turn(),
    ),
}


@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("how", [*WRITERS, "nothing"])
def test_what_breaks_a_lock_ends_the_transaction_in_that_round(how: str, lead: bool | None) -> None:
    bank = Long()
    bank.locked(*(b"k%d" % n for n in range(20)))
    bank.wrote(b"x")
    if lead is not None:
        bank.lead(keep_table=lead)
    if how in WRITERS:
        WRITERS[how](bank)
        row = bank.row("T")
        assert row.state == "ABORTED"
        assert row.broken is not None
        assert (row.broken.table, row.broken.timestamp) == (A, bank.state.tables[A].last)
        assert row.broken.key == b"k7"
        assert "k7" in row.reason
        assert bank.state.locks.count == 0
        bank.heartbeat("T")
        assert bank.result.not_open[0].broken == row.broken
    if lead is not None:
        bank.lead(keep_table=lead)
    assert bank.end() == ("ABORTED" if how in WRITERS else "COMMITTED")
    if how in WRITERS:
        assert bank.result.broken.key == b"k7"
    assert bank.end(asker="again") == bank.row("T").state


def test_who_only_reads_reads_on() -> None:
    bank = Long()
    bank.locked(b"k")
    assert bank.put((A, b"k")) == "COMMITTED"
    assert bank.row("T").state == "OPEN"
    assert bank.lock_reads(b"l") == "ReadsLocked"
    assert bank.result.broken.key == b"k"
    assert bank.state.locks.count == 1, "no more locks are kept of it"
    assert bank.touch("T", PLAIN) == "LocksBroken"
    bank.lead(keep_table=False)
    assert bank.touch("T", PLAIN) == "LocksBroken"
    assert bank.end() == "LocksBroken", "its client ends it, with what it read"


@pytest.mark.parametrize(
    ("span", "written", "state"),
    [
        ((b"a", b"m"), b"k", "ABORTED"),
        ((b"a", b"k"), b"k", "OPEN"),
        ((b"k", None), b"k", "ABORTED"),
        ((b"", None), b"k", "ABORTED"),
        ((b"l", None), b"k", "OPEN"),
    ],
)
def test_a_write_breaks_a_locked_range_only_within_it(
    span: Any, written: bytes, state: str
) -> None:
    bank = Long()
    bank.wrote(b"x")
    bank.locked(span=span)
    assert bank.put((A, written)) == "COMMITTED"
    assert bank.row("T").state == state


def test_a_transaction_breaks_no_lock_of_its_own_and_the_second_of_a_round_sees_the_first() -> None:
    bank = Long()
    bank.open("U")
    for label in "TU":
        bank.touch(label, A)
        bank.locked(b"k", label=label, writer=label)
        bank.write(label, label, A, digest=Keys.of([b"k"]).to_bytes())
        bank.finish(label, label)
    bank.turn(*((f"commit {label}", bank.committing(label)) for label in "TU"))
    bank.wait(10)
    assert sorted(bank.row(label).state for label in "TU") == ["ABORTED", "COMMITTED"]
    winner = next(label for label in "TU" if bank.row(label).state == "COMMITTED")
    assert bank.end(winner) == "COMMITTED", "a repeated one is answered"


def unknown(bank: Long) -> None:
    """A commit whose keys are not known."""
    bank.new_id("C")
    bank.begin("C")
    bank.touch("C", A)
    bank.write("C", "C", A)
    bank.finish("C", "C")
    assert bank.end("C") == "COMMITTED"


def big(bank: Long) -> None:
    """One of which the bounds are known."""
    bank.put(*((A, b"%03d" % i) for i in range(FEW_KEYS + 1)))


@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("doubt", [unknown, big])
def test_a_doubtful_lock_is_validated_and_aborts_nothing(
    doubt: Callable[[Long], None], lead: bool | None
) -> None:
    bank = Long()
    bank.locked(span=(b"0020", b"0020z"))
    bank.locked(b"elsewhere", table=B, writer="v")
    bank.wrote(b"x")
    doubt(bank)
    assert bank.row("T").state == "OPEN"
    if lead is not None:
        bank.lead(keep_table=lead)
    assert bank.end() == "Revalidate"
    again = bank.result
    assert again.writers == (bank.writer("w"),)
    assert {at.table: at.last for at in again.tables}[A] == bank.state.tables[A].last
    bank.ask("list", r.ListLocks(bank.token("T"), bank.writer("w"), 0))
    assert bank.result.locks[0].ranges == (r.LockedRange(b"0020", b"0020z"),)
    bank.ask("list", r.ListLocks(bank.token("T"), bank.writer("w"), bank.result.sequence))
    assert (bank.result.sequence, bank.result.locks) == (0, ())
    assert bank.validate(through=bank.at["T", "w"]) == "ReadsLocked"
    assert bank.end(asker="soon") == "Revalidate", "it was looked at too early"
    assert bank.validate(through=again.timestamp) == "ReadsLocked"
    assert bank.end(asker="then") == "COMMITTED"


def cost_of_a_big_one(bank: Long, label: str) -> tuple[int, int]:
    """(calls, rows that are logged) for a one-shot of one row more than are held against ranges."""
    keys = [b"%03d" % n for n in range(FEW_KEYS + 1)]
    events = tuple(r.Event(A, -1, key, b"v", (), -1) for key in keys)
    shot = r.OneShot(bank.id(label), "nyc", None, events, None, ())
    turn, calls = bank.new_turn(), 0

    def called(*_: object) -> None:
        nonlocal calls
        calls += 1

    sys.setprofile(called)
    try:
        decide(turn, shot, None)
    finally:
        sys.setprofile(None)
    bank.close(turn)
    assert bank.row(label).state == "COMMITTED"
    return calls, len(bank.round.rows)


def test_a_commit_of_many_rows_costs_as_much_whatever_others_locked() -> None:
    bank = Long()
    cost_of_a_big_one(bank, "a")
    calls, rows = cost_of_a_big_one(bank, "b")
    for n in range(20):
        spans = [(b"%03d" % (n + 20 * i), b"%03d." % (n + 20 * i)) for i in range(50)]
        locks = r.TableLocks(A, 0, 0, (), tuple(r.LockedRange(*span) for span in spans))
        bank.ask("lock", r.LockReads(bank.token("T"), bank.writer("w"), n + 1, (locks,)))
    assert bank.state.locks.count == 1_000
    more, as_many = cost_of_a_big_one(bank, "c")
    assert as_many == rows
    assert more < calls + 100


@pytest.mark.parametrize("lead", [False, True])
def test_what_bounds_do_not_lie_round_is_not_in_doubt_as_far_as_the_window_reaches(
    lead: bool,
) -> None:
    """A successor has not seen the commit, so it asks for a look."""
    bank = Long()
    bank.locked(b"001", span=(b"1", b"2"))
    bank.wrote(b"x")
    big(bank)
    if lead:
        bank.lead()
    assert bank.row("T").state == "ABORTED", "its point was written"
    bank.open("U")
    bank.locked(b"else", span=(b"1", b"2"), label="U")
    bank.wrote(b"x", label="U")
    big(bank)
    if lead:
        bank.lead()
    assert bank.end("U") == ("Revalidate" if lead else "COMMITTED")


def test_a_log_of_before_the_times_of_doubts_is_folded() -> None:
    bank = Long()
    bank.locked(b"k")
    unknown(bank)
    row = bank.state.tables[A]
    assert row == r.TableRow(row.last, row.last, 0)
    key = k.table_key(A)
    state = fold([*bank.log, [(key, encode(r.FormerTableRow(row.last)))]])
    assert state.tables[A] == r.TableRow(row.last, 0, 0)


def test_doubts_while_it_is_decided() -> None:
    """Those who wait are told; it waits for the look, or is aborted when nobody is heard of."""
    for looks in (True, False):
        bank = Long()
        bank.locked(b"k")
        bank.wrote(b"x")
        bank.commit("T")
        assert bank.row("T").state == "COMMIT_IN_PROGRESS"
        bank.write_plainly(A)
        bank.wait(10)
        (told_,) = [result for _, result in bank.said]
        assert isinstance(told_, r.Revalidate)
        assert bank.row("T").state == "COMMIT_IN_PROGRESS"
        bank.lead(keep_table=looks)
        bank.wait(100)
        assert bank.row("T").state == "COMMIT_IN_PROGRESS"
        if not looks:
            bank.wait(61_000)
            assert bank.row("T").state == "ABORTED"
            continue
        assert bank.end() == "Revalidate"
        word = r.Validated(bank.writer("w"), 1, bank.result.timestamp)
        bank.ask("commit with it", replace(bank.committing("T"), validated=(word,)))
        bank.wait(100)
        assert bank.row("T").state == "COMMITTED"


@pytest.mark.parametrize("whose", ["the same events", "another writer's"])
def test_a_validation_of_a_decided_commit_counts_from_any_writer(whose: str) -> None:
    """A later receipt of the same events gets the outcome; another writer's is refused once its check counts."""
    bank = Long()
    bank.locked(b"k")
    bank.wrote(b"x")
    bank.write("T", "v", PLAIN)
    bank.commit("T", receipts=[bank.receipt("T", "w", sequence=1)])
    bank.write_plainly(A)
    bank.wait(10)
    due = bank.said[-1][1]
    assert (due.decided, due.writers) == (True, (bank.writer("w"),))
    taken = bank.receipt("T", "w" if whose == "the same events" else "v", sequence=2)
    word = r.Validated(bank.writer("w"), 1, due.timestamp)
    ask = replace(bank.committing("T", own=[taken], receipts=[]), validated=(word,))
    said = bank.ask("repeats", ask) or bank.wait(10)
    if whose == "the same events":
        assert said == "T COMMITTED 1, 1 left out"
    else:
        assert isinstance(bank.said[-1][1], r.Revalidate)
        assert bank.wait(10) == ""
        assert bank.row("T").state == "COMMITTED"
        assert bank.ask("repeats", ask) == "AlreadyCommitted"


@pytest.mark.parametrize("held", [False, True])
def test_a_commit_that_too_many_wait_for_still_reports_its_validation(
    held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "WAITERS", limits.WAITERS._replace(value=2))
    bank = Long()
    bank.locked(b"k")
    bank.held = held
    bank.wrote(b"x")
    bank.wait(10)
    word = r.Validated(bank.writer("w"), 1, bank.told()[0])
    assert word.validated_through > bank.at["T", "w"]
    bank.turn(*((asker, bank.committing("T")) for asker in "12"))
    assert bank.row("T").state == ("OPEN" if held else "COMMIT_IN_PROGRESS")
    assert "NotReady" in bank.ask("3", replace(bank.committing("T"), validated=(word,)))


@pytest.mark.parametrize("who", ["w", "v"])
def test_a_set_without_a_validation_is_not_committed(who: str) -> None:
    bank = Long()
    bank.wrote(b"x")
    assert bank.lock_reads(b"k", writer=who) == "ReadsLocked"
    assert bank.end() == "Revalidate"
    assert bank.result.writers == (bank.writer(who),)
    bank.validate(writer=who)
    assert bank.lock_reads(b"l", writer=who) == "ReadsLocked"
    assert bank.end(asker="more") == "Revalidate"
    bank.validate(writer=who)
    assert bank.end(asker="last") == "COMMITTED"


def test_locks_of_left_out_writers_count_and_who_was_read_from_must_be_taken() -> None:
    bank = Long()
    bank.wrote(b"x", writer="v")
    bank.wrote(b"y", writer="u")
    bank.locked(b"k", read_from=(r.WriterAt(bank.writer("v"), 1),))
    receipts = {name: bank.receipt("T", name) for name in "uv"}
    assert bank.end(receipts=[receipts["u"]]) == "WritersUnfinished"
    bank.locked(b"l", writer="gone")
    assert bank.put((A, b"l")) == "COMMITTED"
    assert bank.row("T").state == "ABORTED"


@pytest.mark.parametrize("more", [0, 1])
def test_who_was_read_from_may_be_taken_with_another_receipt_of_the_same_events(more: int) -> None:
    """The set was read from a receipt that was registered after the commit came."""
    bank = Long()
    bank.held = True
    bank.wrote(b"x", writer="v")
    assert bank.commit("T") == ""
    if more:
        bank.write("T", "v", PLAIN)
    bank.finish("T", "v")
    bank.locked(b"k", read_from=(r.WriterAt(bank.writer("v"), 2),))
    bank.held = False
    said = bank.wait(1000) or bank.wait(10)
    assert said == f"[commit T] {'WritersUnfinished' if more else 'T COMMITTED 1'}"


def test_a_lost_table_ends_who_locked_it() -> None:
    bank = Long()
    bank.locked(b"k")
    turn = bank.new_turn()
    assert give_up_stream(turn, A, "a test") == [bank.id("T")]
    bank.close(turn)
    assert bank.row("T").reason == f"{A} is lost: a test"


def test_the_deletion_of_a_table_names_the_transactions_that_it_aborts() -> None:
    bank = Long()
    bank.locked(b"k")
    bank.delete(A)
    assert bank.row("T").state == "ABORTED"
    (row,) = [row for round_ in bank.rounds for row in round_.audit]
    assert (row.lane, row.what) == ("admin", f"{A}; aborts {bank.id('T').hex()}")


def test_the_oldest_snapshot_and_what_a_repeated_begin_has_to_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scopes, "versions_ms", lambda _: 0)  # else an hour ago is promised, too
    bank = Long()
    first = bank.row("T").snapshot
    assert first > 0
    bank.open("U")
    for label in "TU":
        assert bank.named(A, label=label) == "ReadsLocked"
    assert bank.oldest() == first
    assert bank.ask("other", bank.beginning("T")) == "InvalidArgument"
    bank.abort("T")
    assert bank.oldest() == bank.row("U").snapshot
    last = bank.row("U").snapshot
    bank.abort("U")
    assert bank.oldest() >= last
    begin = replace(bank.beginning("V"), snapshot=(1 << 63) - 1)
    assert bank.ask("ahead", begin) == "InvalidArgument"


def test_a_snapshot_that_replicas_may_have_swept_begins_nothing() -> None:
    """The table of the scope with the least history decides; tables that keep less than a second don't count."""
    bank = Long()
    bank.make("nyc/none", table="true", table_history_ms="0")
    bank.make("nyc/short", table="true", table_history_ms="5000")
    early, old = bank.beginning("T"), bank.told()[0]
    assert bank.named("nyc/short") == "ReadsLocked"
    bank.wait(5001)
    assert bank.oldest("nyc/short") == bank.row("T").snapshot, "T named it before"
    assert bank.ask("late", replace(bank.beginning("U"), snapshot=old)) == "TransactionAborted"
    assert bank.ask("again", replace(early, snapshot=bank.row("T").snapshot)) == "begun T"
    assert bank.open("V") == "begun V"
    assert bank.ask("plain", bank.beginning("W")) == "begun W"
    bank.delete("nyc/short")
    assert bank.ask("late", replace(bank.beginning("X"), snapshot=old)) == "begun X"


@pytest.mark.parametrize("ends", ["revoked", "despite", "deleted"])
def test_a_processor_holds_what_its_lane_may_see(ends: str) -> None:
    """It keeps a table from being deleted or compacted, and its operator sees whose it is, and what ends it."""
    bank, name = Long(), "lax/squat"
    bank.adopt("lax")
    with bank.by("admin"):
        bank.make(f"{A}-base", table_base=A)
    bank.grant("guest", "lax/*", Right.PROCESS)
    bank.grant("owner", A, Right.OPERATE | Right.DESCRIBE)
    make = r.CreateProcessor(name, 1, (r.ProcessorInput(A, "", 0, 0),))
    assert bank.ask("make", make, lane="guest") == "NotAuthorized"
    assert bank.blockers(A, "owner") == []
    bank.grant("guest", A, Right.DESCRIBE)
    assert bank.ask("make", make, lane="guest") != "NotAuthorized"
    assert bank.put((A, b"k")) == "COMMITTED"
    bank.wait(3_700_000)
    bank.describe(stream=A)
    base = r.PublishBase(A, from_s(to_s(bank.oldest())), bank.id("base"))
    assert bank.blockers(A, "owner") == [(name, "guest", f"anabranch processor delete {name}")]
    assert bank.ask("delete", r.DeleteStream(A), lane="owner") == "IllegalState"
    for part in (
        name,
        "of lane guest",
        f"`anabranch processor delete {name}`",
        f"{A} --despite {name}",
    ):
        assert part in bank.message
    assert bank.ask("base", base, lane="owner") == "IllegalState"
    assert f"lost to processors {name} of lane guest" in bank.message
    taking = r.TakeTasks(name, bytes(16), "me", (0,), (0,))
    if ends == "revoked":
        bank.grant("guest", A, 0)
        assert bank.ask("take", taking, lane="guest") == "NotAuthorized"
        assert bank.blockers(A, "owner") == []
    elif ends == "deleted":
        bank.ask("delete", r.DeleteProcessor(name, 0), lane="guest")
    if ends != "despite":
        bank.ask("base", base, lane="owner")
        assert "processors" not in bank.message
    assert bank.ask("delete", r.DeleteStream(A, ("lax/other",)), lane="owner") == (
        "IllegalState" if ends == "despite" else ""
    )
    if ends == "despite":
        assert bank.ask("delete", r.DeleteStream(A, (name,)), lane="owner") == ""
        (row,) = bank.round.audit
        assert f"{A}, an input of processor {name} of lane guest" in row.what
    assert bank.state.streams[A].state == "FORGETTING"


@pytest.mark.parametrize("lead", [None, True, False])
def test_a_snapshot_holds_the_tables_that_its_transaction_named(lead: bool | None) -> None:
    """And only while the lane that named one may read it; those who may operate the table are told, by whom."""
    bank = Long()
    lanes = Right.WRITE | Right.SAFE_TIME | Right.DESCRIBE
    bank.grant("guest", "nyc/*", lanes)
    bank.grant("owner", A, Right.OPERATE | Right.DESCRIBE)
    with bank.by("guest"):
        begin = replace(bank.beginning("G"), snapshot=bank.told()[0], keepalive_ms=80_000_000)
        assert bank.ask("begin G", begin) == "begun G"
    at, name = begin.snapshot, bank.id("G").hex()
    bank.wait(3_500_000)
    assert bank.named(A, label="G", lane="guest") == "ReadsLocked"
    bank.wait(3_500_000)
    if lead is not None:
        bank.lead(keep_table=lead)
    assert bank.oldest(A) == at
    assert bank.oldest(B) > at, "nobody named it"
    assert bank.named(B, label="G", lane="guest") == "SnapshotExpired"
    for lane, whose in (("admin", "guest"), ("owner", "")):
        assert bank.blockers(A, lane) == [(name, whose, f"anabranch txn abort {name}")]
    assert bank.blockers(A, "open") == bank.blockers(B) == []
    bank.grant("guest", "nyc/*", Right.WRITE)
    assert bank.oldest(A) > at
    bank.grant("guest", "nyc/*", lanes)
    assert bank.oldest(A) == at
    with bank.by("guest"):
        bank.abort("G")
    assert bank.oldest(A) > at
    assert not [key for key in bank.table.rows if key[17:18] == bytes((k.Entry.READS,))]


def test_a_snapshot_that_is_too_old_for_its_lane_ends_its_transaction() -> None:
    """One that named no table holds none, and goes on."""
    bank = Long()
    bank.make("nyc/long", table="true", table_history_ms="999999999")
    bank.grant("guest", "nyc/*", Right.WRITE | Right.SAFE_TIME)
    day = limits.QUOTAS["snapshot"].value
    with bank.by("guest"):
        for label in "GH":
            begin = replace(bank.beginning(label), snapshot=bank.told()[0], keepalive_ms=day)
            assert bank.ask(f"begin {label}", begin) == f"begun {label}"
        assert bank.named("nyc/long", label="G") == "ReadsLocked"
        for _ in range(2):
            bank.wait(day // 2 - 1000)
            bank.heartbeat("G", "H")
        assert bank.row("G").state == "OPEN"
        bank.wait(3000)
        assert (bank.row("G").state, bank.row("H").state) == ("ABORTED", "OPEN")
        assert "its snapshot is too old" in bank.row("G").reason
        assert "--quota snapshot=" in bank.row("G").reason
        assert bank.named("nyc/long", label="H") == "SnapshotExpired"


def test_a_set_that_is_registered_again_is_answered_again() -> None:
    bank = Long()
    assert bank.lock_reads(b"k") == "ReadsLocked"
    assert bank.lock_reads(b"k", sequence=1) == "ReadsLocked"


def test_registered_locks_need_the_right_to_read_their_table() -> None:
    bank = Long()
    bank.grant("writer", "nyc/*", 4)
    with bank.by("writer"):
        assert bank.lock_reads(b"z") == "NotAuthorized"


def test_ranges_of_a_table_are_its_readers_in_equal_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane that took all of them keeps no other one out, and gets no more meanwhile."""
    monkeypatch.setattr(limits, "RANGES", limits.RANGES._replace(value=4))
    bank = Long()
    for low in b"abcd":
        assert bank.lock_reads(span=(bytes((low,)), None)) == "ReadsLocked"
    assert bank.lock_reads(span=(b"e", None)) == "TooMuchLocked"
    assert bank.lock_reads(span=(b"e", None), table=B) == "ReadsLocked"
    bank.grant("other", "nyc/*", 7)
    with bank.by("other"):
        bank.open("O")
        for low in b"ab":
            assert bank.lock_reads(span=(bytes((low,)), None), label="O") == "ReadsLocked"
        assert bank.lock_reads(span=(b"c", None), label="O") == "TooMuchLocked"
        assert "its share is 2:" in bank.message
    bank.abort("T")
    with bank.by("other"):
        assert bank.lock_reads(span=(b"c", None), label="O") == "ReadsLocked"


def test_writers_and_tables_of_a_set_count_as_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers that it was read from, and tables of which it locks nothing: each commit goes through them."""
    monkeypatch.setattr(limits, "LOCKS", limits.LOCKS._replace(value=3))
    bank = Long()
    for writer in ("u", "v"):
        bank.wrote(b"x", writer=writer)
    at = tuple(r.WriterAt(bank.writer(writer), 1) for writer in ("u", "v"))
    assert bank.lock_reads(read_from=(r.WriterAt(77, 1),)) == "InvalidArgument"
    assert bank.lock_reads(b"k", read_from=at) == "ReadsLocked"
    assert bank.state.locks.count == bank.state.locks.of(bank.id("T")).count == 3
    assert bank.lock_reads(read_from=at[:1]) == "TooManyLocks"
    empty = r.LockReads(bank.token("T"), bank.writer("w"), 9, (r.TableLocks(A, 0, 0, (), ()),))
    bank.ask("empty", empty)
    assert told(bank.result) == "TooManyLocks"
    bank.abort("T")
    assert bank.state.locks.count == 0


def test_the_transaction_that_broke_a_lock_is_named_only_to_lanes_that_may_see_it() -> None:
    bank = Long()
    bank.locked(b"k")
    bank.grant("other", "nyc/*", 7)
    with bank.by("other"):
        assert bank.put((A, b"k")) == "COMMITTED"
    bank.get("T")
    assert bank.result.broken.by == b""
    row = bank.row("T")
    assert row.broken is not None
    assert row.broken.by == bank.id("shot 1")


def test_a_fold_gives_the_same_locks() -> None:
    bank = Long()
    bank.locked(b"a", b"b", span=(b"c", None))
    bank.locked(b"d", table=B, writer="v")
    unknown(bank)
    folded = fold(bank.log).locks
    assert folded == bank.state.locks
    bank.abort("T")
    assert fold(bank.log).locks == bank.state.locks
