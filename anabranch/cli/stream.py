"""`anabranch stream` and `apply`: create, list, describe, scale, draw, alter, truncate, delete, recover streams."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from anabranch.cli.options import (
    App,
    ClusterOptions,
    Description,
    IfNotExists,
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
from anabranch.core.stream_settings import (
    BASE,
    BYTES,
    EVENTS,
    FIXED,
    PROCESSOR,
    SEGMENT_BYTES,
    TABLE,
    check_settings,
    in_force,
    is_table,
    setting_text,
)
from anabranch.errors import (
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    NotReady,
    UnknownScope,
    UnknownStream,
    WouldDelete,
    count_of,
)
from anabranch.presentation.rows import (
    bytes_fields,
    bytes_text,
    events_of,
    events_text,
    segment_name,
    segment_text,
    stream_row,
    time_text,
    topic_id_of,
)
from anabranch.protocol.hybrid_time import to_text
from anabranch.protocol.legal_names import split_stream
from anabranch.topics.names import stream_topic, topics_of

if TYPE_CHECKING:
    from anabranch import Client, StreamDescription
    from anabranch.presentation.history import History
    from anabranch.reading.group_lag import StreamCount

app = App(
    no_args_is_help=True, help="Create, list, describe, scale, draw, alter and delete streams."
)
_REJECTED = ("at", "partition", "offset", "key", "reason")
_COLUMNS = ("stream", Column("segments", lambda row: len(row["segments"])), "state", "trouble")
Last = Annotated[int, option("--last", "Only this number of the newest epochs.", min=1)]


@app.command("create")
def create(
    options: ClusterOptions,
    stream: StreamName,
    segments: Segments = None,
    setting: StreamSettings = None,
    adopt: Annotated[
        bool,
        option(
            "--adopt",
            "Use an existing topic with records, which readers will get.",
        ),
    ] = False,
    exclusive: Annotated[
        bool, option("--exclusive", "One transaction at a time writes a segment; can't be changed.")
    ] = False,
    near: Near = None,
    description: Description = "",
    if_not_exists: IfNotExists = False,
) -> None:
    """Create a stream, and its scope if that is new.

    A stream that exists with the same settings and number of segments is not changed.
    """
    settings = parse_kafka(setting, "--setting")
    with options.client() as client:
        is_new = not exists(client, stream)
        client.create_stream(
            stream,
            segments,
            settings,
            adopt=adopt,
            near=near,
            description=description,
            exclusive=exclusive,
            exist_ok=if_not_exists,
        )
        found = client.describe(stream)
    title = "Created" if is_new else "Nothing to do: the stream exists"
    row = stream_row(found)
    print_result(row | {"created": is_new}, Grid(title, [row], _COLUMNS), as_json=options.json)


def exists(client: Client, stream: str) -> bool:
    """Whether there is a stream that this client may see."""
    try:
        client.describe(stream)
    except (UnknownScope, UnknownStream, NotAuthorized):
        return False
    return True


_COUNT_S = 10.0  # of all streams: the command must not wait for brokers in trouble
_LIST_COLUMNS = (
    "stream",
    "kind",
    "state",
    Column("segments", lambda row: len(row["segments"])),
    Column("events", lambda row: events_text(row["events"], row["exact"]), True),
    "bytes",
    "newest_commit",
    "trouble",
)


@app.command("list")
def list_streams(
    options: ClusterOptions,
    scope: OnlyScope = None,
    brief: Annotated[
        bool, option("--brief", "Without events, bytes and newest commits: one request.")
    ] = False,
) -> None:
    """List streams: events, bytes and newest commit of each. Tables, and states of processors, are marked."""
    from anabranch.core.stream_states import ACTIVE

    with options.client() as client:
        found = client.streams(scope)
        active = [] if brief else [one.stream for one in found if one.state == ACTIVE]
        counts = _counts(client, active, options.timeout)
    losses = options.losses()
    topics = {stream: stream_topic(stream) for stream in active}
    sizes = options.topic_sizes([*topics.values()]) if topics else {}
    rows = []
    for one in sorted(found, key=attrgetter("stream")):
        row = stream_row(one) | {"kind": _kind(one.settings)} | _count_fields(counts, one.stream)
        rows.append(row | {"bytes": sizes.get(topics.get(one.stream, ""))})
    columns = _COLUMNS if brief else _LIST_COLUMNS
    show("streams", rows, columns, as_json=options.json, losses=losses)
    found.check()


def _counts(client: Client, streams: Sequence[str], timeout: float) -> dict[str, StreamCount]:
    from anabranch.reading.group_lag import count_streams

    if not streams:
        return {}
    return count_streams(client.reader_ports(), streams, min(timeout, _COUNT_S))


def _count_fields(counts: Mapping[str, StreamCount], stream: str) -> dict[str, Any]:
    """The number of a stream's events, and its newest commit; None if they are not known."""
    found = counts.get(stream)
    return {
        "events": found and found.events,
        "exact": found and found.exact,
        "newest_commit": to_text(found.newest) if found and found.newest else None,
    }


