"""The calls of the protocol: requests through kio's generated messages, and the errors of a call without an answer.

Calls whose cost matters are in `anabranch.kafka.data`. A request is given as mappings and lists, and built for any
version: fields that a version doesn't have are omitted. So older brokers' versions need no code of their own.
"""

from __future__ import annotations

import dataclasses
import importlib
import io
import struct
import typing
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

from kio.serial import entity_reader, entity_writer
from kio.serial.errors import SerialError

from anabranch.batches.format import Buffer
from anabranch.ports import TopicPartition


class ConnectionBroken(Exception):
    """The connection failed, or its deadline passed: requests in flight may have been carried out or not.

    ``sent`` is False if no byte of the request can have reached the broker.
    """

    def __init__(self, message: str, *, sent: bool = True) -> None:
        super().__init__(message)
        self.sent = sent


class MalformedAnswer(ConnectionBroken):
    """An answer that breaks the protocol; it is treated like a missing answer."""


class AuthenticationFailed(ConnectionBroken):
    """The broker refuses the client's identity, or the client refuses the broker's: trying again is useless."""

    def __init__(self, message: str) -> None:
        super().__init__(message, sent=False)


class Reader:
    """Reads an answer's fields. `MalformedAnswer`: a field does not fit into the answer."""

    def __init__(self, body: Buffer, flexible: bool) -> None:
        self.body = memoryview(body)
        self.at = 0
        self.flexible = flexible

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        try:
            values = form.unpack_from(self.body, self.at)
        except struct.error:
            raise MalformedAnswer("an answer ends in the middle of a field") from None
        self.at += form.size
        return values

    def i16(self) -> int:
        return int.from_bytes(self.view(2), "big", signed=True)

    def i32(self) -> int:
        return int.from_bytes(self.view(4), "big", signed=True)

    def skip(self, count: int) -> None:
        if self.at + count > len(self.body):
            raise MalformedAnswer("an answer ends in the middle of a field")
        self.at += count

    def skips(self, expected: bytes) -> bool:
        """Whether these bytes come next; then they are skipped."""
        end = self.at + len(expected)
        found = self.body[self.at : end] == expected
        if found:
            self.at = end
        return found

    def raw(self, count: int) -> bytes:
        return bytes(self.view(count))

    def view(self, count: int) -> memoryview:
        start = self.at
        self.skip(count)
        return self.body[start : self.at]

    def uvarint(self) -> int:
        value = shift = 0
        while shift < 35:
            try:  # the check of `skip`, without the cost of a call
                byte = self.body[self.at]
            except IndexError:
                raise MalformedAnswer("an answer ends in the middle of a field") from None
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedAnswer("a number of too many bytes")

    def array(self) -> int:
        """An array's size; null counts as empty."""
        size = self.uvarint() - 1 if self.flexible else self.i32()
        if size > len(self.body):
            raise MalformedAnswer(f"an array of {size}")
        return max(size, 0)

    def string(self) -> str | None:
        size = self.uvarint() - 1 if self.flexible else self.i16()
        return None if size < 0 else self.raw(size).decode("utf-8", "replace")

    def nullable_bytes(self) -> memoryview:
        size = self.uvarint() - 1 if self.flexible else self.i32()
        return self.view(max(size, 0))

    def tags(self) -> None:
        if self.flexible:
            for _ in range(self.uvarint()):
                self.uvarint()
                self.skip(self.uvarint())


# Errors of kio for malformed messages. Other errors may come from a signal handler, and are not caught.
_NO_MESSAGE = (
    SerialError,
    ValueError,
    LookupError,
    TypeError,
    EOFError,
    OverflowError,
    MemoryError,
)
_FIXED = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "error_code": 2,
    "int32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "datetime_i64": 8,
    "float64": 8,
    "uuid": 16,
}
# The bytes of a length that is not compact.
_SIZED = {"string": 2, "records": 4, "bytes": 4}


class Api(NamedTuple):
    """A call of the protocol, and its versions that this code supports."""

    key: int
    folder: str
    name: str
    lowest: int
    highest: int
    # Messages have compact fields and tags from this version on (KIP-482).
    flexible_from: int


PRODUCE = Api(0, "produce", "Produce", 7, 13, 9)
FETCH = Api(1, "fetch", "Fetch", 11, 16, 12)
LIST_OFFSETS = Api(2, "list_offsets", "ListOffsets", 2, 7, 6)
METADATA = Api(3, "metadata", "Metadata", 5, 12, 9)
FIND_COORDINATOR = Api(10, "find_coordinator", "FindCoordinator", 1, 4, 3)
SASL_HANDSHAKE = Api(17, "sasl_handshake", "SaslHandshake", 1, 1, 2)
API_VERSIONS = Api(18, "api_versions", "ApiVersions", 0, 3, 3)
CREATE_TOPICS = Api(19, "create_topics", "CreateTopics", 2, 7, 5)
DELETE_TOPICS = Api(20, "delete_topics", "DeleteTopics", 1, 6, 4)
DELETE_RECORDS = Api(21, "delete_records", "DeleteRecords", 0, 2, 2)
INIT_PRODUCER_ID = Api(22, "init_producer_id", "InitProducerId", 0, 5, 2)
ADD_PARTITIONS_TO_TXN = Api(24, "add_partitions_to_txn", "AddPartitionsToTxn", 0, 3, 3)
END_TXN = Api(26, "end_txn", "EndTxn", 0, 5, 3)
DESCRIBE_CONFIGS = Api(32, "describe_configs", "DescribeConfigs", 1, 4, 4)
DESCRIBE_LOG_DIRS = Api(35, "describe_log_dirs", "DescribeLogDirs", 1, 4, 2)
SASL_AUTHENTICATE = Api(36, "sasl_authenticate", "SaslAuthenticate", 0, 2, 2)
CREATE_PARTITIONS = Api(37, "create_partitions", "CreatePartitions", 0, 3, 2)
INCREMENTAL_ALTER_CONFIGS = Api(44, "incremental_alter_configs", "IncrementalAlterConfigs", 0, 1, 1)
DESCRIBE_PRODUCERS = Api(61, "describe_producers", "DescribeProducers", 0, 0, 0)
DESCRIBE_TRANSACTIONS = Api(65, "describe_transactions", "DescribeTransactions", 0, 0, 0)


