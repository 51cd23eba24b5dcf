"""Makes a client's readers, and ends them with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from anabranch.errors import UnsupportedSetting
from anabranch.extras import need
from anabranch.reading.committed_log import Groups, ReaderPorts
from anabranch.reading.history_search import Start
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.snapshot import SnapshotPlan, newest, streams_of, take
from anabranch.reading.snapshot_reader import SnapshotReader, StreamCut
from anabranch.reading.tasks.groups import Mirror, first_inputs, group_inputs, group_progress
from anabranch.reading.tasks.lag import InputLag, Lag, input_lags
from anabranch.reading.tasks.standing import (
    ConsumerGroup,
    count_events,
    group_of,
    groups_of,
    move_group,
)
from anabranch.reading.tasks.stored import stored
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.schemas.records import ProcessorInfo, ProcessorInput
from anabranch.types import Tenure

if TYPE_CHECKING:
    from anabranch.reading.tasks.reader import TaskReader


class Readers:
    """The readers of one client. ``timeout``: seconds that a question of theirs may take."""

    def __init__(self, ports: ReaderPorts, timeout: float) -> None:
        self.ports = ports
        self._timeout = timeout
        self._made: weakref.WeakSet[Reader | TransactionReader | SnapshotReader | TaskReader] = (
            weakref.WeakSet()
        )

    def read(
        self, streams: str | Sequence[str], group: str | None, timeout: float | None, start: Start
    ) -> Reader:
        """A reader of events."""
        reader = Reader(self.ports, streams_of(streams), group, timeout, start, self._timeout)
        self._made.add(reader)
        return reader

    def read_transactions(
        self,
        stream: str,
        group: str | None,
        timeout: float | None,
        start: Start,
        *,
        whole: bool = False,
    ) -> TransactionReader:
        """A reader of whole transactions. ``whole``: it passes over none that is deleted."""
        parts = self.ports, stream, group, timeout, start, self._timeout
        reader = TransactionReader(*parts, whole=whole)
        self._made.add(reader)
        return reader

    def read_tasks(
        self,
        streams: str | Sequence[str],
        tenure: Tenure,
        timeout: float | None,
        together: Callable[[Sequence[str], float], Mapping[str, int]],
    ) -> TaskReader:
        """A reader of the events of a tenure's tasks. ``together``: `Client.together` by a deadline."""
        need("numpy")
        from anabranch.reading.tasks.reader import TaskReader

        names = streams_of(streams)
        groups = together(names, self.ports.clock.monotonic() + self._timeout)
        reader = TaskReader(self.ports, names, tenure, timeout, self._timeout, groups)
        self._made.add(reader)
        return reader

    def first_inputs(
        self,
        streams: Sequence[str],
        start: Start,
        deadline: float,
        together: Callable[[Sequence[str], float], Mapping[str, int]],
    ) -> tuple[ProcessorInput, ...]:
        """The inputs of a new processor, each with the place where it starts."""
        groups = together(streams, deadline)
        with closing(self.ports.committed_log(self._timeout)) as source:
            return first_inputs(source, streams, start, self._timeout, deadline, groups)

    def lags(self, info: ProcessorInfo) -> list[InputLag]:
        """How far a processor is behind each of its inputs."""
        with closing(self.ports.committed_log(self._timeout)) as source:
            return input_lags(source, info, self._timeout)

    def groups(self, stream: str | None) -> list[ConsumerGroup]:
        """The consumer groups with positions in a stream, or in any."""
        return groups_of(self.ports, self._groups(), stream, self._timeout)

    def group(self, name: str) -> ConsumerGroup:
        """A consumer group, and where it stands."""
        return group_of(self.ports, self._groups(), name, self._timeout)

    def count_events(self, stream: str) -> Lag:
        """A stream's committed events, as `anabranch.Client.count_events` tells them."""
        return count_events(self.ports, stream, self._timeout)

    def move_group(self, name: str, stream: str, start: Start) -> ConsumerGroup:
        """Let a group without members go on from elsewhere."""
        return move_group(self.ports, self._groups(), name, stream, start, self._timeout)

    def _groups(self) -> Groups:
        if self.ports.groups is None:
            raise UnsupportedSetting("this client has no view of consumer groups")
        return self.ports.groups

    def mirror(self, processor: str, ask: Callable[[], ProcessorInfo]) -> Mirror:
        """A mirror of a processor's positions for Kafka's tools."""
        return Mirror(self.ports, processor, ask, self._timeout)

    def group_inputs(self, group: str, streams: Sequence[str]) -> tuple[ProcessorInput, ...]:
        """The inputs of a processor that goes on where a consumer group stands."""
        return group_inputs(self.ports, group, streams, self._timeout)

    def stored(self, info: ProcessorInfo, store: str, key: bytes, task: int | None) -> bytes | None:
        """The committed value of a key in a processor's store."""
        with closing(self.ports.committed_log(self._timeout)) as source:
            return stored(source, info, store, key, task, self._timeout)

    def plan(
        self, streams: Sequence[str], timestamp: int, deadline: float, since: int | None = None
    ) -> SnapshotPlan:
        """The offsets of streams as of a safe timestamp. ``deadline``: monotonic seconds."""
        with closing(self.ports.committed_log(self._timeout)) as source:
            return take(source, streams, timestamp, deadline, since)

    def newest(self, streams: Sequence[str], deadline: float) -> int:
        """The timestamp of the newest record of these streams' histories, which is safe."""
        with closing(self.ports.committed_log(self._timeout)) as source:
            return newest(source, streams, deadline)

    def progress(self, streams: Sequence[str], group: str, safe: int) -> int:
        """The highest timestamp, at most a safe one, up to which a group has consumed all."""
        return group_progress(self.ports, group, streams, safe, self._timeout)

    def read_cut(self, stream: str, cut: StreamCut) -> SnapshotReader:
        """A reader of a stream as of a snapshot."""
        reader = SnapshotReader(self.ports, stream, cut, self._timeout)
        self._made.add(reader)
        return reader

    def close(self) -> None:
        """Close all."""
        for reader in list(self._made):
            reader.close()

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever."""
        for reader in list(self._made):
            reader.after_fork()
