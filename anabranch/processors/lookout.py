"""Topics that are not there: which streams have to wait for that, and which are given up.

Nothing is looked for as long as nothing fails. When a call says that a topic is gone, the streams of this control
partition are looked at once; those that lack a topic are *missing*: nothing is read or written there, all others
go on. Giving up can't be undone, and a broker that has just started, or lags behind, may not know a topic or a
partition yet. So an answer counts only if it knows the status topic, too, and only what stays missing is given up.
A topic in which events come to stand before what it held is another one: all replicas in sync took them, there is
nothing to wait for. One that merely seems to hold less has to seem so for as long, again and again: a broker that
does not know yet that it leads no more would give the same to read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from anabranch.core.decide_admin import ACTIVE
from anabranch.core.state import State
from anabranch.ports import Clock, Log, LogError, TopicGone, TopicUncertain
from anabranch.processors.intake import Intake
from anabranch.topics.names import history_topic, journal_topic, stream_topic

log = logging.getLogger("anabranch.controller")

LOOK_S = 1.0  # how often it is looked whether a missing topic is there again
FADES_S = 10.0  # what was read once, and not again for so long, means nothing


@dataclass(slots=True)
class Lookout:
    """``missing``: stream -> which topic is not found; decisions see it. It lasts as long as its leader leads.

    ``witness``: a topic that is there, since this partition is led: who does not know it knows nothing.
    ``_seeming``: stream -> since when it seems to hold less than it did, and when it last did.
    ``_hints``: what failed; these outlast a change of leadership, which such a failure may be the end of.
    """

    log: Log
    clock: Clock
    witness: str
    missing: dict[str, str] = field(default_factory=dict)
    _since: dict[str, float] = field(default_factory=dict)
    _lost: set[str] = field(default_factory=set)
    _seeming: dict[str, tuple[float, float]] = field(default_factory=dict)
    _hints: list[TopicGone | TopicUncertain] = field(default_factory=list)
    _next: float = 0.0
    _looked: float = 0.0  # when an answer came that counts

    @contextmanager
    def hinting(self) -> Iterator[None]:
        """A topic for which something fails in a way that ends leading is looked for when that begins anew."""
        try:
            yield
        except (TopicGone, TopicUncertain) as error:
            self._hints.append(error)
            raise

    def begin(self, state: State, missing: dict[str, str]) -> None:
        """A leader begins: look for what made the former one fail. ``missing`` is kept up from now on."""
        self.missing = missing
        self._since.clear()
        self._lost.clear()
        hints, self._hints = self._hints, []
        if hints:
            self.look(state)
        for error in hints:
            if isinstance(error, TopicGone) and error.lost:
                self.find(state, error)  # it is there, and another one

    def find(self, state: State, error: TopicGone) -> bool:
        """Look for what this error names. False if that is of no stream here, and its cause is another one."""
        stream = _streams(state).get(error.topic)
        if stream is not None and error.lost:
            self._note(stream, str(error))
            if error.certain:
                self._lost.add(stream)
            else:
                self._seems(stream)
            return True
        self.look(state)
        return stream is not None

    def find_journals(self, intake: Intake, state: State) -> None:
        """Where the journals end, as the intake has to know; without those that are not there."""
        while True:
            known = len(self.missing)
            try:
                intake.find_ends(state)
            except TopicGone as error:
                if not self.find(state, error) or len(self.missing) == known:
                    raise
            else:
                return

    def given_up(self, state: State, after_s: float) -> list[tuple[str, str]]:
        """(stream, why) of those that are not to be waited for any longer."""
        now = self.clock.monotonic()
        if self.missing and now >= self._next:
            self.look(state)
        return [
            (stream, why)
            for stream, why in sorted(self.missing.items())
            if stream in self._lost or self._looked - self._waits_since(stream, now) >= after_s
        ]

    def _seems(self, stream: str) -> None:
        """It is tried again when it is looked for next."""
        now = self.clock.monotonic()
        first, last = self._seeming.get(stream, (now, now))
        self._seeming[stream] = (first if now - last < FADES_S else now), now
        self._next = now + LOOK_S

    def _waits_since(self, stream: str, now: float) -> float:
        since = self._since[stream]
        first, last = self._seeming.get(stream, (since, now))
        return min(first, since) if now - last < FADES_S else since

    def settled(self, stream: str) -> None:
        """It is on the log that a stream is lost."""
        self.missing.pop(stream, None)
        self._lost.discard(stream)
        self._seeming.pop(stream, None)

    def look(self, state: State) -> None:
        """Which streams lack a topic now; an answer of a broker that does not know the witness does not count."""
        now = self.clock.monotonic()
        self._next = now + LOOK_S
        topics = _streams(state)
        try:
            found = self.log.describe_topics([self.witness, *sorted(topics)])
        except LogError as error:
            log.warning("topics can't be looked for now: %s", error)
            return
        if self.witness not in found:
            log.warning("topics can't be looked for now: a broker does not know %s", self.witness)
            return
        self._looked = now
        gone: dict[str, str] = {}
        for topic, stream in topics.items():
            info = found.get(topic)
            if info is None:
                gone.setdefault(stream, f"there is no topic {topic}")
            elif topic != history_topic(stream) and (
                info.partitions < state.streams[stream].partitions
            ):
                gone.setdefault(stream, f"topic {topic} has only {info.partitions} partitions")
        for stream, why in gone.items():
            self._note(stream, why)
        for stream in [s for s in self.missing if s not in gone and s not in self._lost]:
            log.info("%s: its topics are there", stream)
            del self.missing[stream]

    def _note(self, stream: str, why: str) -> None:
        if stream not in self.missing:
            self._since[stream] = self.clock.monotonic()
            log.warning("%s waits: %s", stream, why)
        self.missing[stream] = why


def _streams(state: State) -> dict[str, str]:
    """topic -> stream, of all streams that can be written to."""
    return {
        topic: stream
        for stream, row in state.streams.items()
        if row.state == ACTIVE
        for topic in (stream_topic(stream), journal_topic(stream), history_topic(stream))
    }
