"""Cuts a CSV file into blocks of whole records, whatever it is packed in. No parsing: quotes count.

A line's end is a record's end where the number of quotes before it is even (RFC 4180; a doubled
quote adds two). So blocks can go to processes that know nothing of each other.
"""

from __future__ import annotations

import csv
import gzip
import io
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from anabranch.errors import InvalidArgument

BLOCK_BYTES = 1 << 20
MAX_RECORD_BYTES = 64 << 20
MAX_HEADER_BYTES = 1 << 20
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Block:
    """Whole records; ``line`` is the number of the first one's line in the file, from 1."""

    line: int
    data: bytes


@dataclass
class Opened:
    """An open CSV file: its columns, and what is left of it."""

    columns: list[str]
    size: int
    _raw: IO[bytes]
    _body: _Source
    _rest: bytes
    _line: int

    @property
    def done(self) -> int:
        """How many of ``size`` bytes were read, as the file is stored."""
        return min(self._raw.tell(), self.size)

    def blocks(self, block_bytes: int = BLOCK_BYTES) -> Iterator[Block]:
        """The rest of the file as blocks. `InvalidArgument` where a quote is never closed."""
        rest, line = self._rest, self._line
        while True:
            more = self._body.read(block_bytes)
            data = rest + more
            end = len(data) if not more else record_end(data, len(rest))
            if not more and data.count(b'"') % 2:
                raise InvalidArgument(f"a quote is opened in or after line {line} and never closed")
            if end:
                yield Block(line, data[:end])
                line += data.count(b"\n", 0, end)
            rest = data[end:]
            if not more:
                return
            if len(rest) > MAX_RECORD_BYTES:
                raise InvalidArgument(
                    f"the record at line {line} is longer than {MAX_RECORD_BYTES >> 20} MB: "
                    "is a quote missing?"
                )


def record_end(data: bytes, begin: int = 0) -> int:
    """The end of the last whole record in ``data``; 0 if there is none. ``begin``: none ends before."""
    odd = data.count(b'"') % 2
    end = len(data)
    while (newline := data.rfind(b"\n", begin, end)) >= 0:
        odd ^= data.count(b'"', newline, end) % 2
        if not odd:
            return newline + 1
        end = newline
    return 0


@contextmanager
def opened(path: Path, block_bytes: int = BLOCK_BYTES) -> Iterator[Opened]:
    """A CSV file with a header row, plain, .gz, or .zip with one CSV file in it."""
    with path.open("rb") as raw, _unpacked(path, raw) as body:
        data = b""
        while not (end := _first_record_end(data)):
            more = body.read(block_bytes)
            if not more:
                end = len(data)
                break
            data += more
            if len(data) > max(MAX_HEADER_BYTES, block_bytes):
                raise InvalidArgument(f"{path}: the header row does not end: is a quote missing?")
        columns = _columns(path, data[:end].removeprefix(_BOM))
        lines = data.count(b"\n", 0, end)
        yield Opened(columns, path.stat().st_size, raw, body, data[end:], lines + 1)


def _first_record_end(data: bytes) -> int:
    odd = at = 0
    while (newline := data.find(b"\n", at)) >= 0:
        odd ^= data.count(b'"', at, newline) % 2
        at = newline + 1
        if not odd:
            return at
    return 0


@contextmanager
def _unpacked(path: Path, raw: IO[bytes]) -> Iterator[_Source]:
    suffix = path.suffix.lower()
    if suffix not in (".gz", ".zip"):
        yield raw
        return
    with ExitStack() as closing:
        with _unpacking(path):
            if suffix == ".gz":
                body: _Source = closing.enter_context(gzip.GzipFile(fileobj=raw))
            else:
                archive = closing.enter_context(zipfile.ZipFile(raw))
                body = closing.enter_context(archive.open(_member(path, archive)))
        yield _Packed(path, body)


@contextmanager
def _unpacking(path: Path) -> Iterator[None]:
    try:
        yield
    except InvalidArgument:
        raise
    except Exception as error:  # zlib, bz2, lzma, struct and others raise what they like
        raise InvalidArgument(f"{path} can't be unpacked: {error}") from error


class _Source(Protocol):
    """What is read from."""

    def read(self, size: int, /) -> bytes: ...


@dataclass(frozen=True)
class _Packed:
    """What is in a packed file. `InvalidArgument` where it is damaged."""

    path: Path
    body: _Source

    def read(self, size: int, /) -> bytes:
        with _unpacking(self.path):
            return self.body.read(size)


def _member(path: Path, archive: zipfile.ZipFile) -> str:
    names = [name for name in archive.namelist() if name.lower().endswith(".csv")]
    names = [name for name in names if not name.startswith("__MACOSX/")]
    if len(names) != 1:
        raise InvalidArgument(f"{path} holds {len(names)} CSV files; one is expected")
    return names[0]


def _columns(path: Path, header: bytes) -> list[str]:
    try:
        columns = next(csv.reader(io.StringIO(_text(path, header), newline="")), [])
    except csv.Error as error:
        raise InvalidArgument(f"{path}: its header row is not CSV: {error}") from error
    if not columns or not any(columns):
        raise InvalidArgument(f"{path} is empty: a CSV file with a header row is expected")
    if len(set(columns)) != len(columns):
        twice = sorted({name for name in columns if columns.count(name) > 1})
        raise InvalidArgument(f"{path} names a column twice: {', '.join(twice)}")
    return columns


def _text(path: Path, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{path} is not UTF-8: {error}") from error
