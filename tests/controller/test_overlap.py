"""A round is decided while the one before it is being written, and is written only once that one has happened."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller import controller as controller_module
from anabranch.controller import suspects
from anabranch.controller.controller import OVERLAP_S
from anabranch.core import rows as k
from anabranch.core.decisions import decide as entrance
from anabranch.core.journal_runs import txn_of
from anabranch.core.locks.table_writes import fingerprint
from anabranch.core.rows import read_row
from anabranch.ports import LogBusy, LogFenced, LogUncertain, TableError, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import WAIT_HEADER
from anabranch.protocol.legal_names import ADMIN_LANE, OPEN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.testing.memory.producer import MemoryProducer
from anabranch.testing.memory.table import MemoryStore
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import (
    commands_topic,
    journal_topic,
    status_topic,
    stream_topic,
)
from tests.controller.test_poison_commands import BAD, failing
from tests.controller.world import World

STREAM, OTHER = "nyc/a", "nyc/b"
LANE = "etl"


@pytest.fixture(params=["answers at once", "answers late"], autouse=True)
def answers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Brokers answer while the next round is decided, or only when the leader waits for them."""
    late = request.param == "answers late"
    monkeypatch.setattr(MemoryProducer, "is_answered", lambda _: not late)
    monkeypatch.setattr(MemoryProducer, "_is_slow", lambda _: late)
    monkeypatch.setattr(controller_module, "ADVANCE_EVERY", 1)


class Play:
    """A leader with two streams, whose rounds overlap, and all commands that it was sent."""

    def __init__(self, **settings: Any) -> None:
        self.world = World()
        self.store = MemoryStore()
        self.leader = self.world.led(store=self.store, **settings)
        self.world.stream(self.leader, STREAM)
        self.world.stream(self.leader, OTHER)
        self.leader.overlap_from = 1
        self.sent: dict[bytes, Any] = {}

    def send(self, *commands: Any, lane: str = OPEN_LANE, **how: Any) -> list[bytes]:
        asked = [self.world.send(command, lane=lane, **how) for command in commands]
        self.sent.update(zip(asked, commands, strict=True))
        return asked

    def shot(self, stream: str = STREAM, name: str | None = None, key: bytes = b"k") -> r.OneShot:
        return self.world.one_shot(stream, key, name=name)

    def shots(self, count: int, stream: str = STREAM) -> list[r.OneShot]:
        return [self.shot(stream) for _ in range(count)]

    def leave_under_way(self, *commands: Any, **how: Any) -> list[bytes]:
        """Decide these commands, and one more, in a round that is then being written."""
        asked = self.send(*commands, self.shot(OTHER), **how)
        self.step()
        assert self.leader._under_way is not None
        assert all(self.world.reply(each) is None for each in asked)
        return asked[: len(commands)]

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.leader.step(0)

    def lead_anew(self) -> None:
        """Another process takes over, with an empty table."""
        self.leader = self.world.led("d")
        self.leader.overlap_from = 1

    def until_answered(self, asked: Sequence[bytes], *, seconds: float = 0.0) -> None:
        """Step until all commands are answered. A client asks again if its answer was lost."""
        missing = list(asked)
        for count in range(40):
            missing = [each for each in missing if not self.world.replies(each)]
            if not missing:
                return
            if count == 20:
                for each in missing:
                    self.world.send(self.sent[each], again=each)
            self.step()
            self.world.clock.sleep(seconds)
        raise AssertionError(f"{len(missing)} commands have no answer")

    def answers(self, asked: Sequence[bytes]) -> list[Any]:
        return [self.world.reply(each) for each in asked]

    def states(self, asked: Sequence[bytes]) -> list[str]:
        """The answers: a transaction's state, or the code of a refusal."""
        answers = self.answers(asked)
        return [getattr(x, "state", getattr(x, "code", type(x).__name__)) for x in answers]

    def events(self, stream: str = STREAM) -> int:
        places = [TopicPartition(stream_topic(stream), p) for p in (0, 1)]
        return sum(len(self.world.committed(place)) for place in places)

    def begun(self, keepalive_ms: int = 60_000) -> tuple[bytes, bytes]:
        """(id, token) of a transaction."""
        txn_id, token, _ = self.world.begin(self.leader, STREAM, keepalive_ms=keepalive_ms)
        self.finish()
        return txn_id, token

    def finish(self) -> None:
        """Step until no round is under way."""
        for _ in range(5):
            self.step()
            if self.leader._under_way is None:
                return
        raise AssertionError("there is no end of rounds")

    def rounds(self) -> list[r.RoundRow]:
        """The rounds on the log, the oldest first."""
        log = self.world.committed(TopicPartition(status_topic(), 0))
        return [read_row(x.key, x.value) for x in log if x.key == k.ROUND_KEY and x.value]

    def check_rounds(self) -> None:
        """Neither time nor a position goes back from one round to the next."""
        rows = [(row.hybrid_time, row.commands_offset) for row in self.rounds()]
        assert rows == sorted(rows)


