"""`write_batch`: what it takes and refuses, and that it is all or nothing. The journal here takes events only."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from anabranch import errors
from anabranch.client.writer import Writer
from anabranch.protocol.limits import LATEST
from anabranch.protocol.schemas import records as r
from tests.batches.test_columns_write import HEADERS
from tests.client.answers import STREAM, token_of
from tests.client.bench import Bench
from tests.client.test_write_many import opened

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


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("form", ["table", "batches"])
def test_records_and_receipt_are_those_of_write_many(joined: bool, form: str) -> None:
    benches = Bench(), Bench()
    receipts = []
    for bench, at_once in zip(benches, (True, False), strict=True):
        handle = opened(bench.client, joined=joined)
        if not at_once:
            handle.write_many(STREAM, EVENTS)
        elif form == "table":
            assert handle.write_batch(STREAM, MANY) == len(EVENTS)
        else:
            for batch in MANY.to_batches(max_chunksize=999):
                assert handle.write_batch(STREAM, batch) == batch.num_rows
        handle.flush()
        receipts.append(bench.bus.of(r.Register)[0].receipt)
    assert benches[0].written() == benches[1].written()
    assert len(benches[0].written()) == len(EVENTS)
    assert receipts[0] == receipts[1]


def test_a_few_are_one_command() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        assert txn.write_batch(STREAM, MANY.slice(0, 4)) == 4
        assert txn.write_batch(STREAM, MANY.slice(0, 0)) == 0
        txn.commit()
    (command,) = bench.bus.of(r.OneShot)
    assert [(e.value, e.key, e.timestamp) for e in command.events] == [
        (b"v0", None, 1),
        (b"v1", b"k1", -1),
        (b"v2", b"k2", -1),
        (b"v3", b"k3", -1),
    ]
    assert command.events[3].headers == (r.EventHeader("h", b"x"),)


def test_many_open_the_transaction_before_anything_is_written() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"before", b"k")
        txn.write_batch(STREAM, MANY)
        txn.commit()
    assert [value for _, _, _, value, _, _ in bench.written()] == [
        b"before",
        *(event[0] for event in EVENTS),
    ]


# -- types ----------------------------------------------------------------------------------------------

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
    assert [value for _, _, _, value, _, _ in bench.written()] == [b"before", b"after"]


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
    with pytest.raises(errors.EventTooLarge, match=r"an event of 500\d bytes"):
        writer.write_batch(STREAM, pa.Table.from_pylist(rows))
    assert bench.written() == []
    assert writer.write_batch(STREAM, MANY) == 3000


def test_other_scopes_are_refused() -> None:
    bench = Bench()
    with pytest.raises(errors.CrossScope):
        bench.client.begin("nyc").write_batch("sea/flights", MANY)


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
