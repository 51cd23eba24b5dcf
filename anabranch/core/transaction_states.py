"""Every legal transition of a transaction, as one table (like Kudu's transaction status manager).

An *op* is an event in the life of a transaction, such as a command. On a state it is *applied* (it moves), *already
applied* (nothing changes, the caller gets the same answer; Kudu's TXN_OP_ALREADY_APPLIED) or *illegal* (nothing
changes, the caller gets an error; TXN_ILLEGAL_STATE). The table has a verdict for each op on each state.
`stream_states` has the same table for streams, `HANDLES` for a client's handle of a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Generic, Literal, TypeVar, get_args

from anabranch import errors
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas.records import BrokenLock, TxnRow, TxnState

Op = Literal[
    "begin",  # a client begins it (again)
    "touch",  # a stream is registered
    "register",  # a writer's receipt
    "heartbeat",
    "prepare",  # its writers are final; its coordinator decides
    "reopen",  # its coordinator, another control partition, takes its question for a vote back
    "begin_commit",  # its writers are final
    "begin_finalize",  # its commit timestamp is final, and it is being merged
    "finalize_commit",  # merged
    "begin_abort",
    "finalize_abort",
    "expire",  # it was silent for longer than its keepalive, or its snapshot is too old
    "lose_stream",  # a stream of it is given up
    "force",  # an operator forces the end of a stuck merge
]
StateT = TypeVar("StateT", bound=str)
OpT = TypeVar("OpT", bound=str)


class Verdict(Enum):
    """The effect of an op on a state, if it is not a move."""

    ALREADY = "already applied"
    ILLEGAL = "illegal"


class Machine(Generic[StateT, OpT]):
    """The states and ops of one kind of thing, and the verdict on each pair."""

    def __init__(
        self,
        states: tuple[StateT, ...],
        table: Mapping[OpT, tuple[StateT | Verdict, ...]],
        illegal: Callable[[StateT, OpT, str], errors.AnabranchError],
    ) -> None:
        """``table``: for each op its effect on each state, in their order. ``illegal`` makes an op's error."""
        self.states = states
        self.ops = tuple(table)
        self.transitions = {
            (state, op): verdict
            for op, row in table.items()
            for state, verdict in zip(states, row, strict=True)
        }
        self._illegal = illegal

    def judge(self, state: StateT, op: OpT, what: str = "") -> StateT | None:
        """The state after the op; None: already applied.

        Raises the error of an illegal op, with ``what`` in its message.
        """
        verdict = self.transitions[state, op]
        if verdict is Verdict.ALREADY:
            return None
        if isinstance(verdict, Verdict):
            raise self._illegal(state, op, what)
        return verdict

    def moves(self, state: StateT, op: OpT) -> bool:
        """Whether the op is legal, and not applied already."""
        return not isinstance(self.transitions[state, op], Verdict)


_ = Verdict.ILLEGAL
_same = Verdict.ALREADY

# fmt: off
_TABLE: dict[Op, tuple[TxnState | Verdict, ...]] = {
    # OPEN, COMMIT_IN_PROGRESS, FINALIZE_IN_PROGRESS, COMMITTED, ABORT_IN_PROGRESS, ABORTED, PREPARED
    "begin":            (_same, _same, _same, _same, _, _, _same),
    "touch":            ("OPEN", _, _, _, _, _, _),
    "register":         ("OPEN", _, _, _, _, _, _),
    "heartbeat":        ("OPEN", _same, _same, _same, _, _, _same),
    "prepare":          ("PREPARED", _, _, _, _, _, _same),
    "reopen":           (_same, _, _, _, _, _, "OPEN"),
    # The coordinator of a PREPARED transaction may have acted on the commit, so its commit skips the first state,
    # from which an abort is possible.
    "begin_commit":     ("COMMIT_IN_PROGRESS", _same, _same, _same, _, _, "FINALIZE_IN_PROGRESS"),
    "begin_finalize":   (_, "FINALIZE_IN_PROGRESS", _same, _same, _, _, _),
    "finalize_commit":  (_, _, "COMMITTED", _same, _, _, _),
    "begin_abort":      ("ABORT_IN_PROGRESS", "ABORT_IN_PROGRESS", _, _, _same, _same, "ABORT_IN_PROGRESS"),
    "finalize_abort":   (_, _, _, _, "ABORTED", _same, _),
    "expire":           ("ABORT_IN_PROGRESS", _, _, _, _same, _same, _),
    "lose_stream":      ("ABORT_IN_PROGRESS", "ABORT_IN_PROGRESS", _same, _same, _same, _same, _same),
    "force":           (_, _, "ABORT_IN_PROGRESS", _, _same, _same, _),
}
# fmt: on

FINISHED: frozenset[TxnState] = frozenset(("COMMITTED", "ABORTED"))

Birth = Literal["begin", "one_shot", "give_way", "resolve"]
BIRTHS: dict[Birth, TxnState] = {
    "begin": "OPEN",
    "one_shot": "COMMITTED",  # a whole transaction in one command
    "give_way": "ABORTED",  # a one-shot whose name was committed before
    "resolve": "ABORTED",  # a client asked for its outcome before any other command of it came
}


def born(
    birth: Birth,
    txn_id: bytes,
    wall_ms: int,
    *,
    scope: str,
    name: str | None = None,
    keepalive_ms: int = 0,
    commit_timestamp: int = 0,
    committed: int = 0,
    reason: str = "",
    secret: bytes | None = None,
    owner: str,
    consumes: bytes | None = None,
    snapshot: int = 0,
) -> TxnRow:
    """A transaction's first row, which the caller puts. ``wall_ms``: now, Unix milliseconds."""
    state = BIRTHS[birth]
    return TxnRow(
        txn_id=txn_id,
        scope=scope,
        name=name,
        state=state,
        keepalive_ms=keepalive_ms,
        begun_ms=wall_ms,
        finished_ms=wall_ms if state in FINISHED else 0,
        commit_timestamp=commit_timestamp,
        committed=committed,
        rejected=0,
        left_out=0,
        reason=reason,
        secret=secret,
        owner=owner,
        consumes=consumes,
        snapshot=snapshot,
    )


