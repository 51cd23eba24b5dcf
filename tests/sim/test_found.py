"""What simulation has found, each as a short play of its own: a seed means something else after every change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from unittest.mock import Mock

import pytest

from anabranch.batches.records import Record
from anabranch.controller.controller import Controller
from anabranch.core.stream_states import ACTIVE, LOST, WAITING
from anabranch.errors import OutcomeUnknown, TransactionAborted
from anabranch.ports import LogFenced, LogUnavailable, TopicInfo, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.testing.memory.client import memory_client
from anabranch.testing.memory.log import MemoryLog
from anabranch.testing.memory.table import MemoryStore
from anabranch.testing.memory.trouble import Kind, Trouble
from anabranch.topics.names import control_topic, history_topic, journal_topic, stream_topic
from tests.client.doubles import counted
from tests.client.world import World as ClientWorld
from tests.controller.losing import GONE, KEYS, LOST_S, OTHER, TOPICS, Play
from tests.controller.world import World
from tests.core.labels import SECRET
from tests.sim.simulation import simulate
from tests.sim.tables import Noted, TableMachine


def written(
    world: World,
    controller: Controller,
    events: list[tuple[bytes, bytes]],
    *,
    one_batch: bool = True,
) -> tuple[bytes, r.Commit]:
    """A transaction that has written these to nyc/a, and its commit, which is not sent yet."""
    txn_id = world.txn_id()
    begun = world.ask(controller, r.Begin(txn_id, "nyc", None, 60_000, SECRET))
    touched = world.ask(controller, r.Touch(begun.token, "nyc/a"))
    receipt = world.write(txn_id, 1, "nyc/a", touched.segments, events, one_batch=one_batch)
    return txn_id, r.Commit(begun.token, (receipt,), (), None, 1000)


def test_what_a_zombie_read_of_the_journals_is_read_again() -> None:
    """A leader that is fenced, and does not know it yet, goes on reading journals with an old state.

    It takes the writes of newer transactions for strangers'. When it leads again it must read them again, or
    these can never be committed.
    """
    world = World()
    zombie = world.controller("zombie", store=MemoryStore())
    zombie.lead()
    world.stream(zombie, "nyc/a", segments=1)
    successor = world.controller("successor")
    successor.lead()
    _, commit = written(world, successor, [(b"k", b"v")])
    with pytest.raises(LogFenced):
        zombie.step(0)  # it reads commands and journals; only its round is refused
    zombie.lead()
    outcome = world.ask(zombie, commit)
    assert isinstance(outcome, r.Outcome), outcome
    assert (outcome.state, outcome.committed) == ("COMMITTED", 1)


@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(seed, marks=pytest.mark.long if seed == 0 else pytest.mark.soak)
        for seed in range(5)
    ],
)
def test_merges_fit_into_the_batches_that_their_streams_take(seed: int) -> None:
    """A decided transaction was aborted, because what its merge put together was refused as too large."""
    report = simulate(seed, tight=True, readers=0)
    assert not report.violation, str(report)


def test_a_new_leader_continues_a_merge_only_when_it_has_read_the_journals() -> None:
    """Without a table it saw nothing to carry, took that for all, and merged the transaction without its events."""
    world = World()
    leader = world.controller("leader", chunk_bytes=200)
    leader.lead()
    world.stream(leader, "nyc/a", segments=1)
    events = [(b"k", b"%d" % i) for i in range(20)]
    txn_id, commit = written(world, leader, events, one_batch=False)
    asked = world.send(commit)
    for _ in range(10):
        if leader.state.open[txn_id].staged_merges:
            break
        leader.step(0)
        world.clock.sleep(0.1)
    successor = world.controller("successor", store=MemoryStore(), chunk_bytes=200)
    successor.lead()
    for _ in range(40):
        successor.step(0)
        world.clock.sleep(0.1)
    outcome = world.reply(asked)
    assert isinstance(outcome, r.Outcome), outcome
    assert (outcome.state, outcome.committed) == ("COMMITTED", 20)
    partitions = range(successor.state.streams["nyc/a"].partitions)
    places = [TopicPartition(stream_topic("nyc/a"), number) for number in partitions]
    assert sum(len(world.committed(place)) for place in places) == 20


def test_what_a_round_writes_to_a_journal_fits_into_its_batches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commits of one round came to one batch of ops that the journal refused, again and again: none ever ended."""
    monkeypatch.setattr(limits, "LEAST_MESSAGE", limits.LEAST_MESSAGE._replace(value=1))
    world = World()
    leader = world.controller("leader")
    leader.lead()
    world.ask(leader, r.FindScope("nyc", True))
    world.ask(leader, r.CreateStream("nyc/a", 1, {"max.message.bytes": "450"}))
    commits = [written(world, leader, [(b"k", b"v")])[1] for _ in range(12)]
    told = [world.send(commit) for commit in commits]
    for _ in range(6):
        leader.step(0)
    outcomes = [world.reply(one) for one in told]
    assert [(one.state, one.committed) for one in outcomes] == [("COMMITTED", 1)] * 12


