"""The ports of the client: all I/O, time and random numbers that it uses.

Two implementations: `anabranch.librdkafka` (confluent-kafka) and `anabranch.testing.memory.client` (the simulator).
Deadlines are seconds of the monotonic clock of `anabranch.ports.Clock`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from anabranch.ports import (
    Clock,
    Entropy,
    JournalRecord,
    Log,
    Opened,
    RecordHeaders,
    TopicPartition,
)
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import OPEN_LANE
from anabranch.topics.names import DEFAULT_PREFIX
from anabranch.topics.rights import Acl

if TYPE_CHECKING:
    from anabranch.batches.columns_write import Counted, EventColumns, Placing
    from anabranch.reading.iteration import Readers


class CommandBus(Protocol):
    """Carries commands to controllers and their replies back. Used by many threads at once."""

    def ready(self, deadline: float) -> None:
        """Find the topics of commands and replies. Raises `NotReady` if they can't be found in time."""

    def control_partitions(self, deadline: float, least: int = 0, *, afresh: bool = False) -> int:
        """The number of control partitions. Call it after `ready`.

        The brokers are asked again with ``afresh``, if the known number is below ``least``, or, without ``least``,
        if it is old.
        """

    def max_command_bytes(self) -> int:
        """The size limit of a payload. Call it after `ready`."""

    def cluster_id(self, deadline: float) -> str:
        """The brokers' id of their cluster. Call it after `ready`. Only the first call asks the brokers."""

    def send(
        self,
        control_partition: int,
        correlation_id: bytes,
        payload: bytes,
        headers: RecordHeaders = (),
        *,
        waits: bool = True,
    ) -> None:
        """Queue a command and return soon. Only a reply shows that it arrived.

        From now on replies with this correlation id are kept, until `forget`. ``waits``: if False, the replies are
        dropped, as no caller waits for them. The caller sends another command next; the two may travel together.
        """

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        """The next reply with this correlation id, or None at the deadline or once forgotten.

        Raises `EventTooLarge` if the broker refused the command for its size.
        """

    def forget(self, correlation_id: bytes) -> None:
        """Drop replies with this correlation id, and wake the caller that waits for one."""

    def trouble(self) -> str:
        """The last error (no connection, refused login, …), or an empty text."""

    def close(self) -> None:
        """Stop; waiting calls return None."""

    def after_fork(self) -> None:
        """Called in a forked child. Nothing may be freed from then on: all belongs to the parent's threads."""


class JournalWriter(Protocol):
    """One writer's journal records: idempotent, acks=all. A failed or uncertain write ends the writer."""

    def open(self, topic: str, partitions: Sequence[int], deadline: float) -> Opened:
        """Prepare for writes to these partitions. Raises `DeadlineExceeded` if the brokers don't answer in time."""

    def write(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        headers: RecordHeaders,
        timestamp_ms: int,
    ) -> None:
        """Queue a record; a timestamp of 0 means now. Raises `WriteFailed` if this writer has failed."""

    def write_many(self, topic: str, records: Iterable[JournalRecord]) -> None:
        """Queue records. Each record is queued before the next is taken from the iterable.

        Raises `WriteFailed` if this writer has failed. Records queued before an error stay queued.
        """

    def write_columns(
        self, topic: str, placing: Placing, columns: EventColumns
    ) -> Sequence[Counted] | None:
        """Queue rows; returns their number in each partition, or None if they must be written as events instead.

        A topic always comes with the same ``placing``. Rows without a timestamp get the present time. Raises
        `WriteFailed`.
        """

    def flush(
        self, written: Mapping[TopicPartition, int], deadline: float
    ) -> dict[TopicPartition, int]:
        """Wait until all in-sync replicas have acknowledged all writes.

        Returns an offset above the last record of each partition in ``written``, and not below the given one.
        Raises `WriteFailed` if a write failed or is unacknowledged at the deadline, and `DeadlineExceeded` if only
        the offsets are unknown. Raises `JournalMissing` long before the deadline: repeating is safe.
        """

    def discard(self) -> None:
        """Drop queued records and free everything. The writer can't be used any more."""


class Journals(Protocol):
    """Makes journal writers."""

    def writer(self) -> JournalWriter:
        """A new writer."""

    def close(self) -> None:
        """Free everything, open writers included."""

    def after_fork(self) -> None:
        """Called in a forked child, as `CommandBus.after_fork`."""


class Acls(Protocol):
    """The brokers' ACLs. Calls raise `NotAuthorized`, and `IllegalState` if the brokers have no authorizer."""

    def allow(self, acls: Iterable[Acl], deadline: float) -> None:
        """Add ACLs. Repeating the call is harmless."""

    def listed(self, deadline: float) -> list[Acl]:
        """The ACLs of topics, groups, transactional ids and the cluster."""


@dataclass(frozen=True, slots=True)
class ClientPorts:
    """All ports of a client, and its settings of time.

    ``log``: opens a log, for topics' settings and for operators who add lanes; its argument limits the seconds of
    one answer. ``max_clock_skew``: seconds.
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
