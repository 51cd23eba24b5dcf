"""`anabranch read`, `write` and `load`: committed events as lines, and lines and CSV files as events."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

from anabranch.cli.options import (
    ClusterOptions,
    ConnectionOptions,
    Into,
    Json,
    LoadedAs,
    LogFormat,
    NewSegments,
    StreamName,
    TypedReading,
    ValueCodec,
    Verbose,
    argument,
    line_encoder,
    moment_of,
    opened,
    option,
    parse_segment,
    start_of,
)
from anabranch.cli.output import (
    begin_task,
    print_headings,
    print_json,
    print_line,
    print_result,
    progress_bar,
)
from anabranch.errors import InvalidArgument, count_of
from anabranch.extras import need
from anabranch.presentation.rows import bytes_fields, value_fields, value_text
from anabranch.protocol import defaults
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import split_stream

if TYPE_CHECKING:
    from anabranch import Client, Committed, Event, Result, Transaction
    from anabranch.cli.load_csv import Events
    from anabranch.reading.snapshot import Mode

    AnyEvent = Event[Any, Any]

_CONNECT_TIMEOUT_S = 30.0
_WIDER = 16  # how much farther back `--tail` looks if too few events were wanted
_LONGEST = 64 << 20  # bytes of a line, the most that any stream takes


@dataclass(frozen=True)
class ReadOptions(ConnectionOptions):
    """The common options, with the timeout of a reader."""

    timeout: Annotated[
        float | None,
        option(
            "--timeout SECONDS", "Stop after this time without an event (default: never).", min=0.1
        ),
    ] = None
    json: Json = False
    log_format: LogFormat = "text"
    verbose: Verbose = False


@dataclass(frozen=True)
class Part:
    """Which part of a stream is read. Most of its options read a snapshot."""

    start: Annotated[
        str,
        option(
            "--from TIME",
            "Start at begin, at end, or after a time.",
        ),
    ] = "begin"
    to: Annotated[
        str | None, option("--to TIME", "Stop at a time, or at the present end: end.")
    ] = None
    segment: Annotated[
        str | None, option("--segment NUMBER@EPOCH", "Only events of this segment.")
    ] = None
    at: Annotated[
        str | None,
        option(
            "--at TIME",
            "The stream as of a commit timestamp, an ISO 8601 time, or `now`.",
        ),
    ] = None
    since: Annotated[
        str | None,
        option("--since TIME", "Only events of later commits than this time, as of --at or now."),
    ] = None
    latest: Annotated[
        bool, option("--latest", "As of the newest commit, or --at, without asking a controller.")
    ] = False
    changes: Annotated[
        bool, option("--changes", "Only the last event of each key, as of --at or now.")
    ] = False

    tail: Annotated[int | None, option("--tail N", "Only the newest N events.", min=1)] = None
    follow: Annotated[
        bool,
        option(
            "--follow -f",
            "Continue with new events: the default, but not with --tail or options of a snapshot.",
        ),
    ] = False
    key: Annotated[str | None, option("--with-key KEY", "Only events with this key.")] = None

    @property
    def is_snapshot(self) -> bool:
        """Whether events are read as of a time."""
        times = (self.at, self.since, self.to)
        return self.latest or self.changes or any(time is not None for time in times)

    def check(self, group: str | None, *, transactions: bool) -> None:
        """Raise `InvalidArgument` if options exclude each other."""
        if self.is_snapshot and (group is not None or transactions or self.start == "end"):
            raise InvalidArgument(
                "--at, --to, --since, --latest and --changes read a snapshot: leave out --group, --transactions "
                "and --from end"
            )
        if (self.to is not None and self.at is not None) or (
            self.since is not None and self.start != "begin"
        ):
            raise InvalidArgument(
                "--to means the same as --at, and --from the same as --since: give only one of each"
            )
        if (self.segment is not None or self.key is not None) and transactions:
            raise InvalidArgument(
                "--segment and --with-key choose events: leave out --transactions"
            )
        if self.tail is not None and (
            self.is_snapshot or transactions or group is not None or self.start != "begin"
        ):
            raise InvalidArgument(
                "--tail begins at the newest events: leave out --group, --transactions, --from, --to, --at, "
                "--since, --latest and --changes"
            )
        if self.follow and self.is_snapshot:
            raise InvalidArgument(
                "a snapshot has an end: leave out --follow, or --at, --to, --since, --latest and --changes"
            )

    def chooser(self, typed: TypedReading, stream: str) -> Callable[[AnyEvent], bool]:
        """Whether an event has the segment and the key that were asked for. Raises: InvalidArgument."""
        segment = None if self.segment is None else parse_segment(self.segment, "--segment")
        key: Any = None
        if self.key is not None:
            encode = line_encoder(typed.key_codec, stream, of_keys=True)
            key = typed.handle(stream).decode_key(encode(os.fsencode(self.key)))

        def is_wanted(event: AnyEvent) -> bool:
            is_key = self.key is None or event.key == key
            return is_key and segment in (None, event.segment_id)

        return is_wanted

    def bounds(self) -> tuple[int | datetime | None, int | datetime | None]:
        """(the time of the snapshot, the time after which its events begin); None: now, and the beginning."""
        until = None if self.at is None else moment_of(self.at)
        if self.to is not None and self.to != "end":
            until = moment_of(self.to, "--to")
        since = None if self.since is None else moment_of(self.since, "--since")
        first = start_of(self.start, "--from")
        return until, since if isinstance(first, str) else first


def read(
    part: Part,
    options: ReadOptions,
    typed: TypedReading,
    stream: StreamName,
    group: Annotated[
        str | None,
        option("--group -g", "A consumer group, which continues at its position."),
    ] = None,
    transactions: Annotated[
        bool, option("--transactions -t", "Print transactions, one line each.")
    ] = False,
    limit: Annotated[
        int | None,
        option(
            "--limit -n",
            "Stop after this many events or transactions. A group gets the last again.",
            min=1,
        ),
    ] = None,
) -> None:
    """Read committed events of a stream, in stream order.

    By default the command begins at the oldest event, and continues with new events until Ctrl-C. --tail, --to,
    --at, --limit and --timeout end it.
    """
    part.check(group, transactions=transactions)
    document: Callable[[Any], dict[str, Any]] = event_document
    line: Callable[[Any], tuple[str, ...]] = event_line
    headings: tuple[str, ...] = ("PARTITION@OFFSET", "KEY", "VALUE")
    if transactions:
        document, line = transaction_document, transaction_line
        headings = ("COMMITTED AT", "TRANSACTION", "EVENTS")
    first, given = start_of(part.start, "--from"), typed.given(stream)
    is_wanted = part.chooser(typed, stream)
    with opened(options.target_within(_CONNECT_TIMEOUT_S)) as client:
        found: Iterator[Any]
        if transactions:
            found = client.read_transactions(
                given, group=group, timeout=options.timeout, start=first
            )
        elif part.tail is not None:
            found = _tail(client, given, part, is_wanted, options.timeout)
        elif part.is_snapshot:
            found = filter(is_wanted, _snapshot(client, given, part, options.timeout))
        else:
            found = client.read(given, group=group, timeout=options.timeout, start=first)
            found = filter(is_wanted, found)
        if not options.json:
            print_headings(headings)
        for each in islice(found, limit):
            if options.json:  # only one form is made: making both would be slow
                print_json(document(each))
            else:
                print_line(*line(each))


def _snapshot(client: Client, given: Any, part: Part, timeout: float | None) -> Iterator[AnyEvent]:
    """The events of a snapshot of a stream, which is ``given`` by its name or handle."""
    until, since = part.bounds()
    mode: Mode = "latest" if part.latest else "snapshot"
    snapshot = client.snapshot(given, until, since, mode, timeout=timeout)
    return snapshot.changes(given) if part.changes else snapshot.read(given)


def _tail(
    client: Client,
    given: Any,
    part: Part,
    is_wanted: Callable[[AnyEvent], bool],
    timeout: float | None,
) -> Iterator[AnyEvent]:
    """The newest wanted events, in stream order; with `--follow` later events, too."""
    from anabranch.presentation.system_tables import before_newest

    def commits(until: int, most: int) -> Any:
        return client.system("commits", str(given), until=until, limit=most)

    at = client.snapshot(given).timestamp
    count = window = part.tail or 0
    while True:
        since = before_newest(commits, at, window)
        read = client.snapshot(given, at, since).read(given)
        found = deque(filter(is_wanted, read), maxlen=count)
        if len(found) == count or since is None:
            break
        window *= _WIDER  # few events were wanted
    yield from found
    if part.follow:
        yield from filter(is_wanted, client.read(given, timeout=timeout, start=at))


def event_document(event: AnyEvent) -> dict[str, Any]:
    """An event as JSON. Bytes that are not UTF-8 go into fields with the suffix _base64."""
    return {
        "stream": event.stream,
        **value_fields(key=event.key, value=event.value),
        "headers": [
            bytes_fields(name=name.encode("utf-8", "surrogateescape"), value=data)
            for name, data in event.headers
        ],
        "timestamp": event.timestamp,
        "txn_id": event.txn_id.hex() if event.txn_id else None,
        "commit_timestamp": event.commit_timestamp,
        "segment_id": event.segment_id,
        "partition": event.partition,
        "offset": event.offset,
    }


def event_line(event: AnyEvent) -> tuple[str, ...]:
    """An event for people: its place, its key and its value."""
    key = "-" if event.key is None else _cell(event.key)
    value = "null" if event.value is None else _cell(event.value)
    return f"{event.partition}@{event.offset}", key, value


def _cell(value: Any) -> str:
    return (
        value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value_text(value)
    )


def transaction_document(committed: Committed) -> dict[str, Any]:
    """A whole transaction as JSON."""
    events = [event_document(event) for event in committed.events]
    return {
        "txn_id": committed.txn_id.hex() if committed.txn_id else None,
        "commit_timestamp": committed.commit_timestamp,
        "committed_at": to_text(committed.commit_timestamp),
        "count": len(events),
        "events": events,
    }


def transaction_line(committed: Committed) -> tuple[str, ...]:
    """A whole transaction for people: its time, its id, and its number of events."""
    name = committed.txn_id.hex() if committed.txn_id else "plain writes"
    count = len(committed.events)
    return to_text(committed.commit_timestamp), name, count_of(count, "event")


def write(
    options: ClusterOptions,
    stream: StreamName,
    key: Annotated[str | None, option("--key -k KEY", "The key of all events.")] = None,
    separator: Annotated[
        str | None,
        option(
            "--key-separator TEXT",
            "The text between key and value of a line.",
        ),
    ] = None,
    value_codec: ValueCodec = None,
    name: LoadedAs = None,
) -> None:
    """Write the lines of standard input to a stream as events, in one transaction.

    Line ends are no part of events. An empty line is an event, too. With --value, a line is JSON (with str, text),
    and is encoded. If a line can't be encoded, nothing is committed.
    """
    if key is not None and separator is not None:
        raise InvalidArgument("--key and --key-separator exclude each other: give only one")
    if separator == "":
        raise InvalidArgument("--key-separator must not be empty")
    fixed = None if key is None else key.encode()
    coded = line_encoder(value_codec, stream)
    scope, _ = split_stream(stream)
    with options.client() as client:
        client.describe(stream)
        with client.begin(scope, name=name, keepalive=defaults.TOOL_KEEPALIVE_S) as txn:
            result = txn.result
            if (written := result is None) or result is None:
                txn.token()  # opens it, so it has heartbeats however slowly lines come
                for found, value in _events(sys.stdin.buffer, fixed, separator):
                    txn.write(stream, coded(value), found)
                result = txn.commit()
    document = {
        "stream": stream,
        "txn_id": result.txn_id.hex(),
        "name": result.name,
        "already_committed": not written,
        "commit_timestamp": result.commit_timestamp,
        "committed_at": to_text(result.commit_timestamp),
        "events": result.counts.committed,
    }
    line = f"{count_of(result.counts.committed, 'event')} in {stream}: transaction {document['txn_id']}"
    if not written:
        line = f"{result.name} was written earlier: {line}; nothing was written now"
    print_result(document, line, as_json=options.json)


def _events(
    lines: BinaryIO, key: bytes | None, separator: str | None
) -> Iterator[tuple[bytes | None, bytes]]:
    """(key, value) of each line. Raises: InvalidArgument, with the number of the line."""
    between = None if separator is None else separator.encode()
    number = 0
    while line := lines.readline(_LONGEST + 1):
        number += 1
        if len(line) > _LONGEST:
            raise InvalidArgument(
                f"line {number:,} has more than {_LONGEST:,} bytes; nothing is committed"
            )
        value = line.removesuffix(b"\n").removesuffix(b"\r")
        if between is not None:
            key, found, value = value.partition(between)
            if not found:
                raise InvalidArgument(
                    f"line {number:,} has no {separator!r} between key and value; nothing is committed"
                )
        yield key, value


class Form(StrEnum):
    """The form of an event's value."""

    JSON = "json"
    CSV = "csv"


