"""Produce, Fetch and EndTxn by hand, against kio's generated messages."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import resource
import socket
import uuid
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId
from kio.serial import entity_reader, entity_writer
from kio.static.primitive import Records, i16

from anabranch.kafka import calls, data
from anabranch.kafka.calls import END_TXN, FETCH, PRODUCE, MalformedAnswer
from anabranch.kafka.connection import readable
from anabranch.kafka.data import (
    BUMPS_FROM,
    Ended,
    FetchPosition,
    end_answer,
    end_request,
    uvarint,
)
from anabranch.ports import TopicPartition

IDS = {"a": uuid.UUID(int=7).bytes, "b": uuid.UUID(int=8).bytes}
NAMES = {topic_id: name for name, topic_id in IDS.items()}


def read_request(api: calls.Api, version: int, parts: list[Any]) -> Any:
    """kio's view of a request."""
    kind = getattr(calls._module(api, version, "request"), f"{api.name}Request")
    raw = b"".join(bytes(part) for part in parts)
    message, size = entity_reader(kind)(raw, 0)
    assert size == len(raw)
    return message


def written(api: calls.Api, version: int, kind_name: str, /, **fields: Any) -> Any:
    """A part of an answer, as kio makes it."""
    kind = getattr(calls._module(api, version, "response"), kind_name)
    known = kind.__dataclass_fields__
    return kind(**{key: value for key, value in fields.items() if key in known})


def answer_bytes(message: Any) -> bytes:
    out = io.BytesIO()
    entity_writer(type(message))(out, message)
    return out.getvalue()


def topic_fields(version: int, by_id_from: int, name: str) -> dict[str, Any]:
    if version >= by_id_from:
        return {"topic_id": uuid.UUID(bytes=IDS[name])}
    return {"name": name, "topic": name}


@pytest.mark.parametrize("version", range(PRODUCE.lowest, PRODUCE.highest + 1))
@pytest.mark.parametrize("transactional_id", [None, "", "my-id"])
def test_produce_requests(version: int, transactional_id: str | None) -> None:
    batches = {
        TopicPartition("a", 0): (b"head", b"x" * 300),
        TopicPartition("b", 5): (b"one",),
        TopicPartition("a", 2): (b"", b"y"),
    }
    parts = data.produce_request(version, transactional_id, 1234, batches, IDS)
    found = read_request(PRODUCE, version, parts)
    assert found.transactional_id == transactional_id
    assert found.acks == -1
    assert found.timeout.total_seconds() == 1.234
    topics = [
        (
            getattr(topic, "name", None) or NAMES[topic.topic_id.bytes],
            [(p.index, bytes(p.records)) for p in topic.partition_data],
        )
        for topic in found.topic_data
    ]
    assert topics == [
        ("a", [(0, b"head" + b"x" * 300), (2, b"y")]),
        ("b", [(5, b"one")]),
    ]


@pytest.mark.parametrize("version", range(PRODUCE.lowest, PRODUCE.highest + 1))
def test_produce_answers(version: int) -> None:
    make = partial(written, PRODUCE, version)

    def partition(index: int, error: int, offset: int, message: str | None) -> Any:
        inner = {"batch_index": 0, "batch_index_error_message": "inner"}
        wrong = version >= 8 and error
        return make(
            "PartitionProduceResponse",
            index=index,
            error_code=ErrorCode(error),
            base_offset=offset,
            log_append_time=None,
            log_start_offset=3,
            record_errors=(make("BatchIndexAndErrorMessage", **inner),) if wrong else (),
            error_message=message,
        )

    partitions = {
        "a": (partition(0, 0, 17, None), partition(4, 87, -1, "why")),
        "b": (partition(1, 10, -1, None),),
    }
    topics = tuple(
        make("TopicProduceResponse", partition_responses=made, **topic_fields(version, 13, name))
        for name, made in partitions.items()
    )
    body = answer_bytes(
        make("ProduceResponse", responses=topics, throttle_time=timedelta(seconds=70))
    )
    assert data.throttle_ms(version, body) == 70_000
    found = data.produce_answer(version, body, NAMES)
    told = version >= 8
    assert found == {
        TopicPartition("a", 0): data.Produced(0, 17, None),
        TopicPartition("a", 4): data.Produced(87, -1, "why" if told else None),
        TopicPartition("b", 1): data.Produced(10, -1, "inner" if told else None),
    }
    for cut in range(len(body) - 10):
        with pytest.raises(MalformedAnswer):
            data.produce_answer(version, body[:cut], NAMES)


