"""The topics of streams: made and grown as the log says, by whoever leads.

What shall be is logged first, in the stream's row; then it is done here, and that it is done is logged. A successor
that finds the first without the last does it again, which is harmless.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from anabranch.core.decide_admin import CREATING, stream_created, stream_refused
from anabranch.core.decide_scale import partitions_added, partitions_refused
from anabranch.core.state import State
from anabranch.core.turn import Turn
from anabranch.errors import AnabranchError
from anabranch.ports import Log, LogRefused
from anabranch.processors.growth import Growth
from anabranch.schemas.records import StreamRow
from anabranch.topics.declarations import create_stream_topics, refusal_of

Done = Callable[[Turn], None]  # puts into a turn what was done


class StreamTopics:
    """Makes topics in the loop, and grows them beside it."""

    def __init__(self, log: Log, *, threads: bool) -> None:
        self._log = log
        self._growth = Growth(log, threads=threads)

    @property
    def busy(self) -> bool:
        """Whether something is under way: look again soon."""
        return self._growth.busy

    def step(self, state: State) -> Iterator[Done]:
        """Do, or begin, what the log says. What is done is to be logged before the next is taken.

        Raises: LogError, if the log can't be reached.
        """
        for row in list(state.streams.values()):
            if row.state == CREATING:
                yield self._create(row)
        for stream, grown in self._growth.step(state):
            if isinstance(grown, int):
                yield partial(partitions_added, stream=stream, partitions=grown)
            else:
                yield partial(partitions_refused, stream=stream, error=grown)

    def close(self) -> None:
        """Wait for what is under way: it is harmless, and whoever leads next does it again."""
        self._growth.close()

    def _create(self, row: StreamRow) -> Done:
        try:
            starts = create_stream_topics(
                self._log, row.stream, segments=row.segment_count, settings=row.settings
            )
        except AnabranchError as error:
            return partial(stream_refused, stream=row.stream, error=error)
        except LogRefused as error:
            return partial(stream_refused, stream=row.stream, error=refusal_of(error))
        return partial(stream_created, stream=row.stream, starts=starts)
