"""How big the Spark source's micro-batches are: what it takes of histories, without a cluster."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from anabranch.errors import DeadlineExceeded, MalformedRecord
from anabranch.protocol.ids import NO_TXN, make_txn_id, segment_id
from anabranch.protocol.schemas.records import (
    CommitRecord,
    EpochRecord,
    EpochSegment,
    Position,
    SegmentCommit,
    SegmentEnd,
)
from anabranch.reading.history import Found
from anabranch.spark.columns import EVENT_SCHEMA
from anabranch.spark.options import Options
from anabranch.spark.source.admission import Admitted, Limits, NotYet, admit
from anabranch.spark.source.positions import BEGIN, from_json, is_new, to_json
from anabranch.spark.source.positions import Position as At
from anabranch.spark.source.stream_reader import StreamReader


@dataclass
class Written:
    """A history as a controller writes it; each event takes an offset, each commit's marker one more."""

    stream: str = "s/a"
    records: list[Found] = field(default_factory=list)
    vector: dict[int, int] = field(default_factory=dict)
    _next: dict[int, int] = field(default_factory=dict)
    epoch: int = 0

    def commit(self, timestamp: int, counts: Mapping[int, int], txn: int = 0) -> None:
        """So many events on partitions; ``txn`` 0: plain writes."""
        parts = []
        for partition, count in counts.items():
            first = self._next.get(partition, 0)
            parts.append(
                SegmentCommit(
                    segment_id(self.epoch, partition), partition, first, first + count, count
                )
            )
            self.vector[partition] = first + count
            self._next[partition] = first + count + 1
        txn_id = make_txn_id(0, 1, txn) if txn else NO_TXN
        # As in a wide stream: it tells of what it moved only.
        self._add(CommitRecord(txn_id, self.epoch, timestamp, tuple(parts), (), -1, vector_at=0))

    def scale(self, timestamp: int, sealed: Iterable[int]) -> None:
        """A new epoch that seals the segments of these partitions."""
        ends = tuple(SegmentEnd(segment_id(self.epoch, p), self.vector.get(p, 0)) for p in sealed)
        self.epoch += 1
        opened = tuple(
            EpochSegment(segment_id(self.epoch, p), p, p + 1, p, self.vector.get(p, 0))
            for p in sealed
        )
        self._add(
            EpochRecord(self.epoch, self.epoch, timestamp, opened, ends, self._positions(), -1)
        )

    def _positions(self) -> tuple[Position, ...]:
        return tuple(Position(p, o) for p, o in sorted(self.vector.items()))

    def _add(self, record: CommitRecord | EpochRecord) -> None:
        offset = self.records[-1].offset + 2 if self.records else 0
        self.records.append(Found(offset, record))


@dataclass
class List:
    """A front over records that are all in memory; at its end it knows, or not, that nothing follows."""

    records: list[Found]
    bound: int = 1 << 62
    ends: bool = True

    def peek(self) -> Found | None:
        if not self.records and not self.ends:
            raise NotYet
        return self.records[0] if self.records else None

    def pop(self) -> None:
        self.records.pop(0)


def take(start: Mapping[str, At], histories: Sequence[Written], limits: Limits) -> Admitted:
    """One micro-batch."""
    fronts = {
        h.stream: List([f for f in h.records if f.offset > start[h.stream].after])
        for h in histories
    }
    return admit(start, fronts, limits)


def drain(histories: Sequence[Written], limits: Limits) -> list[dict[str, At]]:
    """All positions, from the beginning on, until nothing is left."""
    positions: dict[str, At] = {h.stream: BEGIN for h in histories}
    found = [positions]
    while True:
        admitted = take(positions, histories, limits)
        if admitted.positions == positions:
            assert admitted.events == 0
            assert admitted.all
            return found
        positions = from_json(json.loads(json.dumps(to_json(admitted.positions))))
        assert positions == admitted.positions
        found.append(positions)


def sizes(histories: Sequence[Written], limits: Limits) -> list[int]:
    """Events of each micro-batch, counted by the offsets that commits say are events."""
    places = drain(histories, limits)
    return [
        sum(
            max(0, min(part.end, after[h.stream].vector.get(part.partition, 0))
                - max(part.first, before[h.stream].vector.get(part.partition, 0)))
            for h in histories
            for f in h.records
            if isinstance(f.record, CommitRecord)
            for part in f.record.segments
        )
        for before, after in itertools.pairwise(places)
    ]  # fmt: skip


