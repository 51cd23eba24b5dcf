"""The costs of commands and data for a leader, in units of work.

One unit is about 10 µs of the leader's thread on the machine of ``docs/performance.md``; a small command costs
about ten units. Lanes and journals take turns by what they were charged, and a lane's quota ``work`` is in units a
second. The core counts units instead of reading a clock, so that the same commands always cost the same.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import Any

from anabranch.core.command_events import CommandEvents
from anabranch.protocol.schemas.records import Event, Receipt

COMMAND = 6  # a command, taken out of its record and judged
ROW = 2  # a row that is written, and later deleted
ANSWER = 2  # an answer, without its bytes
LOOK = 1  # a row that a decision reads, or that later commands will have to read
LISTED = 2  # a transaction that a list reads: to decode its row, check rights, and show it
JOURNAL_OP = 2  # a record of a transaction's life in a stream's journal
KEPT = 90  # an outcome that a `Resolve` makes: kept for days, although no event was written
KIB_BITS = 10  # bytes of commands, rows and answers, shifted by this: a unit for each KiB
ITEMS_A_UNIT = 4  # things that a decision iterates over; events and plain values of a command
# Other parts of a command, such as receipts and their extents, count as this many items each.
RECORD_ITEMS = 6
FEW_BYTES = 256  # parts of a command of no more bytes are not counted
BATCH = 1  # a batch of a journal
RUN = 2  # consecutive records of one writer in a journal, in the index and in a merge
RECORD_BITS = 7  # records of a journal, shifted by this: 128 of them a unit
UNPACKED_BITS = 13  # bytes that a journal's batch unpacks to, shifted by this: 8 KiB a unit
COPIED_BITS = 11  # bytes of a journal that merges copy, fetched and appended: 2 KiB a unit
SMALL = COMMAND + ROW + ANSWER  # most commands
_PLAIN = frozenset((int, bool, str, bytes))


def of_items(count: int) -> int:
    """The units of ``count`` parts of a command."""
    return -(-count // ITEMS_A_UNIT)


def of_parts(record: object) -> int:
    """The units of all that is nested in a command: events, plain values, and records such as receipts."""
    return of_items(_items_of(record))


def _items_of(value: Any) -> int:
    """The number of items in a value, nested ones included."""
    if isinstance(value, dict):
        return len(value)
    if type(value) is CommandEvents:  # `isinstance` of an abstract class would take longer
        return value.items
    own, parts = 0, value
    if type(value) is tuple:  # of one kind
        if value and type(value[0]) is Event:
            return len(value) + sum([len(event.headers) for event in value if event.headers])
        if value and type(value[0]) in _PLAIN:
            return len(value)
    elif not isinstance(value, tuple):  # without names
        own, parts = RECORD_ITEMS, [getattr(value, name) for name in _nested(value.__class__)]
    return own + sum([_items_of(part) for part in parts if part and type(part) not in _PLAIN])


@cache
def _nested(cls: Any) -> tuple[str, ...]:
    """The fields of a record that may be more than a plain value."""
    plain = {"None", *(one.__name__ for one in _PLAIN)}
    return tuple(x.name for x in fields(cls) if not plain.issuperset(str(x.type).split(" | ")))


def of_receipts(receipts: Collection[Receipt]) -> int:
    """The units for decoding or checking receipts."""
    return LOOK * len(receipts) + of_items(sum([len(one.extents) for one in receipts]))


def of_batch(runs: int, records: int, unpacked: int) -> int:
    """The units of a journal's batch: to unpack it, and to index its runs."""
    return BATCH + RUN * runs + (records >> RECORD_BITS) + (unpacked >> UNPACKED_BITS)


def of_merge(copied: int) -> int:
    """The units of a merge that copies ``copied`` bytes into new batches."""
    return copied >> COPIED_BITS


def forecast(size: int, commands: int = 1) -> int:
    """The assumed units of ``commands`` small commands of ``size`` bytes in all, until they are decided."""
    return commands * SMALL + (size >> KIB_BITS)
