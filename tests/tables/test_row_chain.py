"""The chain at a hot row: calls of `transact` that read what earlier calls have sent, and what becomes of them.

Most tests have one thread: a call begins when the command of the call before it was sent, and is not answered yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from threading import Thread
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest

from anabranch.client import row_chain
from anabranch.client.row_chain import Member
from anabranch.client.session import Copy
from anabranch.client.table_locks import Locks
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import AnabranchError, LocksBroken, NotANumber, NotReady
from anabranch.protocol import limits
from anabranch.protocol.defaults import CHAIN_TURN, NO_TURNS_S
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.types import Transacted
from tests.tables.test_row_turns import ROW, Hot
from tests.tables.test_transactions import A, B

Use = Callable[[TableTransaction], Any]


class OtherThread:
    """As if another thread waited in the chain, which begins when it is woken."""

    def __init__(self, its: row_chain.Chain) -> None:
        self._its, self.member, self.wake = its, None, self

    def set(self) -> None:
        self._its._holder = None


class Chain(Hot):
    """A hot row, and calls that are made as soon as another one's command is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[r.OneShot] = []
        self.nested: list[Callable[[], Any]] = []  # of the next commands, one each
        session = self.rows._shared.session
        shot = session.locked_shot

        def noted(
            command: r.OneShot, deadline: float, posted: Copy | None = None, **_: bool
        ) -> Any:
            self.commands.append(command)
            posted = posted or session.post(command, deadline)
            if self.nested:
                Context().run(self.nested.pop(0))
            return shot(command, deadline, posted)

        session.locked_shot = noted  # type: ignore[method-assign]
        self.rows._chain.note((A, ROW))

    def value(self, key: bytes = ROW, table: str = A) -> bytes | None:
        with self.rows.snapshot() as view:
            return view.get(table, key)

    def let_another_wait(self) -> None:
        its = self.rows._chain
        its._waiting.append(cast("Any", OtherThread(its)))

    def members(self, count: int = 2) -> list[Member]:
        return [Member(self.rows._chain, self.rows.deadline(60)) for _ in range(count)]

    def then(self, *uses: Use, **how: Any) -> list[Transacted[Any]]:
        """Call `transact` with each function when the one before it has sent its command; the results in order."""
        found: list[Any] = [None] * len(uses)

        def call(number: int) -> None:
            found[number] = self.rows.transact(uses[number], **how)

        self.nested = [lambda number=n: call(number) for n in range(1, len(uses))]  # type: ignore[misc]
        call(0)
        return found


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    made.close()


def test_each_call_computes_on_what_the_one_before_has_sent(chain: Chain) -> None:
    tries: list[float] = []
    results = chain.then(*[chain.add_noted(tries)] * 5)
    assert chain.value() == b"6"
    assert len(tries) == len(chain.commands) == 5, "none was repeated"
    assert not chain.asked, "nobody else wants the row"
    ids = [result.txn_id for result in results]
    assert [command.txn_id for command in chain.commands] == ids
    follows = [[rows.txn_id for rows in command.follows] for command in chain.commands]
    assert follows == [[], *([txn_id] for txn_id in ids[:-1])]
    times = [result.commit_timestamp for result in results]
    assert times == sorted(times)
    assert all(its.points == () for command in chain.commands[1:] for its in command.locks)


def test_rows_of_several_commits_are_read(chain: Chain) -> None:
    def write(key: bytes) -> Use:
        def use(txn: TableTransaction) -> None:
            chain.add(txn)
            txn.put(B, key, b"of " + key)

        return use

    def read(txn: TableTransaction) -> list[bytes | None]:
        chain.add(txn)
        found = [txn.get(B, key) for key in (b"p", b"q", b"none")]
        txn.delete(B, b"p")
        return found

    def last(txn: TableTransaction) -> bytes | None:
        chain.add(txn)
        return txn.get(B, b"p")

    *_, third, fourth = chain.then(write(b"p"), write(b"q"), read, last)
    assert third.value == [b"of p", b"of q", None]
    assert fourth.value is None
    (none,) = [its.points for its in chain.commands[2].locks if its.table == B]
    assert none == (fingerprint(b"none"),), "locked since the snapshot"
    assert chain.value(b"p", B) is None


