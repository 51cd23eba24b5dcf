"""The client's side of the protocol, as plain synchronous code over small ports.

Every command is safe to repeat, because its ids are made here, before anything is sent. So each is sent again
under the same ids until it is answered; and where the outcome of a commit stays in doubt, RESOLVE settles it
by id. Nothing here sleeps, starts a thread, reads a clock or makes a random number but through the ports.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from anabranch.client.ports import ClientPorts
from anabranch.core.ids import (
    check_scope,
    control_partition_of,
    made_ms_of,
    make_txn_id,
    split_stream,
    txn_text,
)
from anabranch.core.states import FINISHED
from anabranch.core.tokens import peek
from anabranch.errors import (
    AnabranchError,
    DeadlineExceeded,
    EventTooLarge,
    MalformedRecord,
    NotReady,
    OutcomeUnknown,
    TransactionAborted,
    UnknownScope,
    error_of,
)
from anabranch.schemas import records as r
from anabranch.schemas.codec import decode_as, encode

DIRECTORY = 0  # the control partition that knows where each scope is served
FIRST_REPEAT_S = 2.0
LONGEST_REPEAT_S = 10.0
RESOLVE_SHARE = 1 / 3  # of a commit's time, kept to ask for its outcome
_FIRST_RETRY_S = 0.02
_LONGEST_RETRY_S = 1.0
_MAX_WAIT_MS = 600_000
_MARGIN_S = 0.3  # a controller's refusal at its deadline arrives before ours

T = TypeVar("T")


class Session:
    """Commands and their answers. Thread-safe: calls share nothing but caches."""

    def __init__(self, ports: ClientPorts) -> None:
        self._bus = ports.bus
        self._clock = ports.clock
        self._entropy = ports.entropy
        self._prefix = ports.entropy(8)
        self._counter = itertools.count(1)
        self._scopes: dict[str, int] = {}
        self._answered = False
        self.highest_timestamp = 0

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def new_correlation_id(self) -> bytes:
        """8 bytes of this client and a counter."""
        return self._prefix + next(self._counter).to_bytes(8, "big")

    def random64(self) -> int:
        """64 random bits, as a signed number."""
        return int.from_bytes(self._entropy(8), "big", signed=True)

    # -- asking ---------------------------------------------------------------------------------------

    def ask(self, partition: int, command: Any, expected: type[T], deadline: float) -> T:
        """Send a command until it is answered. A refusal is raised as its error.

        `DeadlineExceeded`, or `NotReady` if no controller ever answered this client: no answer came in time.
        """
        result = self.try_ask(partition, command, deadline)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, expected):
            raise MalformedRecord(
                f"the controller answered {type(result).__name__} to {type(command).__name__}"
            )
        return result

    def try_ask(self, partition: int, command: Any, deadline: float) -> Any | None:
        """`ask`, any kind of answer; None if none came in time."""
        self._bus.ready(deadline)
        payload = encode(command)
        if len(payload) > self._bus.max_command_bytes():
            raise EventTooLarge(
                f"{type(command).__name__} has {len(payload)} bytes; the commands topic takes "
                f"{self._bus.max_command_bytes()}"
            )
        pause = _FIRST_RETRY_S
        while True:
            result = self._send_until_answered(partition, payload, deadline)
            if not isinstance(result, r.Refusal):
                return result
            # Not kept in a name: the traceback would hold this frame, and so the error itself.
            if result.code != NotReady.__name__ or self.now() + pause >= deadline:
                raise error_of(result.code, result.message)
            self._clock.sleep(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)

    def _send_until_answered(self, partition: int, payload: bytes, deadline: float) -> Any | None:
        correlation_id = self.new_correlation_id()
        pause = FIRST_REPEAT_S
        try:
            while True:
                self._bus.send(partition, correlation_id, payload)
                data = self._bus.wait(correlation_id, min(deadline, self.now() + pause))
                if data is not None:
                    return self._open_reply(data)
                if self.now() >= deadline:
                    return None
                pause = min(pause * 2, LONGEST_REPEAT_S)
        finally:
            self._bus.forget(correlation_id)

    def _open_reply(self, data: bytes) -> Any:
        reply = decode_as(r.Reply, data)
        self._answered = True
        self.highest_timestamp = max(self.highest_timestamp, reply.hybrid_time)
        return reply.result

    def no_answer(self, command: Any) -> AnabranchError:
        """The error for a command that nothing depends on."""
        trouble = self._bus.trouble()
        said = f" (last trouble: {trouble})" if trouble else ""
        name = type(command).__name__
        if not self._answered:
            return NotReady(f"no controller answered {name}: start `anabranch controller`{said}")
        return DeadlineExceeded(f"{name} was not answered in time; call again{said}")

    # -- scopes and streams ---------------------------------------------------------------------------

    def find_scope(self, scope: str, deadline: float, *, create: bool = False) -> int:
        """The control partition of a scope; it never changes. `UnknownScope`."""
        known = self._scopes.get(scope)
        if known is None:
            info = self.ask(DIRECTORY, r.FindScope(scope, create), r.ScopeInfo, deadline)
            known = self._scopes[scope] = info.control_partition
        return known

    def create_stream(
        self, stream: str, segments: int, settings: Mapping[str, str], deadline: float
    ) -> r.StreamInfo:
        """Create a stream, and its scope if need be. `StreamExists` if it exists with other settings."""
        scope, _ = split_stream(stream)
        command = r.CreateStream(stream, segments, dict(settings))
        partition = self.find_scope(scope, deadline, create=True)
        try:
            return self.ask(partition, command, r.StreamList, deadline).streams[0]
        except UnknownScope:
            # Retention took what the directory told that partition, unread: let it tell it again.
            self._scopes.pop(scope, None)
        partition = self.find_scope(scope, deadline, create=True)
        return self.ask(partition, command, r.StreamList, deadline).streams[0]

    def forget_stream(self, stream: str, deadline: float) -> None:
        """Take a LOST stream away; the answer comes when its topics are gone, too."""
        partition = self.find_scope(split_stream(stream)[0], deadline)
        self.ask(partition, r.ForgetStream(stream), r.StreamList, deadline)

    def scale(
        self,
        stream: str,
        segments: int,
        seal: Sequence[int],
        ranges: Sequence[tuple[int, int]],
        deadline: float,
    ) -> r.StreamInfo:
        """Scale a stream; the answer comes when the new epoch is in the history."""
        partition = self.find_scope(split_stream(stream)[0], deadline)
        opened = tuple(r.KeyRange(low, high) for low, high in ranges)
        command = r.Scale(stream, segments, tuple(seal), opened)
        return self.ask(partition, command, r.StreamList, deadline).streams[0]

    def describe(self, stream: str, deadline: float) -> r.StreamInfo:
        """One stream. `UnknownScope`, `UnknownStream`."""
        partition = self.find_scope(split_stream(stream)[0], deadline)
        command = r.DescribeStreams(None, stream)
        return self.ask(partition, command, r.StreamList, deadline).streams[0]

    def streams(self, scope: str | None, deadline: float) -> list[r.StreamInfo]:
        """All streams of a scope, or of the cluster, by name. `UnknownScope`."""
        found: list[r.StreamInfo] = []
        for partition in self._partitions(scope, deadline):
            command = r.DescribeStreams(scope, None)
            found += self.ask(partition, command, r.StreamList, deadline).streams
        return sorted(found, key=lambda info: info.stream)

    def _partitions(self, scope: str | None, deadline: float) -> Sequence[int]:
        if scope is not None:
            return [self.find_scope(check_scope(scope), deadline)]
        self._bus.ready(deadline)
        return range(self._bus.control_partitions())

    def safe_time(self, scope: str, at: int | None, deadline: float) -> int:
        """A timestamp (None: now) that all later commits of the scope exceed. `NotReady`: still to come."""
        partition = self.find_scope(scope, deadline)
        return self.ask(partition, r.SafeTime(scope, at), r.SafeTimeIs, deadline).timestamp

    # -- transactions ---------------------------------------------------------------------------------

    def new_txn_id(self, scope: str, deadline: float) -> bytes:
        """A transaction id for a scope."""
        partition = self.find_scope(scope, deadline)
        now_ms = int(self._clock.wall() * 1000)
        return make_txn_id(partition, now_ms, int.from_bytes(self._entropy(8), "big"))

    def begin(
        self, txn_id: bytes, scope: str, name: str | None, keepalive_ms: int, deadline: float
    ) -> r.Begun | r.Outcome:
        """Begin; an `Outcome` means that the name is committed already (or the transaction over)."""
        command = r.Begin(txn_id, scope, name, keepalive_ms)
        result = self.try_ask(control_partition_of(txn_id), command, deadline)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, r.Begun | r.Outcome):
            raise MalformedRecord(f"the controller answered {type(result).__name__} to Begin")
        return result

    def touch(self, token: bytes, stream: str, deadline: float) -> r.Touched:
        """Register a stream; says where to write."""
        with _about(token):
            return self.ask(_partition(token), r.Touch(token, stream), r.Touched, deadline)

    def register(self, token: bytes, receipt: r.Receipt, deadline: float) -> r.Registered:
        """Register a writer's receipt."""
        with _about(token):
            return self.ask(_partition(token), r.Register(token, receipt), r.Registered, deadline)

    def commit(
        self,
        token: bytes,
        own: Sequence[r.Receipt],
        receipts: Sequence[r.Receipt] | None,
        name: str | None,
        deadline: float,
        number: int | None = None,
    ) -> r.Outcome:
        """Commit, and know it: COMMITTED. `OutcomeUnknown` at the deadline; refusals leave it open.

        ``number``: of the series ``name``; `AlreadyCommitted` where the series is beyond it.
        """
        wait_s = min(
            deadline - self.now() - _MARGIN_S, (deadline - self.now()) * (1 - RESOLVE_SHARE)
        )
        command = r.Commit(
            token=token,
            own=tuple(own),
            receipts=None if receipts is None else tuple(receipts),
            name=name,
            wait_ms=max(0, min(int(wait_s * 1000), _MAX_WAIT_MS)),
            number=number,
        )
        return self._settle(peek(token).txn_id, command, token, deadline)

    def one_shot(
        self,
        txn_id: bytes,
        scope: str,
        name: str | None,
        events: Sequence[r.Event],
        deadline: float,
    ) -> r.Outcome:
        """A whole transaction in one command, and know it: COMMITTED. `OutcomeUnknown` at the deadline."""
        command = r.OneShot(txn_id, scope, name, tuple(events))
        return self._settle(txn_id, command, None, deadline)

    def _settle(
        self, txn_id: bytes, command: Any, token: bytes | None, deadline: float
    ) -> r.Outcome:
        """Send a commit until its outcome is known; RESOLVE it when it stays unanswered."""
        partition = control_partition_of(txn_id)
        pause = _FIRST_RETRY_S
        while True:
            ask_until = deadline - (deadline - self.now()) * RESOLVE_SHARE
            outcome = self.try_ask(partition, command, ask_until)
            if outcome is None:
                # Where the commit never arrived, a one-shot is aborted by this and an open transaction
                # stays open: then the commit is sent again.
                outcome = self.try_ask(partition, r.Resolve(txn_id), deadline)
            if (
                isinstance(outcome, r.Outcome)
                and outcome.state == "ABORTED"
                and command.name is not None
            ):
                # Perhaps it gave way to an earlier commit: only the command itself is told which.
                outcome = self.try_ask(partition, command, deadline) or outcome
            if outcome is not None and not isinstance(outcome, r.Outcome):
                raise MalformedRecord(
                    f"the controller answered {type(outcome).__name__} to a commit"
                )
            if outcome is not None and outcome.state in FINISHED:
                return committed(outcome)
            if outcome is None or self.now() + pause >= deadline:
                raise OutcomeUnknown(
                    f"the outcome of transaction {txn_text(txn_id)} was not known in time; "
                    "client.state tells it later, client.resolve makes it final",
                    txn_id=txn_id,
                    token=token,
                )
            self._clock.sleep(pause)
            pause = min(pause * 2, _LONGEST_RETRY_S)

    def abort(self, token: bytes, reason: str, deadline: float) -> r.Outcome:
        """Abort. `AlreadyCommitted`; `OutcomeUnknown`: a commit is under way."""
        with _about(token):
            return self.ask(_partition(token), r.Abort(token, reason), r.Outcome, deadline)

    def settle(self, token: bytes, reason: str, deadline: float) -> r.Outcome:
        """Abort a transaction whose merge can't go on, as a stream of it is LOST. `IllegalState` otherwise."""
        return self.ask(_partition(token), r.Settle(token, reason), r.Outcome, deadline)

    def state(self, txn_id: bytes, deadline: float) -> r.Outcome:
        """The state of a transaction; changes nothing. `UnknownTransaction`, `Expired`."""
        return self.ask(control_partition_of(txn_id), r.GetState(txn_id), r.Outcome, deadline)

    def resolve(self, txn_id: bytes, deadline: float) -> r.Outcome:
        """The state; where nothing is known of the transaction, it is aborted first. `Expired`."""
        return self.ask(control_partition_of(txn_id), r.Resolve(txn_id), r.Outcome, deadline)

    def transactions(
        self, scope: str | None, finished: bool, limit: int, deadline: float
    ) -> list[r.Outcome]:
        """The open ones, the oldest first, or all, the newest first. `UnknownScope`, `InvalidArgument`."""
        found: list[r.Outcome] = []
        for partition in self._partitions(scope, deadline):
            found += self._transactions_of(partition, scope, finished, limit, deadline)
        found.sort(key=lambda outcome: made_ms_of(outcome.txn_id), reverse=finished)
        return found[:limit]

    def _transactions_of(
        self, partition: int, scope: str | None, finished: bool, limit: int, deadline: float
    ) -> list[r.Outcome]:
        """Those of a control partition. A controller looks at some of the finished ones at a time."""
        found: list[r.Outcome] = []
        before = None
        while True:
            command = r.ListTransactions(scope, finished, limit - len(found), before)
            part = self.ask(partition, command, r.TransactionList, deadline)
            found += part.transactions
            before = part.more
            if before is None or len(found) >= limit:
                return found

    # -- heartbeats -----------------------------------------------------------------------------------

    def beat(self, correlation_id: bytes, tokens: Sequence[bytes], deadline: float) -> None:
        """Say that these transactions live. Answers, if any, come under the correlation id."""
        self._bus.ready(deadline)
        by_partition: dict[int, list[bytes]] = {}
        for token in tokens:
            by_partition.setdefault(_partition(token), []).append(token)
        for partition, some in sorted(by_partition.items()):
            for i in range(0, len(some), _TOKENS_A_BEAT):
                payload = encode(r.Heartbeat(tuple(some[i : i + _TOKENS_A_BEAT])))
                self._bus.send(partition, correlation_id, payload)

    def hear_beat(self, correlation_id: bytes, deadline: float) -> Sequence[r.Outcome]:
        """The transactions that a heartbeat's answer says are over; empty at the deadline."""
        data = self._bus.wait(correlation_id, deadline)
        result = self._open_reply(data) if data is not None else None
        return result.not_open if isinstance(result, r.Alive) else ()

    def forget(self, correlation_id: bytes) -> None:
        """Wait no more for answers under this id; wakes who does."""
        self._bus.forget(correlation_id)


_TOKENS_A_BEAT = 1000


def committed(outcome: r.Outcome) -> r.Outcome:
    """The outcome if it is COMMITTED, else `TransactionAborted`."""
    if outcome.state != "COMMITTED":
        why = f" ({outcome.reason})" if outcome.reason else ""
        raise TransactionAborted(
            f"transaction {txn_text(outcome.txn_id)} is aborted{why}: begin a new one"
        )
    return outcome


@contextmanager
def _about(token: bytes) -> Iterator[None]:
    """A refusal because a commit is under way says of which transaction."""
    try:
        yield
    except OutcomeUnknown as error:
        error.txn_id, error.token = peek(token).txn_id, token
        raise


def _partition(token: bytes) -> int:
    return control_partition_of(peek(token).txn_id)
