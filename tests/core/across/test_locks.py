"""Locks of transactions over control partitions, by the leaders' real decisions; messages are passed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.decisions.scale import partitions_added
from anabranch.core.locks.table_writes import fingerprint
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import losing
from tests.core.across.tables import Tables
from tests.core.across.test_leaders import settled

HERE, THERE = "nyc/t", "ber/t"


@pytest.fixture
def tables() -> Tables:
    return Tables()


def reader_of(tables: Tables, label: str = "A") -> None:
    """A transaction of nyc that has read a row in both tables, and written one here."""
    tables.open(label)
    for table in (HERE, THERE):
        assert tables.read(label, table, b"k") == "locked"
    tables.put(label, HERE, b"own")


def test_locks_alone_make_a_participant_and_end_with_it(tables: Tables) -> None:
    reader_of(tables)
    assert tables.states() == ["OPEN", "OPEN"]
    assert tables.locked() == [1, 1]
    tables.end("A")
    assert tables.settle() == "[commit A] A COMMITTED 1"
    assert tables.states() == ["COMMITTED", "COMMITTED"]
    assert tables.locked() == [0, 0]


def test_locks_of_a_participant_are_listed_there_and_turns_are_taken_there(tables: Tables) -> None:
    reader_of(tables)
    one, token = tables[1], tables[1].token("A")
    one.ask("list", r.ListLocks(token, one.writer("w"), 0))
    assert [each.table for each in one.result.locks] == [THERE]
    point = fingerprint(b"k")
    one.ask("turn", r.TakeTurn(one.id("A"), None, THERE, point, (THERE,), 1_000))
    assert [at.table for at in one.result.tables] == [THERE]
    assert one.ask("next", r.TakeTurn(one.id("B"), None, THERE, point, (THERE,), 900)) == ""
    tables.end("A")
    assert "[next]" in tables.settle(), "the turn ends with the participant"


def test_a_participant_whose_lock_is_broken_is_open_until_it_votes_no(tables: Tables) -> None:
    reader_of(tables)
    tables.put("A", THERE, b"own")
    assert tables.shot("B@1", THERE, b"k") == "B@1 COMMITTED 1"
    assert tables.states() == ["OPEN", "OPEN"]
    tables.end("A")
    assert "[commit A] LocksBroken" in settled(tables)
    assert tables.states() == ["OPEN", "OPEN"]
    tables[0].abort("A")
    tables.settle()
    assert tables.states() == ["ABORTED", "ABORTED"]
    assert tables.locked() == [0, 0]


def test_locks_that_were_not_validated_are_asked_for_before_the_commit(tables: Tables) -> None:
    tables.open("A")
    one = tables[1]
    locks = (r.TableLocks(THERE, 0, 0, (fingerprint(b"k"),), ()),)
    one.ask("lock", r.LockReads(one.token("A"), one.writer("w"), 1, locks))
    tables.settle()
    tables.put("A", HERE, b"own")
    tables.end("A")
    assert tables.settle() == "[commit A] revalidate"
    valid = r.Validated(one.writer("w"), 1, one.state.round.hybrid_time)
    one.ask("validate", r.LockReads(one.token("A"), one.writer("w"), 0, validated=(valid,)))
    tables.end("A", asker="again")
    assert "[again] A COMMITTED 1" in settled(tables)


@pytest.mark.parametrize("ending", ["commit", "abort", "deadline"])
def test_locks_are_frozen_from_the_vote_to_the_decision(tables: Tables, ending: str) -> None:
    reader_of(tables)
    tables.end("A", wait_ms=1_000)
    tables.deliver()
    assert tables.states() == ["OPEN", "PREPARED"]
    assert tables.shot("B@1", THERE, b"k") == "NotReady"
    assert tables.shot("C@1", THERE, b"other") == "C@1 COMMITTED 1"
    if ending == "abort":
        tables[0].abort("A")
    elif ending == "deadline":
        with losing(tables, r.Vote):
            tables.bag.clear()
            tables.wait(1_001)
        settled(tables)
        assert tables.states() == ["OPEN", "OPEN"]
    tables.settle()
    assert tables.shot("D@1", THERE, b"k") == "D@1 COMMITTED 1"


def test_a_coordinator_whose_part_is_merged_keeps_no_lock_while_a_participant_is_away(
    tables: Tables,
) -> None:
    reader_of(tables)
    with losing(tables, r.Done):
        tables.end("A")
        tables.settle()
        assert tables.states() == ["FINALIZE_IN_PROGRESS", "COMMITTED"]
        assert tables.locked() == [0, 0]
        assert tables.shot("B", HERE, b"k") == "B COMMITTED 1"
        report = r.Validated(tables[0].writer("w"), 1, tables[0].state.round.hybrid_time)
        copy = tables[0].committing("A", receipts=[replace(tables.receipt("A"), sequence=1)])
        assert not tables[0].ask("a copy", replace(copy, validated=(report,)))


@pytest.mark.parametrize("table", [HERE, THERE])
def test_of_a_table_that_is_lost_no_lock_holds(tables: Tables, table: str) -> None:
    reader_of(tables)
    tables.lose(table)
    if table == THERE:
        tables.end("A")
    assert ("[commit A] StreamLost" in settled(tables)) == (table == THERE)
    assert tables.states() == ["ABORTED", "ABORTED"]


@pytest.mark.parametrize("table", [HERE, THERE])
def test_what_a_program_has_prepared_is_named_after_ten_seconds_at_each_side(
    tables: Tables, table: str
) -> None:
    reader_of(tables)
    command = tables[0].committing("A", receipts=[tables.receipt("A", "w1")])
    tables[0].ask("prepare A", replace(command, prepare=r.Prepare(b"", b"")))
    assert tables.settle() == "[prepare A] A PREPARED 1"
    label = "B" if table == HERE else "B@1"
    said = [tables.wait(1_000) or tables.shot(label, table, b"k") for _ in range(12)]
    assert [*dict.fromkeys(said)] == ["NotReady", "ReservedByPrepared"]


# -- two that meet -----------------------------------------------------------------------------------------


def skewed(tables: Tables, homes: tuple[int, int] = (0, 1)) -> None:
    """X, the older, and Y have both read k in both tables; X writes it here, Y there."""
    for label, home, table in (("X", homes[0], HERE), ("Y", homes[1], THERE)):
        tables[home].new_id(label, made_ms=tables[0].wall_ms - (100 if label == "X" else 0))
        tables.open(label, home)
        for each in (HERE, THERE):
            assert tables.read(label, each, b"k", writer=f"{label}w") == "locked"
        tables.put(label, table, b"k", writer=f"{label}1")


@pytest.mark.parametrize("first", ["X", "Y"])
def test_of_two_that_read_what_the_other_writes_one_commits(tables: Tables, first: str) -> None:
    """Write skew: each has read what the other writes, at another control partition."""
    skewed(tables)
    for label in sorted("XY", reverse=first == "Y"):
        tables.end(label, f"{label}1")
    said = settled(tables)
    assert said.count("COMMITTED") == 1
    assert said.count("LocksBroken") + said.count("ABORTED") == 1, said


def test_l2_the_older_waits_and_the_younger_gives_way_wherever_they_meet() -> None:
    """X is prepared at one control partition and asks at the other, Y the other way round."""
    tables = Tables(3)
    skewed(tables, homes=(2, 2))
    for label in "XY":
        tables.end(label, f"{label}1")
    tables.deliver_of("X", 0)
    tables.deliver_of("Y", 1)
    tables.deliver_of("X", 1)
    tables.deliver_of("Y", 0)
    votes = [
        f"{tables[0].label(m.record.txn_id)} {m.record.answer}"
        for m in tables.bag
        if isinstance(m.record, r.Vote)
    ]
    assert votes == ["X YES", "Y YES", "X WAITING", "Y AGAIN"]
    said = settled(tables)
    assert "X COMMITTED" in said
    assert "[commit Y] LocksBroken" in said or "Y ABORTED" in said, said


def test_what_gives_way_to_one_that_lasts_asks_less_and_less_often(tables: Tables) -> None:
    """The older one is prepared by a program."""
    reader_of(tables)
    command = tables[0].committing("A", receipts=[tables.receipt("A", "w1")])
    tables[0].ask("prepare A", replace(command, prepare=r.Prepare(b"", b"")))
    tables.settle()
    tables[0].new_id("B", made_ms=tables[0].wall_ms + 100)
    tables.open("B")
    tables.put("B", THERE, b"k", writer="B1")
    tables.seen.clear()
    tables.end("B", "B1", wait_ms=60_000)
    said = "; ".join(tables.wait(60) for _ in range(180))
    assert "[commit B] ReservedByPrepared" in said
    assert 5 < sum("AGAIN" in one for one in tables.seen) < 30


@pytest.mark.parametrize("older", ["X", "Y"])
def test_l4_the_coordinators_own_locks_are_checked_with_the_decision(
    tables: Tables, older: str
) -> None:
    """X has read k here; Y, prepared here, writes k, and may commit below X."""
    for label, home in (("X", 0), ("Y", 1)):
        tables[home].new_id(label, made_ms=tables[0].wall_ms - (100 if label == older else 0))
        tables.open(label, home)
    assert tables.read("X", HERE, b"k", writer="Xw") == "locked"
    tables.put("X", THERE, b"x", writer="X1")
    tables.put("Y", HERE, b"k", writer="Y1")
    tables.end("Y", "Y1")
    tables.deliver_of("Y", 0)
    tables.collect()
    kept, tables.bag = tables.bag, []
    tables.end("X", "X1")
    tables.settle()
    assert tables.states("X")[0] == "OPEN"
    tables.bag += kept
    said = settled(tables)
    assert "Y COMMITTED" in said
    assert "X COMMITTED" not in said, said


def test_l1_a_commit_waits_for_what_may_be_merged_before_it_into_tables_that_it_locks(
    tables: Tables,
) -> None:
    """D has locked k there; X, prepared at an earlier time, writes k."""
    tables.open("X")
    tables.put("X", THERE, b"k", writer="X1")
    tables.open("D", 1)
    assert tables.read("D", THERE, b"k", writer="Dw") == "locked"
    tables[1].touch("D", "ber/a")
    tables[1].write("D", "D1", "ber/a")
    tables.end("X", "X1")
    tables.deliver_of("X", 1)
    tables.end("D", "D1")
    for _ in range(3):
        tables[1].wait(10)
    assert tables.states("D")[1] != "COMMITTED"
    said = settled(tables)
    assert "X COMMITTED" in said
    assert tables.states("D")[1] == "ABORTED"


def test_l5_a_commit_that_waits_with_a_timestamp_gives_it_back_for_a_lock(tables: Tables) -> None:
    """D waits there with a timestamp, and writes k; X has read k, and may commit above D."""
    tables.open("Z")
    tables.put("Z", THERE, b"z", writer="Z1")
    tables.end("Z", "Z1")
    tables.deliver_of("Z", 1)
    kept, tables.bag = tables.bag, []
    tables.open("X")
    assert tables.read("X", THERE, b"k", writer="Xw") == "locked"
    tables.put("X", HERE, b"x", writer="X1")
    assert tables.shot("D@1", THERE, b"k") == ""
    tables.end("X", "X1")
    tables.deliver_of("X", 1)
    assert tables[1].answers[-1] == "[one-shot D@1] NotReady"
    tables.settle()
    tables.bag += kept
    settled(tables)
    assert tables.shot("D@1", THERE, b"k") == "D@1 COMMITTED 1"
    merges = tables.merges()
    assert merges[THERE][-1][1] > merges[HERE][-1][1]


def staged(tables: Tables) -> None:
    """S, of there alone, has locked k in the table there, and is big."""
    one = tables[1]
    one.settings = replace(one.settings, chunk_bytes=250)
    one.new_id("S", made_ms=tables[0].wall_ms - 500)
    tables.open("S", 1)
    assert tables.read("S", THERE, b"k", writer="Sw") == "locked"
    one.touch("S", "ber/a")
    one.write("S", "S1", "ber/a", 10, size=1_000)
    tables.end("S", "S1")
    one.wait(60)
    turn = one.new_turn()
    partitions_added(turn, "ber/a", 4)
    one.close(turn)
    one.wait(60)


def test_l3_a_vote_gives_way_to_a_staged_merge_whose_locks_it_may_break(tables: Tables) -> None:
    tables.open("X")
    tables.put("X", THERE, b"k", writer="X1")
    staged(tables)
    assert tables.states("S")[1] == "FINALIZE_IN_PROGRESS"
    tables.end("X", "X1")
    tables.deliver_of("X", 1)
    assert str(tables.bag[-1]) == "1>0 Vote AGAIN 1"


def test_l3_a_merge_is_not_staged_while_a_vote_may_break_its_locks(tables: Tables) -> None:
    tables.open("X")
    tables.put("X", THERE, b"k", writer="X1")
    tables.end("X", "X1")
    tables.deliver_of("X", 1)
    staged(tables)
    assert tables.states("S")[1] == "COMMIT_IN_PROGRESS"
    assert "X COMMITTED" in settled(tables)
    assert tables.states("S")[1] == "ABORTED"


def test_l2_one_shots_meet_like_other_transactions() -> None:
    """Both have read and write k in the tables of two participants."""
    tables = Tables(3)
    others = (1, "ber/t"), (2, "tok/t")
    for label in "XY":
        tables[0].new_id(label, made_ms=tables[0].wall_ms - (100 if label == "X" else 0))
        own = {number: {"locks": (tables.lock(table, b"k"),)} for number, table in others}
        tables.one_shot(label, *(table for _, table in others), own=own)
    tables.deliver_of("X", 1)
    tables.deliver_of("Y", 2)
    tables.deliver_of("X", 2)
    tables.deliver_of("Y", 1)
    votes = [
        f"{tables[0].label(m.record.txn_id)} {m.record.answer}"
        for m in tables.bag
        if isinstance(m.record, r.Vote)
    ]
    assert votes == ["X YES", "Y YES", "Y AGAIN"]
    said = settled(tables)
    assert "X COMMITTED 2" in said
    assert "Y COMMITTED" not in said, said
    assert tables.states("Y") == ["ABORTED"] * 3


def test_l2_of_two_one_shots_the_older_commits_though_each_is_prepared_at_the_others_coordinator(
    tables: Tables,
) -> None:
    """Both have read and write k in both tables; the questions for their first votes cross."""
    both = enumerate((HERE, THERE))
    own = {number: {"locks": (tables.lock(table, b"k"),)} for number, table in both}
    for home, label in enumerate("XY"):
        tables[home].new_id(label, made_ms=tables[home].wall_ms - (100 if label == "X" else 0))
        tables.one_shot(label, HERE, THERE, own=own, home=home)
    tables.deliver_of("X", 1)
    tables.deliver_of("Y", 0)
    assert (tables.states("X"), tables.states("Y")) == (["-", "PREPARED"], ["PREPARED", "-"])
    assert "X COMMITTED 2" in settled(tables)
    assert (tables.states("X"), tables.states("Y")) == (["COMMITTED"] * 2, ["ABORTED"] * 2)


@pytest.mark.parametrize("broken", ["", HERE, THERE])
def test_the_locks_of_a_one_shot_are_checked_at_both(tables: Tables, broken: str) -> None:
    own = {n: {"locks": (tables.lock(table, b"k"),)} for n, table in enumerate((HERE, THERE))}
    if broken:
        tables.shot("B@1" if broken == THERE else "B", broken, b"k")
    said = tables.one_shot("A", "nyc/a", "ber/a", own=own) or settled(tables)
    if broken:
        assert said.removeprefix("[A@0] ") == "revalidate"
        assert tables.states()[0] == "ABORTED"
    else:
        assert said == "[A@0] A COMMITTED 2"
    settled(tables)
    assert tables.locked() == [0, 0]


def test_l5_a_changed_row_is_locked_from_the_vote_on_and_its_number_is_decided(
    tables: Tables,
) -> None:
    change: dict[int, dict[str, Any]] = {
        n: {"locks": (tables.lock(t),), "changes": (r.RowChange(t, b"n", "ADD", 5, None),)}
        for n, t in enumerate((HERE, THERE))
    }
    tables.one_shot("A", "nyc/a", "ber/a", own=change)
    tables.deliver()
    assert tables.states() == ["-", "PREPARED"]
    other = r.OneShot(tables[1].id("B@1"), "ber", None, (), None, change[1]["locks"])
    again = tables[1].ask("add", other._replace(changes=change[1]["changes"]))
    assert again == "NotReady"
    assert "A COMMITTED 4" in settled(tables)
    (part,) = [
        p
        for its in tables[1].rounds
        for c in its.commits
        if c.stream == THERE
        for p in c.parts
        if p.events
    ]
    assert [(e.key, e.value) for e in part.events] == [(b"n", b"5")]
