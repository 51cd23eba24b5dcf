"""`anabranch stream`: create, list, describe, scale, draw, alter, truncate, delete and recover streams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import (
    App,
    ClusterOptions,
    Near,
    OnlyScope,
    OperatorOptions,
    Segments,
    StreamName,
    StreamSettings,
    Yes,
    argument,
    confirm,
    moment_of,
    option,
    parse_kafka,
    parse_range,
    parse_segment,
)
from anabranch.cli.output import (
    Column,
    Grid,
    print_note,
    print_result,
    show,
)
from anabranch.core.stream_states import FORGOTTEN
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownStream,
    count_of,
)
from anabranch.presentation.rows import events_of, segment_name, stream_row, topic_id_of
from anabranch.protocol.hybrid_time import to_text
from anabranch.topics.names import topics_of

if TYPE_CHECKING:
    from anabranch import Client, StreamDescription
    from anabranch.presentation.history import History

app = App(
    no_args_is_help=True, help="Create, list, describe, scale, draw, alter and delete streams."
)
_COLUMNS = (
    "stream",
    Column("segments", lambda row: len(row["segments"])),
    "stream_epoch",
    "reference_epoch",
    "state",
    "trouble",
)
Last = Annotated[int, option("--last", "Only this number of the newest epochs.", min=1)]


@app.command("create")
def create(
    options: ClusterOptions,
    stream: StreamName,
    segments: Segments = 1,
    setting: StreamSettings = None,
    adopt: Annotated[
        bool,
        option(
            "--adopt",
            "Use an existing topic with records, which readers will get.",
        ),
    ] = False,
    near: Near = None,
    description: Annotated[
        str, option("--description TEXT", "Text for people. Needs feature level 2.")
    ] = "",
) -> None:
    """Create a stream, and its scope if that is new.

    A stream that exists with the same settings and number of segments is not changed.
    """
    settings = parse_kafka(setting, "--setting")
    with options.client() as client:
        client.create_stream(
            stream,
            segments=segments,
            settings=settings,
            adopt=adopt,
            near=near,
            description=description,
        )
        created = client.describe(stream)
    row = stream_row(created)
    print_result(row, Grid("Created", [row], _COLUMNS), as_json=options.json)


@app.command("list")
def list_streams(
    options: ClusterOptions,
    scope: OnlyScope = None,
) -> None:
    """List streams."""
    with options.client() as client:
        found = client.streams(scope)
    losses = options.losses()
    rows = sorted(map(stream_row, found), key=itemgetter("stream"))
    show("streams", rows, _COLUMNS, as_json=options.json, losses=losses)
    found.check()


@app.command("describe")
def describe(
    options: ClusterOptions,
    stream: StreamName,
    epochs: Annotated[bool, option("--epochs -e", "Also its epochs, from the history.")] = False,
    last: Last = 200,
) -> None:
    """Show a stream: its segments and key ranges, its journal, its settings, and what prevents its deletion."""
    from anabranch.core.decisions.scopes import text_of
    from anabranch.presentation import history

    with options.client() as client:
        found = client.describe(stream)
        ports = client.reader_ports()
        effective = effective_of(client, stream)
    losses = options.losses()
    past = (
        history.read_history(ports, stream, last=last, timeout=options.timeout) if epochs else None
    )
    document = stream_row(found) | {"effective": effective, "losses": losses}
    if past is not None:
        document["epochs"] = _epoch_documents(past)
    print_result(
        document,
        _segments(found),
        *([f"description: {found.description}"] if found.description else ()),
        *([Grid("Epochs", _epoch_rows(past), _EPOCH_COLUMNS)] if past is not None else ()),
        f"state: {found.state}" + (f", {found.trouble}" if found.trouble else ""),
        f"partitions: {found.partitions:,}",
        f"journal indexed up to: {_numbers(found.journal) or 'nothing yet'}",
        f"journal deleted up to: {_numbers(found.low_water) or 'nothing yet'}",
        f"bytes of open transactions: {found.uncommitted_bytes:,}",
        f"journal records rejected: {_numbers(found.rejected) or 'none'}",
        f"foreign records in the stream: {f'{found.foreign:,}' if found.foreign else 'none'}",
        *(f"deletion is prevented by {text_of(blocker)}" for blocker in found.blockers),
        *losses,
        settings_of(found, effective),
        as_json=options.json,
    )


def _numbers(found: Mapping[Any, int]) -> str:
    return ", ".join(f"{name}: {number:,}" for name, number in sorted(found.items()))


@app.command("scale")
def scale(
    options: ClusterOptions,
    stream: StreamName,
    segments: Annotated[
        int | None,
        option(
            "--segments -s",
            "Scale to this number of equal ranges; segments that fit stay.",
            min=1,
            max=10_000,
        ),
    ] = None,
    seal: Annotated[
        list[str] | None,
        option("--seal SEGMENT", "Seal this segment (NUMBER@EPOCH, or an id). Repeatable."),
    ] = None,
    ranges: Annotated[
        list[str] | None,
        option(
            "--range LOW:HIGH",
            "Open a segment with these key positions. Repeatable.",
        ),
    ] = None,
) -> None:
    """Change the segments of a stream. Open transactions continue.

    Give --segments; or --seal and --range, which must cover exactly the same keys.
    """
    sealed = [parse_segment(each) for each in seal or ()]
    opened = [parse_range(each) for each in ranges or ()]
    if (segments is None) == (not sealed and not opened):
        raise InvalidArgument("give --segments N, or --seal and --range")
    with options.client() as client:
        found = client.scale(stream, segments, seal=sealed, ranges=opened)
    print_result(stream_row(found), _segments(found), as_json=options.json)


@app.command("progress")
def progress(
    options: ClusterOptions,
    streams: Annotated[list[str], argument("SCOPE/STREAM", "The streams that are copied.")],
    group: Annotated[str, option("--group -g", "The consumer group that feeds the copy.")],
) -> None:
    """Show up to which time a copy of streams is complete: its consumer group has read all commits up to then."""
    with options.client() as client:
        at = client.progress(streams, group, timeout=options.timeout)
    document = {"group": group, "timestamp": at, "at": to_text(at)}
    print_result(document, (str(at), to_text(at)), as_json=options.json)


@app.command("draw")
def draw_stream(
    options: ClusterOptions,
    stream: StreamName,
    output: Annotated[
        Path | None, option("--output -o FILE", "The SVG file (default: standard output).")
    ] = None,
    last: Last = 200,
) -> None:
    """Draw a stream's history as SVG: its segments in each epoch, and their commits."""
    from anabranch.presentation import history

    with options.client() as client:
        client.describe(stream)  # raises if the stream does not exist
        ports = client.reader_ports()
    past = history.read_history(ports, stream, last=last, timeout=options.timeout)
    picture = history.draw(past.epochs, past.commits, f"Stream {stream}")
    if output is not None:
        output.write_text(picture, encoding="utf-8")
    document = {
        "stream": stream,
        "epochs": len(past.epochs),
        "commits": len(past.commits),
        "file": str(output) if output is not None else None,
        "svg": picture if output is None else None,
    }
    lines = [f"{count_of(len(past.epochs), 'epoch')} drawn to {output}"]
    if output is None:
        lines = picture.splitlines()
    print_result(document, *lines, as_json=options.json)


