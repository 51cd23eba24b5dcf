"""A stream in trouble waits: others commit in the same steps, nothing of it is lost, and it goes on by itself."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller import controller as controller_module
from anabranch.controller.topic_trouble import Described, describe
from anabranch.core.stream_states import ACTIVE, WAITING
from anabranch.errors import NotLeader
from anabranch.ports import (
    LogBusy,
    LogFenced,
    LogRefused,
    LogUnavailable,
    LogUncertain,
    OffsetOutOfRange,
    TopicInfo,
    TopicPartition,
    TopicSpec,
)
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas.records import (
    Abort,
    Commit,
    CreateStream,
    Event,
    ListLanes,
    OneShot,
    Outcome,
    RecoverStream,
    Refusal,
)
from anabranch.topics.names import (
    commands_topic,
    history_topic,
    journal_topic,
    status_topic,
    stream_topic,
)
from tests.controller.losing import GONE, KEYS, OTHER, TOPICS, Play
from tests.memory.log import MemoryLog
from tests.memory.partition import Partition
from tests.memory.producer import MemoryProducer
from tests.memory.trouble import Kind, Trouble

_LOGS_CALL = re.compile(r"\b_?log\.(fetch|start_offsets|end_offsets)$")
FORBIDDEN, POLICY, TOO_LARGE, MIN_ISR = 29, 44, 10, 19


class Refusing:
    """Brokers refuse what is appended to these topics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *topics: str, code: int) -> None:
        self.topics = set(topics)
        check = Partition.check

        def checked(partition: Partition, data: bytes, now_ms: int) -> object:
            topic = partition.name.topic
            if topic in self.topics:
                raise LogRefused(f"{topic}: refused ({code})", code, (topic,))
            return check(partition, data, now_ms)

        monkeypatch.setattr(Partition, "check", checked)

    def mend(self) -> None:
        self.topics.clear()


