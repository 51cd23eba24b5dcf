"""A lane's principal attacks another lane, on a broker with an authorizer: each try is refused by name.

Nothing changes by it, and beside it the other lane commits as ever. The attacks are those of the review of security
that made lanes (`docs/inside/decisions/0018-lanes.md`); the attacker knows all ids, names and offsets, and has a
narrow token.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
from confluent_kafka import KafkaException

import anabranch
from anabranch.batches.records import decode_records
from anabranch.ports import LogError, TopicPartition
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.tokens import Token, make, peek
from anabranch.topics.names import (
    commands_topic,
    control_topic,
    history_topic,
    journal_topic,
    replies_topic,
    status_topic,
    stream_topic,
    transactional_ids,
)
from anabranch.topics.rights import writer_rights
from tests.contract.helpers import wait_stable
from tests.crash.raw import Raw, Refused, make_txn_id
from tests.secured_lanes import LanesPlace, at_last, lanes_place

pytestmark = [pytest.mark.broker, pytest.mark.soak]
THEIRS, BESIDE, MATES, OWN = "pay/orders", "pay/beside", "pay/mates", "own/a"
SLOWEST_S = 8.0
NAME, SERIES = "nightly", "spark/query/anabranch"
UNKNOWN, DENIED, TAKEN = "UnknownTransaction", "NotAuthorized", "NameTaken"
BY_BROKER = "AUTHORIZATION_FAILED"  # TOPIC_…, TRANSACTIONAL_ID_…


@dataclass
class Scene:
    """The victim's open transactions, one of a name, and all that the thief has."""

    place: LanesPlace
    victim: anabranch.Client
    thief: Raw
    held: anabranch.Transaction
    named: anabranch.Transaction
    worker: bytes  # a token of `held`: may write and send heartbeats
    lane_bound: bytes  # one for all, in the victim's lane
    mate: Raw  # of a lane that writes in the same scope, to a stream of its own
    mates: bytes  # the token of its open transaction
    healthy: set[bytes] = field(default_factory=set)
    last: tuple[object, ...] = ()  # as it was `seen` after the attack before

    @property
    def txn_id(self) -> bytes:
        assert self.held.txn_id is not None
        return self.held.txn_id

    def commit_beside(self) -> None:
        with self.victim.begin("pay") as txn:
            txn.write(BESIDE, b"v", key=b"k")
            txn.commit(timeout=20)
            self.healthy.add(txn.txn_id or b"")

    def places(self) -> set[TopicPartition]:
        """The logs in which an attack would leave something."""
        return {
            TopicPartition(topic(stream), 0)
            for stream in (THEIRS, MATES, OWN)
            for topic in (stream_topic, history_topic, journal_topic)
        }

    def seen(self) -> tuple[object, ...]:
        """All that an attack could change, as operators see it."""
        operator, log = self.place.operator, self.place.log
        found = [
            (info.txn_id, info.state, info.counts, info.streams, info.owner)
            for finished in (False, True)
            for info in operator.transactions(finished=finished, limit=10_000)
            if info.txn_id not in self.healthy
        ]
        streams = [(s.stream, s.state, s.segments) for s in operator.streams()]
        lanes = [(x.name, x.blocked, x.quotas, x.topic_ids) for x in operator.lanes()]
        series = [operator.series(scope) for scope in ("pay", "own")]
        ends = sorted(log.end_offsets(self.places(), committed=False).items())
        return found, ends, streams, lanes, series, operator.grants(), operator.audit_log(1_000)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    every = ["describe", "safe-time", "write", "create", "scale", "series", "operate"]
    lanes = {"victim": {"pay/*": every}, "thief": {"own/*": every}, "mate": {MATES: every}}
    folder = tmp_path_factory.mktemp("attacks")
    with lanes_place(folder, lanes, (THEIRS, BESIDE, MATES, OWN)) as place:
        place.secured.grant("victim", writer_rights(THEIRS, BESIDE))
        place.secured.grant("thief", writer_rights(OWN))
        victim = place.client("victim")
        at_last(lambda: one_shot(victim, THEIRS, name="done"))
        with victim.begin("pay") as numbered:
            numbered.write(THEIRS, b"numbered")
            numbered.commit(name=SERIES, number=5)
        held, named = victim.begin("pay"), victim.begin("pay", NAME)
        for txn in (held, named):
            txn.write(THEIRS, b"held")
            txn.flush()
        worker, bound = held.token(), held.token("all", lane="victim")
        raw = place.raw("thief")
        at_last(lambda: one_shot(place.client("thief"), OWN))
        mates = place.client("mate").begin("pay", keepalive=600).token("all")
        made = Scene(place, victim, raw, held, named, worker, bound, place.raw("mate"), mates)
        wait_stable(place.log, made.places())  # late markers are no attack's
        yield made
        assert held.commit().counts.committed == named.commit().counts.committed == 1


