"""Controllers and clients of the former release work with those of this one, until the feature level is raised.

Each release is a wheel or tree of its own (`tests.older_build`); a controller of each is in one group.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest

import anabranch
from anabranch.batches import columns_write, framing
from anabranch.errors import FeatureNotEnabled, UnsupportedVersion
from anabranch.ports import Log
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.codec import LEVEL
from tests import older_build
from tests.cluster import ControllerProcess
from tests.conftest import Broker
from tests.crash.leaving import STREAMS, TABLE, End, Leave
from tests.crash.meeting import Meet
from tests.crash.oracle import check_answers, check_stream, read_status, read_stream
from tests.crash.test_older_build import COMMITTED, Left
from tests.faults.test_tables import begin as begin_tables
from tests.faults.test_tables import look
from tests.processing.test_trial import QUICK
from tests.processing.trial import Trial
from tests.waiting import wait_until
from tests.workload.children import wait_more
from tests.workload.crew import SEED, Crew
from tests.workload.leaders import CONTROLLER
from tests.workload.readers import MODES
from tests.workload.writers import Write
from tests.workload.zygote import Child, Spec, Zygote

FIX_CALL = 2  # exit code
CALL_S = 60.0
LEAD_S = 60.0
TAKEOVERS = int(os.environ.get("ANABRANCH_TAKEOVERS", "4"))
# Between two takeovers: commits, and the longest time for them.
COMMITS, SECONDS = 40, 3.0
TEXT = "Flights from JFK"
pytestmark = [pytest.mark.broker, pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def older() -> Iterator[Zygote]:
    """As `zygote`, of the former release."""
    with Zygote(environment=older_build.environment(), folder=older_build.tree()) as warm:
        yield warm


class Pair:
    """A controller of each release, in one group (`tests.workload.leaders.Leaders`)."""

    def __init__(self, bootstrap: str, folder: Path, prefix: str, chance: random.Random) -> None:
        options = (*CONTROLLER, "--session-timeout", "2")
        self.all = {
            name: ControllerProcess(bootstrap, folder / name, prefix, options, environment)
            for name, environment in (("former", older_build.environment()), ("new", {}))
        }
        # This tree is compiled first: the start of a process has a deadline.
        columns_write.warm()
        framing.warm()
        self._chance = chance
        self.is_raised = False  # the feature level: then the former one does not lead
        self.ended: Counter[str] = Counter()

    def start(self) -> None:
        """Start those that don't run; the first one of all leads."""
        for one in self.all.values():
            if not one.running:
                one.start()
                wait_until(lambda one=one: one.status_file.exists() or not one.running, LEAD_S)  # type: ignore[misc]
        self.leader()

    def lead_first(self, name: str) -> None:
        """Let this one be the leader, before there is any other."""
        self.all[name].start().wait_leading(LEAD_S)

    def leader(self) -> str:
        """Who leads, once one does."""
        until = time.monotonic() + LEAD_S
        while True:
            for name, one in self.all.items():
                if one.leading():
                    return name
            assert time.monotonic() < until, "no controller leads"
            time.sleep(0.02)

    def take_over(self, number: signal.Signals) -> str:
        """End the leader at a random moment of its work; the other one leads then. Returns the one that ended."""
        name = self.leader()
        one = self.all[name]
        time.sleep(self._chance.uniform(0, 0.3))
        one.signal(number)
        one.ended()
        self.ended[f"{name} {number.name}"] += 1
        (other,) = (each for each in self.all if each != name)
        self.all[other].wait_leading(LEAD_S)
        self.start()
        return name

    def let_lead(self, name: str) -> None:
        if self.leader() != name:
            self.take_over(signal.SIGTERM)
        assert self.leader() == name

    def check(self) -> None:
        for name, one in self.all.items():
            assert one.running, f"the {name} controller ended by itself: {one.log_file}"

    def hand_over(self) -> None:
        if not self.is_raised:
            self.take_over(signal.SIGTERM)
            return
        former, new = self.all["former"], self.all["new"]
        new.stop()
        assert former.ended() == FIX_CALL
        new.start().wait_leading(LEAD_S)
        self.start()

    def close(self) -> None:
        for one in self.all.values():
            one.kill()


class MixedCrew(Crew):
    """Its clients are of the two releases by turns."""

    turns: Iterator[Zygote]

    def fork(self, spec: Spec) -> Child:
        self.zygote = next(self.turns)
        return super().fork(spec)


