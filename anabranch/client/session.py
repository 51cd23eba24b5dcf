"""The client's side of the protocol: a call for each command, as plain synchronous code over small ports.

A command is sent again under the same ids until it is answered. Every command is safe to repeat, because the client
makes its ids before anything is sent. If a commit stays unanswered, RESOLVE asks for its outcome by id. Nothing
here sleeps, starts a thread, reads a clock or makes a random number except through the ports.

The file is long because each command has its call here, over one loop that repeats it until an answer comes.
"""

from __future__ import annotations

import hmac
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from anabranch.backoff import Backoff
from anabranch.client.ports import ClientPorts
from anabranch.core.across.holds import instant
from anabranch.core.transaction_states import FINISHED
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    CrossScope,
    DeadlineExceeded,
    EventTooLarge,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    InvalidToken,
    Locked,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    NotReady,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    TransactionAborted,
    UnknownScope,
    UnsupportedVersion,
    count_of,
    error_of,
)
from anabranch.ports import RecordHeaders
from anabranch.protocol import hybrid_time, limits
from anabranch.protocol.defaults import (
    FIRST_LOOK_S,
    FIRST_REPEAT_S,
    FIRST_RETRY_S,
    LEAST_MARGIN_S,
    LOCK_WAIT_MS,
    LONGEST_LOOK_S,
    LONGEST_REPEAT_S,
    LONGEST_RETRY_S,
    MOST_MARGIN_S,
    RESOLVE_SHARE,
)
from anabranch.protocol.hybrid_time import to_text, to_us
from anabranch.protocol.ids import (
    CORRELATION_ID_SIZE,
    DECIDED_HEADER,
    DIRECTORY,
    SECRET_SIZE,
    TIME_HEADER,
    TXN_ID_SIZE,
    WAIT_HEADER,
    command_digest,
    control_partition_of,
    is_marked,
    made_ms_of,
    make_marked_id,
    make_txn_id,
    txn_text,
)
from anabranch.protocol.legal_names import OPEN_LANE, check_scope, split_stream
from anabranch.protocol.limits import MAX_WAIT_MS
from anabranch.protocol.messages import SETS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode_as, encode
from anabranch.protocol.schemas.fast import EncodedEvents
from anabranch.protocol.tokens import Token, TokenBytes, id_named, make, peek
from anabranch.tracing import TRACE_HEADER, Tracing
from anabranch.types import Listed, committed

log = logging.getLogger("anabranch.client")

T = TypeVar("T")
P = TypeVar("P")
_SCOPE_TRIES = 6  # attempts to reach a new scope, in 1.3 s
# Refusals that hold for all copies of a command. Any other one is only about the copy that it answers.
_FINAL = (TransactionAborted, LocksBroken, AlreadyCommitted, EventTooLarge, OwnershipLost)
# A transaction in these states was not committed by any earlier copy.
_UNDONE = ("OPEN", "ABORTED")
_NOTHING = "nothing was changed"  # a phrase in texts of refusals
_TOKENS_A_BEAT = 500
_QUESTIONS_AT_ONCE = 100
_FEW_LEFT = 20  # so few transactions are asked for one by one
_MOST_LISTED = 10_000
_NAMES_AGAIN_S = 60.0  # the feature level may have been raised
_MOST_NAMED = 1_000  # streams in a question for a safe time; with more, it is asked for all streams


class Copy(NamedTuple):
    """A command to send, perhaps several times; every copy has the same bytes and headers.

    The headers have the time that the client knew at the first copy, by which the controller refuses a late copy
    that would undo a change made meanwhile. ``beside``: the commands of the same one-shot to other control
    partitions. They are sent before each copy, and their answers are ignored.
    """

    partition: int
    correlation_id: bytes
    payload: bytes
    headers: RecordHeaders
    beside: tuple[Copy, ...] = ()


