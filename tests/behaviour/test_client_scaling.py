"""Streams that are scaled, or scale themselves, while clients write that know them from before."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

import anabranch
from anabranch.protocol.partitioner import SPACE, tiles

pytestmark = pytest.mark.broker

KEYS = [f"key-{n}".encode() for n in range(64)]


def write_all(client: anabranch.Client, stream: str, said: str) -> anabranch.Result:
    """One transaction through the journal, with every key."""
    txn = client.begin(stream.partition("/")[0])
    txn.token()  # so it is no one-shot
    for key in KEYS:
        txn.write(stream, f"{said} {key.decode()}".encode(), key=key)
    return txn.commit()


@pytest.mark.parametrize("batch", ["one", "many"])
def test_a_client_writes_to_partitions_that_are_newer_than_what_it_knew(
    client: anabranch.Client, other: anabranch.Client, unique: str, batch: str
) -> None:
    stream = f"s{unique}/grown"
    client.create_stream(stream, segments=1)
    write_all(client, stream, "before")
    other.scale(stream, segments=5)
    if batch == "one":
        result = write_all(client, stream, "after")
    else:
        txn = client.begin(f"s{unique}")
        txn.token()
        txn.write_many(stream, [(f"after {k.decode()}".encode(), k) for k in KEYS])
        result = txn.commit()
    assert result.counts.committed == len(KEYS)
    other.scale(stream, segments=2)
    write_all(client, stream, "later")
    seen = [event.value for event in client.snapshot(stream).read(stream)]
    want = [f"{said} {k.decode()}".encode() for said in ("before", "after", "later") for k in KEYS]
    assert sorted(v or b"" for v in seen) == sorted(want)


@pytest.mark.long
def test_a_transaction_that_began_before_a_scaling_is_committed_whole(
    client: anabranch.Client, other: anabranch.Client, unique: str
) -> None:
    stream = f"s{unique}/rolled"
    client.create_stream(stream, segments=2)
    txn = client.begin(f"s{unique}")
    txn.token()
    for key in KEYS[:32]:
        txn.write(stream, b"a", key=key)
    other.scale(stream, segments=3)
    write_all(client, stream, "b")
    for key in KEYS[32:]:
        txn.write(stream, b"a", key=key)
    assert txn.commit().counts.committed == len(KEYS)
    seen = [(event.key, event.value) for event in client.snapshot(stream).read(stream)]
    assert sorted(k or b"" for k, v in seen if v == b"a") == sorted(KEYS)
    for key in KEYS:
        assert [v for k, v in seen if k == key] == [f"b {key.decode()}".encode(), b"a"]


SETTINGS = {"scale.events.per.second": 100, "scale.cooldown.ms": 1000, "scale.max.segments": 8}
DEADLINE_S = 40.0


@pytest.mark.slow(8)
def test_a_loaded_stream_is_split_and_no_key_loses_its_order(
    client: anabranch.Client, unique: str
) -> None:
    stream = f"{unique}/clicks"
    client.create_stream(stream, segments=1, settings=SETTINGS)
    written: dict[bytes, list[int]] = defaultdict(list)
    number = 0
    until = time.monotonic() + DEADLINE_S
    while len(client.describe(stream).segments) < 3:
        assert time.monotonic() < until, client.describe(stream)
        with client.begin(unique) as txn:
            for _ in range(100):
                key = b"key-%d" % (number % 61)
                txn.write(stream, b"%d" % number, key)
                written[key].append(number)
                number += 1
            txn.commit()
        time.sleep(0.1)
    segments = client.describe(stream).segments
    assert tiles([(s.low, s.high) for s in segments])
    assert max(s.high - s.low for s in segments) < SPACE
    seen: dict[bytes, list[int]] = defaultdict(list)
    with client.read(stream, timeout=DEADLINE_S) as reader:
        for _ in range(number):
            event = next(reader)
            assert event.key is not None
            assert event.value is not None
            seen[event.key].append(int(event.value))
    assert seen == written
