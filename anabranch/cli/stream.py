"""`anabranch stream`: create, list and describe streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli.options import (
    DEFAULT_TIMEOUT_S,
    Bootstrap,
    Json,
    Kafka,
    Prefix,
    Timeout,
    Verbose,
)
from anabranch.topics.names import DEFAULT_PREFIX

if TYPE_CHECKING:
    from anabranch import StreamDescription

app = typer.Typer(no_args_is_help=True, help="Create, list and describe streams.")
StreamName = Annotated[str, typer.Argument(metavar="SCOPE/STREAM", help="The stream.")]


@app.command("create")
def create(
    stream: StreamName,
    segments: Annotated[
        int, typer.Option("--segments", "-s", min=1, max=10_000, help="How many segments.")
    ] = 1,
    bootstrap: Bootstrap = None,
    prefix: Prefix = DEFAULT_PREFIX,
    kafka: Kafka = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Create a stream, and its scope if that is new.

    A stream that exists with as many segments is left as it is.
    """
    from anabranch.cli.session import connected, target_of

    with connected(target_of(bootstrap, prefix, timeout, kafka)) as client:
        client.create_stream(stream, segments=segments)
        _show([client.describe(stream)], as_json=json, title="Created", one=True)


@app.command("list")
def list_streams(
    scope: Annotated[str | None, typer.Argument(metavar="SCOPE", help="Only this scope.")] = None,
    bootstrap: Bootstrap = None,
    prefix: Prefix = DEFAULT_PREFIX,
    kafka: Kafka = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """List streams."""
    from anabranch.cli.session import connected, target_of

    with connected(target_of(bootstrap, prefix, timeout, kafka)) as client:
        found = sorted(client.streams(scope), key=lambda each: each.stream)
    _show(found, as_json=json, title="Streams")


@app.command("describe")
def describe(
    stream: StreamName,
    bootstrap: Bootstrap = None,
    prefix: Prefix = DEFAULT_PREFIX,
    kafka: Kafka = None,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Show a stream: its segments with their key ranges, and what its journal holds."""
    from anabranch.cli.output import print_json, print_line, print_table
    from anabranch.cli.session import connected, target_of

    with connected(target_of(bootstrap, prefix, timeout, kafka)) as client:
        found = client.describe(stream)
    if json:
        print_json(document_of(found))
        return
    print_table(
        f"{found.stream}: stream epoch {found.stream_epoch}, "
        f"reference epoch {found.reference_epoch}",
        ("segment", "keys from", "keys to", "partition", "start offset"),
        (
            (f"{_number(s.segment_id)}", f"{s.low:#010x}", f"{s.high:#011x}", s.partition,
             s.start_offset)
            for s in found.segments
        ),
    )  # fmt: skip
    journal = ", ".join(f"{p}: {end:,}" for p, end in sorted(found.journal.items()))
    print_line(f"journal indexed up to: {journal or 'nothing yet'}")
    rejected = ", ".join(f"{why}: {count:,}" for why, count in sorted(found.rejected.items()))
    print_line(f"journal records rejected: {rejected or 'none'}")
    if found.settings:
        settings = ", ".join(f"{name}={value}" for name, value in sorted(found.settings.items()))
        print_line(f"settings: {settings}")


def _number(segment_id: int) -> str:
    return f"{segment_id & 0xFFFFFFFF}@{segment_id >> 32}"


def document_of(found: StreamDescription) -> dict[str, Any]:
    """A stream as JSON."""
    return {
        "stream": found.stream,
        "stream_epoch": found.stream_epoch,
        "reference_epoch": found.reference_epoch,
        "segments": [
            {
                "segment_id": s.segment_id,
                "low": s.low,
                "high": s.high,
                "partition": s.partition,
                "start_offset": s.start_offset,
            }
            for s in found.segments
        ],
        "settings": dict(found.settings),
        "rejected": dict(found.rejected),
        "journal": {str(partition): end for partition, end in sorted(found.journal.items())},
    }


def _show(
    found: Sequence[StreamDescription], *, as_json: bool, title: str, one: bool = False
) -> None:
    from anabranch.cli.output import print_json, print_table

    if as_json:
        documents = [document_of(each) for each in found]
        print_json(documents[0] if one else {"streams": documents})
        return
    print_table(
        title,
        ("stream", "segments", "stream epoch", "reference epoch"),
        ((s.stream, len(s.segments), s.stream_epoch, s.reference_epoch) for s in found),
    )