def on_nth(play: Play, call: str, nth: int, error: Exception) -> None:
    """Raise an error at the n-th such call of a port, once."""
    count = 0

    def called(_: str, what: str) -> None:
        nonlocal count
        count += what == call
        if what == call and count == nth:
            raise error

    play.world.cluster.on_call = called


# -- what the next round sees -------------------------------------------------------------------------


def test_rounds_overlap_as_long_as_there_are_commands() -> None:
    play = Play()
    asked = play.leave_under_way(*play.shots(3))
    for _ in range(3):
        before = play.leader.rounds
        asked += play.send(*play.shots(20))
        play.step()
        assert play.leader._under_way is not None
        assert play.leader.rounds == before + 1, "the former round is finished, in one pass"
    play.finish()
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.events() == len(asked)
    play.check_rounds()


def test_a_lone_command_and_an_idle_leader_leave_nothing_under_way() -> None:
    play = Play()
    asked = play.send(play.shot())
    play.step()
    assert play.leader._under_way is None
    assert play.states(asked) == ["COMMITTED"]
    asked = play.leave_under_way(play.shot())
    play.step()
    assert play.leader._under_way is None
    assert play.states(asked) == ["COMMITTED"]


def test_a_name_is_taken_for_the_next_round() -> None:
    play = Play()
    first = play.leave_under_way(play.shot(name="x"))
    second = play.send(play.shot(name="x"), play.shot(name="y"))
    play.finish()
    (holder,), (again, other) = map(play.answers, (first, second))
    assert holder.state == again.state == other.state == "COMMITTED"
    assert again.txn_id == holder.txn_id != other.txn_id, "the name is the former one's"
    assert play.events() == 2


def test_a_command_that_is_repeated_meanwhile_has_one_outcome() -> None:
    play = Play()
    shot = play.shot()
    first = play.leave_under_way(shot)
    second = play.send(shot, play.shot())
    play.finish()
    (one,), (other,) = play.world.replies(first[0]), play.world.replies(second[0])
    assert one.commit_timestamp == other.commit_timestamp > 0
    assert play.events() == 2


def test_a_series_continues_in_the_next_round() -> None:
    play = Play()
    tokens = [play.begun()[1] for _ in range(3)]

    def commit(token: bytes, number: int) -> r.Commit:
        return r.Commit(token, (), None, "s", 60_000, number)

    first = play.leave_under_way(commit(tokens[0], 1))
    second = play.send(commit(tokens[1], 1), commit(tokens[2], 2))
    play.finish()
    play.step(3)
    (holder,), (again, other) = map(play.answers, (first, second))
    assert holder.state == again.state == other.state == "COMMITTED"
    assert again.txn_id == holder.txn_id != other.txn_id, "the number is the former one's"


@pytest.mark.parametrize("key", [b"read", b"not read"])
def test_a_lock_is_broken_by_a_write_of_the_round_before(key: bytes) -> None:
    play = Play()
    play.leader.overlap_from = 0
    play.world.ask(play.leader, r.CreateStream("nyc/t", 1, {"table": "true"}))
    play.world.ask(play.leader, play.shot("nyc/t", key=b"read"))
    now = play.world.ask(play.leader, r.SafeTime("nyc", None, ("nyc/t",)))
    play.leader.overlap_from = 1
    locks = r.TableLocks("nyc/t", now.timestamp, now.tables[0].last, (fingerprint(b"read"),), ())
    transfer = play.shot("nyc/t", key=b"other")._replace(locks=(locks,))
    first = play.leave_under_way(play.shot("nyc/t", key=key))
    second = play.send(transfer, play.shot())
    play.finish()
    assert play.states(first) == ["COMMITTED"]
    broken = play.states(second)[0] != "COMMITTED"
    assert broken is (key == b"read")


