"""Records and batches that are not as they should be, most of them in journals."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing

import pytest
from confluent_kafka import Producer

from anabranch.batches.compression import NONE, ZSTD, compress
from anabranch.batches.format import Packed
from anabranch.batches.records import put_varint
from anabranch.kafka.cluster import Cluster as Brokers
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.settings import parse_settings
from anabranch.ports import TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.behaviour.bad_input.place import SEGMENTS, SOON_S, WAIT_MS, Place
from tests.crash.raw import make_txn_id, partition_of

pytestmark = pytest.mark.broker


def header_of(txn_id: bytes, epoch: int = 0, writer: int = 7) -> bytes:
    return txn_id + writer.to_bytes(8, "big", signed=True) + epoch.to_bytes(4, "big", signed=True)


GOOD = "ab.txn"
# Records, given the id of an open transaction -> the reason under which it is counted.
RECORDS: dict[str, tuple[Callable[[bytes], list[tuple[str, bytes]]], str]] = {
    "a header too short": (lambda i: [(GOOD, header_of(i)[:-1])], "bad_header"),
    "a header too long": (lambda i: [(GOOD, header_of(i) + b"\0")], "bad_header"),
    "an empty header": (lambda i: [(GOOD, b"")], "bad_header"),
    "the header twice": (lambda i: [(GOOD, header_of(i))] * 2, "bad_header"),
    "another reserved header": (lambda i: [(GOOD, header_of(i)), ("ab.x", b"")], "bad_header"),
    "too many headers": (
        lambda i: [(GOOD, header_of(i)), *[("h", b"")] * 1_001],
        "bad_header",
    ),
    "too many headers of a plain write": (lambda _: [("h", b"")] * 1_001, "bad_header"),
    "a reserved header alone": (lambda i: [("ab.x", b"")], "bad_header"),
    "an unknown transaction": (lambda i: [(GOOD, header_of(make_txn_id()))], "unknown_transaction"),
    "an id of zeros": (lambda i: [(GOOD, header_of(bytes(16)))], "unknown_transaction"),
    "a stream epoch from the future": (lambda i: [(GOOD, header_of(i, 1))], "wrong_stream_epoch"),
    "a negative stream epoch": (lambda i: [(GOOD, header_of(i, -1))], "wrong_stream_epoch"),
}


def test_record_that_is_rejected(place: Place, subtests: pytest.Subtests) -> None:
    for what, (headers, reason) in RECORDS.items():
        with subtests.test(what):
            before = place.rejected(reason, 0)
            token, pen, touched = place.touched()
            place.write(headers(token[1:17]), count=3)
            pen.write(place.stream, touched.segments, [(b"k", b"good")])
            assert place.rejected(reason, before + 3) == before + 3
            outcome = place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
            assert (outcome.state, outcome.committed) == ("COMMITTED", 1)
            assert outcome.rejected == (3 if reason == "wrong_stream_epoch" else 0)
    assert b"bad" not in place.visible()


def test_record_of_a_transaction_that_can_not_have_it(place: Place) -> None:
    token = place.begin()
    place.write([(GOOD, header_of(token[1:17]))])
    assert place.rejected("untouched_stream", 1) == 1
    assert place.raw.ask(r.Abort(token, "")).rejected == 1
    token, pen, touched = place.touched()
    right = partition_of(b"k", touched.segments)
    wrong = place.journal, 1 - right, b"k", b"bad", [pen.header]
    place.raw.produce([wrong])
    assert place.rejected("wrong_segment", 1) == 1
    assert place.raw.ask(r.Abort(token, "")).rejected == 1
    for late, end in enumerate(("COMMITTED", "ABORTED"), 1):
        token, pen, touched = place.touched()
        pen.write(place.stream, touched.segments, [(b"k", b"in time")])
        if end == "COMMITTED":
            place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
        else:
            place.raw.ask(r.Abort(token, ""))
        pen.write(place.stream, touched.segments, [(b"k", b"bad")])
        assert place.rejected("late", late) == late
        assert place.state(token).state == end
    assert b"bad" not in place.visible()


def test_native_transaction_left_open_on_the_journal(place: Place) -> None:
    """Nothing stalls: not the merge of others, not the reader of the stream."""
    token, _, _ = place.touched()
    rude = Producer(
        {
            "bootstrap.servers": place.cluster.bootstrap,
            "transactional.id": place.scope,
            "log_level": 0,
        }
    )
    rude.init_transactions(20)
    rude.begin_transaction()
    for partition in range(SEGMENTS):
        header = (GOOD, header_of(token[1:17]))
        rude.produce(place.journal, b"bad", None, partition, headers=[header])
    rude.flush(20)
    assert place.rejected("native_transaction", SEGMENTS) == SEGMENTS
    with place.client.begin(place.scope) as txn:  # a whole life while it is open
        txn.token()
        txn.write(place.stream, b"meanwhile", key=b"k")
        txn.flush()
        assert txn.commit(timeout=SOON_S).counts.committed == 1
    assert b"meanwhile" in place.visible()
    rude.commit_transaction(20)
    assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"
    assert b"bad" not in place.visible()


NOW_MS = int(time.time() * 1000)


def varlong(value: int) -> bytes:
    out = bytearray()
    put_varint(out, value)
    return bytes(out)


def one_record(timestamp_delta: int, value: int) -> bytes:
    """A record without key whose value is so many zeros."""
    inner = b"\0" + varlong(timestamp_delta) + b"\0\1" + varlong(value) + bytes(value) + b"\0"
    return varlong(len(inner)) + inner


# Batches that a broker takes, and no consumer can read (of commands, it looks at the timestamps).
UNREADABLE: dict[str, Callable[[], Packed]] = {
    # The sum of two numbers of 64 bits.
    "a timestamp beyond 64 bits": lambda: Packed(
        one_record(1 << 40, 3), NONE, 1, (1 << 63) - (1 << 39), (1 << 63) - 1
    ),
    "a bomb": lambda: Packed(
        compress(ZSTD, one_record(0, limits.BATCH.value + 1)), ZSTD, 1, NOW_MS, NOW_MS
    ),
}


def test_batch_that_nobody_can_read(place: Place) -> None:
    commands = f"{place.cluster.prefix}.commands"
    with closing(Brokers(parse_settings(place.cluster.bootstrap, {}))) as brokers:
        for topic, what in (
            (place.journal, "a timestamp beyond 64 bits"), (place.journal, "a bomb"), (commands, "a bomb"),
        ):  # fmt: skip
            deadline = time.monotonic() + 20
            with closing(JournalProducer(brokers, deadline)) as producer:
                producer.append(TopicPartition(topic, 0), UNREADABLE[what](), deadline)
                producer.flush(deadline)
            assert place.state(place.begin()).state == "OPEN", (topic, what)


def test_rejections_are_seen_by_an_operator(place: Place) -> None:
    place.write([("ab.x", b"")], count=2)
    assert place.rejected("bad_header", 2) == 2
    command = [sys.executable, "-m", "anabranch.cli", "stream", "describe", place.stream, "--json"]
    told = subprocess.run(
        [*command, "--bootstrap", place.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(told.stdout)["rejected"] == {"bad_header": 2}
