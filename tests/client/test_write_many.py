"""`write_many`: the same records and receipts as `write`, and no part of it in a commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from anabranch import errors
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.protocol.schemas import records as r
from tests.client.answers import STREAM, token_of
from tests.client.bench import Bench

EVENTS: list[Any] = [
    (b"v%d" % i, b"k%d" % (i % 300)) if i % 7 else (b"v%d" % i, None, {"h": b"x"}, 1 + i)
    for i in range(3500)
]
EVENTS += [(None, b"k"), (b"", b""), (b"v",), (b"v", b"k", None), [b"v", b"k"]]


def opened(client: Client, *, joined: bool) -> Transaction | Writer:
    if joined:
        return client.join(token_of())
    txn = client.begin("nyc")
    txn.token()
    return txn


@pytest.mark.parametrize("joined", [False, True])
def test_records_and_receipt_are_those_of_single_writes(joined: bool) -> None:
    benches = Bench(), Bench()
    receipts = []
    for bench, at_once in zip(benches, (True, False), strict=True):
        handle = opened(bench.client, joined=joined)
        if at_once:
            assert handle.write_many(STREAM, iter(EVENTS)) == len(EVENTS)
        else:
            for event in EVENTS:
                handle.write(STREAM, *event)
        handle.flush()
        receipts.append(bench.bus.of(r.Register)[0].receipt)
    assert benches[0].written() == benches[1].written()
    assert len(benches[0].written()) == len(EVENTS)
    assert receipts[0] == receipts[1]
    assert sum(extent.count for extent in receipts[0].extents) == len(EVENTS)


def test_a_few_are_one_command() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        assert txn.write_many(STREAM, [(b"1", b"k"), (b"2", None, [("h", b"x")], 5)]) == 2
        assert txn.write_many(STREAM, []) == 0
        txn.commit()
    assert bench.bus.of(r.OneShot)[0].events == (
        r.Event(STREAM, -1, b"k", b"1", (), -1),
        r.Event(
            STREAM,
            bench.bus.of(r.OneShot)[0].events[1].segment_id,
            None,
            b"2",
            (r.EventHeader("h", b"x"),),
            5,
        ),
    )


def test_many_open_the_transaction_on_the_way() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        assert txn.write_many(STREAM, EVENTS) == len(EVENTS)
        txn.commit()
    assert [value for _, _, _, value, _, _ in bench.written()] == [event[0] for event in EVENTS]


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
    assert [value for _, _, _, value, _, _ in bench.written()] == [b"before", b"after"]


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
    values = Counter(value for _, _, _, value, _, _ in bench.written())
    assert values.pop(b"in between") == 2
    assert values == Counter(b"%d" % i for i in range(2500))


def test_a_handle_that_is_over_takes_nothing() -> None:
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
    with pytest.raises(errors.TransactionAborted):
        txn.write_many(STREAM, EVENTS)
    with pytest.raises(errors.CrossScope):
        bench.client.begin("nyc").write_many("sea/flights", EVENTS)
