"""Columns ``key`` and ``value`` of encoding=raw that the codecs of options ``key`` and ``value`` encode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument
from anabranch.spark.codecs import Codecs, fields_of
from anabranch.spark.sink.avro_rows import python_values
from anabranch.values import RAW, Codec, Stream, from_text


def check_type(name: str, codec: Codec, kind: t.DataType) -> None:
    """Raise `InvalidArgument` if a codec can't take a column of this type."""
    wanted = ""
    if codec.spec is str:
        wanted = "string"
    elif fields_of(codec.spec):
        wanted = "string (JSON) or struct"
    if wanted and kind.typeName() not in wanted.split():
        raise InvalidArgument(
            f"column {name} is {kind.simpleString()}, and {wanted} is needed for codec {codec.name}: cast it"
        )


class CodecRows:
    """Encodes events of any stream. Each task makes one."""

    def __init__(self, codecs: Codecs, kinds: Mapping[str, t.DataType]) -> None:
        """``kinds``: the types of the columns."""
        self._codecs = codecs
        self._kinds = {name: kind for name, kind in kinds.items() if codecs.codec(name) is not RAW}
        self._handles: dict[str, Stream[Any, Any]] = {}

    def __call__(self, stream: str, events: pa.RecordBatch) -> pa.RecordBatch:
        """The events with encoded columns. Raises: InvalidArgument, NotReady (a schema registry is away)."""
        if not self._kinds:
            return events
        handle = self._handles.get(stream)
        if handle is None:
            handle = self._handles[stream] = self._handle(stream)
        given: dict[str, list[Any]] = dict.fromkeys(("key", "value"), [None] * events.num_rows)
        for name, kind in self._kinds.items():
            given[name] = python_values(events.column(name), kind)
        pairs = [handle.encode(*pair) for pair in zip(given["key"], given["value"], strict=True)]
        coded = {"key": [key for key, _ in pairs], "value": [value for _, value in pairs]}
        for name in self._kinds:
            column = pa.array(coded[name], pa.large_binary())
            events = events.set_column(events.schema.get_field_index(name), name, column)
        return events

    def _handle(self, stream: str) -> Stream[Any, Any]:
        handle = self._codecs.handle(stream, tuple(self._kinds))
        key, value = self._kinds.get("key"), self._kinds.get("value")
        return replace(handle, key=_taking(handle.key, key), value=_taking(handle.value, value))


def _taking(codec: Codec, kind: t.DataType | None) -> Codec:
    """The codec with an ``encode`` that takes a column's values."""
    taken = _taken(codec, kind)
    return (
        codec if taken is None else codec._replace(encode=lambda given: codec.encode(taken(given)))
    )


def _taken(codec: Codec, kind: t.DataType | None) -> Callable[[Any], Any] | None:
    """The function from a column's value to what the codec encodes; None if they are the same."""
    if isinstance(kind, t.StringType):
        return None if codec.spec is str else lambda text: from_text(codec, text.encode())
    if hasattr(codec.spec, "model_validate"):
        validate: Callable[[Any], Any] = codec.spec.model_validate
        return validate
    if fields_of(codec.spec):
        from msgspec import convert

        return lambda row: convert(row, codec.spec)
    return None