def disturbed(chain: Chain, use: Use) -> Use:
    """Another client writes the row while the first try computes."""
    left = [1]

    def call(txn: TableTransaction) -> Any:
        found = use(txn)
        if left:
            left.pop()
            chain.put(chain.blind, k="100")
        return found

    return call


def test_if_a_commit_fails_those_that_follow_it_are_computed_again(chain: Chain) -> None:
    """The commit is not known to have failed until the second call has sent its command, which is refused."""
    tries: list[float] = []
    add = chain.add_noted(tries)

    def fails() -> None:
        chain.rows.transact(then_fails)

    def then_fails(txn: TableTransaction) -> None:
        add(txn)
        if len(tries) == 1:
            (first,) = chain.rows._chain._sent
            chain.nested = [lambda: chain.rows._chain.end(first, 0)]

    chain.nested = [fails]
    chain.rows.transact(disturbed(chain, chain.add))
    assert chain.value() == b"102"
    assert len(tries) == 2
    followed = next(command for command in chain.commands if command.follows)
    assert chain.client.state(followed.txn_id).state == "ABORTED"


def test_an_error_is_raised_only_if_what_it_was_computed_from_is_committed(chain: Chain) -> None:
    read: list[bytes | None] = []

    def fails(txn: TableTransaction) -> None:
        read.append(txn.get(A, ROW))
        raise ZeroDivisionError

    def broken() -> None:
        with pytest.raises(ZeroDivisionError):
            chain.rows.transact(fails)

    chain.nested = [broken]
    chain.rows.transact(disturbed(chain, chain.add))
    assert read[0] == b"2", "as the commit under way writes it"
    assert read[-1] == b"1", "it was not committed"


def test_a_result_without_a_commit_is_of_committed_rows(chain: Chain) -> None:
    read: list[bytes | None] = []

    def looks(txn: TableTransaction) -> bytes | None:
        read.append(txn.get(A, ROW))
        return read[-1]

    first, second = chain.then(disturbed(chain, chain.add), looks)
    assert first.txn_id != NO_TXN == second.txn_id
    assert read[0] == b"2"
    assert second.value == read[-1] != b"2"


def alone(kind: str) -> Use:
    def use(txn: TableTransaction) -> Any:
        if kind == "time":
            assert txn.timestamp
        found = txn.get(A, ROW)
        if kind == "range":
            list(txn.scan(A, b"a", b"z"))
        if kind == "locked range":
            txn.lock(A, prefix=b"k")
        if kind == "deleted range":
            txn.delete_range(A, prefix=b"k")
        if kind == "long":
            txn.flush()
        txn.put(B, b"x", found or b"")
        return found

    return use


KINDS = ("time", "range", "locked range", "deleted range", "long")


@pytest.mark.parametrize("kind", KINDS)
def test_what_needs_committed_rows_waits_for_them(chain: Chain, kind: str) -> None:
    first, second = chain.then(chain.add, alone(kind))
    assert second.commit_timestamp > first.commit_timestamp
    assert second.value == b"2"
    assert not any(command.follows for command in chain.commands)


def test_reads_without_locks_are_of_the_snapshot(chain: Chain) -> None:
    def reads(txn: TableTransaction) -> bytes | None:
        found = txn.get(A, ROW, lock=False)
        txn.put(B, b"x", b"v")
        return found

    assert chain.then(chain.add, reads)[1].value == b"1"

    def adds_and_reads(txn: TableTransaction) -> bytes | None:
        chain.add(txn)
        return txn.get(B, b"x", lock=False)

    assert chain.then(chain.add, adds_and_reads)[1].value == b"v"
    assert chain.value() == b"4"


def test_a_name_that_was_committed_is_answered_on_committed_rows(chain: Chain) -> None:
    before = chain.rows.transact(chain.add, name="n")
    found: list[Any] = []
    chain.nested = [lambda: found.append(chain.rows.transact(chain.add, name="n"))]
    chain.rows.transact(chain.add)
    assert found[0].txn_id == before.txn_id


def scan(txn: TableTransaction) -> None:
    list(txn.scan(A, b"a", b"z"))


@pytest.mark.parametrize("needs_commits", [scan, TableTransaction.flush])
def test_a_function_that_hides_the_error_is_called_again_as_well(
    chain: Chain, needs_commits: Use
) -> None:
    def hides(txn: TableTransaction) -> None:
        chain.add(txn)
        try:
            needs_commits(txn)
        except Exception:  # noqa: BLE001
            txn.put(B, b"x", b"hidden")

    chain.then(chain.add, hides)
    assert chain.value(b"x", B) is None
    assert chain.value() == b"3"


