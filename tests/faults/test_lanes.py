"""One lane in trouble of all kinds, under load: others commit as ever, answers are true, and it recovers.

Each lane's clients commit one-shots and hold transactions open by heartbeats alone, all the time.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

import anabranch
from anabranch.errors import NotReady, UnknownTransaction
from anabranch.ports import TopicPartition, TopicSpec
from anabranch.protocol.ids import SECRET_SIZE
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import commands_topic, replies_topic
from anabranch.topics.rights import TOPIC, Right, client_rights
from tests.crash.raw import Raw, make_txn_id
from tests.secured_lanes import CONTROLLER, LanesPlace, at_last, lanes_place
from tests.workload.steady import COMMITTED, UNKNOWN, Commit, Steady, steadily

pytestmark = [pytest.mark.broker, pytest.mark.timeout(300)]

ETL, MUTE = "etl", "mute"  # in trouble: first and last
OTHERS = "near", "far"
LANES = ETL, MUTE, *OTHERS
SLOWEST_S = 2.0
CALM_S, TROUBLE_S = 3.0, 3.0
KEEPALIVE_S = 2.0
# A silent transaction's keepalive, and until it is noticed at the latest; a flood lasts for 6 s.
STALE_S = 1.0 + 4.5
FLOOD = 12_000  # commands; the quota lets 2,000 a second pass


@dataclass
class Scene:
    """The place, its clients by lane (one-shots, and transactions that are held open), and commands by hand."""

    place: LanesPlace
    clients: dict[str, list[Steady]]
    raws: dict[str, Raw]
    chance: random.Random
    calm_until: float = 0.0
    never: set[bytes] = field(default_factory=set)  # values that must not be committed

    def silent(self, lane: str) -> bytes:
        """Begin a transaction that sends nothing more. Returns its id."""
        begin = r.Begin(make_txn_id(), "shop", None, 1_000, os.urandom(SECRET_SIZE))
        self.raws[lane].ask(begin)
        return begin.txn_id

    def is_aborted(self, txn_id: bytes) -> bool:
        return self.place.operator.state(txn_id).state == "ABORTED"

    def trouble(self, lane: str) -> str:
        return next(x.trouble for x in self.place.operator.lanes() if x.name == lane)

    def commits(self, lane: str) -> list[Commit]:
        """What its clients asked for."""
        return [one for client in self.clients[lane] for one in client.commits]


Trouble = Callable[[Scene], AbstractContextManager[object]]


# -- troubles that pass -------------------------------------------------------------------------------


@contextmanager
def blocked(scene: Scene) -> Iterator[None]:
    """Blocked: commands that are sent meanwhile are never executed, nor are they after the end of it."""
    scene.place.operator.block_lane(ETL)
    since = time.monotonic()
    value = b"sent while blocked"
    event = r.Event(f"shop/{ETL}", -1, b"k", value, (), -1)
    raw = scene.raws[ETL]
    raw.send(r.OneShot(make_txn_id(), "shop", None, (event,)), os.urandom(16))
    raw.producer.flush(10)
    yield
    until = time.monotonic()
    found = [x for x in scene.commits(ETL) if x.began >= since and 0 < x.ended <= until]
    assert found
    assert COMMITTED not in {one.result for one in found}
    scene.never |= {value, *(one.value for one in found)}
    scene.place.operator.unblock_lane(ETL)


@contextmanager
def denied(topic: str, operation: str, scene: Scene) -> Iterator[None]:
    """The controller may not read the lane's commands, or write its answers: `lane list` says so."""
    with scene.place.secured.denied(CONTROLLER, Right(TOPIC, topic, operation, "")):
        yield
        # It is tried now and then, and the lane seems well until that fails.
        at_last(lambda: ready("AUTHORIZATION_FAILED" in scene.trouble(ETL)))


@contextmanager
def taken(at: int, scene: Scene) -> Iterator[None]:
    """The lane's principal may not send commands any more, or read answers."""
    right = list(client_rights(lane=ETL))[at]
    scene.place.secured.revoke(ETL, [right])
    yield
    scene.place.secured.grant(ETL, [right])


@contextmanager
def not_granted(scene: Scene) -> Iterator[None]:
    scene.place.operator.revoke(ETL, f"shop/{ETL}", ["write"])
    yield
    scene.place.operator.grant(ETL, f"shop/{ETL}", ["write"])


@contextmanager
def flooded(scene: Scene) -> Iterator[None]:
    """The lane waits for its own quota; its live transaction lives on, its silent one ends at last."""
    patient = scene.place.client(ETL, timeout=60)
    live = patient.begin("shop", keepalive=KEEPALIVE_S)
    live.write(f"shop/{ETL}", b"live", key=b"k")
    live.flush()
    silent, raw = scene.silent(ETL), scene.raws[ETL]
    for _ in range(FLOOD):
        begin = r.Begin(make_txn_id(), "shop", None, 1_000, bytes(SECRET_SIZE))
        raw.send(begin, os.urandom(16))
        raw.producer.poll(0)
    raw.producer.flush(10)
    # Now: what waits is gone some seconds later.
    at_last(lambda: ready(any(x.name == ETL and x.waiting for x in scene.place.operator.lanes())))
    yield
    now = time.monotonic()
    live.commit()
    found = Commit(b"live", now, now, result=COMMITTED, txn_id=live.txn_id)
    scene.clients[ETL][0].commits.append(found)
    at_last(lambda: ready(scene.is_aborted(silent)))


def ready(well: bool) -> None:
    if not well:
        raise NotReady("not yet")


