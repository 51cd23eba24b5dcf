"""The limits of what clients send and ask for, and the rules of events.

Limits are checked before anything is logged. `docs/operations.md` prints their table, and a test compares the two.
Limits that an operator may choose are in `anabranch.core.decisions.turn.Settings`; defaults, time-outs and pauses
of clients and tools in `anabranch.protocol.defaults`.

The rules of events come after the table: legal keys, values, headers, times and sizes, however an event is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from anabranch.errors import EventTooLarge, InvalidArgument


class Limit(NamedTuple):
    """The most that is allowed, in ``unit``. ``bounds``: what is limited, for people."""

    value: int
    unit: str
    bounds: str

    def check(self, found: int, what: str, most: int | None = None) -> None:
        """`InvalidArgument` if ``found`` exceeds the limit, or ``most``, which the topics' record size allows."""
        if found > self.value or (most is not None and found > most):
            lower = most is not None and most < self.value
            why = " (the topics of status and replies take small messages only: `--max-message-bytes`)"
            allowed, because = (most, why) if lower else (self.value, "")
            raise InvalidArgument(
                f"{what} has {found:,} {self.unit}; {allowed:,} are allowed{because}"
            )


# The numbers in rows that `add`, `min` and `max` change, and the most bytes of such a row.
LEAST_NUMBER = -(1 << 63)
MOST_NUMBER = (1 << 63) - 1
NUMBER_BYTES = 20
TURN_WAIT_MS = 60_000  # the longest wait for a turn at a row
ASK_KEPT_MS = (
    2_000  # a touch keeps its place in the line for this long after it was answered `Locked`
)
MAX_WAIT_MS = 600_000  # the longest wait for the journals to cover a commit's receipts
# Commits wait for the locks of a prepared transaction until this time after its prepare; then they are refused.
PREPARED_HOLD_MS = 10_000

