"""The one-shot of a transaction on tables: how its one command is made, sent, sent again, and resolved.

The controller carries it out, or answers `Revalidate`, which has no effect: the replica then receives the newer
commits, the locks are validated again, and the command is sent again with its new marks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, MutableSequence, Sequence
from dataclasses import dataclass

from anabranch.backoff import Backoff
from anabranch.client.commit_parts import CommitParts
from anabranch.client.receipts import with_trace
from anabranch.client.row_chain import Member, Row, needs_commits
from anabranch.client.session import unknown
from anabranch.client.shared import Shared
from anabranch.client.table_locks import Locks
from anabranch.client.transaction import GRACE_S, place_null_keys
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    DeadlineExceeded,
    DerivationMissing,
    LocksBroken,
    MalformedRecord,
    NotANumber,
    NumberOverflow,
    OutcomeUnknown,
    OwnershipLost,
    RetryError,
    SnapshotExpired,
    TransactionAborted,
    UnsupportedVersion,
)
from anabranch.protocol import defaults, limits
from anabranch.protocol.ids import NO_TXN, is_marked, txn_text
from anabranch.protocol.schemas import records as r
from anabranch.tables.replica import ReadReplica
from anabranch.tables.snapshot import TableSnapshot
from anabranch.tracing import traced


@dataclass(slots=True)
class InMemory:
    """The reads and writes of a short transaction, when it commits.

    ``changes``: by table and key. ``broken``: the first lock that was found broken. ``ran``: the derivations whose
    entries are among the events.
    """

    scope: str
    view: TableSnapshot
    locks: Locks
    events: MutableSequence[r.Event]
    changes: Mapping[tuple[str, bytes], tuple[r.ChangeKind, int]]
    broken: LocksBroken | None
    ran: Collection[r.Derivation] = ()

    @property
    def streams(self) -> set[str]:
        """The tables that it has locked or changes, and the streams to which it writes."""
        found = {*self.locks.tables, *[table for table, _ in self.changes]}
        return found | {event.stream for event in self.events}

    def changes_since(self, marks: Mapping[str, tuple[int, int]]) -> tuple[r.RowChange, ...]:
        """The changes, each with its row as of its table's mark. Raises: SnapshotExpired."""
        found = []
        for (table, key), (kind, number) in self.changes.items():
            base = self.view.row_at(table, key, marks[table][0])
            cut = None if base is None else base[: limits.NUMBER_BYTES + 1]  # longer: no number
            found.append(r.RowChange(table, key, kind, number, cut))
        return tuple(found)

    def rows_of(self, tables: Collection[str]) -> dict[Row, bytes | None]:
        """The rows of these tables as the events leave them; None: deleted."""
        return {
            (event.stream, event.key): event.value
            for event in self.events
            if event.key is not None and event.stream in tables
        }


