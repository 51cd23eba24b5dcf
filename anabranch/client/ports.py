"""The ports of the client: commands and their answers, the journal, time and chance.

Two makes: `anabranch.librdkafka.command_bus` (confluent-kafka), `tests.client.memory` (the simulator).
The clock is `anabranch.ports.Clock`. Deadlines are seconds of its monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anabranch.core import defaults
from anabranch.core.legal_names import OPEN_LANE
from anabranch.ports import (
    Clock,
    Entropy,
    JournalRecord,
    Log,
    Opened,
    RecordHeaders,
    TopicPartition,
)
from anabranch.topics.names import DEFAULT_PREFIX
from anabranch.topics.rights import Acl

if TYPE_CHECKING:
    from anabranch.batches.columns_write import Counted, EventColumns, Placing
    from anabranch.reading.reader_factory import Readers


class CommandBus(Protocol):
    """Carries commands to controllers and their replies back. Used by many threads at once."""

    def ready(self, deadline: float) -> None:
        """Find the cluster's topics, to send and receive on. `NotReady` if they can't be found in time."""

    def control_partitions(self, deadline: float, least: int = 0) -> int:
        """The number of control partitions, asked for if below ``least``, or old without it. Only once `ready`."""

    def max_command_bytes(self) -> int:
        """The size limit of a payload. Only once `ready`."""

    def cluster_id(self, deadline: float) -> str:
        """The name that the brokers gave their cluster, remembered. Only once `ready`."""

    def send(
        self,
        control_partition: int,
        correlation_id: bytes,
        payload: bytes,
        headers: RecordHeaders = (),
    ) -> None:
        """Queue a command and return soon. Only a reply tells whether it arrived.

        From now on replies with this correlation id are kept, until `forget`.
        """

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        """The next reply with this correlation id, or None at the deadline or once forgotten.

        `EventTooLarge` if the broker refused the command for its size.
        """

    def forget(self, correlation_id: bytes) -> None:
        """Drop replies with this correlation id, and wake the caller that waits for one."""

    def trouble(self) -> str:
        """The last error (no connection, refused login, …), or an empty text."""

    def close(self) -> None:
        """Stop; waiting calls return None."""

    def after_fork(self) -> None:
        """In a forked child: never free anything; it belongs to the parent's threads."""


class JournalWriter(Protocol):
    """One writer's journal records: idempotent, acks=all. A failed or uncertain write ends the writer."""

    def open(self, topic: str, partitions: Sequence[int], deadline: float) -> Opened:
        """Prepare for writes to these partitions. `DeadlineExceeded` if the brokers don't answer in time."""

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        timestamp_ms: int,
    ) -> None:
        """Queue a record; 0 ms means now. `WriteFailed` if this writer has failed."""

    def write_many(self, topic: str, records: Iterable[JournalRecord]) -> None:
        """Queue records one by one; the iterable gives the next one after the last one is queued.

        `WriteFailed` if this writer has failed; records queued before an error stay queued.
        """

    def write_columns(
        self, topic: str, placing: Placing, columns: EventColumns
    ) -> Sequence[Counted] | None:
        """Queue the rows of columns; returns the count of each partition, or None: write them as events instead.

        A topic always comes with the same ``placing``. Rows without a timestamp are of now. `WriteFailed`.
        """

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        """Wait until all in-sync replicas have acknowledged all writes.

        Returns for each partition in ``written`` an offset above its last record, at least the one that is given.
        `WriteFailed` if a write failed or is unacknowledged at the deadline, `DeadlineExceeded` if only the offsets
        were not told. `JournalMissing` comes long before the deadline: repeating is safe.
        """

    def discard(self) -> None:
        """Drop the queue, if there is one, and free everything; the writer can't be used any more."""


class Journals(Protocol):
    """Makes journal writers."""

    def writer(self) -> JournalWriter:
        """A new writer."""

    def close(self) -> None:
        """Free everything, open writers included."""

    def after_fork(self) -> None:
        """In a forked child: never free anything; it belongs to the parent's threads."""


class Acls(Protocol):
    """Brokers' lists of who may do what. `NotAuthorized`; `IllegalState` if they keep none."""

    def allow(self, acls: Iterable[Acl], deadline: float) -> None:
        """Add these. Repeating it is harmless."""

    def listed(self, deadline: float) -> list[Acl]:
        """All that are about topics, groups, transactional ids and the cluster."""


@dataclass(frozen=True, slots=True)
class ClientPorts:
    """All ports of a client, and its settings of time.

    ``log``, for makers of lanes: one whose answers take at most so many seconds.
    """

    bus: CommandBus
    journals: Journals
    clock: Clock
    entropy: Entropy
    readers: Readers | None = None
    prefix: str = DEFAULT_PREFIX
    lane: str = OPEN_LANE
    log: Callable[[float], AbstractContextManager[Log]] | None = None
    acls: Acls | None = None
    commit_wait: bool = False
    max_clock_skew: float = defaults.MAX_CLOCK_SKEW_S
