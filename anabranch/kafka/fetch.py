"""Reading: one Fetch request to each broker that has some of the wanted partitions, and their answers."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from anabranch.kafka import codes, data
from anabranch.kafka.calls import FETCH, ConnectionBroken, MalformedAnswer
from anabranch.kafka.cluster import Again, Cluster, raise_or_again
from anabranch.kafka.codes import NONE, Act, error_for, meaning
from anabranch.kafka.connection import Connection, readable
from anabranch.kafka.health import Address, Use
from anabranch.ports import (
    OFFSET_OUT_OF_RANGE,
    CorruptBatch,
    Failed,
    Fetched,
    LogError,
    LogUnavailable,
    OffsetOutOfRange,
    TopicPartition,
)

_MAX_I32 = (1 << 31) - 1
# A broker that is silent for this long after others answered is skipped.
_SLACK_S = 0.3
_NEVER = (0, 0)
_MOST_FED = 10_000
_MOVED_S = 0.001  # the pause before another replica is asked


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One call of `Fetcher.fetch`. ``give_up``: the end of waiting for new records; times are monotonic seconds."""

    positions: Mapping[TopicPartition, int]
    give_up: float
    deadline: float
    max_bytes: int
    committed: bool
    failed: Failed | None


@dataclass(slots=True)
class _Request:
    """A Fetch request under way to one broker."""

    node: int
    connection: Connection
    address: Address
    version: int
    correlation: int
    partitions: Sequence[TopicPartition]


@dataclass(slots=True)
class _Found:
    """The content of the answers so far.

    ``broken``: brokers that did not answer. ``moved``: partitions for which another replica has to be asked.
    """

    fetched: dict[TopicPartition, Fetched] = field(default_factory=dict)
    broken: list[ConnectionBroken] = field(default_factory=list)
    moved: list[TopicPartition] = field(default_factory=list)


