"""Processes that write a table with derived tables, while versions of these are built, switched and dropped.

A row of `GOODS` is ``kind/name/number/amount``. ``by-kind`` is an index, ``by-name`` is unique, ``sums`` has the
totals of amounts, and the versions of each take other parts of the row. A process has the functions of some
versions, or of none, as a program of another language. The checker compares derived tables with their source at
each commit (`checker.derivations`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any, cast

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.client.shared import Derivations
from anabranch.core.derived_rows import Function
from anabranch.core.stream_settings import derived_from, derived_table, versions_of
from anabranch.errors import (
    AnabranchError,
    DerivationMissing,
    IllegalState,
    InvalidArgument,
    LocksBroken,
    NotAuthorized,
    NotReady,
    UniqueViolation,
)
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.topics.names import journal_topic
from checker.recorder import Unknown
from tests.sim.check_log import hold
from tests.sim.ledger import NOISE
from tests.sim.readers import reading_client
from tests.sim.recording import FINAL
from tests.sim.tables import Noted, TableMachine
from tests.sim.writers import BESIDE, FINE, GOODS, SCOPE
from tests.tables.recorded import (
    RecordedTables,
    RecordedTransaction,
    RecordedWork,
    RecordedWrites,
    id_of,
    text,
)

if TYPE_CHECKING:
    from tests.sim.faults import Faults
    from tests.sim.ledger import Ledger
    from tests.sim.picture import Picture
    from tests.sim.ports import SimCluster
    from tests.sim.recording import History
    from tests.sim.world import World

BY_KIND, BY_NAME, SUMS = "by-kind", "by-name", "sums"
# The parts of a row that are its values, by version, in turn.
FIELDS: dict[str, Sequence[tuple[int, ...]]] = {
    BY_KIND: ((0,), (0, 1)),
    BY_NAME: ((1,), (1, 2)),
    SUMS: ((0,), (0, 1)),
}
AMOUNT = 3  # the part that is added up
KEYS = tuple(b"g%d" % number for number in range(6))
KINDS, NAMES = (b"red", b"blue", b"-"), (b"ann", b"bob", b"cat", b"dan", b"eve", b"fay", b"-")
_MOST_OF_A_KIND = 3
_TIMEOUT_S = 10.0
# What a call may come to if a program lacks a function, values occur twice, or another process was first.
_REFUSED = (DerivationMissing, UniqueViolation, IllegalState, InvalidArgument)


def function_of(name: str, version: int) -> Callable[[bytes, bytes], list[Any]]:
    """The function of a version."""
    fields = fields_of(name, version)

    def values(_: bytes, row: bytes) -> list[Any]:
        parts = row.split(b"/")
        found = [parts[n] for n in fields if n < len(parts) and parts[n] != b"-"]
        return [(value, int(parts[AMOUNT])) for value in found] if name == SUMS else found

    return values


def fields_of(name: str, version: int) -> tuple[int, ...]:
    """The parts of a row that are its values."""
    versions = FIELDS[name]
    return versions[(version - 1) % len(versions)]


@dataclass(slots=True)
class Derived:
    """What all processes know. ``versions``: the highest that was made, by name.

    ``lasts``: the index is never dropped; so once it is there (``began``), the table takes no other writers.
    """

    seed: int
    lasts: bool = field(init=False)
    versions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))
    began: bool = False

    def __post_init__(self) -> None:
        self.lasts = Random(f"{self.seed}/derived").random() < 0.7


class _Ignorant(Derivations):
    """The functions of a client that does not know that there are any, as one of another language."""

    def functions(self, table: str, deadline: float) -> Sequence[Function]:
        del table, deadline
        return ()


class DeriverMachine(TableMachine):
    """A process with a replica of the table; it lives as a `TableMachine`."""

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, derived: Derived, number: int
    ) -> None:  # fmt: skip
        super().__init__(world, cluster, faults, ledger, Noted(), number)
        self.name = f"derive{number}"
        self._random = Random(f"{world.seed}/{self.name}")
        self._derived, self._number = derived, number
        self._is_ignorant = False
        self._written = 0

    def _create(self, client: Client) -> bool:
        here, prefix = self.world.current, self.ledger.prefix
        admin = reading_client(self.cluster, here, prefix, ADMIN_LANE, timeout=5.0)
        admin.feature_level(raise_to=LEVEL, timeout=5.0)
        client.create_table(GOODS, 2, timeout=5.0)
        client.create_stream(BESIDE, 2, near=SCOPE, timeout=5.0)
        admin.grant(OPEN_LANE, GOODS, ("operate",), timeout=5.0)
        self._note_ends(client)
        self._is_ignorant = self._random.random() < 0.2
        if self._is_ignorant:
            client._shared.derivations = _Ignorant(client._session)
        else:
            self._attempt(lambda: self._deploy(client))
        return True

    def _note_ends(self, client: Client) -> None:
        deriving = cast("Any", client._deriving)
        if not isinstance(deriving._move, partial):
            deriving._move = partial(self._moved, deriving._move)

    def _moved(self, move: Callable[..., None], of: r.Derivation, sign: str, *more: Any) -> None:
        """Bring a version into force, or take it out of force; note that it ended once that is answered."""
        move(of, sign, *more)
        if sign == "-":
            self.ledger.history.here.note("end_derivation", table=derived_table(of))
        elif of.name == BY_KIND and self._derived.lasts:
            self._derived.began = True

    def _open(self, client: Client) -> Replica:
        return client.replica(GOODS, folder=self._folder / "now", threads=False)

    def _attempt(self, call: Callable[[], object]) -> bool:
        """Whether a call was not refused."""
        try:
            call()
        except _REFUSED as error:
            self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
            return False
        return True

    # -- its work -------------------------------------------------------------------------------------

    def _job(self, client: Client, replica: Replica) -> None:
        rows = self._recorded_goods(replica)
        kinds: list[tuple[float, Callable[[], object]]] = [
            (12, lambda: self._transactions(rows)),
            (3, lambda: self._look(rows)),
            (1.5, self._write_plainly),
            (1, lambda: self._blind(client)),
        ]
        if self._is_ignorant:
            kinds.append((4, lambda: self._add(replica)))
        else:
            kinds += [(4, lambda: self._rebuild(client)), (0.7, lambda: self._drop(client))]
        job = self._random.choices([kind for _, kind in kinds], [weight for weight, _ in kinds])[0]
        if not self._attempt(job) and not self._is_ignorant and self._random.random() < 0.7:
            self._attempt(lambda: self._deploy(client))

    def _recorded_goods(self, replica: Replica) -> RecordedTables:
        self._noted.labels += 1
        history, name = self.ledger.history, f"{self.name}/{self._noted.labels}"
        return RecordedTables(lambda: history.here, replica, SCOPE, name)

    def _transactions(self, rows: RecordedTables) -> None:
        """One, or two that are under way at the same time."""
        began = self._derived.began
        with ExitStack() as stack:
            begun = []
            for _ in range(self._random.choice((1, 1, 2))):
                isolation = self._random.choice(("serializable",) * 4 + ("snapshot",))
                how = {"keepalive": 6.0} if self._random.random() < 0.25 else {}
                begun.append(
                    txn := stack.enter_context(self._begun(rows, isolation=isolation, **how))
                )
                with suppress(LocksBroken):  # the commit raises it again
                    self._use(txn)
                if self._random.random() < 0.5:
                    self.world.sleep(self._random.expovariate(3.0))
            for txn in begun:
                self._commit(txn)
                is_right = not (began and self._is_ignorant and txn.wrote)
                hold(is_right or txn.txn.result is None, "a writer without functions was taken")

    @contextmanager
    def _begun(self, rows: RecordedTables, **how: Any) -> Iterator[RecordedTransaction]:
        """A transaction, which is over afterwards."""
        txn = rows.begin(timeout=5.0, **how)
        try:
            yield txn
        finally:
            with suppress(*FINE, NotAuthorized):
                txn.abort()

    def _use(self, txn: RecordedTransaction) -> None:
        random = self._random
        for _ in range(random.randint(1, 3)):
            kind = random.random()
            if kind < 0.5:
                self._put(txn)
            elif kind < 0.65:
                txn.delete(GOODS, random.choice(KEYS))
            elif kind < 0.75:
                txn.get(GOODS, random.choice(KEYS))
            elif not self._is_ignorant:
                self._keep_few(txn)

    def _put(self, txn: RecordedWork, kind: bytes | None = None) -> None:
        key, kind = self._random.choice(KEYS), kind or self._random.choice(KINDS)
        row = self._row(kind, self._random.choice(NAMES))
        try:
            txn.put(GOODS, key, row)
        except UniqueViolation:
            return  # nothing of it is written
        if kind != b"-" and not self._is_ignorant and self._random.random() < 0.3:
            with suppress(DerivationMissing):  # no version is ready
                found = dict(txn.look_up(GOODS, BY_KIND, kind))
                hold(found.get(key) == row, f"{txn.name}: an own write is not found: {found}")

    def _row(self, kind: bytes, name: bytes) -> bytes:
        self._written += 1
        amount = self._random.randint(-9, 9)
        return b"%s/%s/%d.%d/%d" % (kind, name, self._number, self._written, amount)

    def _keep_few(self, txn: RecordedTransaction) -> None:
        """Write a row of a kind if there are few, else take one away."""
        kind = self._random.choice(KINDS[:2])
        with suppress(DerivationMissing):
            found = txn.look_up(GOODS, BY_KIND, kind)
            if len(found) < _MOST_OF_A_KIND:
                self._put(txn, kind)
            else:
                txn.delete(GOODS, found[0][0])

    def _look(self, rows: RecordedTables) -> None:
        """Write an event elsewhere, because of what is found here."""
        with self._begun(rows) as txn:
            with suppress(LocksBroken):
                name, values = self._random.choice(
                    ((BY_KIND, KINDS), (BY_NAME, NAMES), (SUMS, KINDS))
                )
                if not self._is_ignorant:
                    look_up = txn.total if name == SUMS else txn.look_up
                    look_up(GOODS, name, self._random.choice(values[:-1]))
                txn.write(BESIDE, self._row(b"seen", b"-"), KEYS[0])
            self.world.sleep(self._random.expovariate(1.0))
            self._commit(txn)

    def _blind(self, client: Client) -> None:
        """By a transaction without a replica: rows, or entries."""
        began = self._derived.began
        stream = GOODS
        if self._random.random() < 0.5:
            name = self._random.choice(sorted(FIELDS))
            version = self._random.randint(1, max(1, self._derived.versions[name]))
            stream = derived_table(r.Derivation(GOODS, name, version))
        with client.begin(SCOPE, keepalive=6.0) as begun:
            if stream != GOODS:
                begun.write(stream, NOISE, KEYS[0])
                begun.commit(timeout=5.0)
                hold(False, f"{stream} has taken a row of its own")
            self._noted.labels += 1
            recorder, label = self.ledger.history.here, f"{self.name}/blind/{self._noted.labels}"
            txn = RecordedWrites(recorder, begun, SCOPE, label)
            for _ in range(self._random.randint(1, 2)):
                row = None
                if self._random.random() < 0.75:
                    row = self._row(self._random.choice(KINDS), self._random.choice(NAMES))
                txn.write(GOODS, row, self._random.choice(KEYS))
            txn.commit(timeout=5.0)
        hold(not began, "a source has taken rows of a transaction without a replica")

    def _write_plainly(self) -> None:
        """By a program that knows nothing of the library: in vain while a derivation is in force."""
        began, key = self._derived.began, self._random.choice(KEYS)
        row = NOISE if began else self._row(self._random.choice(KINDS), self._random.choice(NAMES))
        record = Record(0, self.world.wall_ms, key, row)
        asked = {"stream": GOODS, "events": [] if began else [[text(key), id_of(row)]]}
        with suppress(LogError, Unknown), self.ledger.history.here.asking("plain", **asked):
            place = TopicPartition(journal_topic(GOODS), 0)
            self.cluster.log_of(self.world.current).produce_batch(place, encode_batch([record]))
            raise Unknown

    def _add(self, replica: Replica) -> None:
        if not self._derived.began:
            return
        txn = replica.begin(timeout=5.0)
        txn.add(GOODS, b"number", 1)
        txn.commit(timeout=5.0)
        hold(False, "a source has taken an addition")

    # -- versions -------------------------------------------------------------------------------------

    def _deploy(self, client: Client) -> None:
        """Take the functions of all versions in force; a new one if there is none."""
        settings = client.describe(GOODS, timeout=5.0).settings
        twice: UniqueViolation | None = None  # who corrects the rows needs all functions
        for name in FIELDS:
            for version in versions_of(settings, name) or (self._next(name),):
                try:
                    self._derive(client, name, version)
                except UniqueViolation as error:
                    twice = error
        self._reopens = True
        if twice is not None:
            raise twice

    def _next(self, name: str) -> int:
        self._derived.versions[name] += 1
        return self._derived.versions[name]

    def _derive(self, client: Client, name: str, version: int) -> None:
        function, unique, totals = function_of(name, version), name == BY_NAME, name == SUMS
        client.derive(GOODS, name, function, version=version, unique=unique, totals=totals)

    def _rebuild(self, client: Client) -> None:
        """A new version, or one whose build was left."""
        name = self._random.choice(sorted(FIELDS))
        try:
            if self._random.random() < 0.8:
                self._derive(client, name, self._next(name))
            self._reopens = True
            client.rebuild(GOODS, name)
        except UniqueViolation:
            self._correct(client)
            client.rebuild(GOODS, name)

    def _drop(self, client: Client) -> None:
        name = self._random.choice((BY_NAME, SUMS, SUMS if self._derived.lasts else BY_KIND))
        client.drop_derivation(GOODS, name)

    def _correct(self, client: Client) -> None:
        """Delete rows whose values another row has."""

        def correct(txn: RecordedTransaction) -> None:
            seen = set[bytes]()
            for key, row in list(txn.scan(GOODS)):
                name = row.split(b"/")[1]
                if name in seen and name != b"-":
                    txn.delete(GOODS, key)
                seen.add(name)

        with self._replica(client) as replica:
            self._recorded_goods(replica).transact(correct)

    @contextmanager
    def _replica(self, client: Client) -> Iterator[Replica]:
        replica = client.replica(GOODS, threads=False)
        try:
            yield replica
        finally:
            with suppress(BaseException):  # a dead process calls no port
                replica.close()

    # -- its end --------------------------------------------------------------------------------------

    def _last(self, client: Client, replica: Replica) -> bool:
        """Each derivation is built, and right; others may be at it at the same time."""
        del client, replica
        self.world.set_clocks()  # with a wrong clock each new id may be too old, or too new
        self._is_ignorant = False
        # A client without functions of versions that were never in force.
        client = reading_client(
            self.cluster, self.world.current, self.ledger.prefix, timeout=_TIMEOUT_S
        )
        self._note_ends(client)
        for name in FIELDS:
            self._build(client, name)
        return self._attempt(lambda: self._use_all(client))

    def _use_all(self, client: Client) -> None:
        with self._replica(client) as fresh:
            rows = self._recorded_goods(fresh)
            rows.transact(self._put)
            rows.transact(lambda txn: txn.look_up(GOODS, BY_KIND, KINDS[0]))
            rows.transact(lambda txn: txn.total(GOODS, SUMS, KINDS[0]))
        for name in FIELDS:
            wrong = client.check_derivation(GOODS, name)
            hold(not wrong, f"{name}: {wrong}")

    def _build(self, client: Client, name: str) -> None:
        """Build a derivation, dropping versions that can't be. Raises `NotReady` if another process is at it."""
        try:
            self._deploy(client)
            client.rebuild(GOODS, name)
        except AnabranchError as error:
            if not isinstance(error, _REFUSED):
                raise
            self.world.note(self.name, f"{type(error).__name__}: {error}"[:300])
            if isinstance(error, UniqueViolation):
                self._attempt(lambda: self._correct(client))
            elif isinstance(error, IllegalState) and (name != BY_KIND or not self._derived.lasts):
                self._attempt(lambda: client.drop_derivation(GOODS, name))
            raise NotReady(f"{name} is not built yet") from error


def note_derivations(picture: Picture, history: History) -> dict[str, str]:
    """Note each derived table in the history. Returns their types."""
    tables = dict[str, str]()
    for stream, row in sorted(picture.streams.items()):
        derived = derived_from(row.settings)
        if derived is not None:
            of, fields = derived.of, list(fields_of(derived.of.name, derived.of.version))
            asked = {"source": of.source, "name": of.name, "version": of.version}
            history.named(FINAL).note(
                "derivation", table=stream, type=derived.kind, fields=fields, number=AMOUNT, **asked
            )
            tables[stream] = derived.kind
    return tables
