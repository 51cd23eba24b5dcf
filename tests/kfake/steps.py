"""The steps of a new user, each against a broker of some kind, and checked with a consumer of confluent-kafka.

A step returns when it worked. What a broker can't do at all is refused by name: `Refused` has the words.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import subprocess
import sys
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition

import anabranch
from anabranch.errors import AnabranchError
from anabranch.ledger import Ledger
from tests.cluster import Cluster

ROOT = Path(__file__).parents[2]
_WRITER = """
import sys, anabranch, anabranch.errors
bootstrap, token, stream, count = sys.argv[1:]
with anabranch.connect(bootstrap) as client:
    for attempt in range(2):
        try:
            with client.join(bytes.fromhex(token)) as writer:
                for i in range(int(count)):
                    writer.write(stream, b"other %d" % i, key=b"k%d" % (i % 7))
            break
        except anabranch.errors.WriteFailed as error:
            if "lz4" not in str(error):
                raise
print(writer.finish().to_bytes().hex())
"""


class Refused(Exception):
    """A step that the broker can't do was refused; the words of the refusal."""


@dataclass
class Place:
    """A cluster of the kind with a controller that leads, and a client of it."""

    cluster: Cluster
    client: anabranch.Client
    operator: anabranch.Client
    folder: Path
    events: int  # of a big step
    patience: float = 120  # for a commit
    streams: list[str] = field(default_factory=list)  # that steps made

    def scope(self) -> str:
        """A scope of the step's own."""
        return f"s{uuid.uuid4().hex[:8]}"

    def stream(self, name: str, segments: int = 2) -> str:
        """A new stream."""
        self.client.create_stream(name, segments=segments)
        self.streams.append(name)
        return name

    def write(self, stream: str, numbers: Iterable[int], keys: int = 6) -> None:
        """One transaction of these numbers, under so many keys."""
        with self.client.begin(stream.partition("/")[0]) as txn:
            for i in numbers:
                txn.write(stream, b"%d" % i, key=b"k%d" % (i % keys))
            txn.commit()

    def committed(self, stream: str) -> Counter[bytes | None]:
        """The values in the stream's topic as any consumer with `read_committed` gets them."""
        topic = stream.replace("/", ".")
        consumer = Consumer(
            {
                "bootstrap.servers": self.cluster.bootstrap,
                "group.id": f"check-{uuid.uuid4().hex}",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.metrics.push": False,  # kfake asks for it, and each end waits for that
            }
        )
        with contextlib.closing(consumer):
            partitions = consumer.list_topics(topic, 30).topics[topic].partitions
            consumer.assign([TopicPartition(topic, number, 0) for number in partitions])
            found: Counter[bytes | None] = Counter()
            ends = 0
            while ends < len(partitions):
                message = consumer.poll(30)
                assert message is not None, f"{topic}: no answer within 30 s"
                if (error := message.error()) is None:
                    found[message.value()] += 1
                else:
                    assert error.name() == "_PARTITION_EOF", error
                    ends += 1
        return found


def one_shots(place: Place) -> None:
    """Small transactions over two streams."""
    scope = place.scope()
    ends = [place.stream(f"{scope}/{name}") for name in ("a", "b")]
    for i in range(12):
        with place.client.begin(scope) as txn:
            for stream in ends:
                txn.write(stream, b"%d" % i, key=b"k%d" % (i % 5))
            txn.commit()
    for stream in ends:
        assert place.committed(stream) == Counter(b"%d" % i for i in range(12))


def two_processes(place: Place) -> None:
    """A long transaction with writers in two processes; beside it one that is aborted."""
    scope = place.scope()
    stream = place.stream(f"{scope}/long")
    with place.client.begin(scope) as lost:
        lost.write(stream, b"lost", key=b"k")
        lost.flush()
        lost.abort()
    with place.client.begin(scope, keepalive=120) as txn:
        of_the_other = txn.token().hex(), stream, str(place.events)
        other = subprocess.run(
            [sys.executable, "-c", _WRITER, place.cluster.bootstrap, *of_the_other],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=ROOT,
        )
        if other.returncode != 0:
            raise Refused(other.stderr)
        for i in range(place.events):
            txn.write(stream, b"own %d" % i, key=b"k%d" % (i % 7))
        assert place.committed(stream) == Counter()
        result = txn.commit(receipts=[bytes.fromhex(other.stdout.strip())], timeout=place.patience)
    assert result.counts.committed == 2 * place.events
    wanted = Counter(b"%s %d" % (who, i) for who in (b"own", b"other") for i in range(place.events))
    assert place.committed(stream) == wanted


