"""Timelines of transactions, from the logs of a cluster in memory whose clock stands unless a call waits."""

from __future__ import annotations

from typing import Any

import pytest

from anabranch import errors
from anabranch.core.rows import Entry
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.reading.timeline import StatusRow, steps_of
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import history_topic, journal_topic, status_topic
from anabranch.types import Timeline, TimelineStep
from tests.client.answers import STREAM
from tests.client.world import World

STATUS = TopicPartition(status_topic(), 0)
TXN = bytes(range(16))


def whats(found: Timeline) -> list[str]:
    return [step.what for step in found.steps]


def the(found: Timeline, what: str) -> TimelineStep:
    (step,) = [step for step in found.steps if step.what == what]
    return step


def since(found: Timeline, what: str) -> int:
    """Milliseconds from begin to a step."""
    return the(found, what).at_ms - the(found, "begun").at_ms


def committed(world: World, delay: float = 0.0) -> Timeline:
    """The timeline of a transaction with a writer in another process; ``delay``: seconds between its steps."""
    client = world.client
    with client.begin("nyc") as txn:
        token = txn.token()
        world.advance(delay)
        with world.new_client() as other, other.join(token, label="loader") as writer:
            writer.write(STREAM, b"1", key=b"a")
            writer.flush()
            world.advance(delay)
            writer.write(STREAM, b"2", key=b"b")
        world.advance(delay)
        result = txn.commit([writer.finish()])
    found = client.timeline(result.txn_id)
    assert found.txn_id == result.txn_id
    return found


def test_each_step_has_the_time_of_its_round(world: World) -> None:
    world.brokers.marker_delay = 0.3
    found = committed(world, 5.0)
    assert whats(found)[:6] == ["id made", "begun", "touched", "joined", "receipt", "receipt"]
    assert whats(found)[-3:] == ["decided", "merged", "readable"]
    receipts = [step for step in found.steps if step.what == "receipt"]
    assert [step.about.split(": ")[1] for step in receipts] == ["1 event", "2 events, finished"]
    assert all("(loader)" in step.about for step in receipts)
    assert the(found, "touched").about == STREAM
    assert 5000 <= since(found, "touched") < 7000
    assert 10_000 <= receipts[1].at_ms - the(found, "begun").at_ms < 13_000
    assert 15_000 <= since(found, "decided") < 19_000
    assert the(found, "merged").about.startswith("2 events, commit timestamp 2023-")
    assert [step.clock for step in found.steps if step.what in ("id made", "readable")] == [
        "client",
        "broker",
    ]
    assert the(found, "readable").at_ms - the(found, "merged").at_ms == pytest.approx(300, abs=60)
    assert found.gaps == ()


def test_a_commit_names_the_journals_and_writers_that_it_waited_for(world: World) -> None:
    client, journal = world.client, TopicPartition(journal_topic(STREAM), 0)
    with client.begin("nyc") as txn:
        token = txn.token()
        with world.new_client() as other, other.join(token, label="loader") as writer:
            for number in range(20):
                writer.write(STREAM, b"1", key=b"%d" % number)
            writer.flush()
            world.brokers.troubles[journal] = Trouble(Kind.LEADERLESS, process="controller")
            writer.write(STREAM, b"1", key=b"1")
        until = world.clock.now + 3.0

        def mend() -> None:
            if world.clock.now >= until:
                world.brokers.troubles.clear()
            world.step()

        world.clock.on_sleep = mend
        result = txn.commit([writer.finish()])
    found = client.timeline(result.txn_id)
    asked, decided = the(found, "commit asked"), the(found, "decided")
    assert decided.at_ms - asked.at_ms >= 1500
    assert decided.waited_for.startswith(f"the journals of {STREAM} to show the receipts of ")
    assert decided.waited_for.endswith("(loader)")


def test_a_one_shot_has_its_merge_and_where_it_is_readable(world: World) -> None:
    world.brokers.marker_delay = 0.05
    world.client.create_stream("nyc/other")
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a")
        result = txn.commit()
    found = world.client.timeline(result.txn_id.hex())
    assert whats(found) == ["id made", "merged", "readable"]
    assert the(found, "readable").about == STREAM


def test_a_new_leader_and_an_abort_are_steps(world: World) -> None:
    with world.client.begin("nyc") as txn:
        txn.token()
        world.stop_controller()
        world.start_controller()
        txn.abort("no need")
        txn_id = txn.txn_id or b""
    found = world.client.timeline(txn_id)
    assert whats(found) == ["id made", "begun", "leader", "aborted"]
    assert the(found, "leader").about == "term 2: memory"
    assert the(found, "aborted").about == "no need"