def three() -> Written:
    """Commits of 3, 5 and 20 events on two partitions."""
    written = Written()
    written.commit(1, {0: 3}, txn=1)
    written.commit(2, {0: 1, 1: 4})
    written.commit(3, {0: 10, 1: 10}, txn=2)
    return written


@pytest.mark.parametrize(
    ("events", "whole", "expected"),
    [
        (None, False, [28]),
        (28, False, [28]),
        (27, False, [8, 20]),
        (8, False, [8, 8, 8, 4]),
        (7, False, [3, 5, 7, 7, 6]),
        (4, False, [3, 4, 1, 4, 4, 4, 4, 4]),
        (1, False, [1] * 28),
        (8, True, [8, 20]),
        (4, True, [3, 5, 20]),
    ],
)
def test_whole_commits_as_far_as_the_limit_allows(
    events: int | None, whole: bool, expected: list[int]
) -> None:
    assert sizes([three()], Limits(events, whole)) == expected


def test_a_transaction_in_parts_is_read_from_all_partitions_at_once() -> None:
    written = three()
    vectors = [at["s/a"].vector for at in drain([written], Limits(8))]
    assert vectors == [{}, {0: 5, 1: 4}, {0: 10, 1: 9}, {0: 14, 1: 13}, {0: 16, 1: 15}]
    # Inside of the transaction the place in the history is that before it.
    after = [at["s/a"].after for at in drain([written], Limits(8))]
    assert after == [-1, 2, 2, 2, 4]


def test_transactions_of_several_streams_come_in_one_micro_batch() -> None:
    a, b = Written("s/a"), Written("s/b")
    a.commit(1, {0: 1}, txn=1)
    b.commit(2, {0: 1}, txn=2)
    a.commit(3, {0: 2}, txn=3)
    b.commit(3, {0: 2}, txn=3)
    a.commit(4, {0: 1}, txn=4)
    assert sizes([a, b], Limits(3)) == [2, 3, 2]  # 1 + 1; 3 of 4; the rest, and what follows
    assert sizes([a, b], Limits(3, whole=True)) == [2, 4, 1]
    assert sizes([a, b], Limits(None)) == [7]


def test_plain_writes_of_one_moment_belong_to_one_stream_each() -> None:
    a, b = Written("s/a"), Written("s/b")
    a.commit(1, {0: 2})
    b.commit(1, {0: 2})
    assert sizes([a, b], Limits(3)) == [2, 2]


def test_what_may_have_siblings_that_are_not_seen_is_left() -> None:
    a, b = Written("s/a"), Written("s/b")
    a.commit(1, {0: 1}, txn=1)
    a.commit(2, {0: 1}, txn=2)
    b.commit(2, {0: 1}, txn=2)
    start = {"s/a": BEGIN, "s/b": BEGIN}
    blind = admit(start, {"s/a": List(list(a.records)), "s/b": List([], ends=False)}, Limits())
    assert (blind.positions, blind.all) == (start, False)
    # s/b is read beyond what may be taken, which shows that the first commit has no sibling there.
    fronts = {"s/a": List(list(a.records)), "s/b": List(list(b.records), bound=0)}
    fronts["s/a"].bound = a.records[1].offset
    some = admit(start, fronts, Limits())
    assert some.positions["s/a"] == At(a.records[0].offset, {0: 1})
    assert some.positions["s/b"] == BEGIN


def test_a_micro_batch_has_one_epoch_if_the_limit_says_so() -> None:
    written = Written()
    written.commit(1, {0: 1, 1: 1}, txn=1)
    written.scale(2, sealed=[0])
    written.commit(3, {0: 1}, txn=2)
    written.scale(4, sealed=[1])  # it has nothing in this micro-batch
    written.commit(5, {1: 1}, txn=3)
    written.scale(6, sealed=[0, 1])
    written.scale(7, sealed=[0, 1])
    written.commit(8, {0: 2}, txn=4)
    assert sizes([written], Limits(by_epoch=True)) == [2, 2, 2]
    assert sizes([written], Limits()) == [6]
    # Epochs alone are not worth a micro-batch, and are met again.
    written.scale(9, sealed=[0, 1])
    end = drain([written], Limits(by_epoch=True))[-1]
    assert end["s/a"].after == written.records[-2].offset