@dataclass(frozen=True)
class LoadOptions(ClusterOptions):
    """The common options, with the timeout of a load."""

    timeout: Annotated[
        float, option("--timeout SECONDS", "Time limit of the commit and of each request.", min=1.0)
    ] = 60.0


def load(
    options: LoadOptions,
    files: Annotated[
        list[Path],
        argument(
            "FILE...",
            "CSV files with a header row, also .gz or .zip with one CSV file; - is standard input.",
            exists=True,
            dir_okay=False,
            readable=True,
            allow_dash=True,
        ),
    ],
    stream: Into,
    key: Annotated[
        str | None,
        option(
            "--key COLUMN",
            "The column of the events' keys; an empty field means no key.",
        ),
    ] = None,
    timestamp: Annotated[
        str | None,
        option(
            "--timestamp COLUMN",
            "The events' time: ISO 8601, or seconds or milliseconds since 1970.",
        ),
    ] = None,
    form: Annotated[
        Form, option("--format", "The value: the row as a JSON object, or as CSV.")
    ] = Form.JSON,
    delimiter: Annotated[
        str, option("--delimiter CHARACTER", "Between two fields; '\\t' is a tab.")
    ] = ",",
    encoding: Annotated[str, option("--encoding NAME", "The files' encoding.")] = "utf-8",
    segments: NewSegments = None,
    name: LoadedAs = None,
) -> None:
    """Load CSV files into a stream, in one transaction. An error names the line."""
    from anabranch.cli.load_csv import Events

    need("pyarrow")
    started = time.monotonic()
    between = _checked_delimiter(delimiter)
    events = Events(form is Form.JSON, key, timestamp, between, encoding.lower())
    with options.client() as client:
        if segments is not None:
            client.create_stream(stream, segments=segments)
        else:
            client.describe(stream)
        scope, _ = split_stream(stream)
        with client.begin(scope, name=name, keepalive=defaults.TOOL_KEEPALIVE_S) as txn:
            result = txn.result
            loaded = result is None
            if result is None:
                txn.token()  # opens it, so `txn list` shows it, and an operator can abort it
                _load_files(txn, stream, files, events, quiet=options.json)
                result = txn.commit()
    seconds = round(time.monotonic() - started, 3)
    _show_load(stream, result, len(files) if loaded else 0, seconds, as_json=options.json)


