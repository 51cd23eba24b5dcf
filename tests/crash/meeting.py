"""A client of the former release, which works until it meets a record of a higher feature level.

It uses nothing but the public interface and `tests.workload.zygote`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anabranch
from anabranch.errors import AnabranchError
from tests.workload.zygote import Spec, say

CALL_S = 60.0
WRITE_S = 0.2


@dataclass(frozen=True)
class Meet(Spec):
    """``table``, ``stream``: those that it writes to. ``described``: what it asks for from SIGUSR1 on."""

    table: str = ""
    stream: str = ""
    described: tuple[str, ...] = ()

    run = "tests.crash.meeting:meet"


def meet(number: int, given: dict[str, Any]) -> int:
    """Write, and follow a table, until SIGTERM. On SIGUSR1, ask about the streams and say what was answered."""
    spec = Meet(**given)
    ending, asking = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())
    signal.signal(signal.SIGUSR1, lambda *_: asking.set())
    with (
        anabranch.connect(spec.bootstrap, prefix=spec.prefix, timeout=CALL_S) as client,
        client.replica(spec.table) as rows,
    ):
        written = 0
        while not ending.is_set():
            written += 1
            value = b"%d" % written
            with client.begin(spec.table.partition("/")[0]) as txn:
                txn.write(spec.stream, value, key=b"k")
                txn.write(spec.table, value, key=b"old")
                txn.commit()
            with rows.snapshot(fresh=True, timeout=CALL_S) as view:
                found = dict(view.scan(spec.table))
            assert found[b"old"] == value, found
            say(number, "wrote", rows={key.decode(): row.decode() for key, row in found.items()})
            if asking.is_set():
                asking.clear()
                _ask(number, spec, client)
            time.sleep(WRITE_S)
    return 0


def _ask(number: int, spec: Meet, client: anabranch.Client) -> None:
    asked: dict[str, Callable[[], object]] = {
        "plain": lambda: client.describe(spec.stream),
        "all": lambda: client.streams(spec.stream.partition("/")[0]),
    }
    for name in spec.described:
        asked[f"describe {name}"] = lambda name=name: client.describe(name)  # type: ignore[misc]
        asked[f"replica {name}"] = lambda name=name: _rows(client, name)  # type: ignore[misc]
        asked[f"read {name}"] = lambda name=name: _events(client, name)  # type: ignore[misc]
    for what, ask in asked.items():
        try:
            answer = f"{ask()!r}"[:200]
        except AnabranchError as error:
            answer = f"{type(error).__name__}: {error}"
        say(number, "answered", what=what, answer=answer)
    say(number, "asked")


def _rows(client: anabranch.Client, table: str) -> object:
    with client.replica(table) as rows, rows.snapshot(fresh=True, timeout=CALL_S) as view:
        return dict(view.scan(table))


def _events(client: anabranch.Client, stream: str) -> object:
    return [event.value for event in client.snapshot([stream]).read(stream)]
