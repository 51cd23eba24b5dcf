"""How far journals may be cut, what has to move for it, and that nothing is cut that is needed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from unittest import mock

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.decisions import cleanup
from anabranch.core.decisions.cleanup import clean_up, runs_to_move
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.journal_index import JournalIndex
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.cleaning import PLACE, begin, crowd, end, low, opened, rebuild, relocate
from tests.core.harness import World, index_rows


def test_a_journal_is_cut_to_what_is_read_and_not_open() -> None:
    world = opened("A", "B", "C")
    for label, count in (("A", 3), ("B", 4), ("C", 5)):
        world.write(label, f"w{label}", count=count)
    assert low(world) == 0
    end(world, "A")
    assert low(world) == 3
    world.abort("B")
    assert low(world) == 7, "an abort frees as a commit does"
    world.held = True
    world.write("A", "late", count=4)
    world.held = False
    end(world, "C")
    assert low(world) == world.ends[PLACE] == 16
    world.held = True
    world.write("A", "late", count=4)
    assert low(world) == 16, "what is not read stays"


def test_what_a_decided_commit_leaves_out_stays_until_it_ends() -> None:
    world = opened("A")
    world.write("A", "left out", count=3)
    world.write("A", "w1", count=4)
    world.commit("A", own=[world.receipt("A", "w1")])
    assert world.row("A").state == "COMMIT_IN_PROGRESS"
    assert world.state.low_water == {}


def test_plain_writes_stay_until_they_are_committed() -> None:
    world = opened("A")
    world.write("A", "w1", count=3)
    end(world, "A")
    assert low(world) == 3
    world.write_plainly(count=5)
    run = world.write("A", "w1", count=1)
    world.read_journals()
    turn = world.new_turn()
    assert world.index.plain_from(turn.state, *PLACE) == 3
    assert low(world) == run.end, "committed by then"


def test_plain_writes_that_wait_for_a_later_round_stay() -> None:
    world = opened(round_bytes=100)
    for _ in range(3):
        world.write_plainly(count=5)
    assert [low(world) for _ in range(3)] == [5, 10, 15]


@pytest.mark.parametrize(
    ("records", "size", "changes", "cut"),
    [
        (10, 100, {"clean_records": 10, "clean_bytes": 1 << 30}, True),
        (9, 100, {"clean_records": 10, "clean_bytes": 1 << 30}, False),
        (2, 1_000, {"clean_records": 100, "clean_bytes": 1_000}, True),
        (2, 999, {"clean_records": 100, "clean_bytes": 1_000}, False),
    ],
)
def test_a_journal_is_truncated_once_enough_records_or_bytes_are_unneeded(
    records: int, size: int, changes: dict[str, int], cut: bool
) -> None:
    world = opened("A", **changes)
    world.write("A", "w1", count=records, size=size)
    end(world, "A")
    assert (low(world) == records) is cut


def test_little_goes_too_after_a_while() -> None:
    world = opened("A", clean_records=100, clean_bytes=1 << 30, clean_after_ms=60_000)
    world.write("A", "w1", count=2)
    end(world, "A")
    assert low(world) == 0
    world.wait(59_000)
    assert low(world) == 0
    world.wait(1_000)
    assert low(world) == 2
    world.wait(60_000)
    assert len([row for row in world.log if k.low_water_key(*PLACE) in dict(row)]) == 1, "once"


def test_journals_are_checked_for_truncation_once_in_clean_ms() -> None:
    world = opened("A", "B", clean_ms=10_000)
    world.wait(10_000)
    world.write("A", "w1")
    end(world, "A")
    world.write("B", "w2")
    end(world, "B")
    assert low(world) == 0
    world.wait(10_000)
    assert low(world) == 2


def test_a_round_that_comes_to_nothing_cuts_nothing() -> None:
    """Nor does the index forget what its transactions have."""
    world = opened("A")
    world.write("A", "w1", count=3)
    world.turn()
    turn = world.new_turn()
    abort_txn(turn, world.id("A"), "tried")
    clean_up(turn)
    assert turn.cut == {PLACE: 3}
    world.state = type(world.state)(world.table)  # what was not written is forgotten
    assert low(world) == 0
    end(world, "A")
    assert world.row("A").committed == 3


def test_rejected_records_below_are_counted_in_the_row() -> None:
    world = opened("A")
    for _ in range(3):
        world.write("A", "w1", count=2, epoch=1)
    kept = world.write("A", "w2", count=1)
    world.write("A", "w1", count=4, epoch=1)
    assert low(world) == kept.first == 6
    assert world.row("A").rejected == 6
    for _ in range(2):
        rebuild(world)
        world.turn()
        end_of = world.index.rejected_of(world.id("A"))
        assert (world.row("A").rejected, end_of) == (6, 4)
    assert world.abort("A") == "A ABORTED, 10 rejected (aborted by a client)"
    assert index_rows(world) == {}


def test_a_table_that_lags_continues_at_the_low_water() -> None:
    world = opened("A", "B")
    world.write("B", "w1", count=2, epoch=1)
    world.write("A", "w1", count=3)
    world.turn()
    table = dict(world.table.rows)
    end(world, "A")
    kept = world.write("B", "w2", count=4)
    assert low(world) == kept.first
    now = index_rows(world)
    stale = type(world.table)(table)
    for rows in world.log:
        world.state.__class__(stale)
        for key, value in rows:
            state = type(world.state)(stale)
            state.fold_row(key, value)
            state.rederive()
            stale.write(state.take_changes())
    world.table = stale
    world.state = type(world.state)(stale)
    world.index = JournalIndex(stale)
    world.index.load()
    begin(world)
    world.read_journals()
    assert index_rows(world) == now


def test_uncommitted_bytes_are_counted_by_stream() -> None:
    world = opened("A", "B")
    world.create("nyc/b")
    world.created("nyc/b", 0, 0)
    world.touch("A", "nyc/b")
    world.write("A", "w1", size=70)
    world.write("A", "w1", "nyc/b", size=5, partition=1)
    world.write("B", "w2", size=200)
    world.write("B", "w2", size=1_000, epoch=1)  # rejected
    world.turn()
    world.describe()
    told = {s.stream: s.uncommitted_bytes for s in world.result.streams}
    assert told == {"nyc/a": 270, "nyc/b": 5}
    assert world.index.uncommitted.total == 275
    world.abort("B")
    assert world.index.uncommitted.total == 75


@pytest.mark.parametrize("keep_table", [True, False])
def test_too_much_is_refused_until_some_ends(keep_table: bool) -> None:
    world = opened("A", "B", max_uncommitted_bytes=1_000)
    world.begin("C")
    world.write("A", "w1", size=400)
    world.write("B", "w2", size=599)
    world.turn()
    assert world.begin("D") == "begun D"
    world.write("B", "w2", size=1)
    world.lead(keep_table=keep_table)
    world.turn()
    assert world.begin("E") == "TooManyUncommittedBytes"
    assert "1,000 bytes" in world.message
    assert world.touch("C") == "TooManyUncommittedBytes"
    assert world.begin("D") == "begun D", "again"
    assert world.touch("A").startswith("touched"), "again"
    assert world.register("A", world.receipt("A", "w1")) == "registered 1"
    world.abort("A")
    assert world.begin("E") == "begun E"
    assert world.touch("C").startswith("touched")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three runs are moved in one round."""
    monkeypatch.setattr(cleanup, "MAX_MOVED", 3)


