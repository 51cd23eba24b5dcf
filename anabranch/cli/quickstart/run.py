"""The story of the quickstart, from the broker's start to the last check."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from anabranch.cli.quickstart import checks
from anabranch.cli.quickstart.checks import Findings, Killed
from anabranch.cli.quickstart.cluster import Controllers, Place, start_broker
from anabranch.cli.quickstart.display import Display
from anabranch.cli.quickstart.events import DOOMED_MARK, stream_of
from anabranch.cli.quickstart.processes import Child, Family, Message
from anabranch.cli.quickstart.raw import raw_command
from anabranch.cli.quickstart.report import Report
from anabranch.cli.quickstart.rows import StreamReport
from anabranch.cli.quickstart.source import TABLES, Source, find_source
from anabranch.cli.session import connected

WORKERS = 4
KEEPALIVE_S = 120.0
TICK_EVERY_S = 0.1
DOOMED_ROWS = 10_000
STEP_S = 120.0
COMMIT_S = 150.0
VICTIM = 1
FLIGHTS = TABLES[0]


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for."""

    bootstrap: str | None = None
    kafka: Mapping[str, str] = field(default_factory=dict)
    limit: int | None = None
    keep: bool = False


def run_quickstart(settings: Settings, display: Display) -> Report:
    """Runs it all; whatever was started is stopped, however it ends."""
    source = find_source(settings.limit)
    folder = Path(tempfile.mkdtemp(prefix="anabranch-quickstart-"))
    with ExitStack() as stack:
        if settings.keep:
            # Not a word of the report: it should be known after an error too.
            stack.callback(display.note, f"data and logs are kept in {folder}")
        else:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        display.state("starting the broker")
        place = start_broker(stack, folder, settings.bootstrap, settings.kafka)
        display.note(f"broker: {place.target.bootstrap}")
        display.state("starting two controllers")
        controllers = Controllers(place.target, folder)
        controllers.start(stack)
        family = Family(folder)
        stack.callback(family.close)
        story = Story(place, source, controllers, family, display, folder)
        found = story.tell()
        display.state("stopping everything")
    judged = checks.judge(found)
    return Report(
        checks=judged,
        timeline=tuple(display.timeline),
        seconds=display.elapsed,
        folder=str(folder) if settings.keep else None,
        measured=story.measured,
    )


