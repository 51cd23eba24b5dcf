"""Big transactions on tables, on a real broker: their locks are frozen while they are staged."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

import anabranch
from anabranch.tables.replica import Replica
from tests.behaviour.test_tables import bank, put, tables

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]
__all__ = ["bank", "tables"]  # fixtures

ROWS = int(os.environ.get("ANABRANCH_BIG_ROWS", "200000"))  # by hand: more
PART = 50_000


def test_who_writes_a_frozen_row_waits_and_nobody_else(
    client: anabranch.Client,
    tables: tuple[str, str],
    bank: Replica,
    measured: Callable[[str], None],
) -> None:
    table, other = tables
    scope = table.partition("/")[0]
    put(client, table, locked=1, free=1)
    bank.snapshot().close()
    with bank.begin(keepalive=300) as txn, ThreadPoolExecutor(1) as beside:
        assert txn.get(table, b"locked") == b"1"
        values = [os.urandom(100) for _ in range(PART)]
        with client.join(txn.token()) as writer:
            for at in range(0, ROWS, PART):
                keys = np.char.mod("%016d", np.arange(at, at + PART))
                columns = {"key": pa.array(keys).cast(pa.binary()), "value": values}
                writer.write_batch(other, pa.table(columns))
            receipt = writer.finish()
        before = [free_row(client, table) for _ in range(100)]
        took, waits, ended = [], None, beside.submit(txn.commit, [receipt], timeout=900)
        while not ended.done():
            took.append(free_row(client, table))
            if waits is None and any(row.frozen for row in client.system("locks", scope)):
                waits = ThreadPoolExecutor(1).submit(written, client, table)
        result = ended.result()
    assert waits is not None, "the commit was too quick to be seen frozen"
    at, waited = waits.result()
    assert at > (result.commit_timestamp or 0)
    with bank.snapshot(at=result.commit_timestamp) as then:
        assert then.get(table, b"locked") == b"1", "what was read holds up to the commit"
        assert then.get(other, b"%016d" % (ROWS - 1)) is not None
    p99 = [np.percentile(seconds, 99) * 1e3 for seconds in (before, took)]
    measured(
        f"{ROWS:,} rows: waited {waited:.2f} s; others p99 {p99[0]:.0f} ms before, {p99[1]:.0f} meanwhile"
    )
    assert client.system("locks", scope) == []


def written(client: anabranch.Client, table: str) -> tuple[int, float]:
    """Write the locked row: when that was committed, and how long it took, in seconds."""
    began = time.monotonic()
    with client.begin(table.partition("/")[0]) as txn:
        txn.write(table, b"2", key=b"locked")
        result = txn.commit(timeout=900)
    return result.commit_timestamp or 0, time.monotonic() - began


def free_row(client: anabranch.Client, table: str) -> float:
    """Seconds that a write of a row that nobody locked takes."""
    began = time.monotonic()
    put(client, table, free=2)
    return time.monotonic() - began
