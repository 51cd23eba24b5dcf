"""Brokers' health: which ones are asked first, skipped, or taken for replaced, by what was observed of them.

A broker that is frozen, restarting, or cut off from its peers costs time or gives old answers (decision 0030). This
file decides what to do about that, by a clock and without I/O. `Cluster`, which asks the brokers, notes here what
happened; `Cluster.health` is the only place where a broker's state is remembered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from anabranch.backoff import Backoff
from anabranch.ports import Clock, TopicPartition

Address = tuple[str, int]

PATIENCE_S = 5.0  # the wait for one broker's answer to a question that others can answer, too
# A broker that does not answer a request is waited for until another has replaced it. Others are asked about
# that for the first time after `SILENT_S`, then every `ASK_AGAIN_S`; each question may take `REPLACED_S`.
SILENT_S = 2.0
ASK_AGAIN_S = 0.5
REPLACED_S = 1.0
SKIPPED_S = 1.0  # how long a broker is skipped after its first failure; longer if it fails again
LONGEST_SKIPPED_S = 16.0
AGE_S = 10.0  # leaders that other brokers have not confirmed for this long are validated
WAIT_S = 2.0  # how long a caller waits for all replicas to confirm leaders
LATE_S = 15.0  # how long a broker that did not confirm them in time is not waited for
# After this time a leader is asked again for a follower, as Kafka's own consumer does.
FOLLOWED_S = 300.0
LED_S = 5.0  # how long a leader serves what a follower could not


class Use(Enum):
    """A purpose for which a broker is skipped: one whose disk hangs, say, may still be read from."""

    READ = "read"
    SEND = "send"
    FIND_LEADERS = "find leaders"


@dataclass(slots=True)
class Question:
    """A question to one replica about leaders. ``began``: monotonic seconds.

    ``under_way``: it may still be answered. ``late``: no answer came within `WAIT_S`.
    """

    began: float
    under_way: bool = True
    late: bool = True


# Address -> its last question not answered in time. All `Cluster`s share this: each snapshot has its own `Cluster`.
_late: dict[Address, Question] = {}


class BrokerHealth:
    """The state of a cluster's brokers, as one client observes it. Thread-safe: a method makes one change."""

    def __init__(self, clock: Clock, rack: str = "") -> None:
        """``rack``: the reader's, see `Followers`."""
        self._clock = clock
        self._failed: dict[Address, float] = {}
        self._skips: dict[tuple[Use, int], Backoff] = {}
        # Topic -> when brokers other than its leaders last confirmed these.
        self.confirmed: dict[str, float] = {}
        self.followers = Followers(clock, rack)

    # -- the broker to ask, if any of them can answer ---------------------------------------------

    def failed(self, address: Address) -> None:
        """Note that a broker did not answer: others are asked first."""
        self._failed[address] = self._clock.monotonic()

    def answered(self, address: Address) -> None:
        """Note that a broker answered: it is asked in turn again."""
        self._failed.pop(address, None)

    def in_order(self, addresses: Iterable[Address]) -> list[Address]:
        """Brokers without a failure first, in the given order; then those whose failure is the longest ago."""
        return sorted(addresses, key=lambda one: self._failed.get(one, 0.0))

    # -- the broker that alone can answer -----------------------------------------------------------

    def skip(self, use: Use, node: int) -> None:
        """Note that a broker did not serve: callers with others to ask skip it, longer each time."""
        pauses = self._skips.get((use, node))
        if pauses is None:
            pauses = Backoff(SKIPPED_S, LONGEST_SKIPPED_S, self._clock)
            self._skips[use, node] = pauses
        pauses.begin()

    def serves(self, use: Use, node: int) -> None:
        """Note that a broker served: it is not skipped any more."""
        self._skips.pop((use, node), None)

    def is_skipped(self, use: Use, node: int) -> bool:
        """Whether a broker is skipped now."""
        pauses = self._skips.get((use, node))
        return pauses is not None and not pauses.is_over

    # -- leaders that may be former ones ------------------------------------------------------------

    def noted(self, topics: Iterable[str]) -> None:
        """Note leaders that were read. The answer may be a leader's own, so it confirms no leader known before."""
        now = self._clock.monotonic()
        for topic in topics:
            self.confirmed.setdefault(topic, now)

    def to_confirm(self, topics: Iterable[str]) -> list[str]:
        """The topics whose leaders other brokers have to confirm; empty until a topic's are older than `AGE_S`.

        Topics that are due soon are included: otherwise each topic would cost a question of its own.
        """
        now = self._clock.monotonic()
        ages = {topic: now - self.confirmed.get(topic, now) for topic in topics}
        due = any(age > AGE_S for age in ages.values())
        return [topic for topic, age in ages.items() if age > AGE_S / 2] if due else []

    def confirming(self, topics: Iterable[str]) -> None:
        """Note that brokers are asked to confirm the leaders of these topics."""
        self.confirmed.update(dict.fromkeys(topics, self._clock.monotonic()))

    # -- replicas that are slow to confirm a leader -------------------------------------------------

    def ask(self) -> Question:
        """Note the beginning of a question to a replica."""
        return Question(self._clock.monotonic())

    def ended(self, question: Question, *, answered: bool) -> None:
        """Note a question's end. A failure at once costs no time: the replica is waited for the next time, too."""
        question.late = not answered and self._clock.monotonic() - question.began >= WAIT_S
        question.under_way = False

    def give_up(self, address: Address, question: Question) -> None:
        """Note a question that is not waited for any longer."""
        if self._is_late(question):
            _late[address] = question

    def unanswered(self, address: Address) -> Question | None:
        """The question that a replica has not answered in time, so that the replica is not waited for."""
        question = _late.get(address)
        return question if question is not None and self._is_late(question) else None

    def _is_late(self, question: Question) -> bool:
        recent = self._clock.monotonic() - question.began < LATE_S
        return question.late and (recent or question.under_way)


