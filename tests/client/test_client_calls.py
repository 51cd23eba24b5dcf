"""Heartbeats, and the calls of a client that are about no handle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from anabranch import errors
from anabranch.protocol.schemas import records as r
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.iteration import Readers
from anabranch.reading.snapshot import SnapshotPlan
from tests.client.answers import STREAM, obliging, outcome, token_of
from tests.client.bench import Bench, override

# -- heartbeats -----------------------------------------------------------------------------------------


def test_an_open_handle_sends_heartbeats_and_learns_its_end() -> None:
    bench = Bench(override(Heartbeat=None))
    txn = bench.client.begin("nyc", keepalive=30)
    heart = bench.client.heart
    assert heart.step() == float("inf")
    token = txn.token("all")
    due = heart.step()
    assert due == bench.clock.now + 10
    assert bench.bus.of(r.Heartbeat) == []
    bench.clock.now = due
    assert heart.step() == due + 10
    assert bench.bus.of(r.Heartbeat)[0].tokens == (token,)
    heart.receive(due + 1)
    txn.write(STREAM, b"v")

    gone = outcome(token[1:17], "ABORTED", reason="stale")
    bench.bus.script = override(Heartbeat=r.Ended((gone,)))
    bench.clock.now = due + 10
    heart.receive(heart.step())
    with pytest.raises(errors.TransactionAborted, match="stale"):
        txn.write(STREAM, b"v")
    with pytest.raises(errors.TransactionAborted, match="stale"):
        txn.commit()
    assert heart.step() == float("inf")
    beats = [sent.correlation_id for sent in bench.bus.sent if type(sent.command) is r.Heartbeat]
    assert len(set(beats)) == len(beats) == 2


def test_the_shortest_keepalive_sets_the_pace() -> None:
    bench = Bench(override(Heartbeat=None))
    heart = bench.client.heart
    slow = bench.client.begin("nyc", keepalive=300)
    slow.token()
    assert heart.step() == bench.clock.now + 100
    quick = bench.client.begin("nyc", keepalive=3)
    quick.token()
    assert heart.step() == bench.clock.now + 1
    quick.commit()
    bench.clock.now += 1
    assert heart.step() == bench.clock.now + 100
    assert bench.bus.of(r.Heartbeat)[-1].tokens == (slow.token("all"),)


def test_a_joined_writer_beats_only_if_asked() -> None:
    bench = Bench(override(Heartbeat=None))
    bench.client.join(token_of())
    assert bench.client.heart.step() == float("inf")
    writer = bench.client.join(token_of(), heartbeat=True)
    assert bench.client.heart.step() < float("inf")
    writer.finish()
    bench.clock.now += 60
    assert bench.client.heart.step() == float("inf")


def test_a_dropped_handle_beats_no_more() -> None:
    bench = Bench(override(Heartbeat=None))
    bench.client.begin("nyc").token()
    bench.clock.now += 60
    assert bench.client.heart.step() == float("inf")


@pytest.mark.parametrize("joined", [False, True])
def test_the_journal_of_a_dropped_handle_is_freed_by_the_next_one(joined: bool) -> None:
    bench = Bench()
    for _ in range(2):
        if joined:
            bench.client.join(token_of())
        else:
            bench.client.begin("nyc").token()
    assert [journal.state == "discarded" for journal in bench.journals.made] == [True, False]


def _never(*_: object) -> Any:
    raise AssertionError("nothing is read here")


def test_a_client_is_closed_when_it_and_its_snapshots_are_dropped() -> None:
    bench = Bench()
    shared = bench.client._shared
    readers = Readers(ReaderPorts(_never, _never, bench.clock), 30.0)
    shared.ports = replace(shared.ports, readers=readers)
    snapshot = bench.client.open_snapshot(SnapshotPlan(1, {}))
    del bench.client
    assert not shared.closed
    del snapshot
    assert shared.closed


# -- streams, lists, the end ----------------------------------------------------------------------------


def test_streams_and_transactions_of_all_control_partitions() -> None:
    bench = Bench(override(ListTransactions=r.TransactionList((outcome(owner="etl"),))))
    bench.bus.partitions = 3
    assert [d.stream for d in bench.client.streams()] == [STREAM] * 3
    assert [sent.partition for sent in bench.bus.sent] == [0, 1, 2]
    # All three answer with the same transaction, as control partitions do with parts of it.
    assert [info.owner for info in bench.client.transactions(limit=2)] == ["etl"]
    assert len(bench.client.streams("nyc")) == 1
    description = bench.client.describe(STREAM)
    assert len(description.segments) == 2
    assert description.journal == {0: 5}


def test_create_stream_goes_to_its_scopes_partition() -> None:
    bench = Bench(lambda command: obliging(command, scopes=2))
    bench.client.create_stream(STREAM, segments=3, settings={"retention.ms": 5, "x": True})
    find, create = bench.bus.sent
    assert (find.partition, find.command.create) == (0, True)
    assert create.partition == 1
    assert create.command == r.CreateStream(STREAM, 3, {"retention.ms": "5", "x": "true"})


def test_a_closed_client_says_so() -> None:
    bench = Bench()
    txn = bench.client.begin("nyc")
    txn.write(STREAM, b"v")
    bench.client.close()
    bench.client.close()
    for call in (txn.commit, txn.token, bench.client.streams, lambda: txn.write(STREAM, b"v")):
        with pytest.raises(errors.IllegalState, match="closed"):
            call()


def test_a_call_ends_when_another_thread_closes_the_client() -> None:
    """A replica's thread, for example: `close` would wait for it."""
    bench: Bench = Bench(lambda _: bench.client.close())
    before = bench.clock.now
    with pytest.raises(errors.IllegalState, match="closed"):
        bench.client.describe(STREAM)
    assert bench.clock.now - before < 3
    assert len(bench.bus.sent) == 1


def test_a_client_remembers_a_limited_number_of_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anabranch.client.shared.MOST_NAMES", 10)
    shared = Bench().client._shared
    for n in range(25):
        shared.learn(f"nyc/s{n}", None)
        assert f"nyc/s{n}" in shared.streams
    assert len(shared.streams) <= 10
