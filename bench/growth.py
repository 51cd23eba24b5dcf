"""Whether a cluster's stored data reaches a level: one-shots for minutes, with short retentions.

One event each, 256 in flight from one client, into a stream of 64 segments. Events and outcomes are kept for 20 s.
Samples: outcomes, offsets of the history, the disk use of topics and of the controller's table, and the
controller's memory. Brokers here look for old segments every 5 s, not every 5 minutes, and the status topic has
segments of 4 MiB, so that compaction happens within the run.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

import anabranch
from anabranch.batches.records import decode_records
from anabranch.core.rows import Entry
from anabranch.infra.broker import EmbeddedBroker
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import TXN_ID_SIZE
from bench.setting import Place, controller

COMMITS = 200_000
SEGMENTS = 64
IN_FLIGHT = 256
KEPT_S = 20
LOOKS = 12
STREAM = "bench/growth"
STATUS = "anabranch.status"
PROPERTIES = {
    "log.retention.check.interval.ms": "5000",
    "log.segment.delete.delay.ms": "1000",
    "log.cleaner.backoff.ms": "2000",
}


@contextmanager
def _place(folder: Path) -> Iterator[Place]:
    data = folder / "controller"
    data.mkdir()
    with (
        EmbeddedBroker(folder / "broker", properties=PROPERTIES) as broker,
        controller(broker.bootstrap, data, ("--retention", str(KEPT_S))) as pid,
    ):
        yield Place(broker.bootstrap, pid, broker.pid)


def run(*, commits: int) -> dict[str, Any]:
    """The samples of a run."""
    with tempfile.TemporaryDirectory(prefix="anabranch-bench-") as name:
        folder = Path(name)
        with _place(folder) as place, anabranch.connect(place.bootstrap) as client:
            settings = {"retention.ms": str(KEPT_S * 1000), "segment.ms": "5000"}
            client.create_stream(STREAM, segments=SEGMENTS, settings=settings)
            set_of_topic(place.bootstrap, STATUS, "segment.bytes", str(4 << 20))
            return _measure(place, client, folder, commits)


class _Outcomes:
    """Transactions in the status log, read on at each sample."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._position = 0
        self._keys: set[bytes] = set()

    def count(self) -> int:
        place = TopicPartition(STATUS, 0)
        end = self._log.end_offsets([place], committed=True)[place]
        while self._position < end:
            found = self._log.fetch(
                {place: self._position}, max_wait=1.0, max_bytes=8 << 20, committed=True
            ).get(place)
            for batch in found.batches if found is not None else ():
                for record in decode_records(batch.data):
                    key = record.key or b""
                    if len(key) == TXN_ID_SIZE + 1 and key[-1] == Entry.TXN:
                        (self._keys.discard if record.value is None else self._keys.add)(key)
            self._position = found.next_offset if found is not None else self._position
        return len(self._keys)


def _measure(place: Place, client: anabranch.Client, folder: Path, commits: int) -> dict[str, Any]:
    left = threading.Semaphore(commits)
    done = [0] * IN_FLIGHT

    def work(number: int) -> None:
        while left.acquire(blocking=False):
            with client.begin("bench") as txn:
                txn.write(STREAM, b"v" * 100, key=b"key-%d-%d" % (number, done[number]))
                txn.commit()
            done[number] += 1

    log = KafkaLog(place.bootstrap)
    outcomes = _Outcomes(log)
    began = time.monotonic()
    looks: list[dict[str, float]] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    try:
        for number in range(1, LOOKS + 1):
            while sum(done) < commits * number // LOOKS and any(t.is_alive() for t in threads):
                time.sleep(0.2)
            look = _look(log, place, folder, sum(done), time.monotonic() - began)
            looks.append(look | {"outcomes": outcomes.count()})
    finally:
        for thread in threads:
            thread.join()
        log.close()
    return {"commits": commits, "segments": SEGMENTS, "kept_s": KEPT_S, "looks": looks}


def _look(
    log: KafkaLog, place: Place, folder: Path, commits: int, seconds: float
) -> dict[str, float]:
    topic = STREAM.replace("/", ".")
    history = TopicPartition(f"{topic}.history", 0)
    end = log.end_offsets([history], committed=False)[history]
    start = log.start_offsets([history])[history]
    return {
        "seconds": seconds,
        "commits": commits,
        "history_offsets": end - start,
        "history_cut_to": start,
        "history_disk_mb": disk_mb(folder, history.topic),
        "status_disk_mb": disk_mb(folder, STATUS),
        "stream_disk_mb": sum(disk_mb(folder, topic, p) for p in range(SEGMENTS)),
        "table_disk_mb": _bytes(folder / "controller" / "data") / 1e6,
        "controller_mb": memory_mb(place.controller),
    }


def disk_mb(folder: Path, topic: str, partition: int = 0) -> float:
    """What a partition has on the disks of the brokers in ``folder``/broker."""
    found = (folder / "broker").rglob(f"{topic}-{partition}")
    return sum(_bytes(each) for each in found) / 1e6


def _bytes(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:  # segments come and go
            total += path.stat().st_size if path.suffix not in (".index", ".timeindex") else 0
        except FileNotFoundError:
            continue
    return total


def memory_mb(pid: int) -> float:
    """A process's resident memory."""
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) / 1000


def set_of_topic(bootstrap: str, topic: str, name: str, value: str) -> None:
    """Change a topic's setting, as an operator would."""
    entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=[entry])
    admin = AdminClient({"bootstrap.servers": bootstrap})
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(30)


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows."""
    head = [
        "seconds", "commits", "/s", "outcomes", "history offsets", "cut to", "history MB", "status MB", "stream MB",
        "table MB", "controller MB",
    ]  # fmt: skip
    rows = []
    before = {"seconds": 0.0, "commits": 0.0}
    for look in result["looks"]:
        took = max(0.001, look["seconds"] - before["seconds"])
        rate = (look["commits"] - before["commits"]) / took
        rows.append(
            [f"{look['seconds']:.0f}", f"{look['commits']:,}", f"{rate:,.0f}"]
            + [f"{look[name]:,.0f}" for name in ("outcomes", "history_offsets", "history_cut_to")]
            + [f"{look[name]:.1f}" for name in look if name.endswith("_mb")]
        )
        before = look
    return head, rows
