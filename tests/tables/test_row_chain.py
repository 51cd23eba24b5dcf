"""The chain at a hot row: calls of `transact` that read what earlier calls have sent, and what becomes of them.

All is in one thread: a call begins when the command of the call before it is on its way, and not answered yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import Context
from typing import Any

import pytest

from anabranch.client.row_chain import Member
from anabranch.client.table_transaction import TableTransaction
from anabranch.core.locks.table_writes import fingerprint
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.types import Transacted
from tests.tables.test_row_turns import ROW, Hot
from tests.tables.test_transactions import A, B

Use = Callable[[TableTransaction], Any]


class Chain(Hot):
    """A hot row, and calls that are made as soon as another one's command is on its way."""

    def __init__(self) -> None:
        super().__init__()
        self.commands: list[r.OneShot] = []
        self.nested: list[Callable[[], Any]] = []  # of the next commands, one each
        session = self.rows._shared.session
        shot = session.locked_shot

        def noted(command: r.OneShot, deadline: float, sent: Any = None) -> Any:
            self.commands.append(command)

            def on_its_way() -> None:
                if sent is not None:
                    sent()
                if self.nested:
                    Context().run(self.nested.pop(0))

            return shot(command, deadline, on_its_way)

        session.locked_shot = noted  # type: ignore[method-assign]
        self.rows._chain.note((A, ROW))

    def value(self, key: bytes = ROW, table: str = A) -> bytes | None:
        with self.rows.snapshot() as view:
            return view.get(table, key)

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


def test_a_function_that_hides_the_error_is_called_again_as_well(chain: Chain) -> None:
    def hides(txn: TableTransaction) -> None:
        chain.add(txn)
        try:
            list(txn.scan(A, b"a", b"z"))
        except Exception:  # noqa: BLE001
            txn.put(B, b"x", b"hidden")

    chain.then(chain.add, hides)
    assert chain.value(b"x", B) is None
    assert chain.value() == b"3"


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
    """Each command names the next one while calls wait; the last one ends the turn."""
    chain.rows._chain.note((A, ROW), taken=True)

    class Waits:
        """As if another thread waited, which begins when it is woken."""

        member, wake = None, None

        def set(self) -> None:
            chain.rows._chain._holder = None

    waits: Any = Waits()
    waits.wake = waits

    def add(txn: TableTransaction) -> None:
        chain.add(txn)
        chain.rows._chain._waiting.append(waits)

    chain.then(add, add, chain.add)
    heirs = [command.turn_to for command in chain.commands]
    assert heirs == [*(command.txn_id for command in chain.commands[1:]), None]
    assert chain.waits == [True]
    assert not chain.held()
    assert chain.value() == b"4"


def test_a_slow_call_holds_up_the_others_for_a_second(chain: Chain) -> None:
    slow, quick = (Member(chain.rows._chain, chain.rows.deadline(60)) for _ in range(2))
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