class Story:
    """One run on a running cluster. Each step is a method, in the order of `tell`."""

    def __init__(
        self,
        place: Place,
        source: Source,
        controllers: Controllers,
        family: Family,
        display: Display,
        folder: Path,
    ) -> None:
        self._place = place
        self._source = source
        self._controllers = controllers
        self._family = family
        self._display = display
        self._folder = folder
        self._name = f"{place.scope}-2013"
        self._flights = stream_of(place.scope, FLIGHTS)
        self._rows: dict[str, int] = {}
        self.measured: dict[str, Any] = {}

    def tell(self) -> Findings:
        """Everything, in order."""
        self._make_streams()
        observers = self._start_observers()
        ticker = self._start("ticker", every=TICK_EVERY_S, on_message=self._on_tick)
        begun, ended_at = self._begin(self._name)
        token, txn_id = begun["token"], begun["txn_id"]
        partition = int(txn_id[:4], 16)
        receipts, dead_flushed, killed_writing = self._write(token, partition)
        outcome, killed_deciding = self._commit(token, receipts, partition)
        again = self._ask_again()
        doomed_txn_id, doomed_rows, doomed_state = self._abort_another()
        ticker.order("finish")
        ticks = self._family.hear(ticker, "finished", STEP_S)
        reports, streams = self._look_at_the_end(observers)
        return Findings(
            counts={stream_of(self._place.scope, t): self._source.count(t) for t in TABLES},
            transactions_stream=self._flights,
            txn_id=txn_id,
            driver_ended_at=ended_at,
            dead=_label(VICTIM),
            dead_flushed=dead_flushed,
            raw_rows=sum(self._source.count(t) for t in TABLES if t.raw),
            raw_is_program=self._raw_is_program,
            outcome=outcome,
            again=again,
            ticks=ticks,
            tick_seconds=[tick["seconds"] for tick in ticker.said("tick")],
            plain=reports["plain"],
            reader=reports["reader"],
            transactions=reports["transactions"]["transactions"],
            streams=streams,
            killed_writing=killed_writing,
            killed_deciding=killed_deciding,
            doomed_rows=doomed_rows,
            doomed_txn_id=doomed_txn_id,
            doomed_state=doomed_state,
        )

    # -- beginning --------------------------------------------------------------------------------

    def _make_streams(self) -> None:
        self._display.state("creating five streams")
        with connected(self._place.target) as client:
            for table in TABLES:
                # The rows carry times of 2013: a stream with a time limit would lose them.
                client.create_stream(
                    stream_of(self._place.scope, table),
                    segments=table.segments,
                    settings={"retention.ms": "-1"},
                )
        names = ", ".join(stream_of(self._place.scope, table) for table in TABLES)
        self._display.note(f"two controllers; streams {names}")

    def _start_observers(self) -> dict[str, Child]:
        observers = {
            name: self._start(name, stream=self._flights)
            for name in ("plain", "reader", "transactions")
        }
        for observer in observers.values():
            self._family.hear(observer, "ready", STEP_S)
        self._display.note("three observers look on: a plain consumer, two readers of the library")
        return observers

    def _begin(self, name: str | None) -> tuple[Message, float]:
        driver = self._start(
            "driver",
            name="driver" if name else "driver-2",
            parameters={"name": name, "keepalive": KEEPALIVE_S},
        )
        begun = self._family.hear(driver, "begun", STEP_S)
        self._family.wait_for("the driver's end", lambda: driver.poll() is not None, STEP_S)
        ended_at = time.monotonic()
        if name:
            self._display.note(
                f"process {driver.pid} began transaction {begun['txn_id']}, and has ended"
            )
        return begun, ended_at

    # -- writing ----------------------------------------------------------------------------------

    def _write(self, token: str, partition: int) -> tuple[list[str], int, Killed]:
        """Five writers; one is killed, and so is the leading controller. The receipts to take."""
        total = self._source.total()
        shares = self._source.total() // WORKERS
        self._display.state("five processes write")
        workers = [
            self._worker(
                _label(share),
                token,
                share,
                **({"flush_at": shares // 8, "hang_at": shares // 4} if share == VICTIM else {}),
            )
            for share in range(WORKERS)
        ]
        raw = self._start_raw(token)
        victim = workers[VICTIM]
        flushed = self._family.hear(victim, "flushed", STEP_S)
        victim.kill()
        self._display.note(
            f"worker {victim.pid} killed, {flushed['rows']:,} rows after its flush; "
            "another one redoes its share"
        )
        self._rows.pop(victim.name, None)
        redone = self._worker(_label(WORKERS), token, VICTIM)
        writers = [*(w for w in workers if w is not victim), redone]
        self._family.wait_for(
            "a third of the rows", lambda: sum(self._rows.values()) * 3 > total, STEP_S
        )
        self._display.state("the leading controller is killed")
        killed = self._controllers.kill_leader(partition)
        self._note_takeover(killed)
        self._display.state("five processes write")
        finished = [self._family.hear(worker, "finished", STEP_S) for worker in writers]
        receipts = [message["receipt"] for message in finished]
        receipts.append(self._raw_receipt(raw))
        self._display.bar("rows written", total, total)
        self._display.note(f"{total:,} rows are in journals, and nothing of them in a stream")
        return receipts, flushed["rows"], killed

    def _worker(self, label: str, token: str, share: int, **more: Any) -> Child:
        return self._start(
            "writer",
            name=label,
            parameters={
                "token": token,
                "by": label,
                "share": share,
                "of": WORKERS,
                "limit": self._source.limit,
                "tables": [table.name for table in TABLES if not table.raw],
                **more,
            },
            on_message=self._on_rows(label),
        )

    def _start_raw(self, token: str) -> Child:
        table = next(table for table in TABLES if table.raw)
        command = raw_command(
            self._place.target,
            stream_of(self._place.scope, table),
            self._source.cut(table, self._folder),
            table.key,
            token,
        )
        self._raw_is_program = command is not None
        if command is not None:
            return self._family.start_command("raw-client", command)
        return self._start(
            "writer",
            name="raw-client",
            parameters={
                "token": token,
                "by": None,
                "share": 0,
                "of": 1,
                "limit": self._source.limit,
                "tables": [table.name],
            },
        )

    def _raw_receipt(self, raw: Child) -> str:
        """The receipt that the raw program printed."""
        if not self._raw_is_program:
            receipt: str = self._family.hear(raw, "finished", STEP_S)["receipt"]
            return receipt
        self._family.wait_for("the raw program's end", lambda: raw.poll() == 0, STEP_S)
        return str(self._family.wait_for("its receipt", lambda: raw.lines, STEP_S)[-1])

    # -- ending -----------------------------------------------------------------------------------

    def _commit(
        self, token: str, receipts: list[str], partition: int
    ) -> tuple[Message, Killed | None]:
        """The commit from another process; the leader dies between decision and COMMITTED."""
        self._display.state("another process commits")
        committer = self._start(
            "committer",
            parameters={"token": token, "receipts": receipts, "timeout": COMMIT_S},
        )
        requested = self._family.hear(committer, "requested", STEP_S)["requested"]
        self._family.wait_for(
            "the decision",
            lambda: self._controllers.armed_is_gone() or committer.last("committed"),
            COMMIT_S,
            0.01,
        )
        killed = None
        if self._controllers.armed_is_gone():
            self._display.note(
                f"the leading controller killed itself {time.monotonic() - requested:.2f} s after "
                "the commit was asked for: decided, not committed"
            )
            killed = self._controllers.replace_armed(partition)
            self._note_takeover(killed)
        outcome = self._family.hear(committer, "committed", COMMIT_S)
        seconds = outcome["at"] - requested
        self.measured["commit_s"] = round(seconds, 3)
        self._display.note(f"{outcome['committed']:,} events committed, {seconds:.1f} s after")
        return outcome, killed

    def _ask_again(self) -> Message:
        asker = self._start("asker", parameters={"name": self._name})
        return self._family.hear(asker, "outcome", STEP_S)

    def _abort_another(self) -> tuple[str, int, str]:
        """A second transaction: written by two processes, then aborted by a third."""
        self._display.state("a second transaction is written and aborted")
        begun, _ = self._begin(None)
        limit = min(DOOMED_ROWS, self._source.limit or DOOMED_ROWS)
        writers = [
            self._start(
                "writer",
                name=f"doomed-{share}",
                parameters={
                    "token": begun["token"],
                    "by": f"doomed-{share}",
                    "share": share,
                    "of": 2,
                    "limit": limit,
                    "tables": [table.name for table in TABLES],
                    "mark": DOOMED_MARK.decode(),
                },
            )
            for share in range(2)
        ]
        rows = sum(self._family.hear(w, "finished", STEP_S)["rows"] for w in writers)
        aborter = self._start("aborter", parameters={"token": begun["token"]})
        state = self._family.hear(aborter, "aborted", STEP_S)["state"]
        self._display.note(f"a second transaction with {rows:,} events is {state}")
        return begun["txn_id"], rows, state

    def _look_at_the_end(
        self, observers: Mapping[str, Child]
    ) -> tuple[dict[str, Message], list[StreamReport]]:
        """The observers' reports, and the comparison of every stream with its source."""
        self._display.state("comparing every row with its source")
        self._family.hear(self._start("ender", stream=self._flights), "finished", STEP_S)
        checkers = [
            self._start(
                "checker",
                name=f"checker-{number}",
                parameters={"tables": names, "limit": self._source.limit},
            )
            for number, names in enumerate(
                ([FLIGHTS.name], [table.name for table in TABLES if table is not FLIGHTS]), 1
            )
        ]
        observers["plain"].order("finish")
        reports = {name: self._family.hear(c, "report", STEP_S) for name, c in observers.items()}
        for checker in checkers:
            self._family.hear(checker, "finished", STEP_S)
        found = [message for checker in checkers for message in checker.said("checked")]
        streams = [StreamReport.from_document(message) for message in found]
        self._display.note("every stream was compared with its source")
        return reports, streams

    # -- small things -----------------------------------------------------------------------------

    def _start(
        self,
        role: str,
        *,
        name: str | None = None,
        parameters: Mapping[str, Any] | None = None,
        on_message: Callable[[Message], None] | None = None,
        **more: Any,
    ) -> Child:
        common = {"target": asdict(self._place.target), "scope": self._place.scope}
        return self._family.start(
            role, {**common, **(parameters or {}), **more}, name=name, on_message=on_message
        )

    def _on_rows(self, label: str) -> Callable[[Message], None]:
        def take(message: Message) -> None:
            if message["say"] == "wrote":
                self._rows[label] = message["rows"]
                self._display.bar("rows written", sum(self._rows.values()), self._source.total())

        return take

    def _on_tick(self, message: Message) -> None:
        if message["say"] == "tick":
            self._display.tick(message["number"] + 1, message["seconds"])

    def _note_takeover(self, killed: Killed) -> None:
        self._display.note(f"{killed.name}, which led, was killed (SIGKILL)", at=killed.at)
        if killed.taken_over_at is not None:
            seconds = killed.taken_over_at - killed.at
            self._display.note(f"{killed.by} leads, {seconds:.1f} s later", at=killed.taken_over_at)


def _label(share: int) -> str:
    return f"worker-{share + 1}"
