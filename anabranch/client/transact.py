"""`transact`: call a function with a transaction and commit, again and again until nothing is in the way.

After locks broke at a hot row, it comes there in the chain of its replica (`anabranch.client.row_chain`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

from anabranch.backoff import Backoff
from anabranch.client.commit_parts import CommitParts
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.row_chain import HotRow, Member
from anabranch.client.shared import Shared
from anabranch.client.transaction import Transaction
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    Locked,
    LocksBroken,
    MalformedRecord,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    TransactionAborted,
    UnsupportedVersion,
    WriteFailed,
)
from anabranch.protocol import defaults
from anabranch.protocol.legal_names import check_name, split_stream
from anabranch.protocol.schemas import records as r
from anabranch.types import Result, TaskOwnership, Transacted

if TYPE_CHECKING:
    from anabranch.reading.task_reader import TaskReader

log = logging.getLogger("anabranch.client")

_LEAST_S = 0.05  # the least time in which `transact` begins or commits
ASKED_AGAIN = 3  # times: while a version is built, the versions in force change twice


class Repeatable(AbstractContextManager[object], Protocol):
    """The handle of a transaction that this process begins."""

    def __enter__(self) -> Self: ...

    @property
    def txn_id(self) -> bytes | None: ...

    @property
    def commit_with(self) -> Callable[[CommitParts, float | None], Result]: ...


H = TypeVar("H", bound=Repeatable)
V = TypeVar("V")


def transact(
    shared: Shared,
    begin: Callable[[float], H],
    function: Callable[[H], V],
    parts: CommitParts,
    deadline: float,
    *,
    reader: TaskReader | None = None,
    member: Member | None = None,
) -> Transacted[V]:
    """Call ``function`` with a new transaction and commit, until it commits or the deadline is over.

    ``begin``: makes the transaction; its argument limits its seconds. ``parts``: of its commit.
    ``reader``: its positions move with the commit. ``member``: of a chain, for the tries after locks broke at a
    row. Raises: what the last try raised.
    """
    check_name(parts.name)
    consumed = None if reader is None else reader.consumed()
    commit = _Commit(shared, replace(parts, consumed=consumed))
    try:
        return _transact(shared, begin, function, commit, deadline, member)
    except BaseException as error:
        if reader is None:
            raise
        if commit.in_doubt:
            reader.end(f"the commit of this reader's positions ended by {type(error).__name__}")
        elif consumed is not None:
            try:
                reader.put_back(consumed)
            except IllegalState:  # the caller gets the error of the function
                reader.end("positions were taken while others were not committed yet")
        raise


def _transact(
    shared: Shared,
    begin: Callable[[float], H],
    function: Callable[[H], V],
    commit: _Commit,
    deadline: float,
    member: Member | None,
) -> Transacted[V]:
    clock = shared.ports.clock
    pauses: Backoff | None = None
    lost: AnabranchError | None = None
    asked_again = 0
    value = cast("V", None)
    try:
        while True:
            left = max(_LEAST_S, deadline - clock.monotonic())
            try:
                txn = begin(left)
            except RetryError as error:
                if shared.closed or lost is None:
                    raise
                raise _for_caller(lost) from error
            try:
                with txn:
                    if commit.earlier is None:
                        value = function(txn)
                        _check_called(value)
                    result = commit.send(txn, max(_LEAST_S, deadline - clock.monotonic()))
            except DerivationMissing:
                # Another version may have come into force since this client asked. Now it asks again.
                if asked_again == ASKED_AGAIN:
                    raise
                asked_again += 1
                shared.derivations.forget()
                continue
            except (HotRow, Locked, LocksBroken, TransactionAborted, WriteFailed) as error:
                if txn.txn_id is None and not isinstance(error, HotRow | Locked | LocksBroken):
                    raise  # raised by the function
                pauses = pauses or _pauses(shared, error)
                if not pauses.ends_by(deadline):
                    if not isinstance(error, HotRow):
                        raise
                    raise _for_caller(error) from error
                lost = error.with_traceback(None)
                if member is None or not member.take_after(lost):
                    pauses.sleep()
                continue
            if result is not None:
                if member is not None:
                    member.committed(result)
                return Transacted.of(result, value)
            if member is not None:
                member.give_up()  # the positions move alone
    finally:
        if member is not None:
            member.give_up()


def _pauses(shared: Shared, error: AnabranchError) -> Backoff:
    # Segments of exclusive streams are locked for as long as a transaction lasts.
    waits = isinstance(error, Locked | TransactionAborted)
    return Backoff(
        defaults.FIRST_TRANSACT_PAUSE_S,
        defaults.LONGEST_LOCKED_PAUSE_S if waits else defaults.LONGEST_TRANSACT_PAUSE_S,
        shared.ports.clock,
        # So that conflicting clients do not retry together.
        jitter=lambda: shared.session.random64() % 1024 / 1024,
    )


class _Commit:
    """The commit of `transact`, each time that it is sent.

    If the name was committed earlier, the effects of that commit count, and the positions move alone, by another
    commit: a worker that fails between the two repeats its events, whose commit by name again has no effect.
    """

    def __init__(self, shared: Shared, parts: CommitParts) -> None:
        self._shared, self._parts = shared, parts
        self.earlier: Result | None = None  # of the name
        self.in_doubt = False  # whether the positions may have moved

    def send(self, txn: Repeatable, timeout: float) -> Result | None:
        """Commit once; None: the positions have yet to move alone. Raises: as `Transaction.commit`."""
        parts = self._parts if self.earlier is None else replace(self._parts, name=None)
        if parts.consumed is None:
            return txn.commit_with(parts, timeout)
        self.in_doubt = True
        try:
            result = txn.commit_with(parts, timeout)
        except (OutcomeUnknown, OwnershipLost, MalformedRecord, UnsupportedVersion):
            raise  # no answer, an unreadable one, or another owner
        except AlreadyCommitted:
            self.in_doubt = False
            if parts.name is None:
                raise
            self.earlier = self._named(parts.name, parts.consumed, timeout)
            return None
        except AnabranchError:
            self.in_doubt = False
            raise
        return self.earlier or result

    def _named(self, name: str, consumed: r.Consumed, timeout: float) -> Result:
        """The result of the commit of this name: another commit by the name, without events, has it."""
        scope = split_stream(consumed.processor)[0]
        keepalive_ms = keepalive_ms_of(defaults.KEEPALIVE_S)
        with self._shared.outside():
            asking = Transaction(self._shared, scope, None, keepalive_ms)
            return asking.commit(name=name, timeout=timeout)


def _for_caller(lost: AnabranchError) -> AnabranchError:
    """The error for the caller, after the last try failed. A hot row is a broken lock."""
    if isinstance(lost, HotRow):
        return LocksBroken(str(lost), table=lost.table, key=lost.key)
    return lost


def _check_called(returned: object) -> None:
    """Raise `InvalidArgument` if the function is async or a generator: calling it has not run it."""
    if isawaitable(returned) or isgenerator(returned) or isasyncgen(returned):
        if iscoroutine(returned):
            returned.close()  # otherwise Python warns that it was never awaited
        raise InvalidArgument(
            "the function was not run: give a plain one, neither async nor a generator"
        )


def ownership_of(reader: object) -> TaskOwnership:
    """The ownership of a reader whose positions `transact` moves. Raises: InvalidArgument (it has none)."""
    found = getattr(reader, "ownership", None)
    if not isinstance(found, TaskOwnership):
        raise InvalidArgument(
            f"consume={reader!r:.100}: give a reader of tasks, as `client.read(…, ownership=…)` makes"
        )
    return found
