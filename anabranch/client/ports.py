"""What the client protocol asks of the world: commands and their answers, the journal, time and chance.

Two makes: `anabranch.librdkafka.command_bus` (confluent-kafka) and `tests.client.memory` (the simulator).
The clock is `anabranch.ports.Clock`. Deadlines are seconds of its monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from anabranch.errors import NotReady
from anabranch.ports import Clock, Entropy, TopicPartition

if TYPE_CHECKING:
    from anabranch.batches.columns_write import Counted, EventColumns, Placing
    from anabranch.reading.reader_factory import Readers

RecordHeaders: TypeAlias = Sequence[tuple[str, bytes | None]]
# Partition, key, value, headers, timestamp in Unix milliseconds (0: now).
JournalRecord: TypeAlias = tuple[int, bytes | None, bytes | None, RecordHeaders, int]


class CommandBus(Protocol):
    """Carries commands to controllers and their replies back. Used by many threads at once."""

    def ready(self, deadline: float) -> None:
        """Be able to send and to receive. `NotReady` if the cluster's topics can't be found in time."""

    def control_partitions(self, least: int = 0, deadline: float = 0.0) -> int:
        """How many control partitions there are; asked anew if fewer than ``least`` are known. Once `ready`."""

    def max_command_bytes(self) -> int:
        """No bigger payload can be sent. Only once `ready`."""

    def send(self, control_partition: int, correlation_id: bytes, payload: bytes) -> None:
        """Hand over a command; whether it arrives is known by its reply alone. Never waits long.

        From now on replies with this correlation id are kept, until `forget`.
        """

    def wait(self, correlation_id: bytes, deadline: float) -> bytes | None:
        """The next reply with this correlation id, or None at the deadline or once forgotten.

        `EventTooLarge` if the broker refused the command for its size.
        """

    def forget(self, correlation_id: bytes) -> None:
        """Keep no more replies with this correlation id; who waits for one stops waiting."""

    def trouble(self) -> str:
        """What went wrong last (no connection, refused login, …), or an empty text."""

    def close(self) -> None:
        """Stop; who waits gets None."""

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever; it belongs to the parent's threads."""


class JournalMissing(NotReady):
    """The brokers say that a journal is not there (any more): ask what became of its stream."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"the brokers know no topic {topic}: call again later")
        self.topic = topic


@dataclass(frozen=True, slots=True)
class Opened:
    """Journal partitions made ready: an offset not above the first record to come, for each; and the size limit."""

    first: dict[int, int]
    max_event_bytes: int


class JournalWriter(Protocol):
    """One writer's way to journals: idempotent, acks=all. Any failed or uncertain write ends it for good."""

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
        """Queue records, one by one as they are asked for: the next one only after the last one is queued.

        `WriteFailed` if this writer has failed; what was queued before an error stays queued.
        """

    def write_columns(
        self, topic: str, placing: Placing, columns: EventColumns
    ) -> Sequence[Counted] | None:
        """Queue the rows of columns; what went to each partition. None: nothing is done, write them as events.

        A topic always comes with the same ``placing``. Rows without a timestamp are of now. `WriteFailed`.
        """

    def flush(
        self, written: Iterable[TopicPartition], deadline: float
    ) -> dict[TopicPartition, int]:
        """Wait until all that was written is acknowledged by all in-sync replicas.

        Returns for each partition in ``written`` an offset above its last record. `WriteFailed` if any write
        failed or is still unacknowledged at the deadline, `DeadlineExceeded` if only the question for the
        offsets got no answer. `JournalMissing`, long before the deadline: again is safe.
        """

    def discard(self) -> None:
        """Drop what is queued, if anything is, and free everything; nothing can be written any more."""


class Journals(Protocol):
    """Makes journal writers."""

    def writer(self) -> JournalWriter:
        """A new one."""

    def close(self) -> None:
        """Free everything, open writers included."""

    def after_fork(self) -> None:
        """In a forked child: free nothing, ever; it belongs to the parent's threads."""


@dataclass(frozen=True, slots=True)
class ClientPorts:
    """All ports of a client."""

    bus: CommandBus
    journals: Journals
    clock: Clock
    entropy: Entropy
    readers: Readers | None = None
