"""`anabranch apply`: streams as a TOML file says."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from anabranch.cli.options import OperatorOptions, argument, option
from anabranch.cli.output import print_json, print_line, print_table
from anabranch.core.legal_names import split_stream
from anabranch.core.stream_settings import BYTES, EVENTS, FIXED, SEGMENT_BYTES, check_settings
from anabranch.errors import InvalidArgument, UnknownScope, UnknownStream, WouldDelete

if TYPE_CHECKING:
    from anabranch import Client

_KINDS: dict[str, type] = {
    "segments": int, "settings": dict, "near": str, "adopt": bool, "absent": bool
}  # fmt: skip
_RETENTION = ("retention.ms", "retention.bytes")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A stream as the file has it. ``absent``: there shall be none."""

    segments: int = 1
    settings: Mapping[str, str] = field(default_factory=dict)
    near: str | None = None
    adopt: bool = False
    absent: bool = False


class Change(NamedTuple):
    """A difference between the file and the cluster. ``deletes``: events go with it."""

    stream: str
    change: str  # create, delete, segments, or a setting
    now: str
    wanted: str
    deletes: bool = False


def command(
    options: OperatorOptions,
    file: Annotated[
        Path, argument("FILE", 'A TOML file, with a table [streams."SCOPE/STREAM"] each.')
    ],
    dry_run: Annotated[bool, option("--dry-run", "Only show the difference.")] = False,
    allow_delete: Annotated[
        bool, option("--allow-delete", "Do what deletes events: delete streams, shorten retention.")
    ] = False,
) -> None:
    """Make streams as a file says: create them, alter their settings, scale them.

    Streams that the file does not name stay as they are. Deletions of events are refused without --allow-delete,
    and then nothing is changed.
    """
    wanted = parse(file)
    with options.client() as client:
        changes = [change for name, one in wanted.items() for change in _compare(client, name, one)]
        deleting = [f"{c.stream}: {c.change} {c.now} -> {c.wanted}" for c in changes if c.deletes]
        if deleting and not (allow_delete or dry_run):
            raise WouldDelete(
                f"{file} would delete events ({'; '.join(deleting)}): give --allow-delete if that is meant"
            )
        if not dry_run:
            for stream in dict.fromkeys(change.stream for change in changes):
                _carry_out(
                    client, stream, wanted[stream], [c for c in changes if c.stream == stream]
                )
    if options.json:
        print_json({"applied": not dry_run, "changes": [c._asdict() for c in changes]})
    elif changes:
        rows = (change._asdict() for change in changes)
        print_table("To do" if dry_run else "Done", rows, Change._fields)
    else:
        print_line("nothing to do")


def parse(file: Path) -> dict[str, Wanted]:
    """The streams in a file. `InvalidArgument`, `UnsupportedSetting`: with the file, and the place in it."""
    try:
        document = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{file} can't be read: {error}") from error
    streams = document.get("streams")
    if not isinstance(streams, dict) or document.keys() != {"streams"}:
        raise InvalidArgument(
            f'{file}: a table [streams."SCOPE/STREAM"] for each stream, and no other'
        )
    return {name: _parsed(f"{file}: streams.{name!r}", name, one) for name, one in streams.items()}


def _parsed(where: str, name: str, given: object) -> Wanted:
    split_stream(name)
    if not isinstance(given, dict):
        raise InvalidArgument(f"{where}: a table")
    for key, value in given.items():
        if type(value) is not _KINDS.get(key):
            known = ", ".join(f"{each} ({kind.__name__})" for each, kind in _KINDS.items())
            raise InvalidArgument(f"{where}: {key} = {value!r}; a stream has {known}")
    settings = {n: str(v) for n, v in given.get("settings", {}).items()}
    check_settings(settings)
    return Wanted(**(given | {"settings": settings}))


def _compare(client: Client, stream: str, wanted: Wanted) -> Iterator[Change]:
    """The differences of one stream. `InvalidArgument`: one that can't be carried out."""
    try:
        found = client.describe(stream)
    except (UnknownScope, UnknownStream):
        if not wanted.absent:
            yield Change(stream, "create", "", f"{wanted.segments} segments")
        return
    if wanted.absent:
        yield Change(stream, "delete", found.state, "", deletes=True)
        return
    scales = {EVENTS, BYTES, SEGMENT_BYTES} & wanted.settings.keys()
    if len(found.segments) != wanted.segments and not scales:  # else it scales itself
        yield Change(stream, "segments", str(len(found.segments)), str(wanted.segments))
    effective = client.effective_settings(stream)
    for name in sorted(found.settings.keys() | wanted.settings.keys()):
        now, to_be = found.settings.get(name, ""), wanted.settings.get(name, "")
        if now == to_be == effective.get(name, to_be):
            continue
        if name in FIXED:
            raise InvalidArgument(f"{stream}: {name} is {now!r} and can't be altered")
        in_effect = effective.get(name, now)
        # The broker's own limit of bytes, which is not known here, takes the place of one that is taken back.
        shorter = name in _RETENTION and (
            0 <= int(to_be or -1) < _unlimited(in_effect)
            or (name, to_be) == ("retention.bytes", "")
        )
        yield Change(stream, name, in_effect, to_be, deletes=shorter)


def _unlimited(text: str) -> float:
    """A retention, where -1, and none at all, is without end."""
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
        settings = {c.change: c.wanted or None for c in changes if c.change != "segments"}
        if settings:
            client.alter_stream(stream, settings)
        if "segments" in kinds:
            client.scale(stream, wanted.segments)