def _kind(settings: Mapping[str, str]) -> str:
    """Whether a stream is one of events, a table, a table's bases, or a processor's state."""
    if PROCESSOR in settings:
        return "state"
    if BASE in settings:
        return "bases"
    return "table" if is_table(settings) else "stream"


@app.command("describe")
def describe(
    options: ClusterOptions,
    stream: StreamName,
    epochs: Annotated[bool, option("--epochs -e", "Also its epochs, from the history.")] = False,
    last: Last = 200,
) -> None:
    """Show a stream: its segments and key ranges, its journal, its settings, and what prevents its deletion."""
    from anabranch.core.decisions.scopes import text_of
    from anabranch.core.stream_states import ACTIVE
    from anabranch.presentation import history

    with options.client() as client:
        found = client.describe(stream)
        ports = client.reader_ports()
        effective = effective_of(client, stream)
        counted = [stream] if found.state == ACTIVE else []
        counts = _count_fields(_counts(client, counted, options.timeout), stream)
    losses = options.losses()
    past = (
        history.read_history(ports, stream, last=last, timeout=options.timeout) if epochs else None
    )
    document = stream_row(found) | counts | {"effective": effective, "losses": losses}
    if past is not None:
        document["epochs"] = _epoch_documents(past)
    print_result(
        document,
        _segments(found),
        *([f"description: {found.description}"] if found.description else ()),
        *([Grid("Epochs", _epoch_rows(past), _EPOCH_COLUMNS)] if past is not None else ()),
        f"state: {found.state}" + (f", {found.trouble}" if found.trouble else ""),
        f"events: {events_text(counts['events'], counts['exact'])}",
        f"newest commit: {counts['newest_commit'] or 'none, or not known'}",
        f"partitions: {found.partitions:,}",
        f"journal indexed up to: {_numbers(found.journal) or 'nothing yet'}",
        f"journal deleted up to: {_numbers(found.low_water) or 'nothing yet'}",
        f"bytes of open transactions: {found.uncommitted_bytes:,}",
        f"journal records rejected: {_numbers(found.rejected) or 'none'}",
        f"foreign records in the stream: {f'{found.foreign:,}' if found.foreign else 'none'}",
        *map(segment_text, found.locked_segments),
        *(f"deletion is prevented by {text_of(blocker)}" for blocker in found.blockers),
        *losses,
        settings_of(found, effective),
        as_json=options.json,
    )


