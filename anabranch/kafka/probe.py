"""Checks whether a cluster gives what anabranch needs: before a controller starts, or as a probe.

`before_leading` creates no topic, and finds out whether a controller can be leader at all. `Probe` tries, on topics
of its own, everything that docs/inside/decisions/0039-what-a-broker-must-give.md lists.
"""

from __future__ import annotations

import datetime as dt
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from typing import NamedTuple

from kio.schema.errors import ErrorCode

from anabranch.batches.builder import BatchBuilder
from anabranch.batches.compression import CODECS, Codec
from anabranch.batches.format import HEADER_SIZE, Packed
from anabranch.core.stream_settings import MAX_MESSAGE, MIN_ISR, REPLICATION, RETENTION_MS
from anabranch.errors import AnabranchError, NotAuthorized, TopicMisconfigured
from anabranch.kafka import admin, needs
from anabranch.kafka.calls import Api, ConnectionBroken, MalformedAnswer
from anabranch.kafka.cluster import Again, Cluster
from anabranch.kafka.codes import NONE, UNSUPPORTED_VERSION
from anabranch.kafka.coordinator import GROUP_KEY_TYPE, Coordinator, coordinator_of
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.log import KafkaLog
from anabranch.kafka.needs import BROKERS_PAGE, Broker, lacking_of, look_at
from anabranch.kafka.settings import Settings
from anabranch.ports import (
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    TopicInfo,
    TopicPartition,
)
from anabranch.protocol.legal_names import STATE
from anabranch.topics import declarations as declared
from anabranch.topics.creation import (
    INVALID_REPLICATION_FACTOR,
    POLICY_VIOLATION,
    SMALLER_RECORDS,
    check_control_topics,
    control_topics,
    create_control_topics,
    create_lane_topics,
    create_stream_topics,
    describe,
    words_of,
)
from anabranch.topics.names import (
    commands_topic,
    journal_topic,
    of_transactions,
    replies_topic,
    stream_topic,
    topics_of,
)
from anabranch.topics.new_topics import OF_NEW_TOPICS

log = logging.getLogger("anabranch.controller")

# Waiting does not change these answers of brokers.
_INVALID_TIMEOUT = int(ErrorCode.invalid_transaction_timeout)
NEVER_PASSES = frozenset((UNSUPPORTED_VERSION, _INVALID_TIMEOUT))
# Seconds, to try where brokers refuse what was asked for.
_NATIVE_TIMEOUTS = (45, 30, 15, 10, 5, 2, 1)
LOOK_S = 5.0  # each broker, before a controller joins its group, and now and then after that
_ANSWER_S = 10.0  # each question of the probe
_SOON_S = 5.0  # brokers show a change, or write a marker, within this time
# The limit of the probe's own native transactions; the requested one is tried separately.
_SHORT_S = 5.0
_PAUSE_S = 0.05
_GONE_S = 10.0  # brokers stop showing deleted topics within this time
_EARLIER_S = 3600.0  # longer than any probe takes
_ROOM_BYTES = 1 << 10  # for a batch's header and a record's lengths
_MEMBER_ID_REQUIRED = int(ErrorCode.member_id_required)
_INVALID_PARTITIONS = int(ErrorCode.invalid_partitions)
_INVALID_SESSION_TIMEOUT = int(ErrorCode.invalid_session_timeout)
# The group's coordinator is loading, is not elected yet, or has moved.
_COORDINATOR_SOON = frozenset(
    int(code)
    for code in (
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
    )
)
_JOIN_GROUP = Api(11, "join_group", "JoinGroup", 4, 5, 6)

_REPLICAS = 3  # enough, and a number that all products take
_LASTING = RETENTION_MS, "retention.bytes"  # without a limit, journals last
_CONTROL = "control topics"
_OF_STREAM = "a stream's topics"
_OF_TABLE = "a table's topics"
_LANE = "probe"

WORKS = "works"
LOSS = "works with a loss"
FAILS = "does not work"


# -- before a controller joins its group ---------------------------------------------------------------


