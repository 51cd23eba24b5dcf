"""Merges: plain writes are taken in journal order, each once; rolling and big commits wait among others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anabranch.core import rows as k
from anabranch.core.decisions import merge
from anabranch.core.decisions.decide import DECIDED_LEVEL, decide_due
from anabranch.core.decisions.merge import give_up
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.decisions.turn import Turn
from anabranch.core.history_records import Tail, history_records
from anabranch.core.round import Landed, NewEpoch, PlainWrites, Round, StreamCommit
from anabranch.core.state import OpenTxn, State
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from tests.core.harness import World, event, nyc
from tests.core.tables import fold, rows_of, views_of


def index_rows(world: World) -> list[bytes]:
    return [key for key in world.table.rows if key[:1] == k.INDEX]


def taken(world: World) -> list[tuple[str, int, int]]:
    """(stream, partition, offset) of all plain records that were committed, in order."""
    return [
        (commit.stream, writes.source, offset)
        for round_ in world.rounds
        for commit in round_.commits
        for writes in commit.plain
        for run in writes.runs
        for offset in range(run.first, run.end)
    ]


def steps(world: World) -> list[str]:
    """The last round's history, as text: ``plain@0 A@1 epoch 1``."""
    return [
        f"epoch {step.stream_epoch}"
        if isinstance(step, NewEpoch)
        else f"{'plain' if step.plain else world.label(step.txn_id)}@{step.stream_epoch}"
        for step in world.round.history
    ]


def test_they_commit_by_themselves() -> None:
    world = nyc()
    before = world.state.round.hybrid_time
    world.write_plainly(count=3)
    world.write_plainly(count=2, partition=1)
    world.write_plainly(count=1)
    assert world.turn() == "", "nobody waits for an answer"
    assert world.plain() == "nyc/a 0[0-3) 0[3-4) 1[0-2)"
    (commit,) = world.round.commits
    assert (commit.txn_id, commit.stream_epoch) == (NO_TXN, 0)
    assert commit.timestamp == world.state.round.hybrid_time > before
    assert commit.layout == world.state.streams["nyc/a"].segments
    assert [(p.segment_id, p.partition) for p in commit.parts] == [(0, 0), (1, 1)]
    assert world.state.plain == {("nyc/a", 0): 4, ("nyc/a", 1): 2}
    assert State(world.table).get(k.plain_key("nyc/a", 0)) == r.PlainRow("nyc/a", 0, 4, 0)
    assert k.plain_key("nyc/a", 0) in world.round.rows, "row and data are in one round"
    assert index_rows(world) == []
    world.turn()
    assert world.plain() == ""


def test_the_log_gives_the_same_tables() -> None:
    world = nyc()
    for count in (1, 5, 2):
        world.write_plainly(count=count, partition=count % 2)
        world.turn()
    state = fold(world.log)
    assert views_of(state) == views_of(world.state)
    assert state.plain == world.state.plain == {("nyc/a", 0): 2, ("nyc/a", 1): 6}
    assert rows_of(dict(state._table.scan(b""))) == rows_of(world.table.rows)


@pytest.mark.parametrize("keep_table", [True, False])
@pytest.mark.parametrize("when", ["before it is read", "read, not committed", "committed"])
def test_a_successor_loses_and_doubles_none(keep_table: bool, when: str) -> None:
    world = nyc(round_bytes=250)
    for i in range(7):
        world.write_plainly(count=1 + i % 3, partition=i % 2)
    world.held = when == "before it is read"
    if when == "read, not committed":
        world.read_journals()
    else:
        world.turn()
    world.held = False
    world.lead(keep_table=keep_table)
    world.table.write(world.index.sweep(world.state))
    world.index.load()
    for _ in range(10):
        world.turn()
    found = taken(world)
    assert sorted(found) == [("nyc/a", 0, i) for i in range(7)] + [
        ("nyc/a", 1, i) for i in range(6)
    ]
    for partition in (0, 1):
        mine = [offset for _, p, offset in found if p == partition]
        assert mine == sorted(mine)
    assert index_rows(world) == []


