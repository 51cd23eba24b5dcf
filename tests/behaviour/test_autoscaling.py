"""A stream that scales itself on a real cluster, while it is written and read."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

import anabranch
from anabranch.protocol.partitioner import SPACE, tiles

pytestmark = pytest.mark.broker
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
