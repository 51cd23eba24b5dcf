"""A stream in trouble waits, others commit in the same steps, nothing of it is lost, and then it is served."""

from __future__ import annotations

import ast
import gc
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller import controller as controller_module
from anabranch.controller.cleanup import Histories
from anabranch.controller.history_tail import load_tail
from anabranch.controller.intake import Intake
from anabranch.controller.topic_trouble import Described, describe
from anabranch.core.state import State
from anabranch.core.stream_states import ACTIVE, WAITING
from anabranch.ports import Fetched, LogRefused, LogUnavailable, OffsetOutOfRange, TopicPartition
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.records import (
    CreateStream,
    ListLanes,
    Refusal,
    Scale,
    StreamList,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.partition import Partition
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import (
    commands_topic,
    history_topic,
    journal_topic,
    status_topic,
    stream_topic,
)
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play

_LOGS_CALL = re.compile(r"\b_?log\.(fetch|start_offsets|end_offsets)$")
FORBIDDEN, POLICY, TOO_LARGE, MIN_ISR = 29, 44, 10, 19
each_topic = pytest.mark.parametrize("topic", TOPICS, ids=["stream", "journal", "history"])
Topic = Callable[[str], str]
Mend = Callable[[], None]


def refuse(patch: pytest.MonkeyPatch, *topics: str, code: int) -> Mend:
    """Brokers refuse what is appended to these topics, until the result is called."""
    refused, check = set(topics), Partition.check

    def checked(partition: Partition, data: bytes, now_ms: int) -> object:
        topic = partition.name.topic
        if topic in refused:
            raise LogRefused(f"{topic}: refused ({code})", code, (topic,))
        return check(partition, data, now_ms)

    patch.setattr(Partition, "check", checked)
    return refused.clear


def lower_limit(play: Play, topic: str, limit: int) -> Mend:
    """Batches of this topic may have so many bytes, no more, until the result is called."""
    cluster = play.world.cluster
    configs: list[Any] = [cluster.topics[topic].config]
    configs += [log.config for at, log in cluster.partitions.items() if at.topic == topic]
    former = [dict(config) for config in configs]
    for config in configs:
        config["max.message.bytes"] = str(limit)

    def mend() -> None:
        for config, was in zip(configs, former, strict=True):
            config.update(was)

    return mend


def a_partition_less(play: Play, topic: str) -> Mend:
    """A broker that lags knows of one partition less."""
    info = play.world.cluster.topics[topic]
    bring_back = play.world.take_away(topic)
    play.world.cluster.topics[topic] = replace(info, partitions=info.partitions - 1)
    return bring_back


def refused_with(code: int) -> Callable[[Play, str, pytest.MonkeyPatch], Mend]:
    return lambda _, topic, patch: refuse(patch, topic, code=code)


NO_MARKERS = "no room for markers"
# What happens to a topic, and what is said of it.
TROUBLES: dict[str, tuple[Callable[[Play, str, pytest.MonkeyPatch], Mend], str]] = {
    "forbidden": (refused_with(FORBIDDEN), ""),
    "against a policy": (refused_with(POLICY), ""),
    "too few replicas": (refused_with(MIN_ISR), ""),
    # No transaction that writes there is at fault.
    NO_MARKERS: (
        lambda play, topic, _: lower_limit(play, topic, 70), "set max.message.bytes to 16384 or more"
    ),
    "not known": (lambda play, topic, _: play.world.take_away(topic), "there is no topic"),
    "partly known": (lambda play, topic, _: a_partition_less(play, topic), ""),
}  # fmt: skip


def check_waits_then_is_served(play: Play, mend: Mend) -> None:
    term = play.controller.state.term
    for _ in range(4):
        play.play(5, 5.0)
        assert play.one_shot(OTHER) == "COMMITTED"
    assert play.stream_state(GONE) == WAITING
    assert play.one_shot(GONE) == "NotReady"
    assert play.controller.state.term == term, "the leader still leads"
    mend()
    play.play(30, 30.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize(
    ("what", "leader"),
    # Without room for markers another process can't lead: the ids are busy.
    [
        *((what, "same") for what in TROUBLES),
        *((what, "new") for what in TROUBLES if what != NO_MARKERS),
    ],
)
@each_topic
def test_a_decided_commit_waits_for_its_stream_and_is_whole(
    what: str, topic: Topic, leader: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strike, words = TROUBLES[what]
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    mend = strike(play, topic(GONE), monkeypatch)
    commit = play.send_commit(token, receipt)
    play.play(3)
    if leader == "new":
        play.lead_anew()
        play.play(3)
    else:
        assert words in play.controller._memory.waiting[GONE]
    before = play.events(OTHER)
    check_waits_then_is_served(play, mend)
    play.check_committed(commit, 2 * len(KEYS))
    assert play.events(GONE) == len(KEYS) + 2
    assert play.events(OTHER) == before + 4 + len(KEYS), "whole, and once"


def test_the_journal_takes_no_big_records_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What controllers write there is never too much, so the topic is at fault, and no transaction."""
    play = Play()
    _, token, receipt = play.begun(GONE)
    mend = refuse(monkeypatch, journal_topic(GONE), code=TOO_LARGE)
    commit = play.send_commit(token, receipt)
    check_waits_then_is_served(play, mend)
    play.check_committed(commit, len(KEYS))


@each_topic
def test_acknowledged_plain_writes_wait(monkeypatch: pytest.MonkeyPatch, topic: Topic) -> None:
    play = Play()
    place = TopicPartition(journal_topic(GONE), 0)
    mend = refuse(monkeypatch, topic(GONE), code=FORBIDDEN)
    if topic is journal_topic:  # clients may write there
        mend()
    for n in range(5):
        play.world.cluster.produce(place, [Record(0, 1, b"k", b"%d" % n, ())])
    before = play.events(GONE)
    play.play(20, 10.0)
    mend()
    play.play(40, 40.0)
    assert play.events(GONE) == before + 5
    assert not play.controller.state.plain_refused


def test_what_a_lowered_limit_refuses_is_not_given_up() -> None:
    """The journal took and acknowledged it: so the stream's topic has to take it, and its setting is at fault."""
    play = Play()
    _, token, receipt = play.begun(GONE)
    records = [Record(n, 1, b"k", bytes(500), ()) for n in range(100)]
    play.world.cluster.produce(TopicPartition(journal_topic(GONE), 0), records)
    mend = lower_limit(play, stream_topic(GONE), 20_000)
    commit = play.send_commit(token, receipt)
    play.play(3)
    assert "is less than its journal's; set 1048588" in play.controller._memory.waiting[GONE]
    before = play.events(GONE)
    check_waits_then_is_served(play, mend)
    assert play.events(GONE) == before + 100 + len(KEYS) + 1
    assert not play.controller.state.plain_refused
    play.check_committed(commit, len(KEYS))


def test_what_brokers_refuse_for_what_it_is_is_counted_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    mend = refuse(monkeypatch, stream_topic(GONE), code=TOO_LARGE)
    place = TopicPartition(journal_topic(GONE), 0)
    play.world.cluster.produce(place, [Record(0, 1, b"k", b"big", ())])
    play.play(20, 10.0)
    mend()
    assert play.one_shot(GONE) == "COMMITTED"
    play.lead_anew()
    assert play.controller.state.plain_refused == {(GONE, 0): 1}


def test_a_silent_transaction_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    txn_id, _, _ = play.begun(GONE, OTHER)
    refuse(monkeypatch, journal_topic(GONE), code=FORBIDDEN)
    play.play(10, 700.0)
    play.play(3)
    state, reason = play.state(txn_id)
    assert (state, reason[:5]) == ("ABORTED", "stale")


@each_topic
def test_a_stream_that_can_be_made_but_not_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, topic: Topic
) -> None:
    play = Play()
    mend = refuse(monkeypatch, topic("nyc/bad"), code=FORBIDDEN)
    created = play.world.send(CreateStream("nyc/bad", 1, {}))
    assert play.one_shot(OTHER) == "COMMITTED"
    # Its history is the only one that creating writes to.
    assert isinstance(play.world.reply(created), Refusal) == (topic is history_topic)
    mend()
    assert play.ask(CreateStream("nyc/bad", 1, {})).streams[0].state == ACTIVE


@pytest.mark.parametrize("behind", [1, 100])
def test_a_broker_that_does_not_know_a_new_stream_yet_ends_no_lead(
    monkeypatch: pytest.MonkeyPatch, behind: int
) -> None:
    play = Play()
    term = play.controller.state.term
    topic = stream_topic("nyc/new")

    def lacking(*of: Any) -> Described | None:
        nonlocal behind
        found = describe(*of)
        if found is not None and topic in found.found and behind:
            behind -= 1
            del found.found[topic]
        return found

    monkeypatch.setattr("anabranch.controller.topic_trouble.describe", lacking)
    made = play.world.send(CreateStream("nyc/new", 2, {}))
    play.play(30, 15.0)
    assert play.controller.state.term == term
    answer = play.world.reply(made)
    if behind:
        assert answer.code == "NotReady"
        assert "made already: nyc.new, nyc.new.history, nyc.new.journal" in answer.message
        behind = 0
        play.ask(CreateStream("nyc/new", 2, {}))
    assert play.one_shot("nyc/new") == play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("code", [FORBIDDEN, MIN_ISR])
def test_a_control_topic_in_trouble_is_no_commands_fault(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    play = Play()
    mend = refuse(monkeypatch, status_topic("anabranch"), code=code)
    asked = play.world.send(play.world.one_shot(OTHER, partition=0))
    with pytest.raises(LogUnavailable):
        play.play(3)
    for _ in range(3):
        with pytest.raises(LogRefused):
            play.controller.lead()
    mend()
    play.controller.lead()
    play.play(3)
    assert play.world.reply(asked).state == "COMMITTED"


def test_an_unreadable_history(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    place = TopicPartition(history_topic(GONE), 0)
    play.world.cluster.produce(place, [Record(0, 1, b"", b"\xff\xff", ())])
    play.lead_anew()
    for _ in range(3):
        assert play.one_shot(GONE) == "NotReady"
        play.play(5, 5.0)
        assert play.one_shot(OTHER) == "COMMITTED"


def test_a_gap_of_a_stream_without_a_leader_holds_up_no_round() -> None:
    """Other programs wrote to its topic; without helper threads the gap is read between two rounds."""
    play, place = Play(), TopicPartition(stream_topic(GONE), 0)
    play.world.cluster.produce(place, [Record(n, 1, b"k", b"stray", ()) for n in range(9)])
    assert play.one_shot(GONE) == "COMMITTED"
    scan = play.controller._background.foreign_records  # type: ignore[union-attr]
    waiting = list(scan._waiting)
    assert [gap.stream for gap in waiting] == [GONE]
    play.world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)
    began = play.world.clock.now
    for _ in range(5):  # the first try comes before the stream is known to be in trouble
        scan._look_ms = 0
        play.play(1)
    assert (play.world.clock.now, scan.found) == (began, {})
    assert play.one_shot(GONE) == "NotReady"
    play.play(60, 30.0)
    tries = [gap.tries for gap in scan._waiting]
    assert min(tries) <= 5, "a stream that waits is not asked for its gaps"
    del play.world.cluster.troubles[place]
    play.play(30, 30.0)
    assert scan.found == {GONE: 9}


def test_no_call_for_a_stream_waits_for_its_leader() -> None:
    """All other streams would wait, too. Only control topics are waited for: nothing works without them."""
    folder = Path(controller_module.__file__).parent
    waiting = [
        (path.name, function.name)
        for path in (*folder.rglob("*.py"), folder.parent / "topics/creation.py")
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and _LOGS_CALL.search(ast.unparse(call.func))
        if "failed" not in {word.arg for word in call.keywords}
    ]
    of_status = [("leadership.py", "fold_to_end")] * 3 + [("leadership.py", "last_term")] * 3
    assert sorted(waiting) == [("intake.py", "fetch"), *of_status]  # … and of the topic `control`


def test_commands_answered_from_the_past_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    asked = play.world.send(play.world.one_shot(OTHER, partition=0))
    fetch = MemoryLog.fetch

    def fetched(self: MemoryLog, positions: dict[TopicPartition, int], **how: Any) -> Any:
        for place, at in positions.items():
            if place.topic == commands_topic("anabranch"):
                how["failed"][place] = OffsetOutOfRange(place, at)
        return fetch(self, positions, **how)

    monkeypatch.setattr(MemoryLog, "fetch", fetched)
    play.play(1)
    lanes = play.world.ask(play.controller, ListLanes(), lane=ADMIN_LANE).lanes
    assert "a broker that lags" in next(each.trouble for each in lanes if each.lane == "open")
    monkeypatch.undo()
    play.play(4, 1.0)
    assert play.world.reply(asked).state == play.one_shot(OTHER) == "COMMITTED"


# -- partitions without a leader -----------------------------------------------------------------------


class Leaderless(Play):
    """A partition loses its leader at a call."""

    def lose(self, place: TopicPartition, call: str, after: str = "") -> None:
        """``after``: only once there was such a call."""
        self.place, self.began = place, self.world.clock.now
        seen = {""}

        def called(_: str, name: str) -> None:
            seen.add(name)
            if name == call and after in seen:
                self.world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)

        self.world.cluster.on_call = called

    def check_nobody_waited(self) -> None:
        assert self.place in self.world.cluster.troubles
        assert self.world.clock.now == self.began

    def check_that_stream_alone_waits(self) -> None:
        self.play(5)
        assert self.one_shot(OTHER) == "COMMITTED"
        self.check_nobody_waited()
        assert self.one_shot(GONE) == "NotReady"
        self.world.cluster.on_call = None
        self.world.cluster.troubles.clear()
        self.play(30, 30.0)


def test_a_new_segment_without_a_leader() -> None:
    play = Leaderless()
    play.lose(TopicPartition(stream_topic(GONE), 2), "describe_topics", "add_partitions")
    scaled = play.world.send(Scale(GONE, 3, (), ()))
    play.check_that_stream_alone_waits()
    assert isinstance(play.world.reply(scaled), StreamList)
    assert play.one_shot(GONE) == "COMMITTED"


def test_a_history_without_a_leader() -> None:
    play = Leaderless()
    play.lose(TopicPartition(history_topic(GONE), 0), "start_offsets")
    with pytest.raises(LogUnavailable, match="no leader"):
        load_tail(play.world.cluster.log("c"), play.world.clock, GONE)
    play.check_nobody_waited()


def test_a_journal_without_a_leader_and_its_beginning() -> None:
    play = Leaderless()
    place = TopicPartition(journal_topic(GONE), 0)
    for _ in range(3):
        play.world.cluster.produce(place, [Record(0, 1, b"k", b"v", ())])
    log = play.world.cluster.log("somebody")
    log.delete_records(log.end_offsets([place], committed=False))
    play.lose(place, "start_offsets")
    play.check_that_stream_alone_waits()
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


def test_histories_are_not_cut_by_a_stream_without_a_leader() -> None:
    play = Leaderless()
    play.lose(TopicPartition(stream_topic(GONE), 1), "start_offsets")
    assert Histories(play.world.cluster.log("c")).spare({GONE: 2, OTHER: 2}) == {}
    play.check_nobody_waited()


def test_tries_to_lead_without_the_status_topic_leave_nothing() -> None:
    play = Leaderless()
    place = TopicPartition(status_topic("anabranch"), 0)
    play.world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)
    alive = []
    for tries in range(3):
        for _ in range(tries):
            with pytest.raises(LogUnavailable):
                play.controller.lead()
        gc.collect()
        alive.append(sum(type(one) is State for one in gc.get_objects()))
    assert play.controller._trouble.suspects
    assert alive[2] <= alive[1] <= alive[0]


# -- brokers that answer from the past -----------------------------------------------------------------


class StaleBroker:
    """Some partitions are read from it while ``leads``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, topic: str, end: int) -> None:
        self.leads = False
        fetch, end_offsets = MemoryLog.fetch, MemoryLog.end_offsets

        def fetched(
            log: MemoryLog, positions: Mapping[TopicPartition, int], **how: Any
        ) -> dict[TopicPartition, Fetched]:
            stale = {
                place: at
                for place, at in positions.items()
                if self.leads and place.topic == topic and at > end
            }
            for place, at in stale.items():
                how["failed"][place] = OffsetOutOfRange(place, at)
            return fetch(log, {p: at for p, at in positions.items() if p not in stale}, **how)

        def ends(
            log: MemoryLog, places: Sequence[TopicPartition], **how: Any
        ) -> dict[TopicPartition, int]:
            found = end_offsets(log, places, **how)
            stale = [place for place in found if self.leads and place.topic == topic]
            return found | dict.fromkeys(stale, end)

        monkeypatch.setattr(MemoryLog, "fetch", fetched)
        monkeypatch.setattr(MemoryLog, "end_offsets", ends)


def test_a_decided_merge_is_not_aborted_for_a_stale_journal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    broker = StaleBroker(monkeypatch, journal_topic(GONE), 0)
    commit = play.send_commit(token, receipt)
    with monkeypatch.context() as patched:  # the intake has read it from another broker
        patched.setattr(Intake, "_journals", lambda *_: {})
        broker.leads = True
        play.play(20, 10.0)
    assert play.world.reply(commit) is None
    broker.leads = False
    play.play(20, 20.0)
    play.check_committed(commit, 2 * len(KEYS))


@pytest.mark.parametrize(
    ("topic", "end"),
    [(journal_topic(GONE), 1), (history_topic(GONE), 0)],
    ids=["journal", "history"],
)
def test_nothing_is_given_up_for_what_a_stale_broker_says_now_and_then(
    monkeypatch: pytest.MonkeyPatch, topic: str, end: int
) -> None:
    """Again and again, with days between."""
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    broker = StaleBroker(monkeypatch, topic, end)
    commit = play.send_commit(token, receipt)
    for _ in range(5):
        broker.leads = True
        if topic == history_topic(GONE):  # read when leading begins only
            play.lead_anew()
        play.play(20, 0.5 * LOST_S)
        assert play.one_shot(GONE) == "NotReady"
        assert play.one_shot(OTHER) == "COMMITTED"
        broker.leads = False
        play.play(10, 20.0)
        assert play.stream_state(GONE) == ACTIVE
        assert play.one_shot(GONE) == "COMMITTED"
        play.check_committed(commit, 2 * len(KEYS))
        play.world.clock.sleep(100_000)
