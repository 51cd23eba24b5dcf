"""`scripts/days`: whether a cluster grows over days, each of which takes a minute here.

Outcomes, streams and histories of tables are kept for a minute; brokers delete old data every few seconds.
A run can be continued: the folder has the broker's data, and each run adds to its samples. One transaction, the
elder, is open from the first run to the end of the last, and each run writes to it: it is then older than all that
is kept.

Meanwhile one-shots, journals, prepared transactions and transfers between rows commit; streams are scaled, a table
is compacted, and the leader is killed. After three days nothing that is stored may grow any more: the
median of the last third of the samples exceeds that of the third before it by at most a quarter plus `SLACK`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from confluent_kafka.admin import AdminClient

import anabranch
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import RetryError
from anabranch.infra.broker import EmbeddedBroker
from anabranch.protocol.legal_names import ADMIN_LANE
from bench.growth import PROPERTIES, disk_mb, memory_mb, set_of_topic
from tests.cluster import ControllerProcess
from tests.short_days import DAY_S
from tests.workload.steady import COMMITTED, Steady, steadily

SAMPLE_S = 5.0
KILL_S, SCALE_S, COMPACT_S, ELDER_S = 45.0, 30.0, 60.0, 7.0
OLD_DAYS = 3
MIN_SAMPLES = 12  # after the first days; fewer show nothing
GROWTH = 1.25
SLACK = {"memory_mb": 20.0, "_mb": 0.5, "topics": 1.0, "open_files": 20.0}
ORDERS, BIG, OLD, STOCK = "shop/orders", "shop/big", "shop/old", "shop/stock"
STREAMS = (ORDERS, BIG, OLD)
ROWS = 200
SOON = {"segment.ms": str(DAY_S * 250)}


class Elder:
    """The transaction that is open over all runs; what it needs to continue is in a file."""

    def __init__(self, client: anabranch.Client, kept: Path) -> None:
        self._client = client
        self._kept = kept
        if kept.exists():
            self.known: dict[str, Any] = json.loads(kept.read_text())
        else:
            txn = client.begin(OLD.partition("/")[0], keepalive=24 * 3600)
            self.known = {
                "token": txn.token("all").hex(),
                "begun": time.time(),
                "receipts": [],
                "values": 0,
            }
        self._writer = client.join(bytes.fromhex(self.known["token"]), heartbeat=True)

    def write(self) -> None:
        """Write one more event."""
        self._writer.write(OLD, b"%d" % self.known["values"], key=b"elder")
        self.known["values"] += 1

    def pause(self) -> None:
        """Finish this run's part."""
        self.known["receipts"].append(self._writer.finish().to_bytes().hex())
        self._kept.write_text(json.dumps(self.known))

    def end(self) -> float:
        """Commit it. Returns its age in days."""
        receipts = [bytes.fromhex(text) for text in self.known["receipts"]]
        self._client.commit(bytes.fromhex(self.known["token"]), receipts, timeout=60)
        return float((time.time() - self.known["begun"]) / DAY_S)