def test_signs_of_life_of_both_rounds_count() -> None:
    play = Play()
    one, token = play.begun(keepalive_ms=10_000)
    other, later = play.begun(keepalive_ms=10_000)
    play.world.clock.now += 8
    play.step()
    play.leave_under_way(r.Heartbeat((token,)))
    play.world.clock.now += 1
    now_ms = int(play.world.clock.monotonic() * 1000)
    play.send(r.Heartbeat((later,)), play.shot())
    play.finish()
    heard = play.leader._memory.keepalives
    assert (heard.last(one), heard.last(other)) == (now_ms - 1000, now_ms)
    play.world.clock.now += 9.5
    play.step(3)
    assert one not in play.leader.state.open, "its heartbeat was 10.5 seconds ago"
    assert other in play.leader.state.open


def test_a_transaction_that_the_former_round_begins_is_ended_by_the_next_one() -> None:
    play = Play()
    txn_id, token = play.begun()
    play.leave_under_way(r.Touch(token, OTHER))
    asked = play.send(r.Abort(token, "enough", None), play.shot())
    play.finish()
    assert play.states(asked) == ["ABORTED", "COMMITTED"]
    assert txn_id not in play.leader.state.open
    assert play.leader._memory.keepalives.heard.get(txn_id, None) is None


def plain(play: Play, value: bytes) -> None:
    record = Record(0, 1_000, b"key", value, ())
    play.world.cluster.produce(TopicPartition(journal_topic(STREAM), 0), [record])


def test_plain_writes_of_overlapping_rounds_are_committed_once_each() -> None:
    play = Play()
    for number in range(5):
        plain(play, b"%d" % number)
        if number == 0:
            play.leave_under_way(play.shot())
        else:
            play.send(*play.shots(2))
            play.step()
    play.finish()
    play.step(4)
    values = [
        record.value or b""
        for p in (0, 1)
        for record in play.world.committed(TopicPartition(stream_topic(STREAM), p))
        if record.key == b"key"
    ]
    assert sorted(values) == [b"%d" % number for number in range(5)]


def test_a_commit_that_waits_for_its_journal_is_merged_by_a_later_round() -> None:
    events = [(b"k%d" % n, b"v") for n in range(8)]
    twin = Play()  # its ids and offsets are the same
    txn_id, _, touched = twin.world.begin(twin.leader, STREAM)
    receipt = twin.world.write(txn_id, 1, STREAM, touched.segments, events)
    play = Play()
    txn_id, token, touched = play.world.begin(play.leader, STREAM)
    play.finish()
    asked = play.leave_under_way(r.Commit(token, (receipt,), None, None, 60_000))
    assert play.leader.state.open[txn_id].lacks is not None
    play.world.write(txn_id, 1, STREAM, touched.segments, events)
    more = play.send(*play.shots(2))
    play.step()
    assert play.answers(asked) == [None]
    play.finish()
    play.step(4)
    assert set(play.states(asked + more)) == {"COMMITTED"}
    assert play.events() == 8 + 2
    assert play.leader._memory.merging.waits.get(txn_id, None) is None


def test_changes_of_the_index_wait_for_the_round_in_which_they_were_made() -> None:
    """Only its commit proves that no other controller led meanwhile."""
    play = Play()
    txn_id, _, touched = play.world.begin(play.leader, STREAM)
    play.finish()
    play.leave_under_way(play.shot())
    play.world.write(txn_id, 1, STREAM, touched.segments, [(b"a", b"v")])
    play.step()  # finishes the former round, and there is no other command
    assert play.leader._under_way is None
    written = play.store.snapshot()
    assert not [key for key in written if key[:1] == k.INDEX and txn_of(key) == txn_id]
    play.leader.overlap_from = 0
    play.send(play.shot())
    play.step()
    written = play.store.snapshot()
    assert len([key for key in written if key[:1] == k.INDEX and txn_of(key) == txn_id]) == 1


# -- a round under way that fails ---------------------------------------------------------------------


