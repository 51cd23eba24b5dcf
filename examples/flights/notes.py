"""The kinds of the run's events, and the notes of its readers.

Rows of the tables are JSON objects. Events of small transactions and of the aborted one begin with a mark. A header
names the writer of an event.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import IntEnum
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from examples.flights.source import TABLES, Table

BY_HEADER = "by"
SMALL_MARK = b"small "
DOOMED_MARK = b"doomed "
RAW = b""  # the program that uses only the protocol writes no such header
END = -1  # the number of the last small transaction: nothing follows
NO_KEY = 0

_FORM = struct.Struct("<dBBiqqqQQqiiid12s")
_FIELDS = [
    ("at", "<f8"),  # when the reader saw it, by the monotonic clock, which all processes share
    ("stream", "u1"),  # index in `TABLES`
    ("kind", "u1"),
    ("partition", "<i4"),
    ("offset", "<i8"),
    ("segment", "<i8"),  # of whole transactions: which one, counted from 0
    ("committed", "<i8"),  # the commit timestamp, if the reader has it
    ("key", "<u8"),  # `digest_of`
    ("value", "<u8"),
    ("stamp", "<i8"),  # the event's own time
    ("number", "<i4"),  # of a `Small`, from here on
    ("within", "<i4"),
    ("of", "<i4"),
    ("sent", "<f8"),
    ("by", "S12"),
]
NOTE = np.dtype(_FIELDS)
Notes = Any  # an array of `NOTE`: NumPy's types know no fields, and cost the type checker seconds


class Kind(IntEnum):
    """The origin of an event."""

    BIG = 0
    SMALL = 1
    DOOMED = 2
    OTHER = 3


@dataclass(frozen=True, slots=True)
class Small:
    """An event of a small transaction.

    ``number``: of the transaction. ``within``: of the event among the ``of`` events of the transaction in its
    stream. ``sent``: when the transaction began, by the monotonic clock.
    """

    number: int
    within: int
    of: int
    sent: float

    def to_bytes(self) -> bytes:
        return SMALL_MARK + json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, value: bytes) -> Small:
        """The small event in an event's value. Raises: ValueError (it is another event)."""
        if not value.startswith(SMALL_MARK):
            raise ValueError("not an event of a small transaction")
        try:
            return cls(**json.loads(value[len(SMALL_MARK) :]))
        except TypeError as error:
            raise ValueError(str(error)) from error


_NO_SMALL = Small(0, 0, 0, 0.0)


def kind_of(value: bytes | None) -> Kind:
    if value is None:
        return Kind.OTHER
    if value.startswith(b"{"):
        return Kind.BIG
    if value.startswith(SMALL_MARK):
        return Kind.SMALL
    return Kind.DOOMED if value.startswith(DOOMED_MARK) else Kind.OTHER


def stream_of(scope: str, table: Table) -> str:
    return f"{scope}/{table.name}"


def digest_of(data: bytes | None) -> int:
    """A key or value in 64 bits; None: `NO_KEY`."""
    if data is None:
        return NO_KEY
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


class Notebook:
    """A reader's file, with a note of each event in the order of arrival."""

    def __init__(self, path: Path, scope: str) -> None:
        self._file = path.open("wb")
        self._streams = {stream_of(scope, table): at for at, table in enumerate(TABLES)}

    def add(
        self,
        stream: str,
        key: bytes | None,
        value: bytes | None,
        headers: Iterable[tuple[str, bytes | None]] | None,
        stamp: int,
        *,
        partition: int,
        offset: int,
        segment: int = 0,
        committed: int = 0,
    ) -> Small | None:
        """Note an event. Returns it as a `Small`, if it is one."""
        kind = kind_of(value)
        small = None
        if kind is Kind.SMALL and value is not None:
            small = Small.from_bytes(value)
        by = next((data or b"" for name, data in headers or () if name == BY_HEADER), RAW)
        told = small or _NO_SMALL
        self._file.write(
            _FORM.pack(
                *(time.monotonic(), self._streams[stream], kind, partition, offset, segment),
                *(committed, digest_of(key), digest_of(value), stamp),
                *(told.number, told.within, told.of, told.sent, by),
            )
        )
        return small

    def close(self) -> None:
        """Write the rest, and close the file."""
        self._file.close()


def read_notes(path: Path) -> Notes:
    """A reader's notes, without the events of the last transaction."""
    notes: Notes = np.fromfile(path, NOTE)
    lasting: Notes = notes[(notes["kind"] != Kind.SMALL) | (notes["number"] != END)]
    return lasting


def of_kind(notes: Notes, *kinds: Kind) -> Notes:
    return notes[np.isin(notes["kind"], kinds)]
