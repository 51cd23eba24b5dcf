"""Growth of streams' topics, beside the loop: the partitions that the log wants are added."""

from __future__ import annotations

from collections.abc import Container, Iterator
from concurrent.futures import Future
from typing import NamedTuple

from anabranch.backoff import Backoff
from anabranch.core.state import State
from anabranch.errors import AnabranchError, NotReady
from anabranch.ports import Clock, Log, LogRefused, LogUnavailable
from anabranch.processors.streams.health import new_pauses
from anabranch.processors.streams.helper_thread import helper
from anabranch.topics.creation import grow_stream_topics, refusal_of
from anabranch.topics.names import journal_topic


class NotGrown(NamedTuple):
    """The reason why a stream's topics can't be grown, and the partitions of its journal."""

    error: AnabranchError
    there: int = 0


class Growth:
    """Adds the partitions that are logged as wanted, beside the loop; also those that a former leader left.

    A growth that fails pauses, and is tried again for what may pass: brokers may have added the partitions.
    """

    def __init__(self, log: Log, clock: Clock, *, threads: bool) -> None:
        self._log = log
        self._clock = clock
        self._helper = helper("anabranch-growth", threads=threads)
        self._under_way: dict[str, Future[int | NotGrown]] = {}
        self._pauses: dict[str, Backoff] = {}

    @property
    def busy(self) -> bool:
        """Whether topics are being grown."""
        return bool(self._under_way)

    def is_at(self, stream: str) -> bool:
        """Whether this stream's topics are being grown."""
        return stream in self._under_way

    def step(
        self, state: State, waiting: Container[str] = ()
    ) -> Iterator[tuple[str, int | NotGrown]]:
        """Begin the growth that is wanted. Yields (stream, its partitions now, or why it can't be grown).

        ``waiting``: streams in trouble.

        Raises: LogError, if the log can't be reached.
        """
        for stream in [s for s, work in self._under_way.items() if work.done()]:
            row = state.streams.get(stream)
            if row is None or row.wanted_partitions <= row.partitions:
                del self._under_way[stream]  # given up meanwhile
        for stream, row in list(state.streams.items()):
            if row.wanted_partitions <= row.partitions:
                continue
            if stream not in self._under_way:
                pauses = self._pauses.get(stream)
                if stream in waiting or (pauses is not None and not pauses.is_over):
                    continue
                wanted = row.wanted_partitions
                self._under_way[stream] = self._helper.submit(_grow, self._log, stream, wanted)
            work = self._under_way[stream]
            if work.done():
                del self._under_way[stream]
                grown = work.result()
                if isinstance(grown, NotGrown):
                    self._pauses.setdefault(stream, new_pauses(self._clock)).begin()
                yield stream, grown

    def close(self) -> None:
        """Leave work under way: the next leader does it again.

        Such work may still add partitions, also to topics of a later stream of that name; this does no harm.
        """
        self._helper.shutdown(wait=False, cancel_futures=True)
        self._under_way.clear()


def _grow(source: Log, stream: str, partitions: int) -> int | NotGrown:
    """Add partitions. Those that a former attempt added to the journal stay wanted: plain writes come there."""
    try:
        try:
            grow_stream_topics(source, stream, partitions)
        except LogRefused as error:
            journal = source.describe_topics([journal_topic(stream)]).get(journal_topic(stream))
            return NotGrown(refusal_of(error), journal.partitions if journal is not None else 0)
    except AnabranchError as error:
        return NotGrown(error)
    except (LogRefused, LogUnavailable) as error:
        return NotGrown(NotReady(f"the brokers can't add partitions now: {error}"))
    return partitions