def test_no_more_runs_are_moved_at_once_than_a_chunk_has_bytes() -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(4):
        crowd(world)
    world.settings = dataclasses.replace(world.settings, chunk_bytes=250)
    assert len(runs_to_move(world.new_turn(), PLACE)) == 3


def test_an_old_one_that_keeps_much_is_moved() -> None:
    world = opened("A", move_bytes=25_000)
    runs = [world.write("A", "w1", count=2), world.write("A", "w2", count=3)]
    for _ in range(2):
        crowd(world)
    assert list(world.memory.cleaning.crowded) == []
    crowd(world)
    assert list(world.memory.cleaning.crowded) == [PLACE]
    until = world.ends[PLACE]
    assert relocate(world) == 2
    stored = sorted(world.index.runs(world.id("A"), *PLACE), key=lambda run: run.first)
    assert [(x.first, x.end, x.crc_sum) for x in stored] == [
        (x.first, x.end, x.crc_sum) for x in runs
    ]
    assert [x.at for x in stored] == [until, until + 2]
    assert low(world) == until, "never above what it needs"
    assert low(world) == until
    end(world, "A")
    assert world.row("A").committed == 5
    assert low(world) == world.ends[PLACE]
    assert not [key for key in world.table.rows if key[17:18] == bytes((k.Entry.MOVED,))]


