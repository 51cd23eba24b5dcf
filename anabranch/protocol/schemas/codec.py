"""Encoding and decoding records: ``[feature level][record type][Avro body]``, see `docs/protocol.md`.

By the first two bytes, a reader can refuse a record that it does not know, before it parses anything. A hostile
sender gains nothing by claiming huge lengths in a body: fastavro never allocates more than the bytes that came.

A record's *feature level* is the lowest that has all fields in which the record differs from their defaults. So a
program of an older release, which knows lower levels only, reads the record unless such a field is used, and then
refuses it by name. A field of a level above 1 has ``"level"`` in its schema, and a default; no field of a lower
level comes after it. A record type of a level above 1 has ``"level"`` in its schema, and no frame below it
(docs/inside/decisions/0046-feature-levels.md).
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.resources import files
from typing import Any, TypeVar

from fastavro import schemaless_reader, schemaless_writer
from fastavro.repository import AbstractSchemaRepository
from fastavro.schema import load_schema

from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.protocol.schemas import fast, forms
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.making import DEFAULTS

LEVEL = 4  # the highest feature level that this release knows

# Record type -> class. A number is never reused; a changed record gets a new number, or fields of a new level.
TYPES: dict[int, type] = {
    1: r.FindScope,
    2: r.CreateStream,
    3: r.DescribeStreams,
    4: r.Begin,
    5: r.Touch,
    6: r.Register,
    7: r.Commit,
    8: r.OneShot,
    9: r.Abort,
    10: r.Resolve,
    11: r.GetState,
    12: r.Heartbeat,
    13: r.ListTransactions,
    14: r.AdoptScope,
    15: r.Scale,
    16: r.SafeTime,
    17: r.ForgetStream,
    18: r.Force,
    19: r.ListSeries,
    20: r.SetSeries,
    21: r.ListCommands,
    22: r.SetLane,
    23: r.ListLanes,
    24: r.SetGrant,
    25: r.ListGrants,
    26: r.ListAudit,
    27: r.CreateProcessor,
    28: r.RecoverStream,
    29: r.TakeTasks,
    30: r.ReleaseTasks,
    31: r.DescribeProcessors,
    32: r.Reply,
    33: r.Receipt,
    34: r.Consumed,
    35: r.ResetProcessor,
    36: r.DeleteProcessor,
    37: r.PrepareEvents,
    38: r.DeleteStream,
    39: r.AlterStream,
    40: r.TruncateStream,
    41: r.ListOpen,
    42: r.LabelWriter,
    43: r.LockReads,
    44: r.ListLocks,
    46: r.ListRuns,
    48: r.ListTableLocks,
    49: r.PublishBase,
    50: r.SetFeatureLevel,
    51: r.DescribeLeader,
    52: r.TakeTurn,
    53: r.AlterProcessor,
    54: r.CopyProcessor,
    57: r.Enlist,
    58: r.Enlisted,
    59: r.AskVote,
    60: r.Vote,
    61: r.Decide,
    62: r.Done,
    63: r.AskDecision,
    64: r.TermRow,
    65: r.RoundRow,
    66: r.ScopeRow,
    67: r.StreamRow,
    68: r.TxnRow,
    69: r.ParticipantRow,
    70: r.WriterRow,
    71: r.NameRow,
    72: r.FormerPendingCommitRow,
    73: r.EpochRow,
    74: r.StagedMergeRow,
    75: r.LowWaterRow,
    76: r.PlainRow,
    77: r.MovedRow,
    78: r.SeriesRow,
    79: r.YieldedRow,
    80: r.ForgottenRow,
    81: r.RetiredRow,
    82: r.SuspectRow,
    83: r.QuarantineRow,
    84: r.LaneRow,
    85: r.LanePositionRow,
    86: r.GrantRow,
    87: r.AuditRow,
    88: r.ProcessorRow,
    89: r.TaskRow,
    90: r.PreparedRow,
    93: r.LabelRow,
    94: r.FormerTableRow,
    96: r.JournalOp,
    97: r.EpochRecord,
    98: r.CommitRecord,
    100: r.ReadLockRow,
    101: r.ValidatedRow,
    105: r.BaseRow,
    106: r.ChangedRow,
    107: r.ReadsRow,
    108: r.TableRow,
    109: r.PendingCommitRow,
    110: r.FeatureRow,
    111: r.RejectedRow,
    112: r.VotesRow,
    113: r.PartitionRow,
    114: r.CoordinatorRow,
}
_CODES = {cls: code for code, cls in TYPES.items()}

_BY_CONTROLLERS = (
    64  # the least record type that only controllers make; any program makes those before
)
_ANY = 1 << 63  # items of a list in a reply, which only its size in bytes limits

# Errors of fastavro and of the walks for bytes that are not Avro. Other errors may come from a signal handler.
_NO_AVRO = (ValueError, LookupError, TypeError, EOFError, OverflowError, MemoryError)
T = TypeVar("T")
_Plain = Callable[[Any], Any]
_Walk = Callable[[bytes, int], int]  # takes the offset of a value, and returns its end


class _Packaged(AbstractSchemaRepository):
    """Finds the schemas in this package, without fields above a feature level."""

    def __init__(self, level: int) -> None:
        self._level = level

    def load(self, name: str) -> Any:
        file = files("anabranch.protocol.schemas") / (name.rpartition(".")[2] + ".avsc")
        schema = json.loads(file.read_text("utf-8"))
        if "fields" in schema:
            schema["fields"] = [f for f in schema["fields"] if f.get("level", 1) <= self._level]
        return schema


@cache
def schema_of(cls: Any, level: int = LEVEL) -> Any:
    """The schema of a record at a feature level, as parsed by fastavro."""
    return load_schema(f"anabranch.{cls.__name__}", repo=_Packaged(level))


def least_level(cls: Any) -> int:
    """The feature level of a record type: no frame of it has a lower one."""
    least: int = schema_of(cls).get("level", 1)
    return least


def level_of(record: Any) -> int:
    """The feature level of a record: the lowest with its type, and all its fields that differ from defaults."""
    cls: Any = type(record)
    find = _levels(cls)
    return 1 if find is None else find(record)


@cache
def _levels(cls: Any) -> Callable[[Any], int] | None:
    """Finds the level of a record of this class; None if that is always 1."""
    steps = [
        (field["name"], field.get("level", 1), DEFAULTS.get(f"{cls.__name__}.{field['name']}"))
        for field in schema_of(cls)["fields"]
    ]
    inner = [_levels_within(field["type"]) for field in schema_of(cls)["fields"]]
    kept = [(*step, find) for step, find in zip(steps, inner, strict=True) if step[1] > 1 or find]
    least = least_level(cls)
    if not kept and least == 1:
        return None
    if least == LEVEL:
        return lambda _: least

    def find(record: Any) -> int:
        level = least
        for name, own, default, within in kept:
            value = getattr(record, name)
            if value != default:
                level = max(level, own, 1 if within is None else within(value))
        return level

    return find


def _levels_within(avro: Any) -> Callable[[Any], int] | None:
    """Finds the highest level of the records in a field's value; None if that is always 1."""
    branches = avro if isinstance(avro, list) else [avro]
    lists = [b["items"] for b in branches if isinstance(b, dict) and b.get("type") == "array"]
    if lists:
        item = _levels_within(lists[0])
        return None if item is None else lambda values: max(map(item, values or ()), default=1)
    if any(_levels(cls) for branch in branches if (cls := _record_class(branch)) is not None):
        return lambda value: 1 if value is None else level_of(value)
    return None


