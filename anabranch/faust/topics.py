"""Faust's topics as anabranch streams, which agents read and write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Generator, Mapping
from typing import Any

import faust
from faust.agents import current_agent
from faust.types import TP, RecordMetadata

from anabranch.errors import InvalidArgument
from anabranch.faust.refusals import refuse
from anabranch.processing.batch import current_context, outside
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.limits import copied_time


class Sent:
    """The answer of `Topic.send`. Its offset is -1, because an event has no offset before the commit."""

    __slots__ = ("stream", "timestamp")

    def __init__(self, stream: str, timestamp: float) -> None:
        self.stream, self.timestamp = stream, timestamp

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        yield from ()
        return RecordMetadata(self.stream, -1, TP(self.stream, -1), -1, self.timestamp, 0)


class Topic(faust.Topic):
    """A stream, or several streams to read. `anabranch stream create` makes them."""

    app: Any

    def __init__(self, app: Any, **options: Any) -> None:
        """Raises: InvalidArgument."""
        if options.get("pattern"):
            refuse("a topic by pattern", "name the streams")
        for name in options.get("topics") or ():
            split_stream(name)
        super().__init__(app, **options)

    async def send(
        self,
        *,
        key: Any = None,
        value: Any = None,
        timestamp: float | None = None,
        headers: Any = None,
        schema: Any = None,
        key_serializer: Any = None,
        value_serializer: Any = None,
        partition: int | None = None,
        callback: Any = None,
        force: bool = False,
    ) -> Awaitable[RecordMetadata]:
        """Write an event: in an agent, with the commit of what it consumed; elsewhere, in a transaction of its own.

        ``timestamp``: Unix seconds, by default those of the event that is handled. Raises: CrossScope, IllegalState
        (an asyncio task outlived its event), InvalidArgument; elsewhere as `Client.begin` and `Transaction.commit`.
        """
        if partition is not None or callback is not None:
            refuse(
                "send(partition=) or send(callback=)", "a stream places events by key, in a commit"
            )
        is_alone = outside() and current_agent() is None
        at = None if is_alone else current_context()
        raw, made = self.prepare_key(key, key_serializer, schema, self.prepare_headers(headers))
        data, made = self.prepare_value(value, value_serializer, schema, made)
        if not (data is None or isinstance(data, bytes)):
            raise InvalidArgument(f"a value is bytes, not {type(data).__name__}: name a serializer")
        stream = self.get_topic_name()
        pairs = list(made.items() if isinstance(made, Mapping) else made or ())
        ms = None if timestamp is None else int(timestamp * 1000)
        if at is None:
            event = (data, raw, pairs, ms)
            write = self.app.write_alone
            await asyncio.get_running_loop().run_in_executor(None, write, stream, event)
        else:
            if stream not in self.app.program.outputs:
                await asyncio.get_running_loop().run_in_executor(None, self.app.add_output, stream)
                at = current_context()  # the event may have ended meanwhile
            time_ms = copied_time(at.timestamp) if ms is None else ms
            at.write(stream, (data, raw, pairs or None, time_ms))
        return Sent(stream, timestamp or time.time())

    def send_soon(self, **_: Any) -> Any:
        """Raises: InvalidArgument."""
        refuse("topic.send_soon", "await topic.send(…)")

    async def publish_message(self, *_: Any, **__: Any) -> Any:
        """Raises: InvalidArgument."""
        refuse("topic.publish_message", "await topic.send(…)")

    async def declare(self) -> None:
        """Raises: InvalidArgument."""
        refuse("topic.declare", "make streams with `anabranch stream create`")