def before_leading(cluster: Cluster, prefix: str, native_timeout: float) -> tuple[str, ...]:
    """The optional calls that brokers don't offer, after all required ones are found.

    Brokers that don't answer are named in the log and skipped. At least one broker has to answer.

    Raises:
        LogRefused: no controller can be leader there, and waiting does not change that. The text says what to do.
        LogUnavailable: no broker answers.
    """
    brokers = look_at(cluster, LOOK_S, disks=False)
    if all(broker.trouble for broker in brokers):
        raise LogUnavailable("; ".join(f"{one.address}: {one.trouble}" for one in brokers))
    for broker in brokers:
        if wrong := needs.obstacles(broker.too_old):
            what = f"the broker {broker.address} can't be used: {'; '.join(wrong)}"
            raise LogRefused(
                f"{what}. Use one that offers them: {BROKERS_PAGE}", UNSUPPORTED_VERSION
            )
    # Don't wait for this coordinator here: the leader will find out.
    with suppress(LogUnavailable, LogUncertain, ConnectionBroken):
        check_native_timeout(cluster, f"{of_transactions(prefix)}start", native_timeout)
    for broker in brokers:
        if broker.trouble:
            log.warning(
                "the broker %s does not answer; others do: %s", broker.address, broker.trouble
            )
    return needs.lost_calls(lacking_of(brokers))


def check_native_timeout(cluster: Cluster, transactional_id: str, native_timeout: float) -> None:
    """`LogRefused` if the coordinator does not take this limit of a native transaction; names a possible limit."""
    error = _refusal(cluster, transactional_id, native_timeout)
    if error is None:
        return
    if error.error == _INVALID_TIMEOUT:
        lower = (each for each in _NATIVE_TIMEOUTS if each < native_timeout)
        taken = (each for each in lower if _refusal(cluster, transactional_id, each) is None)
        if (found := next(taken, None)) is not None:
            way = f"--native-timeout {found} is taken"
            error = LogRefused(f"{error}; {way}", error.error)
            error.to_do = f"give controllers --native-timeout {found}"
    raise error


def _refusal(cluster: Cluster, transactional_id: str, native_timeout: float) -> LogRefused | None:
    try:
        Coordinator(cluster, transactional_id, native_timeout).close()
    except LogFenced:
        return None  # another process has asked the same in between, and was not refused
    except LogRefused as error:
        return error
    return None


def way_out(error: LogRefused, control_partitions: int, brokers: int) -> str:
    """The way out of a refusal to make topics, for an operator. ``brokers``: the brokers that are up."""
    if error.to_do:
        return error.to_do
    if error.error == INVALID_REPLICATION_FACTOR:
        return f"start more brokers, or give --replication-factor {min(brokers, _REPLICAS)}"
    policy = error.error == POLICY_VIOLATION and "partition" in words_of(error).lower()
    if policy or error.error == _INVALID_PARTITIONS:
        wanted = control_topics("", control_partitions)
        return (
            f"let the cluster have {len(wanted)} topics and {sum(wanted.values())} partitions for controllers, and "
            f"3 topics and 3 partitions or more for each stream: {BROKERS_PAGE}"
        )
    return f"all that a cluster must give: {BROKERS_PAGE}"


# -- the probe -----------------------------------------------------------------------------------------


class Tried(NamedTuple):
    """A need with its result. ``state``: `WORKS`, `LOSS` or `FAILS`. ``to_do``: empty if it works."""

    need: str
    state: str
    found: str
    to_do: str = ""


class _Step(NamedTuple):
    """An attempt at a need. ``lost``: what does not work without it; empty if nothing works.

    ``after``, ``calls``: needs and calls without which it can't be tried.
    """

    need: str
    attempt: Callable[[], str]
    lost: str = ""
    after: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()


class _Unmet(Exception):
    """A need that is not met: its text says what was found, ``to_do`` what helps."""

    def __init__(self, found: str, to_do: str = "") -> None:
        super().__init__(found)
        self.to_do = to_do


class _Lost(_Unmet):
    """The need is optional; the text says what is lost."""


class _Failed(_Unmet):
    """The need is required."""


