"""All limits of what others send and ask for, in one table: checked before anything is logged.

`docs/operations.md` prints it, and a test holds the two together. Limits that an operator may choose are in
`anabranch.core.decisions.turn.Settings`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from anabranch.errors import InvalidArgument
from anabranch.schemas import records as r


class Limit(NamedTuple):
    """The most that is allowed of something, counted in ``unit``; an operator's choice lies within ``bounds``."""

    value: int
    unit: str
    bounds: str

    def check(self, found: int, what: str) -> None:
        """`InvalidArgument` if ``found`` exceeds the limit."""
        if found > self.value:
            raise InvalidArgument(f"{what} has {found:,} {self.unit}; {self.value:,} are allowed")


MAX_WAIT_MS = 600_000  # for a commit's receipts to be covered

COMMAND = Limit(
    1 << 20,
    "bytes",
    "a command, unpacked; `OneShot`, `Commit`, `Register`: the limit of their topic",
)
BATCH = Limit(32 << 20, "bytes", "a record batch of commands, unpacked")
BATCH_RECORDS = Limit(100_000, "records", "a record batch of commands")
QUEUED = Limit(
    32 << 20,
    "bytes",
    "commands of all lanes that wait in a leader, about; and each lane's share of that",
)
TEXT = Limit(1 << 10, "characters", "a reason, or a refusal's text: the rest is cut off")
NAME = Limit(256, "characters", "the name of a transaction or a series")
SETTING = Limit(256, "characters", "a setting's name, or its value")
DIGITS = Limit(20, "digits", "a number in a setting")
CORRELATION_ID = Limit(64, "bytes", "a correlation id")
TOKENS = Limit(1_000, "tokens", "a heartbeat")
HELPERS = Limit(
    8, "lanes", "lanes, not its owner's, that a leader knows to send a transaction's heartbeats"
)
UNREAD = Limit(
    10,
    "keepalives",
    "a transaction's silence (10 minutes at least) while a lane of its heartbeats can't be read",
)
EXTENTS = Limit(20_000, "extents", "a receipt")
RECEIPTS = Limit(3 << 20, "bytes", "the receipts of a transaction's writers, about")
WAITERS = Limit(1_000, "askers", "askers that wait for one commit")
HEADERS = Limit(1_000, "headers", "an event of a one-shot")
EVENT_TIME = Limit(
    253_402_300_799_999, "ms", "the time of an event of a one-shot, Unix (the end of 9999)"
)
SEGMENTS = Limit(10_000, "segments", "a stream, and what one scaling seals or opens")
STREAM_PARTITIONS = Limit(20_000, "partitions", "a stream")
MESSAGE = Limit(64 << 20, "bytes", "`max.message.bytes` of a stream")
LEAST_MESSAGE = Limit(16 << 10, "bytes", "`max.message.bytes` of any topic: this or more")
PREPARED_EVENTS = Limit(
    64 << 10, "bytes", "the events of a `PrepareEvents`, about; more of them go by journals"
)
LOCKS = Limit(
    10_000, "locks", "a transaction's, points and ranges; lock a range, or read with `lock=False`"
)
LOCK_BYTES = Limit(256 << 10, "bytes", "the locks of one `LockReads`; more of them go in several")
REGISTERED = Limit(1_000_000, "locks", "registered locks of a control partition")
RANGES = Limit(1_000, "ranges", "registered ranges of a table")
ROW_KEY = Limit(8 << 10, "bytes", "the key of a table's row")
PREPARED = Limit(10_000, "transactions", "PREPARED ones of a control partition")
SCOPES = Limit(10_000, "scopes", "a control partition")
PROCESSORS = Limit(1_000, "processors", "a control partition")
TASKS = Limit(1_024, "tasks", "a processor")
ALL_TASKS = Limit(32_768, "tasks", "all processors of a control partition")
INPUTS = Limit(64, "inputs", "a processor")
STORES = Limit(256, "stores", "a processor")
LABEL = Limit(64, "characters", "the label of a writer")
HOLDER = Limit(256, "characters", "the name of who takes tasks")
GRANTS = Limit(10_000, "grants", "a control partition; those of scopes' creators come on top")
LANES = Limit(1_000, "lanes", "a control partition")
ANSWER = Limit(4 << 20, "bytes", "an answer; lists go on in the next one (`more`)")
ROUND = Limit(
    16 << 20,
    "bytes",
    "commands, rows and answers of one commit round, about; the rest comes in the next",
)
SET_ASIDE = Limit(1_000, "records", "commands that are remembered as set aside, the newest ones")
TRIES = Limit(
    3, "tries", "a command that can't be decided, or that leaders die of; then it is set aside"
)
UNSURE = Limit(
    10,
    "rounds",
    "a command alone in rounds with an unknown outcome, while others succeed; then the same",
)

