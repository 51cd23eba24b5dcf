"""Derived tables, over a real controller and the log in memory: what writers owe them, and what look-ups see."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.batches.records import Record
from anabranch.client.calls.derivations import Deriving
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.derived_rows import READY, RETIRED, STATE_KEY, Function, of_value
from anabranch.errors import (
    AnabranchError,
    DerivationMissing,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NotReady,
    StreamExists,
    TooManyLocks,
    TransactionAborted,
    UniqueViolation,
    UnsupportedSetting,
)
from anabranch.ports import TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import journal_topic, stream_topic
from tests.client.world import World
from tests.conftest import some
from tests.tables.worlds import let_read, reader_ports

ORDERS, CARDS = "shop/orders", "shop/cards"
BY_CITY, BY_NAME = "shop/orders-by-city-v1", "shop/orders-by-name-v1"


def city(_: bytes, row: bytes) -> bytes | None:
    """The first word of a row, unless it is -."""
    found = row.split(b" ")[0]
    return None if found == b"-" else found


def name(_: bytes, row: bytes) -> list[bytes]:
    """The second word of a row."""
    return row.split(b" ")[1:2]


def city_and_name(key: bytes, row: bytes) -> list[bytes]:
    return [city(key, row) or b"", *name(key, row)]


class Shop(World):
    """A table with orders, which have a city and a name."""

    def __init__(self, level: int = LEVEL) -> None:
        super().__init__()
        self.client.create_table(ORDERS, 2)
        self.client.create_table(CARDS)
        admin = self.connect(lane=ADMIN_LANE)
        admin.grant("open", "shop/*", "operate")
        if level > 1:
            admin.feature_level(raise_to=level)
        let_read(self.client, reader_ports(self))
        self.opened: list[Replica] = []
        self.clients: list[Client] = []  # a client closes once nothing refers to it

    def other(self, *given: tuple[str, Any], version: int = 1, **how: Any) -> Client:
        """Another client, which has these functions; those named ``by-name`` are unique."""
        made = self.new_client(**how)
        self.clients.append(made)
        let_read(made, reader_ports(self))
        for derivation, function in given:
            made.derive(
                ORDERS, derivation, function, version=version, unique=derivation == "by-name"
            )
        return made

    def replica(self, client: Client, *tables: str) -> Replica:
        made = client.replica(*(tables or (ORDERS,)), threads=False)
        self.opened.append(made)
        return made

    def put(self, replica: Replica, **rows: str | None) -> int:
        def write(txn: TableTransaction) -> None:
            for key, row in rows.items():
                if row is None:
                    txn.delete(ORDERS, key.encode())
                else:
                    txn.put(ORDERS, key.encode(), row.encode())

        return replica.transact(write, timeout=5.0).commit_timestamp

    def close(self) -> None:
        for each in self.opened:
            each.close()


@pytest.fixture
def shop() -> Iterator[Shop]:
    made = Shop()
    yield made
    made.close()


def plain_write(shop: Shop, table: str) -> None:
    log = shop.cluster.log("producer")
    log.produce(TopicPartition(journal_topic(table), 0), [Record(0, 0, b"k", b"oslo ann")])


def rows_of(replica: Replica, table: str, at: int | None = None) -> dict[bytes, bytes]:
    with replica.snapshot(at=at) as view:
        return {key: row for key, row in view.scan(table) if key != STATE_KEY}


def found(replica: Replica, derivation: str, value: str) -> list[str]:
    with replica.begin() as txn:
        return [key.decode() for key, _ in txn.lookup(derivation, value.encode())]


def both(shop: Shop) -> Replica:
    """A replica of a client with an index by city, and a unique one by name."""
    shop.client.derive(ORDERS, "by-city", city)
    shop.client.derive(ORDERS, "by-name", name, unique=True)
    return shop.replica(shop.client)


# -- rows that follow ---------------------------------------------------------------------------------------


def test_derived_rows_are_part_of_the_commit(shop: Shop) -> None:
    rows = both(shop)
    assert rows.tables == (ORDERS, BY_CITY, BY_NAME)
    first = shop.put(rows, a="oslo ann", b="oslo bob", c="- cat")
    assert rows_of(rows, BY_CITY) == {b"oslo\0\0a": b"", b"oslo\0\0b": b""}
    assert rows_of(rows, BY_NAME) == {b"ann\0\0": b"a", b"bob\0\0": b"b", b"cat\0\0": b"c"}
    assert [c.timestamp for c in shop.commits(BY_CITY)][-1] == first
    then = shop.put(rows, a="rome ann", b=None, c="- dan")
    assert found(rows, "by-city", "oslo") == []
    assert found(rows, "by-city", "rome") == found(rows, "by-name", "ann") == ["a"]
    assert rows_of(rows, BY_CITY, then - 1) == {b"oslo\0\0a": b"", b"oslo\0\0b": b""}
    assert shop.client.check_derivation(ORDERS, "by-city") == []
    assert shop.client.check_derivation(ORDERS, "by-name", name) == []


def test_only_what_changes_is_written(shop: Shop) -> None:
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    before = len(shop.events(BY_CITY)), len(shop.events(BY_NAME))
    shop.put(rows, a="oslo eve")
    assert len(shop.events(BY_CITY)) == before[0]
    assert len(shop.events(BY_NAME)) == before[1] + 2


def several_writes(txn: TableTransaction) -> None:
    txn.put(ORDERS, b"a", b"oslo ann")
    txn.put(ORDERS, b"a", b"rome bob")
    txn.insert(ORDERS, b"b", b"oslo ann")
    txn.delete(ORDERS, b"b")
    txn.replace(ORDERS, b"a", b"bonn ann")
    txn.put(ORDERS, b"c", b"oslo cat")


def delete_some(txn: TableTransaction) -> None:
    txn.put(ORDERS, b"c", b"rome cat")
    assert txn.delete_range(ORDERS, b"a", b"c") == 2


def delete_all(txn: TableTransaction) -> None:
    assert txn.truncate(ORDERS) == 3
    txn.put(ORDERS, b"z", b"oslo ann")


def do_and_end(
    rows: Replica, work: Callable[[TableTransaction], None], ends: str, keepalive: float | None
) -> None:
    """Do this work in a transaction, and end it; ``prepare``: commit it once it is prepared."""
    with rows.begin(keepalive=keepalive) as txn:
        work(txn)
        if ends == "prepare":
            txn.prepare()
        if ends == "abort":
            txn.abort()
        else:
            txn.commit()


@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
@pytest.mark.parametrize("ends", ["commit", "prepare", "abort"])
def test_each_kind_of_write_is_followed(shop: Shop, ends: str, keepalive: float | None) -> None:
    rows = both(shop)
    for work in (several_writes, delete_some, delete_all):
        if work is not several_writes:
            shop.put(rows, a="oslo ann", b="rome bob", c="oslo cat")
        before = rows_of(rows, BY_NAME)
        do_and_end(rows, work, ends, keepalive)
        assert shop.client.check_derivation(ORDERS, "by-city") == []
        assert shop.client.check_derivation(ORDERS, "by-name") == []
        assert (rows_of(rows, BY_NAME) == before) == (ends == "abort")


def test_the_check_finds_differences(shop: Shop) -> None:
    """A function that is not the one that the rows were written by."""
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    assert shop.client.check_derivation(ORDERS, "by-city", name) == [
        f"{BY_CITY} b'ann\\x00\\x00a' of row b'a' is missing",
        f"{BY_CITY} b'oslo\\x00\\x00a' has no row b'a' with that value",
    ]


def test_values_may_have_any_bytes(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", lambda _, row: [row, row + b"\0", b""])
    rows = shop.replica(shop.client)
    for key in (b"\0", b"\0\xff", b"k"):
        with rows.begin() as txn:
            txn.put(ORDERS, key, b"\0" + key)
            txn.commit()
    assert shop.client.check_derivation(ORDERS, "by-city") == []
    with rows.begin() as txn:
        assert [key for key, _ in txn.lookup("by-city", b"")] == [b"\0", b"\0\xff", b"k"]
        assert [key for key, _ in txn.lookup("by-city", b"\0\0")] == [b"\0"]
        assert [key for key, _ in txn.lookup("by-city", b"\0\0\0")] == [b"\0"]
        assert [key for key, _ in txn.lookup("by-city", b"\0\0\xff")] == [b"\0\xff"]
        assert list(txn.lookup("by-city", b"", limit=1)) == [(b"\0", b"\0\0")]


def bad(_: bytes, row: bytes) -> Any:
    if row == b"no":
        raise ZeroDivisionError
    return {b"word": "word", b"long": b"x" * 9_000}.get(row, row)


@pytest.mark.parametrize(
    ("row", "error"),
    [(b"no", ZeroDivisionError), (b"word", InvalidArgument), (b"long", InvalidArgument)],
)
def test_an_error_of_the_function_leaves_the_transaction_as_it_was(
    shop: Shop, row: bytes, error: type[Exception]
) -> None:
    shop.client.derive(ORDERS, "by-city", bad)
    rows = shop.replica(shop.client)
    with rows.begin() as txn:
        txn.put(ORDERS, b"a", b"fine")
        with pytest.raises(error):
            txn.put(ORDERS, b"a", row)
        txn.put(ORDERS, b"b", b"too")
        txn.commit()
    assert rows_of(rows, ORDERS) == {b"a": b"fine", b"b": b"too"}
    assert rows_of(rows, BY_CITY) == {b"fine\0\0a": b"", b"too\0\0b": b""}


# -- writers without the function ---------------------------------------------------------------------------


def by_one_command(shop: Shop, _: Replica) -> None:
    with shop.other().begin("shop") as txn:
        txn.write(ORDERS, b"oslo", key=b"k")
        txn.commit()


def by_journals(shop: Shop, _: Replica) -> None:
    with shop.other(one_shot_bytes=0).begin("shop") as txn:
        txn.write(ORDERS, b"oslo", key=b"k")
        txn.commit()


def by_a_prepare(shop: Shop, _: Replica) -> None:
    with shop.other().begin("shop") as txn:
        txn.write(ORDERS, b"oslo", key=b"k")
        txn.prepare()


def by_a_writer_that_joins(shop: Shop, rows: Replica) -> None:
    with rows.begin(keepalive=60) as txn:
        txn.put(ORDERS, b"a", b"oslo")
        with shop.other().join(txn.token()) as writer:
            writer.write(ORDERS, b"oslo", key=b"k")


def by_a_replica_that_joins(shop: Shop, rows: Replica) -> None:
    other = shop.replica(shop.other(("by-city", city)))
    with rows.begin(keepalive=60) as txn, other.join(txn.token()) as part:
        part.put(ORDERS, b"k", b"oslo")


def without_the_function(shop: Shop, _: Replica) -> None:
    shop.put(shop.replica(shop.other()), k="oslo")


def with_another_version(shop: Shop, _: Replica) -> None:
    shop.put(shop.replica(shop.other(("by-city", name), version=2)), k="oslo")


def add(shop: Shop, rows: Replica) -> None:
    rows.transact(lambda txn: txn.add(ORDERS, b"k", 1))


def add_without_knowing(shop: Shop, _: Replica) -> None:
    rows = shop.replica(shop.other())
    learned = rows._shared.derivations.learn
    rows.transact(lambda txn: (learned(ORDERS, {}), txn.add(ORDERS, b"k", 1)))


def add_as_if_it_knew(shop: Shop, _: Replica) -> None:
    """Its commit says that it ran the function, which no sender of an addition can."""
    rows = shop.replica(shop.other())
    learned, of = rows._shared.derivations.learn, r.Derivation(ORDERS, "by-city", 1)

    def write(txn: TableTransaction) -> None:
        learned(ORDERS, {})
        txn.add(ORDERS, b"k", 1)
        txn._ran.add(of)

    rows.transact(write)


def put_without_knowing(shop: Shop, _: Replica) -> None:
    rows = shop.replica(shop.other())
    learned = rows._shared.derivations.learn
    rows.transact(lambda txn: (learned(ORDERS, {}), txn.put(ORDERS, b"k", b"1")))


def to_the_derived_table(shop: Shop, _: Replica) -> None:
    with shop.other().begin("shop") as txn:
        txn.write(BY_CITY, b"", key=b"k")
        txn.commit()


WRITERS = (
    by_one_command, by_journals, by_a_prepare, by_a_writer_that_joins, by_a_replica_that_joins,
    without_the_function, with_another_version, add, add_without_knowing, add_as_if_it_knew, put_without_knowing,
    to_the_derived_table,
)  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_writers_that_do_not_run_the_function_are_refused(
    shop: Shop, write: Callable[[Shop, Replica], None]
) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    rows = shop.replica(shop.client)
    with pytest.raises(DerivationMissing, match=r"shop/orders"):
        write(shop, rows)
    assert rows_of(rows, ORDERS) == rows_of(rows, BY_CITY) == {}


def test_rows_of_a_derived_table_are_not_written_by_hand(shop: Shop) -> None:
    rows = both(shop)
    with rows.begin() as txn:
        for write in (
            lambda: txn.put(BY_CITY, b"k", b""),
            lambda: txn.delete(BY_CITY, b"k"),
            lambda: txn.truncate(BY_NAME),
            lambda: txn.add(BY_NAME, b"k", 1),
        ):
            with pytest.raises(InvalidArgument, match="derived from shop/orders"):
                write()


@pytest.mark.parametrize("table", [ORDERS, BY_CITY])
def test_plain_writes_are_rejected_and_counted(shop: Shop, table: str) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    rows = shop.replica(shop.client)
    plain_write(shop, table)
    shop.put(rows, a="rome")
    shop.client.describe(table)
    assert rows_of(rows, ORDERS) == {b"a": b"rome"}
    assert shop.client.describe(table).rejected == {"plain_write": 1}


def test_a_successor_refuses_the_same(shop: Shop) -> None:
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    shop.stop_controller()
    shop.start_controller()
    with pytest.raises(DerivationMissing):
        by_one_command(shop, rows)
    shop.put(rows, a="rome ann")
    assert found(rows, "by-city", "rome") == ["a"]


def test_all_writes_of_a_transaction_run_the_same_versions(shop: Shop) -> None:
    """A version that comes into force between two of them counts for neither."""
    shop.client.derive(ORDERS, "by-city", city)
    rows = shop.replica(shop.client)
    known = shop.client._shared.derivations
    with rows.begin() as txn:
        known.learn(ORDERS, {})
        txn.put(ORDERS, b"a", b"oslo ann")
        known.forget()
        txn.put(ORDERS, b"b", b"oslo bob")
        with pytest.raises(DerivationMissing):
            txn.commit()
    assert rows_of(rows, ORDERS) == {}


def test_rejected_plain_writes_stay_rejected(shop: Shop) -> None:
    """Also if the derivation is dropped, and a successor reads the journal again."""
    shop.client.derive(ORDERS, "by-city", city)
    plain_write(shop, ORDERS)
    assert shop.client.describe(ORDERS).rejected == {"plain_write": 1}
    shop.client.drop_derivation(ORDERS, "by-city")
    shop.stop_controller()
    shop._stores[0].restore({})
    shop.start_controller()
    plain_write(shop, ORDERS)
    shop.client.describe(ORDERS)
    assert len(shop.events(ORDERS)) == 1


# -- a value that occurs once -------------------------------------------------------------------------------


def test_a_value_occurs_once(shop: Shop) -> None:
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    with rows.begin() as txn:
        txn.put(ORDERS, b"b", b"oslo bob")
        with pytest.raises(UniqueViolation, match=r"b'a' of shop/orders"):
            txn.put(ORDERS, b"b", b"oslo ann")
        assert txn.get(ORDERS, b"b") == b"oslo bob"
        txn.put(ORDERS, b"a", b"oslo eve")
        txn.put(ORDERS, b"c", b"oslo ann")
        txn.commit()
    assert found(rows, "by-name", "ann") == ["c"]
    assert shop.client.check_derivation(ORDERS, "by-name") == []


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
def test_of_two_writers_of_a_value_one_commits(
    shop: Shop, isolation: Any, keepalive: float | None
) -> None:
    rows = both(shop)
    with (
        rows.begin(isolation=isolation, keepalive=keepalive) as one,
        rows.begin(isolation=isolation, keepalive=keepalive) as other,
    ):
        one.put(ORDERS, b"a", b"oslo ann")
        other.put(ORDERS, b"b", b"rome ann")
        with shop.client.outside():
            one.commit()
            with pytest.raises((LocksBroken, AnabranchError)) as refused:
                other.commit()
        assert "locks" in str(refused.value) or "written by" in str(refused.value)
    with pytest.raises(UniqueViolation):
        shop.put(rows, b="rome ann")


@pytest.mark.parametrize("isolation", ["serializable", "snapshot"])
def test_the_row_before_is_locked(shop: Shop, isolation: Any) -> None:
    """Otherwise the entry of a row that came meanwhile would stay."""
    rows = both(shop)
    with rows.begin(isolation=isolation) as txn:
        txn.put(ORDERS, b"a", b"oslo ann")
        with shop.client.outside():
            shop.put(rows, a="rome bob")
        with pytest.raises(LocksBroken):
            txn.commit()
    assert shop.client.check_derivation(ORDERS, "by-city") == []


# -- look-ups -----------------------------------------------------------------------------------------------

MEANWHILE = {
    "a row of the value comes": ({"c": "oslo cat"}, True),
    "a row of the value goes": ({"a": None}, True),
    "a row of the value gets another": ({"a": "rome ann"}, True),
    "a row of the value changes otherwise": ({"a": "oslo eve"}, True),
    "a row of another value comes": ({"c": "osl cat"}, False),
    "a row of a longer value comes": ({"c": "oslo2 cat"}, False),
}


@pytest.mark.parametrize("case", MEANWHILE)
@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
def test_a_look_up_locks_what_it_saw(shop: Shop, case: str, keepalive: float | None) -> None:
    change, breaks = MEANWHILE[case]
    rows = both(shop)
    shop.put(rows, a="oslo ann", b="rome bob")
    with rows.begin(keepalive=keepalive) as txn:
        assert [key for key, _ in txn.lookup("by-city", b"oslo")] == [b"a"]
        txn.put(ORDERS, b"z", b"- zoe")
        with shop.client.outside():
            shop.put(rows, **change)  # type: ignore[arg-type]
        if breaks:
            with pytest.raises(AnabranchError, match="read"):
                txn.commit()
        else:
            txn.commit()


def test_a_look_up_sees_own_writes(shop: Shop) -> None:
    rows = both(shop)
    shop.put(rows, a="oslo ann", b="oslo bob")
    with rows.begin() as txn:
        txn.put(ORDERS, b"a", b"rome ann")
        txn.put(ORDERS, b"c", b"oslo cat")
        assert [key for key, _ in txn.lookup("by-city", b"oslo")] == [b"b", b"c"]
        assert list(txn.lookup("by-name", b"cat")) == [(b"c", b"oslo cat")]
        typed: Any = shop.client.stream(ORDERS, key=str, value=str)
        assert list(txn.lookup("by-name", b"cat", source=typed)) == [("c", "oslo cat")]


REFUSED_LOOKUPS = {
    "no such name": (("by-size", b"1"), {}, DerivationMissing, "no version"),
    "no bytes": (("by-city", "oslo"), {}, InvalidArgument, "bytes"),
    "of another table": (("by-city", b"oslo"), {"source": CARDS}, DerivationMissing, "no version"),
    "a limit that is none": (("by-city", b"oslo"), {"limit": -1}, InvalidArgument, "limit"),
}


@pytest.mark.parametrize("case", REFUSED_LOOKUPS)
def test_look_ups_are_refused_at_once(shop: Shop, case: str) -> None:
    given, named, error, text = REFUSED_LOOKUPS[case]
    with both(shop).begin() as txn, pytest.raises(error, match=text):
        txn.lookup(*given, **named)  # type: ignore[arg-type]


def test_tables_with_derivations_of_one_name(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    shop.client.derive(CARDS, "by-city", name)
    rows = shop.replica(shop.client, ORDERS, CARDS)
    with rows.begin() as txn:
        txn.put(CARDS, b"k", b"oslo ann")
        with pytest.raises(InvalidArgument, match="several"):
            txn.lookup("by-city", b"ann")
        assert [key for key, _ in txn.lookup("by-city", b"ann", source=CARDS)] == [b"k"]


# -- how a derivation comes into force ----------------------------------------------------------------------


def test_it_is_built_from_the_rows_that_are_there(shop: Shop) -> None:
    plain = shop.replica(shop.client)
    for first in range(0, 200, 50):
        shop.put(plain, **{f"k{n:03}": f"city{n % 7} name{n}" for n in range(first, first + 50)})
    rows = both(shop)
    assert len(rows_of(rows, BY_CITY)) == len(rows_of(rows, BY_NAME)) == 200
    assert shop.client.check_derivation(ORDERS, "by-city") == []
    assert found(rows, "by-name", "name77") == ["k077"]
    assert shop.client.describe(ORDERS).settings["derive.by-city"] == "1"


def test_values_that_occur_twice_fail_the_build(shop: Shop) -> None:
    plain = shop.replica(shop.client)
    shop.put(plain, a="oslo ann", b="rome ann")
    with pytest.raises(UniqueViolation):
        shop.client.derive(ORDERS, "by-name", name, unique=True)
    rows = shop.replica(shop.client)
    with rows.begin() as txn, pytest.raises(DerivationMissing, match=r"client\.rebuild"):
        txn.lookup("by-name", b"ann")
    shop.put(rows, b="rome bob")
    shop.client.rebuild(ORDERS, "by-name")
    assert found(rows, "by-name", "ann") == ["a"]
    assert shop.client.check_derivation(ORDERS, "by-name") == []


def test_an_entry_of_another_row_stays(shop: Shop) -> None:
    """While a unique table is built, two rows may have a value, and only one of them its entry."""
    plain = shop.replica(shop.client)
    shop.put(plain, a="oslo ann", b="rome ann")
    with pytest.raises(UniqueViolation):
        shop.client.derive(ORDERS, "by-name", name, unique=True)
    rows = shop.replica(shop.client)
    owner = rows_of(rows, BY_NAME).get(b"ann\0\0")
    with rows.begin() as txn:
        txn.write_entries(r.Derivation(ORDERS, "by-name", 1), [(b"ann\0\0", b"a")])
        txn.commit()
    shop.put(rows, b="rome bob")
    assert owner is None
    assert rows_of(rows, BY_NAME) == {b"ann\0\0": b"a", b"bob\0\0": b"b"}


def test_a_short_transaction_that_began_before_begins_again(shop: Shop) -> None:
    rows = shop.replica(shop.client)
    calls = []

    def write(txn: TableTransaction) -> None:
        calls.append(1)
        txn.put(ORDERS, b"a", b"oslo ann")
        if len(calls) == 1:
            with shop.client.outside():
                shop.other(("by-city", city))
            # As if another client had done it, and this one has the function, too.
            shop.client._shared.derivations.learn(ORDERS, {})

    of = r.Derivation(ORDERS, "by-city", 1)
    made = Function(of, "index", values=lambda _, row: frozenset(row.split(b" ")[:1]))
    shop.client._shared.derivations.add(made)
    rows.transact(write)
    assert len(calls) == 2
    assert rows_of(shop.replica(shop.client), BY_CITY) == {b"oslo\0\0a": b""}


@pytest.mark.parametrize("prepared", [False, True])
def test_a_long_transaction_that_began_before_is_waited_for(shop: Shop, prepared: bool) -> None:
    rows, other = shop.replica(shop.client), shop.other(timeout=2.0)
    with rows.begin(keepalive=60) as txn:
        txn.put(ORDERS, b"a", b"oslo ann")
        txn.flush()
        if prepared:
            txn.prepare()
        with pytest.raises(AnabranchError, match="writes to shop/orders without"):
            other.derive(ORDERS, "by-city", city)
        txn.commit()
    other.derive(ORDERS, "by-city", city)
    assert rows_of(shop.replica(other), BY_CITY) == {b"oslo\0\0a": b""}


def test_plain_writes_before_count(shop: Shop) -> None:
    plain_write(shop, ORDERS)
    shop.client.describe(ORDERS)
    shop.client.derive(ORDERS, "by-city", city)
    rows = shop.replica(shop.client)
    assert shop.client.check_derivation(ORDERS, "by-city") == []
    assert len(rows_of(rows, BY_CITY)) == len(rows_of(rows, ORDERS))


# -- versions -----------------------------------------------------------------------------------------------


def test_a_higher_version_is_built_while_others_write(shop: Shop) -> None:
    """Old clients write until the build begins; look-ups switch at one timestamp."""
    rows = both(shop)
    shop.put(rows, a="oslo ann", b="rome bob")
    new = shop.other()
    for version, function in ((1, city), (2, city_and_name)):
        new.derive(ORDERS, "by-city", function, version=version)
    new.derive(ORDERS, "by-name", name, unique=True)
    fresh = shop.replica(new)
    assert found(fresh, "by-city", "ann") == []
    shop.put(rows, c="oslo cat")
    assert new.rebuild(ORDERS, "by-city") == "shop/orders-by-city-v2"
    assert found(fresh, "by-city", "ann") == ["a"]
    assert found(fresh, "by-city", "oslo") == ["a", "c"]
    assert new.describe(ORDERS).settings["derive.by-city"] == "2"
    with pytest.raises(DerivationMissing, match="version 2"):
        shop.put(rows, d="oslo dan")
    shop.put(fresh, d="oslo dan", a=None)
    assert found(fresh, "by-city", "oslo") == ["c", "d"]
    assert new.check_derivation(ORDERS, "by-city") == []
    assert len(rows_of(fresh, BY_CITY)) == 3, "the former table is as it was at the switch"
    with rows.begin() as txn, pytest.raises(DerivationMissing, match="before the replica"):
        txn.lookup("by-city", b"oslo")


def test_a_build_locks_the_rows_that_it_reads(shop: Shop) -> None:
    """Otherwise it would write the entries of a row that another client has replaced meanwhile."""
    writer, builder = shop.other(("by-city", city)), shop.other(("by-city", city))
    writes = shop.replica(writer)
    shop.put(writes, a="oslo ann")
    tries = []

    def replaced_meanwhile(key: bytes, row: bytes) -> list[bytes]:
        tries.append(row)
        if len(tries) == 1:
            with builder.outside():
                shop.put(writes, a="rome bob")
        return city_and_name(key, row)

    writer.derive(ORDERS, "by-city", city_and_name, version=2)
    builder.derive(ORDERS, "by-city", replaced_meanwhile, version=2)
    builder.rebuild(ORDERS, "by-city")
    assert tries == [b"oslo ann", b"rome bob"]
    assert writer.check_derivation(ORDERS, "by-city") == []


@pytest.mark.parametrize("keepalive", [None, 60.0], ids=["one command", "journals"])
def test_the_switch_breaks_the_locks_of_look_ups(shop: Shop, keepalive: float | None) -> None:
    """Otherwise a commit that no longer writes the old version would not break them."""
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    new = shop.other(("by-name", name))
    for version, function in ((1, city), (2, name)):
        new.derive(ORDERS, "by-city", function, version=version)
    fresh = shop.replica(new)
    shop.client.create_table("shop/other")
    both_tables = shop.replica(shop.client, ORDERS, "shop/other")
    with both_tables.begin(keepalive=keepalive) as txn:
        assert [key for key, _ in txn.lookup("by-city", b"oslo")] == [b"a"]
        txn.put("shop/other", b"k", b"one in oslo")
        with new.outside():
            new.rebuild(ORDERS, "by-city")
            shop.put(fresh, b="oslo bob")
        with pytest.raises(AnabranchError, match="v1"):
            txn.commit()


def test_a_build_that_was_left_is_continued(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = both(shop)
    shop.put(rows, **{f"k{n}": f"city{n} name{n}" for n in range(9)})
    new = shop.other(("by-name", name))
    for version, function in ((1, city), (2, city_and_name)):
        new.derive(ORDERS, "by-city", function, version=version)
    fresh = shop.replica(new)
    real = Replica.transact
    for steps in range(5):
        left = iter(range(steps))

        def stops(self: Replica, *given: Any, left: Any = left, **how: Any) -> Any:
            if next(left, None) is None:
                raise NotReady("killed")
            return real(self, *given, **how)

        with monkeypatch.context() as patch:
            patch.setattr(Replica, "transact", stops)
            try:
                new.rebuild(ORDERS, "by-city")
            except NotReady:
                pass
            else:
                break
        shop.put(fresh, **{f"k{steps}": f"town{steps} name{steps}"})
        assert found(fresh, "by-city", f"town{steps}") == [f"k{steps}"]
        for table in (1, 2):
            assert b"town%d\0\0k%d" % (steps, steps) in rows_of(
                fresh, f"shop/orders-by-city-v{table}"
            )
    assert found(fresh, "by-city", "name8") == ["k8"]
    assert new.check_derivation(ORDERS, "by-city") == []


def test_a_sleeping_builder_can_not_switch_a_later_table(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its version was dropped, and its table deleted and made again meanwhile."""
    other = shop.other()
    real = Replica.transact
    calls = []

    def slow(self: Replica, *given: Any, **how: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:  # the switch, as there are no rows
            with monkeypatch.context() as patch:
                patch.setattr(Replica, "transact", real)
                shop.client.drop_derivation(ORDERS, "by-city")
                shop.client.delete_stream(BY_CITY)
                with patch.context() as inner:
                    inner.setattr("anabranch.client.calls.derivations._switch", lambda *_: None)
                    shop.client.derive(ORDERS, "by-city", city)
        return real(self, *given, **how)

    monkeypatch.setattr(Replica, "transact", slow)
    with pytest.raises(AnabranchError):
        other.derive(ORDERS, "by-city", city)
    monkeypatch.undo()
    with shop.replica(shop.client).begin() as txn:
        assert txn.get(BY_CITY, STATE_KEY) != READY


def test_a_derivation_is_dropped(shop: Shop) -> None:
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    with pytest.raises(IllegalState, match="drop_derivation"):
        shop.client.delete_stream(BY_CITY)
    shop.client.drop_derivation(ORDERS, "by-city")
    with rows.snapshot() as view:
        assert view.get(BY_CITY, STATE_KEY) == RETIRED
    with rows.begin() as txn, pytest.raises(DerivationMissing):
        txn.lookup("by-city", b"oslo")
    shop.put(rows, a="rome ann")
    assert rows_of(rows, BY_CITY) == {b"oslo\0\0a": b""}
    with pytest.raises(IllegalState, match="earlier time"):
        shop.client.derive(ORDERS, "by-city", city)
    shop.client.delete_stream(BY_CITY)
    shop.client.derive(ORDERS, "by-city", city)
    assert found(shop.replica(shop.client), "by-city", "rome") == ["a"]


# -- refusals -----------------------------------------------------------------------------------------------

SETTING = "derive.by-city"
REFUSED: dict[str, tuple[Callable[[Shop], object], type[Exception], str]] = {
    "an illegal name": (lambda s: s.client.derive(ORDERS, "By City", city), InvalidArgument, "small letters"),
    "no function": (lambda s: s.client.derive(ORDERS, "by-size", 5), InvalidArgument, "no function"),  # type: ignore[arg-type]
    "version 0": (lambda s: s.client.derive(ORDERS, "by-size", city, version=0), InvalidArgument, "from 1"),
    "a stream": (lambda s: s.client.derive("shop/plain", "by-size", city), InvalidArgument, "no table"),
    "a derived table": (lambda s: s.client.derive(BY_CITY, "x", city), UnsupportedSetting, "no source"),
    "unique now": (
        lambda s: s.client.derive(ORDERS, "by-city", city, unique=True), StreamExists, "'index', and not 'unique'",
    ),
    "no such version": (
        lambda s: s.client.drop_derivation(ORDERS, "by-city", version=2), InvalidArgument, "versions",
    ),
    "nothing to build": (lambda s: s.client.rebuild(ORDERS, "by-size"), DerivationMissing, "no function"),
    "set by hand": (lambda s: s.client.alter_stream(ORDERS, {SETTING: "2"}), UnsupportedSetting, "drop_derivation"),
    "taken back by hand": (lambda s: s.client.alter_stream(ORDERS, {SETTING: None}), UnsupportedSetting, "alone"),
    "set from the beginning": (
        lambda s: s.client.create_table("shop/new", settings={SETTING: "1"}), UnsupportedSetting, "client.derive",
    ),
    "a table of another name": (
        lambda s: s.client.create_table("shop/new", settings={"derived": "shop/orders by-city 1"}),
        InvalidArgument, "named shop/orders-by-city-v1",
    ),
    "a setting that is none": (
        lambda s: s.client.create_table("shop/new", settings={"derived": "shop/orders"}),
        InvalidArgument, "a version",
    ),
}  # fmt: skip


def test_refusals(shop: Shop, subtests: pytest.Subtests) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    shop.client.create_stream("shop/plain")
    for case, (call, error, text) in REFUSED.items():
        with subtests.test(case), pytest.raises(error, match=text):
            call(shop)


COMMANDS: dict[str, tuple[dict[str, str], tuple[str, ...], type[Exception], str]] = {
    "versions": ({SETTING: "1,2"}, (), InvalidArgument, r"\+2 adds"),
    "none": ({}, (SETTING,), UnsupportedSetting, "of its own"),
    "with others": (
        {SETTING: "-1", "table.compact.ratio": "3"},
        (),
        UnsupportedSetting,
        "of its own",
    ),
    "no such table": ({SETTING: "+2"}, (), AnabranchError, "v2"),
    "no number": ({SETTING: "+one"}, (), InvalidArgument, "whole number"),
    "an illegal name": ({"derive.A": "+1"}, (), InvalidArgument, "small letters"),
    "of a stream that is none": ({"derived": "x"}, (), UnsupportedSetting, "can't be altered"),
}


def test_the_leader_refuses_other_changes(shop: Shop, subtests: pytest.Subtests) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    for case, (set_to, unset, error, text) in COMMANDS.items():
        with subtests.test(case), pytest.raises(error, match=text):
            shop.client._session.ask_stream(ORDERS, r.AlterStream(ORDERS, set_to, unset), 1e9)


def test_a_version_may_be_taken_away_twice(shop: Shop) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    for _ in range(2):
        shop.client._session.ask_stream(ORDERS, r.AlterStream(ORDERS, {SETTING: "-1"}, ()), 1e9)
    assert SETTING not in shop.client.describe(ORDERS).settings


def test_a_version_is_taken_away_while_a_later_one_is_built(shop: Shop) -> None:
    """By a builder that slept: its command leaves both versions that are in force by then."""
    shop.client.derive(ORDERS, "by-city", city)
    shop.client.derive(ORDERS, "by-city", city_and_name, version=2)
    shop.client.rebuild(ORDERS, "by-city")
    shop.client.derive(ORDERS, "by-city", city, version=3)
    for change in ("+3", "-1"):
        shop.client._session.ask_stream(ORDERS, r.AlterStream(ORDERS, {SETTING: change}, ()), 1e9)
    assert shop.client.describe(ORDERS).settings[SETTING] == "2,3"


def test_a_source_is_not_deleted(shop: Shop) -> None:
    """Its derived table would be ready, and no writer would keep it."""
    shop.client.derive(ORDERS, "by-city", city)
    with pytest.raises(IllegalState, match="drop_derivation"):
        shop.client.delete_stream(ORDERS)
    shop.client.drop_derivation(ORDERS, "by-city")
    shop.client.delete_stream(ORDERS)


def test_a_source_that_is_lost(shop: Shop) -> None:
    """A later table of its name does not get the rows that were derived from it."""
    shop.client.derive(ORDERS, "by-city", city)
    for topic in (journal_topic(ORDERS), stream_topic(ORDERS)):
        shop.cluster.delete_topic(topic)
    shop.stop_controller()
    shop.start_controller()
    shop.client.describe(ORDERS)
    with suppress(AnabranchError):
        shop.client.delete_stream(ORDERS)
    shop.client.delete_stream(ORDERS)
    with pytest.raises(IllegalState, match="by-city-v1"):
        shop.client.create_table(ORDERS, 2)
    shop.client.delete_stream(BY_CITY)
    shop.client.create_table(ORDERS, 2)
    shop.client.derive(ORDERS, "by-city", city)


@pytest.mark.parametrize("again", [True, False])
def test_a_derived_table_that_is_lost(shop: Shop, again: bool) -> None:
    """It is built again, or its derivation ends, once it is deleted."""
    rows = both(shop)
    shop.put(rows, a="oslo ann")
    for topic in (journal_topic(BY_NAME), stream_topic(BY_NAME)):
        shop.cluster.delete_topic(topic)
    shop.stop_controller()
    shop.start_controller()
    shop.client.describe(BY_NAME)
    with suppress(AnabranchError):
        shop.client.delete_stream(BY_NAME)
    shop.client.delete_stream(BY_NAME)
    if again:
        shop.client.derive(ORDERS, "by-name", name, unique=True)
        rows = shop.replica(shop.client)
        assert found(rows, "by-name", "ann") == ["a"]
        with pytest.raises(UniqueViolation):
            shop.put(rows, b="rome ann")
    else:
        shop.client.drop_derivation(ORDERS, "by-name")
        shop.put(shop.replica(shop.client), b="rome ann")


def test_a_sleeping_builder_takes_no_later_version_away(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = shop.other(("by-city", city))
    first.derive(ORDERS, "by-city", city_and_name, version=2)
    for version, function in ((1, city), (2, city_and_name), (3, city)):
        shop.client.derive(ORDERS, "by-city", function, version=version)
    second = shop.other(("by-city", city))
    second.derive(ORDERS, "by-city", city_and_name, version=2)
    real = Deriving._move

    def slow(self: Deriving, of: r.Derivation, sign: str, timeout: float | None) -> None:
        if sign == "-" and self._shared is first._shared:
            monkeypatch.undo()
            second.rebuild(ORDERS, "by-city")
            shop.client.rebuild(ORDERS, "by-city")
        real(self, of, sign, timeout)

    monkeypatch.setattr(Deriving, "_move", slow)
    first.rebuild(ORDERS, "by-city")
    assert shop.client.describe(ORDERS).settings[SETTING] == "3"
    rows = shop.replica(shop.client)
    shop.put(rows, a="oslo ann")
    assert found(rows, "by-city", "oslo") == ["a"]


def test_two_processes_bring_the_first_versions_into_force(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one has asked for the versions before the first one came."""
    shop.put(shop.replica(shop.client), a="oslo ann")
    other = shop.other()
    check_unused = Deriving._check_unused

    def late(deriving: Deriving, *given: Any) -> None:
        if deriving is other._deriving:
            shop.client.derive(ORDERS, "by-city", city)
        check_unused(deriving, *given)

    monkeypatch.setattr(Deriving, "_check_unused", late)
    other.derive(ORDERS, "by-city", city_and_name, version=2)
    assert other.describe(ORDERS).settings["derive.by-city"] == "2"
    rows = shop.replica(other)
    assert found(rows, "by-city", "ann") == ["a"]
    with shop.replica(other, BY_CITY).snapshot() as view:
        assert view.get(BY_CITY, STATE_KEY) == RETIRED


@pytest.mark.parametrize("end", [TableTransaction.commit, TableTransaction.prepare])
def test_a_client_asks_again_after_a_refusal(shop: Shop, end: Callable[[Any], object]) -> None:
    """Also if it began its transactions by itself, and it was the client that refused."""
    other = shop.other()
    rows = shop.replica(other)
    shop.client.derive(ORDERS, "by-city", city)
    other._shared.derivations.add(shop.client._shared.derivations.named(ORDERS)[0])
    with suppress(DerivationMissing), rows.begin() as txn:
        txn.put(ORDERS, b"a", b"oslo ann")
        end(txn)
    with rows.begin() as txn:
        txn.put(ORDERS, b"a", b"oslo ann")
        end(txn)
        txn.commit()
    plain = shop.replica(shop.other())
    shop.client.drop_derivation(ORDERS, "by-city")
    with plain.begin() as txn:
        txn.put(ORDERS, b"a", b"rome ann")
        txn.commit()


def test_a_look_up_in_a_version_that_own_writes_do_not_have(shop: Shop) -> None:
    """Without locks of reads, nothing else would end the transaction."""
    for version, function in ((1, city), (2, city_and_name)):
        shop.client.derive(ORDERS, "by-city", function, version=version)
    rows = shop.replica(shop.client)
    with rows.begin(isolation="snapshot") as txn:
        other = shop.other(("by-city", city))
        other.derive(ORDERS, "by-city", city_and_name, version=2)
        other.rebuild(ORDERS, "by-city")
        shop.client._shared.derivations.forget()
        txn.put(ORDERS, b"a", b"oslo ann")
        with pytest.raises(LocksBroken, match="own writes"):
            txn.lookup("by-city", b"oslo")


def test_a_late_copy_of_a_refused_command_counts_once(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.client.derive(ORDERS, "by-city", city)
    rows = shop.replica(shop.client)
    session, calls = shop.client._session, []
    real = session.locked_shot

    def shot(command: r.OneShot, deadline: float, sent: Any = None) -> Any:
        calls.append(command)
        if len(calls) == 1:  # the advice to take a turn
            return r.Revalidate(session.highest_timestamp, (), (1, 0))
        if len(calls) == 2:
            real(calls[0], deadline)
            raise DerivationMissing("another version is in force")
        return real(command, deadline, sent)

    monkeypatch.setattr(session, "locked_shot", shot)
    rows.transact(lambda txn: txn.put(ORDERS, b"k", (txn.get(ORDERS, b"k") or b"") + b"x"))
    assert rows_of(rows, ORDERS) == {b"k": b"x"}


def test_a_version_comes_and_another_goes_within_one_call(shop: Shop) -> None:
    other = shop.other(("by-city", city))
    for each in (shop.client, other):
        each.derive(ORDERS, "by-city", city, version=1)
        each.derive(ORDERS, "by-city", city_and_name, version=2)
    calls = iter(range(9))

    def write(txn: TableTransaction) -> None:
        txn.put(ORDERS, b"k", b"oslo ann")
        call = next(calls)
        if call == 0:
            shop.client._deriving._move(r.Derivation(ORDERS, "by-city", 2), "+", None)
        if call == 1:
            shop.client.rebuild(ORDERS, "by-city")

    rows = shop.replica(other)
    rows.transact(write)
    assert rows_of(rows, ORDERS) == {b"k": b"oslo ann"}


def test_it_needs_the_feature_level() -> None:
    shop = Shop(level=1)
    with pytest.raises(FeatureNotEnabled):
        shop.client.derive(ORDERS, "by-city", city)
    shop.close()


def test_creating_the_source_again_changes_nothing(shop: Shop) -> None:
    both(shop)
    assert shop.client.create_table(ORDERS, 2).stream == ORDERS
    assert shop.client.create_table(ORDERS, exist_ok=True).stream == ORDERS


def test_locks_of_whole_tables(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = both(shop)
    monkeypatch.setattr(limits, "LOCKS", limits.LOCKS._replace(value=10))

    def put_many(txn: TableTransaction) -> None:
        for n in range(20):
            txn.put(ORDERS, b"k%d" % n, b"oslo n%d" % n)

    with rows.begin() as txn, pytest.raises(TooManyLocks):
        put_many(txn)
    assert rows_of(rows, ORDERS) == rows_of(rows, BY_NAME) == {}
    with rows.begin() as txn:
        for table in (ORDERS, BY_NAME):
            txn.lock(table)
        put_many(txn)
        txn.commit()
    assert len(rows_of(rows, BY_NAME)) == 20


# -- all together -------------------------------------------------------------------------------------------

KEYS = st.sampled_from([b"a", b"b", b"c", b"d"])
ROWS = st.none() | st.sampled_from(
    [b"oslo ann", b"oslo bob", b"rome ann", b"rome cat", b"- dan", b"- ann"]
)
WRITES = st.lists(st.tuples(KEYS, ROWS), min_size=1, max_size=3)
# Who writes, what, how, and whether others commit between its reads and its commit.
STEPS = st.lists(
    st.tuples(st.integers(0, 1), WRITES, st.booleans(), st.none() | WRITES), min_size=1, max_size=8
)


@given(STEPS, st.integers(0, 8))
@settings(max_examples=some(15), deadline=None)
def test_derived_rows_are_a_fold_of_the_source_at_every_timestamp(
    steps: list[Any], rebuilt_at: int
) -> None:
    shop = Shop()
    clients = [shop.client, shop.other()]
    shop.client.derive(ORDERS, "by-city", city)
    shop.client.derive(ORDERS, "by-name", name, unique=True)
    shop.client.derive(ORDERS, "by-city", city_and_name, version=2)
    for function in shop.client._shared.derivations.named(ORDERS):
        clients[1]._shared.derivations.add(function)
    replicas = [shop.replica(client) for client in clients]
    for number, (who, writes, is_long, meanwhile) in enumerate(steps):
        if number == rebuilt_at:
            clients[who].rebuild(ORDERS, "by-city")
        _play(replicas, who, writes, is_long, meanwhile)
    newest = replicas[0]
    newest.snapshot().close()
    times = sorted({c.timestamp for t in newest.tables for c in shop.commits(t)})
    with newest.snapshot() as now:
        times.append(now.timestamp)
    for at in times:
        with newest.snapshot(at=at) as view:
            _compare(view)
    shop.close()


REFUSED_COMMITS = (LocksBroken, TransactionAborted, DerivationMissing)


def _play(replicas: list[Replica], who: int, writes: Any, is_long: bool, meanwhile: Any) -> None:
    """Commit, unless another commit came first, or another version came into force since the replica asked."""
    with (
        suppress(*REFUSED_COMMITS),
        replicas[who].begin(keepalive=60 if is_long else None) as txn,
    ):
        _write(txn, writes)
        if meanwhile is not None:
            with suppress(*REFUSED_COMMITS), replicas[1 - who].begin() as other:
                _write(other, meanwhile)
                other.commit()
        txn.commit()


def _write(txn: TableTransaction, writes: Any) -> None:
    for key, row in writes:
        with suppress(UniqueViolation):
            if row is None:
                txn.delete(ORDERS, key)
            else:
                txn.put(ORDERS, key, row)


FUNCTIONS = {
    BY_CITY: (city, False),
    "shop/orders-by-city-v2": (city_and_name, False),
    BY_NAME: (name, True),
}


def _compare(view: Any) -> None:
    source = dict(view.scan(ORDERS))
    held = [value for key, row in source.items() for value in name(key, row)]
    assert len(held) == len(set(held)), "a value of a unique derivation has two rows"
    for table, (function, unique) in FUNCTIONS.items():
        rows = dict(view.scan(table))
        if rows.pop(STATE_KEY, None) != READY:
            continue
        expected = {}
        for key, row in source.items():
            found: Any = function(key, row)
            for value in [found] if isinstance(found, bytes) else found or []:
                entry = of_value(value)
                expected[entry if unique else entry + key] = key if unique else b""
        assert rows == expected