class Session:
    """The commands of the protocol. Thread-safe: calls share only caches."""

    def __init__(self, ports: ClientPorts, tracing: Tracing | None = None) -> None:
        self._bus = ports.bus
        self._tracing = tracing
        self._clock = ports.clock
        self._entropy = ports.entropy
        self._lane = ports.lane
        self._prefix = ports.prefix
        self._wait_header: RecordHeaders = [(WAIT_HEADER, b"")] if ports.commit_wait else []
        self._max_clock_skew = ports.max_clock_skew
        self._raising = threading.Lock()
        self.highest_timestamp = 0
        self._reported: dict[int, int] = {}  # the highest time that each control partition reported
        self._scopes: dict[str, int] = {}
        self._shot_key = b""  # of the secrets of one-shots over several control partitions
        # Whether the cluster has accepted a touch over control partitions, so that it accepts such one-shots.
        self.writes_apart = False
        self._names_streams_from = 0.0  # in questions for safe times: feature level 4 has that
        self._answered = False
        self._closed = False

    def close(self) -> None:
        """Close the bus. Waiting calls end without an answer."""
        self._closed = True
        self._bus.close()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def wall(self) -> float:
        """Unix seconds."""
        return self._clock.wall()

    def random64(self) -> int:
        """64 random bits, as a signed number."""
        return int.from_bytes(self._entropy(8), "big", signed=True)

    def cluster(self, deadline: float) -> str:
        """The brokers' id of their cluster, and the prefix, as one text."""
        self._bus.ready(deadline)
        return f"{self._bus.cluster_id(deadline)}/{self._prefix}"

    def observe(self, timestamp: int) -> bool:
        """Make later commands carry this timestamp from elsewhere.

        Returns False, and ignores it, if it is too far ahead of this machine's clock.
        """
        latest_s = self._clock.wall() + self._max_clock_skew
        near = timestamp <= self.highest_timestamp or hybrid_time.to_us(timestamp) <= latest_s * 1e6
        if near:
            self._raise(timestamp)
        return near

    def _raise(self, timestamp: int) -> None:
        with self._raising:  # so that no thread replaces it by a lower one
            self.highest_timestamp = max(self.highest_timestamp, timestamp)

    @property
    def seen(self) -> RecordHeaders:
        """Command headers with the highest hybrid time that this client has seen."""
        seen = hybrid_time.to_bytes(self.highest_timestamp)
        return [(TIME_HEADER, seen), *self._wait_header]

    # -- a command and its answer -----------------------------------------------------------------------

    def ask(
        self,
        partition: int,
        command: Any,
        expected: type[T],
        deadline: float,
        posted: Copy | None = None,
    ) -> T:
        """Send a command until it is answered. A refusal is raised as its error. ``posted``: as of `locked_shot`.

        Without an answer in time it raises `DeadlineExceeded`, or `NotReady` if no controller ever answered.
        """
        result = self.try_ask(partition, command, deadline, posted=posted)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, expected):
            raise MalformedRecord(
                f"the controller answered {type(result).__name__} to {type(command).__name__}"
            )
        return result

    def ask_at_once(
        self, commands: Mapping[int, Any], expected: type[T], deadline: float
    ) -> dict[int, T]:
        """`ask` each of these control partitions. All commands are sent before the first answer is awaited."""
        if len(commands) == 1:
            return {
                number: self.ask(number, c, expected, deadline) for number, c in commands.items()
            }
        copies = {number: self._first_copy(number, c, deadline) for number, c in commands.items()}
        answers: dict[int, T] = {}
        try:
            for copy in copies.values():
                self._send(copy)
            for number, copy in copies.items():
                try:
                    answers[number] = self.ask(number, commands[number], expected, deadline, copy)
                except (NotReady, DeadlineExceeded) as error:
                    raise type(error)(f"control partition {number}: {error}") from error
            return answers
        finally:
            for copy in copies.values():
                self._bus.forget(copy.correlation_id)

    def try_ask(
        self,
        partition: int,
        command: Any,
        deadline: float,
        unanswered: list[bytes] | None = None,
        posted: Copy | None = None,
        *,
        also: RecordHeaders = (),
    ) -> Any | None:
        """As `ask`, for any type of answer; None if there was no answer in time. ``also``: headers to add.

        Raises `NotReady` if all answers were that refusal. The ids of copies that were sent and not answered are
        added to ``unanswered``: such copies may still be carried out. ``posted``: as of `locked_shot`.
        """
        unanswered = [] if unanswered is None else unanswered
        if posted is None:
            copy = self._first_copy(partition, command, deadline, also)
        else:
            copy = posted
            unanswered.append(copy.correlation_id)
        pauses: Backoff | None = None
        refused: r.Refusal | None = None
        try:
            while True:
                result = self._send_until_answered(copy, command, deadline, unanswered)
                result = result or refused
                if not isinstance(result, r.Refusal):
                    return result
                # Raised without a local name, which would make a reference cycle through the traceback.
                over = result.code != NotReady.__name__ or self._closed
                pauses = pauses or self._pauses()
                if over or not pauses.sleep(deadline):
                    raise error_of(result.code, _truly(result.message, unanswered))
                # To be raised if no other answer comes in time.
                refused = result
                if not (type(command) in SETS and copy.correlation_id in unanswered):
                    self._bus.forget(copy.correlation_id)
                    beside = copy.beside
                    copy = self._new_copy(partition, command, copy.payload, also)
                    copy = copy._replace(beside=beside)
        finally:
            self._bus.forget(copy.correlation_id)

    def post(self, command: r.OneShot, deadline: float) -> Copy:
        """Send the first copy of a one-shot, and don't wait: commands that are sent later arrive later.

        Wait for the answer by `locked_shot`, or `forget` the copy's id. Raises: as `locked_shot`; then nothing was
        sent.
        """
        copy = self._first_copy(control_partition_of(command.txn_id), command, deadline)
        self._send(copy)
        return copy

    def _send(self, copy: Copy) -> None:
        for other in copy.beside:
            self._bus.send(
                other.partition, other.correlation_id, other.payload, other.headers, waits=False
            )
        self._bus.send(copy.partition, copy.correlation_id, copy.payload, copy.headers)

    def _first_copy(
        self, partition: int, command: Any, deadline: float, also: RecordHeaders = ()
    ) -> Copy:
        self._bus.ready(deadline)
        if partition >= self._bus.control_partitions(deadline, partition + 1):
            raise InvalidArgument(
                f"there is no control partition {partition} here: the id or token is of another cluster, or prefix"
            )
        try:
            payload = encode(command)
        except MalformedRecord as error:  # a value that no earlier check refused
            raise InvalidArgument(str(error)) from error
        if len(payload) > self._bus.max_command_bytes():
            raise EventTooLarge(
                f"a request ({type(command).__name__}) has {len(payload)} bytes; the commands topic takes "
                f"{self._bus.max_command_bytes()}"
            )
        return self._new_copy(partition, command, payload, also)

    def _pauses(self) -> Backoff:
        """The pauses before a command is sent again. Most commands need none, so they are made when one is due."""
        return Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, self._clock)

    def _new_copy(
        self, partition: int, command: Any, payload: bytes, also: RecordHeaders = ()
    ) -> Copy:
        headers: RecordHeaders
        if type(command) in SETS:  # the controller compares it with its own times
            headers = [(TIME_HEADER, hybrid_time.to_bytes(self._reported.get(partition, 0)))]
        else:
            headers = [*self.seen, *also]
        if self._tracing is not None and (trace := self._tracing.header()) is not None:
            headers = [*headers, (TRACE_HEADER, trace)]
        return Copy(partition, self._entropy(CORRELATION_ID_SIZE), payload, headers)

    def _send_until_answered(
        self,
        copy: Copy,
        command: Any,
        deadline: float,
        unanswered: list[bytes],
    ) -> Any | None:
        digests = (command_digest(copy.payload),)
        repeat_s, is_first = FIRST_REPEAT_S, not unanswered
        waits = copy.correlation_id in unanswered  # earlier copies may be answered, so wait first
        try:
            while True:
                if not waits:
                    unanswered.append(copy.correlation_id)
                    self._send(copy)
                waits = False
                until = min(deadline, self.now() + repeat_s)
                result = self._receive(copy.correlation_id, digests, until, command, copy.partition)
                if result is not None:
                    unanswered.pop()
                    return result
                if self._closed or self.now() >= deadline:
                    return None
                repeat_s, is_first = min(2 * repeat_s, LONGEST_REPEAT_S), False
        except NotAuthorized as error:
            if is_first:
                raise
            raise NotAuthorized(f"{error}; what was sent before may be carried out") from error

    def _receive(
        self,
        correlation_id: bytes,
        digests: Collection[bytes],
        deadline: float,
        command: Any | None = None,
        partition: int = -1,
    ) -> Any | None:
        """The next answer to a command with one of these digests; None at the deadline.

        If ``command`` is given, the answer has to be about its transaction. Other answers with this correlation id
        are mistakes or forgeries, and are skipped.
        """
        while (data := self._bus.wait(correlation_id, deadline)) is not None:
            reply = decode_as(r.Reply, data)
            if reply.command in digests and _belongs(reply.result, command):
                self._answered = True
                if reply.hybrid_time > self._reported.get(partition, 0):
                    self._reported[partition] = reply.hybrid_time
                # Scope lookups carry no commit timestamp.
                if not isinstance(reply.result, r.ScopeInfo):
                    self._raise(reply.hybrid_time)
                return reply.result
            if self.now() >= deadline:
                break
        return None

    def no_answer(self, command: Any) -> AnabranchError:
        """The error for an unanswered command that is safe to repeat."""
        if self._closed:
            return IllegalState("the client was closed meanwhile")
        trouble = self._bus.trouble()
        said = f" (last trouble: {trouble})" if trouble else ""
        name = type(command).__name__
        if not self._answered:
            text = f"no controller answered {name}: start `anabranch controller`"
            if self._lane != OPEN_LANE:
                text += f"; or lane {self._lane!r} is not read: `anabranch lane list` says why"
            return NotReady(f"{text}{said}")
        return DeadlineExceeded(
            f"no controller answered {name} in time: call again; `anabranch cluster status` shows who leads{said}"
        )

    # -- ids, secrets, tokens ------------------------------------------------------------------------------

    def new_correlation_id(self) -> bytes:
        """16 random bytes for one command, so that no other client can guess them and forge an answer."""
        return self._entropy(CORRELATION_ID_SIZE)

    def new_secret(self) -> bytes:
        """The secret of a new transaction, which proves later that this client began it."""
        return self._entropy(SECRET_SIZE)

    def token_of(self, begin: r.Begin, begun_ms: int | None = None) -> TokenBytes:
        """The token, with all rights, of the transaction that this command begins. Nothing is sent."""
        begun_ms = made_ms_of(begin.txn_id) if begun_ms is None else begun_ms
        seen = self.highest_timestamp
        of = Token(begin.txn_id, begin.keepalive_ms, begun_ms, begin.scope, self._lane, seen=seen)
        return make(begin.secret, of)

    def token_as_of_now(self, token: bytes, secret: bytes) -> TokenBytes:
        """The same token, with the highest hybrid time that this client has seen by now."""
        return make(secret, replace(peek(token), seen=self.highest_timestamp))

    # -- scopes and streams --------------------------------------------------------------------------

    def find_scope(
        self, scope: str, deadline: float, *, create: bool = False, near: str | None = None
    ) -> int:
        """The control partition of a scope, which never changes. Raises `UnknownScope`."""
        known = self._scopes.get(scope)
        if known is None or near is not None:
            info = self.ask(DIRECTORY, r.FindScope(scope, create, near), r.ScopeInfo, deadline)
            known = self._scopes[scope] = info.control_partition
        return known

    def are_together(self, scopes: Iterable[str], deadline: float) -> bool:
        """Whether one control partition serves these scopes. Raises `UnknownScope`."""
        return len({self.find_scope(scope, deadline) for scope in scopes}) == 1

    def serves_all(self, streams: Iterable[str], deadline: float) -> bool:
        """Whether one control partition serves all these streams. Raises `UnknownScope`.

        No controller is asked about streams of one scope, nor while there is only one control partition.
        """
        scopes = {split_stream(stream)[0] for stream in streams}
        return len(scopes) == 1 or self.is_alone(deadline) or self.are_together(scopes, deadline)

    def is_alone(self, deadline: float) -> bool:
        """Whether there is only one control partition."""
        self._bus.ready(deadline)
        return self._bus.control_partitions(deadline) == 1

    def places(
        self, token: bytes, streams: Iterable[str], deadline: float
    ) -> dict[int | None, tuple[str, ...]]:
        """Control partition -> those of these streams that it serves. Raises `UnknownScope`.

        The first key is None, for the transaction's own control partition, even if it serves no stream here.
        """
        is_one, home = self.is_alone(deadline), _partition(token)
        found: dict[int | None, tuple[str, ...]] = {None: ()}
        for stream in streams:
            there = home if is_one else self._partition_of(token, stream, deadline)
            place = None if there == home else there
            found[place] = (*found.get(place, ()), stream)
        return found

    def beside(
        self, streams: Iterable[str], tables: Sequence[str], deadline: float
    ) -> Sequence[str]:
        """Those of some tables that control partitions of these streams serve. Raises `UnknownScope`."""
        if self.serves_all((*tables, *streams), deadline):
            return tables
        places = {self.find_scope(split_stream(one)[0], deadline) for one in streams}
        return [t for t in tables if self.find_scope(split_stream(t)[0], deadline) in places]

    def control_partitions(self, streams: Iterable[str], deadline: float) -> dict[str, int]:
        """The number of each stream's control partition. If this lane may not see one, all get the same number.

        No answer in time is an error: readers that took the streams for those of one control partition would not
        read their commits in order.
        """
        scopes = {stream: split_stream(stream)[0] for stream in streams}
        if len(set(scopes.values())) > 1:
            with suppress(NotAuthorized):
                return {s: self.find_scope(scope, deadline) for s, scope in scopes.items()}
        return dict.fromkeys(scopes, DIRECTORY)

    def create_stream(
        self, command: r.CreateStream, deadline: float, *, near: str | None = None
    ) -> r.StreamInfo:
        """Create a stream, and its scope if needed. Raises `StreamExists` if it exists with other settings."""
        scope, _ = split_stream(command.stream)
        pauses = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, self._clock)
        while True:
            partition = self.find_scope(scope, deadline, create=True, near=near)
            try:
                return self.ask(partition, command, r.StreamList, deadline).streams[0]
            except UnknownScope as error:
                # The partition has not read the directory's message about the scope yet, or retention removed it:
                # forgetting the scope makes the directory send it again.
                if pauses.count == _SCOPE_TRIES or not pauses.ends_by(deadline):
                    raise NotReady(
                        f"scope {scope!r} is new, and not known yet where it is served: call again"
                    ) from error
                self._scopes.pop(scope, None)
            pauses.sleep()

    def ask_of(self, name: str, command: Any, expected: type[T], deadline: float) -> T:
        """Ask the control partition of the scope in ``scope/name``. Raises `UnknownScope`."""
        partition = self.find_scope(split_stream(name)[0], deadline)
        return self.ask(partition, command, expected, deadline)

    def ask_stream(self, stream: str, command: Any, deadline: float) -> r.StreamInfo:
        """Send a command about a stream. Raises `UnknownScope`, `UnknownStream`."""
        return self.ask_of(stream, command, r.StreamList, deadline).streams[0]

    def describe(self, stream: str, deadline: float) -> r.StreamInfo:
        """The description of a stream. Raises `UnknownScope`, `UnknownStream`."""
        return self.ask_stream(stream, r.DescribeStreams(None, stream), deadline)

    def streams(self, scope: str | None, deadline: float) -> Listed[r.StreamInfo]:
        """All streams of a scope, or of the cluster, by name. Raises `UnknownScope`."""
        wanted = r.DescribeStreams(scope, None)
        found = self.in_pages(wanted, r.StreamList, lambda part: part.streams, deadline)
        found.sort(key=lambda info: info.stream)
        return found

    def of_each(
        self, scope: str | None, ask: Callable[[int, float], list[T]], deadline: float
    ) -> Listed[T]:
        """The items of all control partitions, or of a scope's partition. Raises if no partition answers.

        ``ask``: a function of a control partition and a deadline. Each partition gets a share of the time;
        partitions that don't answer are asked once more in the time that remains.
        """
        partitions = self._partitions(scope, deadline)
        found: Listed[T] = Listed()
        answered = 0
        asked = deque(partitions)
        shares = len(partitions) if len(partitions) == 1 else 2 * len(partitions)
        while asked:
            partition = asked.popleft()
            again = partition in found.missing
            try:
                found += ask(partition, self.now() + (deadline - self.now()) / shares)
            except RetryError as error:
                found.missing[partition] = error
                shares -= 1
                if not again and shares:
                    asked.append(partition)
            else:
                found.missing.pop(partition, None)
                answered += 1
                shares -= 1 if again else 2
        if not answered:
            raise next(iter(found.missing.values()))
        for partition, why in found.missing.items():
            log.warning(
                "control partition %d does not answer, a list is incomplete: %s", partition, why
            )
        return found

    def _partitions(self, scope: str | None, deadline: float) -> Sequence[int]:
        if scope is not None:
            return [self.find_scope(check_scope(scope), deadline)]
        self._bus.ready(deadline)
        return range(self._bus.control_partitions(deadline))

    def safe_time(self, scope: str, at: int | None, deadline: float) -> int:
        """The safe time ``at`` of a scope: its later commits get higher timestamps. None: a safe time of now.

        Raises `NotReady` if ``at`` is not safe yet.
        """
        partition = self.find_scope(scope, deadline)
        return self.ask(partition, r.SafeTime(scope, at, ()), r.SafeTimeReply, deadline).timestamp

    def instant(self, names: Iterable[str], at: int | None, deadline: float) -> int:
        """Wait until ``at`` is safe for streams, whichever control partitions serve them.

        ``names``: streams; a scope's name alone for all of its streams. ``at`` None: a time at or above all
        timestamps that this client has seen, and all that were answered to anybody before this call. Raises
        `NotReady` at once if ``at`` is later than the deadline.
        """
        questions = self._safe_times(names, (), deadline)
        seen = self.highest_timestamp
        return self._instant(questions, seen, at, deadline)[0]

    def safe_tables(
        self, tables: Sequence[str], least: int, deadline: float
    ) -> tuple[int, dict[str, int]]:
        """A safe time at or above ``least`` (0: now), and the time of each table's newest commit (0: none).

        Such a commit may be later than the safe time. Raises: as `instant`.
        """
        questions = self._safe_times(tables, tables, deadline)
        seen = max(least, self.highest_timestamp)
        at, answers = self._instant(questions, seen, None, deadline)
        return at, {each.table: each.last for answer in answers for each in answer.tables}

    def _safe_times(
        self, names: Iterable[str], tables: Sequence[str], deadline: float
    ) -> dict[int, r.SafeTime]:
        """Control partition -> the question for the time ``at`` of those names that it serves."""
        served: dict[int, tuple[str, list[str]]] = {}
        for name in names:
            scope = name.partition("/")[0]
            served.setdefault(self.find_scope(scope, deadline), (scope, []))[1].append(name)
        questions = {}
        for number, (scope, its) in served.items():
            named = self.now() >= self._names_streams_from and len(its) <= _MOST_NAMED
            streams = [name for name in its if "/" in name] if named else []
            questions[number] = r.SafeTime(
                scope, None, tuple(its) if tables else (), tuple(streams)
            )
        return questions

    def _instant(
        self, questions: Mapping[int, r.SafeTime], seen: int, at: int | None, deadline: float
    ) -> tuple[int, Sequence[r.SafeTimeReply]]:
        """A time that is safe at all these control partitions (docs/inside/across.md, T2), and their answers.

        The first questions fix the time, and later ones are for the same time. So transactions that are committed
        without a pause can't delay the answer.
        """
        questions, answers = self._first_answers(questions, deadline)
        times = {number: answer.timestamp for number, answer in answers.items()}
        wanted, early = instant(times, seen, at)
        if at is not None:
            self._check_near(at, max(times.values()), deadline)
        return wanted, self._settled(questions, wanted, answers, early, deadline)

    def reach(self, names: Iterable[str], at: int, deadline: float) -> int:
        """A time that is safe for streams: the later of ``at`` and the present time of the slowest controller.

        ``at``: the time of a record that a reader found. The present time of the fastest controller, as of
        `instant`, would not do: a lane that writes nowhere can't raise slow clocks to it, so a reader would
        ask for later and later times.
        """
        questions, answers = self._first_answers(self._safe_times(names, (), deadline), deadline)
        wanted = max(at, min(answer.timestamp for answer in answers.values()))
        early = [number for number, answer in answers.items() if answer.timestamp < wanted]
        self._settled(questions, wanted, answers, early, deadline)
        return wanted

    def _first_answers(
        self, questions: Mapping[int, r.SafeTime], deadline: float
    ) -> tuple[Mapping[int, r.SafeTime], dict[int, r.SafeTimeReply]]:
        """The answers to these questions, and the questions as the controllers understand them."""
        try:
            return questions, self.ask_at_once(questions, r.SafeTimeReply, deadline)
        except (FeatureNotEnabled, UnsupportedVersion):  # here no stream is ever held
            self._names_streams_from = self.now() + _NAMES_AGAIN_S
            questions = {number: replace(one, streams=()) for number, one in questions.items()}
            return questions, self.ask_at_once(questions, r.SafeTimeReply, deadline)

    def _settled(
        self,
        questions: Mapping[int, r.SafeTime],
        wanted: int,
        answers: dict[int, r.SafeTimeReply],
        early: Iterable[int],
        deadline: float,
    ) -> Sequence[r.SafeTimeReply]:
        """The answers when a time is safe everywhere. ``early``: control partitions that answered a lower one."""
        left = {*early, *[number for number, answer in answers.items() if not answer.safe]}
        pauses: Backoff | None = None
        while left:
            again = {number: replace(questions[number], at=wanted) for number in sorted(left)}
            answers |= self.ask_at_once(again, r.SafeTimeReply, deadline)
            left = {number for number in left if not answers[number].safe}
            pauses = pauses or self._pauses()
            if left and not pauses.sleep(deadline):
                raise NotReady(
                    f"streams of control partition {min(left)} are held below {to_text(wanted)} until another "
                    "control partition has decided a transaction: ask again"
                )
        return [*answers.values()]

    def _check_near(self, wanted: int, now: int, deadline: float) -> None:
        """`NotReady` at once if a time comes only after the deadline. ``now``: the latest time of a controller."""
        ahead_s = (to_us(wanted) - to_us(now)) / 1e6
        if ahead_s > 0 and self.now() + ahead_s >= deadline:
            raise NotReady(
                f"the time {to_text(wanted)} is not reached yet: {ahead_s:,.3f} s are missing by the controller's "
                "clock, more than the timeout; ask later, or for now"
            )

    def list_runs(
        self, token: bytes, stream: str, wanted: Sequence[r.RunsWanted], deadline: float
    ) -> r.RunList:
        """The places of some of the wanted records of an open transaction, and which are still to be asked for."""
        there = self._partition_of(token, stream, deadline)
        return self.ask(there, r.ListRuns(token, stream, tuple(wanted)), r.RunList, deadline)

    def series(self, scope: str, name: str | None, deadline: float) -> list[r.SeriesInfo]:
        """The latest numbers of a scope's series, by name: of one series, or of all. Raises `UnknownScope`."""
        partition = self.find_scope(check_scope(scope), deadline)
        found: list[r.SeriesInfo] = []
        more = True
        while more:
            command = r.ListSeries(scope, name, found[-1].series if found else None)
            part = self.ask(partition, command, r.SeriesList, deadline)
            found += part.series
            more = part.more
        return found[::-1]

    def open_ones(self, wanted: r.ListOpen, deadline: float) -> Listed[r.OpenInfo]:
        """Open transactions, the oldest first; or one, by its id. Raises `UnknownScope`, `UnknownTransaction`."""
        if wanted.txn_id is not None:
            return Listed([self._open_one(wanted, control_partition_of(wanted.txn_id), deadline)])
        found = self.in_pages(
            wanted,
            r.OpenList,
            lambda part: part.transactions,
            deadline,
            txn_of=lambda info: info.outcome.txn_id,
        )
        found.sort(key=lambda info: made_ms_of(info.outcome.txn_id))
        del found[wanted.limit :]
        return found

    def _open_one(self, wanted: r.ListOpen, there: int, deadline: float) -> r.OpenInfo:
        part = self.ask(there, wanted, r.OpenList, deadline)
        (info,), writers = part.transactions, [*part.transactions[0].writers]
        while part.more is not None:
            part = self.ask(there, replace(wanted, after=part.more), r.OpenList, deadline)
            writers += part.transactions[0].writers
        return replace(info, writers=tuple(writers))

    def table_locks(self, wanted: r.ListTableLocks, deadline: float) -> Listed[r.TableLockInfo]:
        """Registered locks, by transaction and table. Raises `UnknownScope`."""
        found = self.in_pages(wanted, r.TableLockList, lambda part: part.locks, deadline)
        found.sort(key=lambda info: (made_ms_of(info.txn_id), info.txn_id, info.table))
        return found

    def in_pages(
        self,
        wanted: Any,
        expected: type[P],
        of: Callable[[P], Iterable[T]],
        deadline: float,
        *,
        by: str = "after",
        txn_of: Callable[[T], bytes] | None = None,
    ) -> Listed[T]:
        """`of_each` in pages, up to ``wanted.limit`` items of each. ``by``: the field that names the next page.

        ``txn_of``: the transaction of an item. Its coordinator's item is listed; a participant's only if the
        coordinator does not answer.
        """

        most: int | None = getattr(wanted, "limit", None)
        parts: dict[bytes, T] = {}

        def ask(partition: int, until: float) -> list[T]:
            found: list[T] = []
            more = None
            while True:
                left = {} if most is None else {"limit": most - len(found)}
                command = replace(wanted, **left, **{by: more})
                part: Any = self.ask(partition, command, expected, until)
                for item in of(part):
                    txn_id = None if txn_of is None else txn_of(item)
                    if txn_id is None or control_partition_of(txn_id) == partition:
                        found.append(item)
                    else:
                        parts[txn_id] = item
                more = part.more
                if more is None or (most is not None and len(found) >= most):
                    return found

        whole = self.of_each(wanted.scope, ask, deadline)
        away = whole.missing
        whole += [item for txn_id, item in parts.items() if control_partition_of(txn_id) in away]
        return whole

    # -- transactions ---------------------------------------------------------------------------------

    def new_txn_id(
        self, scope: str, deadline: float, *, marked: bool = False, as_old_as: bytes | None = None
    ) -> bytes:
        """A transaction id for a scope. ``marked``: for a one-shot that moves positions; no other may have it.

        ``as_old_as``: a former try, which an older transaction had aborted (wait-die).
        """
        partition = self.find_scope(scope, deadline)
        now_ms = int(self._clock.wall() * 1000) if as_old_as is None else made_ms_of(as_old_as)
        make = make_marked_id if marked else make_txn_id
        return make(partition, now_ms, int.from_bytes(self._entropy(8), "big"))

    def begin(self, command: r.Begin, deadline: float) -> r.Begun | r.Outcome:
        """Begin a transaction. Returns an `Outcome` if the name is committed, or the transaction is over."""
        result = self.try_ask(control_partition_of(command.txn_id), command, deadline)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, r.Begun | r.Outcome):
            raise MalformedRecord(f"the controller answered {type(result).__name__} to Begin")
        return result

    def touch(
        self,
        token: bytes,
        stream: str,
        writer: int,
        deadline: float,
        ran: Iterable[r.Derivation] = (),
        positions: Sequence[int] = (),
    ) -> r.Touched:
        """Add a stream to a transaction, before the writer with this number writes to it; returns where to write.

        The transaction's first touch of the stream, by any writer, pins the reference epoch: the segments (key
        ranges, each in a partition) to which all its writers write. ``ran``: the derivations that the writer runs.
        The stream's control partition is asked, whichever one the transaction is of.

        ``positions``: of keys, whose segments of an exclusive stream are locked first. Raises `Locked` if they are
        not free at the deadline, `TransactionAborted` if an older transaction has them.
        """
        ran, at, pauses = tuple(sorted(ran)), tuple(positions), self._pauses()
        there = self._partition_of(token, stream, deadline)
        while True:
            left_ms = int((deadline - self.now() - LEAST_MARGIN_S) * 1000)
            wait_ms = max(0, min(LOCK_WAIT_MS, left_ms)) if at else 0
            command = r.Touch(token, stream, writer, ran, at, wait_ms)
            try:
                with _about(token):
                    found = self.ask(there, command, r.Touched, deadline)
                self.writes_apart |= there != _partition(token)
                return found
            except Locked:
                # A last try without time for an answer would hide who has the segment.
                if left_ms <= 0 or not pauses.sleep(deadline - LEAST_MARGIN_S):
                    raise
            except InvalidToken as error:
                home, scope = _partition(token), peek(token).scope
                if there == home:
                    raise
                # A controller of an older release knows no transactions of other control partitions.
                raise _apart(scope, home, split_stream(stream)[0], there) from error

    def _partition_of(self, token: bytes, stream: str, deadline: float) -> int:
        """The control partition of a stream; no controller is asked if it is of the transaction's own scope."""
        scope = split_stream(stream)[0]
        if scope == peek(token).scope:
            return _partition(token)
        return self.find_scope(scope, deadline)

    def register(self, token: bytes, receipt: r.Receipt, deadline: float) -> r.Registered:
        with _about(token):
            return self.ask(_partition(token), r.Register(token, receipt), r.Registered, deadline)

    def commit(self, command: r.Commit, deadline: float, *, decided: bool = False) -> r.Outcome:
        """Send a commit until its outcome is COMMITTED, or PREPARED if the command prepares.

        ``decided``: until it is decided, at least (FINALIZE_IN_PROGRESS). The call sets how long the controller may
        wait. After a refusal the transaction is still open. Raises `OutcomeUnknown` at the deadline,
        `AlreadyCommitted` if the series has a higher number, and `NotReady` while registered locks have to be
        revalidated.
        """
        return _outcome(self.try_commit(command, deadline, decided=decided))

    def try_commit(
        self, command: r.Commit, deadline: float, *, decided: bool = False
    ) -> r.Outcome | r.Revalidate:
        """As `commit`, but returns `Revalidate` if registered locks have to be revalidated before the next copy."""
        token = command.token
        with _about(token):
            return self._until_known(id_named(token), command, token, deadline, decided=decided)

    def lock_reads(
        self, command: r.LockReads | r.ListLocks, deadline: float, there: int | None = None
    ) -> r.ReadsLocked:
        """Register locks of a transaction, or list some of its registered locks.

        ``there``: the control partition of the locked tables; None: that of the transaction.
        """
        home = _partition(command.token)
        there = home if there is None else there
        try:
            with _about(command.token):
                return self.ask(there, command, r.ReadsLocked, deadline)
        except InvalidToken as error:
            if there == home or not isinstance(command, r.LockReads) or not command.tables:
                raise
            # A controller of an older release knows no transactions of other control partitions.
            scope, other = peek(command.token).scope, split_stream(command.tables[0])[0]
            raise _apart(scope, home, other, there) from error

    def take_turn(self, command: r.TakeTurn, deadline: float) -> r.Revalidate:
        """Wait for a turn at a row. Raises: NotReady, DeadlineExceeded (not in time), FeatureNotEnabled."""
        return self.ask(control_partition_of(command.txn_id), command, r.Revalidate, deadline)

    def give_up_turn(self, command: r.TakeTurn) -> None:
        """Send a `TakeTurn` that gives up a turn, and don't wait for an answer: the turn would end by itself."""
        copy = self._new_copy(control_partition_of(command.txn_id), command, encode(command))
        self._send(copy)
        self._bus.forget(copy.correlation_id)

    def one_shot(self, command: r.OneShot, deadline: float, *, decided: bool = False) -> r.Outcome:
        """Send a one-shot until it is COMMITTED. Raises `OutcomeUnknown` at the deadline.

        ``decided``: as of `locked_shot`. A one-shot that moves positions may raise `OwnershipLost`.
        """
        return _outcome(self.locked_shot(command, deadline, decided=decided))

    def locked_shot(
        self,
        command: r.OneShot,
        deadline: float,
        posted: Copy | None = None,
        *,
        decided: bool = False,
    ) -> r.Outcome | r.Revalidate:
        """Send a one-shot with locks until it is COMMITTED. Returns `Revalidate`, without effect, for newer marks.

        ``posted``: the first copy, if `post` has sent it. ``decided``: the decision is enough; only a one-shot over
        several control partitions is merged later. Raises `OutcomeUnknown` at the deadline. An earlier copy that
        arrives late is judged by its own locks.
        """
        txn_id = command.txn_id
        if not is_marked(txn_id):
            if posted is None and self.is_apart(command, deadline):
                also: RecordHeaders = [(DECIDED_HEADER, b"")] if decided else ()
                command, posted = self._post_parts(command, deadline, also)
            else:
                decided = False
            return self._until_known(txn_id, command, None, deadline, posted, decided=decided)
        # RESOLVE takes no marked id: the rows of the tasks show the outcome.
        unanswered: list[bytes] = []
        try:
            there = control_partition_of(txn_id)
            answer = self.try_ask(there, command, deadline, unanswered, posted)
        except AnabranchError as error:
            _check_all_copies(error, unanswered, txn_id, None)
            raise
        if answer is None:
            raise unknown("was not known in time", txn_id, None)
        if isinstance(answer, r.Revalidate):
            return answer
        if not isinstance(answer, r.Outcome):
            raise MalformedRecord(f"the controller answered {type(answer).__name__} to OneShot")
        return committed(answer)

    def is_apart(self, command: r.OneShot, deadline: float) -> bool:
        """Whether a one-shot concerns several control partitions. Raises: UnknownScope."""
        if self.is_alone(deadline) or isinstance(command.events, EncodedEvents):
            return False  # those of a write session are of one control partition each
        scopes = {split_stream(stream)[0] for stream in _streams_of(command)}
        scopes.add(command.scope)
        return len(scopes) > 1 and not self.are_together(scopes, deadline)

    def _post_parts(
        self, command: r.OneShot, deadline: float, also: RecordHeaders
    ) -> tuple[r.OneShot, Copy]:
        """Send a one-shot to each control partition that it concerns. Returns the coordinator's command and copy.

        All commands have one secret, which is the same when the one-shot is sent again.
        """
        home, places = control_partition_of(command.txn_id), dict[str, int]()
        for stream in _streams_of(command):
            places[stream] = self.find_scope(split_stream(stream)[0], deadline)
        others = tuple(sorted({*places.values()} - {home}))
        with self._raising:
            self._shot_key = self._shot_key or self.new_secret()
        secret = hmac.digest(self._shot_key, command.txn_id, "sha256")

        def part(number: int) -> r.OneShot:
            mine = {stream for stream, place in places.items() if place == number}
            is_home = number == home
            return command._replace(
                scope=command.scope if is_home else split_stream(min(mine))[0],
                name=command.name if is_home else None,
                events=tuple([event for event in command.events if event.stream in mine]),
                locks=tuple([each for each in command.locks if each.table in mine]),
                changes=tuple([each for each in command.changes if each.table in mine]),
                turn_to=None,
                places=others if is_home else (),
                secret=secret,
            )

        beside = tuple([self._first_copy(number, part(number), deadline) for number in others])
        command = part(home)
        copy = self._first_copy(home, command, deadline, also)._replace(beside=beside)
        self._send(copy)
        return command, copy

    def prepare_events(self, command: r.PrepareEvents, deadline: float) -> r.Outcome | r.Revalidate:
        """Prepare a whole transaction: send it until it is PREPARED, or another one of its name is COMMITTED.

        Returns `Revalidate`, as `locked_shot`.
        """
        return self._until_known(command.txn_id, command, None, deadline)

    def _until_known(
        self,
        txn_id: bytes,
        command: Any,
        token: bytes | None,
        deadline: float,
        posted: Copy | None = None,
        *,
        decided: bool = False,
    ) -> r.Outcome | r.Revalidate:
        """Send a commit until its outcome is known, or its locks have to be validated again.

        ``decided``: the decision is enough. If it stays unanswered, RESOLVE asks for the outcome.
        """
        self._bus.ready(deadline)  # a right that is missing here is a refusal: nothing was sent yet
        unanswered: list[bytes] = []
        try:
            return self._try_until_known(
                txn_id, command, token, deadline, unanswered, posted, decided=decided
            )
        except AnabranchError as error:
            _check_all_copies(error, unanswered, txn_id, token)
            raise

    def _try_until_known(
        self,
        txn_id: bytes,
        command: Any,
        token: bytes | None,
        deadline: float,
        unanswered: list[bytes],
        posted: Copy | None,
        *,
        decided: bool,
    ) -> r.Outcome | r.Revalidate:
        partition = control_partition_of(txn_id)
        by_id = token == txn_id
        # RESOLVE does not carry the secret, so from a foreign lane it would return `UnknownTransaction`.
        by_secret = by_id and getattr(command, "secret", None) is not None
        scope = command.scope if token is None else "" if by_id else peek(token).scope
        resolve = r.Resolve(txn_id, scope, None if by_id else token)
        ends: set[str] | frozenset[str] = FINISHED
        if getattr(command, "prepare", None) is not None:
            ends = ends | {"PREPARED"}
        also: RecordHeaders = ()
        if decided:
            also, ends = [(DECIDED_HEADER, b"")], ends | {"FINALIZE_IN_PROGRESS"}
        pauses: Backoff | None = None
        while True:
            asked_at = self.now()
            ask_s = (deadline - asked_at) * (1 - RESOLVE_SHARE)
            if token is not None:
                margin_s = min(max(ask_s / 4, min(LEAST_MARGIN_S, ask_s / 2)), MOST_MARGIN_S)
                wait_ms = max(0, min(int((ask_s - margin_s) * 1000), MAX_WAIT_MS))
                command = replace(command, wait_ms=wait_ms)
            try:
                until = asked_at + ask_s
                outcome = self.try_ask(partition, command, until, unanswered, posted, also=also)
                posted = None
            except AnabranchError as error:
                early = self.now() - asked_at < min(FIRST_REPEAT_S, ask_s)
                if isinstance(error, _FINAL) or early or by_secret:
                    raise
                # Another copy of the refused commit may still be carried out.
                outcome = self.try_ask(partition, resolve, deadline)
                if outcome is not None and outcome.state in (("OPEN",) if token else _UNDONE):
                    unanswered.clear()
                    raise
            if outcome is None and not by_secret:
                # RESOLVE aborts a one-shot that never arrived. An open transaction stays open, and is sent again.
                outcome = self.try_ask(partition, resolve, deadline)
            if getattr(outcome, "state", "") in _UNDONE:
                unanswered.clear()
            if command.name is not None and getattr(outcome, "state", "") == "ABORTED":
                # Another transaction of the name may be committed: only the answer to the command has its outcome.
                outcome = self.try_ask(partition, command, deadline) or outcome
            if isinstance(outcome, r.Revalidate):
                return outcome
            if outcome is not None and not isinstance(outcome, r.Outcome):
                raise MalformedRecord(
                    f"the controller answered {type(outcome).__name__} to a commit"
                )
            if outcome is not None and outcome.state in ends:
                return committed(outcome) if outcome.state in FINISHED else outcome
            pauses = pauses or self._pauses()
            if outcome is None or not pauses.sleep(deadline):
                raise unknown("was not known in time", txn_id, token)

    def abort(
        self, token: bytes, reason: str, deadline: float, secret: bytes | None = None
    ) -> r.Outcome:
        """Abort a transaction. Raises `AlreadyCommitted`, and `OutcomeUnknown` if a commit is under way."""
        with _about(token):
            return self.ask(_partition(token), r.Abort(token, reason, secret), r.Outcome, deadline)

    def force(
        self,
        token: bytes,
        reason: str,
        deadline: float,
        outcome: bool | None = None,
        at: int | None = None,
    ) -> r.Outcome:
        """As `Client.force`. Raises `IllegalState` for a transaction that can end without force."""
        partition = _partition(token) if at is None else at
        return self.ask(partition, r.Force(token, reason, outcome), r.Outcome, deadline)

    def state(self, txn_id: bytes, token: bytes | None, deadline: float) -> r.Outcome:
        """The state of a transaction; changes nothing. Raises `UnknownTransaction`, `Expired`."""
        return self.whole(self.part_of_state(txn_id, token, deadline), token, deadline)

    def part_of_state(self, txn_id: bytes, token: bytes | None, deadline: float) -> r.Outcome:
        """As `state`, with some of its writers at most."""
        command = r.GetState(txn_id, token)
        return self.ask(control_partition_of(txn_id), command, r.Outcome, deadline)

    def states(
        self, asked: Sequence[tuple[bytes, bytes | None]], deadline: float
    ) -> list[r.Outcome]:
        """The states of a few transactions, given as (id, token or None), with some of their writers at most.

        All questions are sent before the first answer is awaited. Those that no leader answers soon are left out,
        so that a control partition without a leader delays no others. Raises: as `state`.
        """
        some = [r.GetState(*each) for each in asked]
        copies = [
            self._first_copy(control_partition_of(each.txn_id), each, deadline) for each in some
        ]
        found: list[r.Outcome] = []
        try:
            for copy in copies:
                self._send(copy)
            until = min(deadline, self.now() + FIRST_REPEAT_S)
            for each, copy in zip(some, copies, strict=True):
                digests = (command_digest(copy.payload),)
                result = self._receive(copy.correlation_id, digests, until, each, copy.partition)
                if isinstance(result, r.Outcome):
                    found.append(result)
                elif result is not None or self._closed:
                    # Raises what was refused, unless it can be repeated.
                    found.append(self.ask(copy.partition, each, r.Outcome, deadline))
        finally:
            for copy in copies:
                self._bus.forget(copy.correlation_id)
        return found

    def finished(self, asked: dict[bytes, bytes | None], deadline: float) -> Iterator[r.Outcome]:
        """As `Client.finished`. ``asked``: id -> token or None; an id is removed when its transaction has ended."""
        pauses = Backoff(FIRST_LOOK_S, LONGEST_LOOK_S, self._clock)
        still: set[bytes] = set()
        while asked:
            left = [each for each in asked.items() if each[0] not in still]
            for i in range(0, len(left), _QUESTIONS_AT_ONCE):
                for outcome in self.states(left[i : i + _QUESTIONS_AT_ONCE], deadline):
                    if outcome.state in FINISHED:
                        asked.pop(outcome.txn_id)
                        yield outcome
            if asked and not pauses.sleep(deadline):
                raise DeadlineExceeded(
                    f"{count_of(len(asked), 'transaction')} did not end in time, or no leader answers: call again"
                )
            still = self._still_open(asked, deadline)

    def _still_open(self, asked: Collection[bytes], deadline: float) -> set[bytes]:
        """Those of many transactions that a list shows as open: a question for each would keep leaders busy.

        The list shows those that the lane may see, the oldest first. All others are asked for one by one.
        """
        if len(asked) <= _FEW_LEFT:
            return set()
        until = min(deadline, self.now() + FIRST_REPEAT_S)
        wanted = r.ListTransactions(None, False, min(2 * len(asked), _MOST_LISTED), None)
        try:
            return {outcome.txn_id for outcome in self.transactions(wanted, until)}
        except RetryError:
            return set()

    def whole(self, outcome: r.Outcome, token: bytes | None, deadline: float) -> r.Outcome:
        """The outcome with all writers of its transaction; one answer has only a part of them."""
        writers, part = [*outcome.writers], outcome
        while len(part.writers) >= limits.WRITERS_LISTED.value:
            command = r.GetState(outcome.txn_id, token, part.writers[-1].writer)
            part = self.ask(control_partition_of(outcome.txn_id), command, r.Outcome, deadline)
            writers += part.writers
        return outcome._replace(writers=tuple(writers))

    def resolve(self, txn_id: bytes, scope: str, token: bytes | None, deadline: float) -> r.Outcome:
        """The state of a transaction, which is aborted first if no controller knows it. Raises `Expired`."""
        command = r.Resolve(txn_id, scope, token)
        return self.ask(control_partition_of(txn_id), command, r.Outcome, deadline)

    def transactions(self, wanted: r.ListTransactions, deadline: float) -> Listed[r.Outcome]:
        """Open transactions, oldest first, or all, newest first. Raises `UnknownScope`, `InvalidArgument`."""
        found = self.in_pages(
            wanted,
            r.TransactionList,
            lambda part: part.transactions,
            deadline,
            by="before",
            txn_of=lambda outcome: outcome.txn_id,
        )
        found.sort(key=lambda outcome: made_ms_of(outcome.txn_id), reverse=wanted.include_finished)
        del found[wanted.limit :]
        return found

    def label(self, token: bytes, writer: int, label: str, stream: str, deadline: float) -> None:
        """Give a writer a name for people. Call it after the writer's first touch, which was of this stream."""
        there = self._partition_of(token, stream, deadline)
        self.ask(there, r.LabelWriter(token, writer, label), r.Registered, deadline)

    def ask_each(self, command: Any, expected: type[T], deadline: float) -> list[tuple[int, T]]:
        """Send a command to all control partitions; returns the number and the answer of each.

        They are counted afresh: a change of an operator that omits new ones would be lost there.
        """
        self._bus.ready(deadline)
        return [
            (number, self.ask(number, command, expected, deadline))
            for number in range(self._bus.control_partitions(deadline, afresh=True))
        ]

    # -- heartbeats -----------------------------------------------------------------------------------

    def beat(
        self, correlation_id: bytes, tokens: Sequence[bytes], deadline: float
    ) -> Collection[bytes]:
        """Send heartbeats for these transactions. Returns the digests that `receive_beat` needs."""
        self._bus.ready(deadline)
        digests = []
        by_partition: dict[int, list[bytes]] = {}
        for token in tokens:
            by_partition.setdefault(_partition(token), []).append(token)
        for partition, some in sorted(by_partition.items()):
            for i in range(0, len(some), _TOKENS_A_BEAT):
                payload = encode(r.Heartbeat(tuple(some[i : i + _TOKENS_A_BEAT])))
                digests.append(command_digest(payload))
                self._bus.send(partition, correlation_id, payload, self.seen)
        return digests

    def receive_beat(
        self, correlation_id: bytes, digests: Collection[bytes], deadline: float
    ) -> Sequence[r.Outcome]:
        """Wait for an answer to heartbeats. Returns the transactions that are over; empty at the deadline."""
        result = self._receive(correlation_id, digests, deadline)
        return result.not_open if isinstance(result, r.Ended) else ()

    def forget(self, correlation_id: bytes) -> None:
        """Drop later answers with this id, and wake the call that waits for one."""
        self._bus.forget(correlation_id)