def crew_of(
    older: Zygote, zygote: Zygote, pair: Pair, prefix: str, folder: Path, *names: str
) -> MixedCrew:
    bootstrap = pair.all["new"].bootstrap
    crew = MixedCrew(zygote, bootstrap, folder, random.Random(f"{SEED}/{names}"), names)
    crew.prefix, crew.leaders = prefix, pair
    crew.turns = cycle((older, zygote))
    return crew


def begin(crew: Crew) -> None:
    """One of each kind of client in each release."""
    crew.create()
    once = [
        *crew.writers(1, 1),
        *(crew.reader(m, grouped=True) for m in ("ordered", "transactions")),
    ]
    once += map(crew.reader, MODES)
    crew.begin([spec for spec in once for _ in range(2)])


@dataclass(frozen=True)
class Load:
    """Clients of both releases on streams (``crew``) and tables, and controllers, of which ``first`` led first."""

    first: str
    pair: Pair
    crew: MixedCrew
    tables: MixedCrew

    @property
    def crews(self) -> tuple[MixedCrew, MixedCrew]:
        return self.crew, self.tables

    def begin(self) -> None:
        self.pair.lead_first(self.first)
        self.pair.start()
        begin(self.crew)
        begin_tables(self.tables)

    def work_on(self) -> None:
        for each in self.crews:
            each.work_on(COMMITS, SECONDS)

    def wait_more(self) -> None:
        for each in self.crews:
            wait_more(each.commits)

    def end(self, log: Log, measured: Callable[[str], None], what: str) -> None:
        """End all processes. The checker judges both releases as one run."""
        # No crew waits for the end of what the other one still writes.
        writing = [*self.crew.of(Write), *self.tables.clients]
        for child in writing:
            child.signal(signal.SIGTERM)
        for child in writing:
            child.wait_ended(self.crew.patience.end)
        self.crew.finish()
        self.tables.finish_tables(lambda client, recorder: look(self.tables, client, recorder))
        self.close()
        for stream in (*self.crew.streams, *self.tables.streams):
            check_stream(read_stream(log, stream))
        check_answers(log, self.crew.prefix)
        self.crew.judged(measured, f"two releases, the {self.first} one leads first, {what}")
        self.tables.judged(measured, f"{what}, money in tables")

    def close(self) -> None:
        for each in self.crews:
            each.close()


@pytest.fixture(params=["former", "new"])
def load(
    request: pytest.FixtureRequest,
    broker: Broker,
    older: Zygote,
    zygote: Zygote,
    tmp_path: Path,
    unique: str,
) -> Iterator[Load]:
    """One of each kind of client in each release, at work."""
    print(f"ANABRANCH_SEED={SEED}")
    first, prefix = request.param, f"tw{unique}"
    pair = Pair(broker.bootstrap, tmp_path, prefix, random.Random(f"{SEED}/{first}"))
    streams = crew_of(older, zygote, pair, prefix, tmp_path / "streams", "wide", "narrow")
    tables = crew_of(older, zygote, pair, prefix, tmp_path / "tables", "accounts", "limits")
    made = Load(first, pair, streams, tables)
    try:
        made.begin()
        yield made
    finally:
        made.close()


def test_they_take_over_from_each_other(
    load: Load, log: Log, measured: Callable[[str], None]
) -> None:
    """Leaders end in the middle of commits."""
    by_turns = cycle((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGTERM))
    for number, _ in zip(by_turns, range(TAKEOVERS), strict=False):
        load.work_on()
        load.crew.note(f"{load.pair.take_over(number)} ended, {load.pair.leader()} leads")
    load.wait_more()
    load.end(log, measured, str(dict(load.pair.ended)))


def test_the_level_is_raised_under_load(
    load: Load, log: Log, measured: Callable[[str], None]
) -> None:
    """Clients of both releases work before and after it; the former controller does not lead any more."""
    pair, prefix = load.pair, load.crew.prefix
    load.work_on()
    pair.let_lead("new")
    with anabranch.connect(
        load.crew.bootstrap, prefix=prefix, lane=ADMIN_LANE, timeout=CALL_S
    ) as operator:
        assert operator.feature_level(raise_to=LEVEL).level == LEVEL
    pair.is_raised = True
    load.wait_more()
    check_former_does_not_lead(log, pair, prefix)
    load.wait_more()
    load.end(log, measured, "the level is raised")


