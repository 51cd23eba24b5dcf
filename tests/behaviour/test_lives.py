"""Streams are altered, truncated and deleted on a real broker, under load, with open transactions and readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

import anabranch
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    SnapshotExpired,
    StreamExists,
    UnknownStream,
)
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

KEYS = [f"key-{n}".encode() for n in range(16)]


@contextmanager
def load(cluster: Cluster, stream: str) -> Iterator[list[int]]:
    """One-shots to another stream all the while: yields their commit timestamps."""
    done: list[int] = []
    over = threading.Event()

    def write() -> None:
        with anabranch.connect(cluster.bootstrap) as client:
            client.create_stream(stream)
            while not over.is_set():
                with client.begin(stream.partition("/")[0]) as txn:
                    txn.write(stream, b"load", key=b"k")
                    done.append(txn.commit().commit_timestamp)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield done
    finally:
        over.set()
        thread.join()
    assert len(done) > 10


def write_all(client: anabranch.Client, streams: list[str], said: bytes) -> int:
    """One transaction through journals; its commit timestamp."""
    with client.begin(streams[0].partition("/")[0]) as txn:
        txn.token()  # so it is no one-shot
        for stream in streams:
            txn.write_many(stream, [(said, key) for key in KEYS])
        return txn.commit().commit_timestamp


def values(client: anabranch.Client, stream: str) -> list[bytes | None]:
    return [event.value for event in client.snapshot(stream).read(stream)]


def become(client: anabranch.Client, stream: str, name: str, wanted: str) -> None:
    """Brokers show it a moment after it is taken."""
    wait_until(lambda: client.effective_settings(stream)[name] == wanted)


@pytest.mark.long
def test_a_stream_s_life_under_load(
    operator: anabranch.Client,
    cluster: Cluster,
    unique: str,
    measured: Callable[[str], None],
) -> None:
    client = operator
    scope = f"v{unique}"
    one, two = f"{scope}/one", f"{scope}/two"
    for stream in (one, two):
        client.create_stream(stream, segments=2)
    with load(cluster, f"{scope}/load") as commits:
        at = [write_all(client, [one, two], b"%d" % n) for n in range(3)]
        old = client.snapshot([one, two], at[0])
        waiting = client.begin(scope, keepalive=600)
        waiting.write_many(one, [(b"waiting", key) for key in KEYS])
        waiting.flush()
        reader = client.read(one, timeout=20)
        assert next(reader).value == b"0"

        altered = client.alter_stream(one, {"retention.ms": 86_400_000, "scale.cooldown.ms": 5000})
        assert altered.settings == {"retention.ms": "86400000", "scale.cooldown.ms": "5000"}
        become(client, one, "retention.ms", "86400000")
        assert client.alter_stream(one, {"retention.ms": None}).settings == {
            "scale.cooldown.ms": "5000"
        }
        become(client, one, "retention.ms", "-1")
        size = int(client.effective_settings(one)["max.message.bytes"])
        with pytest.raises(InvalidArgument, match="only be raised"):
            client.alter_stream(one, {"max.message.bytes": size - 1})
        client.alter_stream(one, {"max.message.bytes": size + 1})
        with pytest.raises(InvalidArgument, match="refused"):
            client.alter_stream(one, {"segment.bytes": 1})
        become(client, one, "max.message.bytes", str(size + 1))

        for stream in (one, two):
            client.truncate_stream(stream, at[1])
            client.truncate_stream(stream, at[1])
            assert values(client, stream) == [b"2"] * len(KEYS)
            with pytest.raises(SnapshotExpired):
                list(old.read(stream))
            with pytest.raises(SnapshotExpired):
                client.snapshot(stream, at[0])

        with pytest.raises(IllegalState, match="commit or abort"):
            client.delete_stream(one)
        waiting.commit()
        assert values(client, one).count(b"waiting") == len(KEYS)
        before = len(commits)
        kept = client.snapshot([one, two]).position()
        client.delete_stream(one)
        client.delete_stream(one)
        for ask in (client.describe, client.effective_settings):
            with pytest.raises(UnknownStream):
                ask(one)
        began = time.monotonic()
        with pytest.raises(UnknownStream, match="the stream was deleted"):
            list(reader)
        measured(f"told a reader of its stream's deletion after {time.monotonic() - began:.2f} s")
        client.create_stream(one, segments=3)
        with pytest.raises(StreamExists):
            client.create_stream(one, segments=2)
        write_all(client, [one], b"anew")
        assert values(client, one) == [b"anew"] * len(KEYS)
        assert values(client, two) == [b"2"] * len(KEYS)
        rest = client.open_snapshot(kept)
        with pytest.raises(UnknownStream, match="is another one now"):
            list(rest.read(one))
        assert [event.value for event in rest.read(two)] == [b"2"] * len(KEYS)
    assert len(commits) > before
    assert commits == sorted(commits)
