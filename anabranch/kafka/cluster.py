"""A cluster's metadata: brokers, leaders, topic ids; and the connections to its brokers.

Questions that any broker can answer go to a broker in good health (`Cluster.health`), and are repeated.
"""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from kio.schema.errors import ErrorCode

from anabranch.clock import OnceAMinute, SystemClock
from anabranch.kafka import health
from anabranch.kafka.calls import METADATA, AuthenticationFailed, ConnectionBroken
from anabranch.kafka.codes import NONE, READ_CODES, Act, Meaning, error_for, meaning
from anabranch.kafka.connection import Connection, Pool
from anabranch.kafka.health import Address, BrokerHealth, Question
from anabranch.kafka.settings import Settings
from anabranch.ports import (
    LogDenied,
    LogError,
    LogRefused,
    LogUnavailable,
    TopicGone,
    TopicPartition,
)
from anabranch.waits import Job, here

log = logging.getLogger("anabranch.kafka")

T = TypeVar("T")

_Failed = MutableMapping[TopicPartition, LogError]
# How long an unknown topic is asked for: not every broker knows a new topic at once.
UNKNOWN_TOPIC_S = 2.0
_GONE_S = 3600.0  # how long data about a topic that is gone are kept
NO_TOPIC_ID = bytes(16)


class Leader(NamedTuple):
    """A partition's leader, and its leader epoch (-1: not known)."""

    node: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster's metadata show it. ``topic_id`` is all zeros with older brokers."""

    name: str
    topic_id: bytes
    leaders: dict[int, Leader]
    partitions: int
    replication_factor: int
    in_sync: int  # least number of in-sync replicas of a partition
    replicas: frozenset[int] = frozenset()  # brokers

    @property
    def leading(self) -> set[int]:
        """The brokers that lead the topic's partitions."""
        return {leader.node for leader in self.leaders.values()}


def newer(topic: Topic, leaders: Mapping[int, Leader]) -> Topic:
    """The topic, with these leaders where they are newer."""
    newest = {
        number: max(leader, leaders.get(number, leader), key=attrgetter("epoch"))
        for number, leader in topic.leaders.items()
    }
    return replace(topic, leaders=newest)


def topic_of(found: Any) -> Topic:
    """A topic of a Metadata answer."""
    leaders = {}
    replicas = 0
    nodes: set[int] = set()
    in_sync = []
    for partition in found.partitions:
        replicas = max(replicas, len(partition.replica_nodes))
        nodes.update(map(int, partition.replica_nodes))
        in_sync.append(len(partition.isr_nodes))
        node = int(partition.leader_id)
        if node >= 0:
            epoch = int(getattr(partition, "leader_epoch", -1))
            leaders[int(partition.partition_index)] = Leader(node, epoch)
    topic_id = getattr(found, "topic_id", None)
    return Topic(
        name=str(found.name),
        topic_id=topic_id.bytes if topic_id is not None else NO_TOPIC_ID,
        leaders=leaders,
        partitions=len(found.partitions),
        replication_factor=replicas,
        in_sync=min(in_sync, default=-1),
        replicas=frozenset(nodes),
    )


def _addresses(found: Any) -> dict[int, Address]:
    """The brokers of a Metadata answer."""
    return {int(one.node_id): (str(one.host), int(one.port)) for one in found.brokers}


