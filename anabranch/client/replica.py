"""`Replica`: the replica that `Client.replica` makes, with transactions on its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar, get_args

from anabranch.client.commit_parts import CommitParts, Wait
from anabranch.client.own_writes import Writers
from anabranch.client.row_chain import Chain, Member
from anabranch.client.shared import Shared
from anabranch.client.table_access import Isolation
from anabranch.client.table_locks import explained, name_tables
from anabranch.client.table_transaction import JoinedTransaction, TableTransaction
from anabranch.client.transact import ownership_of, transact
from anabranch.client.writer import join
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import InvalidArgument
from anabranch.protocol.schemas import records as r
from anabranch.reading.committed_log import ReaderPorts
from anabranch.tables.replica import ReadReplica, ReplicaSettings
from anabranch.tables.snapshot import TableSnapshot
from anabranch.types import TaskOwnership, Transacted

if TYPE_CHECKING:
    from anabranch.reading.task_reader import TaskReader

T = TypeVar("T")
_ISOLATIONS = get_args(Isolation)
_WRITERS = get_args(Writers)


class ControllerTimes:
    """The answers of controllers that a replica needs (`anabranch.tables.follow.SafeTimes`)."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared

    @property
    def last_timestamp(self) -> int:
        return self._shared.session.highest_timestamp

    def safe(self, tables: Sequence[str], at: int, deadline: float) -> tuple[int, dict[str, int]]:
        self._shared.check()
        return self._shared.session.safe_tables(tables, at, deadline)

    def base(self, table: str, deadline: float) -> r.BaseRow | None:
        return self._shared.session.describe(table, deadline).base

    def oldest_snapshot(self, table: str, deadline: float) -> int:
        return self._shared.session.describe(table, deadline).oldest_snapshot