def test_an_old_table_is_swept_of_what_others_have_committed() -> None:
    """A process that led once has indexed what a successor committed."""
    world = nyc(round_bytes=100)
    for _ in range(4):
        world.write_plainly()
    world.turn()
    assert world.plain() == "nyc/a 0[0-1)"
    old = dict(world.table.rows)
    world.turn()
    assert world.plain() == "nyc/a 0[1-2)"
    for key, value in world.table.rows.items():  # the log's rows, and the old index
        if key[:1] == k.STATUS:
            old[key] = value
    world.table.rows = old
    assert len(index_rows(world)) == 3
    world.lead()
    world.table.write(world.index.sweep(world.state))
    assert len(index_rows(world)) == 2
    assert world.index.plain_waiting(world.state) == [("nyc/a", 0)]
    world.turn()
    assert world.plain() == "nyc/a 0[2-3)"


def test_a_round_merges_no_more_than_its_bytes() -> None:
    world = nyc(round_bytes=1_000)
    for _ in range(5):
        world.write_plainly(size=400)
    world.turn()
    assert world.plain() == "nyc/a 0[0-1) 0[1-2) 0[2-3)"
    assert world.index.plain_waiting(world.state) == [("nyc/a", 0)]
    world.turn()
    assert world.plain() == "nyc/a 0[3-4) 0[4-5)"
    assert world.index.plain_waiting(world.state) == []


def test_journal_partitions_share_a_round() -> None:
    world = nyc(round_bytes=1_000)
    for _ in range(9):
        world.write_plainly(size=100)
    for _ in range(9):
        world.write_plainly(size=100, partition=1)
    world.turn()
    assert world.plain() == "nyc/a " + " ".join(
        f"{p}[{i}-{i + 1})" for p in (0, 1) for i in range(5)
    )


def test_big_batches_take_turns() -> None:
    """Each is a round's worth: none waits for ever."""
    world = nyc("nyc/a", "nyc/b", round_bytes=1_000)
    for _ in range(3):
        for stream in ("nyc/a", "nyc/b"):
            world.write_plainly(stream, size=5_000)
    seen = []
    for _ in range(6):
        world.turn()
        seen.append(world.plain()[:5])
    assert sorted(seen[:2]) == sorted(seen[2:4]) == sorted(seen[4:]) == ["nyc/a", "nyc/b"]


def test_commits_have_half_of_the_round() -> None:
    """However many plain writes there are, merges go on; and the other way round."""
    world = nyc(round_bytes=1_000, chunk_bytes=10_000)
    world.held = True  # no merges before all are decided
    for label in "ABC":
        world.begin(label)
        world.touch(label)
        world.write(label, f"w{label}", size=400)
        world.commit(label, own=[world.receipt(label, f"w{label}")])
    world.held = False
    for _ in range(20):
        world.write_plainly(size=100)
    rounds = []
    for _ in range(4):
        world.turn()
        rounds.append((world.plain().count("["), world.plan().count("nyc/a")))
    assert rounds == [(5, 0), (5, 2), (5, 1), (5, 0)], "decided; then merged, two in a round"


def scale_to_three(world: World) -> None:
    """From two segments to three."""
    world.ask("scale", r.Scale("nyc/a", 3, (), ()))
    turn = world.new_turn()
    if world.state.streams["nyc/a"].wanted_partitions > world.state.streams["nyc/a"].partitions:
        partitions_added(turn, "nyc/a", turn.state.streams["nyc/a"].wanted_partitions)
        world.close(turn)


def test_they_come_before_any_rolling() -> None:
    """One round: plain writes and one-shots to the active layout, then a rolling commit and its end."""
    world = nyc()
    world.begin("A")
    world.touch("A")
    world.write("A", "w1", count=2)
    scale_to_three(world)
    assert world.state.streams["nyc/a"].stream_epoch == 1
    world.commit("A", own=[world.receipt("A", "w1")])
    world.write_plainly(count=3)
    world.one_shot("B", event())
    assert steps(world) == ["B@1", "plain@1", "epoch 2", "A@2", "epoch 3"]
    times = [step.timestamp for step in world.round.history]
    assert times == sorted(set(times))
    plain = [c for c in world.round.commits if c.plain]
    assert [s.partition for s in plain[0].layout] == [p.partition for p in plain[0].parts]
    assert len(plain[0].layout) == 3


def test_after_a_scaling_they_go_to_the_new_layout() -> None:
    world = nyc()
    world.held = True
    world.write_plainly(count=3)
    scale_to_three(world)
    world.held = False
    world.turn()
    (commit,) = world.round.commits
    assert (commit.stream_epoch, len(commit.parts)) == (1, 3)
    assert commit.layout == world.state.streams["nyc/a"].segments


