"""The metrics of a recovery service (`docs/operations.md`), and whether it is ready."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from anabranch.controller.monitor import Monitor, Number, Numbers, Table
from anabranch.ledger.ledger import Recovered

LONGEST_LOOK_S = 60.0
NUMBERS = {
    "ledger_recovered": Number("counter", "Transactions committed, as the database had committed"),
    "ledger_aborted": Number("counter", "Transactions aborted, as the database had not committed"),
    "ledger_forgotten": Number("counter", "Rows deleted, as they were not needed any more"),
    "ledger_expired": Number(
        "counter", "Rows `commit` that were met after their outcome was forgotten"
    ),
    "ledger_held": Number("gauge", "Rows that processes held at the last look"),
    "ledger_waiting": Number("gauge", "Transactions that could not be ended at the last look"),
    "ledger_alarms": Number("gauge", "Contradictions between database and log at the last look"),
    "ledger_failures": Number("counter", "Looks that failed, by error", ("error",)),
}
TABLE = Table(NUMBERS, "ledger", ("ledger_look_seconds", "Time of a look"))


class Watch:
    """Counts the recoveries of a service. ``pause``: seconds between two recoveries."""

    def __init__(self, pause: float) -> None:
        self.numbers = Numbers(TABLE)
        self._trouble: str | None = "it has not looked yet"
        self._most_s = pause + LONGEST_LOOK_S
        self._ended = time.monotonic()

    def look(self, recover: Callable[[], Recovered]) -> Recovered:
        """Call ``recover`` once, and count its results. Raises as ``recover``."""
        begun = time.monotonic()
        try:
            found = recover()
        except Exception as error:
            self.numbers.add("ledger_failures", type(error).__name__)
            self._trouble = f"the last look failed: {type(error).__name__}"
            raise
        else:
            self._trouble = _waits(found)
        finally:
            self._ended = time.monotonic()
            self.numbers.took(self._ended - begun)
        self.numbers.add("ledger_recovered", by=len(found.committed))
        self.numbers.add("ledger_aborted", by=len(found.aborted))
        self.numbers.add("ledger_forgotten", by=found.forgotten)
        self.numbers.add("ledger_expired", by=len(found.expired))
        self.numbers.set("ledger_held", len(found.held))
        self.numbers.set("ledger_waiting", len(found.waiting))
        self.numbers.set("ledger_alarms", len(found.alarms))
        return found

    def trouble(self) -> str | None:
        """Why the service is not ready; None if it is."""
        silent_s = time.monotonic() - self._ended
        return (
            f"no look has ended for {silent_s:.0f} s" if silent_s > self._most_s else self._trouble
        )


def _waits(found: Recovered) -> str | None:
    for partition, error in found.missing.items():
        return f"control partition {partition} does not answer: {error}"
    why = next(iter(found.waiting.values()), None)
    return None if why is None else f"{len(found.waiting)} can't be ended yet: {why}"


@contextmanager
def watched(http: str | None, name: str, pause: float) -> Iterator[Watch]:
    """A watch, served at ``http`` (HOST:PORT) if that is given. Raises: InvalidArgument, PortTaken."""
    watch = Watch(pause)
    if http is None:
        yield watch
        return
    with closing(Monitor(http, TABLE, lambda: {name: watch.numbers}, watch.trouble)):
        yield watch
