"""`anabranch stream`: alter, truncate and delete streams; take lost ones back, or forget them."""

from __future__ import annotations

from typing import Annotated

from anabranch.cli.options import OperatorOptions, StreamName, Yes, confirm, option
from anabranch.cli.output import count_of, print_json, print_result
from anabranch.cli.read import moment_of
from anabranch.cli.session import parse_kafka
from anabranch.cli.stream.commands import (
    Settings,
    app,
    document_of,
    effective_of,
    show_settings,
)
from anabranch.core.stream_states import FORGOTTEN
from anabranch.errors import IllegalState, InvalidArgument
from anabranch.shown.words import events_of, topic_id_of
from anabranch.topics.names import topics_of

__all__ = ["app"]


@app.command("recover")
def recover(options: OperatorOptions, stream: StreamName) -> None:
    """Take a LOST stream back, if its topics are those that it had."""
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
    told = f"{stream} is forgotten: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, told, as_json=options.json)


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
                f"{stream} is another stream than the one that was shown, made since: nothing was done, look again"
            )
        client.delete_stream(stream, despite=despite or ())
    told = f"{stream} is deleted: its name can be used again"
    print_result({"stream": stream, "state": FORGOTTEN}, told, as_json=options.json)


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
        print_json(document_of(found) | {"effective": effective})
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
    told = f"{stream} begins after {until}"
    print_result({"stream": stream, "until": until}, told, as_json=options.json)
