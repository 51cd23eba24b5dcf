"""A forked child's work: lead one control partition, without a group, until it is cut or told to end."""

from __future__ import annotations

import os
import resource
import signal
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from anabranch.batches.records import Record, encode_batch
from anabranch.controller.rocksdb_table import open_checkpoint
from anabranch.core.decisions.turn import Settings
from anabranch.errors import NotLeader
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import Log, LogError, LogFenced, Producer, Table
from anabranch.topics.creation import create_control_topics
from tests.core.labels import SECRET
from tests.crash.points import Cut, Point
from tests.crash.zygote import Spec, say
from tests.failpoints import DecidingController, Failing, failing

IDLE_WAIT_S = 0.1
PAUSE_S = 0.05
TIDY: dict[str, Any] = {
    "clean_ms": 200,
    "clean_records": 200,
    "clean_bytes": 50_000,
    "move_bytes": 100_000,
}


@dataclass(frozen=True)
class Lead(Spec):
    """A controller to fork. ``point``: where it is killed or stopped, see `tests.crash.points`.

    ``armed`` False: calls count only from SIGUSR1 on. ``trace``: a file for the names of all calls.
    ``speed``: how fast its monotonic clock runs, so that keepalives need not be waited for. ``limit``: the
    largest file it may write, bytes (0: any). ``again``: whether it leads again after it was fenced.
    ``prepare``: whether it makes the topics of the control partition. ``threads``: whether carriers and the
    fetching of journals have threads of their own, as in the service. ``tidy``: whether journals are cut, and
    old data is moved, as soon as there is a little to gain.
    """

    folder: str = ""
    point: str = ""
    action: str = "kill"
    armed: bool = True
    trace: str = ""
    speed: float = 1.0
    limit: int = 0
    again: bool = True
    prepare: bool = False
    replies: int = 1
    chunk_bytes: int = 16 << 20
    threads: bool = False
    tidy: bool = False

    run = "tests.crash.leader:lead"


class FastClock:
    """The machine's clock; the monotonic one runs ``speed`` times as fast."""

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic() * self._speed

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds / self._speed)


def warm_up() -> None:
    """Import, and have compiled, whatever a controller uses, so that children have it."""
    from anabranch.controller import durability, rocksdb_table  # noqa: F401
    from anabranch.ports import Fetched, RawBatch
    from anabranch.protocol.schemas import codec, records

    record = records.Begin(bytes(16), "s", None, 1000, SECRET)
    codec.decode(codec.encode(record))
    data = memoryview(encode_batch([Record(0, 0, b"k", b"v")]))
    raw = RawBatch(0, 1, data)
    Fetched([raw], 1, 1, 1, 0)
    for cls in codec.TYPES.values():
        codec.schema_of(cls)


def _identity(producer: Producer) -> tuple[int, int]:
    """(producer id, epoch) as the log shows them."""
    kafka = producer.port if isinstance(producer, Failing) else producer
    assert isinstance(kafka, KafkaProducer)
    return kafka.producer_id, kafka.producer_epoch


def lead(number: int, told: dict[str, Any]) -> int:
    """Lead until SIGTERM (0), or until fenced where the child is not to lead again (3)."""
    spec = Lead(**told)
    if spec.limit:
        resource.setrlimit(resource.RLIMIT_FSIZE, (spec.limit, resource.RLIM_INFINITY))
    action = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[spec.action]
    point = Point.parse(spec.point) if spec.point else None
    cut = Cut(point, action, spec.armed, spec.trace)
    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))

    def arm(*_: object) -> None:
        cut.arm()
        say(number, "armed")

    signal.signal(signal.SIGUSR1, arm)
    clock = FastClock(spec.speed)
    source: Log = failing(KafkaLog(spec.bootstrap), cut)
    if spec.prepare:
        create_control_topics(
            source, spec.prefix, control_partitions=1, reply_partitions=spec.replies
        )
    table: Table = failing(open_checkpoint(Path(spec.folder), source, clock, spec.prefix, 0), cut)
    controller = DecidingController(
        source,
        table,
        clock,
        Settings(
            control_partition=0,
            control_partitions=1,
            prefix=spec.prefix,
            reply_partitions=spec.replies,
            chunk_bytes=spec.chunk_bytes,
            trusts_open=True,
            **(TIDY if spec.tidy else {}),
        ),
        leader=f"{spec.name or 'child'}/{os.getpid()}",
        hook=cut,
        threads=spec.threads,
    )
    while not ending:
        try:
            controller.lead()
            lease = controller.lease
            assert lease is not None
            mine = [_identity(p) for p in chain(lease.producers, *lease.carriers)]
            say(number, "leads", term=lease.term, producers=mine)
            while not ending:
                controller.step(IDLE_WAIT_S)
        except (LogFenced, NotLeader) as error:
            say(number, "lost", why=str(error))
            if not spec.again:
                return 3
            time.sleep(PAUSE_S)
        except LogError as error:
            say(number, "lost", why=f"{type(error).__name__}: {error}")
            time.sleep(PAUSE_S)
    controller.resign()
    table.close()
    source.close()
    return 0