def _illegal(state: TxnState, op: Op, what: str) -> errors.AnabranchError:
    """The error for an op that is illegal in this state. Its class shows what the caller can do."""
    said = f" ({what})" if what else ""
    if state in ("ABORT_IN_PROGRESS", "ABORTED"):
        return errors.TransactionAborted(f"the transaction is aborted{said}: begin a new one")
    if state == "COMMITTED":
        return errors.AlreadyCommitted(f"the transaction is committed{said}: its outcome is final")
    if state in ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS") and op != "force":
        return errors.OutcomeUnknown(
            f"{op} comes too late, the transaction is being committed{said}: nothing was changed; ask for its "
            "outcome"
        )
    if state == "PREPARED":
        return errors.IllegalState(
            f"the transaction is prepared{said}: a commit or an abort ends it, {op} does not; nothing was changed"
        )
    return errors.IllegalState(f"{op} is impossible in state {state}{said}; nothing was changed")


def broken_text(broken: BrokenLock) -> str:
    """The reason for an abort, for people, without the transaction that broke the lock."""
    what = f"{broken.key!r:.100}" if broken.key else "a key"
    if broken.range is not None:
        what += f", of the range from {broken.range.low!r:.100}"
        what += f" to {broken.range.high!r:.100}" if broken.range.high is not None else " on"
    at = hybrid_time.to_text(broken.timestamp)
    return f"{broken.table} {what} was read, and written by another at {at}: begin again"


def locks_broken(broken: BrokenLock) -> errors.LocksBroken:
    """The error for a lock that a commit broke."""
    return errors.LocksBroken(
        broken_text(broken),
        table=broken.table,
        key=broken.key,
        by=broken.by,
        commit_timestamp=broken.timestamp,
    )


TRANSACTIONS: Machine[TxnState, Op] = Machine(get_args(TxnState), _TABLE, _illegal)

# -- the handle in a client ---------------------------------------------------------------------------
# A client may not know the outcome of commands that it sent, so its handle has states of its own.

HandleState = Literal[
    "buffered",  # nothing is begun: the writes are in memory
    "open",  # a Begin was sent
    "sent",  # the first copy of a commit was sent, and its effect is not known
    "doubted",  # a commit may be carried out: several copies were sent, or no answer came in time
    "decided",  # it is committed, by this handle or another one; the handle lacks the result
    "prepared",
    "aborting",  # an abort was sent, and not answered
    "over",  # the handle has its result, or the error that ended it
]
HandleOp = Literal[
    "write",  # an event, a token, a flush
    "begin",  # a Begin is sent
    "send",  # a commit or a prepare is sent
    "refuse",  # the answer says that the copy had no effect
    "refuse_shot",  # the answer says that the copy of a one-shot had no effect
    "doubt",  # there was no answer in time
    "under_way",  # the controller says that a commit is decided, and not carried out yet
    "late",  # the controller says that it is committed
    "prepare",  # it is prepared
    "commit",  # its result
    "fail",  # the error that ends it
    "abort",  # an abort is sent
]

# fmt: off
_HANDLE_TABLE: dict[HandleOp, tuple[HandleState | Verdict, ...]] = {
    # buffered, open, sent, doubted, decided, prepared, aborting, over
    "write":       (_same, _same, _, _, _, _, _, _),
    "begin":       ("open", _same, _same, _same, _, _, _, _),
    # A second copy may be refused although the first one was carried out, so its refusal proves nothing.
    "send":        ("sent", "sent", "doubted", _same, _same, _same, _, _),
    "refuse":      (_, _, "open", _same, _same, _same, _, _same),
    "refuse_shot": (_, _, "buffered", _same, _same, _same, _, _same),
    "doubt":       (_, _, "doubted", _same, _same, _same, _, _same),
    "under_way":   (_, "doubted", "doubted", _same, _same, _same, "doubted", _same),
    "late":        (_, "decided", "decided", "decided", _same, "decided", "decided", _same),
    "prepare":     (_, "prepared", "prepared", "prepared", "prepared", _same, _, _same),
    "commit":      (_, "over", "over", "over", "over", "over", "over", _same),
    "fail":        ("over", "over", "over", "over", "over", "over", "over", _same),
    "abort":       ("aborting", "aborting", _same, _same, _same, _same, _same, "aborting"),
}
# fmt: on


def _illegal_here(state: HandleState, op: HandleOp, what: str) -> errors.AnabranchError:
    """The error for an op that is illegal in this state of a handle."""
    if state in ("sent", "doubted"):
        return errors.IllegalState(
            "the outcome of the commit is unknown: commit again, or ask client.state"
        )
    if state == "decided":
        return errors.AlreadyCommitted("the transaction was committed elsewhere")
    if state == "prepared":
        return errors.IllegalState("the transaction is prepared: commit or abort it")
    if state == "aborting":
        return errors.OutcomeUnknown(
            "the outcome of the transaction is not known, because an abort was not answered: abort it again"
        )
    return errors.IllegalState(f"{op} is impossible in state {state}{what}; nothing was changed")


HANDLES: Machine[HandleState, HandleOp] = Machine(
    get_args(HandleState), _HANDLE_TABLE, _illegal_here
)
USABLE: frozenset[HandleState] = frozenset(("buffered", "open"))
IN_DOUBT: frozenset[HandleState] = frozenset(("sent", "doubted", "decided"))
