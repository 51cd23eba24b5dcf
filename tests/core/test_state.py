"""Keys, rows and changes; the log is the state: folding the rounds gives the live table, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.journal_index import JournalIndex
from anabranch.core.rows import Entry
from anabranch.core.state import Overlay, State
from anabranch.errors import InvariantViolation, MalformedRecord
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from tests.conftest import some
from tests.core.harness import World, nyc
from tests.core.moves import everything, lives, new_world, play
from tests.core.tables import Memory, Row, fold, rows_of, table_of, txn_rows, views_of

TXN = bytes(range(16))


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (k.TERM_KEY, "00" * 16 + "01"),
        (k.ROUND_KEY, "00" * 16 + "02"),
        (k.scope_key("nyc"), "00" * 16 + "03" + b"nyc".hex()),
        (k.stream_key("nyc/a"), "00" * 16 + "04" + b"nyc/a".hex()),
        (k.name_key("nyc", "a/b"), "00" * 16 + "05" + b"nyc/a/b".hex()),
        (k.txn_key(TXN), TXN.hex() + "10"),
        (k.participant_key(TXN, "nyc/a"), TXN.hex() + "11" + b"nyc/a".hex()),
        (k.writer_key(TXN, 1), TXN.hex() + "12" + "0000000000000001"),
        (k.writer_key(TXN, -1), TXN.hex() + "12" + "ffffffffffffffff"),
        (k.pending_key(TXN), TXN.hex() + "13"),
    ],
)
def test_keys_on_the_wire(key: bytes, text: str) -> None:
    assert key.hex() == text
    txn_id, entry, identifier = k.split_key(key)
    assert txn_id + bytes((entry,)) + identifier == key


@pytest.mark.parametrize("key", [b"", TXN, TXN + b"\x00", TXN + b"\x1f", TXN + b"\xff" + b"x"])
def test_other_keys_are_malformed(key: bytes) -> None:
    with pytest.raises(MalformedRecord):
        k.split_key(key)


def test_a_transactions_own_row_comes_first_of_its_rows() -> None:
    keys = [k.pending_key(TXN), k.writer_key(TXN, 0), k.participant_key(TXN, ""), k.txn_key(TXN)]
    assert min(keys) == k.txn_key(TXN)
    assert all(key.startswith(TXN) for key in keys)
    assert all(entry >= Entry.TXN for _, entry, _ in map(k.split_key, keys))


@given(st.lists(st.tuples(st.integers(0, 1 << 62), st.binary(min_size=16, max_size=16))))
def test_finished_ones_sort_by_their_end(ends: list[tuple[int, bytes]]) -> None:
    keys = sorted(k.finished_key(ms, txn_id) for ms, txn_id in ends)
    assert [(int.from_bytes(key[1:9], "big"), key[9:]) for key in keys] == sorted(ends)


@given(st.tuples(st.from_regex("[a-z]{1,3}", fullmatch=True), st.text(min_size=1)))
def test_names_of_unlike_scopes_never_meet(named: tuple[str, str]) -> None:
    scope, name = named
    rest = k.name_key(scope, name)[len(NO_TXN) + 1 :].decode()
    assert tuple(rest.split("/", 1)) == named


# -- changes over a table ----------------------------------------------------------------------

keys = st.binary(min_size=1, max_size=2) | st.sampled_from([b"s", b"sa", b"sb", b"s\xff", b"t"])
changes = st.lists(st.tuples(keys, st.none() | st.binary(max_size=1)), max_size=8)


@given(st.dictionaries(keys, st.binary(max_size=1)), st.lists(changes, max_size=3))
def test_changes_are_seen_as_if_they_were_written(
    below: dict[bytes, bytes], rounds: list[list[tuple[bytes, bytes | None]]]
) -> None:
    table, plain = Memory(below), Memory(below)
    overlay = Overlay(table)
    for changed in rounds:
        for key, value in changed:
            overlay.set(key, value)
            plain.write({key: value})
            assert overlay.get(key) == value
        for prefix in (b"", b"s", b"sa", b"s\xff", b"zz"):
            assert list(overlay.scan(prefix)) == list(plain.scan(prefix))
        for key in plain.rows.keys() | below.keys():
            assert overlay.get(key) == plain.get(key)
        table.write(overlay.take())
        assert overlay.take() == {}
    assert table.rows == plain.rows


def test_many_changes_between_two_scans() -> None:
    """More fresh keys than are put in their places one by one."""
    overlay, plain = Overlay(Memory()), Memory()
    for i in range(500):
        key = bytes((i * 7 % 251, i * 11 % 256))
        overlay.set(key, b"v")
        plain.write({key: b"v"})
        if i in (3, 40, 41, 200, 499):
            assert list(overlay.scan(b"")) == list(plain.scan(b""))
            assert list(overlay.scan(key[:1])) == list(plain.scan(key[:1]))


def test_a_scan_sees_the_changes_as_they_were_when_it_began() -> None:
    overlay = Overlay(Memory({b"a": b"1", b"c": b"1"}))
    overlay.set(b"b", b"1")
    seen = []
    for key, _ in overlay.scan(b""):
        seen.append(key)
        overlay.set(key + b"+", b"2")
    assert seen == [b"a", b"b", b"c"]


def test_a_row_of_the_wrong_kind_is_a_defect() -> None:
    state = State(Memory())
    name: Any = r.NameRow(TXN)
    state._table.set(k.STATUS + k.txn_key(TXN), state.apply(k.name_key("x", "y"), name))
    with pytest.raises(InvariantViolation, match="NameRow"):
        state.txn_row(TXN)
    assert state.holder("x", "y") == TXN
    assert state.holder("x", "z") is None


def test_a_pending_commit_of_an_older_build_is_read() -> None:
    """It had a list for each field of its askers."""
    former = r.FormerPendingCommitRow(
        (b"one", b"two"), (1, 2), ("open", "etl"), (b"digest-1", b"digest-2"), True, (), "name", 3, 4, None, None,
        (b"two",),
    )  # fmt: skip
    key = k.pending_key(bytes(15) + b"x")
    assert k.read_row(key, encode(former)) == r.PendingCommitRow(
        (r.Asker(b"one", 1, b"digest-1", "open", False), r.Asker(b"two", 2, b"digest-2", "etl", True)),
        True, (), "name", 3, 4,
    )  # fmt: skip


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


def test_rows_of_a_transaction_over_control_partitions_are_read_while_it_is_open_and_after() -> (
    None
):
    world = nyc()
    world.log_rows([(k.FEATURE_KEY, r.FeatureRow(4, 1))])
    world.begin("A")
    txn_id, row = world.id("A"), world.row("A")
    votes, promised = r.VotesRow(2, "TIMESTAMP"), r.CoordinatorRow(2, 7, staged=True)
    partners = {1: r.PartitionRow(("ber",)), 300: r.PartitionRow(("oslo",), done=True)}
    rows: list[tuple[bytes, Any]] = [
        (k.votes_key(txn_id), votes),
        (k.coordinator_key(txn_id), promised),
    ]
    rows += [(k.partition_key(txn_id, number), one) for number, one in partners.items()]
    world.log_rows(rows)
    for state in (world.state, fold(world.log)):
        assert state.votes_row(txn_id) == votes
        assert state.partition_rows(txn_id) == partners
        assert state.coordinator_row(txn_id) == promised
        assert (set(state.coordinated), set(state.promised)) == ({txn_id}, {txn_id})
    over = row._replace(state="ABORTED", finished_ms=1)
    world.log_rows([(k.txn_key(txn_id), over)])
    for state in (world.state, fold(world.log)):
        assert state.votes_row(txn_id) == votes
        assert state.partition_rows(txn_id) == partners
        assert state.coordinator_row(txn_id) == promised
        assert not state.coordinated
        assert not state.promised
    world.wait(8 * 86_400_000)
    assert not world.state.row_keys(txn_id)


def test_what_goes_from_the_rows_goes_from_the_views() -> None:
    world = nyc()
    rows = {key: value for rows in world.log for key, value in rows}
    state = fold([list(rows.items())])
    assert (state.scopes, list(state.streams)) == ({"nyc": 0}, ["nyc/a"])
    for key in rows:
        state.fold_row(key, None)
    state.rederive()
    assert views_of(state) == views_of(State(Memory()))


def test_times_of_heartbeats_are_not_in_the_log() -> None:
    world = nyc()
    world.begin("A")
    world.lead()
    assert (world.heard(), world.memory.keepalives.since_ms) == ({}, world.now_ms)