# The most that a lane may have at once that an operator made, unless its row says otherwise.
QUOTAS = {
    "open": Limit(1_000, "transactions", "open transactions of a lane"),
    "staged": Limit(4 << 30, "bytes", "a lane's open transactions in journals"),
    "commands": Limit(2_000, "commands a second", "a lane's commands; more of them wait"),
    "scopes": Limit(100, "scopes", "scopes that a lane made"),
    "streams": Limit(100, "streams", "streams that a lane made"),
    "partitions": Limit(2_000, "partitions", "partitions of streams that a lane made"),
    "locks": Limit(100_000, "locks", "registered locks of a lane's open transactions"),
    "keepalive": Limit(86_400_000, "ms", "the keepalive of a lane's transactions"),
}

TABLE = tuple(found for found in list(globals().values()) if isinstance(found, Limit)) + tuple(
    QUOTAS.values()
)

# Commands that carry events or receipts: as many bytes, unpacked, as their topic's max.message.bytes.
BIG = (r.OneShot, r.PrepareEvents, r.Commit, r.Register)


def cut(text: str, most: int = TEXT.value) -> str:
    """A text for people, within its limit."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def size_of(receipts: Iterable[r.Receipt]) -> int:
    """The bytes of receipts, about, and never too few."""
    return sum(48 + sum(len(e.stream) + 40 for e in receipt.extents) for receipt in receipts)


def weight(answer: object) -> int:
    """The bytes of an answer, about."""
    match answer:
        case r.Outcome():
            size = 256 + 4 * (len(answer.name or "") + len(answer.reason))
            if answer.writers:
                size += size_of(answer.writers)
            return size + sum(map(len, answer.streams))
        case r.Alive():
            return sum(map(weight, answer.not_open))
        case r.TransactionList():
            return sum(map(weight, answer.transactions))
        case r.OpenList():
            return sum(map(weight, answer.transactions))
        case r.OpenInfo():
            writers = sum(128 + 4 * len(one.label) for one in answer.writers)
            return 96 + weight(answer.outcome) + writers + 160 * len(answer.carries)
        case r.SeriesList():
            return sum(256 + 4 * len(one.series) + 8 * len(one.runs) for one in answer.series)
        case r.AuditList():
            return sum(256 + 4 * len(row.what) for row in answer.entries)
        case r.GrantList():
            return 512 * len(answer.grants)
        case r.ProcessorList():
            return sum(map(weight, answer.processors))
        case r.ProcessorInfo():
            tasks = sum(160 + len(task.holder) + 40 * len(task.positions) for task in answer.tasks)
            return 256 + 160 * len(answer.inputs) + 4 * sum(map(len, answer.stores)) + tasks
        case r.ReadsLocked():
            spans = [span for each in answer.locks for span in each.ranges]
            points = sum(len(each.points) for each in answer.locks)
            bounds = sum(8 + len(span.low) + len(span.high or b"") for span in spans)
            return 256 + 64 * len(answer.tables) + 10 * points + bounds
        case r.StreamList():
            return sum(map(weight, answer.streams))
        case r.StreamInfo() | r.Touched():
            maps = (answer.journal, answer.low_water) if isinstance(answer, r.StreamInfo) else ()
            return 1024 + 32 * len(answer.segments) + 24 * sum(map(len, maps))
        case _:
            return 1024
