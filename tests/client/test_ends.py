"""How transactions and writers end: commit, abort, failures, doubt; names; joins."""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from itertools import count
from typing import Any, cast

import pyarrow as pa
import pytest

from anabranch import errors
from anabranch.client.shared import Heart
from anabranch.protocol.schemas import records as r
from anabranch.types import Receipt, Result
from tests.client.answers import STREAM, obliging, outcome, refusal, token_of
from tests.client.bench import Bench, override
from tests.client.doubles import HYBRID_TIME

DENIED = errors.NotAuthorized("the right Write on the topic c is missing")
REFUSED = refusal("NotAuthorized", str(DENIED))

# -- names ----------------------------------------------------------------------------------------------


def test_a_name_begins_at_once() -> None:
    bench = Bench()
    with bench.client.begin("nyc", name="daily") as txn:
        assert bench.bus.names() == ["FindScope", "Begin"]
        assert bench.bus.of(r.Begin)[0].name == "daily"
        txn.write(STREAM, b"v")
        txn.commit()
    assert bench.bus.names() == ["FindScope", "Begin", "Touch", "Commit"]


def test_a_committed_name_has_its_result() -> None:
    done = outcome(b"\0" * 15 + b"\7", name="daily")
    bench = Bench(override(Begin=done))
    with bench.client.begin("nyc", name="daily") as txn:
        assert txn.result is not None
        assert txn.result.txn_id == done.txn_id
        assert txn.commit() is txn.result
        for call in (txn.token, txn.flush, txn.abort, lambda: txn.write(STREAM, b"v")):
            with pytest.raises(errors.AlreadyCommitted):
                call()
    assert bench.bus.names() == ["FindScope", "Begin"]


# -- ends -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["COMMITTED", "ABORTED"])
def test_a_decided_commit_has_its_whole_result_at_the_merge(ends: str) -> None:
    """After the decision nothing but an operator's force ends it otherwise."""
    states = ["OPEN", "FINALIZE_IN_PROGRESS"]

    def script(command: Any) -> Any:
        answer = obliging(command)
        if isinstance(command, r.GetState):
            return answer._replace(state=states[-1])
        if isinstance(command, r.Commit) and states[-1] != "COMMITTED":
            return answer._replace(state=states[-1], commit_timestamp=0)
        return answer

    bench = Bench(script)
    with bench.client.begin("nyc") as txn:
        token = txn.token()
        txn.write(STREAM, b"v")
        with pytest.raises(errors.IllegalState, match="commit it first"):
            txn.merged()
        result = txn.commit(wait="decided")
        assert (result.is_merged, result.commit_timestamp, txn.result) == (False, 0, result)
        with pytest.raises(errors.IllegalState, match="before it is merged"):
            _ = result.committed_at
        assert txn.commit(wait="decided") is result
        assert bench.bus.names().count("Commit") == 1
        for call in (txn.token, txn.flush, txn.abort, lambda: txn.write(STREAM, b"v")):
            with pytest.raises(errors.AlreadyCommitted):
                call()
        assert not bench.client.is_finished(token)
        with pytest.raises(errors.DeadlineExceeded, match="1 transaction did not end in time"):
            list(bench.client.finished([token], timeout=0.1))
        states.append(ends)
        assert [info.state for info in bench.client.finished([token, token])] == [ends]
        if ends == "ABORTED":
            with pytest.raises(errors.TransactionAborted):
                txn.merged()
            assert txn.result is None
        else:
            assert txn.merged() is txn.commit() is txn.commit(wait="decided") is txn.merged()
            assert txn.commit([], name="other").is_merged
    small = bench.client.transact(lambda txn: txn.write(STREAM, b"v"), wait="decided")
    assert small.is_merged, "one request is decided and merged in one round"
    with pytest.raises(errors.InvalidArgument, match="merged or decided"):
        bench.client.commit(token, wait="now")  # type: ignore[arg-type]


def test_another_commit_after_the_decision_awaits_the_one_that_was_decided() -> None:
    """So its answer can't end the handle without the result."""
    states = ["FINALIZE_IN_PROGRESS", "COMMITTED"]

    def script(command: Any) -> Any:
        answer = obliging(command)
        return answer._replace(state=states.pop(0)) if isinstance(command, r.Commit) else answer

    bench = Bench(script)
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v")
        assert not txn.commit(name="daily", wait="decided").is_merged
        assert txn.commit(name="other").is_merged
    assert [command.name for command in bench.bus.of(r.Commit)] == ["daily", "daily"]


