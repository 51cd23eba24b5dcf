"""CSV files as Arrow batches of events: every column is text.

Arrow reads fast, but it names no line in its errors, accepts misplaced quotes, and cuts some records with line
ends wrongly (version 26). So Arrow gets whole records, and the csv module decides: it reads the file again where
Arrow fails, or a quote is misplaced.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import json
import lzma
import struct
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import numpy as np

from anabranch.core.limits import LATEST
from anabranch.errors import InvalidArgument

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

BLOCK_BYTES = 2 << 20  # Arrow reads up to 32 ahead
MAX_RECORD_BYTES = 64 << 20
_BOM = b"\xef\xbb\xbf"
# Errors on reading packed files that are damaged.
_NOT_PACKED = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, zipfile.BadZipFile, lzma.LZMAError, zlib.error,
    struct.error,
)  # fmt: skip
_UNCLOSED = "unexpected end of data"  # the csv module's message

_encode = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True, slots=True)
class Events:
    """How rows become events: the form of the value, and the columns of key and time."""

    as_json: bool = True
    key: str | None = None
    timestamp: str | None = None
    delimiter: str = ","
    encoding: str = "utf-8"

    @property
    def is_plain(self) -> bool:
        """Whether a file is read as it is."""
        return self.encoding in ("utf-8", "utf8")


class CsvFile:
    """An open CSV file with a header row: plain, .gz, or .zip with one CSV file in it."""

    def __init__(self, path: Path, raw: IO[bytes], body: IO[bytes], events: Events) -> None:
        """Call `opened` instead."""
        self._path = path
        self._raw = raw
        self._body = body
        self._events = events
        self.size = path.stat().st_size
        # A bounding or doubled quote has one of these beside it: a delimiter, a line's end, or another quote.
        self._beside = np.isin(np.arange(256), list(events.delimiter.encode() + b'\r\n"'))
        self.columns = _columns(path, events.delimiter)
        for option, column in (("--key", events.key), ("--timestamp", events.timestamp)):
            if column is not None and column not in self.columns:
                what = f"{path} has no column {column!r} for {option}: {', '.join(self.columns)}"
                other = next((d for d in ";\t|" if d in self.columns[0]), "")
                if len(self.columns) == 1 and other:
                    what += f"; is the delimiter {other!r} (--delimiter)?"
                raise InvalidArgument(what)

    @property
    def done(self) -> int:
        """How many of the stored ``size`` bytes were read."""
        return min(self._raw.tell(), self.size)

    def batches(self, block_bytes: int = BLOCK_BYTES) -> Iterator[pa.RecordBatch]:
        """The rows as `write_batch` takes them. `InvalidArgument` names the line that is no row."""
        import pyarrow as pa
        from pyarrow.csv import ConvertOptions, ParseOptions, ReadOptions, open_csv

        try:
            with open_csv(
                _Source(self._blocks(block_bytes)),
                ReadOptions(block_size=2 * MAX_RECORD_BYTES),
                ParseOptions(  # for cutting blocks only
                    delimiter=self._events.delimiter, newlines_in_values=False
                ),
                ConvertOptions(default_column_type=pa.string(), strings_can_be_null=False),
            ) as reader:
                for batch in reader:
                    if batch.num_rows:
                        yield self._events_of(batch)
        except (pa.ArrowException, UnicodeDecodeError) as error:
            self.check()
            raise InvalidArgument(f"{self._path} can't be read as CSV: {error}") from error

    def _blocks(self, block_bytes: int) -> Iterator[bytes]:
        """Whole records to the file's end, cut as the csv module reads them."""
        rest, given = b"", 0
        while True:
            with _unpacking(self._path):
                more = self._body.read(block_bytes)
            data = rest + more if more else rest + b"\n"
            end = _record_end(data, self._beside)
            if end is None or (not more and end < len(data)):
                self.check()
                yield from self._rewritten(given)
                return
            if end:
                yield data[:end]
            if not more:
                return
            given += end
            rest = data[end:]
            if len(rest) > MAX_RECORD_BYTES:
                self.check()
                raise InvalidArgument(
                    f"{self._path}: a record is longer than {MAX_RECORD_BYTES >> 20} MB"
                )

    def _rewritten(self, begin: int) -> Iterator[bytes]:
        """The records from a byte on, with every field in quotes."""
        out = io.StringIO(newline="")
        delimiter = self._events.delimiter
        writer = csv.writer(out, quoting=csv.QUOTE_ALL, delimiter=delimiter)
        for _, row in _rows(self._path, delimiter, begin):
            if row:
                writer.writerow(row)
            if out.tell() > BLOCK_BYTES:
                yield out.getvalue().encode()
                out.seek(0)
                out.truncate()
        yield out.getvalue().encode()

    def check(self) -> None:
        """Read the whole file by the csv module. `InvalidArgument` names the first wrong line."""
        width = len(self.columns)
        column = self._events.timestamp
        for line, row in _rows(self._path, self._events.delimiter):
            if len(row) not in (0, width):
                raise InvalidArgument(
                    f"{self._path}: line {line} has {len(row)} fields; the header has {width}"
                )
            if line > 1 and row and column is not None:
                try:
                    parse_time(row[self.columns.index(column)])
                except ValueError as error:
                    raise InvalidArgument(
                        f"{self._path}: line {line}, column {column}: {error}"
                    ) from error

    def _events_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        import pyarrow as pa
        import pyarrow.compute as pc

        events = self._events
        as_value = _json_of if events.as_json else _csv_of
        found = {"value": as_value(self.columns, batch.columns)}
        if events.key is not None:
            key = batch.column(self.columns.index(events.key))
            found["key"] = pc.if_else(pc.equal(key, ""), None, key)
        if events.timestamp is not None:
            known = batch.column(self.columns.index(events.timestamp)).dictionary_encode()
            try:
                stamps = [parse_time(text) for text in known.dictionary.to_pylist()]
            except ValueError as error:
                self.check()
                raise InvalidArgument(f"{self._path}: {error}") from error
            found["timestamp"] = pa.array(stamps, pa.int64()).take(known.indices)
        return pa.RecordBatch.from_pydict(found)