@pytest.mark.parametrize("session", [None, (70_000, 3)])
@pytest.mark.parametrize("version", range(FETCH.lowest, FETCH.highest + 1))
def test_fetch_requests(version: int, session: tuple[int, int] | None) -> None:
    forgotten = [TopicPartition("b", 4), TopicPartition("a", 7), TopicPartition("b", 2)]
    in_session = {} if session is None else {"session": session, "forgotten": forgotten}
    positions = {
        TopicPartition("a", 1): FetchPosition(10, 3),
        TopicPartition("b", 0): FetchPosition(0),
        TopicPartition("a", 0): FetchPosition(1 << 40, 0),
    }
    parts = data.fetch_request(
        version,
        positions,
        IDS,
        max_wait_ms=250,
        max_bytes=9999,
        isolation=1,
        rack="r1",
        **in_session,  # type: ignore[arg-type]
    )
    found = read_request(FETCH, version, parts)
    assert found.max_wait.total_seconds() == 0.25
    assert (found.min_bytes, found.max_bytes, found.isolation_level) == (1, 9999, 1)
    assert (found.session_id, found.session_epoch) == (session or (0, -1))
    removed = [
        (getattr(topic, "topic", None) or NAMES[topic.topic_id.bytes], topic.partitions)
        for topic in found.forgotten_topics_data
    ]
    assert removed == ([("b", (4, 2)), ("a", (7,))] if session else [])
    assert found.rack_id == "r1"
    topics = [
        (
            getattr(topic, "topic", None) or NAMES[topic.topic_id.bytes],
            [
                (p.partition, p.fetch_offset, p.current_leader_epoch, p.partition_max_bytes)
                for p in topic.partitions
            ],
        )
        for topic in found.topics
    ]
    assert topics == [
        ("a", [(1, 10, 3, 9999), (0, 1 << 40, 0, 9999)]),
        ("b", [(0, 0, -1, 9999)]),
    ]


@pytest.mark.parametrize("version", range(FETCH.lowest, FETCH.highest + 1))
def test_fetch_answers(version: int) -> None:
    make = partial(written, FETCH, version)

    def partition(index: int, **changed: Any) -> Any:
        fields: dict[str, Any] = {
            "partition_index": index,
            "error_code": ErrorCode(0),
            "high_watermark": 100,
            "last_stable_offset": 90,
            "log_start_offset": 5,
            "aborted_transactions": None,
            "preferred_read_replica": -1,
            "records": None,
        }
        return make("PartitionData", **(fields | changed))

    aborted = tuple(
        make("AbortedTransaction", producer_id=p, first_offset=o) for p, o in ((5, 60), (6, 20))
    )
    partitions = {
        "a": (partition(0, aborted_transactions=aborted, records=Records(b"r" * 200)),),
        "b": (partition(3), partition(4, error_code=ErrorCode(6))),
    }
    topics = tuple(
        make("FetchableTopicResponse", partitions=made, **topic_fields(version, 13, name))
        for name, made in partitions.items()
    )
    nothing = {"throttle_time": timedelta(0), "error_code": ErrorCode(0), "session_id": 70_000}
    body = answer_bytes(make("FetchResponse", responses=topics, **nothing))
    error, session, found = data.fetch_answer(version, body, NAMES)
    assert session == 70_000
    assert error == 0
    first = found[TopicPartition("a", 0)]
    assert (first.error, first.high_watermark, first.last_stable_offset) == (0, 100, 90)
    assert first.log_start_offset == 5
    # By offset, whatever the broker's order.
    assert first.aborted == [(6, 20), (5, 60)]
    assert bytes(first.records) == b"r" * 200
    assert bytes(found[TopicPartition("b", 3)].records) == b""
    assert found[TopicPartition("b", 3)].aborted == []
    assert found[TopicPartition("b", 4)].error == 6
    tags = 2 if version >= 12 else 0
    for cut in range(len(body) - tags):
        with pytest.raises(MalformedAnswer):
            data.fetch_answer(version, body[:cut], NAMES)


