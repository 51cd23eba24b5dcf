"""The journal index: what it takes in or rejects, how receipts are weighed against it, how much it holds."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.journal_index import (
    REASONS,
    JournalIndex,
    Read,
    Uncommitted,
    position_key,
    segment_on,
    taken_runs,
)
from anabranch.core.journal_runs import CRC_MODULUS, Run, StoredRun, extents_of
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.cleaning import PLACE
from tests.core.harness import World, index_rows, nyc

HALF = SPACE // 2


def rejected(world: World, stream: str = "nyc/a") -> dict[str, int]:
    return dict(world.index.rejected[stream])


# -- verdicts ----------------------------------------------------------------------------------

# What is written to nyc/a while A is open and touched it, B is open, C aborted, D committed.
VERDICTS: dict[str, tuple[dict[str, Any], str]] = {
    "a run of a touched stream": ({}, ""),
    "keys in the segment": ({"keys": (0, HALF - 1)}, ""),
    "one key, the lowest of partition 1": ({"partition": 1, "keys": (HALF, HALF)}, ""),
    "up to the highest": ({"partition": 1, "keys": (HALF, SPACE - 1)}, ""),
    "a transaction that never began": ({"label": "E"}, "unknown_transaction"),
    "one that did not touch it": ({"label": "B"}, "untouched_stream"),
    "an aborted one": ({"label": "C"}, "late"),
    "a committed one": ({"label": "D"}, "late"),
    "another epoch": ({"epoch": 1}, "wrong_stream_epoch"),
    "an epoch below": ({"epoch": -1}, "wrong_stream_epoch"),
    "a key above the segment": ({"keys": (0, HALF)}, "wrong_segment"),
    "a key below the segment": ({"partition": 1, "keys": (HALF - 1, HALF)}, "wrong_segment"),
    "a partition without segment": ({"partition": 2}, "wrong_segment"),
    "no keys on a partition without segment": ({"partition": 3}, "wrong_segment"),
}


@pytest.mark.parametrize(("given", "reason"), VERDICTS.values(), ids=VERDICTS.keys())
def test_a_record_that_belongs_to_no_open_commit_is_rejected_with_a_reason(
    opened: World, given: dict[str, Any], reason: str
) -> None:
    for label in "BCD":
        opened.begin(label)
    opened.abort("C")
    opened.commit("D")
    opened.turn()
    opened.id("E")
    label = given.get("label", "A")
    rest = {name: v for name, v in given.items() if name != "label"}
    run = opened.write(label, "w1", count=3, **rest)
    verdict = opened.index.verdict(opened.state, "nyc/a", given.get("partition", 0), run)
    assert verdict == reason
    opened.turn()
    assert rejected(opened) == ({reason: 3} if reason else {})
    kept = opened.index.runs(opened.id(label), "nyc/a", given.get("partition", 0))
    assert [run.records for run in kept] == ([] if reason else [3])
    counted = {"A": 3, "B": 3}.get(label, 0) if reason else 0
    assert opened.index.rejected_of(opened.id(label)) == counted, "of open ones only"


def test_every_reason_has_a_name() -> None:
    assert {reason for _, reason in VERDICTS.values()} - {""} < set(REASONS)
    assert len(set(REASONS)) == len(REASONS)


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("inside", ""),
        ("the rest of it", ""),
        ("straddles the end", "late"),
        ("straddles the begin", "late"),
        ("after", "late"),
        ("another writer", "late"),
        ("another partition", "late"),
    ],
)
def test_once_it_is_decided_only_what_is_taken_is_no_longer_late(
    opened: World, what: str, reason: str
) -> None:
    """Met when a new leader reads again what a former one indexed."""
    opened.write("A", "other", count=2)
    run = opened.write("A", "w1", count=4)
    opened.commit("A", own=[opened.receipt("A", "w1")])
    assert opened.row("A").state == "COMMIT_IN_PROGRESS"
    run, partition = {
        "inside": (run, 0),
        "the rest of it": (run._replace(first=3, records=3), 0),
        "straddles the end": (run._replace(end=7, records=5), 0),
        "straddles the begin": (run._replace(first=1, records=5), 0),
        "after": (run._replace(first=6, end=8, records=2), 0),
        "another writer": (run._replace(writer=opened.writer("other")), 0),
        "another partition": (run, 1),
    }[what]
    assert opened.index.verdict(opened.state, "nyc/a", partition, run) == reason


def test_a_commit_that_waits_rejects_nothing_yet(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")], wait_ms=1_000)
    run = opened.write("A", "w2")
    assert opened.index.verdict(opened.state, "nyc/a", 0, run) == ""


# -- what it keeps -----------------------------------------------------------------------------


def test_a_run_comes_back_as_it_was(opened: World) -> None:
    highest = CRC_MODULUS - 1
    for n, writer in enumerate((2, 1, -1, (1 << 63) - 1, -(1 << 63))):
        run = Run(
            opened.id("A"), writer, 0, n * 5, n * 5 + 5, 5, highest, -1, -1, 1 << 40, 9, n > 1
        )
        changes = opened.index.add(opened.state, "nyc/a", 1, [run], run.end)
        opened.table.write(changes)
    stored = opened.index.runs(opened.id("A"), "nyc/a", 1)
    assert sorted(stored, key=lambda run: run.first) == [
        StoredRun(writer, n * 5, n * 5 + 5, 5, highest, 1 << 40, 9, n > 1)
        for n, writer in enumerate((2, 1, -1, (1 << 63) - 1, -(1 << 63)))
    ]
    assert [run.writer for run in stored] == sorted(run.writer for run in stored), "by writer"
    assert opened.index.runs(opened.id("A"), "nyc/a", 0) == []


def test_the_keys_of_a_run_and_of_a_position(opened: World) -> None:
    opened.write("A", "w1", count=3)
    opened.write("A", "w2", count=2)
    opened.turn()
    assert opened.writer("w2") == -2
    place = b"nyc/a" + bytes((0, 0, 0, 0, 0))
    assert [key for key in sorted(opened.table.rows) if key[:1] in (k.INDEX, k.POSITION)] == [
        b"i" + place + opened.id("A") + bytes.fromhex("7ffffffffffffffe 0000000000000003"),
        b"i" + place + opened.id("A") + bytes.fromhex("8000000000000001 0000000000000000"),
        b"pjnyc/a" + bytes(4),
    ]


def test_runs_of_unlike_places_do_not_mix() -> None:
    world = nyc("nyc/a", "nyc/ab")
    for label in "AB":
        world.begin(label)
        world.touch(label, "nyc/a")
        world.touch(label, "nyc/ab")
    places = [
        (label, stream, partition)
        for label in "AB"
        for stream in ("nyc/a", "nyc/ab")
        for partition in (0, 1)
    ]
    for n, (label, stream, partition) in enumerate(places, start=1):
        world.write(label, "w1", stream, n, partition=partition)
    world.turn()
    for n, (label, stream, partition) in enumerate(places, start=1):
        assert [x.records for x in world.index.runs(world.id(label), stream, partition)] == [n]


def test_positions_are_kept_with_the_rows(opened: World) -> None:
    opened.write("A", "w1", count=3)
    opened.write("E", "w1", count=4, partition=1)
    opened.turn()
    assert opened.table.rows[position_key("nyc/a", 0)] == (3).to_bytes(8, "big")
    index = JournalIndex(opened.table)
    assert index.positions == {}
    index.positions["gone", 0] = 1
    index.load()
    assert index.positions == {("nyc/a", 0): 3, ("nyc/a", 1): 4}
    assert index.runs(opened.id("A"), "nyc/a", 0) == opened.index.runs(opened.id("A"), "nyc/a", 0)


def test_a_position_rises_even_if_nothing_is_kept(opened: World) -> None:
    changes = opened.index.add(opened.state, "nyc/a", 1, [], 17)
    assert changes == {position_key("nyc/a", 1): (17).to_bytes(8, "big")}
    assert opened.index.positions["nyc/a", 1] == 17


def test_rejected_records_of_an_open_transaction_add_up(opened: World) -> None:
    opened.write("A", "w1", count=1, epoch=1)
    opened.write("A", "w1", count=1, epoch=1, partition=1)
    opened.write("A", "w1", count=3, epoch=1)
    opened.turn()
    opened.write("A", "w1", count=4, epoch=1, partition=1)
    opened.turn()
    assert opened.index.rejected_of(opened.id("A")) == 9
    assert opened.abort("A") == "A ABORTED, 9 rejected (aborted by a client)"
    assert index_rows(opened) == {}


def test_what_a_former_leader_counted_is_not_counted_again(opened: World) -> None:
    run = opened.write("A", "w1", count=2, epoch=1)
    changes = opened.index.add(opened.state, "nyc/a", 0, [run], run.end, known_until=run.end)
    assert rejected(opened) == {}
    place = b"nyc/a" + bytes((0, 0, 0, 0, 0)) + run.first.to_bytes(8, "big")
    key = k.REJECTED + opened.id("A") + place
    assert changes[key] == (2).to_bytes(8, "big"), "but for its outcome"


def test_records_of_no_transaction_are_counted(opened: World) -> None:
    opened.index.reject("nyc/a", 0, "plain_write", 2)
    opened.index.reject("nyc/a", 0, "plain_write", 3)
    opened.index.reject("nyc/a", 0, "malformed_batch", 1)
    opened.describe(stream="nyc/a")
    assert opened.result.streams[0].rejected == {"plain_write": 5, "malformed_batch": 1}


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_the_end_forgets_its_runs_and_only_its(opened: World, end: str) -> None:
    opened.create("nyc/b")
    opened.created("nyc/b", 0, 0)
    opened.touch("A", "nyc/b")
    opened.begin("B")
    opened.touch("B")
    opened.write("B", "w9", epoch=1)
    opened.write("B", "w9")
    opened.turn()
    others = index_rows(opened)
    for stream in ("nyc/a", "nyc/b"):
        for partition in (0, 1):
            for writer in ("w1", "w2"):
                opened.write("A", writer, stream, partition=partition)
    opened.write("A", "w1", epoch=1)
    opened.turn()
    assert len(index_rows(opened)) == len(others) + 9
    if end == "abort":
        opened.abort("A")
    else:
        opened.commit("A")
        opened.turn()
    assert index_rows(opened) == others


def test_a_sweep_forgets_what_ended_while_the_table_was_not_kept_up(opened: World) -> None:
    for label in "BCD":
        opened.begin(label)
        opened.touch(label)
    for label in "ABC":
        opened.write(label, f"w{label}", partition=1)
        opened.write(label, f"w{label}", epoch=1)
    opened.turn()
    table = dict(opened.table.rows)
    assert opened.index.sweep(opened.state) == {}, "all are open"
    opened.abort("A")
    opened.commit("B", own=())
    opened.turn()
    swept = JournalIndex(type(opened.table)(table)).sweep(opened.state)
    gone = {key for key in table if key[:1] in (k.INDEX, k.REJECTED)}
    gone = {key for key in gone if opened.id("C") not in key}
    assert swept == dict.fromkeys(gone)
    assert len(swept) == 4


# -- again -------------------------------------------------------------------------------------

batches = st.lists(
    st.tuples(
        st.sampled_from("AABC"),
        st.sampled_from(("w1", "w2")),
        st.sampled_from((0, 1, 2)),
        st.integers(1, 3),
        st.sampled_from((0, 0, 0, 1)),
    ),
    max_size=20,
)


@settings(max_examples=some(40), deadline=None, print_blob=True)
@given(batches, st.lists(st.integers(0, 60), max_size=4))
def test_built_anew_from_the_journals_it_is_the_same(
    written: list[tuple[str, str, int, int, int]], cuts: list[int]
) -> None:
    """However the journals are cut into reads; with an index that was thrown away, or not."""
    world = nyc()
    for label in "AB":
        world.begin(label)
        world.touch(label)
    world.id("C")
    for label, writer, partition, count, epoch in written:
        world.write(label, writer, count=count, partition=partition, epoch=epoch)
    world.read_journals()
    before, counts = index_rows(world), rejected(world)
    world.lead(keep_table=False)
    assert index_rows(world) == {}
    for (stream, partition), there in world.journals.items():
        bounds = sorted({c for c in cuts if c <= len(there)} | {0, len(there)})
        for low, high in pairwise(bounds):
            runs = [batch.run for batch in there[low:high]]
            world.table.write(world.index.add(world.state, stream, partition, runs, runs[-1].end))
    assert index_rows(world) == before
    assert rejected(world) == counts


def weigh(world: World, *receipts: r.Receipt) -> tuple[bool, str, int, int]:
    world.read_journals()
    w = world.index.weigh(world.state, world.id("A"), receipts)
    return w.covered, w.wrong.rpartition(": ")[2], w.committed, w.left_out


def test_weighing_several_writers_and_partitions(opened: World) -> None:
    for writer, count, partition in ("w1", 1, 0), ("w2", 2, 0), ("w1", 3, 0), ("w2", 4, 1):
        opened.write("A", writer, count=count, partition=partition)
    w1, w2 = (opened.receipt("A", w) for w in ("w1", "w2"))
    assert weigh(opened) == (True, "", 0, 10)
    assert weigh(opened, w1) == (True, "", 4, 6)
    assert weigh(opened, w2) == (True, "", 6, 4)
    assert weigh(opened, w2, w1) == (True, "", 10, 0)
    size = opened.index.weigh(opened.state, opened.id("A"), [w1]).size
    assert size == 400


def test_an_end_that_is_not_read_yet_is_not_covered(opened: World) -> None:
    opened.write("A", "w1", count=2)
    receipt = opened.receipt("A", "w1", loose=1)
    assert weigh(opened, receipt)[0] is False
    opened.write("A", "other")
    assert weigh(opened, receipt) == (True, "", 2, 1)


def test_covered_means_every_partition(opened: World) -> None:
    extents = tuple(r.Extent("nyc/a", p, 0, 1, 1, 0) for p in (0, 1))
    receipt = r.Receipt(opened.id("A"), 1, 1, True, extents)
    for positions, covered in (
        ({}, False),
        ({0: 1}, False),
        ({0: 1, 1: 1}, True),
        ({0: 5, 1: 0}, False),
    ):
        opened.index.positions = {("nyc/a", p): at for p, at in positions.items()}
        assert opened.index.covers([receipt]) is covered


def test_a_run_that_straddles_a_bound_is_not_taken(opened: World) -> None:
    """A receipt ends between batches; if not, the counts say so."""
    opened.write("A", "w1", count=2)
    opened.write("A", "w1", count=3)
    whole = opened.receipt("A", "w1")
    (extent,) = whole.extents
    bounds: list[dict[str, Any]] = [{"end": 4}, {"first": 1}]
    for bound in bounds:
        cut = replace(whole, extents=(replace(extent, **bound),))
        shows = 2 if "end" in bound else 3
        assert weigh(opened, cut) == (
            True,
            f"the receipt says 5 records, the journal shows {shows} (count differs)",
            shows,
            5 - shows,
        )


def test_the_sum_of_checksums_wraps(opened: World) -> None:
    for first in (0, 1):
        run = Run(
            opened.id("A"), 7, 0, first, first + 1, 1, CRC_MODULUS - 2, -1, -1, first, 9, True
        )
        changes = opened.index.add(opened.state, "nyc/a", 0, [run], first + 1)
        opened.table.write(changes)
    receipt = r.Receipt(
        opened.id("A"), 7, 1, True, (r.Extent("nyc/a", 0, 0, 2, 2, CRC_MODULUS - 4),)
    )
    assert weigh(opened, receipt) == (True, "", 2, 0)


@pytest.mark.parametrize(("stream", "wrong"), [("nyc/a", ""), ("nyc/b", "never touched")])
def test_an_empty_extent_weighs_nothing(opened: World, stream: str, wrong: str) -> None:
    receipt = r.Receipt(opened.id("A"), 7, 1, True, (r.Extent(stream, 0, 0, 0, 0, 0),))
    found = opened.index.weigh(opened.state, opened.id("A"), [receipt])
    assert wrong in found.wrong
    assert bool(found.wrong) == bool(wrong)
    assert (found.committed, found.left_out) == (0, 0)


# -- the small parts ---------------------------------------------------------------------------


def stored(writer: int, first: int, end: int) -> StoredRun:
    return StoredRun(writer, first, end, end - first, 0, first, 100, True)


def test_taken_runs_stand_in_journal_order() -> None:
    runs = [stored(1, 8, 9), stored(1, 0, 2), stored(2, 2, 5), stored(3, 5, 6), stored(2, 6, 8)]
    extents = {1: r.Extent("s/a", 0, 0, 9, 3, 0), 2: r.Extent("s/a", 0, 2, 8, 5, 0)}
    assert [(run.writer, run.first) for run in taken_runs(runs, extents)] == [
        (1, 0),
        (2, 2),
        (2, 6),
        (1, 8),
    ]


@pytest.mark.parametrize(
    ("first", "end", "taken"),
    [(3, 6, True), (0, 9, True), (4, 6, False), (3, 5, False), (6, 9, False), (0, 3, False)],
)
def test_a_run_is_taken_whole_or_not(first: int, end: int, taken: bool) -> None:
    extents = {1: r.Extent("s/a", 0, first, end, 3, 0)}
    assert taken_runs([stored(1, 3, 6)], extents) == ([stored(1, 3, 6)] if taken else [])


def test_extents_by_writer_stream_and_partition() -> None:
    a, b, c = (r.Extent(s, p, 0, 1, 1, 0) for s, p in (("s/a", 0), ("s/a", 1), ("s/b", 0)))
    txn = bytes(16)
    receipts = [r.Receipt(txn, 1, 1, True, (a, b)), r.Receipt(txn, 2, 1, True, (a, c))]
    assert extents_of(receipts) == {
        (1, "s/a", 0): a,
        (1, "s/a", 1): b,
        (2, "s/a", 0): a,
        (2, "s/b", 0): c,
    }


def test_the_layout_of_an_epoch_names_the_segment_of_each_partition(world: World) -> None:
    segments = world.state.streams["nyc/a"].segments
    assert world.state.layout("nyc/a", 0) == segments
    assert world.state.layout("nyc/a", 1) == ()
    assert world.state.layout("nyc/none", 0) == ()
    assert segment_on(world.state, "nyc/a", 0, 1) == segments[1]
    assert segment_on(world.state, "nyc/a", 0, 2) is None
    assert segment_on(world.state, "nyc/a", 1, 1) is None


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 9_000)), max_size=60))
def test_bytes_between_offsets(batches: list[tuple[int, int]]) -> None:
    read, at, ends, total = Read(7), 7, [7], [0]
    for count, size in batches:
        at += count
        read.add(at, size)
        ends.append(at)
        total.append(total[-1] + size)
    assert read.between(7, at) == total[-1]
    assert read.between(at, 7) == 0
    for i, low_end in enumerate(ends):
        for j in range(i, len(ends)):
            exact = total[j] - total[i]
            assert abs(read.between(low_end, ends[j]) - exact) <= 2 * (4 << 10) + 9_000
    read.forget(ends[len(ends) // 2])
    later = ends[len(ends) // 2 :]
    for place in later:
        assert read.between(place, at) <= total[-1]


def test_read_stays_small() -> None:
    read = Read(0)
    for n in range(1, 50_000):
        read.add(n, 100_000)
    assert len(read._ends) < 25_000
    assert read.between(25_000, 49_999) == pytest.approx(25_000 * 100_000, rel=0.01)


def test_staged_adds_up() -> None:
    uncommitted = Uncommitted()
    uncommitted.add(b"A", PLACE, 5, 10)
    uncommitted.add(b"A", PLACE, 3, 1)
    uncommitted.add(b"B", PLACE, 9, 100)
    assert uncommitted.stays[b"A"][PLACE].low == 3
    assert (uncommitted.total, uncommitted.by_stream["nyc/a"]) == (111, 111)
    uncommitted.ended([b"A", b"never seen"])
    assert (uncommitted.total, uncommitted.by_stream["nyc/a"]) == (100, 100)