PASSING: dict[str, Trouble] = {
    "blocked": blocked,
    "its commands forbidden": partial(denied, commands_topic(lane=ETL), "Read"),
    "its answers forbidden": partial(denied, replies_topic(lane=ETL), "Write"),
    "its principal may not ask": partial(taken, 0),
    "its principal may not hear": partial(taken, 1),
    "not granted": not_granted,
    "flooded": flooded,
}


# -- the test -----------------------------------------------------------------------------------------


@pytest.mark.soak
@pytest.mark.slow(75)
def test_trouble_of_one_lane_stops_no_other_lane(tmp_path: Path) -> None:
    seed = int(os.environ.get("ANABRANCH_SEED", random.randrange(1 << 32)))
    print("ANABRANCH_SEED =", seed)
    names, chance = list(PASSING), random.Random(seed)
    chance.shuffle(names)
    streams = [f"shop/{lane}" for lane in LANES]
    granted = {lane: {f"shop/{lane}": ["write", "describe"]} for lane in LANES}
    with lanes_place(tmp_path, granted, streams) as place:
        clients = {}
        for lane in LANES:
            client = place.client(lane, timeout=1.5 if lane in (ETL, MUTE) else 20)
            common = partial(Steady, client, f"shop/{lane}", keepalive=KEEPALIVE_S)
            clients[lane] = [
                common(name=f"{lane}-shot"),
                common(name=f"{lane}-held", holds=2 * KEEPALIVE_S),
            ]
        scene = Scene(place, clients, {lane: place.raw(lane) for lane in (ETL, *OTHERS)}, chance)
        at_last(lambda: [clients[lane][0].client.describe(f"shop/{lane}") for lane in LANES])
        try:
            with steadily(*itertools.chain(*clients.values())):
                time.sleep(CALM_S)
                scene.calm_until = time.monotonic()
                for name in names:
                    print(f"{time.monotonic():.1f} {name}")
                    with PASSING[name](scene):
                        wait_out(scene)
                    clients[ETL][0].wait_more(1, 30.0)
                print(f"{time.monotonic():.1f} topics made again")
                made_again = topics_made_again(scene)
        finally:
            print("\n".join(place.controller.log_file.read_text().splitlines()[-60:]))
        judge(scene, made_again)


def wait_out(scene: Scene) -> None:
    """Some seconds of trouble; a silent transaction of another lane ends in time."""
    until, lane = time.monotonic() + TROUBLE_S, scene.chance.choice(OTHERS)
    began = time.monotonic()
    silent = scene.silent(lane)
    while not scene.is_aborted(silent):
        assert time.monotonic() - began < STALE_S, f"a silent transaction of {lane} is kept alive"
        time.sleep(0.1)
    assert time.monotonic() - began > 1.0
    time.sleep(max(0.0, until - time.monotonic()))


def topics_made_again(scene: Scene) -> float:
    """The answers of one lane and the commands of another are deleted, and others made under their names.

    Returns when the commands were, monotonic seconds.
    """
    log, made = scene.place.log, 0.0
    for lane, topic, rest_s in (
        (MUTE, replies_topic(lane=MUTE), 0.0),
        (ETL, commands_topic(lane=ETL), TROUBLE_S),
    ):
        log.delete_topics(list(log.describe_topics([topic]).values()))
        if rest_s:
            wait_out(scene)
            said = scene.trouble(lane)  # by a look at it, or by the last try to read it
            assert "there is no topic" in said or "UNKNOWN_TOPIC" in said, said
        while topic in log.describe_topics([topic]):
            time.sleep(0.02)
        made = time.monotonic()
        log.create_topics([TopicSpec(topic, 1, {}, -1)])
        wait_out(scene)
        assert "is another one" in scene.trouble(lane), scene.trouble(lane)
    return made


def judge(scene: Scene, made_again: float) -> None:
    """Compare what lanes were answered with what the streams have; others' commits were quick, and none failed."""
    for lane in scene.clients:
        ended = [one for one in scene.commits(lane) if one.result]
        with anabranch.connect(scene.place.secured.broker.bootstrap) as plain:
            stream = f"shop/{lane}"
            seen = [event.value or b"" for event in plain.snapshot(stream).read(stream)]
        values = set(seen)
        assert len(values) == len(seen), f"{lane}: nothing twice"
        good = [one for one in ended if one.result == COMMITTED]
        unsaid = [one for one in ended if one.result == UNKNOWN]
        refused = [one for one in ended if one.result not in (COMMITTED, UNKNOWN)]
        longest = max(one.slowest for one in ended)
        print(
            f"{lane}: {len(good)} committed, {len(unsaid)} unknown, {len(refused)} refused, {longest:.2f} s"
        )
        assert {one.value for one in good} <= values
        assert [one for one in refused if one.value in values] == []
        assert not values & scene.never
        for one in unsaid:
            assert one.txn_id is not None
            assert (one.value in values) == is_committed(scene, one.txn_id), one
        if lane in OTHERS:
            calm = [one.slowest for one in good if one.ended < scene.calm_until]
            assert (refused, unsaid) == ([], [])
            assert longest < max(SLOWEST_S, 4 * max(calm)), (
                "the machine is as busy as it was in calm"
            )
    late = [one for one in scene.commits(ETL) if one.began > made_again]
    assert late
    assert not {one.value for one in late if one.result == COMMITTED}
    place = TopicPartition(replies_topic(lane=MUTE), 0)
    ends = scene.place.log.end_offsets([place], committed=False)
    assert ends[place] == 0, "no answer goes to a topic that the lane was not made with"


def is_committed(scene: Scene, txn_id: bytes) -> bool:
    try:
        return scene.place.operator.state(txn_id).state == "COMMITTED"
    except UnknownTransaction:
        return False