COMMAND = Limit(
    1 << 20,
    "bytes",
    "a command, unpacked (`OneShot`, `Commit`, `Register`: the limit of their topic)",
)
LIST = Limit(20_000, "items", "a list in a command")
EVENTS = Limit(5_000, "events", "a `OneShot` or `PrepareEvents`")
AWAITED = Limit(10_000, "transactions", "a call of `Client.finished`")
BATCH = Limit(17 << 20, "bytes", "a record batch of commands, unpacked")
BATCH_RECORDS = Limit(100_000, "records", "a record batch of commands")
QUEUED = Limit(
    32 << 20,
    "bytes",
    "commands that wait in a leader, about; lanes have equal shares",
)
TEXT = Limit(1 << 10, "characters", "a reason or a refusal's text; the rest is cut off")
NAME = Limit(256, "characters", "the name of a transaction or a series")
DESCRIPTION = Limit(1 << 10, "characters", "the description of a stream")
SETTING = Limit(256, "characters", "a setting's name, or its value")
DIGITS = Limit(20, "digits", "a number in a setting")
CORRELATION_ID = Limit(64, "bytes", "a correlation id")
TOKENS = Limit(1_000, "tokens", "a heartbeat")
HELPERS = Limit(8, "lanes", "lanes, besides its owner's, that send a transaction's heartbeats")
UNREAD = Limit(
    10,
    "keepalives",
    "a transaction's silence (10 minutes at least) while a lane of its heartbeats can't be read",
)
RECEIPTS = Limit(3 << 20, "bytes", "the receipts of a transaction's writers, about")
WRITERS = Limit(20_000, "writers", "an open transaction")
UNCOMMITTED = Limit(
    32 << 30, "bytes", "an open transaction in journals; beyond it, no more streams and writers"
)
WRITERS_LISTED = Limit(500, "writers", "an answer; ask for more after its last writer")
LIST_ROWS = Limit(
    400,
    "rows",
    "what a list reads for an answer; the next one continues (`more`)",
)
WAITERS = Limit(1_000, "askers", "commands that wait for one commit")
REJECTED = Limit(1_000, "records", "rejected records of a journal that are listed")
REJECTED_MS = Limit(7 * 86_400_000, "ms", "… for this time")
REJECTED_KEY = 64  # bytes of the key of a listed record
HEADERS = Limit(1_000, "headers", "an event")
EVENT_TIME = Limit(253_402_300_799_999, "ms", "the time of an event, Unix (the end of 9999)")
SEGMENTS = Limit(10_000, "segments", "a stream, and what one scaling seals or opens")
STREAM_PARTITIONS = Limit(20_000, "partitions", "a stream")
MESSAGE = Limit(64 << 20, "bytes", "`max.message.bytes` of a stream")
RECORD = Limit(
    16 << 20,
    "bytes",
    "a row of the status log, an answer, a step of a history: `--max-message-bytes`, or less if brokers take less",
)
LEAST_RECORD = Limit(4 << 20, "bytes", "at least: `--max-message-bytes`, also as topics have it")
LEAST_MESSAGE = Limit(16 << 10, "bytes", "at least: `max.message.bytes` of any topic")
UNPACKED = Limit(
    64 << 20,
    "bytes",
    "a record batch in a journal, unpacked; also 16 times the stream's `max.message.bytes`, or its packed size",
)
JOURNAL_WORK = Limit(
    20_000, "units of work a second", "the journals of a stream, while others wait for the leader"
)
PASS_WORK = Limit(
    5_000, "units of work", "journals that are read before commands are decided, about"
)
BUSY_PASS_WORK = Limit(500, "units of work", "… within a second after a command")
BUSY_ROUND = Limit(
    1 << 20,
    "bytes",
    "merges of one round, about, within a second after a command; else `--chunk-bytes`",
)
RUNS = Limit(10_000, "runs", "a record batch in a journal; each change of its writer begins one")
PREPARED_EVENTS = Limit(
    64 << 10, "bytes", "the events of a `PrepareEvents`, about; more go by journals"
)
LOCKS = Limit(
    10_000, "locks", "a transaction's points and ranges; lock a range, or read with `lock=False`"
)
DERIVATIONS = Limit(16, "derivations", "a table")
ROW_CHANGES = Limit(
    64,
    "rows",
    "the rows that a transaction changes by `add`, `min` and `max`; write others by `put`",
)
LOCK_BYTES = Limit(
    256 << 10,
    "bytes",
    "the locks of one `LockReads` or `PrepareEvents`; more go in several `LockReads`",
)
REGISTERED = Limit(1_000_000, "locks", "registered locks of a control partition")
RANGES = Limit(
    1_000, "ranges", "registered ranges of a table; lanes that have some have equal shares"
)
TABLES = Limit(1_000, "tables", "the tables that a transaction reads")
TURN_MS = Limit(1_000, "ms", "a transaction's turn at a row at which others wait")
FOLLOWED = Limit(
    64, "transactions", "the transactions whose rows a transaction has read before they committed"
)
ROW_TURNS = Limit(
    256, "transactions", "transactions that wait for a turn at one row; a lane may have half"
)
TURNS = Limit(2_048, "transactions", "… at all rows of a control partition; a lane may have half")
LOCKED_POSITIONS = Limit(1_000, "keys", "keys whose segments a `Touch` locks")
SEGMENT_ASKS = Limit(
    1_000, "touches", "that wait for segments of exclusive streams; a lane may have half"
)
ASKS_OF_TXN = Limit(64, "touches", "… of a transaction")
TURN_TABLES = Limit(100, "tables", "tables that a `TakeTurn` names")
HELD_COMMANDS = Limit(
    10_000, "commands", "one-shots that wait for a transaction across control partitions"
)
HELD_BYTES = Limit(64 << 20, "bytes", "… these commands; those of the next row have as much")
HELD_PARTS = Limit(
    1_000,
    "commands",
    "parts of one-shots that wait for another control partition, and as many touches; half for a lane",
)
EARLY_ASKS = Limit(1_000, "messages", "… and questions of others that wait for such a command")
EARLY_BYTES = Limit(4 << 10, "bytes", "… such a question")
ROW_KEY = Limit(8 << 10, "bytes", "the key of a table's row")
PREPARED = Limit(10_000, "transactions", "prepared transactions of a control partition")
PARTICIPANTS = Limit(64, "control partitions", "participants of a transaction")
GROWTH = Limit(64, "control partitions", "what one `grow_cluster` adds; call it again for more")
SCOPES = Limit(10_000, "scopes", "a control partition")
PROCESSORS = Limit(1_000, "processors", "a control partition")
TASKS = Limit(1_024, "tasks", "a processor")
ALL_TASKS = Limit(32_768, "tasks", "all processors of a control partition")
INPUTS = Limit(64, "inputs", "a processor")
STORES = Limit(256, "stores", "a processor")
TOPOLOGY = Limit(8 << 10, "characters", "the topology of a processor")
LABEL = Limit(64, "characters", "the label of a writer")
HOLDER = Limit(256, "characters", "the name of a worker that takes tasks")
GRANTS = Limit(10_000, "grants", "a control partition, besides those of scopes' creators")
AUDIT = Limit(10_000, "rows", "the audit rows of one lane; the oldest are deleted")
LANES = Limit(1_000, "lanes", "a control partition")
ANSWER = Limit(4 << 20, "bytes", "an answer; a list continues in the next one (`more`)")
ROUND = Limit(
    16 << 20,
    "bytes",
    "commands, rows and answers of one round, about; the next has the rest",
)
ROUND_WORK = Limit(
    2_500, "units of work", "the commands of one round, about; the next has the rest"
)
QUARANTINED = Limit(1_000, "records", "the newest quarantined commands that are remembered")
TRIES = Limit(3, "tries", "a command that fails, or ends leaders, before it is quarantined")
UNSURE = Limit(
    10,
    "rounds",
    "a command alone in rounds of unknown outcome while others succeed, before it is quarantined",
)