def _waits_then_goes_on(play: Play, trouble: Refusing | _Small) -> None:
    term = play.controller.state.term
    for _ in range(4):
        play.play(5, 5.0)
        assert play.one_shot(OTHER) == "COMMITTED"
    assert play.stream_state(GONE) == WAITING
    assert play.one_shot(GONE) == "NotReady"
    assert play.controller.state.term == term, "the leader went on"
    trouble.mend()
    play.play(30, 30.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize("code", [FORBIDDEN, POLICY, MIN_ISR])
@pytest.mark.parametrize("topic", TOPICS, ids=["stream", "journal", "history"])
@pytest.mark.parametrize("leader", ["same", "new"])
def test_a_decided_commit(
    monkeypatch: pytest.MonkeyPatch, topic: Callable[[str], str], code: int, leader: str
) -> None:
    play = Play()
    _, token, receipt = play.begun(GONE, OTHER)
    trouble = Refusing(monkeypatch, topic(GONE), code=code)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    play.play(3)
    if leader == "new":
        play.lead_anew()
        play.play(3)
    before = play.events(OTHER)
    _waits_then_goes_on(play, trouble)
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert (outcome.state, outcome.committed) == ("COMMITTED", 2 * len(KEYS))
    assert play.events(GONE) == len(KEYS) + 2
    assert play.events(OTHER) == before + 4 + len(KEYS), "whole, and once"


def test_the_journal_takes_no_big_records_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What controllers write there is never too much, so the topic is at fault, and no transaction."""
    play = Play()
    _, token, receipt = play.begun(GONE)
    trouble = Refusing(monkeypatch, journal_topic(GONE), code=TOO_LARGE)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    _waits_then_goes_on(play, trouble)
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"


class _Small:
    """Batches of these topics may have so many bytes, no more."""

    def __init__(self, play: Play, *topics: str, limit: int) -> None:
        cluster = play.world.cluster
        configs = [cluster.topics[topic].config for topic in topics]
        configs += [log.config for at, log in cluster.partitions.items() if at.topic in topics]
        self._configs = [config for config in configs if isinstance(config, dict)]
        self._was = [dict(config) for config in self._configs]
        for config in self._configs:
            config["max.message.bytes"] = str(limit)

    def mend(self) -> None:
        for config, was in zip(self._configs, self._was, strict=True):
            config.update(was)


@pytest.mark.parametrize("topic", TOPICS, ids=["stream", "journal", "history"])
def test_a_topic_that_takes_hardly_anything_is_at_fault(topic: Callable[[str], str]) -> None:
    """Not the transactions that write there: so little is not even room for markers."""
    play = Play()
    _, token, receipt = play.begun(GONE)
    trouble = _Small(play, topic(GONE), limit=70)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    play.play(3)
    assert "set max.message.bytes to 16384 or more" in play.controller._memory.waiting[GONE]
    _waits_then_goes_on(play, trouble)
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"


@pytest.mark.parametrize("topic", TOPICS, ids=["stream", "journal", "history"])
def test_acknowledged_plain_writes_wait(
    monkeypatch: pytest.MonkeyPatch, topic: Callable[[str], str]
) -> None:
    play = Play()
    trouble = Refusing(monkeypatch, topic(GONE), code=FORBIDDEN)
    trouble.topics.discard(journal_topic(GONE))  # clients may write there
    place = TopicPartition(journal_topic(GONE), 0)
    for n in range(5):
        play.world.cluster.produce(place, [Record(0, 1, b"k", b"%d" % n, ())])
    before = play.events(GONE)
    play.play(20, 10.0)
    trouble.mend()
    play.play(40, 40.0)
    assert play.events(GONE) == before + 5
    assert not play.controller.state.plain_refused


def test_what_a_lowered_limit_refuses_is_not_given_up() -> None:
    """The journal took and acknowledged it: so the stream's topic has to take it, and its setting is at fault."""
    play = Play()
    _, token, receipt = play.begun(GONE)
    records = [Record(n, 1, b"k", bytes(500), ()) for n in range(100)]
    play.world.cluster.produce(TopicPartition(journal_topic(GONE), 0), records)
    trouble = _Small(play, stream_topic(GONE), limit=20_000)
    commit = play.world.send(Commit(token, (receipt,), None, None, 600_000))
    play.play(3)
    assert "is less than its journal's; set 1048588" in play.controller._memory.waiting[GONE]
    before = play.events(GONE)
    _waits_then_goes_on(play, trouble)
    assert play.events(GONE) == before + 100 + len(KEYS) + 1
    assert not play.controller.state.plain_refused
    outcome = play.world.reply(commit)
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"


def test_what_brokers_refuse_for_what_it_is_is_counted_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play()
    trouble = Refusing(monkeypatch, stream_topic(GONE), code=TOO_LARGE)
    place = TopicPartition(journal_topic(GONE), 0)
    play.world.cluster.produce(place, [Record(0, 1, b"k", b"big", ())])
    play.play(20, 10.0)
    trouble.mend()
    assert play.one_shot(GONE) == "COMMITTED"
    play.lead_anew()
    assert play.controller.state.plain_refused == {(GONE, 0): 1}


def test_a_silent_transaction_ends_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    txn_id, _, _ = play.begun(GONE, OTHER)
    Refusing(monkeypatch, journal_topic(GONE), code=FORBIDDEN)
    play.play(10, 700.0)
    play.play(3)
    state, reason = play.state(txn_id)
    assert (state, reason[:5]) == ("ABORTED", "stale")


@pytest.mark.parametrize("topic", TOPICS, ids=["stream", "journal", "history"])
def test_a_stream_that_can_be_made_but_not_written_is_refused(
    monkeypatch: pytest.MonkeyPatch, topic: Callable[[str], str]
) -> None:
    play = Play()
    trouble = Refusing(monkeypatch, topic("nyc/bad"), code=FORBIDDEN)
    created = play.world.send(CreateStream("nyc/bad", 1, {}))
    assert play.one_shot(OTHER) == "COMMITTED"
    # Its history is the only one that creating writes to.
    assert isinstance(play.world.reply(created), Refusal) == (topic is history_topic)
    trouble.mend()
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
    trouble = Refusing(monkeypatch, status_topic("anabranch"), code=code)
    event = Event(OTHER, 0, b"k", b"v", (), -1)
    asked = play.world.send(OneShot(play.world.txn_id(), "nyc", None, (event,)))
    with pytest.raises(LogUnavailable):
        play.play(3)
    for _ in range(3):
        with pytest.raises(LogRefused):
            play.controller.lead()
    trouble.mend()
    play.controller.lead()
    play.play(3)
    outcome = play.world.reply(asked)
    assert isinstance(outcome, Outcome)
    assert outcome.state == "COMMITTED"


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


# -- an id whose markers can't be written --------------------------------------------------------------


def test_a_busy_id_is_passed_over_by_its_own_leader_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who led last knows that the transaction is its own; another process could not tell a zombie's."""
    play = Play()
    cluster = play.world.cluster
    initialise = cluster.initialise

    def busy(transactional_id: str, timeout: float) -> tuple[int, int] | None:
        if transactional_id.endswith("control.0.a"):
            return None
        return initialise(transactional_id, timeout)

    monkeypatch.setattr(cluster, "initialise", busy)
    play.controller.lead()
    assert play.one_shot(OTHER) == "COMMITTED"
    play.controller.lead()
    assert play.one_shot(OTHER) == "COMMITTED"

    def unsure(process: str, name: str) -> None:
        if name == "commit.after":
            raise LogUncertain("of its term")

    monkeypatch.setattr(cluster, "on_call", unsure)
    with pytest.raises(LogUncertain):
        play.controller.lead()
    monkeypatch.setattr(cluster, "on_call", None)
    play.controller.lead()
    other = play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    play.controller.resign()  # the same process loses the partition, and gets it again
    again = play.world.controller("again")
    again.terms = play.controller.terms
    again.lead()
    again.hand_over()
    other.lead()  # nothing more can come of who has let go
    with pytest.raises(LogBusy):
        play.controller.lead()  # the last term is not its own any more


def test_a_leader_that_is_stopped_before_it_leads_once_more_lets_go() -> None:
    play = Play()
    play.world.cluster.troubles[TopicPartition(history_topic(GONE), 0)] = Trouble(Kind.FAILED_DISK)
    with pytest.raises(LogUncertain):
        play.one_shot(GONE)
    first, other = play.controller, play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    first.hand_over()
    other.lead()
    play.controller = other
    assert play.one_shot(OTHER) == "COMMITTED"
    with pytest.raises(NotLeader):
        first.hand_over()  # it does not disturb who leads since
    assert play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("fenced_in", ["the hand-over", "a round"])
def test_a_leader_that_is_fenced_while_an_id_is_busy_hands_over(
    monkeypatch: pytest.MonkeyPatch, fenced_in: str
) -> None:
    """Each controller that tried to lead fenced the other ids, so the record that it needed was never logged."""
    play = Play()
    initialise = play.world.cluster.initialise
    monkeypatch.setattr(
        play.world.cluster,
        "initialise",
        lambda id_, s: None if id_.endswith("control.0.b") else initialise(id_, s),
    )
    play.controller.lead()  # it was the last leader, so it passes the busy id over
    assert not play.controller._trouble.suspects
    other = play.world.controller("other")
    with pytest.raises(LogBusy):
        other.lead()
    if fenced_in == "a round":
        with pytest.raises(LogFenced):
            play.one_shot(OTHER)
    play.controller.hand_over()
    other.lead()
    play.controller = other
    assert play.one_shot(OTHER) == "COMMITTED"


@pytest.mark.parametrize("busy", ["carrier.0.a", "carrier.0.b"])
def test_a_merge_is_carried_on_by_the_id_that_is_not_busy(
    monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    play = Play(chunk_bytes=1_000)
    wait = MemoryProducer._wait_for_markers

    def waits(producer: MemoryProducer) -> None:
        if producer._id.endswith(busy):
            raise LogBusy(f"{producer._id}: markers can't be written")
        wait(producer)

    monkeypatch.setattr(MemoryProducer, "_wait_for_markers", waits)
    _, token, receipt = play.begun(OTHER, size=1_500)
    outcome = play.ask(Commit(token, (receipt,), None, None, 600_000), seconds=0.05)
    assert outcome.state == "COMMITTED"


@pytest.mark.parametrize("rounds", [0, 1])
def test_a_leader_with_a_busy_id_hands_over_by_another(rounds: int) -> None:
    play = Play()
    for _ in range(rounds):
        assert play.one_shot(OTHER) == "COMMITTED"
    play.world.cluster.troubles[TopicPartition(history_topic(GONE), 0)] = Trouble(Kind.FEW_REPLICAS)
    assert play.one_shot(GONE) == "NotReady"
    play.controller.hand_over()
    play.world.controller("other").lead()


def test_streams_of_a_dead_broker_cost_no_id_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """An append that too few replicas refuse keeps its id busy: the others are found before they are written to."""
    play = Play()
    bad = [f"nyc/bad{i}" for i in range(4)]
    for stream in bad:
        play.world.stream(play.controller, stream)
        assert play.one_shot(stream) == "COMMITTED"
    refused = []
    append = MemoryProducer.append

    def counted(producer: MemoryProducer, batches: Any) -> list[int]:
        try:
            return append(producer, batches)
        except LogRefused as error:
            refused.append(error)
            raise

    monkeypatch.setattr(MemoryProducer, "append", counted)
    for stream in bad:
        place = TopicPartition(stream_topic(stream), 0)
        play.world.cluster.troubles[place] = Trouble(Kind.FEW_REPLICAS)
    assert [play.one_shot(stream) for stream in bad] == ["NotReady"] * len(bad)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert len(refused) == 1


def test_a_round_goes_on_with_another_id(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    cluster = play.world.cluster
    is_ending = cluster.is_ending
    for letter in "abcd":
        busy = f"control.0.{letter}"
        monkeypatch.setattr(
            cluster, "is_ending", lambda id_, busy=busy: id_.endswith(busy) or is_ending(id_)
        )
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.one_shot(OTHER) == "COMMITTED"


# -- giving up, and taking back ------------------------------------------------------------------------


def test_one_brokers_word_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the status topic, but no topic made since: the quorum knows better."""
    play = Play()
    txn_id, _, _ = play.begun(GONE)
    describe = MemoryLog.describe_topics

    def described(self: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        return describe(self, [name for name in names if name != stream_topic(GONE)])

    monkeypatch.setattr(MemoryLog, "describe_topics", described)
    play.controller._trouble.look(play.controller.state, {GONE})
    play.play(50, 200.0)
    assert play.stream_state(GONE) == WAITING
    assert play.state(txn_id)[0] == "OPEN"
    monkeypatch.undo()
    play.play(10, 20.0)
    assert play.one_shot(GONE) == "COMMITTED"


def test_one_brokers_other_id_gives_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows a former stream of that name, which was forgotten."""
    play = Play()
    describe = MemoryLog.describe_topics

    def described(self: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        found = describe(self, names)
        topic = stream_topic(GONE)
        return found | {name: replace(found[name], topic_id="x") for name in found if name == topic}

    monkeypatch.setattr(MemoryLog, "describe_topics", described)
    play.controller._trouble.look(play.controller.state, {GONE})
    play.play(50, 200.0)
    assert play.stream_state(GONE) == WAITING
    monkeypatch.undo()
    play.play(10, 20.0)
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize("mended", ["the old topics", "another topic"])
def test_a_stream_given_up_is_taken_back_with_its_old_topics(mended: str) -> None:
    play = Play()
    _, token, _ = play.begun(GONE)
    cluster = play.world.cluster
    topic = stream_topic(GONE)
    info = cluster.topics[topic]
    kept = {place: log for place, log in cluster.partitions.items() if place.topic == topic}
    cluster.delete_topic(topic)
    assert play.one_shot(GONE) == "NotReady"
    play.play(60, 60.0)
    assert play.one_shot(GONE) == "StreamLost"
    assert play.ask(RecoverStream(GONE)).code == "IllegalState"
    if mended == "another topic":
        cluster.create([TopicSpec(topic, info.partitions, dict(info.config))])
    else:
        cluster.topics[topic] = info
        cluster.partitions.update(kept)
    answer = play.ask(RecoverStream(GONE))
    if mended == "another topic":
        assert answer.code == "IllegalState"
        assert play.one_shot(GONE) == "StreamLost"
    else:
        assert answer.streams[0].state == ACTIVE
        assert play.one_shot(GONE) == "COMMITTED"
        assert play.ask(Abort(token, "")).state == "ABORTED"
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_stream_that_may_not_be_looked_at_is_not_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does it end leading, which began with the same look."""
    play = Play()
    cluster = play.world.cluster
    topic = stream_topic(GONE)
    info = cluster.topics[topic]
    kept = {place: log for place, log in cluster.partitions.items() if place.topic == topic}
    cluster.delete_topic(topic)
    assert play.one_shot(GONE) == "NotReady"
    play.play(60, 60.0)
    assert play.one_shot(GONE) == "StreamLost"
    cluster.topics[topic] = info
    cluster.partitions.update(kept)
    describe = MemoryLog.describe_topics

    def described(self: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        if topic in names:
            raise LogRefused("TOPIC_AUTHORIZATION_FAILED", FORBIDDEN, (topic,))
        return describe(self, names)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "describe_topics", described)
        asked = play.world.send(RecoverStream(GONE))
        play.play(2)
        play.lead_anew()
        assert play.one_shot(OTHER) == "COMMITTED"
        play.play(30, 15.0)
        refused = play.world.reply(asked)
        assert isinstance(refused, Refusal)
        assert (refused.code, play.one_shot(GONE)) == ("NotReady", "StreamLost")
    assert play.ask(RecoverStream(GONE)).streams[0].state == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


def test_commands_answered_from_the_past_wait_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    event = Event(OTHER, 0, b"k", b"v", (), -1)
    asked = play.world.send(OneShot(play.world.txn_id(), "nyc", None, (event,)))
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
