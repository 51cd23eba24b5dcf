"""Commits that wait for transactions across control partitions, in the real decisions, turn by turn.

The rows of a participant are planted: its coordinator is played by the test.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.across.holds import KEPT_MS
from anabranch.core.decisions.across import holding
from anabranch.core.decisions.across.holding import AHEAD_MS
from anabranch.core.decisions.scale import partitions_added
from anabranch.core.decisions.transactions import abort_txn
from anabranch.core.history_records import Tail, history_records
from anabranch.core.locks.table_writes import Keys, fingerprint
from anabranch.core.memory import wait_text
from anabranch.core.round import Landed
from anabranch.core.transaction_states import born
from anabranch.protocol import limits
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.harness import event
from tests.core.labels import SECRET
from tests.core.test_table_locks import PLAIN, A, B, Bank

ROW = b"k"
DIGEST = Keys.of([ROW]).to_bytes()


class Held(Bank):
    """Two tables and a stream of a participant. X, Y, …: transactions whose coordinator is elsewhere."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.log_rows([(k.FEATURE_KEY, r.FeatureRow(4, 1))])
        self.rounds.clear()
        self.known: dict[str, r.OneShot] = {}

    # -- what a coordinator lets happen --------------------------------------------------------------

    def open(self, label: str, *streams: str) -> None:
        self.begin(label)
        for stream in streams:
            self.touch(label, stream)
            epoch = self.state.open[self.id(label)].participants[stream]
            place = self.state.layout(stream, epoch)[0].partition
            self.write(label, label, stream, epoch=epoch, partition=place, digest=DIGEST)

    def promise(self, label: str, *streams: str, ahead_ms: int = 0) -> int:
        """A transaction is prepared, and promises a prepare timestamp, which holds these streams.

        ``ahead_ms``: how long decisions have taken lately.
        """
        self.open(label, *streams)
        prepares = replace(
            self.committing(label, own=[self.receipt(label, label)]), prepare=r.Prepare(b"", b"")
        )
        self.ask("prepare", prepares)
        turn = self.new_turn()
        turn.across.decision_ms = ahead_ms
        at = holding.prepare_timestamp(turn)
        turn.put(k.coordinator_key(self.id(label)), r.CoordinatorRow(1, at, staged=True))
        holding.put_entry(turn, self.id(label))
        self.close(turn)
        return at

    def decide(self, label: str, later: int = 0) -> int:
        """It is decided, at its prepare timestamp or ``later``."""
        turn, txn_id = self.new_turn(), self.id(label)
        its = turn.state.coordinator_row(txn_id)
        assert its is not None
        at = its.prepare_timestamp + later
        turn.hybrid_time = max(turn.hybrid_time, at)
        row = turn.move(turn.row(txn_id), "begin_commit", commit_timestamp=at)
        turn.put(k.txn_key(txn_id), row)
        holding.put_entry(turn, txn_id)
        self.close(turn)
        return at

    def give_up(self, label: str) -> None:
        turn = self.new_turn()
        abort_txn(turn, self.id(label), "its coordinator says so")
        self.close(turn)

    def grow(self) -> None:
        """The shell adds the partitions that scalings and rolling commits need."""
        for stream, row in self.state.streams.items():
            if row.wanted_partitions > row.partitions:
                turn = self.new_turn()
                partitions_added(turn, stream, row.wanted_partitions)
                self.close(turn)

    # -- commits of this control partition ------------------------------------------------------------

    def shot(self, label: str, *streams: str, locks: tuple[r.TableLocks, ...] = ()) -> str:
        events = tuple(event(stream, ROW) for stream in streams)
        self.known[label] = r.OneShot(self.id(label), "nyc", None, events, None, locks)
        return self.send(label)

    def send(self, label: str) -> str:
        return self.ask(label, self.known[label])

    def commits(self, label: str, *streams: str) -> None:
        """A commit through journals, which is decided, and merged unless it has to wait."""
        self.open(label, *streams)
        self.commit(label, own=[self.receipt(label, label)], wait_ms=60_000)
        self.turn()

    def read(self, table: str) -> r.TableLocks:
        """A lock on the row, by a replica: as of a reply's time, or of the newest commit of a held table."""
        told = self.asked_for(r.SafeTime("nyc", None, (table,), (PLAIN,)))
        last = self.state.tables[table].last
        since = told.timestamp if told.tables else last
        return r.TableLocks(table, since, last, (fingerprint(ROW),), ())

    def safe(self, stream: str, at: int | None = None) -> tuple[int, bool]:
        told = self.asked_for(r.SafeTime("nyc", at, (), (stream,)))
        return told.timestamp, told.safe

    def asked_for(self, command: Any) -> Any:
        """The answer to a question. Others may be answered in the same turn."""
        self.ask("question", command)
        return next(result for to, result in self.said if to.correlation_id == b"question")

    # -- what became of it ----------------------------------------------------------------------------

    def merged(self, stream: str) -> list[tuple[int, bytes]]:
        """(timestamp, transaction) of a stream's commits, in the order of its history."""
        return [
            (step.timestamp, step.txn_id)
            for round_ in self.rounds
            for step in round_.commits
            if step.stream == stream
        ]

    def times(self, stream: str) -> list[int]:
        """The timestamps of a stream's history, of EPOCH records, too."""
        steps = [step for round_ in self.rounds for step in round_.history]
        return [step.timestamp for step in steps if step.stream == stream]

    def names(self, stream: str) -> str:
        return " ".join(
            "plain" if txn_id == NO_TXN else self.label(txn_id) for _, txn_id in self.merged(stream)
        )


