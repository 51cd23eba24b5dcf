"""Turns at rows: transactions come to a row one after the other, and no commit depends on a turn."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch.core.locks.row_turns import next_due_ms
from anabranch.core.locks.table_writes import fingerprint
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.test_table_locks import PLAIN, A, B, Bank, told

ROW = b"hot"
TURN_MS = limits.TURN_MS.value


class Queue(Bank):
    """Transactions that ask for one row of table A, each under its own label."""

    def __init__(self) -> None:
        super().__init__()
        self.ask("level", r.SetFeatureLevel(LEVEL), lane="admin")

    def command(self, label: str, *, former: str | None = None, **given: Any) -> r.TakeTurn:
        fields: dict[str, Any] = {
            "table": A,
            "point": fingerprint(ROW),
            "tables": (A, B),
            "wait_ms": 10_000,
        }
        old = None if former is None else self.id(former)
        return r.TakeTurn(self.id(label), old, **(fields | given))

    def take(self, label: str, lane: str | None = None, **given: Any) -> list[str]:
        """Ask for a turn; the labels of those whose turn comes with this round."""
        self.ask(label, self.command(label, **given), lane=lane)
        return self.come()

    def come(self) -> list[str]:
        """The labels of those whose turn came with the last round."""
        return [
            to.correlation_id.decode()
            for to, result in self.said
            if isinstance(result, r.Revalidate)
        ]

    def shot(self, label: str, table: str = A, locks: tuple[r.TableLocks, ...] = ()) -> r.OneShot:
        events = (r.Event(table, -1, ROW, b"v", (), -1),)
        return r.OneShot(self.id(label), "nyc", None, events, None, locks)

    def end(self, label: str, **given: Any) -> list[str]:
        """Commit a one-shot under this label; the labels of those whose turn comes with it."""
        self.ask(f"commit {label}", self.shot(label, **given))
        assert any(told(result) == "COMMITTED" for _, result in self.said)
        return self.come()

    def later(self, ms: int) -> list[str]:
        self.wait(ms)
        return self.come()

    @property
    def due_ms(self) -> int | None:
        return next_due_ms(self.memory.row_turns, self.now_ms)


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_turns_come_in_the_order_of_the_questions(queue: Queue) -> None:
    assert queue.take("a") == ["a"]
    assert [queue.take(label) for label in "bcd"] == [[], [], []]
    assert [queue.end(label) for label in "abcd"] == [["b"], ["c"], ["d"], []]
    assert not queue.memory.row_turns.queues.as_dict()
    assert not queue.memory.row_turns.lanes.as_dict()


def test_the_answer_shows_the_commit_that_ended_the_turn_before(queue: Queue) -> None:
    queue.take("a")
    queue.take("b")
    queue.end("a")
    (answer,) = [result for _, result in queue.said if isinstance(result, r.Revalidate)]
    last = {each.table: each.last for each in answer.tables}
    assert last == {table: queue.state.tables[table].last for table in (A, B)}
    assert answer.timestamp >= last[A] == queue.row("a").commit_timestamp


def test_the_answer_shows_whether_others_want_the_row(queue: Queue) -> None:
    def decided(label: str) -> list[bool]:
        queue.take(label)
        return [x.decided for _, x in queue.said if isinstance(x, r.Revalidate)]

    assert decided("a") == [False]
    assert queue.end("a") == []
    assert decided("b") == [False]
    assert decided("c") == []
    queue.end("b")
    assert [x.decided for _, x in queue.said if isinstance(x, r.Revalidate)] == [True], "c waited"


def test_a_question_of_the_same_round_waits_for_its_commits(queue: Queue) -> None:
    """Its answer comes at the end of the round, so that it reads all that the round commits."""
    queue.turn(("a", queue.command("a")), ("shot", queue.shot("other")))
    times = [x for _, x in queue.said if isinstance(x, r.Revalidate)]
    assert [each.tables[0].last for each in times] == [queue.row("other").commit_timestamp]


def test_a_turn_ends_after_a_second_without_a_commit(queue: Queue) -> None:
    queue.take("a")
    queue.take("b")
    assert queue.due_ms == TURN_MS
    assert queue.later(TURN_MS - 1) == []
    assert queue.later(1) == ["b"]
    assert queue.later(TURN_MS) == []
    assert queue.due_ms is None


def test_a_turn_is_given_up(queue: Queue) -> None:
    for label in "abc":
        queue.take(label)
    assert queue.take("b", wait_ms=0) == ["b"], "it leaves the queue, and is answered"
    assert queue.take("a", wait_ms=0, lane="admin") == ["a"], "another lane gives up nothing"
    assert queue.take("a", wait_ms=0) == ["a", "c"]


def test_who_waited_long_enough_has_no_turn_any_more(queue: Queue) -> None:
    queue.take("a")
    queue.take("b", wait_ms=TURN_MS - 1)
    queue.take("c")
    assert queue.later(TURN_MS) == ["c"]


def test_a_repeated_question_keeps_the_place(queue: Queue) -> None:
    for label in "abc":
        queue.take(label)
    assert queue.take("b") == []
    assert queue.take("a") == ["a"], "its answer was lost"
    assert queue.end("a") == ["b"]
    queue.wait(TURN_MS - 1)
    assert queue.take("b") == ["b"]
    assert queue.later(1) == ["c"], "a repeated question makes no turn longer"
    assert queue.take("a") == ["a"], "a late copy, after its commit, is answered and takes no turn"
    assert queue.end("c") == []


def test_a_turn_goes_over_to_the_next_try(queue: Queue) -> None:
    for label in "abc":
        queue.take(label)
    assert queue.take("a2", former="a") == ["a2"]
    assert queue.end("a") == [], "a has no turn any more"
    assert queue.take("b2", former="b") == []
    assert queue.end("a2") == ["b2"]
    assert queue.take("x", former="c", lane="admin") == [], (
        "another lane's place is not for the taking"
    )
    assert queue.end("b2") == ["x"], "lanes come in turn"


def test_a_one_shot_that_would_break_the_holders_locks_is_advised_once(queue: Queue) -> None:
    lock = queue.lock(A, ROW)
    queue.take("a")
    queue.take("b")
    queue.ask("shot", queue.shot("stranger", locks=(lock,)))
    ((_, advice),) = queue.said
    assert (told(advice), advice.writers) == ("Revalidate", (fingerprint(ROW), 0))
    assert queue.end("stranger", locks=(lock,)) == [], (
        "the next copy is carried out, and ends no turn"
    )
    queue.ask("shot", queue.shot("a", locks=(lock,)))
    assert [told(result) for _, result in queue.said] == ["Revalidate"], "a's lock is broken"
    assert queue.end("a", locks=(queue.lock(A, ROW),)) == ["b"]


def test_the_advice_names_the_table_of_the_row(queue: Queue) -> None:
    """The same key is locked in two tables, and others take turns at one of them."""
    queue.take("a", table=B)
    locks = (queue.lock(A, ROW), queue.lock(B, ROW))
    queue.ask("shot", queue.shot("stranger", table=B, locks=locks))
    ((_, advice),) = queue.said
    assert advice.writers == (fingerprint(ROW), 1)


def test_a_one_shot_that_breaks_no_lock_of_the_holder_is_carried_out(queue: Queue) -> None:
    lock = queue.lock(A, ROW)
    queue.take("a")
    assert queue.end("blind") == []
    assert (
        queue.end("reads the row, and writes another", table=B, locks=(queue.lock(A, ROW),)) == []
    )
    assert queue.put((A, b"cold"), locks=(queue.lock(A, b"cold"),)) == "COMMITTED"
    assert queue.end("a", locks=(queue.lock(A, ROW),)) == []
    assert lock.points == (fingerprint(ROW),)


def test_the_end_of_a_long_transaction_ends_its_turn(queue: Queue) -> None:
    queue.begin("T")
    queue.touch("T", A)
    queue.write("T", "w", A)
    queue.take("T")
    queue.take("b")
    queue.finish("T", "w")
    queue.commit("T")
    queue.wait(100)
    assert queue.row("T").state == "COMMITTED"
    assert queue.come() == ["b"] or queue.later(100) == ["b"]


def test_an_aborted_transaction_has_no_turn(queue: Queue) -> None:
    queue.begin("T")
    queue.take("T")
    queue.take("b")
    queue.abort("T")
    assert queue.come() == ["b"] or queue.later(100) == ["b"]


def test_rows_have_queues_of_their_own(queue: Queue) -> None:
    queue.take("a")
    assert queue.take("b", point=7) == ["b"]
    assert queue.take("c", table=B) == ["c"]


def test_lanes_come_in_turn_and_none_fills_a_queue(
    queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "ROW_TURNS", limits.ROW_TURNS._replace(value=8))
    queue.take("a0")
    for number in range(1, 5):
        queue.take(f"a{number}")
    assert queue.take("a5") == []
    assert told(queue.said[-1][1]) == "NotReady", "a lane has half"
    for number in range(3):
        queue.take(f"x{number}", lane="admin")
    order, now = [], "a0"
    for _ in range(7):
        (now,) = queue.end(now)
        order.append(now)
    assert order == ["x0", "a1", "x1", "a2", "x2", "a3", "a4"]


def test_all_queues_together_are_bounded(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TURNS", limits.TURNS._replace(value=6))
    for number in range(3):
        assert queue.take(f"a{number}", point=number) == [f"a{number}"]
    queue.take("a3", point=3)
    assert told(queue.said[-1][1]) == "NotReady"
    for number in range(3):
        queue.take(f"x{number}", point=number, lane="admin")
    queue.take("x3", point=3, lane="admin")
    assert told(queue.said[-1][1]) == "NotReady"
    queue.take("a0", point=0, wait_ms=0)
    assert queue.take("a3", point=3) == ["a3"], "there is room again"


def test_a_round_that_is_not_written_gives_no_turn(queue: Queue) -> None:
    queue.take("a")
    queue.take("b")
    turn = queue.new_turn()
    queue._decide(turn, queue.shot("a"), queue.asker("lost"))
    queue.lead()
    assert queue.take("c") == ["c"], "a successor knows nothing of the queue"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no such table": ({"table": "nyc/none"}, "UnknownStream"),
    "a stream": ({"table": PLAIN}, "InvalidArgument"),
    "another table that is none": ({"tables": (A, PLAIN)}, "InvalidArgument"),
    "too many tables": ({"tables": (A,) * 101}, "InvalidArgument"),
    "a wait below 0": ({"wait_ms": -1}, "InvalidArgument"),
    "a wait that is too long": ({"wait_ms": 60_001}, "InvalidArgument"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(queue: Queue, what: str) -> None:
    given, code = REFUSED[what]
    queue.take("a", **given)
    assert told(queue.said[-1][1]) == code
    assert not queue.memory.row_turns.queues.as_dict()


def test_an_id_of_another_partition_is_refused(queue: Queue) -> None:
    queue.ask("a", r.TakeTurn(b"\1\1" + NO_TXN[2:], None, A, 1, (A,), 1))
    assert told(queue.said[-1][1]) == "InvalidArgument"


def test_it_takes_the_right_to_write_the_table(queue: Queue) -> None:
    queue.ask("lane", r.SetLane("guest", False, (), {}), lane="admin")
    queue.take("a", lane="guest")
    assert told(queue.said[-1][1]) == "NotAuthorized"
