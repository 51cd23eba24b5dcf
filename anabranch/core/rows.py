"""Keys of the status log and of the status table, which is its copy, and the row that each kind of key has.

A status key is ``txn_id (16) | entry type (1) | identifier``; rows that belong to no transaction have sixteen zero
bytes as the id. In the status table every status key has the prefix ``s``. Rows with other prefixes derive from the
logs and can be rebuilt.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from enum import IntEnum
from typing import Any, Protocol

from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.protocol.ids import NO_TXN, TXN_ID_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode


class Entry(IntEnum):
    """The entry type, byte 16 of a status key. Types 16 to 31 are of transactions."""

    TERM = 1
    ROUND = 2
    SCOPE = 3
    STREAM = 4
    NAME = 5
    EPOCH = 6
    LOW_WATER = 7
    PLAIN = 8
    SERIES = 9
    FORGOTTEN = 10
    RETIRED = 11
    SUSPECT = 12
    QUARANTINED = 13
    LANE = 14
    LANE_POSITION = 15
    TXN = 16
    PARTICIPANT = 17
    WRITER = 18
    PENDING_COMMIT = 19
    STAGED_MERGE = 20
    MOVED = 21
    YIELDED = 22
    PREPARED = 23
    LABEL = 24
    READ_LOCK = 25
    READS = 26
    VOTES = 27
    PARTITION = 28
    COORDINATOR = 29
    GRANT = 32
    AUDIT = 33
    PROCESSOR = 34
    TASK = 35
    TABLE = 36
    BASE = 38
    CHANGED = 39
    REJECTED = 40
    AUDIT_DUE = 44
    FEATURE = 46


_ROWS: dict[Entry, type | tuple[type, ...]] = {
    Entry.TERM: r.TermRow,
    Entry.ROUND: r.RoundRow,
    Entry.SCOPE: r.ScopeRow,
    Entry.STREAM: r.StreamRow,
    Entry.NAME: r.NameRow,
    Entry.EPOCH: r.EpochRow,
    Entry.LOW_WATER: r.LowWaterRow,
    Entry.PLAIN: r.PlainRow,
    Entry.SERIES: r.SeriesRow,
    Entry.FORGOTTEN: r.ForgottenRow,
    Entry.RETIRED: r.RetiredRow,
    Entry.SUSPECT: r.SuspectRow,
    Entry.QUARANTINED: r.QuarantineRow,
    Entry.LANE: r.LaneRow,
    Entry.LANE_POSITION: r.LanePositionRow,
    Entry.TXN: r.TxnRow,
    Entry.PARTICIPANT: r.ParticipantRow,
    Entry.WRITER: r.WriterRow,
    Entry.PENDING_COMMIT: (r.PendingCommitRow, r.FormerPendingCommitRow),
    Entry.STAGED_MERGE: r.StagedMergeRow,
    Entry.MOVED: r.MovedRow,
    Entry.YIELDED: r.YieldedRow,
    Entry.PREPARED: r.PreparedRow,
    Entry.LABEL: r.LabelRow,
    Entry.READ_LOCK: (r.ReadLockRow, r.ValidatedRow),
    Entry.READS: r.ReadsRow,
    Entry.VOTES: r.VotesRow,
    Entry.PARTITION: r.PartitionRow,
    Entry.COORDINATOR: r.CoordinatorRow,
    Entry.FEATURE: r.FeatureRow,
    Entry.GRANT: r.GrantRow,
    Entry.AUDIT: r.AuditRow,
    Entry.PROCESSOR: r.ProcessorRow,
    Entry.TASK: r.TaskRow,
    Entry.TABLE: (r.TableRow, r.FormerTableRow),
    Entry.BASE: r.BaseRow,
    Entry.CHANGED: r.ChangedRow,
    Entry.AUDIT_DUE: r.AuditRow,
    Entry.REJECTED: r.RejectedRow,
}
_LOCK = struct.Struct(">qq")  # writer, sequence
# The fields of a `PendingCommitRow` that older builds wrote in the same form.
_OF_PENDING = ("decided", "writers", "name", "number", "deadline_ms", "consumed", "prepare")
_MANY = 1000  # rows that are skipped one by one before a new scan is started after them
_ENTRIES = {int(entry): entry for entry in Entry}  # faster than `Entry(…)`
FEATURE_KEY = NO_TXN + bytes((Entry.FEATURE,))
TERM_KEY = NO_TXN + bytes((Entry.TERM,))
ROUND_KEY = NO_TXN + bytes((Entry.ROUND,))
SUSPECT_KEY = NO_TXN + bytes((Entry.SUSPECT,))
AUDIT_KEY = NO_TXN + bytes((Entry.AUDIT,))  # the prefix of all audit keys

HISTORY = -1  # in place of the partition in a low water's key: the stream's history

# Table prefixes.
STATUS = b"s"  # + status key -> row
OPEN = b"o"  # + txn id -> b"": transactions that are not finished
FINISHED = b"f"  # + finished ms (8) + txn id -> b"": transactions in the order of their end
INDEX = b"i"  # runs of journal records (journal_runs)
DIGEST = b"d"  # keys that runs of tables write (journal_runs, table_writes)
# Rejected journal records of open transactions (journal_runs) -> count (8). Under the id of zeros: all that
# `core.rejections` has yet to add to the rows of their streams, by batch (see there).
REJECTED = b"x"
META = b"m"  # + name: about the table itself
SERIES_OF = META + b"series "  # + lane -> the number of series that it owns (8)
OWNED = META + b"owned "  # + lane, 0, rest of a series' key -> b"": the series that the lane owns
OUTCOMES = META + b"outcomes"  # -> how many transactions are finished (8)
POSITION = b"p"  # + name -> offset (8): where reading resumes


def _numbered(name: str, number: int) -> bytes:
    return name.encode() + b"/" + number.to_bytes(4, "big", signed=True)


def numbered(identifier: bytes) -> tuple[str, int]:
    """(name, number) of an identifier that consists of a name and a number."""
    return identifier[:-5].decode(), int.from_bytes(identifier[-4:], "big", signed=True)


def numbered_at(identifier: bytes) -> tuple[str, int, int]:
    """(stream, partition, offset) of a moved row's identifier."""
    return *numbered(identifier[:-8]), int.from_bytes(identifier[-8:], "big")


