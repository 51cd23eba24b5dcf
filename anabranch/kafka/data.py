"""Produce, Fetch and EndTxn, encoded by hand: the calls of each round, whose cost matters.

Versions: Produce 7 and 8 (older brokers), 9 to 12 (flexible, topics by name), 13 (by id, KIP-516);
Fetch 11, 12 and 13 to 16 likewise. The names and the order of fields are those of Kafka's
``ProduceRequest.json``, ``FetchRequest.json``, ``EndTxnRequest.json`` and those of the answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from anabranch.batches.format import Buffer, read_header, split_batches
from anabranch.batches.records import decode_records
from anabranch.kafka import calls
from anabranch.kafka.calls import END_TXN, FETCH, PRODUCE, MalformedAnswer, Reader
from anabranch.ports import CorruptBatch, Fetched, RawBatch, TopicPartition

PRODUCE_BY_ID_FROM = 13
FETCH_BY_ID_FROM = 13
READ_UNCOMMITTED = 0
READ_COMMITTED = 1
NO_REPLICA = -1
NO_SESSION = (0, -1)  # id and epoch of a fetch outside of any session
ACKS_ALL = -1
BUMPS_FROM = 5  # the answer has the next producer id and epoch (KIP-890)

_I32 = struct.Struct(">i")
_ACKS_TIMEOUT = struct.Struct(">hi")
_PRODUCED = struct.Struct(">ihqqq")
# The rest of a stored batch's part of an answer, in flexible versions: no bad records, no message, no tags.
_STORED = b"\x01\x00\x00"
_FETCHED = struct.Struct(">ihqqq")
_PAIR = struct.Struct(">qq")
_END = struct.Struct(">qh?")
_ENDED = struct.Struct(">ih")
_BUMPED = struct.Struct(">qh")


def uvarint(value: int) -> bytes:
    if value < 0x80:
        return bytes((value,))
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Form:
    """The encoding of strings, arrays and bytes: compact in flexible versions, otherwise the old one."""

    def __init__(self, flexible: bool) -> None:
        self.flexible = flexible
        self.tags = b"\x00" if flexible else b""

    def string(self, text: str) -> bytes:
        data = text.encode()
        if self.flexible:
            return uvarint(len(data) + 1) + data
        return len(data).to_bytes(2, "big") + data

    def array(self, size: int) -> bytes:
        return uvarint(size + 1) if self.flexible else size.to_bytes(4, "big")

    # The length of bytes is encoded as an array's.
    length = array


def produce_request(
    version: int,
    transactional_id: str | None,
    timeout_ms: int,
    batches: Mapping[TopicPartition, Sequence[Buffer]],
    topic_ids: Mapping[str, bytes],
    acks: int = ACKS_ALL,
) -> list[Buffer]:
    """The parts of a Produce request: one batch per partition, each as consecutive buffers."""
    form = _Form(version >= PRODUCE.flexible_from)
    by_topic: dict[str, list[tuple[int, Sequence[Buffer]]]] = {}
    for (topic, partition), parts in batches.items():
        by_topic.setdefault(topic, []).append((partition, parts))
    if transactional_id is None:
        name = b"\x00" if form.flexible else b"\xff\xff"
    else:
        name = form.string(transactional_id)
    out: list[Buffer] = []
    pending = name + _ACKS_TIMEOUT.pack(acks, timeout_ms) + form.array(len(by_topic))
    for topic, partitions in by_topic.items():
        pending += topic_ids[topic] if version >= PRODUCE_BY_ID_FROM else form.string(topic)
        pending += form.array(len(partitions))
        for partition, parts in partitions:
            size = sum(map(len, parts))
            out.append(pending + _I32.pack(partition) + form.length(size))
            out.extend(parts)
            pending = form.tags
        pending += form.tags
    out.append(pending + form.tags)
    return out


class Produced(NamedTuple):
    """A partition's part of a Produce answer."""

    error: int
    base_offset: int
    message: str | None


