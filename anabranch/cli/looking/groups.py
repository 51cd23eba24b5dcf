"""`anabranch group`: consumer groups, how far they are behind, and where they go on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.options import App, ClusterOptions, StreamName, Yes, argument, confirm, option
from anabranch.cli.output import lag_document, print_json, print_line, print_table
from anabranch.cli.read import start_of

if TYPE_CHECKING:
    from anabranch.reading.tasks.standing import ConsumerGroup

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
    if options.json:
        print_json({"groups": [_document(group) for group in found]})
        return
    print_table(
        "Consumer groups",
        ("group", "state", "members", "streams", "events behind", "seconds behind"),
        (
            (g.name, g.state, len(g.members), ", ".join(one.stream for one in g.streams), *_lag(g))
            for g in found
        ),
    )


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


def _lag(group: ConsumerGroup) -> tuple[object, object]:
    told = lag_document(None if any(one.trouble for one in group.streams) else group.most)
    return told["events_behind"], told["seconds_behind"]


def _document(group: ConsumerGroup) -> dict[str, Any]:
    return {
        "group": group.name,
        "state": group.state,
        "members": list(group.members),
        "streams": [
            {
                "stream": one.stream,
                "reads": "transactions" if one.by_transactions else "events",
                "offsets": {}
                if one.by_transactions
                else {str(p): o for p, o in one.offsets.items()},
                **lag_document(None if one.trouble else one.lag),
                "trouble": one.trouble,
            }
            for one in group.streams
        ],
    }


def _show(group: ConsumerGroup, *, as_json: bool) -> None:
    document = _document(group)
    if as_json:
        print_json(document)
        return
    print_table(
        f"Group {group.name}, {group.state}",
        ("stream", "reads", "events behind", "seconds behind", "exact"),
        (
            (one["stream"], one["reads"], one["events_behind"], one["seconds_behind"], one["exact"])
            for one in document["streams"]
        ),
    )
    print_line(f"members: {', '.join(group.members) or 'none'}")
    for one in group.streams:
        if one.trouble:
            print_line(f"{one.stream}: {one.trouble}")