def test_merges_are_sent_one_by_one_after_the_broker_refused_a_batch() -> None:
    world = nyc()
    for _ in range(3):
        world.write_plainly()
    world.read_journals()
    turn = world.new_turn()
    turn.merge_limit = 1
    decide_due(turn, judge_silence=True)
    assert turn.merge_limit == 0, "no merges beside"
    assert turn.round.plain_runs == 1
    world.close(turn)
    assert world.plain() == "nyc/a 0[0-1)"


def test_what_the_broker_does_not_take_is_passed_over_and_counted() -> None:
    world = nyc()
    world.write_plainly(count=4)
    world.write_plainly(count=2)
    world.read_journals()
    runs = list(world.index.plain_runs(world.state, "nyc/a", 0))
    refused = Round()
    refused.history.append(
        StreamCommit(NO_TXN, "nyc/a", 0, 1, (), (PlainWrites(0, tuple(runs[:1])),))
    )
    assert refused.merged == set(), "nothing to abort"
    turn = world.new_turn()
    give_up(turn, refused)
    world.close(turn)
    assert sum(world.state.plain_refused.values()) == 4
    assert world.state.plain == {("nyc/a", 0): 4}
    world.turn()
    assert world.plain() == "nyc/a 0[4-6)"


def test_a_forged_id_of_zeros_is_no_plain_write() -> None:
    world = nyc()
    world.ids["zero"] = NO_TXN
    world.write("zero", "w1", count=2)
    world.turn()
    assert world.plain() == ""
    assert world.index.rejected["nyc/a"] == {"unknown_transaction": 2}


def test_segments_without_records_are_not_in_the_history() -> None:
    world = nyc()
    world.write_plainly(count=3)
    world.turn()
    tails = {"nyc/a": Tail({0: 10, 1: 20}, {}, 7)}
    ((record,),) = history_records(world.round, {(0, 1): Landed(21, 24, 3)}, tails).values()
    assert isinstance(record, r.CommitRecord)
    assert record.segments == (r.SegmentCommit(1, 1, 21, 24, 3),)
    assert record.vector == (r.Position(0, 10), r.Position(1, 24))
    assert record.txn_id == NO_TXN


CHUNK = 1000  # bytes


def scaled(*streams: str, old: tuple[str, ...], **changes: int) -> World:
    """A world in which these transactions touched the streams before a scaling to one segment."""
    world = nyc(*streams, round_bytes=CHUNK, chunk_bytes=CHUNK, **changes)
    for label in old:
        world.begin(label)
        for stream in streams:
            world.touch(label, stream)
    for stream in streams:
        answer = world.ask("scale", r.Scale(stream, 1, (), ()))
        assert answer == f"{stream} ACTIVE 1"
    return world


def test_partitions_that_are_wanted_already_are_counted_once() -> None:
    world = nyc(max_partitions=8)
    row = replace(world.state.streams["nyc/a"], wanted_partitions=4)
    world.log_rows([(k.stream_key("nyc/a"), row)])
    assert world.ask("more", r.Scale("nyc/a", 5, (), ())) == "TooManyStreams"
    assert world.ask("scale", r.Scale("nyc/a", 4, (), ())) == "", "it waits for them"


def write_and_commit(world: World, label: str, stream: str, epoch: int, size: int = 100) -> str:
    """A transaction that touched already writes once and commits."""
    world.write(label, f"w{label}", stream, epoch=epoch, size=size)
    return world.commit(label, own=[world.receipt(label, f"w{label}")])


def test_a_rolling_commit_is_not_held_up_by_a_flood_of_regular_ones() -> None:
    world = scaled("nyc/a", old=("old",))
    fresh = [f"fresh{n}" for n in range(30)]
    for label in fresh:
        world.begin(label)
        world.touch(label)
        world.write(label, label, epoch=1, size=CHUNK)
    world.write("old", "old")
    for n in range(10):
        # In every turn more regular merges are asked for than fit into a round.
        flood = fresh[3 * n : 3 * n + 3]
        asked = [(x, world.committing(x, own=[world.receipt(x, x)])) for x in flood]
        if n == 2:
            asked.append(("old", world.committing("old", own=[world.receipt("old", "old")])))
        world.turn(*asked)
        assert (
            sum(run.batch_size for c in world.round.commits for p in c.parts for run in p.runs)
            <= 2 * CHUNK
        )
    assert world.row("old").state == "COMMITTED"
    assert sum(world.row(label).state == "COMMITTED" for label in fresh) >= 7