def produce_answer(
    version: int, body: Buffer, names: Mapping[bytes, str]
) -> dict[TopicPartition, Produced]:
    """The answer for each partition's batch. ``names``: topic id -> name."""
    reader = Reader(body, version >= PRODUCE.flexible_from)
    answers = {}
    for _ in range(reader.array()):
        topic = _topic(reader, version >= PRODUCE_BY_ID_FROM, names)
        for _ in range(reader.array()):
            partition, error, base_offset, _, _ = reader.take(_PRODUCED)
            message = None
            if reader.flexible and reader.skips(_STORED):
                answers[TopicPartition(topic, partition)] = Produced(error, base_offset, None)
                continue
            if version >= 8:
                for _ in range(reader.array()):
                    reader.take(_I32)
                    message = reader.string() or message
                    reader.tags()
                message = reader.string() or message
            reader.tags()
            answers[TopicPartition(topic, partition)] = Produced(error, base_offset, message)
        reader.tags()
    return answers


def throttle_ms(version: int, body: Buffer) -> int:
    """For how long the broker will not read from this connection, as a Produce answer says at its end.

    An answer with tagged fields says why a leader is not one: then 0.
    """
    end = len(body) - (version >= PRODUCE.flexible_from)
    if end < _I32.size or any(body[end:]):
        return 0
    return int(_I32.unpack_from(body, end - _I32.size)[0])


class FetchPosition(NamedTuple):
    """The offset from which to fetch a partition. ``leader_epoch`` -1: not known, so not checked."""

    offset: int
    leader_epoch: int = -1


_FETCH_HEAD = struct.Struct(">iiibii")
_OLD_FETCH_HEAD = struct.Struct(">iiiibii")
_FETCH_PARTITION = struct.Struct(">iiqiqi")
_OLD_FETCH_PARTITION = struct.Struct(">iiqqi")


def fetch_request(
    version: int,
    positions: Mapping[TopicPartition, FetchPosition],
    topic_ids: Mapping[str, bytes],
    *,
    max_wait_ms: int,
    max_bytes: int,
    isolation: int,
    rack: str = "",
    session: tuple[int, int] = NO_SESSION,
    forgotten: Iterable[TopicPartition] = (),
) -> list[Buffer]:
    """The parts of a Fetch request. ``rack``: the reader's (KIP-392).

    ``session``: id and epoch of a fetch session (KIP-227). ``forgotten``: partitions to remove from it.
    """
    form = _Form(version >= FETCH.flexible_from)
    by_topic: dict[str, list[tuple[int, FetchPosition]]] = {}
    for (topic, partition), position in positions.items():
        by_topic.setdefault(topic, []).append((partition, position))
    # min_bytes is 1
    if version >= 15:
        out = bytearray(_FETCH_HEAD.pack(max_wait_ms, 1, max_bytes, isolation, *session))
    else:
        out = bytearray(_OLD_FETCH_HEAD.pack(-1, max_wait_ms, 1, max_bytes, isolation, *session))
    out += form.array(len(by_topic))
    for topic, partitions in by_topic.items():
        out += topic_ids[topic] if version >= FETCH_BY_ID_FROM else form.string(topic)
        out += form.array(len(partitions))
        for partition, (offset, leader_epoch) in partitions:
            if version >= 12:
                out += _FETCH_PARTITION.pack(partition, leader_epoch, offset, -1, -1, max_bytes)
            else:
                out += _OLD_FETCH_PARTITION.pack(partition, leader_epoch, offset, -1, max_bytes)
            out += form.tags
        out += form.tags
    removed = calls.by_topic(forgotten)
    out += form.array(len(removed))
    for topic, numbers in removed.items():
        out += topic_ids[topic] if version >= FETCH_BY_ID_FROM else form.string(topic)
        out += form.array(len(numbers)) + b"".join(map(_I32.pack, numbers)) + form.tags
    out += form.string(rack)
    out += form.tags
    return [bytes(out)]


class PartitionFetch(NamedTuple):
    """A partition's part of a Fetch answer; ``aborted``: (producer id, first offset) in offset order.

    ``replica``: the follower that the reader should ask instead, or `NO_REPLICA`.
    """

    error: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: list[tuple[int, int]]
    records: memoryview
    replica: int = NO_REPLICA


class FetchAnswer(NamedTuple):
    """A Fetch answer: its own error code, the id of the fetch session (0: none), and each partition's part."""

    error: int
    session: int
    parts: dict[TopicPartition, PartitionFetch]