def test_a_refused_commit_is_not_sent_again_by_merged() -> None:
    bench = Bench(override(Commit=refusal("WritersUnfinished")))
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v")
        with pytest.raises(errors.WritersUnfinished):
            txn.commit(wait="decided")
        with pytest.raises(errors.IllegalState, match="not decided"):
            txn.merged()


def test_transactions_that_have_ended_are_shown_before_all_were_asked() -> None:
    """A short time is enough for some of many: the next call goes on with the others."""
    bench = Bench(
        lambda command: (
            obliging(command)._replace(state="COMMITTED")
            if isinstance(command, r.GetState)
            else obliging(command)
        )
    )
    ids = [bench.client.reserve("nyc").txn_id for _ in range(250)]
    found = bench.client.finished(ids)
    next(found)
    assert len(bench.bus.of(r.GetState)) == 100
    assert len(list(found)) == 249
    with pytest.raises(errors.InvalidArgument, match="10,001 transactions; 10,000 are allowed"):
        bench.client.finished(n.to_bytes(16, "big") for n in count())


def test_a_control_partition_without_a_leader_delays_no_others() -> None:
    bench = Bench()
    committed = bench.client.transact(lambda txn: txn.write(STREAM, b"v")).txn_id
    bench.bus.partitions = 2
    silent = b"\0\1" + committed[2:]

    def script(command: Any) -> Any:
        if isinstance(command, r.GetState) and command.txn_id == silent:
            return None
        answer = obliging(command)
        return answer._replace(state="COMMITTED") if isinstance(command, r.GetState) else answer

    bench.bus.script = script
    found = bench.client.finished([silent, committed], timeout=9)
    assert next(found).txn_id == committed
    with pytest.raises(errors.DeadlineExceeded, match="1 transaction did not end in time"):
        next(found)


def test_leaving_by_an_exception_aborts_and_lets_it_pass() -> None:
    bench = Bench()
    with pytest.raises(ZeroDivisionError), bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v")
        raise ZeroDivisionError
    (abort,) = bench.bus.of(r.Abort)
    assert "ZeroDivisionError" in abort.reason
    assert bench.journals.made[0].state == "discarded"


def test_an_abort_that_fails_does_not_hide_the_exception() -> None:
    bench = Bench(override(Abort=None))
    started = bench.clock.now
    with pytest.raises(ZeroDivisionError), bench.client.begin("nyc") as txn:
        txn.token()
        raise ZeroDivisionError
    assert bench.clock.now - started <= 5
    with pytest.raises(errors.OutcomeUnknown, match="abort it again"):
        txn.write(STREAM, b"v")


def test_a_failed_write_poisons_for_ever() -> None:
    bench = Bench()
    with pytest.raises(errors.WriteFailed), bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v", key=b"k")
        bench.journals.made[0].fails = True
        with pytest.raises(errors.WriteFailed):
            txn.flush()
        bench.journals.made[0].fails = False
        calls: list[Callable[[], object]] = [
            txn.flush,
            txn.commit,
            lambda: txn.write(STREAM, b"v"),
            lambda: txn.write_many(STREAM, [(b"v",)]),
        ]
        for call in calls:
            with pytest.raises(errors.WriteFailed, match="not acknowledged"):
                call()
        txn.commit()
    assert bench.bus.of(r.Commit) == []
    assert len(bench.bus.of(r.Abort)) == 1


@pytest.mark.parametrize("code", ["WritersUnfinished", "ReceiptsNotCovered", "ReceiptMismatch"])
def test_a_refused_commit_leaves_the_transaction_open(code: str) -> None:
    bench = Bench(override(Commit=[refusal(code), ...]))
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"1", key=b"k")
        with pytest.raises(getattr(errors, code)):
            txn.commit()
        txn.write(STREAM, b"2", key=b"k")
        txn.commit()
    first, second = (command.own[0] for command in bench.bus.of(r.Commit))
    assert (first.extents[0].count, second.extents[0].count) == (1, 2)
    assert second.sequence > first.sequence


