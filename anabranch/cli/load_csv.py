"""CSV files as Arrow batches of events, read by the `csv` module, so each error names its line."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import lzma
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from json.encoder import encode_basestring
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from anabranch.errors import InvalidArgument
from anabranch.protocol.limits import LATEST

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 1 << 20  # that are read at once
MAX_RECORD_BYTES = 64 << 20
# Errors on reading packed files that are damaged.
_NOT_PACKED = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, zipfile.BadZipFile, lzma.LZMAError, zlib.error,
    struct.error,
)  # fmt: skip
_UNCLOSED = "unexpected end of data"  # the csv module's message


@dataclass(frozen=True, slots=True)
class Events:
    """How rows become events: the form of the value, and the columns of key and time."""

    as_json: bool = True
    key: str | None = None
    timestamp: str | None = None
    delimiter: str = ","
    encoding: str = "utf-8"


class CsvFile:
    """An open CSV file with a header row: plain, .gz, or .zip with one CSV file in it."""

    def __init__(self, name: str, raw: IO[bytes], body: IO[bytes], events: Events) -> None:
        """Call `opened` instead. ``raw``: the file as it is stored; ``body``: unpacked."""
        self._name = name
        self._raw = raw
        self._body = body
        self._events = events
        self._blocks = 0
        csv.field_size_limit(MAX_RECORD_BYTES)  # else 128 KiB
        self._csv = csv.reader(self._lines(), strict=True, delimiter=events.delimiter)
        _, self.columns = next(self._rows(), (1, []))
        self._check_columns()

    @property
    def done(self) -> int:
        """How many stored bytes were read."""
        return self._raw.tell() if self._raw.seekable() else 0

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows as `write_batch` takes them. `InvalidArgument` names the first line that is not a row."""
        width, column = len(self.columns), self._events.timestamp
        at = None if column is None else self.columns.index(column)
        key = None if self._events.key is None else self.columns.index(self._events.key)
        value_of = _json_of(self.columns) if self._events.as_json else _csv_line
        values: list[str] = []
        keys: list[str | None] = []
        stamps: list[int] = []
        blocks = self._blocks
        for line, row in self._rows():
            if not row:
                continue
            if len(row) != width:
                raise self._wrong(line, f"has {len(row)} fields; the header has {width}")
            if at is not None:
                try:
                    stamps.append(parse_time(row[at]))
                except ValueError as error:
                    raise self._wrong(line, f"column {column}: {error}", ", ") from error
            values.append(value_of(row))
            if key is not None:
                keys.append(row[key] or None)
            if blocks != self._blocks:
                yield _batch(values, keys, stamps)
                values, keys, stamps, blocks = [], [], [], self._blocks
        if values:
            yield _batch(values, keys, stamps)

    def _check_columns(self) -> None:
        columns, events = self.columns, self._events
        if not any(columns):
            raise InvalidArgument(
                f"{self._name} is empty: a CSV file with a header row is expected"
            )
        if len(set(columns)) != len(columns):
            twice = sorted({name for name in columns if columns.count(name) > 1})
            raise InvalidArgument(f"{self._name} names a column twice: {', '.join(twice)}")
        for option, column in (("--key", events.key), ("--timestamp", events.timestamp)):
            if column is not None and column not in columns:
                what = f"{self._name} has no column {column!r} for {option}: {', '.join(columns)}"
                other = next((d for d in ";\t|" if d in columns[0]), "")
                if len(columns) == 1 and other:
                    what += f"; is the delimiter {other!r} (--delimiter)?"
                raise InvalidArgument(what)

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """The next rows, each with its first line's number, from 1."""
        line = self._csv.line_num + 1
        try:
            for row in self._csv:
                yield line, row
                line = self._csv.line_num + 1
        except csv.Error as error:
            if str(error) == _UNCLOSED:
                raise InvalidArgument(
                    f"{self._name}: a quote is opened in or after line {line} and never closed"
                ) from error
            raise self._wrong(line, f"is not CSV: {error}") from error

    def _lines(self) -> Iterator[str]:
        """The text as lines, each with its end. A block is decoded at a time."""
        encoding = self._events.encoding
        try:
            decoder = codecs.getincrementaldecoder(encoding)()
        except LookupError as error:
            raise InvalidArgument(
                f"--encoding {encoding}: Python knows no such encoding"
            ) from error
        number, rest, is_first = 1, "", True
        while data := self._block():
            text = rest + self._decoded(decoder, data, number + rest.count("\n"))
            if is_first and text:
                text, is_first = text.removeprefix("\ufeff"), False
            end = text.rfind("\n") + 1
            for line in io.StringIO(text[:end], newline=""):
                if len(line) > MAX_RECORD_BYTES:
                    raise self._wrong(number, f"is longer than {MAX_RECORD_BYTES >> 20} MB")
                yield line
                number += line.endswith("\n")
            rest = text[end:]
            if len(rest) > MAX_RECORD_BYTES:
                raise self._wrong(number, f"is longer than {MAX_RECORD_BYTES >> 20} MB")
        yield from io.StringIO(rest + self._decoded(decoder, b"", number), newline="")

    def _block(self) -> bytes:
        self._blocks += 1
        with _unpacking(self._name):
            return self._body.read(BLOCK_BYTES)

    def _decoded(self, decoder: codecs.IncrementalDecoder, data: bytes, line: int) -> str:
        try:
            return decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            before = bytes(error.object[: error.start]).decode(error.encoding, "replace")
            what = f"is not {self._events.encoding}"
            if self._events.encoding in ("utf-8", "utf8"):
                what = "is not UTF-8; give its --encoding, such as latin-1"
            raise self._wrong(line + before.count("\n"), what) from error

    def _wrong(self, line: int, what: str, between: str = " ") -> InvalidArgument:
        return InvalidArgument(f"{self._name}: line {line}{between}{what}")