def test_the_next_chunk_follows_and_what_was_moved_is_not_moved_again(
    few: None,
) -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(4):
        crowd(world)
    moves: list[int] = []
    while (count := relocate(world)) and len(moves) < 9:
        moves.append(count)
        world.wait(300)
    assert moves == [3, 2]
    assert len(world.state.open[world.id("A")].moved) == 2


def test_one_that_is_moved_again_is_at_one_place(few: None) -> None:
    world = opened("A", move_bytes=25_000)
    for _ in range(5):
        world.write("A", "w1")
    for _ in range(3):
        for _ in range(4):
            crowd(world)
        while relocate(world):
            world.wait(300)
    rows = world.state.open[world.id("A")].moved.values()
    firsts = [run.first for row in rows for run in row.runs]
    assert sorted(firsts) == [0, 1, 2, 3, 4]
    end(world, "A")
    assert world.row("A").committed == 5


def decided(world: World) -> None:
    world.commit("A", own=[world.receipt("A", "w1")])


def carried(world: World) -> None:
    """Its chunks are put aside, and its carrier waits for one of its streams."""
    world.settings = dataclasses.replace(world.settings, chunk_bytes=10)
    decided(world)
    for stream in (PLACE[0], "nyc/b"):
        turn = world.new_turn()
        partitions_added(turn, stream, 4)
        world.close(turn)
    world.wait(300)
    world.settings = dataclasses.replace(world.settings, chunk_bytes=1 << 20)


def told_to_commit(world: World) -> None:
    prepare = r.Prepare(b"", b"1")
    own = [world.receipt("A", "w1")]
    world.ask("prepare", dataclasses.replace(world.committing("A", own=own), prepare=prepare))
    world.wait(1)
    assert world.row("A").state == "PREPARED"
    world.ask("commit", world.committing("A"))


@pytest.mark.parametrize(
    ("ends", "state"),
    [
        (decided, "COMMIT_IN_PROGRESS"),
        (carried, "FINALIZE_IN_PROGRESS"),
        (told_to_commit, "FINALIZE_IN_PROGRESS"),
    ],
)
def test_who_waits_for_one_stream_keeps_no_journal_of_another(
    ends: Callable[[World], None], state: str
) -> None:
    """Only what a carrier is at stays, with what lies behind it."""
    world = opened("A", "B", move_bytes=25_000)
    world.create("nyc/b", 2)
    world.created("nyc/b", 0, 0)
    world.touch("A", "nyc/b")
    world.write("A", "w1")
    world.write("A", "w1", "nyc/b")
    world.write("B", "w2")
    ends(world)
    world.memory.waiting = {"nyc/b": "a partition has no leader"}
    for _ in range(30):
        crowd(world)
        while relocate(world):
            pass
    assert world.row("A").state == state
    assert world.ends[PLACE] - low(world) < 20
    world.memory.staging = {world.id("A")}
    for _ in range(8):
        crowd(world)
    assert runs_to_move(world.new_turn(), PLACE) == []
    if state == "COMMIT_IN_PROGRESS" or ends is told_to_commit:
        world.memory.waiting, world.memory.staging = {}, ()
        world.wait(2_000)
        assert world.row("A").committed == 2
        assert world.row("A").state == "COMMITTED"


def test_no_more_runs_are_moved_than_the_limit_needs() -> None:
    world = opened("A", "B", move_bytes=25_000)
    world.write("A", "w1")
    for _ in range(3):
        crowd(world)
    world.write("B", "w2")
    world.write("A", "w1")
    world.turn()
    assert [one.run.first for one in runs_to_move(world.new_turn(), PLACE)] == [0]


def test_nothing_is_moved_to_free_less() -> None:
    world = opened("A", move_bytes=25_000)
    world.write("A", "w1", size=40_000)
    for _ in range(3):
        crowd(world)
    assert runs_to_move(world.new_turn(), PLACE) == []
    for _ in range(2):
        crowd(world)
    assert len(runs_to_move(world.new_turn(), PLACE)) == 1


def test_where_nothing_can_move_it_is_tried_later() -> None:
    world = opened("A", move_bytes=25_000, clean_ms=1_000)
    world.write("A", "w1", size=40_000)
    for _ in range(3):
        crowd(world)
    world.wait(1_000)
    assert list(world.memory.cleaning.crowded) == [PLACE]
    assert relocate(world) == 0
    assert list(world.memory.cleaning.crowded) == []
    world.wait(1_000)
    assert list(world.memory.cleaning.crowded) == []
    world.wait(12_000)
    assert list(world.memory.cleaning.crowded) == [PLACE]


