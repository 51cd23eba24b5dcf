"""Transactions for Kafka-compatible logs that outlive a process, a partition count and a broker's patience.

    with anabranch.connect("localhost:9092") as client:
        client.create_stream("nyc/flights", segments=2)
        with client.begin("nyc") as txn:
            txn.write("nyc/flights", b"value", key=b"key")
            txn.commit()

Names are loaded when they are first used, so that importing the package is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch import errors
    from anabranch.client.client import Client
    from anabranch.client.connect import connect
    from anabranch.client.replica import Replica
    from anabranch.client.reservation import Reservation, narrow
    from anabranch.client.table_transaction import TableTransaction
    from anabranch.client.transaction import Transaction
    from anabranch.client.write_session import WriteSession
    from anabranch.client.writer import Writer
    from anabranch.core.derived_rows import Total
    from anabranch.processing import aggregates
    from anabranch.processing.app import Processor
    from anabranch.processing.derived import DerivedTable
    from anabranch.processing.operations.copies import copy_processor
    from anabranch.reading.snapshot import Snapshot, SnapshotPlan
    from anabranch.tables.changes import Change
    from anabranch.types import (
        AuditEntry,
        CommandsInfo,
        Committed,
        Counts,
        Event,
        FeatureLevel,
        Grant,
        Lane,
        LeaderInfo,
        Receipt,
        Rejected,
        RejectedRecord,
        Result,
        RowError,
        StreamDescription,
        TaskOwnership,
        Timeline,
        TimelineStep,
        Transacted,
        TransactionInfo,
    )
    from anabranch.values import Stream

__version__ = "0.1.0a1"

# The modules of names that are not in `anabranch.types`.
_HOMES = {
    "Change": "anabranch.tables.changes",
    "Client": "anabranch.client.client",
    "DerivedTable": "anabranch.processing.derived",
    "Processor": "anabranch.processing.app",
    "Replica": "anabranch.client.replica",
    "Reservation": "anabranch.client.reservation",
    "Snapshot": "anabranch.reading.snapshot",
    "SnapshotPlan": "anabranch.reading.snapshot",
    "Stream": "anabranch.values",
    "TableTransaction": "anabranch.client.table_transaction",
    "Total": "anabranch.core.derived_rows",
    "Transaction": "anabranch.client.transaction",
    "WriteSession": "anabranch.client.write_session",
    "Writer": "anabranch.client.writer",
    "connect": "anabranch.client.connect",
    "copy_processor": "anabranch.processing.operations.copies",
    "narrow": "anabranch.client.reservation",
}
_MODULES = {"aggregates": "anabranch.processing.aggregates", "errors": "anabranch.errors"}

__all__ = [
    "AuditEntry",
    "Change",
    "Client",
    "CommandsInfo",
    "Committed",
    "Counts",
    "DerivedTable",
    "Event",
    "FeatureLevel",
    "Grant",
    "Lane",
    "LeaderInfo",
    "Processor",
    "Receipt",
    "Rejected",
    "RejectedRecord",
    "Replica",
    "Reservation",
    "Result",
    "RowError",
    "Snapshot",
    "SnapshotPlan",
    "Stream",
    "StreamDescription",
    "TableTransaction",
    "TaskOwnership",
    "Timeline",
    "TimelineStep",
    "Total",
    "Transacted",
    "Transaction",
    "TransactionInfo",
    "WriteSession",
    "Writer",
    "aggregates",
    "connect",
    "copy_processor",
    "errors",
    "narrow",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in __all__:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(import_module(_HOMES.get(name, "anabranch.types")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
