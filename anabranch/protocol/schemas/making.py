"""Makes the records' classes from their schemas. Tables here add what Avro can't express.

A record is a frozen dataclass. Frequent ones are named tuples, whose objects are made in a quarter of the time.
"""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, field, make_dataclass
from importlib.resources import files
from typing import Any, Literal

Schema = dict[str, Any]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TUPLES = _names(
    """
    AskVote CommitRecord CoordinatorRow Decide Derivation Done Event EventHeader FollowedRows LanePositionRow
    OneShot Outcome PartitionRow PendingCommitRow Position Reply RowChange TableLocks TableRow TableTime
    TaskPosition TaskRow TxnHead TxnRow Vote VotesRow
    """
)
# Fields that a dataclass's repr leaves out.
_SECRETS = _names("secret fencing_token fencing_hash token tokens")
_DEFAULTS: tuple[tuple[Any, str], ...] = (
    (
        None,
        """
        Abort.secret AlterStream.description
        AuditList.more Begin.fencing_hash Commit.consumed Commit.number Commit.prepare Commit.secret
        DescribeProcessors.after DescribeProcessors.processor DescribeStreams.after FindScope.near GetState.after
        GetState.token
        ListAudit.before ListTransactions.before ListTransactions.secret
        OneShot.consumed OneShot.secret OneShot.turn_to
        PrepareEvents.consumed PendingCommitRow.consumed PendingCommitRow.prepare
        ProcessorInfo.more ProcessorList.more
        ListOpen.after OpenList.more ListTableLocks.after TableLockList.more
        Resolve.token Force.outcome StreamChange.base StreamInfo.base StreamList.more StreamRow.change
        SetSeries.owner TransactionList.more TxnRow.consumes OpenInfo.waits
        AskVote.prepare Enlisted.head Enlisted.refusal Outcome.broken ReadsLocked.broken TxnRow.broken Vote.error
        Vote.revalidate
        """,
    ),
    (
        0,
        """
        CommandList.open_transactions CommandList.outcomes DescribeProcessors.task Outcome.prepared_ms
        FeatureLevel.control_partitions FeatureRow.control_partitions SetFeatureLevel.control_partitions
        LeaderInfo.busy_us LeaderInfo.waiting
        ProcessorInfo.resets ProcessorRow.first_term ProcessorRow.resets ScopeRow.floor
        StreamInfo.foreign TaskInfo.state_sequence
        Receipt.seen TaskRow.state_sequence Touch.writer Begin.snapshot Outcome.snapshot TxnRow.snapshot
        StreamInfo.oldest_snapshot ReadsLocked.sequence MovedRow.latest OpenInfo.locks
        TableRow.unknown TableRow.bounded SeriesInfo.taken_ms Touch.wait_ms ParticipantRow.locked_ms
        CoordinatorRow.prepare_timestamp Decide.timestamp PartitionRow.committed PartitionRow.left_out
        PartitionRow.rejected Vote.committed Vote.left_out Vote.timestamp CommitRecord.safe
        EpochRecord.safe
        """,
    ),
    (
        False,
        """
        Asker.decided Touched.exclusive
        DescribeStreams.rejected
        CreateStream.adopt ListTransactions.prepared StreamRow.adopt Revalidate.decided OpenInfo.frozen
        Touched.is_table TakeTasks.copying DescribeProcessors.topology CoordinatorRow.staged CoordinatorRow.forced
        PartitionRow.done
        Vote.stages VotesRow.own_merged
        """,
    ),
    (True, "SafeTimeReply.safe"),
    (-1, "CommitRecord.vector_at TaskPosition.offset TaskPosition.segment"),
    (
        (),
        """
        CreateProcessor.kinds CreateProcessor.stores PreparedRow.events ProcessorInfo.stores
        ProcessorRow.kinds ProcessorRow.stores OneShot.changes OneShot.derivations OneShot.follows OneShot.locks
        PrepareEvents.derivations PrepareEvents.locks SafeTime.tables SafeTimeReply.tables Outcome.tables
        Touch.derivations Touch.positions Touched.locked ParticipantRow.locked OpenInfo.asks
        OpenInfo.locked_segments StreamInfo.locked_segments
        OpenInfo.partitions
        Commit.validated LockReads.locks LockReads.read_from LockReads.tables LockReads.validated Revalidate.writers
        ReadLockRow.read_from ReadsLocked.locks StreamInfo.blockers StreamInfo.rejected_records DeleteStream.despite
        AskVote.receipts OneShot.places SafeTime.streams
        """,
    ),
    (b"", "Outcome.prepared_by"),
    (
        "",
        """
        CreateProcessor.topology CreateStream.description OpenInfo.ends ProcessorInfo.origin ProcessorInfo.phase
        ProcessorInfo.topology ProcessorRow.origin ProcessorRow.phase ProcessorRow.topology SeriesInfo.owner
        StreamChange.description StreamInfo.description StreamRow.description Decide.reason PartitionRow.reason
        """,
    ),
)
DEFAULTS = {name: value for value, names in _DEFAULTS for name in _names(names)}
# Text fields with few values, which have a type of their own.
WORDS = {"StreamInfo.state": "ShownStreamState", "StreamRow.state": "StreamState"}
_PLAIN = {"string": "str", "bytes": "bytes", "boolean": "bool", "int": "int", "long": "int"}
_PLAIN |= {"null": "None", "anabranch.Secret": "bytes", "anabranch.TxnId": "bytes"}