def encode(record: Any) -> bytes:
    """The framed bytes of a record (one of `TYPES`)."""
    write = fast.WRITERS.get(type(record))
    if write is not None:
        try:
            return write(record)
        except fast.DECLINED:
            pass
    return _encode_by_form(record) or _encode(record)


def _encode_by_form(record: Any) -> bytes:
    """The framed bytes; empty: fastavro has to write this record."""
    cls: Any = type(record)
    level = level_of(record)
    form = _form(cls, level)
    if form is not None:
        try:
            return bytes((level, _CODES[cls])) + form[0](record)
        except fast.DECLINED:
            pass
    return b""


def _encode(record: Any) -> bytes:
    """The framed bytes, written by fastavro."""
    cls: Any = type(record)
    out = io.BytesIO()
    level = level_of(record)
    out.write(bytes((level, _CODES[cls])))
    try:
        schemaless_writer(out, schema_of(cls, level), _to_plain(cls)(record))
    except (ValueError, TypeError, OverflowError) as error:
        raise MalformedRecord(f"{cls.__name__} can't be written: {error}") from error
    return out.getvalue()


def decode(data: bytes) -> Any:
    """The record of framed bytes.

    Raises: UnsupportedVersion (an unknown level or type), MalformedRecord (not exactly one record).
    """
    if len(data) < 2:
        raise MalformedRecord(f"a record has at least 2 bytes, not {len(data)}")
    if not 1 <= data[0] <= LEVEL:
        raise unsupported_level(data[0], "a record")
    cls = TYPES.get(data[1])
    if cls is None:
        raise UnsupportedVersion(f"record type {data[1]} is not known here: upgrade this side")
    read = fast.READERS.get(cls) if data[0] == 1 else None
    if read is not None:
        try:
            return read(data)
        except fast.DECLINED:
            pass
    found = _decode_by_form(cls, data)
    return _decode(cls, data) if found is None else found


