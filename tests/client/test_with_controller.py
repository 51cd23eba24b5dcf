"""The client against the real controller, on the in-memory log with lost and doubled calls."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import timedelta
from hashlib import sha256
from typing import Any
from unittest.mock import patch

import pytest

from anabranch import errors
from anabranch.ports import LogError, LogUnavailable, LogUncertain, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.tokens import peek
from anabranch.testing.memory.client import MemoryJournal, memory_client
from anabranch.testing.memory.cluster import CLIENT
from anabranch.testing.memory.log import MemoryLog
from anabranch.topics.names import journal_topic
from anabranch.types import Listed
from tests.client.answers import STREAM
from tests.client.doubles import counted
from tests.client.world import World


def values(world: World) -> Counter[bytes | None]:
    return Counter(event.value for event in world.events(STREAM))


def test_a_one_shot(world: World) -> None:
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"1", key=b"a", headers={"h": b"x"}, timestamp=77)
        txn.write(STREAM, b"2", key=b"b")
        result = txn.commit()
    assert result.counts.committed == 2
    assert values(world) == {b"1": 1, b"2": 1}
    event = next(e for e in world.events(STREAM) if e.value == b"1")
    assert (event.key, event.timestamp_ms, event.headers[0]) == (b"a", 77, ("h", b"x"))
    (commit,) = world.commits(STREAM)
    assert (commit.txn_id, commit.timestamp) == (result.txn_id, result.commit_timestamp)


def test_a_handle_of_a_name_whose_transaction_is_prepared_can_only_end_it(world: World) -> None:
    with world.client.begin("nyc", "job") as first:
        first.write(STREAM, b"1")
        info = first.prepare(by=sha256(b"s" * 32).digest())
    with world.client.begin("nyc", "job") as again:
        assert again.prepared == info
        calls = (lambda: again.write(STREAM, b"2"), again.flush, again.token, again.assign_id)
        for call in calls:
            with pytest.raises(errors.ReservedByPrepared, match=r"'job' is prepared"):
                call()
    assert not values(world)
    with world.client.begin("nyc", "job") as last:
        assert last.commit(secret=b"s" * 32).txn_id == info.txn_id
    assert values(world) == {b"1": 1}


def test_exist_ok_accepts_what_has_all_that_was_asked_for(world: World) -> None:
    create, table = world.client.create_stream, world.client.create_table
    made = create("nyc/new", 2, {"retention.ms": "7d", "segment.ms": timedelta(hours=1)})
    assert dict(made.settings) == {"retention.ms": "604800000", "segment.ms": "3600000"}
    assert create("nyc/new", 2, {"retention.ms": "168h", "segment.ms": 3_600_000}) == made
    for asked in ({}, {"segments": 2}, {"settings": {"segment.ms": "60m"}}):
        with pytest.raises(errors.StreamExists):
            create("nyc/new", **asked)
        assert create("nyc/new", **asked, exist_ok=True) == made
    differs = (
        "nyc/new exists, but segments are 2 (asked: 3), retention.ms is 604800000 (asked: 1000)"
    )
    with pytest.raises(errors.StreamExists, match=re.escape(differs)):
        create("nyc/new", 3, {"retention.ms": "1s"}, exist_ok=True)
    with pytest.raises(errors.StreamExists, match=r"table is not set \(asked: true\)"):
        table("nyc/new", exist_ok=True)
    table("nyc/rows", 2)
    assert len(table("nyc/rows", exist_ok=True).segments) == 2
    with pytest.raises(errors.StreamExists, match=r"table is true \(asked: not set\)"):
        create("nyc/rows", exist_ok=True)
    with pytest.raises(errors.InvalidArgument, match="or a span of time such as 90s"):
        create("nyc/other", settings={"retention.ms": "7 days"})


def test_a_description_is_compared_only_if_it_is_given(world: World) -> None:
    create = world.client.create_stream
    world.connect(lane=ADMIN_LANE).feature_level(raise_to=2)
    made = create("nyc/new", description="From JFK")
    assert create("nyc/new", exist_ok=True) == create("nyc/new") == made
    for exist_ok in (True, False):
        with pytest.raises(errors.StreamExists) as refused:
            create("nyc/new", description="From EWR", exist_ok=exist_ok)
        differs = "nyc/new exists, but the description is 'From JFK' (asked: 'From EWR')"
        assert str(refused.value).startswith(differs)


def test_a_flush_before_the_first_write_is_in_no_commit_s_way(world: World) -> None:
    with world.client.begin("nyc") as txn:
        txn.flush()
        assert txn.commit().counts.committed == 0


def test_lists_give_what_answers_and_name_the_rest() -> None:
    world = World(control_partitions=2)
    client = world.new_client(timeout=2.0)
    operator = memory_client(
        world.cluster.log(CLIENT), world.clock, counted(), lane="admin", timeout=2.0
    )
    client.create_stream(STREAM)
    client.create_table("nyc/table")
    with client.begin("nyc", keepalive=3600) as txn:
        txn.token()
        began = world.clock.now
        lists: list[tuple[int, Listed[Any]]] = [
            (2, client.streams()),
            (1, client.transactions()),
            (1, client.open_transactions()),
            (0, client.prepared()),
            (1, client.system("transactions")),
            (1, client.system("tables")),
            (0, client.system("locks")),
            (1, operator.commands()),
        ]
        assert world.clock.now - began < 9 * client._shared.timeout + 1
        for count, found in lists:
            assert (len(found), list(found.missing)) == (count, [1])
            with pytest.raises(errors.NotReady, match="no answer of control partition 1"):
                found.check()
        assert client.streams("nyc").check().missing == {}
    world.stop_controller()
    with pytest.raises(errors.DeadlineExceeded):
        client.streams()


def test_writers_in_several_processes(world: World) -> None:
    with world.client.begin("nyc") as txn:
        token, whole = txn.token(), txn.token("commit")
        txn.write(STREAM, b"own", key=b"k")
        receipts = []
        for i in range(3):
            with world.new_client() as other, other.join(token) as writer:
                for j in range(250):
                    writer.write(STREAM, b"%d/%d" % (i, j), key=b"k%d" % j)
            receipts.append(writer.finish().to_bytes())
        result = txn.commit(receipts=receipts)
    assert result.counts.committed == 751
    assert set(values(world).values()) == {1}
    assert world.client.commit(whole) == result
    assert world.client.state(token).state == "COMMITTED"


def test_a_second_commit_by_reservation_is_judged_by_its_receipts(world: World) -> None:
    reservation = world.client.reserve("nyc")
    receipts = [world.part(reservation, value) for value in (b"one", b"two")]
    first = world.client.commit(reservation, receipts=receipts[:1])
    assert world.client.commit(reservation, receipts=receipts[:1]) == first
    with pytest.raises(errors.AlreadyCommitted, match="without writer"):
        world.client.commit(reservation, receipts=receipts[1:])
    assert values(world) == {b"one": 1}


def test_a_second_coordinator_with_a_later_receipt_of_the_same_events_gets_the_outcome(
    world: World,
) -> None:
    """The coordinator asked the worker for a receipt again, and the worker had written nothing since."""
    reservation = world.client.reserve("nyc")
    worker = world.client.join(reservation)
    worker.write(STREAM, b"v", key=b"k")
    first, later = worker.flush(), worker.flush()
    done = world.client.commit(reservation, receipts=[first])
    assert world.client.commit(reservation, receipts=[later]) == done


def test_a_handle_that_could_not_bring_all_events_to_the_journal_brings_none(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second try would write the first ones twice."""
    written, write = [], MemoryJournal.write

    def fail_once(journal: MemoryJournal, *record: Any) -> None:
        written.append(record)
        if len(written) == 3:
            raise errors.DeadlineExceeded("the brokers took nothing")
        write(journal, *record)

    monkeypatch.setattr(MemoryJournal, "write", fail_once)
    txn = world.client.begin("nyc")
    for number in range(5):
        txn.write(STREAM, b"%d" % number, key=b"k")
    with pytest.raises(errors.DeadlineExceeded):
        txn.flush()
    for _ in range(2):
        with pytest.raises(errors.WriteFailed):
            txn.commit()
    txn.abort()
    assert not values(world)