def test_two_rounds_are_decided_again_in_order_after_the_first_one_is_refused() -> None:
    play = Play()
    play.world.lane(play.leader, LANE)
    play.finish()
    place = TopicPartition(stream_topic(STREAM), 0)
    play.world.cluster.troubles[place] = Trouble(Kind.FEW_REPLICAS)
    shots = [play.world.one_shot(STREAM, partition=0), *play.shots(3, OTHER)]
    first = play.send(*shots)
    second: list[bytes] = []
    for _ in range(4):
        second += play.send(*play.shots(3, OTHER))
        play.step()
    assert play.leader.metrics.total("refused_rounds") > 0
    assert play.leader.lease is not None
    play.until_answered(first[1:] + second)
    assert set(play.states(first[1:] + second)) == {"COMMITTED"}
    del play.world.cluster.troubles[place]
    play.until_answered(first, seconds=1.0)
    times = [answer.commit_timestamp for answer in play.answers(first[1:] + second) if answer]
    assert times == sorted(times), "in the order of the commands"
    assert play.events(OTHER) == len(times)
    play.check_rounds()


def test_memory_does_not_follow_a_round_that_is_refused() -> None:
    play = Play()
    play.world.clock.now += 1  # a sign of life is later than the beginning of the leadership
    one, token = play.begun()
    before = play.leader._memory.keepalives.last(one)
    place = TopicPartition(stream_topic(STREAM), 0)
    play.world.cluster.troubles[place] = Trouble(Kind.FEW_REPLICAS)
    play.world.clock.now += 1
    asked = play.send(r.Abort(token, "enough", None), play.world.one_shot(STREAM, partition=0))
    for _ in range(10):
        refused = play.leader.metrics.total("refused_rounds")
        play.step()
        if play.leader.metrics.total("refused_rounds") > refused:
            break
    assert play.answers(asked[:1]) == [None]
    assert play.leader._memory.keepalives.last(one) == before
    play.until_answered(asked[:1])
    assert play.states(asked[:1]) == ["ABORTED"]


@pytest.mark.parametrize("call", ["append", "append.after", "commit", "commit.after"])
@pytest.mark.parametrize("error", [LogUncertain, LogFenced])
def test_a_leader_drops_both_rounds_if_the_first_one_is_in_doubt(
    call: str, error: type[Exception]
) -> None:
    play = Play()
    before = play.leader.rounds
    on_nth(play, call, 1, error("no answer"))
    asked = play.send(*play.shots(4))
    while play.leader.lease is not None:
        with suppress(error):
            play.step()
            asked += play.send(*play.shots(4))
    play.world.cluster.on_call = None
    assert play.leader.lease is None
    assert play.leader._under_way is None
    assert play.leader.rounds == before
    assert not any(map(play.world.replies, asked)), (
        "no answer of a round in doubt, or of a later one"
    )
    play.leader.lead()
    play.until_answered(asked)
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.events() == len(asked)
    play.check_rounds()


def test_a_successor_of_a_leader_with_a_round_under_way() -> None:
    play = Play()
    asked = play.leave_under_way(*play.shots(4))
    asked += play.send(*play.shots(4))
    former = play.leader
    play.lead_anew()
    with pytest.raises(LogFenced):
        former.step(0)
    play.until_answered(asked)
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.events() == len(asked)


def test_a_busy_id_is_left_out_and_its_round_decided_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    wait, busy = MemoryProducer._wait_for_markers, ["once"]

    def waits(producer: MemoryProducer) -> None:
        if busy:
            busy.pop()
            raise LogBusy(f"{producer._id}: markers can't be written")
        wait(producer)

    meter = play.leader._lanes.on[OPEN_LANE].meter
    before = meter.used
    play.send(play.shot())
    play.step(2)
    one, before = meter.used - before, meter.used
    monkeypatch.setattr(MemoryProducer, "_wait_for_markers", waits)
    asked = play.send(*play.shots(4))
    for _ in range(3):
        play.step()
        asked += play.send(*play.shots(4))
    play.until_answered(asked)
    play.finish()
    charged = meter.used - before  # bytes are charged in KiB of a whole round
    assert one * len(asked) <= charged < 1.1 * one * len(asked), "each command is charged once"
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.leader.lease is not None
    assert play.leader.lease.lacks_ids
    assert play.events() == len(asked) + 1
    play.check_rounds()


