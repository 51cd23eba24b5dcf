"""`anabranch group`: consumer groups, how far they are behind, and where they go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import (
    App,
    ClusterOptions,
    StreamName,
    Yes,
    argument,
    confirm,
    option,
    start_of,
)
from anabranch.cli.output import Column, Row, print_json, print_line, print_table, show
from anabranch.presentation.rows import group_row

if TYPE_CHECKING:
    from anabranch.reading.group_lag import ConsumerGroup

app = App(
    no_args_is_help=True,
    help="List, describe and reset consumer groups; see how far behind they are.",
)
GroupName = Annotated[str, argument("GROUP", "The group.")]


@app.command("list")
def list_groups(
    options: ClusterOptions,
    stream: Annotated[
        str | None, option("--stream -s SCOPE/STREAM", "Only those with a position in it.")
    ] = None,
) -> None:
    """List the consumer groups with positions in streams: ours, and those of plain Kafka consumers.

    The lag counts committed events; markers and dropped records are none.
    """
    with options.client() as client:
        found = client.groups(stream)
    show("groups", map(group_row, found), _COLUMNS, as_json=options.json, title="Consumer groups")


@app.command("describe")
def describe(options: ClusterOptions, group: GroupName) -> None:
    """Show a consumer group: its members, and where it stands in each stream."""
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
            "begin, end, a commit timestamp, or an ISO 8601 time with its zone: what was committed after it.",
        ),
    ],
    yes: Yes = False,
) -> None:
    """Let a consumer group without members go on from elsewhere in a stream."""
    start = start_of(to, "--to")
    connecting = options.client()  # wrong options are refused before the question
    confirm(f"The group {group} will go on from {to} in {stream}.", yes=yes)
    with connecting as client:
        _show(client.reset_group(group, stream, start), as_json=options.json)


def _all_known(key: str, among: Callable[[list[Any]], object]) -> Callable[[Row], object]:
    """A column's value for all streams of a group together; None: that of one is not known."""

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
)


def _show(group: ConsumerGroup, *, as_json: bool) -> None:
    row = group_row(group)
    if as_json:
        print_json(row)
        return
    columns = ("stream", "reads", "events_behind", "seconds_behind", "exact")
    print_table(f"Group {group.name}, {group.state}", row["streams"], columns)
    print_line(f"members: {', '.join(group.members) or 'none'}")
    for one in group.streams:
        if one.trouble:
            print_line(f"{one.stream}: {one.trouble}")