@pytest.fixture
def world() -> Held:
    return Held()


def one_shot(world: Held, stream: str) -> None:
    world.shot("S", stream)


def journal(world: Held, stream: str) -> None:
    world.commits("S", stream)


def plain(world: Held, stream: str) -> None:
    world.write_plainly(stream, digest=DIGEST)
    world.turn()


def big(world: Held, stream: str) -> None:
    """A staged merge: it waits at its end alone, with all that it has copied."""
    world.begin("S")
    world.touch("S", stream)
    world.write("S", "S", stream, digest=DIGEST, size=1 << 30)
    world.commit("S", own=[world.receipt("S", "S")])
    world.turn()
    world.grow()
    world.wait(60)
    for (name, number), row in list(world.state.open[world.id("S")].staged_merges.items()):
        done = replace(row, cursor=1 << 40, first=0, end=1, count=1, done=True)
        world.log_rows([(k.staged_merge_key(world.id("S"), name, number), done)])
    world.wait(60)


@pytest.mark.parametrize("way", [one_shot, journal, plain, big])
def test_who_writes_a_held_stream_waits_for_the_decision(way: Any) -> None:
    for stream, first in ((A, "X S"), (B, "S")):
        world = Held()
        world.promise("X", A)
        way(world, stream)
        assert world.names(stream) == ("" if stream == A else first.replace("S", _name(way)))
        world.decide("X")
        world.turn()
        world.wait(60)
        assert world.names(A) == ("X S" if stream == A else "X").replace("S", _name(way))
        assert world.merged(stream) == sorted(world.merged(stream))
        assert not world.memory.holds.in_use, "nothing is left when all is merged"


def _name(way: Any) -> str:
    return "plain" if way is plain else "S"


def prepared(world: Held, stream: str) -> None:
    events = (event(stream, ROW),)
    command = r.PrepareEvents(world.id("S"), "nyc", None, events, SECRET, r.Prepare(b"", b""))
    world.ask("prepare", command)
    world.commit("S")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("way", [one_shot, journal, plain, prepared])
def test_until_a_decision_is_due_nobody_waits_for_it(way: Any, is_late: bool) -> None:
    """A prepare timestamp is ahead of the clock (H9). From then on the next timestamp is later, and has to wait."""
    world = Held()
    world.promise("X", A, ahead_ms=AHEAD_MS)
    assert world.safe(A)[1]
    if is_late:
        world.wall_us += 1000 * AHEAD_MS + 1_000  # hybrid time is lower still
    way(world, A)
    assert world.names(A) == ("" if is_late else _name(way))
    world.decide("X")
    world.turn()
    world.wait(60)
    if way is prepared and is_late:
        world.commit("S")
    assert world.names(A) == ("X S" if is_late else "S X").replace("S", _name(way))
    assert world.merged(A) == sorted(world.merged(A))