def test_a_function_that_raises_its_own_error_instead_is_called_again_as_well(chain: Chain) -> None:
    """Its first read is of another row, so it has to begin again at the hot one."""

    def translates(txn: TableTransaction) -> None:
        txn.get(B, b"x")
        try:
            chain.add(txn)
        except AnabranchError as error:
            raise ZeroDivisionError from error

    chain.rows.transact(translates)
    assert chain.value() == b"2"


def test_without_time_for_another_try_the_caller_gets_a_broken_lock(chain: Chain) -> None:
    """Its error is not `HotRow`, which is no public class."""
    replica, opens = chain.rows, chain.rows._open_snapshot
    opened: list[object] = []

    def opens_two(*given: Any) -> Any:
        opened.append(given)
        if len(opened) > 2:
            raise NotReady("the replica lags")
        return opens(*given)

    def asks_for_the_time(txn: TableTransaction) -> int:
        chain.add(txn)
        return txn.timestamp

    def second() -> None:
        with patch.object(replica, "_open_snapshot", opens_two), pytest.raises(LocksBroken):
            replica.transact(asks_for_the_time)

    chain.nested = [second]
    replica.transact(chain.add)
    assert len(opened) == 3


def test_a_read_does_not_list_all_that_was_read_before_it(chain: Chain) -> None:
    """The list is made once, for the command. How long it may become is counted without it."""
    keys = [b"%d" % number for number in range(20)]

    def writes(txn: TableTransaction) -> None:
        chain.add(txn)
        for key in keys:
            txn.put(A, key, b"v")

    def reads(txn: TableTransaction) -> list[bytes | None]:
        chain.add(txn)
        return [txn.get(A, key) for key in keys]

    follows = Locks.follows
    with patch.object(Locks, "follows", autospec=True, side_effect=follows) as listed:
        second = chain.then(writes, reads)[1]
    assert second.value == [b"v"] * len(keys)
    assert listed.call_count == len(chain.commands)


def test_changes_are_not_read_by_others(chain: Chain) -> None:
    """Their values are not known here."""

    def changes(txn: TableTransaction) -> None:
        chain.add(txn)
        txn.add(B, b"n", 5)

    def reads(txn: TableTransaction) -> bytes | None:
        chain.add(txn)
        return txn.get(B, b"n")

    _, second = chain.then(changes, reads)
    assert second.value == b"5"
    assert chain.value() == b"3"


def test_with_a_takeover_between_two_commits(chain: Chain) -> None:
    def takeover(txn: TableTransaction) -> None:
        chain.add(txn)
        chain.stop_controller()
        chain.start_controller()

    chain.then(chain.add, takeover, chain.add)
    assert chain.value() == b"4"


def test_a_turn_passes_along_the_chain(chain: Chain) -> None:
    """Each command names the next one while calls wait, or commits are under way."""
    chain.rows._chain.note((A, ROW), taken=True)

    def add(txn: TableTransaction) -> None:
        chain.add(txn)
        chain.let_another_wait()

    chain.then(add, add, chain.add)
    *heirs, unused = [command.turn_to for command in chain.commands]
    assert heirs == [command.txn_id for command in chain.commands[1:]]
    assert chain.waits == [True, False]
    assert chain.asked[1].txn_id == unused, "given up when all were answered"
    assert chain.value() == b"4"
    assert not chain.held()


def in_turn(chain: Chain, calls: int) -> list[bytes]:
    """One call, and others, one after the other, while its commit is under way; the ids in order."""
    chain.rows._chain.note((A, ROW), taken=True)

    def first(txn: TableTransaction) -> None:
        chain.add(txn)
        chain.let_another_wait()

    def others() -> None:
        for _ in range(calls):
            chain.rows.transact(chain.add)

    chain.nested = [others]
    chain.rows.transact(first)
    return [command.txn_id for command in chain.commands]


