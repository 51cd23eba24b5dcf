"""One rule for events: each call that gets a bad event raises the same error, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest

from anabranch import errors
from anabranch.core.stream_settings import TABLE
from anabranch.processing.batch import Limits, WorkBatch, begin_context
from anabranch.processing.table import Table
from anabranch.protocol.limits import AHEAD_MS, LATEST, ROW_KEY
from anabranch.protocol.schemas import records as r
from tests.client.answers import STREAM, segments, stream_info, token_of
from tests.client.bench import Bench, override

LIMIT = 5_000  # bytes that the journal takes
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))

Event = Mapping[str, Any]

# What is wrong -> the event's fields (with a good value and key besides), and a part of the error's text.
BAD: dict[str, tuple[Event, str]] = {
    "time 0": ({"timestamp": 0}, "timestamp 0: Unix milliseconds above 0"),
    "time below 0": ({"timestamp": -2}, "timestamp -2: Unix milliseconds above 0"),
    "year 10000": ({"timestamp": LATEST + 1}, "timestamp 253402300800000: .*the end of 9999"),
    "microseconds": ({"timestamp": 1_735_689_600_000_000}, "timestamp 1735689600000000: "),
    "2^62": ({"timestamp": 1 << 62}, "timestamp 4611686018427387904: "),
    "beyond 64 bits": ({"timestamp": 1 << 63}, "timestamp 9223372036854775808: "),
    "time that is no whole number": ({"timestamp": 1.5}, "timestamp 1.5: "),
    "time that is a truth": ({"timestamp": True}, "timestamp True: "),
    "text as key": ({"key": "k"}, "a key is bytes or None, not str"),
    "text as value": ({"value": "v"}, "a value is bytes or None, not str"),
    "number as value": ({"value": 3}, "a value is bytes or None, not int"),
    "bytearray as key": ({"key": bytearray(b"k")}, "a key is bytes or None, not bytearray"),
    "bytearray as value": ({"value": bytearray(b"x")}, "a value is bytes or None, not bytearray"),
    "reserved header": ({"headers": {"ab.variant": b""}}, "does not begin with 'ab.'"),
    "header name of bytes": ({"headers": [(b"h", b"")]}, "header name b'h'"),
    "number as header name": ({"headers": [(3, b"")]}, "header name 3"),
    "header name that is no UTF-8": ({"headers": {"\udcff": b""}}, "a lone surrogate"),
    "text as header": ({"headers": {"h": "text"}}, "header 'h': bytes or None, not str"),
    "headers that are no pairs": ({"headers": ["h"]}, r"\(name, bytes\) pairs or a mapping"),
    "headers that are a number": ({"headers": 7}, r"\(name, bytes\) pairs or a mapping"),
    "too many headers": ({"headers": [("h", b"")] * 1001}, "1,001 headers; 1,000 are allowed"),
}
GOOD: dict[str, Event] = {
    "first millisecond": {"timestamp": 1},
    "last millisecond": {"timestamp": LATEST},
    "headers": {"headers": [("h", b""), ("h", None), ("é", b"x")]},
    "many headers": {"headers": [("h", b"")] * 300},
    "no value": {"value": None},
    "no key": {"key": None},
}


def fields(event: Event) -> tuple[Any, Any, Any, Any]:
    whole = {"value": b"v", "key": b"k", "headers": None, "timestamp": None} | dict(event)
    return whole["value"], whole["key"], whole["headers"], whole["timestamp"]


def handle_of(bench: Bench, *, opened: bool) -> Any:
    txn = bench.client.begin("nyc")
    if opened:
        txn.token()
        txn.write(STREAM, b"first", key=b"k")
    return txn


def by_write(bench: Bench, event: Event, *, opened: bool) -> None:
    handle_of(bench, opened=opened).write(STREAM, *fields(event))


def by_writer(bench: Bench, event: Event) -> None:
    bench.client.join(token_of()).write(STREAM, *fields(event))


def by_many(bench: Bench, event: Event, *, opened: bool, before: int) -> None:
    events = [*[(b"v", b"k")] * before, fields(event)]
    handle_of(bench, opened=opened).write_many(STREAM, events)


def table_of(event: Event) -> pa.Table | None:
    """The event as a row of an Arrow table; None: no column has it as it is."""
    value, key, headers, timestamp = fields(event)
    if type(timestamp) in (bool, float) or {type(key), type(value)} & {str, bytearray}:
        return None
    try:
        pairs = list(headers.items() if isinstance(headers, dict) else headers or ())
        if any(type(name) is bytes or type(content) is str for name, content in pairs):
            return None
        columns = {
            "value": pa.array([value], pa.binary()),
            "key": pa.array([key], pa.binary()),
            "headers": pa.array([[{"key": k, "value": v} for k, v in pairs]], HEADERS),
            "timestamp": pa.array([timestamp], pa.int64()),
        }
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        return None
    return pa.table(columns)


def by_batch(bench: Bench, event: Event, *, opened: bool) -> None:
    handle_of(bench, opened=opened).write_batch(STREAM, table_of(event))


def by_processor(bench: Bench, event: Event) -> None:
    limits = Limits(ask=lambda streams: bench.client.check_outputs("nyc/p", streams))
    limits.learn((STREAM,))
    with TemporaryDirectory() as folder, closing(Table(Path(folder))) as table:
        begin_context(WorkBatch(table, 1, limits)).write(STREAM, fields(event))


WAYS: dict[str, Callable[[Bench, Event], None]] = {
    "an output of a processor": by_processor,
    "a buffered write": lambda b, e: by_write(b, e, opened=False),
    "a write once it is open": lambda b, e: by_write(b, e, opened=True),
    "a writer": by_writer,
    "write_many, buffered": lambda b, e: by_many(b, e, opened=False, before=0),
    "write_many, not its first": lambda b, e: by_many(b, e, opened=True, before=3),
    "write_many, first of a chunk": lambda b, e: by_many(b, e, opened=True, before=1),
    "write_batch, buffered": lambda b, e: by_batch(b, e, opened=False),
    "write_batch once it is open": lambda b, e: by_batch(b, e, opened=True),
}


# Answers about the stream, as of a table.
A_TABLE = {
    "Touch": r.Touched(STREAM, 0, segments(2), is_table=True),
    "DescribeStreams": r.StreamList((replace(stream_info(STREAM, 1), settings={TABLE: "true"}),)),
}
BUFFERED = {"a buffered write", "write_many, buffered", "write_batch, buffered"}


def ways_of(event: Event) -> list[str]:
    """The ways that can give it."""
    return [way for way in WAYS if not way.startswith("write_batch") or table_of(event)]


@pytest.mark.parametrize("what", BAD)
def test_a_bad_event_is_refused_by_name(subtests: pytest.Subtests, what: str) -> None:
    event, text = BAD[what]
    for way in ways_of(event):
        with subtests.test(way=way):
            bench = Bench(limit=LIMIT)
            with pytest.raises(errors.InvalidArgument, match=text):
                WAYS[way](bench, event)
            written = [each[3] for made in bench.journals.made for each in made.written]
            assert set(written) <= {b"first", b"v"}
            assert fields(event)[0] in (None, b"v") or event["value"] not in written


@pytest.mark.parametrize("way", [way for way in WAYS if way not in BUFFERED])
def test_what_this_stream_does_not_take_is_refused_by_name(
    subtests: pytest.Subtests, way: str
) -> None:
    """What is buffered is judged by the commit."""
    large = {"value": b"x" * 4_000, "headers": [("h", b"x" * 2_000)]}
    with subtests.test("an event that is too large"):
        bench = Bench(limit=LIMIT)
        with pytest.raises(errors.EventTooLarge, match=r"max\.message\.bytes") as refused:
            WAYS[way](bench, large)
        assert refused.value.stream == STREAM
    for key in (None, b"", b"x" * (ROW_KEY.value + 1)):
        with subtests.test("a table's row", key=key and key[:1]):
            bench = Bench(override(**A_TABLE), limit=20_000)
            with pytest.raises(errors.InvalidArgument, match="a row's key is bytes, 1 to 8,192 of"):
                WAYS[way](bench, {"key": key})
            keys = [each[2] for made in bench.journals.made for each in made.written]
            assert set(keys) <= {b"k"}


def test_an_opened_transaction_judges_rows_that_were_buffered() -> None:
    bench = Bench(override(**A_TABLE), limit=LIMIT)
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"first", key=b"k")
    txn.write(STREAM, b"v")
    with pytest.raises(errors.InvalidArgument, match="a row's key is bytes"):
        txn.flush()
    assert bench.written() == []


def test_a_batch_with_one_bad_row_writes_no_row() -> None:
    bench = Bench(override(**A_TABLE), limit=LIMIT)
    txn = handle_of(bench, opened=True)
    rows = pa.table({"value": [b"v"] * 3, "key": pa.array([b"a", b"b", None], pa.binary())})
    with pytest.raises(errors.InvalidArgument, match="a row's key is bytes"):
        txn.write_batch(STREAM, rows)
    txn.write(STREAM, b"goes on", key=b"k")
    assert [each[3] for each in bench.written()] == [b"first", b"goes on"]


@pytest.mark.parametrize("what", GOOD)
def test_what_is_legal_is_taken(subtests: pytest.Subtests, what: str) -> None:
    for way in ways_of(GOOD[what]):
        with subtests.test(way=way):
            WAYS[way](Bench(limit=LIMIT), GOOD[what])


# What is known of a stream -> how far ahead its events may be.
AHEAD: dict[str, tuple[object, int | None]] = {
    "no retention": ({}, None),
    "a short one": ({"retention.ms": "1000"}, AHEAD_MS),
    "a week": ({"retention.ms": "604800000"}, 604_800_000),
    "not known": (r.Refusal("NotAuthorized", "no right"), None),
}


@pytest.mark.parametrize("known", AHEAD)
def test_a_time_that_is_too_far_ahead_is_refused_by_name(
    subtests: pytest.Subtests, known: str
) -> None:
    """The call refuses if the stream has retention by time. If not, or if that is unknown, the commit decides."""
    answer, room = AHEAD[known]
    if isinstance(answer, dict):
        info = replace(stream_info(STREAM, 1), settings=answer)
        answer = r.StreamList((info,))
    for way in WAYS:
        with subtests.test(way=way):
            judge_times(WAYS[way], way != "an output of a processor", answer, room)


def judge_times(
    write: Callable[[Bench, Event], None], asks_if_far: bool, answer: object, room: int | None
) -> None:
    bench = Bench(override(DescribeStreams=answer), limit=LIMIT)
    now_ms = int(bench.clock.wall() * 1000)
    asked = []
    for timestamp in (now_ms, now_ms + AHEAD_MS, now_ms + (room or AHEAD_MS)):
        write(bench, {"timestamp": timestamp})
    asked.append(len(bench.bus.of(r.DescribeStreams)))
    for beyond in (now_ms + (room or AHEAD_MS) + 1, LATEST):
        if room is None:
            write(bench, {"timestamp": beyond})
            continue
        with pytest.raises(errors.InvalidArgument, match=f"{STREAM}.* is {beyond} ms, too far"):
            write(bench, {"timestamp": beyond})
    asked.append(len(bench.bus.of(r.DescribeStreams)))
    if asks_if_far:
        assert asked == [room is not None and room > AHEAD_MS, 1], (
            "asked only if it is far ahead, and once"
        )
