"""Commits with several parts: prepared with locks, positions with locks, positions with a name.

Each process with a replica makes some. A *move* is of a task of one processor, and writes a row that names task and
sequence into the commit: so the topic shows whether each position moved exactly once, with its row. Draws come from
random numbers of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING, Any

from anabranch.client.client import Client
from anabranch.client.table_transaction import TableTransaction
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    InvalidArgument,
    LocksBroken,
    OutcomeUnknown,
    OwnershipLost,
    TransactionAborted,
)
from anabranch.protocol.ids import control_partition_of
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.types import Result, result_of
from tests.sim.check_log import hold
from tests.sim.readers import reading_client
from tests.sim.world import World
from tests.sim.writers import TABLES

if TYPE_CHECKING:
    from tests.sim.ledger import Ledger
    from tests.sim.picture import Picture
    from tests.sim.ports import SimCluster
    from tests.sim.tables import Noted
    from tests.tables.recorded import RecordedTables, RecordedTransaction

SCOPE = TABLES[0].split("/")[0]
PROCESSOR, INPUT = f"{SCOPE}/mover", f"{SCOPE}/moves"
TASKS = 2
MOVE = b"move%d"  # the row of a task
# How old a prepared transaction is when recovery ends it: most early, some after the hold of its locks.
_LEFT_S = (4.0, 4.0, 14.0)
REFUSED = (OwnershipLost, InvalidArgument)


@dataclass(slots=True)
class Prepared:
    """A transaction that was asked to be prepared: its token, when, and its age when recovery ends it."""

    label: str
    token: bytes
    asked: float
    left_s: float


@dataclass(slots=True)
class Shared:
    """What all processes know. ``names``: numbers of names that were tried. ``kinds``: how often each was tried."""

    prepared: dict[bytes, Prepared] = field(default_factory=dict)
    made: bool = False
    names: list[int] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=lambda: defaultdict(int))


class Together:
    """What one process does of them."""

    def __init__(
        self, world: World, cluster: SimCluster, ledger: Ledger, noted: Noted, name: str
    ) -> None:
        self._world, self._cluster, self._ledger, self._noted = world, cluster, ledger, noted
        self._shared = noted.together
        self._random = Random(f"{world.seed}/{name}/together")

    def create(self, client: Client) -> None:
        """The level, the processor, and its input, which stays empty."""
        if self._shared.made:
            return
        here, prefix = self._world.current, self._ledger.prefix
        admin = reading_client(self._cluster, here, prefix, ADMIN_LANE, timeout=5.0)
        admin.feature_level(raise_to=LEVEL)
        client.create_stream(INPUT, 1, near=SCOPE, timeout=5.0)
        client.create_processor(PROCESSOR, (INPUT,), TASKS, "begin")
        self._shared.made = True

    def job(
        self, client: Client, rows: RecordedTables, use: Callable[[RecordedTransaction], None]
    ) -> bool:
        """Do one of these jobs, or none. ``use``: reads and writes."""
        kind = self._random.random()
        if kind < 0.15:
            self.prepare(rows, use)
        elif kind < 0.35:
            self.move(client, rows)
        elif kind < 0.45:
            self.recover(client)
        return kind < 0.45

    # -- prepared, with locks -------------------------------------------------------------------------

    def prepare(self, rows: RecordedTables, use: Callable[[RecordedTransaction], None]) -> None:
        """Prepare a transaction that reads and writes; the database's word comes later, or not at all."""
        txn = rows.begin(keepalive=6.0, timeout=5.0)
        use(txn)
        opened, reads = txn.txn._open(5.0)
        self._shared.kinds["prepared"] += 1
        try:
            reads.register(txn.txn._shared.deadline(5.0))
            txn_id, token = opened.txn_id, opened.token("all")
            assert txn_id is not None
            txn.ask_commit()
            self._shared.prepared[txn_id] = Prepared(
                txn.name, token, self._world.now, self._random.choice(_LEFT_S)
            )
            opened.prepare(timeout=5.0)
            self._world.sleep(self._random.choice((0.0, self._random.expovariate(0.7))))
            if self._random.random() < 0.15:
                return  # the process forgets it
            self._end(
                txn, opened, self._ledger.words.setdefault(txn_id, self._random.random() < 0.8)
            )
        except AnabranchError as error:
            txn.failed(error)
            if not isinstance(error, LocksBroken | TransactionAborted):
                raise
        finally:
            if opened.state in ("buffered", "open"):
                txn.abort()

    def _end(self, txn: RecordedTransaction, opened: Any, word: bool) -> None:
        if word:
            txn.committed(opened.commit(timeout=5.0))
        else:
            with self._ledger.history.here.asking("abort", txn=txn.name):
                opened.abort("the database says so", timeout=5.0)
            txn.failed(TransactionAborted("the database says so"))

    def recover(self, client: Client, *, all_of_them: bool = False) -> None:
        """End what was left, as the database says: it has committed, or never will."""
        for info in client.prepared(SCOPE, timeout=5.0):
            known = self._shared.prepared.get(info.txn_id)
            if known is None:
                continue
            if not all_of_them and self._world.now - known.asked <= known.left_s:
                continue
            if self._ledger.words.setdefault(info.txn_id, False):
                client.commit(known.token, timeout=5.0)
                continue
            with self._ledger.history.here.asking("abort", txn=known.label):
                client.abort(known.token, timeout=5.0)

    # -- positions ------------------------------------------------------------------------------------

    def move(self, client: Client, rows: RecordedTables) -> None:
        """A one-shot that reads with locks, writes, and moves a task; perhaps with a name, new or used before."""
        task = self._random.randrange(TASKS)
        ownership = client.take_tasks(PROCESSOR, [task], timeout=5.0)
        if self._random.random() < 0.2:
            self._world.sleep(self._random.expovariate(1.0))
        sequence = ownership.tasks[task].sequence + 1
        step = r.TaskStep((task,), sequence, (r.TaskPosition(0, 1_000 + sequence, 0),))
        consumed = r.Consumed(PROCESSOR, ownership.fencing_token, (step,))
        name, known = None, self._shared.names
        if self._random.random() < 0.5:
            again = bool(known) and self._random.random() < 0.3
            name = f"move{self._random.choice(known) if again else len(known)}"
            known.append(len(known))
        txn = rows.begin(timeout=5.0)
        txn.get(TABLES[0], MOVE % task)
        txn.put(TABLES[0], MOVE % task, self._noted.value(0, b" %d" % sequence))
        if txn.txn._opened is not None:  # this client makes no one-shots
            txn.abort()
            return
        txn.ask_commit()
        try:
            result = self._commit(txn.txn, consumed, name)
        except AnabranchError as error:
            # A copy that was sent may be carried out yet: no `Resolve` ends an id that is marked.
            given_way = name is not None and isinstance(error, AlreadyCommitted)
            txn.failed(
                TransactionAborted("it gave way") if given_way else OutcomeUnknown(str(error))
            )
            raise
        finally:
            txn.txn.abort()
            self._shared.kinds["moved" if name is None else "moved by name"] += 1
        txn.committed(result)

    def _commit(self, txn: TableTransaction, consumed: r.Consumed, name: str | None) -> Result:
        """As a table transaction commits, with positions in its command."""
        session, replica, deadline = txn._session, txn._replica, txn._shared.deadline(5.0)
        txn_id = txn._one_shot.txn_id = session.new_txn_id(SCOPE, deadline, marked=name is None)
        where = control_partition_of(txn_id)
        while True:
            marks = replica.marks()
            broken = txn._locks.validate(txn._view, marks)
            if broken is not None:
                raise broken
            locks = txn._locks.records(replica.tables, marks)
            command = r.OneShot(txn_id, SCOPE, name, tuple(txn._events), consumed, locks)
            answer = session.try_ask(where, command, deadline)
            if answer is None:
                raise OutcomeUnknown("no answer")
            last = {each.table: each.last for each in answer.tables}
            if isinstance(answer, r.Revalidate):
                replica.wait(answer.timestamp, last, deadline)
                continue
            hold(answer.txn_id == txn_id, f"{txn_id.hex()} gave way, and is told to be committed")
            replica.observe(answer.commit_timestamp, last)
            if name is not None and self._random.random() < 0.4:
                self._world.sleep(
                    self._random.expovariate(0.5)
                )  # others may move the task meanwhile
                again = session.try_ask(where, command, txn._shared.deadline(5.0))
                same = again is None or (again.state, again.commit_timestamp)
                hold(
                    same in (True, ("COMMITTED", answer.commit_timestamp)),
                    f"{name}: repeated, {again}",
                )
            return result_of(answer)


def check_together(picture: Picture, deleted: Container[str]) -> None:
    """Each task has moved once for each sequence, with its row, in order."""
    if TABLES[0] in deleted:
        return
    its = [
        event
        for place, events in sorted(picture.events.items())
        if place[0] == TABLES[0]
        for event in events
    ]
    for task in range(TASKS):
        rows = [event.record.value or b"" for event in its if event.record.key == MOVE % task]
        found = [int(row.split(b" ")[1]) for row in rows]
        known = picture.tasks.get((PROCESSOR, task))
        last = 0 if known is None else known.sequence
        hold(
            sorted(found) == list(range(1, last + 1)),
            f"{PROCESSOR} {task}: {found} moved, it is at {last}",
        )
        hold(
            known is None or known.in_progress is None,
            f"{PROCESSOR} {task} is in progress for ever",
        )
