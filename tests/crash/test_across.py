"""A controller of two is killed or frozen at each logged step of a transaction over both, and at each message.

Each play is recorded once: all rounds and messages of both leaders. Then it is played again for each of them, with
a leader that is killed or frozen there. A frozen one wakes up when another one leads in its place, or only when all
is over; it has to end. A client that is patient gets the play's outcome. In any case each transaction ends alike at
both control partitions, with one timestamp, and its events are in both streams or in none.
"""

from __future__ import annotations

import itertools
import os
import re
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import pytest

import anabranch
from anabranch.errors import OutcomeUnknown, RetryError, TransactionAborted
from anabranch.ports import Log
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL, decode
from tests.conftest import Broker
from tests.crash.oracle import check_stream, read_status, read_stream, txn_rows
from tests.crash.test_zombies import FENCED
from tests.waiting import wait_until
from tests.workload.leader import Lead
from tests.workload.points import Point
from tests.workload.zygote import Child, Zygote

pytestmark = [pytest.mark.broker, pytest.mark.unsecured]

WHO = COORDINATOR, PARTICIPANT = 0, 1
NAMES = "coordinator", "participant"
KILL, FREEZE, SLEEP = "kill", "freeze until another leads", "freeze until all is over"
NOT_REACHED = "not reached"
SENDS = "send:*"
# By call and phase. What is frozen before an append or an end writes nothing more, whenever it wakes up; what is
# frozen after an end sends its messages late.
ACTIONS = {
    ("append:*", "before"): (KILL,),
    ("end:commit", "before"): (KILL, FREEZE),
    ("end:commit", "after"): (KILL, FREEZE, SLEEP),
    (SENDS, "before"): (KILL, FREEZE),
    (SENDS, "after"): (KILL, FREEZE),
}
ROUND = " of a round with "
CHUNK = ">chunk:"  # in the site of a step of a staged merge
SHOT = "one-shot"
GONE = "one-shot of a client that is gone"
CHUNK_BYTES, BIG = 20_000, 60  # events of 1 kB of noise: staged
PATIENCE_S, GIVES_UP_S = 60.0, 0.3
LAST_CALLS_S, OVER_S = 2.0, 10.0
MOST_ALIKE = 2  # calls of a kind in a play: how often a message is repeated is a matter of time
CUTS_A_PAIR = 20  # so that its logs stay short
TRIES, LANES = 3, 2
SECRET = bytes(range(32))


class Cut(NamedTuple):
    """What befalls which leader in which play, and where."""

    play: str
    who: int
    point: Point
    action: str

    @property
    def title(self) -> str:
        """For people."""
        point = self.point
        at = point.site.rpartition(ROUND)[2].strip("*")
        times = f" {point.n}" if point.n > 1 else ""
        return f"{self.play}: {NAMES[self.who]}: {self.action} {point.phase} {point.name}{times} ({at})"