@pytest.mark.parametrize("who", ["interrupted", "another one"])
def test_a_commit_that_a_heartbeat_reported_first_has_its_result(world: World, who: str) -> None:
    txn = world.client.begin("nyc")
    token = txn.token("all")
    if who == "interrupted":
        txn.write(STREAM, b"v", key=b"k")
        txn.flush()
        world.fault = lambda name: KeyboardInterrupt() if name == "produce.after" else None
        with pytest.raises(KeyboardInterrupt):
            txn.commit()
        world.fault = None
    else:
        world.client.commit(token)
    for _ in range(14):
        world.clock.sleep(1.0)
        world.client.heart.step()
        world.client.heart.receive(world.clock.now)
    assert not txn.beating
    with pytest.raises((errors.AlreadyCommitted, errors.IllegalState)):
        txn.write(STREAM, b"more")
    assert txn.commit().counts.committed == (who == "interrupted")


def test_all_writers_are_shown_though_answers_have_some(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to a commit, which looks whether what its own handle wrote was taken."""
    monkeypatch.setattr(limits, "WRITERS_LISTED", limits.WRITERS_LISTED._replace(value=2))
    txn = world.client.begin("nyc")
    receipts = [world.part(txn.token(), b"%d" % number) for number in range(6)]
    assert txn.txn_id is not None
    expected = {receipt.writer for receipt in receipts}
    assert {one.writer for one in world.client.state(txn.txn_id).writers} == expected
    shown = world.client.open_transaction(txn.txn_id)
    assert {one.writer for one in shown.writers} == expected
    assert len(shown.writers) == shown.writer_count == 6
    txn.write(STREAM, b"own")
    assert txn.commit(receipts).counts.committed == 7
    found = world.client.resolve(txn.txn_id).writers
    assert len(found) == 7
    assert {one.writer for one in found} > expected


@pytest.mark.parametrize("flushed", [True, False])
def test_an_unfinished_writer_is_an_error_until_it_finishes(world: World, flushed: bool) -> None:
    """Though nothing of it was sent, or even registered."""
    with world.client.begin("nyc") as txn, world.new_client() as other:
        writer = other.join(txn.token())
        writer.write(STREAM, b"v", key=b"k")
        if flushed:
            writer.flush()
        with pytest.raises(errors.WritersUnfinished):
            txn.commit()
        writer.finish()
        assert txn.commit().counts.committed == 1


def test_committing_what_the_beginner_wrote_says_what_to_do(world: World) -> None:
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"v", key=b"k")
        token = txn.token("commit")
        with pytest.raises(errors.WritersUnfinished, match=r"that began .* commit by it"):
            world.new_client().commit(token)
        assert txn.commit().counts.committed == 1


def test_a_name_claimed_by_two_commits_is_committed_once(world: World) -> None:
    results = []
    for value in (b"1", b"2"):
        with world.client.begin("nyc") as txn:
            txn.token()
            txn.write(STREAM, value, key=b"k")
            results.append(txn.commit(name="once"))
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"3", key=b"k")
        results.append(txn.commit(name="once"))
    assert len(set(results)) == 1
    assert values(world) == {b"1": 1}


def test_resolve_is_for_ever(world: World) -> None:
    txn = world.client.begin("nyc")
    txn.write(STREAM, b"v", key=b"k")
    txn_id = txn._make_id(world.clock.now + 5)
    assert world.client.resolve(txn_id).state == "ABORTED"
    with pytest.raises(errors.TransactionAborted):
        txn.commit()
    assert values(world) == {}


# -- faults ---------------------------------------------------------------------------------------------


def test_no_controller_then_one(world: World) -> None:
    world.stop_controller()
    with world.client.begin("nyc") as txn:
        txn.write(STREAM, b"v", key=b"k")
        with pytest.raises(errors.OutcomeUnknown) as caught:
            txn.commit()
        world.start_controller()
        assert caught.value.txn_id is not None
        result = txn.commit()
    assert result.txn_id == caught.value.txn_id
    assert values(world) == {b"v": 1}


def test_a_lost_begin_is_safe_to_repeat(world: World) -> None:
    world.stop_controller()
    txn = world.client.begin("nyc")
    with pytest.raises(errors.DeadlineExceeded):
        txn.token()
    world.start_controller()
    txn.token()
    txn.abort()
    assert [t.state for t in world.client.transactions(finished=True)] == ["ABORTED"]


def test_a_long_list_comes_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LIST_ROWS", limits.LIST_ROWS._replace(value=2))
    with_tokens = [world.client.begin("nyc") for _ in range(7)]
    ids = [peek(txn.token()).txn_id for txn in with_tokens]
    for txn in with_tokens[1::2]:
        txn.abort()
    assert [t.txn_id for t in world.client.transactions("nyc")] == sorted(ids[0::2])
    every = [t.txn_id for t in world.client.transactions("nyc", finished=True)]
    assert every == sorted(ids, reverse=True)
    for limit in (1, 3, 7):
        found = world.client.transactions(finished=True, limit=limit)
        assert [t.txn_id for t in found] == every[:limit]


def test_a_failed_write_gives_no_receipt(world: World) -> None:
    with world.client.begin("nyc") as txn:
        writer = world.client.join(txn.token())
        writer.write(STREAM, b"v", key=b"k")
        world.fault = lambda name: LogUncertain("?") if name == "produce.after" else None
        with pytest.raises(errors.WriteFailed):
            writer.finish()
        world.fault = None
        with pytest.raises(errors.WriteFailed):
            writer.finish()
        result = txn.commit(receipts=[world.part(txn.token(), b"v")])
    assert (result.counts.committed, result.counts.left_out) == (1, 1)
    assert values(world) == {b"v": 1}


@pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 40))]
)
def test_whatever_is_lost_no_answer_is_wrong(world: World, seed: int) -> None:
    """Commands and fetches fail before and after their effect; every outcome is the true one."""
    chance = random.Random(seed)

    def fault(name: str) -> LogError | None:
        if chance.random() >= 0.2:
            return None
        if name in ("produce", "fetch"):
            return LogUnavailable("not reached")
        if name == "produce.after":
            return LogUncertain("was it?")
        return None

    world.fault = fault
    committed: set[bytes] = set()
    aborted: set[bytes] = set()
    doubtful: dict[bytes, bytes] = {}
    for i in range(12):
        value = b"%d" % i
        txn = world.client.begin("nyc")
        try:
            with txn:
                if i % 2:
                    txn.token()
                txn.write(STREAM, value, key=value)
                txn.commit(timeout=chance.choice([3, 30]))
                committed.add(value)
        except (errors.TransactionAborted, errors.WriteFailed, errors.RetryError):
            aborted.add(value)
        except errors.OutcomeUnknown as error:
            doubtful[value] = error.txn_id or b""
    world.fault = None
    for value, txn_id in doubtful.items():
        state = world.client.resolve(txn_id).state
        while state not in ("COMMITTED", "ABORTED"):
            world.clock.sleep(5)
            world.step()
            state = world.client.resolve(txn_id).state
        (committed if state == "COMMITTED" else aborted).add(value)
    for _ in range(20):
        world.clock.sleep(5)
        world.step()
    assert values(world) == dict.fromkeys(committed, 1)
    assert committed
    assert not committed & aborted


def test_an_old_leader_s_end_of_a_journal_is_asked_for_again(world: World) -> None:
    """A commit said InvalidArgument of the receipt's extent."""
    place = TopicPartition(journal_topic(STREAM), 0)
    stale = world.cluster.log("r").end_offsets([place], committed=False)
    now = MemoryLog.end_offsets
    answers = [stale, stale]

    def end_offsets(log: MemoryLog, places: Any, **how: Any) -> Any:
        is_flush = log.process == CLIENT and place in places
        return answers.pop() if is_flush and answers else now(log, places, **how)

    with world.client.begin("nyc") as txn:
        txn.token()
        txn.write(STREAM, b"mine", key=b"k")
        with patch.object(MemoryLog, "end_offsets", end_offsets):
            assert txn.commit().counts.committed == 1
    assert not answers
