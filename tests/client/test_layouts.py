"""Answers that no controller should give: a stream without segments. What is said is said by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.errors import MalformedRecord
from anabranch.schemas import records as r
from tests.client.answers import STREAM, stream_info
from tests.client.bench import Bench, override

NOWHERE = r.Touched(STREAM, 0, ())
NOTHING = r.StreamList((replace(stream_info(STREAM, 1), segments=()),))


@pytest.mark.parametrize("key", [None, b"k"])
def test_a_write_into_a_stream_without_segments_is_refused(key: bytes | None) -> None:
    bench = Bench(override(Touch=NOWHERE))
    txn = bench.client.begin("nyc")
    txn.token()
    with pytest.raises(MalformedRecord, match=f"no segments of {STREAM}"):
        txn.write(STREAM, b"v", key=key)
    txn._discard()


def test_a_one_shot_without_keys_into_a_stream_without_segments_is_refused() -> None:
    bench = Bench(override(DescribeStreams=NOTHING))
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v")
    with pytest.raises(MalformedRecord, match=f"no segments of {STREAM}"):
        txn.commit()
    assert not bench.bus.of(r.OneShot)
    txn._discard()
