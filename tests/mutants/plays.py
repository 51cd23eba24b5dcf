"""Short plays: the exact order of events in which a planted bug does harm, where chance rarely brings it about.

Each is played by real controllers over the in-memory log, and fails under its bug (`catalogue.Mutant.play`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from anabranch.batches.records import Record, decode_records, encode_batch
from anabranch.client.session import Session
from anabranch.controller import suspects
from anabranch.controller.controller import Controller
from anabranch.core.authorize import ALL
from anabranch.errors import AlreadyCommitted, NotLeader
from anabranch.kafka.data import PartitionFetch, fetched
from anabranch.ports import LogFenced, TopicPartition
from anabranch.protocol.ids import make_txn_id
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import Rights, narrow
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import journal_topic, replies_topic, stream_topic, transactional_ids
from tests.client.answers import outcome, token_of
from tests.client.doubles import scripted_ports
from tests.client.world import World as ClientWorld
from tests.controller.world import World
from tests.core.labels import SECRET
from tests.sim import poison

STREAM = "nyc/a"
LANE = "etl"
PLACE = TopicPartition(stream_topic(STREAM), 0)
KEEPALIVE_S = 2.0
CHUNK_BYTES = 1000  # of a merge that is carried; the write below has more


def _opened() -> tuple[World, Controller]:
    """A leader with a stream of one segment."""
    world = World()
    leader = world.controller("leader")
    leader.lead()
    world.stream(leader, STREAM, segments=1)
    return world, leader


def _values(world: World) -> list[bytes | None]:
    return [record.value for record in world.committed(PLACE)]


def _begin(world: World, leader: Controller) -> tuple[bytes, bytes]:
    """(transaction id, token) of a transaction that was begun."""
    txn_id = world.txn_id()
    begun = world.ask(leader, r.Begin(txn_id, "nyc", None, int(KEEPALIVE_S * 1000), SECRET))
    return txn_id, begun.token


class _Between:
    """A log that does something just before a transactional id is initialised."""

    def __init__(self, log: Any, transactional_id: str, meanwhile: Callable[[], None]) -> None:
        self._log = log
        self._id = transactional_id
        self._meanwhile = meanwhile

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    def producer(self, transactional_id: str, *, timeout: float) -> Any:
        if transactional_id == self._id:
            self._meanwhile()
        return self._log.producer(transactional_id, timeout=timeout)


def a_rival_leads_between_a_and_b() -> None:
    """One took A; another one led, did a round through B, and holds A; then the first takes B.

    Only the TERM record, which goes through A, shows the first one that it is too late. Each of the two could do
    one more round, on a fold without the other's.
    """
    world, _ = _opened()
    rival = world.controller("rival")
    torn = world.controller("torn")

    def meanwhile() -> None:
        rival.lead()
        world.ask(rival, r.FindScope("other", True))  # one round: its next one goes through A

    torn.log = _Between(torn.log, transactional_ids(0)[1], meanwhile)
    leading = [rival]
    with contextlib.suppress(LogFenced, NotLeader):
        torn.lead()
        leading.append(torn)
    event = r.Event(STREAM, -1, b"k", b"once", (), -1)
    world.send(r.OneShot(world.txn_id(), "nyc", None, (event,)))
    for one in leading:
        with contextlib.suppress(LogFenced):
            one.step(0)
    assert _values(world) == [b"once"]


def heartbeats_wait_unread() -> None:
    """A leader that stood still for longer than a keepalive reads what came meanwhile in pieces."""
    world, leader = _opened()
    txn_id, token = _begin(world, leader)
    for _ in range(4):
        world.clock.sleep(KEEPALIVE_S / 2)
        world.send(r.GetState(txn_id))
        world.send(r.Heartbeat((token,)))
    with patch.object(suspects, "MAX_COMMANDS", 1):
        leader.step(0)
        state = world.ask(leader, r.GetState(txn_id), steps=20).state
    assert state == "OPEN", f"it was never silent for its keepalive, and is {state}"


def a_number_comes_too_late() -> None:
    """Numbers 1 and 3 of a series are committed; then a client comes with number 2."""
    world, leader = _opened()
    answers = []
    for number in (1, 3, 2):
        _, token = _begin(world, leader)
        answers.append(world.ask(leader, r.Commit(token, (), (), "series", 1000, number)))
    assert [getattr(answer, "state", None) for answer in answers[:2]] == ["COMMITTED"] * 2
    assert isinstance(answers[2], r.Refusal), f"number 2 is {answers[2].state} after number 3"


def some_writers_are_left_out() -> None:
    """One writer registered, another one's receipt is named: the answer says which was taken."""
    world, leader = _opened()
    txn_id, token = _begin(world, leader)
    touched = world.ask(leader, r.Touch(token, STREAM))
    mine, other = (
        world.write(txn_id, writer, STREAM, touched.segments, [(b"k", b"%d" % writer)])
        for writer in (1, 2)
    )
    world.ask(leader, r.Register(token, mine))
    outcome = world.ask(leader, r.Commit(token, (), (other,), None, 1000))
    assert _values(world) == [b"2"]
    assert outcome.writers == (other,), "the answer names writers that were not taken"


