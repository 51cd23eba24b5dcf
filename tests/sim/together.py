"""Commits with several parts: rows with locks, events, positions, a name or number, changes of rows, a coordinator.

Each process with a replica makes some, each with a set of parts that is drawn, by the calls that programs use. A
*move* is of a task of one processor, and writes a row that names task and sequence into the commit: so the topic
shows whether each position moved exactly once, with its row. Draws come from random numbers of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random
from typing import TYPE_CHECKING, Any

from anabranch.client.client import Client
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    BeginAgainError,
    ClockSkew,
    DeadlineExceeded,
    InvalidArgument,
    LocksBroken,
    OutcomeUnknown,
    OwnershipLost,
    ReservedByPrepared,
    RetryError,
    TransactionAborted,
)
from anabranch.protocol.ids import NO_TXN, control_partition_of, is_marked
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.types import Result, TaskOwnership
from tests.sim.check_log import hold
from tests.sim.readers import reading_client
from tests.sim.world import World
from tests.sim.writers import BESIDE, COUNTERS, TABLES
from tests.tables.recorded import RecordedWrites

if TYPE_CHECKING:
    from tests.sim.counters import Attempt
    from tests.sim.ledger import Ledger
    from tests.sim.picture import Picture
    from tests.sim.ports import SimCluster
    from tests.sim.tables import Noted, Uses
    from tests.tables.recorded import RecordedTables, RecordedTransaction

SCOPE = TABLES[0].split("/")[0]
PROCESSOR, INPUT = f"{SCOPE}/mover", f"{SCOPE}/moves"
TASKS = 2
MOVE = b"move%d"  # the row of a task
FIRST = 1_000  # the positions of a task are this, and its sequence
SERIES = "parts"
SECRET = b"of a coordinator".ljust(32)
_KEYS = (b"a", b"b", b"c")  # of events
_NUMBERED = (b"hot", b"warm", b"cold")  # rows with numbers
_CHANGES: tuple[r.ChangeKind, ...] = ("ADD", "ADD", "ADD", "MIN", "MAX")
# How old a prepared transaction is when recovery ends it: most early, some after the hold of its locks.
_LEFT_S = (4.0, 4.0, 14.0)
HOLD_S = 13.0  # a commit waits for locks of a prepared one for less
_ROOM = 10_000  # bytes of a command: then all these transactions fit
_AGAIN = "take your tasks again"  # what refusals of sequences and positions say
REFUSED = (OwnershipLost, InvalidArgument)


@dataclass(slots=True)
class Prepared:
    """A transaction that was asked to be prepared: when, and its age when recovery ends it."""

    label: str
    asked: float
    left_s: float


@dataclass(slots=True)
class Shared:
    """What all processes know.

    ``prepared``: those whose end is not known. ``held``: of these, those that only their own process ends.
    ``parts``: how often each was tried, and each error came.
    """

    prepared: dict[bytes, Prepared] = field(default_factory=dict)
    held: set[bytes] = field(default_factory=set)
    made: bool = False
    takes: int = 0
    names: int = 0  # that were tried
    highest: int = 0  # number that was tried
    parts: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Parts:
    """The parts that a transaction has besides rows and events."""

    ownership: TaskOwnership | None = None
    taken: str = ""  # the ownership's name in the history
    consumed: r.Consumed | None = None
    name: str | None = None
    number: int | None = None
    changes: dict[bytes, tuple[r.ChangeKind, int]] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a commit or prepare."""
        found = {"name": self.name, "number": self.number, "consumed": self.consumed}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def task(self) -> int:
        """The task that moves."""
        assert self.consumed is not None
        return self.consumed.steps[0].tasks[0]

    def recorded(self, scope: str, *, names_are_kept: bool) -> dict[str, Any]:
        """As the history has them. ``scope``: the transaction's, in which names and series are unique."""
        found: dict[str, Any] = {}
        if self.number is not None:
            found |= {"series": f"{SERIES} of {scope}", "number": self.number}
        elif self.name is not None and names_are_kept:
            found |= {"series": f"name {self.name} of {scope}", "number": 0}
        if self.consumed is not None:
            found |= {"processor": PROCESSOR, "ownership": self.taken, "tasks": [self.task]}
            found["consumes"] = []
        return found


