"""Rows as Avro: each value is one datum without a header, as in Spark's ``to_avro`` and ``from_avro``."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import fastavro
import pyarrow as pa
from fastavro.schema import SchemaParseException
from fastavro.types import Schema
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TOP = "topLevelRecord"
# Errors of json and fastavro for a text that is not a schema.
_NO_SCHEMA = (
    SchemaParseException,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    RecursionError,
)
_PLAIN: Mapping[type[t.DataType], Any] = {
    t.BooleanType: "boolean",
    t.ByteType: "int",
    t.ShortType: "int",
    t.IntegerType: "int",
    t.LongType: "long",
    t.FloatType: "float",
    t.DoubleType: "double",
    t.BinaryType: "bytes",
    t.DateType: {"type": "int", "logicalType": "date"},
    t.TimestampType: {"type": "long", "logicalType": "timestamp-micros"},
    t.TimestampNTZType: {"type": "long", "logicalType": "local-timestamp-micros"},
}
_INTEGERS = ("int", "long", "float", "double")
# Spark type -> Avro types that can hold its values.
_TAKEN: Mapping[type[t.DataType], Sequence[str]] = {
    t.BooleanType: ("boolean",),
    t.ByteType: _INTEGERS,
    t.ShortType: _INTEGERS,
    t.IntegerType: _INTEGERS,
    t.LongType: ("long", "float", "double"),
    t.FloatType: ("float", "double"),
    t.DoubleType: ("double",),
    t.StringType: ("string", "enum"),
    t.BinaryType: ("bytes", "fixed"),
    t.DateType: ("int.date",),
    t.TimestampType: ("long.timestamp-micros", "long.timestamp-millis"),
    t.TimestampNTZType: ("long.local-timestamp-micros", "long.local-timestamp-millis"),
    t.DecimalType: ("bytes.decimal", "fixed.decimal"),
    t.ArrayType: ("array",),
    t.MapType: ("map",),
    t.StructType: ("record",),
}
# Values that some branches of a union would round: fastavro uses the first branch that accepts a value.
_FINE: Mapping[type[t.DataType], Any] = {
    t.IntegerType: 2**24 + 1,
    t.LongType: 2**53 + 1,
    t.TimestampType: datetime.fromtimestamp(1e-6, UTC),
    t.TimestampNTZType: datetime(1970, 1, 1, microsecond=1),  # noqa: DTZ001
}


def avro_schema(schema: t.StructType) -> str:
    """The Avro schema of rows, as JSON: ``encoding=avro`` uses it, unless ``avroschema`` gives another.

    Raises: InvalidArgument (a column has no Avro type, or a name that Avro does not allow).
    """
    return json.dumps(_of(schema, _TOP, ""))


def _of(kind: t.DataType, name: str, space: str) -> Any:
    for plain, avro in _PLAIN.items():
        if isinstance(kind, plain):
            return avro
    if isinstance(kind, t.StringType):
        return "string"
    if isinstance(kind, t.DecimalType):
        size = (10**kind.precision).bit_length() // 8 + 1
        full = f"{space}.{name}.fixed" if space else f"{name}.fixed"
        decimal = {"logicalType": "decimal", "precision": kind.precision, "scale": kind.scale}
        return {"type": "fixed", "name": full, "size": size, **decimal}
    if isinstance(kind, t.ArrayType):
        return {
            "type": "array",
            "items": _nullable(kind.elementType, name, space, kind.containsNull),
        }
    if isinstance(kind, t.MapType) and isinstance(kind.keyType, t.StringType):
        return {
            "type": "map",
            "values": _nullable(kind.valueType, name, space, kind.valueContainsNull),
        }
    if isinstance(kind, t.StructType):
        inner = f"{space}.{name}" if space else name
        fields = []
        for field in kind.fields:
            if not _NAME.fullmatch(field.name):
                raise InvalidArgument(
                    f"column {field.name!r}: a name in Avro is letters, digits and _: rename it"
                )
            avro = _nullable(field.dataType, field.name, inner, field.nullable)
            fields.append({"name": field.name, "type": avro})
        named = {"type": "record", "name": name, "fields": fields}
        return {**named, "namespace": space} if space else named
    raise InvalidArgument(
        f"column {name} has type {kind.simpleString()}, which has no Avro type here: cast it to string"
    )


def _nullable(kind: t.DataType, name: str, space: str, nullable: bool) -> Any:
    avro = _of(kind, name, space)
    return [avro, "null"] if nullable else avro


def parse(text: str) -> Schema:
    """The schema of option ``avroschema``. Raises: InvalidArgument (it is not the schema of a record)."""
    try:
        parsed = fastavro.parse_schema(json.loads(text), _write_hint=False)
    except _NO_SCHEMA as error:
        raise InvalidArgument(f"option avroschema is no Avro schema: {error!r}") from error
    if not isinstance(parsed, dict) or parsed.get("type") != "record":
        raise InvalidArgument("option avroschema: a record is needed, with a field for each column")
    return parsed


def check_fits(kind: t.StructType, text: str) -> None:
    """Raise `InvalidArgument` if the schema of option ``avroschema`` can't hold a column."""
    _Fit().record("", kind, parse(text))