def _by_name(entry: Entry) -> Callable[[str], bytes]:
    """Keys of rows that a name identifies."""
    prefix = NO_TXN + bytes((entry,))
    return lambda name: prefix + name.encode()


def _by_number(entry: Entry) -> Callable[[str, int], bytes]:
    """Keys of rows that a name and a number identify: a stream's partition or epoch, a processor's task."""
    prefix = NO_TXN + bytes((entry,))
    return lambda name, number: prefix + _numbered(name, number)


def _in_scope(entry: Entry) -> Callable[[str, str], bytes]:
    """Keys of rows that a scope and a name in it identify."""
    prefix = NO_TXN + bytes((entry,))
    return lambda scope, name: prefix + scope.encode() + b"/" + name.encode()


def _of_txn(entry: Entry) -> Callable[[bytes], bytes]:
    """Keys of rows of which a transaction has one."""
    end = bytes((entry,))
    return lambda txn_id: txn_id + end


def _by_writer(entry: Entry) -> Callable[[bytes, int], bytes]:
    """Keys of rows of which each writer of a transaction has one."""
    kind = bytes((entry,))
    return lambda txn_id, writer: txn_id + kind + writer.to_bytes(8, "big", signed=True)


scope_key = _by_name(Entry.SCOPE)
stream_key = _by_name(Entry.STREAM)
table_key = _by_name(Entry.TABLE)
base_key = _by_name(Entry.BASE)
rejected_row_key = _by_name(Entry.REJECTED)
forgotten_key = _by_name(Entry.FORGOTTEN)
lane_key = _by_name(Entry.LANE)
lane_position_key = _by_name(Entry.LANE_POSITION)
audit_due_key = _by_name(Entry.AUDIT_DUE)
processor_key = _by_name(Entry.PROCESSOR)
epoch_key = _by_number(Entry.EPOCH)
low_water_key = _by_number(Entry.LOW_WATER)
plain_key = _by_number(Entry.PLAIN)
retired_key = _by_number(Entry.RETIRED)
task_key = _by_number(Entry.TASK)
name_key = _in_scope(Entry.NAME)
series_key = _in_scope(Entry.SERIES)
txn_key = _of_txn(Entry.TXN)
pending_key = _of_txn(Entry.PENDING_COMMIT)
reads_key = _of_txn(Entry.READS)
yielded_key = _of_txn(Entry.YIELDED)
prepared_key = _of_txn(Entry.PREPARED)
votes_key = _of_txn(Entry.VOTES)
coordinator_key = _of_txn(Entry.COORDINATOR)
writer_key = _by_writer(Entry.WRITER)
label_key = _by_writer(Entry.LABEL)