class Replica(ReadReplica):
    """Tables in a folder, and transactions on them. Made by `Client.replica`.

        with client.replica("bank/accounts") as replica:
            replica.transact(lambda txn: txn.put("bank/accounts", b"anna", b"5"))

    Close it, or use it as a context manager. Thread-safe, except for `step`.
    """

    def __init__(self, shared: Shared, ports: ReaderPorts, settings: ReplicaSettings) -> None:
        super().__init__(ports, ControllerTimes(shared), settings)
        self._shared = shared
        self._chain = Chain(shared.session, self.observe, self._newest_from, self.tables)

    def begin(
        self,
        *,
        isolation: Isolation = "serializable",
        keepalive: float | None = None,
        writers: Writers = "own",
        ownership: TaskOwnership | None = None,
        fresh: bool = True,
        timeout: float | None = None,
    ) -> TableTransaction:
        """Begin a transaction that reads all tables at the newest moment here, including all that this client saw.

        ``fresh`` False: don't wait until the replica has all that this client saw; a transaction that only adds to
        rows does not need that.
        ``isolation``: 'snapshot' locks written keys instead of read keys (the first committer wins). ``keepalive``,
        for a long transaction: it is aborted after this many seconds without the heartbeats that the handle sends.
        ``writers``: 'all' also reads what the transaction's other processes wrote, once they have finished
        (`TableTransaction.refresh`); they can't read the writes of this handle, which never finishes.
        ``ownership``: the ownership of the tasks whose positions the commit will move. ``timeout``: seconds to
        catch up. Raises: as `snapshot`; with a keepalive as `Client.begin`.
        """
        _check(isolation, writers)
        view = self._newest(self.deadline(timeout), fresh=fresh)
        return TableTransaction(
            self._shared, self, view, isolation, keepalive, writers, ownership=ownership
        )

    def begin_tasks(self, ownership: TaskOwnership, least: int) -> TableTransaction:
        """Begin a transaction of a worker, which knows how new its snapshot has to be. Otherwise as `begin`.

        The snapshot is the newest complete one of this replica, at the hybrid time ``least`` or later.
        """
        wanted = max(1, least, self.broken_at)
        view = self._open_snapshot(wanted, None, self.deadline(None))
        return TableTransaction(self._shared, self, view, "serializable", ownership=ownership)

    def _newest(self, deadline: float, *, fresh: bool) -> TableSnapshot:
        """A snapshot with the last commit that broke locks here and, if ``fresh``, all that this client saw."""
        seen = self._controller.last_timestamp if fresh else 0
        return self._open_snapshot(max(1, seen, self.broken_at), None, deadline)

    def join(
        self,
        token: bytes,
        *,
        isolation: Isolation = "serializable",
        heartbeat: bool = False,
        label: str = "",
        writers: Writers = "own",
        timeout: float | None = None,
    ) -> JoinedTransaction:
        """Join a transaction that another process began, by its token. All its processes read at its snapshot.

        ``heartbeat``, ``label``: as for `Client.join`. ``writers``: as for `begin`; 'all' needs the right state,
        and never includes writes of the handle that began the transaction. ``timeout``: seconds. Raises: as
        `snapshot`, `Client.join`; LocksBroken, InvalidArgument (it was not begun by a replica).
        """
        _check(isolation, writers)
        deadline = self.deadline(timeout)
        writer = join(self._shared, token, heartbeat=heartbeat, label=label)
        try:
            with explained(self._shared, token):
                answers = name_tables(self._shared, writer.identity, self.tables, deadline)
            for answer in answers:
                if answer.broken is not None:
                    raise locks_broken(answer.broken)
                self.observe(answer.timestamp, {each.table: each.last for each in answer.tables})
            if not answer.snapshot:
                raise InvalidArgument(
                    "the transaction reads no tables: join it by `Client.join`, or begin it by a replica"
                )
            self.wait(answer.snapshot, {}, deadline)
            view = self.snapshot(at=answer.snapshot)
            try:
                return JoinedTransaction(self._shared, self, writer, view, isolation, writers)
            except BaseException:
                view.close()
                raise
        except BaseException:
            writer.discard()
            raise

    def transact(
        self,
        function: Callable[[TableTransaction], T],
        *,
        isolation: Isolation = "serializable",
        name: str | None = None,
        consume: TaskReader | None = None,
        fresh: bool = True,
        wait: Wait = "merged",
        timeout: float | None = None,
    ) -> Transacted[T]:
        """Call ``function`` with a transaction, and commit; repeat this while locks break, for ``timeout`` seconds.

        The function may be called several times, so it must have no side effects. After locks broke at a row, the
        next calls come there one after the other (docs/how-to/tables.md, "Hot rows"). The result has what it
        returned as ``value``. An exception from it drops the transaction, and is raised. An unknown outcome is
        resolved before the function is called again. ``fresh``: as for `begin`. ``name``, ``consume``, ``wait``: as
        of `Client.transact`; if the name is committed already, the function still runs, on the present rows.
        ``consume`` needs feature level 3. Raises: as `TableTransaction.commit`; LocksBroken after the timeout; with
        ``consume`` as `Client.transact`.
        """
        _check(isolation, "own")
        ownership = None if consume is None else ownership_of(consume)
        end = self.deadline(timeout)
        member = Member(
            self._chain,
            end,
            marked=consume is not None and name is None,
            follows=consume is None and isolation == "serializable",
        )

        def begin(left: float) -> TableTransaction:
            deadline = self.deadline(left)
            if member.is_inside:
                view = member.snapshot(deadline)
            else:
                view = self._newest(deadline, fresh=fresh)
            return TableTransaction(
                self._shared, self, view, isolation, ownership=ownership, member=member
            )

        return transact(
            self._shared,
            begin,
            function,
            CommitParts(name=name, wait=wait),
            end,
            reader=consume,
            member=member,
        )

    def _newest_from(self, least: int, deadline: float) -> TableSnapshot:
        """The newest snapshot here, with all up to a time, and with the last commit that broke locks here."""
        return self._open_snapshot(max(least, self.broken_at), None, deadline)


def _check(isolation: Isolation, writers: Writers) -> None:
    for given, kinds in ((isolation, _ISOLATIONS), (writers, _WRITERS)):
        if given not in kinds:
            raise InvalidArgument(f"{given!r}: {' or '.join(kinds)}")