def schemas() -> Iterator[Schema]:
    """All schemas, by their names."""
    found = (entry for entry in files(__package__).iterdir() if entry.name.endswith(".avsc"))
    for entry in sorted(found, key=lambda entry: entry.name):
        yield json.loads(entry.read_text("utf-8"))


def annotation(avro: Any) -> str:
    """The Python type of an Avro type, as text."""
    if isinstance(avro, list):
        return " | ".join(map(annotation, sorted(avro, key=lambda branch: branch == "null")))
    if isinstance(avro, dict):
        if avro["type"] == "array":
            return f"tuple[{annotation(avro['items'])}, ...]"
        return f"Mapping[str, {annotation(avro['values'])}]"
    return _PLAIN.get(avro) or str(avro).removeprefix("anabranch.")


def fields_of(schema: Schema) -> dict[str, str]:
    """The fields of a record, in order, and the type of each."""
    return {
        each["name"]: WORDS.get(f"{schema['name']}.{each['name']}") or annotation(each["type"])
        for each in schema["fields"]
    }


def made(module: str) -> dict[str, Any]:
    """The classes of all records, and the types of enums, by name. ``module``: the module that has them."""
    found: dict[str, Any] = {"Mapping": Mapping}
    for schema in schemas():
        name = schema["name"]
        if schema["type"] == "enum":
            found[name] = Literal[tuple(schema["symbols"])]
        elif schema["type"] == "record":
            cls = found[name] = _tuple(schema) if name in TUPLES else _dataclass(schema)
            cls.__module__ = module
    return found


def _tuple(schema: Schema) -> Any:
    fields = fields_of(schema)
    places = (f"{schema['name']}.{each}" for each in fields)
    defaults = [DEFAULTS[place] for place in places if place in DEFAULTS]
    make: Any = namedtuple  # Any, because mypy can't see these names
    cls = make(schema["name"], fields, defaults=defaults)
    cls.__annotations__, cls.__doc__ = fields, schema["doc"]
    if "secret" in fields:
        cls.__repr__ = _shown
    return cls


def _shown(record: Any) -> str:
    fields = zip(record._fields, record, strict=True)
    text = ", ".join([f"{name}={value!r}" for name, value in fields if name not in _SECRETS])
    return f"{type(record).__name__}({text})"


def _dataclass(schema: Schema) -> Any:
    name = schema["name"]
    fields = [
        (
            each,
            kind,
            field(default=DEFAULTS.get(f"{name}.{each}", MISSING), repr=each not in _SECRETS),
        )
        for each, kind in fields_of(schema).items()
    ]
    told = {"__doc__": schema["doc"]}
    return make_dataclass(name, fields, namespace=told, frozen=True, slots=True)
