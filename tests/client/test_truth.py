"""Answers to callers are true, also after interrupted calls and doubled commands."""

# ruff: noqa: PT012 (what a `with` of ours does at its end is what is tested)

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from anabranch import errors
from anabranch.client.transaction import Transaction
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.types import Receipt
from tests.client.answers import STREAM, TXN, obliging, token_of
from tests.client.bench import Bench, override
from tests.client.world import World


def commands(kind: str, txn: Transaction) -> Callable[[], object]:
    """The call that is interrupted, with all that comes before its command done."""
    txn.write(STREAM, b"v", key=b"k")
    if kind == "begin":
        return txn.token
    if kind == "commit":
        txn.flush()
    return txn.commit


@pytest.mark.parametrize("moment", ["produce", "produce.after"])
@pytest.mark.parametrize("kind", ["one-shot", "commit", "begin"])
def test_abort_that_returns_after_an_interrupt_means_never(
    world: World, kind: str, moment: str
) -> None:
    txn = world.client.begin("nyc")
    call = commands(kind, txn)
    world.fault = lambda name: KeyboardInterrupt() if name == moment else None
    with pytest.raises(KeyboardInterrupt):
        call()
    world.fault = None
    try:
        txn.abort()
        committed = False
    except errors.AlreadyCommitted:
        committed = True
    for _ in range(5):
        world.clock.sleep(1.0)
    assert len(world.events(STREAM)) == committed
    assert committed == ((kind, moment) == ("one-shot", "produce.after"))
    assert txn.txn_id is not None
    state = world.client.state(txn.txn_id).state
    assert state == ("COMMITTED" if committed else "ABORTED")
    with pytest.raises(errors.AlreadyCommitted if committed else errors.TransactionAborted):
        txn.write(STREAM, b"more")


@pytest.mark.parametrize("kind", ["one-shot", "commit", "begin"])
def test_leaving_by_an_interrupt_ends_the_transaction(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(KeyboardInterrupt), world.client.begin("nyc") as txn:
        call = commands(kind, txn)

        def once(name: str) -> BaseException | None:
            if name != "produce.after":
                return None
            world.fault = None
            return KeyboardInterrupt()

        world.fault = once
        call()
    assert txn.txn_id is not None
    state = world.client.state(txn.txn_id).state
    assert state == ("COMMITTED" if kind == "one-shot" else "ABORTED")
    assert ("committed all the same" in caplog.text) == (kind == "one-shot")


def test_an_unanswered_begin_leaves_no_ghost(world: World) -> None:
    world.stop_controller()
    with pytest.raises(errors.DeadlineExceeded), world.client.begin("nyc", keepalive=3600) as txn:
        try:
            txn.token()
        finally:
            world.start_controller()
    assert txn.txn_id is not None
    assert world.client.state(txn.txn_id).state == "ABORTED"


@pytest.mark.parametrize("timeout", [1, 4, 15])
def test_receipts_that_are_not_covered_raise_within_the_timeout(
    world: World, timeout: float
) -> None:
    with world.client.begin("nyc", keepalive=300) as txn:
        true = world.part(txn.token(), b"v")
        (extent,) = true.record.extents
        beyond = replace(true.record, sequence=9, extents=(replace(extent, end=extent.end + 5),))
        started = world.clock.now
        with pytest.raises(errors.ReceiptsNotCovered):
            txn.commit(receipts=[Receipt(beyond)], timeout=timeout)
        assert world.clock.now - started <= timeout
        assert txn.commit(receipts=[true]).counts.committed == 1


def test_leaving_without_commit_logs_the_dropped_events(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"1")
        txn.token()
        txn.write(STREAM, b"2")
    assert "left without commit: its 2 events are dropped" in caplog.text
    caplog.clear()
    with bench.client.begin("nyc") as txn:
        txn.write(STREAM, b"1")
        txn.abort()
    with bench.client.begin("nyc") as txn:
        txn.token()
    assert caplog.text == ""


@pytest.mark.parametrize("how", ["handle", "token"])
@pytest.mark.parametrize("named", [False, True])
def test_events_left_out_without_receipts_are_logged(
    caplog: pytest.LogCaptureFixture, how: str, named: bool
) -> None:
    def script(command: Any) -> Any:
        answer = obliging(command)
        return answer._replace(left_out=3) if isinstance(command, r.Commit) else answer

    bench = Bench(script)
    receipts: list[Receipt] | None = [] if named else None
    with caplog.at_level(logging.WARNING, "anabranch.client"):
        if how == "token":
            bench.client.commit(token_of(), receipts=receipts)
        else:
            with bench.client.begin("nyc") as txn:
                txn.token()
                txn.commit(receipts=receipts)
    assert ("without 3 events" in caplog.text) != named


def test_an_abort_without_answer_is_sent_again() -> None:
    bench = Bench(override(Abort=[None, None, None, ...]))
    txn = bench.client.begin("nyc")
    txn.token()
    with pytest.raises(errors.DeadlineExceeded):
        txn.abort(timeout=3)
    sent = len(bench.bus.of(r.Abort))
    txn.abort()
    assert len(bench.bus.of(r.Abort)) > sent
    txn.abort()
    assert len(bench.bus.of(r.Abort)) == sent + 2


def test_ids_and_tokens_of_no_control_partition_here() -> None:
    bench = Bench()
    bench.bus.grows_to = 3
    strange = make_txn_id(3, 1, 1)
    asks: tuple[Callable[[], object], ...] = (
        lambda: bench.client.state(strange),
        lambda: bench.client.resolve(strange),
        lambda: bench.client.commit(token_of(strange)),
        lambda: bench.client.abort(token_of(strange)),
        lambda: bench.client.join(token_of(strange)).write(STREAM, b"v"),
    )
    for ask in asks:
        with pytest.raises(errors.InvalidArgument, match="no control partition 3"):
            ask()
    assert bench.bus.sent == []
    added = make_txn_id(2, 1, 1)
    assert bench.client.state(added).txn_id == added, "of one that was added since"
    assert TXN[:2] == b"\0\0"


@pytest.mark.parametrize(
    "call",
    [
        lambda c: c.begin(7),
        lambda c: c.begin("nyc", keepalive=timedelta(seconds=5)),
        lambda c: c.begin("nyc", keepalive=True),
        lambda c: c.begin("nyc", name=b"n"),
        lambda c: c.begin("nyc").write(STREAM, b"v", timestamp=True),
        lambda c: c.begin("nyc").write(b"nyc/a", b"v"),
        lambda c: c.begin("nyc").commit(timeout="3"),
        lambda c: c.begin("nyc").commit(name="s", number=1.0),
        lambda c: c.begin("nyc").commit(name="s", number=True),
        lambda c: c.commit(token_of(), receipts=7),
        lambda c: c.commit(token_of(), receipts=["text"]),
        lambda c: c.commit(None),
        lambda c: c.abort(token_of(), 7),
        lambda c: c.state(7),
        lambda c: c.transactions("nyc", limit="7"),
        lambda c: c.create_stream(STREAM, segments=1.5),
        lambda c: c.create_stream(None),
        lambda c: c.scale(STREAM, segments=1.5),
        lambda c: c.scale(STREAM, segments=True),
        lambda c: c.scale(STREAM, seal=["0"], ranges=[(0, 1)]),
        lambda c: c.describe(7),
    ],
)
def test_wrong_types_are_named(call: Callable[[Any], object]) -> None:
    bench = Bench()
    with pytest.raises(errors.InvalidArgument):
        call(bench.client)
    assert not {"Begin", "Commit", "Abort", "CreateStream", "Scale"} & set(bench.bus.names())