@cache
def _module(api: Api, version: int, kind: str) -> Any:
    return importlib.import_module(f"kio.schema.{api.folder}.v{version}.{kind}")


def _built(kind: Any, given: Mapping[str, Any]) -> Any:
    """An entity with the given fields, without fields that it doesn't have."""
    fields = fields_of(kind)
    values = {name: value for name, value in given.items() if name in fields}
    for name, value in values.items():
        if value is not None and (item := fields[name].entity) is not None:
            values[name] = tuple(_built(item, each) for each in value)
    return kind(**values)


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, tuple[int, ...]]:
    """Topic -> numbers of its partitions, as in requests."""
    topics: dict[str, list[int]] = {}
    for topic, number in partitions:
        topics.setdefault(topic, []).append(number)
    return {topic: tuple(numbers) for topic, numbers in topics.items()}


def request(api: Api, version: int, /, **fields: Any) -> bytes:
    """A request's bytes, without its header. Structures in ``fields`` are mappings."""
    kind = getattr(_module(api, version, "request"), f"{api.name}Request")
    out = io.BytesIO()
    entity_writer(kind)(out, _built(kind, fields))
    return out.getvalue()


def answer(api: Api, version: int, body: Buffer) -> Any:
    """The message of an answer. `MalformedAnswer`."""
    kind = getattr(_module(api, version, "response"), f"{api.name}Response")
    check_claims(kind, body)
    try:
        return entity_reader(kind)(bytes(body), 0)[0]
    except _NO_MESSAGE as error:
        raise MalformedAnswer(f"no answer to {api.name} {version}: {error!r}") from error


class Field(NamedTuple):
    """The encoding of an entity's field."""

    array: bool
    fixed: int  # bytes; 0 for a field with its own length, or an entity
    length: int  # bytes of a length that is not compact
    entity: Any
    tag: int | None


def check_claims(kind: type, body: Buffer) -> None:
    """`MalformedAnswer` if an array, or any other field, is longer than the answer. ``kind``: an entity of kio.

    kio allocates as many items as an array claims before it reads them. Too big a claim would exhaust the memory of
    the process, so answers are checked before kio reads them.
    """
    _Walk(body, kind.__flexible__).entity(kind)  # type: ignore[attr-defined]


@cache
def fields_of(kind: Any) -> dict[str, Field]:
    """The fields of an entity of kio, in their order."""
    hints = typing.get_type_hints(kind)
    found = {}
    for field in dataclasses.fields(kind):
        of = hints[field.name]
        bare = [arg for arg in typing.get_args(of) if arg is not type(None)]
        if bare and typing.get_origin(of) is not tuple:
            of = bare[0]
        array = typing.get_origin(of) is tuple
        if array:
            of = typing.get_args(of)[0]
        name = field.metadata.get("kafka_type", "")
        entity = of if dataclasses.is_dataclass(of) else None
        tag = field.metadata.get("tag")
        found[field.name] = Field(array, _FIXED.get(name, 0), _SIZED.get(name, 0), entity, tag)
    return found


class _Walk(Reader):
    """Skips over an entity, and checks each size in it."""

    def entity(self, kind: Any) -> None:
        fields = fields_of(kind).values()
        for field in fields:
            if field.tag is None:
                self._field(field)
        if self.flexible:
            for _ in range(self.uvarint()):
                tag, size = self.uvarint(), self.uvarint()
                begin = self.at
                for field in fields:
                    if field.tag == tag:
                        self._field(field)
                        self.at = begin
                self.skip(size)

    def _field(self, field: Field) -> None:
        count = self._size(4) if field.array else 1
        if count > len(self.body) - self.at:
            raise MalformedAnswer(f"an array of {count} in an answer of {len(self.body)} bytes")
        if field.fixed:
            self.skip(max(count, 0) * field.fixed)
            return
        for _ in range(count):
            if field.entity is not None:
                self.entity(field.entity)
            else:
                self.skip(max(self._size(field.length), 0))

    def _size(self, width: int) -> int:
        """A length; -1 is null."""
        if self.flexible:
            return self.uvarint() - 1
        return int.from_bytes(self.view(width), "big", signed=True)
