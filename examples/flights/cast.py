"""Starts the processes of the run, each with the parameters of its role."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anabranch.cli.options import Target
from examples.flights.cluster import Place
from examples.flights.display import Display
from examples.flights.notes import DOOMED_MARK, Notes, read_notes, stream_of
from examples.flights.processes import Child, Family, Message
from examples.flights.source import TABLES, Source

WORKERS = 4
VICTIM = 1
MEMBERS = 2
CLERKS = 2
KEEPALIVE_S = 120.0
TICK_EVERY_S = 0.1
DOOMED_ROWS = 10_000
STEP_S = 120.0
FLIGHTS = TABLES[0]
RAW_PROGRAM = Path(__file__).parents[1] / "raw_client.py"
RAW_TABLE = next(table for table in TABLES if table.raw)


def label_of(share: int) -> str:
    """A worker's name, in the header of its events."""
    return f"worker-{share + 1}"


class Cast:
    """Starts the children on a cluster, and adds up the rows that they report as written."""

    def __init__(
        self,
        place: Place,
        source: Source,
        family: Family,
        display: Display,
        folder: Path,
        picture: Path,
    ) -> None:
        """Start nothing yet. ``picture``: the file for the drawing of the flights' epochs."""
        self.place = place
        self.source = source
        self.family = family
        self._display = display
        self._folder = folder
        self.picture = picture
        self.flights = stream_of(place.scope, FLIGHTS)
        self.rows: dict[str, int] = {}
        self.raw_is_program = False
        self.living_workers: list[Child] = []

    def start(
        self,
        role: str,
        *,
        name: str | None = None,
        on_message: Callable[[Message], None] | None = None,
        **parameters: Any,
    ) -> Child:
        common = {
            "target": asdict(self.place.target),
            "scope": self.place.scope,
            "limit": self.source.limit,
        }
        return self.family.start(role, {**common, **parameters}, name=name, on_message=on_message)

    def observers(self) -> dict[str, Child]:
        """The children that only watch."""
        return {role: self._observer(role, role) for role in ("plain", "reader", "transactions")}

    def members(self) -> dict[str, Child]:
        """The members of the group that reads the flights in order."""
        names = [f"member-{number}" for number in range(1, MEMBERS + 1)]
        return {name: self._observer("member", name) for name in names}

    def late_reader(self) -> Child:
        """Start a plain consumer that reads everything at the end."""
        return self._observer("plain", "log")

    def _observer(self, role: str, name: str) -> Child:
        notes = str(self._notes_of(name))
        return self.start(role, name=name, stream=self.flights, notes=notes)

    def _notes_of(self, name: str) -> Path:
        return self._folder / f"{name}.notes"

    def notes(self, observer: Child) -> Notes:
        """The notes of an observer that has reported."""
        return read_notes(self._notes_of(observer.name))

    def scaler(self, segments: int) -> Child:
        return self.start(
            "scaler", name=f"scaler-{segments}", stream=self.flights, segments=segments
        )

    def historian(self, txn_id: str) -> Child:
        """Start the child that prints and draws the flights' epochs."""
        return self.start(
            "historian", stream=self.flights, txn_id=txn_id, picture=str(self.picture)
        )

    def ticker(self) -> Child:
        """Start the child that commits small transactions."""

        def take(message: Message) -> None:
            if message["say"] == "tick":
                self._display.tick(message["number"] + 1, message["seconds"])

        return self.start("ticker", every=TICK_EVERY_S, on_message=take)

    def clerks(self) -> list[Child]:
        """Start the children that move money between the accounts that the auditor has opened."""
        return [self.start("clerk", name=f"clerk-{n + 1}") for n in range(CLERKS)]

    def driver(self, name: str | None) -> Child:
        """Start a child that begins a transaction and ends."""
        return self.start(
            "driver",
            name="driver" if name else "driver-2",
            begin_as=name,
            keepalive=KEEPALIVE_S,
        )

    def begun(self, driver: Child) -> tuple[Message, float]:
        """A driver's message about its transaction, and the time when the driver had ended."""
        begun = self.family.hear(driver, "begun", STEP_S)
        self.family.wait_for("the driver's end", lambda: driver.poll() is not None, STEP_S)
        return begun, time.monotonic()

    def worker(self, label: str, token: str, share: int, **more: Any) -> Child:
        """Start a child that writes a share of the rows."""

        def take(message: Message) -> None:
            if message["say"] == "wrote":
                self.rows[label] = message["rows"]
                self._display.wrote(self.written, self.source.total())

        worker = self.start(
            "writer",
            name=label,
            token=token,
            by=label,
            share=share,
            of=WORKERS,
            tables=[table.name for table in TABLES if not table.raw],
            on_message=take,
            **more,
        )
        self.living_workers.append(worker)
        return worker

    def forget(self, worker: Child) -> None:
        """Stop counting a worker's rows."""
        self.rows.pop(worker.name, None)
        self.living_workers.remove(worker)

    @property
    def written(self) -> int:
        """The number of rows that the workers report as written."""
        return sum(list(self.rows.values()))

    def raw(self, token: str) -> Child:
        """Start the program that uses only the protocol, or else a worker of the library if that can't run here."""
        command = raw_command(
            self.place.target,
            stream_of(self.place.scope, RAW_TABLE),
            self.source.cut(RAW_TABLE, self._folder),
            RAW_TABLE.key,
            token,
        )
        self.raw_is_program = command is not None
        if command is not None:
            return self.family.start_command("raw-client", command)
        return self.start(
            "writer",
            name="raw-client",
            token=token,
            by=None,
            share=0,
            of=1,
            tables=[RAW_TABLE.name],
        )

    def raw_receipt(self, raw: Child) -> str:
        """The receipt that the raw program printed, once it has ended."""
        if not self.raw_is_program:
            receipt: str = self.family.hear(raw, "finished", STEP_S)["receipt"]
            return receipt
        self.family.wait_for("the raw program's end", lambda: raw.poll() == 0, STEP_S)
        return str(self.family.wait_for("its receipt", lambda: raw.lines, STEP_S)[-1])

    def doomed(self, token: str) -> list[Child]:
        """Start the writers of the transaction that will be aborted."""
        return [
            self.start(
                "writer",
                name=f"doomed-{share}",
                token=token,
                by=f"doomed-{share}",
                share=share,
                of=2,
                limit=min(DOOMED_ROWS, self.source.limit or DOOMED_ROWS),
                tables=[table.name for table in TABLES],
                mark=DOOMED_MARK.decode(),
            )
            for share in range(2)
        ]

    def heard(self, children: Mapping[str, Child], what: str) -> dict[str, Message]:
        """Each child's message of a kind, by its name, once all have sent one."""
        return {name: self.family.hear(child, what, STEP_S) for name, child in children.items()}


def raw_command(
    target: Target, stream: str, csv_file: Path, key: str, token: str
) -> list[str] | None:
    """The command of a program that writes a CSV file as one more writer, and prints its receipt.

    None if the target has further settings, which the program does not support.
    """
    if target.kafka:
        return None
    return [
        *(sys.executable, str(RAW_PROGRAM), stream),
        *("--bootstrap", target.bootstrap, "--prefix", target.prefix),
        *("--csv", str(csv_file), "--key", key, "--token", token),
    ]
