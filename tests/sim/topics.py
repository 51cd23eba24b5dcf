"""Topics in outside hands: an operator deletes one of a stream by mistake, and some brokers lag behind.

What is deleted is a stream's topic, its journal or its history; one stream at least keeps all. Sometimes it is made
anew by hand, at once or later, empty or with something in it. A broker that lags does not know a topic, or a
partition of it, or anything, for a while: whoever asks it is told that it does not exist.

The run's own checks see all that ever stood in a topic, whichever it was at that time (`visible`): what is left of
a stream has to fit together with what was lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING

from anabranch.batches.records import Record, encode_batch
from anabranch.ports import TopicGone, TopicInfo, TopicPartition, TopicSpec
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.sim.faults import Faults
from tests.sim.ledger import Ledger
from tests.sim.world import Process, World

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

BY_HAND = b"by hand"  # what somebody puts into a topic that he made anew
OPERATOR = "operator"  # the history of what he does
NAMES: dict[str, Callable[[str], str]] = {
    "stream": stream_topic,
    "journal": journal_topic,
    "history": history_topic,
}
_ANEW = 0.6  # how often a topic is made anew
_AT_ONCE = 0.3
_FILLED = 0.4
_LATEST = 0.6  # of `lost_after_s`: so long brokers lag behind at most


@dataclass(frozen=True, slots=True)
class Lag:
    """What a process's broker does not know until then. ``topic`` None: no topic at all. ``least``: partition."""

    process: str
    topic: str | None
    least: int
    until: float


