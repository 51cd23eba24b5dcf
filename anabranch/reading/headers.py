"""Headers of a message of librdkafka's."""

from __future__ import annotations

from operator import methodcaller
from typing import Any, Protocol, cast

from anabranch.errors import MalformedRecord

# Not ``message.headers()``: once that line has run some ten times, Python no longer looks whether C code left an
# error behind, and one for a name that is no UTF-8 comes up somewhere else, as a UnicodeDecodeError.
_checked_headers = methodcaller("headers")


class _Message(Protocol):
    def topic(self) -> str | None: ...
    def partition(self) -> int | None: ...
    def offset(self) -> int | None: ...
    def headers(self) -> Any: ...


def headers_of(message: _Message) -> tuple[tuple[str, bytes | None], ...]:
    """A message's headers.

    `MalformedRecord` where a name is no UTF-8: any Kafka producer can write such a name, and no broker minds, but
    confluent-kafka fails on it with a SystemError.
    """
    try:
        return cast("tuple[tuple[str, bytes | None], ...]", tuple(_checked_headers(message) or ()))
    except (SystemError, UnicodeDecodeError) as error:
        raise MalformedRecord(
            f"{message.topic()}[{message.partition()}] has at offset {message.offset()} a header whose name is no "
            "UTF-8, which librdkafka can't read in Python: let its producer write proper names"
        ) from error
