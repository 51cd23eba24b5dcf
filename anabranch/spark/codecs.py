"""Codecs of the columns ``key`` and ``value``: options ``key``, ``value`` and ``undecodable`` (docs/spark.md).

The driver checks the options and finds the columns' types. Each task imports the codecs, and calls them row by row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument, UndecodableValue
from anabranch.presentation.rows import json_of
from anabranch.spark.api import arrow_schema
from anabranch.spark.options import Options
from anabranch.types import Event
from anabranch.values import (
    RAW,
    Bury,
    Codec,
    Decoder,
    Held,
    Stream,
    codec_of,
    spec_of,
    stream_of,
)

_SPARK = "give its module to Spark: --py-files, or spark.sparkContext.addPyFile"
_PLAIN: Mapping[Any, type[t.DataType]] = {
    bool: t.BooleanType,
    int: t.LongType,
    float: t.DoubleType,
    str: t.StringType,
    bytes: t.BinaryType,
    date: t.DateType,
    datetime: t.TimestampType,
}


class Shape(NamedTuple):
    """How values of a Python type are shown in a column. ``shown``: the column's value; None: the same."""

    kind: t.DataType
    shown: Callable[[Any], Any] | None = None


_TEXT = Shape(t.StringType(), json_of)


@dataclass(frozen=True, slots=True)
class Codecs:
    """The words of the options, plain data that Spark sends to the tasks."""

    key: str = "bytes"
    value: str = "bytes"
    undecodable: str = "raise"

    @staticmethod
    def of(options: Options) -> Codecs:
        """Options ``key`` and ``value``. `codec` says whether they are codecs."""
        given = {name: options.text(name) for name in ("key", "value")}
        return Codecs(**{name: word for name, word in given.items() if word is not None})

    def codec(self, name: str) -> Codec:
        """The codec of a column, for no stream in particular. Raises: InvalidArgument."""
        word: str = getattr(self, name)
        try:
            return codec_of(spec_of(word))
        except InvalidArgument as error:
            more = f"; {_SPARK}" if ":" in word else ""
            raise InvalidArgument(f"option {name}: {error}{more}") from error

    def shape(self, name: str) -> Shape:
        """How a column shows decoded values."""
        return shape_of(result_of(self.codec(name)))

    def handle(self, stream: str, names: Sequence[str] = ("key", "value")) -> Stream[Any, Any]:
        """The handle of a stream, with the codecs of these columns. Raises: InvalidArgument."""
        key, value = (self.codec(name).spec if name in names else None for name in ("key", "value"))
        return stream_of(stream, key, value, self.undecodable)


NONE = Codecs()


def result_of(codec: Codec) -> Any:
    """The type that a codec decodes to, as far as it says; `Any` otherwise."""
    spec = codec.spec
    if isinstance(spec, type):
        return spec
    decode = spec[1] if isinstance(spec, tuple) else getattr(spec, "loads", None)
    if isinstance(decode, type):
        return decode
    try:
        return get_type_hints(decode).get("return", Any)
    except Exception:  # noqa: BLE001 - not a function, or its names can't be found
        return Any


def fields_of(model: Any) -> list[tuple[str, str, Any]]:
    """The fields of a model class: name in JSON, name in Python, and type. Empty if it is no model."""
    if hasattr(model, "model_fields"):
        return [(of.alias or name, name, of.annotation) for name, of in model.model_fields.items()]
    if hasattr(model, "__struct_fields__"):
        hints = get_type_hints(model)
        names = zip(model.__struct_encode_fields__, model.__struct_fields__, strict=True)
        return [(shown, name, hints[name]) for shown, name in names]
    return []


