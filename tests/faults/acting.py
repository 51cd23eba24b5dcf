"""The common parts of writers, helpers and readers: events, records of what is done, and how they end."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import anabranch
from anabranch.core.decisions.turn import WAITING
from anabranch.errors import (
    BeginAgainError,
    FixCallError,
    OutcomeUnknown,
    RetryError,
)
from checker.recorder import Failed, Recorder, Unknown
from tests.crash.children import run_guarded
from tests.crash.zygote import say

STREAMS = ("wide", "narrow")
THREADS = 3
KEYS = 12  # of all writers together, so that their order counts
PADDING = 32  # bytes that don't compress
CALL_S = 30.0
# Frozen brokers keep connections open: librdkafka's own minute would take most of a run.
PATIENCE = {"socket.timeout.ms": 10_000}
STATES = {
    "OPEN": "open",
    "COMMIT_IN_PROGRESS": "committing",
    "FINALIZE_IN_PROGRESS": "committing",
    "COMMITTED": "committed",
    "ABORT_IN_PROGRESS": "aborting",
    "ABORTED": "aborted",
    "PREPARED": "prepared",
}


@dataclass(frozen=True)
class Row:
    """One event to be: where, its key, and its id, with which the value begins."""

    stream: str
    key: str
    id: str


def rows(name: str, count: int, chance: random.Random, scope: str) -> list[Row]:
    """Events that nothing else has; ``name`` is unique."""
    return [
        Row(
            f"{scope}/{STREAMS[chance.random() < 0.3]}",
            f"key-{chance.randrange(KEYS)}",
            f"{name}.{n}",
        )
        for n in range(count)
    ]


def by_stream(events: Sequence[Row]) -> dict[str, list[Row]]:
    """Kept in order within each stream."""
    found: dict[str, list[Row]] = {}
    for event in events:
        found.setdefault(event.stream, []).append(event)
    return found


def value_of(event: Row) -> bytes:
    """The id, and something that makes it bigger."""
    return event.id.encode() + b" " + os.urandom(PADDING // 2).hex().encode()


def write_all(recorder: Recorder, to: Any, handle: str, writer: str, events: Sequence[Row]) -> None:
    """Write to a handle of the library, one operation for each stream."""
    for stream, of_stream in by_stream(events).items():
        listed = [[event.key, event.id] for event in of_stream]
        with recorder.asking("write", txn=handle, writer=writer, stream=stream, events=listed):
            for event in of_stream:
                to.write(stream, value_of(event), key=event.key.encode())


@contextmanager
def sorted_out() -> Iterator[None]:
    """Errors of the library as the recorder's two kinds: surely without effect, and not known."""
    try:
        yield
    except OutcomeUnknown as error:
        raise Unknown(f"{type(error).__name__}: {error}") from error
    except (RetryError, BeginAgainError, FixCallError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


def ask_state(recorder: Recorder, client: anabranch.Client, txn_id: bytes, *, final: bool) -> str:
    """What the controllers say of a transaction; ``final``: one that nobody knows is ended by it."""
    with recorder.asking("state", txn_id=txn_id.hex()) as told:
        try:
            info = client.resolve(txn_id) if final else client.state(txn_id)
        except anabranch.errors.UnknownTransaction:
            told |= {"state": "unknown", "timestamp": None}
        except anabranch.errors.Expired:
            told |= {"state": "expired", "timestamp": None}
        else:
            told |= {
                # A commit that waits may be refused yet: to the checker the transaction is open.
                "state": "open" if info.reason == WAITING else STATES[info.state],
                "timestamp": info.commit_timestamp or None,
            }
    return str(told["state"])


class Ending:
    """Set by SIGTERM; by SIGUSR2 too, which says that there is nothing more to come."""

    def __init__(self) -> None:
        self.event = threading.Event()
        self.at_end = False
        signal.signal(signal.SIGTERM, lambda *_: self.event.set())
        signal.signal(signal.SIGUSR2, lambda *_: self._last())

    def _last(self) -> None:
        self.at_end = True
        self.event.set()


def in_threads(number: int, ending: Ending, work: Callable[[int], None]) -> int:
    """Run ``work`` until SIGTERM; 1 if one of the threads failed."""

    def fails(why: str) -> None:
        say(number, "defect", why=why)
        ending.event.set()

    return run_guarded(number, [partial(work, n) for n in range(THREADS)], fails)
