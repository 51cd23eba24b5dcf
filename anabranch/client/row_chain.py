"""Calls of `transact` at hot rows: the chain of one replica's calls, and turns among the replicas.

At a row at which locks break again and again, the calls of one replica come one after the other. Each one reads the
rows that the calls before it have sent, before these commits are answered, and its command names the transactions
whose rows it read. The controller commits it only if those are committed, and nothing has written the rows since.

If other clients write the row, too, the chain takes a turn there, which passes from one of its calls to the next.
docs/inside/tables.md, "Chains at rows" and "Turns at rows", has the rules.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple

from anabranch.client.session import Session
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import (
    AnabranchError,
    BeginAgainError,
    FeatureNotEnabled,
    LocksBroken,
    NotAuthorized,
    NotReady,
    RetryError,
    UnsupportedVersion,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.ids import is_marked
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas import records as r
from anabranch.types import Result
from anabranch.waits import Signal, here

if TYPE_CHECKING:
    from anabranch.tables.snapshot import TableSnapshot

log = logging.getLogger("anabranch.client")

_MOST_HOT = 1_000  # rows that are remembered
_LONGEST_S = limits.TURN_MS.value / 1000  # a call computes alone
_LEAST_S = 0.001
_MOST_SENT = 64  # commits under way whose rows are remembered

Row = tuple[str, bytes]  # table, key


class HotRow(BeginAgainError):
    """The function has to be called again: a hot row was read outside the chain. `transact` catches this error.

    ``alone``: or in the chain, where the next try must not read what is not committed yet.
    """

    def __init__(
        self, message: str, *, table: str = "", key: bytes = b"", alone: bool = False
    ) -> None:
        super().__init__(message)
        self.table, self.key, self.alone = table, key, alone


def needs_commits(why: str) -> HotRow:
    """The error of a try that read rows of commits under way, and must not."""
    return HotRow(f"it read what is not committed yet, and {why}", alone=True)


class RowTurn(NamedTuple):
    """A turn of the chain. ``txn_id``: of the transaction that is to commit in it.

    ``timestamp``: all commits up to this time are on the log; ``last``: each table's newest one. ``until``: its
    end, monotonic seconds. ``left``: how many more transactions of the chain may have it.
    """

    txn_id: bytes
    row: tuple[str, int]  # table and fingerprint
    timestamp: int
    last: dict[str, int]
    until: float
    left: int = defaults.CHAIN_TURN


@dataclass(eq=False, slots=True)
class SentRows:
    """The rows of a commit that was sent. ``committed_at``: 0 until its answer has come, or if it failed.

    ``changed``: more rows that it writes, by `add`, `min` or `max`: their values are not known here.
    """

    txn_id: bytes
    rows: Mapping[Row, bytes | None]
    changed: Collection[Row]
    committed_at: int = 0
    is_over: bool = False
    waiting: list[Signal] = field(default_factory=list)

    def is_in(self, timestamp: int) -> bool:
        """Whether it is known that a snapshot at this time has these rows, or later ones."""
        return 0 < self.committed_at <= timestamp

    @property
    def has_failed(self) -> bool:
        """Whether it is not committed, or its outcome is not known here."""
        return self.is_over and not self.committed_at


@dataclass(eq=False, slots=True)
class _Waiter:
    member: Member
    wake: Signal


class Chain:
    """The chain of a replica: one of its calls at a time reads and computes at hot rows. Thread-safe."""

    def __init__(
        self,
        session: Session,
        observe: Callable[[int, Mapping[str, int]], None],
        newest_from: Callable[[int, float], TableSnapshot],
        tables: Sequence[str],
    ) -> None:
        """``observe``: as of `ReadReplica`. ``newest_from``: opens the newest snapshot, at a time or later."""
        self.session, self.tables = session, tables
        self.observe, self.newest_from = observe, newest_from
        self._lock = Lock()
        self._hot: dict[Row, float] = {}  # until when
        self._taken: dict[Row, float] = {}  # until when the row is taken to be hot for others, too
        self._holder: Member | None = None
        self._since = 0.0
        self._waiting: deque[_Waiter] = deque()
        self._sent: list[SentRows] = []  # oldest first
        self.turn: RowTurn | None = None  # of the next commit
        self.turn_at = 0  # of the last turn: the time up to which all commits were on the log
        self.no_turns_until = 0.0  # the controller knows no turns

    # -- hot rows -------------------------------------------------------------------------------------

    def is_hot(self, row: Row) -> bool:
        """Whether calls at this row come one after the other."""
        return bool(self._hot) and self.session.now() < self._hot.get(row, 0.0)

    def is_taken(self, row: Row) -> bool:
        """Whether other clients wanted the row a moment ago."""
        return self.session.now() < self._taken.get(row, 0.0)

    def note(self, row: Row, *, taken: bool | None = None) -> None:
        """Note that a row is hot. ``taken``: whether other clients want it, if that is known."""
        with self._lock:
            if len(self._hot) >= _MOST_HOT:
                self._hot.clear()
                self._taken.clear()
            until = self._hot[row] = self.session.now() + defaults.HOT_ROW_S
            if taken:
                self._taken[row] = until
            elif taken is not None:
                self._taken.pop(row, None)

    # -- one call at a time ---------------------------------------------------------------------------

    def enter(self, member: Member, deadline: float) -> bool:
        """Wait for the call's turn to compute. Returns False if the deadline comes first."""
        with self._lock:
            if self._holder is member:
                return True
            if self._holder is None and not self._waiting:
                self._grant(member)
                return True
            own = _Waiter(member, here().signal())
            self._waiting.append(own)
        try:
            return self._wait(own, deadline)
        finally:
            with self._lock, suppress(ValueError):
                self._waiting.remove(own)

    def _wait(self, own: _Waiter, deadline: float) -> bool:
        while True:
            # A wait lasts a second at most: the holder's second may begin again, or other calls may enter.
            is_first, now = self._first is own, self.session.now()
            until = min(deadline, self._since + _LONGEST_S) if is_first else deadline
            if own.wake.wait(max(_LEAST_S, min(until - now, _LONGEST_S))):
                return True
            with self._lock:
                if own not in self._waiting:
                    return True
                now = self.session.now()
                if own is self._waiting[0] and now >= self._since + _LONGEST_S:
                    self._waiting.popleft()
                    self._grant(own.member)  # the call before it takes too long
                    return True
                if now >= deadline:
                    return False

    @property
    def _first(self) -> _Waiter | None:
        with self._lock:
            return self._waiting[0] if self._waiting else None

    def _grant(self, member: Member) -> None:
        self._holder, self._since = member, self.session.now()

    def wait_for_turn(self, member: Member, until: float) -> None:
        """Let the call begin its time when its turn has come, at this time at the latest."""
        with self._lock:
            if self._holder is member:
                self._since = until

    def begin_turn(self, member: Member, timestamp: int) -> None:
        """Note that a turn has come, in which no row of the commits before it is read until it is in a snapshot."""
        with self._lock:
            self.turn_at = max(self.turn_at, timestamp)
            self._sent.clear()
            if self._holder is member:
                self._since = self.session.now()

    def take_turn_of(self, member: Member, *, marked: bool) -> RowTurn | None:
        """Remove and return the chain's turn; None if this call does not compute, or its commit can't use the turn.

        No two calls get it: the controller would treat the second commit as a copy of the first.
        """
        with self._lock:
            turn = self.turn if self._holder is member else None
            if turn is None or marked != is_marked(turn.txn_id) or self.session.now() >= turn.until:
                return None
            self.turn = None
            return turn

    def pass_on(self, member: Member, turn: RowTurn) -> bool:
        """Keep a turn for the next call. Returns False, and keeps none, if another call computes by now."""
        with self._lock:
            is_inside = self._holder is member
            if is_inside:
                self.turn = turn
            return is_inside

    def end_turn(self, txn_id: bytes) -> None:
        """Drop the chain's turn if it is that of this transaction."""
        with self._lock:
            if self.turn is not None and self.turn.txn_id == txn_id:
                self.turn = None

    def leave(self, member: Member) -> RowTurn | None:
        """Let the next call compute. Returns the chain's turn if no call needs it."""
        with self._lock:
            if self._holder is not member:
                return None
            self._holder = None
            if self._waiting:
                following = self._waiting.popleft()
                self._grant(following.member)
                following.wake.set()
            return self._unused_turn()

    def _unused_turn(self) -> RowTurn | None:
        """Remove and return the chain's turn if no call has it or may need it soon. The caller has the lock."""
        if self._holder is not None or self._more_may_come:
            return None
        turn, self.turn = self.turn, None
        return turn

    def is_in(self, member: Member) -> bool:
        """Whether this call has the right to compute now."""
        return self._holder is member

    @property
    def has_more(self) -> bool:
        """Whether more calls of this replica wait or, as commits are under way, may soon come."""
        with self._lock:
            return self._more_may_come

    @property
    def _more_may_come(self) -> bool:
        # A program that changes the row in a loop calls again once its commit is answered.
        return bool(self._waiting) or not all(sent.is_over for sent in self._sent)

    # -- commits under way ----------------------------------------------------------------------------

    def add(self, sent: SentRows) -> None:
        """Let the next calls read these rows."""
        with self._lock:
            self._sent.append(sent)
            del self._sent[:-_MOST_SENT]

    def end(self, sent: SentRows, committed_at: int) -> RowTurn | None:
        """Note the outcome of a commit; ``committed_at`` 0: it has failed, or is not known.

        Returns the chain's turn if no call needs it any more.
        """
        with self._lock:
            if sent.is_over:
                return None
            sent.committed_at, sent.is_over = committed_at, True
            if not committed_at and sent in self._sent:
                # Later commits were perhaps computed from it.
                del self._sent[self._sent.index(sent) :]
            for wake in sent.waiting:
                wake.set()
            return self._unused_turn()

    def sent_since(self, timestamp: int) -> tuple[SentRows, ...]:
        """The oldest commit that a snapshot at this time may lack, and all commits that were sent after it."""
        with self._lock:
            while self._sent and self._sent[0].is_in(timestamp):
                del self._sent[0]
            return tuple(self._sent)

    def wait_for(self, sent: SentRows, deadline: float) -> None:
        """Wait until the outcome of a commit is known. Raises: NotReady (at the deadline)."""
        with self._lock:
            if sent.is_over:
                return
            sent.waiting.append(wake := here().signal())
        if not wake.wait(max(0.0, deadline - self.session.now())):
            raise NotReady("a commit whose rows were read has no answer yet")


