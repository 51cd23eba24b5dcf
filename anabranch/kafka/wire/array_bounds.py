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
from anabranch.kafka.wire.reader import Reader

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
    _Walk(body, kind.__flexible__).entity(kind)  # type: ignore[attr-defined]


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


class _Walk(Reader):
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
