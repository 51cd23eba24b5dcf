"""A lost stream is forgotten: nothing of it is left for the next one of its name."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from anabranch.batches.records import Record
from anabranch.controller.cleanup import Truncator, _Walk
from anabranch.controller.controller import Controller
from anabranch.controller.jobs import Jobs
from anabranch.controller.stream_topics import GIVE_UP_S
from anabranch.core import rows as k
from anabranch.core.stream_states import ACTIVE, FORGETTING, LOST
from anabranch.errors import UnsupportedVersion
from anabranch.ports import (
    LogError,
    LogFenced,
    LogRefused,
    LogUnavailable,
    TopicPartition,
    TopicSpec,
)
from anabranch.protocol.ids import NO_TXN, TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas.codec import TYPES
from anabranch.protocol.schemas.records import (
    Abort,
    Commit,
    CreateStream,
    DeleteStream,
    DescribeStreams,
    ForgetStream,
    Outcome,
    Prepare,
    Scale,
    StreamList,
)
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import history_topic, journal_topic, stream_topic
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play, killed_at

each_topic = pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])
DONE = StreamList(())


def used(**settings: Any) -> Play:
    """A stream that was used, with plain writes and cut journals."""
    play = Play(clean_records=1, clean_ms=0, **settings)
    for n in range(3):
        plain(play, n)
        assert play.one_shot(GONE) == "COMMITTED"
    assert isinstance(play.ask(Scale(GONE, 3, (), ()), seconds=0.2), StreamList)
    play.play(5, 1.0)
    play.lead_anew(clean_records=1, clean_ms=0)
    play.play(1)
    unknown(play, 5)
    play.play(3)
    return play


def lost(topic: str = stream_topic(GONE), **settings: Any) -> Play:
    """The same, given up."""
    play = used(**settings)
    play.world.cluster.delete_topic(topic)
    plain(play, 3)  # in the index, and never committed
    play.one_shot(GONE)
    play.begun(OTHER)
    play.play(20, 2 * LOST_S)
    assert play.stream_state(GONE) == LOST
    return play


def unknown(play: Play, count: int) -> None:
    """Writes of a transaction that was never begun."""
    header = ((TXN_HEADER, pack_txn_header(play.world.txn_id(), 1, 0)),)
    place = TopicPartition(journal_topic(GONE), 0)
    play.world.cluster.produce(place, [Record(0, 1, KEYS[0], b"stray", header)] * count)


def in_memory(controller: Controller) -> set[object]:
    """Everything by which the controller keeps something in memory."""
    memory, index = controller._memory, controller._intake.index
    background = controller._background
    assert background is not None
    return {
        *controller._tails,
        *controller._autoscaling._scalers,
        *controller._autoscaling._asked,
        *(name for _, name in controller._trouble._troubles),
        *controller._trouble.waiting,
        *background.topics._deleting,
        *memory.merging.may_roll_ms.as_dict(),
        *memory.merging.may_grow_ms.as_dict(),
        *(stream for stream, _ in memory.cleaning.may_move_ms.as_dict()),
        *(stream for stream, _ in controller._intake._known_until),
        *(stream for stream, _ in index.positions),
        *(stream for stream, _ in index.plain_ends),
        *(stream for stream, _ in index.read),
        *index.rejected,
        *(place.topic for place in background.truncator._due),
    }


def plain(play: Play, n: int) -> None:
    """Plain writes, where there is a journal."""
    for partition in (0, 1):
        place = TopicPartition(journal_topic(GONE), partition)
        if place in play.world.cluster.partitions:
            play.world.cluster.produce(place, [Record(0, 1, KEYS[n], b"plain", ())] * 3)


def forget(play: Play, stream: str = GONE) -> Any:
    """The answer, played with time between the steps."""
    return play.ask(ForgetStream(stream), seconds=0.2)


def check_made_anew(play: Play) -> None:
    """A new stream of the name holds only its own events."""
    created = play.ask(CreateStream(GONE, 2, {}))
    assert isinstance(created, StreamList), created
    assert play.events(GONE) == 0
    for _ in range(2):
        assert play.one_shot(GONE) == "COMMITTED"
    _, token, receipt = play.begun(GONE, OTHER)
    assert play.commit(token, receipt).committed == 2 * len(KEYS)
    assert play.events(GONE) == len(KEYS) + 2
    plain(play, 0)
    play.play(5, 1.0)
    assert play.events(GONE) == len(KEYS) + 2 + 6
    unknown(play, 2)
    play.play(3)
    found = play.ask(DescribeStreams(None, GONE)).streams[0]
    rejected = {"unknown_transaction": 2}
    assert (found.state, found.rejected, found.stream_epoch) == (ACTIVE, rejected, 0)
    play.lead_anew(keeps_table=False)
    assert play.one_shot(GONE) == "COMMITTED"
    assert play.events(GONE) == len(KEYS) + 2 + 6 + 1


@each_topic
@pytest.mark.parametrize("anew", [False, True], ids=["gone", "made anew"])
def test_a_lost_stream_is_forgotten_with_what_is_left(topic: str, anew: bool) -> None:
    play = lost(topic)
    if anew:
        play.world.cluster.log("somebody").create_topics([TopicSpec(topic, 1)])
    assert forget(play) == DONE
    assert not [name for name in play.world.cluster.topics if name.startswith("nyc.gone")]
    assert play.one_shot(GONE) == "UnknownStream"
    assert play.one_shot(OTHER) == "COMMITTED"
    check_made_anew(play)


def test_nothing_names_it_any_more_but_that_it_is_forgotten() -> None:
    play = lost()
    assert play.one_shot(OTHER) == "COMMITTED"
    controller = play.controller
    controller._memory.merging.may_grow_ms.put(GONE, 1 << 60)
    controller._memory.merging.may_roll_ms.put(GONE, 1 << 60)
    controller._memory.cleaning.may_move_ms.put((GONE, 0), 1 << 60)
    controller._tails[GONE] = controller._tails[OTHER]
    controller._trouble.may_be_refused(controller.state, [GONE])
    assert GONE in in_memory(controller)
    assert forget(play) == DONE
    assert play.one_shot(OTHER) == "COMMITTED"
    assert not {GONE, journal_topic(GONE)} & in_memory(controller)
    assert OTHER in in_memory(controller)
    keys = [key for key, _ in controller.table.scan(b"") if GONE.encode() in key]
    of_no_txn = [key for key in keys if key.startswith(k.STATUS + NO_TXN)]
    things = k.stream_key(GONE), k.segments_key(GONE)
    left = [k.forgotten_key(GONE), *sorted(map(k.changed_key, things))]
    assert of_no_txn == [k.STATUS + key for key in left]
    derived = [key for key in keys if key[:1] != k.STATUS]
    assert derived == [k.POSITION + b"f" + GONE.encode()]


def test_what_was_to_be_deleted_of_the_old_journal_is_not_deleted_of_the_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:

        def away(*_: Any) -> None:
            raise LogUnavailable("a broker is away")

        patched.setattr(MemoryLog, "delete_records", away)
        play = lost()
        assert journal_topic(GONE) in in_memory(play.controller)
    never = replace(play.controller.settings, clean_ms=1 << 50)
    play.controller.settings = never
    play.controller._memory.cleaning.next_ms = 1 << 60
    forget(play)
    play.ask(CreateStream(GONE, 2, {}))
    for _ in range(20):
        plain(play, 0)
    play.play(10, 100.0)
    place = TopicPartition(journal_topic(GONE), 0)
    log = play.world.cluster.log("reader")
    assert log.end_offsets([place], committed=False)[place] >= 60
    assert log.start_offsets([place]) == {place: 0}


@pytest.mark.parametrize("who", ["truncation", "growth"])
@pytest.mark.parametrize("seconds", [GIVE_UP_S - 1, GIVE_UP_S + 1], ids=["waits", "refused"])
def test_what_names_a_topic_only_is_waited_for(
    who: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = lost()
    command = play.world.send(ForgetStream(GONE))
    with monkeypatch.context() as patched:
        if who == "growth":
            is_under_way = Jobs.is_under_way
            patched.setattr(
                Jobs, "is_under_way", lambda *of: of[1:] == (who, GONE) or is_under_way(*of)
            )
        else:
            patched.setattr(Truncator, "is_at", lambda _, stream: stream == GONE)
        play.play(60, seconds)
        assert play.one_shot(OTHER) == "COMMITTED"
    if seconds > GIVE_UP_S:
        answer = play.world.reply(command)
        assert "brokers don't answer" in answer.message
        assert play.stream_state(GONE) == LOST
        command = play.world.send(ForgetStream(GONE))
    else:
        assert play.controller.state.streams[GONE].state == FORGETTING
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "delete_topics", lambda *_: None)
        play.play(10, 4.0)
        assert play.world.reply(command) is None, "its own time counts from here"
    play.play(10, 4.0)
    assert play.world.reply(command) == DONE


def test_the_scan_of_an_old_history_is_not_used_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play, jobs = Play(), Jobs(threads=False)
    truncator = Truncator(
        play.world.cluster.log("c"), jobs, play.controller._trouble, histories_ms=1
    )
    look = Future[dict[str, int]]()
    monkeypatch.setattr(jobs, "_helpers", {"histories": SimpleNamespace(submit=lambda *_: look)})
    assert truncator.spare(0, lambda: {GONE: 2, OTHER: 2}) == {}
    assert not truncator.is_at(GONE), "a look only reads: no deletion waits for it"
    truncator.forget_stream(GONE)
    truncator._histories._walks[GONE] = _Walk(9, 7)  # it goes on on its thread
    look.set_result({GONE: 7, OTHER: 7})
    assert truncator.spare(0, lambda: {GONE: 2, OTHER: 2}) == {OTHER: 7}
    assert GONE not in truncator._histories._walks


def test_it_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    play = lost()
    first = play.world.send(ForgetStream(GONE))
    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "delete_topics", lambda *_: None)
        play.play(2, 0.2)
        assert play.controller.state.streams[GONE].state == FORGETTING
        for command in (ForgetStream(GONE), CreateStream(GONE, 2, {})):
            assert play.ask(command).code == "NotReady"
        assert play.one_shot(GONE) == "StreamLost"
        assert play.stream_state(GONE) == FORGETTING
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.world.reply(first) is None
    play.play(10, 2.0)
    assert play.world.reply(first) == DONE
    assert forget(play) == DONE, "forgotten already"
    check_made_anew(play)
    refused = forget(play)
    assert refused.code == "IllegalState", "it is not lost"
    assert play.stream_state(GONE) == ACTIVE


def test_what_is_not_lost_is_not_forgotten() -> None:
    play = lost()
    assert forget(play, OTHER).code == "IllegalState"
    assert forget(play, "nyc/none").code == "UnknownStream"
    assert play.one_shot(OTHER) == "COMMITTED"
    play.world.cluster.delete_topic(stream_topic(OTHER))
    play.one_shot(OTHER)
    assert play.ask(ForgetStream(OTHER)).code == "NotReady", "it is missing so far"


def test_a_stream_is_deleted_once_no_transaction_has_a_part_in_it() -> None:
    play = used()
    open_id, token, receipt = play.begun(GONE, OTHER)
    prepared_id, to_prepare, also = play.begun(GONE)
    by = Prepare(b"", b"me")
    assert isinstance(
        play.ask(Commit(to_prepare, (also,), None, None, 60_000, prepare=by)), Outcome
    )
    plain(play, 0)
    for over in (Commit(token, (receipt,), None, None, 60_000), Abort(to_prepare, "")):
        refused = play.ask(DeleteStream(GONE))
        assert refused.code == "IllegalState"
        assert prepared_id.hex() in refused.message
        assert (open_id.hex() in refused.message) == isinstance(over, Commit)
        assert play.stream_state(GONE) == ACTIVE
        assert isinstance(play.ask(over), Outcome)
    assert play.ask(DeleteStream(GONE), seconds=0.2) == DONE
    assert not [name for name in play.world.cluster.topics if name.startswith("nyc.gone")]
    assert play.one_shot(GONE) == "UnknownStream"
    assert play.ask(DeleteStream(GONE)) == DONE, "repeated by another"
    check_made_anew(play)


# Each call before and after, forgotten the one time and deleted the other time.
ENDS = [
    (call, phase, (ForgetStream, DeleteStream)[(at + number + kind) % 2], kind)
    for at, call in enumerate(("describe_topics", "delete_topics", "append", "commit", "send"))
    for number, phase in enumerate(("", ".after"))
    for kind in (0, 1)
]


@pytest.mark.parametrize(
    ("call", "phase", "taken"),
    [pytest.param(*end, marks=pytest.mark.soak if more else ()) for *end, more in ENDS],
)
def test_a_successor_deletes_it_wherever_a_leader_ends(call: str, phase: str, taken: Any) -> None:
    """Killed at every port call of forgetting or deleting, one after the other, it is gone once."""

    def start() -> tuple[Play, Any]:
        play = lost(journal_topic(GONE)) if taken is ForgetStream else used()
        return play, taken(GONE)

    for play, asked in killed_at(call + phase, start):
        assert play.world.reply(asked) == DONE
        check_made_anew(play)


@pytest.mark.parametrize("done", [False, True])
def test_an_older_controller_does_not_lead_where_something_was_forgotten(
    done: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the intent on: it would make a new stream over the rest of the old one."""
    play = lost()
    play.world.send(ForgetStream(GONE))
    play.play(20 if done else 1, 4.0)
    assert (GONE in play.controller.state.streams) is not done
    with monkeypatch.context() as older:
        older.delitem(TYPES, 80)
        with pytest.raises(UnsupportedVersion, match="a newer"):
            play.lead_anew(keeps_table=False)
    play.lead_anew()
    play.play(20, 4.0)
    check_made_anew(play)


