"""`transact` at a hot row, over a real controller and the log in memory: when it asks for a turn, or ends one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from anabranch.client.replica import Replica
from anabranch.client.row_chain import Member
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import LocksBroken
from anabranch.protocol.defaults import HOT_ROW_S, NO_TURNS_S
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.tables.test_transactions import A, B, Bank
from tests.tables.worlds import let_read, operator, reader_ports

ROW = b"k"


class Hot(Bank):
    """Two clients with replicas, and what they ask about turns."""

    def __init__(self, level: int = LEVEL) -> None:
        super().__init__()
        if level > 1:
            operator(self).feature_level(raise_to=level)
        self.put(self.blind, k="1", x="1")
        self.rows.snapshot().close()
        self.asked: list[r.TakeTurn] = []
        self._watch(self.rows)
        other = self.new_client()
        let_read(other, reader_ports(self))
        self.others: Replica = other.replica(A, threads=False)
        self._client = other

    def _watch(self, replica: Replica) -> None:
        session = replica._shared.session
        take, give_up = session.take_turn, session.give_up_turn

        def taking(command: r.TakeTurn, deadline: float) -> r.Revalidate:
            self.asked.append(command)
            return take(command, deadline)

        def giving_up(command: r.TakeTurn) -> None:
            self.asked.append(command)
            give_up(command)

        session.take_turn = taking  # type: ignore[method-assign]
        session.give_up_turn = giving_up  # type: ignore[method-assign]

    @property
    def waits(self) -> list[bool]:
        """Of each `TakeTurn`: whether it waits for a turn; False: it gives one up."""
        return [command.wait_ms > 0 for command in self.asked]

    def add(self, txn: TableTransaction) -> None:
        txn.put(A, ROW, b"%d" % (int(txn.get(A, ROW) or 0) + 1))

    def add_disturbed(self, times: int = 1) -> Callable[[TableTransaction], None]:
        """`add`, while others write the row in the first tries."""
        left = times

        def add(txn: TableTransaction) -> None:
            nonlocal left
            self.add(txn)
            if left:
                left -= 1
                self.put(self.blind, k=str(10 * (left + 1)))

        return add

    def add_noted(self, tries: list[float]) -> Callable[[TableTransaction], None]:
        """`add`, which notes the time of each try."""

        def add(txn: TableTransaction) -> None:
            tries.append(self.clock.monotonic())
            self.add(txn)

        return add

    def held(self) -> dict[bytes, Any]:
        """The transactions that have a turn at the row, or want one."""
        assert self.controller is not None
        queue = self.controller._memory.row_turns.queues.get((A, fingerprint(ROW)), None)
        return {} if queue is None else {x.txn_id: x for x in (queue.holder, *queue.waiting) if x}

    def occupy(self) -> bytes:
        """Another transaction takes the turn."""
        session = self.others._shared.session
        txn_id = session.new_txn_id("bank", session.now() + 5)
        command = r.TakeTurn(txn_id, None, A, fingerprint(ROW), (A,), 5_000)
        session.take_turn(command, session.now() + 5)
        return txn_id

    def close(self) -> None:
        self.rows.close()
        self.others.close()


@pytest.fixture
def hot() -> Iterator[Hot]:
    made = Hot()
    yield made
    made.close()


def test_after_its_locks_broke_it_reads_in_a_turn_and_commits_in_it(hot: Hot) -> None:
    result = hot.rows.transact(hot.add_disturbed())
    assert hot.waits == [True]
    assert result.txn_id == hot.asked[0].txn_id, "the turn ends with its commit"
    assert hot.rows.snapshot().get(A, ROW) == b"11"
    assert not hot.held()


def test_without_a_conflict_no_turn_is_asked_for(hot: Hot) -> None:
    hot.rows.transact(hot.add)
    assert not hot.asked


def test_the_turn_goes_over_to_the_next_try(hot: Hot) -> None:
    result = hot.rows.transact(hot.add_disturbed(3))
    assert hot.waits == [True, True, True]
    first, second, third = hot.asked
    assert (first.former, second.former, third.former) == (None, first.txn_id, second.txn_id)
    assert result.txn_id == third.txn_id
    assert not hot.held()


def test_what_ends_without_a_commit_gives_its_turn_up(hot: Hot) -> None:
    def fails(txn: TableTransaction) -> None:
        hot.add(txn)
        if hot.asked:
            raise ZeroDivisionError
        hot.put(hot.blind, k="5")

    with pytest.raises(ZeroDivisionError):
        hot.rows.transact(fails)
    assert hot.waits == [True, False]
    assert hot.asked[1].txn_id == hot.asked[0].txn_id

    def reads(txn: TableTransaction) -> bytes | None:
        if len(hot.asked) == 2:
            hot.add(txn)
            hot.put(hot.blind, k="6")
        return txn.get(A, ROW)

    assert hot.rows.transact(reads).value == b"6"
    assert hot.waits == [True, False, True, False]
    hot.rows.transact(hot.add)
    assert not hot.held()


@pytest.mark.parametrize("level", [1, 2])
def test_below_its_feature_level_it_tries_again_as_ever(level: int) -> None:
    hot = Hot(level)
    hot.rows.transact(hot.add_disturbed(2))
    assert hot.rows.snapshot().get(A, ROW) == b"11"
    assert hot.waits == [True], "it does not ask again at once"
    hot.clock.sleep(NO_TURNS_S + 1)
    hot.rows.transact(hot.add_disturbed())
    assert hot.waits == [True, True]
    hot.close()


def test_a_commit_that_would_break_the_holders_locks_takes_a_turn(hot: Hot) -> None:
    """The holder never commits: its turn ends after a second."""
    holder = hot.occupy()
    tries: list[float] = []
    result = hot.rows.transact(hot.add_noted(tries))
    assert hot.waits == [True]
    assert len(tries) == 1, "nobody changed the row, so the same try commits"
    assert 0.5 < hot.clock.monotonic() - tries[0] < 1.5
    assert result.txn_id == hot.asked[0].txn_id
    assert holder not in hot.held()


def test_a_turn_is_taken_in_the_table_where_others_take_turns(hot: Hot) -> None:
    """The same key is locked in two tables."""
    hot.occupy()

    def add(txn: TableTransaction) -> None:
        txn.get(B, ROW)
        hot.add(txn)
        txn.put(B, ROW, b"too")

    hot.rows.transact(add)
    assert [(command.table, command.point) for command in hot.asked] == [(A, fingerprint(ROW))]


def test_advice_without_a_table_is_not_taken(hot: Hot) -> None:
    """Leaders of earlier builds name only the fingerprint of the row."""
    hot.occupy()
    session = hot.rows._shared.session
    shot = session.locked_shot

    def by_earlier_build(command: r.OneShot, *more: Any) -> r.Outcome | r.Revalidate:
        answer = shot(command, *more)
        if isinstance(answer, r.Revalidate):
            return replace(answer, writers=answer.writers[:1])
        return answer

    session.locked_shot = by_earlier_build  # type: ignore[assignment,method-assign]
    sent = hot.sent
    hot.rows.transact(hot.add)
    assert hot.sent == sent + 2
    assert not hot.asked
    assert hot.rows.snapshot().get(A, ROW) == b"2"


def test_a_row_at_which_others_took_turns_is_not_read_without_one(hot: Hot) -> None:
    hot.occupy()
    hot.rows.transact(hot.add)
    sent, tries = hot.sent, list[float]()
    hot.rows.transact(hot.add_noted(tries))
    assert len(tries) == 1
    assert hot.sent == sent + 1
    assert hot.waits == [True, True]
    hot.rows.transact(hot.add)
    assert hot.waits == [True, True], "nobody waited"
    hot.rows._chain.note((A, ROW), taken=True)
    hot.clock.sleep(HOT_ROW_S)
    hot.rows.transact(hot.add)
    assert hot.waits == [True, True]


def test_a_late_copy_of_an_advised_commit_does_no_harm(hot: Hot) -> None:
    """The function is called again only once the commit's locks are broken, so that no copy is carried out."""
    hot.occupy()
    session, sent = hot.rows._shared.session, []
    shot, take = session.locked_shot, session.take_turn

    def noted(command: r.OneShot, *more: Any) -> r.Outcome | r.Revalidate:
        sent.append(command)
        return shot(command, *more)

    def disturbed(command: r.TakeTurn, deadline: float) -> r.Revalidate:
        if len(sent) == 1:
            hot.put(hot.blind, k="20")
        return take(command, deadline)

    session.locked_shot, session.take_turn = noted, disturbed  # type: ignore[assignment,method-assign]
    result = hot.rows.transact(hot.add)
    advised, asked, second = sent
    assert asked == advised, "the answer shows that no copy was carried out"
    assert hot.waits == [True, True]
    assert hot.asked[0].txn_id == hot.asked[1].former == advised.txn_id
    assert result.txn_id == second.txn_id
    late = hot.blind._shared.session
    assert isinstance(late.locked_shot(advised, late.now() + 5), r.Revalidate)
    assert hot.rows.snapshot().get(A, ROW) == b"21"


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_copy_of_an_advised_commit_that_is_carried_out_is_its_outcome(
    hot: Hot, by_hand: bool
) -> None:
    """Its own write has broken its locks: the function is not called again."""
    hot.occupy()
    session, late, tries = hot.rows._shared.session, hot.blind._shared.session, list[float]()
    shot = session.locked_shot

    def copied(command: r.OneShot, *more: Any) -> r.Outcome | r.Revalidate:
        answer = shot(command, *more)
        if isinstance(answer, r.Revalidate):
            assert isinstance(late.locked_shot(command, late.now() + 5), r.Outcome)
        return answer

    session.locked_shot = copied  # type: ignore[assignment,method-assign]
    if by_hand:
        with hot.rows.begin() as txn:
            hot.add(txn)
            result = txn.commit()
    else:
        result = hot.rows.transact(hot.add_noted(tries))
        assert len(tries) == 1
        assert result.txn_id == hot.asked[0].txn_id
    assert hot.client.state(result.txn_id).state == "COMMITTED"
    assert hot.rows.snapshot().get(A, ROW) == b"2"


