"""Growing the topics of streams, beside the loop: commits go on while partitions are added."""

from __future__ import annotations

from collections.abc import Container, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from anabranch.core.state import State
from anabranch.errors import AnabranchError, NotReady
from anabranch.ports import Log, LogRefused, LogUnavailable
from anabranch.topics.declarations import grow_stream_topics, refusal_of


class Growth:
    """Adds the partitions that are logged as wanted; also those that a former leader left."""

    def __init__(self, log: Log, *, threads: bool) -> None:
        self._log = log
        self._pool = ThreadPoolExecutor(1, "anabranch-growth") if threads else None
        self._under_way: dict[str, tuple[int, Future[None]]] = {}

    @property
    def busy(self) -> bool:
        """Whether topics are being grown."""
        return bool(self._under_way)

    def is_at(self, stream: str) -> bool:
        """Whether this stream's topics are being grown."""
        return stream in self._under_way

    def step(
        self, state: State, waiting: Container[str] = ()
    ) -> Iterator[tuple[str, int | AnabranchError]]:
        """Begin what is wanted; (stream, partitions that it has now, or why it can't be grown).

        ``waiting``: streams in trouble.

        Raises: LogError, if the log can't be reached.
        """
        for stream in [s for s, (_, work) in self._under_way.items() if work.done()]:
            row = state.streams.get(stream)
            if row is None or row.wanted_partitions <= row.partitions:
                del self._under_way[stream]  # it was given up meanwhile
        for stream, row in list(state.streams.items()):
            if row.wanted_partitions <= row.partitions:
                continue
            if stream not in self._under_way:
                if stream in waiting:
                    continue
                wanted = row.wanted_partitions
                self._under_way[stream] = wanted, self._begin(stream, wanted)
            partitions, work = self._under_way[stream]
            if work.done():
                del self._under_way[stream]
                try:
                    work.result()
                except AnabranchError as error:
                    yield stream, error
                except LogRefused as error:
                    yield stream, refusal_of(error)
                except LogUnavailable as error:
                    yield stream, NotReady(f"the brokers can't add partitions now: {error}")
                else:
                    yield stream, partitions

    def close(self) -> None:
        """Work under way is not waited for: whoever leads next does it again.

        It adds to topics that are there; to those of a later stream of that name, too, as anybody's hand may.
        """
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._under_way.clear()

    def _begin(self, stream: str, partitions: int) -> Future[None]:
        if self._pool is not None:
            return self._pool.submit(grow_stream_topics, self._log, stream, partitions)
        done: Future[None] = Future()
        try:
            grow_stream_topics(self._log, stream, partitions)
            done.set_result(None)
        except (AnabranchError, LogRefused) as error:
            done.set_exception(error)
        return done
