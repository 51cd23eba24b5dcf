"""The workload: client processes that make transactions of all kinds, one by one, and note what they saw."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, cast

from anabranch.client.client import Client
from anabranch.client.reservation import Reservation
from anabranch.client.transaction import Transaction
from anabranch.client.writer import Writer
from anabranch.errors import (
    AnabranchError,
    EventTooLarge,
    InvalidArgument,
    NotAuthorized,
    OutcomeUnknown,
    Quarantined,
    ReceiptMismatch,
    RetryError,
    StreamLost,
    TopicMisconfigured,
    UnknownStream,
)
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from anabranch.types import Receipt, Result
from tests.sim.faults import Faults
from tests.sim.ledger import Attempt, Deal, Ledger
from tests.sim.noise import Noise
from tests.sim.poison import Poison
from tests.sim.ports import SimCluster, client_ports
from tests.sim.prepared import preparing, recover
from tests.sim.questions import ask, clear_doubt, resolve_new
from tests.sim.recorded import (
    recorded_begin,
    recorded_commit,
    told_commit,
)
from tests.sim.safe_times import ask_safe_time
from tests.sim.scaling import scale_somehow
from tests.sim.world import Interrupt, Process, SimClock, Violation, World
from tests.sim.writers import (
    FINE,
    KEYS,
    SCOPE,
    STREAMS,
    Helper,
    near,
    new_event,
    recorded_write,
    some_events,
    start_helper,
    wait_for,
)

NAMES = ("n0", "n1", "n2")
SERIES = "n0"  # a series is not disturbed by a name
SPOILED = (InvalidArgument, ReceiptMismatch)  # of receipts, where a journal was deleted
# Where brokers take nothing, or hardly anything.
REFUSED = (InvalidArgument, EventTooLarge, TopicMisconfigured)
ENDS = (*FINE, *SPOILED, *REFUSED, NotAuthorized)
TIGHT_BYTES = "450"  # enough for each event of the workload but the large ones
_RESTART_S = 1.0
_PAUSE_S = 0.3  # mean, before a call is repeated


class Worker:
    """A client's machine: its process is started again when it dies, and goes on with the next job."""

    def __init__(
        self,
        world: World,
        cluster: SimCluster,
        faults: Faults,
        ledger: Ledger,
        name: str,
        jobs: int,
        lane: str = OPEN_LANE,
    ) -> None:
        self.world, self.cluster, self.faults, self.ledger = world, cluster, faults, ledger
        self.name = name
        self.jobs = jobs
        self.lane = lane
        self.starts = 0
        self.busy = False
        self.in_doubt: list[Deal] = []  # it would keep a note of these
        self.peers: list[Worker] = []
        self.client: Client | None = None
        self.process: Process | None = None
        self.noise = Noise(world, cluster, ledger)
        self.poison = Poison(world, cluster, ledger, lane)

    @property
    def done(self) -> bool:
        """All jobs are done."""
        return self.jobs == 0 and not self.in_doubt and not self.busy

    def start(self) -> None:
        """Start a process."""
        self.starts += 1
        process = self.faults.process(f"{self.name}.{self.starts}", "client")
        process.on_death.append(lambda: self.world.later(self.faults.span(_RESTART_S), self.start))
        self.process = process
        self.client = None
        self.busy = False
        self.world.spawn(process, "main", lambda: self._run(process))

    # -- its tasks ------------------------------------------------------------------------------------

    def _run(self, process: Process) -> None:
        while self.lane not in (OPEN_LANE, *self.ledger.lanes):
            self.world.sleep(0.3)
        ports = client_ports(self.cluster, process, self.ledger.prefix, self.lane)
        client = Client(
            ports,
            timeout=self.world.random.choice((3.0, 10.0, 30.0)),
            one_shot_bytes=self.world.random.choice((0, 200, 1 << 18)),
            threads=False,
        )
        self._create_streams(client, ports.clock)
        plain, repeats = client, self.faults.weather.repeats
        if repeats and self.world.random.random() < repeats:
            client = repeating(self.world, client)
        self.client = client
        self.world.spawn(process, "heart", lambda: beat(self.world, plain, process))
        if self.faults.weather.scale_s:
            self.world.spawn(process, "scaler", lambda: self._scale(client))
        if self.faults.weather.safe_s:
            self.world.spawn(process, "watch", lambda: self._ask_safe_times(client))
        for mean_s, send in self.poison.kinds(self.faults.weather):
            self.world.spawn(process, send.__name__, partial(self._poison, client, mean_s, send))
        if self.faults.weather.plain_s:
            self.world.spawn(process, "plain", self._write_plainly)
        if self.faults.weather.prepared:
            beside = (self.world, self.faults, self.ledger, client, process.name)
            self.world.spawn(process, "recovery", partial(recover, *beside))
        while True:
            if self.done:  # a crowd may still come to be in doubt; and the heart goes on
                ports.clock.sleep(5.0)
                continue
            self.busy = True
            if self.in_doubt and (self.jobs == 0 or self.world.random.random() < 0.5):
                clear_doubt(self, client)
            else:
                self.jobs -= 1
                self._job(client)
            self.busy = False
            ports.clock.sleep(self.world.random.expovariate(2.0))

    def _create_streams(self, client: Client, clock: object) -> None:
        settings = settings_of(self.faults)
        if self.faults.weather.across:
            self._raise_level()
        for stream in self.ledger.streams:
            segments = STREAMS[stream]
            while True:
                try:
                    is_first = stream.startswith(f"{SCOPE}/")
                    beside = None if is_first else near(self.world)
                    client.create_stream(stream, segments, settings, near=beside, timeout=5.0)
                    break
                except StreamLost:
                    break
                except Quarantined:  # by chance, three leaders ended with this command
                    self.world.sleep(0.2)
                except (RetryError, NotAuthorized, *REFUSED) as error:
                    if not isinstance(error, self._allowed):
                        raise
                    self.world.sleep(0.2)

    def _raise_level(self) -> None:
        """To the level that transactions over control partitions need."""
        ports = client_ports(self.cluster, self.world.current, self.ledger.prefix, ADMIN_LANE)
        admin = Client(ports, timeout=5.0, threads=False)
        while True:
            try:
                admin.feature_level(raise_to=LEVEL)
            except FINE:
                self.world.sleep(0.2)
            else:
                return

    def _ask_safe_times(self, client: Client) -> None:
        """Beside the jobs, as long as there are any."""
        while self.jobs:
            self.world.sleep(self.faults.span(self.faults.weather.safe_s))
            ask_safe_time(self.world, self.cluster, client, SCOPE, self.ledger.safe_answers)

    def _write_plainly(self) -> None:
        """Beside the jobs, as long as there are any."""
        while self.jobs:
            self.world.sleep(self.faults.span(self.faults.weather.plain_s))
            self.noise.burst()

    def _poison(self, client: Client, mean_s: float, send: Callable[[Client], None]) -> None:
        """Beside the jobs, as long as there are any."""
        while self.jobs:
            self.world.sleep(self.faults.span(mean_s))
            if not self.faults.strikes(1.0, send.__name__):
                continue
            self.ledger.poisoned = True
            try:
                send(client)
            except AnabranchError as error:
                self.world.note(self.name, f"poison: {type(error).__name__}: {error}"[:200])

    def _scale(self, client: Client) -> None:
        """Beside the jobs, as long as there are any."""
        random = self.world.random
        while self.jobs:
            self.world.sleep(self.faults.span(self.faults.weather.scale_s))
            stream = random.choice(self.ledger.streams)
            if random.random() < 0.15:
                self.noise.send_scaling_twice(stream)
                continue
            try:
                with self.ledger.history.here.asking("scale", stream=stream):
                    scale_somehow(self.world, client, stream)
            except (*FINE, *REFUSED) as error:
                if not isinstance(error, self._allowed):
                    raise
                self.world.note(self.name, f"scale: {type(error).__name__}: {error}")

    def _job(self, client: Client) -> None:
        jobs: list[tuple[float, Callable[[Client], None]]] = [
            (6, self._one_shot),
            (9, self._journal),
            (1, partial(ask, self)),
            (1, partial(resolve_new, self)),
            (2, self._reserve),
            (2, self.noise.make),
            (3, self._crowd),
        ]
        if self.faults.weather.tight:
            jobs.append((2, self._too_large))
        if self.ledger.lanes:
            jobs.append((2, partial(ask, self)))
        if bursts := self.faults.weather.bursts:
            jobs.append((20 * bursts, self._burst))
        if self.faults.weather.refusals:
            jobs.append((20 * self.faults.weather.refusals, self._too_early))
        chosen = self.world.random.choices([j for _, j in jobs], [w for w, _ in jobs])[0]
        try:
            chosen(client)
        except ENDS as error:
            if not isinstance(error, self._allowed):
                raise
            self.world.note(self.name, f"{type(error).__name__}: {error}")

    @property
    def _allowed(self) -> tuple[type[Exception], ...]:
        """Errors that a job may get: those of the library, never the brokers' own."""
        spoiled = SPOILED if self.ledger.deleted else ()
        lawful = (NotAuthorized,) if self.ledger.lanes else ()
        troubled = (NotAuthorized, *REFUSED) if self.ledger.troubled else ()
        return (*FINE, *spoiled, *lawful, *troubled)

    def _open(self, kind: str, name: str | None = None, keepalive: float = 0.0) -> Deal:
        deal = self.ledger.open(SCOPE, kind, name, keepalive)
        deal.lane = self.lane
        return deal

    # -- jobs -----------------------------------------------------------------------------------------

    def _one_shot(self, client: Client) -> None:
        random = self.world.random
        name = random.choice(NAMES) if random.random() < 0.25 else None
        deal = self._open("one-shot", name)
        with recorded_begin(self.ledger, deal):
            txn = client.begin(SCOPE, keepalive=random.choice((2.0, 6.0)))
        own = deal.writer("own")
        try:
            for _ in range(random.randint(1, 4)):
                told = new_event(random, deal, own)
                recorded_write(self.ledger, deal, own, told, txn.write)
            attempt = deal.attempt(self.world.now, "own", None, name=name)
            call = preparing(
                self.world, self.faults, self.ledger, deal, txn,
                partial(_commit_one_shot, deal, txn, name), None, (name, None),
            )  # fmt: skip
            prepared = deal.label in self.ledger.prepared
            self._commit(deal, call, attempt, None if prepared else txn.abort)
        except ENDS as error:
            self._give_up(deal, txn, error)
            raise
        finally:
            deal.txn_id = txn.txn_id or deal.txn_id

    def _too_large(self, client: Client) -> None:
        """A one-shot with an event that its stream does not take: refused, and others go on."""
        deal = self._open("too large")
        with recorded_begin(self.ledger, deal):
            txn = client.begin(SCOPE)
        own = deal.writer("own")
        attempt = deal.attempt(self.world.now, None, {"nobody": 1})
        try:
            for _ in range(2):
                told = new_event(self.world.random, deal, own)
                txn.write(told.stream, told.value, told.key, {"filling": bytes(int(TIGHT_BYTES))})
            attempt.result = txn.commit(timeout=5.0)
        except (EventTooLarge, *ENDS) as error:
            attempt.error = error
            self._give_up(deal, txn, error)
        finally:
            deal.txn_id = txn.txn_id

    def _too_early(self, client: Client) -> None:
        """A one-shot to a stream that another client makes at this moment. Who is refused lets it be."""
        deal = self._open("one-shot")
        stream = f"{SCOPE}/new-{deal.label}"

        def create() -> None:
            self.world.sleep(self.world.random.expovariate(1.0))
            with contextlib.suppress(*FINE):
                client.create_stream(stream, 1, timeout=10.0)

        self.world.spawn(self.world.current, f"create-{deal.label}", create)
        with recorded_begin(self.ledger, deal):
            txn = client.begin(SCOPE)
        own = deal.writer("own")
        attempt = deal.attempt(self.world.now, "own", {})
        attempt.own = "own", 1
        with contextlib.suppress(UnknownStream, *ENDS):
            recorded_write(self.ledger, deal, own, deal.event(own, stream, b"k0"), txn.write)
            self._commit(deal, partial(_commit_one_shot, deal, txn, None), attempt)

    def _give_up(self, deal: Deal, txn: Transaction, error: AnabranchError) -> None:
        """As leaving a ``with`` by an exception does."""
        if not isinstance(error, OutcomeUnknown):
            self._abort(deal, lambda: txn.abort("left by an error", timeout=2.0))

    def _abort(self, deal: Deal, abort: Callable[[], None]) -> None:
        """What is answered counts, unless the network sent the commit twice."""
        recorded: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if deal.label not in self.ledger.doubled:
            recorded = self.ledger.history.here.asking("abort", txn=deal.label)
        with contextlib.suppress(*FINE), recorded:
            abort()
            if deal.label not in self.ledger.doubled:
                deal.aborted_at = self.world.now

    def _journal(self, client: Client) -> None:
        random = self.world.random
        name = random.choice(NAMES) if random.random() < 0.2 else None
        keepalive = random.choice((1.5, 3.0, 8.0))
        deal = self._open("journal", name, keepalive)
        try:
            with recorded_begin(self.ledger, deal) as told, self.world.interruptible():
                txn = client.begin(SCOPE, name, keepalive)
                deal.txn_id = txn.txn_id
                if txn.result is None and txn.txn_id is not None and txn.prepared is None:
                    told["txn_id"] = txn.txn_id.hex()
        except Interrupt:
            return
        if txn.result is not None:
            deal.named_result = txn.result
            return
        if txn.txn_id in self.ledger.words or txn.prepared is not None:
            deal.txn_id = None  # it is another one, which has the name
            return
        try:
            self._use(client, deal, txn)
        except ENDS as error:
            self._give_up(deal, txn, error)
            raise

    def _crowd(self, client: Client) -> None:
        """Several transactions at once, in one stream, that commit together later: by then it may be scaled."""
        random = self.world.random
        stream = random.choice(self.ledger.streams)
        together = self.world.now + random.uniform(0.5, 4.0)
        each = partial(self._one_of_many, client, stream, together)
        self._at_once("crowd", random.choice((2, 3, 5)), each, together)

    def _burst(self, client: Client) -> None:
        """Many one-shots, some at once and some after each other without a pause."""
        random = self.world.random

        def some() -> None:
            for _ in range(random.choice((1, 2, 3))):
                self._one_shot(client)

        self._at_once("burst", random.choice((3, 6, 10)), some, self.world.now)

    def _at_once(self, what: str, count: int, each: Callable[[], None], begin_s: float) -> None:
        """Do this in so many tasks, and wait for them until 20 s after ``begin_s``."""
        left = [count]

        def one() -> None:
            try:
                each()
            except ENDS as error:
                self.world.note(self.name, f"{what}: {type(error).__name__}: {error}")
            left[0] -= 1

        for number in range(count):
            self.world.spawn(self.world.current, f"{what}-{number}", one)
        while left[0] and self.world.now < begin_s + 20.0:
            self.world.sleep(0.1)

    def _one_of_many(self, client: Client, stream: str, together: float) -> None:
        random = self.world.random
        deal = self._open("journal", keepalive=8.0)
        with recorded_begin(self.ledger, deal):
            txn = client.begin(SCOPE, None, 8.0)
        own = deal.writer("own")
        try:
            for _ in range(random.randint(1, 5)):
                told = deal.event(own, stream, random.choice(KEYS))
                recorded_write(self.ledger, deal, own, told, txn.write)
            txn.flush()
            deal.txn_id, deal.begun = txn.txn_id, True
            self.world.sleep(together - self.world.now)
            attempt = deal.attempt(self.world.now, "own", None)
            self._commit(deal, lambda t: txn.commit(timeout=t), attempt)
        except ENDS as error:
            self._give_up(deal, txn, error)
            raise
        finally:
            deal.txn_id = txn.txn_id or deal.txn_id

    def _use(self, client: Client, deal: Deal, txn: Transaction) -> None:
        random = self.world.random
        token = txn.token("all")
        deal.txn_id, deal.begun = txn.txn_id, True
        if deal.txn_id is None:
            raise Violation("a token without a transaction")
        self.noise.tokens.append((token, deal))
        own = deal.writer("own")
        helpers = [self._help(deal, txn.token()) for _ in range(random.choice((0, 0, 1, 2)))]
        for _ in range(some_events(random)):
            told = new_event(random, deal, own)
            recorded_write(self.ledger, deal, own, told, txn.write)
            if random.random() < 0.1:
                with contextlib.suppress(Interrupt), self.world.interruptible():
                    txn.flush()
            if random.random() < 0.2:
                self.world.sleep(random.expovariate(1.0))
        if random.random() < self.faults.weather.linger:
            self.world.sleep(random.expovariate(0.5))
        wait_for(self.world, helpers)
        end = random.random()
        if end < 0.08:
            return  # dropped: goes stale
        if end < 0.18:
            with self.ledger.history.here.asking("abort", txn=deal.label):
                deal_aborts(self.world, deal, lambda: txn.abort("the client's wish"))
            return
        if end < 0.28:
            self._commit_elsewhere(deal, token, helpers)
            return
        if helpers and end < 0.38:
            self._commit_falsely(client, deal, token, helpers)
        receipts, named = self._choose(helpers)
        claimed = number = None
        kind = random.random()
        if helpers and not deal.claims and kind < self.faults.weather.two_committers:
            self._race(deal, token, helpers)
        elif deal.name is None and kind < 0.15:
            claimed = deal.name = random.choice(NAMES)
        elif deal.name is None and kind < 0.65 + self.faults.weather.numbered:
            steps = (-1, -1, 0, 1, 1, 1) if self.faults.weather.numbered else (-1, 0, 0, 0, 1, 1)
            claimed, number = SERIES, self.ledger.number(deal, random.choice(steps))
        attempt = deal.attempt(self.world.now, "own", named, name=deal.name)
        call = preparing(
            self.world, self.faults, self.ledger, deal, txn,
            lambda t: txn.commit(receipts, name=claimed, number=number, timeout=t),
            receipts, (claimed, number),
        )  # fmt: skip
        is_prepared = deal.label in self.ledger.prepared
        if not is_prepared:
            self._succeed(deal, token, helpers, attempt)
        self._commit(deal, call, attempt, None if is_prepared else txn.abort)

    def _race(self, deal: Deal, token: bytes, helpers: list[Helper]) -> None:
        """Another client commits at the same time, with receipts that it chose."""

        def commit() -> None:
            self.world.sleep(self.world.random.expovariate(20.0))
            try:
                self._commit_elsewhere(deal, token, helpers)
            except ENDS as error:
                self.world.note(self.name, f"race: {type(error).__name__}: {error}")

        self.world.spawn(self.world.current, "race", commit)

    def _help(self, deal: Deal, token: bytes | Reservation) -> Helper:
        """Start a writer here or elsewhere."""
        worker = self.world.random.choice(self._holders(token))
        given = (self.world, self.ledger, worker.process, worker.client, deal, token)
        return start_helper(*given, stays=self.faults.weather.repeats / 2)

    def _holders(self, token: bytes | Reservation) -> list[Worker]:
        """Those to whom it may be handed: a reservation is begun in its own lane."""
        near = [peer for peer in self.peers if peer.lane == self.lane or isinstance(token, bytes)]
        return [self, *near]

    def _choose(self, helpers: list[Helper]) -> tuple[list[Receipt] | None, dict[str, int] | None]:
        """Some receipts to name, or None for all finished writers."""
        random = self.world.random
        if any(helper.flush is not None for helper in helpers):  # unfinished writers are named
            newest = {helper.label: helper.receipts[-1] for helper in helpers if helper.receipts}
            return [found[0] for found in newest.values()], {w: n for w, (_, n) in newest.items()}
        if random.random() < 0.4:
            return None, None
        receipts, named = [], {}
        for helper in helpers:
            if helper.receipts and random.random() < 0.8:
                receipt, count = random.choice(helper.receipts)
                receipts.append(receipt)
                named[helper.label] = count
        return receipts, named

    def _reserve(self, client: Client) -> None:
        """A transaction that whoever writes first begins."""
        random = self.world.random
        name = random.choice(NAMES) if random.random() < 0.2 else None
        keepalive = random.choice((3.0, 10.0))
        deal = self._open("reserved", name, keepalive)
        with recorded_begin(self.ledger, deal) as told:
            reserved = client.reserve(SCOPE, name, keepalive, timeout=5.0)
            deal.txn_id = reserved.txn_id
            told["txn_id"] = reserved.txn_id.hex()
        helpers = [self._help(deal, reserved) for _ in range(random.choice((0, 1, 2, 2)))]
        wait_for(self.world, helpers)
        if random.random() < 0.15:
            with self.ledger.history.here.asking("abort", txn=deal.label):
                deal_aborts(self.world, deal, lambda: client.abort(reserved))
            return
        self._commit_elsewhere(deal, reserved, helpers)

    def _commit_elsewhere(
        self, deal: Deal, token: bytes | Reservation, helpers: list[Helper]
    ) -> None:
        """Another client commits by the token; the beginner's unregistered writes stay out."""
        client = self.world.random.choice(self._holders(token)).client
        if client is None:
            return
        receipts, named = self._choose(helpers)
        attempt = deal.attempt(self.world.now, None, named)
        self._succeed(deal, token, helpers, attempt)
        self._commit(deal, lambda t: client.commit(token, receipts, timeout=t), attempt)

    def _succeed(
        self, deal: Deal, token: bytes | Reservation, helpers: list[Helper], first: Attempt
    ) -> None:
        """If this commit has no answer soon, a successor asks the writers for receipts again, and commits."""
        repeats = self.faults.weather.repeats
        if deal.claims or not repeats or self.world.random.random() >= repeats:
            return

        def succeed() -> None:
            self.world.sleep(self.world.random.expovariate(2.0))
            client = self.world.random.choice(self._holders(token)).client
            try:
                if first.result is None and client is not None:
                    self._commit_afresh(client, deal, token, helpers)
            except ENDS as error:
                self.world.note(self.name, f"successor: {type(error).__name__}: {error}")

        self.world.spawn(self.world.current, "successor", succeed)

    def _commit_afresh(
        self, client: Client, deal: Deal, token: bytes | Reservation, helpers: list[Helper]
    ) -> None:
        receipts, named = [], {}
        for helper in helpers:
            if helper.flush is not None:
                receipts.append(helper.flush())
                named[helper.label] = len(deal.writers[helper.label].told)
        self.world.sleep(self.world.random.expovariate(1.0))
        attempt = deal.attempt(self.world.now, None, named)
        self._commit(deal, lambda t: client.commit(token, receipts, timeout=t), attempt)

    def _commit_falsely(
        self, client: Client, deal: Deal, token: bytes, helpers: list[Helper]
    ) -> None:
        """Commit with a receipt that is not true: it must be refused."""
        found = self.noise.falsify([h.receipts[-1] for h in helpers if h.receipts])
        if found is None:
            return
        receipt = found
        attempt = deal.attempt(self.world.now, None, {}, is_false=True)
        try:
            attempt.result = client.commit(token, [receipt], timeout=2.0)
        except AnabranchError as error:
            attempt.error = error
        attempt.ended = self.world.now

    def _commit(
        self,
        deal: Deal,
        call: Callable[[float], Result],
        attempt: Attempt,
        abort: Callable[[], None] | None = None,
    ) -> None:
        """Commit, some times over; what stays in doubt is cleared later.

        After an interrupt its client commits again, aborts, if it can, or lets it be.
        """
        random = self.world.random
        attempt.sent = self.world.now
        for _ in range(random.choice((1, 2, 3))):
            try:
                recorded = recorded_commit(self.ledger, deal, attempt)
                with recorded as told, self.world.interruptible():
                    result = call(random.choice((1.0, 5.0, 20.0)))
                    told_commit(told, deal, result)
            except Interrupt:
                attempt.in_doubt = True
                if deal not in self.in_doubt:
                    self.in_doubt.append(deal)
                chance = random.random()
                if chance < 0.3:
                    continue
                if chance < 0.7 and abort is not None:
                    self._abort(deal, abort)
                return
            except OutcomeUnknown as error:
                attempt.in_doubt = True
                deal.txn_id = error.txn_id or deal.txn_id
                if deal not in self.in_doubt:
                    self.in_doubt.append(deal)
                continue
            except AnabranchError as error:
                attempt.error = error
                # A second committer of one that a ledger prepared.
                lawful = (NotAuthorized,) if deal.label in self.ledger.prepared else ()
                if not isinstance(error, (UnknownStream, *lawful, *self._allowed)):
                    self.world.fail(f"{deal.label}: commit was refused: {error!r}")
                raise
            finally:
                attempt.ended = self.world.now
            self.world.note(deal.label, f"committed at {result.commit_timestamp}")
            attempt.result = result
            return