def test_a_turn_is_kept_while_commits_are_under_way(chain: Chain) -> None:
    """A program that changes a row in a loop calls again once its commit is answered."""
    ids = in_turn(chain, CHAIN_TURN - 3)
    heirs = [command.turn_to for command in chain.commands]
    assert heirs[:-1] == ids[1:]
    assert chain.waits == [True, False]
    assert chain.asked[1].txn_id == heirs[-1]
    assert chain.value() == b"%d" % (CHAIN_TURN - 1)
    assert not chain.held()


def test_a_chain_keeps_a_turn_for_some_commits_only(chain: Chain) -> None:
    ids = in_turn(chain, CHAIN_TURN + 2)
    heirs = [command.turn_to for command in chain.commands]
    assert heirs[:CHAIN_TURN] == [*ids[1:CHAIN_TURN], None]
    assert heirs[CHAIN_TURN:] == [None] * 3
    assert chain.waits == [True], "nobody else wants the row"
    assert chain.value() == b"%d" % (CHAIN_TURN + 4)
    assert not chain.held()


def test_a_chain_passes_no_turn_on_that_is_about_to_end(chain: Chain) -> None:
    member = chain.members(1)[0]
    assert member._enter((A, ROW), ask=True)
    txn_id = member.turn_id(marked=False)
    assert txn_id is not None
    chain.let_another_wait()
    chain.clock.sleep(limits.TURN_MS.value / 2000)
    assert member.heir(txn_id, chain.rows.deadline(60)) is None


def test_a_commit_that_fails_in_a_turn_gives_the_turn_up(chain: Chain) -> None:
    """Its command names another transaction, to which the turn has not passed."""
    chain.put(chain.blind, B, n="no number")
    chain.rows._chain.note((A, ROW), taken=True)

    def wrong(txn: TableTransaction) -> None:
        chain.add(txn)
        txn.add(B, b"n", 1)
        chain.let_another_wait()

    with pytest.raises(NotANumber):
        chain.rows.transact(wrong)
    assert chain.commands[0].turn_to is not None
    assert chain.value() == b"1"
    assert not chain.held()


def test_a_call_that_is_overtaken_while_it_commits_gives_up_what_it_can_not_pass_on(
    chain: Chain,
) -> None:
    its = chain.rows._chain
    its.note((A, ROW), taken=True)
    session = chain.rows._shared.session
    shot = session.locked_shot

    def overtaken(command: r.OneShot, *more: Any) -> Any:
        answer = shot(command, *more)
        its._grant(chain.members(1)[0])
        return answer

    def add(txn: TableTransaction) -> None:
        chain.add(txn)
        chain.let_another_wait()

    session.locked_shot = overtaken  # type: ignore[assignment,method-assign]
    chain.rows.transact(add, isolation="snapshot")
    assert chain.commands[0].turn_to is not None
    assert chain.value() == b"2"
    assert not chain.held()


def test_a_chain_goes_on_while_its_commits_also_change_rows(chain: Chain) -> None:
    """Only the changed rows are not known."""
    tries: list[float] = []
    add = chain.add_noted(tries)

    def changes(txn: TableTransaction) -> None:
        add(txn)
        txn.add(B, b"n", 5)

    chain.then(*[changes] * 4)
    assert len(tries) == 4
    assert (chain.value(), chain.value(b"n", B)) == (b"5", b"20")


def test_a_commit_that_takes_another_turn_passes_it_to_another_id(chain: Chain) -> None:
    """A call has committed by the id to which the first turn passed. A second use would seem committed, too."""
    chain.rows._chain.note((A, ROW), taken=True)
    session = chain.rows._shared.session
    take = session.take_turn
    results: list[Transacted[Any]] = []

    def first(txn: TableTransaction) -> None:
        chain.add(txn)
        if not chain.commands:
            chain.let_another_wait()
            # The leader forgets the turn, and another client takes it, so the command is advised to take a turn.
            chain.stop_controller()
            chain.start_controller()
            chain.occupy()

    def reads() -> None:
        chain.rows._chain._sent.clear()  # as if so many commits were sent that this one is forgotten
        results.append(chain.rows.transact(lambda txn: txn.put(B, b"seen", txn.get(A, ROW) or b"")))
        chain.nested = [adds]

    def adds() -> None:
        results.append(chain.rows.transact(chain.add))

    def taken(command: r.TakeTurn, deadline: float) -> r.Revalidate:
        answer = take(command, deadline)
        if results:
            chain.let_another_wait()
        return answer

    session.take_turn = taken  # type: ignore[method-assign]
    chain.nested = [reads]
    results.append(chain.rows.transact(first))
    assert len({result.txn_id for result in results}) == 3
    assert chain.value() == b"3", "both have added"


