"""How receipts are weighed against the journal index."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.journal_index import segment_on, taken_runs
from anabranch.core.journal_runs import CRC_MODULUS, Run, StoredRun, extents_of
from anabranch.protocol.schemas import records as r
from tests.core.harness import World


def weigh(world: World, *receipts: r.Receipt) -> tuple[bool, str, int, int]:
    world.read_journals()
    w = world.index.weigh(world.state, world.id("A"), receipts)
    return w.covered, w.wrong.rpartition(": ")[2], w.committed, w.left_out


def test_weighing_nothing(opened: World) -> None:
    assert weigh(opened) == (True, "", 0, 0)
    opened.write("A", "w1", count=3)
    assert weigh(opened) == (True, "", 0, 3)


def test_weighing_several_writers_and_partitions(opened: World) -> None:
    for writer, count, partition in ("w1", 1, 0), ("w2", 2, 0), ("w1", 3, 0), ("w2", 4, 1):
        opened.write("A", writer, count=count, partition=partition)
    w1, w2 = (opened.receipt("A", w) for w in ("w1", "w2"))
    assert weigh(opened, w1) == (True, "", 4, 6)
    assert weigh(opened, w2) == (True, "", 6, 4)
    assert weigh(opened, w2, w1) == (True, "", 10, 0)
    size = opened.index.weigh(opened.state, opened.id("A"), [w1]).size
    assert size == 400


@pytest.mark.parametrize("loose", [0, 1, 4])
def test_bounds_may_be_loose(opened: World, loose: int) -> None:
    opened.write("A", "other", count=4)
    opened.write("A", "w1", count=2)
    opened.write("A", "other", count=4)
    assert weigh(opened, opened.receipt("A", "w1", loose=loose)) == (True, "", 2, 8)


def test_an_end_above_what_is_read_is_not_covered(opened: World) -> None:
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


def test_count_before_checksum(opened: World) -> None:
    opened.write("A", "w1", count=2)
    assert "count differs" in weigh(opened, opened.receipt("A", "w1", count=1, crc=1))[1]
    assert "checksum differs" in weigh(opened, opened.receipt("A", "w1", crc=1))[1]


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


def test_a_receipt_of_an_untouched_stream_is_wrong(opened: World) -> None:
    receipt = r.Receipt(opened.id("A"), 7, 1, True, (r.Extent("nyc/b", 0, 0, 0, 0, 0),))
    assert "never touched" in opened.index.weigh(opened.state, opened.id("A"), [receipt]).wrong


def test_an_empty_extent_weighs_nothing(opened: World) -> None:
    receipt = r.Receipt(opened.id("A"), 7, 1, True, (r.Extent("nyc/a", 0, 0, 0, 0, 0),))
    assert weigh(opened, receipt) == (True, "", 0, 0)


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


def test_layouts(world: World) -> None:
    segments = world.state.streams["nyc/a"].segments
    assert world.state.layout("nyc/a", 0) == segments
    assert world.state.layout("nyc/a", 1) == ()
    assert world.state.layout("nyc/none", 0) == ()
    assert segment_on(world.state, "nyc/a", 0, 1) == segments[1]
    assert segment_on(world.state, "nyc/a", 0, 2) is None
    assert segment_on(world.state, "nyc/a", 1, 1) is None
