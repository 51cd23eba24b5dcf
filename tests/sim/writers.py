"""Writers that join a transaction by its token, in a task or process of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from anabranch.client.client import Client
from anabranch.client.reservation import Reservation
from anabranch.client.writer import Writer
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    ClockSkew,
    EventTooLarge,
    Expired,
    IllegalState,
    InvalidArgument,
    NotAuthorized,
    OutcomeUnknown,
    ReservedByPrepared,
    RetryError,
    StreamLost,
    WritersUnfinished,
)
from anabranch.types import Receipt, Result
from tests.sim.ledger import Deal, Ledger, Told, WriterLog
from tests.sim.recorded import recorded_begin, recorded_commit, told_commit
from tests.sim.recording import event_id, text
from tests.sim.world import Process, World

SCOPE = "s"
NEW = "u/d"  # comes when the cluster has grown
STREAMS = {"s/a": 2, "s/b": 1, "t/c": 3, NEW: 2}
TABLES = ("s/rows", "rows/near")
COUNTERS = f"{SCOPE}/counters"  # a table of numbers
CHAINED = f"{SCOPE}/chained"  # a table that tasks of one process change together
GOODS = f"{SCOPE}/goods"  # a table with derived tables
FLATS = f"{SCOPE}/flats"  # a table from which workers derive another one
LATER = f"{FLATS}-by-kind-v1"
BESIDE = f"{SCOPE}/beside"  # events that are committed together with rows
KEYS = (b"k0", b"k1", b"k2", b"k3", None)

# What a call may come to without anything being wrong.
FINE = (
    RetryError,
    BeginAgainError,
    AskOutcomeError,
    AlreadyCommitted,
    IllegalState,
    WritersUnfinished,
    ClockSkew,
    ReservedByPrepared,
    StreamLost,  # `check_lost` looks whether that is so
)


_STAYS_S = 8.0  # how long a writer that has ended can be asked for its receipt


def near(world: World) -> str | None:
    """The scope that others are near to; None: they are spread over the control partitions."""
    return None if world.across else SCOPE


def create_tables(world: World, client: Client) -> None:
    """Create both tables, or find that they are there."""
    settings = {"table.history.ms": str(Random(f"{world.seed}/t").choice((1500, 3600000)))}
    client.create_table(TABLES[0], 2, settings, timeout=5.0)
    client.create_table(TABLES[1], 1, settings, near=near(world), timeout=5.0)


@dataclass
class Helper:
    """Such a writer, and what it hands back: receipts, with the number of its events by then."""

    label: str
    receipts: list[tuple[Receipt, int]] = field(default_factory=list)
    done: bool = False
    flush: Callable[[], Receipt] | None = (
        None  # for a writer that has ended: gives a receipt as often as asked
    )


def new_event(random: Random, deal: Deal, account: WriterLog) -> Told:
    """The writer's next event, somewhere."""
    return deal.event(account, random.choice(deal.streams), random.choice(KEYS))


def some_events(random: Random) -> int:
    """How many events a writer makes: few, or now and then many."""
    return random.randint(12, 30) if random.random() < 0.12 else random.randint(0, 6)


def start_helper(
    world: World,
    ledger: Ledger,
    process: Process | None,
    client: Client | None,
    deal: Deal,
    token: bytes | Reservation,
    stays: float = 0.0,
) -> Helper:
    """Start a writer in a process, if the process lives. ``stays``: how often it waits to be asked again."""
    helper = Helper(f"w{len(deal.writers)}")
    account = deal.writer(helper.label)
    if client is None or process is None or process.dead:
        helper.done = True
        return helper

    def body() -> None:
        writer = client.join(token, heartbeat=world.random.random() < 0.3)
        try:
            _write(world, ledger, writer, deal, account, helper, stays)
        except (InvalidArgument, EventTooLarge, NotAuthorized, *FINE) as error:
            in_trouble = ledger.deleted or ledger.troubled
            lawful = ledger.lanes if isinstance(error, NotAuthorized) else in_trouble
            if not isinstance(error, FINE) and not lawful:
                raise
            world.note(process.name, f"helper: {type(error).__name__}: {error}")
            writer.discard()
        helper.done = True

    process.on_death.append(lambda: setattr(helper, "done", True))
    world.spawn(process, helper.label, body)
    return helper


def recorded_write(
    ledger: Ledger,
    deal: Deal,
    account: WriterLog,
    told: Told,
    write: Callable[[str, bytes, bytes | None], None],
) -> None:
    """Write an event that is noted already."""
    events = [[text(told.key), event_id(told.value)]]
    with ledger.history.here.asking(
        "write", txn=deal.label, writer=account.part, stream=told.stream, events=events
    ):
        write(told.stream, told.value, told.key)


def commit_one(
    world: World,
    ledger: Ledger,
    client: Client,
    deal: Deal,
    stream: str,
    timeout: float,
    seen: int = 0,
) -> Result:
    """Commit one event in a transaction of its own. ``seen``: a timestamp that the client was told."""
    with recorded_begin(ledger, deal):
        txn = client.begin(deal.scope)
    own = deal.writer("own")
    told = deal.event(own, stream, b"one")
    attempt = deal.attempt(world.now, "own", None)
    try:
        recorded_write(ledger, deal, own, told, txn.write)
        with recorded_commit(ledger, deal, attempt, seen) as answer:
            result = attempt.result = txn.commit(timeout=timeout)
            told_commit(answer, deal, result)
        return result
    except AnabranchError as error:
        attempt.in_doubt = isinstance(error, OutcomeUnknown | Expired)
        attempt.error = None if attempt.in_doubt else error
        recorded: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if deal.label not in ledger.doubled:
            recorded = ledger.history.here.asking("abort", txn=deal.label)
        with contextlib.suppress(AnabranchError), recorded:
            txn.abort("left by an error", timeout=timeout)
        raise
    finally:
        attempt.ended = world.now
        deal.txn_id = txn.txn_id


def _write(
    world: World,
    ledger: Ledger,
    writer: Writer,
    deal: Deal,
    account: WriterLog,
    helper: Helper,
    stays: float,
) -> None:
    random = world.random
    for _ in range(some_events(random)):
        told = new_event(random, deal, account)
        recorded_write(ledger, deal, account, told, writer.write)
        if random.random() < 0.25:
            helper.receipts.append((writer.flush(), len(account.told)))
            account.flushed.append(len(account.told))
        if random.random() < 0.1:
            world.sleep(random.expovariate(1.0))
    if stays and random.random() < stays:
        helper.receipts.append((writer.flush(), len(account.told)))
        account.flushed.append(len(account.told))
        helper.flush, helper.done = writer.flush, True
        world.sleep(_STAYS_S)
        helper.flush = None
    elif random.random() < 0.8:
        account.finishing = True
        account.flushed.append(len(account.told))
        with contextlib.ExitStack() as stack:
            for part in account.parts():
                asking = ledger.history.here.asking("finish", txn=deal.label, writer=part)
                stack.enter_context(asking)
            helper.receipts.append((writer.finish(), len(account.told)))
        account.finished_at = world.now
    elif random.random() < 0.5:
        helper.done = True  # it goes on writing while others commit
        for _ in range(random.randint(1, 4)):
            told = new_event(random, deal, account)
            recorded_write(ledger, deal, account, told, writer.write)
            world.sleep(random.expovariate(3.0))
        writer.flush()


def wait_for(world: World, helpers: list[Helper]) -> None:
    """Until all are done, but not for ever."""
    give_up = world.now + 8.0
    while world.now < give_up and not all(helper.done for helper in helpers):
        world.sleep(0.1)
