"""Rows that a one-shot read as a commit under way writes them: when it is committed, and how turns pass on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from anabranch.core.locks.table_writes import fingerprint
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.test_row_turns import ROW, TURN_MS
from tests.core.test_row_turns import Queue as RowQueue
from tests.core.test_table_locks import A, B, Bank, told

K = b"k"


class Chain(Bank):
    """One-shots under labels. ``since``: what all of them know of the tables: what was committed at first."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.ask("level", r.SetFeatureLevel(LEVEL), lane="admin")
        assert self.put((A, K), (A, b"l"), (B, K)) == "COMMITTED"
        self.since = tuple(self.lock(table) for table in (A, B))

    def rows(self, label: str, *keys: bytes, table: str = A) -> r.FollowedRows:
        """Rows as the one-shot with this label writes them."""
        return r.FollowedRows(self.id(label), table, tuple(sorted(map(fingerprint, keys or (K,)))))

    def shot(
        self, label: str, *follows: r.FollowedRows, key: bytes = K, table: str = A, **more: Any
    ) -> r.OneShot:
        event = r.Event(table, -1, key, label.encode(), (), -1)
        fields: dict[str, Any] = {"locks": self.since, "follows": follows, **more}
        return r.OneShot(self.id(label), "nyc", None, (event,), **fields)

    def commit(self, label: str, *follows: r.FollowedRows, **more: Any) -> str:
        self.ask(label, self.shot(label, *follows, **more))
        return told(self.result)


def nothing(_: Chain) -> None:
    """Nothing comes between."""


def foreign(*rows: tuple[str, bytes]) -> Callable[[Chain], None]:
    def write(chain: Chain) -> None:
        assert chain.put(*rows) == "COMMITTED"

    return write


def takeover(chain: Chain) -> None:
    chain.lead()


def unseen(chain: Chain) -> None:
    foreign((A, b"l"))(chain)
    takeover(chain)


def small_window(chain: Chain) -> None:
    chain.memory.recent_writes.limit = 1
    assert chain.put((B, b"z")) == "COMMITTED"


