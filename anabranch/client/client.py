"""The client: everything starts here, with `connect`."""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from anabranch.client.client_reads import Reading
from anabranch.client.handle import Shared
from anabranch.client.heartbeats import Heart
from anabranch.client.joined_writer import Writer
from anabranch.client.ports import ClientPorts
from anabranch.client.reservation import (
    Reservation,
    abort_reserved,
    begin_reserved,
    id_of,
    keepalive_ms_of,
    reserve,
)
from anabranch.client.session import Session
from anabranch.client.transaction import Transaction
from anabranch.core.ids import check_number, check_scope, check_type
from anabranch.core.tokens import operator_proof
from anabranch.errors import InvalidArgument, NotForkSafe
from anabranch.schemas.codec import encode
from anabranch.schemas.records import Outcome, SeriesInfo, SetSeries
from anabranch.types import (
    CommandsInfo,
    Receipt,
    Result,
    StreamDescription,
    TransactionInfo,
    description_of,
    info_of,
    receipt_records,
    result_of,
    warn_left_out,
)

DEFAULT_TIMEOUT_S = 30.0
DEFAULT_KEEPALIVE_S = 30.0
DEFAULT_ONE_SHOT_BYTES = 256 << 10
_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client(Reading):
    """A connection to the controllers of a cluster. Thread-safe; not to be used in a forked child.

    Calls without a ``timeout`` of their own end after the client's, in seconds. Made by `anabranch.connect`.
    """

    def __init__(
        self,
        ports: ClientPorts,
        *,
        timeout: float = DEFAULT_TIMEOUT_S,
        one_shot_bytes: int = DEFAULT_ONE_SHOT_BYTES,
        threads: bool = True,
    ) -> None:
        """``threads`` False: no heartbeats by themselves: drive `heart` (the simulator does)."""
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout {timeout!r}: seconds above 0")
        if not 0 <= one_shot_bytes <= 1 << 30:
            raise InvalidArgument(f"one_shot_bytes {one_shot_bytes!r}: 0 to 2^30")
        self._ports = ports
        self._session = Session(ports)
        self._heart = Heart(self._session, thread=threads)
        self._shared = Shared(
            self._session, ports.journals, timeout, one_shot_bytes, self._heart.add
        )
        self._close_lock = threading.Lock()
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._shared.forked:
            self.close()

    def _deadline(self, timeout: float | None) -> float:
        """When a call ends that begins now. `NotForkSafe`, `IllegalState`: it can't begin."""
        self._shared.check()
        return self._shared.deadline(timeout)

    @property
    def heart(self) -> Heart:
        """The heartbeats, for who drives them step by step."""
        return self._heart

    # -- streams --------------------------------------------------------------------------------------

    def create_stream(
        self,
        stream: str,
        segments: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        adopt: bool = False,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a stream (``scope/name``), and its scope if it is new. The same again changes nothing.

        ``segments``: 1 to 10,000 key ranges, each a partition. ``settings``: of the stream's topic, as Kafka
        spells them. ``adopt``: its topic may exist and have records, which readers get as they are.

        Raises: StreamExists (with other settings), TopicNotEmpty, InvalidArgument, TopicMisconfigured, NotReady,
        DeadlineExceeded (again is safe).
        """
        texts = {name: _setting(value) for name, value in (settings or {}).items()}
        deadline = self._deadline(timeout)
        info = self._session.create_stream(stream, segments, texts, deadline, adopt=bool(adopt))
        self._shared.layouts[stream] = info.segments
        return description_of(info)

    def streams(
        self, scope: str | None = None, *, timeout: float | None = None
    ) -> list[StreamDescription]:
        """All streams of a scope, or of the cluster, by name. Raises: UnknownScope, NotReady, DeadlineExceeded."""
        found = self._session.streams(scope, self._deadline(timeout))
        return [description_of(info) for info in found]

    def describe(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """One stream. Raises: UnknownScope, UnknownStream, NotReady, DeadlineExceeded."""
        info = self._session.describe(stream, self._deadline(timeout))
        self._shared.layouts[stream] = info.segments
        return description_of(info)

    def scale(
        self,
        stream: str,
        segments: int | None = None,
        *,
        seal: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
    ) -> StreamDescription:
        """Change the segments of a stream, while transactions are open: none is waited for, none disturbed.

        ``segments``: so many, even ones; those that fit already stay. Or by hand: ``seal`` these active
        segments (ids of `describe`) and open ``ranges`` instead, (low, high) key positions that cover exactly
        the same keys.

        Raises: InvalidArgument, UnknownStream, NotReady (another scaling waits for its partitions),
        DeadlineExceeded (again is safe with ``segments``).
        """
        self._shared.check()
        if (segments is None) == (not seal and not ranges):
            raise InvalidArgument(
                "give a number of segments, or what to seal and which ranges to open"
            )
        info = self._session.scale(
            stream, segments or 0, seal, ranges, self._shared.deadline(timeout)
        )
        self._shared.layouts[stream] = info.segments
        return description_of(info)

    def forget_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Take a LOST stream away for good, with what is left of its topics: its name can be used again.

        An operator's call. Forgotten already is fine. Positions in the old stream kept elsewhere (snapshots,
        checkpoints of Spark queries) are of no use for a new one of that name: throw them away.

        Raises: IllegalState (it is not LOST, or a transaction that is not over has a part in it: `settle` that),
        UnknownScope, UnknownStream, InvalidArgument (the brokers don't delete topics), NotReady, DeadlineExceeded
        (again is safe).
        """
        self._session.forget_stream(stream, self._deadline(timeout))
        self._shared.layouts.pop(stream, None)

    def recover_stream(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """Take a LOST stream back whose topics are those that it had, as they were only out of sight.

        An operator's call. Transactions that were aborted when it was given up stay aborted.

        Raises: IllegalState (a topic is another one, or gone), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded (again is safe).
        """
        return description_of(self._session.recover_stream(stream, self._deadline(timeout)))

    # -- transactions ---------------------------------------------------------------------------------

    def begin(
        self, scope: str, name: str | None = None, keepalive: float = DEFAULT_KEEPALIVE_S
    ) -> Transaction:
        """Begin a transaction in a scope.

        Nothing is sent before it is needed, unless a ``name`` is given: a name is unique in its scope. If it is
        committed already, the handle has its `result`; an open transaction of that name is aborted.
        ``keepalive``: seconds, at least 1, of silence after which the controller aborts it; the handle sends
        heartbeats by itself.

        Raises: InvalidArgument; with a name also UnknownScope, TooManyTransactions, ClockSkew, NotReady,
        DeadlineExceeded.
        """
        self._shared.check()
        keepalive_ms = keepalive_ms_of(keepalive)
        txn = Transaction(self._shared, check_scope(scope), name, keepalive_ms)
        if name is not None:
            txn.open_named()
        return txn

    def reserve(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = DEFAULT_KEEPALIVE_S,
        *,
        timeout: float | None = None,
    ) -> Reservation:
        """Agree on a transaction without beginning it: the first write of whoever joins it does.

        The arguments are those of `begin`. Nobody sends heartbeats for it but who joins with ``heartbeat``, so
        the keepalive has to cover the time between the last write and the commit.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded.
        """
        return reserve(self._session, scope, name, keepalive, self._deadline(timeout))

    def join(self, transaction: bytes | Reservation, heartbeat: bool = False) -> Writer:
        """Write to a transaction begun elsewhere, given its token, or to a reserved one.

        Nothing is sent before the first write. Of a reservation that one begins the transaction, if nobody has
        yet; if it is over already, every write raises `TransactionAborted` or `AlreadyCommitted` (whose
        ``result`` may be that of another one, with the reservation's name).

        ``heartbeat``: keep the transaction alive from here too. Raises: InvalidToken.
        """
        self._shared.check()
        return Writer(self._shared, transaction, heartbeat=heartbeat)

    def commit(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        timeout: float | None = None,
    ) -> Result:
        """Commit a transaction by its token or reservation; see `Transaction.commit` for arguments and errors.

        ``receipts``: exactly the writers to take; None: every finished one. Committed already: the same result.
        A reservation that nobody began is begun and committed, empty.
        """
        check_number(name, number)
        records = receipt_records(receipts, id_of(transaction))
        deadline = self._deadline(timeout)
        if isinstance(transaction, Reservation):
            begun = begin_reserved(self._session, transaction, deadline)
            if isinstance(begun, Outcome):
                return result_of(begun)
            transaction = begun.token
        outcome = self._session.commit(transaction, (), records, name, deadline, number)
        warn_left_out(outcome, receipts)
        return result_of(outcome)

    def abort(
        self,
        transaction: bytes | Reservation,
        reason: str = "aborted by a client",
        *,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction by its token or reservation; aborted already is fine.

        A reservation that nobody began can't be begun after this.

        Raises: AlreadyCommitted, InvalidToken, UnknownTransaction, Expired, NotReady, DeadlineExceeded.
        """
        deadline = self._deadline(timeout)
        if isinstance(transaction, Reservation):
            abort_reserved(self._session, transaction, reason, deadline)
        else:
            self._session.abort(transaction, reason, deadline)

    def settle(
        self,
        transaction: bytes,
        reason: str = "settled by an operator",
        *,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction in all its streams whose merge can't go on, as one of them is LOST; by its token.

        An operator's call. Aborted already is fine. Who reads its other streams' topics plainly, not by
        the history, may have seen events of it, and goes on seeing them: nobody can take them out.

        Raises: IllegalState (no stream of it is lost, or its merge has not begun: `abort` it), AlreadyCommitted,
        InvalidToken, UnknownTransaction, Expired, NotReady, DeadlineExceeded (again is safe).
        """
        self._session.settle(transaction, reason, self._deadline(timeout))

    def state(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """What is known of a transaction, given its token, id (16 bytes or 32 digits) or reservation.

        Changes nothing.

        Raises: UnknownTransaction (nothing is known of it *so far*: a command may be on its way; `resolve`
        makes it final), Expired, InvalidToken, NotReady, DeadlineExceeded.
        """
        return info_of(self._session.state(id_of(transaction), self._deadline(timeout)))

    def resolve(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """`state`, made final: a transaction of which nothing is known is aborted, for ever.

        Raises: Expired, ClockSkew (nothing is known of it, and its id was made more than a day ahead of the
        controller's clock: it can't begin either), InvalidToken, NotReady, DeadlineExceeded (again is safe).
        """
        return info_of(self._session.resolve(id_of(transaction), self._deadline(timeout)))

    def transactions(
        self,
        scope: str | None = None,
        finished: bool = False,
        limit: int = 100,
        *,
        timeout: float | None = None,
    ) -> list[TransactionInfo]:
        """Open transactions, the oldest first; with ``finished`` the ended ones too, and the newest first.

        Raises: UnknownScope, InvalidArgument (``limit`` is 1 to 10,000), NotReady, DeadlineExceeded.
        """
        self._shared.check()
        check_type("a limit", limit, int)
        found = self._session.transactions(scope, finished, limit, self._shared.deadline(timeout))
        return [info_of(outcome) for outcome in found]

    def series(
        self, scope: str, name: str | None = None, *, timeout: float | None = None
    ) -> list[SeriesInfo]:
        """The series of a scope and where they stand, or the one of this name, if it has a commit; by name.

        Raises: UnknownScope, NotReady, DeadlineExceeded.
        """
        return self._session.series(scope, name, self._deadline(timeout))

    def set_series(
        self,
        scope: str,
        name: str,
        number: int,
        *,
        expected: int | None,
        key: bytes,
        timeout: float | None = None,
    ) -> None:
        """Let a series stand at ``number`` (-1: as if it had no commit): the next commit must have a higher one.

        An operator's call: ``key`` is the controllers', 32 bytes. ``expected``: where it stands now (None: no
        commit).

        Raises: IllegalState (it stands elsewhere), InvalidToken (another key), InvalidArgument, UnknownScope,
        NotReady, DeadlineExceeded (again is safe).
        """
        self._shared.check()
        command = SetSeries(scope, name, expected, number, b"")
        proved = replace(command, proof=operator_proof(encode(command), key))
        self._session.set_series(proved, self._shared.deadline(timeout))

    def commands(self, *, timeout: float | None = None) -> list[CommandsInfo]:
        """How far each control partition is with its commands, and which of them it set aside.

        Raises: NotReady, DeadlineExceeded.
        """
        found = self._session.commands(self._deadline(timeout))
        return [
            CommandsInfo(
                n, got.position, got.end, got.set_aside, got.open_transactions, got.outcomes
            )
            for n, got in found
        ]

    # -- its end --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Handles that are open go stale at the controller; abort them first."""
        if self._shared.forked:
            raise NotForkSafe("this client was made before a fork: the parent closes it")
        with self._close_lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        for handle in list(self._shared.handles):
            handle.client_closes()
        self._heart.close()
        if self._ports.readers is not None:
            self._ports.readers.close()
        self._ports.journals.close()
        self._ports.bus.close()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        # Of a process that ends `_at_exit` takes care, as long as modules are there to do it with.
        if shared and not shared.closed and not shared.forked and not sys.is_finalizing():
            self.close()

    def _after_fork(self) -> None:
        self._shared.forked = True
        for handle in list(self._shared.handles):
            handle.after_fork()
        if self._ports.readers is not None:
            self._ports.readers.after_fork()
        self._ports.bus.after_fork()
        self._ports.journals.after_fork()


def _after_fork_in_child() -> None:
    for client in list(_clients):
        client._after_fork()  # noqa: SLF001


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


@atexit.register
def _at_exit() -> None:
    for client in list(_clients):
        if not client._shared.forked:  # noqa: SLF001
            client.close()


def _setting(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