def one_shot(client: anabranch.Client, stream: str, name: str | None = None) -> None:
    with client.begin(stream.partition("/")[0]) as txn:
        txn.write(stream, b"v", key=b"k")
        txn.commit(name=name)


# -- attacks ------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """A name, the error's, and what makes the command, or does it at the brokers."""

    name: str
    error: str
    of: Callable[[Scene], Any]
    mate: bool = False  # by the lane that shares the scope


def shot(scope: str, *streams: str, name: str | None = None) -> r.OneShot:
    events = tuple(r.Event(stream, -1, b"k", b"stolen", (), -1) for stream in streams)
    return r.OneShot(make_txn_id(), scope, name, events)


def begin(scope: str) -> r.Begin:
    return r.Begin(make_txn_id(), scope, None, 60_000, os.urandom(SECRET_SIZE))


def commit(token: bytes, name: str | None = None, number: int | None = None) -> r.Commit:
    return r.Commit(token, (), None, name, 0, number)


def finished(scene: Scene) -> r.Receipt:
    """A receipt of the victim's own writer that ends it with nothing."""
    (writer,) = scene.victim.state(scene.txn_id).writers
    return r.Receipt(scene.txn_id, writer.writer, 1 << 30, True, ())


def self_made(scene: Scene) -> bytes:
    """A token of the transaction by a secret of the thief's own."""
    token = peek(scene.worker)
    mine = Token(token.txn_id, token.keepalive_ms, token.begun_ms, token.scope, "thief")
    return make(os.urandom(SECRET_SIZE), mine)


def with_id(made: Callable[[bytes], Any]) -> Callable[[Scene], Any]:
    return lambda scene: made(scene.txn_id)


def always(command: Any) -> Callable[[Scene], Any]:
    return lambda _: command


def read(topic: str) -> Callable[[Scene], Any]:
    def attempt(scene: Scene) -> str:
        place = TopicPartition(topic, 0)
        return str(scene.thief.log.fetch({place: 0}, max_wait=0, max_bytes=1, committed=False))

    return attempt


def write(topic: str, command: Any = b"x") -> Callable[[Scene], Any]:
    """Write a record there: an answer under any correlation id, or a command in another's name."""

    def attempt(scene: Scene) -> str:
        told: list[object] = []
        payload = command if isinstance(command, bytes) else encode(command)
        headers = [("ab.cid", os.urandom(16)), ("ab.reply", bytes(4))]
        scene.thief.producer.produce(
            topic,
            payload,
            os.urandom(16),
            0,
            headers=headers,  # type: ignore[arg-type]
            on_delivery=lambda error, _: told.append(error),
        )
        scene.thief.producer.flush(20)
        return str(told)

    return attempt


def fence(scene: Scene) -> str:
    scene.thief.log.producer(transactional_ids(0)[0], timeout=60).close()
    return "fenced"


