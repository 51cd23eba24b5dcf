"""Parts of Faust that can't be exactly once. Each is refused by its name; the error says what to use instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from anabranch.errors import InvalidArgument

_OTHER_KEY = "send to a topic with the new key, and give an agent of its own that topic"
_TAKE = "a commit holds many events already: use commit_interval=, or a batch handler of anabranch.Processor"
_JOIN = "keep one side in an app.Table, in an agent that reads both topics"
_ASK = "send to a topic, and read the answers from another one"
_GLOBAL = "a table's rows belong to the task of their key: send to a topic with that key"
_WINDOW = "use anabranch.Processor and its windows()"
_KAFKA = "no part of Faust's own Kafka side runs; streams are read and written by anabranch"

STREAM = {
    "group_by": _OTHER_KEY,
    "through": _OTHER_KEY,
    **dict.fromkeys(("take", "take_events", "take_with_timestamp", "noack_take"), _TAKE),
    **dict.fromkeys(
        ("noack", "ack"), "an event is consumed with the commit that holds its effects"
    ),
    **dict.fromkeys(("combine", "join", "left_join", "inner_join", "outer_join", "__and__"), _JOIN),
}
AGENT = dict.fromkeys(("ask", "ask_nowait", "map", "kvmap", "join", "kvjoin", "test_context"), _ASK)
APP = {
    **dict.fromkeys(("GlobalTable", "SetGlobalTable"), _GLOBAL),
    "SetTable": "use app.Table, with a list as value",
    "channel": "an event in memory is lost with the process: name a stream, app.topic('scope/name')",
    "LiveCheck": "it samples by Kafka topics of its own",
    **dict.fromkeys(("table_route", "topic_route"), "read stores with `anabranch processor get`"),
    **dict.fromkeys(("commit", "start_client", "maybe_start_client"), _KAFKA),
    **dict.fromkeys(("maybe_start_producer", "_new_consumer", "_new_producer"), _KAFKA),
}
TABLE = dict.fromkeys(
    ("hopping", "tumbling", "using_window", "relative_to", "relative_to_now", "relative_to_field"),
    _WINDOW,
) | {"as_ansitable": "read stores with `anabranch processor get`"}


def refuse(what: str, instead: str) -> NoReturn:
    """Refuse a part of Faust. Raises: InvalidArgument."""
    raise InvalidArgument(f"{what} can't be exactly once: {instead}")


def refusing(kind: str, table: dict[str, str]) -> Callable[[type], type]:
    """Decorate a class, so that the methods in ``table`` raise `InvalidArgument`."""

    def method(name: str, instead: str) -> Callable[..., Any]:
        def refused(*_: Any, **__: Any) -> NoReturn:
            refuse(f"{kind}.{name}", instead)

        return refused

    def decorate(found: type) -> type:
        for name, instead in table.items():
            setattr(found, name, method(name, instead))
        return found

    return decorate