@pytest.mark.parametrize("seed", range(30))
def test_whatever_is_written_is_read_once_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    histories = [Written(f"s/{name}") for name in "abc"[: chance.randint(1, 3)]]
    timestamp = txn = 0
    for _ in range(chance.randint(1, 40)):
        timestamp += 1
        if chance.random() < 0.2:
            chance.choice(histories).scale(timestamp, sealed=range(4))
            continue
        txn += 1
        for history in chance.sample(histories, chance.randint(1, len(histories))):
            counts = {
                p: chance.randint(1, 9) for p in chance.sample(range(4), chance.randint(1, 4))
            }
            history.commit(timestamp, counts, txn)
    limits = Limits(
        chance.choice([None, 1, 5, 20, 50]), chance.random() < 0.3, chance.random() < 0.5
    )
    places = drain(histories, limits)
    commits: dict[int, list[tuple[str, SegmentCommit, int]]] = {}
    for h in histories:
        for f in h.records:
            for part in f.record.segments if isinstance(f.record, CommitRecord) else ():
                commits.setdefault(f.record.timestamp, []).append(
                    (h.stream, part, f.record.stream_epoch)
                )
    left = {t: sum(part.count for _, part, _ in parts) for t, parts in commits.items()}
    for before, after in itertools.pairwise(places):
        touched, epochs, events = [], {h.stream: set[int]() for h in histories}, 0
        for t, parts in sorted(commits.items()):
            size = left[t]
            for stream, part, epoch in parts:
                low = max(part.first, before[stream].vector.get(part.partition, 0))
                high = min(part.end, after[stream].vector.get(part.partition, 0))
                if low < high:
                    left[t] -= high - low
                    events += high - low
                    epochs[stream].add(epoch)
            if left[t] < size:
                touched.append(t)
            if left[t]:
                # What is not taken to its end is the last one, alone, and too big; unless it may not be split.
                assert not any(left[later] < sum(p.count for _, p, _ in commits[later])
                               for later in commits if later > t)  # fmt: skip
                assert t not in touched or (touched == [t] and not limits.whole)
        assert events > 0
        if limits.events is not None:
            assert events <= limits.events or (limits.whole and len(touched) == 1)
        if limits.by_epoch:
            assert all(len(found) <= 1 for found in epochs.values())
    assert not any(left.values())


def test_positions_of_a_checkpoint() -> None:
    offset = to_json({"s/b": At(3, {10: 1, 2: 5}), "s/a": BEGIN}, new=True)
    assert json.dumps(offset) == (
        '{"new": true, "s/a": {"after": -1, "vector": {}}, '
        '"s/b": {"after": 3, "vector": {"2": 5, "10": 1}}}'
    )
    assert is_new(offset)
    assert not is_new(to_json(from_json(offset)))
    with pytest.raises(MalformedRecord, match="another query's"):
        from_json({"nyc.flights": {"0": 12}})


def test_over_control_partitions_it_waits_for_controllers_and_asks_them_only_for_what_is_new() -> (
    None
):
    options = {"bootstrap": "nowhere:9092", "stream": "s/a,t/b"}
    reader, at = StreamReader(Options(options), EVENT_SCHEMA), {"s/a": BEGIN, "t/b": BEGIN}
    ends = {"s/a": (1, 1), "t/b": (0, 0)}
    heads = Mock(side_effect=[DeadlineExceeded("no leader"), dict.fromkeys(at), dict.fromkeys(at)])
    reader._found = SimpleNamespace(apart=True, ends=lambda: dict(ends), heads=heads)  # type: ignore[assignment]
    assert [reader._admitted(at, ReadAllAvailable()) for _ in range(4)] == [at] * 4
    assert heads.call_count == 2, "it waits, it finds nothing, and asks no more"
    ends["t/b"] = (2, 2)
    assert reader._admitted(at, ReadAllAvailable()) == at
    assert heads.call_count == 3
