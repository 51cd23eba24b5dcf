"""Encodes rows as events: option ``encoding``, which the driver checks against the schema.

An `Encoding` is plain data that Spark sends to the tasks, where `encoder` turns Arrow batches of rows into events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument
from anabranch.spark.codecs import NONE, Codecs, fields_of
from anabranch.spark.columns import HEADERS_TYPE
from anabranch.spark.options import Options
from anabranch.spark.sink import avro_rows, json_rows
from anabranch.values import RAW, Codec, Stream, from_text

ENCODINGS = ("raw", "json", "avro")
_STREAM = "stream"
_BYTES = (t.BinaryType, t.StringType)
_RAW: dict[str, tuple[type[t.DataType], ...]] = {
    "key": _BYTES,
    "value": _BYTES,
    "headers": (t.ArrayType,),
    "timestamp": (t.TimestampType,),
    _STREAM: (t.StringType,),
}
_WANTED = {
    "key": "binary or string",
    "value": "binary or string",
    "headers": HEADERS_TYPE.simpleString(),
    "timestamp": "timestamp",
    _STREAM: "string",
}

Encode: TypeAlias = "Callable[[pa.RecordBatch], pa.Array]"


@dataclass(frozen=True)
class Encoding:
    """The columns of a row, by number, that become an event's fields. Made by `encoding_of`."""

    kind: str
    fields: tuple[t.StructField, ...]
    values: tuple[int, ...]
    keys: tuple[int, ...]
    headers: int | None
    timestamp: int | None
    stream: int | None
    avro: str | None
    codecs: Codecs

    def encoder(
        self, given: str | None
    ) -> Callable[[pa.RecordBatch], Iterator[tuple[str, pa.RecordBatch]]]:
        """A function from a batch of rows to batches of events, each with its stream.

        Each task makes one. The batches have the columns that `Transaction.write_batch` takes. ``given``: option
        ``stream``.
        """
        value, key = self._value(), self._key()
        kinds = {"value": self.fields[self.values[0]].dataType} if self.kind == "raw" else {}
        if kinds and self.keys:
            kinds["key"] = self.fields[self.keys[0]].dataType
        coded = CodecRows(self.codecs, kinds)

        def events(rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
            columns = {"value": value(rows)}
            if key is not None:
                columns["key"] = key(rows)
            if self.headers is not None:
                columns["headers"] = rows.column(self.headers)
            if self.timestamp is not None:
                columns["timestamp"] = rows.column(self.timestamp)
            batch = pa.RecordBatch.from_pydict(columns)
            if self.stream is None:
                yield given or "", coded(given or "", batch)
            else:
                for stream, some in _by_stream(rows.column(self.stream), batch):
                    yield stream, coded(stream, some)

        return events

    def _value(self) -> Encode:
        fields = [self.fields[i] for i in self.values]
        if self.kind == "raw":
            (only,) = self.values
            return lambda rows: rows.column(only)
        if self.kind == "json":
            return lambda rows: json_rows.json_rows(self._columns(rows), fields, rows.num_rows)
        encode = avro_rows.AvroRows(self.avro or "", fields)
        return lambda rows: encode(self._columns(rows), rows.num_rows)

    def _columns(self, rows: pa.RecordBatch) -> list[pa.Array]:
        return [rows.column(i) for i in self.values]

    def _key(self) -> Encode | None:
        if not self.keys:
            return None
        if len(self.keys) > 1:
            fields = [self.fields[i] for i in self.keys]
            return lambda rows: json_rows.json_arrays([rows.column(i) for i in self.keys], fields)
        (only,) = self.keys
        kind = self.fields[only].dataType
        if isinstance(kind, _BYTES):
            return lambda rows: rows.column(only)
        return lambda rows: json_rows.plain_texts(rows.column(only), kind)


def encoding_of(options: Options, schema: t.StructType, *, by_column: bool) -> Encoding:
    """The encoding of these rows, from the options. ``by_column``: each row names its stream.

    Raises: InvalidArgument, which says what to do.
    """
    kind = options.choice("encoding", ENCODINGS, "raw")
    keys = options.words("keycolumn")
    codecs = Codecs.of(options)
    keep = options.choice("keepkey", ("true", "false"), "true") == "true"
    timestamp = options.text("timestampcolumn")
    avro = options.text("avroschema")
    names = [field.name.lower() for field in schema.fields]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidArgument(f"columns of the same name: {', '.join(twice)}; rename or drop them")
    if by_column and _STREAM not in names:
        raise InvalidArgument(
            "no column 'stream' (scope/name): add one, or give option stream=scope/name instead of scope"
        )
    if avro is not None and kind != "avro":
        raise InvalidArgument(f"option avroschema is for encoding=avro, not {kind}")
    if kind == "raw":
        if keys or timestamp or not keep:
            raise InvalidArgument(
                "options keycolumn, keepkey and timestampcolumn are for encoding=json and avro; raw takes the "
                "columns key and timestamp"
            )
        return _raw(schema, codecs, by_column=by_column)
    if codecs != NONE:
        raise InvalidArgument(
            f"options key and value are codecs for encoding=raw, not {kind}: name the columns of the key in option "
            "keycolumn"
        )
    return _encoded(kind, schema, keys, keep, timestamp, avro, by_column=by_column)


def _raw(schema: t.StructType, codecs: Codecs, *, by_column: bool) -> Encoding:
    places = {field.name.lower(): i for i, field in enumerate(schema.fields)}
    unknown = [field.name for field in schema.fields if field.name.lower() not in _RAW]
    if unknown or "value" not in places:
        found = f"not {', '.join(unknown)}" if unknown else "and value has to be there"
        raise InvalidArgument(
            f"encoding=raw takes the columns {', '.join(_RAW)}, {found}: select those, or give option "
            "encoding=json or avro to write whole rows"
        )
    if not by_column and _STREAM in places:
        raise InvalidArgument(
            "both option stream and a column 'stream': drop the column, or give option scope instead"
        )
    for name, place in places.items():
        codec = codecs.codec(name) if name in ("key", "value") else RAW
        if codec is RAW:
            _check_type(name, schema.fields[place].dataType)
        else:
            _check_codec(name, codec, schema.fields[place].dataType)
    if "key" not in places and codecs.codec("key") is not RAW:
        raise InvalidArgument(
            f"option key={codecs.key}: a codec of the column key, which is not there"
        )
    return Encoding(
        kind="raw",
        fields=tuple(schema.fields),
        values=(places["value"],),
        keys=tuple(places[name] for name in ("key",) if name in places),
        headers=places.get("headers"),
        timestamp=places.get("timestamp"),
        stream=places.get(_STREAM),
        avro=None,
        codecs=codecs,
    )


def _encoded(
    kind: str,
    schema: t.StructType,
    keys: Sequence[str],
    keep: bool,
    timestamp: str | None,
    avro: str | None,
    *,
    by_column: bool,
) -> Encoding:
    key_places = tuple(_place(schema, "keycolumn", name) for name in keys)
    time_place = None if timestamp is None else _place(schema, "timestampcolumn", timestamp)
    stream = _place(schema, "scope", _STREAM) if by_column else None
    if not keep and not keys:
        raise InvalidArgument("option keepkey=false needs option keycolumn")
    if time_place is not None:
        kind_of_time = schema.fields[time_place].dataType
        if not isinstance(kind_of_time, _RAW["timestamp"]):
            raise InvalidArgument(
                f"option timestampcolumn: column {schema.names[time_place]} is {kind_of_time.simpleString()}, and "
                f"{_WANTED['timestamp']} is needed: cast it"
            )
    if stream is not None:
        _check_type(_STREAM, schema.fields[stream].dataType)
    left_out = {stream, *(() if keep else key_places)}
    values = tuple(i for i in range(len(schema.fields)) if i not in left_out)
    row = t.StructType([schema.fields[i] for i in values])
    for place in key_places:
        field = schema.fields[place]
        if len(keys) > 1 or not isinstance(field.dataType, _BYTES):
            json_rows.check_type(field.name, field.dataType)
    if kind == "json":
        for field in row.fields:
            json_rows.check_type(field.name, field.dataType)
    elif avro is None:
        avro = avro_rows.avro_schema(row)
    else:
        avro_rows.check_fits(row, avro)
    return Encoding(
        kind=kind,
        fields=tuple(schema.fields),
        values=values,
        keys=key_places,
        headers=None,
        timestamp=time_place,
        stream=stream,
        avro=avro,
        codecs=NONE,
    )


def _place(schema: t.StructType, option: str, name: str) -> int:
    """The number of a column. As in Spark, names are compared without case."""
    names = [field.name.lower() for field in schema.fields]
    if name.lower() not in names:
        raise InvalidArgument(
            f"option {option}: there is no column {name!r}; there are {', '.join(schema.names)}"
        )
    return names.index(name.lower())


def _check_type(name: str, kind: t.DataType) -> None:
    if not isinstance(kind, _RAW[name]) or (name == "headers" and not _are_headers(kind)):
        raise InvalidArgument(
            f"column {name} is {kind.simpleString()}, and {_WANTED[name]} is needed: cast it, or give option "
            "encoding=json or avro to write whole rows"
        )


def _check_codec(name: str, codec: Codec, kind: t.DataType) -> None:
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


def _are_headers(kind: t.DataType) -> bool:
    if not isinstance(kind, t.ArrayType) or not isinstance(kind.elementType, t.StructType):
        return False
    fields = {field.name: field.dataType for field in kind.elementType.fields}
    return (
        fields.keys() == {"key", "value"}
        and isinstance(fields["key"], t.StringType)
        and isinstance(fields["value"], _BYTES)
    )


def _by_stream(streams: pa.Array, events: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The events of each stream, in order."""
    if streams.null_count:
        raise InvalidArgument("a row's column 'stream' is null: fill it, or filter such rows out")
    found = pc.unique(streams).to_pylist()
    for stream in found:
        yield stream, events if len(found) == 1 else events.filter(pc.equal(streams, stream))


class CodecRows:
    """Encodes columns ``key`` and ``value`` by codecs, for events of any stream. Each task makes one."""

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
            given[name] = avro_rows.python_values(events.column(name), kind)
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
