"""`anabranch apply`: create and change streams to match a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from anabranch.cli.options import OperatorOptions, argument, option
from anabranch.cli.output import Grid, print_result
from anabranch.core.stream_settings import (
    BYTES,
    EVENTS,
    FIXED,
    SEGMENT_BYTES,
    check_settings,
    setting_text,
)
from anabranch.errors import InvalidArgument, UnknownScope, UnknownStream, WouldDelete, count_of
from anabranch.protocol.legal_names import split_stream

if TYPE_CHECKING:
    from anabranch import Client

_KINDS: dict[str, type] = {
    "segments": int, "settings": dict, "near": str, "adopt": bool, "description": str, "absent": bool
}  # fmt: skip
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


def command(
    options: OperatorOptions,
    file: Annotated[Path, argument("FILE", "A TOML file with a table for each stream.")],
    dry_run: Annotated[bool, option("--dry-run", "Only show the differences.")] = False,
    allow_delete: Annotated[
        bool,
        option(
            "--allow-delete",
            "Allow changes that delete events.",
        ),
    ] = False,
) -> None:
    """Make streams match a file: create, alter, scale and delete them.

    Streams that the file does not name stay; settings and descriptions that it does not name are removed. If events
    would be deleted, nothing is changed without --allow-delete.
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
    """The streams of a file. Raises: InvalidArgument, UnsupportedSetting, with the place in the file."""
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from error
    streams = document.get("streams")
    if not isinstance(streams, dict) or document.keys() != {"streams"}:
        raise InvalidArgument(
            f'{file} needs a table [streams."SCOPE/STREAM"] for each stream, and no other tables'
        )
    return {name: _parsed(f"{file}: streams.{name!r}", name, one) for name, one in streams.items()}


def _parsed(where: str, name: str, given: object) -> Wanted:
    split_stream(name)
    if not isinstance(given, dict):
        raise InvalidArgument(f"{where} must be a table")
    for key, value in given.items():
        if type(value) is not _KINDS.get(key):
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in _KINDS.items())
            raise InvalidArgument(
                f"{where}: {key} = {value!r} is not allowed; the keys are {known}"
            )
    settings = {n: setting_text(n, v) for n, v in given.get("settings", {}).items()}
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
    for name in sorted(found.settings.keys() | wanted.settings.keys()):
        now, to_be = found.settings.get(name, ""), wanted.settings.get(name, "")
        if now == to_be == effective.get(name, to_be):
            continue
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
