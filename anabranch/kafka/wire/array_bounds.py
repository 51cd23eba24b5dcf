"""Whether the arrays of an answer fit into its bytes.

kio makes room for as many items as an array claims before it reads them. Too big a claim would end the process for
lack of memory, so an answer is walked before kio gets it.
"""

from __future__ import annotations

import dataclasses
import typing
from functools import cache
from typing import Any, NamedTuple

from anabranch.batches.format import Buffer
from anabranch.kafka.wire.errors import MalformedAnswer

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


class Field(NamedTuple):
    """How a field of an entity is written."""

    array: bool
    fixed: int  # bytes; 0: of a length of its own, or an entity
    length: int  # bytes of a length that is not compact
    entity: Any
    tag: int | None


def check_claims(kind: type, body: Buffer) -> None:
    """`MalformedAnswer` if an array, or any other field, goes beyond the end. ``kind``: an entity of kio's."""
    _Walk(bytes(body), kind.__flexible__).entity(kind)  # type: ignore[attr-defined]


@cache
def fields_of(kind: Any) -> dict[str, Field]:
    """The fields of an entity of kio's, in their order."""
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


class _Walk:
    def __init__(self, body: bytes, flexible: bool) -> None:
        self._body = body
        self._at = 0
        self._flexible = flexible

    def entity(self, kind: Any) -> None:
        fields = fields_of(kind).values()
        for field in fields:
            if field.tag is None:
                self._field(field)
        if self._flexible:
            for _ in range(self._uvarint()):
                tag, size = self._uvarint(), self._uvarint()
                begin = self._at
                for field in fields:
                    if field.tag == tag:
                        self._field(field)
                        self._at = begin
                self._skip(size)

    def _field(self, field: Field) -> None:
        count = self._size(4) if field.array else 1
        if count > len(self._body) - self._at:
            raise MalformedAnswer(f"an array of {count} in an answer of {len(self._body)} bytes")
        if field.fixed:
            self._skip(max(count, 0) * field.fixed)
            return
        for _ in range(count):
            if field.entity is not None:
                self.entity(field.entity)
            else:
                self._skip(max(self._size(field.length), 0))

    def _size(self, width: int) -> int:
        """A length; -1 is null."""
        if self._flexible:
            return self._uvarint() - 1
        begin = self._at
        self._skip(width)
        return int.from_bytes(self._body[begin : self._at], "big", signed=True)

    def _uvarint(self) -> int:
        value = shift = 0
        while shift < 35:
            self._skip(1)
            byte = self._body[self._at - 1]
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedAnswer("a number of too many bytes")

    def _skip(self, count: int) -> None:
        if self._at + count > len(self._body):
            raise MalformedAnswer("an answer ends in the middle of a field")
        self._at += count