FORGED = r.Reply(bytes(16), bytes(8), 0, r.Refusal("NotReady", "forged"))
# One command of each kind: what each lane may do by each is in tests/core/test_rights.py and test_owners.py.
ATTACKS = [
    Attack("commit events", DENIED, always(shot("pay", THEIRS))),
    Attack("list transactions", DENIED, always(r.ListTransactions("pay", True, 100))),
    Attack("begin", DENIED, always(begin("pay"))),
    Attack("abort by id", UNKNOWN, with_id(lambda i: r.Abort(i, "mine"))),
    Attack("see by id", UNKNOWN, with_id(lambda i: r.GetState(i, None))),
    Attack("commit by a worker's token", DENIED, lambda s: commit(s.worker)),
    Attack("commit by a token of the victim's lane", DENIED, lambda s: commit(s.lane_bound)),
    Attack("commit by a token of another secret", UNKNOWN, lambda s: commit(self_made(s))),
    Attack("grant", DENIED, always(r.SetGrant("thief", "pay/*", 255))),
    # In the scope that they share, a lane is as far from another's things.
    Attack("mate: commit events", DENIED, always(shot("pay", MATES, THEIRS)), True),
    Attack("mate: commit under an open name", TAKEN, always(shot("pay", MATES, name=NAME)), True),
    Attack("mate: take a number", TAKEN, lambda s: commit(s.mates, SERIES, 6), True),
    Attack("mate: finish its writer", DENIED, lambda s: r.Register(s.worker, finished(s)), True),
    Attack("mate: abort by id", UNKNOWN, with_id(lambda i: r.Abort(i, "mine")), True),
    Attack("read answers", BY_BROKER, read(replies_topic(lane="victim"))),
    Attack("read secrets", BY_BROKER, read(commands_topic(lane="victim"))),
    Attack("read own secrets", BY_BROKER, read(commands_topic(lane="thief"))),
    Attack("read the status log", BY_BROKER, read(status_topic())),
    Attack("forge an answer", BY_BROKER, write(replies_topic(lane="victim"), FORGED)),
    Attack("forge an answer to itself", BY_BROKER, write(replies_topic(lane="thief"), FORGED)),
    Attack("speak as the victim", BY_BROKER, write(commands_topic(lane="victim"), shot("pay", THEIRS))),
    Attack("speak as an operator", BY_BROKER, write(commands_topic(lane="admin"), r.SetGrant("thief", "*", 255))),
    Attack("speak as open", BY_BROKER, write(commands_topic(), shot("pay", THEIRS))),
    Attack("speak as a controller", BY_BROKER, write(control_topic(), r.AdoptScope("pay", "thief"))),
    Attack("write the status log", BY_BROKER, write(status_topic())),
    Attack("write the stream", BY_BROKER, write(stream_topic(THEIRS))),
    Attack("write its journal", BY_BROKER, write(journal_topic(THEIRS))),
    Attack("write its history", BY_BROKER, write(history_topic(THEIRS))),
    Attack("fence the controller", BY_BROKER, fence),
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name.replace(" ", "-"))
def test_a_stolen_lane_harms_no_other_lane(scene: Scene, attack: Attack) -> None:
    before = scene.last or scene.seen()
    took: list[float] = []
    over = threading.Event()

    def beside() -> None:
        while not (over.is_set() and took):
            began = time.monotonic()
            scene.commit_beside()
            took.append(time.monotonic() - began)
            over.wait(0.01)  # not more of them than lists show

    with ThreadPoolExecutor(1) as committer:
        committing = committer.submit(beside)
        try:
            told = outcome_of(scene, attack)
        finally:
            over.set()
        committing.result(60)
    scene.last = scene.seen()
    assert attack.error in told
    assert max(took) < SLOWEST_S
    assert scene.last == before


def outcome_of(scene: Scene, attack: Attack) -> str:
    try:
        made = attack.of(scene)
        raw = scene.mate if attack.mate else scene.thief
        return made if isinstance(made, str) else repr(raw.ask(made))
    except Refused as refused:
        return refused.code
    except (KafkaException, LogError) as error:
        return str(error)


def test_lists_show_a_thief_its_own(scene: Scene) -> None:
    streams = scene.thief.ask(r.DescribeStreams(None, None)).streams
    assert [info.stream for info in streams] == [OWN]
    owners, before = set(), None
    while True:
        page = scene.thief.ask(r.ListTransactions(None, True, 1_000, before))
        owners |= {outcome.owner for outcome in page.transactions}
        if (before := page.more) is None:
            break
    assert owners == {"thief"}


def test_an_answer_goes_to_the_askers_lane_alone(scene: Scene) -> None:
    """The victim's correlation id in a thief's command brings nothing into the victim's answers."""
    stolen, place = os.urandom(16), TopicPartition(replies_topic(lane="victim"), 0)
    log = scene.place.log
    end = log.end_offsets([place], committed=False)[place]
    done = scene.thief.ask(shot("own", OWN))
    scene.thief.ask(r.GetState(done.txn_id, None), correlation_id=stolen)
    fetched = log.fetch({place: end}, max_wait=0, max_bytes=1 << 20, committed=False)
    batches = fetched[place].batches if place in fetched else ()
    keys = [record.key for batch in batches for record in decode_records(batch.data)]
    assert stolen not in keys