class Fetcher:
    """`anabranch.ports.Log.fetch` on brokers. Thread-safe: each call uses connections of its own.

    Each batch's CRC is checked. A broker that does not answer is skipped while another answers. While leaders
    move, a call waits up to the request timeout and then raises `LogUnavailable`; with ``failed`` it does neither.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._turn = 0
        # Partition with records -> number of the last fetch with some, and their bytes.
        self._fed: dict[TopicPartition, tuple[int, int]] = {}

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        *,
        max_wait: float,
        max_bytes: int,
        committed: bool,
        failed: Failed | None = None,
    ) -> dict[TopicPartition, Fetched]:
        if not positions:
            return {}
        give_up = time.monotonic() + max_wait
        deadline = give_up + self._cluster.settings.request_timeout
        wanted = _Wanted(positions, give_up, deadline, max_bytes, committed, failed)
        return self._cluster.repeat("fetch", deadline, lambda: self._fetch(wanted))

    def _fetch(self, wanted: _Wanted) -> dict[TopicPartition, Fetched]:
        by_leader = self._cluster.groups(wanted.positions, wanted.deadline, wanted.failed)
        groups = self._cluster.health.followers.groups(by_leader)
        if wanted.failed is not None:
            self._leave_out_skipped(groups, wanted.failed)
        wait = max(0.0, wanted.give_up - time.monotonic())
        self._turn += 1
        requests: list[_Request] = []
        found = _Found()
        try:
            for node, partitions in groups.items():
                group = self._in_turn(partitions)
                try:
                    requests.append(self._ask(node, group, wait, wanted))
                except ConnectionBroken as error:
                    self._pass_over(node, group, error, wanted, found)
            self._receive(requests, wait, wanted, found)
            if wanted.failed is None and len(found.broken) == len(groups):
                raise found.broken[0]
            if found.moved and not found.fetched and not wanted.failed:
                what = f"{found.moved[0].topic} is read from another replica"
                raise Again(LogUnavailable(what), _MOVED_S)
        except (Again, ConnectionBroken):
            # Partitions that moved are fetched next time; the other answers are used.
            if not found.fetched:
                raise
        finally:
            for request in requests:
                self._cluster.pool.give(request.connection, request.address)
        return found.fetched

    # -- requests -------------------------------------------------------------------------------------

    def _leave_out_skipped(self, groups: dict[int, list[TopicPartition]], failed: Failed) -> None:
        for node in list(groups):
            if self._cluster.health.is_skipped(Use.READ, node):
                for partition in groups.pop(node):
                    why = f"broker {node}, which leads {partition.topic}, does not answer"
                    failed[partition] = LogUnavailable(why, (partition.topic,))

    def _in_turn(self, partitions: list[TopicPartition]) -> list[TopicPartition]:
        """The partitions in the request's order: first those whose last records came the longest time ago.

        A flooded partition fills the answer, and only the first with records may go beyond ``max_bytes``. So busy
        partitions take turns.
        """
        turn = self._turn % len(partitions)
        group = partitions[turn:] + partitions[:turn]
        return sorted(group, key=lambda place: self._fed.get(place, _NEVER)) if self._fed else group

    def _note_fed(self, result: Mapping[TopicPartition, Fetched]) -> None:
        if len(self._fed) > _MOST_FED:
            self._fed.clear()
        for place, fetched in result.items():
            self._fed[place] = self._turn, sum([len(batch.data) for batch in fetched.batches])

    def _ask(
        self, node: int, partitions: Sequence[TopicPartition], wait: float, wanted: _Wanted
    ) -> _Request:
        address = self._cluster.address(node)
        connection = self._cluster.pool.wait_on(address, self._cluster.soon(wanted.deadline))
        try:
            version, sent = self._send(connection, partitions, wait, wanted)
        except BaseException:
            self._cluster.pool.give(connection, address)
            raise
        return _Request(node, connection, address, version, sent, partitions)

    def _send(
        self,
        connection: Connection,
        partitions: Sequence[TopicPartition],
        wait: float,
        wanted: _Wanted,
    ) -> tuple[int, int]:
        """Send a Fetch request. Returns its version and correlation id."""
        version = connection.version(FETCH)
        positions = {
            place: data.FetchPosition(wanted.positions[place], self._cluster.epoch(place))
            for place in partitions
        }
        parts = data.fetch_request(
            version,
            positions,
            self._cluster.topic_ids,
            max_wait_ms=min(round(wait * 1000), _MAX_I32),
            max_bytes=min(wanted.max_bytes, _MAX_I32),
            isolation=data.READ_COMMITTED if wanted.committed else data.READ_UNCOMMITTED,
            rack=self._cluster.health.followers.rack_for(partitions),
        )
        flexible = version >= FETCH.flexible_from
        return version, connection.send(
            FETCH.key, version, parts, flexible=flexible, deadline=wanted.deadline
        )

    def _pass_over(
        self,
        node: int,
        partitions: Sequence[TopicPartition],
        error: ConnectionBroken,
        wanted: _Wanted,
        found: _Found,
    ) -> None:
        """Continue without a broker that can't be reached or does not answer, and ask for the new leaders."""
        found.broken.append(error)
        self._cluster.distrust(node)
        self._cluster.health.followers.fails(partitions, node)
        if wanted.failed is None:
            return
        self._cluster.health.skip(Use.READ, node)
        for partition in partitions:
            wanted.failed[partition] = LogUnavailable(str(error), (partition.topic,))

    # -- answers --------------------------------------------------------------------------------------

    def _receive(
        self, requests: Sequence[_Request], wait: float, wanted: _Wanted, found: _Found
    ) -> None:
        """Wait for the first answer with records, and take all answers that have arrived by then."""
        # A frozen broker accepts requests and does not answer: others become leaders soon.
        limit = self._cluster.soon(wanted.deadline) + wait
        waiting = list(requests)
        while waiting and not found.fetched and not found.moved:
            if wanted.failed is not None and len(waiting) < len(requests):
                limit = min(limit, max(wanted.give_up, time.monotonic()) + _SLACK_S)
            for request in _ready(waiting, limit):
                waiting.remove(request)
                try:
                    self._take(request, limit, wanted, found)
                except ConnectionBroken as error:
                    self._pass_over(request.node, request.partitions, error, wanted, found)
                else:
                    self._cluster.health.serves(Use.READ, request.node)
                    self._cluster.health.answered(request.address)
        for request in _ready(waiting, None) if waiting else ():
            self._take(request, limit, wanted, found)

    def _take(self, request: _Request, deadline: float, wanted: _Wanted, found: _Found) -> None:
        """Read one answer."""
        body = request.connection.receive(request.correlation, deadline)
        try:
            error, answers = data.fetch_answer(request.version, body, self._cluster.topic_names)
        except MalformedAnswer as problem:
            raise Again(problem) from problem
        if error != NONE:
            self._cluster.forget({partition.topic for partition in request.partitions})
            raise_or_again(codes.FETCH_CODES, error, "fetch")
        result: dict[TopicPartition, Fetched] = {}
        failure: tuple[str, int] | None = None
        asked = set(request.partitions)
        for partition, answer in answers.items():
            if partition not in asked:
                continue
            if self._is_moved(request.node, partition, answer):
                found.moved.append(partition)
                continue
            if answer.error not in (NONE, OFFSET_OUT_OF_RANGE):
                failure = partition.topic, answer.error
                self._cluster.forget((partition.topic,))
                _refuse(partition, answer.error, wanted.failed)
                continue
            try:
                fetched = self._fetched(partition, answer, wanted)
            except (OffsetOutOfRange, CorruptBatch) as problem:
                if wanted.failed is None:
                    raise
                wanted.failed[partition] = problem
                continue
            if fetched is not None:
                result[partition] = fetched
        if failure is not None and wanted.failed is None and not result:
            topic, code = failure
            raise_or_again(codes.FETCH_CODES, code, f"fetch {topic}", topics=(topic,))
        self._note_fed(result)
        found.fetched.update(result)

    def _is_moved(self, node: int, partition: TopicPartition, answer: data.PartitionFetch) -> bool:
        """Whether another replica has to be asked for the partition."""
        followers = self._cluster.health.followers
        if answer.replica not in (data.NO_REPLICA, node):
            followers.named(partition, answer.replica)
            return True
        # A follower may lag: ask its leader, also for an offset out of the follower's range.
        if answer.error != NONE and followers.fails((partition,), node):
            self._cluster.forget((partition.topic,))
            return True
        return False

    def _fetched(
        self, partition: TopicPartition, answer: data.PartitionFetch, wanted: _Wanted
    ) -> Fetched | None:
        position = wanted.positions[partition]
        if answer.error == OFFSET_OUT_OF_RANGE:
            self._cluster.forget((partition.topic,))  # this broker may not be leader any more
            raise OffsetOutOfRange(partition, position)
        return data.fetched(partition, answer, position, wanted.committed)


def _refuse(partition: TopicPartition, code: int, failed: Failed | None) -> None:
    """Note a partition's error in ``failed``; without it, raise the error if asking again is useless."""
    meant = meaning(codes.FETCH_CODES, code)
    topic = partition.topic
    why: LogError = error_for(meant, code, f"fetch {topic}", topics=(topic,))
    if failed is not None:
        failed[partition] = why
    elif meant.act is Act.REFUSED:
        raise why


def _ready(waiting: Sequence[_Request], deadline: float | None) -> list[_Request]:
    """The requests whose answer has begun to arrive. Waits for one until ``deadline`` (None: not at all)."""
    buffered = [one for one in waiting if one.connection.buffered()]
    if buffered:
        return buffered
    if deadline is not None and len(waiting) == 1:
        # Reading waits on its own.
        return list(waiting)
    wait = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
    found = readable([one.connection for one in waiting], wait)
    if not found and deadline is not None:
        return list(waiting)  # past the deadline: reading raises the error
    return [one for one in waiting if one.connection.fileno() in found]
