"""Control partitions are added under a connected client and a controller."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

import anabranch
from anabranch.protocol.ids import control_partition_of
from anabranch.topics.names import commands_topic, control_topic, status_topic
from tests.cluster import START_DEADLINE_S, start_cluster
from tests.conftest import Broker

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

PREFIX = "growing"


def test_a_connected_client_uses_them(broker: Broker, tmp_path: Path) -> None:
    first = start_cluster(broker.bootstrap, tmp_path, PREFIX).controller
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})

    def grow(*topics: str) -> None:
        for made in admin.create_partitions([NewPartitions(each, 2) for each in topics]).values():
            made.result()

    try:
        with anabranch.connect(broker.bootstrap, prefix=PREFIX, timeout=30.0) as client:
            client.create_stream(f"{PREFIX}-a/s")
            # One topic after the other: a controller that looks in between goes on.
            grow(commands_topic(PREFIX))
            time.sleep(8.0)
            grow(commands_topic(PREFIX, "admin"), control_topic(PREFIX), status_topic(PREFIX))
            until = time.monotonic() + START_DEADLINE_S
            while first.leading() != [0, 1]:
                assert first.running
                assert time.monotonic() < until, first.log_file.read_text()[-4000:]
                time.sleep(0.1)
            first.stop()  # new scopes are put there by controllers that were started since
            first.start().wait_leading()
            client.create_stream(f"{PREFIX}-b/s")
            with client.begin(f"{PREFIX}-b") as txn:
                txn.write(f"{PREFIX}-b/s", b"v")
                assert control_partition_of(txn.commit().txn_id) == 1
    finally:
        first.kill()
