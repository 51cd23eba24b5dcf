"""What commands about tables are refused for: settings, locks, bases; as `test_refusals`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.authorize import CREATORS
from anabranch.protocol.hybrid_time import from_s, to_s
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event
from tests.core.test_refusals import (
    ILLEGAL,
    INVALID,
    UNSUPPORTED,
    Lowered,
    Make,
    Row,
    after,
    alter,
    check_row,
    create,
    this,
)
from tests.core.test_registered_locks import Long
from tests.core.test_table_locks import PLAIN, A, B

COMPANION = f"{A}-base"


def made() -> Long:
    """Tables nyc/a and nyc/b, stream nyc/plain; T is open at a snapshot, its handle is writer w."""
    bank = Long()
    bank.grant("open", "nyc/*", CREATORS)
    bank.make(COMPANION, table_base=A)
    bank.make("nyc/x-base")
    bank.lock_reads(b"k")
    return bank


# -- settings --------------------------------------------------------------------------------------

TABLE_SETTINGS: dict[str, Row] = {
    "a stream becomes a table": (alter(PLAIN, table="true"), UNSUPPORTED, "can't be altered"),
    "retention": (alter(A, retention_ms="1"), UNSUPPORTED, "anabranch table compact"),
    "Kafka's compaction": (alter(A, cleanup_policy="compact"), UNSUPPORTED, "anabranch table compact"),
    "table=false": (create("nyc/new", table="false"), INVALID, "true, or leave it out"),
    "a ratio of 1": (alter(A, table_compact_ratio="1"), INVALID, "from 2"),
    "the companion's retention": (alter(COMPANION, retention_ms="1"), UNSUPPORTED, "bases has no setting"),
    "truncated": (this(r.TruncateStream(A, 1)), INVALID, "anabranch table compact"),
    "its companion truncated": (this(r.TruncateStream(COMPANION, 1)), INVALID, "compact that again"),
    "its companion deleted": (this(r.DeleteStream(COMPANION)), ILLEGAL, "goes with that table"),
    "the name of a companion": (create(f"{B}-base"), INVALID, "choose another one"),
    "a table whose companion's name is taken": (
        create("nyc/x", table="true"), INVALID, "there is a stream nyc/x-base",
    ),
    "a table of a topic with records": (
        this(r.CreateStream("nyc/z", 1, {"table": "true"}, adopt=True)), INVALID, "begins empty",
    ),
    "a companion of no table": (create("nyc/z-base", table_base="nyc/z"), INVALID, "`compact_table`"),
}  # fmt: skip

# -- locks of a one-shot ---------------------------------------------------------------------------


def locking(**changes: Any) -> Make:
    """A one-shot with a lock on nyc/a that has these changes."""

    def make(bank: Long) -> r.OneShot:
        lock = bank.lock(A, b"k")._replace(**changes)
        return r.OneShot(bank.id("S"), "nyc", None, (event(B),), None, (lock,))

    return make


def locking_twice(bank: Long) -> r.OneShot:
    lock = bank.lock(A, b"k")
    return r.OneShot(bank.id("S"), "nyc", None, (event(B),), None, (lock, lock))


def row(key: bytes | None) -> Make:
    return lambda w: r.OneShot(w.id("S"), "nyc", None, (event(A, key),))


def adding(number: int, base: bytes | None) -> Make:
    """A one-shot that adds a number to a row of nyc/a; more of these are in `test_row_changes`."""
    change = r.RowChange(A, b"k", "ADD", number, base)
    return lambda w: r.OneShot(w.id("S"), "nyc", None, (), None, (w.lock(A),), (change,))


AHEAD = (1 << 63) - 1
LOCKS: dict[str, Row] = {
    "no table": (locking(table=PLAIN), INVALID, "make one with `create_table`"),
    "unknown table": (locking(table="nyc/none"), "UnknownStream", ""),
    "since a time to come": (locking(since=AHEAD), INVALID, "a controller's reply"),
    "a newest commit after that": (locking(last=AHEAD), INVALID, "is not above it"),
    "points that fall": (locking(points=(2, 1)), INVALID, "points rise"),
    "a point twice": (locking(points=(1, 1)), INVALID, "points rise"),
    "many points": (locking(points=tuple(range(10_001))), INVALID, "10,000 are allowed"),
    "an empty range": (locking(ranges=(r.LockedRange(b"b", b"b"),)), INVALID, "ends above its beginning"),
    "ranges that overlap": (
        locking(ranges=(r.LockedRange(b"a", b"c"), r.LockedRange(b"b", None))), INVALID, "don't meet",
    ),
    "two ranges without an end": (
        locking(ranges=(r.LockedRange(b"a", None), r.LockedRange(b"b", None))), INVALID, "don't meet",
    ),
    "a table twice": (locking_twice, INVALID, "each table once"),
    "a row without a key": (row(b""), INVALID, "is not empty"),
    "a big key": (row(b"k" * 8193), INVALID, "8,192 are allowed"),
    "added to no number": (adding(1, b"five"), "NotANumber", "no decimal integer"),
    "added too much": (adding(AHEAD, b"1"), "NumberOverflow", "more than 64 bits"),
}  # fmt: skip

# -- derivations -----------------------------------------------------------------------------------

DERIVED = f"{A}-b-v1"
MISSING = "DerivationMissing"
B_1 = r.Derivation(A, "b", 1)


def derived() -> Long:
    """As `made`; nyc/a is the source of derivation b, version 1."""
    bank = made()
    bank.ask("level", r.SetFeatureLevel(3), lane="admin")
    bank.make(DERIVED, table="true", derived=f"{A} b 1")
    bank.ask("derive", r.AlterStream(A, {"derive.b": "+1"}, ()))
    assert bank.state.derivations[A] == (B_1,)
    return bank


def writing(table: str, *ran: r.Derivation, change: bool = False) -> Make:
    """A one-shot by a sender that ran these derivations."""

    def make(bank: Long) -> r.OneShot:
        changes = (r.RowChange(table, b"k", "ADD", 1, None),) if change else ()
        events = () if change else (event(table),)
        locks = (bank.lock(table),) if change else ()
        return r.OneShot(bank.id("S"), "nyc", None, events, None, locks, changes, (), None, ran)

    return make


def touching(table: str, *ran: r.Derivation) -> Make:
    return lambda bank: r.Touch(bank.token("T"), table, bank.writer("w"), ran)


def in_force(change: str, **more: str) -> Make:
    return this(r.AlterStream(A, {"derive.b": change} | more, ()))


DERIVATIONS: dict[str, Row] = {
    "a source": (writing(A), MISSING, "client.derive"),
    "by another version": (writing(A, B_1._replace(version=2)), MISSING, "version 1"),
    "by that of another table": (writing(A, B_1._replace(source=B)), MISSING, "version 1"),
    "a derived table": (writing(DERIVED), MISSING, "has the rows"),
    "by a journal": (touching(A), MISSING, "client.derive"),
    "a derived table by a journal": (touching(DERIVED), MISSING, "has the rows"),
    "changed": (writing(A, B_1, change=True), MISSING, "`put` the row"),
    "no sign": (in_force("2"), INVALID, "adds version 2"),
    "with another setting": (in_force("+2", retention="1"), "UnsupportedSetting", "of its own"),
    "taken back": (this(r.AlterStream(A, {}, ("derive.b",))), "UnsupportedSetting", "of its own"),
    "no version": (in_force("+0"), INVALID, ""),
    "without a table": (in_force("+2"), "UnknownStream", "v2"),
    "the source deleted": (this(r.DeleteStream(A)), ILLEGAL, "drop_derivation"),
    "the table deleted": (this(r.DeleteStream(DERIVED)), ILLEGAL, "drop_derivation"),
}  # fmt: skip

# -- registered locks ------------------------------------------------------------------------------


def lock(*keys: bytes, span: Any = None, table: str = A, label: str = "T", **given: Any) -> Make:
    """T registers its second set."""
    ranges = () if span is None else (r.LockedRange(*span),)
    points = tuple(sorted(int.from_bytes(key, "big") for key in keys))
    locks = (r.TableLocks(table, 0, 0, points, ranges),)
    given = {"sequence": 2, "locks": locks, **given}
    return lambda w: r.LockReads(w.token(label), w.writer("w"), **given)


def naming(*tables: str, label: str = "T") -> Make:
    return lambda w: r.LockReads(w.token(label), w.writer("w"), 0, tables=tables)


def validating(sequence: int, through: int) -> Make:
    """The client says that its sets up to this one hold through a time."""
    return lambda w: lock(
        sequence=0, locks=(), validated=(r.Validated(w.writer("w"), sequence, through),)
    )(w)


def without_snapshot(world: World) -> None:
    world.begin("P")


def break_lock(bank: Long) -> None:
    bank.locked(b"broken")
    assert bank.put((A, b"broken")) == "COMMITTED"


def read_from_w(bank: Long) -> None:
    """T read what its writer w wrote, and so a commit has to take that."""
    bank.wrote(b"x", writer="v")
    read = (r.WriterAt(bank.writer("v"), 1),)
    assert bank.lock_reads(b"l", read_from=read) == "ReadsLocked"


REGISTERED: dict[str, Row] = {
    "no table": (lock(b"k", table=PLAIN), INVALID, "make one with `create_table`"),
    "unknown table": (lock(b"k", table="nyc/none"), "UnknownStream", ""),
    "times of no table": (lock(table=PLAIN, sequence=0), INVALID, "make one with `create_table`"),
    "times of an unknown table": (lock(table="nyc/none", sequence=0), "UnknownStream", ""),
    "an empty range": (lock(span=(b"b", b"b")), INVALID, "ends above its beginning"),
    "a long range": (lock(span=(b"k" * (1 + (256 << 10)), None)), INVALID, "registers locks"),
    "many points": (lock(*(b"%05d" % n for n in range(10_001))), "TooManyLocks", "lock=False"),
    "the same number with others": (lock(b"l", sequence=1), INVALID, "give it a higher number"),
    "of writer 0": (lambda w: replace(lock(b"l")(w), writer=0), INVALID, "no writer is 0"),
    "read from a stranger": (lock(b"l", read_from=(r.WriterAt(77, 1),)), INVALID, "which the transaction has not"),
    "without a snapshot": (after(without_snapshot, then=lock(b"k", label="P")), INVALID, "without a snapshot"),
    "validated through a time to come": (validating(1, AHEAD), INVALID, "no time of a reply"),
    "validated before it is registered": (validating(2, 1), INVALID, "is not registered"),
    "prepared": (
        lambda w: replace(w.committing("T"), prepare=r.Prepare(b"", b"")), "FeatureNotEnabled", "level 3",
    ),
    "locks of all": (Lowered("REGISTERED", 2, lock(b"1", b"2")), "TooMuchLocked", "wait for some"),
    "ranges of a table": (Lowered("RANGES", 0, lock(span=(b"a", b"b"))), "TooMuchLocked", "its share is 0:"),
    "a table again": (Lowered("TABLES", 1, naming(A)), "locked", ""),
    "more tables": (Lowered("TABLES", 1, naming(A, B)), INVALID, "a transaction that reads"),
    "aborted": (after(lambda w: w.abort("T"), then=lock(b"m")), "TransactionAborted", "begin a new one"),
    "broken": (after(break_lock, then=lambda w: r.Touch(w.token("T"), PLAIN)), "LocksBroken", A),
    "a snapshot that is not kept": (
        after(
            lambda w: w.open("U", keepalive_ms=80_000_000), lambda w: w.wait(7_200_000), then=naming(B, label="U"),
        ),
        "SnapshotExpired", "`table.history.ms`",
    ),
    "read from a writer that is left out": (
        after(read_from_w, then=lambda w: w.committing("T", receipts=())), "WritersUnfinished", "has to take that",
    ),
}  # fmt: skip

# -- bases -----------------------------------------------------------------------------------------


def base(
    *streams: str, label: str = "D", ahead: int = 0, number: int | None = None, series: str = COMPANION
) -> Make:  # fmt: skip
    """A transaction with a part in each of these streams commits as a base of nyc/a; its publication."""

    def make(bank: Long) -> r.PublishBase:
        bank.abort("T")  # whose snapshot is older
        bank.wait(7_200_000)
        bank.describe(stream=A)
        at = to_s(bank.result.streams[0].oldest_snapshot) + ahead if number is None else number
        bank.begin(label)
        for stream in streams:
            bank.wrote(b"x", stream, label, writer=label)
        bank.commit(label, name=series, number=at)
        for _ in range(4):
            bank.wait(10)
        assert bank.row(label).state == "COMMITTED", bank.get(label)
        return r.PublishBase(A, from_s(at), bank.id(label))

    return make


def overtaken(bank: Long) -> r.PublishBase:
    first: r.PublishBase = base(COMPANION)(bank)
    base(COMPANION, label="E")(bank)
    return first


def in_one_command(bank: Long) -> r.PublishBase:
    """A one-shot takes no number."""
    assert bank.one_shot("D", event(COMPANION)) == "D COMMITTED 1"
    return r.PublishBase(A, from_s(5), bank.id("D"))


def publish(at: int = from_s(5), txn: str = "D", table: str = A) -> Make:
    return lambda w: r.PublishBase(table, at, w.id(txn))


BASES: dict[str, Row] = {
    "a base": (base(COMPANION), "", ""),
    "later than a snapshot": (base(COMPANION, ahead=1), "NotReady", "has to be readable from"),
    "into the table, too": (base(COMPANION, A), ILLEGAL, f"commit one to {COMPANION} alone"),
    "into the table instead": (base(A), ILLEGAL, "alone"),
    "of nothing": (base(), ILLEGAL, "alone"),
    "in one command": (in_one_command, ILLEGAL, "alone"),
    "of another series": (base(COMPANION, series="mine"), ILLEGAL, "make another base"),
    "with a later one": (overtaken, ILLEGAL, "make another base"),
    "open": (publish(txn="T"), ILLEGAL, "no base"),
    "unknown": (publish(), ILLEGAL, "no base"),
    "no second": (publish(4097), INVALID, "whole second"),
    "of no table": (publish(table=PLAIN), INVALID, "no table"),
}  # fmt: skip

TABLES: dict[str, tuple[Callable[[], World], str | None, dict[str, Row]]] = {
    "settings": (made, "admin", TABLE_SETTINGS),
    "locks": (made, None, LOCKS),
    "registered": (made, None, REGISTERED),
    "bases": (made, "admin", BASES),
    "derivations": (derived, None, DERIVATIONS),
}


@pytest.mark.parametrize(
    ("command", "case"), [(command, case) for command, rows in TABLES.items() for case in rows[2]]
)
def test_a_command_about_a_table_is_answered(
    command: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_world, lane, rows = TABLES[command]
    check_row(make_world(), rows[case], monkeypatch, lane)