# The most that a lane may have at once, unless its row has another quota. The lane `admin` has no quotas.
QUOTAS = {
    "open": Limit(1_000, "transactions", "open transactions of a lane"),
    "staged": Limit(4 << 30, "bytes", "a lane's open transactions in journals"),
    "work": Limit(
        20_000,
        "units a second",
        "a lane's commands; a unit is about 10 µs, a small command 10 units; more commands wait",
    ),
    "scopes": Limit(100, "scopes", "scopes that a lane made"),
    "streams": Limit(100, "streams", "streams that a lane made"),
    "partitions": Limit(2_000, "partitions", "partitions of streams that a lane made"),
    "locks": Limit(100_000, "locks", "registered locks of a lane's open transactions"),
    "prepared": Limit(1_000, "transactions", "prepared transactions of a lane"),
    "processors": Limit(100, "processors", "processors that a lane made"),
    "tasks": Limit(4_096, "tasks", "tasks of processors that a lane made"),
    "series": Limit(10_000, "series", "series of numbers that a lane owns"),
    "keepalive": Limit(86_400_000, "ms", "the keepalive of a lane's transactions"),
    "snapshot": Limit(
        86_400_000, "ms", "the age of a snapshot at which a lane's open transaction reads tables"
    ),
}

TABLE = tuple(found for found in list(globals().values()) if isinstance(found, Limit)) + tuple(
    QUOTAS.values()
)


def cut(text: str, most: int = TEXT.value) -> str:
    """A text for people, cut off at a limit of characters."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


# -- events ---------------------------------------------------------------------------------------------
#
# The client refuses an event that breaks a rule. Records that other programs wrote to journals are rejected by the
# same rules, and counted: `bad_header`, `bad_time`, `bad_key`, `too_large`.

Pairs: TypeAlias = "Sequence[tuple[str, bytes | None]]"

RESERVED = "ab."  # header names with this prefix are reserved for anabranch
NO_TIME = -1  # the time of a record that has no time; in commands: now
LATEST = EVENT_TIME.value
# The most bytes of a batch that is read from a stream: a merge may add some to a batch that it splits.
READ = UNPACKED.value + (64 << 10)
FRAMING = 68  # least bytes of a record batch with one record, without key, value and headers
AHEAD_MS = 3_600_000  # clocks may differ by this; Kafka's own default allows the same
_HEADER_OVERHEAD = 6  # bytes of a header besides name and value, about


class Room(NamedTuple):
    """A stream's own limits of an event."""

    stream: str = ""
    most: int | None = None  # bytes of key, value and headers; None if not known
    is_table: bool = False
    latest: int = LATEST  # the latest time that an event may have now, Unix milliseconds

    def check(self, key: object, size: int, timestamp: int | None) -> None:
        """Check an event against the stream's own limits. Raises: InvalidArgument, EventTooLarge."""
        if timestamp is not None:
            check_ahead(timestamp, self.latest, self.stream)
        if self.is_table:
            check_row_key(key)
        if self.most is not None:
            check_bytes(size, self.most, self.stream)


