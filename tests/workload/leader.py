"""A forked controller: it leads one control partition, without a group, until it is cut or ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from anabranch.batches import framing
from anabranch.batches.records import Record, encode_batch
from anabranch.controller.rocksdb_table import open_checkpoint
from anabranch.core.decisions.turn import Settings
from anabranch.errors import NotLeader
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.transactional_producer import KafkaProducer
from anabranch.ports import Log, LogError, LogFenced, Producer, Table
from anabranch.topics.creation import create_control_topics
from tests.core.labels import SECRET
from tests.failpoints import DecidingController, Failing, failing
from tests.workload.points import Cut, Point
from tests.workload.zygote import Spec, say

IDLE_WAIT_S = 0.1
PAUSE_S = 0.05
TIDY: dict[str, Any] = {
    "clean_ms": 100,
    "clean_records": 30,
    "clean_bytes": 3_000,
    "move_bytes": 30_000,
}
ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(frozen=True)
class Lead(Spec):
    """A controller to fork. ``points``: ``kill`` or ``stop``, a space, and where (`tests.workload.points`).

    ``armed`` False: calls count only from SIGUSR1 on. ``trace``: a file for the names of all calls.
    ``speed``: how fast its monotonic clock runs, so that keepalives need not be waited for. ``again``: whether it
    leads again after it was fenced. ``threads``: whether carriers and the fetching of journals have threads of
    their own, as in the service. ``tidy``: whether journals are cut, and old data is moved, as soon as there is a
    little to gain. ``control_partition``: the one that it leads, of ``control_partitions``.
    """

    folder: str = ""
    points: tuple[str, ...] = ()
    armed: bool = True
    trace: str = ""
    speed: float = 1.0
    again: bool = True
    chunk_bytes: int = 16 << 20
    threads: bool = False
    tidy: bool = False
    control_partition: int = 0
    control_partitions: int = 1

    run = "tests.workload.leader:lead"


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
    from anabranch.kafka import calls
    from anabranch.ports import Fetched, RawBatch
    from anabranch.protocol.schemas import codec, records

    framing.warm()  # on a busy machine loading takes seconds, in which a leader decides nothing
    record = records.Begin(bytes(16), "s", None, 1000, SECRET)
    codec.decode(codec.encode(record))
    data = memoryview(encode_batch([Record(0, 0, b"k", b"v")]))
    raw = RawBatch(0, 1, data)
    Fetched([raw], 1, 1, 1, 0)
    for cls in codec.TYPES.values():
        codec.schema_of(cls)
    for api in vars(calls).values():
        if isinstance(api, calls.Api):
            for kind in ("request", "response"):
                calls._module(api, api.highest, kind)


def _identities(producers: Iterable[Producer]) -> list[tuple[int, int]]:
    """(producer id, epoch) of each, as the log shows them; a planted bug may have others in their place."""
    found = []
    for producer in producers:
        kafka = producer.port if isinstance(producer, Failing) else producer
        if isinstance(kafka, KafkaProducer):
            found.append((kafka.producer_id, kafka.producer_epoch))
    return found


def lead(number: int, given: dict[str, Any]) -> int:
    """Lead until SIGTERM (0), or until fenced where the child is not to lead again (3)."""
    spec = Lead(**given)
    cuts: list[Cut] = []
    for text in spec.points or ("",):
        action, _, point = text.partition(" ")
        where = Point.parse(point) if point else None
        cuts.append(Cut(where, ACTIONS[action or "kill"], spec.armed, "" if cuts else spec.trace))

    def hook(name: str, phase: str) -> None:
        for cut in cuts:
            cut(name, phase)

    def arm(*_: object) -> None:
        for cut in cuts:
            cut.arm()
        say(number, "armed")

    ending: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ending.append(number))
    signal.signal(signal.SIGUSR1, arm)
    clock = FastClock(spec.speed)
    source: Log = failing(KafkaLog(spec.bootstrap), hook)
    led, of = spec.control_partition, spec.control_partitions
    create_control_topics(source, spec.prefix, control_partitions=of, reply_partitions=1)
    checkpoint = open_checkpoint(Path(spec.folder), source, clock, spec.prefix, led)
    table: Table = failing(checkpoint, hook)
    controller = DecidingController(
        source,
        table,
        clock,
        Settings(
            control_partition=led,
            control_partitions=of,
            prefix=spec.prefix,
            reply_partitions=1,
            chunk_bytes=spec.chunk_bytes,
            trusts_open=True,
            **(TIDY if spec.tidy else {}),
        ),
        leader=f"{spec.name or 'child'}/{os.getpid()}",
        hook=hook,
        threads=spec.threads,
        overlap_from=1,
    )
    while not ending:
        try:
            controller.lead()
            lease = controller.lease
            assert lease is not None
            mine = _identities(chain(lease.producers, *lease.carriers))
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