# What comes before the first one's commit, and between it and the second one's; the second one's answer.
CASES: dict[str, tuple[Callable[[Chain], None], Callable[[Chain], None], str]] = {
    "nothing comes between": (nothing, nothing, "COMMITTED"),
    "another row is written": (nothing, foreign((A, b"l"), (B, K)), "COMMITTED"),
    "the row is written": (nothing, foreign((A, K)), "Revalidate"),
    "the row was written before": (foreign((A, K)), nothing, "COMMITTED"),
    "a new leader, and nothing since": (nothing, takeover, "COMMITTED"),
    "a new leader, and what it has not seen": (
        nothing,
        unseen,
        "Revalidate",
    ),
    "the recent writes have dropped it, and nothing since": (nothing, small_window, "COMMITTED"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_row_is_locked_since_the_commit_that_it_follows(case: str) -> None:
    before, between, answer = CASES[case]
    chain = Chain()
    before(chain)
    assert chain.commit("first", key=K) == "COMMITTED"
    between(chain)
    logged = len(chain.log)
    assert chain.commit("second", chain.rows("first")) == answer
    if answer == "Revalidate":
        assert {key[16] for key, _ in chain.log[-1]} == {2}, "only that the round was led is logged"
        assert len(chain.log) == logged + 1
        assert chain.state.txn_row(chain.id("second")) is None


def test_its_other_locks_hold_since_the_snapshot() -> None:
    chain = Chain()
    locks = (chain.lock(A, b"l"), chain.since[1])
    assert chain.commit("first") == "COMMITTED"
    assert chain.commit("second", chain.rows("first"), locks=locks) == "COMMITTED"
    assert chain.put((A, b"l")) == "COMMITTED"
    assert chain.commit("third", chain.rows("second"), locks=locks) == "Revalidate"


def test_without_the_commit_that_it_follows_nothing_is_logged() -> None:
    chain = Chain()
    second = chain.shot("second", chain.rows("first"))
    chain.ask("second", second)
    assert told(chain.result) == "Revalidate", "the first one has not come"
    chain.ask("resolve", r.Resolve(chain.id("first"), "nyc"))
    assert chain.row("first").state == "ABORTED"
    chain.ask("second", second)
    assert told(chain.result) == "Revalidate", "the first one is aborted"
    assert chain.state.txn_row(second.txn_id) is None


@pytest.mark.parametrize("order", ["first second third", "second first", "third first second"])
def test_in_one_round_the_order_decides(order: str) -> None:
    chain = Chain()
    shots = {
        "first": chain.shot("first"),
        "second": chain.shot("second", chain.rows("first")),
        "third": chain.shot("third", chain.rows("second")),
    }
    labels = order.split()
    chain.turn(*((label, shots[label]) for label in labels))
    found = {to.correlation_id.decode(): told(result) for to, result in chain.said}
    wanted, done = {}, set[str]()
    for label in labels:
        before = {"first": None, "second": "first", "third": "second"}[label]
        wanted[label] = "COMMITTED" if before is None or before in done else "Revalidate"
        done |= {label} if wanted[label] == "COMMITTED" else set()
    assert found == wanted
    for label in labels:  # repeated: each is answered from its row, or carried out now
        chain.ask(label, shots[label])
        assert told(chain.result) == "COMMITTED" or wanted[label] == "Revalidate"


def test_a_round_that_is_not_written_leaves_nothing_to_follow() -> None:
    chain = Chain()
    turn = chain.new_turn()
    chain._decide(turn, chain.shot("first"), chain.asker("first"))
    chain._decide(turn, chain.shot("second", chain.rows("first")), chain.asker("second"))
    assert [told(result) for _, result in turn.round.replies] == ["COMMITTED"] * 2
    chain.lead()
    assert chain.commit("second", chain.rows("first")) == "Revalidate"


def test_a_repeated_command_is_answered_before_its_rows_are_checked() -> None:
    chain = Chain()
    assert chain.commit("first") == "COMMITTED"
    second = chain.shot("second", chain.rows("first"))
    chain.ask("second", second)
    at = chain.result.commit_timestamp
    assert chain.put((A, K)) == "COMMITTED"
    chain.ask("second", second)
    assert (told(chain.result), chain.result.commit_timestamp) == ("COMMITTED", at)


def test_a_commit_of_another_lane_is_not_followed() -> None:
    chain = Chain()
    chain.ask("first", chain.shot("first"), lane="admin")
    assert told(chain.said[-1][1]) == "COMMITTED"
    assert chain.commit("second", chain.rows("first")) == "Revalidate"


def test_a_commit_that_did_not_write_the_table_is_not_followed() -> None:
    chain = Chain()
    assert chain.commit("first", table=B) == "COMMITTED"
    assert chain.commit("second", chain.rows("first")) == "Revalidate"
    assert chain.commit("third", chain.rows("first", table=B)) == "COMMITTED"


def test_a_table_that_is_made_again_is_another_one() -> None:
    chain = Chain()
    assert chain.commit("first") == "COMMITTED"
    chain.delete(A)
    chain.make(A, table="true")
    since = tuple(chain.lock(table) for table in (A, B))
    assert chain.commit("second", chain.rows("first"), locks=since) == "Revalidate"


REFUSED: dict[str, Callable[[Chain], dict[str, Any]]] = {
    "a table that the locks do not name": lambda chain: {"locks": chain.since[1:]},
    "no locks": lambda _: {"locks": ()},
    "points that do not rise": lambda chain: {
        "follows": (chain.rows("first")._replace(points=(2, 1)),)
    },
    "too many commits": lambda chain: {
        "follows": tuple(chain.rows(f"{i}") for i in range(limits.FOLLOWED.value + 1))
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    chain = Chain()
    assert chain.commit("first") == "COMMITTED"
    given = {"follows": (chain.rows("first"),), **REFUSED[what](chain)}
    chain.ask("second", chain.shot("second")._replace(**given))
    assert told(chain.said[-1][1]) == "InvalidArgument"


# -- turns --------------------------------------------------------------------------------------------------


class Turns(RowQueue):
    """A queue, and one-shots that pass their turns on."""

    def passing(self, label: str, heir: str | None) -> list[str]:
        lock = self.lock(A, ROW)
        shot = self.shot(label, locks=(lock,))
        to = None if heir is None else self.id(heir)
        self.ask(f"commit {label}", shot._replace(turn_to=to))
        assert told(self.said[0][1]) == "COMMITTED"
        return self.come()


def test_a_turn_passes_to_the_transaction_that_the_commit_names() -> None:
    queue = Turns()
    assert queue.take("a") == ["a"]
    assert queue.take("b") == []
    assert queue.passing("a", "a2") == []
    assert queue.passing("a2", "a3") == []
    assert queue.passing("a3", None) == ["b"]
    assert queue.end("b") == []
    assert not queue.memory.row_turns.lanes.as_dict()


def test_a_turn_that_is_passed_on_lasts_no_longer() -> None:
    queue = Turns()
    queue.take("a")
    queue.take("b")
    queue.wait(TURN_MS - 10)
    assert queue.passing("a", "a2") == []
    assert queue.later(9) == []
    assert queue.later(1) == ["b"]


def test_only_the_holder_of_a_turn_passes_it_on() -> None:
    queue = Turns()
    queue.take("a")
    queue.take("b")
    lock = queue.lock(A, ROW)
    stranger = queue.shot("x", locks=(lock,))._replace(turn_to=queue.id("x2"))
    queue.ask("x", stranger)
    queue.ask("x", stranger)  # advised once, then carried out
    assert told(queue.said[0][1]) == "COMMITTED"
    assert queue.take("a") == ["a"], "it has the turn yet"


def test_the_next_one_gives_the_turn_up() -> None:
    queue = Turns()
    queue.take("a")
    queue.take("b")
    queue.passing("a", "a2")
    assert queue.take("a2", wait_ms=0) == ["a2", "b"]


def test_who_follows_a_row_without_the_turn_is_advised() -> None:
    queue = Turns()
    queue.end("first")
    queue.take("a")
    since = tuple(queue.lock(table) for table in (A, B))
    rows = r.FollowedRows(queue.id("first"), A, (fingerprint(ROW),))
    queue.ask("second", queue.shot("second", locks=since)._replace(follows=(rows,)))
    assert queue.said[0][1].writers == (fingerprint(ROW), 0)