def test_other_transactions_are_only_delayed(hot: Hot) -> None:
    hot.occupy()
    with hot.rows.begin() as txn:
        hot.add(txn)
        txn.commit()
    assert not hot.asked
    hot.put(hot.blind, k="7")
    assert hot.rows.snapshot().get(A, ROW) == b"7"


def test_a_new_leader_is_asked_again(hot: Hot) -> None:
    """Turns are lost with their leader. The one that waits asks again when no answer comes."""
    hot.occupy()
    take = hot.rows._shared.session.take_turn

    def with_takeover(command: r.TakeTurn, deadline: float) -> r.Revalidate:
        hot.stop_controller()
        hot.start_controller()
        return take(command, deadline)

    hot.rows._shared.session.take_turn = with_takeover  # type: ignore[method-assign]
    hot.rows.transact(hot.add)
    assert hot.waits == [True]
    assert not hot.held()


def test_at_its_deadline_a_hot_row_is_a_broken_lock(hot: Hot) -> None:
    hot.rows._chain.note((A, ROW), taken=True)
    assert Member(hot.rows._chain, hot.rows.deadline(0)).must_enter(A, ROW)
    with pytest.raises(LocksBroken, match="others take turns") as raised:
        hot.rows.transact(hot.add, timeout=0)
    assert (raised.value.table, raised.value.key) == (A, ROW)