def test_the_end_of_a_long_transaction_is_read_first(world: World) -> None:
    with world.client.begin("nyc", keepalive=3600) as txn:
        txn.token()
        for _ in range(40):  # rows of other transactions
            with world.client.outside(), world.client.begin("nyc") as other:
                other.write(STREAM, b"1", key=b"a")
                other.commit()
            world.advance(10)
        txn.write(STREAM, b"1", key=b"a")
        result = txn.commit()
    found = world.client.timeline(result.txn_id)
    assert whats(found) == ["id made", "begun", "touched", "joined", "receipt", "decided", "merged"]
    assert since(found, "merged") >= 400_000
    assert len(found.gaps) == 1
    assert "in the millisecond of the commit timestamp" in found.gaps[0]


def test_what_can_t_be_read_is_a_gap(world: World) -> None:
    result_of = committed(world).txn_id
    denied = Trouble(Kind.DENYING, process="reader")
    world.brokers.troubles[STATUS] = denied
    found = world.client.timeline(result_of)
    assert whats(found) == ["id made", "begun", "merged"]
    assert "the right Describe on the topic anabranch.status is missing" in found.gaps[0]
    world.brokers.troubles.clear()
    world.brokers.troubles[TopicPartition(history_topic(STREAM), 0)] = denied
    found = world.client.timeline(result_of)
    assert "decided" in whats(found)
    assert f"the history of {STREAM} can't be read" in found.gaps[0]


def test_a_compacted_status_log_is_a_gap(world: World) -> None:
    txn_id = committed(world).txn_id
    world.brokers.compact(STATUS)
    found = world.client.timeline(txn_id)
    assert "merged" in whats(found)
    assert "decided" not in whats(found)
    assert "touched" in whats(found)
    assert found.gaps[0].startswith("the status log is compacted here")


def test_an_unknown_transaction_is_refused(world: World) -> None:
    with pytest.raises(errors.UnknownTransaction):
        world.client.timeline(make_txn_id(0, int(world.clock.wall() * 1000), 7))


def test_an_open_transaction_has_its_steps_so_far(world: World) -> None:
    with world.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"1", key=b"a")
        txn.flush()
        found = world.client.timeline(txn.txn_id or b"")
    assert whats(found) == ["id made", "begun", "touched", "joined", "receipt"]
    assert found.gaps == ()


# -- rows that the small world above does not make --------------------------------------------------------


def txn_row(at_ms: int, state: r.TxnState, **changes: Any) -> StatusRow:
    row = r.TxnRow(
        TXN, "nyc", None, state, 1, 1, 0, 0, 0, 0, 0, "", None, "open", None, 0, None
    )._replace(**changes)
    return StatusRow(at_ms, Entry.TXN, b"", row)


def staged(at_ms: int, number: int, done: bool) -> StatusRow:
    row = r.StagedMergeRow(TXN, STREAM, number, number, 7, 0, 0, 9, 9, done)
    return StatusRow(at_ms, Entry.STAGED_MERGE, bytes([number]), row)


def test_a_staged_merge_waited_for_its_segments() -> None:
    rows = [
        txn_row(1, "OPEN"),
        txn_row(2, "COMMIT_IN_PROGRESS"),
        txn_row(3, "FINALIZE_IN_PROGRESS"),
        staged(3, 0, False),
        staged(4, 0, True),
        staged(5, 1, True),
        txn_row(6, "COMMITTED", committed=18, commit_timestamp=1_700_000_000_000_000 << 12),
    ]
    steps = steps_of(rows)
    assert [(step.at_ms, step.what) for step in steps] == [
        (1, "begun"), (2, "decided"), (3, "staging"), (4, "staged"), (5, "staged"), (6, "merged")
    ]  # fmt: skip
    assert steps[-1].waited_for == "2 segments to be staged"
    assert steps[3].about == f"{STREAM}, journal partition 0: 9 events"


def test_a_prepared_transaction_is_decided_by_its_coordinator() -> None:
    pending = r.PendingCommitRow((), False, (), "daily", 7, 0)
    rows = [
        txn_row(1, "OPEN"),
        StatusRow(2, Entry.PENDING_COMMIT, b"", pending),
        txn_row(4, "PREPARED"),
        txn_row(9, "FINALIZE_IN_PROGRESS"),
        txn_row(9, "COMMITTED"),
    ]
    steps = steps_of(rows)
    assert [(step.at_ms, step.what) for step in steps] == [
        (1, "begun"), (2, "commit asked"), (4, "prepared"), (9, "decided"), (9, "merged")
    ]  # fmt: skip
    assert steps[2].waited_for == "its turn, or an earlier commit of series daily"
    assert steps[3].waited_for == ""
