"""Every legal transition of a stream, as one table, like that of transactions (`transaction_states`).

While the shell works on a stream's topics, the stream has a state of its own (CREATING, RECOVERING, FORGETTING):
one op begins the work, another op ends it with its result. A stream without a row is FORGOTTEN: deleted, or never
created.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

from anabranch.core.transaction_states import Machine, Verdict
from anabranch.errors import AnabranchError, IllegalState, NotReady, StreamLost, UnknownStream
from anabranch.protocol.schemas.records import StreamRow, StreamState

CREATING: Final = "CREATING"
ACTIVE: Final = "ACTIVE"
LOST: Final = "LOST"  # a topic of it was deleted or replaced
RECOVERING: Final = "RECOVERING"  # LOST, and its topics are compared with the old ones
FORGETTING: Final = "FORGETTING"  # LOST, and its remaining topics are being deleted
FORGOTTEN: Final = "FORGOTTEN"  # no row
# ACTIVE, but can't be read or written now: shown to clients, never logged.
WAITING: Final = "WAITING"

GIVEN_UP: frozenset[StreamState] = frozenset((LOST, RECOVERING, FORGETTING))

StreamOp = Literal[
    "use",  # a write or a scaling
    "begin_create",
    "finalize_create",  # its topics exist
    "refuse_create",
    "give_up",  # a topic of it is gone
    "begin_recover",
    "finalize_recover",  # its topics are the old ones
    "refuse_recover",
    "begin_forget",
    "finalize_forget",  # nothing is left of its topics
    "refuse_forget",
]

_ = Verdict.ILLEGAL
_same = Verdict.ALREADY

# fmt: off
_TABLE: dict[StreamOp, tuple[StreamState | Verdict, ...]] = {
    # CREATING, ACTIVE, LOST, RECOVERING, FORGETTING, FORGOTTEN
    "use":              (_, ACTIVE, _, _, _, _),
    "begin_create":     (CREATING, _same, _, _, _, CREATING),
    "finalize_create":  (ACTIVE, _same, _, _, _, _),
    "refuse_create":    (FORGOTTEN, _, _, _, _, _same),
    "give_up":          (_, LOST, _same, _same, _same, _same),
    "begin_recover":    (_, _same, RECOVERING, _, _, _),
    "finalize_recover": (_, _same, _, ACTIVE, _, _),
    "refuse_recover":   (_, _, _same, LOST, _, _),
    "begin_forget":     (_, _, FORGETTING, _, _same, _same),
    "finalize_forget":  (_, _, _, _, FORGOTTEN, _same),
    "refuse_forget":    (_, _, _same, _, LOST, _),
}
# fmt: on


# Refused with `NotReady`: possible when the work on the topics is done.
_PASSES = {("use", CREATING), ("begin_forget", CREATING), ("begin_forget", RECOVERING)}


def state_of(row: StreamRow | None) -> StreamState:
    """The state in a stream's row; FORGOTTEN without one."""
    return row.state if row is not None else FORGOTTEN


def changes_topics(row: StreamRow) -> bool:
    """Whether a stream's topics are to be created, compared, deleted, altered, truncated or grown."""
    whole = row.state in (CREATING, RECOVERING, FORGETTING)
    return whole or row.change is not None or row.wanted_partitions > row.partitions


def lost_error(stream: str) -> StreamLost:
    """The error for a command that needs a LOST stream."""
    return StreamLost(
        f"{stream} is lost: a topic of it was deleted or replaced. Nothing can be committed there any more; "
        "write to another stream, or let an operator forget this one and create it again"
    )


def _illegal(state: StreamState, op: StreamOp, stream: str) -> AnabranchError:
    """The error for an op that is illegal in this state. Its class shows what the caller can do."""
    if op == "begin_create" and state == FORGETTING:
        return NotReady(f"{stream} is being forgotten: ask again")
    if op in ("use", "begin_create") and state in GIVEN_UP:
        return lost_error(stream)
    if op == "begin_recover" and state == FORGOTTEN:
        return UnknownStream(f"there is no stream {stream!r}")
    if op == "begin_recover" or (op, state) in _PASSES:
        return NotReady(f"{stream} is {state}: ask again")
    if op == "use":
        return UnknownStream(f"there is no stream {stream!r}: create it first")
    if op == "begin_forget":
        return IllegalState(
            f"{stream} is {state}: only a LOST stream can be forgotten, and an ACTIVE one deleted "
            "(`anabranch stream delete`)"
        )
    return IllegalState(f"{stream}: {op} is impossible in state {state}; nothing was changed")


STREAMS: Machine[StreamState, StreamOp] = Machine(get_args(StreamState), _TABLE, _illegal)