def test_a_table_that_can_not_be_written_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The former round has happened, as its answers say; the next one has not."""
    play = Play()
    first = play.leave_under_way(*play.shots(3))
    second = play.send(*play.shots(3))
    full = TableError("no space left on device")

    def write(_: object) -> None:
        raise full

    monkeypatch.setattr(play.leader.table, "write", write)
    with pytest.raises(TableError):
        play.step()
    assert set(play.states(first)) == {"COMMITTED"}
    assert play.answers(second) == [None] * 3
    play.lead_anew()
    play.until_answered(first + second)
    assert set(play.states(second)) == {"COMMITTED"}
    assert play.events() == 6


# -- poison -------------------------------------------------------------------------------------------


def test_a_defect_in_the_next_round_leaves_the_former_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    monkeypatch.setitem(entrance._DECISIONS, r.GetState, failing(lambda: ValueError("a defect")))
    others = play.leave_under_way(*play.shots(3))
    others += play.send(play.shot())
    (bad,) = play.send(r.GetState(BAD, None, None))
    others += play.send(*play.shots(3))
    play.step()
    assert set(play.states(others[:3])) == {"COMMITTED"}
    assert play.leader.lease is not None
    play.until_answered([*others, bad])
    assert play.states([bad]) == ["Quarantined"]
    assert set(play.states(others)) == {"COMMITTED"}
    assert play.leader.state.holder("nyc", "x") is None
    assert play.events() == len(others)
    play.check_rounds()


def test_a_command_that_brokers_refuse_is_found_among_overlapping_rounds() -> None:
    play = Play()
    for topic in (stream_topic(OTHER), journal_topic(OTHER)):
        config = play.world.cluster.partition(TopicPartition(topic, 0)).config
        config["max.message.bytes"] = "20000"
    others = play.leave_under_way(*play.shots(3))
    others += play.send(*play.shots(3))
    (bad,) = play.send(play.world.one_shot(OTHER, b"k", bytes(30_000), partition=0))
    others += play.send(*play.shots(3))
    for _ in range(40):
        play.step()
        others += play.send(play.shot())
    play.until_answered([*others, bad])
    assert play.states([bad]) == ["EventTooLarge"]
    assert set(play.states(others)) == {"COMMITTED"}
    assert play.events() == len(others)


def test_rounds_overlap_again_after_suspect_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspects, "PIECE", 2)
    play = Play()
    on_nth(play, "commit.after", 1, LogUncertain("no answer"))
    asked = play.send(*play.shots(4))
    with pytest.raises(LogUncertain):
        play.step(3)
    play.world.cluster.on_call = None
    play.leader.lead()
    while not play.world.reply(asked[-1]):
        play.step()
        assert play.leader._under_way is None, "each piece of suspect commands is a round alone"
        if not play.world.replies(asked[0]):
            for each in asked:
                play.world.send(play.sent[each], again=each)
    play.step(4)
    play.leave_under_way(play.shot())
    play.finish()


@pytest.mark.parametrize("commands", [0, 2])
def test_a_batch_that_is_passed_over_meanwhile_is_logged(
    commands: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "BATCH_RECORDS", limits.BATCH_RECORDS._replace(value=1))
    play = Play()
    play.leave_under_way(play.shot())
    place = TopicPartition(commands_topic(), 0)
    at = play.world.cluster.produce(place, [Record(0, 0, b"", b"")] * 2)
    play.send(*play.shots(commands))
    play.finish()
    play.step(2)
    found = [(row.offset, row.what) for row in play.leader.state.quarantined.values()]
    assert found == [(at, "unreadable")]


# -- lanes --------------------------------------------------------------------------------------------


def test_a_lane_has_its_quota_once_in_two_rounds() -> None:
    play = Play()
    play.world.lane(play.leader, LANE)
    play.world.ask(play.leader, r.SetGrant(LANE, "*", 127), lane=ADMIN_LANE)
    play.finish()
    lane = play.leader._lanes.on[LANE]
    play.send(play.shot(), lane=LANE)
    play.step(2)
    one = lane.meter.used
    lane.meter.rate, lane.meter.left = 10 * one, 10.0 * one
    used = lane.meter.used
    play.send(*play.shots(100), lane=LANE)
    for _ in range(5):
        play.send(*play.shots(5))
        play.step()
    play.finish()
    assert lane.meter.used - used <= (10 + 2) * one, "its last command may exceed the quota"
    assert lane.meter.used - used >= 10 * one


def test_a_lane_that_is_blocked_by_a_round_under_way_is_not_read_by_the_next_one() -> None:
    play = Play()
    play.world.lane(play.leader, LANE)
    play.world.ask(play.leader, r.SetGrant(LANE, "*", 127), lane=ADMIN_LANE)
    play.finish()
    row = play.leader.state.lanes[LANE]
    first = play.send(*play.shots(2))
    play.send(r.SetLane(LANE, True, row.topic_ids, {}), lane=ADMIN_LANE)
    play.step()
    assert play.leader._under_way is not None
    late = play.send(*play.shots(3), lane=LANE)
    more = play.send(*play.shots(3))
    play.finish()
    play.step(3)
    assert set(play.states(first + more)) == {"COMMITTED"}
    assert play.answers(late) == [None] * 3
    position = play.leader.state.lane_positions[LANE]
    play.send(r.SetLane(LANE, False, row.topic_ids, {}), lane=ADMIN_LANE)
    play.step(6)
    assert play.leader.state.lane_positions[LANE] >= position
    answered = [answer for answer in play.answers(late) if answer is not None]
    assert len(answered) in (0, 3)


# -- streams ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", [1, 2])
def test_streams_are_made_while_rounds_overlap_all_the_time(passes: int) -> None:
    """Commands come in each pass, or in every other one, as clients wait for answers and send more then."""
    play = Play()
    asked = play.send(r.CreateStream("nyc/new", 1, {}))
    overlaps = 0
    for _ in range(40):
        play.send(*play.shots(5))
        for _ in range(passes):
            play.step()
            overlaps += play.leader._under_way is not None
            play.world.clock.now += OVERLAP_S / 3
    assert overlaps > 20
    assert play.answers(asked)[0] is not None, "topics are changed between rounds"


def test_a_stream_that_is_deleted_by_a_round_under_way_takes_nothing_of_the_next_one() -> None:
    play = Play()
    play.leave_under_way(r.DeleteStream(STREAM, ()))
    asked = play.send(play.shot(), play.shot(OTHER))
    play.finish()
    play.step(3)
    refused, fine = play.states(asked)
    assert (refused != "COMMITTED", fine) == (True, "COMMITTED")
    assert STREAM not in play.leader.state.streams


# -- ends ---------------------------------------------------------------------------------------------


def test_an_answer_in_commit_wait_is_kept_with_its_round() -> None:
    play = Play(clock_error_ms=50)
    shot = play.send(play.shot(), more=((WAIT_HEADER, b""),))
    first = play.send(play.shot())
    play.step()
    assert play.leader._under_way is not None
    second = play.send(*play.shots(2))
    play.finish()
    assert set(play.states(first + second)) == {"COMMITTED"}
    assert play.answers(shot) == [None]
    play.world.clock.now += 0.101
    play.step(2)
    assert play.states(shot) == ["COMMITTED"]


def test_a_leader_that_resigns_drops_the_round_under_way() -> None:
    play = Play()
    asked = play.leave_under_way(*play.shots(3))
    play.leader.resign()
    assert play.leader._under_way is None
    play.leader.lead()
    play.until_answered(asked)
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.events() == 3


def test_a_leader_that_hands_over_finishes_the_round_under_way() -> None:
    play = Play()
    asked = play.leave_under_way(*play.shots(3))
    play.leader.hand_over()
    assert set(play.states(asked)) == {"COMMITTED"}
    assert play.leader.state.term is not None
    assert play.leader.state.term.resigned
    play.lead_anew()
    more = play.send(*play.shots(3))
    play.until_answered(more)
    assert play.events() == 6


def test_a_leader_that_is_fenced_in_the_round_under_way_hands_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A successor may not pass over the busy id before this leader's resignation is logged."""
    play = Play()
    cluster = play.world.cluster
    initialise = cluster.initialise
    monkeypatch.setattr(
        cluster,
        "initialise",
        lambda id_, s: None if id_.endswith("control.0.b") else initialise(id_, s),
    )
    play.leader.lead()
    play.step()
    play.leave_under_way(*play.shots(3))
    other = play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()  # it has fenced the other ids
    play.leader.hand_over()
    other.lead()