def test_a_merge_goes_in_the_order_of_timestamps_and_ids(world: Held) -> None:
    """Two coordinators chose the same time. Y waits for X, whose id is lower, and which waits for Z itself."""
    world.promise("Z", B)
    first, second = world.promise("X", A, B), world.promise("Y", A)
    world.decide("X", later=second - first)
    world.decide("Y")
    world.turn()
    assert world.names(A) == ""
    world.decide("Z")
    world.turn()
    world.turn()
    assert (world.names(A), world.names(B)) == ("X Y", "Z X")
    assert {at for at, _ in world.merged(A)} == {second}


def test_a_waiting_commit_keeps_its_timestamp_for_a_while(world: Held) -> None:
    """Later promises hold nothing that waits already (H4)."""
    world.promise("X", A)
    assert world.shot("S", A) == ""
    world.commits("C", A)
    for label in ("Y", "Z"):
        world.promise(label, A)
    world.decide("X")
    assert "S COMMITTED 1" in world.turn()
    world.turn()
    assert world.names(A) == "X S C"


@pytest.mark.parametrize("left_ms", [1, 0])
def test_it_gives_its_timestamp_back_after_that(world: Held, left_ms: int) -> None:
    """… since what waits for it would wait for the coordinator, too: here T, which writes B alone."""
    world.promise("X", A)
    world.shot("S", A, B)
    world.wait(1)
    world.shot("T", B)
    said = world.wait(KEPT_MS - 1 - left_ms)
    assert said == ("" if left_ms else "[S] NotReady; [T] T COMMITTED 1")
    assert world.memory.holds.due_ms(world.now_ms) == (1 if left_ms else None)
    if not left_ms:
        assert world.send("S") == "", "it is sent again, and waits again"
        world.decide("X")
        assert world.turn() == "[S] S COMMITTED 2"


def test_a_timestamp_that_nothing_logs_is_not_given_again(world: Held) -> None:
    """The turn in which S begins to wait has nothing to log. Its id is higher than that of T."""
    world.promise("X", A)
    world.id("T")
    world.shot("S", A, B)
    assert world.round.empty
    assert world.shot("T", B) == "", "it has a later timestamp than S, so it waits for S"


def test_a_prepared_one_shot_is_not_committed_into_a_held_stream(world: Held) -> None:
    """Its events are in a row, and it is merged in the round of its decision."""
    events = (event(A, ROW),)
    prepares = r.PrepareEvents(world.id("S"), "nyc", None, events, SECRET, r.Prepare(b"", b""))
    assert world.ask("prepare", prepares) == "S PREPARED 1"
    world.promise("X", A)
    assert world.commit("S") == "NotReady"
    world.decide("X")
    world.turn()
    assert world.commit("S") == "S COMMITTED 1"
    assert world.names(A) == "X S"


def test_a_new_leader_holds_the_same_streams(world: Held) -> None:
    world.promise("X", A)
    world.shot("S", A)
    for keep_table in (True, False):
        world.lead(keep_table=keep_table)
        assert world.shot("S", A) == "", "the client repeats what nobody has answered"
        world.commits(f"C{keep_table}", A)
    world.decide("X")
    world.turn()
    world.wait(60)
    assert world.names(A) == "X S CTrue CFalse"


def test_a_scaling_does_not_wait(world: Held) -> None:
    """Its EPOCH record has no later time than what is still to be merged, so the history's times rise (H6)."""
    world.promise("X", A)
    world.ask("scale", r.Scale(A, 3, (), ()))
    world.grow()
    assert len(world.state.streams[A].segments) == 3
    world.decide("X")
    for _ in range(3):
        world.wait(300)
        world.grow()
    assert (world.names(A), world.times(A)) == ("X", sorted(world.times(A)))


def test_a_commit_waits_for_the_tables_that_it_locks(world: Held) -> None:
    """Else X would write, at an earlier time, what S has read (L1)."""
    locks = (world.read(A),)
    world.promise("X", A)
    assert world.shot("S", PLAIN, locks=locks) == ""
    world.decide("X")
    assert world.turn() == "[S] revalidate"
    assert world.shot("S", PLAIN, locks=(world.read(A),)) == "S COMMITTED 1"