class Hands:
    """All of a run. ``deleted``: stream -> which of its topics."""

    def __init__(self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger) -> None:
        self._world, self._cluster, self._faults, self._ledger = world, cluster, faults, ledger
        self._random = Random(f"{world.seed}/topics")
        self._lags: list[Lag] = []
        self.gone: set[str] = set()  # topics that no broker knows for a while
        self.altered: dict[tuple[str, str], str] = {}  # (topic, setting) -> its value before
        self._lagged = ledger.lagged  # once a stream: two of them are no longer one
        self.deleted = ledger.deleted

    def start(self) -> None:
        """From now on, if the weather has it."""
        self._next(self._faults.weather.lose_s, self._delete)
        self._next(self._faults.weather.lag_s, self._lag)

    def _next(self, mean_s: float, event: object) -> None:
        if mean_s:
            self._world.later(1.0 + self._random.expovariate(1 / mean_s), event)  # type: ignore[arg-type]

    def lacks_topic(self, stream: str) -> bool:
        """Whether somebody deleted a topic of this stream, and did not make another one."""
        kind = self.deleted.get(stream)
        return kind is not None and NAMES[kind](stream) not in self._cluster.topics

    # -- deletion -------------------------------------------------------------------------------------

    def _delete(self) -> None:
        if self._faults.calm:
            return
        self._next(self._faults.weather.lose_s, self._delete)
        known = [s for s in self._ledger.streams if s not in self.deleted and self.stands(s)]
        if len(known) < 2 or len(self.deleted) + 1 >= len(self._ledger.streams):
            return
        stream, kind = self._random.choice(known), self._random.choice(sorted(NAMES))
        topic = NAMES[kind](stream)
        if not self._faults.strikes(1.0, "topic deleted", topic):
            return
        info = self._cluster.topics[topic]
        self.deleted[stream] = kind
        with self._ledger.history.named(OPERATOR).asking("delete", stream=stream, topic=kind):
            self._cluster.delete_topic(topic)
        self._world.note(OPERATOR, f"deletes {topic}")
        self._world.changed()
        if self._random.random() < _ANEW:
            if self._random.random() < _AT_ONCE:
                self._make_anew(stream, info)
            else:
                later = self._random.expovariate(0.5)
                self._world.later(later, lambda: self._make_anew(stream, info))

    def stands(self, stream: str) -> bool:
        """It has all its topics, and its first epoch."""
        history = self._cluster.partitions.get(TopicPartition(history_topic(stream), 0))
        if history is None:
            return False
        seen = [entry for entry in history.entries if entry.next_offset <= history.stable_offset]
        committed = any(not (entry.is_control or entry.is_aborted) for entry in seen)
        return committed or history.start_offset > 0

    def _make_anew(self, stream: str, info: TopicInfo) -> None:
        if self._faults.calm:
            return
        if self.deleted[stream] == "history" and self._cluster.may_mark(info.name):
            # Known not to be seen: markers of the old one may land there, so that it is as long.
            self._world.later(0.5, lambda: self._make_anew(stream, info))
            return
        self._world.note(OPERATOR, f"makes {info.name} anew")
        altered = [place for place in self.altered if place[0] == info.name]
        config = {**info.config} | {place[1]: self.altered.pop(place) for place in altered}
        self._cluster.create([TopicSpec(info.name, info.partitions, config)])
        if self.deleted[stream] != "history" and self._random.random() < _FILLED:
            for _ in range(self._random.randint(1, 3)):
                place = TopicPartition(info.name, self._random.randrange(info.partitions))
                self._fill(stream, place)
        self._world.changed()

    def _fill(self, stream: str, place: TopicPartition) -> None:
        now_ms = self._world.wall_ms
        value = BY_HAND
        if self.deleted[stream] == "journal":  # a plain write, as by any producer
            told = self._ledger.plainly(stream, place.partition, None)
            event = [None, told.value.decode()]
            self._ledger.history.named(OPERATOR).note("plain", stream=stream, events=[event])
            value = told.value
        self._cluster.produce_batch(place, encode_batch([Record(0, now_ms, None, value, ())]))

    # -- settings -------------------------------------------------------------------------------------

    def alter(self, topic: str, name: str, value: str) -> None:
        """Somebody alters a topic's setting, until it is restored."""
        self._world.note(OPERATOR, f"sets {name}={value} of {topic}")
        self.altered.setdefault((topic, name), self._cluster.topics[topic].config[name])
        self._set(topic, name, value)

    def restore(self) -> None:
        """All settings are as they were."""
        for (topic, name), value in self.altered.items():
            self._set(topic, name, value)
        self.altered.clear()

    def _set(self, topic: str, name: str, value: str) -> None:
        info = self._cluster.topics.get(topic)
        if info is not None:  # new partitions take it over
            self._cluster.topics[topic] = replace(info, config={**info.config, name: value})
        for place, partition in self._cluster.partitions.items():
            if place.topic == topic:
                partition.config[name] = value

    # -- brokers that lag behind ----------------------------------------------------------------------

    def _lag(self) -> None:
        if self._faults.calm:
            return
        self._next(self._faults.weather.lag_s, self._lag)
        known = [s for s in self._ledger.streams if s not in self._lagged and self.stands(s)]
        processes = sorted(
            {
                task.process.name
                for task in self._world._tasks
                if task.process.kind != "reader" and not task.process.dead
            }
        )
        if not known or not processes:
            return
        stream, process = self._random.choice(known), self._random.choice(processes)
        topic = NAMES[self._random.choice(sorted(NAMES))](stream)
        if topic not in self._cluster.topics:
            return
        count = self._cluster.topics[topic].partitions
        what = self._random.choice(("topic", "topic", "partition", "all"))
        until = self._world.now + self._random.uniform(0.1, _LATEST) * self._lost_after_s
        if not self._faults.strikes(1.0, "topic not known", topic):
            return
        self._lagged.add(stream)
        least = count - 1 if what == "partition" else 0
        self._lags.append(Lag(process, None if what == "all" else topic, least, until))
        self._world.note("brokers", f"{process} is not told of {topic} ({what}) until {until:.3f}")
        self._world.later(until - self._world.now + 1e-6, self._world.changed)

    @property
    def _lost_after_s(self) -> float:
        return self._faults.weather.lost_after_s

    def _hidden(self, process: Process, topic: str) -> Iterator[int]:
        """From which partition on something is not known."""
        if topic in self.gone:
            yield 0
        for lag in self._lags:
            is_now = lag.process == process.name and self._world.now < lag.until
            if is_now and not self._faults.calm and lag.topic in (None, topic):
                yield lag.least

    def check(self, process: Process, places: Iterable[TopicPartition]) -> None:
        """`TopicGone` if this process's broker does not know one of them."""
        for place in places:
            if self.lacks(process, place):
                what = f"{place.topic}[{place.partition}] does not exist"
                raise TopicGone(what, place.topic)

    def lacks(self, process: Process, place: TopicPartition) -> bool:
        """Whether its broker does not know that, be it for a while or because it is deleted."""
        if any(place.partition >= least for least in self._hidden(process, place.topic)):
            return True
        return place not in self._cluster.partitions

    def described(self, process: Process, topic: str, partitions: int) -> int:
        """How many partitions its broker knows; 0: it does not know the topic."""
        return min([partitions, *self._hidden(process, topic)])