def _checked_delimiter(given: str) -> str:
    """The delimiter that an option gives. Raises: InvalidArgument."""
    delimiter = "\t" if given == "\\t" else given
    if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
        raise InvalidArgument(
            f"--delimiter {delimiter!r} must be one ASCII character, but no quote or line end"
        )
    return delimiter


def _show_load(stream: str, result: Result, files: int, seconds: float, *, as_json: bool) -> None:
    """Print what a load did. ``files``: 0 if its name was committed before."""
    rows, txn_id = result.counts.committed, result.txn_id.hex()
    document = {
        "stream": stream,
        "txn_id": txn_id,
        "name": result.name,
        "already_committed": not files,
        "commit_timestamp": result.commit_timestamp,
        "rows": rows,
        "files": files,
        "seconds": seconds,
    }
    line = (
        f"{count_of(rows, 'row')} of {count_of(files, 'file')} in {stream}, all at once, in {seconds:.1f} s "
        f"({rows / max(seconds, 0.001):,.0f}/s): transaction {txn_id}"
    )
    if not files:
        line = (
            f"{result.name} was loaded earlier: transaction {txn_id}, {count_of(rows, 'event')}; nothing was "
            "written now"
        )
    print_result(document, line, as_json=as_json)


def _load_files(
    txn: Transaction, stream: str, files: Sequence[Path], events: Events, *, quiet: bool
) -> None:
    from anabranch.cli.load_csv import opened

    with progress_bar(quiet=quiet) as bar:
        for path in files:
            with opened(path, events) as file:
                size = None if str(path) == "-" else path.stat().st_size
                task = begin_task(bar, path.name, size)
                for batch in file.batches():
                    txn.write_batch(stream, batch)
                    bar.update(task, completed=file.done)
                bar.update(task, completed=size)
