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
    from anabranch.client.joined_writer import Writer
    from anabranch.client.reservation import Reservation
    from anabranch.client.tokens import narrow
    from anabranch.client.transaction import Transaction
    from anabranch.processing.app import Processor
    from anabranch.reading.snapshot import Snapshot, SnapshotPlan
    from anabranch.types import (
        AuditEntry,
        CommandsInfo,
        Committed,
        Counts,
        Event,
        Grant,
        Lane,
        Receipt,
        Result,
        StreamDescription,
        Tenure,
        TransactionInfo,
    )

__version__ = "0.1.0"

_HOMES = {
    "AuditEntry": "anabranch.types",
    "Client": "anabranch.client.client",
    "CommandsInfo": "anabranch.types",
    "Committed": "anabranch.types",
    "Counts": "anabranch.types",
    "Event": "anabranch.types",
    "Grant": "anabranch.types",
    "Lane": "anabranch.types",
    "Processor": "anabranch.processing.app",
    "Receipt": "anabranch.types",
    "Reservation": "anabranch.client.reservation",
    "Result": "anabranch.types",
    "Snapshot": "anabranch.reading.snapshot",
    "SnapshotPlan": "anabranch.reading.snapshot",
    "StreamDescription": "anabranch.types",
    "Tenure": "anabranch.types",
    "Transaction": "anabranch.client.transaction",
    "TransactionInfo": "anabranch.types",
    "Writer": "anabranch.client.joined_writer",
    "connect": "anabranch.client.connect",
    "narrow": "anabranch.client.tokens",
}

__all__ = [
    "AuditEntry",
    "Client",
    "CommandsInfo",
    "Committed",
    "Counts",
    "Event",
    "Grant",
    "Lane",
    "Processor",
    "Receipt",
    "Reservation",
    "Result",
    "Snapshot",
    "SnapshotPlan",
    "StreamDescription",
    "Tenure",
    "Transaction",
    "TransactionInfo",
    "Writer",
    "connect",
    "errors",
    "narrow",
]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("anabranch.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