def test_an_unknown_outcome_can_be_asked_for_again() -> None:
    bench = Bench(override(Commit=[None, None, None, ...], Resolve=None))
    with bench.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"v", key=b"k")
        with pytest.raises(errors.OutcomeUnknown) as caught:
            txn.commit(timeout=9)
        assert caught.value.token == txn._token
        for call in (txn.token, txn.flush, lambda: txn.write(STREAM, b"w")):
            with pytest.raises(errors.IllegalState, match="unknown"):
                call()
        assert isinstance(txn.commit(), Result)
    owns = {command.own for command in bench.bus.of(r.Commit)}
    assert len(owns) == 1  # the same commit, not a new one


@pytest.mark.parametrize(
    "answers",
    [
        {"Commit": [DENIED, ...]},
        {"Commit": [None, DENIED, ...], "Resolve": DENIED},
        {"Commit": [None] * 3 + [...], "Resolve": DENIED},
        {"Commit": [None, REFUSED, ...], "Resolve": REFUSED},
        {"Commit": [None] * 3 + [...], "Resolve": REFUSED},
    ],
    ids=["at once", "a later copy", "the question", "a refused copy", "the question is refused"],
)
def test_a_right_that_is_taken_leaves_a_commit_in_doubt(answers: dict[str, Any]) -> None:
    """An earlier copy may be carried out: to write on, or to abort in silence, would be wrong."""
    bench = Bench(override(**answers))
    with bench.client.begin("nyc") as txn:
        txn.token()
        with pytest.raises(errors.OutcomeUnknown, match="right Write on the topic") as caught:
            txn.commit(timeout=9)
        assert caught.value.token == txn._token
        with pytest.raises(errors.IllegalState, match="unknown"):
            txn.write(STREAM, b"w")
        assert isinstance(txn.commit(), Result)
    assert bench.bus.of(r.Abort) == []


@pytest.mark.parametrize("code", ["NotAuthorized", "Expired", "ClockSkew"])
@pytest.mark.parametrize("one_shot", [False, True])
def test_a_refused_copy_leaves_a_commit_in_doubt(code: str, one_shot: bool) -> None:
    """A copy before it may be carried out, and its outcome forgotten, as a clock jumps."""
    bench = Bench(override(Commit=None, OneShot=None, Resolve=None))
    txn = bench.client.begin("nyc")
    if one_shot:
        txn.write(STREAM, b"v")
    else:
        txn.token()
    for answer in (None, refusal(code, "no right")):
        bench.bus.script = override(Commit=answer, OneShot=answer, Resolve=answer)
        said = "no right" if answer else "not known in time"
        with pytest.raises(errors.OutcomeUnknown, match=said) as caught:
            txn.commit(timeout=9)
        assert caught.value.token == txn._token
    assert not bench.bus.of(r.Abort)


@pytest.mark.parametrize("between", [[], [refusal("NotReady")]])
def test_a_right_that_is_taken_refuses_a_question(between: list[Any]) -> None:
    bench = Bench(override(DescribeStreams=[None, *between, DENIED]))
    begun = bench.clock.now
    with pytest.raises(
        errors.NotAuthorized, match=r"Write on the topic .*before may be carried out"
    ):
        bench.client.describe(STREAM)
    assert bench.clock.now - begun < 5


def test_leaving_in_doubt_does_not_abort() -> None:
    bench = Bench(override(Commit=None, Resolve=None))
    with pytest.raises(errors.OutcomeUnknown), bench.client.begin("nyc") as txn:
        txn.token()
        txn.commit()
    assert bench.bus.of(r.Abort) == []


def test_abort_finds_the_outcome_of_a_one_shot_in_doubt() -> None:
    bench = Bench(override(OneShot=None, Resolve=None))
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v")
    with pytest.raises(errors.OutcomeUnknown):
        txn.commit()
    bench.bus.script = override(Resolve=outcome(txn.txn_id or b""))
    with pytest.raises(errors.AlreadyCommitted):
        txn.abort()
    assert txn.result is not None


def test_a_commit_elsewhere_without_own_writes_is_no_success() -> None:
    bench = Bench()
    with pytest.raises(errors.AlreadyCommitted, match="without"), bench.client.begin("nyc") as txn:
        token = txn.token()
        bench.bus.script = override(Commit=outcome(token[1:17], writers=()))
        txn.write(STREAM, b"v")
        txn.commit()
    assert txn.result is None


def test_a_commit_that_the_controller_aborted_sends_no_abort() -> None:
    bench = Bench(override(Commit=refusal("TransactionAborted", "stale")))
    with pytest.raises(errors.TransactionAborted, match="stale"), bench.client.begin("nyc") as txn:
        txn.token()
        txn.commit()
    assert bench.bus.of(r.Abort) == []
    with pytest.raises(errors.TransactionAborted):
        txn.commit()