def test_a_scope_is_served_though_the_directorys_record_was_deleted_unread() -> None:
    """Its control partition did not know it, for ever: the directory sends it once."""
    world = World(control_partitions=2)
    directory, other = world.controller("directory"), world.controller("other", 1)
    directory.lead()
    world.ask(directory, r.FindScope("first", True))
    assert world.ask(directory, r.FindScope("s", True)).control_partition == 1
    control = world.cluster.partition(TopicPartition(control_topic(), 1))
    control.delete_below(control.end_offset)
    other.lead()
    refusal = world.ask(other, r.CreateStream("s/a", 1, {}))
    assert isinstance(refusal, r.Refusal)
    assert refusal.code == "UnknownScope"
    world.ask(directory, r.FindScope("s", True))
    assert isinstance(world.ask(other, r.CreateStream("s/a", 1, {})), r.StreamList)


def test_a_handle_keeps_the_id_that_was_aborted() -> None:
    """An interrupted commit was resolved by another client; when it was repeated, the handle forgot the id."""
    world = ClientWorld()
    world.client.create_stream("nyc/a")
    txn = world.client.begin("nyc")
    txn.write("nyc/a", b"v", key=b"k")
    world.fault = lambda name: KeyboardInterrupt() if name == "produce" and txn.txn_id else None
    with pytest.raises(KeyboardInterrupt):
        txn.commit()
    txn_id, world.fault = txn.txn_id, None
    assert txn_id is not None
    assert world.client.resolve(txn_id).state == "ABORTED"
    with pytest.raises(TransactionAborted):
        txn.commit()
    assert txn.txn_id == txn_id


@pytest.mark.parametrize("topic", [stream_topic, history_topic])
def test_finding_how_far_histories_may_be_cut_holds_up_no_commit(
    topic: Callable[[str], str],
) -> None:
    """Each fetch waited for the leader of a partition that had none, and all other streams with it."""
    play = Play(clean_history_ms=400)
    play.world.cluster.troubles[TopicPartition(topic(GONE), 0)] = Trouble(Kind.LEADERLESS)
    for _ in range(10):
        began = play.world.clock.now
        assert play.one_shot(OTHER) == "COMMITTED"
        assert play.world.clock.now == began
        play.world.clock.sleep(0.5)


def test_growing_does_not_end_half_way_for_a_partition_in_trouble() -> None:
    """The topics had grown, and the stream had not: nobody read plain writes in the journal's new partitions."""
    play = Play()
    troubled = TopicPartition(stream_topic(GONE), 0)
    play.world.cluster.troubles[troubled] = Trouble(Kind.DENYING)
    play.world.send(r.Scale(GONE, 4, (), ()))
    play.play(10, 5.0)
    place = TopicPartition(journal_topic(GONE), 3)
    play.world.cluster.produce(place, [Record(0, 1, b"k", b"plain")])
    del play.world.cluster.troubles[troubled]
    play.play(60, 60.0)
    places = [place for place in play.world.cluster.partitions if place.topic == troubled.topic]
    assert b"plain" in {e.value for place in places for e in play.world.committed(place)}