def check_event(key: object, value: object, timestamp: object) -> None:
    """Raise `InvalidArgument` for a key, value or time that no stream accepts."""
    if key is not None and not isinstance(key, bytes):
        raise InvalidArgument(f"a key is bytes or None, not {type(key).__name__}")
    if value is not None and not isinstance(value, bytes):
        raise InvalidArgument(f"a value is bytes or None, not {type(value).__name__}")
    if timestamp is not None:
        check_timestamp(timestamp)


def check_timestamp(timestamp: object) -> None:
    """Raise `InvalidArgument` unless a time is Unix milliseconds, from 1 to the end of 9999."""
    if isinstance(timestamp, bool) or not isinstance(timestamp, int) or not 0 < timestamp <= LATEST:
        raise InvalidArgument(bad_time(timestamp))


def bad_time(timestamp: object) -> str:
    """The error message for a time that is out of range."""
    return f"timestamp {timestamp!r}: Unix milliseconds above 0, up to {LATEST} (the end of 9999), or None for now"


def check_ahead(timestamp: int, latest: int, stream: str) -> None:
    """Raise `InvalidArgument` for a time that is out of range, or later than the stream's ``latest``."""
    if not NO_TIME <= timestamp <= LATEST:
        raise InvalidArgument(
            f"{stream}: an event's timestamp is out of range: {timestamp} ms; -1 (none) to {LATEST} are allowed"
        )
    if timestamp > latest:
        raise InvalidArgument(
            f"{stream}: an event's timestamp is {timestamp} ms, too far ahead; now {latest} is allowed: the "
            "stream's retention.ms, or an hour, ahead, as a later time would delay the deletion of old events"
        )


def copied_time(timestamp: int | None) -> int | None:
    """The time for a copy of an event; None (now) if no stream accepts the event's own time."""
    return timestamp if timestamp is not None and 0 < timestamp <= LATEST else None


def check_headers(headers: Any) -> Pairs | None:
    """Headers as (name, bytes or None) pairs; None without headers. `InvalidArgument`."""
    if not headers:
        return None
    pairs: Iterable[tuple[Any, Any]] = headers.items() if isinstance(headers, Mapping) else headers
    found: list[tuple[str, bytes | None]] = []
    try:
        for name, value in pairs:
            if type(name) is not str or not name.isascii() or name.startswith(RESERVED):
                check_header_name(name)
            if value is not None and not isinstance(value, bytes):
                raise InvalidArgument(f"header {name!r}: bytes or None, not {type(value).__name__}")
            found.append((name, value))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(
            f"headers are (name, bytes) pairs or a mapping, not {headers!r:.80}"
        ) from error
    HEADERS.check(len(found), "an event")
    return found


def check_header_name(name: object) -> None:
    """Raise `InvalidArgument` unless the name is a text that UTF-8 can encode, and is not reserved."""
    if not isinstance(name, str) or name.startswith(RESERVED):
        raise InvalidArgument(
            f"header name {name!r}: a string that does not begin with {RESERVED!r}"
        )
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            # Such a name would crash librdkafka's producer in Python, and the process with it.
            raise InvalidArgument(
                f"header name {name!r}: a lone surrogate, which UTF-8 can't encode"
            ) from None


def copied_name(name: str) -> str:
    """The name of a header in a copy of its record: reserved names, and names that are not UTF-8, are changed."""
    name = name.encode("utf-8", "replace").decode()
    return f"_{name}" if name.startswith(RESERVED) else name


def check_row_key(key: object) -> bytes:
    """The key of a table's row; `InvalidArgument` if it is illegal."""
    if not isinstance(key, bytes) or not 1 <= len(key) <= ROW_KEY.value:
        what = f"{len(key):,} bytes" if isinstance(key, bytes) else f"{key!r:.100}"
        raise InvalidArgument(f"a row's key is bytes, 1 to {ROW_KEY.value:,} of them, not {what}")
    return key


def headers_size(headers: Pairs | None) -> int:
    """The bytes of headers in a record, about."""
    if not headers:
        return 0
    return sum(len(name) + len(value or b"") + _HEADER_OVERHEAD for name, value in headers)


def check_bytes(size: int, most: int, stream: str, topic: str = "") -> None:
    """Raise `EventTooLarge` if an event has more bytes than the stream accepts. ``topic``: what refuses it."""
    if size > most:
        error = EventTooLarge(
            f"an event of {size:,} bytes; {topic or stream} takes up to {most:,} of key, value and headers "
            "(topic setting max.message.bytes)"
        )
        error.stream, error.limit = stream, most
        raise error
