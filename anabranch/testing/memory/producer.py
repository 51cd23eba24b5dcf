"""The producer of the in-memory log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from anabranch.batches.format import Buffer, next_sequence, read_header
from anabranch.ports import (
    LogBusy,
    LogError,
    LogFenced,
    LogRefused,
    LogUncertain,
    Producer,
    Steps,
    TopicPartition,
    all_steps,
)
from anabranch.testing.memory.broker import MemoryBroker
from anabranch.testing.memory.trouble import Kind, error_of


class Handle(Protocol):
    """A process's `anabranch.testing.memory.log.MemoryLog`."""

    process: str

    @property
    def cluster(self) -> MemoryBroker:
        """The brokers that all processes share."""

    def called(self, name: str) -> None:
        """Pass through the cluster's hook."""


class MemoryProducer(Producer):
    """`anabranch.ports.Producer` in memory."""

    def __init__(self, log: Handle, transactional_id: str, producer_id: int, epoch: int) -> None:
        self._log = log
        self._cluster = log.cluster
        self._id = transactional_id
        self.producer_id = producer_id
        self.producer_epoch = epoch
        self._sequences: dict[TopicPartition, int] = {}
        self._begun = False
        self._ended: LogError | None = None
        self._refusal: LogRefused | None = None

    def appending(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> Steps[list[int]]:
        """`anabranch.ports.Producer.appending`; the effect comes before or after the step ends (`_is_slow`)."""
        self._check_usable()
        if not batches:
            return []
        self._called("append")
        slow = self._is_slow()
        if slow:
            yield from self._pause("append")
        self._wait_for_markers()
        self._wait_for_leaders([partition for partition, _ in batches])
        self.check(partition for partition, _ in batches)
        try:
            with self._cluster.lock:
                offsets = self._append(batches)
        except LogRefused as error:
            self._refusal = error
            raise
        except LogError as error:
            raise self._over(error) from None
        if not slow:
            yield from self._pause("append")
        self._called("append.after")
        return offsets

    def append_stream(self, batches: Iterable[tuple[TopicPartition, Buffer]]) -> list[int]:
        try:
            listed = list(batches)
        except BaseException as error:
            # As on a broker: some batches may have been stored already.
            self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
            raise
        return all_steps(self.appending(listed))

    def committing(self) -> Steps[None]:
        """`anabranch.ports.Producer.committing`; the effect comes before or after the step ends (`_is_slow`)."""
        self._check_usable()
        if self._begun:
            yield from self._end("commit")

    def is_answered(self) -> bool:
        return True

    def abort(self) -> None:
        if self._ended is not None:
            raise self._ended
        self._refusal = None
        if self._begun:
            all_steps(self._end("abort"))

    def check(self, partitions: Iterable[TopicPartition]) -> None:
        places = list(partitions)
        with self._cluster.lock:
            away = self._cluster.troubles.of(places, self._log.process, Kind.LEADERLESS)
            for partition, trouble in away.items():
                raise error_of(partition, trouble)
            for partition in places:
                self._cluster.land_lost(partition, self.producer_id)

    def close(self) -> None:
        self._ended = self._ended or LogFenced(f"{self._id}: the producer is closed")

    def _check_usable(self) -> None:
        if self._ended is not None:
            raise type(self._ended)(str(self._ended))
        if self._refusal is not None:
            refusal = self._refusal
            raise LogRefused(f"abort first: {refusal}", refusal.error, refusal.topics)

    def _over(self, error: LogError) -> LogError:
        self._ended = error
        return error

    def _called(self, name: str) -> None:
        try:
            self._log.called(name)
        except (LogFenced, LogUncertain) as error:
            raise self._over(error) from None

    def _wait_for_markers(self) -> None:
        """Wait until the markers of the id's last transaction have landed (CONCURRENT_TRANSACTIONS).

        `LogBusy` if they don't; nothing was appended then.
        """

        def ended() -> bool:
            with self._cluster.lock:
                return not self._cluster.is_ending(self._id)

        if not self._cluster.wait_for(ended):
            raise LogBusy(f"{self._id}: markers can't be written")

    def _wait_for_leaders(self, places: Sequence[TopicPartition]) -> None:
        """Wait until all have a leader and enough replicas, as long as patience lasts."""
        troubles, process = self._cluster.troubles, self._log.process
        self._cluster.wait_for(
            lambda: not troubles.of(places, process, Kind.LEADERLESS, Kind.FEW_REPLICAS)
        )
        lacking = troubles.of(places, process, Kind.LEADERLESS)
        for place, trouble in lacking.items():
            error = error_of(place, trouble)
            error.topics = frozenset(other.topic for other in lacking)
            if self._begun:  # what was appended before has to be aborted
                self._refusal = LogRefused(f"an append was cut short: {error!r}", 0)
            raise error

    def _append(self, batches: Sequence[tuple[TopicPartition, Buffer]]) -> list[int]:
        """Append. Partitions in trouble join the native transaction, too: its end has to be marked there."""
        state = self._cluster.current(self._id, self.producer_id, self.producer_epoch)
        targets = [self._cluster.partition(partition) for partition, _ in batches]
        self._cluster.begin(state, dict.fromkeys(partition for partition, _ in batches))
        self._begun = True
        offsets = []
        trouble, unwritten = self._cluster.troubles.unwritten(
            [partition for partition, _ in batches], self._log.process
        )
        for target, (partition, given) in zip(targets, batches, strict=True):
            if partition in unwritten:
                continue
            data = bytes(given)
            target.check(data, self._cluster.now_ms())
            sequence = self._sequences.get(partition, 0)
            offsets.append(
                target.append(
                    data, self.producer_id, self.producer_epoch, sequence, transactional=True
                )
            )
            self._sequences[partition] = next_sequence(sequence, read_header(data).record_count)
        if trouble is not None:
            raise trouble
        return offsets

    def _is_slow(self) -> bool:
        """Whether the brokers do what they are asked for only when the caller waits for it."""
        return False

    def _pause(self, name: str) -> Steps[None]:
        """End a step: the request of this call is sent, and its caller does other work meanwhile."""
        del name
        yield

    def _end(self, name: str) -> Steps[None]:
        self._called(name)
        slow = self._is_slow()
        if slow:
            yield from self._pause(name)
        try:
            with self._cluster.lock:
                state = self._cluster.current(self._id, self.producer_id, self.producer_epoch)
                self.producer_id, self.producer_epoch = self._cluster.end(
                    state, commit=name == "commit"
                )
        except LogFenced as error:
            raise self._over(error) from None
        if self._cluster.transaction_version >= 2:
            self._sequences.clear()
        self._begun = False
        if not slow:
            yield from self._pause(name)
        self._called(f"{name}.after")
