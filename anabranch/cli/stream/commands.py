"""`anabranch stream`: create, list, describe, scale and draw streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli import session
from anabranch.cli.options import (
    App,
    ClusterOptions,
    StreamName,
    argument,
    option,
)
from anabranch.cli.output import count_of, print_json, print_line, print_note, print_table
from anabranch.cli.session import parse_kafka
from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import segment_id
from anabranch.core.partitioner import SPACE
from anabranch.errors import InvalidArgument, NotAuthorized, NotReady, UnknownStream
from anabranch.shown.words import segment_name as segment_name

if TYPE_CHECKING:
    from anabranch import Client, StreamDescription
    from anabranch.shown.history import History

app = App(
    no_args_is_help=True, help="Create, list, describe, scale, draw, alter and delete streams."
)
Settings = Annotated[
    list[str] | None,
    option(
        "--setting NAME=VALUE", "A setting of the stream, such as retention.ms=-1. May be repeated."
    ),
]
Last = Annotated[int, option("--last", "Draw only so many epochs, the latest.", min=1)]


@app.command("create")
def create(
    options: ClusterOptions,
    stream: StreamName,
    segments: Annotated[int, option("--segments -s", "How many segments.", min=1, max=10_000)] = 1,
    setting: Settings = None,
    adopt: Annotated[
        bool,
        option(
            "--adopt",
            "Take its topic though it has records, which readers get. Takes --lane admin.",
        ),
    ] = False,
    near: Annotated[
        str | None, option("--near SCOPE", "A scope that a new one shares transactions with.")
    ] = None,
) -> None:
    """Create a stream, and its scope if that is new.

    A stream that exists with as many segments and the same settings stays as it is.
    """
    settings = parse_kafka(setting, "--setting")
    with options.client() as client:
        client.create_stream(stream, segments=segments, settings=settings, adopt=adopt, near=near)
        created = client.describe(stream)
    if options.json:
        print_json(document_of(created))
    else:
        _show([created], title="Created")


@app.command("list")
def list_streams(
    options: ClusterOptions,
    scope: Annotated[str | None, argument("SCOPE", "Only this scope.")] = None,
) -> None:
    """List streams."""
    with options.client() as client:
        found = client.streams(scope)
    losses = session.losses_of(options.target())
    found.sort(key=lambda each: each.stream)
    if options.json:
        print_json({"streams": [document_of(each) for each in found], "losses": losses})
    else:
        _show(found, title="Streams")
        _show_losses(losses)
    found.check()


@app.command("describe")
def describe(
    options: ClusterOptions,
    stream: StreamName,
    epochs: Annotated[bool, option("--epochs -e", "Its epochs too, from the history.")] = False,
    last: Last = 200,
) -> None:
    """Show a stream: its segments with their key ranges, what its journal holds, and who holds it."""
    from anabranch.core.decisions.scopes import text_of
    from anabranch.shown import history

    with options.client() as client:
        found = client.describe(stream)
        ports = client.reader_ports()
        effective = effective_of(client, stream)
    losses = session.losses_of(options.target())
    past = (
        history.read_history(ports, stream, last=last, timeout=options.timeout) if epochs else None
    )
    if options.json:
        told = {"epochs": _epoch_documents(past)} if past is not None else {}
        print_json(document_of(found) | {"effective": effective, "losses": losses} | told)
        return
    _show_segments(found)
    if past is not None:
        print_table("Epochs", _EPOCH_COLUMNS, (list(e.values()) for e in _epoch_rows(past)))
    print_line(f"state: {found.state}" + (f", {found.trouble}" if found.trouble else ""))
    print_line(f"partitions: {found.partitions:,}")
    journal = ", ".join(f"{p}: {end:,}" for p, end in sorted(found.journal.items()))
    print_line(f"journal indexed up to: {journal or 'nothing yet'}")
    low_water = ", ".join(f"{p}: {start:,}" for p, start in sorted(found.low_water.items()))
    print_line(f"journal deleted up to: {low_water or 'nothing yet'}")
    print_line(f"bytes of open transactions: {found.staged_bytes:,}")
    rejected = ", ".join(f"{why}: {count:,}" for why, count in sorted(found.rejected.items()))
    print_line(f"journal records rejected: {rejected or 'none'}")
    print_line(
        f"foreign records in the stream: {f'{found.foreign:,}' if found.foreign else 'none'}"
    )
    for holder in found.holders:
        print_line(f"held by {text_of(holder)}")
    _show_losses(losses)
    show_settings(found, effective)


@app.command("scale")
def scale(
    options: ClusterOptions,
    stream: StreamName,
    segments: Annotated[
        int | None,
        option(
            "--segments -s",
            "So many segments of even ranges; those that fit already stay.",
            min=1,
            max=10_000,
        ),
    ] = None,
    seal: Annotated[
        list[str] | None,
        option("--seal SEGMENT", "By hand: seal this one, NUMBER@EPOCH or an id. May be repeated."),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        option(
            "--range LOW:HIGH",
            "By hand: open a segment with these key positions instead. May be repeated.",
        ),
    ] = None,
) -> None:
    """Change the segments of a stream. Open transactions go on.

    Give --segments; or --seal and --range, which have to cover exactly the same keys.
    """
    sealed = [parse_segment(each) for each in seal or ()]
    opened = [parse_range(each) for each in ranges or ()]
    if (segments is None) == (not sealed and not opened):
        raise InvalidArgument("give --segments N, or --seal and --range")
    with options.client() as client:
        found = client.scale(stream, segments, seal=sealed, ranges=opened)
    if options.json:
        print_json(document_of(found))
    else:
        _show_segments(found)


@app.command("progress")
def progress(
    options: ClusterOptions,
    streams: Annotated[list[str], argument("SCOPE/STREAM", "The streams that are copied.")],
    group: Annotated[str, option("--group -g", "The consumer group that feeds the copy.")],
) -> None:
    """The time as of which a copy is whole: all that was committed until then, its consumer group has read."""
    with options.client() as client:
        at = client.progress(streams, group, timeout=options.timeout)
    if options.json:
        print_json({"group": group, "timestamp": at, "at": to_text(at)})
    else:
        print_line(str(at), to_text(at))


@app.command("draw")
def draw_stream(
    options: ClusterOptions,
    stream: StreamName,
    output: Annotated[
        Path | None, option("--output -o FILE", "The SVG file (default: standard output).")
    ] = None,
    last: Last = 200,
) -> None:
    """Draw a stream's history as SVG: how its segments split and join, and what was committed in them."""
    from anabranch.shown import history
    from anabranch.shown.draw import draw

    with options.client() as client:
        client.describe(stream)  # raises if the stream does not exist
        ports = client.reader_ports()
    past = history.read_history(ports, stream, last=last, timeout=options.timeout)
    picture = draw(past.epochs, past.commits, f"Stream {stream}")
    if output is not None:
        output.write_text(picture, encoding="utf-8")
    if options.json:
        print_json(
            {
                "stream": stream,
                "epochs": len(past.epochs),
                "commits": len(past.commits),
                "file": str(output) if output is not None else None,
                "svg": picture if output is None else None,
            }
        )
    elif output is None:
        for line in picture.splitlines():
            print_line(line)
    else:
        print_line(f"{count_of(len(past.epochs), 'epoch')} drawn to {output}")