def _decode_by_form(cls: Any, data: bytes) -> Any:
    """The record; None: fastavro has to read it, or to refuse it."""
    form = _form(cls, data[0])
    if form is not None:
        try:
            record, end = form[1](data, 2)
        except fast.DECLINED:
            return None
        if end == len(data):
            return record
    return None


def name_of(record: bytes) -> str:
    """The name of the type of an encoded record."""
    found = TYPES.get(record[1]) if len(record) > 1 else None
    return "unreadable" if found is None else found.__name__


def unsupported_level(level: int, what: str) -> UnsupportedVersion:
    """The error for a feature level that this release does not know. ``what``: what has it."""
    return UnsupportedVersion(
        f"{what} has feature level {level}, and this release knows levels 1 to {LEVEL}: upgrade it"
    )


def _decode(cls: Any, data: bytes) -> Any:
    """The record, read by fastavro."""
    body, level = io.BytesIO(data), data[0]
    body.seek(2)
    if level < least_level(cls):
        # Else a client could have a leader log what an older one can't read.
        raise MalformedRecord(f"a {cls.__name__} has feature level {least_level(cls)} at least")
    try:
        if data[1] < _BY_CONTROLLERS:
            _walk(cls, level, _ANY if cls is r.Reply else fast.LIST)(data, 2)
        plain = schemaless_reader(body, schema_of(cls, level), None, return_record_name=True)
        record = _from_plain(cls, level)(plain)
    except _NO_AVRO as error:
        raise MalformedRecord(f"not a {cls.__name__}: {error}") from error
    if body.tell() != len(data):
        raise MalformedRecord(f"{len(data) - body.tell()} bytes too many after {cls.__name__}")
    return record


@cache
def _form(cls: Any, level: int) -> forms.Form | None:
    """The writer and the reader of `forms` for a record's body; None: fastavro has to write, read or refuse it."""
    if level < least_level(cls):
        return None
    try:
        return forms.form_of(schema_of(cls, level), _record_class, partial(_named, level))
    except fast.Unusual:
        return None


def _named(level: int, avro: Any) -> Any:
    """The schema of a named type; other schemas as they are."""
    if isinstance(avro, str) and avro.startswith("anabranch."):
        return load_schema(avro, repo=_Packaged(level))
    return avro


def decode_as(cls: type[T], data: bytes) -> T:
    """The record of framed bytes, as `decode` returns it; it has to be of this class."""
    record = decode(data)
    if not isinstance(record, cls):
        raise MalformedRecord(f"{type(record).__name__} where {cls.__name__} belongs")
    return record


@cache
def _walk(cls: Any, level: int, most: int) -> _Walk:
    """A walk over a record's bytes, which raises an error for the first field that is not valid Avro.

    fastavro alone would accept -1 as the last branch of a union or symbol of an enum, and any byte as true.
    ``most``: the most items of a list.
    """
    steps = [(name, _walker(avro, level, most)) for name, avro in _field_types(cls, level)]

    def walk(data: bytes, at: int) -> int:
        for name, step in steps:
            try:
                at = step(data, at)
            except IndexError:
                raise ValueError(f"{name}: the record ends early") from None
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        return at

    return walk


def _walker(avro: Any, level: int, most: int) -> _Walk:
    avro = _named(level, avro)
    cls = _record_class(avro)
    if cls is not None:
        return _walk(cls, level, most)
    if isinstance(avro, list):
        return _union([_walker(branch, level, most) for branch in avro])
    form: dict[str, Any] = avro if isinstance(avro, dict) else {}
    kind: str = form.get("type", avro)
    if kind in ("null", "fixed"):
        size = form.get("size", 0)
        return lambda data, at: _room(data, at, size)
    if kind == "array":
        few = _record_class(form["items"]) in (r.Event, r.EventHeader)
        return _list([_walker(form["items"], level, most)], min(most, fast.EVENTS) if few else most)
    if kind == "map":
        return _list([_text, _walker(form["values"], level, most)], most)
    if kind == "enum":
        return _union([_nothing] * len(form["symbols"]))
    return {"boolean": _boolean, "string": _text, "bytes": _text}.get(kind, _number)


def _union(branches: Sequence[_Walk]) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        number, at = _long_at(data, at)
        if not 0 <= number < len(branches):
            return _wrong(f"one of {len(branches)} choices", number)
        return branches[number](data, at)

    return walk


