"""The calls of clients, as the history has them (`docs/inside/checker.md`).

A name that is unique in its scope is a series in which there is number 0 alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from anabranch.batches.records import Record, encode_batch
from anabranch.core.decisions.turn import WAITING
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    ClockSkew,
    LocksBroken,
    OutcomeUnknown,
    ReceiptMismatch,
    TransactionAborted,
    UnknownTransaction,
    WritersUnfinished,
)
from anabranch.ports import LogError, TopicPartition
from anabranch.topics.names import journal_topic
from anabranch.types import Result, TransactionInfo
from tests.sim.ledger import Attempt, Deal, Ledger, Workplace
from tests.sim.recording import event_id, text
from tests.tables.recorded import broken_of
from tests.workload.recording import STATES

if TYPE_CHECKING:
    from tests.sim.ports import SimCluster

_TELLS_NOTHING = (OutcomeUnknown, AlreadyCommitted)
_MOST_PARTS = 40  # receipts of a writer, more than there are


@contextmanager
def recorded_begin(ledger: Ledger, deal: Deal) -> Iterator[dict[str, Any]]:
    """The id may be put into what is told."""
    with ledger.history.here.asking("begin", txn=deal.label, scope=deal.scope) as told:
        told["txn_id"] = None
        yield told


@contextmanager
def recorded_commit(
    ledger: Ledger, deal: Deal, attempt: Attempt, seen: int = 0
) -> Iterator[dict[str, Any]]:
    """One call of commit. ``seen``: a timestamp that the committer, or a writer, was told."""
    recorder = ledger.history.here
    writers: list[str] | None = None
    perhaps: list[str] = []  # a later receipt of theirs may be registered by then
    if attempt.receipts is not None:
        writers = ["own"] if attempt.own is not None else []
        for label, count in attempt.receipts.items():
            named = deal.writers[label].parts(count)
            writers += named
            perhaps += [f"{label}.{i}" for i in range(len(named), _MOST_PARTS)]
    elif attempt.own is not None:
        recorder.note("finish", txn=deal.label, writer="own")
    claims: dict[str, Any] = {"own": ["own"]} if attempt.own is not None else {}
    claims |= {"seen": seen} if seen else {}
    if attempt.number is not None:
        claims |= {"series": "series", "number": attempt.number}
    elif deal.name is not None and ledger.names_are_kept:
        claims |= {"series": f"name {deal.name}", "number": 0}
    if deal.consumed is not None:
        claims |= {
            "processor": deal.consumed.processor,
            "ownership": deal.ownership,
            "tasks": sorted(task for step in deal.consumed.steps for task in step.tasks),
            "consumes": [event_id(given.value) for given in deal.given],
        }
    if deal.label in ledger.prepared:
        claims["prepares"] = True
    op = recorder.ask("commit", txn=deal.label, writers=writers, perhaps=perhaps, **claims)
    told: dict[str, Any] = {}
    try:
        yield told
    except LocksBroken as error:
        recorder.told(op, "failed", **broken_of(error))
        raise
    except (TransactionAborted, WritersUnfinished, ReceiptMismatch, ClockSkew) as error:
        # The clock may be right when the second copy of a one-shot arrives.
        may_come = isinstance(error, ClockSkew) and deal.label in ledger.doubled
        outcome = "unknown" if may_come else "failed"
        recorder.told(op, outcome, why=f"{type(error).__name__}: {error}")
        raise
    except BaseException as error:
        refused = isinstance(error, AnabranchError) and not isinstance(error, _TELLS_NOTHING)
        outcome = "failed" if refused and ledger.is_final(deal) else "unknown"
        recorder.told(op, outcome, why=f"{type(error).__name__}: {error}")
        raise
    recorder.told(op, "ok", **told)


def recorded_plain(
    ledger: Ledger,
    cluster: SimCluster,
    stream: str,
    partition: int,
    events: Sequence[tuple[bytes | None, bytes]],
) -> None:
    """Keys and values that a program writes to a journal without the library; any topic may be in trouble."""
    records = [Record(0, cluster.world.wall_ms, key, value) for key, value in events]
    named = [[text(key), event_id(value)] for key, value in events]
    place = TopicPartition(journal_topic(stream), partition)
    with suppress(LogError), ledger.history.here.asking("plain", stream=stream, events=named):
        cluster.log_of(cluster.world.current).produce_batch(place, encode_batch(records))


def told_commit(told: dict[str, Any], deal: Deal, result: Result) -> None:
    """What a commit was answered."""
    told["txn_id"] = result.txn_id.hex()
    told["timestamp"] = result.commit_timestamp
    told["committed"] = result.counts.committed
    told["left_out"] = result.counts.left_out
    told["replayed"] = deal.claims and result.txn_id != deal.txn_id


@contextmanager
def recorded_take(ledger: Ledger, place: Workplace, tasks: Sequence[int] | None) -> Iterator[str]:
    """Tasks are taken; gives the ownership's name."""
    ledger.ownerships += 1
    label = f"{place.name}#{ledger.ownerships}"
    named = list(range(place.tasks) if tasks is None else tasks)
    with ledger.history.here.asking("take", processor=place.name, ownership=label, tasks=named):
        yield label


@contextmanager
def recorded_state(ledger: Ledger, txn_id: bytes) -> Iterator[dict[str, Any]]:
    """A question what became of an id."""
    recorder = ledger.history.here
    op = recorder.ask("state", txn_id=txn_id.hex())
    told: dict[str, Any] = {}
    try:
        yield told
    except UnknownTransaction:
        recorder.told(op, "ok", state="unknown", timestamp=None)
        raise
    except BaseException as error:
        recorder.told(op, "unknown", why=f"{type(error).__name__}: {error}")
        raise
    recorder.told(op, "ok", **told)


def state_of(info: TransactionInfo) -> dict[str, Any]:
    """What is told of it."""
    # A commit that waits may be refused yet: to the checker the transaction is open.
    state = "open" if info.reason == WAITING else STATES[info.state]
    return {"state": state, "timestamp": info.commit_timestamp if state == "committed" else None}
