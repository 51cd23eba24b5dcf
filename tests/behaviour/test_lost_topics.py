"""Topics deleted by hand on a real broker: the streams that have them are given up, all others go on."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.errors import IllegalState, StreamLost, TransactionAborted, UnknownStream
from tests.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

SOON_S = 60.0
KINDS = ("", ".journal", ".history")


QUICKLY_LOST = pytest.mark.parametrize("own_cluster", [("--lost-after", "0.5")], indirect=True)


@pytest.mark.soak
@QUICKLY_LOST
def test_idle_streams_whose_topics_somebody_deletes_are_lost(
    own_cluster: Cluster, unique: str
) -> None:
    """Nothing is written or read: the check that runs each minute finds it."""
    streams = [f"p{unique}/idle{n}" for n in range(3)]
    with anabranch.connect(own_cluster.bootstrap, prefix=own_cluster.prefix) as client:
        for stream in streams:
            client.create_stream(stream)
        topics = [s.replace("/", ".") + kind for s, kind in zip(streams, KINDS, strict=True)]
        admin = AdminClient({"bootstrap.servers": own_cluster.bootstrap})
        for done in admin.delete_topics(topics).values():
            done.result()
        wait_until(
            lambda: {s.state for s in client.streams(f"p{unique}")} == {"LOST"}, 120.0, pause=1.0
        )
        for stream in streams:
            with pytest.raises(StreamLost):
                client.create_stream(stream)


@pytest.mark.soak
@QUICKLY_LOST
def test_streams_whose_topics_somebody_deletes_are_given_up(
    own_cluster: Cluster, unique: str
) -> None:
    scope = f"p{unique}"
    lost = [f"{scope}/lost{n}" for n in range(3)]
    fine = f"{scope}/fine"
    with (
        anabranch.connect(own_cluster.bootstrap, prefix=own_cluster.prefix) as client,
        anabranch.connect(
            own_cluster.bootstrap, prefix=own_cluster.prefix, lane="admin"
        ) as operator,
    ):
        for stream in (*lost, fine):
            client.create_stream(stream)

        def commit_fine() -> None:
            with client.begin(scope) as txn:
                txn.token()  # so it is no one-shot
                txn.write(fine, b"fine")
                txn.commit()

        def write_late(stream: str) -> None:
            with client.begin(scope) as txn:
                txn.write(stream, b"late")
                txn.commit()

        def wait_aborted(token: bytes, stream: str) -> None:
            wait_until(lambda: client.state(token).state == "ABORTED", SOON_S)
            assert f"{stream} is lost" in client.state(token).reason

        under_way = []
        for stream in lost:
            txn = client.begin(scope, keepalive=600)  # so that no heartbeat tells it first
            for place in (stream, fine):
                txn.write(place, b"torn", key=b"k")
            txn.flush()
            under_way.append(txn)
        commit_fine()
        topics = [stream.replace("/", ".") + kind for stream, kind in zip(lost, KINDS, strict=True)]
        admin = AdminClient({"bootstrap.servers": own_cluster.bootstrap})
        for done in admin.delete_topics(topics).values():
            done.result()
        for stream, txn in zip(lost, under_way, strict=True):
            commit_fine()
            if stream == lost[1]:  # no journal: not even the flush gets through
                token = txn.token()
                txn.write(stream, b"never stored", key=b"k")
                with pytest.raises(StreamLost, match=f"{stream} is LOST"):
                    txn.flush(SOON_S)
                wait_aborted(token, stream)
                continue
            with pytest.raises(TransactionAborted, match=f"{stream} is lost"):
                txn.commit(timeout=SOON_S)
        wait_until(lambda: {client.describe(stream).state for stream in lost} == {"LOST"}, SOON_S)
        for stream in lost:
            with pytest.raises(StreamLost):
                write_late(stream)
        assert {s.stream: s.state for s in client.streams(scope)} == {
            fine: "ACTIVE", **dict.fromkeys(lost, "LOST"),
        }  # fmt: skip
        with client.snapshot(fine).read(fine) as events:
            assert [event.value for event in events] == [b"fine"] * 4
        with pytest.raises(IllegalState, match="only a LOST stream"):
            operator.forget_stream(fine)
        for stream in lost:
            operator.forget_stream(stream)
            operator.forget_stream(stream)
            with pytest.raises(UnknownStream):
                client.describe(stream)
            client.create_stream(stream, segments=2)
        under_way[1].abort()  # what it wrote, and could not be rid of, is of the old one
        for stream in lost:
            write_late(stream)
            write_late(stream)
            with client.snapshot(stream).read(stream) as events:
                assert [event.value for event in events] == [b"late"] * 2
    written = own_cluster.controller.log_file.read_text()
    for stream in lost:
        assert written.count(f"{stream} is lost") == 1
    assert written.count("WARNING") < 12, written
    assert written.count("leads no more") <= len(lost), "making topics anew ends no lead"