def effective_of(client: Client, stream: str) -> dict[str, str]:
    """The settings that brokers tell; none where this client may not ask."""
    try:
        return client.effective_settings(stream)
    except (NotAuthorized, NotReady, UnknownStream) as error:
        print_note(f"the settings in effect are not known: {error}")
        return {}


def show_settings(found: StreamDescription, effective: Mapping[str, str]) -> None:
    """The settings that were asked for, beside those in effect."""
    names = sorted({*found.settings, *effective})
    columns = ("setting", "wanted", "effective")
    rows = ((name, found.settings.get(name, ""), effective.get(name, "")) for name in names)
    print_table(f"{found.stream}: settings", columns, rows)


_EPOCH_COLUMNS = ("epoch", "copy of", "opened", "segments", "sealed", "commits", "events")


def _epoch_rows(past: History) -> list[dict[str, Any]]:
    rows = []
    for epoch in past.epochs:
        copied = epoch.reference_epoch if epoch.reference_epoch != epoch.stream_epoch else None
        commits = past.of_epoch(epoch.stream_epoch)
        rows.append(
            {
                "stream_epoch": epoch.stream_epoch,
                "copy_of": copied,
                "opened": to_text(epoch.timestamp),
                "segments": len(epoch.segments),
                "sealed": len(epoch.sealed),
                "commits": len(commits),
                "events": sum(part.count for commit in commits for part in commit.segments),
            }
        )
    return rows