class Probe:
    """Tries each need of a cluster. Its topics begin with `mark`; `run` deletes them at its end, or names them.

    The keyword arguments are the options that controllers will have.
    """

    def __init__(
        self,
        settings: Settings,
        prefix: str,
        *,
        control_partitions: int,
        replication_factor: int,
        session_timeout: float,
        max_message_bytes: int,
        native_timeout: float,
    ) -> None:
        settings = replace(settings, request_timeout=_ANSWER_S)
        self._cluster = Cluster(settings)
        self._log = KafkaLog(settings)
        self._prefix = prefix
        # The time in it lets later probes know whether its topics were left over.
        self.mark = f"{prefix}-probe-{int(time.time()):08x}-{secrets.token_hex(4)}"
        self._id = f"{of_transactions(prefix)}{self.mark}"
        self._stream, self._table = f"{self.mark}/events", f"{self.mark}/rows{STATE}"
        self._control_partitions = control_partitions
        self._factor = replication_factor
        self._record_bytes = self._asked_bytes = max_message_bytes
        self._native_timeout = native_timeout
        self._session_timeout = session_timeout

    def close(self) -> None:
        self._log.close()
        self._cluster.close()

    def run(self) -> Iterator[Tried]:
        """Try all needs. If required calls are missing, nothing else is tried."""
        try:
            brokers = look_at(self._cluster, _ANSWER_S, disks=False)
        except (LogError, AnabranchError) as error:
            yield Tried(
                "brokers", FAILS, str(error), "look at the broker, and at security.protocol"
            )
            return
        lacks = lacking_of(brokers)
        failed = set()
        for tried in _calls(brokers, lacks):
            if tried.state == FAILS:
                failed.add(tried.need)
            yield tried
        if failed:
            return
        try:
            for step in self._steps():
                if failed.isdisjoint(step.after) and lacks.isdisjoint(step.calls):
                    tried = self._try(step)
                    if tried.state == FAILS:
                        failed.add(tried.need)
                    yield tried
        finally:
            left = self._delete()
        yield left

    def _try(self, step: _Step) -> Tried:
        need, lost = step.need, step.lost
        state, to_do = (LOSS if lost else FAILS), f"all that a cluster must give: {BROKERS_PAGE}"
        try:
            return Tried(need, WORKS, step.attempt())
        except _Lost as error:
            return Tried(need, LOSS, str(error), error.to_do)
        except _Failed as error:
            return Tried(need, state, str(error), error.to_do or to_do)
        except (LogError, AnabranchError, MalformedAnswer, ConnectionBroken) as error:
            text = f"{lost}: {error}" if lost else str(error)
            if isinstance(error, NotAuthorized) or getattr(error, "forbidden", False):
                to_do = "grant it on topics and ids that begin so, or let an administrator run this"
            elif isinstance(error, LogRefused):
                to_do = way_out(error, self._control_partitions, len(self._cluster.nodes))
            elif isinstance(error, TopicMisconfigured):
                to_do = OF_NEW_TOPICS
            return Tried(need, state, text, to_do)

    def _steps(self) -> Iterator[_Step]:
        yield _Step("dry runs", self._dry_runs)
        yield _Step(f"topics of {self._prefix}", self._own_topics)
        yield _Step(_CONTROL, self._control_topics)
        yield _Step(_OF_STREAM, lambda: self._stream_topics(self._stream))
        yield _Step(_OF_TABLE, lambda: self._stream_topics(self._table))
        lost = "no lane but `open` and `admin`"
        yield _Step("a lane's topics", self._lane_topics, lost, (_CONTROL,))
        yield _Step("replicas", self._replicas, after=(_OF_STREAM,))
        yield _Step("size", self._size, after=(_CONTROL,))
        yield _Step("compression", self._codecs, after=(_OF_STREAM,))
        yield _Step("ends of partitions", self._ends, after=(_OF_TABLE,))
        yield _Step("transaction time-out", self._time_out)
        yield _Step("native transactions", self._transactions, after=(_OF_STREAM, _OF_TABLE))
        yield _Step("fencing", self._fencing, after=(_OF_STREAM,))
        yield _Step("groups", self._groups)
        for need, attempt in (
            (needs.GROW, self._grow),
            (needs.CUT, self._cut),
            (needs.ALTER, self._alter),
        ):
            names = tuple(api.name for api in need.calls)
            yield _Step(need.name, attempt, need.lost, (_OF_STREAM,), names)

    # -- topics ---------------------------------------------------------------------------------------

    def _dry_runs(self) -> str:
        deadline = self._cluster.deadline()
        heeds = self._cluster.repeat(
            "a dry run", deadline, lambda: admin.heeds_dry_runs(self._cluster, self.mark, deadline)
        )
        if not heeds:
            raise _Lost(
                "a dry run makes the topic; it is deleted again",
                "nothing: topics are made and deleted a few times more",
            )
        return "make nothing"

    def _own_topics(self) -> str:
        """Check the control topics of the prefix: existing ones as they are, and the others by dry runs."""
        try:
            missing, taken = check_control_topics(
                self._log,
                self._prefix,
                control_partitions=self._control_partitions,
                max_message_bytes=self._asked_bytes,
            )
        except TopicMisconfigured as error:
            raise _Failed(str(error), "set them as it says") from error
        if self._cluster.heeds_dry_runs:
            for name in missing:
                self._log.replicas_of_new(name)
        if taken < self._asked_bytes:
            raise self._smaller(taken)
        every = len(control_topics(self._prefix, self._control_partitions))
        there = every - len(missing)
        return f"{there} of {every} are there; they, and rights to them, are as needed"

    def _smaller(self, taken: int) -> _Lost:
        do = f"raise {MAX_MESSAGE}, or give controllers --max-message-bytes {taken}"
        return _Lost(SMALLER_RECORDS % (taken, self._asked_bytes), do)

    def _control_topics(self) -> str:
        made = create_control_topics(
            self._log,
            self.mark,
            control_partitions=self._control_partitions,
            replication_factor=self._factor,
            max_message_bytes=self._asked_bytes,
        )
        self._record_bytes = made.record_bytes
        counts = control_topics(self.mark, made.control_partitions, made.reply_partitions)
        return f"{len(counts)} topics, {sum(counts.values())} partitions: their settings are kept"

    def _stream_topics(self, stream: str) -> str:
        settings = {} if self._factor < 0 else {REPLICATION: str(self._factor)}
        create_stream_topics(
            self._log, stream, segments=1, settings=settings, record_bytes=self._record_bytes
        )
        name = journal_topic(stream)
        shown = describe(self._log, [name])[name].config
        if silent := [setting for setting in _LASTING if setting not in shown]:
            raise _Lost(
                f"the broker does not report {' and '.join(silent)}: if it deletes what it keeps by time or size, "
                "journals lose events of open transactions, and histories what readers go by",
                "let whoever runs it say so",
            )
        return "3 topics: their settings are kept"

    def _lane_topics(self) -> str:
        create_lane_topics(self._log, self.mark, _LANE, like="open")
        return "2 topics"

    def _replicas(self) -> str:
        name = journal_topic(self._stream)
        info = describe(self._log, [name])[name]
        factor, in_sync = info.replication_factor, info.config.get(MIN_ISR)
        if factor < 2:
            raise _Lost(
                "1 of each partition: what is acknowledged is lost with its broker",
                "for more than trials: three brokers, or --replication-factor",
            )
        if in_sync is None:
            return (
                f"{factor}; the broker does not report {MIN_ISR}: it answers for majorities itself"
            )
        return f"{factor}, {MIN_ISR}={in_sync}"

    def _delete(self) -> Tried:
        """Delete this probe's topics until no broker shows any, and topics that earlier probes have left."""
        mine, deleted = self._names(), set[str]()
        left = set(mine)
        until = time.monotonic() + _GONE_S
        try:
            due = left  # a broker may not show all created topics yet
            while due:
                if time.monotonic() > until:
                    raise LogUnavailable(f"brokers show them for {_GONE_S:.0f} s after that")
                self._log.delete_topics([TopicInfo(name, 0, 0, {}, "") for name in sorted(due)])
                time.sleep(_PAUSE_S)
                left = due = self._left()
                deleted |= due
        except (LogError, AnabranchError, MalformedAnswer, ConnectionBroken) as error:
            with suppress(LogError, AnabranchError, MalformedAnswer, ConnectionBroken):
                left = self._left()
            text = f"{needs.DELETE.lost}: {error}. The probe's are left: {', '.join(sorted(left))}"
            return Tried(needs.DELETE.name, LOSS, text, "delete them by hand")
        earlier = len({name for name in deleted if not name.startswith(self.mark)})
        found = "all topics of this probe are deleted again"
        if earlier:
            found += f", and {earlier} that earlier ones had left"
        return Tried(needs.DELETE.name, WORKS, found)

    def _names(self) -> list[str]:
        """The topics that this probe creates, without topics that brokers create in dry runs."""
        of_lane = commands_topic(self.mark, _LANE), replies_topic(self.mark, _LANE)
        of_controllers = control_topics(self.mark, self._control_partitions)
        return [*of_controllers, *of_lane, *topics_of(self._stream), *topics_of(self._table)]

    def _left(self) -> set[str]:
        """Topics of this probe, and of probes an hour ago or earlier, that any broker shows."""
        return set(
            filter(self._is_left, admin.topics_shown(self._cluster, self._cluster.deadline()))
        )

    def _is_left(self, topic: str) -> bool:
        if topic.startswith(self.mark):
            return True
        found = re.match(rf"{re.escape(self._prefix)}-probe-([0-9a-f]{{8}})-[0-9a-f]{{8}}\.", topic)
        return found is not None and int(found[1], 16) < time.time() - _EARLIER_S

    # -- records --------------------------------------------------------------------------------------

    def _append(self, place: TopicPartition, batch: Packed) -> None:
        """Append outside of native transactions, and wait for all replicas in sync."""
        deadline = self._cluster.deadline()
        producer = JournalProducer(self._cluster, deadline)
        with closing(producer):
            producer.append(place, batch, deadline)
            producer.flush(deadline)

    def _size(self) -> str:
        place = TopicPartition(replies_topic(self.mark), 0)
        self._append(place, _batch("none", 1, self._record_bytes - _ROOM_BYTES))
        if self._record_bytes < self._asked_bytes:
            raise self._smaller(self._record_bytes)
        return f"a record of {self._record_bytes / (1 << 20):g} MiB is taken"

    def _codecs(self) -> str:
        place = TopicPartition(journal_topic(self._stream), 0)
        refused: dict[Codec, LogRefused] = {}
        for codec in CODECS:
            try:
                self._append(place, _batch(codec, 1))
            except LogRefused as error:
                refused[codec] = error
        if "none" in refused:
            raise refused["none"]
        if not refused:
            return "all codecs are taken"
        taken = ", ".join(codec for codec in CODECS if codec not in refused)
        text = f"not taken: {', '.join(refused)}; taken: {taken}"
        first = next((codec for codec in CODECS if codec not in ("none", *refused)), "none")
        raise _Lost(text, f"let writers have compression_type={first}")

    def _ends(self) -> str:
        place = TopicPartition(journal_topic(self._table), 0)  # only this check writes to it
        acknowledged = 0
        for count in (3, 5):
            self._append(place, _batch("none", count))
            acknowledged += count
            if (end := self._end(place)) != acknowledged:
                raise _Failed(
                    f"the broker says that the end of a partition is {end}, after it has acknowledged all up to "
                    f"{acknowledged}: what it stores would be overlooked",
                    "use another broker: this one answers wrongly",
                )
        return "each is the last acknowledged offset + 1"

    def _end(self, place: TopicPartition, *, committed: bool = False) -> int:
        return self._log.end_offsets([place], committed=committed)[place]

    def _time_out(self) -> str:
        check_native_timeout(self._cluster, f"{self._id}.time", self._native_timeout)
        return f"native transactions may take {self._native_timeout:g} s"

    def _transactions(self) -> str:
        # Like a round: in several topics at once, one of them compacted.
        places = [TopicPartition(stream_topic(each), 0) for each in (self._stream, self._table)]
        producer = self._log.producer(self._id, timeout=_SHORT_S)
        with closing(producer):
            aborted = producer.append([(place, _batch("none", 3).frame()) for place in places])
            for place, offset in zip(places, aborted, strict=True):
                if self._end(place, committed=True) != offset:
                    raise _Failed("readers are let beyond the begin of an open native transaction")
            producer.abort()
            kept = producer.append([(place, _batch("none", 2).frame()) for place in places])
            producer.commit()
        for place, begin, offset in zip(places, aborted, kept, strict=True):
            self._check_committed(place, begin, offset)
        return f"abort and commit; {'KIP-890' if producer.is_v2 else 'the older protocol'}"

    def _check_committed(self, place: TopicPartition, begin: int, kept: int) -> None:
        """`_Failed` unless readers see exactly two records from ``begin`` on: the records at ``kept``."""
        _until(
            lambda: self._end(place, committed=True) == self._end(place),
            "the marker of a native transaction is not written",
        )
        found = self._log.fetch({place: begin}, max_wait=_SOON_S, max_bytes=1 << 20, committed=True)
        batches = [(b.base_offset, b.next_offset) for f in found.values() for b in f.batches]
        if batches != [(kept, kept + 2)]:
            raise _Failed(
                f"of an aborted and a committed native transaction readers see {batches or 'nothing'}, "
                f"not the committed [{kept}, {kept + 2})"
            )

    def _fencing(self) -> str:
        place = TopicPartition(stream_topic(self._stream), 0)
        with (
            closing(self._log.producer(self._id, timeout=_SHORT_S)) as old,
            closing(self._log.producer(self._id, timeout=_SHORT_S)) as new,
        ):
            try:
                old.append([(place, _batch("none", 1).frame())])
                old.commit()
            except LogFenced:
                new.append([(place, _batch("none", 1).frame())])
                new.commit()
                return "a former leader can't write any more"
        raise _Failed("a producer whose transactional id was initialised again can still write")

    def _groups(self) -> str:
        deadline = self._cluster.deadline()
        group = f"{self.mark}.controllers"

        def join() -> int:
            address = coordinator_of(self._cluster, group, deadline, key_type=GROUP_KEY_TYPE)
            with closing(self._cluster.pool.open(address, deadline)) as connection:
                found = connection.ask(
                    _JOIN_GROUP,
                    deadline,
                    group_id=group,
                    session_timeout=dt.timedelta(seconds=self._session_timeout),
                    rebalance_timeout=dt.timedelta(seconds=self._session_timeout),
                    member_id="",
                    protocol_type="consumer",
                    protocols=[{"name": "range", "metadata": b""}],
                )
            code = int(found.error_code)
            if code in _COORDINATOR_SOON:
                why = f"{ErrorCode(code).name.upper()} ({code})"
                raise Again(LogUnavailable(f"the group's coordinator is not ready: {why}"))
            return code

        code = self._cluster.repeat("join a group", deadline, join)
        if code == _INVALID_SESSION_TIMEOUT:
            text = (
                f"--session-timeout {self._session_timeout:g} s is not within the broker's limits"
            )
            raise _Failed(
                text, "give another --session-timeout, or change group.min.session.timeout.ms"
            )
        if code not in (NONE, _MEMBER_ID_REQUIRED):
            raise _Failed(f"no member is let in: {ErrorCode(code).name.upper()} ({code})")
        return f"sessions of {self._session_timeout:g} s"

    # -- optional needs ---------------------------------------------------------------------------------

    def _grow(self) -> str:
        name = journal_topic(self._stream)
        self._log.add_partitions(name, 2)
        deadline = self._cluster.deadline()
        self._cluster.repeat(
            "grow again", deadline, lambda: admin.add_partitions(self._cluster, name, 2, deadline)
        )
        return "also when it is asked for twice"

    def _cut(self) -> str:
        place = TopicPartition(journal_topic(self._stream), 0)
        self._log.delete_records({place: 1})
        start = self._log.start_offsets([place])[place]
        if start != 1:
            raise _Lost(f"{needs.CUT.lost}: a partition cut at 1 begins at {start}")
        return "records are deleted below an offset"

    def _alter(self) -> str:
        name, value = stream_topic(self._stream), str(declared.DAY_MS)
        self._log.alter_topics({name: {RETENTION_MS: value}})

        def shown() -> str | None:
            return self._log.describe_topics([name])[name].config.get(RETENTION_MS)

        if shown() is None:
            raise _Lost(
                f"{RETENTION_MS} of a topic was altered, and the broker does not report it",
                "ask whoever runs it whether altered settings hold",
            )
        _until(
            lambda: shown() == value, f"{needs.ALTER.lost}: a setting that was altered is not kept"
        )
        return "settings of topics are altered"