@app.command("rejected")
def rejected(
    options: ClusterOptions,
    stream: StreamName,
    last: Annotated[int, option("--last", "Only this number of the newest.", min=1)] = 20,
) -> None:
    """List journal records that the controller rejected: how many ever, by reason, and the newest of 7 days."""
    with options.client() as client:
        found = client.rejected(stream)
    newest = [
        {
            "at": time_text(one.timestamp),
            "partition": one.partition,
            "offset": one.offset,
            "reason": one.reason,
            **bytes_fields(key=one.key),
        }
        for one in found.records[:last]
    ]
    shown = [
        row | {"key": "" if one.key is None else bytes_text(one.key)}
        for row, one in zip(newest, found.records, strict=False)
    ]
    print_result(
        {"stream": stream, "counts": dict(found.counts), "records": newest},
        f"journal records rejected: {_numbers(found.counts) or 'none'}",
        *([Grid("Newest", shown, _REJECTED)] if shown else ()),
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
        if sys.stdout.isatty():
            print_note("this is a picture in SVG: --output FILE keeps it")
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
    from anabranch.core.stream_states import FORGOTTEN

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
    from anabranch.core.stream_states import FORGOTTEN

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
    description: Annotated[
        str | None,
        option("--description TEXT", "Text for people; '' removes it. Needs feature level 2."),
    ] = None,
) -> None:
    """Change a stream or table: settings such as retention.ms, or its description. Transactions continue."""
    wanted: dict[str, str | None] = {**parse_kafka(setting, "--setting")}
    wanted |= dict.fromkeys(unset or ())
    if not wanted and description is None:
        raise InvalidArgument("give --setting NAME=VALUE, --unset NAME or --description TEXT")
    with options.client() as client:
        found = client.alter_stream(stream, wanted, description=description)
        effective = effective_of(client, stream)
    document = stream_row(found) | {"effective": effective}
    text = [f"description: {found.description}"] if found.description else []
    print_result(document, settings_of(found, effective), *text, as_json=options.json)


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


# -- streams of a file ----------------------------------------------------------------------------------------

