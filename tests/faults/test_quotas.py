"""A broker that throttles its clients, as managed clusters do: everything is slower, and nothing fails.

Kafka answers a client above its quota at once, and then does not read its connection until the rate is below
the quota. So the next request waits in the connection, and its deadline runs meanwhile.

Longer: `python -m tests.faults.test_quotas 10` throttles for ten minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from anabranch.infra.fetch import ensure_broker
from tests.behaviour.floods import terms
from tests.cluster import start_cluster
from tests.workload.steady import COMMITTED, Steady, steadily

pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(240)]

MIB = 1 << 20
# What one client may do: bytes a second that it writes and reads, and percent of one thread of the broker.
QUOTAS = {"producer_byte_rate": MIB // 4, "consumer_byte_rate": MIB // 2, "request_percentage": 25}
# What a controller merges at once: a second at its quota.
CHUNKS = ("--chunk-bytes", str(QUOTAS["producer_byte_rate"]))
BIG = 8 * MIB  # of one transaction: half a minute at its quota
VALUE = b"v" * 64_000
SMALL, LARGE = "shop/orders", "shop/imports"


def throttle(broker: EmbeddedBroker) -> None:
    """Set `QUOTAS` for each client, by Kafka's own tool."""
    settings = ",".join(f"{name}={value}" for name, value in QUOTAS.items())
    subprocess.run(
        [
            *("java", "-cp", os.pathsep.join(map(str, ensure_broker()))),
            *("kafka.admin.ConfigCommand", "--bootstrap-server", broker.bootstrap),
            *("--alter", "--add-config", settings),
            *("--entity-type", "clients", "--entity-default"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )


def committed(client: anabranch.Client, stream: str, idle: float) -> Counter[bytes]:
    """Values of a stream's events, until none came for ``idle`` seconds."""
    with client.read(stream, timeout=idle) as reader:
        return Counter(bytes(event.value or b"") for event in reader)


def run(seconds: float, folder: Path) -> dict[str, float]:
    """Throttle a broker under load for ``seconds``, and until a big transaction is committed."""
    with EmbeddedBroker() as broker, ExitStack() as opened:
        cluster = start_cluster(broker.bootstrap, folder, "anabranch", CHUNKS)
        opened.callback(cluster.controller.kill)
        client, other, importer, reader = (
            opened.enter_context(anabranch.connect(broker.bootstrap)) for _ in range(4)
        )
        for stream in (SMALL, LARGE):
            client.create_stream(stream)
        before = terms(cluster)
        writers = [Steady(client, SMALL, "a"), Steady(other, SMALL, "b", journal=True)]
        with steadily(*writers):
            for writer in writers:
                writer.wait_more(20)
            throttle(broker)
            began = time.monotonic()
            with importer.begin("shop") as txn:
                for number in range(BIG // len(VALUE)):
                    txn.write(LARGE, VALUE, key=b"%d" % number)
                txn.commit(timeout=120)
            imported = time.monotonic() - began
            for writer in writers:
                writer.wait_more(5)
            time.sleep(max(0.0, seconds - (time.monotonic() - began)))
        ends = Counter(commit.result for writer in writers for commit in writer.commits)
        values = Counter(value for writer in writers for value in writer.values)
        assert ends.keys() == {COMMITTED}, ends
        assert committed(reader, SMALL, 10) == values
        assert committed(reader, LARGE, 30).total() == BIG // len(VALUE)
        assert terms(cluster) == before
        assert " throttles what this process writes" in cluster.controller.log_file.read_text()
        slowest = max(commit.slowest for writer in writers for commit in writer.commits)
        return {"commits": values.total(), "import_s": imported, "slowest_s": slowest}


def test_throttled_clients_are_slower_and_nothing_fails(tmp_path: Path) -> None:
    seen = run(30.0, tmp_path)
    # Twice its quota at most: else nothing was throttled.
    assert seen["import_s"] > BIG / QUOTAS["producer_byte_rate"] / 2, seen


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        print(run(60 * float(sys.argv[1]) if len(sys.argv) > 1 else 30.0, Path(folder)))
