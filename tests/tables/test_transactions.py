"""Transactions over a real controller and the log in memory: what costs a look, what costs a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from threading import Thread
from typing import Any
from unittest.mock import Mock, patch

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.client import own_writes
from anabranch.client import table_locks as client_locks
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import JoinedTransaction, TableTransaction
from anabranch.client.transaction import Transaction
from anabranch.controller import intake
from anabranch.controller.controller import Controller
from anabranch.core.decisions import decide
from anabranch.core.decisions.turn import Settings
from anabranch.core.journal_runs import unpack_run
from anabranch.core.locks import frozen, table_writes
from anabranch.core.locks.recent_writes import RecentWrites
from anabranch.core.rows import INDEX
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DeadlineExceeded,
    IllegalState,
    InvalidArgument,
    InvalidToken,
    LocksBroken,
    NonTransactional,
    NotForkSafe,
    NotReady,
    OutcomeUnknown,
    SnapshotExpired,
    TransactionAborted,
    UnknownStream,
)
from anabranch.ports import RawBatch, TopicPartition
from anabranch.protocol.limits import Room
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode
from anabranch.tables.indexes import Indexed
from anabranch.tables.snapshot import TableSnapshot
from anabranch.topics.names import history_topic, journal_topic
from tests.client.world import World
from tests.tables.worlds import let_read, operator, reader_ports

A, B = TABLES = ("bank/a", "bank/b")


class Bank(World):
    """A replica that moves when somebody waits, and a client that writes blindly."""

    def __init__(self) -> None:
        super().__init__()
        for table in TABLES:
            self.client.create_table(table, 2)
        self.blind = self.new_client(one_shot_bytes=1 << 20)
        self.by_journal = self.new_client(one_shot_bytes=0)
        let_read(self.client, reader_ports(self))
        self.rows: Replica = self.client.replica(*TABLES, threads=False)
        self.sent = 0
        shot = self.rows._shared.session.locked_shot

        def counted(*given: Any, **named: Any) -> Any:
            self.sent += 1
            return shot(*given, **named)

        self.rows._shared.session.locked_shot = counted  # type: ignore[method-assign]

    def start_controller(self, number: int = 0) -> None:
        """Journals are cut, and old runs moved, as soon as there is a little to gain."""
        log, store = self.cluster.log("controller"), self._stores[number].open("controller")
        tidy = {"clean_ms": 1, "clean_records": 1, "move_bytes": 20_000}
        settings = Settings(0, 1, "anabranch", reply_partitions=8, trusts_open=True, **tidy)  # type: ignore[arg-type]
        controller = self.controllers[number] = Controller(log, store, self.clock, settings, "test")
        controller.lead()

    def put(self, client: Any, table: str = A, **rows: str) -> None:
        with client.begin("bank") as txn:
            for key, value in rows.items():
                txn.write(table, value.encode(), key=key.encode())
            txn.commit()


@pytest.fixture
def bank() -> Iterator[Bank]:
    made = Bank()
    made.put(made.blind, k="1", x="1")
    made.rows.snapshot().close()
    yield made
    made.rows.close()


# -- looks ------------------------------------------------------------------------------------------------


def takeover(bank: Bank, _: pytest.MonkeyPatch) -> None:
    """The next leader has not seen the last commits."""
    bank.put(bank.blind, x="2")
    bank.stop_controller()
    bank.start_controller()


def small_window(bank: Bank, _: pytest.MonkeyPatch) -> None:
    """What was written above `since` is dropped."""
    assert bank.controller is not None
    windows: RecentWrites = bank.controller._memory.recent_writes
    windows.limit = 1
    bank.put(bank.blind, x="2")
    bank.put(bank.blind, B, x="2")
    assert windows.reach > bank.rows.timestamp


def collision(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys have one fingerprint."""
    for module in (table_writes, client_locks):
        monkeypatch.setattr(module, "fingerprint", lambda _: 7)
    bank.put(bank.blind, x="2")