def test_a_safe_time_is_of_streams_and_is_fixed(world: Held) -> None:
    at = world.promise("X", A)
    fixed, safe = world.safe(A)
    assert fixed >= at
    assert not safe
    assert world.safe(A, at - 1) == (at - 1, True)
    assert world.safe(B)[1], "another stream is not held"
    assert world.ask("old", r.SafeTime("nyc", None)) == "NotReady", "a client that names no stream"
    world.promise("Y", A)
    world.decide("X")
    world.turn()
    assert world.safe(A, fixed) == (fixed, True), "what came later does not matter"


def test_the_newest_commit_of_a_held_table_is_not_told(world: Held) -> None:
    world.promise("X", A)
    world.ask("now", r.SafeTime("nyc", None, (A, B), (B,)))
    assert [each.table for each in world.result.tables] == [B]


def test_a_record_says_what_is_complete(world: Held) -> None:
    """`CommitRecord.safe` of another stream's record, while A is held."""
    at = world.promise("X", A)
    world.shot("S", B)
    (step,) = world.round.commits
    (record,) = history_records(world.round, {(0, 0): Landed(0, 1, 1)}, {B: Tail()})[B]
    assert record.safe == at - 1
    assert step.timestamp > at
    world.ask("scale", r.Scale(B, 3, (), ()))
    world.grow()
    (record,) = history_records(world.round, {}, {B: Tail()})[B]
    assert isinstance(record, r.EpochRecord)
    assert record.safe == at - 1
    world.decide("X")
    world.turn()
    assert (world.round.safe, world.names(A)) == (0, "X")


def test_a_wait_can_be_seen(world: Held) -> None:
    """A participant's rows as they are, of a transaction of control partition 3."""
    txn_id = world.id(world.new_id("X", partition=3))
    row = born("begin", txn_id, world.wall_ms, scope="nyc", owner="open", secret=b"s" * 32)
    world.log_rows(
        [
            (k.txn_key(txn_id), row._replace(state="PREPARED")),
            (k.coordinator_key(txn_id), r.CoordinatorRow(1, world.state.round.hybrid_time)),
            (k.participant_key(txn_id, A), r.ParticipantRow(A, 0)),
        ]
    )
    world.lead()
    world.commits("C", A)
    wait = world.new_turn().wait_of(world.id("C"))
    assert wait is not None
    assert wait_text(world.memory, wait) == (
        "it waits for the decision of control partition 3 on nyc/a"
    )
    world.ask("list", r.ListOpen("nyc", world.id("C"), 100))
    assert world.result.transactions[0].waits.stream == A


