"""One stream is in trouble for an hour: nothing that never touched it may wait for it.

It is played when all faults of a run are over. Two transactions touch the stream: one is decided when the trouble
comes, and one is staged, with a locked table. Meanwhile others commit, of all kinds and by all lanes. After
a third of the hour another leader begins, without a table; after two thirds an operator ends what holds others, by
the command for that. At the end of the hour there is a list of everything that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from anabranch.client.client import Client
from anabranch.client.transaction import Transaction
from anabranch.controller.controller import Controller
from anabranch.core.state import State
from anabranch.errors import AnabranchError, OutcomeUnknown
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import made_ms_of
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import journal_topic, topics_of
from tests.sim.clients import beat
from tests.sim.controllers import Fleet
from tests.sim.faults import Faults
from tests.sim.ledger import Deal, Ledger
from tests.sim.picture import stuck_of
from tests.sim.ports import SimCluster, client_ports
from tests.sim.recorded import recorded_begin, recorded_commit, recorded_plain, told_commit
from tests.sim.scaling import scale_somehow
from tests.sim.world import Process, World
from tests.sim.writers import SCOPE, commit_one, recorded_write

BOUND_S = 10.0  # a call that takes longer waits
_OLD = 0.25  # of the hour: what a journal keeps for longer waits
_BAD, _SHARED, _BIG = f"{SCOPE}/bad", f"{SCOPE}/shared", f"{SCOPE}/big"
_ROWS, _FREE, _APART = f"{SCOPE}/held", f"{SCOPE}/free", f"{SCOPE}/apart"
_SETUP_S = 60.0
_KEEPALIVE_MS = 30_000
_LATE_S = 120.0  # before the end
_BIG_EVENTS, _BIG_BYTES = 12, 100
_POLICY = 44
_STEPS_A_S = 400  # of the scheduler, at most
_CONTROLLERS = "c"
_COMMITTING = ("COMMIT_IN_PROGRESS", "FINALIZE_IN_PROGRESS")


class Wait(NamedTuple):
    """Who waits, and why, or for how long."""

    who: str
    why: str

    def __str__(self) -> str:
        return f"{self.who}: {self.why}"


class _Sworn:
    """A replica's word for locks that nobody can have broken: nobody else writes yet."""

    def __init__(self, through: int) -> None:
        self._through = through

    @property
    def validated(self) -> tuple[r.Validated, ...]:
        """One set of one writer."""
        return (r.Validated(1, 1, self._through),)

    def locks(self) -> tuple[r.TableLocks, ...]:
        """Nothing: they are registered."""
        return ()

    def revalidate(self, answer: r.Revalidate, _: float) -> None:
        """It is sure again."""
        self._through = answer.timestamp


