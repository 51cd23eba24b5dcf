"""Controllers and clients of an older build are killed; those of this one go on with all that they left."""

from __future__ import annotations

import os
import random
import shutil
import signal
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import anabranch
from anabranch.client.reservation import Reservation
from anabranch.errors import AlreadyCommitted, LocksBroken, ReservedByPrepared
from anabranch.ledger import Ledger
from anabranch.ports import Log
from tests import older_build
from tests.conftest import Broker
from tests.crash.leaving import NAME, NUMBER, RESERVED, ROWS, SECRET, SERIES, STREAMS, TABLE, Leave
from tests.crash.oracle import check_answers, check_stream, read_status, read_stream
from tests.faults.test_tables import begin as begin_tables
from tests.faults.test_tables import look
from tests.ledger.child import STEPS
from tests.ledger.places import PostgresPlace
from tests.ledger.test_kills import end, events
from tests.owned import start_module
from tests.postgres import server
from tests.processing.test_trial import QUICK
from tests.processing.trial import Trial
from tests.waiting import wait_until
from tests.workload.children import wait_more
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import Forked
from tests.workload.readers import MODES
from tests.workload.writers import Write
from tests.workload.zygote import Child, Zygote

READY_S = 120.0  # the older build may have to be compiled first
CALL_S = 60.0
# Between two kills: commits of streams, and of tables; and the longest time for each.
COMMITS = int(os.environ.get("ANABRANCH_COMMITS", "60"))
SECONDS = 12.0
COMMITTED = "one shot", "named", "series"
SAID = Counter({f"{kind} {n}".encode(): 1 for kind in COMMITTED for n in range(5)})
pytestmark = [pytest.mark.broker, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def older() -> Iterator[Zygote]:
    """As `zygote`, of the older build."""
    with Zygote(environment=older_build.environment(), folder=older_build.tree()) as warm:
        yield warm


@dataclass
class Left:
    """Transactions that an older build left, by kind, and a client of this build."""

    client: anabranch.Client
    scope: str
    said: dict[str, dict[str, Any]]

    def id(self, kind: str) -> bytes:
        return bytes.fromhex(self.said[kind]["txn_id"])

    def token(self, kind: str) -> bytes:
        return bytes.fromhex(self.said[kind]["token"])

    def receipts(self, kind: str) -> list[bytes]:
        return [bytes.fromhex(receipt) for receipt in self.said[kind]["receipts"]]

    def states(self) -> dict[str, tuple[str, int]]:
        """State and commit timestamp of each."""
        infos = {kind: self.client.state(self.id(kind), timeout=CALL_S) for kind in self.said}
        return {kind: (info.state, info.commit_timestamp) for kind, info in infos.items()}

    def values(self) -> list[Counter[bytes | None]]:
        """The events of each stream."""
        snapshot = self.client.snapshot([f"{self.scope}/{name}" for name in STREAMS])
        return [
            Counter(event.value for event in snapshot.read(f"{self.scope}/{name}"))
            for name in STREAMS
        ]

    def check_taken_over(self) -> None:
        """All that was committed is there, with its timestamp, and nothing else is."""
        found = self.states()
        for kind in COMMITTED:
            assert found.pop(kind) == ("COMMITTED", self.said[kind]["timestamp"])
        assert found.pop("aborted")[0] == "ABORTED"
        assert found.pop("silent")[0] in ("OPEN", "ABORTED")
        prepared = {kind for kind, (state, _) in found.items() if state == "PREPARED"}
        assert prepared == {"prepared", "prepared, then aborted", "prepared in memory", "held"}
        assert {state for kind, (state, _) in found.items() if kind not in prepared} == {"OPEN"}
        assert {info.txn_id for info in self.client.prepared(self.scope, secret=SECRET)} == {
            self.id(kind) for kind in prepared
        }
        assert self.values() == [SAID, SAID]
        assert self.client.begin(self.scope, NAME).result is not None
        (series,) = self.client.series(self.scope)
        assert (series.series, series.number) == (SERIES, NUMBER)
        with self.client.begin(self.scope) as txn, pytest.raises(AlreadyCommitted):
            txn.commit(name=SERIES, number=NUMBER - 1)
        with self.client.begin(self.scope) as txn, pytest.raises(ReservedByPrepared):
            txn.commit(name=RESERVED)

    def end_streams(self) -> None:
        """Commit and abort what was open or prepared, and wait for the end of the silent one."""
        client = self.client
        reserved = Reservation.from_bytes(bytes.fromhex(self.said["reserved"]["reservation"]))
        for kind, transaction in (("open", self.token("open")), ("reserved", reserved)):
            assert client.commit(transaction, self.receipts(kind)).counts.committed == 10
        for kind in ("prepared", "prepared in memory"):
            assert client.commit(self.id(kind), secret=SECRET).counts.committed == 10
        client.abort(self.token("open, then aborted"))
        client.abort(self.id("prepared, then aborted"), secret=SECRET)
        wait_until(lambda: client.state(self.id("silent")).state == "ABORTED", CALL_S)
        ended = ("open", "reserved", "prepared", "prepared in memory")
        wanted = SAID + Counter(f"{kind} {n}".encode() for kind in ended for n in range(5))
        assert self.values() == [wanted, wanted]

    def end_rows(self, folder: Path) -> None:
        """Locks of the older build hold and break as they would in it; the replica in its folder has all rows."""
        table, client = f"{self.scope}/{TABLE}", self.client
        with client.replica(table, folder=folder) as rows:
            with rows.snapshot(fresh=True, timeout=CALL_S) as view:
                assert dict(view.scan(table)) == ROWS
            rows.transact(lambda txn: txn.put(table, b"broken", b"7"), timeout=CALL_S)
            client.commit(self.token("kept"), self.receipts("kept"))
            with pytest.raises(LocksBroken):
                client.commit(self.token("broken"), self.receipts("broken"))
            client.commit(self.id("held"), secret=SECRET)
            wanted = ROWS | {b"kept": b"101", b"broken": b"7", b"held": b"101"}
            for place in (rows, client.replica(table, folder=folder.with_suffix(".new"))):
                with place, place.snapshot(fresh=True, timeout=CALL_S) as view:
                    assert dict(view.scan(table)) == wanted


def leave(older: Zygote, leaders: Forked, scope: str, folder: Path) -> tuple[Child, dict[str, Any]]:
    """Let a process of the older build leave its transactions. Returns it, and what it says of each."""
    spec = Leave(leaders.bootstrap, leaders.prefix, "leave", scope=scope, folder=str(folder))
    child = older.fork(spec)
    wait_until(lambda: child.said("left_all") or not child.running, READY_S)
    assert child.running, child.events
    assert Path(child.said("imported")[0]["file"]).is_relative_to(older_build.tree())
    return child, {said["kind"]: said for said in child.said("left")}


def leave_payments(leaders: Forked, dsn: str, scopes: str, output: Path) -> None:
    """Let processes of the older build die at each step of a payment."""
    environment = os.environ | older_build.environment()
    given = [leaders.bootstrap, leaders.prefix, dsn, scopes]
    with output.open("wb") as file:
        dying = [
            start_module(
                "tests.ledger.child", [*given, step, step], output=file, environment=environment
            )
            for step in STEPS
        ]
        assert {process.wait(READY_S) for process in dying} == {-9}, output.read_text()


@contextmanager
def led_by(
    older: Zygote, bootstrap: str, folder: Path, machines: int, **how: Any
) -> Iterator[Forked]:
    """Leaders of the older build."""
    chance = random.Random(f"{SEED}/older")
    prefix = f"ob{uuid.uuid4().hex[:6]}"
    leaders = Forked(older, bootstrap, folder, prefix, chance, machines, 0.0, how)
    try:
        leaders.fork().wait_leading(READY_S)
        yield leaders
    finally:
        leaders.close()


@pytest.mark.long
def test_what_an_older_build_left_is_ended(
    broker: Broker, older: Zygote, zygote: Zygote, log: Log, tmp_path: Path
) -> None:
    """The next leader has its folder; the one after that reads all from the log."""
    with ExitStack() as stack:
        database = stack.enter_context(server())
        leaders = stack.enter_context(led_by(older, broker.bootstrap, tmp_path, 1))
        scope, replica = f"{leaders.prefix}-scope", tmp_path / "replica"
        place = PostgresPlace(database.dsn()).made()
        client = anabranch.connect(broker.bootstrap, prefix=leaders.prefix, timeout=CALL_S)
        stack.enter_context(client)
        for name in ("shop", "bank"):
            client.create_stream(f"{name}/postings")
        ledger = Ledger(place.connect)
        ledger.create(client)
        leave_payments(leaders, place.dsn, "shop,bank", tmp_path / "children")
        child, said = leave(older, leaders, scope, replica)
        leaders.last.kill()
        child.kill()
        leaders.zygote = zygote
        leaders.fork().wait_leading(CALL_S)
        left = Left(client, scope, said)
        left.check_taken_over()
        left.end_streams()
        left.end_rows(replica)
        end(client, ledger)
        paid = sorted(step for step, committed in STEPS.items() if committed)
        assert place.orders() == paid
        wanted = sorted(2 * paid)
        assert sorted((e.value or b"").decode() for e in events(client, "shop,bank")) == wanted
        states, values = left.states(), left.values()
        leaders.last.kill()
        shutil.rmtree(tmp_path / "machine-0")
        leaders.fork().wait_leading(CALL_S)
        assert (left.states(), left.values()) == (states, values)
        for name in (*STREAMS, TABLE):
            check_stream(read_stream(log, f"{scope}/{name}"))
        check_answers(log, leaders.prefix)
        assert len(read_status(log, leaders.prefix).terms) == 3


def crew_of(older: Zygote, leaders: Forked, folder: Path, *names: str) -> Crew:
    """Clients of the older build."""
    crew = Crew(older, leaders.bootstrap, folder, random.Random(f"{SEED}/{names}"), names)
    crew.prefix, crew.leaders = leaders.prefix, leaders
    return crew


def replace_all(zygote: Zygote, leaders: Forked, *crews: Crew) -> None:
    """Kill all clients and the leader at once; those of this build follow, with their folders and groups."""
    clients = [(crew, child) for crew in crews for child in crew.clients]
    for child in (leaders.last, *(child for _, child in clients)):
        assert child.running, f"{child.spec.name} ended by itself: {child.events[-2:]}"
        child.signal(signal.SIGKILL)
    for _, child in clients:
        child.wait_ended()
    leaders.fork().wait_leading(CALL_S)
    for crew, child in clients:
        crew.zygote = zygote
        crew.again(child)
    for crew in crews:
        for child in crew.clients:
            child.wait_said("works", READY_S)


@pytest.mark.soak
@pytest.mark.timeout(600 + 3 * SECONDS)
def test_all_go_on_with_the_next_build(
    broker: Broker,
    older: Zygote,
    zygote: Zygote,
    log: Log,
    tmp_path: Path,
    measured: Callable[[str], None],
) -> None:
    """The leader is replaced, then all clients are. The checker judges both builds as one run."""
    print(f"ANABRANCH_SEED={SEED}")
    with (
        led_by(older, broker.bootstrap, tmp_path, 2, threads=True, tidy=True) as leaders,
        ExitStack() as stack,
    ):
        crew = crew_of(older, leaders, tmp_path / "streams", "wide", "narrow")
        tables = crew_of(older, leaders, tmp_path / "tables", "accounts", "limits")
        for each in (crew, tables):
            stack.callback(each.close)
        crew.create()
        grouped = [crew.reader(mode, grouped=True) for mode in ("ordered", "transactions")]
        crew.begin([*crew.writers(2, 2), *grouped, *grouped, *map(crew.reader, MODES)])
        begin_tables(tables)
        for following, kill in (
            (older, leaders.kill),
            (zygote, leaders.kill),
            (zygote, partial(replace_all, zygote, leaders, crew, tables)),
            (zygote, leaders.kill),
        ):
            for each in (crew, tables):
                each.work_on(COMMITS, SECONDS)
            leaders.zygote = following
            kill()
        for each in (crew, tables):
            wait_more(each.commits)
        finish(crew, tables)
    for stream in (*crew.streams, *tables.streams):
        check_stream(read_stream(log, stream))
    check_answers(log, leaders.prefix)
    crew.judged(measured, "two builds")
    tables.judged(measured, "two builds, money in tables")


def finish(crew: Crew, tables: Crew) -> None:
    """No crew waits for the end of what the other one still writes."""
    writing = [*crew.of(Write), *tables.clients]
    for child in writing:
        child.signal(signal.SIGTERM)
    for child in writing:
        child.wait_ended(crew.patience.end)
    crew.finish()
    tables.finish_tables(lambda client, recorder: look(tables, client, recorder))


@pytest.mark.soak
def test_a_processor_goes_on(
    broker: Broker, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """Workers and controllers of both builds; outputs and stores are one fold of the input."""
    trial = Trial(broker.bootstrap, tmp_path, QUICK, older=older_build.environment())
    measured(trial.run().told())
