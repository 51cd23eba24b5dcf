"""How the run's events are told apart, by readers that know nothing of anabranch.

Rows of the tables are JSON objects. Events of small transactions and of the aborted one begin with
a mark of their own; and who wrote an event stands in a header.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from examples.flights.source import Table

BY_HEADER = "by"
RAW = "raw program"
SMALL_MARK = b"small "
DOOMED_MARK = b"doomed "


class Kind(Enum):
    """What an event belongs to."""

    BIG = "big"
    SMALL = "small"
    DOOMED = "doomed"
    OTHER = "other"


@dataclass(frozen=True, slots=True)
class Small:
    """An event of a small transaction.

    ``number`` is the transaction's, ``index`` the event's in its stream, ``of`` how many it has
    there; ``sent`` when its commit was called, by the monotonic clock.
    """

    number: int
    index: int
    of: int
    sent: float

    def to_bytes(self) -> bytes:
        """The event's value."""
        fields = {"number": self.number, "index": self.index, "of": self.of, "sent": self.sent}
        return SMALL_MARK + json.dumps(fields).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Small:
        """The small event of an event's value. ValueError if it is none."""
        if not value.startswith(SMALL_MARK):
            raise ValueError("not an event of a small transaction")
        try:
            return cls(**json.loads(value[len(SMALL_MARK) :]))
        except TypeError as error:
            raise ValueError(str(error)) from error


def kind_of(value: bytes | None) -> Kind:
    """What an event belongs to, by its value."""
    if value is None:
        return Kind.OTHER
    if value.startswith(b"{"):
        return Kind.BIG
    if value.startswith(SMALL_MARK):
        return Kind.SMALL
    return Kind.DOOMED if value.startswith(DOOMED_MARK) else Kind.OTHER


def writer_of(headers: Sequence[tuple[str, bytes | None]] | None) -> str:
    """Who wrote an event, by its header; the raw program writes none."""
    for name, value in headers or ():
        if name == BY_HEADER:
            return (value or b"").decode("utf-8", "replace")
    return RAW


def stream_of(scope: str, table: Table) -> str:
    """The stream of a table."""
    return f"{scope}/{table.name}"
