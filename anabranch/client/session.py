"""The client's side of the protocol: a call for each command, as plain synchronous code over small ports.

If a commit's outcome stays in doubt, RESOLVE decides it by id. Nothing here sleeps, starts a thread, reads a clock
or makes a random number except through the ports.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from anabranch.client.exchange import FIRST_REPEAT_S, FIRST_RETRY_S, LONGEST_RETRY_S, T
from anabranch.client.ports import ClientPorts
from anabranch.client.stream_calls import StreamCalls
from anabranch.core import limits
from anabranch.core.ids import (
    SECRET_SIZE,
    command_digest,
    control_partition_of,
    made_ms_of,
    make_marked_id,
    make_txn_id,
    txn_text,
)
from anabranch.core.limits import MAX_WAIT_MS
from anabranch.core.tokens import Token, TokenBytes, id_named, make, peek
from anabranch.core.transaction_states import FINISHED
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    EventTooLarge,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    NotReady,
    OutcomeUnknown,
    TenureLost,
    TransactionAborted,
)
from anabranch.schemas import records as r
from anabranch.schemas.codec import encode
from anabranch.types import Listed, committed

RESOLVE_SHARE = 1 / 3  # of a commit's time, kept to ask for its outcome
# A controller's refusal at its deadline arrives so long before ours, at least and at most.
_MARGIN_S = (0.3, 2.0)
# A refusal that holds for all copies of a command; any other holds only for a command sent once.
_FINAL = (TransactionAborted, LocksBroken, AlreadyCommitted, EventTooLarge, TenureLost)


class Session(StreamCalls):
    """The commands of the protocol. Thread-safe: calls share nothing but caches."""

    def __init__(self, ports: ClientPorts) -> None:
        super().__init__(ports)
        self._entropy = ports.entropy
        self._lane = ports.lane
        self._prefix = ports.prefix

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
        """The token of this secret's transaction, with all that this client has seen by now."""
        return make(secret, replace(peek(token), seen=self.highest_timestamp))

    def cluster(self, deadline: float) -> str:
        """The brokers' name of their cluster, and the prefix."""
        self._bus.ready(deadline)
        return f"{self._bus.cluster_id(deadline)}/{self._prefix}"

    def wall(self) -> float:
        """Unix seconds."""
        return self._clock.wall()

    def random64(self) -> int:
        """64 random bits, as a signed number."""
        return int.from_bytes(self._entropy(8), "big", signed=True)

    # -- transactions ---------------------------------------------------------------------------------

    def new_txn_id(self, scope: str, deadline: float, *, marked: bool = False) -> bytes:
        """A transaction id for a scope. ``marked``: of a one-shot that moves positions, and of no other."""
        partition = self.find_scope(scope, deadline)
        now_ms = int(self._clock.wall() * 1000)
        make = make_marked_id if marked else make_txn_id
        return make(partition, now_ms, int.from_bytes(self._entropy(8), "big"))

    def begin(self, command: r.Begin, deadline: float) -> r.Begun | r.Outcome:
        """Begin; an `Outcome`: the name is committed (or the transaction over)."""
        result = self.try_ask(control_partition_of(command.txn_id), command, deadline)
        if result is None:
            raise self.no_answer(command)
        if not isinstance(result, r.Begun | r.Outcome):
            raise MalformedRecord(f"the controller answered {type(result).__name__} to Begin")
        return result

    def touch(self, token: bytes, stream: str, writer: int, deadline: float) -> r.Touched:
        """Register a stream and the writer that will write to it; returns where to."""
        command = r.Touch(token, stream, writer)
        with _about(token):
            return self.ask(_partition(token), command, r.Touched, deadline)

    def register(self, token: bytes, receipt: r.Receipt, deadline: float) -> r.Registered:
        """Register a writer's receipt."""
        with _about(token):
            return self.ask(_partition(token), r.Register(token, receipt), r.Registered, deadline)

    def commit(self, command: r.Commit, deadline: float) -> r.Outcome:
        """Commit until the outcome is COMMITTED; with ``prepare``, until it is PREPARED.

        `OutcomeUnknown` at the deadline; refusals leave it open. `AlreadyCommitted`: a series is beyond the number.
        The call says how long the controller may wait. Raises `NotReady` while registered locks have to be checked.
        """
        answer = self.try_commit(command, deadline)
        if isinstance(answer, r.LookAgain):
            raise no_replica()
        return answer

    def try_commit(self, command: r.Commit, deadline: float) -> r.Outcome | r.LookAgain:
        """Like `commit`, but may return that the registered locks have to be checked before the next copy."""
        token = command.token
        try:
            with _about(token):
                return self._until_known(id_named(token), command, token, deadline)
        except _LooksAgain as told:
            return told.answer

    def lock_reads(self, command: r.LockReads | r.ListLocks, deadline: float) -> r.ReadsLocked:
        """Register what was read of tables, or tell a set of what was registered."""
        with _about(command.token):
            return self.ask(_partition(command.token), command, r.ReadsLocked, deadline)

    def one_shot(self, command: r.OneShot, deadline: float) -> r.Outcome:
        """A whole transaction in one command, until it is COMMITTED. `OutcomeUnknown` at the deadline.

        One that moves positions has a marked id; `TenureLost` is a refusal then.
        """
        txn_id = command.txn_id
        if command.consumed is None:
            return self._until_known(txn_id, command, None, deadline)
        # There is no RESOLVE of a marked id: the rows of its tasks are its outcome.
        unheard: list[bytes] = []
        try:
            outcome = self.try_ask(control_partition_of(txn_id), command, deadline, unheard)
        except AnabranchError as error:
            if not unheard or isinstance(error, _FINAL):
                raise
            raise unknown(f"is not known: {error}", txn_id, None) from error
        if outcome is None:
            raise unknown("was not known in time", txn_id, None)
        if not isinstance(outcome, r.Outcome):
            raise MalformedRecord(f"the controller answered {type(outcome).__name__} to OneShot")
        return committed(outcome)

    def locked_shot(self, command: r.OneShot, deadline: float) -> r.Outcome | r.LookAgain:
        """A one-shot with locks, until it is COMMITTED, or they have to be looked at again: then nothing is logged.

        `OutcomeUnknown` at the deadline. A copy that was sent before is judged by its own locks, should it arrive.
        """
        try:
            return self._until_known(command.txn_id, command, None, deadline)
        except _LooksAgain as told:
            return told.answer

    def prepare_events(self, command: r.PrepareEvents, deadline: float) -> r.Outcome:
        """Prepare a whole transaction in one command, until it is PREPARED, or what it gave way to is COMMITTED."""
        return self._until_known(command.txn_id, command, None, deadline)

    def _until_known(
        self, txn_id: bytes, command: Any, token: bytes | None, deadline: float
    ) -> r.Outcome:
        """Send a commit until its outcome is known; RESOLVE it if it stays unanswered."""
        self._bus.ready(deadline)  # a right that is missing here is a refusal
        unheard: list[bytes] = []
        try:
            return self._try_until_known(txn_id, command, token, deadline, unheard)
        except NotAuthorized as error:
            if not unheard:  # a controller refused the only copy
                raise
            raise unknown(f"is not known: {error}", txn_id, token) from error

    def _try_until_known(
        self,
        txn_id: bytes,
        command: Any,
        token: bytes | None,
        deadline: float,
        unheard: list[bytes],
    ) -> r.Outcome:
        partition = control_partition_of(txn_id)
        by_id = token == txn_id
        # RESOLVE shows no secret: a lane that is not the transaction's would be told that there is none.
        by_secret = by_id and getattr(command, "secret", None) is not None
        scope = command.scope if token is None else "" if by_id else peek(token).scope
        resolve = r.Resolve(txn_id, scope, None if by_id else token)
        ends = FINISHED if getattr(command, "prepare", None) is None else {*FINISHED, "PREPARED"}
        pause = FIRST_RETRY_S
        while True:
            asked_at = self.now()
            ask_s = (deadline - asked_at) * (1 - RESOLVE_SHARE)
            if token is not None:
                margin_s = min(max(ask_s / 4, min(_MARGIN_S[0], ask_s / 2)), _MARGIN_S[1])
                wait_ms = max(0, min(int((ask_s - margin_s) * 1000), MAX_WAIT_MS))
                command = replace(command, wait_ms=wait_ms)
            try:
                outcome = self.try_ask(partition, command, asked_at + ask_s, unheard)
            except AnabranchError as error:
                early = self.now() - asked_at < min(FIRST_REPEAT_S, ask_s)
                if isinstance(error, _FINAL) or early or by_secret:
                    raise
                # Another copy of the refused commit may still be carried out.
                outcome = self.try_ask(partition, resolve, deadline)
                if outcome is not None and outcome.state == ("OPEN" if token else "ABORTED"):
                    unheard.clear()  # none of them was carried out, or will be
                    raise
            if outcome is None and not by_secret:
                # RESOLVE aborts a one-shot that never arrived. An open transaction stays open: it is asked again.
                outcome = self.try_ask(partition, resolve, deadline)
            if command.name is not None and getattr(outcome, "state", "") == "ABORTED":
                # Perhaps it gave way to an earlier commit: only an answer to the command itself names that one.
                outcome = self.try_ask(partition, command, deadline) or outcome
            if isinstance(outcome, r.LookAgain):
                raise _LooksAgain(outcome)
            if outcome is not None and not isinstance(outcome, r.Outcome):
                raise MalformedRecord(
                    f"the controller answered {type(outcome).__name__} to a commit"
                )
            if outcome is not None and outcome.state in ends:
                return outcome if outcome.state == "PREPARED" else committed(outcome)
            if outcome is None or self.now() + pause >= deadline:
                raise unknown("was not known in time", txn_id, token)
            self._clock.sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_S)

    def abort(
        self, token: bytes, reason: str, deadline: float, secret: bytes | None = None
    ) -> r.Outcome:
        """Abort. `AlreadyCommitted`; `OutcomeUnknown`: a commit is under way."""
        with _about(token):
            return self.ask(_partition(token), r.Abort(token, reason, secret), r.Outcome, deadline)

    def settle(
        self, token: bytes, reason: str, deadline: float, presume: bool | None = None
    ) -> r.Outcome:
        """Abort a transaction whose merge can't go on: a stream of it is LOST. Else `IllegalState`.

        ``presume``: it is PREPARED; whether to commit it.
        """
        return self.ask(_partition(token), r.Settle(token, reason, presume), r.Outcome, deadline)

    def state(self, txn_id: bytes, token: bytes | None, deadline: float) -> r.Outcome:
        """The state of a transaction; changes nothing. `UnknownTransaction`, `Expired`."""
        command = r.GetState(txn_id, token)
        found = self.ask(control_partition_of(txn_id), command, r.Outcome, deadline)
        return self.whole(found, token, deadline)

    def whole(self, outcome: r.Outcome, token: bytes | None, deadline: float) -> r.Outcome:
        """An outcome with all writers of its transaction; an answer has some only."""
        writers, part = [*outcome.writers], outcome
        while len(part.writers) >= limits.WRITERS_LISTED.value:
            command = r.GetState(outcome.txn_id, token, part.writers[-1].writer)
            part = self.ask(control_partition_of(outcome.txn_id), command, r.Outcome, deadline)
            writers += part.writers
        return outcome._replace(writers=tuple(writers))

    def resolve(self, txn_id: bytes, scope: str, token: bytes | None, deadline: float) -> r.Outcome:
        """The state; a transaction that no controller knows is aborted first. `Expired`."""
        command = r.Resolve(txn_id, scope, token)
        return self.ask(control_partition_of(txn_id), command, r.Outcome, deadline)

    def transactions(self, wanted: r.ListTransactions, deadline: float) -> Listed[r.Outcome]:
        """Open transactions, the oldest first, or all, the newest first. `UnknownScope`, `InvalidArgument`."""
        found = self._in_pages(
            wanted, r.TransactionList, lambda part: part.transactions, deadline, by="before"
        )
        found.sort(key=lambda outcome: made_ms_of(outcome.txn_id), reverse=wanted.include_finished)
        del found[wanted.limit :]
        return found

    def label(self, token: bytes, writer: int, label: str, deadline: float) -> None:
        """Name a writer of a transaction for people, after its first touch."""
        self.ask(_partition(token), r.LabelWriter(token, writer, label), r.Registered, deadline)

    def ask_each(self, command: Any, expected: type[T], deadline: float) -> list[tuple[int, T]]:
        """Ask all control partitions the same: (its number, its answer) of each."""
        return [
            (number, self.ask(number, command, expected, deadline))
            for number in self._partitions(None, deadline)
        ]

    # -- heartbeats -----------------------------------------------------------------------------------

    def beat(
        self, correlation_id: bytes, tokens: Sequence[bytes], deadline: float
    ) -> Collection[bytes]:
        """Send one heartbeat for these transactions. Answers come under the correlation id, to these digests."""
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

    def hear_beat(
        self, correlation_id: bytes, digests: Collection[bytes], deadline: float
    ) -> Sequence[r.Outcome]:
        """The transactions that a heartbeat's answer says are over; empty at the deadline."""
        result = self._hear(correlation_id, digests, deadline)
        return result.not_open if isinstance(result, r.Alive) else ()

    def forget(self, correlation_id: bytes) -> None:
        """Drop later answers under this id, and wake the call that waits for one."""
        self._bus.forget(correlation_id)


_TOKENS_A_BEAT = 500


class _LooksAgain(Exception):
    """Carries a `LookAgain` out of the loop that waits for an outcome."""

    def __init__(self, answer: r.LookAgain) -> None:
        super().__init__("look again")
        self.answer = answer


def no_replica() -> NotReady:
    """The error for a commit that can't check what its transaction read."""
    return NotReady(
        "locks of the transaction on tables have to be looked at: commit it where a replica is"
    )


def unknown(why: str, txn_id: bytes, token: bytes | None) -> OutcomeUnknown:
    """The error for a commit that may be carried out, or not."""
    return OutcomeUnknown(
        f"the outcome of transaction {txn_text(txn_id)} {why}; "
        "client.state tells it later, client.resolve makes it final",
        txn_id=txn_id,
        token=token,
    )


@contextmanager
def _about(token: bytes) -> Iterator[None]:
    """Add the transaction to a refusal that says that a commit is under way."""
    try:
        yield
    except OutcomeUnknown as error:
        error.txn_id, error.token = id_named(token), token
        raise


def _partition(token: bytes) -> int:
    return control_partition_of(id_named(token))