def shape_of(hint: Any, within: tuple[Any, ...] = ()) -> Shape:
    """The column for a Python type. A type that Spark lacks is shown as JSON. ``within``: models around it."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return shape_of(inner[0], within)
    if origin in (Union, UnionType):
        given = [one for one in inner if one is not NoneType]
        return shape_of(given[0], within) if len(given) == 1 else _TEXT
    if origin in (list, set, frozenset) or (origin is tuple and inner[1:] == (...,)):
        item = shape_of(inner[0], within)
        return Shape(t.ArrayType(item.kind), _list_of(item.shown))
    if origin is dict and inner[0] is str:
        item = shape_of(inner[1], within)
        return Shape(t.MapType(t.StringType(), item.kind), _map_of(item.shown))
    if not isinstance(hint, type):
        return _TEXT
    if hint in _PLAIN:
        return Shape(_PLAIN[hint]())
    fields = [] if hint in within else fields_of(hint)
    if not fields:
        return _TEXT
    shapes = [(title, name, shape_of(of, (*within, hint))) for title, name, of in fields]
    kind = t.StructType([t.StructField(title, shape.kind) for title, _, shape in shapes])
    return Shape(kind, _struct_of([(title, name, shape.shown) for title, name, shape in shapes]))


def _shown(show: Callable[[Any], Any] | None, value: Any) -> Any:
    return value if show is None or value is None else show(value)


def _list_of(show: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return list if show is None else lambda items: [_shown(show, item) for item in items]


def _map_of(show: Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    return lambda of: [(name, _shown(show, item)) for name, item in of.items()]


def _struct_of(
    fields: Sequence[tuple[str, str, Callable[[Any], Any] | None]],
) -> Callable[[Any], Any]:
    return lambda row: {title: _shown(show, getattr(row, name)) for title, name, show in fields}


class Decoding:
    """Decodes the columns of the events of one stream. Each task makes one."""

    def __init__(self, codecs: Codecs, stream: str, schema: t.StructType, bury: Bury) -> None:
        """``bury``: as of `Decoder`."""
        handle = codecs.handle(stream, schema.names)
        found = {"key": handle.key, "value": handle.value}
        self._names = [name for name, codec in found.items() if codec is not RAW]
        self._shown = {name: codecs.shape(name).shown for name in self._names}
        kinds = arrow_schema(schema)
        self._kinds = {name: kinds.field(name).type for name in self._names}
        self._stream, self._bury = stream, bury
        self._batch: Any = None
        self._decoder = Decoder(handle, self._bury_whole)

    @property
    def skipped(self) -> int:
        """How many events were left out."""
        return self._decoder.skipped

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The events with decoded columns. Raises: UndecodableValue, NotReady (a schema registry is away)."""
        if not self._names:
            return batch
        self._batch = batch
        found = list(self._decoder.decoded(Held(self._raw(batch))))
        try:
            columns = self._columns(found)
        except Exception:  # noqa: BLE001 - a codec's values may be anything
            found = self._fitting(batch, found)
            columns = self._columns(found)
        if len(found) < batch.num_rows:
            left = pa.array([event.offset for event in found], batch.column("offset").type)
            batch = batch.filter(pc.is_in(batch.column("offset"), left))
        for name, column in columns.items():
            batch = batch.set_column(batch.schema.get_field_index(name), name, column)
        return batch

    def _raw(self, batch: pa.RecordBatch) -> Iterator[Event]:
        columns = (
            batch.column(name).to_pylist() for name in ("key", "value", "partition", "offset")
        )
        for key, value, partition, offset in zip(*columns, strict=True):
            yield Event(self._stream, key, value, [], 0, None, 0, 0, partition, offset)

    def _columns(self, events: Sequence[Event[Any, Any]]) -> dict[str, pa.Array]:
        """The columns. Raises an error of pyarrow if a value has not the type that its codec says."""
        return {
            name: pa.array([self._cell(name, event) for event in events], kind)
            for name, kind in self._kinds.items()
        }

    def _cell(self, name: str, event: Event[Any, Any]) -> Any:
        return _shown(self._shown[name], event.key if name == "key" else event.value)

    def _fitting(
        self, batch: pa.RecordBatch, events: Sequence[Event[Any, Any]]
    ) -> list[Event[Any, Any]]:
        """The events that fit their columns. Others count as undecodable: a number may have more than 64 bits."""
        raw = {event.offset: event for event in self._raw(batch)}
        left = []
        for event in events:
            try:
                self._columns([event])
            except Exception as error:  # noqa: BLE001
                self._decoder.refuse(Held(iter(())), raw[event.offset], error)
            else:
                left.append(event)
        return left

    def _bury_whole(self, stream: str, event: Event, error: UndecodableValue) -> None:
        """Add headers and timestamp to an event, and make it a dead letter."""
        batch = self._batch
        (row,) = batch.filter(pc.equal(batch.column("offset"), event.offset)).to_pylist()
        headers = [(header["key"], header["value"]) for header in row["headers"]]
        at = round(row["timestamp"].timestamp() * 1000)
        self._bury(stream, event._replace(headers=headers, timestamp=at), error)
