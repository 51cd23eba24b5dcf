"""Records, batches and commands that brokers take and no client of ours would send."""

from __future__ import annotations

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
from anabranch.protocol.schemas.codec import encode
from tests.behaviour.bad_input.place import SEGMENTS, SOON_S, Place
from tests.waiting import wait_until

pytestmark = pytest.mark.broker


def test_a_native_transaction_left_open_on_the_journal_stalls_nothing(place: Place) -> None:
    """Not the merge of others, not the reader of the stream."""
    token, pen, _ = place.touched()
    options = {"bootstrap.servers": place.cluster.bootstrap, "transactional.id": place.scope}
    rude = Producer(options | {"log_level": 0})
    rude.init_transactions(20)
    rude.begin_transaction()
    for partition in range(SEGMENTS):
        rude.produce(place.journal, b"bad", None, partition, headers=[pen.header])
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


def test_a_batch_that_no_consumer_can_read_stalls_nothing(place: Place) -> None:
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


WRONG_HEADERS: dict[str, list[tuple[str, bytes]]] = {
    "none": [],
    "no partition": [("ab.cid", b"1" * 16)],
    "no correlation id": [("ab.reply", bytes(4))],
    "a partition that is not there": [("ab.cid", b"1" * 16), ("ab.reply", b"\x00\x00\x03\xe7")],
    "a negative partition": [("ab.cid", b"1" * 16), ("ab.reply", b"\xff\xff\xff\xff")],
    "a partition of three bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(3))],
    "a partition of eight bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(8))],
    "an empty correlation id": [("ab.cid", b""), ("ab.reply", bytes(4))],
    "a correlation id of 1 kB": [("ab.cid", b"1" * 1000), ("ab.reply", bytes(4))],
}


def test_a_command_that_can_not_be_answered_is_done(
    place: Place, subtests: pytest.Subtests
) -> None:
    """Nothing says that a client waits."""
    topic = f"{place.cluster.prefix}.commands"
    tokens = {what: place.begin() for what in WRONG_HEADERS}
    commands = {what: encode(r.Abort(token, "no answer")) for what, token in tokens.items()}
    place.raw.produce([(topic, 0, None, commands[w], WRONG_HEADERS[w]) for w in WRONG_HEADERS])
    for what, token in tokens.items():
        with subtests.test(what):
            wait_until(lambda token=token: place.state(token).state != "OPEN")  # type: ignore[misc]
            assert place.state(token).reason == "no answer"