def test_a_rolling_commit_of_two_streams_waits_once_to_be_collated() -> None:
    labels = tuple(f"{stream}{n}" for n in range(8) for stream in "ab")
    world = scaled("nyc/a", "nyc/b", old=("both", *labels), collate_ms=200)
    begun = world.now_ms
    for n in range(8):
        for stream in "ab":
            label = f"{stream}{n}"
            write_and_commit(world, label, f"nyc/{stream}", 0)
            if (stream, n) == ("a", 0):
                world.write("both", "both", "nyc/a")
                world.write("both", "both", "nyc/b")
                world.commit("both", own=[world.receipt("both", "both")])
            # The streams roll in turn, each as often as it may.
            for _ in range(4):
                world.wait(25)
            if world.row("both").state == "COMMITTED":
                break
        else:
            continue
        break
    assert world.row("both").state == "COMMITTED"
    assert world.now_ms - begun <= 300


def test_a_big_merge_that_waits_for_another_is_not_planned_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = nyc(chunk_bytes=CHUNK, round_bytes=CHUNK)
    for label in ("first", "second"):
        world.begin(label)
        world.touch(label)
        world.write(label, label, size=2 * CHUNK)
    world.ask("scale", r.Scale("nyc/a", 1, (), ()))
    for label in ("first", "second"):
        world.commit(label, own=[world.receipt(label, label)])
    world.wait(60)
    states = [world.row(label).state for label in ("first", "second")]
    assert states == ["FINALIZE_IN_PROGRESS", "COMMIT_IN_PROGRESS"]
    planned = []
    plan_of = merge.plan_of

    def counted(turn: Turn, txn_id: bytes, txn: OpenTxn) -> merge.Plan:
        planned.append(world.label(txn_id))
        return plan_of(turn, txn_id, txn)

    monkeypatch.setattr(merge, "plan_of", counted)
    for _ in range(10):
        world.wait(60)
    assert planned == []
    # Carried to its place, the first one makes way.
    ((key, row),) = world.state.open[world.id("first")].staged_merges.items()
    done = replace(row, cursor=9, first=0, end=1, count=1, done=True)
    world.log_rows([(k.staged_merge_key(world.id("first"), *key), done)])
    for _ in range(4):
        world.wait(60)
    states = [world.row(label).state for label in ("first", "second")]
    assert states == ["COMMITTED", "FINALIZE_IN_PROGRESS"]


@pytest.mark.parametrize("level", [DECIDED_LEVEL - 1, DECIDED_LEVEL])
def test_a_decided_commit_is_answered_before_its_merge(level: int) -> None:
    """Who waits for the decision alone is answered when no abort is possible any more; all others at the merge."""
    world = nyc(chunk_bytes=CHUNK, round_bytes=CHUNK)
    world.ask("level", r.SetFeatureLevel(level), lane=ADMIN_LANE)
    world.begin("big")
    world.touch("big")
    world.write("big", "w", size=2 * CHUNK)
    world.ask("scale", r.Scale("nyc/a", 1, (), ()))
    command = world.committing("big", own=[world.receipt("big", "w")])
    assert world.ask("patient", command) == "", "its decision is logged, and an abort is possible"
    world.at_decision = True
    told = []
    for name in ("quick", "again"):
        world.ask(name, command)
        said = [*world.said]
        world.wait(60)
        told += [(to.correlation_id, result.state) for to, result in [*said, *world.said]]
    assert world.row("big").state == "FINALIZE_IN_PROGRESS"
    enabled = level == DECIDED_LEVEL
    assert (
        told == [(b"quick", "FINALIZE_IN_PROGRESS"), (b"again", "FINALIZE_IN_PROGRESS")] * enabled
    )
    ((key, row),) = world.state.open[world.id("big")].staged_merges.items()
    done = replace(row, cursor=9, first=0, end=1, count=1, done=True)
    world.log_rows([(k.staged_merge_key(world.id("big"), *key), done)])
    world.wait(60)
    waited = {to.correlation_id: result.state for to, result in world.said}
    names = [b"patient"] if enabled else [b"patient", b"quick", b"again"]
    assert waited == dict.fromkeys(names, "COMMITTED")
