"""Kafka's controller is killed: calls with little time are answered by another broker."""

from __future__ import annotations

import time

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from anabranch.clock import SystemClock
from anabranch.errors import NotReady
from anabranch.infra.cluster import EmbeddedCluster
from anabranch.librdkafka.admin import KafkaAdmin
from anabranch.librdkafka.options import Options

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(180)]

CALL_S = 4.0  # no more than the patience with one broker
PATIENCE_S = 20.0


def test_calls_with_little_time_find_another_controller(three_brokers: EmbeddedCluster) -> None:
    admin = KafkaAdmin(Options(three_brokers.bootstrap, {}), SystemClock())

    raw = AdminClient({"bootstrap.servers": three_brokers.bootstrap})
    raw.create_topics([NewTopic("limits", 3, 3)])["limits"].result(30)

    def ask() -> int:
        admin._limits.clear()
        return admin.max_message_bytes(["limits"], time.monotonic() + CALL_S)["limits"]

    wanted = ask()
    native = admin.native
    assert isinstance(native, AdminClient)
    controller = native.list_topics(timeout=10).controller_id
    three_brokers.node(controller).kill()
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            assert ask() == wanted
            break
        except NotReady:
            assert time.monotonic() < until, "the killed broker is still asked"
    three_brokers.node(controller).start()
    admin.close()
