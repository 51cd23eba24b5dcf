"""A command and its answer: sent again under the same ids until it is answered.

Every command is safe to repeat, because the client makes its ids before anything is sent.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import Any, NamedTuple, TypeVar

from anabranch.backoff import Backoff
from anabranch.client.ports import ClientPorts
from anabranch.core import hybrid_time
from anabranch.core.decisions.times import SETS
from anabranch.core.defaults import FIRST_REPEAT_S, FIRST_RETRY_S, LONGEST_REPEAT_S, LONGEST_RETRY_S
from anabranch.core.ids import (
    CORRELATION_ID_SIZE,
    TIME_HEADER,
    TXN_ID_SIZE,
    WAIT_HEADER,
    command_digest,
)
from anabranch.core.legal_names import OPEN_LANE
from anabranch.core.tokens import id_named, peek
from anabranch.errors import (
    AnabranchError,
    DeadlineExceeded,
    EventTooLarge,
    IllegalState,
    InvalidArgument,
    MalformedRecord,
    NotAuthorized,
    NotReady,
    error_of,
)
from anabranch.ports import RecordHeaders
from anabranch.schemas import records as r
from anabranch.schemas.codec import decode_as, encode

_NOTHING = "nothing was changed"  # as refusals say

T = TypeVar("T")


class _Copy(NamedTuple):
    """One command, of which every copy has the same bytes and headers.

    So no copy claims to know of later changes than the first copy did, and a late copy that would undo a change
    made after another copy is refused.
    """

    partition: int
    correlation_id: bytes
    payload: bytes
    headers: RecordHeaders


class Exchange:
    """Sends commands and hears their answers."""

    def __init__(self, ports: ClientPorts) -> None:
        self._bus = ports.bus
        self._clock = ports.clock
        self._new_id = ports.entropy
        self._lane = ports.lane
        self._answered = False
        self._held: RecordHeaders = [(WAIT_HEADER, b"")] if ports.commit_wait else []
        self._max_clock_skew = ports.max_clock_skew
        self._raising = threading.Lock()
        self.highest_timestamp = 0
        self._told: dict[int, int] = {}  # the highest time that each control partition reported
        self._closed = False

    def close(self) -> None:
        """Close the bus; calls that wait end without an answer."""
        self._closed = True
        self._bus.close()

    def now(self) -> float:
        """Monotonic seconds."""
        return self._clock.monotonic()

    def observe(self, timestamp: int) -> bool:
        """Take in a timestamp that others have told: what is sent from now on carries it.

        False, and nothing changed, if it is too far ahead of this machine's clock.
        """
        latest_s = self._clock.wall() + self._max_clock_skew
        near = timestamp <= self.highest_timestamp or hybrid_time.to_us(timestamp) <= latest_s * 1e6
        if near:
            self._raise(timestamp)
        return near

    def _raise(self, timestamp: int) -> None:
        with self._raising:  # else a thread might put back a lower one
            self.highest_timestamp = max(self.highest_timestamp, timestamp)

    @property
    def seen(self) -> RecordHeaders:
        """The headers of a command that say what this client has seen."""
        seen = hybrid_time.to_bytes(self.highest_timestamp)
        return [(TIME_HEADER, seen), *self._held]

    def _new_copy(self, partition: int, command: Any, payload: bytes) -> _Copy:
        headers: RecordHeaders
        if type(command) in SETS:  # compared with that control partition's times
            headers = [(TIME_HEADER, hybrid_time.to_bytes(self._told.get(partition, 0)))]
        else:
            headers = self.seen
        return _Copy(partition, self._new_id(CORRELATION_ID_SIZE), payload, headers)

    def new_correlation_id(self) -> bytes:
        """16 random bytes for one command: no other client can guess them to answer under."""
        return self._new_id(CORRELATION_ID_SIZE)

    def ask(self, partition: int, command: Any, expected: type[T], deadline: float) -> T:
        """Send a command until it is answered. Raises a refusal as its error.

        No answer in time: `DeadlineExceeded`, or `NotReady` if no controller ever answered this client.
        """
        result = self.try_ask(partition, command, deadline)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, expected):
            raise MalformedRecord(
                f"the controller answered {type(result).__name__} to {type(command).__name__}"
            )
        return result

    def try_ask(
        self, partition: int, command: Any, deadline: float, unheard: list[bytes] | None = None
    ) -> Any | None:
        """`ask` for any kind of answer; None if none came in time. `NotReady`: only refusals of that name came.

        ``unheard`` gets the ids of copies that were sent and not answered: they may be carried out.
        """
        unheard = [] if unheard is None else unheard
        self._bus.ready(deadline)
        if partition >= self._bus.control_partitions(deadline, partition + 1):
            raise InvalidArgument(
                f"there is no control partition {partition} here: the id or token is of another cluster, or prefix"
            )
        try:
            payload = encode(command)
        except MalformedRecord as error:  # of a value that no earlier check caught
            raise InvalidArgument(str(error)) from error
        if len(payload) > self._bus.max_command_bytes():
            raise EventTooLarge(
                f"{type(command).__name__} has {len(payload)} bytes; the commands topic takes "
                f"{self._bus.max_command_bytes()}"
            )
        pauses = Backoff(FIRST_RETRY_S, LONGEST_RETRY_S, self._clock)
        refused: r.Refusal | None = None
        copy = self._new_copy(partition, command, payload)
        try:
            while True:
                result = self._send_until_answered(copy, command, deadline, unheard)
                result = result or refused
                if not isinstance(result, r.Refusal):
                    return result
                # Not kept in a name: the traceback would hold this frame, and so the error itself.
                over = result.code != NotReady.__name__ or self._closed
                if over or not pauses.sleep(deadline):
                    raise error_of(result.code, _truly(result.message, unheard))
                refused = result  # the reason, if no answer comes in time
                # A copy without an answer may have set something; a new command could undo a change made after it.
                if not (type(command) in SETS and copy.correlation_id in unheard):
                    self._bus.forget(copy.correlation_id)
                    copy = self._new_copy(partition, command, payload)
        finally:
            self._bus.forget(copy.correlation_id)

    def _send_until_answered(
        self, copy: _Copy, command: Any, deadline: float, unheard: list[bytes]
    ) -> Any | None:
        digests = (command_digest(copy.payload),)
        pauses, is_first = Backoff(FIRST_REPEAT_S, LONGEST_REPEAT_S, self._clock), not unheard
        waits = copy.correlation_id in unheard  # first wait for the answers to earlier copies
        try:
            while True:
                if not waits:
                    unheard.append(copy.correlation_id)
                    self._bus.send(copy.partition, copy.correlation_id, copy.payload, copy.headers)
                waits = False
                until = min(deadline, self.now() + pauses.next_s)
                result = self._hear(copy.correlation_id, digests, until, command, copy.partition)
                if result is not None:
                    unheard.pop()
                    return result
                if self._closed or self.now() >= deadline:
                    return None
                pauses.begin()
        except NotAuthorized as error:
            if is_first and pauses.count == 0:
                raise
            raise NotAuthorized(f"{error}; what was sent before may be carried out") from error

    def _hear(
        self,
        correlation_id: bytes,
        digests: Collection[bytes],
        deadline: float,
        command: Any | None = None,
        partition: int = -1,
    ) -> Any | None:
        """The next answer to a command of these digests (and to this one, if given); None at the deadline.

        Other answers under this id are mistakes or forgeries: they are passed over.
        """
        while (data := self._bus.wait(correlation_id, deadline)) is not None:
            reply = decode_as(r.Reply, data)
            if reply.command in digests and _belongs(reply.result, command):
                self._answered = True
                if reply.hybrid_time > self._told.get(partition, 0):
                    self._told[partition] = reply.hybrid_time
                if not isinstance(reply.result, r.ScopeInfo):  # the directory tells of no commit
                    self._raise(reply.hybrid_time)
                return reply.result
            if self.now() >= deadline:
                break
        return None

    def no_answer(self, command: Any) -> AnabranchError:
        """The error for an unanswered command that nothing depends on."""
        if self._closed:
            return IllegalState("the client was closed meanwhile")
        trouble = self._bus.trouble()
        said = f" (last trouble: {trouble})" if trouble else ""
        name = type(command).__name__
        if not self._answered:
            told = f"no controller answered {name}: start `anabranch controller`"
            if self._lane != OPEN_LANE:
                told += f"; or lane {self._lane!r} is not read: `anabranch lane list` says why"
            return NotReady(f"{told}{said}")
        return DeadlineExceeded(f"{name} was not answered in time; call again{said}")


def _truly(message: str, unheard: Collection[bytes]) -> str:
    """A refusal's text: it is of one copy of the command, and of others that were sent no answer came."""
    more = f"{_NOTHING} by this copy, but one sent before may be carried out"
    return message.replace(_NOTHING, more) if unheard else message


def _belongs(result: Any, command: Any | None) -> bool:
    """Whether an outcome is of the command's transaction, or of one that it may give way to."""
    if command is None or not isinstance(result, r.Outcome):
        return True
    if result.txn_id == (command.txn_id if hasattr(command, "txn_id") else id_named(command.token)):
        return True
    if isinstance(command, r.Begin):  # its commit may have claimed a name, and given way to this
        return result.scope == command.scope
    if not isinstance(command, r.Commit | r.OneShot | r.PrepareEvents) or command.name is None:
        return False
    if not isinstance(command, r.Commit):
        return result.scope == command.scope and result.name == command.name
    if len(command.token) != TXN_ID_SIZE and result.scope != peek(command.token).scope:
        return False  # a bare id names no scope
    return command.number is not None or result.name == command.name
