"""The calls of a client about its streams: made, described, scaled, forgotten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from anabranch.client.handle import Shared
from anabranch.client.session import Session
from anabranch.core.ids import check_scope
from anabranch.errors import InvalidArgument
from anabranch.schemas import records as r
from anabranch.types import StreamDescription, description_of


class Streams:
    """See `Client`, which has these calls."""

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
        names. ``adopt``: the topic may exist and hold records; readers get those unchanged. ``near``: a scope; a
        new one is put on the same control partition, so that transactions write to both. None: on the one with
        the fewest scopes.

        Raises: StreamExists (with other settings), TopicNotEmpty, InvalidArgument (also: the scope exists, and not
        near that one), UnknownScope (``near``), TopicMisconfigured, NotReady, DeadlineExceeded (repeating is safe).
        """
        texts = {name: _setting(value) for name, value in (settings or {}).items()}
        deadline = self._deadline(timeout)
        if near is not None:
            check_scope(near)
        info = self._session.create_stream(
            stream, segments, texts, deadline, adopt=bool(adopt), near=near
        )
        self._shared.layouts[stream] = info.segments
        return description_of(info)

    def streams(
        self, scope: str | None = None, *, timeout: float | None = None
    ) -> list[StreamDescription]:
        """All streams of a scope, or of the cluster, by name. Raises: UnknownScope, NotReady, DeadlineExceeded."""
        found = self._session.streams(scope, self._deadline(timeout))
        return [description_of(info) for info in found]

    def describe(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """One stream. Raises: UnknownScope, UnknownStream, NotReady, DeadlineExceeded."""
        info = self._session.describe(stream, self._deadline(timeout))
        self._shared.layouts[stream] = info.segments
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

        Raises: InvalidArgument, UnknownStream, NotReady (another scaling waits for its partitions),
        DeadlineExceeded (repeating is safe with ``segments``).
        """
        self._shared.check()
        if (segments is None) == (not seal and not ranges):
            raise InvalidArgument(
                "give a number of segments, or what to seal and which ranges to open"
            )
        opened = tuple(r.KeyRange(low, high) for low, high in ranges)
        command = r.Scale(stream, segments or 0, tuple(seal), opened)
        info = self._session.ask_stream(stream, command, self._shared.deadline(timeout))
        self._shared.layouts[stream] = info.segments
        return description_of(info)

    def forget_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Remove a LOST stream and what is left of its topics for good; its name can be used again.

        For operators. Repeating the call is fine. Positions in the old stream (snapshots, checkpoints of Spark
        queries) mean nothing in a new stream of that name: throw them away.

        Raises: IllegalState (the stream is not LOST, or a transaction that is not over has a part in it: `settle`
        that), UnknownScope, UnknownStream, InvalidArgument (the brokers don't delete topics), NotReady,
        DeadlineExceeded (repeating is safe).
        """
        command = r.ForgetStream(stream)
        self._session.ask_of(stream, command, r.StreamList, self._deadline(timeout))
        self._shared.layouts.pop(stream, None)

    def recover_stream(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """Take a LOST stream back, if its topics are the same ones and were only out of sight.

        For operators. Transactions that were aborted when the stream was given up stay aborted.

        Raises: IllegalState (a topic is another one, or gone), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded (repeating is safe).
        """
        command = r.RecoverStream(stream)
        return description_of(self._session.ask_stream(stream, command, self._deadline(timeout)))

    def _deadline(self, timeout: float | None) -> float:
        """The monotonic second at which a call that begins now ends. Raises: `NotForkSafe`, `IllegalState`."""
        self._shared.check()
        return self._shared.deadline(timeout)


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
