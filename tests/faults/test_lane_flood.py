"""A flood of one lane costs that lane: others' one-shots stay as quick, by its quota and by turns.

Longer: ``python -m tests.faults.test_lane_flood 60``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest

import anabranch
from anabranch.infra.broker import EmbeddedBroker
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.topics.names import commands_topic
from anabranch.types import Lane
from tests.cluster import start_cluster
from tests.crash.raw import make_txn_id, quick_producer
from tests.waiting import wait_until
from tests.workload.steady import COMMITTED, Steady, steadily

pytestmark = [pytest.mark.broker, pytest.mark.timeout(400)]

FLOOD, OTHERS = "flood", ("near", "far")
BEGINS, BIG = 3_000, 20  # a second; the quota lets 2,000 commands pass
BIG_BYTES = 1_000_000  # of a one-shot's event, about as many as its topic takes
SECONDS, TURNS = 20.0, 4
TIMES = 2.0
PERCENT = 99
AT_ONCE = 2  # one-shots in flight of each other lane


def flood(bootstrap: str, on: Event) -> None:
    """Send while it is on, and wait for nothing; a process of its own."""
    more = {"queue.buffering.max.kbytes": 1 << 20, "linger.ms": 5, "message.max.bytes": 8 << 20}
    producer = quick_producer(bootstrap, **more)
    topic, value = commands_topic(lane=FLOOD), os.urandom(BIG_BYTES)

    def send(command: object) -> None:
        headers = [("ab.cid", os.urandom(16)), ("ab.reply", bytes(4))]
        producer.produce(topic, encode(command), None, 0, headers=headers)  # type: ignore[arg-type]
        producer.poll(0)

    while on.wait():
        began, begins, big = time.monotonic(), 0, 0
        while on.is_set():
            passed = time.monotonic() - began
            while begins < passed * BEGINS:
                begins += 1
                send(r.Begin(make_txn_id(), "shop", None, 60_000, os.urandom(SECRET_SIZE)))
            while big < passed * BIG:
                big += 1
                event = r.Event(f"shop/{FLOOD}", -1, b"k", value, (), -1)
                send(r.OneShot(make_txn_id(), "shop", None, (event,)))
            time.sleep(0.005)


def measure(clients: dict[str, anabranch.Client], seconds: float) -> list[float]:
    """The seconds that each one-shot of the other lanes took."""
    steady = [
        Steady(client, f"shop/{lane}", name=f"{lane}-{n}", pause=0.01, timeout=30)
        for lane, client in clients.items()
        for n in range(AT_ONCE)
    ]
    with steadily(*steady):
        time.sleep(seconds)
    commits = [one for client in steady for one in client.commits]
    failed = [one for one in commits if one.result != COMMITTED]
    assert not failed, failed[:3]
    return [one.slowest for one in commits]


def part(waits: list[float], percent: int) -> float:
    return waits[len(waits) * percent // 100]


def row_of(operator: anabranch.Client) -> Lane:
    return next(lane for lane in operator.lanes() if lane.name == FLOOD)


def waiting(operator: anabranch.Client) -> int:
    return row_of(operator).waiting


def run(bootstrap: str, seconds: float, tell: Callable[[str], object]) -> tuple[float, float, int]:
    """p99 in seconds without and with the flood, and how many commands of the flooded lane waited."""
    with ExitStack() as stack:
        operator = stack.enter_context(anabranch.connect(bootstrap, lane="admin"))
        for lane in (FLOOD, *OTHERS):
            operator.create_stream(f"shop/{lane}", segments=1)
            operator.add_lane(lane)
            operator.grant(lane, f"shop/{lane}", ["write", "describe"])
        clients = {
            lane: stack.enter_context(anabranch.connect(bootstrap, lane=lane)) for lane in OTHERS
        }
        fork = multiprocessing.get_context("spawn")
        on = fork.Event()
        flooder = fork.Process(target=flood, args=(bootstrap, on), daemon=True)
        flooder.start()
        measure(clients, 3.0)
        calm, hot, usage, waited = list[float](), list[float](), dict[str, int](), 0
        try:
            for _ in range(TURNS):  # in turns: the machine may be busy with others' work
                calm += measure(clients, seconds / TURNS)
                on.set()
                time.sleep(1.0)  # the quota's first second
                hot += measure(clients, seconds / TURNS)
                waited, usage = max(waited, waiting(operator)), dict(row_of(operator).usage)
                on.clear()
                wait_until(lambda: not waiting(operator))
        finally:
            flooder.kill()
            flooder.join()
    calm.sort()
    hot.sort()
    for name, waits in (("calm", calm), ("flood", hot)):
        shares = ", ".join(f"p{p} {part(waits, p) * 1000:.0f} ms" for p in (50, 95, PERCENT))
        tell(
            f"{name}: {len(waits)} one-shots of others, {shares}, longest {waits[-1] * 1000:.0f} ms"
        )
    tell(f"the flooded lane: {waited:,} commands wait, uses {usage}")
    return part(calm, PERCENT), part(hot, PERCENT), waited


@contextmanager
def own_cluster(folder: Path) -> Iterator[str]:
    """A broker and a controller of its own, without TLS: this measures controllers."""
    with EmbeddedBroker() as broker:
        cluster = start_cluster(broker.bootstrap, folder)
        try:
            yield broker.bootstrap
        finally:
            cluster.controller.kill()


@pytest.mark.soak
def test_a_flood_of_one_lane_slows_no_other_lane(
    tmp_path: Path, measured: Callable[[str], None]
) -> None:
    with own_cluster(tmp_path) as bootstrap:
        calm, hot, waited = run(bootstrap, SECONDS, measured)
    assert hot <= TIMES * calm
    assert waited > 0, "the quota delays the flood"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, default=SECONDS, nargs="?")
    with own_cluster(Path(tempfile.mkdtemp(prefix="anabranch-flood-"))) as bootstrap:
        run(bootstrap, parser.parse_args().seconds, print)
