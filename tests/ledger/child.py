"""A process with a ledger, to be killed: ``python -m tests.ledger.child BOOTSTRAP PREFIX DSN SCOPES NAME [STEP]``.

With a step it makes the order NAME and kills itself there; without one it moves money until it is killed. The clock
is `tests.shifted`'s.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from typing import Any
from unittest.mock import patch

import psycopg

import anabranch
from anabranch.errors import AnabranchError
from anabranch.ledger import Ledger
from tests.ledger.places import PostgresPlace
from tests.shifted import shift

# Steps of an order, and whether the database has committed once a process dies there.
STEPS = {
    "body": False,
    "prepare": False,
    "prepare.after": False,
    "commit": False,
    "commit.after": True,
    "finish": True,
    "finish.after": True,
}
START = 1_000_000  # in the table's account at the beginning; streams' accounts may owe
TABLE = "table"  # the account that is no stream
BIG, PADDING = 40, 200  # events of a big transfer, and bytes of each: more than a chunk


def main() -> None:
    shift()
    bootstrap, prefix, dsn, scopes, name, *step = sys.argv[1:]
    place = PostgresPlace(dsn)
    streams = [f"{scope}/postings" for scope in scopes.split(",")]
    with anabranch.connect(bootstrap, prefix=prefix, timeout=10.0) as client:
        if step:
            order(client, place, streams, name, step[0])
        while True:
            try:
                transfer(client, place, streams, random.randrange(2, 100))
            except (AnabranchError, psycopg.Error) as error:
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                time.sleep(0.1)


def order(
    client: anabranch.Client, place: PostgresPlace, streams: list[str], key: str, at: str
) -> None:
    def hook(step: str) -> None:
        if step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def around(real: Any, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            hook(name)
            found = real(*given, **named)
            hook(f"{name}.after")
            return found

        return call

    txn = client.begin(streams[0].partition("/")[0])
    with (
        patch.object(txn, "prepare", around(txn.prepare, "prepare")),
        patch.object(txn, "commit", around(txn.commit, "finish")),
        Ledger(lambda: place.connect(hook)).commit(txn) as cursor,
    ):
        for stream in streams:
            txn.write(stream, key.encode(), key=b"k")
        place.order(cursor, key)
        hook("body")


def transfer(
    client: anabranch.Client, place: PostgresPlace, streams: list[str], amount: int
) -> None:
    """From one account to two others, of the table and one in each stream; the table has a row of each part."""
    accounts = random.sample([TABLE, *streams], 3)
    parts = dict(zip(accounts, (-amount, amount // 2, amount - amount // 2), strict=True))
    way = random.choice(("in memory", "in memory", "by journals", "carried"))
    ledger = Ledger(place.connect)
    with (
        client.begin(random.choice(streams).partition("/")[0]) as txn,
        ledger.commit(txn) as cursor,
    ):
        for stream in accounts:
            if stream != TABLE:
                txn.write(stream, b"%d" % parts[stream], key=b"%d" % (amount % 7))
                for _ in range(BIG * (way == "carried")):
                    txn.write(stream, b"0 " + random.randbytes(PADDING), key=random.randbytes(2))
        assert txn.txn_id is not None
        if way != "in memory":
            txn.flush()
            time.sleep(random.choice((0.0, 0.5)))  # a scaling may come in between: it rolls
        for account, part in parts.items():
            place.order(cursor, f"{txn.txn_id.hex()}/{account.partition('/')[0]}", part)
        if TABLE in parts:
            cursor.execute("update account set balance = balance + %s", (parts[TABLE],))


if __name__ == "__main__":
    main()
