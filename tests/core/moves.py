"""Random lives of a control partition: moves that hypothesis strings together, and how each is played.

Few labels, names, writers and partitions, so that moves meet each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from anabranch.core.stream_states import CREATING
from anabranch.errors import InvalidArgument
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, nyc
from tests.core.labels import MINUTE, SECRET

LABELS = "ABCDEF"
WRITERS = ("w1", "w2", "w3")
STREAMS = ("nyc/a", "nyc/b")
NAMES = (None, None, "x", "y")


@dataclass(frozen=True)
class Begin:
    label: str
    name: str | None
    keepalive_ms: int


@dataclass(frozen=True)
class Touch:
    label: str
    stream: str


@dataclass(frozen=True)
class Write:
    label: str
    writer: str
    stream: str
    partition: int
    count: int
    epoch: int


@dataclass(frozen=True)
class Register:
    label: str
    writer: str
    finished: bool
    bend: str


@dataclass(frozen=True)
class Commit:
    label: str
    own: tuple[str, ...]
    receipts: tuple[str, ...] | None
    name: str | None
    wait_ms: int
    bend: str
    number: int | None = None


@dataclass(frozen=True)
class Ask:
    """Abort, settle, heartbeat, resolve, get, list or describe."""

    kind: str
    label: str


@dataclass(frozen=True)
class OneShot:
    label: str
    events: tuple[tuple[str, bytes | None, int], ...]
    name: str | None


@dataclass(frozen=True)
class Create:
    """A scope (no slash) or a stream."""

    what: str


@dataclass(frozen=True)
class MakeTopics:
    """The shell makes all topics that are asked for, or can't."""

    can: bool


@dataclass(frozen=True)
class Together:
    """Commands of one round."""

    moves: tuple[Any, ...]


@dataclass(frozen=True)
class Wait:
    ms: int


@dataclass(frozen=True)
class Hold:
    """Journals are read from now on, or not."""

    held: bool


@dataclass(frozen=True)
class TakeOver:
    """A new leader, with the table of the former one or without."""

    keep_table: bool


labels = st.sampled_from(LABELS)
few = st.sampled_from("AAABBBCCDE")  # most moves are about few
writers = st.sampled_from(WRITERS)
streams = st.sampled_from(STREAMS)
bends = st.sampled_from(("", "", "", "", "", "loose", "count", "crc", "old"))

begins = st.builds(Begin, few, st.sampled_from(NAMES), st.sampled_from((5_000, MINUTE, 20 * DAY)))
touches = st.builds(Touch, few, st.sampled_from((*STREAMS, *STREAMS, "nyc/none", "sfo/a")))
writes = st.builds(
    Write,
    few,
    writers,
    streams,
    st.sampled_from((0, 0, 1, 1, 2)),
    st.integers(1, 3),
    st.sampled_from((0, 0, 0, 0, 0, 1)),
)
registers = st.builds(Register, few, writers, st.booleans(), bends)
commits = st.builds(
    Commit,
    few,
    st.lists(writers, max_size=2).map(tuple),
    st.none() | st.lists(writers, max_size=2).map(tuple),
    st.sampled_from(NAMES),
    st.sampled_from((0, 1_000, 600_000)),
    bends,
    st.sampled_from((None, None, None, 0, 1, 2)),
)
one_shots = st.builds(
    OneShot,
    labels,
    st.lists(
        st.tuples(
            streams, st.sampled_from((None, b"", b"k", b"key")), st.sampled_from((-1, 0, 1, 5))
        ),
        max_size=4,
    ).map(tuple),
    st.sampled_from(NAMES),
)
asks = st.builds(
    Ask,
    st.sampled_from(("abort", "force", "heartbeat", "resolve", "get", "list", "describe")),
    labels,
)
commands = st.one_of(begins, touches, registers, commits, commits, one_shots, asks)
waits = st.builds(Wait, st.sampled_from((0, 1, 250, 1_000, 5_000, MINUTE, MINUTE, DAY, 8 * DAY)))
together = st.builds(Together, st.lists(commands, min_size=2, max_size=4).map(tuple))
holds = st.builds(Hold, st.booleans())
creates = st.builds(
    Create, st.sampled_from(("nyc/a", "nyc/c", "nyc/d", "sfo", "sfo/a", "anabranch"))
)
making = st.builds(MakeTopics, st.booleans())

transactions = st.one_of(
    begins, begins, touches, touches, writes, writes, writes, registers, registers, commits, commits,
    one_shots, asks, together, waits, holds,
)  # fmt: skip
everything = st.one_of(transactions, transactions, transactions, creates, making)
takeovers = st.builds(TakeOver, st.booleans())