def fetch_answer(version: int, body: Buffer, names: Mapping[bytes, str]) -> FetchAnswer:
    """The content of the answer. In a session, it has only partitions with records, errors or new limits."""
    reader = Reader(body, version >= FETCH.flexible_from)
    reader.skip(4)  # throttle time
    error, session = reader.i16(), reader.i32()
    answers = {}
    for _ in range(reader.array()):
        topic = _topic(reader, version >= FETCH_BY_ID_FROM, names)
        for _ in range(reader.array()):
            partition, code, high, stable, start = reader.take(_FETCHED)
            aborted = []
            for _ in range(reader.array()):
                producer_id, first_offset = reader.take(_PAIR)
                aborted.append((producer_id, first_offset))
                reader.tags()
            replica = reader.i32()
            records = reader.nullable_bytes()
            reader.tags()
            answers[TopicPartition(topic, partition)] = PartitionFetch(
                code, high, stable, start, sorted(aborted, key=itemgetter(1)), records, replica
            )
        reader.tags()
    return FetchAnswer(error, session, answers)


def fetched(
    partition: TopicPartition, answer: PartitionFetch, position: int, committed: bool
) -> Fetched | None:
    """A reader's part of the answer, from a position on; None if not even the position moves."""
    batches: list[RawBatch] = []
    after = position
    try:
        for batch, hidden in visible(answer, committed):
            after = max(after, batch.next_offset)
            if batch.next_offset > position and not hidden:
                batches.append(batch)
    except CorruptBatch as error:
        what = f"{partition.topic}[{partition.partition}]: {error}"
        raise CorruptBatch(what, (partition.topic,)) from error
    if after == position:
        return None
    return Fetched(
        batches, after, answer.high_watermark, answer.last_stable_offset, answer.log_start_offset
    )


def visible(answer: PartitionFetch, committed: bool) -> Iterator[tuple[RawBatch, bool]]:
    """The batches in order, and whether each is hidden: a marker, or aborted if ``committed``.

    The broker lists the aborted transactions that overlap the answer as (producer id, first offset): a
    producer's batches are aborted from that offset until its next abort marker.
    """
    coming = answer.aborted if committed else []
    at = 0
    aborting: set[int] = set()
    for raw in split_batches(answer.records):
        while at < len(coming) and coming[at][1] < raw.next_offset:
            aborting.add(coming[at][0])
            at += 1
        header = read_header(raw.data)
        if header.is_control:
            # Most markers need no decoding: there is one for every commit.
            if header.producer_id in aborting and is_abort_marker(raw):
                aborting.discard(header.producer_id)
            yield raw, True
        else:
            yield raw, header.is_transactional and header.producer_id in aborting


def is_abort_marker(control: RawBatch) -> bool:
    """Whether a control batch is an abort marker: its key is version i16, type i16 (0 = abort)."""
    records = decode_records(control.data)
    return bool(records) and records[0].key is not None and records[0].key[2:4] == b"\x00\x00"


def _topic(reader: Reader, by_id: bool, names: Mapping[bytes, str]) -> str:
    if not by_id:
        return reader.string() or ""
    topic_id = reader.raw(16)
    try:
        return names[topic_id]
    except KeyError:
        raise MalformedAnswer(f"an answer about topic {topic_id.hex()}, not asked for") from None


def end_request(
    version: int, transactional_id: str, producer_id: int, producer_epoch: int, *, commit: bool
) -> bytes:
    name = transactional_id.encode()
    fields = _END.pack(producer_id, producer_epoch, commit)
    if version >= END_TXN.flexible_from:
        return uvarint(len(name) + 1) + name + fields + b"\x00"
    return len(name).to_bytes(2, "big") + name + fields


class Ended(NamedTuple):
    """An EndTxn answer; below version `BUMPS_FROM` it has no producer (-1)."""

    error: int
    producer_id: int
    producer_epoch: int


def end_answer(version: int, body: Buffer) -> Ended:
    """The content of the answer. Raises `MalformedAnswer`."""
    try:
        _, error = _ENDED.unpack_from(body)
        if version < BUMPS_FROM:
            return Ended(error, -1, -1)
        return Ended(error, *_BUMPED.unpack_from(body, _ENDED.size))
    except struct.error:
        raise MalformedAnswer("an answer to EndTxn that is too short") from None