def _epoch_documents(past: History) -> list[dict[str, Any]]:
    documents = []
    for epoch, row in zip(past.epochs, _epoch_rows(past), strict=True):
        told = asdict(epoch)
        documents.append(row | {name: told[name] for name in ("timestamp", "segments", "sealed")})
    return documents


def _show_segments(found: StreamDescription) -> None:
    print_table(
        f"{found.stream}: stream epoch {found.stream_epoch}, "
        f"reference epoch {found.reference_epoch}",
        ("segment", "keys from", "keys to", "partition"),
        (
            (segment_name(s.segment_id), f"{s.low:#010x}", f"{s.high:#011x}", s.partition)
            for s in found.segments
        ),
    )


def document_of(found: StreamDescription) -> dict[str, Any]:
    """A stream as JSON."""
    return {
        "stream": found.stream,
        "stream_epoch": found.stream_epoch,
        "reference_epoch": found.reference_epoch,
        "segments": [asdict(segment) for segment in found.segments],
        "partitions": found.partitions,
        "settings": dict(found.settings),
        "rejected": dict(found.rejected),
        "journal": {str(partition): end for partition, end in sorted(found.journal.items())},
        "low_water": {str(partition): at for partition, at in sorted(found.low_water.items())},
        "staged_bytes": found.staged_bytes,
        "state": found.state,
        "trouble": found.trouble,
        "foreign": found.foreign,
    }


def _show_losses(losses: Sequence[str]) -> None:
    """Print the losses of all streams where brokers do not offer a call."""
    for text in losses:
        print_line(text)


def _show(found: Sequence[StreamDescription], *, title: str) -> None:
    print_table(
        title,
        ("stream", "segments", "stream epoch", "reference epoch", "state", "trouble"),
        (
            (s.stream, len(s.segments), s.stream_epoch, s.reference_epoch, s.state, s.trouble)
            for s in found
        ),
    )


# -- segments and key ranges as people write them ------------------------------------------------------


def parse_segment(text: str, option: str = "--seal") -> int:
    """The id of a segment given as number@epoch, or as the id itself. Else `InvalidArgument`."""
    number, at, epoch = text.partition("@")
    try:
        if not at:
            found = int(text, 0)
            if 0 <= found < 1 << 63:
                return found
        elif 0 <= int(number) < 1 << 31 and 0 <= int(epoch) < 1 << 31:
            return segment_id(int(epoch), int(number))
    except ValueError:
        pass
    raise InvalidArgument(
        f"{option} {text!r} is no segment: write NUMBER@EPOCH, as `anabranch stream describe` does, or an id"
    )


def parse_range(text: str) -> tuple[int, int]:
    """(low, high) of ``LOW:HIGH``, hexadecimal with 0x or decimal. Else `InvalidArgument`."""
    low, _, high = text.partition(":")
    try:
        found = int(low, 0), int(high, 0)
    except ValueError:
        found = (0, 0)
    if 0 <= found[0] < found[1] <= SPACE:
        return found
    raise InvalidArgument(
        f"--range {text!r} is no range of keys: write LOW:HIGH with 0 <= LOW < HIGH <= {SPACE:#x}"
    )
