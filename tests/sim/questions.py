"""What clients ask: what became of transactions, which there are, what a stream is like."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from anabranch.client.client import Client
from anabranch.errors import (
    BeginAgainError,
    ClockSkew,
    NotAuthorized,
    RetryError,
    UnknownTransaction,
)
from anabranch.protocol.ids import is_marked
from tests.sim.picture import STUCK
from tests.sim.recorded import recorded_state, state_of
from tests.sim.writers import SCOPE

if TYPE_CHECKING:
    from tests.sim.clients import Worker
    from tests.sim.ledger import Deal

MEDDLED = "by a lane that may not"


def clear_doubt(worker: Worker, client: Client) -> None:
    """Ask what became of a commit without an answer."""
    deal = worker.in_doubt[0]
    if deal.txn_id is None:
        worker.in_doubt.remove(deal)
        return
    random = worker.world.random
    try:
        may_be_stuck = worker.faults.calm and bool(worker.ledger.deleted)
        final = random.random() < (0.3 if may_be_stuck else 0.8)
        question = client.resolve if final else client.state
        with recorded_state(worker.ledger, deal.txn_id) as told:
            info = question(deal.txn_id, timeout=random.choice((1.0, 10.0)))
            told |= state_of(info)
    except NotAuthorized:  # there is no such one, or nothing may be written now
        return
    except (BeginAgainError, ClockSkew):  # the clock that made the id was too far ahead
        worker.in_doubt.remove(deal)
        return
    except RetryError:
        return
    if info.state in ("COMMITTED", "ABORTED"):
        deal.finals.append((info.state, info.commit_timestamp))
        worker.in_doubt.remove(deal)
    elif info.state in STUCK and may_be_stuck:
        worker.in_doubt.remove(deal)  # who is not is waited for anyway
    elif info.state == "OPEN" and worker.world.random.random() < 0.3:
        worker.in_doubt.remove(deal)  # nobody keeps it alive


def ask(worker: Worker, client: Client) -> None:
    """Something, of anything."""
    random = worker.world.random
    if random.random() < 0.3:
        client.transactions(SCOPE, finished=random.random() < 0.5)
        return
    if random.random() < 0.3:
        client.describe(random.choice(worker.ledger.streams))
        return
    known = [d for d in worker.ledger.deals.values() if d.txn_id and not is_marked(d.txn_id)]
    if not known:
        return
    deal = random.choice(known)
    if deal.lane != worker.lane:
        meddle(worker, client, deal)
        return
    try:
        with recorded_state(worker.ledger, deal.txn_id or b"") as told:
            info = client.state(deal.txn_id or b"")
            told |= state_of(info)
    except UnknownTransaction:
        if deal.begun:
            worker.world.fail(f"{deal.label}: nothing is known of a transaction that was begun")
        return
    if info.state in ("COMMITTED", "ABORTED"):
        deal.finals.append((info.state, info.commit_timestamp))


def meddle(worker: Worker, client: Client, deal: Deal) -> None:
    """See, and abort, another lane's transaction by its id: it must read as if there were none."""
    txn_id = deal.txn_id or b""
    for call in (client.state, partial(client.abort, reason=MEDDLED)):
        try:
            call(txn_id)
        except UnknownTransaction:
            continue
        worker.world.fail(f"{deal.label} of lane {deal.lane} is known to lane {worker.lane}")


def resolve_new(worker: Worker, client: Client) -> None:
    """Resolve an id that nobody used: aborted for ever, also for a command that comes late."""
    txn_id = worker.noise.new_id(SCOPE)
    if txn_id is None:
        return
    with recorded_state(worker.ledger, txn_id) as told:
        info = client.resolve(txn_id)
        told |= state_of(info)
    worker.ledger.final_answers.append((txn_id, info.state, info.commit_timestamp))
    if info.state != "ABORTED":
        worker.world.fail(f"an id that nobody used is {info.state}")
    worker.noise.send_one_shot(txn_id)