class _Source:
    """Blocks as a file that ignores the size asked for: Arrow takes each block as it is."""

    closed = False

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks = blocks

    def read(self, _size: int) -> bytes:
        """The next block."""
        return next(self._blocks, b"")


def _record_end(data: bytes, beside: npt.NDArray[np.bool_]) -> int | None:
    """The end of the last whole record; 0 if there is none; None: a quote neither bounds a field nor is doubled."""
    content = np.frombuffer(b"\n" + data + b"\n", dtype=np.uint8)
    quotes = np.flatnonzero(content == ord('"'))
    closes = np.arange(len(quotes)) % 2
    if not beside[content[np.where(closes, quotes + 1, quotes - 1)]].all():
        return None
    line_ends = np.flatnonzero(content[:-1] == ord("\n"))
    whole = line_ends[np.searchsorted(quotes, line_ends) % 2 == 0]
    return int(whole[-1])


@contextmanager
def opened(path: Path, events: Events) -> Iterator[CsvFile]:
    """A CSV file; ``-``: standard input. `InvalidArgument` if its header or its packing can't be read.

    Standard input, and what is not UTF-8, is copied to a temporary file first.
    """
    is_input = str(path) == "-"
    if not is_input and events.is_plain:
        with _unpacked(path) as (raw, body):
            yield CsvFile(path, raw, body, events)
        return
    with tempfile.TemporaryDirectory(prefix="anabranch-load-") as folder:
        copy, shown = Path(folder, "rows.csv"), "standard input" if is_input else str(path)
        with nullcontext((None, sys.stdin.buffer)) if is_input else _unpacked(path) as (_, source):
            _copy(cast("IO[bytes]", source), copy, events.encoding, shown)
        try:
            with _unpacked(copy) as (raw, body):
                yield CsvFile(copy, raw, body, events)
        except InvalidArgument as error:
            raise InvalidArgument(str(error).replace(str(copy), shown)) from error


def _copy(source: IO[bytes], copy: Path, encoding: str, shown: str) -> None:
    try:
        decoder = codecs.getincrementaldecoder(encoding)()
    except LookupError as error:
        raise InvalidArgument(f"--encoding {encoding}: Python knows no such encoding") from error
    with copy.open("wb") as out:
        number = 1
        while True:
            data = source.read(BLOCK_BYTES)
            try:
                text = decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                line = number + data[: error.start].count(b"\n")
                raise InvalidArgument(f"{shown}: line {line} is not {encoding}") from error
            out.write(text.encode())
            number += text.count("\n")
            if not data:
                return