class Followers:
    """The replica to fetch a partition from: its leader, or a follower in the reader's rack (KIP-392).

    The leader names the follower. A follower that can't serve a partition is skipped for a while.
    """

    def __init__(self, clock: Clock, rack: str) -> None:
        """``rack``: the reader's; if it is empty, leaders serve everything."""
        self._clock = clock
        self._rack = rack
        # Partition -> (follower, or None for the leader; until when, monotonic seconds).
        self._chosen: dict[TopicPartition, tuple[int | None, float]] = {}

    def named(self, place: TopicPartition, node: int) -> None:
        """Note that the leader has named this follower."""
        self._chosen[place] = node, self._clock.monotonic() + FOLLOWED_S

    def fails(self, places: Iterable[TopicPartition], node: int) -> bool:
        """Note that a broker can't serve these partitions. True if it was a follower: then leaders are asked."""
        until = self._clock.monotonic() + LED_S
        followed = [place for place in places if self._chosen.get(place, (None,))[0] == node]
        self._chosen |= dict.fromkeys(followed, (None, until))
        return bool(followed)

    def groups(self, by_leader: dict[int, list[TopicPartition]]) -> dict[int, list[TopicPartition]]:
        """The partitions by the broker to ask. ``by_leader``: by their leaders."""
        if not self._chosen:
            return by_leader
        now = self._clock.monotonic()
        self._chosen = {p: chosen for p, chosen in self._chosen.items() if chosen[1] > now}
        groups: dict[int, list[TopicPartition]] = {}
        for leader, places in by_leader.items():
            for place in places:
                follower, _ = self._chosen.get(place, (None, 0.0))
                groups.setdefault(leader if follower is None else follower, []).append(place)
        return groups

    def rack_for(self, places: Iterable[TopicPartition]) -> str:
        """The rack for a request; empty if the broker has to serve one of these partitions itself."""
        chosen = self._chosen
        led = chosen and any(p in chosen and chosen[p][0] is None for p in places)
        return "" if led else self._rack
