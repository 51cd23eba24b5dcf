"""`anabranch write`: lines of standard input into a stream, in one transaction."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated, BinaryIO

from anabranch.cli.options import ClusterOptions, LoadedAs, StreamName, option
from anabranch.cli.output import count_of, print_result
from anabranch.core import defaults
from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import split_stream
from anabranch.errors import InvalidArgument

_LONGEST = 64 << 20  # bytes of a line, the most that any stream takes


def command(
    options: ClusterOptions,
    stream: StreamName,
    key: Annotated[str | None, option("--key -k KEY", "The key of all events.")] = None,
    separator: Annotated[
        str | None,
        option(
            "--key-separator TEXT",
            "Each line is a key, this, and a value; a line without it is refused.",
        ),
    ] = None,
    name: LoadedAs = None,
) -> None:
    """Write lines of standard input to a stream, each an event: all at once, or none.

    Events have the line's bytes without its end; an empty line is an event, too.
    """
    if key is not None and separator is not None:
        raise InvalidArgument("--key is of all lines, --key-separator of each: give one of them")
    if separator == "":
        raise InvalidArgument("--key-separator is empty")
    fixed = None if key is None else key.encode()
    scope, _ = split_stream(stream)
    with options.client() as client:
        client.describe(stream)
        with client.begin(scope, name=name, keepalive=defaults.TOOL_KEEPALIVE_S) as txn:
            result = txn.result
            if (written := result is None) or result is None:
                txn.token()  # its heartbeats go on, however slowly lines come
                for found, value in _events(sys.stdin.buffer, fixed, separator):
                    txn.write(stream, value, found)
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
        line = f"{result.name} was written before: {line}; nothing was written now"
    print_result(document, line, as_json=options.json)


def _events(
    lines: BinaryIO, key: bytes | None, separator: str | None
) -> Iterator[tuple[bytes | None, bytes]]:
    """(key, value) of each line. `InvalidArgument` names the line that is none."""
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