class Hour:
    """All of a run. ``waits``: who does at its end."""

    def __init__(
        self, world: World, cluster: SimCluster, faults: Faults, ledger: Ledger, fleet: Fleet
    ) -> None:
        self._world, self._cluster, self._ledger, self._fleet = world, cluster, ledger, fleet
        self._length_s = faults.weather.hour_s
        self._random = Random(f"{world.seed}/hour")
        self._armed = self._over = self._spoilt = False
        self._places: list[TopicPartition] = []
        self._calls: dict[str, str] = {}  # who waits -> why
        self._deals: dict[bytes, str] = {}  # of which of them a transaction is
        self._busy = 0
        self._processes: dict[str, Process] = {}  # by lane
        self._clients: dict[tuple[str, int], Client] = {}  # … and the size of their one-shots
        self.waits: list[Wait] = []

    def play(self) -> None:
        """All of it, if the weather has it."""
        world = self._world
        if not self._length_s or world.violation is not None:
            return
        world.allow(_STEPS_A_S * self._length_s)
        world.set_clocks()
        world.note("hour", "begins")
        self._task("holders", self._hold)
        if not world.run(lambda: self._spoilt, world.now + _SETUP_S):
            world.fail(f"after {_SETUP_S:.0f} s no transaction is carried to {_BAD}")
            return
        ends = world.now + self._length_s
        world.later(self._length_s / 3, self._fleet.replace)
        world.later(
            self._length_s * 2 / 3, lambda: self._task("operator of force", self._force, ADMIN_LANE)
        )
        self._others()
        world.run(lambda: world.now >= ends, ends)
        self.waits = list(self._waiting())
        self._over = True
        for place in self._places:
            self._cluster.troubles.pop(place, None)
        world.changed()
        world.note("hour", f"is over; {len(self.waits)} wait: {'; '.join(map(str, self.waits))}")
        if self.waits:
            which = "; ".join(map(str, self.waits))
            world.fail(f"after {self._length_s:.0f} s of trouble of {_BAD} these wait: {which}")
        world.run(lambda: not self._busy, world.now + _SETUP_S)

    # -- who holds ------------------------------------------------------------------------------------

    def after_step(self, leader: Controller) -> None:
        """A leader has done a round: the trouble comes as soon as one is carried."""
        if self._armed and not self._spoilt and any(self._carried(leader.state)):
            self._spoil()

    def _carried(self, state: State) -> Iterator[bytes]:
        for txn_id, txn in state.open.items():
            if txn.row.state == "FINALIZE_IN_PROGRESS" and _BAD in txn.participants:
                yield txn_id

    def _spoil(self) -> None:
        self._spoilt = True
        kind = self._random.choice((Kind.LEADERLESS, Kind.DENYING, Kind.REFUSING))
        stream, journal, history = topics_of(_BAD)
        topics = self._random.choice(((stream,), (history,), (stream, journal, history)))
        self._places = [place for place in self._cluster.partitions if place.topic in topics]
        trouble = Trouble(kind) if kind is Kind.LEADERLESS else Trouble(kind, _POLICY, _CONTROLLERS)
        self._cluster.troubles.update(dict.fromkeys(self._places, trouble))
        self._world.note("brokers", f"{', '.join(topics)} from now on: {kind.name}")
        self._world.changed()

    def _hold(self, client: Client) -> None:
        for stream in (_BAD, _SHARED, _BIG, _APART):
            self._until_it_works(lambda s=stream: client.create_stream(s, 1))  # type: ignore[misc]
        for table in (_ROWS, _FREE):
            self._until_it_works(lambda t=table: client.create_table(t, 1))  # type: ignore[misc]
        small, of_small = self._begin(client, {_BAD: 1, _SHARED: 1})
        big, of_big = self._begin(client, {_BIG: _BIG_EVENTS, _BAD: 2}, _ROWS)
        self._armed = True
        self._task("carried", lambda _: self._commit("", big, of_big))
        while not self._spoilt:
            self._world.sleep(0.1)
        self._commit("", small, of_small)

    def _begin(
        self, client: Client, events: dict[str, int], locks: str = ""
    ) -> tuple[Transaction, Deal]:
        """A transaction whose events are in journals; it locks all rows of a table, if one is named."""
        deal = self._ledger.open(SCOPE, "journal", keepalive=_KEEPALIVE_MS / 1000)
        deal.lane = client.lane
        snapshot = client.last_timestamp if locks else 0
        with recorded_begin(self._ledger, deal):
            txn = Transaction(client._shared, SCOPE, None, _KEEPALIVE_MS, snapshot=snapshot)
        own = deal.writer("own")
        token = txn.token()
        deal.txn_id, deal.begun = txn.txn_id, True
        if locks:
            spans = (r.TableLocks(locks, snapshot, 0, (), (r.LockedRange(b"", None),)),)
            session = client._session
            found = session.lock_reads(r.LockReads(token, 1, 1, spans), session.now() + BOUND_S)
            txn.read_by(_Sworn(found.timestamp))
        for stream, count in events.items():
            for _ in range(count):
                told = deal.event(own, stream, b"k0", size=_BIG_BYTES if count > 2 else 0)
                recorded_write(self._ledger, deal, own, told, txn.write)
        txn.flush()
        return txn, deal

    def _commit(self, who: str, txn: Transaction, deal: Deal) -> None:
        """Until it is known what becomes of it. ``who``: waits meanwhile."""
        if who:
            self._deals[deal.txn_id or b""] = who
        attempt = deal.attempt(self._world.now, "own", None)
        while True:
            try:
                with recorded_commit(self._ledger, deal, attempt) as told:
                    attempt.result = txn.commit(timeout=BOUND_S)
                    told_commit(told, deal, attempt.result)
            except OutcomeUnknown as error:
                attempt.in_doubt = True
                self._note(who, str(error))
                self._world.sleep(BOUND_S if who else 6 * BOUND_S)
                continue
            except AnabranchError as error:
                attempt.error = error
                self._note(who, str(error))
            else:
                self._note(who)
            attempt.ended = self._world.now
            return

    # -- who does not -----------------------------------------------------------------------------------

    def _others(self) -> None:
        one, big = self._one, self._big
        for who, by_journals in (("by one command", False), ("by journals", True)):
            self._repeat(f"a small one, {who}", 60.0, one(_SHARED), by_journals=by_journals)
            self._repeat(f"a row, {who}", 60.0, one(_ROWS), by_journals=by_journals)
            self._repeat(
                f"a row that nobody locks, {who}", 300.0, one(_FREE), by_journals=by_journals
            )
        late_s = self._length_s - _LATE_S  # a leader looks often at what it is to carry
        self._repeat("a big transaction", 60.0, big(_BIG), late_s)
        self._repeat("a big transaction elsewhere", 60.0, big(_APART), late_s)
        self._repeat("a big transaction with locks", 60.0, big(_APART, _FREE), late_s)
        scale = lambda client, _: scale_somehow(self._world, client, _SHARED)  # noqa: E731
        self._repeat("a scaling", 600.0, scale, 600.0)
        self._repeat("plain writes", 60.0, lambda *_: self._plain())
        for lane in sorted(self._ledger.lanes):
            self._repeat(f"lane {lane}", 120.0, one(_SHARED), lane=lane)
        ask = lambda client, _: client.describe(_SHARED)  # noqa: E731
        self._repeat("lane admin", 120.0, ask, lane=ADMIN_LANE)

    def _one(self, stream: str) -> Callable[[Client, str], None]:
        def call(client: Client, who: str) -> None:
            deal = self._ledger.open(SCOPE, "hour")
            deal.lane = client.lane
            commit_one(self._world, self._ledger, client, deal, stream, BOUND_S)

        return call

    def _big(self, stream: str, locks: str = "") -> Callable[[Client, str], None]:
        def call(client: Client, who: str) -> None:
            self._commit(who, *self._begin(client, {stream: _BIG_EVENTS}, locks))

        return call

    def _plain(self) -> None:
        told = self._ledger.plainly(_SHARED, 0, b"k0")
        recorded_plain(self._ledger, self._cluster, _SHARED, 0, [(told.key, told.value)])

    def _repeat(
        self,
        who: str,
        pause_s: float,
        call: Callable[[Client, str], None],
        after_s: float = 0.0,
        *,
        lane: str = OPEN_LANE,
        by_journals: bool = True,
    ) -> None:
        def body(client: Client) -> None:
            self._world.sleep(after_s)
            while not self._over:
                began = self._world.now
                try:
                    call(client, who)
                    late = self._world.now - began > 2 * BOUND_S and not who.startswith("a big")
                    self._note(who, f"took {self._world.now - began:.0f} s" if late else "")
                except AnabranchError as error:
                    self._note(who, f"{type(error).__name__}: {error}")
                self._world.sleep(self._random.uniform(0.5, 1.5) * pause_s)

        self._task(who, body, lane, 0 if by_journals else 1 << 18)

    # -- an operator ------------------------------------------------------------------------------------

    def _force(self, client: Client) -> None:
        """End, by its command, what holds others."""
        for partition in self._fleet.partitions:
            leader = self._fleet.leading(partition)
            for txn_id in list(self._carried(leader.state)) if leader is not None else ():
                try:
                    client.force(txn_id, timeout=BOUND_S)
                except AnabranchError as error:
                    self._world.note("operator of force", f"{type(error).__name__}: {error}")

    # -- who waits --------------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[Wait]:
        """Calls that did not succeed the last time; transactions; journals."""
        yield from (Wait(who, why) for who, why in self._calls.items())
        for partition in self._fleet.partitions:
            leader = self._fleet.leading(partition)
            if leader is None:
                yield Wait(f"control partition {partition}", "nobody leads it")
            else:
                yield from self._transactions(leader)
                yield from self._journals(leader)

    def _transactions(self, leader: Controller) -> Iterator[Wait]:
        now_ms = self._world.wall_s * 1000
        stuck = stuck_of(leader.state, self._ledger.deleted)
        for txn_id, txn in leader.state.open.items():
            age_s = (now_ms - made_ms_of(txn_id)) / 1000
            asks = txn.row.state in _COMMITTING or txn.pending is not None
            if (
                asks
                and age_s > 2 * BOUND_S
                and _BAD not in txn.participants
                and txn_id not in stuck
            ):
                who = self._deals.get(txn_id, f"transaction {txn_id.hex()}")
                if who not in self._calls:
                    yield Wait(who, f"{txn.row.state} for {age_s:.0f} s")

    def _journals(self, leader: Controller) -> Iterator[Wait]:
        """Bytes that were written long ago, but for those of open transactions and what pays no cut."""
        old_ms = (self._world.wall_s - _OLD * self._length_s) * 1000
        settings, stays = leader.settings, leader._intake.index.uncommitted.stays
        for stream, row in leader.state.streams.items():
            if stream == _BAD or stream in self._ledger.deleted:
                continue
            for number in range(row.partitions):
                place = TopicPartition(journal_topic(stream), number)
                entries = self._cluster.partition(place).entries
                kept = sum(
                    len(e.data) for e in entries if not e.is_control and e.max_timestamp < old_ms
                )
                needed = sum(
                    its[stream, number].size for its in stays.values() if (stream, number) in its
                )
                spare = settings.move_bytes + settings.clean_bytes
                if kept > needed + spare:
                    yield Wait(f"the journal of {stream}", f"{kept} bytes are old, {needed} needed")

    # -- small things ------------------------------------------------------------------------------------

    def _note(self, who: str, why: str = "") -> None:
        if why and who:
            self._calls[who] = why
        else:
            self._calls.pop(who, None)

    def _until_it_works(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except AnabranchError as error:
                self._world.note("hour", f"{type(error).__name__}: {error}")
                self._world.sleep(1.0)

    def _task(
        self,
        name: str,
        body: Callable[[Client], None],
        lane: str = OPEN_LANE,
        one_shot_bytes: int = 0,
    ) -> None:
        """A task of the process of its lane; those of a kind share a client."""
        process = self._processes.setdefault(lane, Process(f"hour-{lane}.1", "client"))
        self._busy += 1

        def run() -> None:
            client = self._clients.get((lane, one_shot_bytes))
            if client is None:
                ports = client_ports(self._cluster, process, self._ledger.prefix, lane)
                settings = {"timeout": BOUND_S, "one_shot_bytes": one_shot_bytes}
                client = Client(ports, **settings, threads=False)  # type: ignore[arg-type]
                self._clients[lane, one_shot_bytes] = client
                self._world.spawn(process, "heart", lambda: beat(self._world, client, process, 2.0))
            body(client)
            self._busy -= 1

        self._world.spawn(process, name.replace(" ", "-"), run)