def changed_key(of: bytes) -> bytes:
    """The key of the `ChangedRow` of a thing. ``of``: the key of the thing's own row."""
    return NO_TXN + bytes((Entry.CHANGED,)) + of[TXN_ID_SIZE:]


def segments_key(stream: str) -> bytes:
    """The key by which `changed_key` names a stream's segments: that of its first epoch."""
    return epoch_key(stream, 0)


def quarantine_key(lane: str, offset: int) -> bytes:
    return NO_TXN + bytes((Entry.QUARANTINED,)) + offset.to_bytes(8, "big") + lane.encode()


def quarantine_at(identifier: bytes) -> tuple[str, int]:
    """(lane, offset) of the identifier of a quarantined command's row."""
    return identifier[8:].decode(), int.from_bytes(identifier[:8], "big")


def grant_key(lane: str, pattern: str) -> bytes:
    return NO_TXN + bytes((Entry.GRANT,)) + lane.encode() + b" " + pattern.encode()


def audit_key(at_ms: int, number: int) -> bytes:
    """The key of an audit row. ``number``: distinguishes rows of the same millisecond."""
    return AUDIT_KEY + at_ms.to_bytes(8, "big") + number.to_bytes(4, "big")


def staged_merge_key(txn_id: bytes, stream: str, number: int) -> bytes:
    return txn_id + bytes((Entry.STAGED_MERGE,)) + _numbered(stream, number)


def moved_key(txn_id: bytes, stream: str, partition: int, at: int) -> bytes:
    """The key of a moved row. ``at``: the present offset of its first run."""
    return txn_id + bytes((Entry.MOVED,)) + _numbered(stream, partition) + at.to_bytes(8, "big")


def owned_key(lane: str, series: bytes) -> bytes:
    """The table key that notes a lane's ownership of a series. ``series``: the key of the series' row."""
    return OWNED + lane.encode() + b"\0" + series[TXN_ID_SIZE + 1 :]


def participant_key(txn_id: bytes, stream: str) -> bytes:
    return txn_id + bytes((Entry.PARTICIPANT,)) + stream.encode()


def partition_key(txn_id: bytes, partition: int) -> bytes:
    """The key of a participant. ``partition``: its control partition."""
    return txn_id + bytes((Entry.PARTITION,)) + partition.to_bytes(2, "big")


def partition_of(identifier: bytes) -> int:
    """The control partition of the identifier of a `partition_key`."""
    if len(identifier) != 2:
        raise MalformedRecord(f"not the key of a participant: {identifier.hex()}")
    return int.from_bytes(identifier, "big")


def read_lock_key(txn_id: bytes, writer: int, sequence: int) -> bytes:
    """The key of a set of locks; with sequence 0, of the writer's `ValidatedRow`."""
    return txn_id + bytes((Entry.READ_LOCK,)) + _LOCK.pack(writer, sequence)


