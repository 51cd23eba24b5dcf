"""The events of whole transactions, where retention comes to them while a reader is at them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.core.ids import TXN_HEADER, pack_txn_header
from anabranch.errors import DeadlineExceeded, MalformedRecord, SnapshotExpired
from anabranch.ports import TopicPartition
from anabranch.reading import transaction_reader
from anabranch.reading.transaction_reader import _Feeds
from anabranch.schemas.records import CommitRecord, Position, SegmentCommit
from anabranch.topics.names import stream_topic
from tests.sim.consumers import SimMessage

STREAM = "nyc/a"
TXN = bytes(range(16))
HEADERS = ((TXN_HEADER, pack_txn_header(TXN, 1, 0)),)
RECORD = CommitRecord(TXN, 0, 10, (SegmentCommit(0, 0, 4, 7, 3),), (Position(0, 7),), -1)


class Topic:
    """One partition, as an admin and a consumer see it. ``starts``: what is told one time after the other."""

    def __init__(self, starts: list[int], *offsets: int) -> None:
        self.starts = starts
        self.offsets = offsets
        self.native = SimpleNamespace(seek=lambda place: None)

    def start_offsets(self, places: Iterable[tuple[str, int]], _: float) -> Mapping[Any, int]:
        start = self.starts.pop(0) if len(self.starts) > 1 else self.starts[0]
        return dict.fromkeys(places, start)

    def add(self, *_: object) -> None:
        """All is given at once."""

    def next_batch(self, _: float) -> list[SimMessage]:
        place = TopicPartition(stream_topic(STREAM), 0)
        offsets, self.offsets = self.offsets, ()
        return [SimMessage(place, at, Record(at, 0, b"k", b"v", HEADERS), 0) for at in offsets]


def _feeds(monkeypatch: pytest.MonkeyPatch, topic: Topic) -> _Feeds:
    monkeypatch.setattr(transaction_reader, "CommittedConsumer", lambda *_, **__: topic)
    return _Feeds(None, topic, STREAM, 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("starts", "offsets"),
    [
        ([5], ()),  # it has gone before
        ([0, 7], ()),  # nothing is left, and nothing new comes
        ([0, 7], (9,)),  # what comes first is behind it
        ([0, 6], (6, 9)),  # half of it is left
        ([0, 7], (4, 5)),  # the rest went while it was read
    ],
)
def test_what_retention_has_torn_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, starts: list[int], offsets: tuple[int, ...]
) -> None:
    """At once or later: it neither waits for what never comes, nor takes it for tampering."""
    assert _feeds(monkeypatch, Topic(starts, *offsets)).events(RECORD) is None


def test_a_big_one_that_is_torn_while_it_is_read_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transaction_reader, "IN_HAND", 2)
    events = _feeds(monkeypatch, Topic([0, 6], 4)).events(RECORD)
    assert events is not None
    with pytest.raises(SnapshotExpired, match=TXN.hex()):
        list(events)


@pytest.mark.parametrize(("offsets", "error"), [((), DeadlineExceeded), ((4, 9), MalformedRecord)])
def test_without_retention_it_is_waited_for_or_wrong(
    monkeypatch: pytest.MonkeyPatch, offsets: tuple[int, ...], error: type[Exception]
) -> None:
    with pytest.raises(error):
        _feeds(monkeypatch, Topic([0], *offsets)).events(RECORD)


def test_what_is_there_whole_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    events = _feeds(monkeypatch, Topic([4], 4, 5, 6)).events(RECORD)
    assert [event.offset for event in events or ()] == [4, 5, 6]
