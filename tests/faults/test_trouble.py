"""One stream in lasting trouble on three brokers, under load: others commit meanwhile, and it recovers.

Longer: `python -m tests.faults.test_trouble kill 60`, or freeze, isr, right.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

import anabranch
from anabranch.errors import AnabranchError, NotReady
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicSpec
from anabranch.topics import creation
from anabranch.topics.names import commands_topic, replies_topic
from tests.cluster import start_cluster
from tests.workload.steady import COMMITTED, Steady, steadily

pytestmark = [pytest.mark.broker, pytest.mark.timeout(240)]

SOLO = {"replication.factor": "1", "min.insync.replicas": "1"}
PAIR = {"replication.factor": "2"}
GRACE_S = (
    25.0  # until brokers have elected other leaders, and a leader has gone on without the stream
)


@contextmanager
def writing(bootstrap: str, *streams: str) -> Iterator[list[Steady]]:
    with ExitStack() as opened:
        clients = [opened.enter_context(anabranch.connect(bootstrap, timeout=10)) for _ in streams]
        writers = [
            Steady(client, stream, timeout=5)
            for client, stream in zip(clients, streams, strict=True)
        ]
        with steadily(*writers):
            yield writers


def kill(cluster: EmbeddedCluster, node: int) -> Callable[[], object]:
    cluster.node(node).kill()
    return cluster.node(node).start


def freeze(cluster: EmbeddedCluster, node: int) -> Callable[[], object]:
    cluster.node(node).pause()
    return cluster.node(node).resume


@pytest.mark.soak
def test_others_commit_while_a_broker_of_one_stream_is_dead() -> None:
    others_commit_meanwhile(kill, SOLO, 6.0)


@pytest.mark.soak
def test_others_commit_while_a_right_on_one_stream_is_missing() -> None:
    right_taken(6.0)


@pytest.mark.soak
@pytest.mark.parametrize(("trouble", "grace_s"), [(kill, GRACE_S), (freeze, 45.0)])
def test_others_commit_while_the_broker_of_a_lanes_answers_is_away(
    trouble: Callable[[EmbeddedCluster, int], Callable[[], object]], grace_s: float
) -> None:
    """Once brokers have elected other leaders no round and no lead fails for it; then it is answered again."""
    replies = replies_topic(lane="solo")
    with EmbeddedCluster(3, quick_start=True) as cluster, ExitStack() as stack:
        control = start_cluster(cluster.bootstrap)
        stack.callback(control.controller.kill)
        log = stack.enter_context(closing(KafkaLog(cluster.bootstrap)))
        log.create_topics([TopicSpec(commands_topic(lane="solo"), 1), TopicSpec(replies, 1, {}, 1)])
        operator = stack.enter_context(anabranch.connect(cluster.bootstrap, lane="admin"))
        operator.create_stream("nyc/good", segments=1)
        with patch.object(creation, "problems", return_value=[]):  # one replica is too few
            operator.add_lane("solo", adopt_topics=True)
        operator.grant("solo", "nyc/*", ["write", "describe"])
        solo = stack.enter_context(anabranch.connect(cluster.bootstrap, lane="solo"))
        one_shot(solo, "nyc/good")
        admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
        node = admin.list_topics(timeout=10).topics[replies].partitions[0].leader
        with writing(cluster.bootstrap, "nyc/good") as (good,):
            mend = trouble(cluster, node)
            time.sleep(grace_s)
            began, said = time.monotonic(), control.controller.log_file.read_text()
            while time.monotonic() < began + 8.0:
                with pytest.raises(AnabranchError):
                    one_shot(solo, "nyc/good", timeout=1)
            # A client that knew the broker before it froze may need a minute to find another one.
            with anabranch.connect(cluster.bootstrap, lane="admin", timeout=20) as fresh:
                trouble_of = {lane.name: lane.trouble for lane in fresh.lanes()}
            ended, later = time.monotonic(), control.controller.log_file.read_text()[len(said) :]
            mend()
        until = ended + 60
        while True:
            try:
                one_shot(solo, "nyc/good", timeout=2)
                break
            except AnabranchError:
                assert time.monotonic() < until, operator.lanes()
        print(said[-2000:], "\n---", later)
        assert "has no leader" in trouble_of.pop("solo")
        assert not any(trouble_of.values())
        assert "lead" not in later.replace("has no leader", "")
        assert max(one.slowest for one in good.commits if began <= one.began <= ended) < 2.0


def right_taken(seconds: float) -> None:
    """A real authorizer: the controller may neither see, read nor write the topics of one stream."""
    rights = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "allow.everyone.if.no.acl.found": "true",
    }
    folder = Path(tempfile.mkdtemp(prefix="anabranch-rights-"))
    broker = EmbeddedBroker(folder, quick_start=True, properties=rights)
    broker.start()
    control = start_cluster(broker.bootstrap)
    client = anabranch.connect(broker.bootstrap)
    try:
        for stream in ("nyc/good", "nyc/bad"):
            client.create_stream(stream, segments=1)
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        denied = [
            AclBinding(
                ResourceType.TOPIC,
                "nyc.bad",
                ResourcePatternType.PREFIXED,
                "User:ANONYMOUS",
                "*",
                operation,
                AclPermissionType.DENY,
            )
            for operation in (AclOperation.DESCRIBE, AclOperation.READ, AclOperation.WRITE)
        ]
        for made in admin.create_acls(denied).values():
            made.result(10)
        until = time.monotonic() + seconds
        waits = []
        while time.monotonic() < until or client.describe("nyc/bad").state != "WAITING":
            began = time.monotonic()
            one_shot(client, "nyc/good")
            waits.append(time.monotonic() - began)
            assert time.monotonic() < until + 60
        print(len(waits), "commits, slowest", sorted(waits)[-5:])
        assert sorted(waits)[-5] < 2.0, "but for the moment when the right was taken"
        assert "TOPIC_AUTHORIZATION_FAILED" in client.describe("nyc/bad").trouble
        with pytest.raises(NotReady, match="TOPIC_AUTHORIZATION_FAILED"):
            # In a shorter time a machine that stops for seconds gets no answer: OutcomeUnknown.
            one_shot(client, "nyc/bad", timeout=20)
        anything = AclBindingFilter(
            ResourceType.TOPIC,
            "nyc.bad",
            ResourcePatternType.PREFIXED,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            AclOperation.ANY,
            AclPermissionType.ANY,
        )
        for gone in admin.delete_acls([anything]).values():
            gone.result(10)
        one_shot(client, "nyc/bad", timeout=30)
    finally:
        client.close()
        control.controller.kill()
        broker.stop()


def one_shot(client: anabranch.Client, stream: str, timeout: float = 20) -> None:
    with client.begin("nyc") as txn:
        txn.write(stream, b"v", key=b"k")
        txn.commit(timeout=timeout)


def others_commit_meanwhile(
    trouble: Callable[[EmbeddedCluster, int], Callable[[], object]],
    settings: dict[str, str],
    seconds: float,
) -> None:
    with EmbeddedCluster(3, quick_start=True) as cluster:
        control = start_cluster(cluster.bootstrap)
        try:
            client = anabranch.connect(cluster.bootstrap)
            client.create_stream("nyc/good", segments=1)
            client.create_stream("other/good", segments=1)
            client.create_stream("nyc/solo", segments=1, settings=settings)
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
            topic = admin.list_topics(timeout=10).topics["nyc.solo"]
            with writing(cluster.bootstrap, "nyc/good", "other/good", "nyc/solo") as writers:
                time.sleep(2)
                mend = trouble(cluster, topic.partitions[0].replicas[-1])
                began = time.monotonic()
                time.sleep(GRACE_S + seconds)
                then = client.describe("nyc/solo")
                ended = time.monotonic()
                mend()
                *good, solo = writers
                solo.wait_more(3, 90.0)
            for writer in good:
                waits = sorted(
                    one.slowest for one in writer.commits if began + GRACE_S <= one.began <= ended
                )
                print(writer.stream, len(waits), "commits, slowest", waits[-5:])
                assert waits[len(waits) * 9 // 10] < 2.0
                assert writer.commits[-1].result == COMMITTED
            assert then.state == "WAITING", then
            assert then.trouble
            print(then.trouble, "| solo:", len(solo.values), len(solo.commits))
            for writer in writers:
                with client.read(writer.stream, timeout=5) as reader:
                    seen = [event.value for event in reader]
                assert set(writer.values) <= set(seen)
                assert len(seen) == len(set(seen)), "nothing twice"
        finally:
            print("\n".join(control.controller.log_file.read_text().splitlines()[-30:]))
            client.close()
            control.controller.kill()


if __name__ == "__main__":
    name, seconds = sys.argv[1], float(sys.argv[2])
    if name == "right":
        right_taken(seconds)
        sys.exit()
    play, chosen = {"kill": (kill, SOLO), "freeze": (freeze, SOLO), "isr": (kill, PAIR)}[name]
    others_commit_meanwhile(play, chosen, seconds)