class Member:
    """One call of `transact`, in the chain of its replica.

    ``follows``: whether its tries may read rows of commits that are under way.
    """

    def __init__(
        self, chain: Chain, deadline: float, *, marked: bool = False, follows: bool = True
    ) -> None:
        """``marked``: its commit has a marked id, as it moves positions and has no name."""
        self._chain, self._session, self._deadline = chain, chain.session, deadline
        self._marked, self.follows = marked, follows
        self._stays_out = False  # the present try does not enter the chain
        self._began_inside = False  # … began in the chain
        self._before: tuple[SentRows, ...] = ()  # … reads rows of these commits,
        self._as_of = 0  # … and of a snapshot at this time
        self._sent: SentRows | None = None  # … has sent these rows
        self._turn: RowTurn | None = None  # of its commit
        self._heir: bytes | None = None  # the transaction to which that turn passes
        self._passed: bytes | None = None  # the heir that the chain has

    # -- reading --------------------------------------------------------------------------------------

    @property
    def is_inside(self) -> bool:
        """Whether the call is the one of the chain that computes."""
        return self._chain.is_in(self)

    @property
    def is_unsure(self) -> bool:
        """Whether the present try may have read what is not committed yet, or an old snapshot."""
        return self._began_inside and self.follows

    def must_enter(self, table: str, key: bytes) -> bool:
        """Whether the call has to enter the chain before it reads the row, because the row is hot."""
        if self._began_inside or self._stays_out:
            return False
        chain = self._chain
        # While the controller knows no turns, no call enters the chain.
        return chain.is_hot((table, key)) and self._session.now() >= chain.no_turns_until

    def enter_at(self, table: str, key: bytes) -> TableSnapshot | None:
        """Enter the chain; returns a snapshot to read in it. None if this takes too long."""
        if not self._enter((table, key), ask=False):
            return None
        return self.snapshot(self._deadline)

    def snapshot(self, deadline: float) -> TableSnapshot:
        """The snapshot for a try in the chain: an old one, if the try reads what is newer of commits under way.

        Raises: as `ReadReplica.wait`.
        """
        chain = self._chain
        least = max(1, chain.turn_at)
        if not self.follows:
            for sent in chain.sent_since(0):
                chain.wait_for(sent, deadline)
            least = max(least, self._session.highest_timestamp)
        view = chain.newest_from(least, deadline)
        self._before = chain.sent_since(view.timestamp) if self.follows else ()
        self._as_of = view.timestamp
        self._began_inside = True
        return view

    def newest(self, table: str, key: bytes) -> SentRows | None:
        """The commit under way that wrote a row last, if the present try reads such rows."""
        for sent in reversed(self._before):
            if (table, key) in sent.rows or (table, key) in sent.changed:
                self._chain.note((table, key))
                # The answer to a later commit may come before that to an earlier one.
                return None if sent.is_in(self._as_of) else sent
        return None

    def has_between(self, table: str, low: bytes, high: bytes | None) -> bool:
        """Whether commits under way, whose rows the present try reads, wrote rows of a range."""
        return any(
            name == table and low <= key and (high is None or key < high)
            for sent in self._before
            if not sent.is_in(self._as_of)
            for name, key in (*sent.rows, *sent.changed)
        )

    def wait_for(self, sent: SentRows, deadline: float) -> None:
        """As `Chain.wait_for`."""
        self._chain.wait_for(sent, deadline)

    # -- committing -----------------------------------------------------------------------------------

    def turn_id(self, *, marked: bool) -> bytes | None:
        """The id for the commit of this try, if the chain has a turn for it."""
        chain = self._chain
        turn = chain.take_turn_of(self, marked=marked)
        if turn is None:
            return None
        self._turn = turn
        return turn.txn_id

    def heir(self, txn_id: bytes, deadline: float) -> bytes | None:
        """The transaction to which the turn of this commit passes: the next one of the chain, if one may come."""
        turn, chain = self._turn, self._chain
        if (
            self._heir is None
            and turn is not None
            and (turn.txn_id == txn_id and turn.left > 1)
            # Later commits might come after the turn's end, and break the locks of the next client.
            and self._session.now() < turn.until - _LONGEST_S / 2
            and (self.is_inside and chain.has_more)
        ):
            self._heir = self._session.new_txn_id(split_stream(turn.row[0])[0], deadline)
        return self._heir

    def sent(
        self, txn_id: bytes, rows: Mapping[Row, bytes | None], changed: Collection[Row]
    ) -> None:
        """Note that the commit is on its way, and let the next call compute. Arguments: as of `SentRows`."""
        if self.is_inside and self.follows:
            self._sent = SentRows(txn_id, rows, changed)
            self._chain.add(self._sent)
            self._pass_on()
            self._leave()

    def _pass_on(self) -> RowTurn | None:
        """Let the next call of the chain have the turn's heir. Returns the heir's turn if that is not possible."""
        turn, heir = self._turn, self._heir
        if turn is None or heir is None or self._passed == heir:
            return None
        following = turn._replace(txn_id=heir, left=turn.left - 1)
        if not self._chain.pass_on(self, following):
            return following
        self._passed = heir
        return None

    def answered(self, committed_at: int) -> None:
        """Note the outcome of the present try's commit; 0: it has failed, or is not known."""
        if not committed_at and self._heir is not None:
            self._chain.end_turn(self._heir)  # it is passed on with the commit only
        if self._sent is not None:
            unused = self._chain.end(self._sent, committed_at)
            self._sent = None
            if unused is not None:
                self._give_up(unused)

    def committed(self, result: Result) -> None:
        """Note that the call has committed, which has ended its turn, or passed it on.

        A commit that leaves neither events nor a row of its own does not end it, but may pass it on.
        """
        its_own = self._turn is not None and self._turn.txn_id == result.txn_id
        ends = result.counts.committed or not is_marked(result.txn_id) or self._heir is not None
        if its_own and ends:
            unused = self._pass_on()
            if unused is not None:
                self._give_up(unused)
            self._turn = self._heir = None

    # -- turns ----------------------------------------------------------------------------------------

    def take_after(self, error: AnabranchError) -> bool:
        """Enter the chain for the next try, if the row of the error is known. Returns whether that may begin."""
        self.answered(0)
        self._before = ()
        self._began_inside = self._stays_out = False
        if isinstance(error, HotRow) and error.alone:
            self.follows, self._stays_out = False, True
            self.give_up()
            return True
        if not (isinstance(error, LocksBroken | HotRow) and error.key):
            self.give_up()
            return False
        at = error.commit_timestamp if isinstance(error, LocksBroken) else 0
        return self._enter((error.table, error.key), ask=at > self._chain.turn_at)

    def take_for(self, txn_id: bytes, table: str, key: bytes, deadline: float) -> RowTurn | None:
        """Take a turn for a transaction that was advised to do so. Other calls no longer read its rows."""
        self.answered(0)
        self._heir = None  # another call may have committed by this id
        chain = self._chain
        if not key or not chain.enter(self, deadline):
            return None
        former, chain.turn = chain.turn, None
        if former is not None and former.row != (table, fingerprint(key)):
            self._give_up(former)
            former = None
        self._turn = self._take(txn_id, (table, key), former, deadline)
        if self._turn is None:
            self._leave()
        return self._turn

    def _enter(self, row: Row, *, ask: bool) -> bool:
        """Enter the chain, and take a turn if other clients want the row, or to ``ask`` whether they do."""
        chain, deadline = self._chain, self._deadline
        if self._session.now() < chain.no_turns_until or not chain.enter(self, deadline):
            return False
        former = self._former(row)
        if chain.turn is None and (ask or former is not None or chain.is_taken(row)):
            with suppress(RetryError):
                scope = split_stream(row[0])[0]
                txn_id = self._session.new_txn_id(scope, deadline, marked=self._marked)
                chain.turn = self._take(txn_id, row, former, deadline)
            if chain.turn is None:
                self._leave()
                return False
        return True

    def _former(self, row: Row) -> RowTurn | None:
        """The turn at this row that passes to a new id. Others are given up, except a usable one of the chain."""
        chain, there = self._chain, (row[0], fingerprint(row[1]))
        own, self._turn = self._turn, None
        if own is not None and (own.row != there or self._heir is not None):
            self._give_up(own)
            own = None
        self._heir = None
        turn = chain.turn
        if turn is not None:
            is_over = turn.row != there or self._session.now() >= turn.until
            if is_over or own is not None or is_marked(turn.txn_id) != self._marked:
                chain.turn = None
                if is_over or own is not None:
                    self._give_up(turn)
                else:
                    own = turn
        return own

    def _take(
        self, txn_id: bytes, row: Row, former: RowTurn | None, deadline: float
    ) -> RowTurn | None:
        """Wait for a turn of the leader. The commits that were sent before are decided by then."""
        chain, now = self._chain, self._session.now()
        deadline, there = min(deadline, now + defaults.TURN_WAIT_S), (row[0], fingerprint(row[1]))
        tables = self._session.beside(row[:1], chain.tables, deadline)
        if len(tables) > limits.TURN_TABLES.value:
            tables = row[:1]
        before = None if former is None else former.txn_id
        wait_ms = max(1, int((deadline - now) * 1000))
        command = r.TakeTurn(txn_id, before, *there, tuple(tables), wait_ms)
        chain.wait_for_turn(self, deadline)
        try:
            answer = self._session.take_turn(command, deadline)
        except (FeatureNotEnabled, UnsupportedVersion, NotAuthorized) as none:
            log.info("no turns at hot rows: %s", none)
            chain.no_turns_until = now + defaults.NO_TURNS_S
            return None
        except RetryError as late:
            log.debug("no turn at a row of %s in time: %s", row[0], late)
            return None
        chain.note(row, taken=answer.decided)
        chain.begin_turn(self, answer.timestamp)
        last = {each.table: each.last for each in answer.tables}
        chain.observe(answer.timestamp, last)
        until = self._session.now() + limits.TURN_MS.value / 1000
        turn = RowTurn(txn_id, there, answer.timestamp, last, until)
        if self.is_inside:
            return turn
        self._give_up(turn)
        return None

    def give_up(self) -> None:
        """Leave the chain, and let other clients have the row."""
        self.answered(0)
        turn, self._turn = self._turn, None
        if turn is not None:
            self._give_up(turn)  # its commit has failed, so it has passed to no heir
        self._heir = None
        self._leave()

    def _leave(self) -> None:
        turn = self._chain.leave(self)
        if turn is not None:
            self._give_up(turn)

    def _give_up(self, turn: RowTurn) -> None:
        command = r.TakeTurn(turn.txn_id, None, *turn.row, (), 0)
        with suppress(AnabranchError):
            self._session.give_up_turn(command)