def settings_of(faults: Faults) -> dict[str, str]:
    """What streams are created with."""
    return {"max.message.bytes": TIGHT_BYTES} if faults.weather.tight else {}


def beat(world: World, client: Client, process: Process, pause_s: float = 0.3) -> None:
    """Heartbeats, which in a real client a thread sends."""
    clock = SimClock(world, process)
    while True:
        try:
            due = client.heart.step()
            if due == float("inf"):
                clock.sleep(pause_s)
            else:
                client.heart.receive(due)
        except RetryError:
            clock.sleep(0.3)


def _commit_one_shot(deal: Deal, txn: Transaction, name: str | None, seconds: float) -> Result:
    try:
        return txn.commit(name=name, timeout=seconds)
    finally:
        deal.txn_id = txn.txn_id
        deal.opened = txn._token is not None


def deal_aborts(world: World, deal: Deal, abort: Callable[[], None]) -> None:
    """Abort; note that it was answered."""
    abort()
    deal.aborted_at = world.now


# -- clients that call once more after an error that says so, as a user's program does ----------------


def repeating(world: World, client: Client) -> Client:
    """A client that repeats each call of itself and of its handles once after a `RetryError`."""
    return cast("Client", _Repeating(world, client))


class _Repeating:
    def __init__(self, world: World, handle: Any) -> None:
        self._repeating = world, handle

    def __getattr__(self, name: str) -> Any:
        world, handle = self.__dict__["_repeating"]
        found = getattr(handle, name)
        if name.startswith("_") or not callable(found):
            return found
        return _again(world, found)

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *how: Any) -> Any:
        return self._repeating[1].__exit__(*how)


def _again(world: World, call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(call)
    def repeated(*given: Any, **named: Any) -> Any:
        try:
            found = call(*given, **named)
        except RetryError as error:
            world.note(world.running_name, f"again, after {type(error).__name__}")
            world.sleep(world.random.expovariate(1 / _PAUSE_S))
            found = call(*given, **named)
        return _Repeating(world, found) if isinstance(found, Transaction | Writer) else found

    return repeated
