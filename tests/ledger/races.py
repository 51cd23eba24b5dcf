"""A process that is only slow, or dies, against recovery: greenlets, of which a seed says who does the next step.

Each commit of a database, and each command about prepared transactions, is a step: there others go on, or the
process dies, its database session is ended, or the answer to its commit is lost.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from anabranch.client.client import Client
from anabranch.errors import AnabranchError, OutcomeUnknown
from anabranch.ledger import Ledger
from anabranch.ledger.dialects import driver_of
from tests.client.world import World
from tests.ledger.places import Place

STREAMS = "shop/orders", "bank/postings"
DAY_S = 86_400
GONE_S = 10.0  # PostgreSQL ends a session, and frees its locks, a moment after its client is gone
_DIES, _KICKED, _LOST, _FAILS = 0.06, 0.04, 0.25, 0.1


class Dead(BaseException):
    """The process is killed: nothing of it runs any more."""


@dataclass
class Process:
    """A process of a race: its steps pass `step`."""

    race: Race
    name: str
    dead: bool = False
    told: str = ""  # what a caller was told in the end
    connections: list[Any] = field(default_factory=list)

    def connect(self) -> Any:
        if self.dead:
            raise Dead
        made = self.race.place.connect(self.step)
        self.connections.append(made)
        return made

    def step(self, name: str) -> None:
        """Others go on here; then chance strikes."""
        self.race.pause()
        chance = self.race.rng.random
        if self.dead or chance() < _DIES:
            self.dead = True
            raise Dead
        own: Any = self.connections[-1] if self.connections else None
        if name == "txn.prepare.after" and chance() < _KICKED:
            own.cut()
        if name == "commit" and self.name == "slow" and chance() < _FAILS:
            own.cut()
            raise self.race.driver.OperationalError("the session is ended")
        if name == "commit.after" and chance() < _LOST:
            raise self.race.driver.OperationalError("no answer")

    @contextmanager
    def hooked(self, target: Any, *names: str) -> Iterator[None]:
        """Steps before and after each of these calls."""
        with ExitStack() as stack:
            for name in names:
                stack.enter_context(patch.object(target, name, self._around(target, name)))
            yield

    def _around(self, target: Any, name: str) -> Callable[..., Any]:
        real = getattr(target, name)

        def call(*given: Any, **named: Any) -> Any:
            self.step(f"txn.{name}")
            found = real(*given, **named)
            self.step(f"txn.{name}.after")
            return found

        return call

    def end(self) -> None:
        """The server ends the sessions of a process that is gone."""
        self.dead = True
        for each in self.connections:
            each.close()


class Race:
    """One slow process, and recoveries beside it, over and over until it is done."""

    def __init__(self, world: World, place: Place, seed: int) -> None:
        self.world, self.place = world, place
        self.rng = random.Random(seed)
        self.key = f"order-{seed}"
        with closing(place.connect()) as connection:
            self.driver = driver_of(connection)
        self._hub = getcurrent()
        self._slow = Process(self, "slow")

    def pause(self) -> None:
        if getcurrent() is not self._hub:
            self._hub.switch()

    def run(self) -> str:
        """What the slow process was told: committed, not committed, unknown or dead."""
        running = [greenlet(self._commit), *(greenlet(self._recover) for _ in range(2))]
        while running:
            self.rng.choice(running).switch()
            running = [each for each in running if not each.dead]
        return self._slow.told

    def _commit(self) -> None:
        slow = self._slow
        client = self.world.new_client(timeout=5.0)
        ledger = Ledger(slow.connect)
        try:
            txn = client.begin("shop")
            with slow.hooked(txn, "prepare", "commit", "abort"), ledger.commit(txn) as cursor:
                for stream in STREAMS:
                    txn.write(stream, self.key.encode(), key=b"k")
                self.place.order(cursor, self.key)
                slow.step("body")
            slow.told = "committed"
        except OutcomeUnknown:
            slow.told = "unknown"
        except (AnabranchError, self.driver.Error):
            slow.told = "not committed"
        except Dead:
            slow.told = "dead"
        finally:
            slow.end()

    def _recover(self) -> None:
        for _ in range(self.rng.randrange(4)):
            one = Process(self, "recovery")
            try:
                recover(self.world.new_client(timeout=5.0), one)
            except Dead:
                pass
            except (AnabranchError, self.driver.Error):
                pass  # it comes again
            finally:
                one.end()


def recover(client: Client, one: Process) -> None:
    with one.hooked(client, "prepared", "commit", "abort"):
        Ledger(one.connect).recover(client, older_than=-DAY_S * 1000)


def start(place: Place, control_partitions: int = 1) -> World:
    """A cluster in memory, one control partition led, with the streams, and the ledger of a place."""
    world = World(control_partitions)
    for stream, near in zip(STREAMS, (None, "shop"), strict=True):
        world.client.create_stream(stream, segments=1, near=near)
    Ledger(place.connect).create(world.client)
    return world


def settle(world: World, place: Place) -> None:
    """Recover until there is nothing left to do."""
    until = time.monotonic() + GONE_S
    for turn in itertools.count(1):
        world.clock.sleep(100.0)
        found = Ledger(place.connect).recover(world.client, older_than=-DAY_S * 1000)
        assert found.alarms == {}, found
        over = not found.held and not Ledger(place.connect).rows()
        if turn >= 3 and (over or time.monotonic() > until):
            break
    assert world.client.transactions() == []
    assert Ledger(place.connect).rows() == []


def differences(world: World, place: Place) -> set[str]:
    """Orders without each of their events, and events without an order."""
    rows = place.orders()
    found = set()
    for stream in STREAMS:
        events = sorted((event.value or b"").decode() for event in world.events(stream))
        found |= set(rows) ^ set(events)
        found |= {key for key in events if events.count(key) > 1}
    return found
