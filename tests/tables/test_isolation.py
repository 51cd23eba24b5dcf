"""What transactions on tables promise, over a real controller and the log in memory: anomalies, locks, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NonTransactional,
    NotReady,
    RowExists,
    RowMissing,
    TooManyLocks,
    UnknownStream,
    UnsupportedSetting,
)
from tests.tables.test_transactions import A, B, Bank
from tests.tables.test_transactions import bank as bank


def put(bank: Bank, **rows: int | None) -> None:
    """Blind writes to table A by another client; None deletes."""
    with bank.blind.begin("bank") as txn:
        for key, value in rows.items():
            txn.write(A, None if value is None else b"%d" % value, key=key.encode())
        txn.commit()


# -- anomalies: Hermitage's, on keys 1 and 2 with 10 and 20 ---------------------------------------------
# A step is `T action`; actions: r1 (read key 1), w1=11, p (scan all), d1 (delete), c (commit), a (abort).
# "broken?": as soon as the replica knows. All begin at first, but for those with a step b.
# The result of a step that has one stands behind "->"; "broken" is LocksBroken.

HERMITAGE = {
    "G0 write cycles": """
        1 w1=11
        2 w1=12
        1 w2=21
        1 c -> ok
        2 w2=22
        2 c -> {serializable: ok, snapshot: broken}
        3 b
        3 p -> {serializable: 1=12 2=22, snapshot: 1=11 2=21}""",
    "G1a aborted reads": """
        1 w1=101
        2 p -> 1=10 2=20
        1 a
        2 p -> 1=10 2=20
        2 c -> ok""",
    "G1b intermediate reads": """
        1 w1=101
        2 p -> 1=10 2=20
        1 w1=11
        1 c -> ok
        2 p -> 1=10 2=20
        2 c -> ok""",
    "G1c circular information flow": """
        1 w1=11
        2 w2=22
        1 r2 -> 20
        2 r1 -> 10
        1 c -> ok
        2 c -> {serializable: broken, snapshot: ok}""",
    "OTV observed transaction vanishes": """
        1 w1=11
        1 w2=19
        2 w1=12
        1 c -> ok
        3 r1 -> 10
        2 w2=18
        3 r2 -> 20
        2 c -> {serializable: ok, snapshot: broken}
        3 r2 -> 20
        3 r1 -> 10
        3 c -> ok""",
    "PMP predicate-many-preceders": """
        1 p -> 1=10 2=20
        2 w3=30
        2 c -> ok
        1 p -> 1=10 2=20
        1 c -> ok""",
    "PMP write predicates": """
        1 w1=20
        1 w2=30
        2 p -> 1=10 2=20
        2 d2
        1 c -> ok
        2 c -> broken""",
    "P4 lost update": """
        1 r1 -> 10
        2 r1 -> 10
        1 w1=11
        2 w1=11
        1 c -> ok
        2 c -> broken""",
    "G-single read skew": """
        1 r1 -> 10
        2 r1 -> 10
        2 r2 -> 20
        2 w1=12
        2 w2=18
        2 c -> ok
        1 r2 -> 20
        1 c -> ok""",
    "G-single, predicates": """
        1 p -> 1=10 2=20
        2 w1=12
        2 w3=18
        2 c -> ok
        1 p -> 1=10 2=20
        1 w4=1 -> {serializable: broken?, snapshot: }
        1 c -> {serializable: broken, snapshot: ok}""",
    "G2-item write skew": """
        1 r1 -> 10
        1 r2 -> 20
        2 r1 -> 10
        2 r2 -> 20
        1 w1=11
        2 w2=21
        1 c -> ok
        2 c -> {serializable: broken, snapshot: ok}""",
    "G2 anti-dependency cycles, predicates": """
        1 p -> 1=10 2=20
        2 p -> 1=10 2=20
        1 w3=30
        2 w4=42
        1 c -> ok
        2 c -> {serializable: broken, snapshot: ok}""",
    "G2 with a reader between (Fekete)": """
        1 p -> 1=10 2=20
        2 w2=25
        2 c -> ok
        3 b
        3 p -> 1=10 2=25
        3 c -> ok
        1 w1=0 -> {serializable: broken?, snapshot: }
        1 c -> {serializable: broken, snapshot: ok}""",
    "a row that is not there": """
        1 r9 -> -
        2 r9 -> -
        1 w9=1
        2 w9=2
        1 c -> ok
        2 c -> broken""",
    "YDB's eight steps, a whole row put blindly and read back": """
        1 r2 -> 20
        2 w1=2
        2 c -> ok
        1 w1=3
        1 r1 -> 3
        1 c -> {serializable: ok, snapshot: broken}
        3 b
        3 r1 -> {serializable: 3, snapshot: 2}""",
    "YDB's eight steps, the row kept": """
        1 r1 -> 10
        2 w1=2
        2 c -> ok
        1 w1=13 -> {serializable: broken?, snapshot: }
        1 c -> broken""",
}


def expected(text: str, isolation: str) -> str:
    if text.startswith("{"):
        each = dict(part.split(":") for part in text.strip("{}").split(","))
        text = {name.strip(): found.strip() for name, found in each.items()}[isolation]
    return text


def act(txn: Any, action: str, tables: Sequence[str] = (A,)) -> str:
    """Carry out an action. ``tables``: the rows of keys 0, 1 and so on are in these, in turn."""
    key = action[1:2].encode()
    table = tables[int(key) % len(tables)] if key.isdigit() else ""
    match action[0]:
        case "r":
            return (txn.get(table, key) or b"-").decode()
        case "w":
            txn.put(table, key, action.partition("=")[2].encode())
        case "d":
            txn.delete(table, key)
        case "p":
            rows = sorted(row for each in tables for row in txn.scan(each))
            return " ".join(f"{k.decode()}={v.decode()}" for k, v in rows)
        case "a":
            txn.abort()
        case "c":
            txn.commit(timeout=20.0)
            return "ok"
    return ""


def play(rows: Replica, name: str, tables: Sequence[str] = (A,), **given: Any) -> None:
    """Play an anomaly. ``given``: arguments of `Replica.begin`."""
    rows.snapshot().close()
    steps = [line.strip().partition(" -> ") for line in HERMITAGE[name].strip().splitlines()]
    later = {step[0] for step, _, _ in steps if step.endswith(" b")}
    names = {step[0] for step, *_ in steps} - later
    begun = {who: rows.begin(**given) for who in sorted(names)}
    for step, _, told in steps:
        who, action = step.split()
        if action == "b":
            begun[who] = rows.begin(**given)
            continue
        try:
            found = act(begun[who], action, tables)
        except LocksBroken as error:
            found = "broken" if error.table in tables and len(error.by) == 16 else repr(error)
        wanted = expected(told, given.get("isolation", "serializable"))
        if wanted.endswith("?"):
            assert found in ("", wanted[:-1]), step
        else:
            assert found == wanted, step
    for txn in begun.values():
        txn.abort()


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("name", HERMITAGE)
def test_each_anomaly_of_hermitage_is_prevented(bank: Bank, name: str, isolation: Any) -> None:
    put(bank, **{"1": 10, "2": 20, "k": None, "x": None})
    play(bank.rows, name, isolation=isolation)


def test_own_writes_and_reads_in_order(bank: Bank) -> None:
    put(bank, k=None, x=None)
    bank.rows.snapshot().close()
    with bank.rows.begin() as txn:
        for key in (b"b", b"d", b"a\0"):
            txn.insert(A, key, b"1")
        txn.commit()
    with bank.rows.begin() as txn:
        txn.put(A, b"c", b"2")
        txn.delete(A, b"b")
        assert list(txn.scan(A)) == [(b"a\0", b"1"), (b"c", b"2"), (b"d", b"1")]
        assert [k for k, _ in txn.scan(A, reverse=True)] == [b"d", b"c", b"a\0"]
        assert [k for k, _ in txn.scan(A, low=b"b", limit=1)] == [b"c"]
        assert [k for k, _ in txn.scan(A, prefix=b"a")] == [b"a\0"]
        assert txn.get(A, b"b") is None
        with pytest.raises(RowExists):
            txn.insert(A, b"d", b"")
        with pytest.raises(RowMissing):
            txn.replace(A, b"b", b"")
        txn.commit()
    with bank.rows.begin() as txn:
        assert [k for k, _ in txn.scan(A)] == [b"a\0", b"c", b"d"]
        asked = txn.commit()
        assert (asked.counts.committed, asked.commit_timestamp) == (0, txn.timestamp)


# What is scanned, which row another one writes meanwhile, and whether the locks hold.
SCANS: list[tuple[dict[str, Any], str, bool]] = [
    ({"limit": 2}, "d", True),
    ({"limit": 2}, "b", False),
    ({"limit": 1, "reverse": True}, "d", True),
    ({"limit": 1, "reverse": True}, "z", False),
    ({"low": b"b", "high": b"d"}, "d", True),
    ({"low": b"b", "high": b"d"}, "bb", False),
    ({"prefix": b"a"}, "b", True),
    ({"prefix": b"a"}, "ab", False),
    ({"lock": False}, "b", True),
]


def test_a_scan_locks_what_it_saw(bank: Bank) -> None:
    put(bank, a=1, c=1, e=1)
    bank.rows.snapshot().close()
    for how, written, holds in SCANS:
        with bank.rows.begin() as txn:
            assert list(txn.scan(A, **how))
            put(bank, **{written: 1})
            txn.put(B, b"k", b"1")
            if holds:
                txn.commit(timeout=20.0)
            else:
                with pytest.raises(LocksBroken):
                    txn.commit(timeout=20.0)
        put(bank, **{written: None})
        bank.rows.snapshot().close()


def test_a_big_commit_breaks_the_locks_on_its_keys_alone(bank: Bank) -> None:
    """Digests tell the keys of big batches, too: a transaction whose locks hold is sent once."""
    held, broken = bank.rows.begin(), bank.rows.begin()
    assert (held.get(A, b"x"), broken.get(A, b"k")) == (b"1", b"1")
    with bank.by_journal.begin("bank") as txn:
        txn.write(A, b"2", key=b"k")
        txn.write_many(A, [(b"v", b"o%d" % n) for n in range(4_400)])
        txn.commit()
    held.put(B, b"held", b"1")
    assert held.commit(timeout=20.0).counts.committed == 1
    assert bank.sent == 1
    broken.put(B, b"broken", b"1")
    with pytest.raises(LocksBroken, match="was read as of"):
        broken.commit(timeout=20.0)


Refused = list[tuple[type[AnabranchError], Callable[[], Any]]]


def test_what_is_refused(bank: Bank) -> None:
    client, rows = bank.client, bank.rows
    client.create_stream("bank/plain")
    outside: Refused = [
        (InvalidArgument, lambda: client.replica("bank/plain")),
        (UnknownStream, lambda: client.replica("bank/none")),
        (InvalidArgument, lambda: client.replica([A])),  # type: ignore[arg-type]
        (InvalidArgument, lambda: client.system("commits", "bank", start=2, until=1)),
        (UnknownStream, lambda: client.system("commits", "bank/none")),
        (UnsupportedSetting, lambda: client.create_table("bank/t", settings={"retention.ms": 1})),
        (InvalidArgument, lambda: client.create_stream("bank/t", settings={"table": "no"})),
        (InvalidArgument, lambda: rows.begin(isolation="chaos")),  # type: ignore[arg-type]
        (NotReady, lambda: rows.snapshot(at=(1 << 63) - 1, timeout=20)),
    ]
    for error, call in outside:
        with pytest.raises(error):
            call()
    txn = rows.begin()
    inside: Refused = [
        (InvalidArgument, lambda: txn.get(A, b"")),
        (InvalidArgument, lambda: txn.put(A, b"k" * 8193, b"")),
        (InvalidArgument, lambda: txn.put(A, b"k", None)),  # type: ignore[call-overload]
        (InvalidArgument, lambda: txn.put("bank/plain", b"k", b"")),
        (InvalidArgument, lambda: txn.get("no/table", b"k")),
        (InvalidArgument, lambda: txn.scan(A, low=b"b", high=b"a")),
        (InvalidArgument, lambda: txn.scan(A, prefix="a")),  # type: ignore[call-overload]
    ]
    for error, call in inside:
        with pytest.raises(error):
            call()
    for number in range(10_000):
        txn.lock(A, b"%d" % number)
    with pytest.raises(TooManyLocks):
        txn.get(A, b"one more")
    txn.abort()
    with pytest.raises(IllegalState, match="over"):
        txn.get(A, b"k")


def at_once(client: Client) -> dict[str, Callable[[], Any]]:
    """Calls that take effect at once, whatever becomes of a transaction."""
    return {
        "create_stream": lambda: client.create_stream("bank/new"),
        "create_table": lambda: client.create_table("bank/made"),
        "compact_table": lambda: client.compact_table(A),
        "scale": lambda: client.scale(A, 3),
        "alter_stream": lambda: client.alter_stream(A, {"segment.ms": 60_000}),
        "forget_stream": lambda: client.forget_stream(A),
        "delete_stream": lambda: client.delete_stream(A),
        "recover_stream": lambda: client.recover_stream(A),
        "truncate_stream": lambda: client.truncate_stream(A, 1 << 62),
        "create_processor": lambda: client.create_processor("bank/p", A),
        "reset_processor": lambda: client.reset_processor("bank/p", "begin"),
        "mark_copy": lambda: client.mark_copy(
            "bank/q", "bank/p", "copying", origin_resets=0, resets=0
        ),
        "alter_processor": lambda: client.alter_processor("bank/p", drop=[A]),
        "delete_processor": lambda: client.delete_processor("bank/p"),
        "import_group": lambda: client.import_group("bank/p", "group"),
        "set_series": lambda: client.set_series("bank", "s", 1, expected=None),
        "reset_group": lambda: client.reset_group("group", A, "begin"),
        "add_lane": lambda: client.add_lane("new", ("User:new",)),
        "block_lane": lambda: client.block_lane("new"),
        "unblock_lane": lambda: client.unblock_lane("new"),
        "grant": lambda: client.grant("new", "*", ("write",)),
        "revoke": lambda: client.revoke("new", "*"),
    }


def test_calls_that_take_effect_at_once_are_refused_inside(bank: Bank) -> None:
    client = bank.client
    before = {s.stream: s for s in client.streams("bank")}

    def refused(_: object = None) -> None:
        for call, make in at_once(client).items():
            with pytest.raises(NonTransactional, match=f"^{call} inside the open"):
                make()

    with bank.rows.begin() as txn:
        refused()
        assert txn.get(A, b"none") is None
        # Reading, another thread or client are no part of it.
        client.describe(A)
        put(bank, other=1)
        assert bank.rows.transact(lambda inner: inner.get(A, b"none")).value is None
        with client.outside():
            bank.rows.transact(lambda inner: inner.put(A, b"none", b"inner"))
        refused()
        thread = Thread(target=client.create_stream, args=("bank/2",))
        thread.start()
        thread.join()
        bank.new_client().create_stream("bank/3")
        txn.abort()
        client.create_stream("bank/4")
    with pytest.raises(NonTransactional):
        bank.rows.transact(lambda txn: client.scale(A, 3))
    bank.rows.transact(refused)
    with pytest.raises(ZeroDivisionError), bank.rows.begin():
        raise ZeroDivisionError
    kept = bank.rows.begin()  # no `with`: nothing says where it ends
    client.create_stream("bank/5")
    kept.abort()
    found = {s.stream: s for s in client.streams("bank")}
    assert found.keys() - before.keys() == {f"bank/{n}" for n in (2, 3, 4, 5)}
    for name, was in before.items():
        assert replace(found[name], oldest_snapshot=was.oldest_snapshot) == was


def test_a_transaction_inside_another_one_is_not_committed(bank: Bank) -> None:
    client, rows = bank.client, bank.rows

    def write(txn: Any) -> None:
        txn.write("bank/events", b"inner", key=b"k")

    client.create_stream("bank/events")
    long = rows.begin(keepalive=60)
    commits: tuple[Callable[[], object], ...] = (
        lambda: client.transact(write),
        lambda: client.transact(write, name="n"),
        lambda: rows.transact(write),
        lambda: rows.transact(lambda txn: txn.delete(A, b"1")),
        lambda: long.commit(name="n"),
    )
    with client.begin("bank") as outer:
        for inner in commits:
            with pytest.raises(NonTransactional, match=r"^commit inside the open transaction <Tra"):
                inner()
        other = client.begin("bank")
        write(other)
        for end in (other.commit, other.prepare):
            with pytest.raises(NonTransactional):
                end()
        write(outer)
        outer.commit()
        assert other.commit().counts.committed == 1
    assert long.commit(name="n").name == "n"
    assert len(bank.events("bank/events")) == 2


def test_transactions_side_by_side_end_from_the_first_one_on(bank: Bank) -> None:
    client = bank.client
    with client.begin("bank") as first, bank.rows.begin() as second:
        first.write(B, b"1", key=b"side")
        second.put(A, b"side", b"2")
        with pytest.raises(
            NonTransactional, match=r"inside the open transaction <Transaction bank"
        ):
            second.commit()
        first.commit()
        second.commit()
    with client.begin("bank") as txn:
        with client.join(txn.token()) as writer:
            writer.write(B, b"3", key=b"side")
            with pytest.raises(NonTransactional):
                client.create_stream("bank/inside")
        txn.commit()
    with client.join(client.reserve("bank")), pytest.raises(NonTransactional, match="<Writer"):
        client.transact(lambda txn: txn.write(B, b"4", key=b"side"))
    assert [client.transact(lambda txn: txn.write(B, b"4", key=b"side")).counts.committed] == [1]


def test_a_commit_through_another_handle_of_the_transaction_is_its_own(bank: Bank) -> None:
    txn = bank.client.begin("bank")
    token = txn.token("all")
    with suppress(AlreadyCommitted), bank.client.join(token) as writer:  # it has not finished
        writer.write(B, b"1", key=b"k")
        txn.commit(receipts=[writer.flush()])
    assert txn.commit().counts.committed == 1
    with bank.client.begin("bank"):
        assert bank.client.commit(token).counts.committed == 1  # the token names the transaction
