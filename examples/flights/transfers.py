"""The roles that transfer money between airlines, and audit that: two rows of a table change together, or not."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any

from anabranch.cli.options import connected
from examples.flights.child import Say
from examples.flights.writers import target_from

if TYPE_CHECKING:
    from anabranch.client.table_transaction import TableTransaction

AIRLINES = ("AA", "B6", "DL", "EV", "UA", "US")
OPENED_WITH = 1000
TOTAL = len(AIRLINES) * OPENED_WITH
_WITHIN_S = 120.0  # for a transfer, while controllers die
_EVERY_S = 0.1
_AUDIT_EVERY_S = 0.5


def table_of(scope: str) -> str:
    return f"{scope}/accounts"


def clerk(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Pay from one account to another until the order to finish, and once after it."""
    table = table_of(parameters["scope"])
    paid: Counter[str] = Counter()  # how this process changed each account
    calls: list[str] = []
    began, longest, last = [], 0.0, False
    with connected(target_from(parameters)) as client, client.replica(table) as accounts:
        while not last:
            last = finish.is_set()
            payer, payee = random.sample(AIRLINES, 2)
            amount = random.randint(1, 50)
            start = time.monotonic()
            accounts.transact(partial(_pay, calls, table, payer, payee, amount), timeout=_WITHIN_S)
            began.append(start)
            longest = max(longest, time.monotonic() - start)
            paid[payer] -= amount
            paid[payee] += amount
            finish.wait(_EVERY_S)
    say("finished", began=began, again=len(calls) - len(began), longest=longest, paid=paid)


def _open(table: str, txn: TableTransaction) -> None:
    for name in AIRLINES:
        txn.put(table, name.encode(), b"%d" % OPENED_WITH)


def _pay(
    calls: list[str], table: str, payer: str, payee: str, amount: int, txn: TableTransaction
) -> None:
    """Transfer; called again if others changed one of the two accounts meanwhile."""
    calls.append(payer)
    for name, more in ((payer, -amount), (payee, amount)):
        held = int(txn.get(table, name.encode()) or 0)
        txn.put(table, name.encode(), b"%d" % (held + more))


def audit(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Open the accounts; then add them up in one snapshot after another until the order to finish, and after it."""
    table = table_of(parameters["scope"])
    wrong: list[int] = []
    snapshots, held, last = 0, dict[str, int](), False
    with connected(target_from(parameters)) as client:
        client.create_table(table)
        with client.replica(table) as accounts:
            accounts.transact(partial(_open, table))
            say("ready")
            while not last:
                last = finish.is_set()
                with accounts.snapshot(timeout=_WITHIN_S) as view:
                    held = {key.decode(): int(row) for key, row in view.scan(table)}
                snapshots += 1
                if sum(held.values()) != TOTAL:
                    wrong.append(sum(held.values()))
                finish.wait(_AUDIT_EVERY_S)
    say("report", snapshots=snapshots, wrong=wrong, held=held)