moves = st.lists(
    st.one_of(
        st.tuples(
            st.just("write"), st.sampled_from("ABC"), st.integers(1, 3), st.integers(1, 4_000)
        ),
        st.tuples(st.just("reject"), st.sampled_from("ABC"), st.integers(1, 3), st.just(10)),
        st.tuples(st.just("crowd"), st.just(""), st.just(1), st.integers(9_000, 20_000)),
        st.tuples(st.just("plain"), st.just(""), st.integers(1, 3), st.integers(1, 4_000)),
        st.tuples(
            st.sampled_from(("commit", "abort")), st.sampled_from("ABC"), st.just(0), st.just(0)
        ),
        st.tuples(st.just("lead"), st.just(""), st.integers(0, 1), st.just(0)),
    ),
    max_size=40,
)


def check_kept(world: World, written: dict[str, list[tuple[int, int]]]) -> None:
    """What open transactions wrote is in the index, whole, and lies at or above the low water."""
    begins = world.state.low_water.get(PLACE, 0)
    assert begins <= world.index.positions.get(PLACE, 0)
    size = 0
    for label, runs in written.items():
        stored = world.index.runs(world.id(label), *PLACE)
        assert sorted((x.first, x.end) for x in stored) == runs
        assert all(x.batch_base >= begins and x.at >= begins for x in stored)
        size += sum(x.batch_size for x in stored)
    assert world.index.uncommitted.total == size
    plain = world.index.plain_from(world.state, *PLACE)
    assert plain is None or plain >= begins


@settings(max_examples=some(150), deadline=None, print_blob=True)
@given(moves)
def test_whatever_happens_what_is_needed_is_kept(played: list[tuple[str, str, int, int]]) -> None:
    world = opened("A", "B", "C", move_bytes=5_000)
    written: dict[str, list[tuple[int, int]]] = {label: [] for label in "ABC"}
    rejected = dict.fromkeys("ABC", 0)
    cut = relocated = 0
    for what, label, count, size in played:
        if label and label not in written:
            continue
        if what == "write":
            run = world.write(label, f"w{label}", count=count, size=size)
            written[label].append((run.first, run.end))
        elif what == "reject":
            world.write(label, f"w{label}", count=count, size=size, epoch=3)
            rejected[label] += count
        elif what == "crowd":
            crowd(world, size)
        elif what == "plain":
            world.write_plainly(count=count, size=size)
        elif what == "lead" and count:
            world.lead()
            begin(world)
        elif what == "lead":
            before = index_rows(world)
            held = world.index.positions == dict(world.ends)
            rebuild(world)
            world.read_journals()
            if held:
                assert index_rows(world) == before, "the same from the logs alone"
        elif what == "commit":
            runs = written.pop(label)
            world.turn()
            world.commit(label, own=[whole(world, label, runs)] if runs else [])
            world.wait(300)
            row = world.row(label)
            assert row.state == "COMMITTED"
            assert row.committed == sum(last - first for first, last in runs)
            assert row.rejected == rejected[label]
        elif what == "abort":
            written.pop(label)
            world.turn()
            world.abort(label)
            assert world.row(label).rejected == rejected[label]
        world.wait(300)
        if world.memory.cleaning.crowded:
            with mock.patch.object(cleanup, "MAX_MOVED", 2):
                relocated += relocate(world)
        check_kept(world, written)
        cut = world.state.low_water.get(PLACE, 0)
    event(f"cut: {cut > 0}, moved: {relocated > 0}")


def whole(world: World, label: str, runs: list[tuple[int, int]]) -> r.Receipt:
    """A receipt for exactly these."""
    mine = [
        batch for batch in world.journals[PLACE]
        if batch.run.txn_id == world.id(label) and (batch.run.first, batch.run.end) in runs
    ]  # fmt: skip
    crc = sum(batch.run.crc_sum for batch in mine) % (1 << 63)
    extent = r.Extent(*PLACE, runs[0][0], runs[-1][1], sum(end - first for first, end in runs), crc)
    return r.Receipt(world.id(label), world.writer(f"w{label}"), 1, True, (extent,))
