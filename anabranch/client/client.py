"""The client that `anabranch.connect` makes.

The file is long because it has every call of a client, with what it does and raises. Calls that take more
than a command are carried out by parts of the client: `streams`, `reading`, `processors`, `admin`, `system`.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, overload

from anabranch.client.admin import Administration, lane_acls
from anabranch.client.heartbeats import Heart
from anabranch.client.ports import ClientPorts
from anabranch.client.processors import Processors, check_imported
from anabranch.client.reading import Reading
from anabranch.client.reservation import (
    Reservation,
    abort_by,
    asked_about,
    commit_by,
    id_of,
    keepalive_ms_of,
    reserve,
)
from anabranch.client.session import Session
from anabranch.client.shared import Handle, Shared
from anabranch.client.streams import Streams, given
from anabranch.client.system import SystemTables
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer, join
from anabranch.core import defaults
from anabranch.core.authorize import ADD, ALL, TAKE
from anabranch.core.hybrid_time import MAX, to_text
from anabranch.core.legal_names import check_number, check_scope, check_type
from anabranch.core.limits import Room
from anabranch.core.stream_settings import TABLE
from anabranch.errors import ClockSkew, InvalidArgument, MalformedRecord, NotForkSafe
from anabranch.extras import need
from anabranch.presentation.system_tables import (
    CommitRow,
    LockRow,
    TableRow,
    TransactionRow,
    VersionRow,
    check_call,
)
from anabranch.reading.committed_log import ReaderPorts
from anabranch.reading.history_search import Start, check_at
from anabranch.reading.ordered_reader import Reader
from anabranch.reading.snapshot import At, Mode, Snapshot, SnapshotPlan
from anabranch.reading.tasks.groups import Mirror
from anabranch.reading.tasks.lag import InputLag, Lag, input_lags
from anabranch.reading.tasks.standing import (
    ConsumerGroup,
    count_events,
    group_of,
    groups_of,
    move_group,
)
from anabranch.reading.tasks.stored import stored
from anabranch.reading.transaction_reader import TransactionReader
from anabranch.schemas import records as r
from anabranch.topics.rights import Acl
from anabranch.types import (
    AuditEntry,
    CommandsInfo,
    Grant,
    Lane,
    Listed,
    OpenTransaction,
    Receipt,
    Result,
    StreamDescription,
    Tenure,
    TransactionInfo,
    description_of,
    info_of,
    open_of,
    receipt_records,
    result_of,
    right_bits,
    warn_left_out,
)

if TYPE_CHECKING:
    from anabranch.reading.tasks.reader import TaskReader
    from anabranch.tables.changes import Changes
    from anabranch.tables.indexes import Index
    from anabranch.tables.replica import Replica

_clients: weakref.WeakSet[Client] = weakref.WeakSet()


class Client:
    """A connection to the controllers of a cluster. Thread-safe; a forked child can't use it.

    Made by `anabranch.connect`. Calls without a ``timeout`` end after the client's own, in seconds.
    """

    def __init__(
        self,
        ports: ClientPorts,
        *,
        timeout: float = defaults.TIMEOUT_S,
        one_shot_bytes: int = defaults.ONE_SHOT_BYTES,
        threads: bool = True,
    ) -> None:
        """``threads`` False: no thread sends heartbeats; the caller drives `heart`, as the simulator does."""
        if not 0 < timeout < 1e9:
            raise InvalidArgument(f"timeout {timeout!r}: seconds above 0")
        if not 0 <= one_shot_bytes <= 1 << 30:
            raise InvalidArgument(f"one_shot_bytes {one_shot_bytes!r}: 0 to 2^30")
        self._threads = threads
        self._close_lock = threading.Lock()
        self._session = Session(ports)
        self._heart = Heart(self._session, thread=threads)
        self._shared = Shared(self._session, ports, timeout, one_shot_bytes, self._heart.add)
        self._streams = Streams(self._shared)
        self._reading = Reading(self._shared)
        self._processors = Processors(self._shared, self._reading)
        self._admin = Administration(self._shared)
        self._system = SystemTables(self._shared, self._reading)
        _clients.add(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._shared.forked:
            self.close()

    @property
    def heart(self) -> Heart:
        """The heartbeats, for a caller that drives them step by step."""
        return self._heart

    @property
    def lane(self) -> str:
        """The lane that this client asks by."""
        return self._shared.ports.lane

    @property
    def last_timestamp(self) -> int:
        """The highest hybrid time that this client was told, by answers, tokens and `observe`; 0: none.

        Its transactions commit above it, and its snapshots have all up to it. Readers don't raise it.
        """
        return self._session.highest_timestamp

    def observe(self, timestamp: int) -> None:
        """Let all that this client commits from now on, anywhere, come after this commit timestamp.

        Meant for one that came on another way than by an answer or a token: in a message, in an event that was
        read. Nothing is sent.

        Raises: ClockSkew (more than ``max_clock_skew`` ahead of this machine's clock), InvalidArgument; nothing
        changed.
        """
        check_type("a timestamp", timestamp, int)
        if not 0 <= timestamp <= MAX:
            raise InvalidArgument(f"timestamp {timestamp}: a hybrid time, 0 to 2^63 - 1")
        if not self._session.observe(timestamp):
            raise ClockSkew(
                f"the time {to_text(timestamp)} is more than {self._shared.ports.max_clock_skew:g} s ahead of this "
                "machine's clock: set the clocks"
            )

    @property
    def cluster(self) -> str:
        """The brokers' name of their cluster, and the prefix. Raises: NotReady, DeadlineExceeded."""
        return self._session.cluster(self._shared.checked_deadline(None))

    # -- transactions begun here, and writers -------------------------------------------------------

    def begin(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        tenure: Tenure | None = None,
    ) -> Transaction:
        """Begin a transaction in a scope.

        Only a ``name`` is sent at once: names are unique in a scope. If it is committed already, the handle has
        its `result`; an open transaction of that name is aborted. ``keepalive``: seconds (at least 1) of silence
        after which the controller aborts the transaction; the handle sends heartbeats by itself. ``tenure``: the
        commit will move positions of its tasks; then without a name.

        Raises: InvalidArgument; with a name also UnknownScope, TooManyTransactions, ClockSkew, NotReady,
        DeadlineExceeded.
        """
        self._shared.check()
        keepalive_ms = keepalive_ms_of(keepalive)
        if tenure is not None and (name is not None or tenure.scope != scope):
            raise InvalidArgument(
                f"a transaction that moves positions of {tenure.processor} is of its scope, and has no name"
            )
        txn = Transaction(self._shared, check_scope(scope), name, keepalive_ms, tenure)
        if name is not None:
            txn.open_named()
        return txn

    def reserve(
        self,
        scope: str,
        name: str | None = None,
        keepalive: float = defaults.KEEPALIVE_S,
        *,
        timeout: float | None = None,
    ) -> Reservation:
        """Agree on a transaction without beginning it: the first write of a joined writer begins it.

        The arguments are those of `begin`. Only a writer joined with ``heartbeat`` sends heartbeats; without one
        the keepalive has to cover the time between the last write and the commit.

        Raises: InvalidArgument, UnknownScope, NotReady, DeadlineExceeded.
        """
        return reserve(
            self._session, scope, name, keepalive, self._shared.checked_deadline(timeout)
        )

    def join(
        self, transaction: bytes | Reservation, heartbeat: bool = False, *, label: str = ""
    ) -> Writer:
        """Make a writer for a transaction, given its token or its reservation.

        Nothing is sent before the first write, which begins a reservation that has not begun. If the transaction
        is over, every write raises `TransactionAborted` or `AlreadyCommitted`; the ``result`` of the latter may be
        of another transaction that took the reservation's name.

        ``heartbeat``: keep the transaction alive from here too. A token needs the right write, and heartbeat for
        that. ``label``: at most 64 characters, by which `WritersUnfinished` and operators' tools call the writer.
        Raises: InvalidToken, NotAuthorized, InvalidArgument.
        """
        self._shared.check()
        return join(self._shared, transaction, heartbeat=heartbeat, label=label)

    # -- transactions by token, id or reservation ---------------------------------------------------

    def commit(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        consumed: r.Consumed | None = None,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> Result:
        """Commit a transaction by its reservation, or by a token with the right commit.

        With the ``secret`` of what prepared it the id (16 bytes) does, from any lane. Arguments and errors are
        those of `Transaction.commit`; `NotAuthorized`: the token lacks that right.

        ``receipts``: exactly the writers to take; None: every finished one. Repeating it gives the same result.
        A reservation that no writer began is begun and committed, empty.
        """
        check_number(name, number)
        records = receipt_records(receipts, id_of(transaction))
        command = r.Commit(b"", (), records, name, 0, number, consumed, None, secret)
        deadline = self._shared.checked_deadline(timeout)
        outcome = commit_by(self._session, transaction, command, deadline)
        warn_left_out(outcome, receipts)
        return result_of(outcome)

    def prepare(
        self,
        transaction: bytes | Reservation,
        receipts: Sequence[Receipt | bytes] | None = None,
        name: str | None = None,
        number: int | None = None,
        *,
        by: bytes = b"",
        attempt: bytes = b"",
        timeout: float | None = None,
    ) -> TransactionInfo:
        """Prepare a transaction by its reservation, or by a token with the right commit.

        Arguments, result and errors are those of `Transaction.prepare`.
        """
        check_number(name, number)
        records = receipt_records(receipts, id_of(transaction))
        command = r.Commit(b"", (), records, name, 0, number, None, r.Prepare(by, attempt))
        deadline = self._shared.checked_deadline(timeout)
        return info_of(commit_by(self._session, transaction, command, deadline))

    def abort(
        self,
        transaction: bytes | Reservation,
        reason: str = "aborted by a client",
        *,
        secret: bytes | None = None,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction by its reservation, or by a token with the right abort. Repeating the call is fine.

        A reservation that no writer began can't be begun after this. The id (16 bytes) does in the lane that began
        it, for operators, and with the ``secret`` of what prepared it.

        Raises: AlreadyCommitted, InvalidToken, NotAuthorized, UnknownTransaction, Expired, NotReady,
        DeadlineExceeded.
        """
        abort_by(self._session, transaction, reason, secret, self._shared.checked_deadline(timeout))

    def settle(
        self,
        transaction: bytes,
        reason: str = "settled by an operator",
        *,
        presume: bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Abort a transaction in all its streams: one of them is LOST, or in trouble, so its merge does not go on.

        ``presume``: it is PREPARED, and its coordinator will never say how it ends; True commits it.

        For operators, by its id or a token of it. Repeating the call is fine. Consumers that read the topics of its
        other streams directly, without the history, may have seen events of it and keep seeing them: events can't
        be taken out.

        Raises: IllegalState (nothing stops its merge, or that has not begun: `abort` it), AlreadyCommitted,
        InvalidToken, UnknownTransaction, Expired, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.checked_deadline(timeout)
        self._session.settle(id_of(transaction), reason, deadline, presume)

    def state(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """The state of a transaction, given its token, id (16 bytes or 32 digits) or reservation. Changes nothing.

        Raises: UnknownTransaction (no controller knows it *so far*: a command may be on its way, `resolve` makes
        this final; or this client may not see it), NotAuthorized (the token's time is over), Expired,
        InvalidToken, NotReady, DeadlineExceeded.
        """
        txn_id, _, token = asked_about(self._session, transaction)
        deadline = self._shared.checked_deadline(timeout)
        return info_of(self._session.state(txn_id, token, deadline))

    def resolve(
        self, transaction: bytes | str | Reservation, *, timeout: float | None = None
    ) -> TransactionInfo:
        """`state`, made final: a transaction that no controller knows is aborted, so that it can never begin.

        Raises: Expired, ClockSkew (an unknown id, made more than a day ahead of the controller's clock: it can't
        begin either), InvalidToken, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.checked_deadline(timeout)
        txn_id, scope, token = asked_about(self._session, transaction)
        found = self._session.resolve(txn_id, scope, token, deadline)
        return info_of(self._session.whole(found, token, deadline))

    def transactions(
        self,
        scope: str | None = None,
        finished: bool = False,
        limit: int = 100,
        *,
        timeout: float | None = None,
    ) -> Listed[TransactionInfo]:
        """Open transactions, the oldest first; with ``finished`` also the ended ones, the newest first.

        The list's ``missing``: control partitions that don't answer. Raises: UnknownScope, InvalidArgument
        (``limit`` is 1 to 10,000); NotReady, DeadlineExceeded (none answers).
        """
        check_type("a limit", limit, int)
        wanted = r.ListTransactions(scope, finished, limit, None)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.transactions(wanted, deadline).each(info_of)

    def open_transactions(
        self, scope: str | None = None, limit: int = 100, *, timeout: float | None = None
    ) -> Listed[OpenTransaction]:
        """Open transactions, the oldest first, with bytes, ages, what is left of keepalives, and streams.

        ``missing`` and errors: as in `transactions`.
        """
        check_type("a limit", limit, int)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.open_ones(r.ListOpen(scope, None, limit), deadline).each(open_of)

    def open_transaction(self, txn_id: bytes, *, timeout: float | None = None) -> OpenTransaction:
        """One transaction by its id, open or not, with its writers and how far its merge is.

        Raises: as `state`.
        """
        deadline = self._shared.checked_deadline(timeout)
        return open_of(self._session.open_ones(r.ListOpen(None, id_of(txn_id), 1), deadline)[0])

    def prepared(
        self,
        scope: str | None = None,
        *,
        secret: bytes | None = None,
        limit: int = 10_000,
        timeout: float | None = None,
    ) -> Listed[TransactionInfo]:
        """Prepared transactions, which wait for their coordinator's word, the oldest first.

        ``secret``: those prepared ``by`` its SHA-256, whichever lane began them. ``missing`` and errors:
        as in `transactions`.
        """
        wanted = r.ListTransactions(scope, False, limit, None, True, secret)
        deadline = self._shared.checked_deadline(timeout)
        return self._session.transactions(wanted, deadline).each(info_of)

    def series(
        self, scope: str, name: str | None = None, *, timeout: float | None = None
    ) -> list[r.SeriesInfo]:
        """The latest number of each series of a scope, by name, and whose it is; ``name``: of this series alone.

        Number -1: an operator gave it to its ``owner``, and it has no commit yet. ``taken_ms``: Unix milliseconds.

        Raises: UnknownScope, NotReady, DeadlineExceeded.
        """
        return self._session.series(scope, name, self._shared.checked_deadline(timeout))

    def set_series(
        self,
        scope: str,
        name: str,
        number: int,
        *,
        expected: int | None,
        owner: str | None = None,
        timeout: float | None = None,
    ) -> None:
        """Move a series to ``number`` (-1: as if it had no commit): the next commit must have a higher one.

        Takes the right series. ``expected``: its number now (None: no commit). ``owner``: the lane that has it from
        now on; "": all that may write to the whole scope; None: as it is.

        Raises: IllegalState (its number is another one), NotAuthorized, InvalidArgument, UnknownLane,
        UnknownScope, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("set_series", timeout)
        partition = self._session.find_scope(check_scope(scope), deadline)
        command = r.SetSeries(scope, name, expected, number, owner)
        self._session.ask(partition, command, r.SeriesList, deadline)

    # -- streams ------------------------------------------------------------------------------------

    def create_stream(
        self,
        stream: str,
        segments: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        adopt: bool = False,
        near: str | None = None,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a stream (``scope/name``), and its scope if that is new. Repeating the call changes nothing.

        ``segments``: 1 to 10,000 key ranges, each a partition. ``settings``: of the stream's topic, under Kafka's
        names. ``adopt``: the topic may exist and hold records; readers get those unchanged (it
        takes ``operate`` on ``*``). ``near``: a scope; a new one is put on the same control partition, so that
        transactions write to both. None: on the one with the fewest scopes.

        Raises: StreamExists (with other settings), TopicNotEmpty, InvalidArgument (also: the scope exists, and not
        near that one), NotAuthorized, UnknownScope (``near``), TopicMisconfigured, NotReady, DeadlineExceeded
        (repeating is safe).
        """
        deadline = self._shared.deadline_outside("create_stream", timeout)
        return self._streams.create(stream, segments, settings, deadline, adopt=adopt, near=near)

    def create_table(
        self,
        table: str,
        segments: int = 1,
        settings: Mapping[str, Any] | None = None,
        *,
        near: str | None = None,
        timeout: float | None = None,
    ) -> StreamDescription:
        """Create a table: a stream whose key is a row's key and whose last value is the row; no value deletes it.

        ``settings``: as of `create_stream`, without ``retention.*``; ``table.history.ms``: how long replicas keep
        versions, milliseconds (an hour). All ways to write to a stream write to it; `replica` reads it.

        Raises: as `create_stream`.
        """
        self._shared.deadline_outside("create_table", timeout)
        chosen = {TABLE: "true", **given(settings)}
        return self.create_stream(table, segments, chosen, near=near, timeout=timeout)

    def streams(
        self, scope: str | None = None, *, timeout: float | None = None
    ) -> Listed[StreamDescription]:
        """All streams of a scope, or of the cluster, by name; ``missing``: control partitions that don't answer.

        Raises: UnknownScope; NotReady, DeadlineExceeded (none answers).
        """
        return self._session.streams(scope, self._shared.checked_deadline(timeout)).each(
            description_of
        )

    def describe(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """One stream. Raises: UnknownScope, UnknownStream, NotReady, DeadlineExceeded."""
        return self._streams.describe(stream, self._shared.checked_deadline(timeout))

    def scale(
        self,
        stream: str,
        segments: int | None = None,
        *,
        seal: Sequence[int] = (),
        ranges: Sequence[tuple[int, int]] = (),
        timeout: float | None = None,
    ) -> StreamDescription:
        """Change the segments of a stream. Open transactions neither delay it nor notice it.

        ``segments``: split the keys evenly into so many; segments that fit already stay. Or name both sides:
        ``seal`` these active segments (ids from `describe`) and open ``ranges`` instead, (low, high) key positions
        that cover exactly the same keys.

        Raises: InvalidArgument, UnknownScope, UnknownStream, StreamLost, TooManyStreams, TopicMisconfigured (its
        topics have other settings or partitions), NotAuthorized, NotReady (another scaling waits for partitions),
        DeadlineExceeded (repeating is safe with ``segments``).
        """
        deadline = self._shared.deadline_outside("scale", timeout)
        return self._streams.scale(stream, segments, seal, ranges, deadline)

    def alter_stream(
        self, stream: str, settings: Mapping[str, Any], *, timeout: float | None = None
    ) -> StreamDescription:
        """Change settings of a stream; transactions and readers go on. Repeating the call is fine.

        ``settings``: as of `create_stream`, of which ``replication.factor`` stays as it is, and
        ``max.message.bytes`` can only be raised. None: as if the setting had not been given.

        For operators. After a refusal the settings are those of before.

        Raises: UnsupportedSetting, InvalidArgument (also: the brokers refuse), TopicMisconfigured, NotAuthorized,
        UnknownScope, UnknownStream, StreamLost, NotReady (another change is under way, or the brokers are away),
        DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("alter_stream", timeout)
        return self._streams.alter(stream, settings, deadline)

    def truncate_stream(
        self, stream: str, until: int | datetime, *, timeout: float | None = None
    ) -> StreamDescription:
        """Delete a stream's events up to a time, for good: all that was committed at or before it, and no more.

        ``until``: a commit timestamp, or a datetime with its time zone. No transaction is torn in the stream; give
        all streams of a scope the same one, and none is torn over them. Open transactions are not touched.
        Readers that stand before it go on behind it, or raise `SnapshotExpired`, as after retention. Repeating the
        call is fine.

        For operators.

        Raises: InvalidArgument (also: the state of a processor), NotAuthorized, UnknownScope, UnknownStream,
        StreamLost, NotReady (the time is to come; another change is under way; the brokers are away),
        DeadlineExceeded (repeating is safe).
        """
        at = check_at(until, "until")
        if at is None:
            raise InvalidArgument(
                "until None: a commit timestamp, or a datetime with its time zone"
            )
        deadline = self._shared.deadline_outside("truncate_stream", timeout)
        return description_of(
            self._session.ask_stream(stream, r.TruncateStream(stream, at), deadline)
        )

    def forget_stream(self, stream: str, *, timeout: float | None = None) -> None:
        """Remove a LOST stream and what is left of its topics for good; its name can be used again.

        For operators. Repeating the call is fine. Positions in the old stream (snapshots, checkpoints of Spark
        queries) mean nothing in a new stream of that name: throw them away.

        Raises: IllegalState (the stream is not LOST, or a transaction that is not over has a part in it: `settle`
        that), UnknownScope, UnknownStream, InvalidArgument (the brokers don't delete topics), NotReady,
        DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("forget_stream", timeout)
        self._streams.take_away(stream, r.ForgetStream(stream), deadline)

    def delete_stream(
        self, stream: str, *, despite: Sequence[str] = (), timeout: float | None = None
    ) -> None:
        """Delete a stream for good: its topics, events and groups' positions. Its name can be used again.

        For operators. Repeating the call is fine. Plain writes that are not committed yet go, too; readers get
        `UnknownStream`. Positions kept elsewhere: as of `forget_stream`. If the brokers don't delete the topics,
        the stream is LOST: `recover_stream`, or repeat this. ``despite``: processors that read it, and may lose it:
        their workers fail from then on.

        Raises: IllegalState (transactions that are not over have a part in it: commit or abort them; a processor
        reads it that ``despite`` does not name), UnknownScope, UnknownStream, InvalidArgument, NotAuthorized (the
        brokers don't delete topics), NotReady (it is in trouble), DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("delete_stream", timeout)
        self._streams.take_away(stream, r.DeleteStream(stream, tuple(despite)), deadline)

    def recover_stream(self, stream: str, *, timeout: float | None = None) -> StreamDescription:
        """Take a LOST stream back, if its topics are the same ones and were only out of sight.

        For operators. Transactions that were aborted when the stream was given up stay aborted.

        Raises: IllegalState (a topic is another one, or gone), UnknownScope, UnknownStream, NotReady,
        DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.deadline_outside("recover_stream", timeout)
        return description_of(self._session.ask_stream(stream, r.RecoverStream(stream), deadline))

    def effective_settings(self, stream: str, *, timeout: float | None = None) -> dict[str, str]:
        """The settings that the stream's topic has now, by the brokers' word, and not only those that were given.

        `describe` has the settings that were asked for.

        Raises: UnknownStream, NotAuthorized (``DescribeConfigs`` on the topic is missing), NotReady,
        UnsupportedSetting (the client has options that only librdkafka takes).
        """
        return self._streams.settings(stream, self._shared.checked_deadline(timeout))

    def topic_id(self, stream: str, *, timeout: float | None = None) -> str:
        """The id of the stream's topic: another stream of that name, made later, has another one.

        Empty if brokers have no ids. Raises: as `effective_settings`.
        """
        return self._streams.topic(stream, self._shared.checked_deadline(timeout)).topic_id

    def together(self, streams: Sequence[str]) -> dict[str, int]:
        """Stream -> a number: streams with different ones never share a transaction. Raises: UnknownScope."""
        self._shared.check()
        return self._session.together(streams, self._shared.deadline(None))

    # -- reading ------------------------------------------------------------------------------------

    @overload
    def read(
        self,
        streams: str | Sequence[str],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        tenure: None = None,
    ) -> Reader: ...

    @overload
    def read(
        self, streams: str | Sequence[str], *, timeout: float | None = None, tenure: Tenure
    ) -> TaskReader: ...

    def read(
        self,
        streams: str | Sequence[str],
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        tenure: Tenure | None = None,
    ) -> Reader | TaskReader:
        """Committed events of one or more streams; iterate over what is returned, and close it.

        Events of one key come in commit order, however the stream is scaled meanwhile.

        ``group``: members of a group share the events, and go on where it stopped: each event comes at least
        once. None: all events, nothing is kept. ``timeout``: end after so many seconds without an event; None:
        never. ``start``, where there is no position yet: 'begin', 'end', or what was committed after a commit
        timestamp: a hybrid time (of a `Result`) or a datetime with its time zone.

        ``tenure``: events of these tasks of a processor alone, from where they stand; the reader's `consumed` moves
        their positions with a commit. Then without ``group`` and ``start``.

        Raises: UnknownStream, InvalidArgument, NotReady, DeadlineExceeded; while iterating NotReady and
        DeadlineExceeded (going on is safe), FixCallError.
        """
        return self._reading.read(streams, group, timeout, start, tenure)

    def read_transactions(
        self,
        stream: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
    ) -> TransactionReader:
        """Whole transactions of a stream in commit order; iterate over what is returned, and close it.

        A group has one active member; its position is committed after each transaction. The other arguments
        and errors are those of `read`.
        """
        return self._reading.readers().read_transactions(stream, group, timeout, start)

    def snapshot(
        self,
        streams: str | Sequence[str],
        at: At = None,
        since: At = None,
        mode: Mode = "snapshot",
        *,
        timeout: float | None = None,
    ) -> Snapshot:
        """Streams as of a commit timestamp; nothing of them is read yet. One control partition serves their scopes.

        ``at``: a hybrid time (that of a `Result`: the snapshot has that transaction) or a datetime with its time
        zone; one that is still to come is waited for, if it comes before the timeout. None: now, with all that
        anybody has committed before this call, and all that this client has seen. ``since``: only what was
        committed after this time. ``mode``: 'latest' takes what the histories have, with all that anybody has
        committed before this call, and asks no controller (but for where several scopes are, if there are several
        control partitions).

        Raises: UnknownScope, UnknownStream, CrossScope, InvalidArgument (also: ``since`` is later than the
        snapshot); SnapshotExpired (retention has passed it); NotReady (also: the time is not reached, or the
        histories end before it), DeadlineExceeded.
        """
        return self.open_snapshot(self._reading.plan(streams, at, since, mode, timeout))

    def open_snapshot(self, plan: SnapshotPlan | str) -> Snapshot:
        """The snapshot of a plan, or what a position has left of one; another process may have made it.

        Nothing is sent. Raises: InvalidArgument.
        """
        if isinstance(plan, str):
            plan = SnapshotPlan.of_text(plan)
        if not isinstance(plan, SnapshotPlan):
            raise InvalidArgument(
                f"open_snapshot takes what snapshot.plan() or snapshot.position() gave, not {plan!r:.100}"
            )
        self._reading.readers()
        return Snapshot(plan, lambda stream, cut: self._reading.readers().read_cut(stream, cut))

    def progress(
        self, streams: str | Sequence[str], group: str, *, timeout: float | None = None
    ) -> int:
        """The time as of which a copy that this consumer group feeds is whole: the highest one, at most now.

        All that was committed up to it lies below the group's positions, in each of these streams. Take `snapshot`
        at this time to compare the copy.

        Raises: as `snapshot`; InvalidArgument: the group has no position in a stream.
        """
        return self._reading.progress(streams, group, timeout)

    def count_events(self, stream: str) -> Lag:
        """The committed events that a stream has now, and the Unix ms of the oldest of their commits (0: none).

        Not ``exact``: of a long history offsets are counted, so the markers between events, too.

        Raises: UnknownStream, NotReady, NotAuthorized.
        """
        readers = self._reading.readers()
        return count_events(readers.ports, stream, readers.timeout)

    def groups(self, stream: str | None = None) -> list[ConsumerGroup]:
        """The consumer groups with positions in a stream, or in any stream, by name, and how far they are behind.

        Those of plain Kafka consumers of streams' topics, too. A lag counts events, no markers; a stream in trouble
        says why, and is no error. Raises: NotReady, NotAuthorized, InvalidArgument.
        """
        readers = self._reading.readers()
        return groups_of(readers.ports, readers.groups, stream, readers.timeout)

    def group(self, name: str) -> ConsumerGroup:
        """A consumer group, its members, and where it stands in streams.

        Raises: InvalidArgument (there is none of the name), NotReady, NotAuthorized (Describe on the group).
        """
        readers = self._reading.readers()
        return group_of(readers.ports, readers.groups, name, readers.timeout)

    def reset_group(self, name: str, stream: str, start: Start) -> ConsumerGroup:
        """Let a consumer group go on from ``start``, as of `read`, in a stream. Repeating it is harmless.

        Raises: IllegalState (members are in it; nothing was changed), UnknownStream, InvalidArgument, NotReady,
        NotAuthorized (Read on the group), SnapshotExpired (retention has passed that time).
        """
        readers = self._reading.readers()
        return move_group(readers.ports, readers.groups, name, stream, start, readers.timeout)

    def reader_ports(self) -> ReaderPorts:
        """The ports of this client's readers, for programs that read topics themselves."""
        return self._reading.readers().ports

    # -- tables -------------------------------------------------------------------------------------

    def replica(
        self,
        *tables: str,
        folder: str | Path | None = None,
        timeout: float | None = None,
        threads: bool = True,
        index: Mapping[str, Index] | None = None,
    ) -> Replica:
        """A replica of tables of one control partition, in RocksDB; close it, or use it as a context manager.

        ``folder``: kept over restarts, of this replica alone; None: a temporary one. Its transactions and snapshots
        read all of the tables at one instant. ``threads`` False: who waits moves it, or calls its `step`.
        ``index``: names, each with a function of key and row that gives the values to look rows up by
        (`TableSnapshot.lookup`): bytes, several, or None; with several tables (table, function). A folder with
        other names is loaded again; another function needs another name.

        Raises: NotInstalled, UnknownStream, InvalidArgument (it is no table), CrossScope, IllegalState (the folder
        is in use, or of another cluster), NotReady, DeadlineExceeded.
        """
        return self._reading.replica(tables, folder, timeout, threads=threads, index=index)

    def changes(
        self,
        table: str,
        group: str | None = None,
        timeout: float | None = None,
        start: Start = "begin",
        *,
        until: At | Literal["end"] = None,
        before: bool = False,
        folder: str | Path | None = None,
    ) -> Changes:
        """Changes of a table's rows in commit order, whatever wrote them; iterate over what is returned.

        ``group``, ``timeout`` and ``start`` are those of `read_transactions`. ``until``: end with what is committed
        up to this time, 'end' being now; with ``start`` it is the difference between two times, without ``group``.
        ``before``: with the row that was there, which takes a replica of the table in ``folder``, as of `replica`;
        a folder is for one such reader.

        Raises: as `read_transactions` and `replica`; InvalidArgument: ``until`` with a group, or below ``start``.
        While iterating: NotReady and DeadlineExceeded (going on is safe), SnapshotExpired, FixCallError.
        """
        return self._reading.changes(
            table, group, timeout, start, until=until, before=before, folder=folder
        )

    def compact_table(
        self,
        table: str,
        *,
        plain_readers_lose_history: bool = False,
        folder: str | Path | None = None,
        timeout: float = defaults.COMPACT_S,
        progress: Callable[[int], None] = lambda _: None,
    ) -> r.BaseRow:
        """Make a base of a table, which new replicas begin at, and delete what no promised snapshot needs.

        A base has all rows as of now minus ``table.history.ms``, each with its own commit. Repeating the call, also
        in several processes at once, is fine: what one began the next one finishes. ``folder``: of a replica, kept
        for the next time. ``timeout``: seconds. ``progress``: called with the rows that are written.

        ``plain_readers_lose_history``: say so. A consumer that reads the topic from its beginning afterwards, as a
        GlobalKTable does, lacks all rows that did not change since; the companion stream ``<table>-base`` has them.

        For operators, of the lane that made the first base.

        Raises: InvalidArgument (also: not said so), IllegalState (groups that read changes have not come so far: it
        names them), NotReady (the table is too young; a snapshot needs what would go; another process makes a
        base), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        self._shared.deadline_outside("compact_table", None)
        need("rocksdict", "pyarrow", extra="tables")
        from anabranch.tables.compact import compact

        if not plain_readers_lose_history:
            raise InvalidArgument(
                f"consumers that read the topic of {table} from its beginning will lack rows that don't change any "
                "more: say plain_readers_lose_history=True (`--plain-readers-lose-history`) if that is fine"
            )
        open_replica = partial(self._reading.replica, [table], folder, None, threads=self._threads)
        return compact(self, table, lambda at: open_replica(held=at), timeout, progress)

    def publish_base(self, table: str, timestamp: int, txn_id: bytes) -> r.BaseRow:
        """Let a table begin at a base that is committed, for programs that make bases. Repeating it is harmless.

        ``timestamp``: its rows are as of this hybrid time, of a whole second. ``txn_id``: its transaction, of the
        companion stream alone, which has that second's number in the series of the companion's name.

        For operators.

        Raises: IllegalState (it is none, or there is a later one), InvalidArgument, NotReady (snapshots need what
        would go; another change is under way), NotAuthorized, UnknownStream, DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("publish_base", None)
        info = self._session.ask_stream(table, r.PublishBase(table, timestamp, txn_id), deadline)
        if info.base is None:
            raise MalformedRecord(f"the controller tells no base of {table}")
        return info.base

    # -- processors ---------------------------------------------------------------------------------

    def create_processor(
        self,
        processor: str,
        inputs: str | Sequence[str | r.ProcessorInput],
        tasks: int = defaults.TASKS,
        start: Start = "begin",
        *,
        stores: Sequence[str] | Mapping[str, str] = (),
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Make a processor (``scope/name``, of an existing scope). Repeating it changes nothing, but adds stores.

        ``inputs``: streams, of any scopes, or where to begin in each. ``tasks``: a power of two up to 1,024; the
        most that work side by side, it never changes. ``start``: where its tasks begin, as of `read`; logged once.
        ``stores``: names; with one or more it has state, the stream ``scope/name.state``. None of them is ever
        taken away. As a mapping: to what each is; another kind under that name is refused until a reset.

        Raises: UnknownScope, UnknownStream, IllegalState (it exists with other tasks, inputs or kinds of stores),
        InvalidArgument, NotAuthorized (the right process), NotReady, DeadlineExceeded, and for its state as
        `create_stream`.
        """
        deadline = self._shared.deadline_outside("create_processor", timeout)
        return self._processors.create(processor, inputs, tasks, start, deadline, stores=stores)

    def reset_processor(
        self,
        processor: str,
        start: Start | None = None,
        *,
        keep_state: bool = False,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Let a processor begin again, from ``start`` (as of `read`), without its state: all of its tenures end.

        ``keep_state``: its stores stay as they are; then without a ``start`` its positions do, too. Streams
        keep what it has written. Each call resets once more.

        Raises: UnknownScope, UnknownStream, UnknownProcessor, InvalidArgument (neither start nor keep_state),
        IllegalState (another one reset it at the same time), NotReady (a commit of it is being merged),
        NotAuthorized (the right process), DeadlineExceeded.
        """
        deadline = self._shared.deadline_outside("reset_processor", timeout)
        return self._processors.reset(processor, start, bool(keep_state), deadline)

    def import_group(
        self,
        processor: str,
        group: str,
        inputs: str | Sequence[str] = (),
        tasks: int = defaults.TASKS,
        *,
        timeout: float | None = None,
    ) -> r.ProcessorInfo:
        """Let a processor begin where a consumer group of Kafka's stands in the topics of its inputs.

        With ``inputs`` it is made, else it is there and is reset, without its state. The processor begins with the
        first commit of each input that the group has not read whole: nothing is left out, some events may come
        again. Stop the group's members before.

        Raises: as `create_processor` and `reset_processor`; InvalidArgument (the group has no offsets there, or is
        the processor's own mirror), IllegalState (with inputs: it begins elsewhere already), SnapshotExpired.
        """
        check_imported(processor, group)
        deadline = self._shared.deadline_outside("import_group", timeout)
        return self._processors.import_group(processor, group, inputs, tasks, deadline)

    def delete_processor(self, processor: str, *, timeout: float | None = None) -> None:
        """Take a processor away, with its state. One of that name that is made later begins without it.

        The topics of its state are deleted behind the answer.

        Raises: as `reset_processor`.
        """
        deadline = self._shared.deadline_outside("delete_processor", timeout)
        self._processors.delete(processor, deadline)

    def processors(self, scope: str, *, timeout: float | None = None) -> list[r.ProcessorInfo]:
        """The processors of a scope, by name, without their tasks. Raises: UnknownScope, NotReady."""
        return self._processors.listed(scope, self._shared.checked_deadline(timeout))

    def processor(self, processor: str, *, timeout: float | None = None) -> r.ProcessorInfo:
        """A processor, and where its tasks stand. Raises: UnknownScope, UnknownProcessor, NotReady."""
        return self._processors.described(processor, self._shared.checked_deadline(timeout))

    def check_outputs(
        self, processor: str, streams: Iterable[str], *, timeout: float | None = None
    ) -> dict[str, Room]:
        """Check that commits of a processor can write to these streams.

        Returns each stream's limits of events, where they can be known. Raises: CrossScope, UnknownScope,
        UnknownStream, NotReady, DeadlineExceeded.
        """
        deadline = self._shared.checked_deadline(timeout)
        return self._processors.check_outputs(processor, streams, deadline)

    def take(
        self,
        processor: str,
        tasks: Iterable[int] | None = None,
        *,
        holder: str | None = None,
        timeout: float | None = None,
    ) -> Tenure:
        """Take tasks of a processor (None: all): no other tenure commits for them from now on.

        The answer comes once their commits that were decided before are merged: so where the tasks stand is final.
        ``holder``: for people; None: this host and process.

        Raises: TenureLost (another one took a task at the same time, nothing was changed: take them if they are
        yours), UnknownScope, UnknownProcessor, InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        return self._processors.take(
            processor, tasks, holder, self._shared.checked_deadline(timeout)
        )

    def release(self, tenure: Tenure, *, timeout: float | None = None) -> None:
        """Give up tasks. Those that another one has taken are left alone. Repeating it is fine."""
        self._processors.release(tenure, self._shared.checked_deadline(timeout))

    def stored(
        self, processor: str, store: str, key: bytes, task: int | None = None
    ) -> bytes | None:
        """The committed value of a key in a processor's store, None if there is none. Reads a whole partition.

        ``task``: of a store that is local, which task's; None: that of the key.

        Raises: UnknownScope, UnknownProcessor, InvalidArgument (no such store or task), NotReady, NotAuthorized.
        """
        readers, info = self._reading.readers(), self.processor(processor)
        with readers.source() as source:
            return stored(source, info, store, key, task, readers.timeout)

    def mirror(self, processor: str, ask: Callable[[], r.ProcessorInfo] | None = None) -> Mirror:
        """A mirror of a processor's positions for Kafka's tools: call its `step` every few seconds; close it.

        ``ask``: describes the processor; None: `processor` does.
        """
        readers = self._reading.readers()
        ask = ask or partial(self.processor, processor)
        return Mirror(readers.ports, processor, ask, readers.timeout)

    def lag(self, info: r.ProcessorInfo) -> list[InputLag]:
        """How far the tasks of a processor, as `processor` told of it, are behind each of its inputs.

        Read from the inputs' histories. An input in trouble says why, and is no error.
        """
        readers = self._reading.readers()
        with readers.source() as source:
            return input_lags(source, info, readers.timeout)

    # -- operators ----------------------------------------------------------------------------------

    def lanes(self, *, timeout: float | None = None) -> list[Lane]:
        """All lanes, by name. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return self._admin.lanes(self._shared.checked_deadline(timeout))

    def add_lane(
        self,
        name: str,
        principals: Iterable[str] = (),
        quotas: Mapping[str, int | None] | None = None,
        *,
        apply: bool = False,
        adopt_topics: bool = False,
        timeout: float | None = None,
    ) -> Lane:
        """Make a lane: its two topics, then the lane itself in all control partitions. Repeating it is safe.

        A lane that exists gets more partitions for its commands if control partitions were added.

        Before that its ``principals`` (``User:etl``) must be the only ones who may write to its commands and read
        its answers: with ``apply`` the brokers are told so first, else `anabranch.topics.rights.client_rights` says
        what to grant. ``quotas``: those to set, None for the default; all others of the lane stay as they are.
        ``adopt_topics``: the topics may exist, empty and as they should be, as an attempt leaves them that was cut
        short.

        Raises: InvalidArgument, NotAuthorized, IllegalState (a topic exists; the brokers keep no rules), NotReady,
        DeadlineExceeded (repeat it, then with ``adopt_topics``).
        """
        acls = lane_acls(self._shared.ports.prefix, name, principals)
        deadline = self._shared.checked_deadline(timeout)
        return self._admin.add_lane(name, acls, quotas, deadline, apply=apply, adopt=adopt_topics)

    def block_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Read no more commands of a lane; commits of it that wait undecided are refused. Repeating it is fine.

        Raises: UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        return self._admin.block(name, True, self._shared.checked_deadline(timeout))

    def unblock_lane(self, name: str, *, timeout: float | None = None) -> Lane:
        """Read a lane's commands again, from its end as of now: those sent meanwhile are never carried out.

        Raises: as `block_lane`.
        """
        return self._admin.block(name, False, self._shared.checked_deadline(timeout))

    def grants(self, *, timeout: float | None = None) -> list[Grant]:
        """All grants, by lane and pattern. Raises: NotAuthorized, NotReady, DeadlineExceeded."""
        return self._admin.grants(self._shared.checked_deadline(timeout))

    def grant(
        self, lane: str, pattern: str, rights: Iterable[str], *, timeout: float | None = None
    ) -> Grant:
        """Give a lane rights, such as ``("write", "describe")``, beside those that it has on this pattern.

        Patterns are ``scope/stream``, ``scope/*`` and ``*``. Returns all rights of the lane on exactly this one.

        Raises: InvalidArgument, UnknownLane, NotAuthorized, NotReady, DeadlineExceeded (repeating is safe).
        """
        deadline = self._shared.checked_deadline(timeout)
        return self._admin.set_grant(lane, pattern, ADD | right_bits(rights), deadline)

    def revoke(
        self,
        lane: str,
        pattern: str,
        rights: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Grant:
        """Take rights (None: all) on exactly this pattern from a lane; returns those left. Others' stay.

        Raises: as `grant`.
        """
        taken = int(ALL) if rights is None else right_bits(rights)
        deadline = self._shared.checked_deadline(timeout)
        return self._admin.set_grant(lane, pattern, TAKE | taken, deadline)

    def audit_log(self, limit: int = 100, *, timeout: float | None = None) -> list[AuditEntry]:
        """Commands of operators, the newest first: once for each control partition that carried them out.

        Raises: InvalidArgument, NotAuthorized, NotReady, DeadlineExceeded.
        """
        check_type("a limit", limit, int)
        if limit < 1:
            raise InvalidArgument(f"limit {limit}: 1 or more")
        return self._admin.audit_log(limit, self._shared.checked_deadline(timeout))

    def commands(self, *, timeout: float | None = None) -> Listed[CommandsInfo]:
        """How many commands each control partition has handled, and which it set aside.

        ``missing``: control partitions that don't answer. Raises: NotReady, DeadlineExceeded (none answers).
        """
        return self._admin.commands(self._shared.checked_deadline(timeout))

    def acls(self, *, timeout: float | None = None) -> list[Acl]:
        """The brokers' own rules about who may do what. Raises: NotAuthorized, IllegalState (they keep none)."""
        return self._admin.acls(self._shared.checked_deadline(timeout))

    # -- system tables ------------------------------------------------------------------------------

    @overload
    def system(
        self, name: Literal["transactions"], of: str | None = None, **how: Any
    ) -> Listed[TransactionRow]: ...

    @overload
    def system(
        self, name: Literal["locks"], of: str | None = None, **how: Any
    ) -> Listed[LockRow]: ...

    @overload
    def system(self, name: Literal["commits"], of: str, **how: Any) -> Listed[CommitRow]: ...

    @overload
    def system(
        self, name: Literal["tables"], of: str | None = None, **how: Any
    ) -> Listed[TableRow]: ...

    @overload
    def system(self, name: Literal["versions"], of: str, **how: Any) -> Listed[VersionRow]: ...

    def system(  # type: ignore[misc] # `check_call` judges `how`
        self,
        name: str,
        of: str | None = None,
        *,
        key: bytes | None = None,
        start: At = None,
        until: At = None,
        folder: str | Path | None = None,
        limit: int = 1000,
        timeout: float | None = None,
    ) -> Listed[Any]:
        """A system table: rows of named columns, as pandas takes them.

        'transactions', of a scope or of all: open ones, the oldest first, then those that ended and are kept.
        'locks', of a scope or of all: registered ones of open transactions on tables, and who waits for whom.
        'commits', of a scope or a stream: committed after ``start`` and up to ``until``, the newest first; None:
        all, now. To go on, give the last one's timestamp - 1 as ``until``. 'tables', of a scope or of all, by name.
        'versions', of a table's ``key``: as a replica of it keeps them (``folder``, as of `replica`).
        ``limit``: 1 to 10,000 rows. ``timeout``: seconds, of each question. The list's ``missing``: as in
        `transactions`.

        Raises: InvalidArgument, UnknownScope, UnknownStream, NotAuthorized, NotReady, DeadlineExceeded;
        'versions' as `replica`.
        """
        self._shared.check()
        check_call(name, of, key=key, start=start, until=until, folder=folder, limit=limit)
        return self._system.rows(
            name, of, key=key, start=start, until=until, folder=folder, limit=limit, timeout=timeout
        )

    # -- its end ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free everything. Open handles go stale at the controller: abort them first."""
        if self._shared.forked:
            raise NotForkSafe("this client was made before a fork: the parent closes it")
        with self._close_lock:
            if self._shared.closed:
                return
            self._shared.closed = True
        with ExitStack() as ends:  # the last one first, and all of them whatever one raises
            ends.callback(self._session.close)
            ends.callback(self._shared.ports.journals.close)
            if self._shared.ports.readers is not None:
                ends.callback(self._shared.ports.readers.close)
            ends.callback(self._heart.close)
            for handle in _all_of(self._shared.handles):
                handle.client_closes()

    def __del__(self) -> None:
        shared = getattr(self, "_shared", None)
        # At the process's end `_at_exit` closes clients, while the modules it needs are still loaded.
        if shared and not shared.closed and not shared.forked and not sys.is_finalizing():
            self.close()

    def _after_fork(self) -> None:
        self._shared.forked = True
        for handle in _all_of(self._shared.handles):
            handle.after_fork()
        if self._shared.ports.readers is not None:
            self._shared.ports.readers.after_fork()
        self._shared.ports.bus.after_fork()
        self._shared.ports.journals.after_fork()


def _all_of(handles: Iterable[Handle]) -> list[Handle]:
    """The handles of now; other threads may begin meanwhile."""
    while True:
        with suppress(RuntimeError):
            return list(handles)


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