@pytest.mark.slow(60)
def test_a_processor_has_workers_of_both(
    broker: Broker, tmp_path: Path, measured: Callable[[str], None]
) -> None:
    """A worker and a controller of each release; outputs and stores are one fold of the input."""
    trial = Trial(broker.bootstrap, tmp_path, QUICK)
    for process in (trial.controllers[0], trial.workers[0]):
        process.environment = {**process.environment, **older_build.environment()}
    measured(trial.run().told())


@pytest.mark.parametrize("first", ["former", "new"])
def test_what_one_release_prepared_the_other_one_ends(
    broker: Broker, older: Zygote, zygote: Zygote, log: Log, tmp_path: Path, first: str
) -> None:
    """Its client is killed, then its leader; the other release leads, and its client commits and aborts."""
    prefix = f"pr{first}{SEED}"
    scope = f"{prefix}-scope"
    clients = {"former": older, "new": zygote}
    (other,) = clients.keys() - {first}
    pair = Pair(broker.bootstrap, tmp_path, prefix, random.Random(f"{SEED}/{first}"))
    try:
        pair.lead_first(first)
        pair.start()
        spec = Leave(broker.bootstrap, prefix, "leave", scope=scope, folder=str(tmp_path / "rows"))
        leaving = clients[first].fork(spec)
        leaving.wait_said("left_all", LEAD_S)
        said = {each["kind"]: each for each in leaving.said("left")}
        leaving.kill()
        assert pair.take_over(signal.SIGKILL) == first
        ending = clients[other].fork(End(broker.bootstrap, prefix, "end", scope=scope, left=said))
        ending.wait_ended(2 * CALL_S)
        assert ending.status == 0, ending.events[-3:]
        for name, child in ((first, leaving), (other, ending)):
            file = Path(child.said("imported")[0]["file"])
            assert file.is_relative_to(older_build.tree()) is (name == "former")
        answers = {each["kind"]: each["answer"] for each in ending.said("ended_one")}
        assert answers == {
            **dict.fromkeys(("open", "reserved", "prepared", "prepared in memory"), "10"),
            **dict.fromkeys(("open, then aborted", "prepared, then aborted"), "aborted"),
            "kept": "1",
            "held": "1",
            "broken": "LocksBroken",
        }
        with anabranch.connect(
            broker.bootstrap, prefix=prefix, lane=ADMIN_LANE, timeout=CALL_S
        ) as client:
            left = Left(client, scope, said)
            check_ended(left, {kind for kind, answer in answers.items() if answer.isdigit()})
            found = left.states(), left.values()
            assert pair.take_over(signal.SIGKILL) == other
            assert (left.states(), left.values()) == found
            assert client.feature_level().level == 1
        for name in (*STREAMS, TABLE):
            check_stream(read_stream(log, f"{scope}/{name}"))
        check_answers(log, prefix)
    finally:
        pair.close()


def check_ended(left: Left, committed: set[str]) -> None:
    """Each has the end that was answered, and the streams have the events of all that were committed."""
    wait_until(lambda: left.states()["silent"][0] == "ABORTED", CALL_S)
    states = {kind: state for kind, (state, _) in left.states().items()}
    committed |= set(COMMITTED)
    assert {kind for kind, state in states.items() if state == "COMMITTED"} == committed
    assert {states[kind] for kind in states.keys() - committed} == {"ABORTED"}
    for kind in COMMITTED:
        assert left.states()[kind] == ("COMMITTED", left.said[kind]["timestamp"])
    written = committed - {"kept", "held"}
    wanted = Counter(f"{kind} {n}".encode() for kind in written for n in range(5))
    assert left.values() == [wanted, wanted]


def write(client: anabranch.Client, table: str, key: bytes) -> None:
    with client.begin(table.partition("/")[0]) as txn:
        txn.write(table, b"x", key=key)
        txn.commit()


def check_nothing_raised(client: anabranch.Client, pair: Pair, name: str) -> None:
    """Neither leader lets the new field be used, and the level can't be raised while one of them may lead."""
    pair.let_lead("former")
    with pytest.raises(UnsupportedVersion, match=r"feature level 2, .* levels 1 to 1"):
        client.create_stream(name, description=TEXT)
    with pytest.raises(
        UnsupportedVersion, match=f"a leader knows feature levels up to 1, not {LEVEL}"
    ):
        client.feature_level(raise_to=LEVEL)
    pair.let_lead("new")
    with pytest.raises(FeatureNotEnabled, match="cluster feature --raise 2"):
        client.create_stream(name, description=TEXT)
    assert name not in [each.stream for each in client.streams()]
    assert client.feature_level().level == 1


