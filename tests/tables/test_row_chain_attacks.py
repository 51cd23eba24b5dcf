from __future__ import annotations
import threading, time
from contextvars import Context
from collections.abc import Iterator
from typing import Any
import pytest
from anabranch.client.row_chain import HotRow, Member, Chain as RowChain, RowTurn, SentRows
from anabranch.client.table_locks import Locks
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import AnabranchError, LocksBroken
from tests.tables.test_row_chain import Chain
from tests.tables.test_row_turns import ROW
from tests.tables.test_transactions import A, B


@pytest.fixture
def chain() -> Iterator[Chain]:
    made = Chain()
    yield made
    made.close()


def waiter(chain: Chain) -> Any:
    class Waits:
        member, wake = None, None
        def set(self) -> None:
            chain.rows._chain._holder = None
    waits: Any = Waits()
    waits.wake = waits
    return waits


def test_heir_is_used_once(chain: Chain) -> None:
    chain.rows._chain.note((A, ROW), taken=True)
    waits = waiter(chain)
    first = True

    def one(txn):
        nonlocal first
        chain.add(txn)
        txn.add(B, b"n", 5)           # so its rows are not known: nobody follows it
        if first:
            first = False
            chain.rows._chain._waiting.append(waits)   # another thread waits
            chain.stop_controller(); chain.start_controller()   # the leader forgets turns …
            chain.occupy()                                       # … and another client has it

    found: list[Any] = []
    def reads(txn):
        txn.put(B, b"seen", txn.get(A, ROW))

    def two() -> None:
        found.append(chain.rows.transact(reads))
        # when the one before sends its second copy, a third call begins
        chain.nested = [three]

    def three() -> None:
        found.append(chain.rows.transact(chain.add))

    session = chain.rows._shared.session
    take = session.take_turn
    def taken(command, deadline):
        answer = take(command, deadline)
        if found:
            chain.rows._chain._waiting.append(waits)   # a third thread waits
        return answer
    session.take_turn = taken
    chain.nested = [two]
    before = int(chain.value())
    res = chain.rows.transact(one)
    for c in chain.commands:
        print(c.txn_id.hex(), c.turn_to and c.turn_to.hex(), len(c.events), len(c.follows), len(c.changes))
    print([f.txn_id.hex() for f in found], res.txn_id.hex(), chain.value())
    assert len({f.txn_id for f in found} | {res.txn_id}) == 3
    assert int(chain.value()) == before + 2, "two adds were reported as committed"


def test_turn_id_once(chain: Chain) -> None:
    c = chain.rows._chain
    one, two = (Member(c, chain.rows.deadline(60)) for _ in range(2))
    assert one._enter((A, ROW), ask=True)
    assert c.turn is not None
    session, got = c.session, []
    now = session.now
    def overtaken() -> float:
        if c._lock.locked():
            return now()
        session.now = now
        chain.clock.sleep(0.999)
        c._grant(two)                 # as `_wait` does after a second
        got.append(two.turn_id(marked=False))
        return now() - 0.999
    session.now = overtaken
    got.append(one.turn_id(marked=False))
    got.append(two.turn_id(marked=False))
    found = [each for each in got if each]
    assert len(set(found)) == len(found), got


def test_translated(chain: Chain) -> None:
    class Mine(Exception): ...
    def use(txn):
        txn.get(B, b"x")
        try:
            chain.add(txn)
        except AnabranchError as e:
            raise Mine from e
    chain.rows.transact(use)
    assert chain.value() == b"2"


def test_hidden_flush(chain: Chain) -> None:
    def hides(txn):
        chain.add(txn)
        try:
            txn.flush()
        except Exception:
            txn.put(B, b"x", b"hidden")
    chain.then(chain.add, hides)
    assert chain.value(b"x", B) is None


def test_deadline_error(chain: Chain) -> None:
    def use(txn):
        chain.add(txn)
        txn.timestamp
    real = chain.rows._open_snapshot
    from anabranch.errors import NotReady
    n = [0]
    def opens(*a):
        n[0] += 1
        if n[0] > 2:
            raise NotReady("the replica lags")
        return real(*a)
    def second():
        chain.rows._open_snapshot = opens
        try:
            chain.rows.transact(use)
        except Exception as e:
            errors.append(e)
        finally:
            chain.rows._open_snapshot = real
    errors = []
    chain.nested = [second]
    chain.rows.transact(chain.add)
    print(repr(errors))
    assert not isinstance(errors[0], HotRow)


class Session:
    now = staticmethod(time.monotonic)


def test_slow_after_turn() -> None:
    c = RowChain(Session(), None, None, (A,))
    slow, second, third = (Member(c, time.monotonic() + 60) for _ in range(3))
    assert c.enter(slow, time.monotonic() + 60)
    c.wait_for_turn(slow, time.monotonic() + 10)   # as _take does
    calls = [0]
    took = {}
    def go(m, name):
        t = time.monotonic(); assert c.enter(m, time.monotonic() + 60); took[name] = time.monotonic() - t; c.leave(m)
    t2 = threading.Thread(target=go, args=(second, "second"), daemon=True); t2.start()
    time.sleep(0.2)
    c.begin_turn(slow, 1)     # the turn has come; now its second begins
    class Counted:
        def __init__(self): self.c = 0
        def __call__(self): self.c += 1; return time.monotonic()
    counted = Counted(); Session.now = staticmethod(counted)
    t3 = threading.Thread(target=go, args=(third, "third"), daemon=True); t3.start()
    t2.join(3)
    print(took, "questions for the time", counted.c)
    Session.now = staticmethod(time.monotonic)
    late = "second" not in took
    c.leave(slow)
    assert not late, counted.c


def test_quadratic() -> None:
    from types import SimpleNamespace
    sent = SentRows(b"1" * 16, {})
    t = time.process_time()
    locks = Locks()
    for n in range(2000):
        locks.follow(A, b"%d" % n, sent)
        locks.follows_count
    took = time.process_time() - t
    print("2000 reads", took)
    assert took < 0.5
