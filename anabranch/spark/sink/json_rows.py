"""Rows as JSON, column by column, equal to Spark's ``to_json(struct(*))`` for plain types.

Arrow joins the texts; only strings with control characters and binary columns cost a Python object for each row.
``to_json`` differs in three points: here timestamps are always in UTC, 1.0E10 is written 1e+10, and map keys have
to be strings.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument

_TEXT = pa.large_string()
_COMMA = pa.scalar(",", _TEXT)
_NOTHING = pa.scalar("", _TEXT)
_NUMBERS = (t.ByteType, t.ShortType, t.IntegerType, t.LongType, t.DecimalType)
_PLAIN = (
    *_NUMBERS,
    t.BooleanType,
    t.FloatType,
    t.DoubleType,
    t.StringType,
    t.BinaryType,
    t.DateType,
    t.TimestampType,
    t.TimestampNTZType,
    t.NullType,
)
# Escapes as Spark's JSON library (Jackson) writes them.
_ESCAPES = str.maketrans(
    {chr(i): f"\\u{i:04X}" for i in range(32)}
    | {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
)


def check_type(name: str, kind: t.DataType) -> None:
    """Raise `InvalidArgument` for a column whose type has no JSON form here."""
    if isinstance(kind, t.ArrayType):
        check_type(f"{name}.element", kind.elementType)
    elif isinstance(kind, t.StructType):
        for field in kind.fields:
            check_type(f"{name}.{field.name}", field.dataType)
    elif isinstance(kind, t.MapType):
        if not isinstance(kind.keyType, t.StringType):
            raise InvalidArgument(
                f"column {name}: a map's keys are {kind.keyType.simpleString()}, and in JSON they are strings: "
                "cast them"
            )
        check_type(f"{name}.value", kind.valueType)
    elif not isinstance(kind, _PLAIN):
        raise InvalidArgument(
            f"column {name} has type {kind.simpleString()}, which has no JSON here: cast it to string"
        )


def json_rows(columns: Sequence[pa.Array], fields: Sequence[t.StructField], rows: int) -> pa.Array:
    """Each row as an object without its null fields. ``rows``: the number of rows."""
    parts: list[pa.Array] = []
    for column, field in zip(columns, fields, strict=True):
        name = pa.scalar(f",{quoted(field.name)}:", _TEXT)
        values = json_values(column, field.dataType)
        if values.null_count:
            parts.append(pc.fill_null(_joined(name, values), ""))
        else:
            parts += [name, values]
    if not parts:
        return pa.repeat(pa.scalar("{}", _TEXT), rows)
    # null_handling="skip" would lose rows that are all null (Arrow 26).
    opened = pc.binary_replace_slice(_joined(*parts), start=0, stop=1, replacement="{")
    return _joined(opened, pa.scalar("}", _TEXT))


def json_arrays(columns: Sequence[pa.Array], fields: Sequence[t.StructField]) -> pa.Array:
    """Each row as an array, with its nulls."""
    values = [
        pc.fill_null(json_values(column, field.dataType), "null")
        for column, field in zip(columns, fields, strict=True)
    ]
    inner = pc.binary_join_element_wise(*values, _COMMA)
    return _joined(pa.scalar("[", _TEXT), inner, pa.scalar("]", _TEXT))


def json_values(column: pa.Array, kind: t.DataType) -> pa.Array:
    """Each value as JSON; null stays null."""
    if isinstance(kind, t.StringType):
        return _quote(_escaped(column.cast(_TEXT)))
    if isinstance(kind, t.FloatType | t.DoubleType):
        return _floats(column)
    if isinstance(kind, t.StructType):
        return _structs(column, kind)
    if isinstance(kind, t.ArrayType):
        items = pc.fill_null(json_values(column.flatten(), kind.elementType), "null")
        return _lists(column, items, "[", "]")
    if isinstance(kind, t.MapType):
        return _maps(column, kind)
    texts = plain_texts(column, kind)
    bare = isinstance(kind, (*_NUMBERS, t.BooleanType, t.NullType))
    return texts if bare else _quote(texts)


def plain_texts(column: pa.Array, kind: t.DataType) -> pa.Array:
    """Each value of a plain type as text without quotes; values of other types as JSON."""
    if isinstance(kind, t.BinaryType):
        texts = [None if v is None else b64encode(v).decode() for v in column.to_pylist()]
        return pa.array(texts, _TEXT)
    if isinstance(kind, t.TimestampType):
        return _joined(_times(column), pa.scalar("Z", _TEXT))
    if isinstance(kind, t.TimestampNTZType):
        return _times(column)
    if isinstance(kind, t.FloatType | t.DoubleType):
        return pc.utf8_trim(_floats(column), characters='"')
    if isinstance(kind, _PLAIN):
        return column.cast(_TEXT)
    return json_values(column, kind)


def quoted(text: str) -> str:
    return f'"{text.translate(_ESCAPES)}"'


def _joined(*parts: Any) -> pa.Array:
    return pc.binary_join_element_wise(*parts, _NOTHING)


def _quote(texts: pa.Array) -> pa.Array:
    quote = pa.scalar('"', _TEXT)
    return _joined(quote, texts, quote)


def _escaped(texts: pa.Array) -> pa.Array:
    if pc.any(pc.match_substring_regex(texts, r"[\x00-\x1f]")).as_py():
        return pa.array(
            [None if text is None else text.translate(_ESCAPES) for text in texts.to_pylist()],
            _TEXT,
        )
    texts = pc.replace_substring(texts, "\\", "\\\\")
    return pc.replace_substring(texts, '"', '\\"')


def _floats(column: pa.Array) -> pa.Array:
    """The shortest text that reads as the same number. NaN and infinities become strings, as in Spark."""
    texts = column.cast(_TEXT)
    whole = pc.invert(pc.match_substring_regex(texts, "[.en]"))
    texts = pc.if_else(whole, _joined(texts, pa.scalar(".0", _TEXT)), texts)
    if pc.all(pc.is_finite(column)).as_py() is False:
        infinity = pc.if_else(pc.greater(column, 0), '"Infinity"', '"-Infinity"')
        special = pc.if_else(pc.is_nan(column), '"NaN"', infinity).cast(_TEXT)
        texts = pc.if_else(pc.is_finite(column), texts, special)
    return texts


def _times(column: pa.Array) -> pa.Array:
    """Dates and times as text, cut to milliseconds; a column with a time zone is written in UTC."""
    naive = column.cast(pa.timestamp("us", "UTC") if column.type.tz else column.type)
    naive = naive.cast(pa.timestamp("us"))
    cut = pc.floor_temporal(naive, unit="millisecond").cast(pa.timestamp("ms"))
    return pc.replace_substring(cut.cast(_TEXT), " ", "T")


def _structs(column: pa.Array, kind: t.StructType) -> pa.Array:
    rows = json_rows(column.flatten(), kind.fields, len(column))
    return pc.if_else(column.is_valid(), rows, pa.scalar(None, _TEXT))


def _maps(column: pa.Array, kind: t.MapType) -> pa.Array:
    pairs = column.cast(pa.list_(_pair(column.type)))
    keys, values = pairs.flatten().flatten()
    texts = pc.fill_null(json_values(values, kind.valueType), "null")
    items = _joined(json_values(keys, kind.keyType), pa.scalar(":", _TEXT), texts)
    return _lists(pairs, items, "{", "}")


def _pair(kind: pa.MapType) -> pa.DataType:
    return pa.struct([kind.key_field, kind.item_field])


def _lists(column: pa.Array, items: pa.Array, start: str, end: str) -> pa.Array:
    """The items of each list, joined."""
    sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), items)
    texts = _joined(pa.scalar(start, _TEXT), pc.binary_join(lists, _COMMA), pa.scalar(end, _TEXT))
    return pc.if_else(column.is_valid(), texts, pa.scalar(None, _TEXT))
