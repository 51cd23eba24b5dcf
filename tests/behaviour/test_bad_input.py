"""Bad input of every kind: a named error or a counted rejection, and nothing else is disturbed.

Beside each case a healthy transaction of two writers is open; it commits at the end, whole and soon.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

import anabranch
from anabranch import errors
from anabranch.ports import Log, TopicPartition
from anabranch.processors.intake import MAX_UNPACKED_BYTES
from anabranch.schemas import records as r
from anabranch.schemas.codec import encode
from anabranch.topics.batch import Packed
from anabranch.topics.compression import NONE, ZSTD, compress
from anabranch.topics.journal_producer import JournalProducer
from anabranch.topics.kafka_log import KafkaLog
from anabranch.topics.records import put_varint
from anabranch.topics.settings import parse_settings
from anabranch.topics.wire.cluster import Cluster as Brokers
from tests.cluster import Cluster, start_cluster
from tests.crash.oracle import check_stream, read_stream
from tests.crash.raw import Pen, Raw, Refused, make_txn_id, partition_of

pytestmark = pytest.mark.broker

SEGMENTS = 2
KEEPALIVE_MS = 600_000
SOON_S = 10.0
WAIT_MS = 10_000
NO_WRITER = b"\0" * 16
NOW_MS = int(time.time() * 1000)


@pytest.fixture(scope="module")
def log(cluster: Cluster) -> Iterator[KafkaLog]:
    kafka = KafkaLog(cluster.bootstrap)
    yield kafka
    kafka.close()


@pytest.fixture
def raw(cluster: Cluster, log: Log) -> Raw:
    return Raw(cluster.bootstrap, cluster.prefix, log).start()


@dataclass
class Place:
    """A stream of its own, and an open transaction of a raw client that is about to do wrong."""

    cluster: Cluster
    client: anabranch.Client
    raw: Raw
    log: Log
    scope: str

    @property
    def stream(self) -> str:
        return f"{self.scope}/events"

    @property
    def journal(self) -> str:
        return f"{self.scope}.events.journal"

    def begin(self) -> bytes:
        """A new transaction's token."""
        begun = self.raw.ask(r.Begin(make_txn_id(), self.scope, None, KEEPALIVE_MS))
        assert isinstance(begun, r.Begun)
        return begun.token

    def touched(self) -> tuple[bytes, Pen, r.Touched]:
        """(token, a writer, where to write)."""
        token = self.begin()
        touched = self.raw.ask(r.Touch(token, self.stream))
        return token, Pen(self.raw, token[5:21]), touched

    def write(
        self, headers: list[tuple[str, bytes]], *, count: int = 1, partition: int = 0
    ) -> None:
        """Plain records into the journal, without keys."""
        self.raw.produce([(self.journal, partition, None, b"bad", headers)] * count)

    def rejected(self, reason: str, at_least: int) -> int:
        """The count of a reason, once it has come so far."""
        until = time.monotonic() + SOON_S
        while True:
            count = self.client.describe(self.stream).rejected.get(reason, 0)
            if count >= at_least or time.monotonic() > until:
                return count
            time.sleep(0.02)

    def visible(self) -> list[bytes]:
        """All payloads, and that history agrees."""
        found = read_stream(self.log, self.stream)
        check_stream(found)
        return sorted(e.value for e in found.events)

    def state(self, token: bytes) -> r.Outcome:
        outcome = self.raw.ask(r.GetState(token[5:21]))
        assert isinstance(outcome, r.Outcome)
        return outcome


@pytest.fixture
def place(
    cluster: Cluster, client: anabranch.Client, raw: Raw, log: Log, unique: str
) -> Iterator[Place]:
    """Something bad happens here; the transaction beside it commits whole, and soon."""
    made = Place(cluster, client, raw, log, f"bad{unique}")
    client.create_stream(made.stream, segments=SEGMENTS)
    with beside(client, made.stream) as healthy:
        yield made
    seen = [value for value in made.visible() if value.startswith(b"healthy")]
    assert seen == sorted(healthy)


@contextmanager
def beside(client: anabranch.Client, stream: str) -> Iterator[list[bytes]]:
    """A transaction of two writers around something; gives its payloads."""
    values = [f"healthy {n:03}".encode() for n in range(40)]
    txn = client.begin(stream.partition("/")[0])
    token = txn.token()
    with client.join(token) as writer:
        for value in values[:15]:
            writer.write(stream, value, key=value)
    for value in values[15:30]:
        txn.write(stream, value, key=value)
    txn.flush()
    yield values
    for value in values[30:]:
        txn.write(stream, value, key=value)
    began = time.monotonic()
    counts = txn.commit().counts
    assert time.monotonic() - began < SOON_S
    assert (counts.committed, counts.rejected, counts.left_out) == (40, 0, 0)


