"""`transact`: call a function with a transaction and commit, again and again until nothing is in the way.

After locks broke at a hot row, it waits for a turn at that row (`Turns`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import fields, replace
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, TypeVar, cast

from anabranch.backoff import Backoff
from anabranch.client.commit_parts import CommitParts
from anabranch.client.reservation import keepalive_ms_of
from anabranch.client.session import Session
from anabranch.client.shared import Shared
from anabranch.client.transaction import Transaction
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    BeginAgainError,
    FeatureNotEnabled,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    MalformedRecord,
    NotAuthorized,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    TransactionAborted,
    UnsupportedVersion,
    WriteFailed,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.ids import is_marked
from anabranch.protocol.legal_names import check_name, split_stream
from anabranch.protocol.schemas import records as r
from anabranch.types import Result, TaskOwnership, Transacted

if TYPE_CHECKING:
    from anabranch.reading.task_reader import TaskReader

log = logging.getLogger("anabranch.client")

_LEAST_S = 0.05  # the least time in which `transact` begins or commits
_MOST_HOT = 1_000  # rows that are remembered


class Repeatable(AbstractContextManager[object], Protocol):
    """The handle of a transaction that this process begins."""

    def __enter__(self) -> Self: ...

    @property
    def txn_id(self) -> bytes | None: ...

    @property
    def commit_with(self) -> Callable[[CommitParts, float | None], Result]: ...


H = TypeVar("H", bound=Repeatable)
V = TypeVar("V")


class HotRow(BeginAgainError):
    """A row at which others take turns was read without a turn. `transact` catches this error."""

    def __init__(self, message: str, *, table: str = "", key: bytes = b"") -> None:
        super().__init__(message)
        self.table, self.key = table, key


class RowTurn(NamedTuple):
    """A turn that has begun. ``txn_id``: the id under which a transaction has to commit in it.

    ``timestamp``: the log has all commits up to this hybrid time. ``last``: the timestamp of each table's last one.
    """

    txn_id: bytes
    row: tuple[str, int]  # table and fingerprint
    timestamp: int
    last: dict[str, int]


class HotRows:
    """The rows of a replica at which others took turns a moment ago. Thread-safe."""

    def __init__(self, session: Session, tables: Sequence[str]) -> None:
        self.session, self.tables = session, tables
        self._until: dict[tuple[str, bytes], float] = {}
        self.no_turns_until = 0.0  # the controller knows no turns

    def has(self, table: str, key: bytes) -> bool:
        """Whether the row is hot."""
        return bool(self._until) and self.session.now() < self._until.get((table, key), 0.0)

    def note(self, table: str, key: bytes, *, hot: bool) -> None:
        """Note whether others want the row."""
        if not hot:
            self._until.pop((table, key), None)
            return
        if len(self._until) >= _MOST_HOT:
            self._until.clear()
        self._until[table, key] = self.session.now() + defaults.HOT_ROW_S


class Turns:
    """The turns of one call of `transact`, which has at most one at a time: ``held``.

    ``marked``: whether the id of its commit is marked, as the commit moves positions and has no name.
    """

    def __init__(self, hot: HotRows, *, marked: bool = False) -> None:
        self._hot, self._session, self._marked = hot, hot.session, marked
        self.held: RowTurn | None = None

    def check_cold(self, table: str, key: bytes) -> None:
        """Raise `HotRow` if the row is hot and no turn is held: the locks would be broken."""
        if self.held is None and self._hot.has(table, key):
            raise HotRow(f"others take turns at {table} {key!r:.100}", table=table, key=key)

    def take_after(self, error: AnabranchError, deadline: float) -> bool:
        """Wait for a turn for the next try, if the error names a row. Returns whether the turn has begun.

        If the failed try had the turn at that row, the next try gets the same turn.
        """
        if not (isinstance(error, LocksBroken | HotRow) and error.key):
            self.give_up()
            return False
        if self.held is not None and self.held.row != (error.table, fingerprint(error.key)):
            self.give_up()
        former, self.held = self.held, None
        with suppress(RetryError):
            scope = split_stream(error.table)[0]
            txn_id = self._session.new_txn_id(scope, deadline, marked=self._marked)
            return self._take(txn_id, error.table, error.key, former, deadline)
        return False

    def take_for(self, txn_id: bytes, table: str, key: bytes, deadline: float) -> RowTurn | None:
        """Wait for a turn for a transaction that was advised to take one, if none is held."""
        if self.held is None:
            self._take(txn_id, table, key, None, deadline)
            return self.held
        return None

    def _take(
        self, txn_id: bytes, table: str, key: bytes, former: RowTurn | None, deadline: float
    ) -> bool:
        hot, now = self._hot, self._session.now()
        if not key or now < hot.no_turns_until:
            return False
        deadline, point = min(deadline, now + defaults.TURN_WAIT_S), fingerprint(key)
        tables = hot.tables if len(hot.tables) <= limits.TURN_TABLES.value else (table,)
        before = None if former is None else former.txn_id
        wait_ms = max(1, int((deadline - now) * 1000))
        command = r.TakeTurn(txn_id, before, table, point, tuple(tables), wait_ms)
        answer = None
        try:
            answer = self._session.take_turn(command, deadline)
        except (FeatureNotEnabled, UnsupportedVersion, NotAuthorized) as none:
            log.info("no turns at hot rows: %s", none)
            hot.no_turns_until = now + defaults.NO_TURNS_S
        except RetryError as late:
            log.debug("no turn at a row of %s in time: %s", table, late)
        hot.note(table, key, hot=answer is not None and answer.decided)
        if answer is not None:
            last = {each.table: each.last for each in answer.tables}
            self.held = RowTurn(txn_id, (table, point), answer.timestamp, last)
        return answer is not None

    def committed(self, result: Result) -> None:
        """Note that a transaction is committed, which ends its turn.

        The turn continues if the commit has no events and its id is marked: such a commit leaves no row of its own.
        """
        its_own = self.held is not None and self.held.txn_id == result.txn_id
        if its_own and (result.counts.committed or not is_marked(result.txn_id)):
            self.held = None

    def give_up(self) -> None:
        """Let the next one have the row."""
        if self.held is not None:
            command = r.TakeTurn(self.held.txn_id, None, *self.held.row, (), 0)
            self.held = None
            with suppress(AnabranchError):
                self._session.give_up_turn(command)


def transact(
    shared: Shared,
    begin: Callable[[float], H],
    function: Callable[[H], V],
    name: str | None,
    deadline: float,
    *,
    reader: TaskReader | None = None,
    turns: Turns | None = None,
) -> Transacted[V]:
    """Call ``function`` with a new transaction and commit, until it commits or the deadline is over.

    ``begin``: makes the transaction; its argument limits its seconds. ``reader``: its positions move with the
    commit. ``turns``: after locks broke at a row, the next try waits for a turn there. Raises: what the last try
    raised.
    """
    check_name(name)
    consumed = None if reader is None else reader.consumed()
    commit = _Commit(shared, CommitParts(name=name, consumed=consumed))
    try:
        return _transact(shared, begin, function, commit, deadline, turns)
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
    turns: Turns | None,
) -> Transacted[V]:
    clock = shared.ports.clock
    pauses = Backoff(
        defaults.FIRST_TRANSACT_PAUSE_S,
        defaults.LONGEST_TRANSACT_PAUSE_S,
        clock,
        # So that conflicting clients do not retry together.
        jitter=lambda: shared.session.random64() % 1024 / 1024,
    )
    lost: AnabranchError | None = None
    value = cast("V", None)
    try:
        while True:
            left = max(_LEAST_S, deadline - clock.monotonic())
            try:
                txn = begin(left)
            except RetryError as error:
                if shared.closed or lost is None:
                    raise
                raise lost from error
            try:
                with txn:
                    if commit.earlier is None:
                        value = function(txn)
                        _check_called(value)
                    result = commit.send(txn, max(_LEAST_S, deadline - clock.monotonic()))
            except (HotRow, LocksBroken, TransactionAborted, WriteFailed) as error:
                if txn.txn_id is None and not isinstance(error, HotRow | LocksBroken):
                    raise  # raised by the function
                if not pauses.ends_by(deadline):
                    if not isinstance(error, HotRow):
                        raise
                    raise LocksBroken(str(error), table=error.table, key=error.key) from error
                lost = error.with_traceback(None)
                if turns is None or not turns.take_after(lost, deadline):
                    pauses.sleep()
                continue
            if result is not None:
                if turns is not None:
                    turns.committed(result)
                return Transacted(*(getattr(result, f.name) for f in fields(result)), value=value)
            if turns is not None:
                turns.give_up()  # the positions move alone
    finally:
        if turns is not None:
            turns.give_up()


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