def _calls(brokers: list[Broker], lacks: set[str]) -> Iterator[Tried]:
    """Check for brokers that do not answer, and for calls that some do not offer."""
    silent = [f"{one.address}: {one.trouble}" for one in brokers if one.trouble]
    if len(silent) == len(brokers):
        yield Tried("brokers", FAILS, "; ".join(silent), "start them, or look at their logs")
        return
    do = f"start it, or look at its log: {'; '.join(silent)}" if silent else ""
    text = f"{len(brokers) - len(silent)} of {len(brokers)} answer"
    yield Tried("brokers", LOSS if silent else WORKS, text, do)
    for text in needs.obstacles(lacks):
        yield Tried("calls", FAILS, text, f"use another broker: {BROKERS_PAGE}")
    for text in needs.losses(lacks):
        yield Tried("calls", LOSS, text, f"live with it, or use another broker: {BROKERS_PAGE}")
    if not lacks:
        yield Tried("calls", WORKS, "all, in versions that are supported")


def _until(shown: Callable[[], bool], wrong: str) -> None:
    """Wait until ``shown`` is true; `_Failed` with the text ``wrong`` if that takes too long."""
    until = time.monotonic() + _SOON_S
    while not shown():
        if time.monotonic() > until:
            raise _Failed(wrong)
        time.sleep(_PAUSE_S)


def _batch(codec: Codec, count: int, size: int = 100) -> Packed:
    """A batch of ``count`` records of ``size`` bytes."""
    now_ms = int(time.time() * 1000)
    builder = BatchBuilder(codec)
    builder.add_all((b"k", bytes(size), (), now_ms) for _ in range(count))
    return Packed(builder.build()[HEADER_SIZE:], CODECS[codec], count, now_ms, now_ms)
