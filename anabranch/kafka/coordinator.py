"""A transactional id's coordinator: initialise, add partitions, end (KIP-98, KIP-890)."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping, Sequence

from kio.schema.errors import ErrorCode

from anabranch.backoff import Backoff
from anabranch.clock import SystemClock
from anabranch.kafka import calls, codes, health
from anabranch.kafka.calls import (
    ADD_PARTITIONS_TO_TXN,
    END_TXN,
    FIND_COORDINATOR,
    INIT_PRODUCER_ID,
    PRODUCE,
    ConnectionBroken,
    MalformedAnswer,
)
from anabranch.kafka.cluster import UNKNOWN_TOPIC_S, Again, Cluster, raise_or_again
from anabranch.kafka.codes import NONE, Act, meaning
from anabranch.kafka.connection import Connection
from anabranch.kafka.data import BUMPS_FROM, end_answer, end_request
from anabranch.kafka.lost_markers import LastOutcome
from anabranch.ports import (
    UNKNOWN_TOPIC_OR_PARTITION,
    LogBusy,
    LogError,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    Steps,
    TopicPartition,
)

_FEATURE = "transaction.version"
_V2 = 2
GROUP_KEY_TYPE = 0
TRANSACTION_KEY_TYPE = 1
# Produce adds partitions to the transaction from this version on (KIP-890).
PRODUCE_ADDS_FROM = 12
_HIGHEST_END_TXN_V1 = 3
# A transaction that just ended blocks the next one for a millisecond or two, rarely for 25.
_FIRST_PAUSE_S = 0.001
_LONGEST_PAUSE_S = 0.02
_PAUSE_GROWTH = 1.5
# … or for longer if its markers can't be written, because a partition has no leader.
BUSY_S = 1.5
ANSWER_S = 12.0  # longer than a silent broker stays leader


def busy(transactional_id: str) -> LogBusy:
    """The error for an id that stays CONCURRENT_TRANSACTIONS for longer than markers take."""
    return LogBusy(
        f"{transactional_id}: the markers of its last native transaction are not written, for {BUSY_S:.0f} s "
        "now: a partition that it wrote to has no leader, or too few replicas in sync"
    )


def coordinator_of(
    cluster: Cluster, name: str, deadline: float, *, key_type: int = TRANSACTION_KEY_TYPE
) -> tuple[str, int]:
    """The address of the coordinator of a transactional id, or of a group."""
    return cluster.repeat(
        f"coordinator of {name}",
        deadline,
        lambda: _coordinator_of(cluster, name, key_type, deadline),
    )


def _coordinator_of(cluster: Cluster, name: str, key_type: int, deadline: float) -> tuple[str, int]:
    with cluster.connection(None, deadline) as connection:
        found = connection.ask(
            FIND_COORDINATOR,
            cluster.soon(deadline),
            key=name,
            key_type=key_type,
            coordinator_keys=(name,),
        )
    several = getattr(found, "coordinators", (found,))  # from version 4 on
    if not several:
        raise MalformedAnswer(f"FindCoordinator names no coordinator for {name}")
    one = several[0]
    code = int(one.error_code)
    if code != NONE:
        raise_or_again(codes.READ_CODES, code, f"coordinator of {name}")
    return str(one.host), int(one.port)


class Coordinator:
    """The producer's side of the transaction coordinator, over a connection of its own.

    Write with `producer_id` and `producer_epoch`. ``is_v2``: whether the cluster has transactions of KIP-890, where
    each end returns a new epoch, and Produce adds partitions by itself. ``last``: the outcome of the id's last
    native transaction before the id was initialised.
    """

    def __init__(self, cluster: Cluster, transactional_id: str, timeout: float) -> None:
        """Initialise the transactional id. ``timeout``: limit of one native transaction, in seconds.

        Raises:
            LogBusy: the markers of its last native transaction can't be written.
            LogUnavailable: no coordinator until the deadline.
            LogRefused: the broker does not allow the id or the timeout.
        """
        self._cluster = cluster
        self._id = transactional_id
        self._busy_since: float | None = None
        self._timeout = dt.timedelta(milliseconds=round(timeout * 1000))
        self.connection: Connection | None = None
        self._closed = False
        self._address: tuple[str, int] | None = None
        self.producer_id = -1
        self.producer_epoch = -1
        self.is_v2 = False
        self.last = LastOutcome()
        deadline = cluster.deadline()
        try:
            cluster.repeat(f"initialise {transactional_id}", deadline, lambda: self._init(deadline))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._closed = True
        if self.connection is not None:
            self.connection.close()

    def _init(self, deadline: float) -> None:
        connection = self._connect(deadline)
        self.last.ask(connection, self._id, self._cluster.soon(deadline))
        found = connection.ask(
            INIT_PRODUCER_ID,
            self._cluster.soon(deadline),
            transactional_id=self._id,
            transaction_timeout=self._timeout,
        )
        code = int(found.error_code)
        if code == codes.CONCURRENT_TRANSACTIONS:
            self._busy_since = self._busy_since or time.monotonic()
            if time.monotonic() - self._busy_since > BUSY_S:
                raise busy(self._id)
        if code != NONE:
            self._fail(codes.INIT_CODES, code, f"initialise {self._id}")
        self.producer_id = int(found.producer_id)
        self.producer_epoch = int(found.producer_epoch)
        end_txn = connection.versions.get(END_TXN.key, (0, 0))[1]
        self.is_v2 = (
            connection.features.get(_FEATURE, 0) >= _V2
            and end_txn >= BUMPS_FROM
            and connection.versions.get(PRODUCE.key, (0, 0))[1] >= PRODUCE_ADDS_FROM
        )

    def _connect(self, deadline: float) -> Connection:
        connection = self.connection
        if connection is None or not connection.usable():
            if self._address is not None:
                self._cluster.health.failed(self._address)
            self._address = coordinator_of(self._cluster, self._id, deadline)
            soon = self._cluster.soon(deadline)
            connection = self.connection = self._cluster.pool.open(self._address, soon)
            if self._closed:  # perhaps meanwhile, by another thread
                connection.close()
                raise ConnectionBroken(f"{self._id}: the producer is closed", sent=False)
        return connection

    def is_replaced(self) -> bool:
        """Whether another broker is the coordinator by now. Leaders ask the coordinator before they append."""
        try:
            if self._address is not None:
                self._cluster.health.failed(self._address)
            deadline = self._cluster.deadline(health.REPLACED_S)
            return self._address != coordinator_of(self._cluster, self._id, deadline)
        except LogError:
            return False

    def _fail(
        self,
        table: Mapping[ErrorCode, codes.Meaning],
        code: int,
        what: str,
        topics: Sequence[str] = (),
    ) -> None:
        """Raise the error of a coordinator's code; `Again` if the coordinator did nothing."""
        if meaning(table, code).act is Act.REFRESH and self.connection is not None:
            self.connection.close()
        raise_or_again(table, code, what, topics=topics)

    def add_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        """AddPartitionsToTxn, for clusters below ``transaction.version`` 2.

        Raises:
            LogFenced, LogUncertain: the producer is unusable.
            LogBusy: nothing was added, because the transaction before has not ended everywhere.
            LogRefused: the broker refuses a partition.
        """
        deadline = self._cluster.deadline()
        known_by = min(deadline, time.monotonic() + UNKNOWN_TOPIC_S)
        busy_by = time.monotonic() + BUSY_S
        try:
            self._repeat_quickly(
                deadline, lambda: self._add_once(partitions, deadline, known_by, busy_by)
            )
        except LogBusy:
            raise
        except (ConnectionBroken, LogUnavailable) as error:
            raise LogUncertain(f"{self._id}: add partitions: {error}") from error

    def _add_once(
        self, partitions: Sequence[TopicPartition], deadline: float, known_by: float, busy_by: float
    ) -> None:
        connection = self._connect(deadline)
        found = connection.ask(
            ADD_PARTITIONS_TO_TXN,
            deadline,
            v3_and_below_transactional_id=self._id,
            v3_and_below_producer_id=self.producer_id,
            v3_and_below_producer_epoch=self.producer_epoch,
            v3_and_below_topics=[
                {"name": topic, "partitions": numbers}
                for topic, numbers in calls.by_topic(partitions).items()
            ],
        )
        failed = {
            int(result.partition_error_code): str(topic.name)
            for topic in found.results_by_topic_v3_and_below
            for result in topic.results_by_partition
        }
        gone = failed.get(UNKNOWN_TOPIC_OR_PARTITION)
        if gone is not None and time.monotonic() > known_by:
            raise LogUncertain(f"{self._id}: add partitions: there is no topic {gone}", (gone,))
        failures = failed.keys() - {NONE}
        if failures == {codes.CONCURRENT_TRANSACTIONS} and time.monotonic() > busy_by:
            raise busy(self._id)
        # A real reason takes precedence over "not attempted because of another".
        for code in sorted(failures, key=lambda code: code == 55):
            what = f"{self._id}: add partitions"
            self._fail(codes.ADD_PARTITIONS_CODES, code, what, (failed[code],))

    def end(self, *, commit: bool) -> Steps[None]:
        """EndTxn, in steps: each ends when the request is sent, and the next one waits for the answer.

        Raises:
            LogFenced, LogUncertain: the producer is unusable.
        """
        what = f"{self._id}: {'commit' if commit else 'abort'}"
        deadline = self._cluster.deadline()
        pauses = new_pauses()
        try:
            while True:
                try:
                    return (yield from self._end_once(commit, deadline, what))
                except Again as again:
                    if not pauses.sleep(deadline):
                        raise LogUnavailable(str(again)) from again
        except (ConnectionBroken, LogUnavailable, LogRefused, MalformedAnswer) as error:
            raise LogUncertain(f"{what}: {error}") from error

    def _end_once(self, commit: bool, deadline: float, what: str) -> Steps[None]:
        connection = self._connect(deadline)
        version = connection.version(
            END_TXN, END_TXN.highest if self.is_v2 else _HIGHEST_END_TXN_V1
        )
        body = end_request(version, self._id, self.producer_id, self.producer_epoch, commit=commit)
        limit = min(deadline, time.monotonic() + ANSWER_S)
        flexible = version >= END_TXN.flexible_from
        sent = connection.send(END_TXN.key, version, (body,), flexible=flexible, deadline=limit)
        yield
        self._cluster.wait(connection, limit, self.is_replaced)
        ended = end_answer(version, connection.receive(sent, limit))
        if ended.error != NONE:
            self._fail(codes.END_TXN_CODES, ended.error, what)
        if self.is_v2:
            self.producer_id, self.producer_epoch = ended.producer_id, ended.producer_epoch

    def _repeat_quickly(self, deadline: float, attempt: Callable[[], None]) -> None:
        """Repeat while the coordinator answers that it did nothing. A broken connection ends the repetition."""
        pauses = new_pauses()
        while True:
            try:
                return attempt()
            except Again as again:
                if not pauses.sleep(deadline):
                    raise LogUnavailable(str(again)) from again


def new_pauses() -> Backoff:
    """The pauses between tries of a request that is refused while a native transaction is ending."""
    return Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, SystemClock(), growth=_PAUSE_GROWTH)
