"""Tools for users to test their own code (`docs/testing.md`).

`Driver` runs the program of a `Processor` on events in memory. `MemoryCluster` is a real controller over a log in
memory, for clients. ``pytest_plugin`` has fixtures with a real broker.

Names are loaded when they are first used, because pytest loads a module of this folder wherever it is installed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.testing.driver import Driver, InputEvent
    from anabranch.testing.memory.cluster import MemoryCluster

_HOMES = {
    "Driver": "anabranch.testing.driver",
    "InputEvent": "anabranch.testing.driver",
    "MemoryCluster": "anabranch.testing.memory.cluster",
}

__all__ = ["Driver", "InputEvent", "MemoryCluster"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'anabranch.testing' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