def test_a_long_transaction_in_doubt_ends_the_machines_heartbeats() -> None:
    """The simulator kept its handle, whose heartbeats kept it open: no run with it came to an end."""
    txn = Mock(timestamp=1)
    txn.token.return_value = b"token"
    txn.commit.side_effect = txn.abort.side_effect = OutcomeUnknown("no answer", txn_id=None)
    txn.get.return_value, txn.scan.return_value = None, []
    txn.is_alone = False
    machine = TableMachine(Mock(seed=0), Mock(), Mock(), Mock(), noted := Noted(), 0)
    for _ in range(20):
        machine._long(Mock(**{"begin.return_value": txn}))
    machine.close()
    assert txn.commit.called
    assert noted.long == []


def test_a_ledger_s_commit_that_waits_is_no_alarm_in_another_lane() -> None:
    """It asked for the state by the id alone, and the answer was that there is no such transaction."""
    world, secret = ClientWorld(), b"s" * SECRET_SIZE
    world.client.create_stream("nyc/a")
    admin = memory_client(world.cluster.log("admin"), world.clock, counted(), lane=ADMIN_LANE)
    admin.add_lane("other")
    txn = world.client.begin("nyc")
    txn.write("nyc/a", b"v", key=b"k")
    assert txn.prepare(by=sha256(secret).digest()).state == "PREPARED"
    place = TopicPartition(stream_topic("nyc/a"), 0)
    world.cluster.troubles[place] = Trouble(Kind.LEADERLESS)
    log = world.cluster.log("other")
    other = memory_client(log, world.clock, counted(), lane="other")
    with pytest.raises(OutcomeUnknown, match="has no leader"):
        other.commit(txn.txn_id or b"", secret=secret, timeout=5.0)
    del world.cluster.troubles[place]
    assert other.commit(txn.txn_id or b"", secret=secret).counts.committed == 1


# Topics that were deleted by hand.


@pytest.mark.parametrize("anew", [False, True], ids=["deleted", "made anew"])
@pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])
def test_a_stream_that_grows_when_its_topic_goes_holds_up_no_other_stream(
    topic: str, anew: bool
) -> None:
    """With its history made anew, its growth could not be logged: no leader stayed."""
    play = Play()
    play.world.send(r.Scale(GONE, 4, (), ()))
    if anew:
        play.make_anew(topic)
    else:
        play.world.cluster.delete_topic(topic)
    play.play(3)
    play.lead_anew()
    play.play(3)
    assert play.one_shot(OTHER) == "COMMITTED"
    play.play(80, 2 * LOST_S)
    assert play.one_shot(OTHER) == "COMMITTED"
    assert play.one_shot(GONE) in ("StreamLost", "NotReady", "COMMITTED")


@pytest.mark.parametrize("topic", [topic(GONE) for topic in TOPICS])
def test_scaling_a_stream_without_a_topic_is_refused_as_not_ready(topic: str) -> None:
    """The answer was that the call is wrong; and the stream's topics were not checked."""
    play = Play()
    play.world.cluster.delete_topic(topic)
    refusal = play.ask(r.Scale(GONE, 4, (), ()))
    assert isinstance(refusal, r.Refusal)
    assert refusal.code == "NotReady"
    play.play(2)
    assert play.stream_state(GONE) == WAITING


def test_a_history_made_anew_is_not_taken_for_the_old_one_by_the_last_of_several_records() -> None:
    """The last of two records had a higher offset than the only one of the old history: no leader stayed."""
    play = Play()
    play.world.stream(play.controller, "nyc/young", segments=1)
    play.make_anew(history_topic("nyc/young"))
    events = [r.Event("nyc/young", 0, b"k", b"v", (), -1) for _ in range(2)]
    for event in events:
        play.world.send(r.OneShot(play.world.txn_id(), "nyc", None, (event,)))
    play.play(3)
    place = TopicPartition(history_topic("nyc/young"), 0)
    assert not play.world.committed(place)
    play.play(40, 2 * LOST_S)
    play.lead_anew()
    assert play.stream_state("nyc/young") == LOST
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_big_merge_that_waits_for_partitions_does_not_wait_for_ever() -> None:
    """The stream can't grow, for lack of its history: nothing else needed that, so it was never missed."""
    play = Play(chunk_bytes=1_000)
    txn_id, token, receipt = play.begun(GONE, OTHER, size=300)
    play.world.cluster.delete_topic(history_topic(GONE))
    commit = play.world.send(r.Commit(token, (receipt,), None, None, 60_000))
    play.play(60, 3 * LOST_S)
    assert play.state(txn_id)[0] == "ABORTED"
    assert isinstance(play.world.reply(commit), r.Refusal)
    assert play.stream_state(GONE) == LOST