@dataclass
class Pair:
    """Two control partitions, the leaders of each, one after another, and a client."""

    zygote: Zygote
    bootstrap: str
    log: Log
    folder: Path
    prefix: str = field(default_factory=lambda: f"x{uuid.uuid4().hex[:6]}")
    client: anabranch.Client = field(init=False)
    leaders: list[list[Child]] = field(default_factory=lambda: [[], []])
    tended: list[int] = field(default_factory=lambda: [*WHO])
    count: int = 0
    gives_up_s: float = GIVES_UP_S
    expected: dict[bytes, tuple[int, str]] = field(default_factory=dict)

    @property
    def streams(self) -> list[str]:
        """One at each control partition."""
        return [f"{name}-{self.prefix}/events" for name in NAMES]

    @contextmanager
    def led(self, *points: str) -> Iterator[Pair]:
        """With its streams; the client knows both control partitions. ``points``: of the first coordinator."""
        try:
            self.fork(COORDINATOR, points)
            self.fork(PARTICIPANT)
            for who in WHO:
                self.leaders[who][-1].wait_leading(PATIENCE_S)
            with anabranch.connect(self.bootstrap, prefix=self.prefix, lane=ADMIN_LANE) as operator:
                operator.feature_level(raise_to=LEVEL)
            self.client = anabranch.connect(self.bootstrap, prefix=self.prefix, timeout=PATIENCE_S)
            with self.client:
                for stream in self.streams:
                    self.client.create_stream(stream, 1)
                assert [*self.client.control_partitions(self.streams).values()] == [*WHO]
                one_shot(self, self.value("first"))
                yield self
        finally:
            for child in itertools.chain(*self.leaders):
                child.kill()

    def value(self, play: str) -> bytes:
        """What only the next transaction writes."""
        self.count += 1
        return b"%s %d %s" % (play.encode(), self.count, os.urandom(8).hex().encode())

    # -- leaders --------------------------------------------------------------------------------------

    def fork(self, who: int, points: tuple[str, ...] = (), trace: str = "") -> Child:
        """The next leader; one that was killed leaves its folder to it."""
        earlier = self.leaders[who]
        frozen = sum(not child.killed for child in earlier)
        spec = Lead(
            self.bootstrap,
            self.prefix,
            f"{NAMES[who]}-{len(earlier)}",
            folder=str(self.folder / f"{self.prefix}-{who}-{frozen}"),
            points=points,
            trace=trace,
            armed=False,
            again=False,
            chunk_bytes=CHUNK_BYTES,
            threads=True,
            control_partition=who,
            control_partitions=len(WHO),
        )
        earlier.append(self.zygote.fork(spec))
        return earlier[-1]

    def replace(self, who: int, points: tuple[str, ...] = (), trace: str = "") -> Child:
        """Another one leads, with these points; it counts calls once it is armed."""
        self.leaders[who][-1].kill()
        child = self.fork(who, points, trace)
        child.wait_leading(PATIENCE_S)
        return child

    def tend(self) -> None:
        """Where a leader has ended or stopped, the next one follows."""
        for who in self.tended:
            last = self.leaders[who][-1]
            if last.stopped or not last.running:
                self.fork(who)

    # -- one play -------------------------------------------------------------------------------------

    def play(self, name: str, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Play it to its end; where a leader is cut, the next one goes on."""
        value = self.value(name)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(PLAYS[name], self, value)
            while not running.done():
                self.tend()
                meanwhile()
                time.sleep(0.005)
            self.expected[value] = running.result()
        self.wait_settled()

    def cut(self, cut: Cut, number: int) -> bool:
        """Play it with this cut, and check all. Returns whether the cut came. ``number``: of the try."""
        # A busy machine may need longer until the client has sent its commands.
        self.gives_up_s = GIVES_UP_S * 4**number
        how = "kill" if cut.action == KILL else "stop"
        victim = self.replace(cut.who, (f"{how} {cut.point}",))
        victim.arm()

        def wake() -> None:
            last = self.leaders[cut.who][-1]
            if cut.action == FREEZE and victim.stopped and last is not victim and last.leading:
                victim.go_on()

        self.play(cut.play, wake)
        reached = self.was_cut(victim, cut.who)
        if not reached:
            victim.kill()  # else it would be cut in another play
        self.tend()
        if reached:
            self.leaders[cut.who][-1].wait_leading(PATIENCE_S)
            self.follow(victim)
        self.check_soon()
        return reached

    def was_cut(self, victim: Child, who: int) -> bool:
        """Whether it was killed or frozen. It may make its last calls when all can be read already."""

        def found() -> bool:
            return victim.stopped or not victim.running or victim is not self.leaders[who][-1]

        with suppress(AssertionError):
            wait_until(found, LAST_CALLS_S, pause=0.005)
        return found()

    def follow(self, victim: Child) -> None:
        """The next one commits. A leader that was frozen learns by its next round that it can't write, and ends."""
        if victim.stopped:
            victim.go_on()
        value = self.value("next")
        self.expected[value] = one_shot(self, value)
        until = time.monotonic() + PATIENCE_S
        while victim.running and time.monotonic() < until:
            value = self.value("next")
            self.expected[value] = one_shot(self, value)
        status = victim.status
        assert victim.killed or (status or 0) >> 8 == FENCED, f"it ended as {status}"

    # -- the checks -----------------------------------------------------------------------------------

    def states(self) -> list[dict[bytes, tuple[str, int]]]:
        """State and timestamp of each transaction, at each control partition."""
        found = []
        for who in WHO:
            rows = txn_rows(read_status(self.log, self.prefix, who, self.tend).rows)
            its: dict[bytes, tuple[str, int]] = {}
            for txn_id, data in rows.items():
                row: r.TxnRow = decode(data)
                its[txn_id] = (row.state, row.commit_timestamp)
            found.append(its)
        return found

    def wait_settled(self) -> None:
        wait_until(self.settled, PATIENCE_S, what=lambda: f"not over: {self.states()}")

    def settled(self) -> bool:
        """Whether all are over."""
        rows = itertools.chain(*(its.values() for its in self.states()))
        return all(state in ("COMMITTED", "ABORTED") for state, _ in rows)

    def check_soon(self) -> None:
        """`check` when all is over: answers come before the last row, and a lost client's command may come late."""
        until = time.monotonic() + OVER_S
        while True:
            self.wait_settled()
            try:
                return self.check()
            except AssertionError:
                if time.monotonic() >= until:
                    raise
            self.tend()
            time.sleep(0.1)

    def check(self) -> None:
        """Each transaction has one outcome, and what clients were answered is true. No leader has failed."""
        for child in itertools.chain(*self.leaders):
            assert child.running or child.killed or (child.status or 0) >> 8 == FENCED, child.events
        first, second = self.states()
        for txn_id in first.keys() & second.keys():
            ends = first[txn_id], second[txn_id]
            assert ends[0][0] == ends[1][0], f"{txn_id.hex()} has two outcomes: {ends}"
            assert ends[0][0] == "ABORTED" or ends[0] == ends[1], f"two timestamps: {ends}"
        logs = [read_stream(self.log, stream, self.tend) for stream in self.streams]
        for one in logs:
            check_stream(one)
        stamps = [
            {
                one.txn_id: one.timestamp
                for _, one in found.history
                if isinstance(one, r.CommitRecord)
            }
            for found in logs
        ]
        assert stamps[0] == stamps[1]
        told = {txn_id: at for txn_id, (state, at) in first.items() if state == "COMMITTED"}
        assert stamps[0].items() >= told.items()
        there = [Counter(event.value for event in found.events) for found in logs]
        for value, (count, allowed) in self.expected.items():
            seen = [its[value] for its in there]
            assert seen in ([count] * 2, [0] * 2), f"{value!r} is torn: {seen}"
            assert {count: "COMMITTED", 0: "ABORTED"}[seen[0]] in allowed, f"{value!r}: {seen}"


# -- plays: they return how often each stream has the value if it is committed, and the allowed outcomes ----------

Played = tuple[int, str]


def one_shot(pair: Pair, value: bytes) -> Played:
    """A command to each control partition."""

    def write(txn: anabranch.Transaction) -> None:
        for stream in pair.streams:
            txn.write(stream, value, key=b"k")

    pair.client.transact(write)
    return 1, "COMMITTED"


def abandoned(pair: Pair, value: bytes) -> Played:
    """The same, by a client that does not repeat anything."""

    def write(txn: anabranch.Transaction) -> None:
        for stream in pair.streams:
            txn.write(stream, value, key=b"k")

    try:
        pair.client.transact(write, timeout=pair.gives_up_s)
    except OutcomeUnknown:
        return 1, "COMMITTED or ABORTED"
    except (RetryError, TransactionAborted):
        return 1, "ABORTED"
    return 1, "COMMITTED"


def written(pair: Pair, value: bytes, count: int = 1) -> anabranch.Transaction:
    """A transaction that has written to both streams, through journals."""
    txn = pair.client.begin(pair.streams[COORDINATOR].partition("/")[0])
    for stream in pair.streams:
        for _ in range(count):
            txn.write(stream, value, key=b"k")
    txn.flush()
    return txn


def commit(pair: Pair, value: bytes) -> Played:
    """Through journals."""
    written(pair, value).commit()
    return 1, "COMMITTED"


def abort(pair: Pair, value: bytes) -> Played:
    """Before its commit."""
    written(pair, value).abort()
    return 1, "ABORTED"


def prepare(pair: Pair, value: bytes) -> Played:
    """First prepared, then committed by its id."""
    ready = written(pair, value).prepare(by=sha256(SECRET).digest(), attempt=b"1")
    pair.client.commit(ready.txn_id, secret=SECRET)
    return 1, "COMMITTED"


def stage(pair: Pair, value: bytes) -> Played:
    """Large enough to be staged at both."""
    txn = pair.client.begin(pair.streams[COORDINATOR].partition("/")[0])
    for stream in pair.streams:
        for _ in range(BIG):
            txn.write(stream, os.urandom(1000), key=b"n")
        txn.write(stream, value, key=b"k")
    txn.flush()
    txn.commit()
    return 1, "COMMITTED"


PLAYS: dict[str, Callable[[Pair, bytes], Played]] = {
    "commit": commit,
    SHOT: one_shot,
    GONE: abandoned,
    "abort": abort,
    "prepare, then commit": prepare,
    "staged commit": stage,
}


# -- the table ----------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A call of a leader in a play. ``holds``: what its round holds; empty: it is a message."""

    who: int
    point: Point
    holds: str


def steps(pair: Pair, play: str) -> list[Step]:
    """Each append and end of a round that holds rows, and each message, of both leaders in this play."""
    traces = [pair.folder / f"trace-{who}-{uuid.uuid4().hex[:6]}" for who in WHO]
    for who in WHO:
        pair.replace(who, trace=str(traces[who])).arm()
    pair.play(play)
    pair.check()
    found = []
    for who in WHO:
        pair.replace(who)
        calls = [*map(Point.parse, traces[who].read_text().splitlines())]
        # A one-shot is logged before its decision, and its messages are sent twice, only if answers are late.
        sent = messages(calls, 1 if play == SHOT else MOST_ALIKE)
        found += [Step(who, *each) for each in rounds(calls, "OPEN" if play == SHOT else "")]
        found += [Step(who, point, "") for point in sent]
    return found


def messages(calls: list[Point], most: int) -> Iterator[Point]:
    """Each message that is sent, up to this often of a kind."""
    counted = Counter(
        (message(kind), call.phase)
        for call in calls
        for kind in re.findall(r"control\.(\w+)", call.name)
        if call.phase == "after" or ROUND not in call.site  # it is logged, or made from memory
    )
    for (name, phase), count in counted.items():
        yield from (Point(name, "*", n, phase) for n in range(1, min(count, most) + 1))


def rounds(calls: list[Point], passed: str) -> Iterator[tuple[Point, str]]:
    """A point for each append and end of a round, and what the round holds. ``passed``: a kind that is passed over.

    A point is the n-th call of a round that holds a kind of row: the kind that the fewest rounds have, because time
    decides what else a round holds. A round with rows of streams alone is no step, as a stream's first staged merge
    adds a partition.
    """
    its = []
    for call in calls:
        _, inside, rows = call.site.rpartition(ROUND)
        kinds = {CHUNK} if CHUNK in call.site else {*rows.split("+")} if inside else set()
        where = call_of(call), call.phase
        if kinds - {"", "suspect", "stream"} and passed not in kinds and where[0] != SENDS:
            its += [(where, kinds)] if where in ACTIONS else []
    total = Counter((where, kind) for where, kinds in its for kind in kinds)
    seen: Counter[tuple[tuple[str, str], str]] = Counter()
    for where, kinds in its:
        seen.update((where, kind) for kind in kinds)
        kind = min(kinds, key=lambda kind: (total[where, kind], kind))
        site = f"*{CHUNK}*" if kind == CHUNK else f"*{ROUND}*{kind}*"
        if (n := seen[where, kind]) <= MOST_ALIKE:
            yield Point(where[0], site, n, where[1]), "+".join(sorted(kinds))


def message(kind: str) -> str:
    """The name of the call that sends a message of this kind, whatever is sent with it."""
    return f"send:*control.{kind}*"


def cuts(pair: Pair) -> list[Cut]:
    """The table: each step in the first play that has it, and those of a one-shot by a client that is gone, too."""
    done: set[Step] = set()
    found = []
    for play in PLAYS:
        its = [] if play == GONE else steps(pair, play)
        new = [(play, each) for each in its if each not in done]
        done.update(its)
        if play == SHOT:
            new += [(GONE, each) for each in its]
        found += [
            Cut(name, step.who, step.point, action)
            for name, step in new
            for action in actions(step.point)
        ]
    return found


def call_of(point: Point) -> str:
    """The call as `ACTIONS` names it, without what is appended or sent, as time decides what goes together."""
    return point.name if point.name.startswith("end:") else point.name.partition(":")[0] + ":*"


def actions(point: Point) -> tuple[str, ...]:
    """What befalls a leader at this point."""
    return ACTIONS[call_of(point), point.phase]


def run(
    make: Callable[[], Pair], todo: deque[Cut], wrong: dict[str, str], played: Counter[str]
) -> None:
    """Run cuts on a pair until none is left; after one that fails, on a new pair."""
    while todo:
        with make().led() as pair, suppress(IndexError):
            for _ in range(CUTS_A_PAIR):
                cut = todo.popleft()
                try:
                    reached = any(pair.cut(cut, number) for number in range(TRIES))
                except Exception as error:  # noqa: BLE001 - reported with its cut, after all others
                    wrong[cut.title] = f"{type(error).__name__}: {error}"
                    break
                played[cut.action if reached else NOT_REACHED] += 1


@pytest.fixture
def make(broker: Broker, zygote: Zygote, log: Log, tmp_path: Path) -> Callable[[], Pair]:
    """A new pair."""
    return lambda: Pair(zygote, broker.bootstrap, log, tmp_path)


def at(play: str, who: int, name: str, rows: str, phase: str, action: str) -> Cut:
    """A cut of the short table."""
    return Cut(play, who, Point(name, f"*{ROUND}{rows}" if rows else "*", 1, phase), action)


FEW = [
    at("commit", PARTICIPANT, message("Vote"), "", "after", FREEZE),
    at("commit", COORDINATOR, "end:commit", "FINALIZE_IN_PROGRESS*", "before", KILL),
]


@pytest.mark.slow(8)
@pytest.mark.timeout(300)
def test_a_controller_is_cut_between_messages(make: Callable[[], Pair]) -> None:
    wrong: dict[str, str] = {}
    run(make, deque(FEW), wrong, played := Counter[str]())
    assert not wrong
    assert not played[NOT_REACHED]


@pytest.mark.slow(5)
@pytest.mark.timeout(300)
def test_a_dead_coordinator_blocks_only_what_was_written_or_locked(
    make: Callable[[], Pair],
) -> None:
    dies = f"kill {message('AskVote')}|*|1|after"
    with make().led(dies) as pair, ThreadPoolExecutor(1) as pool:
        client, second = pair.client, pair.streams[PARTICIPANT]
        home, table = (f"{stream.partition('/')[0]}/rows" for stream in pair.streams)
        other = second.replace("events", "other")
        client.create_stream(other, 1)
        client.create_table(home)
        client.create_table(table)
        with client.replica(home, table) as rows, client.replica(table) as its:
            its.transact(lambda txn: [txn.put(table, key, b"0") for key in (b"locked", b"free")])

            def both(txn: anabranch.TableTransaction) -> None:
                txn.put(home, b"k", b"both")
                txn.write(second, b"both")
                txn.get(table, b"locked")

            def add(stream: str, timeout: float | None = None) -> None:
                client.transact(lambda txn: txn.write(stream, b"alone"), timeout=timeout)

            def put(key: bytes, timeout: float | None = None) -> None:
                its.transact(lambda txn: txn.put(table, key, b"1"), timeout=timeout)

            rows.transact(both)
            pair.tended = [PARTICIPANT]
            coordinator = pair.leaders[COORDINATOR][0]
            coordinator.arm()
            waiting = pool.submit(rows.transact, both)
            coordinator.wait_ended(PATIENCE_S)
            wait_until(lambda: "PREPARED" in [state for state, _ in pair.states()[1].values()])
            add(other)
            put(b"free")
            assert len(list(client.snapshot([other]).read(other))) == 1
            with pytest.raises(RetryError):
                add(second, 0.5)
            with pytest.raises(RetryError):
                put(b"locked", 0.5)
            assert not waiting.done()
            pair.tended = [*WHO]
            pair.tend()
            assert waiting.result().commit_timestamp
            add(second)
            put(b"locked")
            assert len(list(client.snapshot([second]).read(second))) == 3 + 1


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_controller_is_cut_at_each_step_and_message(
    make: Callable[[], Pair], subtests: pytest.Subtests, measured: Callable[[str], None]
) -> None:
    started = time.monotonic()
    with make().led() as pair:
        table = cuts(pair)
    todo, wrong, played = deque(table), dict[str, str](), Counter[str]()
    with ThreadPoolExecutor(LANES) as pool:
        for lane in [pool.submit(run, make, todo, wrong, played) for _ in range(LANES)]:
            lane.result()
    measured(f"{len(table)} cuts: {dict(played)} in {time.monotonic() - started:.0f} s")
    for title, why in wrong.items():
        with subtests.test(title):
            pytest.fail(why, pytrace=False)
    # What a round holds beside others, and when the client that is gone gives up, are a matter of time.
    assert played[NOT_REACHED] <= len(table) / 5
