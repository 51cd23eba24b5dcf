"""What simulation has found, each as a short play of its own: a seed means something else after every change."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from unittest.mock import Mock

import pytest

from anabranch.batches.records import Record
from anabranch.errors import OutcomeUnknown, TransactionAborted
from anabranch.ports import LogFenced, TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import control_topic, history_topic, journal_topic, stream_topic
from tests.client.doubles import counted
from tests.client.memory import memory_client
from tests.client.world import World as ClientWorld
from tests.controller.losing import GONE, OTHER, Play
from tests.controller.world import World
from tests.core.labels import SECRET
from tests.memory.table import MemoryStore
from tests.memory.trouble import Kind, Trouble
from tests.sim.simulation import simulate
from tests.sim.tables import Noted, TableMachine


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
    txn_id = world.txn_id()
    begun = world.ask(successor, r.Begin(txn_id, "nyc", None, 60_000, SECRET))
    touched = world.ask(successor, r.Touch(begun.token, "nyc/a"))
    receipt = world.write(txn_id, 1, "nyc/a", touched.segments, [(b"k", b"v")])
    with pytest.raises(LogFenced):
        zombie.step(0)  # it reads commands and journals; only its round is refused
    zombie.lead()
    outcome = world.ask(zombie, r.Commit(begun.token, (receipt,), (), None, 1000))
    assert isinstance(outcome, r.Outcome), outcome
    assert (outcome.state, outcome.committed) == ("COMMITTED", 1)


def test_merges_fit_into_the_batches_that_their_streams_take() -> None:
    """A decided transaction was aborted, because what its merge put together was refused as too large."""
    for seed in range(5):
        report = simulate(seed, tight=True, readers=0)
        assert not report.violation, str(report)


def test_a_new_leader_carries_on_only_when_it_has_read_the_journals() -> None:
    """Without a table it saw nothing to carry, took that for all, and merged the transaction without its events."""
    world = World()
    leader = world.controller("leader", chunk_bytes=200)
    leader.lead()
    world.stream(leader, "nyc/a", segments=1)
    txn_id = world.txn_id()
    begun = world.ask(leader, r.Begin(txn_id, "nyc", None, 60_000, SECRET))
    touched = world.ask(leader, r.Touch(begun.token, "nyc/a"))
    events = [(b"k", b"%d" % i) for i in range(20)]
    receipt = world.write(txn_id, 1, "nyc/a", touched.segments, events, one_batch=False)
    asked = world.send(r.Commit(begun.token, (receipt,), (), None, 1000))
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
    asked = []
    for _ in range(12):
        txn_id = world.txn_id()
        begun = world.ask(leader, r.Begin(txn_id, "nyc", None, 60_000, SECRET))
        touched = world.ask(leader, r.Touch(begun.token, "nyc/a"))
        receipt = world.write(txn_id, 1, "nyc/a", touched.segments, [(b"k", b"v")])
        asked.append(r.Commit(begun.token, (receipt,), (), None, 1000))
    told = [world.send(command) for command in asked]
    for _ in range(6):
        leader.step(0)
    outcomes = [world.reply(one) for one in told]
    assert [(one.state, one.committed) for one in outcomes] == [("COMMITTED", 1)] * 12


def test_a_scope_is_served_though_what_the_directory_told_was_deleted_unread() -> None:
    """Its control partition did not know it, for ever: the directory told it once."""
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
    """An interrupted commit was resolved by somebody: told so when it came again, the handle forgot the id."""
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
def test_nobody_waits_while_it_is_looked_how_far_histories_may_be_cut(
    topic: Callable[[str], str],
) -> None:
    """Each look waited for the leader of a partition that had none, and all other streams with it."""
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


def test_a_long_transaction_in_doubt_is_let_go() -> None:
    """The simulator held on to it, so it beat for what nobody would end: no run with it came to an end."""
    txn = Mock(timestamp=1)
    txn.token.return_value = b"token"
    txn.commit.side_effect = txn.abort.side_effect = OutcomeUnknown("no answer", txn_id=None)
    txn.get.return_value, txn.scan.return_value = None, []
    machine = TableMachine(Mock(seed=0), Mock(), Mock(), Mock(), noted := Noted(), 0)
    for _ in range(20):
        machine._long(Mock(**{"begin.return_value": txn}))
    machine.close()
    assert txn.commit.called
    assert noted.long == []


def test_a_ledger_s_commit_that_waits_is_no_alarm_in_another_lane() -> None:
    """It asked how that one stands by the id alone, and was told that there is no such transaction."""
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
