"""Reading: one Fetch request to each broker that has some of the wanted partitions, and their answers.

A leader fetches the same partitions in each round, and most of them have no new records. So it fetches in
*sessions* (KIP-227): a broker remembers the partitions and positions. A request names only changed positions, and
an answer has only partitions with new records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

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
_MOVED_S = 0.001  # the pause before another replica is asked, or a session begun again
# How long the brokers of a session's partitions are kept, if the metadata stay the same.
_PLAN_S = 1.0
# FETCH_SESSION_ID_NOT_FOUND, INVALID_FETCH_SESSION_EPOCH, FETCH_SESSION_TOPIC_ID_ERROR
_NO_SESSION = (70, 71, 106)


class _Wanted(NamedTuple):
    """One call of `Fetcher.fetch`. ``give_up``: the end of waiting for new records; times are monotonic seconds.

    ``in_session``: the call may use the sessions.
    """

    positions: Mapping[TopicPartition, int]
    give_up: float
    deadline: float
    max_bytes: int
    committed: bool
    failed: Failed | None
    in_session: bool


@dataclass(slots=True)
class _Request:
    """A Fetch request under way to one broker. ``due``: when the broker answers, even without records."""

    node: int
    connection: Connection
    address: Address
    version: int
    correlation: int
    partitions: Sequence[TopicPartition]
    due: float
    session: _Session | None = None
    is_read: bool = False


@dataclass(slots=True)
class _Session:
    """A fetch session with one broker.

    ``epoch``: of the next request; 0: it begins the session, perhaps again. ``asked``: the positions that the
    broker knows. ``places``: their partitions. ``under_way``: a request that an earlier call did not wait for: the
    next call takes its answer if it wants the same. ``link``: the connection, while it is not in the pool.
    """

    id: int = 0
    epoch: int = 0
    asked: dict[TopicPartition, int] = field(default_factory=dict)
    places: Collection[TopicPartition] = ()
    under_way: _Request | None = None
    link: tuple[Connection, Address] | None = None

    def begin_again(self) -> None:
        """Let the next request name all partitions. By the old id in it, the broker ends the old session."""
        self.epoch = 0
        self.asked.clear()

    def changed(
        self, places: Collection[TopicPartition], positions: Mapping[TopicPartition, int]
    ) -> list[TopicPartition]:
        """The partitions that the broker knows with another position, or not at all."""
        asked = self.asked
        return [place for place in places if asked.get(place) != positions[place]]

    def gone(self, places: Collection[TopicPartition]) -> Iterable[TopicPartition]:
        """The partitions that the broker knows, and that are not wanted any more."""
        return () if places is self.places else self.asked.keys() - set(places)

    def sent(
        self,
        places: Collection[TopicPartition],
        changed: Mapping[TopicPartition, int],
        gone: Iterable[TopicPartition],
    ) -> None:
        """Note a request."""
        self.asked.update(changed)
        for place in gone:
            del self.asked[place]
        self.places = places
        self.epoch = 1 if self.epoch == _MAX_I32 else self.epoch + 1

    def answered(self, session_id: int) -> None:
        """Note an answer. ``session_id``: 0: the broker keeps no session."""
        if self.epoch == 1:
            self.id = session_id
        if not session_id:
            self.begin_again()


class _Plan(NamedTuple):
    """The broker of each partition, which holds until the metadata or the partitions change."""

    changes: int = -1  # `Cluster.changes`
    max_bytes: int = 0
    until: float = 0.0
    places: Collection[TopicPartition] = ()
    groups: Mapping[int, list[TopicPartition]] = {}


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

    def __init__(self, cluster: Cluster, *, in_sessions: bool = False) -> None:
        """``in_sessions``: use sessions for fetches of several partitions, one call at a time.

        Sessions pay if a caller fetches the same partitions again and again.
        """
        self._cluster = cluster
        self._in_sessions = in_sessions
        self._in_session = threading.Lock()
        self._sessions: dict[int, _Session] = {}
        self._plan = _Plan()
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
        fits = self._in_sessions and failed is not None and len(positions) > 1
        in_session = fits and self._in_session.acquire(blocking=False)
        wanted = _Wanted(positions, give_up, deadline, max_bytes, committed, failed, in_session)
        try:
            return self._cluster.repeat("fetch", deadline, lambda: self._fetch(wanted))
        finally:
            if in_session:
                self._in_session.release()

    def close(self) -> None:
        """Close the connections of the sessions. Close the cluster first: that ends a call under way."""
        with self._in_session:
            for node in list(self._sessions):
                self._give_up(self._sessions.pop(node))

    def _fetch(self, wanted: _Wanted) -> dict[TopicPartition, Fetched]:
        groups = self._planned(wanted) if wanted.in_session else self._groups(wanted)
        if wanted.failed is not None:
            groups = self._without_skipped(groups, wanted.failed)
        wait = max(0.0, wanted.give_up - time.monotonic())
        self._turn += 1
        requests: list[_Request] = []
        found = _Found()
        try:
            for node, partitions in groups.items():
                try:
                    requests.append(self._ask(node, partitions, wait, wanted))
                except ConnectionBroken as error:
                    self._pass_over(node, partitions, error, wanted, found)
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
                if request.session is None:
                    self._cluster.pool.give(request.connection, request.address)
                elif not request.is_read:
                    request.session.under_way = request
        return found.fetched

    # -- requests -------------------------------------------------------------------------------------

    def _groups(self, wanted: _Wanted) -> Mapping[int, list[TopicPartition]]:
        """The partitions by the broker to ask."""
        by_leader = self._cluster.groups(wanted.positions, wanted.deadline, wanted.failed)
        return self._cluster.health.followers.groups(by_leader)

    def _planned(self, wanted: _Wanted) -> Mapping[int, list[TopicPartition]]:
        """`_groups`, or its last result while that holds. When the metadata change, the sessions begin again."""
        plan, now = self._plan, time.monotonic()
        same = (plan.changes, plan.max_bytes) == (self._cluster.changes, wanted.max_bytes)
        if same and now < plan.until and plan.places == wanted.positions.keys():
            return plan.groups
        groups = self._groups(wanted)
        changes = self._cluster.changes
        if not same or plan.changes != changes:
            for session in self._sessions.values():
                session.begin_again()
        # Each call finds errors again, and follows replicas.
        keep_s = 0.0 if wanted.failed or self._cluster.settings.rack else _PLAN_S
        places = set(wanted.positions)
        self._plan = _Plan(changes, wanted.max_bytes, now + keep_s, places, groups)
        return groups

    def _without_skipped(
        self, groups: Mapping[int, list[TopicPartition]], failed: Failed
    ) -> Mapping[int, list[TopicPartition]]:
        skipped = [node for node in groups if self._cluster.health.is_skipped(Use.READ, node)]
        for node in skipped:
            for partition in groups[node]:
                why = f"broker {node}, which leads {partition.topic}, does not answer"
                failed[partition] = LogUnavailable(why, (partition.topic,))
        return {n: of for n, of in groups.items() if n not in skipped} if skipped else groups

    def _in_turn(self, partitions: Sequence[TopicPartition]) -> Sequence[TopicPartition]:
        """The partitions in the request's order: first those whose last records came the longest time ago.

        A flooded partition fills the answer, and only the first with records may go beyond ``max_bytes``. So busy
        partitions take turns. In a session, the broker does the same.
        """
        turn = self._turn % len(partitions)
        group = [*partitions[turn:], *partitions[:turn]]
        return sorted(group, key=lambda place: self._fed.get(place, _NEVER)) if self._fed else group

    def _note_fed(self, result: Mapping[TopicPartition, Fetched]) -> None:
        if len(self._fed) > _MOST_FED:
            self._fed.clear()
        for place, fetched in result.items():
            self._fed[place] = self._turn, sum([len(batch.data) for batch in fetched.batches])

    def _ask(
        self, node: int, partitions: Sequence[TopicPartition], wait: float, wanted: _Wanted
    ) -> _Request:
        session = self._sessions.setdefault(node, _Session()) if wanted.in_session else None
        if session is not None and (request := session.under_way) is not None:
            session.under_way = None
            same = not (session.changed(partitions, wanted.positions) or session.gone(partitions))
            if same and not request.connection.broken:
                return request
            self._give_up(session)  # what the answer would bring is fetched again
        address = self._cluster.address(node)
        connection = self._connection(session, address, self._cluster.soon(wanted.deadline))
        try:
            version, sent = self._send(connection, partitions, wait, wanted, session)
        except BaseException:
            if session is None:
                self._cluster.pool.give(connection, address)
            else:
                session.begin_again()
                self._give_up(session)
            raise
        due = wanted.give_up
        return _Request(node, connection, address, version, sent, partitions, due, session)

    def _connection(
        self, session: _Session | None, address: Address, deadline: float
    ) -> Connection:
        """A connection of the pool. A session keeps its own."""
        if session is None:
            return self._cluster.pool.wait_on(address, deadline)
        if session.link is None or session.link[1] != address or not session.link[0].usable():
            self._give_up(session)
            session.link = self._cluster.pool.wait_on(address, deadline), address
        return session.link[0]

    def _give_up(self, session: _Session) -> None:
        """Give a session's connection back, and with it a request under way."""
        session.under_way = None
        if session.epoch == 1:  # the session's id comes with the answer
            session.begin_again()
        if session.link is not None:
            self._cluster.pool.give(*session.link)
            session.link = None

    def _send(
        self,
        connection: Connection,
        partitions: Sequence[TopicPartition],
        wait: float,
        wanted: _Wanted,
        session: _Session | None,
    ) -> tuple[int, int]:
        """Send a Fetch request. Returns its version and correlation id."""
        version = connection.version(FETCH)
        places: Sequence[TopicPartition] = partitions
        gone: Iterable[TopicPartition] = ()
        if session is not None and session.epoch:
            places = session.changed(partitions, wanted.positions)
            gone = session.gone(partitions)
        else:
            places = self._in_turn(partitions)
        positions = {place: wanted.positions[place] for place in places}
        parts = data.fetch_request(
            version,
            {
                place: data.FetchPosition(at, self._cluster.epoch(place))
                for place, at in positions.items()
            },
            self._cluster.topic_ids,
            max_wait_ms=min(round(wait * 1000), _MAX_I32),
            max_bytes=min(wanted.max_bytes, _MAX_I32),
            isolation=data.READ_COMMITTED if wanted.committed else data.READ_UNCOMMITTED,
            rack=self._cluster.health.followers.rack_for(partitions),
            session=data.NO_SESSION if session is None else (session.id, session.epoch),
            forgotten=gone,
        )
        flexible = version >= FETCH.flexible_from
        sent = connection.send(
            FETCH.key, version, parts, flexible=flexible, deadline=wanted.deadline
        )
        if session is not None:
            session.sent(partitions, positions, gone)
        return version, sent

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
        if wanted.in_session and node in self._sessions:
            self._give_up(self._sessions.pop(node))
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
            due = [request for request in waiting if request.due <= wanted.give_up]
            ready = _ready(waiting, limit if due else wanted.give_up)
            if not (ready or due):
                break
            for request in ready or due:  # after the limit, reading raises the error
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
        request.is_read = True
        try:
            answers = self._answers(request, deadline)
        except BaseException:
            if request.session is not None:
                request.session.begin_again()
            raise
        result: dict[TopicPartition, Fetched] = {}
        failure: tuple[str, int] | None = None
        for partition, answer in answers.items():
            if partition not in wanted.positions:
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

    def _answers(
        self, request: _Request, deadline: float
    ) -> dict[TopicPartition, data.PartitionFetch]:
        body = request.connection.receive(request.correlation, deadline)
        try:
            answer = data.fetch_answer(request.version, body, self._cluster.topic_names)
        except MalformedAnswer as problem:
            raise Again(problem) from problem
        if answer.error in _NO_SESSION:
            raise Again(LogUnavailable("the broker has ended the fetch session"), _MOVED_S)
        if answer.error != NONE:
            self._cluster.forget({partition.topic for partition in request.partitions})
            raise_or_again(codes.FETCH_CODES, answer.error, "fetch")
        if request.session is not None:
            request.session.answered(answer.session)
        return answer.parts

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
    wait = 0.0 if deadline is None else max(0.0, deadline - time.monotonic())
    if len(waiting) == 1:
        return list(waiting) if waiting[0].connection.has_arrived(wait) else []
    buffered = [one for one in waiting if one.connection.buffered() or one.connection.broken]
    if buffered:
        return buffered
    found = readable([one.connection for one in waiting], wait)
    return [one for one in waiting if one.connection.fileno() in found]