def check_rolled_back(client: anabranch.Client, pair: Pair, stream: str) -> None:
    """Without the new controller the former one works on alone."""
    assert pair.all["new"].stop() == 0
    pair.all["former"].wait_leading(LEAD_S)
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, b"rolled back")
        assert txn.commit().counts.committed == 1
    pair.start()


def check_meeting(meeting: Child, stream: str, described: tuple[str, str]) -> None:
    """The former client reads and writes all but records of level 2; of these, it names the level."""
    meeting.signal(signal.SIGUSR1)
    meeting.wait_said("asked", CALL_S)
    said = {each["what"]: each["answer"] for each in meeting.said("answered")}
    refused = {"all", f"replica {described[1]}", *(f"describe {name}" for name in described)}
    for what in refused:
        assert said[what].startswith("UnsupportedVersion: "), (what, said[what])
        assert "feature level 2" in said[what]
    assert said["plain"].startswith("StreamDescription"), said
    assert [said[f"read {name}"] for name in described] == ["[]"] * 2, (
        "histories have no such field"
    )
    assert not meeting.said("failed")


def check_former_does_not_lead(log: Log, pair: Pair, prefix: str) -> None:
    """It ends as soon as it is to lead, having fenced no other controller: it logs no term."""
    former, new = pair.all["former"], pair.all["new"]
    former_log = len(former.log_file.read_text())
    before = read_status(log, prefix).terms[-1].term
    new.kill()
    assert former.ended() == FIX_CALL
    said = former.log_file.read_text()[former_log:]
    assert (
        said.count(
            f"the status log has feature level {LEVEL}, and this release knows levels 1 to 1"
        )
        == 1
    ), said
    new.start().wait_leading(LEAD_S)
    former.start()
    wait_until(lambda: former.status_file.exists(), LEAD_S)
    time.sleep(3.0)  # longer than the session timeout, and a rebalance
    assert former.running, "it stands by as long as another one leads"
    assert new.leading() == [0]
    assert read_status(log, prefix).terms[-1].term == before + 1


def test_the_former_release_refuses_what_a_raised_level_brings(
    broker: Broker, older: Zygote, log: Log, tmp_path: Path
) -> None:
    """Until then one may go back to it, and nothing is of the higher level."""
    prefix = f"rl{SEED}"
    scope = f"{prefix}-scope"
    stream, table = f"{scope}/stream", f"{scope}/table"
    pair = Pair(broker.bootstrap, tmp_path, prefix, random.Random(SEED))
    try:
        pair.lead_first("former")
        pair.start()
        with anabranch.connect(
            broker.bootstrap, prefix=prefix, lane=ADMIN_LANE, timeout=CALL_S
        ) as client:
            wait_until(lambda: client.create_stream(stream, 2) is not None, CALL_S)
            client.create_table(table)
            described = f"{scope}/described", f"{scope}/table-described"
            meeting = older.fork(
                Meet(
                    broker.bootstrap,
                    prefix,
                    "meet",
                    table=table,
                    stream=stream,
                    described=described,
                )
            )
            meeting.wait_said("wrote", CALL_S)
            check_nothing_raised(client, pair, described[0])
            check_rolled_back(client, pair, stream)
            pair.let_lead("new")
            assert client.feature_level(raise_to=LEVEL).level == LEVEL
            for made in (
                client.create_stream(described[0], description=TEXT),
                client.create_table(described[1], description=TEXT),
                *map(client.describe, described),
            ):
                assert made.description == TEXT
            write(client, table, b"new")
            check_meeting(meeting, stream, described)
            check_former_does_not_lead(log, pair, prefix)
            write(client, table, b"newer")
            wait_until(lambda: meeting.said("wrote")[-1]["rows"].get("newer") == "x", CALL_S)
            meeting.signal(signal.SIGTERM)
            meeting.wait_ended(CALL_S)
            assert meeting.status == 0, meeting.events[-3:]
            assert [each.quarantined for each in client.commands()] == [()]
    finally:
        pair.close()
