"""The log is the state: whatever happened, folding the rounds gives the live table, byte for byte.

Also when the log is compacted, when it is folded in pieces, and when a controller stops between any
two rounds and goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.journal_index import JournalIndex
from anabranch.core.state import State
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.conftest import some
from tests.core.harness import World, nyc
from tests.core.moves import everything, lives, new_world, play
from tests.core.tables import Memory, Row, fold, rows_of, table_of, txn_rows, views_of

random_lives = settings(
    max_examples=some(60),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)


def lived(moves: list[Any]) -> World:
    world = new_world()
    for number, move in enumerate(moves):
        play(world, move, number)
    event(f"commits: {min(5, sum(len(round_.commits) for round_ in world.rounds))}")
    return world


def assert_same(folded: State, live: State) -> None:
    """Tables byte for byte, and what is decoded from them."""
    assert rows_of(table_of(folded)) == rows_of(table_of(live))
    assert views_of(folded) == views_of(live)


def assert_in_step(table: dict[bytes, bytes]) -> None:
    """The derived keys say what the transactions' rows say, and nothing else."""
    state = State(Memory(table))
    expected = set()
    for row in txn_rows(state):
        ended = row.state in ("COMMITTED", "ABORTED")
        key = k.finished_key(row.finished_ms, row.txn_id) if ended else k.OPEN + row.txn_id
        expected.add(key)
    assert {key for key in table if key[:1] in (k.OPEN, k.FINISHED)} == expected
    assert state.outcomes == sum(key[:1] == k.FINISHED for key in expected)


def test_views_are_derived_without_reading_all_names_and_series() -> None:
    names, count = [k.name_key("nyc", f"{n:05}") for n in range(5000)], [0]
    names += [k.series_key("nyc", f"{n:05}") for n in range(1500)]
    rows = {k.STATUS + name: b"not read" for name in names}
    rows[k.STATUS + k.scope_key("nyc")] = encode(r.ScopeRow("nyc", 3, ""))
    rows[k.STATUS + k.lane_key("last")] = encode(r.LaneRow("last", False, (), {}))

    class Counting(Memory):
        def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
            for found in super().scan(prefix, first):
                count[0] += 1
                yield found

    state = State(Counting(rows))
    assert (state.scopes, list(state.lanes)) == ({"nyc": 3}, ["last"])
    assert count[0] < 2100


def compacted(rows: Sequence[Row], until: int, *, tombstones: bool) -> list[Row]:
    """As Kafka's cleaner leaves it: below ``until`` only the last record of each key, in its place.

    ``tombstones``: the deletions there are old enough to be dropped too.
    """
    last = {key: i for i, (key, _) in enumerate(rows[:until])}
    kept = [
        (key, value)
        for i, (key, value) in enumerate(rows[:until])
        if last[key] == i and (value is not None or not tombstones)
    ]
    return kept + list(rows[until:])


@random_lives
@given(lives(everything, 25), st.data())
def test_folding_the_log_gives_the_live_table(moves: list[Any], data: st.DataObject) -> None:
    world = lived(moves)
    assert rows_of(world.table.rows) == rows_of(table_of(world.state))
    assert_in_step(world.table.rows)
    assert_same(fold(world.log), world.state)

    cuts = data.draw(st.sets(st.integers(0, len(world.log))), "pieces")
    assert_same(fold(world.log, sorted(cuts)), world.state)

    rows = [row for rows in world.log for row in rows]
    until = data.draw(st.integers(0, len(rows)), "compacted until")
    for tombstones in (False, True):
        clean = compacted(rows, until, tombstones=tombstones)
        assert_same(fold([clean]), world.state)
        assert_same(fold([[row] for row in clean], sorted(cuts)), world.state)

    whole = compacted(rows, len(rows), tombstones=True)
    data.draw(st.randoms(use_true_random=False), "order").shuffle(whole)
    assert_same(fold([whole]), world.state)


@random_lives
@given(lives(everything, 20), st.data())
def test_folding_on_from_an_old_checkpoint(moves: list[Any], data: st.DataObject) -> None:
    """A table of any moment, folded on; also when some rounds are folded a second time."""
    world = lived(moves)
    at = data.draw(st.integers(0, len(world.log)), "checkpoint")
    table = Memory()
    fold(world.log[:at], table=table)
    again = data.draw(st.integers(0, at), "folded again from")
    rows = [row for rows in world.log[again:] for row in rows]
    until = data.draw(st.integers(0, len(rows)), "compacted until")
    state = fold([compacted(rows, until, tombstones=False)], table=table)
    assert_same(state, world.state)
    assert_in_step(table.rows)


def reborn(world: World, *, refold: bool) -> None:
    """The controller stops and goes on: all memory is gone but what is said to be volatile (when
    it heard of whom, and the counts of rejected records since it leads).

    ``refold``: its table is folded from the log anew; only the journal index is carried over.
    """
    rows = dict(world.table.rows)
    if refold:
        rows = rows_of(rows, b"ixp") | rows_of(table_of(fold(world.log)))
    world.table = Memory(rows)
    world.state = State(world.table, trusts_open=True)
    world.index = JournalIndex(world.table, rejected=world.index.rejected)
    world.index.load()


