"""The calls of a client about its streams: made, described, scaled, altered, deleted."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Protocol

from anabranch.client.ports import ClientPorts
from anabranch.client.session import Session
from anabranch.client.shared import Shared
from anabranch.core.legal_names import check_scope
from anabranch.core.stream_settings import REPLICATION, TABLE, TOPIC
from anabranch.errors import InvalidArgument, NonTransactional, UnknownStream, UnsupportedSetting
from anabranch.ports import TopicInfo
from anabranch.reading.committed_log import client_errors
from anabranch.reading.history_search import check_at
from anabranch.schemas import records as r
from anabranch.topics.names import stream_topic
from anabranch.types import Listed, StreamDescription, description_of


class Entered(Protocol):
    """A transaction on tables whose `with` block was entered."""

    @property
    def is_over(self) -> bool: ...


# Clients and their transactions that this thread, or task of asyncio, is inside; the outermost first.
_entered: ContextVar[tuple[tuple[Shared, weakref.ref[Entered]], ...]] = ContextVar(
    "anabranch-entered", default=()
)


def entered(shared: Shared, txn: Entered) -> None:
    """Note that the code from here on, in this thread, is inside a transaction of a client, until it is over."""
    still = [each for each in _entered.get() if (other := each[1]()) and not other.is_over]
    _entered.set((*still, (shared, weakref.ref(txn))))


class Streams:
    """See `Client`, which has these calls."""

    _ports: ClientPorts
    _session: Session
    _shared: Shared

    def create_stream(
        self,
        stream: str,
        segments: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        adopt: bool = False,
        near: str | None = None,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a stream (``scope/name``), and its scope if that is new. Repeating the call changes nothing.

        ``segments``: 1 to 10,000 key ranges, each a partition. ``settings``: of the stream's topic, under Kafka's
        names. ``adopt``: the topic may exist and hold records; readers get those unchanged (it
        takes ``operate`` on ``*``). ``near``: a scope; a new one is put on the same control partition, so that
        transactions write to both. None: on the one with the fewest scopes.

        Raises: StreamExists (with other settings), TopicNotEmpty, InvalidArgument (also: the scope exists, and not
        near that one), NotAuthorized, UnknownScope (``near``), TopicMisconfigured, NotReady, DeadlineExceeded
        (repeating is safe).
        """
        deadline = self._alone("create_stream", timeout)
        texts = {name: _setting(value) for name, value in _given(settings).items()}
        if near is not None:
            check_scope(near)
        command = r.CreateStream(stream, segments, texts, bool(adopt))
        info = self._session.create_stream(command, deadline, near=near)
        self._shared.learn(stream, info)
        return description_of(info)

    def create_table(
        self,
        table: str,
        segments: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        near: str | None = None,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a table: a stream whose key is a row's key and whose last value is the row; no value deletes it.

        ``settings``: as of `create_stream`, without ``retention.*``; ``table.history.ms``: how long replicas keep
        versions, milliseconds (an hour). All ways to write to a stream write to it; `replica` reads it.

        Raises: as `create_stream`.
        """
        self._alone("create_table", timeout)
        chosen = {TABLE: "true", **_given(settings)}
        return self.create_stream(table, segments, chosen, near=near, timeout=timeout)

    def streams(
        self, scope: str | None = None, *, timeout: float | None = None
    ) -> Listed[StreamDescription]:
        """All streams of a scope, or of the cluster, by name; ``missing``: control partitions that don't answer.

        Raises: UnknownScope; NotReady, DeadlineExceeded (none answers).
        """
        return self._session.streams(scope, self._deadline(timeout)).each(description_of)

    def describe(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """One stream. Raises: UnknownScope, UnknownStream, NotReady, DeadlineExceeded."""
        info = self._session.describe(stream, self._deadline(timeout))
        self._shared.learn(stream, info)
        return description_of(info)

    def scale(
        self,
        stream: str,
        segments: int | None = None,
        *,
        seal: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
    ) -> StreamDescription:
        """Change the segments of a stream. Open transactions neither delay it nor notice it.

        ``segments``: split the keys evenly into so many; segments that fit already stay. Or name both sides:
        ``seal`` these active segments (ids from `describe`) and open ``ranges`` instead, (low, high) key positions
        that cover exactly the same keys.

        Raises: InvalidArgument, UnknownScope, UnknownStream, StreamLost, TooManyStreams, TopicMisconfigured (its
        topics have other settings or partitions), NotAuthorized, NotReady (another scaling waits for partitions),
        DeadlineExceeded (repeating is safe with ``segments``).
        """
        deadline = self._alone("scale", timeout)
        if (segments is None) == (not seal and not ranges):
            raise InvalidArgument(
                "give a number of segments, or what to seal and which ranges to open"
            )
        opened = tuple(r.KeyRange(low, high) for low, high in ranges)
        command = r.Scale(stream, segments or 0, tuple(seal), opened)
        info = self._session.ask_stream(stream, command, deadline)
        self._shared.learn(stream, info)
        return description_of(info)

    def forget_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Remove a LOST stream and what is left of its topics for good; its name can be used again.

        For operators. Repeating the call is fine. Positions in the old stream (snapshots, checkpoints of Spark
        queries) mean nothing in a new stream of that name: throw them away.

        Raises: IllegalState (the stream is not LOST, or a transaction that is not over has a part in it: `settle`
        that), UnknownScope, UnknownStream, InvalidArgument (the brokers don't delete topics), NotReady,
        DeadlineExceeded (repeating is safe).
        """
        self._take_away("forget_stream", stream, r.ForgetStream(stream), timeout)

    def delete_stream(
        self, stream: str, *, despite: Sequence[str] = (), timeout: float | None = None
    ) -> None:
        """Delete a stream for good: its topics, events and groups' positions. Its name can be used again.

        For operators. Repeating the call is fine. Plain writes that are not committed yet go, too; readers get
        `UnknownStream`. Positions kept elsewhere: as of `forget_stream`. If the brokers don't delete the topics,
        the stream is LOST: `recover_stream`, or repeat this. ``despite``: processors that read it, and may lose it:
        their workers fail from then on.

        Raises: IllegalState (transactions that are not over have a part in it: commit or abort them; a processor
        reads it that ``despite`` does not name), UnknownScope, UnknownStream, InvalidArgument, NotAuthorized (the
        brokers don't delete topics), NotReady (it is in trouble), DeadlineExceeded (repeating is safe).
        """
        self._take_away("delete_stream", stream, r.DeleteStream(stream, tuple(despite)), timeout)

    def alter_stream(
        self, stream: str, settings: Mapping[str, Any], *, timeout: float | None = None
    ) -> StreamDescription:
        """Change settings of a stream; transactions and readers go on. Repeating the call is fine.

        ``settings``: as of `create_stream`, of which ``replication.factor`` stays as it is, and
        ``max.message.bytes`` can only be raised. None: as if the setting had not been given.

        For operators. After a refusal the settings are those of before.

        Raises: UnsupportedSetting, InvalidArgument (also: the brokers refuse), TopicMisconfigured, NotAuthorized,
        UnknownScope, UnknownStream, StreamLost, NotReady (another change is under way, or the brokers are away),
        DeadlineExceeded (repeating is safe).
        """
        texts = {n: _setting(value) for n, value in _given(settings).items() if value is not None}
        command = r.AlterStream(stream, texts, tuple(n for n, v in settings.items() if v is None))
        return description_of(
            self._session.ask_stream(stream, command, self._alone("alter_stream", timeout))
        )

    def truncate_stream(
        self, stream: str, until: int | datetime, *, timeout: float | None = None
    ) -> StreamDescription:
        """Delete a stream's events up to a time, for good: all that was committed at or before it, and no more.

        ``until``: a commit timestamp, or a datetime with its time zone. No transaction is torn in the stream; give
        all streams of a scope the same one, and none is torn over them. Open transactions are not touched.
        Readers that stand before it go on behind it, or raise `SnapshotExpired`, as after retention. Repeating the
        call is fine.

        For operators.

        Raises: InvalidArgument (also: the state of a processor), NotAuthorized, UnknownScope, UnknownStream,
        StreamLost, NotReady (the time is to come; another change is under way; the brokers are away),
        DeadlineExceeded (repeating is safe).
        """
        at = check_at(until, "until")
        if at is None:
            raise InvalidArgument(
                "until None: a commit timestamp, or a datetime with its time zone"
            )
        command = r.TruncateStream(stream, at)
        return description_of(
            self._session.ask_stream(stream, command, self._alone("truncate_stream", timeout))
        )

    def effective_settings(self, stream: str, *, timeout: float | None = None) -> dict[str, str]:
        """The settings that the stream's topic has now, by the brokers' word, and not only those that were given.

        `describe` has the settings that were asked for.

        Raises: UnknownStream, NotAuthorized (``DescribeConfigs`` on the topic is missing), NotReady,
        UnsupportedSetting (the client has options that only librdkafka takes).
        """
        found = self._topic(stream, timeout)
        named = {name: found.config[name] for name in sorted(TOPIC) if name in found.config}
        return named | {REPLICATION: str(found.replication_factor)}

    def topic_id(self, stream: str, *, timeout: float | None = None) -> str:
        """The id of the stream's topic: another stream of that name, made later, has another one.

        Empty if brokers have no ids. Raises: as `effective_settings`.
        """
        return self._topic(stream, timeout).topic_id

    def _topic(self, stream: str, timeout: float | None) -> TopicInfo:
        topic = stream_topic(stream)
        seconds = self._deadline(timeout) - self._session.now()
        if self._ports.log is None:
            raise UnsupportedSetting("this client was made without a way to the brokers' settings")
        with self._ports.log(seconds) as log, client_errors("DescribeConfigs"):
            found = log.describe_topics([topic]).get(topic)
        if found is None:
            raise UnknownStream(f"there is no topic {topic}")
        return found

    def _take_away(self, call: str, stream: str, command: Any, timeout: float | None) -> None:
        self._session.ask_of(stream, command, r.StreamList, self._alone(call, timeout))
        self._shared.streams.pop(stream, None)

    def recover_stream(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """Take a LOST stream back, if its topics are the same ones and were only out of sight.

        For operators. Transactions that were aborted when the stream was given up stay aborted.

        Raises: IllegalState (a topic is another one, or gone), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded (repeating is safe).
        """
        command = r.RecoverStream(stream)
        return description_of(
            self._session.ask_stream(stream, command, self._alone("recover_stream", timeout))
        )

    def _alone(self, call: str, timeout: float | None) -> float:
        """As `_deadline`, for a call that takes effect at once. Raises: NonTransactional."""
        for shared, made in reversed(_entered.get()):
            txn = made()
            if shared is self._shared and txn is not None and not txn.is_over:
                raise NonTransactional(
                    f"{call} inside the open transaction {txn!r}: it takes effect at once, and no abort takes it "
                    "back; make the call before or after it"
                )
        return self._deadline(timeout)

    def _deadline(self, timeout: float | None) -> float:
        """The monotonic second at which a call that begins now ends. Raises: `NotForkSafe`, `IllegalState`."""
        self._shared.check()
        return self._shared.deadline(timeout)


def _given(settings: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if settings is not None and not isinstance(settings, Mapping):
        raise InvalidArgument(f"settings {settings!r:.100}: give names, each with a value")
    return settings or {}


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
