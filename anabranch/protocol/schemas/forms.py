"""Codecs that are made from the schemas of records, out of the parts in `fast`. They take half of fastavro's time.

`codec` tries the handwritten functions in `fast` first, then these, then fastavro. Like those in `fast`, these
functions decline any but the common form of a value (`fast.DECLINED`); then fastavro reads, writes or refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

from anabranch.protocol.schemas import fast
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.fast import Unusual

Write = Callable[[Any], bytes]
# Takes the place of a value; returns it, and its end.
Read = Callable[[bytes, int], tuple[Any, int]]
Form = tuple[Write, Read]
_BOOLEANS = {False: b"\x00", True: b"\x01"}


def form_of(schema: Any, class_of: Callable[[Any], Any], resolve: Callable[[Any], Any]) -> Form:
    """The writer and the reader of values of a schema.

    ``schema``: as fastavro parsed it. ``class_of``: returns the class of a record's schema, None for other schemas.
    ``resolve``: returns the schema of a named type, other schemas as they are.

    Raises: Unusual (the schema has a type for which there is no function here).
    """
    schema = resolve(schema)
    if (cls := class_of(schema)) is not None:
        fields = [form_of(field["type"], class_of, resolve) for field in schema["fields"]]
        return _record(cls, [field["name"] for field in schema["fields"]], fields)
    if isinstance(schema, list):
        if len(schema) != 2 or schema[0] != "null":
            raise Unusual
        return _optional(form_of(schema[1], class_of, resolve))
    kind = schema["type"] if isinstance(schema, dict) else schema
    if kind == "array":
        item = class_of(resolve(schema["items"]))
        most = fast.EVENTS if item in (r.Event, r.EventHeader) else fast.LIST
        return _array(form_of(schema["items"], class_of, resolve), most)
    if kind == "fixed":
        return _fixed(schema["size"])
    if kind == "enum":
        return _enum(schema["symbols"])
    if kind not in _SIMPLE:
        raise Unusual
    return _SIMPLE[kind]


def _record(cls: Any, names: Sequence[str], fields: Sequence[Form]) -> Form:
    writers, readers = [write for write, _ in fields], [read for _, read in fields]
    get = attrgetter(*names) if len(names) > 1 else lambda record: (getattr(record, names[0]),)

    def write(record: Any) -> bytes:
        if type(record) is not cls:
            raise Unusual
        return b"".join([step(value) for step, value in zip(writers, get(record), strict=True)])

    def read(data: bytes, at: int) -> tuple[Any, int]:
        values = []
        for step in readers:
            value, at = step(data, at)
            values.append(value)
        return cls(*values), at

    return write, read


def _optional(form: Form) -> Form:
    write, read = form

    def read_some(data: bytes, at: int) -> tuple[Any, int]:
        if data[at] == 2:
            return read(data, at + 1)
        if data[at]:
            raise Unusual
        return None, at + 1

    return lambda value: b"\x00" if value is None else b"\x02" + write(value), read_some


def _array(form: Form, most: int) -> Form:
    write, read = form

    def write_all(values: Any) -> bytes:
        if type(values) is not tuple:
            raise Unusual
        return fast.write_all(values, write)

    return write_all, lambda data, at: fast.read_all(data, at, read, most)


def _fixed(size: int) -> Form:
    def write(value: Any) -> bytes:
        if type(value) is not bytes or len(value) != size:
            raise Unusual
        return value

    def read(data: bytes, at: int) -> tuple[bytes, int]:
        end = at + size
        return data[at:end], end

    return write, read


def _enum(symbols: Sequence[str]) -> Form:
    if len(symbols) > 64:
        raise Unusual  # the numbers of some symbols have two bytes
    numbers = {symbol: bytes((2 * at,)) for at, symbol in enumerate(symbols)}
    found = {2 * at: symbol for at, symbol in enumerate(symbols)}
    return numbers.__getitem__, lambda data, at: (found[data[at]], at + 1)


def _write_boolean(value: Any) -> bytes:
    if type(value) is not bool:
        raise Unusual
    return _BOOLEANS[value]


def _read_boolean(data: bytes, at: int) -> tuple[bool, int]:
    if data[at] > 1:
        raise Unusual
    return data[at] == 1, at + 1


_SIMPLE: dict[str, Form] = {
    "boolean": (_write_boolean, _read_boolean),
    "int": (fast.write_int, fast.read_int),
    "long": (fast.write_long, fast.read_long),
    "string": (fast.write_name, fast.read_name),
    "bytes": (fast.write_bytes, fast.read_bytes),
}