def no_digest(bank: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit from a journal whose runs have none."""
    real = intake.scan

    def scan(batch: RawBatch, rules: Room, **more: Any) -> intake.Scanned:
        return real(batch, rules._replace(is_table=False), **more)

    monkeypatch.setattr(intake, "scan", scan)
    bank.put(bank.by_journal, x="2")


@pytest.mark.parametrize("force", [takeover, small_window, collision, no_digest])
def test_locks_that_the_controller_can_not_judge_are_revalidated(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, force: Callable[..., None]
) -> None:
    """None of many is lost; at least the first is sent again."""
    begun = [bank.rows.begin() for _ in range(10)]
    for number, txn in enumerate(begun):
        assert txn.get(A, b"k") == b"1"
        txn.put(B, b"%d" % number, b"1")
    force(bank, monkeypatch)
    before = bank.sent
    for txn in begun:
        assert txn.commit(timeout=20.0).counts.committed == 1
    assert bank.sent - before > len(begun), "the case is not met"


@pytest.mark.parametrize("force", [takeover, small_window, collision, no_digest])
def test_locks_that_the_controller_can_not_judge_may_be_broken(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, force: Callable[..., None]
) -> None:
    txn = bank.rows.begin()
    txn.put(B, b"k", txn.get(A, b"x") or b"")
    force(bank, monkeypatch)
    with pytest.raises(LocksBroken):
        txn.commit(timeout=20.0)


@pytest.mark.parametrize("others", [0, 1])
def test_a_commit_validates_its_reads_if_a_later_commit_is_in_the_replica(
    bank: Bank, others: int
) -> None:
    txn = bank.rows.begin()
    txn.put(A, b"k", txn.get(A, b"x") or b"")
    for _ in range(others):
        bank.put(bank.blind, B, y="2")
        bank.rows.snapshot().close()
    real = TableSnapshot.get_version
    with patch.object(TableSnapshot, "get_version", autospec=True, side_effect=real) as looked:
        assert txn.commit(timeout=20.0).counts.committed == 1
    assert looked.call_count == others


def test_a_function_that_its_call_does_not_run_is_refused(bank: Bank) -> None:
    async def later(txn: TableTransaction) -> None:
        txn.put(A, b"k", b"never")

    def piecewise(txn: TableTransaction) -> Iterator[None]:
        txn.put(A, b"k", b"never")
        yield

    for function in (later, piecewise):
        with pytest.raises(InvalidArgument, match="async"):
            bank.rows.transact(function)
    with bank.rows.snapshot() as now:
        assert now.get(A, b"k") == b"1"


def test_transact_that_runs_out_of_time_raises_locks_broken(bank: Bank) -> None:
    def loses(txn: TableTransaction) -> None:
        txn.put(B, b"k", txn.get(A, b"k") or b"")
        bank.put(bank.blind, k="2")

    late = [bank.rows.begin(), DeadlineExceeded("SafeTime was not answered in time")]
    with patch.object(bank.rows, "begin", Mock(side_effect=late)), pytest.raises(LocksBroken):
        bank.rows.transact(loses, timeout=5.0)


def test_validating_registered_locks_waits_for_no_idle_table(bank: Bank) -> None:
    """The controller names the locked tables alone, not the other one."""
    txn = bank.rows.begin(keepalive=600.0)
    assert not list(txn.scan(A, b"0020", b"0021"))
    txn.put(A, b"mine", b"1")
    txn.flush()
    bank.put(bank.blind, **{f"{n:04d}": "in doubt" for n in range(100) if n != 20})
    assert txn.commit(timeout=20.0).counts.committed == 1


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_that_is_registered_in_parts_takes_few_ranges(bank: Bank, reverse: bool) -> None:
    """A table has 1,000 for all transactions. What is registered whole at last breaks as its parts do."""
    bank.put(bank.blind, **{f"r{n:02d}": "1" for n in range(40)})
    bank.rows.snapshot().close()
    txn = bank.rows.begin(keepalive=600.0)
    assert bank.controller is not None
    ranges = []
    for key, row in txn.scan(A, prefix=b"r", reverse=reverse):
        txn.put(B, key, row)
        txn.flush()
        ranges.append(bank.controller._state.locks.ranges(A).total())
    assert ranges == [min(n + 1, 17) for n in range(40)]
    bank.put(bank.blind, r20a="phantom")
    with pytest.raises(LocksBroken, match="r20a"):
        txn.commit(timeout=20.0)


# -- what breaks a lock -----------------------------------------------------------------------------------


def one_shot(bank: Bank) -> None:
    bank.put(bank.blind, k="2")


def journal(bank: Bank) -> None:
    bank.put(bank.by_journal, k="2")


def plain_write(bank: Bank) -> None:
    """By a producer that knows nothing of the library."""
    batch = encode_batch([Record(0, 1, b"k", b"2")])
    bank.cluster.log("plain").produce_batch(TopicPartition(journal_topic(A), 0), batch)
    before = len(bank.commits(A))
    while len(bank.commits(A)) == before:
        bank.clock.sleep(0.1)


def rolling(bank: Bank) -> None:
    """It began in an epoch before the last one."""
    with bank.by_journal.begin("bank") as txn:
        txn.write(A, b"2", key=b"k")
        txn.flush()
        bank.client.scale(A, 3)
        txn.commit()
    history = bank._read(TopicPartition(history_topic(A), 0))
    epochs = [e for e in (decode(h.value or b"") for h in history) if isinstance(e, r.EpochRecord)]
    assert any(e.stream_epoch != e.reference_epoch for e in epochs), "it is not rolling"


def moved(bank: Bank) -> None:
    """Its run in the journal was moved forward, behind what others wrote."""
    with bank.by_journal.begin("bank", keepalive=3600.0) as txn:
        txn.write(A, b"2", key=b"k")
        txn.flush()
        for number in range(40):
            pads = {f"pad{n}": f"{number}" * 2000 for n in range(4)}
            with bank.by_journal.outside():
                bank.put(bank.by_journal, **pads)
            bank.clock.sleep(1.0)
        assert bank.controller is not None
        runs = bank.controller.table.scan(INDEX + A.encode())
        assert any(unpack_run(*run).moved_to for run in runs), "it was not moved"
        txn.commit()


@pytest.mark.parametrize("write", [one_shot, journal, plain_write, rolling, moved])
def test_each_kind_of_write_breaks_the_locks_on_its_keys(
    bank: Bank, write: Callable[[Bank], None]
) -> None:
    """And no other: those hold though the replica is not asked again."""
    held, broken = bank.rows.begin(), bank.rows.begin()
    assert (held.get(A, b"x"), broken.get(A, b"k")) == (b"1", b"1")
    write(bank)
    held.put(B, b"held", b"1")
    broken.put(B, b"broken", b"1")
    assert held.commit(timeout=20.0).counts.committed == 1
    assert bank.sent == 1
    with pytest.raises(LocksBroken):
        broken.commit(timeout=20.0)


@pytest.mark.parametrize("more", ["low", "high", "prefix"])
def test_a_key_and_a_range_are_not_locked_in_one_call(bank: Bank, more: str) -> None:
    given: dict[str, Any] = {more: b"k"}
    with bank.rows.begin() as txn, pytest.raises(InvalidArgument, match="a key, a prefix, or low"):
        txn.lock(A, b"x", **given)


REFUSED: list[tuple[Callable[[Bank], object], str]] = [
    (lambda bank: bank.rows.begin(keepalive=4_000_000), "seconds, 1 to 2,147,483"),
    (lambda bank: bank.rows.join(b"abc"), "malformed token: b'abc' is not a token"),
    (lambda bank: bank.client.replica(), "a replica is of at least one table"),
    (lambda bank: bank.rows.snapshot(at=datetime(2099, 1, 1, tzinfo=UTC)), "1970 to 2041-05-10"),
    (lambda bank: bank.client.replica(A, index=[1]), "index .1.: give names"),  # type: ignore[arg-type]
    (lambda bank: bank.client.replica(A, index={5: min}), "index .5.*: give names"),  # type: ignore[dict-item]
    (lambda bank: bank.rows.snapshot().lookup("i", "10"), "is bytes, not '10'"),  # type: ignore[arg-type]
    (lambda bank: bank.rows.snapshot().scan(A, limit="2"), "a limit is int, not str"),  # type: ignore[call-overload]
    (lambda bank: bank.rows.snapshot(timeout="x"), "seconds, is int or float, not str"),  # type: ignore[arg-type]
    (lambda bank: bank.rows.transact(min, name=5), "name is str, not int"),  # type: ignore[arg-type]
    (lambda bank: bank.client.replica(A, folder=5), "a folder is str or Path, not int"),  # type: ignore[arg-type]
    (lambda bank: bank.client.changes(A, timeout="x"), "seconds, is int or float, not str"),  # type: ignore[call-overload]
    (lambda bank: bank.client.changes(A, group=5), "a group.s name is str, not int"),  # type: ignore[call-overload]
    (lambda bank: bank.client.create_table(A, 1, [1]), "settings .1.: give names"),  # type: ignore[arg-type]
    (lambda _: Indexed(A, "i", lambda *_: 5).of(b"k", b"r"), "index 'i' gave 5 for row"),  # type: ignore[arg-type]
    (lambda bank: commit_with(bank, b"junk"), "b'junk' is not a receipt"),
]


def commit_with(bank: Bank, receipt: bytes) -> None:
    with bank.client.begin("bank") as txn:
        txn.token()
        txn.commit(receipts=[receipt])


@pytest.mark.parametrize(("call", "told"), REFUSED, ids=[told for _, told in REFUSED])
def test_invalid_arguments_are_refused_by_name(
    bank: Bank, call: Callable[[Bank], object], told: str
) -> None:
    with pytest.raises((InvalidArgument, InvalidToken), match=told):
        call(bank)


def test_calls_that_are_not_transactional_are_refused_by_name(bank: Bank) -> None:
    settings: Any = 1
    with bank.rows.begin():
        for call in (
            lambda: bank.client.create_table(A, settings=settings),
            lambda: bank.client.compact_table("bank/none"),
        ):
            with pytest.raises(NonTransactional, match=r"^(create|compact)_table inside"):
                call()


# -- a table made again ------------------------------------------------------------------------------------


@pytest.mark.parametrize("commits", [0, 1, 2, 9], ids=["empty", "shorter", "as-long", "longer"])
def test_a_table_that_is_made_again_is_loaded_again_by_itself(bank: Bank, commits: int) -> None:
    bank.put(bank.blind, k="2")
    bank.rows.snapshot().close()
    admin = operator(bank)
    admin.delete_stream(A)
    with pytest.raises(UnknownStream, match=A):
        bank.rows.snapshot()
    admin.create_table(A, 2)
    for number in range(commits):
        bank.put(bank.blind, new=str(number))
    with bank.rows.snapshot(timeout=5.0) as view:
        assert dict(view.scan(A)) == ({b"new": b"%d" % (commits - 1)} if commits else {})
        assert view.get(B, b"k") is None


def test_a_table_that_is_loaded_again_in_a_transaction_ends_it(bank: Bank) -> None:
    """Its marks tell of no commit meanwhile, and neither does a controller that leads since its birth."""
    bank.put(bank.blind, k="1")
    txn = bank.rows.begin()
    txn.put(A, b"k", txn.get(A, b"k") or b"")
    admin, follower = operator(bank), bank.rows._follower
    admin.delete_stream(A)
    admin.create_table(A, 2)
    with patch.object(follower, "_base_of", side_effect=NotReady("no leader")):
        while any(follower.marks()[A]):
            with suppress(NotReady):
                bank.rows.step(bank.clock.monotonic() + 0.5)
            bank.clock.sleep(1.0)
        with pytest.raises(SnapshotExpired, match="loaded again"):
            txn.commit()
    with bank.rows.snapshot() as view:
        assert list(view.scan(A)) == []


# -- own writes -------------------------------------------------------------------------------------------


def test_own_writes_are_read_while_they_can_not_be_handed_over(bank: Bank) -> None:
    txn = bank.rows.begin(writers="all")
    txn.put(A, b"k", b"2")
    waits = Mock(side_effect=NotReady("no leader"))
    with patch.dict(decide._DECISIONS, {r.Touch: waits}), pytest.raises(NotReady):
        txn.token()
    assert txn.get(A, b"k") == b"2"
    txn.token()
    assert txn.get(A, b"k") == b"2"


def test_two_threads_hand_each_row_over_once(bank: Bank) -> None:
    """The other thread comes in the middle of a write to the journals, and waits for its end."""
    with bank.rows.begin() as txn:
        other = Thread(target=txn.put, args=(A, b"other", bytes(5000)))
        write = Transaction.write

        def met(*given: Any, **named: Any) -> None:
            if other.ident is None:
                other.start()
                other.join(0.1)
            write(*given, **named)

        with patch.object(Transaction, "write", met):
            txn.put(A, b"one", bytes(5000))
            other.join()
        assert txn.commit().counts.committed == 2


# -- outcomes ---------------------------------------------------------------------------------------------


def in_doubt(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, name: str | None = None
) -> TableTransaction:
    """A transaction that is committed, but whose commit raised `OutcomeUnknown`; the replica has its rows."""
    txn = bank.rows.begin()
    txn.put(A, b"k", txn.get(A, b"k") or b"")
    shot = txn._session.locked_shot

    def unheard(*given: Any) -> Any:
        shot(*given)
        raise OutcomeUnknown("gone", txn_id=txn.txn_id or b"")

    with monkeypatch.context() as patched:
        patched.setattr(txn._session, "locked_shot", unheard)
        with pytest.raises(OutcomeUnknown):
            txn.commit(name=name)
    bank.rows.snapshot().close()
    return txn


@pytest.mark.parametrize("then", ["nothing", "written", "loaded again"])
def test_a_commit_in_doubt_is_not_broken_by_itself(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    """Nor by a later write of its row, or a table that can't be looked into: it was committed before."""
    txn = in_doubt(bank, monkeypatch)
    if then == "written":
        bank.put(bank.blind, k="3")
        bank.rows.snapshot().close()
    elif then == "loaded again":
        bank.rows._follower._begin_again(A, bank.rows._store.marks[A].ids)
    with pytest.raises(IllegalState, match="commit again"):
        txn.get(A, b"k")
    with pytest.raises(IllegalState, match="commit again"):
        txn.put(A, b"x", b"")
    assert txn.commit().txn_id == txn.txn_id


@pytest.mark.parametrize("doubted", [False, True])
def test_a_refused_commit_leaves_the_transaction_as_it_was(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, doubted: bool
) -> None:
    """Not, if a copy that was sent before may still be on its way."""
    unknown, refusal = OutcomeUnknown("gone", txn_id=bytes(16)), NotReady("no controller serves it")
    txn = bank.rows.begin()
    txn.put(A, b"x", b"1")
    with monkeypatch.context() as patched:
        for error in [unknown] * doubted + [refusal]:
            patched.setattr(txn._session, "locked_shot", Mock(side_effect=error))
            with pytest.raises(type(error)):
                txn.commit()
    with pytest.raises(IllegalState, match="commit again") if doubted else nullcontext():
        txn.put(A, b"y", b"2")
    assert txn.commit().counts.committed == 2 - doubted


def test_a_commit_that_a_frozen_lock_kept_waiting_can_be_made_again(bank: Bank) -> None:
    """The id of the first try is given up: it was resolved, so that no copy of it is carried out."""
    txn = bank.rows.begin()
    txn.put(A, b"k", txn.get(A, b"k") or b"")
    waits = Mock(side_effect=NotReady("a big transaction read that"))
    with patch.object(frozen, "check_free", waits), pytest.raises(NotReady):
        txn.commit(timeout=5.0)
    assert txn.commit().counts.committed == 1


@pytest.mark.parametrize(
    "leave", [lambda txn: txn.__exit__(None, None, None), TableTransaction.abort]
)
def test_a_commit_in_doubt_that_is_left_can_be_asked_for(
    bank: Bank,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leave: Callable[[TableTransaction], None],
) -> None:
    """Its own commit says what became of it, as if it had not been left."""
    txn = in_doubt(bank, monkeypatch)
    leave(txn)
    with pytest.raises(IllegalState, match="commit again"):
        txn.get(A, b"k")
    assert (txn.commit().txn_id, txn.commit().counts.committed) == (txn.txn_id, 1)
    with pytest.raises(IllegalState, match="it is committed"):
        txn.get(A, b"k")
    unknown = OutcomeUnknown("gone", txn_id=bytes(16))
    with bank.rows.begin() as never, monkeypatch.context() as patched:
        never.put(A, b"x", b"1")
        patched.setattr(never._session, "locked_shot", Mock(side_effect=unknown))
        with pytest.raises(OutcomeUnknown):
            never.commit()
    for _ in range(2):
        with pytest.raises(TransactionAborted):
            never.commit()
    assert not caplog.text


def test_a_name_has_its_outcome_after_the_block_too(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bank.rows.begin() as first:
        first.put(A, b"x", b"2")
        won = first.commit(name="job-1")
    with in_doubt(bank, monkeypatch, "job-1") as late:
        pass
    assert late.commit().txn_id == won.txn_id


@pytest.mark.parametrize(
    ("ends", "error"),
    [
        ("commit", None),
        ("commit", LocksBroken),
        ("finish", None),
        ("finish", LocksBroken),
        ("finish", SnapshotExpired),  # the table is made again before it is locked
    ],
)
def test_what_was_left_unanswered_is_ended_again(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, ends: str, error: type[AnabranchError] | None
) -> None:
    """Its snapshot is closed, and its locks are looked at all the same."""
    begun = bank.rows.begin(keepalive=600.0)
    token = begun.token()
    left = bank.rows.join(token) if ends == "finish" else begun
    left.put(B, b"left", left.get(A, b"k") or b"")
    if isinstance(left, TableTransaction):
        left.flush()
        unknown = Mock(side_effect=OutcomeUnknown("gone", txn_id=bytes(16)))
        session = left._opened._session  # type: ignore[union-attr]
        with left, patch.object(session, "try_commit", unknown), pytest.raises(OutcomeUnknown):
            left.commit()
    else:
        waits = Mock(side_effect=NotReady("no leader"))
        with patch.object(left._session, "lock_reads", waits), pytest.raises(NotReady), left:
            pass
    no_digest(bank, monkeypatch)
    bank.put(bank.by_journal, **{"k" if error is LocksBroken else "x": "2"})
    takeover(bank, monkeypatch)
    if error is SnapshotExpired:
        operator(bank).delete_stream(A)
        operator(bank).create_table(A, 2)
        bank.rows.snapshot().close()
    with pytest.raises(IllegalState, match=f"{ends}.? again"):
        left.get(A, b"k")
    with pytest.raises(error) if error else nullcontext():
        receipts = [left.finish()] if isinstance(left, JoinedTransaction) else []
        assert begun.commit(receipts=receipts).counts.committed == 1
    if ends == "finish":
        begun.abort()
    state = bank.client.state(token).state
    assert (state, set(bank.rows._open)) == ("ABORTED" if error else "COMMITTED", set())


@pytest.mark.parametrize("by", ["itself", "a later one"])
@pytest.mark.parametrize("wrote", [False, True])
def test_a_part_of_a_committed_transaction_reports_the_commit_and_no_broken_locks(
    bank: Bank, wrote: bool, by: str
) -> None:
    """The replica shows a row that was written since the snapshot, by this transaction or a later one."""
    txn = bank.rows.begin(keepalive=600.0)
    part = bank.rows.join(txn.token())
    if wrote:
        part.put(B, b"part", b"1")
    txn.put(A, b"k", b"2")
    txn.commit(receipts=[])
    if by == "a later one":
        bank.put(bank.blind, k="3")
    bank.rows.snapshot().close()
    with pytest.raises(AlreadyCommitted) if wrote else nullcontext():
        part.get(A, b"k")
    for call in (lambda: part.put(A, b"k", b"4"), part.flush, part.finish):
        with pytest.raises(AlreadyCommitted):
            call()
    part.discard()


@pytest.mark.parametrize("own", [False, True], ids=["all is committed", "it wrote more"])
@pytest.mark.parametrize("asks", ["commit", "put first"])
def test_the_beginner_of_what_another_committed_gets_that_outcome(
    bank: Bank, asks: str, own: bool
) -> None:
    txn = bank.rows.begin(keepalive=600.0)
    token = txn.token("all")
    with bank.rows.join(token) as part:
        part.put(A, b"k", b"2")
    receipt = part.finish()
    txn.get(A, b"x")
    if own:
        txn.put(B, b"own", b"1")
    done = bank.blind.commit(token, receipts=[receipt])
    bank.rows.snapshot().close()
    if own or asks == "put first":
        with pytest.raises(AlreadyCommitted) if own else nullcontext():
            txn.get(A, b"k")
        with pytest.raises(AlreadyCommitted):
            txn.put(B, b"x", b"3")
    with pytest.raises(AlreadyCommitted, match="without") if own else nullcontext():
        assert txn.commit(receipts=[receipt]) == done
    assert bank.client.state(token).state == "COMMITTED"


def test_validation_that_finds_the_own_commit_gets_the_outcome(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another commit of the same transaction checked the locks first; the replica shows its merge."""
    txn = bank.rows.begin(keepalive=600.0)
    txn.put(A, b"k", txn.get(A, b"k") or b"")
    txn.flush()
    no_digest(bank, monkeypatch)
    bank.put(bank.by_journal, x="2")
    opened, reads = txn._opened, txn._reads
    assert isinstance(opened, Transaction)
    assert reads is not None
    look, token = reads.revalidate, txn.token("all")

    def late(answer: r.Revalidate, deadline: float) -> None:
        look(answer, deadline)
        assert opened._own is not None
        command = r.Commit(token, (opened._own,), None, None, 0, validated=reads.validated)
        bank.blind._shared.session.commit(command, deadline)
        bank.rows.snapshot().close()
        look(answer, deadline)

    with patch.object(reads, "revalidate", late):
        assert txn.commit().txn_id == txn.txn_id


@pytest.mark.parametrize("error", [NotReady, SnapshotExpired])
@pytest.mark.parametrize("decided", [False, True])
def test_validation_that_fails_between_two_sends_of_a_commit_leaves_it_sent(
    bank: Bank, monkeypatch: pytest.MonkeyPatch, decided: bool, error: type[AnabranchError]
) -> None:
    """The replica is late, and the commit may be decided: the same commit again gets its outcome."""
    if decided:
        no_digest(bank, monkeypatch)
        bank.rows.snapshot().close()
    txn = bank.rows.begin(keepalive=600.0)
    txn.put(A, b"k", txn.get(A, b"k") or b"")
    txn.flush()
    reads = txn._reads
    assert reads is not None
    place = TopicPartition(journal_topic(A), 0)
    plain, told = [Record(0, 1, b"x", b"2")], []

    def step() -> None:
        """A commit whose keys are not known comes between the decision and the merge."""
        bank.step()
        assert bank.controller is not None
        row = bank.controller._state.txn_row(txn.txn_id or b"")
        if plain and row is not None and row.state == "COMMIT_IN_PROGRESS":
            bank.cluster.log("plain").produce_batch(place, encode_batch([plain.pop()]))

    def late(answer: r.Revalidate, _: float) -> None:
        told.append(answer.decided)
        raise error("the replica is not there yet")

    if decided:
        bank.clock.on_sleep = step
    else:
        no_digest(bank, monkeypatch)
    with patch.object(reads, "revalidate", late), pytest.raises(error):
        txn.commit()
    assert told == [decided]
    for call in (partial(txn.get, A, b"x"), partial(txn.put, A, b"x", b"3")):
        with pytest.raises(IllegalState, match="commit again"):
            call()
    assert txn.commit().txn_id == txn.txn_id


def idle(bank: Bank, sweeps: Replica, table: str) -> None:
    """The client gets no answer while another client's replica sweeps."""
    for number in range(3):
        bank.clock.sleep(2.0)
        bank.put(bank.blind, table, other=str(number))
        sweeps.snapshot().close()
        for _ in range(5):
            sweeps.step(bank.clock.monotonic())


def by_keepalive(rows: Replica, table: str) -> TableTransaction:
    txn = rows.begin(keepalive=30.0)
    txn.get(table, b"key")
    return txn


def by_token(rows: Replica, table: str) -> TableTransaction:
    txn = rows.begin()
    txn.put(table, b"key", b"2")
    return txn


def by_writes(rows: Replica, table: str) -> TableTransaction:
    txn = rows.begin()
    txn.put(table, b"key", bytes(8192))
    return txn


def by_token_after_reads(rows: Replica, table: str) -> TableTransaction:
    """The program has to begin again; only `transact` does so by itself."""
    txn = rows.begin()
    assert txn.get(table, b"other") == b"0"
    with pytest.raises(TransactionAborted, match="begin again"):
        txn.token()
    with pytest.raises(IllegalState, match="over"):
        txn.get(table, b"key")
    rows.transact(lambda txn: (txn.get(table, b"other"), txn.token()))
    return rows.begin()


def test_where_nothing_is_committed_a_client_that_was_idle_begins_at_a_new_moment(
    bank: Bank,
) -> None:
    table = "bank/short"
    bank.client.create_table(table, settings={"table.history.ms": 1500})
    with bank.client.replica(table, threads=False) as rows:
        rows.snapshot().close()
        bank.clock.sleep(5.0)
        begun = 0

        def work(txn: TableTransaction) -> None:
            nonlocal begun
            begun += 1
            txn.get(table, b"key")
            txn.token()

        rows.transact(work)
        assert begun == 2


@pytest.mark.parametrize("begins", [by_keepalive, by_token, by_writes, by_token_after_reads])
def test_others_can_join_what_a_client_begins_that_was_idle(
    bank: Bank, begins: Callable[[Replica, str], TableTransaction]
) -> None:
    """Other replicas have swept what an old snapshot needs, because the transaction was not open."""
    table = "bank/short"
    bank.client.create_table(table, settings={"table.history.ms": 1500})
    let_read(bank.blind, reader_ports(bank))
    with bank.client.replica(table, threads=False) as rows:
        with bank.blind.replica(table, threads=False) as others:
            bank.put(bank.blind, table, other="0")
            rows.snapshot().close()
            others.snapshot().close()
            idle(bank, others, table)
            txn = begins(rows, table)
            with others.join(txn.token()) as part:
                assert part.get(table, b"other") == b"2"
            txn.commit()
        assert not rows._open


def test_an_ended_transaction_keeps_no_versions(bank: Bank) -> None:
    """A snapshot that stays open keeps all versions: of one that was not begun, aborted, or finished."""
    with bank.rows.begin(keepalive=600.0) as txn:
        token, before = txn.token(), set(bank.rows._open)
        part = bank.rows.join(token)
        part.get(A, b"k")
        bank.stop_controller()
        with pytest.raises(DeadlineExceeded), part:
            pass
        with pytest.raises(DeadlineExceeded):
            bank.rows.begin(keepalive=30.0)
        assert (part.is_over, set(bank.rows._open)) == (True, before)
        with pytest.raises(ZeroDivisionError), txn:
            raise ZeroDivisionError
        assert not bank.rows._open
        bank.start_controller()


def test_what_is_closed_is_not_used_on(bank: Bank) -> None:
    view, txn = bank.rows.snapshot(), bank.rows.begin()
    begun = [view.scan(A), view.scan(A, reverse=True), view.versions(A, b"k")]
    next(begun[0])
    next(begun[1])
    view.close()
    for rows in begun:
        with pytest.raises(IllegalState, match="the snapshot is closed"):
            next(rows)
    bank.rows.close()
    with pytest.raises(IllegalState, match="the replica is closed"):
        txn.put(A, b"k", b"2")


def test_a_forked_child_leaves_all_to_its_parent(bank: Bank) -> None:
    rows, own = bank.rows, own_writes.Scratch()
    view, txn = rows.snapshot(), rows.begin(keepalive=600.0)
    with txn, rows.join(txn.token()) as part:
        txn.put(A, b"k", b"2")
        for store in (rows._store, own._store):
            store.after_fork()
        for leaves in (rows, view, txn, part):
            leaves.__exit__(None, None, None)
        own.close()
        for call in (rows.snapshot, rows.begin, rows.lag, partial(rows.step, 0.0), txn.commit):
            with pytest.raises(NotForkSafe):
                call()
        for reader in (view, txn, part):
            with pytest.raises(NotForkSafe):
                reader.get(A, b"k")
        for store in (rows._store, own._store):
            assert (store.folder.exists(), store.forked) == (True, True)
            store.forked = False
        assert (view.get(A, b"k"), part.get(A, b"k"), txn.is_over) == (b"1", b"1", False)
        txn.abort()
        part.discard()
        own.close()
