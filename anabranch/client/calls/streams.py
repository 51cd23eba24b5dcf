"""Streams of a client: creating, describing, changing and deleting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.client.shared import Shared
from anabranch.core.stream_settings import (
    REPLICATION,
    TOPIC,
    descriptions_differ,
    differences,
    segments_differ,
    setting_text,
)
from anabranch.errors import (
    InvalidArgument,
    MalformedRecord,
    NotAuthorized,
    StreamExists,
    UnknownStream,
    UnsupportedSetting,
)
from anabranch.ports import TopicInfo
from anabranch.protocol.legal_names import check_scope
from anabranch.protocol.schemas import records as r
from anabranch.reading.committed_log import client_errors
from anabranch.topics.names import stream_topic
from anabranch.types import Rejected, RejectedRecord, StreamDescription, description_of


class Streams:
    """Calls of `Client` about streams, with its arguments and errors; names are the same unless one is given."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._session = shared.session

    def create(
        self,
        stream: str,
        segments: int | None,
        settings: Mapping[str, Any] | None,
        deadline: float,
        *,
        adopt: bool,
        near: str | None,
        description: str = "",
        exist_ok: bool = False,
    ) -> StreamDescription:
        """As `Client.create_stream`."""
        texts = {name: setting_text(name, value) for name, value in given(settings).items()}
        if near is not None:
            check_scope(near)
        count = 1 if segments is None else segments
        command = r.CreateStream(stream, count, texts, bool(adopt), description)
        try:
            return self._learn(stream, self._session.create_stream(command, deadline, near=near))
        except StreamExists as error:
            if not exist_ok:
                raise
            return self._accept(command, segments, deadline, error)

    def _accept(
        self,
        command: r.CreateStream,
        segments: int | None,
        deadline: float,
        refusal: StreamExists,
    ) -> StreamDescription:
        """The stream that exists. Raises: StreamExists if it differs from what was asked for, or can't be seen."""
        stream = command.stream
        try:
            found = self.describe(stream, deadline)
        except NotAuthorized:
            raise refusal from None
        unlike = [] if segments is None else segments_differ(segments, len(found.segments))
        unlike += differences(command.settings, found.settings, only_asked=True)
        unlike += descriptions_differ(command.description, found.description)
        if unlike:
            raise StreamExists(f"{stream} exists, but {', '.join(unlike)}") from refusal
        return found

    def describe(self, stream: str, deadline: float) -> StreamDescription:
        return self._learn(stream, self._session.describe(stream, deadline))

    def rejected(self, stream: str, deadline: float) -> Rejected:
        """As `Client.rejected`."""
        wanted = r.DescribeStreams(None, stream, rejected=True)
        found = self._session.ask_stream(stream, wanted, deadline)
        records = [
            RejectedRecord(one.partition, one.offset, one.key, one.reason, one.at_ms)
            for one in reversed(found.rejected_records)
        ]
        return Rejected(dict(found.rejected), records)

    def scale(
        self,
        stream: str,
        segments: int | None,
        seal: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        deadline: float,
    ) -> StreamDescription:
        if (segments is None) == (not seal and not ranges):
            raise InvalidArgument(
                "give a number of segments, or what to seal and which ranges to open"
            )
        opened = tuple(r.KeyRange(low, high) for low, high in ranges)
        command = r.Scale(stream, segments or 0, tuple(seal), opened)
        return self._learn(stream, self._session.ask_stream(stream, command, deadline))

    def alter(
        self,
        stream: str,
        settings: Mapping[str, Any] | None,
        deadline: float,
        *,
        description: str | None = None,
    ) -> StreamDescription:
        """As `Client.alter_stream`."""
        if settings is None and description is None:
            raise InvalidArgument("give settings, a description, or both")
        named = given(settings)
        texts = {n: setting_text(n, v) for n, v in named.items() if v is not None}
        unset = tuple(n for n, v in named.items() if v is None)
        command = r.AlterStream(stream, texts, unset, description)
        return description_of(self._session.ask_stream(stream, command, deadline))

    def take_away(
        self, stream: str, command: r.ForgetStream | r.DeleteStream, deadline: float
    ) -> None:
        """As `Client.forget_stream` and `Client.delete_stream`."""
        self._session.ask_of(stream, command, r.StreamList, deadline)
        self._shared.streams.pop(stream, None)

    def publish_base(self, table: str, timestamp: int, txn_id: bytes, deadline: float) -> r.BaseRow:
        info = self._session.ask_stream(table, r.PublishBase(table, timestamp, txn_id), deadline)
        if info.base is None:
            raise MalformedRecord(f"the controller's answer has no base of {table}")
        return info.base

    def settings(self, stream: str, deadline: float) -> dict[str, str]:
        """As `Client.effective_settings`."""
        found = self.topic(stream, deadline)
        named = {name: found.config[name] for name in sorted(TOPIC) if name in found.config}
        return named | {REPLICATION: str(found.replication_factor)}

    def topic(self, stream: str, deadline: float) -> TopicInfo:
        """The stream's topic, as the brokers describe it. Raises: as `Client.effective_settings`."""
        topic = stream_topic(stream)
        seconds = deadline - self._session.now()
        if self._shared.ports.log is None:
            raise UnsupportedSetting("this client was made without a way to the brokers' settings")
        with self._shared.ports.log(seconds) as log, client_errors("DescribeConfigs"):
            found = log.describe_topics([topic]).get(topic)
        if found is None:
            raise UnknownStream(f"there is no topic {topic}")
        return found

    def _learn(self, stream: str, info: r.StreamInfo) -> StreamDescription:
        self._shared.learn(stream, info)
        return description_of(info)


def given(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The settings of a caller, or an empty mapping. Raises `InvalidArgument` if they are no mapping."""
    if settings is not None and not isinstance(settings, Mapping):
        raise InvalidArgument(f"settings {settings!r:.100}: give names, each with a value")
    return settings or {}
