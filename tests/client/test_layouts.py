"""Layouts of streams: without segments, which no controller should tell, and from before a scaling."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.errors import MalformedRecord
from anabranch.protocol.schemas import records as r
from tests.client.answers import STREAM, stream_info
from tests.client.bench import Bench, override

LAYOUTS = [r.StreamList((stream_info(STREAM, count),)) for count in (1, 8)]
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


def test_a_client_remembers_so_many_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.client.shared._MOST_NAMES", 10)
    shared = Bench().client._shared
    for n in range(25):
        shared.learn(f"nyc/s{n}", None)
        assert f"nyc/s{n}" in shared.streams
    assert len(shared.streams) <= 10