@contextmanager
def _unpacked(path: Path) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file as stored, and its unpacked content after the byte order mark."""
    suffix = path.suffix.lower()
    with ExitStack() as closing:
        raw = closing.enter_context(path.open("rb"))
        if not raw.seekable():
            raise InvalidArgument(f"{path} can't be read twice: copy it to a file first")
        body: IO[bytes] = raw
        with _unpacking(path):
            if suffix == ".gz":
                body = cast("IO[bytes]", closing.enter_context(gzip.open(raw)))
            elif suffix == ".zip":
                archive = closing.enter_context(zipfile.ZipFile(raw))
                body = closing.enter_context(archive.open(_member(path, archive)))
            if body.read(len(_BOM)) != _BOM:
                body.seek(0)
        yield raw, body


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except _NOT_PACKED as error:
        raise InvalidArgument(f"{path} can't be unpacked: {error}") from error


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.lower().endswith(".csv")]
    names = [name for name in names if not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise InvalidArgument(f"{path} holds {len(names)} CSV files; one is expected")
    return names[0]


def _columns(path: Path, delimiter: str) -> list[str]:
    _, columns = next(_rows(path, delimiter), (1, []))
    if not any(columns):
        raise InvalidArgument(f"{path} is empty: a CSV file with a header row is expected")
    if len(set(columns)) != len(columns):
        twice = sorted({name for name in columns if columns.count(name) > 1})
        raise InvalidArgument(f"{path} names a column twice: {', '.join(twice)}")
    return columns


def _rows(path: Path, delimiter: str, begin: int = 0) -> Iterator[tuple[int, list[str]]]:
    """The csv module's records from a byte on, each with its first line's number, from 1."""
    with _unpacked(path) as (_, body):
        if begin:
            body.seek(begin, io.SEEK_CUR)
        csv.field_size_limit(MAX_RECORD_BYTES)  # else 128 KiB
        reader = csv.reader(_lines(path, body), strict=True, delimiter=delimiter)
        line = 1
        try:
            for row in reader:
                yield line, row
                line = reader.line_num + 1
        except csv.Error as error:
            wrong = f"line {line} is not CSV: {error}"
            if str(error) == _UNCLOSED:
                wrong = f"a quote is opened in or after line {line} and never closed"
            raise InvalidArgument(f"{path}: {wrong}") from error


def _lines(path: Path, body: IO[bytes]) -> Iterator[str]:
    number = 1
    while True:
        with _unpacking(path):
            data = body.readline(MAX_RECORD_BYTES + 1)
        if len(data) > MAX_RECORD_BYTES:
            raise InvalidArgument(
                f"{path}: line {number} is longer than {MAX_RECORD_BYTES >> 20} MB"
            )
        if not data:
            return
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidArgument(
                f"{path}: line {number} is not UTF-8; give its --encoding, such as latin-1"
            ) from error
        yield from io.StringIO(text, newline="")
        number += 1


# -- a row's event ---------------------------------------------------------------------------------------


def _json_of(columns: list[str], fields: list[pa.Array]) -> pa.Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    parts: list[str | pa.Array] = []
    for name, field in zip(columns, fields, strict=True):
        content = _content(field)
        if ((content < ord(" ")) | (content == ord('"')) | (content == ord("\\"))).any():
            field = pa.array([_encode(text)[1:-1] for text in field.to_pylist()], pa.string())
        parts += [('",' if parts else "{") + _encode(name) + ':"', field]
    return pc.binary_join_element_wise(*parts, '"}', "")


def _csv_of(columns: list[str], fields: list[pa.Array]) -> pa.Array:
    import pyarrow.compute as pc

    quoted: list[pa.Array] = []
    for field in fields:
        if np.isin(_content(field), list(b',"\r\n')).any() or len(fields) == 1:
            doubled = pc.replace_substring(field, '"', '""')
            special = pc.match_substring_regex(field, '[,"\r\n]')
            if len(columns) == 1:
                # Else the row would be an empty line.
                special = pc.or_(special, pc.equal(field, ""))
            inside = pc.binary_join_element_wise('"', doubled, '"', "")
            field = pc.if_else(special, inside, field)
        quoted.append(field)
    return pc.binary_join_element_wise(*quoted, ",")


def _content(field: pa.Array) -> npt.NDArray[np.uint8]:
    content = field.buffers()[2]
    return np.frombuffer(b"" if content is None else content, dtype=np.uint8)


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