# -- records in the journal -------------------------------------------------------------------------------


def header_of(txn_id: bytes, epoch: int = 0, writer: int = 7) -> bytes:
    return txn_id + writer.to_bytes(8, "big", signed=True) + epoch.to_bytes(4, "big", signed=True)


GOOD = "ab.txn"
# What is written, given the id of an open transaction -> the reason under which it is counted.
RECORDS: dict[str, tuple[Callable[[bytes], list[tuple[str, bytes]]], str]] = {
    "a header too short": (lambda i: [(GOOD, header_of(i)[:-1])], "bad_header"),
    "a header too long": (lambda i: [(GOOD, header_of(i) + b"\0")], "bad_header"),
    "an empty header": (lambda i: [(GOOD, b"")], "bad_header"),
    "the header twice": (lambda i: [(GOOD, header_of(i))] * 2, "bad_header"),
    "another reserved header": (lambda i: [(GOOD, header_of(i)), ("ab.x", b"")], "bad_header"),
    "a reserved header alone": (lambda i: [("ab.x", b"")], "bad_header"),
    "an unknown transaction": (lambda i: [(GOOD, header_of(make_txn_id()))], "unknown_transaction"),
    "an id of zeros": (lambda i: [(GOOD, header_of(bytes(16)))], "unknown_transaction"),
    "a stream epoch from the future": (lambda i: [(GOOD, header_of(i, 1))], "wrong_stream_epoch"),
    "a negative stream epoch": (lambda i: [(GOOD, header_of(i, -1))], "wrong_stream_epoch"),
}


@pytest.mark.parametrize("what", RECORDS)
def test_record_that_is_rejected(place: Place, what: str) -> None:
    headers, reason = RECORDS[what]
    token, pen, touched = place.touched()
    place.write(headers(token[5:21]), count=3)
    pen.write(place.stream, touched.segments, [(b"k", b"good")])
    assert place.rejected(reason, 3) == 3
    outcome = place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
    assert (outcome.state, outcome.committed) == ("COMMITTED", 1)
    assert outcome.rejected == (3 if reason == "wrong_stream_epoch" else 0)
    assert b"bad" not in place.visible()


def test_record_of_a_transaction_that_never_touched_the_stream(place: Place) -> None:
    token = place.begin()
    place.write([(GOOD, header_of(token[5:21]))])
    assert place.rejected("untouched_stream", 1) == 1
    assert place.raw.ask(r.Abort(token, "")).rejected == 1


def test_record_in_the_wrong_segment_for_its_key(place: Place) -> None:
    token, pen, touched = place.touched()
    right = partition_of(b"k", touched.segments)
    wrong = place.journal, 1 - right, b"k", b"bad", [pen.header]
    place.raw.produce([wrong])
    assert place.rejected("wrong_segment", 1) == 1
    assert place.raw.ask(r.Abort(token, "")).rejected == 1


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_record_that_comes_too_late(place: Place, end: str) -> None:
    token, pen, touched = place.touched()
    pen.write(place.stream, touched.segments, [(b"k", b"in time")])
    if end == "commit":
        place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
    else:
        place.raw.ask(r.Abort(token, ""))
    pen.write(place.stream, touched.segments, [(b"k", b"bad")])
    assert place.rejected("late", 1) == 1
    assert b"bad" not in place.visible()
    assert place.state(token).state == {"commit": "COMMITTED", "abort": "ABORTED"}[end]


def test_native_transaction_left_open_on_the_journal(place: Place) -> None:
    """Nobody stalls: not the merge of others, not the reader of the stream."""
    token, _, _ = place.touched()
    rude = Producer(
        {
            "bootstrap.servers": place.cluster.bootstrap,
            "transactional.id": place.scope,
            "log_level": 0,
        }
    )
    rude.init_transactions(20)
    rude.begin_transaction()
    for partition in range(SEGMENTS):
        header = (GOOD, header_of(token[5:21]))
        rude.produce(place.journal, b"bad", None, partition, headers=[header])
    rude.flush(20)
    assert place.rejected("native_transaction", SEGMENTS) == SEGMENTS
    with place.client.begin(place.scope) as txn:  # a whole life while it is open
        txn.token()
        txn.write(place.stream, b"meanwhile", key=b"k")
        txn.flush()
        assert txn.commit(timeout=SOON_S).counts.committed == 1
    assert b"meanwhile" in place.visible()
    rude.commit_transaction(20)
    assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"
    assert b"bad" not in place.visible()