class TableOneShot:
    """The one-shot of one transaction. The transaction lets one thread at a time call it.

    An error ends the transaction if it is `LocksBroken`, or if ``is_over`` is set with it.
    """

    def __init__(self, shared: Shared, replica: ReadReplica, member: Member | None) -> None:
        self._shared, self._session = shared, shared.session
        self._replica = replica
        self._member = member
        self.trace = shared.new_trace()
        self.txn_id: bytes | None = None  # the transaction's id, even if it becomes a long one
        self.is_sent = False  # a copy of the command was sent, and may have taken effect
        self.is_over = False
        self._command: r.OneShot | None = None  # the copy that was sent last

    @traced("commit", "PRODUCER")
    def commit(self, held: InMemory, parts: CommitParts, deadline: float) -> r.Outcome:
        """Send the command until it has an outcome. Raises: as `TableTransaction.commit`."""
        member, committed_at = self._member, 0
        if member is None:
            return self._commit(held, parts, deadline)
        try:
            outcome = self._commit(held, parts, deadline)
            if outcome.txn_id == self.txn_id:
                committed_at = outcome.commit_timestamp
            elif member.is_unsure:
                raise needs_commits("gave way to an earlier commit of its name")
        finally:
            member.answered(committed_at)
        return outcome

    def _commit(self, held: InMemory, parts: CommitParts, deadline: float) -> r.Outcome:
        self._shared.check()
        scope, txn_id = held.scope, self.txn_id
        if not self.is_sent:
            parts.check_id(txn_id)
        if txn_id is None or (is_marked(txn_id) != parts.are_marked and not self.is_sent):
            txn_id = self.txn_id = self._new_id(scope, deadline, marked=parts.are_marked)
        place_null_keys(self._shared, held.events, deadline)
        pauses: Backoff | None = None
        unsure = False
        while True:
            # Take the marks before validating, so that the validation includes everything up to them.
            marks = self._replica.marks()
            changes: tuple[r.RowChange, ...] = ()
            found: AnabranchError | None
            try:
                found = held.broken or held.locks.validate(held.view, marks)
                changes = held.changes_since(marks)
            except SnapshotExpired as error:
                found = error
            if found is not None and self.is_sent:
                # The lock may have been broken by this commit itself, or after it.
                if unsure and isinstance(found, LocksBroken):
                    # RESOLVE would abort the id, and end its turn.
                    return self._repeated(found, self._shared.deadline(GRACE_S))
                return self._given_up(txn_id, scope, found)
            if found is not None:
                raise found
            command = self._made(txn_id, held, parts, marks, changes, deadline)
            apart = self._session.is_apart(command, deadline)
            if apart and self._member is not None and (self._member.is_inside or command.follows):
                raise needs_commits("it concerns several control partitions")
            try:
                with self._replica.report_due():
                    answer = self._send(command, deadline, held)
            except (DerivationMissing, NotANumber, NumberOverflow) as error:
                if not self.is_sent:
                    raise
                return self._given_up(txn_id, scope, error)
            if isinstance(answer, r.Outcome):
                newest = {each.table: each.last for each in answer.tables}
                self._replica.observe(answer.commit_timestamp, newest)
                return answer
            # A copy of this command may still be carried out, in three cases: the answer was only the advice to
            # take a turn; the command follows a commit under way, which comes; or it has changes, and another
            # commit leaves the numbers of their rows with the controller.
            self.is_sent = not apart and bool(answer.writers or changes or command.follows)
            unsure = not apart and bool(answer.writers or (changes and not command.follows))
            if apart:  # the id is used up
                txn_id = self.txn_id = self._new_id(scope, deadline, marked=parts.are_marked)
            timestamp, last = self._time_to_wait_for(answer, txn_id, held.locks, deadline)
            try:
                self._replica.wait(timestamp, last, deadline)
                self._wait_for_followed(held.locks, deadline)
                if changes and not answer.writers:
                    pauses = pauses or self._pauses()
                    if not pauses.sleep(deadline):
                        raise DeadlineExceeded(
                            "other writers keep writing the rows that this one changes"
                        )
            except AnabranchError as error:
                return self._given_up(txn_id, scope, error)

    def _made(
        self,
        txn_id: bytes,
        held: InMemory,
        parts: CommitParts,
        marks: Mapping[str, tuple[int, int]],
        changes: tuple[r.RowChange, ...],
        deadline: float,
    ) -> r.OneShot:
        return r.OneShot(
            txn_id,
            held.scope,
            parts.name,
            with_trace(held.events, self.trace),
            parts.consumed,
            held.locks.records(self._named(held, deadline), marks),
            changes,
            held.locks.follows(),
            None if self._member is None else self._member.heir(txn_id, deadline),
            tuple(sorted(held.ran)),
        )

    def _named(self, held: InMemory, deadline: float) -> Sequence[str]:
        """The tables that the command names: those of the control partitions where it reads or writes."""
        if self._session.is_alone(
            deadline
        ):  # most clusters are so, and this is done for each commit
            return self._replica.tables
        return self._session.beside(held.streams, self._replica.tables, deadline)

    def _time_to_wait_for(
        self, answer: r.Revalidate, txn_id: bytes, locks: Locks, deadline: float
    ) -> tuple[int, Mapping[str, int]]:
        """The time, and each table's newest commit, that the replica must have before the command is sent again.

        If the answer advises so, a turn is taken here, and the time is the turn's.
        """
        # A leader of an earlier build names no table. Then the command is sent again at once, and is carried out.
        knows_row = len(answer.writers) == 2
        if knows_row and self._member is not None and self._command is not None:
            point, number = answer.writers
            table = self._command.locks[number].table
            turn = self._member.take_for(txn_id, table, locks.key_of(table, point), deadline)
            if turn is not None:
                return turn.timestamp, turn.last
        return answer.timestamp, {each.table: each.last for each in answer.tables}

    def _wait_for_followed(self, locks: Locks, deadline: float) -> None:
        """Wait for the outcomes of the commits that this one follows, until the replica has what they wrote."""
        if self._member is not None:
            for sent in locks.followed:
                self._member.wait_for(sent, deadline)
                self._replica.wait(max(1, sent.committed_at), {}, deadline)

    def _new_id(self, scope: str, deadline: float, *, marked: bool) -> bytes:
        of_turn = None if self._member is None else self._member.turn_id(marked=marked)
        return of_turn or self._session.new_txn_id(scope, deadline, marked=marked)

    def _pauses(self) -> Backoff:
        """The pauses after answers that ask to revalidate: clients that change one row must not send together.

        The first client that commits leaves the row's number with the controller. All others then need no more.
        """
        return Backoff(
            defaults.FIRST_CHANGE_PAUSE_S,
            defaults.LONGEST_CHANGE_PAUSE_S,
            self._shared.ports.clock,
            jitter=lambda: self._session.random64() % 1024 / 1024,
        )

    def _send(
        self, command: r.OneShot, deadline: float, held: InMemory | None = None
    ) -> r.Outcome | r.Revalidate:
        before, self.is_sent, self._command = self.is_sent, True, command
        posted, member = None, self._member
        try:
            if member is not None and member.is_inside and held is not None:
                posted = self._session.post(command, deadline)
                member.sent(command.txn_id, held.rows_of(self._replica.tables), held.changes.keys())
            return self._session.locked_shot(command, deadline, posted)
        except (OutcomeUnknown, MalformedRecord, UnsupportedVersion):
            raise  # no answer, or an unreadable one
        except (TransactionAborted, OwnershipLost, AlreadyCommitted):
            self.is_over = True
            raise
        except AnabranchError as error:
            if isinstance(error, DerivationMissing):
                self._shared.derivations.forget()
            self.is_sent = before  # this copy was refused, so it had no effect
            if not before:
                self.txn_id = None  # resolving it may have aborted the id
            raise

    def _given_up(self, txn_id: bytes, scope: str, error: AnabranchError) -> r.Outcome:
        """Give up a commit, for ``error``: RESOLVE aborts it, unless a copy of the command was carried out already.

        Returns the outcome if it is COMMITTED. Otherwise raises: OutcomeUnknown (no answer), ``error``, or
        DeadlineExceeded instead of a `RetryError`. The last two end the transaction.
        """
        if is_marked(txn_id):
            return self._repeated(error, self._shared.deadline(GRACE_S))
        try:
            outcome = self._session.resolve(txn_id, scope, None, self._shared.deadline(GRACE_S))
        except AnabranchError as trouble:
            raise OutcomeUnknown(
                f"the outcome of transaction {txn_text(txn_id)} is not known: {trouble}",
                txn_id=txn_id,
            ) from error
        if outcome.state == "COMMITTED":
            return outcome
        self.is_over = True
        if not isinstance(error, RetryError):
            raise error
        raise DeadlineExceeded(
            f"the replica did not show in time whether the locks hold: {error}; nothing was written, begin again"
        ) from error

    def _repeated(self, error: AnabranchError, deadline: float) -> r.Outcome:
        """Send the last command again, if a copy of it was not answered, as RESOLVE takes no marked id.

        Returns the outcome if a copy was carried out. Otherwise raises ``error``: no copy can be carried out any
        more, as the commit that broke its locks stays. Then `commit` may be repeated, unless ``error`` is
        `LocksBroken`. Raises OutcomeUnknown if a copy may still be carried out: if the answer was only the advice
        to take a turn, or if the command was refused only because of writes to rows that it changes.
        """
        if self.is_sent and self._command is not None:
            answer = self._send(self._command, deadline)
            if isinstance(answer, r.Outcome):
                return answer
            # Its locks stay broken, but another commit may make changes of rows possible.
            possible = self._command.changes and not isinstance(error, LocksBroken)
            self.is_sent = bool(answer.writers or possible)
            if self.is_sent:
                raise unknown("is not known", self._command.txn_id, None) from error
        raise error

    def resolved(self, scope: str, deadline: float) -> r.Outcome:
        """The outcome of a commit that was not answered. Raises: TransactionAborted, OutcomeUnknown."""
        if self.txn_id is not None and is_marked(self.txn_id):
            return self._repeated(unknown("is not known", self.txn_id, None), deadline)
        outcome = self._session.resolve(self.txn_id or NO_TXN, scope, None, deadline)
        if outcome.state != "COMMITTED" and self._command is not None:
            # If its name was committed before, only an answer to the command itself has that outcome.
            answer = self._session.locked_shot(self._command, deadline)
            outcome = answer if isinstance(answer, r.Outcome) else outcome
        if outcome.state != "COMMITTED":
            why = outcome.reason or outcome.state
            raise TransactionAborted(f"the transaction is aborted ({why}): begin a new one")
        return outcome
