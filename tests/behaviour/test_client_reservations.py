"""Reservations and numbered commits on a real broker: many processes, one transaction, one effect."""

from __future__ import annotations

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import anabranch
from anabranch import errors
from tests.behaviour.steps import values
from tests.cluster import Cluster

pytestmark = pytest.mark.broker
OVER_ASYNCIO = pytest.mark.long

DEADLINE_S = 120

# Says that it is ready, waits for a line, and then is one of many that join at once.
TASK = """
import sys, anabranch
from anabranch.errors import AnabranchError
bootstrap, reservation, stream, who = sys.argv[1:]
reservation = anabranch.Reservation.from_bytes(bytes.fromhex(reservation))
with anabranch.connect(bootstrap, timeout=60) as client:
    client.describe(stream)
    print("ready", flush=True)
    sys.stdin.readline()
    writer = client.join(reservation, heartbeat=True)
    try:
        for i in range(500):
            writer.write(stream, b"%s/%d" % (who.encode(), i), key=b"k%d" % i)
        print(writer.finish().to_bytes().hex(), flush=True)
    except AnabranchError as error:
        print(type(error).__name__, error, flush=True)
"""


class Task:
    """A process that joins a reservation when it is told to."""

    def __init__(
        self, cluster: Cluster, reserved: anabranch.Reservation, stream: str, who: str
    ) -> None:
        arguments = [cluster.bootstrap, reserved.to_bytes().hex(), stream, who]
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", TASK, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )

    def ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def run(self) -> str:
        """Let it go on; what it says in the end."""
        said, _ = self.process.communicate("go\n", timeout=DEADLINE_S)
        assert self.process.returncode == 0
        return said.strip()


@pytest.fixture
def stream(client: anabranch.Client, unique: str) -> str:
    name = f"s{unique}/events"
    client.create_stream(name, segments=3)
    return name


@pytest.mark.long
def test_processes_join_one_reservation_at_once(
    cluster: Cluster, client: anabranch.Client, stream: str
) -> None:
    """All of them begin it; a repeated batch and a zombie's writes have no effect."""
    scope = stream.split("/")[0]
    reserved = client.reserve(scope, keepalive=60)
    tasks = [Task(cluster, reserved, stream, f"t{i}") for i in range(4)]
    for task in tasks:
        task.ready()
    zombie = tasks.pop()
    with ThreadPoolExecutor(len(tasks)) as pool:
        said = list(pool.map(Task.run, tasks))
    receipts = [bytes.fromhex(text) for text in said]
    assert client.state(reserved).state == "OPEN"
    result = client.commit(reserved, receipts, name="q/sink", number=0)
    assert result.txn_id == reserved.txn_id
    assert result.counts == anabranch.Counts(1500, 0, 0)

    assert zombie.run().startswith("AlreadyCommitted the transaction is committed")
    again = client.reserve(scope)
    assert client.commit(again, [], name="q/sink", number=0) == result
    assert client.state(again).state == "ABORTED"
    committed = values(client, stream)
    assert set(committed.values()) == {1}
    assert len(committed) == 1500


@pytest.mark.soak
@pytest.mark.parametrize("kills", [1, 3])
def test_a_series_outlives_controllers_and_their_tables(
    own_cluster: Cluster, unique: str, kills: int
) -> None:
    prefix, controller = own_cluster.prefix, own_cluster.controller
    scope = f"s{unique}"
    with anabranch.connect(own_cluster.bootstrap, prefix=prefix, timeout=60) as client:
        client.create_stream(f"{scope}/events")

        def batch(number: int, value: bytes) -> anabranch.Result:
            reserved = client.reserve(scope)
            with client.join(reserved) as writer:
                writer.write(f"{scope}/events", value, key=b"k")
            return client.commit(reserved, [writer.finish()], name="q", number=number)

        first, second = batch(3, b"3"), batch(4, b"4")
        for _ in range(kills):
            controller.kill()
            shutil.rmtree(controller.folder / "data")
            controller.start()
            controller.wait_leading()
            assert batch(4, b"again") == second
            with pytest.raises(errors.AlreadyCommitted, match="at number 4"):
                batch(3, b"again")
        assert client.state(first.txn_id).state == "COMMITTED"
        assert batch(5, b"5").counts.committed == 1
        assert values(client, f"{scope}/events") == {b"3": 1, b"4": 1, b"5": 1}
