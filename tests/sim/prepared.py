"""Prepared transactions in a run: the product's ledger, its slow processes, and recovery that races with them.

The database is outside of the cluster and never fails; it is `Session`s in place of the product's `Book`. A session
may be ended, and the answer to its commit lost. Draws come from random numbers of their own.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import TYPE_CHECKING, Any

from anabranch import ledger as product
from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.errors import AlreadyCommitted, AnabranchError, OutcomeUnknown, TransactionAborted
from anabranch.ledger.book import ABORT, BEGUN, COMMIT, FIRST, Meta, Row
from anabranch.types import Receipt, Result
from tests.sim.ledger import Deal, Ledger
from tests.sim.picture import STUCK
from tests.sim.world import Violation, World

if TYPE_CHECKING:
    from anabranch.client.table_transaction import TableTransaction
    from tests.sim.faults import Faults
    from tests.sim.picture import Picture

SECRET = b"the secret in the database's row"


class _Cursor:
    def close(self) -> None:
        """The session goes on."""


class Session:
    """One session with the table, as `Book`; ``chance``: of a process that commits. What it commits is a word."""

    driver = sqlite3  # its errors

    def __init__(self, world: World, ledger: Ledger, cluster: str, chance: Random | None) -> None:
        self._world, self._ledger, self._cluster, self._chance = world, ledger, cluster, chance
        self._mine: Row | None = None
        self.connection = self

    def open(self, *, moved: bool = False) -> Meta:
        return Meta(SECRET, "", self._cluster)

    def cursor(self) -> _Cursor:
        return _Cursor()

    def close(self) -> None:
        self.rollback()

    def _holds(self) -> bool:
        return self._mine is not None and self._ledger.held.get(self._mine.txn_id) is self

    def begin(self, txn_id: bytes, attempt: bytes) -> Meta:
        if txn_id in self._ledger.rows or txn_id in self._ledger.held:
            raise self._refusal(txn_id)
        self._mine = Row(txn_id, BEGUN, attempt, 0, former=False)
        self._ledger.held[txn_id] = self
        return self.open()

    def check_same(self) -> None:
        """The block runs no statement of its own here that could end the database's transaction."""
        assert self._holds()

    def is_early(self, txn_id: bytes) -> bool:
        row = self._ledger.rows.get(txn_id)
        return row is not None and row.outcome == BEGUN

    def _refusal(self, txn_id: bytes) -> AnabranchError:
        row = self._ledger.rows.get(txn_id)
        done = row is not None and row.outcome == COMMIT
        return (
            AlreadyCommitted("a row") if done else TransactionAborted("the database has ended it")
        )

    def end(self, txn_id: bytes, attempt: bytes) -> None:
        """The process is slow here; its session may be ended meanwhile."""
        assert self._chance is not None
        if self._chance.random() < 0.3:
            self.rollback()
        self._world.sleep(self._chance.choice((0.0, 0.0, self._chance.expovariate(0.5))))
        if not self._holds() or self._mine is None:
            raise self._refusal(txn_id)
        self._mine = self._mine._replace(outcome=COMMIT)

    def commit(self) -> None:
        if not self._holds() or self._mine is None:
            raise sqlite3.OperationalError("the session was ended")
        self._ledger.rows[self._mine.txn_id] = self._mine
        self._ledger.words.setdefault(self._mine.txn_id, True)
        self.rollback()
        end = self._chance.random() if self._chance else 1.0
        if end < 0.2:
            raise OutcomeUnknown("the process dies, or forgets it; left to recovery")
        if end < 0.4:
            raise sqlite3.OperationalError("no answer")

    def rollback(self) -> bool:
        if self._holds() and self._mine is not None:
            del self._ledger.held[self._mine.txn_id]
        return True

    def decide(self, txn_id: bytes) -> Row | None:
        if txn_id in self._ledger.held:
            return None
        row = self._ledger.rows.setdefault(txn_id, Row(txn_id, ABORT, b"", 0, former=False))
        self._ledger.words.setdefault(txn_id, row.outcome == COMMIT)
        return row

    def rows(
        self, before_ms: int, limit: int, after: Row = FIRST, *, former: bool = True
    ) -> list[Row]:
        found = sorted(self._ledger.rows.values(), key=lambda row: (row.made, row.txn_id))
        return [row for row in found if (row.made, row.txn_id) > (after.made, after.txn_id)][:limit]

    def forget(self, rows: Iterable[Row]) -> int:
        mine = [row for row in rows if self._ledger.rows.get(row.txn_id) == row]
        for row in mine:
            del self._ledger.rows[row.txn_id]
        return len(mine)