def test_the_number_of_waiting_one_shots_has_a_limit(
    world: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HELD_COMMANDS", limits.HELD_COMMANDS._replace(value=1))
    world.promise("X", A)
    assert world.shot("S", A) == ""
    assert world.shot("T", A) == "NotReady"
    assert world.send("S") == "", "the same command again takes the place of the former"
    world.decide("X")
    assert world.turn() == "[S] S COMMITTED 1"


# -- against a brute force ------------------------------------------------------------------------------

some_streams = st.sets(st.sampled_from((A, B, PLAIN)), min_size=1, max_size=2).map(sorted)
one_stream = st.sampled_from((A, B, PLAIN))
happenings = st.lists(
    st.one_of(
        st.tuples(st.just("promise"), st.tuples(some_streams, st.sampled_from((0, 3, 30)))),
        st.tuples(st.just("decide"), st.integers(0, 20)),
        st.tuples(st.just("give_up"), st.just(0)),
        st.tuples(st.just("shot"), some_streams),
        st.tuples(st.just("reads"), st.sampled_from((A, B))),
        st.tuples(st.just("commits"), some_streams),
        st.tuples(st.just("plain"), one_stream),
        st.tuples(st.just("scale"), one_stream),
        st.tuples(st.just("safe"), one_stream),
        st.tuples(st.just("wait"), st.integers(1, 120)),
        st.tuples(st.just("lead"), st.booleans()),
    ),
    min_size=4,
    max_size=24,
)


class Run:
    """A random life of a participant, and what must hold in its histories at the end."""

    def __init__(self) -> None:
        self.world = Held(retention_ms=1 << 50)
        self.open: list[str] = []
        self.shots: dict[str, r.TableLocks | None] = {}
        self.decided: dict[str, int] = {}
        self.asked: list[tuple[str, int]] = []
        self.safe: list[tuple[str, int, int]] = []  # stream, time, commits up to it
        self.labels = 0

    def new(self) -> str:
        self.labels += 1
        return f"T{self.labels}"

    def happen(self, what: str, arg: Any) -> None:
        world = self.world
        if what == "promise":
            self.open.append(label := self.new())
            streams, ahead_ms = arg
            world.promise(label, *streams, ahead_ms=ahead_ms)
        elif what == "decide" and self.open:
            label = self.open.pop(0)
            # Up to 5 ms later, and at no other's time: each step of a life takes a millisecond.
            self.decided[label] = world.decide(label, arg * 1_024_007)
        elif what == "give_up" and self.open:
            world.give_up(self.open.pop())
        elif what == "shot":
            self.shots[label := self.new()] = None
            world.shot(label, *arg)
        elif what == "reads":
            self.reads(self.new(), arg)
        elif what == "commits":
            world.commits(self.new(), *arg)
        elif what == "plain":
            world.write_plainly(arg, digest=DIGEST)
        elif what == "scale":
            world.ask("scale", r.Scale(arg, 1 + self.labels % 3, (), ()))
        elif what == "safe":
            self.asked.append((arg, world.safe(arg)[0]))
        elif what == "wait":
            world.wait(arg)
        elif what == "lead":
            world.lead(keep_table=arg)
        world.wait(1)
        self.ask_again()

    def ask_again(self) -> None:
        for stream, at in list(self.asked):
            if self.world.safe(stream, at)[1]:
                self.asked.remove((stream, at))
                self.safe.append((stream, at, self.count(stream, at)))

    def reads(self, label: str, table: str) -> None:
        self.shots[label] = lock = self.world.read(table)
        self.safe.append((table, lock.since, self.count(table, lock.since)))
        self.world.shot(label, PLAIN, locks=(lock,))

    def count(self, stream: str, at: int) -> int:
        return sum(time <= at for time, _ in self.world.merged(stream))

    def finish(self) -> None:
        """All is decided, and clients repeat what was not answered."""
        for _ in range(len(self.open)):
            self.happen("decide", 1)
        for _ in range(6):
            self.world.wait(300)
            self.world.grow()
            for label, lock in self.shots.items():
                if self.world.state.txn_row(self.world.id(label)) is None:
                    if lock is None:
                        self.world.send(label)
                    else:  # it was answered that its row may have changed: it is read again
                        self.reads(label, lock.table)
        self.ask_again()

    def check(self) -> None:
        world = self.world
        assert not world.memory.holds.in_use, "nothing is left when all is decided"
        times: dict[bytes, set[int]] = {}
        for stream in (A, B, PLAIN):
            merged = world.merged(stream)
            ours = [(at, txn_id) for at, txn_id in merged if txn_id != NO_TXN]
            assert ours == sorted(ours), stream
            assert max(Counter(txn_id for _, txn_id in ours).values(), default=1) == 1
            for at, txn_id in ours:
                times.setdefault(txn_id, set()).add(at)
            steps = world.times(stream)
            assert steps == sorted(steps), "timestamps never fall along a history (H6)"
        assert all(len(its) == 1 for its in times.values()), "one timestamp everywhere"
        for label, at in self.decided.items():
            assert times[world.id(label)] == {at}, "as its coordinator decided"
        for label in self.shots:
            assert world.row(label).state == "COMMITTED"
        for stream, at, count in self.safe:
            assert self.count(stream, at) == count, "more was merged below a safe time"
        assert not self.asked, "a fixed time is safe in the end"
        for label, lock in self.shots.items():
            if lock is not None:
                (mine,) = times[world.id(label)]
                late = [at for at, _ in world.merged(lock.table) if lock.since < at < mine]
                assert not late, "what it read had changed when it committed"


@settings(max_examples=some(25), deadline=None, print_blob=True)
@given(happenings)
def test_merges_are_as_if_all_timestamps_were_known(lives: list[tuple[str, Any]]) -> None:
    run = Run()
    for what, arg in lives:
        run.happen(what, arg)
    run.finish()
    run.check()