def test_of_two_concurrent_calls_one_gets_the_turns_id(chain: Chain) -> None:
    """The first one is overtaken, as it takes too long, while it finds out whether the turn is over."""
    its, (first, second) = chain.rows._chain, chain.members()
    assert first._enter((A, ROW), ask=True)
    session, now = its.session, its.session.now
    ids: list[bytes | None] = []

    def overtake() -> None:
        with its._lock:
            its._grant(second)
        ids.append(second.turn_id(marked=False))

    thread = Thread(target=overtake, daemon=True)

    def now_later() -> float:
        session.now = now  # type: ignore[method-assign]
        thread.start()
        thread.join(0.1)
        return now()

    session.now = now_later  # type: ignore[method-assign]
    ids.append(first.turn_id(marked=False))
    thread.join(60)
    assert len(ids) == 2
    assert ids.count(None) == 1


@pytest.fixture
def waited(chain: Chain, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each wait in the chain. The clock passes them; nothing wakes a call."""
    found: list[float] = []

    def wait(seconds: float) -> bool:
        found.append(seconds)
        chain.clock.sleep(seconds)
        return False

    signal = SimpleNamespace(wait=wait, set=lambda: None)
    monkeypatch.setattr(row_chain, "here", lambda: SimpleNamespace(signal=lambda: signal))
    return found


def test_a_call_sees_within_a_second_that_the_turn_before_it_has_come(
    chain: Chain, waited: list[float]
) -> None:
    """It knew only that the turn comes in ten seconds at the latest."""
    its, (slow, second) = chain.rows._chain, chain.members()
    began = chain.clock.monotonic()
    assert its.enter(slow, began + 60)
    its.wait_for_turn(slow, began + 10)
    sleep = chain.clock.sleep

    def turn_comes(seconds: float) -> None:
        its.begin_turn(slow, 1)
        chain.clock.sleep = sleep  # type: ignore[method-assign]
        sleep(seconds)

    chain.clock.sleep = turn_comes  # type: ignore[method-assign]
    assert its.enter(second, began + 60)
    assert chain.clock.monotonic() - began <= 2
    assert len(waited) <= 2


def test_a_call_that_is_not_the_next_one_does_not_spin(chain: Chain, waited: list[float]) -> None:
    """It wakes once a second, even if the call that computes has long had its second."""
    its, (slow, third) = chain.rows._chain, chain.members()
    began = chain.clock.monotonic()
    assert its.enter(slow, began + 60)
    chain.let_another_wait()
    assert not its.enter(third, began + 5)
    assert waited == [1.0] * 5


def test_a_call_that_was_overtaken_passes_no_turn_on(chain: Chain) -> None:
    """The chain's turn is that of the call that has overtaken it."""
    its, (slow, quick) = chain.rows._chain, chain.members()
    assert slow._enter((A, ROW), ask=True)
    txn_id = slow.turn_id(marked=False)
    assert txn_id is not None
    chain.let_another_wait()
    assert slow.heir(txn_id, chain.rows.deadline(60)) is not None
    its._grant(quick)
    slow._pass_on()
    assert its.turn is None


def test_while_the_controller_knows_no_turns_a_hot_row_is_read_outside_the_chain(
    chain: Chain,
) -> None:
    """No call may enter then, so a call that had to would find no end."""
    its, tries = chain.rows._chain, list[float]()
    its.no_turns_until = its.session.now() + NO_TURNS_S
    assert its.is_hot((A, ROW))
    chain.rows.transact(chain.add_noted(tries))
    assert len(tries) == 1


def test_a_slow_call_holds_up_the_others_for_a_second(chain: Chain) -> None:
    slow, quick = chain.members()
    assert slow._enter((A, ROW), ask=False)
    began = chain.clock.monotonic()
    assert chain.rows._chain.is_in(slow)
    chain.clock.sleep(limits.TURN_MS.value / 1000)
    assert quick._enter((A, ROW), ask=False)
    assert chain.rows._chain.is_in(quick)
    assert chain.clock.monotonic() - began < 2
    slow.give_up()
    assert chain.rows._chain.is_in(quick), "the slow one has lost its place"
    quick.give_up()
