"""`write_many` and `write_batch`: the same records and receipts as of `write`, and no part of them in a commit.

The journal here takes events only: how columns are laid out is in `tests.batches.test_columns_write`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from anabranch import errors
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.protocol.limits import LATEST
from anabranch.protocol.schemas import records as r
from tests.batches.test_columns_write import HEADERS
from tests.client.answers import STREAM, token_of
from tests.client.bench import Bench

MANY = pa.table(
    {
        "value": pa.array([b"v%d" % i for i in range(3000)]),
        "key": pa.array([None if i % 5 == 0 else b"k%d" % (i % 300) for i in range(3000)]),
        "headers": pa.array(
            [None if i % 3 else [{"key": "h", "value": b"x"}] for i in range(3000)], HEADERS
        ),
        "timestamp": pa.array([None if i % 7 else 1 + i for i in range(3000)]),
    }
)
EVENTS: list[Any] = [
    (
        row["value"],
        row["key"],
        [(h["key"], h["value"]) for h in row["headers"] or ()] or None,
        row["timestamp"],
    )
    for row in MANY.to_pylist()
]
# More forms that an event may have in `write_many`.
ODD: list[Any] = [(None, b"k"), (b"", b""), (b"v",), (b"v", b"k", None), [b"v", b"k"]]


def opened(client: Client, *, joined: bool) -> Transaction | Writer:
    if joined:
        return client.join(token_of())
    txn = client.begin("nyc")
    txn.token()
    return txn


def values(bench: Bench) -> list[Any]:
    """Of the records that were written."""
    return [value for _, _, _, value, _, _ in bench.written()]


def by_many(handle: Transaction | Writer) -> int:
    return handle.write_many(STREAM, iter(EVENTS))


def by_table(handle: Transaction | Writer) -> int:
    return handle.write_batch(STREAM, MANY)


def by_batches(handle: Transaction | Writer) -> int:
    return sum(handle.write_batch(STREAM, batch) for batch in MANY.to_batches(max_chunksize=999))


WAYS = pytest.mark.parametrize("way", [by_many, by_table, by_batches])
Way = Callable[[Transaction | Writer], int]


@WAYS
@pytest.mark.parametrize("joined", [False, True])
def test_records_and_receipt_are_those_of_single_writes(joined: bool, way: Way) -> None:
    more = ODD if way is by_many else []
    benches = Bench(), Bench()
    receipts = []
    for bench, at_once in zip(benches, (True, False), strict=True):
        handle = opened(bench.client, joined=joined)
        if at_once:
            assert way(handle) == len(EVENTS)
            handle.write_many(STREAM, more)
        else:
            for event in [*EVENTS, *more]:
                handle.write(STREAM, *event)
        handle.flush()
        receipts.append(bench.bus.of(r.Register)[0].receipt)
    assert benches[0].written() == benches[1].written()
    assert len(benches[0].written()) == len(EVENTS) + len(more)
    assert receipts[0] == receipts[1]
    assert sum(extent.count for extent in receipts[0].extents) == len(EVENTS) + len(more)


@WAYS
def test_many_open_the_transaction_and_are_written_in_order(way: Way) -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"before", b"k")
        assert way(txn) == len(EVENTS)
        txn.commit()
    assert values(bench) == [b"before", *(event[0] for event in EVENTS)]


def test_other_scopes_are_refused() -> None:
    bench = Bench()
    txn = bench.client.begin("nyc")
    with pytest.raises(errors.CrossScope):
        txn.write_many("sea/flights", EVENTS)
    with pytest.raises(errors.CrossScope):
        txn.write_batch("sea/flights", MANY)


def test_a_few_are_one_command() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        assert txn.write_many(STREAM, [(b"1", b"k"), (b"2", None, [("h", b"x")], 5)]) == 2
        assert txn.write_many(STREAM, []) == 0
        assert txn.write_batch(STREAM, MANY.slice(0, 4)) == 4
        assert txn.write_batch(STREAM, MANY.slice(0, 0)) == 0
        txn.commit()
    (command,) = bench.bus.of(r.OneShot)
    header = (r.EventHeader("h", b"x"),)
    assert [(e.key, e.value, e.headers, e.timestamp) for e in command.events] == [
        (b"k", b"1", (), -1),
        (None, b"2", header, 5),
        (None, b"v0", header, 1),
        (b"k1", b"v1", (), -1),
        (b"k2", b"v2", (), -1),
        (b"k3", b"v3", header, -1),
    ]
    assert [e.segment_id == -1 for e in command.events] == [True, False, False, True, True, True]


# -- write_many --------------------------------------------------------------------------------------

BAD: list[tuple[Any, type[Exception]]] = [
    ((b"v", "text"), errors.InvalidArgument),
    ((b"v", b"k", None, None, None), errors.InvalidArgument),
    ((), errors.InvalidArgument),
    (7, errors.InvalidArgument),
    ("ab", errors.InvalidArgument),
    ((b"x" * 5000, b"k"), errors.EventTooLarge),
    ((None, b"x" * 5000), errors.EventTooLarge),
    ((b"x" * 500, b"k", {"h": b"x" * 500}), errors.EventTooLarge),
]


@pytest.mark.parametrize(("bad", "error"), BAD)
def test_a_bad_event_first_leaves_the_handle_as_it_was(bad: Any, error: type[Exception]) -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"before", b"k")
        with pytest.raises(error):
            txn.write_many(STREAM, [bad, (b"never", b"k")])
        txn.write(STREAM, b"after", b"k")
        txn.commit()
    assert values(bench) == [b"before", b"after"]


@pytest.mark.parametrize(("bad", "error"), BAD)
@pytest.mark.parametrize("joined", [False, True])
def test_a_bad_event_later_ends_the_handle(bad: Any, error: type[Exception], joined: bool) -> None:
    bench = Bench()
    handle = opened(bench.client, joined=joined)
    with pytest.raises(error):
        handle.write_many(STREAM, [*EVENTS[:1500], bad, (b"never", b"k")])
    assert len(bench.written()) == 1500
    ends = (handle.finish,) if isinstance(handle, Writer) else (handle.commit, handle.flush)
    for call in (*ends, lambda: handle.write_many(STREAM, EVENTS)):
        with pytest.raises(errors.WriteFailed, match="not all"):
            call()
    assert not bench.bus.of(r.Commit)
    assert not bench.bus.of(r.Register)


@pytest.mark.parametrize("opened_first", [False, True])
def test_an_exception_of_the_iterable_ends_the_handle(opened_first: bool) -> None:
    def failing() -> Iterator[tuple[bytes, bytes]]:
        yield b"1", b"k"
        raise ZeroDivisionError

    bench = Bench()
    txn = bench.client.begin("nyc")
    if opened_first:
        txn.token()
    with pytest.raises(ZeroDivisionError):
        txn.write_many(STREAM, failing())
    with pytest.raises(errors.WriteFailed, match="ZeroDivisionError"):
        txn.commit()
    txn.abort()
    assert not bench.bus.of(r.Commit) + bench.bus.of(r.OneShot)
    assert len(bench.bus.of(r.Abort)) == opened_first


def test_the_iterable_may_use_the_handle() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:

        def nested() -> Iterator[tuple[bytes, bytes]]:
            for i in range(2500):
                if i % 1000 == 999:
                    txn.write(STREAM, b"in between", b"k")
                yield b"%d" % i, b"k"

        txn.token()
        assert txn.write_many(STREAM, nested()) == 2500
        txn.commit()
    found = Counter(values(bench))
    assert found.pop(b"in between") == 2
    assert found == Counter(b"%d" % i for i in range(2500))


def test_a_handle_that_ends_meanwhile_takes_nothing_more() -> None:
    bench = Bench()
    txn = bench.client.begin("nyc")
    txn.token()
    txn.write_many(STREAM, EVENTS)

    def ended() -> Iterator[Any]:
        yield from EVENTS
        txn.abort()
        yield from EVENTS

    with pytest.raises(errors.TransactionAborted):
        txn.write_many(STREAM, ended())


# -- types of columns -------------------------------------------------------------------------------

TEXT = ["é", None, ""]
DATA = ["é".encode(), None, b""]
ACCEPTED: list[tuple[str, pa.Array, list[Any]]] = [
    ("value", pa.array(DATA, pa.binary()), DATA),
    ("value", pa.array(DATA, pa.large_binary()), DATA),
    ("value", pa.array(DATA, pa.binary_view()), DATA),
    ("value", pa.array(TEXT, pa.string()), DATA),
    ("value", pa.array(TEXT, pa.large_string()), DATA),
    ("value", pa.array(TEXT, pa.string_view()), DATA),
    ("value", pa.array(TEXT).dictionary_encode(), DATA),
    ("value", pa.nulls(3), [None] * 3),
    ("key", pa.array(TEXT, pa.string()), DATA),
    ("key", pa.array(DATA).dictionary_encode(), DATA),
    ("key", pa.nulls(3), [None] * 3),
    ("timestamp", pa.array([1, None, LATEST]), [1, 0, LATEST]),
    ("timestamp", pa.array([1, None, 2], pa.timestamp("s")), [1000, 0, 2000]),
    ("timestamp", pa.array([1, None, 2], pa.timestamp("ms")), [1, 0, 2]),
    ("timestamp", pa.array([1999, None, 2000], pa.timestamp("us")), [1, 0, 2]),
    ("timestamp", pa.array([1999999, None, 2 << 20], pa.timestamp("ns", "UTC")), [1, 0, 2]),
    (
        "timestamp",
        pa.array([datetime(2025, 1, 1, tzinfo=UTC)] * 3, pa.timestamp("us", tz="America/New_York")),
        [1735689600000] * 3,
    ),
    ("timestamp", pa.nulls(3), [0] * 3),
    ("headers", pa.nulls(3), [[]] * 3),
    (
        "headers",
        pa.array(
            [None, [], [{"value": "x", "key": "é"}]],
            pa.large_list(pa.struct([("value", pa.string()), ("key", pa.large_string())])),
        ),
        [[], [], [("é", b"x")]],
    ),
]


@pytest.mark.parametrize(
    ("name", "array", "written"), ACCEPTED, ids=lambda x: str(getattr(x, "type", ""))
)
def test_types_that_are_taken(name: str, array: pa.Array, written: list[Any]) -> None:
    bench = Bench()
    columns = {"value": pa.array([b"v"] * 3)} | {name: array}
    with bench.client.begin("nyc") as txn:
        txn.token()
        assert txn.write_batch(STREAM, pa.table(columns)) == 3
        txn.commit()
    field = {"key": 2, "value": 3, "headers": 4, "timestamp": 5}[name]
    found = [record[field] for record in bench.written()]
    assert [one[:-1] if name == "headers" else one for one in found] == written


def test_values_under_a_null_are_ignored() -> None:
    """Arrow allows anything there."""
    text = pa.StringArray.from_buffers(
        2,
        pa.array([0, 3, 6], pa.int32()).buffers()[1],
        pa.py_buffer(b"abcdef"),
        pa.py_buffer(b"\x02"),
    )
    pairs = pa.array(
        [{"key": "ab.txn", "value": b"x"}, None, {"key": "h", "value": b"y"}], HEADERS.value_type
    )
    headers = pa.ListArray.from_buffers(
        HEADERS,
        2,
        [pa.py_buffer(b"\x02"), pa.array([0, 2, 3], pa.int32()).buffers()[1]],
        children=[pairs],
    )
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write_batch(STREAM, pa.table({"value": text, "key": text, "headers": headers}))
        txn.commit()
    assert [(key, value, pairs[:-1]) for _, _, key, value, pairs, _ in bench.written()] == [
        (None, None, []),
        (b"def", b"def", [("h", b"y")]),
    ]


def one(**columns: Any) -> pa.Table:
    """A row, of these columns and a value."""
    return pa.table({"value": [b"v"]} | columns)


def header(**fields: Any) -> pa.Array:
    return pa.array([[fields]])


REFUSED: list[tuple[Any, str]] = [
    (b"v", "pyarrow.RecordBatch or Table, not bytes"),
    (pa.table({"key": [b"k"]}), "no column 'value'"),
    (one(partition=[1]), "column 'partition': only value, key, headers, timestamp"),
    (pa.table([pa.array([b"v"])] * 2, names=["value", "value"]), "'value' is there twice"),
    (pa.table({"value": [1]}), "column 'value' is int64; binary or string is needed"),
    (one(key=[1.5]), "column 'key' is double"),
    (one(key=pa.array([b"123"], pa.binary(3))), r"column 'key' is fixed_size_binary\[3\]"),
    (one(timestamp=pa.array([1], pa.int32())), "column 'timestamp' is int32"),
    (one(timestamp=["2025-01-01"]), "column 'timestamp' is string"),
    (one(timestamp=pa.array([999], pa.timestamp("us"))), "timestamp 0"),
    (one(timestamp=pa.array([1 << 60], pa.timestamp("s"))), "timestamp 1152921504606846976"),
    (one(headers=[b"x"]), "column 'headers' is binary"),
    (
        one(headers=[[b"x"]]),
        r"column 'headers' is list<.*>; list<struct<key: string, value: binary>>",
    ),
    (one(headers=header(key="k")), "column 'headers' is list<"),
    (one(headers=header(key="k", value=b"v", more=1)), "column 'headers' is list<"),
    (one(headers=header(key=b"k", value=b"v")), "column 'headers.key' is binary; string is needed"),
    (one(headers=header(key="k", value=1)), "column 'headers.value' is int64"),
    (one(headers=header(key="ab.", value=b"v")), "header name b'ab.'"),
    (one(headers=pa.array([[None]], HEADERS)), "a header is null"),
    (one(headers=pa.array([[{"key": None, "value": b"v"}]], HEADERS)), "a header without a key"),
]


@pytest.mark.parametrize(("batch", "message"), REFUSED)
@pytest.mark.parametrize("joined", [False, True])
def test_a_refused_batch_leaves_the_handle_as_it_was(
    batch: Any, message: str, joined: bool
) -> None:
    bench = Bench()
    handle = opened(bench.client, joined=joined)
    handle.write(STREAM, b"before", b"k")
    with pytest.raises(errors.InvalidArgument, match=message):
        handle.write_batch(STREAM, batch)
    handle.write(STREAM, b"after", b"k")
    handle.flush()
    assert values(bench) == [b"before", b"after"]


@pytest.mark.parametrize("rows", [0, 1])
def test_types_of_a_table_without_rows_are_checked(rows: int) -> None:
    with pytest.raises(errors.InvalidArgument, match="int64"):
        Bench().client.join(token_of()).write_batch(STREAM, pa.table({"value": [1]}).slice(0, rows))


@pytest.mark.parametrize("at", [0, 1000, 2999])
@pytest.mark.parametrize("field", ["value", "key"])
def test_a_row_that_is_too_large_is_refused_before_anything_is_written(at: int, field: str) -> None:
    rows = MANY.select(["value", "key"]).to_pylist()
    rows[at][field] = b"x" * 5000
    bench = Bench()
    writer = bench.client.join(token_of())
    with pytest.raises(errors.EventTooLarge, match=r"an event of 5,00\d bytes"):
        writer.write_batch(STREAM, pa.Table.from_pylist(rows))
    assert bench.written() == []
    assert writer.write_batch(STREAM, MANY) == 3000


# -- all or nothing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [KeyboardInterrupt, errors.WriteFailed("not acknowledged")])
@pytest.mark.parametrize("joined", [False, True])
def test_a_failure_in_the_middle_ends_the_handle(
    error: Any, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench()
    handle = opened(bench.client, joined=joined)
    handle.write(STREAM, b"before", b"k")
    journal = bench.journals.made[0]
    write = journal.write

    def failing(*record: Any) -> None:
        if len(journal.written) == 1500:
            raise error
        write(*record)

    monkeypatch.setattr(journal, "write", failing)
    with pytest.raises(type(error) if isinstance(error, Exception) else error):
        handle.write_batch(STREAM, MANY)
    monkeypatch.setattr(journal, "write", write)
    ends = (handle.finish,) if isinstance(handle, Writer) else (handle.commit, handle.flush)
    for call in (
        *ends,
        lambda: handle.write_batch(STREAM, MANY),
        lambda: handle.write(STREAM, b""),
    ):
        with pytest.raises(errors.WriteFailed, match=r"write_batch was left|not acknowledged"):
            call()
    assert not bench.bus.of(r.Commit) + bench.bus.of(r.Register)
