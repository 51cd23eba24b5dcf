"""Commands outlive the producer that they go through; how one is lost is in tests/faults/test_blind_broker.py."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

import anabranch
from anabranch.librdkafka.command_bus import KafkaBus
from anabranch.librdkafka.handles import drop
from tests.cluster import Cluster

pytestmark = pytest.mark.broker


class Overtaken:
    """The producer of a thread that is about to send, while another thread replaces and frees it."""

    def __init__(self, bus: KafkaBus, freed: Producer) -> None:
        self.bus = bus
        self.freed = freed
        self.successor = bus._producer
        self.refusals = 0

    def produce(self, *what: Any, **how: Any) -> None:
        """As the freed one does it; then the thread looks again which one it is."""
        self.bus._producer = self.successor
        with pytest.raises(RuntimeError) as caught:
            self.freed.produce(*what, **how)
        self.refusals += 1
        raise caught.value

    def poll(self, timeout: float) -> int:
        """Nothing was queued."""
        return 0

    def __len__(self) -> int:
        return 0


def test_a_command_sent_through_a_freed_producer_is_sent_again(
    cluster: Cluster, unique: str
) -> None:
    with anabranch.connect(cluster.bootstrap) as client:
        client.create_stream(f"{unique}/events")
        bus = client._session._bus
        assert isinstance(bus, KafkaBus)
        lost = bus._producer
        assert lost is not None
        assert bus._renew_producer(lost)
        drop(lost)
        assert not bus._renew_producer(lost), "replaced already: it must not be freed twice"
        late = Overtaken(bus, lost)
        bus._producer = late  # type: ignore[assignment]
        with client.begin(unique) as txn:
            txn.write(f"{unique}/events", b"v")
            txn.commit()
        assert late.refusals == 1
        assert bus._producer is late.successor
    assert not bus._renew_producer(late.successor), "closed: nobody would free the new one"  # type: ignore[arg-type]