def _apart(one: str, here: int, other: str, there: int) -> CrossScope:
    return CrossScope(
        f"scope {one!r} is on control partition {here} and {other!r} on {there}: below feature level 4, a "
        "transaction is of one control partition. Raise it (`anabranch cluster feature --raise 4`), or make new "
        "scopes with `near`"
    )


def _outcome(answer: r.Outcome | r.Revalidate) -> r.Outcome:
    if isinstance(answer, r.Revalidate):
        raise no_replica()
    return answer


def _streams_of(command: r.OneShot) -> set[str]:
    """The streams to which a one-shot writes, and the tables that it locks or changes."""
    found = {event.stream for event in command.events}
    found |= {each.table for each in command.locks}
    return found | {each.table for each in command.changes}


def no_replica() -> NotReady:
    """The error for a commit without a replica to revalidate its locks."""
    return NotReady(
        "locks of the transaction on tables have to be validated again: commit it where a replica is"
    )


def unknown(why: str, txn_id: bytes, token: bytes | None) -> OutcomeUnknown:
    """The error for a commit that may or may not be carried out."""
    return OutcomeUnknown(
        f"the outcome of transaction {txn_text(txn_id)} {why}; "
        "client.state shows it later, client.resolve makes it final",
        txn_id=txn_id,
        token=token,
    )


