"""From a stream into a database table, exactly once: the position is a row, too, and moves in the same commit.

    anabranch stream create shop/orders
    python -m examples.table_from_stream localhost:9092 shop/orders totals.db

Kill it at any time, or run two: each transaction of the stream is in the table once, whole, in commit order.
"""

from __future__ import annotations

import sqlite3
import sys
from contextlib import closing

import anabranch

TABLES = """
create table if not exists totals (item text primary key, amount integer not null);
create table if not exists positions (stream text primary key, at integer not null);
"""


def copy(
    client: anabranch.Client,
    database: sqlite3.Connection,
    stream: str,
    timeout: float | None = None,
) -> int:
    """Add the stream's amounts to the totals, until none come for ``timeout`` seconds; returns how many commits."""
    database.executescript(TABLES)
    database.execute("insert or ignore into positions values (?, 0)", (stream,))
    database.commit()
    (at,) = database.execute("select at from positions where stream = ?", (stream,)).fetchone()
    copied = 0
    with closing(client.read_transactions(stream, timeout=timeout, start=at or "begin")) as reader:
        for committed in reader:
            moved = database.execute(
                "update positions set at = ? where stream = ? and at = ?",
                (committed.commit_timestamp, stream, at),
            )
            if moved.rowcount != 1:  # another process copies it, too
                database.rollback()
                raise RuntimeError(f"another process copies {stream}")
            for event in committed.events:
                database.execute(
                    "insert into totals values (?, ?) on conflict do update set amount = amount + excluded.amount",
                    ((event.key or b"").decode(), int(event.value or b"0")),
                )
            database.commit()
            at, copied = committed.commit_timestamp, copied + 1
    return copied


if __name__ == "__main__":
    bootstrap, stream_name, path = sys.argv[1:]
    with anabranch.connect(bootstrap) as connected, closing(sqlite3.connect(path)) as opened:
        copy(connected, opened, stream_name)