def merge(place: Place) -> None:
    """Many events through a journal, by all ways of writing."""
    import pyarrow as pa

    scope = place.scope()
    stream = place.stream(f"{scope}/merge")
    count = place.events
    with place.client.begin(scope, keepalive=120) as txn:
        txn.token()  # it opens
        txn.write_many(stream, ((b"many %d" % i, b"k%d" % (i % 9)) for i in range(count)))
        keys = [b"k%d" % (i % 9) for i in range(count)]
        rows = pa.table({"value": [b"row %d" % i for i in range(count)], "key": keys})
        txn.write_batch(stream, rows)
        txn.commit(timeout=place.patience)
    assert place.committed(stream) == Counter(
        b"%s %d" % (way, i) for way in (b"many", b"row") for i in range(count)
    )


def readers(place: Place) -> None:
    """All ways to read give the same."""
    stream = place.stream(f"{place.scope()}/read")
    for number in range(3):
        place.write(stream, range(20 * number, 20 * number + 20), keys=3)
    wanted = place.committed(stream)
    assert wanted.total() == 60
    snapshot = place.client.snapshot(stream)
    assert Counter(event.value for event in snapshot.read(stream)) == wanted
    assert Counter(event.value for event in place.client.read(stream, timeout=1)) == wanted
    whole = [
        Counter(event.value for event in transaction.events)
        for transaction in place.client.read_transactions(stream, timeout=1)
    ]
    assert [part.total() for part in whole] == [20, 20, 20]
    assert sum(whole, Counter()) == wanted


def scaling(place: Place) -> None:
    """A stream is scaled while a transaction is open; each key keeps its order."""
    scope = place.scope()
    stream = place.stream(f"{scope}/scaled")
    numbers: dict[bytes, list[int]] = {}
    with place.client.begin(scope, keepalive=120) as txn:
        txn.token()  # it opens
        for i in range(90):
            if i == 30:
                with place.client.outside():
                    place.client.scale(stream, segments=4)
            txn.write(stream, b"%d" % i, key=b"k%d" % (i % 6))
        txn.commit(timeout=60)
    place.client.scale(stream, segments=3)
    for i in range(90, 120):
        place.write(stream, [i])
    assert place.committed(stream) == Counter(b"%d" % i for i in range(120))
    for event in place.client.snapshot(stream).read(stream):
        numbers.setdefault(event.key or b"", []).append(int(event.value or b""))
    assert all(each == sorted(each) for each in numbers.values())


def take_over(place: Place) -> None:
    """The controller is killed in the middle of a transaction; another one goes on, from an empty folder."""
    scope = place.scope()
    stream = place.stream(f"{scope}/taken")
    with place.client.begin(scope, keepalive=120) as txn:
        for i in range(50):
            txn.write(stream, b"%d" % i, key=b"k%d" % (i % 6))
        txn.token()
        txn.flush()
        controller = place.cluster.controller
        controller.kill()
        shutil.rmtree(controller.folder / "data", ignore_errors=True)
        controller.start()
        controller.wait_leading()
        assert txn.commit(timeout=120).counts.committed == 50
    assert place.committed(stream) == Counter(b"%d" % i for i in range(50))


def table(place: Place) -> None:
    """Transactions on a table by two threads, of which none loses a change."""
    name = f"{place.scope()}/accounts"
    place.client.create_table(name)

    def pay(txn: Any) -> None:
        held = int(txn.get(name, b"ann") or 0)
        txn.put(name, b"ann", b"%d" % (held + 1))

    with place.client.replica(name) as replica:
        payers = [
            threading.Thread(
                target=lambda: [replica.transact(pay, timeout=60) for _ in range(4)], daemon=True
            )
            for _ in range(2)
        ]
        for payer in payers:
            payer.start()
        for payer in payers:
            payer.join(90)
        with replica.snapshot() as view:
            assert view.get(name, b"ann") == b"8"