class Cluster:
    """Metadata and a pool of connections, shared by a log and its producers. Thread-safe."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.pool = Pool(settings)
        self._lock = threading.Lock()
        self._brokers: dict[int, Address] = {}
        self._topics: dict[str, Topic] = {}
        self.changes = 0  # of what is known of topics and brokers, so that callers can keep what follows from it
        # Topic id -> newest known leaders, also of forgotten topics.
        self._newest: dict[bytes, dict[int, Leader]] = {}
        # Two views for hot calls; they are replaced, never changed.
        self.topic_ids: dict[str, bytes] = {}
        self.topic_names: dict[bytes, str] = {}
        # Topic id -> (since when its name has no id or another id, the name).
        self._gone: dict[bytes, tuple[float, str]] = {}
        self.health = BrokerHealth(SystemClock(), settings.rack)
        self.warnings = OnceAMinute(log, SystemClock().monotonic)
        self._confirming: Job | None = None
        self.chance = random.Random()  # independent of the program's own seed
        # (producer id, partition) -> whether its last native transaction there was committed.
        self.ended: dict[tuple[int, TopicPartition], bool] = {}
        # Whether brokers create nothing in a dry run; and if they create topics, with how many replicas. None, 0:
        # not known.
        self.heeds_dry_runs: bool | None = None
        self.replicas_of_new = 0
        # The only broker that changes topics; -1: all do.
        self._controller = -1

    # -- connections ----------------------------------------------------------------------------

    @contextmanager
    def connection(
        self, node: int | None, deadline: float, *, background: bool = False
    ) -> Iterator[Connection]:
        """A connection to a broker (None: any) for a ``with``.

        ``background``: no caller waits for it, so a failure does not count against the broker.
        """
        if node is None:
            connection, address = self._any(deadline)
        else:
            address = self.address(node)
            connection = self.pool.take(address, deadline)
        try:
            yield connection
            self.health.answered(address)
        except ConnectionBroken:
            if not background:
                self.health.failed(address)
            raise
        finally:
            self.pool.give(connection, address)

    @contextmanager
    def changing(self, deadline: float) -> Iterator[Connection]:
        """A connection to a broker that changes topics, for a ``with``: any, until `leaves_changes` is called."""
        node = self._controller if self._controller in self._brokers else None
        try:
            with self.connection(node, deadline) as connection:
                yield connection
        except ConnectionBroken:
            self._controller = -1  # the others know the next one
            raise

    def leaves_changes(self, deadline: float) -> None:
        """Note that only the cluster's own controller changes topics: ask that broker from now on."""
        found = self.metadata([], None, deadline)
        with self._lock:
            self._brokers = _addresses(found)
        self._controller = int(found.controller_id)

    def address(self, node: int) -> Address:
        """A broker's address. `ConnectionBroken` (nothing sent) if it is not known."""
        try:
            return self._brokers[node]
        except KeyError:
            raise ConnectionBroken(f"broker {node} is not known", sent=False) from None

    def _any(self, deadline: float) -> tuple[Connection, Address]:
        problems = []
        known = list(dict.fromkeys((*self._brokers.values(), *self.settings.bootstrap)))
        # In random order, as an isolated broker has old metadata. In turns, a call of two requests might always
        # meet the same one.
        self.chance.shuffle(known)
        for address in self.health.in_order(known):
            try:
                return self.pool.take(address, self.soon(deadline)), address
            except ConnectionBroken as error:
                self.health.failed(address)
                if isinstance(error, AuthenticationFailed):
                    raise  # the other brokers would refuse, too
                problems.append(str(error))
        raise ConnectionBroken("; ".join(problems), sent=False)

    def close(self) -> None:
        """Close all idle connections; connections in use are closed when they come back."""
        self.pool.close()

    def after_fork(self) -> None:
        """In a forked child: close its copies of the idle connections; the parent's connections stay open."""
        self._lock = threading.Lock()
        self.chance = random.Random()  # a copy would make the parent's choices
        self.pool.after_fork()

    # -- calls that may be repeated --------------------------------------------------------------

    def deadline(self, seconds: float | None = None) -> float:
        """The monotonic time at which a call gives up."""
        return time.monotonic() + (self.settings.request_timeout if seconds is None else seconds)

    def soon(self, deadline: float = math.inf) -> float:
        """The deadline for one broker's answer to a question that may be repeated to another broker."""
        return min(deadline, time.monotonic() + health.PATIENCE_S)

    def repeat(self, what: str, deadline: float, attempt: Callable[[], T]) -> T:
        """Repeat ``attempt`` until it returns, as long as it raises `Again` or the connection breaks.

        Pass no call that changes something, unless the call is safe to repeat.

        Raises:
            LogUnavailable: the deadline passed.
            LogDenied: the brokers refuse our identity.
        """
        while True:
            try:
                return attempt()
            except AuthenticationFailed as error:
                raise LogDenied(f"{what}: {error}") from error
            except ConnectionBroken as error:
                # The broker may have failed, and its partitions may have other leaders by now.
                self.forget_all()
                problem: Exception = error
                pause = self.settings.retry_backoff
            except Again as error:
                problem = error.problem
                pause = error.pause or self.settings.retry_backoff
            if time.monotonic() + pause >= deadline:
                topics = problem.topics if isinstance(problem, LogError) else ()
                raise LogUnavailable(f"{what}: {problem}", topics) from problem
            here().sleep(pause)

    # -- metadata ---------------------------------------------------------------------------------

    def refresh(self, names: Iterable[str], deadline: float) -> dict[str, Topic]:
        """Ask for topics again. Topics that don't exist are omitted and forgotten."""
        wanted = sorted(set(names))
        return self.repeat("metadata", deadline, lambda: self._refresh(wanted, deadline))

    @property
    def nodes(self) -> list[int]:
        """The brokers that are known."""
        return list(self._brokers)

    def metadata(
        self,
        names: list[str] | None,
        node: int | None,
        deadline: float,
        *,
        background: bool = False,
    ) -> Any:
        """The answer of a broker (None: any) about these topics (None: all). ``background``: as in `connection`.

        `ConnectionBroken`: also if the broker has just started, and has not read the cluster's metadata.
        """
        with self.connection(node, deadline, background=background) as connection:
            found = connection.ask(
                METADATA,
                self.soon(deadline),
                topics=None if names is None else [{"topic_id": None, "name": n} for n in names],
                allow_auto_topic_creation=False,
                include_cluster_authorized_operations=False,
                include_topic_authorized_operations=False,
            )
        if not found.brokers:
            raise ConnectionBroken(
                f"{'a broker' if node is None else f'broker {node}'} knows no brokers so far"
            )
        return found

    def _refresh(self, names: list[str], deadline: float) -> dict[str, Topic]:
        found = self.metadata(names, None, deadline)
        topics_found = {}
        refused: dict[str, int] = {}
        for topic in found.topics:
            code = int(topic.error_code)
            if code == NONE:
                topics_found[str(topic.name)] = topic_of(topic)
            elif meaning(READ_CODES, code).act is Act.REFUSED:
                refused[str(topic.name)] = code
        with self._lock:
            topics_found = {name: self._newer(topic) for name, topic in topics_found.items()}
            self.health.noted(topics_found)
            self._brokers = _addresses(found)
            for name in names:
                self._topics.pop(name, None)
            self._topics.update(topics_found)
            self._note_ids(names, topics_found)
            self.changes += 1
        for name, code in refused.items():
            raise error_for(meaning(READ_CODES, code), code, f"topic {name}", topics=refused.keys())
        return topics_found

    def _note_ids(self, names: list[str], found: Mapping[str, Topic]) -> None:
        """Note ids and names of topics. Deleted topics stay known for a while: requests may be under way."""
        now = time.monotonic()
        for name in names:
            before = self.topic_ids.get(name, NO_TOPIC_ID)
            if before != NO_TOPIC_ID and (name not in found or found[name].topic_id != before):
                self._gone.setdefault(before, (now, name))
        ids = self.topic_ids | {topic.name: topic.topic_id for topic in found.values()}
        known = self.topic_names | {topic.topic_id: topic.name for topic in found.values()}
        for topic in found.values():
            self._gone.pop(topic.topic_id, None)
        while self._gone:
            topic_id, (since, name) = next(iter(self._gone.items()))
            if now - since < _GONE_S:
                break
            del self._gone[topic_id]
            self._newest.pop(topic_id, None)
            known.pop(topic_id, None)
            if ids.get(name) == topic_id:
                del ids[name]
                self.health.confirmed.pop(name, None)
        self.topic_ids, self.topic_names = ids, known

    def _newer(self, found: Topic) -> Topic:
        """The topic as found, with known leaders where they are newer, because the broker may lag."""
        if found.topic_id == NO_TOPIC_ID:
            return found  # a replaced topic restarts at epoch 0
        newest = self._newest.setdefault(found.topic_id, {})
        found = newer(found, newest)
        newest.update(found.leaders)
        return found

    def take_newer(self, found: Any) -> None:
        """Note newer leaders of known topics from a broker's answer, and nothing else."""
        topics = [topic_of(one) for one in found.topics if int(one.error_code) == NONE]
        with self._lock:
            for topic in topics:
                known = self._topics.get(topic.name)
                if known is not None and known.topic_id == topic.topic_id:
                    now = newer(known, self._newer(topic).leaders)
                    self.changes += now != known
                    self._topics[topic.name] = now

    def forget(self, names: Iterable[str]) -> None:
        """Forget these topics, so that the next use asks for them."""
        with self._lock:
            self.changes += 1
            for name in names:
                self._topics.pop(name, None)

    def distrust(self, node: int) -> None:
        """Note that a broker does not answer: ask other brokers first, and find its partitions' leaders again."""
        with self._lock:
            if node in self._brokers:
                self.health.failed(self._brokers[node])
            self.changes += 1
            for name, topic in list(self._topics.items()):
                if node in topic.leading:
                    del self._topics[name]

    def forget_all(self) -> None:
        with self._lock:
            self.changes += 1
            self._topics.clear()

    def topic(self, name: str) -> Topic | None:
        return self._topics.get(name)

    def leader(self, partition: TopicPartition) -> Leader | None:
        topic = self._topics.get(partition.topic)
        return topic.leaders.get(partition.partition) if topic else None

    def epoch(self, partition: TopicPartition) -> int:
        """The known leader epoch, or -1. A leader with another epoch refuses the question."""
        leader = self.leader(partition)
        return leader.epoch if leader else -1

    def leaders(
        self, partitions: Iterable[TopicPartition], deadline: float
    ) -> dict[TopicPartition, Leader]:
        """The leaders of all these partitions; unknown ones are asked for.

        Raises:
            TopicGone: a topic or partition does not exist.
            LogUnavailable: there was no leader until the deadline.
        """
        wanted = list(partitions)
        started = time.monotonic()
        gone: TopicGone | None = None  # from the last answer
        while True:
            known = {p: leader for p in wanted if (leader := self.leader(p)) is not None}
            missing = [p for p in wanted if p not in known]
            if not missing:
                return known
            topics = {p.topic for p in missing}
            try:
                found = self.refresh(topics, deadline)
            except LogUnavailable as error:
                if gone is None:
                    raise
                raise gone from error
            now, gone = time.monotonic(), None
            for p in missing:
                topic = found.get(p.topic)
                if topic is None or not 0 <= p.partition < topic.partitions:
                    gone = TopicGone(f"{p.topic}[{p.partition}] does not exist", p.topic)
            late = now + self.settings.retry_backoff > deadline
            if gone is not None and (late or now - started > UNKNOWN_TOPIC_S):
                raise gone
            if any(self.leader(p) is None for p in missing):
                if late:
                    what = f"{missing[0].topic} has partitions without a leader"
                    raise LogUnavailable(what, topics)
                here().sleep(self.settings.retry_backoff)

    def groups(
        self, partitions: Iterable[TopicPartition], deadline: float, failed: _Failed | None = None
    ) -> dict[int, list[TopicPartition]]:
        """The partitions grouped by the broker that leads them.

        ``failed``: gets the errors of partitions without a leader, and the call does not wait. Without it,
        `leaders` waits for all.
        """
        partitions = list(partitions)
        self.confirm_leaders({p.topic for p in partitions})
        if failed is None:
            known = self.leaders(partitions, deadline)
        else:
            known = self._leaders_now(partitions, deadline, failed)
        groups: dict[int, list[TopicPartition]] = {}
        for partition, leader in known.items():
            groups.setdefault(leader.node, []).append(partition)
        return groups

    def _leaders_now(
        self, wanted: Sequence[TopicPartition], deadline: float, failed: _Failed
    ) -> dict[TopicPartition, Leader]:
        known = {p: leader for p in wanted if (leader := self.leader(p)) is not None}
        if len(known) == len(wanted):
            return known
        try:
            self.refresh({p.topic for p in wanted if p not in known}, deadline)
        except LogRefused as error:
            failed.update({p: error for p in wanted if p.topic in error.topics})
        known = {p: leader for p in wanted if (leader := self.leader(p)) is not None}
        for p in wanted:
            if p not in known and p not in failed:
                why = "has no leader" if p.topic in self._topics else "is not found"
                failed[p] = LogUnavailable(f"{p.topic}[{p.partition}] {why}", (p.topic,))
        return known

    # -- brokers that may have been replaced -----------------------------------------------------

    def wait(self, connection: Connection, deadline: float, replaced: Callable[[], bool]) -> None:
        """Wait until an answer begins to arrive, or until the deadline.

        ``replaced``: asks other brokers, from time to time, whether this broker was replaced. If it was, the
        connection is closed, and `ConnectionBroken` raised. A broker that is merely slow is waited for.
        """
        limit = time.monotonic() + health.SILENT_S
        while not connection.has_arrived(max(0.0, min(limit, deadline) - time.monotonic())):
            if time.monotonic() >= deadline:
                return
            if replaced():
                connection.close()
                what = f"{connection.address} does not answer, and another broker has its place"
                raise ConnectionBroken(what)
            limit = time.monotonic() + health.ASK_AGAIN_S

    def is_replaced(self, node: int, partitions: Collection[TopicPartition]) -> bool:
        """Whether other brokers say that one of the partitions is not led by ``node``, which does not answer.

        False if no other broker answers. From now on, metadata are asked of ``node`` last.
        """
        self.distrust(node)
        try:
            self.refresh({p.topic for p in partitions}, self.deadline(health.REPLACED_S))
        except LogError:
            return False
        leaders = map(self.leader, partitions)
        return any(leader is not None and leader.node != node for leader in leaders)

    def confirm_leaders(self, topics: Collection[str]) -> None:
        """Now and then ask brokers other than the leaders for newer leaders of topics in use, in the background.

        An isolated former leader still answers fetches, with no records and no error.
        """
        old = self.health.to_confirm(topics)
        busy = self._confirming is not None and self._confirming.is_alive()
        if not old or busy or len(self._brokers) < 2:
            return
        self.health.confirming(old)
        with suppress(RuntimeError):  # there are too many threads: the next call may get one
            self._confirming = here().start("leaders", lambda: self._confirm(old))

    def _confirm(self, names: list[str]) -> None:
        """Ask until another broker has answered for each topic's leaders."""
        left = {topic.name: topic.leading for topic in filter(None, map(self.topic, names))}
        nodes = self.nodes
        self.chance.shuffle(nodes)
        for node in sorted(nodes, key=lambda node: self._unanswered(node) is not None):
            here = [name for name, leading in left.items() if leading - {node}]
            if here and self._ask_newer(node, here):
                for name in here:
                    left[name] &= {node}

    def ask_replicas(self, topics: Collection[str], deadline: float) -> None:
        """Ask all replicas for newer leaders: a new leader knows its role before it accepts records.

        Wait for the answers, but not of brokers that were late last time: these get one question at a time. Half of
        the remaining time is reserved for the question to the leaders.
        """
        asked: dict[int, list[str]] = {}
        for topic in filter(None, map(self.topic, topics)):
            for node in topic.replicas:
                if topic.leading - {node}:
                    asked.setdefault(node, []).append(topic.name)
        waited: list[tuple[Address, Question, Job]] = []
        for node in asked.keys() & set(self._brokers):
            before = self._unanswered(node)
            if before is not None and before.under_way:
                continue
            question = self.health.ask()
            ask = partial(self._ask_replica, question, node, asked[node])
            try:
                job = here().start("leaders", ask)
            except RuntimeError as error:  # there are too many threads
                raise LogUnavailable(f"replicas can't be asked: {error}", asked[node]) from error
            if before is None:
                waited.append((self.address(node), question, job))
            else:
                self.health.give_up(self.address(node), question)
        now = time.monotonic()
        until = now + min(health.WAIT_S, max(0.0, deadline - now) / 2)
        for address, question, job in waited:
            job.join(max(0.0, until - time.monotonic()))
            self.health.give_up(address, question)

    def _ask_replica(self, question: Question, node: int, names: list[str]) -> None:
        answered = False
        try:
            answered = self._ask_newer(node, names)
        finally:
            self.health.ended(question, answered=answered)

    def _unanswered(self, node: int) -> Question | None:
        with suppress(ConnectionBroken):  # the broker may not be known any more
            return self.health.unanswered(self.address(node))
        return None

    def _ask_newer(self, node: int, names: list[str]) -> bool:
        """Ask a broker for newer leaders, and note these. False: the broker did not answer."""
        try:
            found = self.metadata(names, node, self.soon(), background=True)
        except (ConnectionBroken, LogError):
            return False
        self.take_newer(found)
        return True


class Again(Exception):
    """Nothing was done: repeat the call after ``pause`` seconds (None: the usual back-off)."""

    def __init__(self, problem: Exception, pause: float | None = None) -> None:
        super().__init__(str(problem))
        self.problem = problem
        self.pause = pause


def raise_or_again(
    table: Mapping[ErrorCode, Meaning],
    code: int,
    what: str,
    detail: str | None = None,
    topics: Iterable[str] = (),
) -> None:
    """Raise the error of a code: `Again` if the call may be repeated."""
    meant = meaning(table, code)
    error = error_for(meant, code, what, detail, topics)
    raise Again(error) if meant.act in (Act.RETRY, Act.REFRESH) else error
