"""Twelve changes that a newcomer may have to make, and where each is made.

A move that breaks a row has to edit it: so somebody looks whether the new place is one that a newcomer finds.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent / "anabranch"

# (change, file, what is changed there: a name, or Class.name)
PLACES = (
    ("the default keepalive", "protocol/defaults.py", "KEEPALIVE_S"),
    ("the default keepalive of the tools", "protocol/defaults.py", "TOOL_KEEPALIVE_S"),
    ("the default keepalive of a Spark job", "protocol/defaults.py", "SPARK_KEEPALIVE_S"),
    ("a new refusal of a commit", "core/decisions/commit.py", "commit"),
    ("a new refusal of a commit", "errors.py", "AlreadyCommitted"),
    ("which segment a key is in", "protocol/partitioner.py", "position_of"),
    ("how long a receipt is waited for", "protocol/defaults.py", "RESOLVE_SHARE"),
    ("how long a receipt is waited for", "protocol/defaults.py", "MOST_MARGIN_S"),
    ("how long a receipt is waited for", "protocol/limits.py", "MAX_WAIT_MS"),
    ("the header ab.txn", "protocol/ids.py", "TXN_HEADER"),
    ("the SQL of the ledger's table", "ledger/dialects.py", "CREATE"),
    ("when a worker ends the batch of a commit", "processing/batch.py", "WorkBatch.is_full"),
    ("when a worker ends the batch of a commit", "protocol/defaults.py", "COMMIT_INTERVAL_S"),
    ("range locks against a commit", "core/locks/recent_writes.py", "RecentWrites"),
    ("range locks against a commit", "core/locks/lock_table.py", "LockTable"),
    ("range locks against a commit", "core/locks/table_writes.py", "Write.touches"),
    ("retries of a Spark task", "spark/sink/writer.py", "Target.write"),
    ("the names of metrics", "controller/metrics.py", "NUMBERS"),
    ("the pause between tries of transact", "protocol/defaults.py", "FIRST_TRANSACT_PAUSE_S"),
    ("the pause between tries of transact", "client/replica.py", "Replica.transact"),
    ("the clock check of doctor", "protocol/defaults.py", "CLOCK_WARN_S"),
    ("the clock check of doctor", "cli/doctor.py", "_clock"),
)
CHANGES = 12


@cache
def names_of(file: str) -> set[str]:
    """The names that a file defines: constants, functions, classes, and methods as Class.name."""
    found = set()
    for node in ast.parse((ROOT / file).read_text()).body:
        match node:
            case ast.FunctionDef(name=name):
                found.add(name)
            case ast.ClassDef(name=name, body=body):
                methods = (each.name for each in body if isinstance(each, ast.FunctionDef))
                found |= {name, *(f"{name}.{method}" for method in methods)}
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return found


@pytest.mark.parametrize(("change", "file", "name"), PLACES)
def test_a_change_has_its_place(change: str, file: str, name: str) -> None:
    assert name in names_of(file), f"{change}: no {name} in {file}"


def test_all_changes_have_a_place() -> None:
    kinds = {change.split(" of the tools")[0].split(" of a Spark job")[0] for change, *_ in PLACES}
    assert len(kinds) == CHANGES
