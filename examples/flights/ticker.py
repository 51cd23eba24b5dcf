"""The roles that commit small transactions on the same streams: readers of these must not wait for the big one."""

from __future__ import annotations

import time
from collections.abc import Mapping
from threading import Event
from typing import Any

from anabranch.cli.options import connected
from anabranch.errors import OutcomeUnknown, TransactionAborted
from examples.flights.child import Say
from examples.flights.notes import END, Small, stream_of
from examples.flights.source import TABLES, Table, find_source
from examples.flights.writers import target_from

# Events of the last transaction, over all segments. Readers that get one know that nothing follows.
END_EVENTS = 64
# Events of each small transaction in each stream: in one stream several, so that a check sees half a transaction.
EVENTS = {table.name: 3 if table.name == "flights" else 1 for table in TABLES}
_KEYS = 20


def run(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Commit a small transaction every ``every`` seconds, until the order to finish."""
    scope, every = parameters["scope"], parameters["every"]
    committed: list[int] = []
    aborted: list[int] = []
    number = 0
    # Keys of the first rows, so that the big transaction and small ones share keys.
    keys = {table.name: _first_keys(table, parameters["limit"]) for table in TABLES}
    with connected(target_from(parameters)) as client:
        while not finish.is_set():
            began = time.monotonic()
            txn = client.begin(scope)
            for table in TABLES:
                of = EVENTS[table.name]
                for index in range(of):
                    event = Small(number, index, of, began)
                    key = keys[table.name][(number * of + index) % len(keys[table.name])]
                    txn.write(stream_of(scope, table), event.to_bytes(), key)
            try:
                txn.commit()
                done = True
            except TransactionAborted:
                done = False
            except OutcomeUnknown as error:
                # A user would do the same.
                if error.txn_id is None:
                    raise
                done = client.resolve(error.txn_id).state == "COMMITTED"
            (committed if done else aborted).append(number)
            say("tick", number=number, began=began, seconds=time.monotonic() - began, done=done)
            number += 1
            finish.wait(max(0.0, began + every - time.monotonic()))
    say("finished", committed=committed, aborted=aborted)


def _first_keys(table: Table, limit: int | None) -> list[bytes]:
    found: dict[bytes, None] = {}
    for row in find_source(limit).rows(table):
        if row.key is not None:
            found[row.key] = None
            if len(found) == _KEYS:
                break
    return list(found)


def end(parameters: Mapping[str, Any], say: Say, finish: Event) -> None:
    """Commit the last transaction, by which readers know that nothing follows."""
    stream = parameters["stream"]
    with connected(target_from(parameters)) as client:
        txn = client.begin(parameters["scope"])
        for index in range(END_EVENTS):
            event = Small(END, index, END_EVENTS, time.monotonic())
            txn.write(stream, event.to_bytes(), f"end-{index}".encode())
        txn.commit()
    say("finished")