def read_lock_of(identifier: bytes) -> tuple[int, int]:
    """(writer, sequence) of the identifier of a `read_lock_key`."""
    try:
        writer, sequence = _LOCK.unpack(identifier)
    except struct.error as error:
        raise MalformedRecord(f"not the key of locks: {identifier.hex()}") from error
    return int(writer), int(sequence)


def split_key(key: bytes) -> tuple[bytes, Entry, bytes]:
    """(transaction id, entry type, identifier) of a status key."""
    try:
        return key[:TXN_ID_SIZE], _ENTRIES[key[TXN_ID_SIZE]], key[TXN_ID_SIZE + 1 :]
    except (IndexError, KeyError) as error:
        raise MalformedRecord(f"not a status key: {key.hex()}") from error


def finished_key(finished_ms: int, txn_id: bytes) -> bytes:
    """Derived table key that orders finished transactions by their end."""
    return FINISHED + finished_ms.to_bytes(8, "big") + txn_id


def rows_of_views(
    scan: Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]],
) -> Iterator[tuple[bytes, bytes]]:
    """The rows of a status table that belong to no transaction, without kinds that no view of the state has."""
    prefix = STATUS + NO_TXN
    rows, passed = scan(prefix, b""), 0
    while (found := next(rows, None)) is not None:
        # A row that no controller wrote may have an unknown entry type: the caller refuses it by its key.
        entry = int.from_bytes(found[0][len(prefix) : len(prefix) + 1], "big")
        if entry not in (Entry.NAME, Entry.SERIES, Entry.CHANGED):
            yield found
            passed = 0
        elif (passed := passed + 1) == _MANY:
            rows, passed = scan(prefix, prefix + bytes((entry + 1,))), 0


def read_row(key: bytes, value: bytes) -> Any:
    """The row of a status record. `MalformedRecord`: no controller wrote it. `UnsupportedVersion`: a newer
    controller wrote it.

    Forms of rows that former versions wrote are converted.
    """
    try:
        row, (_, entry, identifier) = decode(value), split_key(key)
    except (MalformedRecord, UnsupportedVersion) as error:
        raise foreign(key, error, type(error)) from error
    if not isinstance(row, _ROWS[entry]):
        raise foreign(key, f"a {type(row).__name__} where a row of {entry.name} belongs")
    if identifier and entry in (Entry.TERM, Entry.ROUND, Entry.SUSPECT, Entry.FEATURE):
        raise foreign(key, "bytes too many in the key")
    if isinstance(row, r.FormerTableRow):
        return r.TableRow(row.last)  # the `ValidatedRow`s have the rest
    if isinstance(row, r.FormerPendingCommitRow):
        askers = zip(
            row.correlation_ids, row.reply_partitions, row.commands, row.lanes, strict=True
        )
        return r.PendingCommitRow(
            tuple([r.Asker(*each, held=each[0] in row.held) for each in askers]),
            **{name: getattr(row, name) for name in _OF_PENDING},
        )
    return row


def foreign(
    key: bytes, what: object, kind: type[MalformedRecord | UnsupportedVersion] = MalformedRecord
) -> MalformedRecord | UnsupportedVersion:
    """The error for a row that no controller, or a newer controller, wrote. ``what``: what is wrong with it."""
    who = "no" if kind is MalformedRecord else "a newer, or no,"
    return kind(
        f"the status log has a row that {who} controller wrote, of key {key.hex()}: {what}. Let only controllers "
        "write to that topic; a record of this key with a null value takes the row away"
    )


class Rows(Protocol):
    """The methods of a table that the core calls; `anabranch.ports.Table` describes them."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, prefix: bytes, first: bytes = b"") -> Iterator[tuple[bytes, bytes]]: ...

    def scan_back(self, before: bytes) -> Iterator[tuple[bytes, bytes]]: ...