# -- commands ---------------------------------------------------------------------------------------------


def with_token(kind: type, token: bytes, stream: str) -> object:
    receipt = r.Receipt(token[5:21].ljust(16), 7, 1, True, ())
    return {
        r.Touch: r.Touch(token, stream),
        r.Register: r.Register(token, receipt),
        r.Commit: r.Commit(token, (), None, None, WAIT_MS),
        r.Abort: r.Abort(token, ""),
        r.Heartbeat: r.Heartbeat((token,)),
    }[kind]


def flip(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


TAMPERINGS: dict[str, Callable[[bytes], bytes]] = {
    "version": lambda t: flip(t, 0),
    "key id": lambda t: flip(t, 1),
    "control partition": lambda t: flip(t, 6),
    "transaction": lambda t: flip(t, 20),
    "keepalive": lambda t: flip(t, 24),
    "scope": lambda t: flip(t, 25),
    "signature": lambda t: flip(t, -1),
    "cut short": lambda t: t[:-1],
    "made longer": lambda t: t + b"\0",
    "empty": lambda t: b"",
    "half": lambda t: t[: len(t) // 2],
}


@pytest.mark.parametrize("what", TAMPERINGS)
def test_tampered_token(place: Place, what: str) -> None:
    token = place.begin()
    for kind in (r.Touch, r.Register, r.Commit, r.Abort, r.Heartbeat):
        with pytest.raises(Refused) as refused:
            place.raw.ask(with_token(kind, TAMPERINGS[what](token), place.stream))
        expected = {"InvalidToken"} | ({"UnsupportedVersion"} if what == "version" else set())
        assert refused.value.code in expected, kind
    assert place.state(token).state == "OPEN"
    assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"


def change(receipt: r.Receipt, **changes: object) -> r.Receipt:
    return replace(receipt, extents=(replace(receipt.extents[0], **changes),))  # type: ignore[arg-type]


# A right receipt -> a wrong one, and how it is refused.
RECEIPTS: dict[str, tuple[Callable[[r.Receipt], r.Receipt], str]] = {
    "one more": (lambda x: change(x, count=x.extents[0].count + 1), "ReceiptMismatch"),
    "one less": (lambda x: change(x, count=x.extents[0].count - 1), "ReceiptMismatch"),
    "nothing": (lambda x: change(x, count=0, crc_sum=0), "ReceiptMismatch"),
    "checksum": (lambda x: change(x, crc_sum=x.extents[0].crc_sum ^ 1), "ReceiptMismatch"),
    "begins late": (lambda x: change(x, first=x.extents[0].first + 1), "ReceiptMismatch"),
    "ends early": (lambda x: change(x, end=x.extents[0].end - 1), "ReceiptMismatch"),
    "another writer": (lambda x: replace(x, writer=x.writer ^ 1), "ReceiptMismatch"),
    "not there yet": (lambda x: change(x, end=x.extents[0].end + 1000), "ReceiptsNotCovered"),
    "ends at 2^62": (lambda x: change(x, end=1 << 62), "ReceiptsNotCovered"),
    "of another": (lambda x: replace(x, txn_id=make_txn_id()), "InvalidArgument"),
    "twice": (lambda x: replace(x, extents=x.extents * 2), "InvalidArgument"),
    "back to front": (lambda x: change(x, first=9, end=8), "InvalidArgument"),
    "negative": (lambda x: change(x, first=-1), "InvalidArgument"),
    "fewer than none": (lambda x: change(x, count=-1), "InvalidArgument"),
    "another stream": (lambda x: change(x, stream="no/where"), "UnknownStream"),
    "no such partition": (lambda x: change(x, partition=99), "InvalidArgument"),
}


@pytest.mark.parametrize("what", RECEIPTS)
def test_wrong_receipt(place: Place, what: str) -> None:
    """Refused, and the transaction is open as before: the right one commits it."""
    spoil, code = RECEIPTS[what]
    token, pen, touched = place.touched()
    pen.write(place.stream, touched.segments, [(b"k", b"one"), (b"k", b"two")])
    receipt = pen.receipt()
    with pytest.raises(Refused) as refused:
        place.raw.ask(r.Commit(token, (spoil(receipt),), None, None, 300))
    assert refused.value.code.startswith(code)
    assert place.state(token).state == "OPEN"
    better = replace(receipt, sequence=receipt.sequence + 1)
    outcome = place.raw.ask(r.Commit(token, (better,), (), None, WAIT_MS))
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2)


# Bytes on the commands topic, with the two headers -> the code of the answer.
GARBAGE: dict[str, tuple[bytes, str]] = {
    "a version from the future": (
        b"\x02" + encode(r.GetState(NO_WRITER))[1:],
        "UnsupportedVersion",
    ),
    "a type from the future": (b"\x01\xc8" + NO_WRITER, "UnsupportedVersion"),
    "version zero": (b"\x00\x0b" + NO_WRITER, "UnsupportedVersion"),
    "nothing": (b"", "MalformedRecord"),
    "one byte": (b"\x01", "MalformedRecord"),
    "no body": (b"\x01\x0b", "MalformedRecord"),
    "a body too short": (encode(r.GetState(NO_WRITER))[:-1], "MalformedRecord"),
    "a body too long": (encode(r.GetState(NO_WRITER)) + b"\0", "MalformedRecord"),
    "a length of 2^60": (b"\x01\x01" + b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "MalformedRecord"),
    "a length below zero": (b"\x01\x01\x01", "MalformedRecord"),
    "text that is not UTF-8": (b"\x01\x01\x04\xff\xfe\x00", "MalformedRecord"),
    "a status row": (encode(r.ScopeRow("x", 0)), "MalformedRecord"),
    "a reply": (encode(r.Reply(b"", 0, r.Registered(1))), "MalformedRecord"),
    "64 kB of noise": (b"\x01\x08" + bytes(range(256)) * 256, "MalformedRecord"),
}


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_on_the_commands_topic(place: Place, what: str) -> None:
    payload, code = GARBAGE[what]
    with pytest.raises(Refused) as refused:
        place.raw.ask(payload)
    assert refused.value.code == code


def varlong(value: int) -> bytes:
    out = bytearray()
    put_varint(out, value)
    return bytes(out)


def one_record(timestamp_delta: int, value: int) -> bytes:
    """A record without key whose value is so many zeros."""
    inner = b"\0" + varlong(timestamp_delta) + b"\0\1" + varlong(value) + bytes(value) + b"\0"
    return varlong(len(inner)) + inner


# Batches that a broker takes, and nobody can read (of commands, it looks at the timestamps).
UNREADABLE: dict[str, Callable[[], Packed]] = {
    # The sum of two numbers of 64 bits.
    "a timestamp beyond 64 bits": lambda: Packed(
        one_record(1 << 40, 3), NONE, 1, (1 << 63) - (1 << 39), (1 << 63) - 1
    ),
    "a bomb": lambda: Packed(
        compress(ZSTD, one_record(0, MAX_UNPACKED_BYTES + 1)), ZSTD, 1, NOW_MS, NOW_MS
    ),
}


@pytest.mark.parametrize(
    ("topic", "what"),
    [("journal", "a timestamp beyond 64 bits"), ("journal", "a bomb"), ("commands", "a bomb")],
)
def test_batch_that_nobody_can_read(place: Place, topic: str, what: str) -> None:
    name = f"{place.cluster.prefix}.commands" if topic == "commands" else place.journal
    brokers = Brokers(parse_settings(place.cluster.bootstrap, {}))
    deadline = time.monotonic() + 20
    try:
        producer = JournalProducer(brokers, deadline)
        try:
            producer.append(TopicPartition(name, 0), UNREADABLE[what](), deadline)
            producer.flush(deadline)
        finally:
            producer.close()
    finally:
        brokers.close()
    assert place.state(place.begin()).state == "OPEN"


WRONG_HEADERS: dict[str, list[tuple[str, bytes]]] = {
    "none": [],
    "no partition": [("ab.cid", b"1" * 16)],
    "no correlation id": [("ab.reply", bytes(4))],
    "a partition that is not there": [("ab.cid", b"1" * 16), ("ab.reply", b"\x00\x00\x03\xe7")],
    "a negative partition": [("ab.cid", b"1" * 16), ("ab.reply", b"\xff\xff\xff\xff")],
    "a partition of three bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(3))],
    "a partition of eight bytes": [("ab.cid", b"1" * 16), ("ab.reply", bytes(8))],
    "an empty correlation id": [("ab.cid", b""), ("ab.reply", bytes(4))],
    "a correlation id of 1 kB": [("ab.cid", b"1" * 1000), ("ab.reply", bytes(4))],
}


@pytest.mark.parametrize("what", WRONG_HEADERS)
def test_command_that_can_not_be_answered(place: Place, what: str) -> None:
    """It is carried out all the same: nothing says that anybody waits."""
    token = place.begin()
    command = encode(r.Abort(token, "unheard"))
    place.raw.produce([(f"{place.cluster.prefix}.commands", 0, None, command, WRONG_HEADERS[what])])
    until = time.monotonic() + SOON_S
    while place.state(token).state == "OPEN" and time.monotonic() < until:
        time.sleep(0.02)
    assert place.state(token).reason == "unheard"


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_command_in_a_native_transaction(place: Place, end: str) -> None:
    """It is read before its native transaction ends, so it is refused, at once, and stalls nobody."""
    token = place.begin()
    rude = Producer(
        {
            "bootstrap.servers": place.cluster.bootstrap,
            "transactional.id": f"{place.scope}-commands",
            "log_level": 0,
        }
    )
    rude.init_transactions(20)
    rude.begin_transaction()
    cid = place.raw.correlation_id()
    headers = [("ab.cid", cid), ("ab.reply", bytes(4))]
    command = encode(r.Abort(token, "rude"))
    rude.produce(f"{place.cluster.prefix}.commands", command, None, 0, headers=headers)  # type: ignore[arg-type]
    rude.flush(20)
    answer = place.raw.wait(cid, SOON_S)
    assert isinstance(answer, r.Refusal)
    assert answer.code == "InvalidArgument"
    assert "native transaction" in answer.message
    rude.commit_transaction(20) if end == "commit" else rude.abort_transaction(20)
    assert place.state(token).state == "OPEN"
    assert place.raw.ask(r.Abort(token, "")).state == "ABORTED"


# -- too large --------------------------------------------------------------------------------------------

LIMIT = 20_000


def small_stream(place: Place) -> str:
    name = f"{place.scope}/small"
    place.client.create_stream(name, settings={"max.message.bytes": LIMIT})
    return name


def test_one_shot_event_that_the_stream_does_not_take(place: Place) -> None:
    """Refused by name; commands of the same round, before and behind it, go on."""
    small = small_stream(place)

    def one_shot(stream: str, size: int) -> r.OneShot:
        event = r.Event(stream, -1, b"k", b"x" * size, (), -1)
        return r.OneShot(make_txn_id(), place.scope, None, (event,))

    sizes = [10, LIMIT + 1, 10, LIMIT * 2, LIMIT // 2, 10]
    commands = [one_shot(small, size) for size in sizes]
    answers = place.raw.ask_all(commands)
    told = [a.code if isinstance(a, r.Refusal) else a.state for a in answers]
    assert told == ["EventTooLarge" if size > LIMIT else "COMMITTED" for size in sizes]
    for command, answer in zip(commands, answers, strict=True):
        if isinstance(answer, r.Refusal):
            with pytest.raises(Refused) as refused:
                place.raw.ask(r.GetState(command.txn_id))
            assert refused.value.code == "UnknownTransaction"
            assert place.raw.ask(r.Resolve(command.txn_id)).state == "ABORTED"
    found = read_stream(place.log, small)
    check_stream(found)
    assert [len(e.value) for e in found.events] == [10, 10, LIMIT // 2, 10]


def test_event_that_the_library_does_not_take(place: Place) -> None:
    small = small_stream(place)
    with place.client.begin(place.scope) as txn:
        txn.token()
        with pytest.raises(errors.EventTooLarge, match=r"max\.message\.bytes"):
            txn.write(small, b"x" * LIMIT, key=b"k")
        txn.write(small, b"fits", key=b"k")
        assert txn.commit().counts.committed == 1


def test_data_that_the_stream_refuses_once_merged(place: Place) -> None:
    """The stream's limit was lowered behind the journal's back: that transaction is aborted, others go on."""
    token, pen, touched = place.touched()
    pen.write(place.stream, touched.segments, [(b"k", b"x" * 5_000)])
    admin = AdminClient({"bootstrap.servers": place.cluster.bootstrap, "log_level": 0})
    limit = ConfigResource(
        ResourceType.TOPIC,
        place.stream.replace("/", "."),
        incremental_configs=[
            ConfigEntry("max.message.bytes", "2000", incremental_operation=AlterConfigOpType.SET)
        ],
    )
    for future in admin.incremental_alter_configs([limit]).values():
        future.result(20)
    others = [place.touched() for _ in range(4)]
    for _, other_pen, _ in others:
        other_pen.write(place.stream, touched.segments, [(b"k", b"fits")])
    commands = [r.Commit(t, (p.receipt(),), None, None, WAIT_MS) for t, p, _ in others]
    refused = r.Commit(token, (pen.receipt(),), None, None, WAIT_MS)
    answers = place.raw.ask_all([*commands[:2], refused, *commands[2:]])
    assert isinstance(answers[2], r.Refusal)
    assert answers[2].code == "TransactionAborted"
    assert {a.state for i, a in enumerate(answers) if i != 2} == {"COMMITTED"}
    outcome = place.state(token)
    assert outcome.state == "ABORTED"
    assert "refused" in outcome.reason
    assert place.visible().count(b"fits") == 4


# The topic's limit, and sizes of events that writers put into one partition, in order. The journal takes each.
FITTING = {
    "small ones, many": (LIMIT, [[1_000] * 60]),
    "a big one behind small ones": (LIMIT, [[4_000, 4_000, 18_000]]),
    "two writers": (LIMIT, [[9_000], [15_000], [9_000]]),
    "just what fits, again and again": (LIMIT, [[19_000] * 5]),
    "a big one behind small ones, default limit": (1_048_588, [[200_000, 200_000, 900_000]]),
}


@pytest.mark.parametrize("what", FITTING)
def test_all_that_the_journal_takes_is_merged(place: Place, what: str) -> None:
    """The pieces of a commit are put together into batches: never into one that the stream refuses."""
    limit, writers = FITTING[what]
    small = f"{place.scope}/fitting"
    place.client.create_stream(small, settings={"max.message.bytes": limit})
    token = place.begin()
    touched = place.raw.ask(r.Touch(token, small))
    receipts = []
    for writer in writers:
        pen = Pen(place.raw, token[5:21])
        for n, size in enumerate(writer):
            pen.write(small, touched.segments, [(b"k", f"{n:04}".encode() + b"x" * (size - 4))])
        receipts.append(pen.receipt())
    outcome = place.raw.ask(r.Commit(token, tuple(receipts), None, None, WAIT_MS))
    assert (outcome.state, outcome.committed) == ("COMMITTED", sum(map(len, writers)))


# -- seen by an operator, and a full disk -------------------------------------------------------------------


def test_rejections_are_seen_by_an_operator(place: Place) -> None:
    place.write([("ab.x", b"")], count=2)
    assert place.rejected("bad_header", 2) == 2
    command = [sys.executable, "-m", "anabranch.cli", "stream", "describe", place.stream, "--json"]
    told = subprocess.run(
        [*command, "--bootstrap", place.cluster.bootstrap],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(told.stdout)["rejected"] == {"bad_header": 2}


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
@pytest.mark.slow(8)
def test_full_disk_under_the_table(cluster: Cluster, log: Log, unique: str, tmp_path: Path) -> None:
    """The controller says so and ends; the next one, with room, goes on where the log stands."""
    prefix = f"full{unique}"
    controller = start_cluster(cluster.bootstrap, tmp_path, prefix).controller
    stream = f"{prefix}-scope/events"
    with ExitStack() as stack:
        stack.callback(controller.kill)
        client = stack.enter_context(anabranch.connect(cluster.bootstrap, prefix=prefix))
        client.create_stream(stream)
        txn = client.begin(f"{prefix}-scope")
        txn.token()
        txn.write(stream, b"before", key=b"k")
        txn.flush()
        resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        told = []
        until = time.monotonic() + 30
        while controller.running and time.monotonic() < until:
            other = client.begin(f"{prefix}-scope")
            other.write(stream, os.urandom(5_000), key=b"o")
            with suppress(errors.OutcomeUnknown, errors.RetryError):
                told.append(other.commit(timeout=3).txn_id)
        assert controller.process is not None
        assert controller.process.wait(30) == 6
        assert "can't be written" in controller.log_file.read_text()
        controller.folder = tmp_path / "another disk"
        controller.start()
        controller.wait_leading()
        txn.write(stream, b"after", key=b"k")
        assert txn.commit().counts.committed == 2
        assert {client.state(txn_id).state for txn_id in told} <= {"COMMITTED"}
        check_stream(read_stream(log, stream))
