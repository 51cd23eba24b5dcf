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
    from anabranch.client.reservation import Reservation
    from anabranch.client.snapshot import Snapshot, SnapshotPlan
    from anabranch.client.transaction import Transaction
    from anabranch.client.types import (
        CommandsInfo,
        Committed,
        Counts,
        Event,
        Receipt,
        Result,
        StreamDescription,
        TransactionInfo,
    )
    from anabranch.client.writer import Writer

__version__ = "0.1.0"

_HOMES = {
    "Client": "anabranch.client.client",
    "CommandsInfo": "anabranch.client.types",
    "Committed": "anabranch.client.types",
    "Counts": "anabranch.client.types",
    "Event": "anabranch.client.types",
    "Receipt": "anabranch.client.types",
    "Reservation": "anabranch.client.reservation",
    "Result": "anabranch.client.types",
    "Snapshot": "anabranch.client.snapshot",
    "SnapshotPlan": "anabranch.client.snapshot",
    "StreamDescription": "anabranch.client.types",
    "Transaction": "anabranch.client.transaction",
    "TransactionInfo": "anabranch.client.types",
    "Writer": "anabranch.client.writer",
    "connect": "anabranch.client.connect",
}

__all__ = [
    "Client",
    "CommandsInfo",
    "Committed",
    "Counts",
    "Event",
    "Receipt",
    "Reservation",
    "Result",
    "Snapshot",
    "SnapshotPlan",
    "StreamDescription",
    "Transaction",
    "TransactionInfo",
    "Writer",
    "connect",
    "errors",
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
