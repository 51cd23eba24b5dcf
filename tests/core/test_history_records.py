"""History records: what follows from a round and from where its events landed."""

from __future__ import annotations

import pytest

from anabranch.core.history_records import DIRECTLY_BEFORE, NO_PREVIOUS, Tail, history_records
from anabranch.core.round import Landed, Message, NewEpoch, Part, Round, StreamCommit
from anabranch.protocol.schemas import records as r

TXN = [bytes([n]) * 16 for n in range(5)]


def commit(n: int, stream: str, *partitions: int, epoch: int = 0) -> StreamCommit:
    parts = tuple(Part(segment_id=epoch << 32 | p, partition=p) for p in partitions)
    return StreamCommit(TXN[n], stream, epoch, 100 + n, parts)


def opening(stream: str, *starts: int) -> NewEpoch:
    segments = tuple(r.SegmentRange(p, p, p + 1, p) for p in range(len(starts)))
    return NewEpoch(stream, 0, 0, 50, segments, starts=dict(enumerate(starts)))


def vector(record: r.EpochRecord | r.CommitRecord) -> dict[int, int]:
    assert list(record.vector) == sorted(record.vector, key=lambda p: p.partition)
    return {position.partition: position.offset for position in record.vector}


def test_a_round_without_merges_has_no_history() -> None:
    assert history_records(Round(), {}, {}) == {}


def test_a_commit_is_one_record_of_each_stream() -> None:
    tail = Tail(vector={0: 10, 1: 20, 2: 30}, last=7)
    landed = {(0, 0): Landed(11, 14, 3), (0, 1): Landed(30, 32, 2)}
    round_ = Round(history=[commit(1, "s/a", 0, 2)])
    assert history_records(round_, landed, {"s/a": tail}) == {
        "s/a": [
            r.CommitRecord(
                txn_id=TXN[1],
                stream_epoch=0,
                timestamp=101,
                segments=(r.SegmentCommit(0, 0, 11, 14, 3), r.SegmentCommit(2, 2, 30, 32, 2)),
                vector=(r.Position(0, 14), r.Position(1, 20), r.Position(2, 32)),
                previous=7,
            )
        ]
    }
    assert tail.vector == {0: 14, 1: 20, 2: 32}, "the next round goes on from there"
    assert tail.last == 7, "its offset is not known yet"


def test_several_commits_of_a_stream_in_one_round() -> None:
    """Each names the one before: by its offset, or as directly before it."""
    tail = Tail(vector={0: 0, 1: 0}, last=3)
    round_ = Round(history=[commit(n, "s/a", n % 2) for n in range(4)])
    landed = {(n, 0): Landed(10 * n, 10 * n + 5, 5) for n in range(4)}
    records = history_records(round_, landed, {"s/a": tail})["s/a"]
    assert [x.previous for x in records] == [3, *[DIRECTLY_BEFORE] * 3]
    assert [x.timestamp for x in records] == [100, 101, 102, 103]
    assert [vector(x) for x in records] == [
        {0: 5, 1: 0},
        {0: 5, 1: 15},
        {0: 25, 1: 15},
        {0: 25, 1: 35},
    ]


def test_several_streams_go_each_their_own_way() -> None:
    tails = {"s/a": Tail({0: 1}, last=4), "s/b": Tail({0: 2, 1: 3}, last=NO_PREVIOUS)}
    round_ = Round(history=[commit(1, "s/b", 1), commit(1, "s/a", 0), commit(2, "s/b", 0)])
    landed = {(0, 0): Landed(3, 4, 1), (1, 0): Landed(1, 9, 8), (2, 0): Landed(2, 3, 1)}
    out = history_records(round_, landed, tails)
    assert [(x.previous, vector(x)) for x in out["s/a"]] == [(4, {0: 9})]
    assert [(x.previous, vector(x)) for x in out["s/b"]] == [
        (NO_PREVIOUS, {0: 2, 1: 4}),
        (DIRECTLY_BEFORE, {0: 3, 1: 4}),
    ]


def test_a_new_stream_and_its_first_commit() -> None:
    tail = Tail()
    round_ = Round(history=[opening("s/a", 5, 6), commit(1, "s/a", 1)])
    epoch, first = history_records(round_, {(1, 0): Landed(6, 8, 2)}, {"s/a": tail})["s/a"]
    assert isinstance(epoch, r.EpochRecord)
    assert isinstance(first, r.CommitRecord)
    assert (epoch.previous, vector(epoch)) == (NO_PREVIOUS, {0: 5, 1: 6})
    starts = [s.start_offset for s in epoch.segments]
    assert (epoch.timestamp, starts) == (50, [5, 6])
    assert (first.previous, vector(first)) == (DIRECTLY_BEFORE, {0: 5, 1: 8})


def test_a_later_epoch_keeps_the_ends_that_are_known() -> None:
    tail = Tail(vector={0: 9}, last=2)
    (epoch,) = history_records(Round(history=[opening("s/a", 4, 6)]), {}, {"s/a": tail})["s/a"]
    assert isinstance(epoch, r.EpochRecord)
    assert (epoch.previous, vector(epoch)) == (2, {0: 9, 1: 6})
    assert [s.start_offset for s in epoch.segments] == [9, 6], "behind what came after the look"


def test_a_commit_that_wrote_nothing_more_than_its_place() -> None:
    """Positions are per partition of the stream, ids per segment."""
    tail = Tail(vector={0: 0})
    round_ = Round(history=[commit(1, "s/a", 0, epoch=3)])
    (record,) = history_records(round_, {(0, 0): Landed(0, 1, 1)}, {"s/a": tail})["s/a"]
    assert isinstance(record, r.CommitRecord)
    assert record.stream_epoch == 3
    assert record.segments == (r.SegmentCommit(3 << 32, 0, 0, 1, 1),)


@pytest.mark.parametrize(
    ("round_", "empty"),
    [
        (Round(), True),
        (Round(rows={b"k": None}), False),
        (Round(replies=[None]), False),  # type: ignore[list-item]
        (Round(messages=[Message(1, None, None)]), False),
    ],
    ids=["nothing", "a row", "a reply", "a command"],
)
def test_when_a_round_is_empty(round_: Round, empty: bool) -> None:
    assert round_.empty is empty


def test_a_round_names_the_streams_with_new_history() -> None:
    round_ = Round(history=[opening("s/a", 0), commit(1, "s/b", 0), commit(2, "s/b", 0)])
    assert round_.streams == ["s/a", "s/b"]
