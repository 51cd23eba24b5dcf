"""One of the processes of `anabranch load`: parses blocks of CSV and writes its rows.

Spoken over a pipe. To the worker: `Block`s, then None. From it: `Wrote` after each block, `Finished`
with the receipt at the end, or `Failed` and nothing more.
"""

from __future__ import annotations

import csv
import io
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from zlib import crc32

from anabranch.cli.errors import ExitCode, exit_code_of
from anabranch.cli.load_split import Block
from anabranch.cli.session import Target, connected
from anabranch.errors import InvalidArgument

SILENCE_S = 600.0
_POLL_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker is told at its start."""

    target: Target
    token: bytes = field(repr=False)
    stream: str
    columns: tuple[str, ...]
    form: str
    key: str | None
    timestamp: str | None
    worker: int
    workers: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """A block is written; so many of its rows were this worker's."""

    rows: int


@dataclass(frozen=True, slots=True)
class Finished:
    """All is written and acknowledged."""

    receipt: bytes
    rows: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The worker gave up."""

    name: str
    message: str
    code: ExitCode


Writing = Callable[[bytes | None, bytes, int | None], None]


def run(pipe: Connection, job: Job) -> None:
    """The process's main function."""
    try:
        _write_all(pipe, job)
    except KeyboardInterrupt:
        # The terminal sent it to every process; the parent ends the load.
        sys.exit(ExitCode.INTERRUPTED)
    except Exception as error:  # noqa: BLE001 - it is shown by the parent, whatever it is
        pipe.send(Failed(type(error).__name__, str(error), exit_code_of(error)))


def _write_all(pipe: Connection, job: Job) -> None:
    with connected(job.target) as client, client.join(job.token) as writer:
        rows = 0

        def write(key: bytes | None, value: bytes, timestamp: int | None) -> None:
            writer.write(job.stream, value, key, None, timestamp)

        while (block := _next_block(pipe)) is not None:
            written = write_block(block, job, write)
            rows += written
            pipe.send(Wrote(written))
        receipt = writer.finish()
        pipe.send(Finished(receipt.to_bytes(), rows))


def _next_block(pipe: Connection) -> Block | None:
    parent = multiprocessing.parent_process()
    deadline = time.monotonic() + SILENCE_S
    while not pipe.poll(_POLL_S):
        if parent is not None and not parent.is_alive():
            sys.exit(ExitCode.TERMINATED)
        if time.monotonic() > deadline:
            raise TimeoutError(f"nothing to do for {SILENCE_S:.0f} s: the parent is stuck")
    block: Block | None = pipe.recv()
    return block


def write_block(block: Block, job: Job, write: Writing) -> int:
    """Writes this worker's rows of a block; how many.

    With a key column a worker writes the rows of its share of the keys, so that the rows of one key
    keep their order; without one, all of the block's.
    """
    value_of = _values(job)
    key_at = job.columns.index(job.key) if job.key is not None else -1
    time_at = job.columns.index(job.timestamp) if job.timestamp is not None else -1
    shared = key_at >= 0 and job.workers > 1
    written = 0
    for line, row in _rows(block, len(job.columns)):
        key = row[key_at].encode() or None if key_at >= 0 else None
        if shared and share_of(key, line, job.workers) != job.worker:
            continue
        stamp = None
        if time_at >= 0:
            try:
                stamp = parse_time(row[time_at])
            except ValueError as error:
                raise InvalidArgument(f"line {line}, column {job.timestamp}: {error}") from error
        write(key, value_of(row), stamp)
        written += 1
    return written


def share_of(key: bytes | None, line: int, workers: int) -> int:
    """Which worker writes a row: by its key, or where it has none, by its place."""
    return (line if key is None else crc32(key)) % workers


def _rows(block: Block, width: int) -> Iterator[tuple[int, list[str]]]:
    try:
        text = block.data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = block.line + block.data.count(b"\n", 0, error.start)
        raise InvalidArgument(f"line {line} is not UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = block.line
    try:
        for row in reader:
            if row:
                if len(row) != width:
                    raise InvalidArgument(
                        f"line {line} has {len(row)} fields; the header has {width}"
                    )
                yield line, row
            line = block.line + reader.line_num
    except csv.Error as error:
        raise InvalidArgument(f"line {line} is not CSV: {error}") from error


def _values(job: Job) -> Callable[[list[str]], bytes]:
    columns = job.columns
    if job.form == "json":
        encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode

        def as_json(row: list[str]) -> bytes:
            return encode(dict(zip(columns, row, strict=True))).encode()

        return as_json

    def as_csv(row: list[str]) -> bytes:
        out = io.StringIO()
        csv.writer(out, lineterminator="").writerow(row)
        return out.getvalue().encode()

    return as_csv


def parse_time(text: str) -> int:
    """Unix milliseconds of ISO 8601 (UTC unless it says otherwise), or of a number of them.

    A number below 10^11 is taken for seconds. ValueError for anything else.
    """
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        moment = datetime.fromisoformat(text)
        if moment.tzinfo is None:
            moment = moment.replace(tzinfo=UTC)
        return round(moment.timestamp() * 1000)
    if not 0 < number < 1e14:
        raise ValueError(f"{text!r} is no time")
    return round(number * 1000) if number < 1e11 else round(number)
