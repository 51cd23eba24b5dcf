"""A process's part in a transaction on tables that was begun elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, Self

from anabranch.core.hybrid_time import to_text
from anabranch.core.ids import txn_text
from anabranch.core.transaction_states import locks_broken
from anabranch.errors import IllegalState, InvalidArgument, LocksBroken, RetryError
from anabranch.schemas import records as r
from anabranch.tables.own_writes import Writers
from anabranch.tables.registering import Controller, Part, Registering, explained
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tables.work import IN_DOUBT, Isolation, TableWork, Validating, alone
from anabranch.types import Receipt


class Writing(Part, Protocol):
    """The handle of a joined writer: `anabranch.client.writer.Writer`."""

    def write(self, stream: str, value: bytes | None = None, key: bytes | None = None) -> None: ...

    def flush(self, timeout: float | None = None) -> Receipt: ...

    def finish(self, timeout: float | None = None) -> Receipt: ...

    def discard(self) -> None: ...


class Joins(Controller, Protocol):
    """The calls by which a client joins a transaction that was begun elsewhere."""

    def join(self, token: bytes, heartbeat: bool, label: str) -> Writing:
        """A writer of the token's transaction. InvalidToken, NotAuthorized."""


class JoinedTransaction(TableWork):
    """Reads and writes of a transaction begun elsewhere, at its snapshot. Made by `Replica.join`.

    Leaving its `with` block without an exception finishes it. Thread-safe.
    """

    def __init__(
        self,
        replica: Validating,
        controller: Controller,
        writer: Writing,
        view: TableSnapshot,
        isolation: Isolation,
        writers: Writers,
    ) -> None:
        super().__init__(replica, view, isolation)
        if writers == "all":
            self._own = controller.reading_back(writer)
        self._writer = writer
        self._controller = controller
        self._reads = Registering(controller, writer, replica, view, self._locks, self._read_from)
        self._finished: Receipt | None = None

    def __enter__(self) -> Self:
        self._controller.entered(self)
        return self

    @alone
    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        if self._view.is_forked:
            return
        try:
            if error is None and not self._over:
                self.finish()
        except RetryError:
            self._end(IN_DOUBT)
            raise
        finally:
            if self._over != IN_DOUBT:
                self.discard()

    def __repr__(self) -> str:
        return f"<JoinedTransaction {txn_text(self.txn_id)} at {to_text(self.timestamp)}>"

    @property
    def txn_id(self) -> bytes:
        """The transaction, 16 bytes."""
        return self._writer.txn_id or b""

    def _write(self, table: str, key: bytes, value: bytes | None) -> None:
        with self._broken_fails():
            self._writer.write(table, value, key=key)

    @contextmanager
    def _broken_fails(self) -> Iterator[None]:
        try:
            with self._reads.explained():
                yield
        except LocksBroken as error:
            self._fail(error)

    @alone
    def flush(self, timeout: float | None = None) -> Receipt:
        """Wait until what was read is registered and validated, and what was written is stored. The handle stays
        usable.

        Pass on conclusions from these reads only after this call. Raises: LocksBroken; as `Writer.flush`.
        """
        self._check()
        with self._broken_fails():
            self._reads.flush(self._controller.deadline(timeout))
            return self._writer.flush(timeout)

    @alone
    def finish(self, timeout: float | None = None) -> Receipt:
        """`flush`, and end this part. Give the receipt to the process that commits. Later calls return the same
        receipt.

        After an error that says so it may be repeated, even after the `with` block.
        """
        if self._finished is None:
            if self._over != IN_DOUBT:
                self._check()
            with self._broken_fails():
                self._reads.flush(self._controller.deadline(timeout))
                self._finished = self._writer.finish(timeout)
            self._end("this part of it is finished")
        return self._finished

    @alone
    def discard(self) -> None:
        """Drop writes that are not flushed. Registered locks stay."""
        if self._finished is None:
            self._writer.discard()
        self._end("this part of it is discarded")

    def _check(self) -> None:
        if self._over == IN_DOUBT:
            raise IllegalState(
                "it was left, and is not finished: call `finish` again, or `discard`"
            )
        super()._check()

    def _give_up(self) -> None:
        self._reads.check_open(self._controller.deadline(None))
        self._writer.discard()


def join(
    replica: Validating,
    commits: Joins,
    token: bytes,
    isolation: Isolation,
    heartbeat: bool,
    label: str,
    writers: Writers,
    deadline: float,
) -> JoinedTransaction:
    """As `Replica.join`."""
    writer = commits.join(token, heartbeat, label)
    try:
        command = r.LockReads(*writer.identity, 0, tables=replica.tables)
        with explained(commits, token):
            told = commits.lock_reads(command, deadline)
        if told.broken is not None:
            raise locks_broken(told.broken)
        if not told.snapshot:
            raise InvalidArgument(
                "the transaction reads no tables: join it by `Client.join`, or begin it by a replica"
            )
        replica.observe(told.timestamp, {each.table: each.last for each in told.tables})
        replica.wait(told.snapshot, {}, deadline)
        view = replica.snapshot(at=told.snapshot)
        try:
            return JoinedTransaction(replica, commits, writer, view, isolation, writers)
        except BaseException:
            view.close()
            raise
    except BaseException:
        writer.discard()
        raise