def _list(items: Sequence[_Walk], most: int) -> _Walk:
    def walk(data: bytes, at: int) -> int:
        count = 0
        number, at = _long_at(data, at)
        while number:
            if number < 0:  # a block with its size in bytes
                _, at = _long_at(data, at)
            count += abs(number)
            if count > most:
                return _wrong(f"{most} items at most", count)
            for _ in range(abs(number)):
                for item in items:
                    at = item(data, at)
            number, at = _long_at(data, at)
        return at

    return walk


def _nothing(_: bytes, at: int) -> int:
    return at


def _number(data: bytes, at: int) -> int:
    return at + 1 if data[at] < 0x80 else _long_at(data, at)[1]


def _boolean(data: bytes, at: int) -> int:
    return at + 1 if data[at] < 2 else _wrong("a boolean", data[at])


def _text(data: bytes, at: int) -> int:
    size, at = _long_at(data, at)
    return _room(data, at, size)


def _long_at(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value >> 1 ^ -(value & 1), at + 1
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value >> 1 ^ -(value & 1), at
    return _wrong("64 bits", "more"), at


def _room(data: bytes, at: int, size: int) -> int:
    return at + size if 0 <= size <= len(data) - at else _wrong(f"{len(data) - at} bytes", size)


def _wrong(due: str, found: object) -> int:
    raise ValueError(f"{found} where {due} should be")


def _int32(value: int) -> int:
    # fastavro reads any 64 bits as an Avro int, but every reader has to be able to write the value again.
    if type(value) is not int:
        raise TypeError(f"{value!r} is not an int")
    if not -(1 << 31) <= value < 1 << 31:
        raise ValueError(f"{value} is not within the 32 bits of an int")
    return value


def _optional(step: _Plain) -> _Plain:
    return lambda value: None if value is None else step(value)


def _tagged(record: Any) -> tuple[str, Any]:
    cls: Any = type(record)
    return f"anabranch.{cls.__name__}", _to_plain(cls)(record)


def _record_class(avro: Any) -> Any:
    """The dataclass of a schema's record type, or None."""
    name = avro.get("name", "") if isinstance(avro, dict) and avro.get("type") == "record" else avro
    if isinstance(name, str) and name.startswith("anabranch."):
        found = getattr(r, name.rpartition(".")[2], None)
        return found if isinstance(found, type) and r.is_record(found) else None
    return None


def _field_types(cls: Any, level: int = LEVEL) -> list[tuple[str, Any]]:
    return [(f["name"], f["type"]) for f in schema_of(cls, level)["fields"]]


@cache
def _from_plain(cls: Any, level: int) -> _Plain:
    # Fields of higher levels come last, and get their defaults.
    steps = [(name, _reader(avro, level)) for name, avro in _field_types(cls, level)]

    def build(plain: Any) -> Any:
        return cls(*[step(plain[name]) if step else plain[name] for name, step in steps])

    return build


def _reader(avro: Any, level: int) -> _Plain | None:
    cls = _record_class(avro)
    if cls is not None:
        return _from_plain(cls, level)
    if avro == "int":
        return _int32
    if isinstance(avro, list):
        if all(_record_class(branch) for branch in avro):
            return lambda pair: _from_plain(getattr(r, pair[0].rpartition(".")[2]), level)(pair[1])
        inner = _reader(avro[1], level)
        if _record_class(avro[1]) is not None and inner is not None:
            whole = inner
            return _optional(lambda pair: whole(pair[1]))  # fastavro names the branch here too
        if isinstance(avro[1], str) and avro[1].startswith("anabranch."):
            return _optional(lambda pair: pair[1] if type(pair) is tuple else pair)  # and here
        return _optional(inner) if inner else None
    if isinstance(avro, dict) and avro["type"] == "array":
        item = _reader(avro["items"], level)
        if item is None:
            return tuple
        return lambda values: tuple([item(value) for value in values])
    return None


@cache
def _to_plain(cls: Any) -> _Plain:
    steps = [(name, _writer(avro)) for name, avro in _field_types(cls)]

    def flatten(record: Any) -> Any:
        return {
            name: step(getattr(record, name)) if step else getattr(record, name)
            for name, step in steps
        }

    return flatten


def _writer(avro: Any) -> _Plain | None:
    cls = _record_class(avro)
    if cls is not None:
        return _to_plain(cls)
    if avro == "int":
        return _int32
    if isinstance(avro, list):
        if all(_record_class(branch) for branch in avro):
            return _tagged
        inner = _writer(avro[1])
        return _optional(inner) if inner else None
    if isinstance(avro, dict) and avro["type"] == "array":
        item = _writer(avro["items"])
        if item is None:
            return list
        return lambda values: [item(value) for value in values]
    return None