def test_what_was_missing_once_is_not_given_up_for_want_of_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Missing for a moment, then no broker answered for long: that was taken for missing all the time."""
    play = Play()
    broker, topic = play.world.cluster, stream_topic(GONE)
    info, kept = (
        broker.topics[topic],
        {p: log for p, log in broker.partitions.items() if p.topic == topic},
    )
    broker.delete_topic(topic)
    assert play.one_shot(GONE) == "NotReady"
    broker.topics[topic] = info
    broker.partitions.update(kept)

    def away(_: MemoryLog, names: Sequence[str]) -> dict[str, TopicInfo]:
        raise LogUnavailable(f"no broker answers for {len(names)} topics")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryLog, "describe_topics", away)
        play.play(10, 2 * LOST_S)
        assert play.stream_state(GONE) == WAITING
    play.play(3, 3.0)
    assert play.stream_state(GONE) == ACTIVE
    assert play.one_shot(GONE) == "COMMITTED"


@pytest.mark.parametrize("more", [0, 1, 20], ids=["as many", "one more", "more"])
@pytest.mark.parametrize("looks", [True, False], ids=["a new leader", "the same leader"])
@pytest.mark.parametrize("one_batch", [True, False], ids=["other batches", "the same batches"])
def test_others_records_in_a_journal_made_anew_are_not_taken_for_a_transactions(
    more: int, looks: bool, one_batch: bool
) -> None:
    """The journal was full again before its leader looked: what was weighed in the old one was merged by offset."""
    play = Play()
    txn_id, token, receipt = play.begun(GONE, OTHER)
    other = play.ask(r.Begin(play.world.txn_id(), "nyc", None, 600_000, SECRET))
    touched = play.ask(r.Touch(other.token, GONE))
    play.make_anew(journal_topic(GONE))
    # As big, and in the same places: only what they are tells them from those that were there.
    strangers = [(key, b"y" * 8) for key in KEYS]
    for events in (strangers, [(key, b"z") for key in KEYS * more]):
        play.world.write(
            other.txn_id, 9, GONE, touched.segments, events, epoch=0, one_batch=one_batch
        )
    if looks:
        play.lead_anew()
    play.world.send(r.Commit(token, (receipt,), None, None, 60_000))
    play.play(40, 2 * LOST_S)
    state, _ = play.state(txn_id)
    assert state == "ABORTED"
    values = {
        record.value
        for p in (0, 1)
        for record in play.world.committed(TopicPartition(stream_topic(GONE), p))
    }
    assert values <= {b"v"}, "nobody committed these"
    assert play.events(OTHER) == 1, "its part in the other stream neither"
    assert play.one_shot(OTHER) == "COMMITTED"


def test_a_refused_touch_of_a_missing_stream_counts_as_a_heartbeat() -> None:
    """A refused touch did not count: a transaction whose client repeated it went stale."""
    play = Play()
    txn_id = play.world.txn_id()
    begun = play.ask(r.Begin(txn_id, "nyc", None, 4_000, SECRET))
    play.world.cluster.delete_topic(stream_topic(GONE))
    assert play.one_shot(GONE) == "NotReady"
    for _ in range(10):
        assert play.ask(r.Touch(begun.token, GONE)).code == "NotReady"
        play.play(2, 2.0)
    assert play.state(txn_id)[0] == "OPEN"
    play.play(10, 10.0)
    assert play.state(txn_id)[0] == "ABORTED"
