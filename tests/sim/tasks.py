"""Workers of processors: they take tasks, steal them from each other, and commit outputs with what they consumed.

Each output is of one event of an input; the ledger notes of which. All do what `docs/inside/processing.md` allows,
and some of what it forbids: a stretch is sent twice, under two ids, or long after others have its tasks.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from anabranch.client.client import Client
from anabranch.client.table_transaction import TableTransaction
from anabranch.client.transaction import Transaction
from anabranch.errors import (
    AnabranchError,
    EventTooLarge,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NotAuthorized,
    OutcomeUnknown,
    RetryError,
    SnapshotExpired,
    StreamLost,
    TopicMisconfigured,
    UnknownProcessor,
    UnknownScope,
    UnknownStream,
)
from anabranch.processing.batch import BatchConflict
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.protocol.schemas.records import Consumed
from anabranch.reading.committed_log import client_errors
from anabranch.reading.task_reader import TaskReader
from anabranch.topics.names import history_topic, stream_topic
from anabranch.types import Event, Result, TaskOwnership
from tests.sim.clients import beat
from tests.sim.faults import Faults
from tests.sim.ledger import Attempt, Deal, Given, Ledger, Workplace
from tests.sim.ports import SimCluster
from tests.sim.prepared import preparing
from tests.sim.readers import reading_client
from tests.sim.recorded import recorded_begin, recorded_commit, recorded_take, told_commit
from tests.sim.scaling import scale_somehow
from tests.sim.task_rows import StretchTables
from tests.sim.task_state import STORES, Numbers, Row, change, restore
from tests.sim.world import Interrupt, Process, World
from tests.sim.writers import FINE, SCOPE, create_tables, recorded_write

if TYPE_CHECKING:
    from tests.sim.tables import Noted
    from tests.tables.recorded import RecordedTransaction

OUTPUT = f"{SCOPE}/out"
TASKS = (1, 2, 4)
_RESTART_S = 1.0
_TIMEOUT_S = 1.0  # a reader gives up when nothing came for so long
_IDLE_ROUNDS = 3  # without an event, after all writing: all is consumed
_WAIT = (UnknownScope, UnknownStream, UnknownProcessor)  # it is not there yet
_STATE_BYTES = 500  # so many a change of state may take: that of one event does
_TOO_MUCH = "a state change of"
_TRIES = 3  # of a stretch whose locks are broken
_AGAIN = "take your tasks again"  # what refusals of sequences and positions say


class Stretch(NamedTuple):
    """What a commit is of: the positions that it moves, the events before them, and how these change the state.

    ``label``: the ownership's name in the history.
    """

    consumed: Consumed
    events: list[Event]
    label: str
    rows: list[Row]


class TaskMachine:
    """A worker's machine: its process is started again when it dies, until all inputs are consumed."""

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, noted: Noted, number: int
    ) -> None:  # fmt: skip
        self.world, self.cluster, self.faults, self.ledger = world, cluster, faults, ledger
        self.number, self._noted = number, noted
        self.name = f"p{number}"
        self.starts = 0
        self.idle = 0  # rounds in a row
        self.finishing = False  # all writing to inputs has ended
        self.consumed = 0  # events whose commit is known here
        self.client: Client | None = None
        self.tables: StretchTables | None = None  # of the process; None while it has none
        self.peers: list[TaskMachine] = []  # itself, too
        self._folder: Path | None = None

    @property
    def done(self) -> bool:
        """All is consumed; or nobody can consume it."""
        return self.idle >= _IDLE_ROUNDS

    def start(self) -> None:
        """Start a process."""
        self.starts += 1
        self.idle = 0
        process = self.faults.process(f"{self.name}.{self.starts}", "worker")
        process.on_death.append(lambda: self.world.later(self.faults.span(_RESTART_S), self.start))
        process.on_death.append(self._close_tables)
        self.client = None
        self.world.spawn(process, "work", lambda: self._run(process))

    def close(self) -> None:
        """Close the tables, and delete their folder."""
        self._close_tables()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _close_tables(self) -> None:
        if self.tables is not None:
            self.tables.close()
            self.tables = None

    def _open_tables(self, client: Client) -> StretchTables:
        """Those of this process. Each has a folder of its own."""
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="anabranch-sim-"))
        folder = self._folder / str(self.starts)
        history = self.ledger.history
        inputs = [stream for stream in self.ledger.streams if stream not in self.ledger.deleted]
        return StretchTables(self.world, history, self._noted, client, folder, inputs)

    def _run(self, process: Process) -> None:
        random = self.world.random
        client = reading_client(
            self.cluster,
            process,
            self.ledger.prefix,
            timeout=random.choice((3.0, 10.0)),
            one_shot_bytes=random.choice((0, 200, 1 << 18)),
        )
        self.client = client
        self.world.spawn(process, "heart", lambda: beat(self.world, client, process))
        while True:
            if self.done:
                self.world.sleep(5.0)
                continue
            found, place = False, None
            try:
                place = self._workplace(client)
                if place is not None and self.faults.weather.rows and self.tables is None:
                    self.tables = self._open_tables(client)
                if place is not None:
                    found = self._work(client, place)
            except AnabranchError as error:
                spoiled = place is not None and place.inputs_in(self.ledger.deleted)
                if not spoiled and not isinstance(error, (SnapshotExpired, *_WAIT, *self._allowed)):
                    raise
                self.world.note(process.name, f"{type(error).__name__}: {error}"[:200])
                found = not isinstance(error, (SnapshotExpired, IllegalState, StreamLost))
                self.world.sleep(0.3)
            except Interrupt:
                found = True
            self.idle = self.idle + 1 if self.finishing and not found else 0
            self.world.sleep(random.expovariate(2.0))

    @property
    def _allowed(self) -> tuple[type[Exception], ...]:
        refused = (NotAuthorized, InvalidArgument, EventTooLarge, TopicMisconfigured)
        return (*FINE, *(refused if self.ledger.troubled else ()))

    # -- which tasks ----------------------------------------------------------------------------------

    def _workplace(self, client: Client) -> Workplace | None:
        """The processor that they all work for; the next one where the last is of no use any more."""
        random, ledger = self.world.random, self.ledger
        known = list(ledger.workplaces.values())
        if (
            known
            and known[-1].inputs_in(ledger.deleted)
            and (self.finishing or random.random() < 0.1)
        ):
            known[-1].is_over = True
        if known and not known[-1].is_over:
            place = known[-1]
        else:
            there = [stream for stream in ledger.streams if stream not in ledger.deleted]
            if self.finishing or not there:
                return None
            inputs = tuple(sorted(random.sample(there, k=random.randint(1, len(there)))))
            # What is left of an input may lack events of its first commits.
            start = "end" if self.faults.weather.retain_s else "begin"
            name = f"{SCOPE}/p{len(known)}"
            stores = (
                random.choice((STORES, ()))
                if self.faults.weather.chunk_bytes >= _STATE_BYTES
                else ()
            )
            place = Workplace(name, inputs, random.choice(TASKS), start, stores)
            ledger.workplaces[name] = place
        if not place.made:
            weather, here = self.faults.weather, self.world.current
            if weather.rows or weather.prepared:
                admin = reading_client(
                    self.cluster, here, self.ledger.prefix, ADMIN_LANE, timeout=5.0
                )
                admin.feature_level(raise_to=LEVEL, timeout=5.0)
            if weather.rows:
                create_tables(self.world, client)
            client.create_stream(OUTPUT, 2, timeout=5.0)
            parts = place.inputs, place.tasks, place.start
            client.create_processor(place.name, *parts, stores=place.stores)
            place.made = True
        return place

    def _choose(self, place: Workplace) -> list[int] | None:
        """All tasks, or some; at the end each worker has its share, and none takes another's."""
        random = self.world.random
        if self.finishing:
            return list(range(place.tasks))[self.number :: len(self.peers)]
        if random.random() < 0.4:
            return None
        return random.sample(range(place.tasks), k=random.randint(1, place.tasks))

    # -- reading --------------------------------------------------------------------------------------

    def _work(self, client: Client, place: Workplace) -> bool:
        """Take tasks, and commit some stretches. Whether there was anything."""
        random = self.world.random
        tasks = self._choose(place)
        if tasks == []:
            return False
        if random.random() < 0.05 and self.faults.weather.scale_s and not self.finishing:
            scale_somehow(self.world, client, OUTPUT)
        with recorded_take(self.ledger, place, tasks) as label, self.world.interruptible():
            ownership = client.take_tasks(place.name, tasks, holder=label, timeout=5.0)
        log = self.cluster.log_of(self.world.current)
        with client_errors():  # of a restore by hand
            state = restore(log, self.ledger, ownership) if place.stores else None
        inputs = list(place.inputs)
        if len(inputs) > 1 and random.random() < 0.15 and not self.finishing:
            inputs.remove(random.choice(inputs))
        try:
            with client.read(inputs, ownership=ownership, timeout=_TIMEOUT_S) as reader:
                found = self._stretches(client, ownership, label, reader, state)
        except (SnapshotExpired, IllegalState) as error:
            self._expired(place, inputs, error)
            raise
        if random.random() < 0.3:
            client.release_tasks(ownership, timeout=2.0)
        return found

    def _stretches(
        self,
        client: Client,
        ownership: TaskOwnership,
        label: str,
        reader: TaskReader,
        state: Numbers | None,
    ) -> bool:
        random = self.world.random
        beside: list[bool] = []  # of the commit that is under way beside the reading, if any
        found = False
        for _ in range(random.choice((1, 3, 10))):
            few = state is not None and self.faults.weather.chunk_bytes <= 2 * _STATE_BYTES
            events = self._some(reader, 1 if few else random.choice((1, 2, 5, 20)))
            found = found or bool(events)
            if not events and (found or random.random() < 0.7):
                break
            if random.random() < 0.1:
                self.world.sleep(random.expovariate(0.5))
            consumed = reader.consumed()
            rows = change(state, ownership, consumed, events) if state is not None else []
            stretch = Stretch(consumed, events, label, rows)
            commit = partial(self._commit, client, ownership, stretch)
            if random.random() < 0.2:
                self._spawn(commit, beside)
                continue
            if random.random() < 0.05:  # it does not wait for the answer, and sends it once more
                self._spawn(commit, [])
            if not commit() or False in beside:
                return True
        return found

    def _some(self, reader: TaskReader, most: int) -> list[Event]:
        """Events of a reader, by one iteration or several; one that failed for a moment goes on."""
        events: list[Event] = []
        ended = False
        while not ended and len(events) < most:
            before = len(events)
            try:
                for event in islice(reader, self.world.random.randint(1, most - before)):
                    events.append(event)
                ended = len(events) == before
            except RetryError:
                if self.world.random.random() < 0.5:
                    raise
        return events

    def _expired(self, place: Workplace, inputs: list[str], error: AnabranchError) -> None:
        """Another processor is needed, if something is gone; else that is no true answer."""
        places = self.cluster.partitions
        topics = {name(stream) for stream in inputs for name in (stream_topic, history_topic)}
        cut = any(part.start_offset for at, part in places.items() if at.topic in topics)
        if not cut and not place.inputs_in(self.ledger.deleted):
            self.world.fail(f"{place.name}: {error!r}, and nothing is deleted")
        place.is_over = True

    def _spawn(self, commit: Callable[[], bool], ends: list[bool]) -> None:
        self.world.spawn(self.world.current, "beside", lambda: ends.append(commit()))

    # -- committing -----------------------------------------------------------------------------------

    def _commit(self, client: Client, ownership: TaskOwnership, stretch: Stretch) -> bool:
        """Commit a stretch. False: not so far as is known here; the tasks must be taken again.

        After a conflict it is handled again, as nothing of it has happened.
        """
        tables = self.tables
        if tables is None or self.world.random.random() >= self.faults.weather.rows:
            return self._try_commit(client, ownership, stretch, None)
        for _ in range(_TRIES):
            try:
                with tables.alone():
                    return self._try_commit(client, ownership, stretch, tables)
            except BatchConflict as conflict:
                self.world.note(self.name, f"conflict: {conflict}"[:200])
                self.world.sleep(self.world.random.expovariate(5.0))
        return False

    def _try_commit(
        self,
        client: Client,
        ownership: TaskOwnership,
        stretch: Stretch,
        tables: StretchTables | None,
    ) -> bool:
        """Handle a stretch, and commit it. Raises `BatchConflict`: its locks are broken."""
        random = self.world.random
        deal = self.ledger.open(SCOPE, "task", keepalive=random.choice((3.0, 8.0)))
        deal.consumed, deal.ownership = stretch.consumed, stretch.label
        txn: Transaction | TableTransaction | None = None
        try:
            with ExitStack() as stack:
                rows = None if tables is None else tables.handle(deal, ownership, stretch.events)
                if rows is None or rows.reads is None:
                    with recorded_begin(self.ledger, deal):
                        seconds = deal.keepalive_ms / 1000
                        txn = client.begin(SCOPE, None, seconds, ownership=ownership)
                else:
                    txn = stack.enter_context(cast("RecordedTransaction", rows.reads).txn)
                kind = random.random()
                if tables is None and kind < 0.25 and not stretch.rows:
                    return self._commit_elsewhere(deal, txn, stretch.events)
                self._write(deal, "own", stretch.events, txn.write)
                self._write_state(deal, txn, ownership, stretch.rows)
                if tables is not None and rows is not None:
                    tables.write(deal, txn, rows)
                finished = self._finish(deal, txn, stretch, kind)
                if finished is None:
                    return False
                if rows is not None:
                    rows.committed(finished.commit_timestamp)
                self.consumed += len(stretch.events)
                return True
        except BatchConflict:
            raise
        except AnabranchError as error:
            if not isinstance(error, self._allowed):
                raise
            self.world.note(deal.label, f"{type(error).__name__}: {error}"[:200])
            return False
        finally:
            deal.txn_id = (None if txn is None else txn.txn_id) or deal.txn_id

    def _finish(
        self, deal: Deal, txn: Transaction | TableTransaction, stretch: Stretch, kind: float
    ) -> Result | None:
        """Commit what is written, perhaps by a ledger. None: it is not committed so far as is known here."""
        if kind < 0.5:
            txn.flush()
        consumed = stretch.consumed
        call = preparing(
            self.world, self.faults, self.ledger, deal, txn,
            lambda t: txn.commit(consumed=consumed, timeout=t),
        )  # fmt: skip
        is_prepared = deal.label in self.ledger.prepared
        if kind < 0.1 and not is_prepared:
            self._abort_beside(deal, txn)
        attempt = deal.attempt(self.world.now, "own", None)
        if self._ask(deal, call, attempt):
            return attempt.result
        if isinstance(txn, TableTransaction):
            if isinstance(attempt.error, LocksBroken | SnapshotExpired):
                raise BatchConflict.of(attempt.error)
        elif not is_prepared and self.world.random.random() < 0.5:
            self._abort(deal, txn)
        return None

    def _write_state(
        self,
        deal: Deal,
        txn: Transaction | TableTransaction,
        ownership: TaskOwnership,
        rows: Sequence[Row],
    ) -> None:
        for row in rows:
            told = deal.event(deal.writer("own"), ownership.state, row.key)
            self.ledger.numbers[told.value] = row.number
            change_one = partial(_write_state, txn, row.task)
            recorded_write(self.ledger, deal, deal.writer("own"), told, change_one)

    def _write(
        self,
        deal: Deal,
        writer: str,
        events: list[Event],
        write: Callable[[str, bytes, bytes | None], None],
    ) -> None:
        """An output for each event; one without an event shows that a stretch without any was committed."""
        account = deal.writer(writer)
        for event in events:
            told = deal.event(account, OUTPUT, event.key)
            deal.given.append(
                Given(
                    event.stream, event.partition, event.offset, event.key, event.value, told.value
                )
            )
            recorded_write(self.ledger, deal, account, told, write)
        if not events:
            recorded_write(self.ledger, deal, account, deal.event(account, OUTPUT, b"idle"), write)

    def _commit_elsewhere(
        self, deal: Deal, txn: Transaction | TableTransaction, events: list[Event]
    ) -> bool:
        """Other processes write, and another one commits by the token."""
        random = self.world.random
        token = txn.token("all")
        deal.txn_id, deal.begun = txn.txn_id, True
        holders = [peer.client for peer in self.peers if peer.client is not None]
        writer = random.choice(holders).join(token)
        self._write(deal, "w0", events, writer.write)
        account = deal.writer("w0")
        account.finishing = True
        account.flushed.append(len(account.told))
        with self.ledger.history.here.asking("finish", txn=deal.label, writer="w0.0"):
            receipt = writer.finish()
        account.finished_at = self.world.now
        committer = random.choice(holders)
        if random.random() < 0.2:
            self.world.sleep(random.expovariate(0.5))
        attempt = deal.attempt(self.world.now, None, {"w0": len(account.told)})
        return self._ask(
            deal,
            lambda t: committer.commit(token, [receipt], consumed=deal.consumed, timeout=t),
            attempt,
        )

    def _ask(self, deal: Deal, call: Callable[[float], Result], attempt: Attempt) -> bool:
        """Commit, some times over. What stays in doubt is settled by taking the tasks again."""
        random = self.world.random
        attempt.sent = self.world.now
        for _ in range(random.choice((1, 2, 3))):
            try:
                with (
                    recorded_commit(self.ledger, deal, attempt) as told,
                    self.world.interruptible(),
                ):
                    result = call(random.choice((1.0, 5.0, 20.0)))
                    told_commit(told, deal, result)
            except Interrupt:
                attempt.in_doubt = True
                return False
            except OutcomeUnknown as error:
                attempt.in_doubt = True
                deal.txn_id = error.txn_id or deal.txn_id
                continue
            except AnabranchError as error:
                attempt.error = copy(error)  # without what holds the handle, which goes on beating
                known = _AGAIN in str(error) or _TOO_MUCH in str(error)
                fits = isinstance(error, InvalidArgument) and known
                if not fits and not isinstance(error, self._allowed):
                    self.world.fail(f"{deal.label}: commit was refused: {error!r}")
                self.world.note(deal.label, f"{type(error).__name__}: {error}"[:200])
                return False
            finally:
                attempt.ended = self.world.now
            self.world.note(deal.label, f"committed at {result.commit_timestamp}")
            attempt.result = result
            return True
        return False

    def _abort_beside(self, deal: Deal, txn: Transaction | TableTransaction) -> None:
        """Another process aborts it by its token, at about the time of its commit."""
        token = txn.token("all")
        other = self.world.random.choice([p.client for p in self.peers if p.client is not None])

        def abort() -> None:
            self.world.sleep(self.world.random.expovariate(20.0))
            asking = self.ledger.history.here.asking("abort", txn=deal.label)
            with contextlib.suppress(*self._allowed), asking:
                other.abort(token, timeout=2.0)
                deal.aborted_at = self.world.now

        self.world.spawn(self.world.current, "abort", abort)

    def _abort(self, deal: Deal, txn: Transaction) -> None:
        is_sure = deal.label not in self.ledger.doubled
        asking = self.ledger.history.here.asking("abort", txn=deal.label)
        with contextlib.suppress(*self._allowed), asking if is_sure else contextlib.nullcontext():
            txn.abort("left by an error", timeout=2.0)
            if is_sure:
                deal.aborted_at = self.world.now


def _write_state(
    txn: Transaction | TableTransaction, task: int, _: str, value: bytes, key: bytes | None
) -> None:
    txn.write_state(task, [(key or b"", value)])
