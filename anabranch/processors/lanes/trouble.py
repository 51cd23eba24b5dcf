"""Lanes in trouble: each waits alone, all others are served. The one home of that rule.

Commands that can't be read are not asked for. Answers that can't be written are not sent, and their clients ask
again. A topic is tried again once a look at the brokers' metadata finds it well and its pause is over; the pause
grows while it fails again and again. A topic that is not the one whose id the lane's row has is never read or
written. `open` and `admin` are lanes as others are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from anabranch.backoff import Backoff
from anabranch.core.decisions.lanes import is_blocked
from anabranch.core.decisions.turn import Settings
from anabranch.core.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.core.state import State
from anabranch.ports import Clock, Log, LogError, TopicInfo, TopicPartition
from anabranch.processors.streams.health import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    describe,
    gone,
    new_pauses,
    refuses_data,
)
from anabranch.topics.names import commands_topic, replies_topic, status_topic

log = logging.getLogger("anabranch.controller")

UNSENT_PAUSE_S = 0.01


class _Topic(NamedTuple):
    """A topic of a lane. ``partitions``: as many as it has at least. ``topic_id``: empty where any will do."""

    name: str
    commands: bool
    partitions: int
    topic_id: str


@dataclass(slots=True)
class LaneTrouble:
    """``waiting``: topic -> why it is not read, or written. ``unsent``: some answers are not on their way yet."""

    log: Log
    clock: Clock
    settings: Settings
    waiting: dict[str, str] = field(default_factory=dict)
    unsent: bool = False
    _pauses: dict[str, Backoff] = field(default_factory=dict)  # by topic

    def begin(self, state: State) -> None:
        """A leader begins: lanes whose topics have ids are looked at."""
        topics = self._topics(state)
        known = [topic for topic in topics.values() if topic.topic_id]
        self._look([*known, *(topics[name] for name in self.waiting if name in topics)])

    def of(self, lane: str) -> str:
        """The reason why a lane waits; empty if it does not."""
        prefix = self.settings.prefix
        names = commands_topic(prefix, lane), replies_topic(prefix, lane)
        return "; ".join(self.waiting[name] for name in names if name in self.waiting)

    @property
    def wait_s(self) -> float:
        """How long the loop may wait."""
        if self.unsent:
            return UNSENT_PAUSE_S
        return FIRST_PAUSE_S if self.waiting else LONGEST_PAUSE_S

    def send(self, answers: Iterable[tuple[TopicPartition, bytes]] = ()) -> None:
        """Send answers, but none to topics that wait; hear what became of earlier ones."""
        failed: dict[TopicPartition, LogError] = {}
        heard = [answer for answer in answers if answer[0].topic not in self.waiting]
        self.unsent = self.log.send(heard, failed)
        for place, error in failed.items():
            if refuses_data(error):
                log.warning("an answer is lost: %s", error)  # others to that lane are fine
            else:
                self.note(place.topic, str(error))

    def note(self, topic: str, why: str, *, looked: bool = False) -> None:
        """Let a topic wait; longer, if it waits already and was looked at."""
        known = topic in self.waiting
        if looked or not known:
            self._pauses.setdefault(topic, new_pauses(self.clock)).begin()
        if not known:
            log.warning("%s waits: %s", topic, why)
        self.waiting[topic] = why

    def look(self, state: State) -> None:
        """Look at the topics whose pause is over."""
        if not self.waiting:
            return
        topics = self._topics(state)
        for name in self.waiting.keys() - topics.keys():
            del self.waiting[name]
        self._look([topics[name] for name in sorted(self.waiting) if self._pauses[name].is_over])

    def _look(self, topics: Iterable[_Topic]) -> None:
        wanted = {topic.name: topic for topic in topics}
        if not wanted:
            return
        described = describe(self.log, status_topic(self.settings.prefix), wanted)
        for name, topic in wanted.items():
            if described is None:
                why = "it can't be looked at now"
            elif name in described.forbidden:
                why = described.forbidden[name]
            else:
                why = self._wrong(topic, described.found.get(name))
            if why:
                self.note(name, why, looked=True)
            elif self.waiting.pop(name, ""):
                log.info("%s goes on", name)

    def _wrong(self, topic: _Topic, info: TopicInfo | None) -> str:
        why = gone(topic.name, info, topic.partitions, topic.topic_id)
        if why or info is None:
            return why
        mine = (self.settings.control_partition,) if topic.commands else range(topic.partitions)
        lacking = [partition for partition in mine if partition in info.leaderless]
        return f"{topic.name}[{lacking[0]}] has no leader" if lacking else ""

    def _topics(self, state: State) -> dict[str, _Topic]:
        """The topics of all lanes, by name; without the commands of blocked ones."""
        found = {}
        for lane in {OPEN_LANE, ADMIN_LANE, *state.lanes}:
            row = state.lanes.get(lane)
            ids = row.topic_ids if row is not None and len(row.topic_ids) == 2 else ("", "")
            commands = commands_topic(self.settings.prefix, lane)
            if not is_blocked(state, lane):
                least = self.settings.control_partition + 1
                found[commands] = _Topic(commands, True, least, ids[0])
            replies = replies_topic(self.settings.prefix, lane)
            least = self.settings.reply_partitions if lane == OPEN_LANE else 1
            found[replies] = _Topic(replies, False, least, ids[1])
        return found