class Together:
    """What one process does of them."""

    def __init__(
        self, world: World, cluster: SimCluster, ledger: Ledger, noted: Noted, name: str
    ) -> None:
        self._world, self._cluster, self._ledger, self._noted = world, cluster, ledger, noted
        self._shared = noted.together
        self._name, self._random = name, Random(f"{world.seed}/{name}/together")

    def create(self, client: Client) -> None:
        """The level, the processor, its input, which stays empty, and a stream of events."""
        if self._shared.made:
            return
        here, prefix = self._world.current, self._ledger.prefix
        admin = reading_client(self._cluster, here, prefix, ADMIN_LANE, timeout=5.0)
        admin.feature_level(raise_to=LEVEL)
        client.create_stream(INPUT, 1, near=SCOPE, timeout=5.0)
        client.create_stream(BESIDE, 2, near=SCOPE, timeout=5.0)
        client.create_processor(PROCESSOR, (INPUT,), TASKS, "begin")
        self._shared.made = True

    def job(self, client: Client, rows: RecordedTables, uses: Uses) -> bool:
        """Do one of these jobs, or none."""
        kind = self._random.random()
        if kind < 0.35:
            self.combine(client, rows, uses)
        elif kind < 0.45:
            self.recover(client)
        return kind < 0.45

    # -- one transaction ------------------------------------------------------------------------------

    def combine(self, client: Client, rows: RecordedTables, uses: Uses) -> None:
        """A transaction with some parts. Its positions may be another's by the time when it commits."""
        random = self._random
        parts = self._take(client) if random.random() < 0.55 else Parts()
        how: dict[str, Any] = {} if parts.ownership is None else {"ownership": parts.ownership}
        if random.random() < 0.3:
            how["keepalive"] = 6.0
        txn = rows.begin(timeout=5.0, **how)
        prepares = random.random() < 0.5
        with txn.txn:
            if prepares and random.random() < 0.6:
                # Of two of the first kind each breaks the other's locks, one of the second breaks theirs.
                random.choice((uses.pair, uses.pair, uses.blind))(txn)
            elif random.random() < 0.7:
                uses.any(txn)
            self._write(txn, parts)
            self._claim(parts)
            may_change = self._noted.counted is not None and parts.number is None
            may_change = may_change and txn.txn._opened is None
            # A transaction over control partitions that moves positions is not one command.
            may_change = may_change and not (self._world.across and parts.consumed is not None)
            may_change = may_change and txn.txn._shared.one_shot_bytes > _ROOM
            if may_change and not prepares and random.random() < 0.5:
                self._change(txn, parts)
            if random.random() < 0.2:
                self._world.sleep(random.expovariate(1.0))
            if prepares:
                self._prepare(txn, parts)
            else:
                self._commit(txn, parts)

    def _take(self, client: Client) -> Parts:
        """Positions to move: those that follow the present ones, of a task that is now this process's."""
        task = self._random.randrange(TASKS)
        self._shared.takes += 1
        label = f"{PROCESSOR}#{self._shared.takes}"
        asked = {"processor": PROCESSOR, "ownership": label, "tasks": [task]}
        with self._ledger.history.here.asking("take", **asked):
            ownership = client.take_tasks(PROCESSOR, [task], timeout=5.0)
        if self._random.random() < 0.2:
            self._world.sleep(self._random.expovariate(1.0))
        sequence = ownership.tasks[task].sequence + 1
        step = r.TaskStep((task,), sequence, (r.TaskPosition(0, FIRST + sequence, 0),))
        consumed = r.Consumed(PROCESSOR, ownership.fencing_token, (step,))
        return Parts(ownership, label, consumed)

    def _write(self, txn: RecordedTransaction, parts: Parts) -> None:
        random = self._random
        if parts.consumed is not None:
            if random.random() < 0.5:
                txn.get(TABLES[0], MOVE % parts.task)
            row = self._noted.value(0, b" %d" % parts.consumed.steps[0].sequence)
            txn.put(TABLES[0], MOVE % parts.task, row)
        for _ in range(random.choice((0, 0, 1, 2))):
            txn.write(BESIDE, self._noted.value(0), random.choice(_KEYS))
        if random.random() < 0.1:
            for _ in range(6):  # it may be staged
                txn.write(BESIDE, self._noted.value(0, b" " + b"." * 100), random.choice(_KEYS))

    def _claim(self, parts: Parts) -> None:
        random, shared = self._random, self._shared
        kind = random.random()
        if kind < 0.3:
            again = shared.names > 0 and random.random() < 0.3
            number = random.randrange(shared.names) if again else shared.names
            parts.name = f"part{number}"
            shared.names = max(shared.names, number + 1)
        elif kind < 0.4:
            parts.name, parts.number = SERIES, max(0, shared.highest + random.choice((-1, 0, 1, 1)))
            shared.highest = max(shared.highest, parts.number)

    def _change(self, txn: RecordedTransaction, parts: Parts) -> None:
        """Add to rows with numbers; the id is made before, that their checks know it."""
        for key in sorted({self._random.choice(_NUMBERED) for _ in range(2)}):
            kind, number = self._random.choice(_CHANGES), self._random.randint(-9, 9)
            {"ADD": txn.txn.add, "MIN": txn.txn.min, "MAX": txn.txn.max}[kind](
                COUNTERS, key, number
            )
            parts.changes[key] = kind, number

    # -- its end --------------------------------------------------------------------------------------

    def _commit(self, txn: RecordedTransaction, parts: Parts) -> None:
        attempt = self._attempt(txn, parts)
        with self._ending(txn, parts, attempt):
            try:
                result = txn.txn.commit(**parts.given, timeout=5.0)
            except (RetryError, OutcomeUnknown):  # a repeated call settles what is not known
                if txn.is_over or (parts.changes and txn.txn.txn_id is None):
                    raise  # it would have another id
                result = txn.txn.commit(**parts.given, timeout=5.0)
            if attempt is not None and result.txn_id == txn.txn.txn_id:
                attempt.told = result.commit_timestamp
            self._committed(txn, parts, result)
        if parts.name is not None and parts.consumed is not None and self._random.random() < 0.4:
            self._repeat(txn, result)

    def _committed(self, txn: RecordedTransaction, parts: Parts, result: Result) -> None:
        mine = result.txn_id in (NO_TXN, txn.txn.txn_id)
        hold(mine or parts.consumed is None, f"{txn.name} gave way, and is told to be committed")
        hold(mine or parts.name is not None, f"{txn.name} is answered with another's outcome")
        counted = self._noted.counted
        attempt = None if counted is None else counted.attempts.get(result.txn_id)
        txn.committed(result, 0 if attempt is None else len(attempt.changes))

    def _attempt(self, txn: RecordedTransaction, parts: Parts) -> Attempt | None:
        if not parts.changes or self._noted.counted is None:
            return None
        shot, deadline = txn.txn._one_shot, txn.txn._shared.deadline(5.0)
        marked = parts.consumed is not None and parts.name is None
        shot.txn_id = shot._session.new_txn_id(SCOPE, deadline, marked=marked)
        return self._noted.counted.attempt(shot.txn_id, parts.changes)

    @contextmanager
    def _ending(
        self, txn: RecordedTransaction, parts: Parts, attempt: Attempt | None = None, **more: Any
    ) -> Iterator[None]:
        """Record a commit or prepare, and how it failed."""
        kinds = {**parts.given, "changes": parts.changes, "open": txn.txn._opened, **more}
        its = [name for name, there in kinds.items() if there not in (None, {})]
        self._shared.parts.update([*its, "+".join(its)])
        kept = self._ledger.names_are_kept
        txn.ask_commit(**parts.recorded(txn.scope, names_are_kept=kept), **more)
        try:
            yield
        except AnabranchError as error:
            self._shared.parts[type(error).__name__] += 1
            known = self._known(txn, parts, error, prepares=bool(more))
            if attempt is not None:
                attempt.is_over = isinstance(
                    known, LocksBroken | TransactionAborted | DeadlineExceeded
                )
            txn.failed(known)
            fits = not isinstance(error, InvalidArgument) or _AGAIN in str(error)
            if not fits and not self._ledger.troubled:
                self._world.fail(f"{txn.name}: a commit with {its} was refused: {error!r}")
            raise

    def _known(
        self, txn: RecordedTransaction, parts: Parts, error: AnabranchError, *, prepares: bool
    ) -> AnabranchError:
        """The error, if it is certain that the transaction has no effect; else that nothing is known."""
        if isinstance(error, AlreadyCommitted) and parts.consumed is not None and not prepares:
            return TransactionAborted("it gave way")
        txn_id = txn.txn.txn_id
        # No `Resolve` ends an id that is marked: a copy that was sent may be carried out yet.
        marked = txn_id is not None and is_marked(txn_id)
        is_sure = isinstance(error, LocksBroken) or not (marked or prepares)
        return error if is_sure else OutcomeUnknown(str(error), txn_id=txn_id)

    def _repeat(self, txn: RecordedTransaction, result: Result) -> None:
        """Send a one-shot with a name once more, when others may have moved its task."""
        command = txn.txn._one_shot._command
        if command is None or not self._ledger.names_are_kept:
            return
        self._world.sleep(self._random.expovariate(0.5))
        deadline = txn.txn._shared.deadline(5.0)
        try:
            again = txn.txn._session.try_ask(
                control_partition_of(command.txn_id), command, deadline
            )
        except REFUSED as error:
            self._world.fail(f"{command.name}: repeated, it is refused: {error!r}")
            raise
        told = ("COMMITTED", result.commit_timestamp)
        same = again is None or (again.state, again.commit_timestamp) == told
        hold(same, f"{command.name}: repeated, {again}")

    # -- a coordinator --------------------------------------------------------------------------------

    def _prepare(self, txn: RecordedTransaction, parts: Parts) -> None:
        """Prepare it; the coordinator's word comes later, by this process or by recovery."""
        txn_id = txn.txn.txn_id or txn.txn.assign_id()
        left_s = self._random.choice(_LEFT_S)
        prepared = Prepared(txn.name, self._world.now, left_s)
        self._shared.prepared[txn_id] = prepared
        with self._ending(txn, parts, prepares=True):
            by = sha256(SECRET).digest()
            info = txn.txn.prepare(**parts.given, by=by, timeout=5.0)
            if txn.txn.result is not None:  # another one has the name or number
                self._committed(txn, parts, txn.txn.result)
                return
            hold(info.txn_id == txn.txn.txn_id, f"{txn.name} is prepared as another one")
            if info.txn_id != txn_id:  # it began again with a newer snapshot
                self._shared.prepared[info.txn_id] = prepared
                txn_id = info.txn_id
            self._world.sleep(self._random.choice((0.0, self._random.expovariate(0.7))))
            if self._random.random() < 0.2:
                return  # the process forgets it
            if self._ledger.words.setdefault(txn_id, self._random.random() < 0.8):
                txn.committed(txn.txn.commit(secret=SECRET, timeout=5.0))
            else:
                with self._ledger.history.here.asking("abort", txn=txn.name):
                    txn.txn.abort("the database says so", secret=SECRET, timeout=5.0)
                txn.failed(TransactionAborted("the database says so"))
        self._shared.prepared.pop(txn_id, None)

    def hold_a_lock(self, client: Client, rows: RecordedTables) -> None:
        """Prepare one that has read a row: a commit that writes the row waits, and is refused in time.

        No fault strikes meanwhile.
        """
        key = b"held by " + self._name.encode()
        txn = rows.begin(timeout=5.0)
        txn.get(TABLES[0], key)
        txn.write(BESIDE, self._noted.value(0), _KEYS[0])
        txn_id = txn.txn.txn_id or txn.txn.assign_id()
        self._shared.prepared[txn_id] = Prepared(txn.name, self._world.now, 2 * HOLD_S)
        self._shared.held.add(txn_id)
        try:
            with self._ending(txn, Parts(), prepares=True):
                info = txn.txn.prepare(by=sha256(SECRET).digest(), timeout=5.0)
                if info.txn_id != txn_id:  # it began again with a newer snapshot
                    raise TransactionAborted("another process may end it")
                self._write_held(client, key)
                self._ledger.words[txn_id] = True
                txn.committed(txn.txn.commit(secret=SECRET, timeout=5.0))
                del self._shared.prepared[txn_id]
        finally:
            self._shared.held.discard(txn_id)

    def _write_held(self, client: Client, key: bytes) -> None:
        began = self._world.now
        self._noted.labels += 1
        with client.begin(SCOPE, keepalive=2 * HOLD_S) as begun:
            recorder = self._ledger.history.here
            txn = RecordedWrites(recorder, begun, SCOPE, f"held/{self._noted.labels}")
            txn.write(TABLES[0], self._noted.value(0), key)
            try:
                txn.commit(timeout=2 * HOLD_S)
            except (ReservedByPrepared, TransactionAborted, RetryError, OutcomeUnknown) as error:
                took_s = self._world.now - began
                hold(took_s <= HOLD_S, f"a commit waited {took_s:.1f} s for a prepared one's lock")
                if isinstance(error, RetryError | OutcomeUnknown):
                    raise
            else:
                hold(False, "a commit broke a lock of a prepared one")

    def recover(self, client: Client) -> None:
        """End what was left for long enough, as the coordinator says: it has committed, or never will."""
        for info in client.prepared(SCOPE, timeout=5.0):
            known = self._shared.prepared.get(info.txn_id)
            if known is not None and self._world.now - known.asked > known.left_s:
                self._end(client, info.txn_id)

    def settle(self, client: Client) -> None:
        """End all that is left: after this none of them is prepared any more."""
        for info in client.prepared(SCOPE, secret=SECRET, timeout=5.0):
            if info.txn_id not in self._shared.held:
                self._end(client, info.txn_id)
        for txn_id in sorted(self._shared.prepared.keys() - self._shared.held):
            try:
                state = client.resolve(txn_id, timeout=5.0).state
            except (BeginAgainError, ClockSkew):  # it is forgotten, or can't begin
                state = "ABORTED"
            if state == "OPEN":
                client.abort(txn_id, timeout=5.0)
            elif state == "PREPARED":
                self._end(client, txn_id)
            elif state not in ("COMMITTED", "ABORTED"):
                continue  # it is decided
            self._shared.prepared.pop(txn_id, None)

    def _end(self, client: Client, txn_id: bytes) -> None:
        if self._ledger.words.setdefault(txn_id, False):
            client.commit(txn_id, secret=SECRET, timeout=5.0)
            return
        known, here = self._shared.prepared.get(txn_id), self._ledger.history.here
        with nullcontext() if known is None else here.asking("abort", txn=known.label):
            client.abort(txn_id, secret=SECRET, timeout=5.0)


def check_together(picture: Picture, deleted: Container[str]) -> None:
    """Each task has moved once for each sequence, with its row, in order."""
    if TABLES[0] in deleted:
        return
    times = {record.txn_id: record.timestamp for _, _, record in picture.commits()}
    its = [
        event
        for place, events in sorted(picture.events.items())
        if place[0] == TABLES[0]
        for event in events
        if event.txn_id in times
    ]
    for task in range(TASKS):
        where = f"{PROCESSOR} {task}"
        moves = [event for event in its if event.record.key == MOVE % task]
        found = sorted(
            (int((event.record.value or b"").split(b" ")[1]), times[event.txn_id])
            for event in moves
        )
        numbers = [number for number, _ in found]
        known = picture.tasks.get((PROCESSOR, task))
        last = 0 if known is None else known.sequence
        hold(numbers == list(range(1, last + 1)), f"{where}: {numbers} moved, it is at {last}")
        moments = [moment for _, moment in found]
        hold(moments == sorted(moments), f"{where}: its moves are at {moments}")
        if known is None:
            continue
        hold(known.in_progress is None, f"{where} is in progress for ever")
        at = {position.record for position in known.positions}
        hold(not last or at == {FIRST + last}, f"{where}: {last} moves, and it is at {at}")