@st.composite
def _whole(draw: st.DrawFn) -> list[Any]:
    """A transaction from its begin to its commit, cut short anywhere."""
    label, stream, writer = draw(few), draw(streams), draw(writers)
    moves = [
        Begin(label, draw(st.sampled_from(NAMES)), MINUTE),
        Touch(label, stream),
        Write(label, writer, stream, draw(st.integers(0, 1)), draw(st.integers(1, 3)), 0),
        draw(st.sampled_from((Register(label, writer, True, ""), Wait(0)))),
        Commit(label, (writer,), None, draw(st.sampled_from(NAMES)), 1_000, ""),
        Commit(label, (writer,), None, "s", 1_000, "", draw(st.integers(0, 3))),
    ]
    del moves[draw(st.integers(4, 5))]  # it claims a name, or a number
    return moves[: draw(st.integers(2, 5))]


def lives(move: st.SearchStrategy[Any], size: int) -> st.SearchStrategy[list[Any]]:
    """Lists of moves, about so many; a move that does nothing is what they shrink to."""
    idle = st.just([Wait(0)])
    chapters = st.one_of(
        idle, st.builds(lambda m: [m], move), st.builds(lambda m: [m], move), _whole()
    )
    listed = st.lists(chapters, min_size=size // 2, max_size=size)
    return listed.map(lambda parts: [m for part in parts for m in part if m != Wait(0)])


def new_world(**changes: Any) -> World:
    """Two streams of two segments, room for few."""
    return nyc(*STREAMS, **({"max_open": 3, "round_bytes": 250, "purge_per_look": 3} | changes))


def command_of(world: World, move: Any) -> Any:
    """The command of a move. Receipts tell the truth about the journals so far, unless bent."""
    if isinstance(move, Begin):
        return r.Begin(world.id(move.label), "nyc", move.name, move.keepalive_ms, SECRET)
    if isinstance(move, Touch):
        return r.Touch(world.token(move.label), move.stream)
    if isinstance(move, Register):
        receipt = bent(world, move.label, move.writer, move.finished, move.bend)
        return r.Register(world.token(move.label), receipt)
    if isinstance(move, Commit):
        own = tuple(bent(world, move.label, w, False, move.bend) for w in move.own)
        receipts = None
        if move.receipts is not None:
            receipts = tuple(bent(world, move.label, w, True, "") for w in move.receipts)
        return r.Commit(
            world.token(move.label), own, receipts, move.name, move.wait_ms, move.number
        )
    if isinstance(move, OneShot):
        events = tuple(
            event(stream, key, f"{move.label}{i}".encode(), segment_id=segment)
            for i, (stream, key, segment) in enumerate(move.events)
        )
        return r.OneShot(world.id(move.label), "nyc", move.name, events)
    if isinstance(move, Create):
        is_stream = "/" in move.what
        return r.CreateStream(move.what, 2, {}) if is_stream else r.FindScope(move.what, True)
    return {
        "abort": r.Abort(world.token(move.label), ""),
        "force": r.Force(world.token(move.label), ""),
        "heartbeat": r.Heartbeat((world.token(move.label), world.token("A"))),
        "resolve": r.Resolve(world.id(move.label), "nyc"),
        "get": r.GetState(world.id(move.label)),
        "list": r.ListTransactions(None, True, 100),
        "describe": r.DescribeStreams(None, None),
    }[move.kind]


def bent(world: World, label: str, writer: str, finished: bool, bend: str) -> r.Receipt:
    """A receipt: true, with loose bounds, wrong in count or checksum, or with a sequence of old."""
    return world.receipt(
        label,
        writer,
        finished=finished,
        sequence=1 if bend == "old" else None,
        loose=2 if bend == "loose" else 0,
        count=1 if bend == "count" else 0,
        crc=1 if bend == "crc" else 0,
    )


def play(world: World, move: Any, number: int) -> str:
    """Play one move; ``number`` makes its askers unlike all others."""
    if isinstance(move, Wait):
        return world.wait(move.ms)
    if isinstance(move, Write):
        world.write(
            move.label,
            move.writer,
            move.stream,
            move.count,
            partition=move.partition,
            epoch=move.epoch,
        )
        return ""
    if isinstance(move, Hold):
        world.held = move.held
        return ""
    if isinstance(move, TakeOver):
        world.lead(keep_table=move.keep_table)
        return ""
    if isinstance(move, MakeTopics):
        creating = [s for s, row in sorted(world.state.streams.items()) if row.state == CREATING]
        said = [
            world.created(s, 3, 4) if move.can else world.refused(s, InvalidArgument("no"))
            for s in creating
        ]
        return "; ".join(said)
    return world.turn(*asked(world, move, number))


def asked(world: World, move: Any, number: int) -> list[tuple[str, Any]]:
    """Who asks what in a move of commands."""
    moves = move.moves if isinstance(move, Together) else (move,)
    return [(f"{number}.{i}", command_of(world, m)) for i, m in enumerate(moves)]
