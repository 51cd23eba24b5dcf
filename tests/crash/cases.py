"""One case: the scenario with a controller that is cut at a point, and its successor."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from confluent_kafka import Producer

from anabranch.clock import SystemClock
from anabranch.controller.leadership import fold_to_end
from anabranch.controller.rocksdb_table import RocksTable
from anabranch.core import rows as k
from anabranch.core.state import State
from anabranch.ports import Log, TopicPartition
from anabranch.protocol.schemas.codec import decode
from anabranch.testing.memory.table import MemoryStore, MemoryTable
from anabranch.topics.names import status_topic
from tests.crash.oracle import check_answers
from tests.crash.raw import Raw, quick_producer
from tests.crash.scenario import SPEED, Scenario
from tests.workload.leader import Lead
from tests.workload.points import Point
from tests.workload.zygote import Child, Zygote

CASE_DEADLINE_S = 60.0
AFTER_DECISION = Point("after-decision", "*", 1, "after")
LAST_DECISION = AFTER_DECISION._replace(n=2)


@dataclass
class Place:
    """A prefix with its topics and streams, for one case after another."""

    zygote: Zygote
    bootstrap: str
    log: Log
    prefix: str
    producer: Producer
    folder: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="anabranch-case-"))
    cases: int = 0
    rebuilt: MemoryTable = field(default_factory=lambda: MemoryStore().open("rebuilt"))

    @classmethod
    def on(cls, zygote: Zygote, bootstrap: str, log: Log, prefix: str) -> Place:
        """With a producer of its own."""
        return cls(zygote, bootstrap, log, prefix, quick_producer(bootstrap))

    def remove(self) -> None:
        """Its folder goes; the topics stay until the broker goes."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def check_table(self) -> None:
        """The table equals the fold of the log. No controller may lead."""
        state = State(self.rebuilt)
        status = TopicPartition(status_topic(self.prefix), 0)
        fold_to_end(self.log, self.rebuilt, state, SystemClock(), status)
        table = RocksTable(Path(self.folder) / "table")
        try:
            for kind in (k.STATUS, k.OPEN, k.FINISHED, k.OUTCOMES):
                there, folded = dict(table.scan(kind)), dict(self.rebuilt.scan(kind))
                differ = [
                    key for key in there.keys() | folded.keys() if there.get(key) != folded.get(key)
                ]
                assert not differ, "not what the log says: " + "; ".join(
                    f"{key.hex()}: {_told(there.get(key))} for {_told(folded.get(key))}"
                    for key in differ[:3]
                )
            for kind in (k.INDEX, k.DIGEST, k.REJECTED):
                left = len(list(table.scan(kind)))
                assert not left, f"{left} rows under {kind!r} of transactions that are over"
        finally:
            table.close()

    def check_log(self) -> None:
        """The status log is in order, and no answer is of a round that is not there."""
        check_answers(self.log, self.prefix)


@dataclass
class Case:
    """A scenario, and its controllers, one after another.

    ``cuts``: where the first ones are killed; those after them live. ``traces``: files for their calls.
    ``play``: the scenario. ``chunk_bytes``: what makes a merge a big one.
    """

    place: Place
    cuts: list[Point | None]
    traces: list[str] = field(default_factory=list)
    play: type[Scenario] = Scenario
    chunk_bytes: int = Lead.chunk_bytes
    children: list[Child] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        place = self.place
        self.client = Raw(place.bootstrap, place.prefix, place.log, place.producer, idle=self.watch)
        self.auditor = Raw(place.bootstrap, place.prefix, place.log, place.producer, idle=self.live)
        self.scenario = self.play(self.client, f"{place.prefix}-scope")

    # -- controllers ----------------------------------------------------------------------------------

    def fork(self) -> Child:
        """The next controller, on the folder of the one before."""
        number = len(self.children)
        place = self.place
        point = self.cuts[number] if number < len(self.cuts) else None
        trace = self.traces[number] if number < len(self.traces) else ""
        spec = Lead(
            place.bootstrap,
            place.prefix,
            folder=f"{place.folder}/table",
            name=f"{place.prefix}/{place.cases}/{number}",
            points=(f"kill {point}",) if point else (),
            trace=trace,
            speed=SPEED,
            chunk_bytes=self.chunk_bytes,
        )
        self.children.append(place.zygote.fork(spec))
        return self.children[-1]

    def settle(self) -> Child:
        """Go on until a controller leads; each one that is cut gets its successor."""
        child = self.children[-1] if self.children else self.fork()
        while True:
            assert time.monotonic() < self.started + CASE_DEADLINE_S, "the case takes too long"
            if child.running and child.leading:
                return child
            if not child.running:
                if not (isinstance(child.spec, Lead) and child.spec.points and child.killed):
                    raise AssertionError(
                        f"{child.spec.name} ended by itself: {child.status}, {child.events[-3:]}"
                    )
                child = self.fork()
            else:
                time.sleep(0.002)

    def live(self) -> None:
        """See that a controller leads."""
        if not self.children[-1].running:
            self.settle()
        assert time.monotonic() < self.started + CASE_DEADLINE_S, "the case takes too long"

    def watch(self) -> None:
        """`live`; and after a takeover everything has to hold at once."""
        before = len(self.children)
        self.live()
        if len(self.children) > before:
            self.auditor.start()
            self.scenario.check(self.place.log, self.auditor)

    # -- a whole run ----------------------------------------------------------------------------------

    def run(self) -> None:
        """The scenario to its end, and all that has to hold then."""
        try:
            self.settle()
            self.client.start()
            self.auditor.start()
            self.scenario.run()
            self.scenario.check_end(self.place.log, self.auditor)
            self.end()
            self.place.check_table()
        finally:
            for child in self.children:
                child.kill()
            self.place.cases += 1

    def end(self) -> None:
        """End the last leader in peace; one that is cut at its very last call has a successor too."""
        while True:
            last = self.settle()
            last.signal(signal.SIGTERM)
            last.wait_ended()
            if last.status == 0:
                return

    @property
    def reached(self) -> bool:
        """Whether each cut was reached: one controller more than cuts."""
        return len(self.children) == len(self.cuts) + 1


def _told(value: bytes | None) -> str:
    return str(decode(value)) if value else repr(value)
