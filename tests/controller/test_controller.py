"""The controller loop over the in-memory log: rounds, merges, takeover, several control partitions."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from anabranch.batches.records import Record, encode_batch
from anabranch.controller.controller import Controller
from anabranch.core.rows import ROUND_KEY
from anabranch.ports import LogFenced, TopicPartition
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import (
    CORRELATION_HEADER,
    REPLY_HEADER,
    TIME_HEADER,
    TXN_HEADER,
    WAIT_HEADER,
    pack_txn_header,
    unpack_txn_header,
)
from anabranch.protocol.partitioner import record_checksum
from anabranch.protocol.schemas.codec import LEVEL, decode, encode
from anabranch.protocol.schemas.records import (
    AdoptScope,
    Commit,
    CommitRecord,
    CreateStream,
    EpochRecord,
    Event,
    Extent,
    FindScope,
    GetState,
    ListCommands,
    OneShot,
    Outcome,
    Receipt,
    ScopeInfo,
    SetGrant,
    StreamList,
)
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    history_topic,
    journal_topic,
    status_topic,
    stream_topic,
)
from tests.controller.world import World, leading

STREAM = "nyc/flights"


def events_of(
    world: World, stream: str = STREAM, segments: int = 2
) -> list[tuple[bytes, bytes, bytes]]:
    """(transaction, key, value) of all committed events, partition by partition."""
    out = []
    for partition in range(segments):
        for record in world.committed(TopicPartition(stream_topic(stream), partition)):
            txn_id, _, _ = unpack_txn_header(dict(record.headers)[TXN_HEADER] or b"")
            out.append((txn_id, record.key or b"", record.value or b""))
    return out


def history_of(world: World, stream: str = STREAM) -> list[EpochRecord | CommitRecord]:
    records = world.committed(TopicPartition(history_topic(stream), 0))
    return [decode(record.value or b"") for record in records]


def one_shot(world: World, count: int) -> OneShot:
    events = tuple(
        Event(STREAM, -1, b"key-%d" % i, b"value-%d" % i, (), 5_000 + i) for i in range(count)
    )
    return OneShot(world.txn_id(), "nyc", None, events)


def test_a_one_shot_is_placed_by_key_and_is_in_the_history() -> None:
    world, controller = leading(STREAM)
    command = one_shot(world, 20)
    outcome = world.ask(controller, command)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 20)
    seen = events_of(world)
    assert sorted(e[1:] for e in seen) == sorted((e.key, e.value) for e in command.events)
    epoch, commit = history_of(world)
    assert isinstance(epoch, EpochRecord)
    assert isinstance(commit, CommitRecord)
    assert commit.timestamp == outcome.commit_timestamp > epoch.timestamp
    assert sum(s.count for s in commit.segments) == 20
    ends = {
        p: world.committed(TopicPartition(stream_topic(STREAM), p))[-1].offset + 1 for p in (0, 1)
    }
    assert {p.partition: p.offset for p in commit.vector} == ends


@pytest.mark.parametrize("one_batch", [True, False], ids=["spliced", "small batches"])
def test_a_transaction_of_two_writers_is_merged_whole(one_batch: bool) -> None:
    world, controller = leading(STREAM)
    txn_id, token, touched = world.begin(controller, STREAM)
    written = {w: [(b"k%d" % i, b"%d-%d" % (w, i)) for i in range(400)] for w in (1, 2, 3)}
    receipts = {
        w: world.write(txn_id, w, STREAM, touched.segments, rows, one_batch=one_batch)
        for w, rows in written.items()
    }
    outcome = world.ask(controller, Commit(token, (), (receipts[1], receipts[2]), None, 1000))
    assert (outcome.state, outcome.committed, outcome.left_out) == ("COMMITTED", 800, 400)
    seen = events_of(world)
    assert {e[0] for e in seen} == {txn_id}
    assert sorted(e[1:] for e in seen) == sorted(written[1] + written[2])
    for writer in (1, 2):  # per key and writer in the order of writing
        for partition in (0, 1):
            values = [
                int((r.value or b"").split(b"-")[1])
                for r in world.committed(TopicPartition(stream_topic(STREAM), partition))
                if (r.value or b"").startswith(b"%d-" % writer)
            ]
            assert values == sorted(values)
    commit = history_of(world)[-1]
    assert isinstance(commit, CommitRecord)
    assert sum(s.count for s in commit.segments) == 800


def test_a_fenced_leader_appends_and_answers_nothing() -> None:
    world, old = leading(STREAM)
    new = world.led("new")
    correlation_id = world.send(one_shot(world, 3))
    with pytest.raises(LogFenced):
        old.step(0)
    assert world.reply(correlation_id) is None
    assert events_of(world) == []
    new.step(0)
    assert isinstance(world.reply(correlation_id), Outcome)
    assert len(events_of(world)) == 3


def test_a_pending_commit_survives_its_controller() -> None:
    world, first = leading(STREAM)
    txn_id, token, touched = world.begin(first, STREAM)
    rows = [(b"k%d" % i, b"v") for i in range(10)]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, rows)
    end = receipt.extents[0]
    missing = Extent(STREAM, end.partition, end.end, end.end + 1, 1, 0)
    later = Receipt(txn_id, 2, 1, True, (missing,))
    asked = world.send(Commit(token, (receipt,), (later,), None, 60_000))
    first.step(0)
    first.step(0)
    assert world.reply(asked) is None  # the second receipt claims what is not written yet
    second = world.led("c1")
    second.step(0)
    assert world.reply(asked) is None
    world.clock.now += 61
    second.step(0)
    refusal = world.reply(asked)
    assert refusal.code == "ReceiptsNotCovered"
    outcome = world.ask(second, Commit(token, (receipt,), (), None, 1000))
    assert outcome.state == "COMMITTED"
    assert len(events_of(world)) == 10


def test_scopes_are_served_where_the_directory_says() -> None:
    world = World(control_partitions=3)
    leaders = [world.led(f"c{p}", p) for p in range(3)]
    homes = {}
    for scope in (f"scope-{i}" for i in range(8)):
        info = world.ask(leaders[0], FindScope(scope, True))
        assert isinstance(info, ScopeInfo)
        homes[scope] = info.control_partition
        leaders[info.control_partition].step(0)  # it reads that the scope is its own
    assert set(homes.values()) == {0, 1, 2}
    for scope, home in homes.items():
        for partition, leader in enumerate(leaders):
            answer = world.ask(leader, CreateStream(f"{scope}/s", 1, {}))
            if partition == home:
                assert isinstance(answer, StreamList), answer
            else:
                assert answer.code == "UnknownScope"
    again = world.led("again", 0)
    assert world.ask(again, FindScope("scope-5", True)).control_partition == homes["scope-5"]


@pytest.mark.parametrize(
    ("payload", "code"),
    [
        (b"", "MalformedRecord"),
        (b"\x01", "MalformedRecord"),
        (bytes((LEVEL, 4)) + b"rest", "FeatureNotEnabled"),
        (bytes((LEVEL + 1, 4)) + b"rest", "UnsupportedVersion"),
        (b"\x01\xfarest", "UnsupportedVersion"),
        (b"\x01\x04rest", "MalformedRecord"),
    ],
)
def test_commands_that_are_none_are_answered_by_name(payload: bytes, code: str) -> None:
    world = World()
    controller = world.led()
    answer = world.ask(controller, payload)
    assert answer.code == code


def test_commands_in_native_transactions_are_refused() -> None:
    world, controller = leading(STREAM)
    correlation_id = b"native"
    headers = ((CORRELATION_HEADER, correlation_id), (REPLY_HEADER, bytes(4)))
    batch = encode_batch([Record(0, 0, b"", encode(one_shot(world, 3)), headers)])
    producer = world.cluster.log("raw").producer("raw", timeout=60)
    producer.append([(TopicPartition(commands_topic(), 0), batch)])
    controller.step(0)  # before it is decided whether the command was sent at all
    producer.abort()
    answer = world.reply(correlation_id)
    assert answer.code == "InvalidArgument"
    assert events_of(world) == []


def test_messages_of_controllers_are_read_uncommitted_and_never_inside_a_native_transaction() -> (
    None
):
    world = World()
    store = MemoryStore()
    controller = world.led(store=store)
    control = TopicPartition(control_topic(), 0)
    producer = world.cluster.log("other").producer("other", timeout=60)
    refused = world.ask(controller, AdoptScope("taken", "open"))
    assert (refused.code, "controllers" in refused.message) == ("InvalidArgument", True)
    for end in (producer.abort, producer.commit):
        producer.append(
            [(control, encode_batch([Record(0, 0, b"", encode(AdoptScope("never", "open")))]))]
        )
        # A native transaction that stays open stops no message of others.
        world.cluster.produce(control, [Record(0, 0, b"", encode(AdoptScope("told", "open")))])
        world.ask(controller, FindScope("own", True))
        assert set(controller.state.scopes) == {"own", "told"}
        end()
        controller.step(0)
        assert set(controller.state.scopes) == {"own", "told"}
    world.ask(controller, FindScope("own", True))
    # Every position that a round logs is one from which nothing is missed, and nothing is done twice.
    read_to = controller.state.round.control_offset
    assert read_to > 0
    other = FindScope("other", True)  # controllers say nothing else there
    world.cluster.produce(control, [Record(0, 0, b"", encode(other))])
    world.cluster.produce(
        control, [Record(0, 0, b"", encode(AdoptScope(f"s{i}", "open"))) for i in range(2)]
    )
    controller.resign()
    successor = world.led("d")
    assert successor.state.round.control_offset == read_to
    assert set(successor.state.scopes) == {"own", "told"}
    successor.step(0)
    assert set(successor.state.scopes) == {"own", "told", "s0", "s1"}
    end_offset = world.cluster.partition(control).end_offset
    assert successor.state.round.control_offset == end_offset
    # Retention may take unread records.
    world.cluster.produce(control, [Record(0, 0, b"", encode(AdoptScope("gone", "open")))])
    world.cluster.log("retention").delete_records({control: end_offset + 1})
    successor.step(0)
    world.cluster.produce(control, [Record(0, 0, b"", encode(AdoptScope("late", "open")))])
    successor.step(0)
    successor.step(0)
    assert set(successor.state.scopes) == {"own", "told", "s0", "s1", "late"}


def test_what_grows_is_shown() -> None:
    world, controller = leading(STREAM)
    for _ in range(3):
        world.ask(controller, one_shot(world, 5))
    ends = world.cluster.log("reader").end_offsets(
        [place := TopicPartition(history_topic(STREAM), 0)], committed=True
    )
    for outcomes, history, leader in (
        (3, ends[place] - 1, controller),  # behind its last record stands a marker
        (3, 0, world.controller("c1")),
        (0, 0, None),
    ):
        if leader is None:
            world.clock.sleep(8 * 86_400)
            controller.step(0)
        elif leader is not controller:
            controller = leader
            controller.lead()
        controller.update_metrics()
        shown = {
            name: controller.metrics.values[name][()] for name in ("outcomes", "history_offsets")
        }
        assert shown == {"outcomes": outcomes, "history_offsets": history}
        listed = world.ask(controller, ListCommands())
        assert (listed.open_transactions, listed.outcomes) == (0, outcomes)


def test_what_operators_do_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "anabranch.controller")
    world = World()
    leader = world.led()
    for _ in range(2):
        world.ask(leader, SetGrant("open", "nyc/*", 12))
    said = [found.getMessage() for found in caplog.records if "by lane" in found.getMessage()]
    assert said == ["by lane open: SetGrant open on nyc/*: write, create"]


def test_every_leader_gives_the_same_state() -> None:
    world, first = leading(STREAM)
    done = one_shot(world, 5)
    outcome = world.ask(first, done)
    from_nothing = world.led("c1")
    assert world.ask(from_nothing, GetState(done.txn_id)) == outcome
    assert world.ask(from_nothing, done) == outcome  # repeated: answered, not done again
    assert len(events_of(world)) == 5


def test_a_successor_does_not_wait_for_the_open_round_of_a_dead_leader() -> None:
    world, old = leading(STREAM)
    assert old.lease is not None
    left_open = encode_batch([Record(0, 0, ROUND_KEY, encode(old.state.round))])
    old.lease.next_producer().append([(TopicPartition(status_topic(), 0), left_open)])
    before = world.clock.now
    new = world.led("new")
    assert world.clock.now - before < 5
    assert isinstance(world.ask(new, one_shot(world, 3)), Outcome)


@pytest.mark.parametrize("more", [False, True], ids=["", "its first fetch brings more"])
def test_what_was_left_out_is_not_rejected_too_after_a_takeover(more: bool) -> None:
    world, first = leading(STREAM)
    txn_id, token, touched = world.begin(first, STREAM)
    rows = [(b"k%d" % i, b"v") for i in range(10)]
    taken = world.write(txn_id, 1, STREAM, touched.segments, rows)
    world.write(txn_id, 2, STREAM, touched.segments, rows)  # killed: it never gave a receipt
    asked = world.send(Commit(token, (taken,), (), None, 1000))
    first.step(0)  # decided, and not merged
    second = world.controller("c1")
    second.lead()  # from an empty table: it reads the journal again
    if more:
        for partition in range(2):
            place = TopicPartition(journal_topic(STREAM), partition)
            world.cluster.produce(place, [Record(0, 0, b"k", b"plain")])
    world.steps(second, 4)
    outcome = world.reply(asked)
    assert (outcome.committed, outcome.left_out, outcome.rejected) == (10, 10, 0)


SMALL_LIMIT = 20_000


@pytest.mark.parametrize("mixed", [False, True], ids=["batches of one writer", "mixed batches"])
def test_merged_batches_keep_the_streams_limit(mixed: bool) -> None:
    world = World()
    controller = world.led()
    world.ask(controller, FindScope("nyc", True))
    world.ask(controller, CreateStream(STREAM, 1, {"max.message.bytes": str(SMALL_LIMIT)}))
    txn_id, token, _ = world.begin(controller, STREAM)
    journal = TopicPartition("nyc.flights.journal", 0)
    rows = [
        (b"k%d" % i, b"%d-" % i + b"v" * size) for i, size in enumerate((7_000, 30, 12_000) * 30)
    ]
    records = {
        w: [Record(0, 1, k, v, ((TXN_HEADER, pack_txn_header(txn_id, w, 0)),)) for k, v in rows]
        for w in (1, 2)
    }
    if mixed:
        turns = [r for pair in zip(records[1], records[2], strict=True) for r in pair]
        batches = [encode_batch(turns[i : i + 6], "zstd") for i in range(0, len(turns), 6)]
    else:
        batches = [encode_batch([r], None) for w in (1, 2) for r in records[w]]
    for batch in batches:
        assert len(batch) <= SMALL_LIMIT
        world.cluster.produce_batch(journal, batch)
    end = world.cluster.log("x").end_offsets([journal], committed=False)[journal]
    crc_sum = sum(record_checksum(k, v) for k, v in rows)
    receipts = tuple(
        Receipt(txn_id, w, 1, True, (Extent(STREAM, 0, 0, end, len(rows), crc_sum),))
        for w in (1, 2)
    )
    big = OneShot(
        world.txn_id(),
        "nyc",
        None,
        tuple(
            Event(STREAM, -1, b"k", b"e" * size, (), -1) for size in (9_000, 15_000, 100, 18_000)
        ),
    )
    first = world.ask(controller, big)
    assert isinstance(first, Outcome), first
    outcome = world.ask(controller, Commit(token, (), receipts, None, 1000))
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2 * len(rows))
    seen = events_of(world, segments=1)
    assert len(seen) == 2 * len(rows) + 4
    for writer in (1, 2):
        mine = [
            (r.key, r.value)
            for r in world.committed(TopicPartition(stream_topic(STREAM), 0))
            if unpack_txn_header(dict(r.headers)[TXN_HEADER] or b"")[1] == writer
        ]
        assert mine == rows


# -- clocks --------------------------------------------------------------------------------------------

WAITS = ((WAIT_HEADER, b""),)
ERROR_S = 0.05


def waiting() -> tuple[World, Controller, Any, bytes]:
    """A commit that is made, and whose asker wants commit wait."""
    world, controller = leading(STREAM, clock_error_ms=int(ERROR_S * 1000))
    command = one_shot(world, 3)
    return world, controller, command, world.send(command, more=WAITS)


def test_an_answer_waits_for_the_clocks_and_no_other_one_does() -> None:
    world, controller, _, asked = waiting()
    for _ in range(3):
        other = world.send(one_shot(world, 3))
        controller.step(0)
        assert isinstance(world.reply(other), Outcome), "not held up"
    world.clock.now += 2 * ERROR_S - 0.001
    controller.step(0)
    assert world.reply(asked) is None, "another clock may be behind by the error, this one ahead"
    begun = world.clock.now
    controller.step(5.0)
    controller.step(0)
    found = world.reply(asked)
    assert isinstance(found, Outcome)
    assert world.clock.now - begun < 0.1, "the loop does not sleep over it"
    passed_us = int(world.clock.now * 1e6) - hybrid_time.to_us(found.commit_timestamp)
    assert passed_us > 2e6 * ERROR_S


def test_a_successor_lets_it_wait_for_what_is_left() -> None:
    world, controller, command, asked = waiting()
    controller.step(0)
    successor = world.led("d", clock_error_ms=int(ERROR_S * 1000))
    world.clock.now += ERROR_S
    world.send(command, again=asked, more=WAITS)
    successor.step(0)
    assert world.reply(asked) is None
    world.clock.now += ERROR_S + 0.001
    successor.step(0)
    assert isinstance(world.reply(asked), Outcome)


@pytest.mark.parametrize("header", [b"", b"1234567", b"123456789", b"\x80" + bytes(7)])
def test_a_malformed_time_is_refused(header: bytes) -> None:
    world = World()
    controller = world.led()
    asked = world.send(one_shot(world, 1), more=((TIME_HEADER, header),))
    controller.step(0)
    answer = world.reply(asked)
    assert (answer.code, "8 bytes" in answer.message) == ("InvalidArgument", True)


def test_a_time_that_is_far_ahead_is_shown(caplog: pytest.LogCaptureFixture) -> None:
    world, controller = leading(STREAM)
    for ahead_s in (0.5, 5.0, 6.0):
        seen = hybrid_time.from_us(int((world.clock.now + ahead_s) * 1e6))
        header = (TIME_HEADER, hybrid_time.to_bytes(seen))
        asked = world.send(one_shot(world, 1), more=(header,))
        controller.step(0)
        assert world.reply(asked).commit_timestamp == seen + 1
        controller.update_metrics()
        assert controller.metrics.total("seconds_ahead") == pytest.approx(ahead_s, abs=0.002)
        told = [x for x in caplog.records if x.levelno == logging.WARNING]
        assert len(told) == (ahead_s > 1), "told once"
    world.clock.now += 60
    controller.update_metrics()
    assert controller.metrics.total("seconds_ahead") == 0