def test_a_table_that_was_away_takes_nothing_old_for_new() -> None:
    play = lost(stream_topic(GONE))
    away = play.store
    play.lead_anew(keeps_table=False)
    assert forget(play) == DONE
    play.ask(CreateStream(GONE, 2, {}))
    plain(play, 0)
    play.play(3, 0.1)
    assert play.events(GONE) == 6
    play.store = away
    play.lead_anew()
    play.play(5, 1.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"
    plain(play, 1)
    play.play(5, 1.0)
    assert play.events(GONE) == 6 + 1 + 6
    assert play.ask(DescribeStreams(None, GONE)).streams[0].rejected == {}


def test_a_process_that_leads_no_more_deletes_nothing_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It stands still before it looks for leftovers; meanwhile a successor forgets, and the stream is made anew."""
    play = lost()
    play.world.send(ForgetStream(GONE))
    zombie = play.controller
    describe = MemoryLog.describe_topics
    meanwhile: list[bool] = []

    def described(log: MemoryLog, names: Any) -> Any:
        if log is zombie.log and not meanwhile:
            meanwhile.append(True)
            play.controller = play.world.led("b", store=MemoryStore())
            play.play(10, 2.0)
            assert play.one_shot(GONE) == "UnknownStream"
            play.ask(CreateStream(GONE, 2, {}))
            assert play.one_shot(GONE) == "COMMITTED"
        return describe(log, names)

    fetch = MemoryLog.fetch

    def fetched(log: MemoryLog, *args: Any, **more: Any) -> Any:
        late = log is zombie.log and bool(
            meanwhile
        )  # so it hears nothing that it would have to write of
        return {} if late else fetch(log, *args, **more)

    monkeypatch.setattr(MemoryLog, "describe_topics", described)
    monkeypatch.setattr(MemoryLog, "fetch", fetched)
    with pytest.raises(LogFenced):
        play_on(zombie, play)
    assert meanwhile
    assert play.one_shot(GONE) == "COMMITTED"
    assert play.events(GONE) == 2


def play_on(controller: Controller, play: Play) -> None:
    """Steps of a controller, until it fails."""
    for _ in range(20):
        controller.step(0)
        play.world.clock.sleep(0.2)


@pytest.mark.parametrize("again", [False, True], ids=["refused", "made anew again and again"])
def test_topics_that_do_not_go_are_named(again: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    play = lost()
    delete = MemoryLog.delete_topics

    def delete_topics(log: MemoryLog, topics: Any) -> None:
        if not again:
            raise LogRefused("delete.topic.enable is false", 73)
        delete(log, topics)
        log.create_topics([TopicSpec(topic.name, 1) for topic in topics])

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "delete_topics", delete_topics)
        command = play.world.send(ForgetStream(GONE))
        play.play(20, 2 * GIVE_UP_S)
        answer = play.world.reply(command)
        assert answer.code == ("NotReady" if again else "InvalidArgument")
        for topic in (journal_topic, history_topic):
            assert topic(GONE) in answer.message
        assert play.stream_state(GONE) == LOST
    play.world.send(ForgetStream(GONE), again=command)
    play.play(20, 4.0)
    assert play.world.replies(command)[-1] == DONE
    check_made_anew(play)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        ("delete_topics", LogUnavailable("THROTTLING_QUOTA_EXCEEDED")),
        ("describe_topics", LogRefused("TOPIC_AUTHORIZATION_FAILED", 29, (journal_topic(GONE),))),
    ],
)
def test_brokers_that_cannot_be_asked_to_delete_end_no_lead(
    call: str, error: LogError, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lead began with the same call, and ended of it, for as long as that lasted."""
    play = lost()
    original = getattr(MemoryLog, call)

    def called(log: MemoryLog, topics: Any) -> Any:
        if journal_topic(GONE) in [getattr(topic, "name", topic) for topic in topics]:
            raise error
        return original(log, topics)

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, call, called)
        command = play.world.send(ForgetStream(GONE))
        play.play(2, 0.2)
        play.lead_anew()
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.world.reply(command) is None
        play.play(50, GIVE_UP_S + 5)
        answer = play.world.reply(command)
        assert answer.code == "NotReady"
        assert play.stream_state(GONE) == LOST
    assert forget(play) == DONE
    check_made_anew(play)