def a_commit_is_sent_again_and_again() -> None:
    """The journal never shows what its receipt claims, and its client asks every two seconds."""
    world, leader = _opened()
    txn_id, token = _begin(world, leader)
    touched = world.ask(leader, r.Touch(token, STREAM))
    true = world.write(txn_id, 1, STREAM, touched.segments, [(b"k", b"v")])
    (extent,) = true.extents
    command = r.Commit(
        token, (replace(true, extents=(replace(extent, end=extent.end + 5),)),), None, None, 5000
    )
    sent = world.send(command)
    for _ in range(3):
        leader.step(0)
        world.clock.sleep(2.0)
        world.send(command, again=sent)
    leader.step(0)
    assert [answer.code for answer in world.replies(sent)] == ["ReceiptsNotCovered"]


def a_command_can_not_be_decided() -> None:
    """Controllers' code fails for one command: the next one is answered all the same."""
    world, leader = _opened()
    with poison.failing_decisions():
        world.send(r.DescribeStreams(None, poison.DEFECT))
        sent = world.send(r.DescribeStreams(None, STREAM))
        for _ in range(20):
            leader.step(0)
    assert isinstance(world.reply(sent), r.StreamList)


def an_interrupt_ends_a_commit() -> None:
    """Ctrl-C just after a one-shot was sent; then `abort`, which promises that nothing of it is ever seen."""
    world = ClientWorld()
    world.client.create_stream(STREAM)
    txn = world.client.begin("nyc")
    txn.write(STREAM, b"v", key=b"k")
    world.fault = lambda name: KeyboardInterrupt() if name == "produce.after" else None
    with contextlib.suppress(KeyboardInterrupt):
        txn.commit()
    world.fault = None
    with contextlib.suppress(AlreadyCommitted):
        txn.abort()
        assert txn.txn_id is not None
        state = world.client.state(txn.txn_id).state
        assert state == "ABORTED", f"abort() returned, and it is {state}"


def a_zombie_reads_on() -> None:
    """A leader that is fenced and does not know it reads journals with an old state, and leads again.

    What it takes for strangers' must be read again, or it can never be committed.
    """
    world = World()
    zombie = world.controller("zombie", store=MemoryStore())
    zombie.lead()
    world.stream(zombie, STREAM, segments=1)
    successor = world.controller("successor")
    successor.lead()
    txn_id, token = _begin(world, successor)
    touched = world.ask(successor, r.Touch(token, STREAM))
    receipt = world.write(txn_id, 1, STREAM, touched.segments, [(b"k", b"v")])
    with contextlib.suppress(LogFenced):
        zombie.step(0)
    zombie.lead()
    outcome = world.ask(zombie, r.Commit(token, (receipt,), (), None, 1000))
    assert getattr(outcome, "state", None) == "COMMITTED", f"it was answered with {outcome}"
    assert _values(world) == [b"v"]


def a_carrier_outlives_its_leader() -> None:
    """A leader that carries a merge is followed by another one, and does one more chunk before it learns it."""
    world = World()
    old = world.controller("old", chunk_bytes=CHUNK_BYTES)
    old.lead()
    world.stream(old, STREAM, segments=1)
    txn_id, token = _begin(world, old)
    touched = world.ask(old, r.Touch(token, STREAM))
    written = [b"%d" % number * 300 for number in range(8)]
    events = [(b"k", value) for value in written]
    receipt = world.write(txn_id, 1, STREAM, touched.segments, events, one_batch=False)
    commit = world.send(r.Commit(token, (receipt,), (), None, 60_000))

    def carried() -> int:
        return sum(row.count for row in old.state.open[txn_id].staged_merges.values())

    for _ in range(20):
        old.step(0)
        world.clock.sleep(0.1)
        if carried():
            break
    assert 0 < carried() < len(written), "it is not carried in chunks"
    successor = world.controller("successor", chunk_bytes=CHUNK_BYTES)
    successor.lead()
    with contextlib.suppress(LogFenced):
        old.step(0)
    for _ in range(20):
        successor.step(0)
        world.clock.sleep(0.1)
    assert getattr(world.reply(commit), "state", None) == "COMMITTED"
    places = [place for place in world.cluster.partitions if place.topic == PLACE.topic]
    found = [record.value for place in places for record in world.committed(place)]
    assert found == written, f"{len(found)} events of {len(written)}"


def plain_writes_wait_together() -> None:
    """Several batches of plain writes of one key are committed in one round."""
    world, leader = _opened()
    written = [b"%d" % number for number in range(4)]
    for value in written:
        world.cluster.produce(TopicPartition(journal_topic(STREAM), 0), [Record(0, 1, b"k", value)])
    for _ in range(4):
        leader.step(0)
    assert _values(world) == written


