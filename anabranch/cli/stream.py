"""`anabranch stream`: create, list, describe, scale, draw, alter, truncate and delete streams; recover them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli import session
from anabranch.cli.options import (
    App,
    ClusterOptions,
    Near,
    OnlyScope,
    OperatorOptions,
    Segments,
    Settings,
    StreamName,
    Yes,
    argument,
    confirm,
    moment_of,
    option,
    parse_range,
    parse_segment,
)
from anabranch.cli.output import (
    Column,
    print_json,
    print_line,
    print_note,
    print_result,
    print_table,
    show,
)
from anabranch.cli.session import parse_kafka
from anabranch.core.hybrid_time import to_text
from anabranch.core.stream_states import FORGOTTEN
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownStream,
)
from anabranch.presentation.rows import stream_row
from anabranch.presentation.words import count_of, events_of, segment_name, topic_id_of
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
Last = Annotated[int, option("--last", "Draw only so many epochs, the latest.", min=1)]


@app.command("create")
def create(
    options: ClusterOptions,
    stream: StreamName,
    segments: Segments = 1,
    setting: Settings = None,
    adopt: Annotated[
        bool,
        option(
            "--adopt",
            "Take its topic though it has records, which readers get. Takes --lane admin.",
        ),
    ] = False,
    near: Near = None,
) -> None:
    """Create a stream, and its scope if that is new.

    A stream that exists with as many segments and the same settings stays as it is.
    """
    settings = parse_kafka(setting, "--setting")
    with options.client() as client:
        client.create_stream(stream, segments=segments, settings=settings, adopt=adopt, near=near)
        created = client.describe(stream)
    if options.json:
        print_json(stream_row(created))
    else:
        print_table("Created", [stream_row(created)], _COLUMNS)


@app.command("list")
def list_streams(
    options: ClusterOptions,
    scope: OnlyScope = None,
) -> None:
    """List streams."""
    with options.client() as client:
        found = client.streams(scope)
    losses = session.losses_of(options.target())
    rows = sorted(map(stream_row, found), key=itemgetter("stream"))
    show("streams", rows, _COLUMNS, as_json=options.json, losses=losses)
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
    from anabranch.presentation import history

    with options.client() as client:
        found = client.describe(stream)
        ports = client.reader_ports()
        effective = effective_of(client, stream)
    losses = session.losses_of(options.target())
    past = (
        history.read_history(ports, stream, last=last, timeout=options.timeout) if epochs else None
    )
    if options.json:
        more = {"epochs": _epoch_documents(past)} if past is not None else {}
        print_json(stream_row(found) | {"effective": effective, "losses": losses} | more)
        return
    _show_segments(found)
    if past is not None:
        print_table("Epochs", _epoch_rows(past), _EPOCH_COLUMNS)
    print_line(f"state: {found.state}" + (f", {found.trouble}" if found.trouble else ""))
    print_line(f"partitions: {found.partitions:,}")
    journal = ", ".join(f"{p}: {end:,}" for p, end in sorted(found.journal.items()))
    print_line(f"journal indexed up to: {journal or 'nothing yet'}")
    low_water = ", ".join(f"{p}: {start:,}" for p, start in sorted(found.low_water.items()))
    print_line(f"journal deleted up to: {low_water or 'nothing yet'}")
    print_line(f"bytes of open transactions: {found.uncommitted_bytes:,}")
    rejected = ", ".join(f"{why}: {count:,}" for why, count in sorted(found.rejected.items()))
    print_line(f"journal records rejected: {rejected or 'none'}")
    print_line(
        f"foreign records in the stream: {f'{found.foreign:,}' if found.foreign else 'none'}"
    )
    for blocker in found.blockers:
        print_line(f"held by {text_of(blocker)}")
    for text in losses:
        print_line(text)
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
        print_json(stream_row(found))
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
    from anabranch.presentation import history
    from anabranch.presentation.draw import draw

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


@app.command("recover")
def recover(options: OperatorOptions, stream: StreamName) -> None:
    """Recover a LOST stream whose topics are the same ones as before the loss."""
    with options.client() as client:
        state = client.recover_stream(stream).state
    print_result({"stream": stream, "state": state}, f"{stream} is {state}", as_json=options.json)


@app.command("forget")
def forget(options: OperatorOptions, stream: StreamName, yes: Yes = False) -> None:
    """Remove a LOST stream for good, so that its name can be used again.

    Deletes the rest of its topics. Refused for a stream that is not LOST, and while a transaction that is not
    over has a part in it: the refusal names the command that ends it.
    """
    connecting = options.client()  # wrong options are refused before the question
    confirm(f"All that is left of {stream} and its topics will be deleted for good.", yes=yes)
    with connecting as client:
        client.forget_stream(stream)
    line = f"{stream} is forgotten: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, line, as_json=options.json)


@app.command("delete")
def delete(
    options: OperatorOptions,
    stream: StreamName,
    despite: Annotated[
        list[str] | None,
        option(
            "--despite PROCESSOR", "A processor that reads it, and may lose it. May be repeated."
        ),
    ] = None,
    yes: Yes = False,
) -> None:
    """Delete a stream with all its events, so that its name can be used again.

    Refused while a transaction that is not over has a part in it, or a processor reads it that --despite does not
    name. `anabranch stream describe` shows these processors.
    """
    with options.client() as client:
        found = client.describe(stream)
        topic_id = topic_id_of(lambda: client.topic_id(stream))
        topics = ", ".join(topics_of(stream))
        segments = count_of(len(found.segments), "segment")
        # A lost stream may take its time: counted for the question alone.
        events = "" if yes else f", {events_of(lambda: client.count_events(stream))}"
        confirm(
            f"{stream} ({found.state}, {segments}{events}) will be deleted for good: all its events, the topics "
            f"{topics}, and the positions of all groups there.",
            yes=yes,
        )
        if not yes and topic_id != topic_id_of(lambda: client.topic_id(stream)):
            raise IllegalState(
                f"{stream} is another stream than the one that was shown: it was made since. Nothing was done; "
                "look again"
            )
        client.delete_stream(stream, despite=despite or ())
    line = f"{stream} is deleted: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, line, as_json=options.json)


@app.command("alter")
def alter(
    options: OperatorOptions,
    stream: StreamName,
    setting: Settings = None,
    unset: Annotated[
        list[str] | None,
        option(
            "--unset NAME", "Take a setting back, as if it had not been given. May be repeated."
        ),
    ] = None,
) -> None:
    """Change settings of a stream, such as retention.ms; transactions and readers go on."""
    wanted: dict[str, str | None] = {**parse_kafka(setting, "--setting")}
    wanted |= dict.fromkeys(unset or ())
    if not wanted:
        raise InvalidArgument("give --setting NAME=VALUE or --unset NAME")
    with options.client() as client:
        found = client.alter_stream(stream, wanted)
        effective = effective_of(client, stream)
    if options.json:
        print_json(stream_row(found) | {"effective": effective})
    else:
        show_settings(found, effective)


@app.command("truncate")
def truncate(
    options: OperatorOptions,
    stream: StreamName,
    until: Annotated[
        str, option("--until TIME", "A commit timestamp, or a time in ISO 8601 with its zone.")
    ],
    yes: Yes = False,
) -> None:
    """Delete a stream's oldest events: all that was committed at or before a time, whole transactions only."""
    moment = moment_of(until, "--until")
    if moment is None:
        raise InvalidArgument("--until now: give a commit timestamp, or a time")
    connecting = options.client()  # wrong options are refused before the question
    confirm(f"All events of {stream} up to {until} will be deleted for good.", yes=yes)
    with connecting as client:
        client.truncate_stream(stream, moment)
    line = f"{stream} begins after {until}"
    print_result({"stream": stream, "until": until}, line, as_json=options.json)


def effective_of(client: Client, stream: str) -> dict[str, str]:
    """The settings that brokers tell; none where this client may not ask."""
    try:
        return client.effective_settings(stream)
    except (NotAuthorized, NotReady, UnknownStream) as error:
        print_note(f"the settings in effect are not known: {error}")
        return {}


def show_settings(found: StreamDescription, effective: Mapping[str, str]) -> None:
    """The settings that were asked for, beside those in effect."""
    rows = [
        {
            "setting": name,
            "wanted": found.settings.get(name),
            "effective": effective.get(name),
        }
        for name in sorted({*found.settings, *effective})
    ]
    print_table(f"{found.stream}: settings", rows, ("setting", "wanted", "effective"))


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


def _show_segments(found: StreamDescription) -> None:
    print_table(
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