class Days:
    """One run: a broker over the folder, a controller, and the work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.samples_file = folder / "samples.jsonl"
        self.troubles: Counter[str] = Counter()
        self.failures: list[Exception] = []
        self.lives = threading.Lock()  # held while there is no leader
        self.kills = 0

    @contextmanager
    def running(self) -> Iterator[anabranch.Client]:
        """A client of the cluster, with everything created."""
        with ExitStack() as stack:
            self.broker = stack.enter_context(
                EmbeddedBroker(self.folder / "broker", properties=PROPERTIES)
            )
            controller = ControllerProcess(
                self.broker.bootstrap,
                self.folder / "controller",
                arguments=("--retention", str(DAY_S), "--session-timeout", "2"),
                module="tests.short_days",
            )
            self.controller = stack.enter_context(controller)
            self.controller.wait_leading()
            client = stack.enter_context(anabranch.connect(self.broker.bootstrap))
            for stream in STREAMS:
                settings = SOON | {"retention.ms": str(DAY_S * 1000)}
                client.create_stream(stream, settings=settings, exist_ok=True)
            history = {"table.history.ms": str(DAY_S * 1000)}
            client.create_table(STOCK, settings=SOON | history, exist_ok=True)
            for topic in self._topics():
                if topic.startswith("shop.") or topic == "anabranch.status":
                    set_of_topic(self.broker.bootstrap, topic, "segment.ms", SOON["segment.ms"])
            tombstones = str(DAY_S * 1000)
            set_of_topic(
                self.broker.bootstrap, "anabranch.status", "delete.retention.ms", tombstones
            )
            yield client

    def work(self, client: anabranch.Client, seconds: float) -> int:
        """Let everything happen for ``seconds``. Returns the commits."""
        elder = Elder(client, self.folder / "elder.json")
        writers = [Steady(client, ORDERS), Steady(client, BIG, journal=True, pause=0.1)]
        over = threading.Event()
        jobs = [
            (ELDER_S, elder.write),
            (SCALE_S, self._scaling(client)),
            (COMPACT_S, self._compact),
            (KILL_S, self._kill),
            (DAY_S / 4, lambda: self._prepare(client)),
            (0.1, self._transfers(client)),
            (SAMPLE_S, self._sample),
        ]
        threads = [
            threading.Thread(target=self._repeat, args=(over, *job), daemon=True) for job in jobs
        ]
        with steadily(*writers):
            for thread in threads:
                thread.start()
            time.sleep(seconds)
            over.set()
            for thread in threads:
                thread.join(90)
                assert not thread.is_alive(), "a job does not end"
        if self.failures:
            raise ExceptionGroup("jobs failed", self.failures)
        elder.pause()
        ends = Counter(commit.result for writer in writers for commit in writer.commits)
        self._check(client, writers)
        assert ends[COMMITTED] > seconds, ends
        return ends[COMMITTED]

    def _repeat(self, over: threading.Event, pause: float, job: Callable[[], object]) -> None:
        while not over.wait(pause):
            try:
                job()
            except RetryError as error:  # the leader was killed
                self.troubles[type(error).__name__] += 1
            except Exception as error:  # noqa: BLE001 - reported by the caller
                self.failures.append(error)
                return

    def _check(self, client: anabranch.Client, writers: list[Steady]) -> None:
        """What was acknowledged within the last quarter of a day is there, once."""
        since = time.monotonic() - DAY_S / 4
        for writer in writers:
            with client.read(writer.stream, timeout=5) as reader:
                found = Counter(bytes(event.value or b"") for event in reader)
            wanted = {one.value for one in writer.of(COMMITTED) if one.ended > since}
            assert [value for value in wanted if found[value] != 1] == []

    def _scaling(self, client: anabranch.Client) -> Callable[[], object]:
        counts = iter(range(1, 1 << 30))
        return lambda: client.scale(ORDERS, 1 + next(counts) % 3, timeout=30)

    def _compact(self) -> None:
        with anabranch.connect(self.broker.bootstrap, lane=ADMIN_LANE) as operator:
            operator.compact_table(
                STOCK, plain_readers_lose_history=True, folder=self.folder / "compacting"
            )

    def _kill(self) -> None:
        with self.lives:
            self.controller.kill()
            self.controller.start().wait_leading()
            self.kills += 1

    def _prepare(self, client: anabranch.Client) -> None:
        """A prepared transaction that waits for a second of a day."""
        with client.begin("shop") as txn:
            txn.write(BIG, b"prepared")
            txn.prepare(timeout=30)
            time.sleep(1)
            txn.commit(timeout=30)

    def _transfers(self, client: anabranch.Client) -> Callable[[], object]:
        rows = client.replica(STOCK, folder=self.folder / "replica")
        counts = iter(range(1, 1 << 30))

        def transfer(txn: TableTransaction) -> None:
            number = next(counts)
            left, right = (b"%d" % (number * n % ROWS) for n in (3, 7))
            moved = int(txn.get(STOCK, left) or b"0")
            txn.put(STOCK, left, b"%d" % (moved + 1))
            txn.put(STOCK, right, b"%d" % (moved - 1))

        return lambda: rows.transact(transfer, timeout=30)

    def _topics(self) -> list[str]:
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap})
        return sorted(admin.list_topics(timeout=20).topics)

    def _sample(self) -> None:
        with self.lives:
            self._sample_now()

    def _sample_now(self) -> None:
        topics = self._topics()
        stored = {
            f"{topic}_mb": sum(disk_mb(self.folder, topic, partition) for partition in range(16))
            for topic in topics
            if topic.startswith("shop.") or topic == "anabranch.status"
        }
        pid = self.controller.pid
        data = self.folder / "controller" / "data"
        sizes = [path.stat().st_size for path in data.rglob("*") if path.is_file()]
        sample = stored | {
            "at": time.time(),
            "controller_data_mb": sum(sizes) / 1e6,
            "controller_memory_mb": memory_mb(pid),
            "open_files": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "topics": len(topics),
        }
        with self.samples_file.open("a") as out:
            print(json.dumps(sample), file=out)


def plateaus(samples: list[dict[str, float]]) -> list[str]:
    """What grew, as sentences; the first days are left out."""
    until = samples[0]["at"] + OLD_DAYS * DAY_S
    late = [sample for sample in samples if sample["at"] > until]
    if len(late) < MIN_SAMPLES:
        return [f"only {len(late)} samples after {OLD_DAYS} days: continue the run"]
    third = len(late) // 3
    grown = []
    for name in sorted(late[-1].keys() - {"at"}):
        before, last = (
            statistics.median(sample.get(name, 0.0) for sample in part)
            for part in (late[-2 * third : -third], late[-third:])
        )
        slack = next(size for end, size in SLACK.items() if name.endswith(end))
        if last > before * GROWTH + slack:
            grown.append(f"{name} grew from {before:.1f} to {last:.1f}")
    return grown


def table(samples: list[dict[str, float]]) -> str:
    """A sample of each quarter of the run."""
    some = [samples[len(samples) * n // 4] for n in range(4)] + samples[-1:]
    names = [name for name in some[-1] if name != "at"]
    lines = [
        f"{'days':>26} " + " ".join(f"{(s['at'] - samples[0]['at']) / DAY_S:8.1f}" for s in some)
    ]
    lines += [f"{name:>26} " + " ".join(f"{s.get(name, 0.0):8.2f}" for s in some) for name in names]
    return "\n".join(lines)


def finish(client: anabranch.Client, folder: Path) -> str:
    """Commit the elder, and read its events. Returns a sentence about it."""
    elder = Elder(client, folder / "elder.json")
    age = elder.end()
    with client.read(OLD, timeout=5) as reader:
        found = [int(event.value or b"-1") for event in reader]
    assert found == list(range(elder.known["values"])), "the elder's events are not whole"
    assert age > OLD_DAYS, f"the elder is only {age:.1f} days old: continue the run"
    return f"the elder, {age:.1f} days old, has committed {len(found)} events"


def main() -> int:
    """Run; 1 if something grew or is missing."""
    parser = argparse.ArgumentParser(
        prog="scripts/days", description=(__doc__ or "").split("\n\n")[1]
    )
    parser.add_argument(
        "--minutes", type=float, default=8, help="of this run, a day each (default 8)"
    )
    parser.add_argument("--folder", type=Path, help="is kept, and continued by the next run")
    parser.add_argument(
        "--go-on", action="store_true", help="leave the elder open for the next run"
    )
    given = parser.parse_args()
    with ExitStack() as stack:
        folder = given.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        days = Days(folder)
        with days.running() as client:
            commits = days.work(client, given.minutes * 60)
            print(f"{commits} commits, {days.kills} leaders killed, troubles {dict(days.troubles)}")
            if not given.go_on:
                print(finish(client, folder))
        samples = [json.loads(line) for line in days.samples_file.read_text().splitlines()]
        print(table(samples))
        grown = plateaus(samples)
        print(*grown or ["nothing grew"], sep="\n")
        return bool(grown)


if __name__ == "__main__":
    sys.exit(main())