@app.command("recover")
def recover(options: OperatorOptions, stream: StreamName) -> None:
    """Make a LOST stream ACTIVE again, if its topics are those from before the loss, by their ids.

    Transactions that the loss aborted stay aborted.
    """
    with options.client() as client:
        state = client.recover_stream(stream).state
    print_result({"stream": stream, "state": state}, f"{stream} is {state}", as_json=options.json)


@app.command("forget")
def forget(options: OperatorOptions, stream: StreamName, yes: Yes = False) -> None:
    """Remove a LOST stream and the rest of its topics for good, so that its name can be used again.

    The command is refused while an unfinished transaction writes to the stream.
    """
    with options.client_after(
        f"The rest of {stream} and its topics will be deleted for good.", yes=yes
    ) as client:
        client.forget_stream(stream)
    line = f"{stream} is forgotten: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, line, as_json=options.json)


@app.command("delete")
def delete(
    options: OperatorOptions,
    stream: StreamName,
    despite: Annotated[
        list[str] | None,
        option("--despite PROCESSOR", "A processor that may lose this input. Repeatable."),
    ] = None,
    yes: Yes = False,
) -> None:
    """Delete a stream with all its events, so that its name can be used again.

    The command is refused while an unfinished transaction writes to the stream, or a processor reads it that
    --despite does not name.
    """
    with options.client() as client:
        found = client.describe(stream)
        topic_id = topic_id_of(lambda: client.topic_id(stream))
        topics = ", ".join(topics_of(stream))
        segments = count_of(len(found.segments), "segment")
        # Counting may take long for a LOST stream, and only the question needs it.
        events = "" if yes else f", {events_of(lambda: client.count_events(stream))}"
        confirm(
            f"{stream} ({found.state}, {segments}{events}) will be deleted for good: all its events, the topics "
            f"{topics}, and the positions of all groups there.",
            yes=yes,
        )
        if not yes and topic_id != topic_id_of(lambda: client.topic_id(stream)):
            raise IllegalState(
                f"{stream} was deleted and made again meanwhile, so nothing was done: repeat the command"
            )
        client.delete_stream(stream, despite=despite or ())
    line = f"{stream} is deleted: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, line, as_json=options.json)


