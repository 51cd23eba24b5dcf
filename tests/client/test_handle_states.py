"""The handle of a transaction: from each state, the state after each answer of a controller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pytest

from anabranch import errors
from anabranch.client.transaction import Transaction
from anabranch.core.transaction_states import HandleState
from anabranch.protocol.schemas import records as r
from tests.client.answers import STREAM, obliging, outcome, refusal
from tests.client.bench import Bench, override

LOOK = r.Revalidate(9, (), (1,))


def _prepares(command: Any) -> Any:
    answer = obliging(command)
    return answer._replace(state="PREPARED") if isinstance(command, r.Commit) else answer


# State -> the controller's answer, and the call, that lead to it from the state open.
WAYS: dict[HandleState, tuple[Any, Callable[[Transaction], object]]] = {
    "open": (obliging, lambda _: None),
    "sent": (override(Commit=LOOK), Transaction.commit),
    "doubted": (override(Commit=None, Resolve=None), Transaction.commit),
    "decided": (override(Abort=refusal("AlreadyCommitted")), Transaction.abort),
    "prepared": (_prepares, Transaction.prepare),
    "aborting": (override(Abort=None), Transaction.abort),
    "over": (obliging, Transaction.abort),
}
# Answers to a commit -> the state after it, from each of the states.
COMMITS: dict[str, tuple[Any, str]] = {
    #                                     open    sent    doubted decided prepared
    "committed": (override(), "           over    over    over    over    over"),
    "refused": (refusal("StreamLost"), "  open    doubted doubted decided prepared"),
    "not ready": (refusal("NotReady"), "  open    doubted doubted decided prepared"),
    "no right": (refusal("NotAuthorized"), "open   doubted doubted decided prepared"),
    "unanswered": (None, "                doubted doubted doubted decided prepared"),
    "under way": (refusal("OutcomeUnknown"), "doubted doubted doubted decided prepared"),
    "look": (LOOK, "                      sent    doubted doubted decided prepared"),
    "look, decided": (r.Revalidate(9, (), (1,), True),
                      "                   doubted doubted doubted decided prepared"),
    "aborted": (refusal("TransactionAborted"), "over over over over over"),
    "broken": (refusal("LocksBroken"), "  over    over    over    over    over"),
}  # fmt: skip
# Answers to an abort, with the error that it raises.
ABORTS: dict[str, tuple[Any, str]] = {
    #                                           open     sent    doubted decided  prepared aborting
    "aborted": (override(), "                   over     over    over    over     over     over"),
    "DeadlineExceeded": (None, "                aborting sent    doubted decided  prepared aborting"),
    "NotReady": (refusal("NotReady"), "         aborting sent    doubted decided  prepared aborting"),
    "AlreadyCommitted": (refusal("AlreadyCommitted"),
                         "                      decided  decided decided decided  decided  decided"),
    "OutcomeUnknown": (refusal("OutcomeUnknown"),
                       "                        doubted  doubted doubted decided  prepared doubted"),
}  # fmt: skip


def brought(state: HandleState) -> tuple[Bench, Transaction]:
    """A handle in this state, which has written an event."""
    script, call = WAYS[state]
    bench = Bench()
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v", key=b"k")
    txn.token()
    bench.bus.script = script
    with suppress(errors.AnabranchError):
        call(txn)
    assert txn.state == state
    return bench, txn


def rows(table: dict[str, tuple[Any, str]]) -> list[Any]:
    return [
        pytest.param(state, answer, after, name, id=f"{name} in {state}")
        for name, (answer, states) in table.items()
        for state, after in zip(WAYS, states.split(), strict=False)
    ]


def answered(
    state: HandleState, kind: str, answer: Any
) -> tuple[Bench, Transaction, errors.AnabranchError | None]:
    """A handle that was in this state, after this answer to its commit or abort, and the error of that call."""
    bench, txn = brought(state)
    script = answer if callable(answer) else override(**{kind: answer, "Resolve": _open_still})
    bench.bus.script = script
    try:
        (txn.commit if kind == "Commit" else txn.abort)(timeout=3)
    except errors.AnabranchError as error:
        return bench, txn, error
    return bench, txn, None


_open_still = outcome(state="OPEN")


@pytest.mark.parametrize(("state", "answer", "after", "name"), rows(COMMITS))
def test_the_state_after_an_answer_to_a_commit(
    state: HandleState, answer: Any, after: HandleState, name: str
) -> None:
    bench, txn, error = answered(state, "Commit", answer)
    assert txn.state == after
    assert (error is None) == (name == "committed")
    if after in ("doubted", "decided", "prepared"):  # whatever was answered, its outcome can be had
        bench.bus.script = override()
        assert txn.commit().counts.committed == 3


@pytest.mark.parametrize(("state", "answer", "after", "name"), rows(ABORTS))
def test_the_state_after_an_answer_to_an_abort(
    state: HandleState, answer: Any, after: HandleState, name: str
) -> None:
    _, txn, error = answered(state, "Abort", answer)
    assert txn.state == after
    assert (type(error).__name__ if error else "aborted") == name


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("open", None),
        ("sent", errors.IllegalState),
        ("doubted", errors.IllegalState),
        ("decided", errors.AlreadyCommitted),
        ("prepared", errors.IllegalState),
        ("aborting", errors.OutcomeUnknown),
        ("over", errors.TransactionAborted),
    ],
)
def test_the_error_of_a_write_in_each_state(
    state: HandleState, error: type[errors.AnabranchError] | None
) -> None:
    _, txn = brought(state)
    calls: list[Callable[[], object]] = [
        lambda: txn.write(STREAM, b"w"),
        lambda: txn.write_many(STREAM, [(b"w",)]),
        lambda: txn.write_batch(STREAM, pa.table({"value": [b"w"]})),
        txn.flush,
    ]
    for call in calls if error is not None else ():
        with pytest.raises(error or errors.AnabranchError):
            call()
        assert txn.state == state


def test_a_commit_that_was_sent_is_repeated_inside_another_transaction() -> None:
    """It was sent outside: only its result is to be learned."""
    bench, txn = brought("doubted")
    bench.bus.script = obliging
    with bench.client.begin("nyc") as other:
        assert txn.commit().txn_id == txn.txn_id
        other.write(STREAM, b"v", key=b"k")
        other.commit()
