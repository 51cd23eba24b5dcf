"""`anabranch group`: list, describe and reset consumer groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import (
    App,
    ClusterOptions,
    StreamName,
    Yes,
    argument,
    option,
    start_of,
)
from anabranch.cli.output import Column, Grid, Row, print_result, show
from anabranch.errors import FixCallError, RetryError
from anabranch.presentation.rows import group_row
from anabranch.topics.names import mirror_group

if TYPE_CHECKING:
    from anabranch import Client
    from anabranch.reading.group_lag import ConsumerGroup

app = App(
    no_args_is_help=True,
    help="List, describe and reset consumer groups.",
)
GroupName = Annotated[str, argument("GROUP", "The group.")]


@app.command("list")
def list_groups(
    options: ClusterOptions,
    stream: Annotated[
        str | None,
        option("--stream -s SCOPE/STREAM", "Only groups with a position in this stream."),
    ] = None,
) -> None:
    """List the consumer groups with positions in streams.

    A mirror has copies of a processor's positions; `anabranch processor list` has the processor's own lag.
    """
    with options.client() as client:
        found = client.groups(stream)
        mirrors = _mirrors(client, [group.name for group in found])
    rows = [group_row(group) | {"mirror_of": mirrors.get(group.name)} for group in found]
    show("groups", rows, _COLUMNS, as_json=options.json, title="Consumer groups")


@app.command("describe")
def describe(options: ClusterOptions, group: GroupName) -> None:
    """Show a consumer group: its members, and its position in each stream."""
    with options.client() as client:
        _show(client.group(group), as_json=options.json)


@app.command("reset")
def reset(
    options: ClusterOptions,
    group: GroupName,
    stream: StreamName,
    to: Annotated[
        str,
        option(
            "--to TIME",
            "begin, end, or after a commit timestamp or an ISO 8601 time.",
        ),
    ],
    yes: Yes = False,
) -> None:
    """Reset the position of a consumer group in a stream. A group with members is refused."""
    start = start_of(to, "--to")
    with options.client_after(
        f"The group {group} will continue from {to} in {stream}.", yes=yes
    ) as client:
        _show(client.reset_group(group, stream, start), as_json=options.json)


def _mirrors(client: Client, groups: Iterable[str]) -> dict[str, str]:
    """Mirror group -> its processor. Processors that this client may not see are missing."""
    found: dict[str, str] = {}
    for scope in sorted({name.partition(".")[0] for name in groups if "." in name}):
        with suppress(FixCallError, RetryError):
            infos = client.processors(scope)
            found |= {mirror_group(one.processor): one.processor for one in infos}
    return found


def _all_known(key: str, among: Callable[[list[Any]], object]) -> Callable[[Row], object]:
    """A column's value for all streams of a group together; None if it is not known for some stream."""

    def value(row: Row) -> object:
        found = [one[key] for one in row["streams"]]
        return None if None in found else among(found)

    return value


_COLUMNS = (
    "group",
    "state",
    Column("members", lambda row: len(row["members"])),
    Column("streams", lambda row: [one["stream"] for one in row["streams"]]),
    Column("events behind", _all_known("events_behind", sum)),
    Column("seconds behind", _all_known("seconds_behind", max)),
    "mirror_of",
)


def _show(group: ConsumerGroup, *, as_json: bool) -> None:
    row = group_row(group)
    columns = ("stream", "reads", "events_behind", "seconds_behind", "exact")
    print_result(
        row,
        Grid(f"Group {group.name}, {group.state}", row["streams"], columns),
        f"members: {', '.join(group.members) or 'none'}",
        *(f"{one.stream}: {one.trouble}" for one in group.streams if one.trouble),
        as_json=as_json,
    )