@contextmanager
def opened(path: Path, events: Events) -> Iterator[CsvFile]:
    """A CSV file; ``-``: standard input. `InvalidArgument` if its header or its packing can't be read."""
    if str(path) == "-":
        yield CsvFile("standard input", sys.stdin.buffer, sys.stdin.buffer, events)
        return
    suffix = path.suffix.lower()
    with ExitStack() as closing:
        raw = closing.enter_context(path.open("rb"))
        body: IO[bytes] = raw
        with _unpacking(path):
            if suffix == ".gz":
                body = cast("IO[bytes]", closing.enter_context(gzip.open(raw)))
            elif suffix == ".zip":
                archive = closing.enter_context(zipfile.ZipFile(raw))
                body = closing.enter_context(archive.open(_member(path, archive)))
        yield CsvFile(str(path), raw, body, events)


@contextmanager
def _unpacking(name: object) -> Iterator[None]:
    try:
        yield
    except _NOT_PACKED as error:
        raise InvalidArgument(f"{name} can't be unpacked: {error}") from error


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.lower().endswith(".csv")]
    names = [name for name in names if not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise InvalidArgument(f"{path} holds {len(names)} CSV files; one is expected")
    return names[0]


def _batch(values: list[str], keys: list[str | None], stamps: list[int]) -> pa.RecordBatch:
    import pyarrow as pa

    columns = {"value": pa.array(values, pa.string())}
    if keys:
        columns["key"] = pa.array(keys, pa.string())
    if stamps:
        columns["timestamp"] = pa.array(stamps, pa.int64())
    return pa.RecordBatch.from_pydict(columns)


def _json_of(columns: Sequence[str]) -> Callable[[Sequence[str]], str]:
    """A function that makes a JSON object of a row."""
    names = (encode_basestring(name).replace("%", "%%") for name in columns)
    form = "{" + ",".join(f"{name}:%s" for name in names) + "}"
    return lambda row: form % tuple(map(encode_basestring, row))


def _csv_line(row: Sequence[str]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerow(row)
    return out.getvalue()[:-2]


@lru_cache(1 << 16)  # times of neighbouring rows are often the same
def parse_time(text: str) -> int:
    """Unix milliseconds from ISO 8601 (UTC unless the text has a zone) or from a number.

    A number below 10^11 is taken as seconds. ValueError for any other text.
    """
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        number = moment.timestamp()
        unix_ms = round(number * 1000)
    else:
        unix_ms = round(number * 1000 if number < 1e11 else number) if 0 < number <= LATEST else 0
    if not 0 < unix_ms <= LATEST:
        raise ValueError(f"{text!r} is not a time after 1970-01-01, up to the end of 9999")
    return unix_ms
