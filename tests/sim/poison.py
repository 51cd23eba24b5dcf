"""Commands that nobody can mean: random bytes, huge texts, settings that can't work, and what makes code fail.

Each must cost its sender at most an error, and nobody else anything: see `trouble`, whose probe commits meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from unittest.mock import patch

from anabranch.batches.records import Record, encode_batch
from anabranch.client.client import Client
from anabranch.controller import lanes as commands
from anabranch.core.decisions.decide import decide
from anabranch.core.decisions.turn import Turn
from anabranch.core.round import ReplyTo
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import CORRELATION_HEADER, DIRECTORY, NO_TXN, REPLY_HEADER, make_txn_id
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import encode
from anabranch.topics.names import commands_topic, history_topic, journal_topic, stream_topic
from tests.sim.greedy import Greedy
from tests.sim.ledger import Ledger
from tests.sim.ports import SimCluster
from tests.sim.weather import Weather
from tests.sim.world import World
from tests.sim.writers import SCOPE, commit_one

RAISED = ("a defect",)
DEFECT = f"{SCOPE}/defect"  # who asks for this one finds a defect of the controller
_HUGE = 300_000  # characters; a command may have a million bytes
_UNFIT = (  # settings that a stream can't have
    {"max.message.bytes": "70"},  # less than a marker has
    {"cleanup.policy": "compact"},
    {"min.insync.replicas": "3"},
)
_BY_HAND = (  # settings that brokers accept of a stream's topics
    ("max.message.bytes", "100"),
    ("cleanup.policy", "compact"),
    ("message.timestamp.before.max.ms", "0"),
    ("message.timestamp.after.max.ms", "0"),
)


class Poison:
    """Sends it."""

    def __init__(self, world: World, cluster: SimCluster, ledger: Ledger, lane: str) -> None:
        self._world = world
        self._cluster = cluster
        self._ledger = ledger
        self._lane = lane
        self._greedy = Greedy(world, cluster, ledger, lane)

    def kinds(self, weather: Weather) -> list[tuple[float, Callable[[Client], None]]]:
        """Mean seconds between, and what is done then."""
        known = (
            (weather.poison_s, self.nonsense),
            (weather.raising_s, self.defect),
            (weather.hostile_s, self.hostile),
            (weather.greedy_s, self._greedy.take_all),
        )
        return [(mean_s, send) for mean_s, send in known if mean_s]

    @property
    def _random(self) -> Random:
        return self._world.random

    def nonsense(self, _: Client) -> None:
        """Bytes that are no command, or are one with a text of any size in it."""
        text = "x" * self._random.choice((0, 300, 5000, _HUGE))
        text += self._random.choice(("", "\0", "\ud7ff", "..", "/", "\n"))
        txn_id = make_txn_id(0, self._world.wall_ms, self._random.getrandbits(64))
        event = r.Event(text, -1, text.encode(), b"", (), -1)
        secret = self._random.randbytes(32)
        keepalive_ms = self._random.choice((-1, 0, 1, 5000))
        command = self._random.choice(
            (
                r.Begin(txn_id, SCOPE, text, keepalive_ms, secret),
                r.Begin(txn_id, text, None, keepalive_ms, secret),
                r.Begin(NO_TXN, SCOPE, None, keepalive_ms, secret),
                r.CreateStream(f"{SCOPE}/{text}", 1, {}),
                r.CreateStream(f"{SCOPE}/many", (1 << 31) - 1, {}),
                r.FindScope(text, True),
                r.OneShot(txn_id, SCOPE, text, (event,)),
                r.Scale(f"{SCOPE}/a", -1, (), ()),
                r.Abort(text.encode(), text),
                r.DescribeStreams(text, text),
            )
        )
        data = encode(command)
        how = self._random.random()
        if how < 0.3:
            data = self._random.randbytes(self._random.choice((0, 1, 20, 2000)))
        elif how < 0.6:  # some of its bytes are others
            at = self._random.randrange(len(data))
            data = data[:at] + self._random.randbytes(1) + data[at + 1 :]
        self._send(data)

    def defect(self, _: Client) -> None:
        """A command on which the controller's code fails."""
        self._send(encode(r.DescribeStreams(None, DEFECT)))

    def hostile(self, client: Client) -> None:
        """A stream with settings that can't work, from the beginning or set by hand; somebody writes to it."""
        stream = f"{SCOPE}/hostile-{self._random.getrandbits(32)}"
        settings = self._random.choice((*_UNFIT, {}, {}, {}))
        client.create_stream(stream, 1, settings, timeout=2.0)
        topic = self._random.choice((stream_topic, journal_topic, history_topic))(stream)
        if not self._cluster.faults.calm and topic in self._cluster.topics:
            self._ledger.limited.add(stream)
            self._cluster.hands.alter(topic, *self._random.choice(_BY_HAND))
        deal = self._ledger.open(SCOPE, "hostile")
        deal.lane = self._lane
        commit_one(self._world, self._ledger, client, deal, stream, 2.0)

    def _send(self, data: bytes) -> None:
        headers = (
            (CORRELATION_HEADER, self._random.randbytes(self._random.choice((16, 16, 0, 100)))),
            (REPLY_HEADER, self._random.choice((bytes(4), bytes(4), b"\xff" * 4, b""))),
        )
        place = TopicPartition(commands_topic(self._ledger.prefix), DIRECTORY)  # the first scope's
        record = Record(0, self._world.wall_ms, None, data, headers)
        self._cluster.send(place, encode_batch([record]))


@contextmanager
def failing_decisions() -> Iterator[None]:
    """In here `DEFECT` is a defect of all controllers."""
    real = getattr(commands, "decide", decide)

    def fail(turn: Turn, command: object, to: ReplyTo | None) -> None:
        if isinstance(command, r.DescribeStreams) and command.stream == DEFECT:
            raise KeyError(*RAISED)
        real(turn, command, to)

    with patch.object(commands, "decide", fail):
        yield