@app.command("alter")
def alter(
    options: OperatorOptions,
    stream: StreamName,
    setting: StreamSettings = None,
    unset: Annotated[
        list[str] | None,
        option("--unset NAME", "Remove a setting. Repeatable."),
    ] = None,
) -> None:
    """Change settings of a stream, such as retention.ms. Transactions and readers continue."""
    wanted: dict[str, str | None] = {**parse_kafka(setting, "--setting")}
    wanted |= dict.fromkeys(unset or ())
    if not wanted:
        raise InvalidArgument("give --setting NAME=VALUE or --unset NAME")
    with options.client() as client:
        found = client.alter_stream(stream, wanted)
        effective = effective_of(client, stream)
    document = stream_row(found) | {"effective": effective}
    print_result(document, settings_of(found, effective), as_json=options.json)


@app.command("truncate")
def truncate(
    options: OperatorOptions,
    stream: StreamName,
    until: Annotated[
        str, option("--until TIME", "Delete up to a commit timestamp or an ISO 8601 time.")
    ],
    yes: Yes = False,
) -> None:
    """Delete the events of a stream that were committed up to a time."""
    moment = moment_of(until, "--until")
    if moment is None:
        raise InvalidArgument("--until can't be now: give a commit timestamp, or a time")
    with options.client_after(
        f"All events of {stream} up to {until} will be deleted for good.", yes=yes
    ) as client:
        client.truncate_stream(stream, moment)
    line = f"{stream} begins after {until}"
    print_result({"stream": stream, "until": until}, line, as_json=options.json)


def effective_of(client: Client, stream: str) -> dict[str, str]:
    """The settings that are in effect by the brokers; empty if this client may not ask."""
    try:
        return client.effective_settings(stream)
    except (NotAuthorized, NotReady, UnknownStream) as error:
        print_note(f"the settings in effect are not known: {error}")
        return {}


def settings_of(found: StreamDescription, effective: Mapping[str, str]) -> Grid:
    """A table of the settings that were requested and those in effect."""
    rows = [
        {
            "setting": name,
            "wanted": found.settings.get(name),
            "effective": effective.get(name),
        }
        for name in sorted({*found.settings, *effective})
    ]
    return Grid(f"{found.stream}: settings", rows, ("setting", "wanted", "effective"))


_EPOCH_COLUMNS = (
    Column("epoch", "stream_epoch"), "copy_of", "opened", "segments", "sealed", "commits", "events"
)  # fmt: skip


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
        fields = asdict(epoch)
        documents.append(row | {name: fields[name] for name in ("timestamp", "segments", "sealed")})
    return documents


def _segments(found: StreamDescription) -> Grid:
    return Grid(
        f"{found.stream}: stream epoch {found.stream_epoch}, "
        f"reference epoch {found.reference_epoch}",
        stream_row(found)["segments"],
        (
            Column("segment", lambda row: segment_name(row["segment_id"])),
            Column("keys from", lambda row: f"{row['low']:#010x}"),
            Column("keys to", lambda row: f"{row['high']:#011x}"),
            "partition",
        ),
    )