END_VERSIONS = range(END_TXN.lowest, END_TXN.highest + 1)


@pytest.mark.parametrize("version", END_VERSIONS)
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("name", ["anabranch-control-3-a", "ü" * 200])
def test_end_requests(version: int, commit: bool, name: str) -> None:
    wanted = calls.request(
        END_TXN,
        version,
        transactional_id=name,
        producer_id=(1 << 40) + 7,
        producer_epoch=32_000,
        committed=commit,
    )
    assert end_request(version, name, (1 << 40) + 7, 32_000, commit=commit) == wanted


@pytest.mark.parametrize("version", END_VERSIONS)
@pytest.mark.parametrize("error", [ErrorCode.none, ErrorCode.concurrent_transactions])
def test_end_answers(version: int, error: ErrorCode) -> None:
    kind = import_module(f"kio.schema.end_txn.v{version}.response").EndTxnResponse
    fields = {"throttle_time": timedelta(milliseconds=11), "error_code": error}
    if version >= BUMPS_FROM:
        fields |= {"producer_id": ProducerId(1 << 33), "producer_epoch": i16(41)}
    body = answer_bytes(kind(**fields))
    bumped = (1 << 33, 41) if version >= BUMPS_FROM else (-1, -1)
    assert end_answer(version, memoryview(body)) == Ended(int(error), *bumped)


@pytest.mark.parametrize("version", END_VERSIONS)
def test_a_short_end_answer_is_malformed(version: int) -> None:
    size = 16 if version >= BUMPS_FROM else 6
    end_answer(version, bytes(size))
    with pytest.raises(MalformedAnswer):
        end_answer(version, bytes(size - 1))


def test_an_answer_about_another_topic_is_refused() -> None:
    body = uvarint(2) + uuid.UUID(int=99).bytes + uvarint(1) + b"\x00"
    with pytest.raises(MalformedAnswer, match="not asked for"):
        data.produce_answer(13, body, NAMES)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(MalformedAnswer, match="an array of"):
        data.produce_answer(13, uvarint(1 << 30), NAMES)
    with pytest.raises(MalformedAnswer, match="too many bytes"):
        data.produce_answer(13, b"\xff" * 20, NAMES)


@given(st.binary(max_size=200), st.sampled_from((7, 8, 9, 12, 13)))
def test_any_bytes_are_an_answer_or_refused_by_name(body: bytes, version: int) -> None:
    for read in (data.produce_answer, data.fetch_answer):
        with contextlib.suppress(MalformedAnswer):
            read(version + 4 * (read is data.fetch_answer), body, NAMES)


def test_answers_are_seen_on_descriptors_beyond_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    near, far = socket.socketpair()
    beyond = socket.socket(fileno=fcntl.fcntl(near.fileno(), fcntl.F_DUPFD, 1500))
    try:
        assert readable([beyond]) == set()
        far.send(b"x")
        assert readable([far, beyond], 60) == {beyond.fileno()}
    finally:
        for one in (near, far, beyond):
            one.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_broken_connection_is_seen_among_many() -> None:
    """Its end counts as readable, so that a waiting caller hears of it."""
    pairs = [socket.socketpair() for _ in range(50)]
    try:
        ours = [near for near, _ in pairs]
        assert readable(ours) == set()
        pairs[7][1].close()
        pairs[30][0].shutdown(socket.SHUT_RDWR)
        assert readable(ours, 60) == {ours[7].fileno(), ours[30].fileno()}
    finally:
        for one in itertools.chain(*pairs):
            one.close()
