"""Prepared transactions in a run: a database that decides, its slow processes, and recovery that races with them.

The database is outside of the cluster and never fails: one word for each transaction, by an insert that the key
decides (`Ledger.words`). Draws come from random numbers of their own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING

from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import AnabranchError, OutcomeUnknown, TransactionAborted
from anabranch.ports import LogError
from anabranch.types import Receipt, Result
from tests.sim.ledger import Deal, Ledger
from tests.sim.picture import STUCK
from tests.sim.world import Violation, World

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.picture import Picture

SECRET = b"the secret in the database's row"
BY = sha256(SECRET).digest()


def preparing(
    world: World,
    faults: Faults,
    ledger: Ledger,
    deal: Deal,
    txn: Transaction,
    commit: Callable[[float], Result],
    receipts: list[Receipt] | None,
    claim: tuple[str | None, int | None],
) -> Callable[[float], Result]:
    """The call that ends a transaction: ``commit``, or prepare, the database's word, and then the commit."""
    chance = Random(f"{world.seed}/{deal.label}/prepared")
    if chance.random() >= faults.weather.prepared:
        return commit
    ledger.prepared.add(deal.label)
    deal.opened = True  # a refusal need not be the last word
    name, number = claim

    def call(seconds: float) -> Result:
        attempt = deal.label.encode()
        try:
            info = txn.prepare(
                receipts, name=name, number=number, by=BY, attempt=attempt, timeout=seconds
            )
        finally:
            deal.txn_id = txn.txn_id or deal.txn_id
        if txn.result is not None:
            return txn.result
        world.sleep(chance.choice((0.0, 0.0, chance.expovariate(0.5))))
        if not ledger.words.setdefault(info.txn_id, True):
            raise TransactionAborted(
                "recovery was first: the database's transaction is rolled back"
            )
        if chance.random() < 0.2:  # this process dies, or forgets it
            raise OutcomeUnknown("left to recovery", txn_id=info.txn_id)
        return txn.commit(secret=SECRET, timeout=seconds)

    return call


def recover(world: World, faults: Faults, ledger: Ledger, client: Client, name: str) -> None:
    """End what is prepared, now and then, as the database says; who comes first decides."""
    chance = Random(f"{world.seed}/{name}/recovery")
    while True:
        world.sleep(chance.expovariate(1.0 if faults.calm else 0.3))
        with contextlib.suppress(AnabranchError, LogError):
            for info in client.prepared(secret=SECRET, timeout=5.0):
                if chance.random() < 0.5 or faults.calm:
                    _end(world, ledger, client, info.txn_id)


def _end(world: World, ledger: Ledger, client: Client, txn_id: bytes) -> None:
    label = next((d.label for d in ledger.deals.values() if d.txn_id == txn_id), None)
    try:
        if ledger.words.setdefault(txn_id, False):
            client.commit(txn_id, secret=SECRET, timeout=10.0)
            return
        recorded: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if label is not None:
            recorded = ledger.history.here.asking("abort", txn=label)
        with recorded:
            client.abort(txn_id, "the database has no row of it", secret=SECRET, timeout=10.0)
    except AnabranchError as error:
        world.note(label or txn_id.hex(), f"recovery: {type(error).__name__}: {error}")


def check_prepared(picture: Picture, ledger: Ledger) -> None:
    """Each ended as the database says."""
    for txn_id, word in ledger.words.items():
        row = picture.rows.get(txn_id)
        if row is None and picture.is_forgotten(txn_id):
            continue
        state = "unknown" if row is None else row.state
        spoiled = row is not None and picture.participants[txn_id].keys() & picture.deleted.keys()
        if word and spoiled and state in STUCK:
            continue  # it waits for a stream of which a topic is gone
        if state != ("COMMITTED" if word else "ABORTED"):
            raise Violation(
                f"{txn_id.hex()} is {state}, and the database says {'commit' if word else 'abort'}"
            )
