"""Transactions: what they send, keep back, count and refuse while they are written."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from anabranch import errors
from anabranch.protocol.ids import TXN_HEADER, unpack_txn_header
from anabranch.protocol.partitioner import position_of, record_checksum
from anabranch.protocol.schemas import records as r
from anabranch.types import Receipt
from tests.client.answers import STREAM, obliging, refusal, stream_info, token_of
from tests.client.bench import Bench, override
from tests.client.doubles import HYBRID_TIME

OTHER = "nyc/weather"


# -- one-shots ------------------------------------------------------------------------------------------


def test_nothing_is_sent_before_the_commit() -> None:
    bench = Bench()
    txn = bench.client.begin("nyc")
    for i in range(10):
        txn.write(STREAM, b"v%d" % i, key=b"k")
    assert bench.bus.sent == []
    result = txn.commit()
    assert bench.bus.names() == ["FindScope", "OneShot"]
    assert result.counts.committed == 10
    assert result.txn_id == txn.txn_id
    assert txn.commit() is txn.result is result
    assert bench.bus.names() == ["FindScope", "OneShot"], "a second commit sends nothing"


def test_a_one_shot_carries_the_events_in_order() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"k", headers={"a": b"x"}, timestamp=5)
        txn.write(OTHER, None, key=b"")
        txn.write(STREAM, b"", key=b"k", headers=[("b", None), ("b", b"")])
        txn.commit()
    (command,) = bench.bus.of(r.OneShot)
    assert command.events == (
        r.Event(STREAM, -1, b"k", b"1", (r.EventHeader("a", b"x"),), 5),
        r.Event(OTHER, -1, b"", None, (), -1),
        r.Event(STREAM, -1, b"k", b"", (r.EventHeader("b", None), r.EventHeader("b", b"")), -1),
    )


def test_an_empty_transaction_commits() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        assert txn.commit().counts.committed == 0


def test_null_keys_are_spread_over_the_segments() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        for _ in range(5):
            txn.write(STREAM, b"v")
        txn.commit()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"v")
        txn.commit()
    places = [{e.segment_id for e in command.events} for command in bench.bus.of(r.OneShot)]
    assert all(len(place) == 1 for place in places)  # one batch
    assert bench.bus.names().count("DescribeStreams") == 1


def test_leaving_without_a_commit_sends_nothing_if_nothing_was_sent() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"v")
    assert bench.bus.sent == []
    with pytest.raises(errors.TransactionAborted):
        txn.commit()
    with pytest.raises(errors.TransactionAborted):
        txn.write(STREAM, b"v")


def test_a_refused_one_shot_can_be_committed_again() -> None:
    bench = Bench(override(OneShot=[refusal("UnknownStream"), ...]))
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"v")
        with pytest.raises(errors.UnknownStream):
            txn.commit()
        assert txn.commit().counts.committed == 1
    first, second = bench.bus.of(r.OneShot)
    assert first.events == second.events
    assert first.txn_id != second.txn_id, "the first one may have been aborted by RESOLVE"


def test_a_one_shot_too_large_for_the_commands_topic_is_written_instead() -> None:
    bench = Bench()
    bench.bus.max_bytes = 500
    with bench.client.begin("nyc") as txn:
        for _ in range(5):
            txn.write(STREAM, b"v" * 100, key=b"k")
        assert txn.commit().txn_id == txn.txn_id
    assert bench.bus.names() == ["FindScope", "Begin", "Touch", "Commit"]
    assert len(bench.written()) == 5


# -- opening --------------------------------------------------------------------------------------------


def test_a_full_buffer_opens_the_transaction() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        for i in range(30):
            txn.write(STREAM, b"%d" % i * 50, key=b"k%d" % (i % 3))
        assert bench.bus.names() == ["FindScope", "Begin", "Touch"]
        result = txn.commit()
    assert result.txn_id == bench.bus.of(r.Begin)[0].txn_id
    values = [value for _, _, _, value, _, _ in bench.written()]
    assert values == [b"%d" % i * 50 for i in range(30)]
    assert bench.journals.made[0].state == "discarded"


def test_more_events_than_a_request_may_have_open_the_transaction() -> None:
    bench = Bench(one_shot_bytes=1 << 30)
    with bench.client.begin("nyc") as txn:
        txn.write_many(STREAM, [(b"k", b"")] * 5_000)
        assert bench.bus.names() == []
        txn.write(STREAM, b"", key=b"k")
        assert bench.bus.names() == ["FindScope", "Begin", "Touch"]
        txn.commit()
    assert len(bench.written()) == 5_001


def test_the_receipt_counts_what_was_written() -> None:
    bench = Bench()
    events = [(b"k%d" % i, b"v%d" % i) for i in range(200)]
    with bench.client.begin("nyc") as txn:
        txn.token()
        for key, value in events:
            txn.write(STREAM, value, key=key)
        txn.commit()
    (own,) = bench.bus.of(r.Commit)[0].own
    assert own.finished
    assert {e.partition for e in own.extents} == {0, 1}
    for extent in own.extents:
        mine = [(k, v) for k, v in events if (position_of(k) >= 1 << 31) == (extent.partition == 1)]
        assert extent.count == len(mine)
        assert extent.crc_sum == sum(record_checksum(k, v) for k, v in mine)
        assert (extent.first, extent.end) == (5, 5 + len(mine))


def test_every_record_names_transaction_writer_and_epoch() -> None:
    bench = Bench(override(Touch=r.Touched(STREAM, 4, obliging(r.Touch(b"", STREAM)).segments)))
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v", key=b"k")
        txn.write(STREAM, b"v", key=b"k", headers=[("h", b"1")])
        txn.commit()
    (own,) = bench.bus.of(r.Commit)[0].own
    plain, with_header = [headers for _, _, _, _, headers, _ in bench.written()]
    assert [name for name, _ in with_header] == ["h", TXN_HEADER]
    assert [name for name, _ in plain] == [TXN_HEADER]
    assert unpack_txn_header(plain[0][1]) == (txn.txn_id, own.writer, 4)


def test_null_keys_stay_on_a_segment_for_a_while() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.token()
        for _ in range(1000):
            txn.write(STREAM, b"v" * 100)
        txn.commit()
    places = [partition for _, partition, *_ in bench.written()]
    turns = sum(a != b for a, b in pairwise(places))
    assert 4 <= turns <= 10
    assert min(Counter(places).values()) > 300


def test_a_token_opens_and_is_always_the_same() -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"v")
        assert txn.token() == txn.token()
        assert txn.token("all")[:-32] == token_of(txn.txn_id or b"", seen=HYBRID_TIME)[:-32]
        assert bench.bus.names() == ["FindScope", "Begin", "Touch"]


def test_an_unknown_stream_writes_nothing_of_the_buffer() -> None:
    bench = Bench(override(Touch=[..., refusal("UnknownStream")]))
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v")
    txn.write("nyc/unknown", b"v")
    with pytest.raises(errors.UnknownStream):
        txn.token()
    assert bench.written() == []
    with pytest.raises(errors.UnknownStream):
        txn.commit()
    assert bench.written() == []


def test_an_unknown_stream_in_an_open_transaction_leaves_it_usable() -> None:
    bench = Bench(override(Touch=[..., refusal("UnknownStream"), ...]))
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"1")
        txn.token()
        with pytest.raises(errors.UnknownStream):
            txn.write("nyc/unknown", b"2")
        txn.write(STREAM, b"3")
        txn.commit()
    assert [value for _, _, _, value, _, _ in bench.written()] == [b"1", b"3"]


def test_an_event_too_large_leaves_the_transaction_usable() -> None:
    bench = Bench(limit=1000)
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"k")
        for opened in range(2):
            with pytest.raises(errors.EventTooLarge, match=r"max\.message\.bytes"):
                txn.write(STREAM, b"x" * 5000, key=b"k")
            assert bool(opened) or bench.bus.names() == ["FindScope", "Begin", "Touch"]
        with pytest.raises(errors.EventTooLarge):
            txn.write(STREAM, b"x" * 500, headers={"h": b"y" * 500})
        txn.write(STREAM, b"2", key=b"k")
        txn.commit()
    assert [value for _, _, _, value, _, _ in bench.written()] == [b"1", b"2"]


# -- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"stream": "flights"}, errors.InvalidArgument),
        ({"stream": "nyc/fli.ghts"}, errors.InvalidArgument),
        ({"stream": 3}, errors.InvalidArgument),
        ({"stream": "sea/flights"}, errors.CrossScope),
        ({"key": "text"}, errors.InvalidArgument),
        ({"headers": {"ab.txn": b""}}, errors.InvalidArgument),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_a_bad_argument_leaves_the_transaction_as_it_was(
    arguments: dict[str, Any], error: type[Exception], opened: bool
) -> None:
    """All bad events are in `tests.client.test_event_rules`."""
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        if opened:
            txn.token()
            txn.write(STREAM, b"first", key=b"k")
        with pytest.raises(error):
            txn.write(**({"stream": STREAM, "value": b"v", "key": b"k"} | arguments))
        begun = opened or error is errors.CrossScope  # only a controller knows that
        assert txn.commit().counts.committed == (3 if begun else 0)
    if opened:
        assert len(bench.written()) == 1


@pytest.mark.parametrize("keepalive", [0, 0.5, -1, 1e12, float("nan")])
def test_a_keepalive_out_of_range(keepalive: float) -> None:
    with pytest.raises(errors.InvalidArgument):
        Bench().client.begin("nyc", keepalive=keepalive)


def test_receipts_of_another_transaction_are_refused_here() -> None:
    bench = Bench()
    foreign = Receipt(r.Receipt(b"\1" * 16, 1, 1, True, ()))
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"v")
        with pytest.raises(errors.InvalidArgument):
            txn.commit(receipts=[foreign])
        txn.token()
        with pytest.raises(errors.InvalidArgument, match="transaction"):
            txn.commit(receipts=[foreign])
        with pytest.raises(errors.InvalidArgument, match="list"):
            txn.commit(receipts=foreign)  # type: ignore[arg-type]
        with pytest.raises(errors.InvalidArgument):
            txn.commit(receipts=[b"\1\41nonsense"])


# -- layouts of streams -------------------------------------------------------------------------------

LAYOUTS = [r.StreamList((stream_info(STREAM, count),)) for count in (1, 8)]
NOWHERE = r.Touched(STREAM, 0, ())
NOTHING = r.StreamList((replace(stream_info(STREAM, 1), segments=()),))


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_write_into_a_stream_without_segments_is_refused(key: bytes | None) -> None:
    bench = Bench(override(Touch=NOWHERE))
    txn = bench.client.begin("nyc")
    txn.token()
    with pytest.raises(errors.MalformedRecord, match=f"no segments of {STREAM}"):
        txn.write(STREAM, b"v", key=key)
    txn._discard()


def test_a_one_shot_without_keys_into_a_stream_without_segments_is_refused() -> None:
    bench = Bench(override(DescribeStreams=NOTHING))
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v")
    with pytest.raises(errors.MalformedRecord, match=f"no segments of {STREAM}"):
        txn.commit()
    assert not bench.bus.of(r.OneShot)
    txn._discard()


def test_events_without_a_key_follow_a_scaling_of_others() -> None:
    bench = Bench(override(DescribeStreams=list(LAYOUTS)))
    seen = []
    for pause in (0.0, 1.0, 60.0):
        bench.clock.now += pause
        for _ in range(40):
            with bench.client.begin("nyc") as txn:
                txn.write(STREAM, b"v")
                txn.commit()
        shots = bench.bus.of(r.OneShot)[-40:]
        seen.append({event.segment_id for shot in shots for event in shot.events})
    assert [len(ids) > 1 for ids in seen] == [False, False, True]