# -- writers --------------------------------------------------------------------------------------------


def test_a_writer_finishes_when_left() -> None:
    bench = Bench()
    with bench.client.join(token_of()) as writer:
        assert bench.bus.sent == []
        writer.write(STREAM, b"v", key=b"k")
        part = writer.flush()
        writer.write(STREAM, b"w", key=b"k")
    receipt = writer.finish()
    assert (part.finished, part.events) == (False, 1)
    assert (receipt.finished, receipt.events) == (True, 2)
    assert receipt.record.seen == bench.client.last_timestamp == HYBRID_TIME
    assert Receipt.from_bytes(receipt.to_bytes()) == receipt
    assert bench.bus.names() == ["Touch", "Register", "Register"]
    rows = pa.table({"value": [b"x"]})
    for call in (lambda: writer.write(STREAM, b"x"), lambda: writer.write_batch(STREAM, rows)):
        with pytest.raises(errors.IllegalState, match="finished"):
            call()


def test_a_writer_that_wrote_nothing_finishes_too() -> None:
    bench = Bench()
    with bench.client.join(token_of()) as writer:
        pass
    assert writer.finish().events == 0
    assert bench.bus.of(r.Register)[0].receipt.finished


def test_a_writer_left_by_an_exception_gives_no_receipt() -> None:
    bench = Bench()
    with pytest.raises(ZeroDivisionError), bench.client.join(token_of()) as writer:
        writer.write(STREAM, b"v")
        raise ZeroDivisionError
    assert bench.bus.of(r.Register) == []
    assert bench.journals.made[0].state == "discarded"
    with pytest.raises(errors.IllegalState):
        writer.finish()


@pytest.mark.parametrize("token", [b"", b"short", b"\2" * 80, "text"])
def test_a_bad_token(token: Any) -> None:
    with pytest.raises(errors.InvalidToken):
        Bench().client.join(token)


def test_commit_and_abort_by_token() -> None:
    bench = Bench()
    receipt = bench.client.join(token_of()).finish()
    result = bench.client.commit(token_of(), receipts=[receipt, receipt.to_bytes()], name="n")
    assert result.commit_timestamp == 99
    (command,) = bench.bus.of(r.Commit)
    assert (command.own, command.receipts, command.name) == ((), (receipt.record,) * 2, "n")
    bench.client.abort(token_of(), "because")
    assert bench.bus.of(r.Abort)[0].reason == "because"
    assert bench.client.state(token_of()).state == "OPEN"
    assert bench.client.state(token_of()[1:17].hex()).state == "OPEN"
    assert bench.client.resolve(token_of()[1:17]).state == "ABORTED"


# -- heartbeats -----------------------------------------------------------------------------------------


def test_the_hearts_thread_waits_until_something_is_due() -> None:
    """Before the first heartbeat there is no answer to wait for: it must not ask again and again."""
    asked: list[str] = []

    class Session:
        now = staticmethod(time.monotonic)

        def __getattr__(self, name: str) -> Any:
            def call(*_: object) -> Any:
                asked.append(name)
                return ()

            return call

    class Open:
        live_token, keepalive_ms = token_of(), 900

    session, handle = Session(), Open()
    heart = Heart(session, thread=True)  # type: ignore[arg-type]
    heart.add(handle)  # type: ignore[arg-type]
    until = time.monotonic() + 30
    while "beat" not in asked:
        assert time.monotonic() < until
        assert asked.count("receive_beat") < 3
        time.sleep(0.01)
    heart.close()


# -- the block that the caller is in --------------------------------------------------------------------


def test_another_task_may_close_a_generator_that_is_outside() -> None:
    """The event loop's `shutdown_asyncgens` does, in a context of its own."""
    client = Bench().client

    async def ours() -> AsyncIterator[int]:
        with client.outside():
            yield 1

    async def main() -> None:
        made = ours()
        assert await anext(made) == 1
        await asyncio.create_task(cast("AsyncGenerator[int]", made).aclose())

    asyncio.run(main())


def test_a_block_that_was_left_keeps_no_client() -> None:
    bench = Bench()
    shared = weakref.ref(bench.client._shared)
    with bench.client.begin("nyc") as txn:
        txn.abort()
    del bench, txn
    gc.collect()
    assert shared() is None
