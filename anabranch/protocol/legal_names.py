"""The rules for names that users choose: of scopes, lanes, streams, transactions, and inputs of processors.

Some names are reserved: the state of processor ``scope/name`` is the stream ``scope/name.state``, and the bases of
table ``scope/name`` are in its companion, the stream ``scope/name-base``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from anabranch.errors import InvalidArgument
from anabranch.protocol import limits

MAX_NAME = limits.NAME.value
# The lanes that exist from the start.
OPEN_LANE = "open"
ADMIN_LANE = "admin"
# Phases of a copy of a processor, in its row; empty: it may be run.
COPYING = "copying"
SAVEPOINT = "savepoint"
STATE = ".state"  # the end of the name of a processor's state
BASE = "-base"  # the end of the name of a table's companion
PLAIN = "topic:"  # the prefix of inputs that are plain topics
# The ends of the names of a stream's other topics, as Kafka compares them.
_BESIDE = (
    "_journal",
    "_history",
)
_TOPIC = re.compile(r"[a-zA-Z0-9._-]{1,249}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
_TEXT_BYTES = (1 << 15) - 1  # the most bytes of a text in Kafka's protocol
_LANE = re.compile(r"[a-z0-9][a-z0-9-]{0,49}")


def check_type(what: str, value: object, *kinds: type) -> None:
    """`InvalidArgument` unless a value has one of these types; a bool is not accepted as an int."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        due = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidArgument(f"{what} is {due}, not {type(value).__name__}")


def check_text(what: str, text: str) -> str:
    """`InvalidArgument` for a text that librdkafka changes: one with leading blanks, or with a zero byte."""
    check_type(what, text, str)
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not a text in UTF-8: {error.reason}") from error
    if not 0 < size <= _TEXT_BYTES:
        raise InvalidArgument(f"{what} has {size:,} bytes: 1 to {_TEXT_BYTES:,} are allowed")
    if text[0].isspace() or "\0" in text:
        raise InvalidArgument(f"{what} begins with a blank, or has a zero byte: remove it")
    return text


def check_scope(scope: str) -> str:
    """The scope's name; `InvalidArgument` if the name is not legal."""
    if type(scope) is not str:
        check_type("a scope", scope, str)
    if not _NAME.fullmatch(scope):
        raise InvalidArgument(
            f"{scope!r} is not a scope: letters, digits, _ and - (at most 100), not _ or - in front"
        )
    return scope


def check_lane(lane: str) -> str:
    """The lane's name; `InvalidArgument` if the name is not legal."""
    check_type("a lane", lane, str)
    if not _LANE.fullmatch(lane):
        raise InvalidArgument(
            f"{lane!r} is not a lane: small letters, digits and - (at most 50), not - in front"
        )
    return lane


def check_name(name: str | None) -> None:
    """`InvalidArgument` unless a name, of a transaction or a series, has 1 to 256 characters."""
    if name is not None:
        check_type("a transaction's name", name, str)
    if name is not None and not 1 <= len(name) <= MAX_NAME:
        raise InvalidArgument(f"a transaction's name has 1 to {MAX_NAME} characters")


def check_number(name: str | None, number: int | None) -> None:
    """`InvalidArgument` unless a commit's number is 0 or more, and has a series' name."""
    if number is None:
        return
    if name is None:
        raise InvalidArgument("a number is one of a series: give the series' name too")
    check_type("a commit's number", number, int)
    if not 0 <= number < 1 << 63:
        raise InvalidArgument(f"number {number} of series {name!r}: numbers are 0 to 2^63 - 1")


def split_stream(stream: str) -> tuple[str, str]:
    """('nyc', 'flights') of 'nyc/flights'. `InvalidArgument` for an illegal name.

    Names have no dots, so that topic names are not ambiguous. The exception is a processor's state:
    'nyc/delays.state'.
    """
    if type(stream) is not str:  # a fast path: each event of a batch comes here
        check_type("a stream, scope/name,", stream, str)
    scope, slash, name = stream.partition("/")
    if not slash or not _NAME.fullmatch(scope) or not _NAME.fullmatch(name.removesuffix(STATE)):
        raise InvalidArgument(
            f"{stream!r} is not a stream: scope/stream, each of letters, digits, _ and - (at most 100)"
        )
    return scope, name


def check_input(name: str) -> None:
    """`InvalidArgument` unless a processor's input is a stream, or a plain topic: 'topic:orders'."""
    if not is_plain(name):
        split_stream(name)
    elif not _TOPIC.fullmatch(name.removeprefix(PLAIN)):
        raise InvalidArgument(f"{name!r} names no topic of Kafka's")


def is_plain(name: str) -> bool:
    """Whether an input is a plain topic, and not a stream."""
    return name.startswith(PLAIN)


def state_stream(processor: str) -> str:
    return processor + STATE


def is_state(stream: str) -> bool:
    """Whether a stream is the state of the processor `stream.removesuffix(STATE)`."""
    return stream.endswith(STATE)


def base_stream(table: str) -> str:
    """The companion of a table: the stream that has its bases."""
    return table + BASE


def as_kafka_compares(name: str) -> str:
    """The name of a stream or topic as Kafka compares it: . and _ are equal."""
    return name.replace("/", "_").replace(".", "_")


def names_beside(stream: str) -> Iterator[str]:
    """Names, as Kafka compares them, of streams of which a topic would have the name of a topic of this stream."""
    own = as_kafka_compares(stream)
    yield own
    for end in _BESIDE:
        yield own + end
        if own.endswith(end):
            yield own.removesuffix(end)