class _Fit:
    """Compares the types of rows with an Avro schema, whose named types may refer to each other."""

    def __init__(self) -> None:
        self._named: dict[str, Any] = {}

    def record(self, path: str, kind: t.StructType, avro: Any) -> None:
        fields = {field["name"]: field for field in avro["fields"]}
        columns = {field.name: field for field in kind.fields}
        missing = [n for n, field in fields.items() if n not in columns and "default" not in field]
        unknown = [name for name in columns if name not in fields]
        where = f" in {path.rstrip('.')}" if path else ""
        if missing:
            raise InvalidArgument(
                f"option avroschema: no column{where} for {', '.join(missing)}, which have no default"
            )
        if unknown:
            raise InvalidArgument(
                f"option avroschema: no field{where} for {', '.join(unknown)}: drop them or add fields"
            )
        for name, field in columns.items():
            self.value(path + name, field.dataType, fields[name]["type"])

    def value(self, path: str, kind: t.DataType, avro: Any) -> None:
        branches = [
            self._resolved(branch) for branch in (avro if isinstance(avro, list) else [avro])
        ]
        if isinstance(kind, t.NullType):
            taken = [branch for branch in branches if branch["type"] == "null"]
        else:
            names = next((n for k, n in _TAKEN.items() if isinstance(kind, k)), ())
            taken = [branch for branch in branches if _full(branch) in names]
        if not taken:
            raise InvalidArgument(
                f"option avroschema: column {path} is {kind.simpleString()}, which "
                f"{json.dumps(avro)} does not take: cast it, or change the schema"
            )
        fine = next((value for k, value in _FINE.items() if isinstance(kind, k)), None)
        simple = [branch for branch in branches if branch["type"] in ("null", *_INTEGERS)]
        if any(_keeps(fine, branch) for branch in taken) and not _keeps(fine, simple):
            raise InvalidArgument(
                f"option avroschema: column {path} would lose digits in a branch of {json.dumps(avro)} "
                "that comes before a finer one: let the finer one come first"
            )
        (branch, *_) = taken
        if isinstance(kind, t.StructType):
            self.record(f"{path}.", kind, branch)
        elif isinstance(kind, t.ArrayType):
            self.value(f"{path}.element", kind.elementType, branch["items"])
        elif isinstance(kind, t.MapType):
            self.value(f"{path}.value", kind.valueType, branch["values"])

    def _resolved(self, avro: Any) -> Any:
        if isinstance(avro, str):
            return self._named.get(avro, {"type": avro})
        if "name" in avro:
            self._named[avro["name"]] = avro
        return avro


def _keeps(value: Any, avro: Any) -> bool:
    """Whether a value is unchanged after writing and reading it. True for None."""
    if value is None:
        return True
    out = io.BytesIO()
    try:
        fastavro.schemaless_writer(out, avro, value)
        out.seek(0)
        return bool(fastavro.schemaless_reader(out, avro, None) == value)
    except (ValueError, TypeError, OverflowError):  # another logical type: a time of day
        return False


def _full(avro: Any) -> str:
    """A type's name, with its logical type if that changes the values it can hold."""
    logical = str(avro.get("logicalType", ""))
    changes = logical in ("date", "decimal") or "timestamp" in logical
    return f"{avro['type']}.{logical}" if changes else str(avro["type"])


class AvroRows:
    """Encodes rows by a schema, which is given as JSON."""

    def __init__(self, text: str, fields: Sequence[t.StructField]) -> None:
        self._schema = parse(text)
        self._names = [field.name for field in fields]
        self._kinds = [field.dataType for field in fields]

    def __call__(self, columns: Sequence[pa.Array], rows: int) -> pa.Array:
        """A datum for each row. Raises: InvalidArgument (the schema can't hold a row)."""
        try:
            data = list(self._data(columns, rows))
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise InvalidArgument(f"a row does not fit the Avro schema: {error}") from error
        return pa.array(data, pa.large_binary())

    def _data(self, columns: Sequence[pa.Array], rows: int) -> Iterator[bytes]:
        lists = [python_values(*each) for each in zip(columns, self._kinds, strict=True)]
        out = io.BytesIO()
        for row in zip(*lists, strict=True) if lists else [()] * rows:
            out.seek(0)
            out.truncate()
            fastavro.schemaless_writer(out, self._schema, dict(zip(self._names, row, strict=True)))
            yield out.getvalue()


def python_values(column: pa.Array, kind: t.DataType) -> list[Any]:
    """A column's values: structs and maps as dictionaries, times in UTC."""
    values, convert = _in_utc(column).to_pylist(), _converter(kind)
    return [convert(value) for value in values] if convert else values


def _in_utc(column: pa.Array) -> pa.Array:
    """The same instants in UTC, a zone that every Python knows."""
    kind = _utc(column.type)
    return column if kind == column.type else column.cast(kind)


def _utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind):
        return pa.timestamp(kind.unit, "UTC") if kind.tz else kind
    if pa.types.is_map(kind):
        return pa.map_(kind.key_field, kind.item_field.with_type(_utc(kind.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_utc(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_utc(field.type)) for field in kind])
    return kind


def _converter(kind: t.DataType) -> Callable[[Any], Any] | None:
    """The function from Arrow's value to fastavro's, or None if they are the same."""
    if isinstance(kind, t.MapType):
        inner = _converter(kind.valueType) or _same
        return lambda pairs: None if pairs is None else {k: inner(v) for k, v in pairs}
    if isinstance(kind, t.ArrayType):
        convert = _converter(kind.elementType)
        if convert is not None:
            return lambda items: None if items is None else [convert(item) for item in items]
    if isinstance(kind, t.StructType):
        parts = {field.name: _converter(field.dataType) or _same for field in kind.fields}
        if any(part is not _same for part in parts.values()):
            return lambda row: row and {name: part(row[name]) for name, part in parts.items()}
    return None


def _same(value: Any) -> Any:
    return value