@random_lives
@given(lives(everything, 20), st.randoms(use_true_random=False))
def test_stopping_between_rounds_changes_nothing(moves: list[Any], random: Random) -> None:
    steady, restless = new_world(), new_world()
    for number, move in enumerate(moves):
        if random.random() < 0.5:
            reborn(restless, refold=random.random() < 0.5)
        assert play(restless, move, number) == play(steady, move, number)
        ours, theirs = (w.rounds[-1] if w.rounds else None for w in (restless, steady))
        assert ours == theirs
        if ours is not None and theirs is not None:
            assert list(ours.rows) == list(theirs.rows), "also in the order on the log"
    assert restless.log == steady.log
    assert restless.table.rows == steady.table.rows
    assert views_of(restless.state) == views_of(steady.state)


@random_lives
@given(lives(everything, 30))
def test_timestamps_rise_and_an_outcome_is_for_ever(moves: list[Any]) -> None:
    world = lived(moves)
    times = [
        t for round_ in world.rounds for t in dict.fromkeys(c.timestamp for c in round_.commits)
    ]
    assert times == sorted(set(times)), "strictly"
    assert all(c.timestamp > 0 for round_ in world.rounds for c in round_.commits)
    outcomes: dict[bytes, r.Outcome] = {}
    for round_ in world.rounds:
        for _, result in round_.replies:
            for outcome in _outcomes(result):
                if outcome.state in ("COMMITTED", "ABORTED"):
                    said = outcome._replace(streams=(), writers=())  # lists leave these out
                    assert outcomes.setdefault(outcome.txn_id, said) == said
                else:
                    assert outcome.txn_id not in outcomes, "it had ended"
    merged = [c.txn_id for round_ in world.rounds for c in round_.commits]
    assert {outcomes[txn_id].state for txn_id in merged if txn_id in outcomes} <= {"COMMITTED"}


def _outcomes(result: Any) -> Sequence[r.Outcome]:
    if isinstance(result, r.Outcome):
        return (result,)
    if isinstance(result, r.Ended):
        return result.not_open
    return result.transactions if isinstance(result, r.TransactionList) else ()


# -- by hand -----------------------------------------------------------------------------------


def test_the_life_of_one_transaction_folded_at_every_point() -> None:
    world = nyc()
    world.begin("A", name="daily")
    world.touch("A")
    world.write("A", "w1", count=3)
    world.finish("A", "w1")
    world.commit("A")
    world.turn()
    world.wait(8 * 86_400_000)
    assert world.table.get(k.STATUS + k.txn_key(world.id("A"))) is None
    for cut in range(len(world.log) + 1):
        for second in range(cut, len(world.log) + 1):
            assert_same(fold(world.log, [cut, second]), world.state)


def test_an_end_and_its_forgetting_in_one_piece_after_an_open_view() -> None:
    """The view of open transactions is older than the rows then."""
    world = nyc()
    world.begin("A")
    opened = len(world.log)
    world.abort("A")
    world.wait(8 * 86_400_000)
    state = fold(world.log, [opened])
    assert rows_of(table_of(state), b"of") == {}
    assert state.finished_before(1 << 60, 10) == []


def test_folding_judges_nothing() -> None:
    """Compaction skips states: from OPEN a row may jump to any other, and back to nothing."""
    world = nyc()
    world.begin("A")
    key = k.txn_key(world.id("A"))
    values = [dict(rows)[key] for rows in world.log if key in dict(rows)]
    world.abort("A")
    values.append(world.table.rows[k.STATUS + key])
    for jumps in ([1], [1, 0], [0, 1, 0, 1], [1, 1, 0]):
        state = fold([[(key, values[j]) for j in jumps]])
        assert rows_of(table_of(state), b"s") == {k.STATUS + key: values[jumps[-1]]}
        assert_in_step(table_of(state))


def test_rows_of_a_transaction_without_its_own_row_are_kept_and_not_open() -> None:
    world = nyc()
    world.begin("A")
    world.touch("A")
    rows = [row for rows in world.log for row in rows if row[0] != k.txn_key(world.id("A"))]
    state = fold([rows])
    assert state.open == {}
    assert state.participants(world.id("A")) == {"nyc/a": 0}


def test_what_goes_from_the_rows_goes_from_the_views() -> None:
    world = nyc()
    rows = {key: value for rows in world.log for key, value in rows}
    state = fold([list(rows.items())])
    assert (state.scopes, list(state.streams)) == ({"nyc": 0}, ["nyc/a"])
    for key in rows:
        state.fold_row(key, None)
    state.rederive()
    assert views_of(state) == views_of(State(Memory()))


def test_who_was_heard_of_is_not_in_the_log() -> None:
    world = nyc()
    world.begin("A")
    world.lead()
    assert (world.heard(), world.memory.keepalives.since_ms) == ({}, world.now_ms)
