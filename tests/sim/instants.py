"""What else readers ask about instants: differences, older snapshots again, positions, how whole a copy is.

All chance is of their own, so that it moves no other draw.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from random import Random
from typing import TYPE_CHECKING

from anabranch.errors import InvalidArgument
from anabranch.ports import TopicPartition
from anabranch.protocol.schemas import records as r
from anabranch.reading.snapshot import Mode, Snapshot
from anabranch.topics.names import stream_topic
from anabranch.types import Event
from tests.sim.check_log import hold
from tests.sim.ledger import Answers, Ledger
from tests.sim.picture import Picture
from tests.sim.topics import BY_HAND

if TYPE_CHECKING:
    from anabranch.client.client import Client


class Instants:
    """One reader's questions."""

    def __init__(self, client: Client, random: Random, answers: Answers) -> None:
        self._client = client
        self._random = random
        self._answers = answers
        self._taken: list[tuple[str, Snapshot]] = []

    def mode(self) -> Mode:
        """A way to take a snapshot of now."""
        return "latest" if self._random.random() < 0.3 else "snapshot"

    def whole(self, snapshot: Snapshot, stream: str) -> list[Event]:
        """All events, read in one go or by two readers, the second one from a position on."""
        if self._random.random() < 0.5:
            with snapshot.read(stream) as reader:
                return list(reader)
        with snapshot.read(stream) as reader:
            begun = list(islice(reader, self._random.randrange(8)))
            position = snapshot.position()
        with self._client.open_snapshot(position).read(stream) as rest:
            return begun + list(rest)

    def older(self, label: str, snapshot: Snapshot) -> tuple[str, Snapshot] | None:
        """One that was taken before, perhaps: it gives the same again. Keeps the new one."""
        found = self._random.choice(self._taken) if self._taken else None
        self._taken = [*self._taken[-5:], (label, snapshot)]
        return found if self._random.random() < 0.5 else None

    def difference(self, older: Snapshot, newer: Snapshot) -> None:
        """What came between two snapshots."""
        since, at = sorted((older.timestamp, newer.timestamp))
        asked = self._client.snapshot(newer.streams, at, since, self.mode(), timeout=5.0)
        for stream in asked.streams:
            found = self.whole(asked, stream)
            places = [(e.partition, e.offset) for e in found if e.value != BY_HAND]
            self._answers.differences.append((stream, since, at, places))

    def copy(
        self, stream: str, group: str, offsets: Callable[[], dict[TopicPartition, int]]
    ) -> None:
        """How whole the copy of a group is."""
        try:
            at = self._client.progress(stream, group)
        except InvalidArgument:
            return  # it has no position yet
        self._answers.copies.append((stream, at, dict(offsets())))


def check_snapshots(picture: Picture, ledger: Ledger) -> None:
    """What was read is what the plan says, each event once, whatever was deleted since."""
    for stream, cut, places in ledger.snapshots:
        due = [
            (partition, event.offset)
            for partition, end in cut.offsets.items()
            for event in picture.events[stream, partition]
            if cut.start_offsets[partition] <= event.offset < end
        ]
        hold(sorted(places) == sorted(due), f"a snapshot of {stream}: {places}, and not {due}")


def check_instants(picture: Picture, answers: Answers, deleted: dict[str, str]) -> None:
    """Differences are what the history says, and copies have all up to the time that was told."""
    for stream, since, at, places in answers.differences:
        due = [
            (part.partition, event.offset)
            for record in _commits(picture, stream)
            if since < record.timestamp <= at
            for part in record.segments
            for event in picture.events[stream, part.partition]
            if part.first <= event.offset < part.end
        ]
        right = sorted(places) == sorted(due) or stream in deleted
        hold(right, f"{stream} from {since} to {at}: {places}, and not {due}")
    for stream, at, offsets in answers.copies:
        topic = stream_topic(stream)
        for record in _commits(picture, stream):
            for part in record.segments if record.timestamp <= at else ():
                has = offsets.get(TopicPartition(topic, part.partition), 0)
                right = part.end <= has or stream in deleted
                hold(right, f"a copy of {stream} is whole at {at}: it lacks {part} of {record}")


def _commits(picture: Picture, stream: str) -> list[r.CommitRecord]:
    return [x for _, x in picture.history.get(stream, ()) if isinstance(x, r.CommitRecord)]