def test_brokers_that_know_nothing_yet_do_not_make_it_forgotten() -> None:
    play = lost()
    broker = play.world.cluster
    command = play.world.send(ForgetStream(GONE))
    topics = dict(broker.topics)
    broker.topics.clear()
    play.play(10, GIVE_UP_S / 2)
    assert play.world.reply(command) is None
    assert play.controller.state.streams[GONE].state == FORGETTING
    broker.topics.update(topics)
    play.play(10, 2.0)
    assert play.world.reply(command) == DONE
    assert journal_topic(GONE) not in broker.topics


def test_a_new_stream_that_misses_a_topic_is_waited_for_as_any_other() -> None:
    play = Play()
    play.make_anew(history_topic(GONE))  # so it is known to be lost at once
    play.one_shot(GONE)
    play.play(3)
    assert play.stream_state(GONE) == LOST
    forget(play)
    play.ask(CreateStream(GONE, 2, {}))
    bring_back = play.world.take_away(journal_topic(GONE))
    play.play(10, LOST_S / 2)
    assert play.one_shot(GONE) == "NotReady"
    bring_back()
    play.play(10, 5.0)
    assert play.one_shot(GONE) == "COMMITTED"


def test_a_history_that_was_left_is_refused_by_name() -> None:
    play = lost()
    leave = play.world.take_away(history_topic(GONE))
    forget(play)
    leave()
    refused = play.ask(CreateStream(GONE, 2, {}))
    assert refused.code == "TopicMisconfigured"
    assert history_topic(GONE) in refused.message
    assert play.one_shot(GONE) == "UnknownStream"