def _check_all_copies(
    error: AnabranchError, unanswered: Collection[bytes], txn_id: bytes, token: bytes | None
) -> None:
    """Turn a refusal about a commit into `OutcomeUnknown` if an earlier copy may still be carried out."""
    if unanswered and not isinstance(error, (*_FINAL, OutcomeUnknown)):
        raise unknown(f"is not known: {error}", txn_id, token) from error


@contextmanager
def _about(token: bytes) -> Iterator[None]:
    """Add the transaction to `OutcomeUnknown`, the refusal while a commit is under way."""
    try:
        yield
    except OutcomeUnknown as error:
        error.txn_id, error.token = id_named(token), token
        raise


def _partition(token: bytes) -> int:
    return control_partition_of(id_named(token))


def _truly(message: str, unanswered: Collection[bytes]) -> str:
    """The text of a refusal; it mentions earlier copies that were not answered, if there are any."""
    more = f"{_NOTHING} by this copy, but one sent before may be carried out"
    return message.replace(_NOTHING, more) if unanswered else message


def _belongs(result: Any, command: Any | None) -> bool:
    """Whether an outcome answers the command: it is of the command's transaction, or of another of its name."""
    if command is None or not isinstance(result, r.Outcome):
        return True
    if result.txn_id == (command.txn_id if hasattr(command, "txn_id") else id_named(command.token)):
        return True
    if isinstance(command, r.Begin):  # another may have committed under the name
        return result.scope == command.scope
    if not isinstance(command, r.Commit | r.OneShot | r.PrepareEvents) or command.name is None:
        return False
    if not isinstance(command, r.Commit):
        return result.scope == command.scope and result.name == command.name
    if len(command.token) != TXN_ID_SIZE and result.scope != peek(command.token).scope:
        return False  # a bare id names no scope
    return command.number is not None or result.name == command.name
