"""The story of the run: its steps in order, and the processes of each."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from examples.flights.cast import STEP_S, VICTIM, WORKERS, Cast, label_of
from examples.flights.cluster import Controllers
from examples.flights.compare import Wanted
from examples.flights.display import Display
from examples.flights.findings import Findings, Killed
from examples.flights.historian import Epoch
from examples.flights.measure import measure_ticks, rows_seen, rows_written
from examples.flights.notes import Notes, stream_of
from examples.flights.processes import Child, Message
from examples.flights.source import TABLES
from examples.flights.ticker import END_EVENTS

COMMIT_S = 150.0
SCALE_TO = (4, 3)  # segments of the flights, while the big transaction is open


class Story:
    """One run on a running cluster. Each step is a method, in the order of `tell`."""

    def __init__(self, cast: Cast, controllers: Controllers, display: Display) -> None:
        self._cast = cast
        self._family = cast.family
        self._source = cast.source
        self._controllers = controllers
        self._display = display
        self._name = f"{cast.place.scope}-2013"
        self._scaled: list[Message] = []
        self.measured: dict[str, Any] = {}

    def tell(self) -> Findings:
        cast = self._cast
        self._make_streams()
        observers, members, ticker = cast.observers(), cast.members(), cast.ticker()
        auditor = cast.start("auditor")
        begun, ended_at, doomed = self._begin_two()
        cast.heard(observers | members | {"auditor": auditor}, "ready")
        clerks = cast.clerks()
        self._display.note(
            "three observers look on: a plain consumer, two readers of the library; "
            f"and a group of {len(members)} that reads the flights in order"
        )
        partition = int(begun["txn_id"][:4], 16)
        receipts, dead_flushed, doomed_rows, killed_writing = self._write(
            begun["token"], doomed["token"], partition
        )
        # Meanwhile read the source, which takes some seconds.
        reading = ThreadPoolExecutor(1)
        wanted = reading.submit(lambda: [Wanted(self._source.rows(table)) for table in TABLES])
        reading.shutdown(wait=False)
        outcome, killed_deciding = self._commit(begun["ending"], receipts, partition)
        asker = cast.start("asker", begin_as=self._name)
        doomed_state = self._abort(doomed, doomed_rows)
        again = self._family.hear(asker, "outcome", STEP_S)
        ticker.finish()
        ticks = self._family.hear(ticker, "finished", STEP_S)
        audit, moved = self._settle_accounts(auditor, clerks)
        reports, late = self._look(observers, members)
        notes = {name: cast.notes(child) for name, child in (observers | members).items()}
        historian = cast.historian(begun["txn_id"])
        history = self._family.hear(historian, "history", STEP_S)
        self._family.hear(late, "report", STEP_S)
        self._measure(ticker, notes["plain"], outcome, [killed_writing, killed_deciding])
        scope = cast.place.scope
        return Findings(
            streams=[stream_of(scope, table) for table in TABLES],
            wanted=wanted.result(),
            txn_id=begun["txn_id"],
            driver_ended_at=ended_at,
            dead=label_of(VICTIM).encode(),
            dead_flushed=dead_flushed,
            raw_rows=sum(self._source.count(t) for t in TABLES if t.raw),
            raw_is_program=cast.raw_is_program,
            outcome=outcome,
            again=again,
            ticks=ticks,
            txn_ids=reports["transactions"]["txn_ids"],
            killed_writing=killed_writing,
            killed_deciding=killed_deciding,
            doomed_rows=doomed_rows,
            doomed_txn_id=doomed["txn_id"],
            doomed_state=doomed_state,
            scaled=[(message["segments"], message["done"]) for message in self._scaled],
            epochs=[Epoch(**epoch) for epoch in history["epochs"]],
            plain=notes["plain"],
            reader=notes["reader"],
            whole=notes["transactions"],
            members=[notes[name] for name in members],
            log=cast.notes(late),
            clerks=moved,
            audit=audit,
        )

    def _make_streams(self) -> None:
        self._display.state("creating five streams")
        self._family.hear(self._cast.start("maker"), "finished", STEP_S)
        names = ", ".join(stream_of(self._cast.place.scope, table) for table in TABLES)
        self._display.note(f"two controllers; streams {names}")

    def _begin_two(self) -> tuple[Message, float, Message]:
        """Two processes begin a transaction each, and end."""
        driver, other = self._cast.driver(self._name), self._cast.driver(None)
        begun, ended_at = self._cast.begun(driver)
        self._display.note(
            f"process {driver.pid} began transaction {begun['txn_id']}, and has ended"
        )
        return begun, ended_at, self._cast.begun(other)[0]

    def _write(
        self, token: str, doomed_token: str, partition: int
    ) -> tuple[list[str], int, int, Killed]:
        """Write by five writers; kill one of them, and the leading controller.

        Returns the receipts to commit, the rows that the dead writer had flushed, the rows of the transaction that
        will be aborted, and the controller's death.
        """
        cast, total = self._cast, self._source.total()
        share = total // WORKERS
        self._display.state("five processes write")
        doing = {"flush_at": share // 8, "hang_at": share // 4}
        workers = [
            cast.worker(label_of(n), token, n, **(doing if n == VICTIM else {}))
            for n in range(WORKERS)
        ]
        raw = cast.raw(token)
        victim = workers.pop(VICTIM)
        flushed = self._family.hear(victim, "flushed", STEP_S)["rows"]
        victim.kill()
        self.measured["worker_killed_at_s"] = round(self._display.elapsed, 2)
        self._display.note(
            f"worker {victim.pid} killed after a flush of {flushed:,} rows; "
            "another one redoes its share"
        )
        cast.forget(victim)
        workers.append(cast.worker(label_of(WORKERS), token, VICTIM))
        doomed = cast.doomed(doomed_token)
        self._scale(SCALE_TO[0])
        self._family.wait_for("a third of the rows", lambda: cast.written * 3 > total, STEP_S)
        self._display.state("the leading controller is killed")
        killed = self._controllers.kill_leader(partition)
        self._note_takeover(killed)
        self._scale(SCALE_TO[1])
        self._display.state("five processes write")
        finished = [self._family.hear(worker, "finished", STEP_S) for worker in workers]
        receipts = [message["receipt"] for message in finished]
        receipts.append(cast.raw_receipt(raw))
        doomed_rows = sum(self._family.hear(w, "finished", STEP_S)["rows"] for w in doomed)
        self._display.wrote(total, total)
        self._display.note(f"{total:,} rows are in journals, and nothing of them in a stream")
        return receipts, flushed, doomed_rows, killed

    def _scale(self, segments: int) -> None:
        """Scale the flights. Writers to the open transaction notice nothing."""
        self._display.state(f"the flights are scaled to {segments} segments")
        scaled = self._family.hear(self._cast.scaler(segments), "scaled", STEP_S)
        self._scaled.append(scaled)
        self._display.note(
            f"the flights were scaled to {segments} segments: stream epoch {scaled['epoch']}",
            at=scaled["done"],
        )

    def _commit(
        self, token: str, receipts: list[str], partition: int
    ) -> tuple[Message, Killed | None]:
        """Commit from another process; the leader dies between the decision and COMMITTED."""
        self._display.state("another process commits")
        committer = self._cast.start("committer", token=token, receipts=receipts, timeout=COMMIT_S)
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
        self._display.note(f"{outcome['committed']:,} events committed, {seconds:.1f} s after")
        return outcome, killed

    def _abort(self, doomed: Message, rows: int) -> str:
        """Abort the second transaction, from a process that neither began nor wrote it."""
        self._display.state("a second transaction is aborted")
        aborter = self._cast.start("aborter", token=doomed["ending"])
        state: str = self._family.hear(aborter, "aborted", STEP_S)["state"]
        self._display.note(f"a second transaction, with {rows:,} events, is {state}")
        return state

    def _settle_accounts(
        self, auditor: Child, clerks: list[Child]
    ) -> tuple[Message, list[Message]]:
        """Let the clerks make their last transfers, and then the auditor its last sum."""
        for child in clerks:
            child.finish()
        moved = [self._family.hear(child, "finished", STEP_S) for child in clerks]
        auditor.finish()
        audit = self._family.hear(auditor, "report", STEP_S)
        transfers = sum(len(message["began"]) for message in moved)
        self._display.note(
            f"{transfers:,} transfers between accounts of a table, by {len(clerks)} processes"
        )
        return audit, moved

    def _look(
        self, observers: dict[str, Child], members: dict[str, Child]
    ) -> tuple[dict[str, Message], Child]:
        """Returns the observers' reports, once they have seen everything, and a consumer that reads all again."""
        self._display.state("comparing every row with its source")
        ender = self._cast.start("ender", stream=self._cast.flights)
        self._family.hear(ender, "finished", STEP_S)
        late = self._cast.late_reader()
        for child in (late, observers["plain"]):
            child.finish()

        def members_are_done() -> bool:
            got = {said["index"] for child in members.values() for said in child.said("end")}
            return len(got) == END_EVENTS

        self._family.wait_for("the group's last events", members_are_done, STEP_S)
        for child in members.values():
            child.finish()
        return self._cast.heard(observers | members, "report"), late

    def _measure(
        self, ticker: Child, plain: Notes, outcome: Message, killed: list[Killed | None]
    ) -> None:
        """Note series and moments, in seconds since the start."""
        started = self._display.started
        workers = {c.name: c.said("wrote") for c in self._cast.living_workers}
        self.measured |= {
            "rows": self._source.total(),
            "commit_s": round(outcome["at"] - outcome["requested"], 3),
            "requested_at_s": round(outcome["requested"] - started, 2),
            "committed_at_s": round(outcome["at"] - started, 2),
            "scaled_at_s": [
                [round(message["done"] - started, 2), message["segments"]]
                for message in self._scaled
            ],
            "controllers_killed_at_s": [round(k.at - started, 2) for k in killed if k],
            "small_commits": measure_ticks(ticker.said("tick"), started),
            "rows_written": rows_written(workers, started),
            "rows_seen_by_the_plain_consumer": rows_seen(plain, started),
        }

    def _note_takeover(self, killed: Killed) -> None:
        self._display.note(f"{killed.name}, which led, was killed (SIGKILL)", at=killed.at)
        if killed.taken_over_at is not None:
            seconds = killed.taken_over_at - killed.at
            self._display.note(f"{killed.by} leads, {seconds:.1f} s later", at=killed.taken_over_at)
