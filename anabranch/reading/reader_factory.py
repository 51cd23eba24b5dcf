"""Creates a client's readers, and closes them with it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from typing import TYPE_CHECKING

from anabranch.errors import UnsupportedSetting
from anabranch.extras import need
from anabranch.reading.committed_log import CommittedLog, Groups, ReaderPorts
from anabranch.reading.history import Start
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.positions import first_inputs
from anabranch.reading.snapshot import SnapshotPlan, SnapshotReader, StreamCut, streams_of, take
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.schemas.records import ProcessorInput
from anabranch.types import Tenure

if TYPE_CHECKING:
    from anabranch.reading.task_reader import TaskReader


class Readers:
    """The readers of one client. ``timeout``: seconds that one of their questions may take."""

    def __init__(self, ports: ReaderPorts, timeout: float) -> None:
        self.ports = ports
        self.timeout = timeout
        self._made: weakref.WeakSet[Reader | TransactionReader | SnapshotReader | TaskReader] = (
            weakref.WeakSet()
        )

    def read(
        self, streams: str | Sequence[str], group: str | None, timeout: float | None, start: Start
    ) -> Reader:
        """A reader of events."""
        reader = Reader(self.ports, streams_of(streams), group, timeout, start, self.timeout)
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
        """A reader of whole transactions. ``whole``: it raises instead of skipping deleted ones."""
        reader = TransactionReader(
            self.ports, stream, group, timeout, start, self.timeout, whole=whole
        )
        self._made.add(reader)
        return reader

    def read_tasks(
        self,
        streams: str | Sequence[str],
        tenure: Tenure,
        timeout: float | None,
        together: Callable[[Sequence[str], float], Mapping[str, int]],
    ) -> TaskReader:
        """A reader of the events of a tenure's tasks. ``together``: `Client.together` with a deadline."""
        need("numpy")
        from anabranch.reading.task_reader import TaskReader

        names = streams_of(streams)
        groups = together(names, self.ports.clock.monotonic() + self.timeout)
        reader = TaskReader(self.ports, names, tenure, timeout, self.timeout, groups)
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
        with self.source() as source:
            return first_inputs(source, streams, start, self.timeout, deadline, groups)

    @property
    def groups(self) -> Groups:
        """Consumer groups. Raises: UnsupportedSetting."""
        if self.ports.groups is None:
            raise UnsupportedSetting("this client has no view of consumer groups")
        return self.ports.groups

    def source(self) -> AbstractContextManager[CommittedLog]:
        """A log for some questions."""
        return closing(self.ports.committed_log(self.timeout))

    def plan(
        self, streams: Sequence[str], timestamp: int, deadline: float, since: int | None = None
    ) -> SnapshotPlan:
        """The offsets of streams as of a safe timestamp. ``deadline``: monotonic seconds."""
        with self.source() as source:
            return take(source, streams, timestamp, deadline, since)

    def read_cut(self, stream: str, cut: StreamCut) -> SnapshotReader:
        """A reader of a stream as of a snapshot."""
        reader = SnapshotReader(self.ports, stream, cut, self.timeout)
        self._made.add(reader)
        return reader

    def close(self) -> None:
        """Close all."""
        for reader in list(self._made):
            reader.close()

    def after_fork(self) -> None:
        """In a forked child: never free anything."""
        for reader in list(self._made):
            reader.after_fork()
