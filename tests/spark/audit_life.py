"""A busy life for a stream: every kind of write there is, and scalings between them."""

from __future__ import annotations

import os
from contextlib import suppress

from confluent_kafka import Producer

import anabranch
from anabranch.protocol.ids import pack_txn_header
from anabranch.protocol.schemas.records import Consumed, TaskStep
from anabranch.topics.names import journal_topic

KEYS = [f"key-{n}".encode() for n in range(24)]


def process(client: anabranch.Client, stream: str, other: str) -> int:
    """Commits that move positions and change state. Returns how many events are written to ``other``."""
    processor = f"{stream}-processor"
    client.create_processor(processor, stream, 2, "end", stores=["s"])
    ownership = client.take_tasks(processor)
    for sequence in range(1, 7):
        with client.begin(ownership.scope, ownership=ownership) as txn:
            txn.write(other, b"processed", key=b"k")
            txn.write_state(sequence % 2, [(b"\0\0\0\2k", b"%d" % sequence)])
            if sequence > 3:
                txn.flush()
            step = TaskStep((0, 1), sequence, ())
            txn.commit(consumed=Consumed(processor, ownership.fencing_token, (step,)))
    return 6


def live(client: anabranch.Client, bootstrap: str, stream: str, other: str) -> dict[str, int]:
    """Give two streams of a scope a history. Returns how many events each has."""
    scope = stream.partition("/")[0]
    client.create_stream(stream, segments=2)
    client.create_stream(other, segments=1, near=scope)
    count = {stream: 0, other: 0}
    journal = journal_topic(stream)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "acks": "all"})

    def plain(n: int) -> None:
        for i in range(n):
            producer.produce(journal, f"plain {i % 3}", b"p%d" % (i % 5))
        assert producer.flush(30) == 0
        count[stream] += n

    # Several writers over two streams; one is left out, one writes to a wrong place.
    txn = client.begin(scope, keepalive=120)
    token = txn.token()
    receipts = []
    for w in range(3):
        with client.join(token) as writer:
            for i, key in enumerate(KEYS * 3):
                writer.write(stream, f"w{w} {i}".encode(), key=key, headers={"n": b"%d" % i})
            writer.write(other, f"other {w}".encode(), key=b"k")
            writer.write(other, None, key=None, timestamp=1_700_000_000_000)
            receipts.append(writer.finish())
    assert txn.txn_id is not None
    misplaced = pack_txn_header(txn.txn_id, int.from_bytes(os.urandom(7), "big"), 99)
    producer.produce(journal, b"misplaced", b"k", 0, headers=[("ab.txn", misplaced)])
    assert producer.flush(30) == 0
    result = txn.commit(receipts=receipts[:2])
    assert result.counts.left_out > 0, result
    assert result.counts.rejected == 1, result
    count[stream] += 2 * 3 * len(KEYS)
    count[other] += 2 * 2

    plain(40)
    for i in range(20):  # one-shots
        with client.begin(scope) as small:
            small.write(stream, b"one", key=KEYS[i])
            if i % 4 == 0:
                small.write(other, b"one", key=KEYS[i])
            small.commit()
    count[stream] += 20
    count[other] += 5
    count[other] += process(client, stream, other)

    # Records after a writer's last receipt do not count.
    txn = client.begin(scope)
    with suppress(KeyError), client.join(txn.token()) as writer:
        writer.write(stream, b"early", key=b"k")
        early = writer.flush()
        writer.write(stream, b"later", key=b"k")
        raise KeyError("it ends")
    assert txn.commit(receipts=[early]).counts.committed == 1
    count[stream] += 1

    gone = client.begin(scope)
    gone.token()
    for key in KEYS:
        gone.write(stream, b"never seen", key=key)
    gone.flush()
    gone.abort()

    # Two that are open over scalings roll; the big one is staged.
    old, big = client.begin(scope, keepalive=120), client.begin(scope, keepalive=120)
    old.token()
    big.token()
    for key in KEYS:
        old.write(stream, b"old", key=key)
    old.flush()
    big.write_many(stream, [(os.urandom(60), KEYS[i % len(KEYS)]) for i in range(2000)])
    big.flush()
    client.scale(stream, segments=3)
    plain(20)
    with client.begin(scope) as later:
        later.token()
        for key in KEYS:
            later.write(stream, b"later", key=key)
        later.commit()
    client.scale(stream, segments=1)
    old.commit()
    big.commit(timeout=60)
    count[stream] += 2 * len(KEYS) + 2000
    plain(10)
    return count