class _Ledger(product.Ledger):
    """The product's, over sessions."""

    def __init__(self, *of_session: Any) -> None:
        super().__init__(lambda: None)
        self._of_session = of_session

    @contextlib.contextmanager
    def _open(self, connection: Any = None) -> Iterator[Any]:
        with contextlib.closing(Session(*self._of_session)) as session:
            yield session


def preparing(
    world: World,
    faults: Faults,
    ledger: Ledger,
    deal: Deal,
    txn: Transaction | TableTransaction,
    commit: Callable[[float], Result],
    receipts: list[Receipt] | None = None,
    claim: tuple[str | None, int | None] = (None, None),
) -> Callable[[float], Result]:
    """The call that ends a transaction: ``commit``, or that of a ledger, which moves the deal's positions, too."""
    chance = Random(f"{world.seed}/{deal.label}/prepared")
    if chance.random() >= faults.weather.prepared:
        return commit
    ledger.prepared.add(deal.label)
    deal.opened = True  # a refusal need not be the last word
    name, number = claim
    called: list[bool] = []

    def call(seconds: float) -> Result:
        if called:
            raise OutcomeUnknown("a ledger takes a transaction once", txn_id=txn.txn_id)
        called.append(True)
        try:
            of_session = (world, ledger, txn.cluster, chance)
            with _Ledger(*of_session).commit(
                txn,
                receipts=receipts,
                name=name,
                number=number,
                consumed=deal.consumed,
                timeout=seconds,
            ):
                deal.txn_id = txn.txn_id or deal.txn_id
        except sqlite3.OperationalError as error:
            raise TransactionAborted("the driver's word") from error
        finally:
            deal.txn_id = txn.txn_id or deal.txn_id
        if txn.result is None:
            raise OutcomeUnknown("left to recovery", txn_id=txn.txn_id)
        return txn.result

    return call


class _Recovering:
    """A client whose aborts are recorded."""

    def __init__(self, client: Client, ledger: Ledger) -> None:
        self._client, self._ledger = client, ledger
        self.commit, self.cluster = client.commit, client.cluster

    def prepared(self, scope: str | None, *, secret: bytes) -> Any:
        return self._client.prepared(scope, secret=secret, timeout=5.0)

    def abort(
        self, txn_id: bytes, reason: str, *, secret: bytes, timeout: float | None = None
    ) -> None:
        deals = self._ledger.deals.values()
        label = next((d.label for d in deals if d.txn_id == txn_id), None)
        recorded: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if label is not None:
            recorded = self._ledger.history.here.asking("abort", txn=label)
        with recorded:
            self._client.abort(txn_id, reason, secret=secret, timeout=timeout or 10.0)


def recover(world: World, faults: Faults, ledger: Ledger, client: Client, name: str) -> None:
    """End what is prepared, now and then, as the database says; who comes first decides."""
    chance = Random(f"{world.seed}/{name}/recovery")
    while True:
        world.sleep(chance.expovariate(1.0 if faults.calm else 0.3))
        try:
            service: Any = _Recovering(client, ledger)
            found = _Ledger(world, ledger, client.cluster, None).recover(service, older_than=-1e12)
        except AnabranchError as error:
            world.note(name, f"recovery: {type(error).__name__}: {error}")
        else:
            # A clock that jumps lets outcomes expire before a recovery asks; `check_prepared` looks at the rest.
            if found.alarms:
                raise Violation(f"alarms: {found.alarms}")


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