def processor(place: Place) -> None:
    """Events and the positions of their input are committed as one."""
    scope = place.scope()
    source, target = place.stream(f"{scope}/in"), place.stream(f"{scope}/out")
    place.write(source, range(40))
    name = f"{scope}/copy"
    place.client.create_processor(name, source, tasks=2)
    for _ in range(2):  # the second one finds nothing left to do
        ownership = place.client.take_tasks(name)
        with place.client.read(source, timeout=1, ownership=ownership) as reader:
            events = list(reader)
            if events:
                with place.client.begin(scope, ownership=ownership) as txn:
                    for event in events:
                        txn.write(target, event.value, key=event.key)
                    txn.commit(consumed=reader.consumed())
        place.client.release_tasks(ownership)
    assert place.committed(target) == Counter(b"%d" % i for i in range(40))


def ledger(place: Place) -> None:
    """A row of a database and its events: both, or neither."""
    scope = place.scope()
    stream = place.stream(f"{scope}/sold")
    database = place.folder / f"{scope}.db"
    kept = Ledger(lambda: sqlite3.connect(database))
    kept.create(place.client)
    with contextlib.closing(sqlite3.connect(database)) as connection:
        connection.execute("create table sold (item integer)")
        connection.commit()
    for item in range(4):
        with (
            contextlib.suppress(ZeroDivisionError),
            place.client.begin(scope) as txn,
            kept.commit(txn) as cursor,
        ):
            txn.write(stream, b"%d" % item, key=b"k")
            cursor.execute("insert into sold values (?)", [item])
            if item == 2:
                raise ZeroDivisionError
    with contextlib.closing(sqlite3.connect(database)) as connection:
        assert list(connection.execute("select item from sold order by item")) == [(0,), (1,), (3,)]
    assert place.committed(stream) == Counter([b"0", b"1", b"3"])


def groups(place: Place) -> None:
    """A group's next member goes on where the one before came to."""
    scope = place.scope()
    stream = place.stream(f"{scope}/shared")
    place.write(stream, range(30))
    seen: Counter[bytes | None] = Counter()
    with place.client.read(stream, group=scope, timeout=20) as reader:
        for event in reader:
            seen[event.value] += 1
            if seen.total() == 12:
                break
        next(reader)  # so that the one before counts as done
        reader.commit()
    with place.client.read(stream, group=scope, timeout=10) as reader:
        for event in reader:
            seen[event.value] += 1
            if seen.total() == 30:
                break
    assert seen == place.committed(stream)


def altering(place: Place) -> None:
    """A setting of a stream is changed, and comes into force where the broker reports it."""
    name, day = "retention.ms", "86400000"
    stream = place.stream(f"{place.scope()}/altered")
    reported = name in place.client.effective_settings(stream)
    with _refusal():
        place.operator.alter_stream(stream, {name: day})
    (found,) = [one for one in place.client.streams() if one.stream == stream]
    assert found.settings[name] == day
    assert place.client.effective_settings(stream).get(name) == (day if reported else None)


def deleting(place: Place) -> None:
    """A stream is deleted, and one of its name begins empty."""
    stream = place.stream(f"{place.scope()}/gone")
    place.write(stream, [1])
    place.operator.delete_stream(stream)
    place.stream(stream)
    place.write(stream, [2])
    assert place.committed(stream) == Counter([b"2"])


@contextlib.contextmanager
def _refusal() -> Iterator[None]:
    try:
        yield
    except AnabranchError as error:
        raise Refused(str(error)) from error


STEPS: dict[str, Callable[[Place], None]] = {
    "one-shots": one_shots,
    "two processes": two_processes,
    "merge": merge,
    "readers": readers,
    "scaling": scaling,
    "table": table,
    "processor": processor,
    "ledger": ledger,
    "groups": groups,
    "altering": altering,
    "deleting": deleting,
    "take-over": take_over,  # the last one: what the others made is there
}
BIG = int(os.environ.get("ANABRANCH_MERGED", "100000"))
