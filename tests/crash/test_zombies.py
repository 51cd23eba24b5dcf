"""Two controllers that both believe they lead: the older one appends nothing to their logs, and merges nothing.

The zombie is frozen (SIGSTOP) at a moment of taking the lead or of a round. Another takes over and works. Then
the zombie goes on, while the other works on: nothing but answers of rounds that happened may show that it was
there, and it ends.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from anabranch.kafka.log import KafkaLog
from anabranch.ports import Log, TopicPartition
from tests.conftest import Broker
from tests.crash.cases import Place
from tests.crash.locking import Locking
from tests.crash.oracle import partitions_of, stamps
from tests.crash.raw import Raw
from tests.crash.scenario import SPEED, Scenario
from tests.workload.leader import Lead
from tests.workload.points import Point
from tests.workload.zygote import Child, Zygote

LANES = 3
LEADING = "take the lead"
FENCED = 3  # the exit code of a child that learned that another one leads


class Moment(NamedTuple):
    """When a zombie freezes: in which step of the scenario, at which call.

    ``few``: one of those around what fences it, around what makes a round last, or around what orders its appends.
    """

    step: str
    name: str
    phase: str
    n: int = 1
    site: str = "*"
    few: bool = False

    @property
    def title(self) -> str:
        return f"{self.step}: {self.phase} {self.name}" + (f" {self.n}" if self.n > 1 else "")


COMMIT, ONE_SHOT = "commit from two writers", "one-shot"
MERGE = "append:journal+status+stream"
MOMENTS = [
    # design §5
    Moment(LEADING, "producer:a", "before"),
    Moment(LEADING, "producer:a", "after", few=True),
    Moment(LEADING, "producer:b", "before", few=True),
    Moment(LEADING, "producer:b", "after"),
    Moment(LEADING, "append:status", "before"),
    Moment(LEADING, "append:status", "after", few=True),
    Moment(LEADING, "end:commit", "before", few=True),
    Moment(LEADING, "end:commit", "after"),
    Moment(LEADING, "end_offsets", "after", 3, "*fold_to_end*"),
    Moment(LEADING, "table:rows", "before", 2),
    # between rounds and inside one
    Moment(COMMIT, "fetch:commands+control+journal", "before", few=True),
    Moment(COMMIT, "append:journal+status", "before"),
    Moment(COMMIT, "after-decision", "after", few=True),
    Moment(COMMIT, "fetch:journal", "before"),
    Moment(COMMIT, MERGE, "before"),
    Moment(COMMIT, MERGE, "after", few=True),
    Moment(COMMIT, "append:history", "before"),
    Moment(COMMIT, "append:history", "after"),
    Moment(COMMIT, "end:commit", "before", 1, "*data*", few=True),
    Moment(COMMIT, "end:commit", "after", 1, "*data*", few=True),
    Moment(COMMIT, "table:rows", "before", 1, "*data*"),
    Moment(ONE_SHOT, "append:*stream", "before"),
    Moment(ONE_SHOT, "append:*history*", "after"),
    Moment(ONE_SHOT, "end:commit", "before", few=True),
    Moment(ONE_SHOT, "send:replies", "before", few=True),
    Moment("abort", "append:journal+status", "before", 1, "*ABORTED*", few=True),
    Moment("go stale", "append:*", "before", 1, "*ABORTED*", few=True),
]
FEW = [moment for moment in MOMENTS if moment.few]
# Without KIP-890 the epoch of a producer stays through all its transactions.
OLD_PROTOCOL = [
    Moment(LEADING, "producer:a", "after"),
    Moment(LEADING, "end:commit", "before"),
    Moment(COMMIT, "after-decision", "after"),
    Moment(COMMIT, "append:history", "before"),
    Moment(COMMIT, "end:commit", "before", 1, "*data*"),
    Moment(ONE_SHOT, "end:commit", "before"),
]
# Of tables: whatever it calls from the step on, one after another.
LOCKING = [
    Moment(step, "*", "before", n)
    for step in ("commit what still holds", "a commit from journals", "commit what is broken", "a last one")
    for n in range(1, 13)
]  # fmt: skip


@dataclass
class Haunted:
    """The scenario with a zombie in it."""

    place: Place
    moment: Moment
    play: type[Scenario] = Scenario
    chunk_bytes: int = Lead.chunk_bytes
    children: list[Child] = field(default_factory=list)
    zombie: Child | None = None

    def __post_init__(self) -> None:
        place = self.place
        self.client = Raw(place.bootstrap, place.prefix, place.log, place.producer, idle=self.watch)
        self.auditor = Raw(place.bootstrap, place.prefix, place.log, place.producer)
        self.scenario = self.play(self.client, f"{place.prefix}-scope")

    def fork(self, name: str, point: Point | None = None, *, armed: bool = True) -> Child:
        place = self.place
        spec = Lead(
            place.bootstrap,
            place.prefix,
            folder=f"{place.folder}/{name}",
            name=f"{place.prefix}/{name}",
            points=(f"stop {point}",) if point else (),
            armed=armed,
            speed=SPEED,
            again=point is None,
            chunk_bytes=self.chunk_bytes,
            threads=True,
        )
        self.children.append(self.place.zygote.fork(spec))
        return self.children[-1]

    def watch(self) -> None:
        """Once the zombie is frozen, another takes over."""
        zombie = self.zombie
        if zombie is not None and zombie.stopped and self.children[-1] is zombie:
            self.fork("other").wait_leading()

    def run(self) -> None:
        """All of it, with its checks."""
        try:
            self._run()
        finally:
            for child in self.children:
                child.kill()

    def _run(self) -> None:
        moment = self.moment
        point = Point(moment.name, moment.site, moment.n, moment.phase)
        first = self.fork("first", point, armed=False)
        first.wait_leading()
        self.client.start()
        self.auditor.start()
        zombie = self.zombie = first
        if moment.step == LEADING:
            self.scenario.steps[0][1]()
            first.kill()
            zombie = self.zombie = self.fork("zombie", point)
            zombie.wait_stopped()
            self.watch()
        frozen = False
        marks: dict[TopicPartition, int] = {}
        for name, step in self.scenario.steps[moment.step == LEADING :]:
            if name == moment.step:
                zombie.arm()
            step()
            if not frozen and (moment.step == LEADING or name == moment.step):
                zombie.wait_stopped()
                self.watch()
                marks = self.marks()
                zombie.go_on()
                frozen = True
        assert frozen
        zombie.wait_ended()
        assert zombie.status is not None
        assert zombie.status >> 8 == FENCED, f"the zombie ended as {zombie.status}"
        other = self.children[-1]
        other.wait_leading()  # for a moment it may have lost the lead to the zombie that woke up
        self.scenario.check_end(self.place.log, self.auditor)
        self.place.check_log()
        if (moment.step, moment.name, moment.phase) != (LEADING, "producer:a", "before"):
            # (That one had not begun to lead: when it continues, it rightly does.)
            self.check_stamps(other, marks)

    # -- who appended what ----------------------------------------------------------------------------

    def partitions(self) -> list[TopicPartition]:
        """All that rounds append to."""
        topics = [f"{self.place.prefix}.status"]
        for stream in self.scenario.streams:
            topic = stream.replace("/", ".")
            topics += [topic, f"{topic}.journal", f"{topic}.history"]
        return partitions_of(self.place.log, topics)

    def marks(self) -> dict[TopicPartition, int]:
        """The ends of all logs now."""
        return self.place.log.end_offsets(self.partitions(), committed=False)

    def check_stamps(self, other: Child, marks: dict[TopicPartition, int]) -> None:
        """All that follows the marks was appended by the one that leads, committed or not."""
        epochs: dict[int, int] = {}
        for producer_id, epoch in other.said("leads")[0]["producers"]:
            epochs[producer_id] = epoch
        assert epochs, "the other one did not say by which producers it leads"
        late = [
            s
            for s in stamps(self.place.log, self.partitions())
            if s.base_offset >= marks.get(s.partition, 0)
        ]
        assert late, "the other one did nothing"
        for stamp in late:
            assert stamp.producer_epoch >= epochs.get(stamp.producer_id, 1 << 15), (
                f"appended by the zombie: {stamp}; the other one leads as {epochs}"
            )


def haunt(
    zygote: Zygote,
    broker: Broker,
    log: Log,
    moments: Iterable[Moment],
    play: type[Scenario] = Scenario,
    chunk_bytes: int = Lead.chunk_bytes,
) -> dict[str, str]:
    """Run all moments; returns the faults by moment."""
    run = uuid.uuid4().hex[:6]

    def one(numbered: tuple[int, Moment]) -> str:
        number, moment = numbered
        place = Place.on(zygote, broker.bootstrap, log, f"z{run}-{number}")
        haunted = Haunted(place, moment, play, chunk_bytes)
        try:
            haunted.run()
        except Exception as error:  # noqa: BLE001 - reported with its moment, after all others
            return f"{haunted.scenario.transcript[-1:]}: {type(error).__name__}: {error}"
        finally:
            place.remove()
        return ""

    moments = list(moments)
    with ThreadPoolExecutor(LANES) as pool:
        wrong = pool.map(one, enumerate(moments))
        return {m.title: why for m, why in zip(moments, wrong, strict=True) if why}


@pytest.mark.broker
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("moments", "play"),
    [
        pytest.param(FEW[:1], Scenario, id="fewest", marks=pytest.mark.long),
        pytest.param(FEW, Scenario, id="few", marks=pytest.mark.soak),
        pytest.param(MOMENTS, Scenario, id="all", marks=pytest.mark.soak),
        pytest.param(LOCKING, Locking, id="locks", marks=pytest.mark.soak),
    ],
)
def test_a_zombie_does_nothing(
    broker: Broker,
    zygote: Zygote,
    log: Log,
    subtests: pytest.Subtests,
    moments: list[Moment],
    play: type[Scenario],
) -> None:
    for title, why in haunt(zygote, broker, log, moments, play).items():
        with subtests.test(title):
            pytest.fail(why, pytrace=False)


@pytest.mark.soak
@pytest.mark.broker
@pytest.mark.timeout(300)
def test_a_zombie_does_nothing_under_the_older_protocol(
    broker_tv0: Broker, zygote: Zygote, subtests: pytest.Subtests
) -> None:
    log = KafkaLog(broker_tv0.bootstrap)
    try:
        wrong = haunt(zygote, broker_tv0, log, OLD_PROTOCOL)
    finally:
        log.close()
    for title, why in wrong.items():
        with subtests.test(title):
            pytest.fail(why, pytrace=False)


@pytest.mark.broker
def test_what_a_zombie_read_is_not_believed(broker: Broker, zygote: Zygote, log: Log) -> None:
    """It indexes writes of a transaction that began without it. Whoever leads on its folder finds them."""
    place = Place.on(zygote, broker.bootstrap, log, f"zr{uuid.uuid4().hex[:6]}")
    moment = Moment("write and keep open", "fetch:commands+control+journal", "before")
    haunted = Haunted(place, moment)
    try:
        zombie = haunted.fork("zombie", Point(moment.name, "*", 1, moment.phase), armed=False)
        zombie.wait_leading()
        haunted.client.start()
        haunted.scenario.create()
        zombie.arm()
        zombie.wait_stopped()
        other = haunted.fork("other")
        other.wait_leading()
        haunted.scenario.keep()
        zombie.go_on()
        zombie.wait_ended()
        assert zombie.status is not None
        assert zombie.status >> 8 == FENCED
        other.kill()
        haunted.fork("zombie").wait_leading()  # a machine that is itself again
        haunted.scenario.commit_kept()
        assert haunted.scenario.acknowledged["kept"].committed == 10
        place.check_log()
    finally:
        for child in haunted.children:
            child.kill()
        place.remove()