_KINDS: dict[str, type] = {
    "segments": int, "settings": dict, "near": str, "adopt": bool, "description": str, "absent": bool
}  # fmt: skip
_SECTIONS = ("streams", "tables")
_OF_STREAM = ("segments", "description")  # changes of no setting
_RETENTION = ("retention.ms", "retention.bytes")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stream as the file describes it. ``absent``: the stream must not exist."""

    segments: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    near: str | None = None
    adopt: bool = False
    description: str = ""
    absent: bool = False


class Change(NamedTuple):
    """A difference between the file and the cluster. ``deletes``: whether removing it deletes events."""

    stream: str
    change: str  # create, delete, segments, description, or a setting
    now: str
    wanted: str
    deletes: bool = False


def apply(
    options: OperatorOptions,
    file: Annotated[
        Path, argument("FILE", "A TOML file with a section for each stream and table.")
    ],
    dry_run: Annotated[bool, option("--dry-run", "Only show the differences.")] = False,
    allow_delete: Annotated[
        bool,
        option(
            "--allow-delete",
            "Allow changes that delete events.",
        ),
    ] = False,
) -> None:
    """Make streams and tables match a file: create, alter, scale and delete them.

    Streams and tables that the file does not name stay; settings and descriptions that it does not name are
    removed. If events would be deleted, nothing is changed without --allow-delete.
    """
    wanted = parse(file)
    with options.client() as client:
        changes = [change for name, one in wanted.items() for change in _compare(client, name, one)]
        deleting = [f"{c.stream}: {c.change} {c.now} -> {c.wanted}" for c in changes if c.deletes]
        if deleting and not (allow_delete or dry_run):
            raise WouldDelete(
                f"{file} would delete events ({'; '.join(deleting)}): add --allow-delete to do so"
            )
        if not dry_run:
            for stream in dict.fromkeys(change.stream for change in changes):
                _carry_out(
                    client, stream, wanted[stream], [c for c in changes if c.stream == stream]
                )
    rows = [change._asdict() for change in changes]
    table = Grid("To do" if dry_run else "Done", rows, Change._fields)
    document = {"applied": not dry_run, "changes": rows}
    print_result(document, table if rows else "nothing to do", as_json=options.json)


def parse(file: Path) -> dict[str, Wanted]:
    """The streams and tables of a file. Raises: InvalidArgument, UnsupportedSetting, with the place in the file."""
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from error
    if not document or not all(
        name in _SECTIONS and isinstance(given, dict) for name, given in document.items()
    ):
        raise InvalidArgument(
            f'{file} needs a section [streams."SCOPE/STREAM"] for each stream, [tables."SCOPE/TABLE"] for each '
            "table, and no other sections"
        )
    if both := document.get("streams", {}).keys() & document.get("tables", {}).keys():
        raise InvalidArgument(
            f"{file}: {', '.join(sorted(both))}: a stream and a table; keep one section"
        )
    return {
        name: _parsed(f"{file}: {section}.{name!r}", name, one, is_a_table=section == "tables")
        for section, given in document.items()
        for name, one in given.items()
    }


def _parsed(where: str, name: str, given: object, *, is_a_table: bool) -> Wanted:
    split_stream(name)
    if not isinstance(given, dict):
        raise InvalidArgument(f"{where} must be a section")
    for key, value in given.items():
        if type(value) is not _KINDS.get(key):
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in _KINDS.items())
            raise InvalidArgument(
                f"{where}: {key} = {value!r} is not allowed; the keys are {known}"
            )
    settings = {n: setting_text(n, v) for n, v in given.get("settings", {}).items()}
    if is_a_table:
        settings |= {TABLE: "true"}
    check_settings(settings)
    return Wanted(**(given | {"settings": settings}))


def _compare(client: Client, stream: str, wanted: Wanted) -> Iterator[Change]:
    """The differences of one stream. Raises: InvalidArgument if a difference can't be removed."""
    try:
        found = client.describe(stream)
    except (UnknownScope, UnknownStream):
        if not wanted.absent:
            yield Change(stream, "create", "", count_of(wanted.segments, "segment"))
        return
    if wanted.absent:
        yield Change(stream, "delete", found.state, "", deletes=True)
        return
    scales = {EVENTS, BYTES, SEGMENT_BYTES} & wanted.settings.keys()
    if len(found.segments) != wanted.segments and not scales:  # else it scales itself
        yield Change(stream, "segments", str(len(found.segments)), str(wanted.segments))
    if found.description != wanted.description:
        yield Change(stream, "description", found.description, wanted.description)
    effective = client.effective_settings(stream)
    its = found.settings.keys() - in_force(found.settings)  # derivations are the programs' affair
    for name in sorted(its | wanted.settings.keys()):
        now, to_be = found.settings.get(name, ""), wanted.settings.get(name, "")
        if now == to_be == effective.get(name, to_be):
            continue
        if name == TABLE:
            kind, section = ("table", "tables") if now else ("stream", "streams")
            raise InvalidArgument(
                f'{stream} is a {kind}, which can\'t be altered: describe it as [{section}."{stream}"]'
            )
        if name in FIXED:
            raise InvalidArgument(f"{stream}: {name} is {now!r} and can't be altered")
        in_effect = effective.get(name, now)
        # Without a limit of bytes of its own the stream has the broker's, which is not known here.
        shorter = name in _RETENTION and (
            0 <= int(to_be or -1) < _unlimited(in_effect)
            or (name, to_be) == ("retention.bytes", "")
        )
        yield Change(stream, name, in_effect, to_be, deletes=shorter)


def _unlimited(text: str) -> float:
    """A retention; -1 and an empty text are unlimited."""
    return float("inf") if not text or int(text) < 0 else int(text)


def _carry_out(client: Client, stream: str, wanted: Wanted, changes: list[Change]) -> None:
    kinds = {change.change for change in changes}
    if "create" in kinds:
        given: dict[str, Any] = asdict(wanted)
        del given["absent"]
        client.create_stream(stream, **given)
    elif "delete" in kinds:
        client.delete_stream(stream)
    else:
        settings = {c.change: c.wanted or None for c in changes if c.change not in _OF_STREAM}
        description = wanted.description if "description" in kinds else None
        if settings or description is not None:
            client.alter_stream(stream, settings, description=description)
        if "segments" in kinds:
            client.scale(stream, wanted.segments)