def one_aborts_and_commits_later() -> None:
    """The bytes of a partition, as a broker answers a fetch: aborted, its marker, committed, by one producer."""
    world, _ = _opened()
    producer = world.cluster.log("native").producer("native", timeout=60.0)
    for value, end in ((b"gone", producer.abort), (b"there", producer.commit)):
        producer.append([(PLACE, encode_batch([Record(0, 1, b"k", value)]))])
        end()
    lying = world.cluster.partition(PLACE)
    aborted = [(e.producer_id, e.base_offset) for e in lying.entries if e.is_aborted]
    records = memoryview(b"".join(entry.data for entry in lying.entries))
    answer = PartitionFetch(0, lying.end_offset, lying.stable_offset, 0, aborted, records)
    found = fetched(PLACE, answer, 0, True)
    assert found is not None
    assert found.next_offset == lying.end_offset
    values = [record.value for batch in found.batches for record in decode_records(batch.data)]
    assert values == [b"there"]


def a_stranger_begins_again() -> None:
    """Somebody repeats a Begin with all that is public of it, and a secret of their own."""
    world, leader = _opened()
    txn_id, _ = _begin(world, leader)
    stranger = r.Begin(txn_id, "nyc", None, int(KEEPALIVE_S * 1000), bytes(32))
    assert isinstance(world.ask(leader, stranger), r.Refusal)


def tokens_that_are_not_good_enough() -> None:
    """Somebody aborts by a token with another MAC, without that right, after its end, or in another lane."""
    world, leader = _opened()
    txn_id, token = _begin(world, leader)
    for bad in (
        token[:-32] + bytes(32),
        narrow(token, rights=Rights.WRITE),
        narrow(token, not_after_ms=int(world.clock.wall() * 1000) - 1),
        narrow(token, lane="etl"),
    ):
        world.ask(leader, r.Abort(bad, ""))
        assert world.ask(leader, r.GetState(txn_id)).state == "OPEN"


def _lane(world: World, leader: Controller) -> None:
    world.lane(leader, LANE)
    world.ask(leader, r.SetGrant(LANE, "*", int(ALL)), lane=ADMIN_LANE)


def a_lane_is_blocked_for_a_while() -> None:
    """A one-shot comes while its lane is blocked; then it is unblocked."""
    world, leader = _opened()
    _lane(world, leader)
    world.lane(leader, LANE, blocked=True)
    world.send(_shot(world), lane=LANE)
    world.lane(leader, LANE)
    for _ in range(4):
        leader.step(0)
    assert _values(world) == []


def a_lane_is_answered() -> None:
    """A lane asks: no other lane can read the answer."""
    world, leader = _opened()
    _lane(world, leader)
    sent = world.send(_shot(world), lane=LANE)
    leader.step(0)
    assert world.reply(sent) is not None
    others = world.committed(TopicPartition(replies_topic(), 0))
    assert sent not in [record.key for record in others]


def a_refused_lane_gets_its_right() -> None:
    """A lane's one-shot is refused; the lane gets that right, and another one leads."""
    world, leader = _opened()
    world.lane(leader, LANE)
    assert isinstance(world.ask(leader, _shot(world), lane=LANE), r.Refusal)
    world.ask(leader, r.SetGrant(LANE, "*", int(ALL)), lane=ADMIN_LANE)
    successor = world.controller("successor")
    successor.lead()
    for _ in range(4):
        successor.step(0)
    assert _values(world) == [], "committed, though it was refused"


def heartbeats_wait_in_a_lane() -> None:
    """As `heartbeats_wait_unread`, in a lane; the commands of `open` are read."""
    world, leader = _opened()
    _lane(world, leader)
    txn_id = world.txn_id()
    begin = r.Begin(txn_id, "nyc", None, int(KEEPALIVE_S * 1000), SECRET)
    token = world.ask(leader, begin, lane=LANE).token
    for _ in range(4):
        world.clock.sleep(KEEPALIVE_S / 2)
        world.send(r.GetState(txn_id), lane=LANE)
        world.send(r.Heartbeat((token,)), lane=LANE)
    with patch.object(suspects, "MAX_COMMANDS", 1):
        leader.step(0)
        state = world.ask(leader, r.GetState(txn_id), steps=20, lane=LANE).state
    assert state == "OPEN", f"it was never silent for its keepalive, and is {state}"


def _shot(world: World) -> r.OneShot:
    event = r.Event(STREAM, -1, b"k", b"once", (), -1)
    return r.OneShot(world.txn_id(), "nyc", None, (event,))


def an_answer_to_another_command() -> None:
    """Under a commit's correlation id comes an answer to a Resolve of the same transaction, as it was before."""
    ours = make_txn_id(0, 1, 7)
    token = token_of(ours)
    stray = r.Reply(b"c", b"another!", 1, outcome(ours, committed=7))
    _, clock, ports = scripted_ports(lambda _: [stray, (1.0, outcome(ours, committed=8))])
    found = Session(ports).commit(r.Commit(token, (), (), None, 0), clock.now + 30)
    assert found.committed == 8, "the answer is to another command"
