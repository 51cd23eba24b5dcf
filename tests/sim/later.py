"""Processes with workers that derive a table after the commits of its source, and replicas that read both.

The source has any writers: transactions with journals or without, and plain writes. A worker has some of the tasks;
others take them from it. The checker compares each entry with the rows of the source, at the source's times
(`checker.derivations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import anabranch
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import OwnershipLost
from anabranch.processing.worker import AllTasks, Worker
from anabranch.protocol.defaults import CUT_BYTES
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests.sim.check_log import hold
from tests.sim.derivers import BY_KIND, KINDS, function_of
from tests.sim.readers import reading_client
from tests.sim.recorded import recorded_plain
from tests.sim.scaling import scale_somehow
from tests.sim.tables import TableMachine
from tests.sim.writers import FLATS, LATER, SCOPE
from tests.tables.recorded import RecordedTables, RecordedWrites

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.ledger import Ledger
    from tests.sim.ports import SimCluster
    from tests.sim.tables import Noted
    from tests.sim.world import World

TASKS = 2
KEYS = tuple(b"f%d" % number for number in range(4))
# A commit that changes the state of all keys takes so many bytes. If chunks are smaller, each commit has one event.
_STATE_BYTES = 500
_SOON_S = 2.0  # a snapshot may have to wait for a worker that nobody runs


class LaterMachine(TableMachine):
    """A process with a replica of source and derived table; it lives as a `TableMachine`."""

    title = "later"

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, noted: Noted, number: int
    ) -> None:  # fmt: skip
        super().__init__(world, cluster, faults, ledger, noted, number)
        self._jobs, self._written, self._workers = 24, 0, 0

    def _create(self, client: Client) -> bool:
        here, prefix = self.world.current, self.ledger.prefix
        admin = reading_client(self.cluster, here, prefix, ADMIN_LANE, timeout=5.0)
        admin.feature_level(raise_to=LEVEL, timeout=5.0)
        client.create_table(FLATS, 2, timeout=5.0)
        self._app().prepare(client)
        return True

    def _app(self) -> anabranch.DerivedTable:
        function = function_of(BY_KIND, 1)
        cut_bytes = 1 if self.faults.weather.chunk_bytes < _STATE_BYTES else CUT_BYTES
        return anabranch.DerivedTable(
            FLATS, BY_KIND, function, tasks=TASKS, commit_interval=0, cut_bytes=cut_bytes, retries=0
        )

    def _open(self, client: Client) -> Replica:
        return client.replica(FLATS, LATER, folder=self._folder / "now", threads=False)

    def _job(self, client: Client, replica: Replica) -> None:
        rows = self._recorded(replica)
        kinds: list[tuple[float, Callable[[], object]]] = [
            (8, lambda: self._write(client)),
            (3, self._write_plainly),
            (10, lambda: self._work(client)),
            (5, lambda: self._look(rows)),
            (0.5, lambda: scale_somehow(self.world, client, self._random.choice((FLATS, LATER)))),
        ]
        self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]()

    def _recorded(self, replica: Replica) -> RecordedTables:
        self._noted.labels += 1
        history, name = self.ledger.history, f"{self.name}/{self._noted.labels}"
        return RecordedTables(lambda: history.here, replica, SCOPE, name)

    def _row(self) -> bytes:
        self._written += 1
        return b"%s/%s.%d" % (self._random.choice(KINDS), self.name.encode(), self._written)

    def _write(self, client: Client) -> None:
        self._noted.labels += 1
        with client.begin(SCOPE, keepalive=6.0) as begun:
            label = f"{self.name}/write/{self._noted.labels}"
            txn = RecordedWrites(self.ledger.history.here, begun, SCOPE, label)
            for _ in range(self._random.randint(1, 3)):
                row = None if self._random.random() < 0.25 else self._row()
                txn.write(FLATS, row, self._random.choice(KEYS))
            if self._random.random() < 0.3:
                begun.flush(timeout=5.0)
            self._noted.times.append(txn.commit(timeout=5.0).commit_timestamp)

    def _write_plainly(self) -> None:
        recorded_plain(
            self.ledger, self.cluster, FLATS, 0, [(self._random.choice(KEYS), self._row())]
        )

    # -- its worker -----------------------------------------------------------------------------------

    def _work(self, client: Client) -> None:
        """With all tasks, or one; others may have them meanwhile."""
        tasks = self._random.choice((range(TASKS), [self._random.randrange(TASKS)]))
        with self._worker(client, tasks) as worker:
            for _ in range(self._random.choice((1, 3, 8))):
                worker.step()
                if self._random.random() < 0.2:
                    self.world.sleep(self._random.expovariate(1.0))
            if self._random.random() < 0.3:
                worker.release()

    @contextmanager
    def _worker(self, client: Client, tasks: range | list[int]) -> Iterator[Worker]:
        """A worker, which ends as by a kill. Its folder is the one of the last worker here, or a new one."""
        self._workers += self._random.random() < 0.3
        folder = Path(self._folder, f"work{self._workers}")
        worker = Worker(self._app(), client, folder, tasks=AllTasks(tasks), threads=False)
        worker._holder = f"{self.world.running_name}/{self._noted.labels}"
        try:
            yield worker
        finally:
            with suppress(BaseException):  # a dead process calls no port
                worker._stack.close()

    # -- what it sees ---------------------------------------------------------------------------------

    def _look(self, rows: RecordedTables) -> None:
        """As of now, of the newest complete time here, or of an older time."""
        times = self._noted.times
        at = self._random.choice(times) if times and self._random.random() < 0.5 else None
        how = {"fresh": False} if at is None and self._random.random() < 0.5 else {}
        with rows.snapshot(at=at, timeout=_SOON_S, **how) as view:
            self._noted.times.append(view.timestamp)
            for kind in KINDS[:2]:
                view.look_up(FLATS, BY_KIND, kind)

    def _last(self, client: Client, replica: Replica) -> bool:
        """All is derived, and right; others may be at it at the same time."""
        self.world.set_clocks()  # with a wrong clock each new id may be too old, or too new
        try:
            with self._worker(client, range(TASKS)) as worker:
                for _ in range(6):
                    worker.step()
        except OwnershipLost:
            # Without a pause two processes may take tasks from each other for ever.
            self.world.sleep(self._random.expovariate(0.3))
            raise
        self._look(self._recorded(replica))
        with self._recorded(replica).snapshot(timeout=_SOON_S) as view:
            for kind in KINDS[:2]:
                view.look_up(FLATS, BY_KIND, kind)
        wrong = client.check_derivation(FLATS, BY_KIND, function_of(BY_KIND, 1), timeout=5.0)
        hold(not wrong, f"{LATER}: {wrong}")
        return True
