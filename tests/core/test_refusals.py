"""What each command is refused for: one table, of which a row is a command, its answer, and words of the message.

The rows follow `docs/protocol.md`. Those of positions and of tables are in `test_refusals_of_processors` and
`test_refusals_of_tables`. `World` checks that a refused command changes nothing. Rows with another answer are the
last values allowed. Who may send what is in `tests/core/test_rights.py`.

The file is long because it has a row for each rule of each command.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import pytest

from anabranch.core.authorize import ADD, TAKE, Right
from anabranch.core.decisions.questions import MAX_LISTED
from anabranch.core.decisions.streams import give_up_stream
from anabranch.core.journal_runs import NEVER
from anabranch.core.rows import stream_key
from anabranch.protocol import limits
from anabranch.protocol.partitioner import SPACE
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.harness import DAY, World, event, nyc
from tests.core.labels import MINUTE, SECRET

Make = Callable[[Any], Any]  # what makes a command in a world; steps before it are in it, too
# The command, its answer, and words of the refusal.
Row = tuple[Make, str, str]
INVALID, UNKNOWN, UNSUPPORTED = "InvalidArgument", "UnknownTransaction", "UnsupportedSetting"
ILLEGAL = "IllegalState"


@dataclass(frozen=True, slots=True)
class Lowered:
    """A command that is decided while a limit of `protocol/limits.py` is lower."""

    limit: str
    value: int
    make: Make

    def __call__(self, world: Any) -> Any:
        return self.make(world)


def after(*steps: Make, then: Make) -> Make:
    """The command ``then``, in a world in which these steps were done."""

    def make(world: Any) -> Any:
        for step in steps:
            step(world)
        return then(world)

    return make


def this(command: Any) -> Make:
    return lambda _: command


def refused(world: World) -> bool:
    return any(isinstance(result, r.Refusal) for _, result in world.said)


def check_row(world: World, row: Row, patch: pytest.MonkeyPatch, lane: str | None = None) -> None:
    """Play a row: the command has this answer, and a refusal these words and a length that fits."""
    make, answer, words = row
    asked = make(world)
    if isinstance(make, Lowered):
        lower = getattr(limits, make.limit)._replace(value=make.value)
        patch.setattr(limits, make.limit, lower)
    assert world.ask("it", asked, lane=lane) == answer
    if refused(world):
        assert words in world.message
        assert len(world.message) <= limits.TEXT.value


def made() -> World:
    """A is open and touched nyc/a, N is open under a name, C is committed, X aborted, S a one-shot.

    Scope sfo is served here, ber elsewhere; the topics of nyc/creating are still being made.
    """
    world = nyc("nyc/a", "nyc/b", control_partitions=2, max_keepalive_ms=MINUTE)
    world.find_scope("ber")
    world.find_scope("sfo", near="nyc")
    world.create("sfo/a", retention_ms="1")
    world.created("sfo/a", 0, 0)
    world.create("nyc/creating", retention_ms="1")
    for label in "ACX":
        world.begin(label)
    world.touch("A")
    world.begin("N", name="daily")
    world.commit("C")
    world.abort("X", "why")
    world.one_shot("S", event())
    world.grant("etl", "nyc/*", 0)
    world.id("new")
    return world


# -- scopes and streams ----------------------------------------------------------------------------


NOT_SCOPES = ("", "a.b", "a/b", "-a", "a" * 101, "anabranch", "anabranch_commands")
SCOPES: dict[str, Row] = {
    **{
        f"{type(command).__name__} {number}": (this(command), INVALID, "")
        for scope in NOT_SCOPES
        for number, command in enumerate(
            (r.FindScope(scope, False), r.FindScope(scope, True), r.AdoptScope(scope, "open")),
            3 * NOT_SCOPES.index(scope),
        )
    },
    "like the prefix": (this(r.FindScope("anabranch2", True, "nyc")), "anabranch2 at 0", ""),
    "like its topics": (this(r.FindScope("anabranch-2", True, "nyc")), "anabranch-2 at 0", ""),
    "not there": (this(r.FindScope("lax", False)), "UnknownScope", ""),
    "near nothing": (this(r.FindScope("lax", True, "none")), "UnknownScope", ""),
    "there, and not near": (this(r.FindScope("sfo", True, "ber")), INVALID, ""),
}


def create(stream: str, segments: int = 1, **given: str) -> Make:
    settings = {name.replace("_", "."): value for name, value in given.items()}
    return this(r.CreateStream(stream, segments, settings))


CREATE: dict[str, Row] = {
    "no such scope": (create("lax/a"), "UnknownScope", ""),
    "a scope served elsewhere": (create("ber/a"), "UnknownScope", "control partition 1"),
    "the topics' prefix": (create("anabranch/a"), INVALID, ""),
    **{f"not a stream: {name}": (create(name), INVALID, "") for name in ("nyc", "nyc/a.b", "nyc/a/b")},
    "no segments": (create("nyc/new", 0), INVALID, ""),
    "most segments": (create("nyc/new", 10_000), "", ""),
    "more segments": (create("nyc/new", 10_001), INVALID, ""),
    **{
        f"other {what} than {stream} has": (
            create(stream, segments, retention_ms=ms), "StreamExists", f"{stream} exists, but {differs}",
        )
        for stream in ("sfo/a", "nyc/creating")
        for what, segments, ms, differs in (
            ("segments", 3, "1", "segments are 2 (asked: 3)"),
            ("settings", 2, "2", "retention.ms is 1 (asked: 2)"),
            ("of both", 3, "2", "segments are 2 (asked: 3), retention.ms is 1 (asked: 2)"),
        )
    },
}  # fmt: skip


def wrong(name: str, value: str, words: str, answer: str = INVALID) -> tuple[str, str, str, str]:
    return name, value, answer, words


# Checked when a stream is made, and when it is altered.
SETTINGS = (
    wrong("retention.ms", "soon", "retention.ms=soon: set a whole number from"),
    wrong("retention.ms", "1" * 40_000, "the value of retention.ms"),
    wrong("retention.ms", str(1 << 63), "retention.ms=9223372036854775808"),
    wrong("max.message.bytes", "16383", "set 16384 or more"),
    wrong("max.message.bytes", str((64 << 20) + 1), "max.message.bytes=67108865"),
    wrong("replication.factor", "0", "-1 for the broker's default"),
    wrong("cleanup.policy", "compact", "a stream has no setting cleanup.policy", UNSUPPORTED),
    wrong("table.history.ms", "1", "set table=true, too", UNSUPPORTED),
    wrong("x" * 257, "1", "a setting's name"),
    wrong("scale.events.per.second", "1" * 5_000, "the value of scale.events.per.second"),
    wrong("scale.min.segments", "65", "scale.min.segments=65 is above scale.max.segments=64"),
    *(
        wrong(name, value, f"{name}={value}: set a whole number from 1")
        for name, value in (
            ("scale.events.per.second", "0"),
            ("scale.events.per.second", "-5"),
            ("scale.events.per.second", "1e3"),
            ("scale.bytes.per.second", "9223372036854775808"),
            ("scale.segment.bytes", "\u0661"),
            ("scale.min.segments", "0"),
            ("scale.max.segments", "10001"),
            ("scale.cooldown.ms", "999"),
            ("scale.cooldown.ms", ""),
        )
    ),
)
CREATE |= {
    f"{name[:40]}={value[:40]}": (this(r.CreateStream("nyc/new", 1, {name: value})), answer, words)
    for name, value, answer, words in SETTINGS
}


def alter(stream: str, *unset: str, **given: str) -> Make:
    settings = {name.replace("_", "."): value for name, value in given.items()}
    return this(r.AlterStream(stream, settings, unset))


ALTER: dict[str, Row] = {
    "unknown stream": (alter("nyc/none", retention_ms="1"), "UnknownStream", ""),
    "being made": (alter("nyc/creating", retention_ms="1"), "NotReady", ""),
    "being altered": (after(lambda w: w.ask("first", alter("nyc/a", retention_ms="1")(w), lane="admin"),
                            then=alter("nyc/a", retention_ms="2")), "NotReady", "is being altered"),
    "replicas": (alter("nyc/a", replication_factor="3"), UNSUPPORTED, "can't be altered: make a new stream"),
    "takes an unknown one back": (alter("nyc/a", "no.such"), UNSUPPORTED, "no.such can't be taken back"),
    "takes back what it sets": (
        alter("nyc/a", "retention.ms", retention_ms="1"), UNSUPPORTED, "given, too",
    ),
    "truncate before time": (this(r.TruncateStream("nyc/a", -1)), INVALID, "a hybrid time"),
    "truncate what is to come": (
        this(r.TruncateStream("nyc/a", (1 << 63) - 1)), "NotReady", "is not reached yet",
    ),
    **{
        f"{name[:40]}={value[:40]}": (this(r.AlterStream("nyc/a", {name: value}, ())), answer, words)
        for name, value, answer, words in SETTINGS
        if name != "replication.factor"
    },
}  # fmt: skip


def scale(
    segments: int = 0, seal: tuple[int, ...] = (), *ranges: r.KeyRange, stream: str = "nyc/a"
) -> Make:
    return this(r.Scale(stream, segments, seal, ranges))


def lose(stream: str) -> Make:
    """The topics of a stream are gone."""

    def give_up(world: World) -> None:
        turn = world.new_turn()
        give_up_stream(turn, stream, "gone")
        world.close(turn)

    return give_up


def keep_waiting(stream: str) -> Make:
    """A partition of a stream has no leader."""

    def wait(world: World) -> None:
        world.memory.waiting = {stream: "no leader"}

    return wait


def with_settings(**changes: Any) -> Make:
    def change(world: World) -> None:
        world.settings = replace(world.settings, **changes)

    return change


ALL_KEYS = r.KeyRange(0, SPACE)
SCALE: dict[str, Row] = {
    "unknown stream": (scale(3, stream="nyc/none"), "UnknownStream", ""),
    "LOST": (after(lose("nyc/a"), then=scale(3)), "StreamLost", "is lost"),
    "a number and ranges": (scale(3, (0,), ALL_KEYS), INVALID, "not both"),
    "seals too many": (scale(0, (0,) * 10_001), INVALID, "10,000 are allowed"),
    "opens too many": (scale(0, (0,), *(ALL_KEYS,) * 10_001), INVALID, "10,000 are allowed"),
    "no such segment": (scale(0, (7,), ALL_KEYS), INVALID, "not an active segment"),
    "other keys than it seals": (scale(0, (0,), ALL_KEYS), INVALID, "must cover exactly"),
    "too few partitions left": (
        after(with_settings(max_partitions=12), then=scale(12)), "TooManyStreams", "partitions",
    ),
    "being scaled": (
        after(lambda w: w.ask("first", scale(3)(w)), then=scale(4)), "NotReady", "is being scaled",
    ),
}  # fmt: skip

CREATE |= {
    "too many streams": (after(with_settings(max_streams=4), then=create("nyc/new")), "TooManyStreams", ""),
    "too many partitions": (
        after(with_settings(max_partitions=12), then=create("nyc/new", 8)), "TooManyStreams", "partitions",
    ),
}  # fmt: skip

DELETE: dict[str, Row] = {
    "unknown stream": (this(r.DeleteStream("nyc/none")), "UnknownStream", "nothing is to be taken away"),
    "with an open transaction": (this(r.DeleteStream("nyc/a")), ILLEGAL, "`anabranch txn abort"),
    "forget a stream that is not LOST": (this(r.ForgetStream("nyc/a")), ILLEGAL, "nyc/a"),
    "recover a stream that is not LOST": (this(r.RecoverStream("nyc/a")), "nyc/a ACTIVE 2", ""),
}  # fmt: skip


# -- lanes -----------------------------------------------------------------------------------------


def grant(lane: str, pattern: str, rights: int, said: str) -> Row:
    return lambda _: r.SetGrant(lane, pattern, rights), INVALID, said


GRANT: dict[str, Row] = {
    f"{given[0]} {given[1]} {given[2]}": grant(*given)
    for given in (
        ("none", "nyc/*", 4, "no lane 'none'"),
        ("ETL", "nyc/*", 4, "'ETL' is not a lane"),
        ("", "nyc/*", 4, "'' is not a lane"),
        ("etl", "nyc", 4, "'nyc' is not a stream"),
        ("etl", "", 4, "'' is not a stream"),
        ("etl", "*/*", 4, "'*' is not a scope"),
        *(("etl", bad, 4, "is not a stream") for bad in ("*/a", "nyc/a*", "nyc/a/b", "**")),
        *(("etl", "nyc/*", bad, "0 to 511") for bad in (512, -1, ADD | 512, ADD | TAKE)),
        *(("admin", "*", bad, "keeps all rights") for bad in (TAKE | 1, 254, 0)),
    )
}


def set_lane(
    lane: str = "etl", *, blocked: bool = False, ids: tuple[str, ...] = ("1", "2"), **own: int
) -> Make:
    return this(r.SetLane(lane, blocked, ids, own))


def opened_by(lane: str, label: str, name: str | None = None) -> Make:
    def begin(world: World) -> None:
        world.grant(lane, "nyc/*", Right.WRITE)
        with world.by(lane):
            assert world.begin(label, name=name) == f"begun {label}"

    return begin


LANE: dict[str, Row] = {
    "admin blocked": (set_lane("admin", blocked=True), INVALID, "can't be blocked"),
    **{f"not a lane: {lane}": (set_lane(lane), INVALID, "") for lane in ("Etl", "e" * 51, "-e")},
    "another topic": (set_lane(ids=("1", "x")), ILLEGAL, "has other topics"),
    "no topics": (set_lane(ids=()), ILLEGAL, "has other topics"),
    "at the limit of lanes, one that is there": (Lowered("LANES", 1, set_lane()), "etl", ""),
    "too many lanes": (Lowered("LANES", 1, set_lane("web")), INVALID, "1 are allowed"),
    "an unknown quota": (set_lane(opened=5), INVALID, "'opened' is no quota"),
    "a quota of 0": (set_lane(open=0), INVALID, "block the lane to stop it"),
    "a negative quota": (set_lane(open=-1), INVALID, "1 or more"),
    "less than it has": (
        after(opened_by("etl", "E"), opened_by("etl", "F"), then=set_lane(open=1)), INVALID, "has 2 now",
    ),
}  # fmt: skip


def series(expected: int | None, number: int, owner: str | None = None) -> Make:
    return this(r.SetSeries("nyc", "s", expected, number, owner))


SERIES: dict[str, Row] = {
    "no such scope": (this(r.SetSeries("lax", "s", None, 1)), "UnknownScope", "create a stream in it first"),
    "below -1": (series(None, -2), INVALID, "-1 to 2^63"),
    "no such lane": (series(None, 1, "nowhere"), "UnknownLane", "anabranch lane add"),
    "another number than was seen": (series(4, 5), ILLEGAL, "list it again"),
    "being committed": (
        after(lambda w: w.commit("A", name="s", number=1, asker="c"), then=series(None, 5)),
        "NotReady; [c] A COMMITTED 0", "is being committed",
    ),
}  # fmt: skip


# -- begin, the token, touch -----------------------------------------------------------------------


def made_at(world: World, ms: int) -> str:
    return world.new_id("new", made_ms=ms)


def elsewhere(world: World) -> str:
    return world.new_id("new", partition=7)


def begin(label: str = "new", **given: Any) -> Callable[[World], r.Begin]:
    return lambda world: world.beginning(label, **given)


BEGIN: dict[str, Row] = {
    "too many open": (after(with_settings(max_open=2), then=begin()), "TooManyTransactions", ""),
    "another lane's name": (
        after(opened_by("etl", "E", name="x"), then=begin(name="x")), "NameTaken", "",
    ),
    "in use, other name": (begin("N", name="weekly"), INVALID, "in use with other arguments"),
    "in use, no name": (begin("N"), INVALID, "in use with other arguments"),
    "in use, other keepalive": (begin("N", name="daily", keepalive_ms=5_000), INVALID, "other arguments"),
    "in use, other scope": (begin("N", name="daily", scope="sfo"), INVALID, "other arguments"),
    "aborted": (begin("X"), "TransactionAborted", "why"),
    "made now": (lambda w: w.beginning(made_at(w, w.wall_ms)), "begun new", ""),
    "made long ago": (lambda w: w.beginning(made_at(w, w.wall_ms - 3 * DAY)), "begun new", ""),
    "made a day ahead": (lambda w: w.beginning(made_at(w, w.wall_ms + DAY)), "begun new", ""),
    "made further ahead": (lambda w: w.beginning(made_at(w, w.wall_ms + DAY + 1)), "ClockSkew", ""),
    "made at the beginning of time": (lambda w: w.beginning(made_at(w, 0)), "Expired", ""),
    "of another partition": (lambda w: w.beginning(elsewhere(w)), INVALID, "control partition 7; this is 0"),
    "no such scope": (begin(scope="lax"), "UnknownScope", ""),
    "not a scope": (begin(scope="n.y.c"), INVALID, ""),
    "a scope served elsewhere": (begin(scope="ber"), "UnknownScope", "served by control partition 1"),
    "the topics' prefix": (begin(scope="anabranch"), INVALID, ""),
    "shortest keepalive": (begin(keepalive_ms=1_000), "begun new", ""),
    "longest keepalive": (begin(keepalive_ms=MINUTE), "begun new", ""),
    **{
        f"keepalive {ms}": (begin(keepalive_ms=ms), INVALID, "") for ms in (999, MINUTE + 1, 0, -1)
    },
    "no name": (begin(name=""), INVALID, ""),
    "shortest name": (begin(name="n"), "begun new", ""),
    "longest name": (begin(name="é" * 256), "begun new", ""),
    "longer name": (begin(name="n" * 257), INVALID, ""),
    "any characters": (begin(name="a/b\0c"), "begun new", ""),
}  # fmt: skip


def touch(stream: str, label: str = "A") -> Callable[[World], r.Touch]:
    return lambda world: r.Touch(world.token(label), stream)


def ask_exclusive(world: World) -> r.Touch:
    """A touch that asks for a segment of an exclusive stream."""
    world.ask("level", r.SetFeatureLevel(LEVEL), lane="admin")
    world.create("nyc/once", exclusive="true")
    world.created("nyc/once", 0, 0)
    return r.Touch(world.token("A"), "nyc/once", positions=(0,), wait_ms=1_000)


TOUCH: dict[str, Row] = {
    "too many keys": (Lowered("LOCKED_POSITIONS", 0, ask_exclusive), INVALID, "0 are allowed"),
    "another scope's": (touch("sfo/a"), "touched sfo/a epoch 0 on 0,1", ""),
    "another control partition": (touch("ber/a"), "CrossScope", "control partition 0"),
    "a scope that is not there": (touch("lax/a"), "UnknownStream", ""),
    "unknown stream": (touch("nyc/none"), "UnknownStream", ""),
    "being made": (touch("nyc/creating"), "NotReady", ""),
    **{
        f"not a stream: {stream}": (touch(stream), INVALID, "")
        for stream in ("nyc", "nyc/a.journal", "")
    },
    "aborted": (touch("nyc/a", "X"), "TransactionAborted", "why"),
    "committed": (touch("nyc/a", "C"), "AlreadyCommitted", ""),
}  # fmt: skip

# How a transaction is named by its token, in each command that takes one.
BY_TOKEN: dict[str, Callable[[World, bytes], Any]] = {
    "touch": lambda w, token: r.Touch(token, "nyc/a"),
    "register": lambda w, token: r.Register(token, r.Receipt(w.id("A"), 1, 1, False, ())),
    "commit": lambda w, token: r.Commit(token, (), None, None, 0),
    "abort": lambda w, token: r.Abort(token, ""),
    "heartbeat": lambda w, token: r.Heartbeat((token,)),
}


TOKENS: dict[str, tuple[Callable[[World], bytes], str, str]] = {
    "not a token": (lambda _: b"", "InvalidToken", ""),
    "never begun": (lambda w: w.token("new"), UNKNOWN, ""),
    "of another partition": (lambda w: w.token(elsewhere(w)), "InvalidToken", "partition 7"),
}


def by_token(command: str, case: str) -> Row:
    token, answer, words = TOKENS[case]
    return lambda world: BY_TOKEN[command](world, token(world)), answer, words


TOKEN = {f"{name}, {case}": by_token(name, case) for name in BY_TOKEN for case in TOKENS}


LEDGER = b"l" * 32
BY = sha256(LEDGER).digest()
RIGHTS = Right.DESCRIBE | Right.WRITE | Right.CREATE | Right.SCALE | Right.PROCESS


def made_with_quotas() -> World:
    """Two lanes that may do the same; `QUOTA` gives the first one quotas of its own."""
    world = made()
    for lane in ("etl", "web"):
        world.grant(lane, "*", RIGHTS)
    return world


def limited(*steps: Make, then: Make, **own: int) -> Make:
    """The lane etl has these quotas, and has done these steps."""

    def asked(world: World) -> Any:
        with world.by("etl"):
            world.ask("set", r.SetLane("etl", False, ("1", "2"), own), lane="admin")
            for step in steps:
                step(world)
            return then(world)

    return asked


def processor(name: str) -> Make:
    return this(r.CreateProcessor(f"nyc/{name}", 4, (r.ProcessorInput("nyc/a", "", 0, 0),)))


def prepared(label: str) -> Make:
    word = r.Prepare(BY, b"")
    return lambda w: r.PrepareEvents(w.id(label), "nyc", None, (event(),), SECRET, word)


def asks(command: Make) -> Make:
    """A step: the command is done."""

    def step(world: World) -> None:
        world.ask("step", command(world))
        assert not refused(world), world.message

    return step


# What lane etl is refused for a quota of its own. Another lane may do the same then.
QUOTA: dict[str, Row] = {
    "open": (
        limited(lambda w: w.begin("E"), open=1, then=begin(name="other")),
        "TooManyTransactions", "anabranch lane add etl --quota open=2",
    ),
    "keepalive": (limited(keepalive=59_999, then=begin()), INVALID, "--quota keepalive=60000"),
    "keepalive, the longest": (limited(keepalive=60_000, then=begin()), "begun new", ""),
    "scopes": (
        limited(asks(this(r.FindScope("s1", True))), scopes=1, then=this(r.FindScope("s2", True))),
        "TooManyStreams", "--quota scopes=2",
    ),
    "streams": (
        limited(asks(create("nyc/x")), streams=1, then=create("nyc/y")), "TooManyStreams", "--quota streams=2",
    ),
    "partitions": (limited(partitions=4, then=create("nyc/x", 5)), "TooManyStreams", "--quota partitions=5"),
    "partitions of all": (
        limited(asks(create("nyc/x", 3)), partitions=4, then=create("nyc/y", 2)),
        "TooManyStreams", "--quota partitions=5",
    ),
    "processors": (
        limited(asks(processor("p")), processors=1, then=processor("q")), INVALID, "--quota processors=2",
    ),
    "tasks": (limited(asks(processor("p")), tasks=6, then=processor("q")), INVALID, "--quota tasks=8"),
    "prepared": (
        limited(asks(prepared("E")), prepared=1, then=prepared("F")), "TooManyTransactions", "--quota prepared=2",
    ),
}  # fmt: skip


# -- receipts, commit, one-shot --------------------------------------------------------------------


def extent(**given: Any) -> r.Extent:
    return replace(r.Extent("nyc/a", 0, 0, 1, 1, 7), **given)


def receipt(*extents: r.Extent, label: str = "A", **given: Any) -> Callable[[World], r.Receipt]:
    return lambda world: replace(
        r.Receipt(world.id(label), world.writer("w1"), 1, False, extents), **given
    )


# A receipt, to what a registration is answered, and words of the refusal.
RECEIPTS: dict[str, tuple[Callable[[World], r.Receipt], str, str]] = {
    "nothing written": (receipt(), "registered 1", ""),
    "two partitions": (receipt(extent(), extent(partition=1)), "registered 1", ""),
    "an empty extent": (receipt(extent(first=4, end=4, count=0)), "registered 1", ""),
    "a partition twice": (receipt(extent(), extent(first=5, end=6)), INVALID, ""),
    "an untouched stream": (receipt(extent(stream="nyc/b")), "UnknownStream", ""),
    "an unknown stream": (receipt(extent(stream="nyc/none")), "UnknownStream", ""),
    "end below first": (receipt(extent(first=2, count=-1)), INVALID, ""),
    "negative offset": (receipt(extent(first=-1, count=2)), INVALID, ""),
    "negative count": (receipt(extent(count=-1)), INVALID, ""),
    "more events than offsets": (receipt(extent(count=2)), INVALID, ""),
    "negative checksum": (receipt(extent(crc_sum=-1)), INVALID, ""),
    "no such partition": (receipt(extent(partition=2)), INVALID, "no journal partition 2"),
    "another transaction": (receipt(label="N"), INVALID, "another transaction"),
    "no writer": (receipt(writer=0), INVALID, ""),
    "no sequence": (receipt(sequence=0), INVALID, ""),
    "negative sequence": (receipt(sequence=-1), INVALID, ""),
}  # fmt: skip


def commit(label: str = "A", **given: Any) -> Callable[[World], r.Commit]:
    return lambda world: world.committing(label, **given)


def written(world: World) -> None:
    """A has three events of writer w1, which its journal does not show yet."""
    world.held = True
    world.write("A", "w1", count=3)


def labelling(label: str, writer: str = "w1") -> Make:
    return lambda w: r.LabelWriter(w.token("A"), w.writer(writer), label)


WRITERS: dict[str, Row] = {
    "too many tokens of heartbeats": (this(r.Heartbeat((b"",) * 1_001)), INVALID, "1,000 are allowed"),
    "another receipt of the same sequence": (
        after(asks(lambda w: r.Register(w.token("A"), receipt()(w))),
              then=lambda w: r.Register(w.token("A"), receipt(extent())(w))), "ReceiptMismatch", "and differ",
    ),
    "a receipt without what an earlier one had": (
        after(asks(lambda w: r.Register(w.token("A"), receipt(extent())(w))),
              then=lambda w: r.Register(w.token("A"), receipt(sequence=2)(w))), "ReceiptMismatch", "cumulative",
    ),
    "too many writers": (
        Lowered("WRITERS", 0, lambda w: r.Register(w.token("A"), receipt()(w))), INVALID, "the transaction",
    ),
    "a label of a stranger": (labelling("x"), INVALID, "touch a stream"),
    "a label that can't be printed": (labelling("a\nb"), INVALID, "can't be printed"),
    "a long label": (labelling("x" * 1_000), INVALID, "the label of a writer"),
}  # fmt: skip

COMMIT: dict[str, Row] = {
    "not shown by its journal in time": (
        after(written, then=lambda w: w.committing("A", own=[w.receipt("A", "w1")], wait_ms=0)),
        "ReceiptsNotCovered", "still open: commit again",
    ),
    "another lane's series": (
        after(opened_by("etl", "E"), lambda w: w.ask("c", w.committing("E", name="s", number=1), lane="etl"),
              then=commit("N", name="s", number=2)),
        "NameTaken; [c] E COMMITTED 0", "anabranch series set nyc 's' NUMBER --owner",
    ),

    "shortest wait": (commit(wait_ms=0), "", ""),
    "longest wait": (commit(wait_ms=limits.MAX_WAIT_MS), "", ""),
    "negative wait": (commit(wait_ms=-1), INVALID, "within 0 and"),
    "longer wait": (commit(wait_ms=limits.MAX_WAIT_MS + 1), INVALID, "within 0 and 600,000"),
    "no name": (commit(name=""), INVALID, "1 to 256 characters"),
    "longer name": (commit(name="n" * 257), INVALID, "1 to 256 characters"),
    "another name than it began with": (commit("N", name="weekly"), INVALID, "'daily'"),
    "number without series": (commit(number=0), INVALID, "the series' name"),
    "negative number": (commit(name="s", number=-1), INVALID, "0 to 2"),
    "series without name": (commit(name="", number=0), INVALID, "1 to 256"),
    "longer series": (commit(name="s" * 257, number=0), INVALID, "1 to 256"),
    "aborted": (commit("X"), "TransactionAborted", "why"),
    "aborted, with a name": (commit("X", name="weekly"), "TransactionAborted", ""),
}  # fmt: skip


def shot(*events: r.Event, label: str = "new", scope: str = "nyc", name: str | None = None) -> Any:
    return lambda world: r.OneShot(world.id(label), scope, name, events)


def among(bad: r.Event) -> Any:
    return shot(event(), bad, event())


ONE_SHOT: dict[str, Row] = {
    "unknown stream": (among(event("nyc/none")), "UnknownStream", ""),
    "stream being made": (among(event("nyc/creating")), "NotReady", ""),
    "another control partition": (among(event("ber/a")), "CrossScope", "control partition 0"),
    "a scope that is not there": (among(event("lax/a")), "UnknownStream", ""),
    "not a stream": (among(event("nyc")), INVALID, ""),
    "reserved header": (among(event(headers={"ab.txn": b""})), INVALID, ""),
    "reserved prefix": (among(event(headers={"ab.": None})), INVALID, ""),
    "reserved second header": (among(event(headers={"x": b"", "ab.later": b""})), INVALID, ""),
    **{
        f"time {time}": (among(event(timestamp=time)), INVALID, "")
        for time in (-2, -(1 << 62), NEVER)
    },
    "other headers": (shot(event(headers={"abc": b"1", "a": None, "": b"", "AB.": b""})), "new COMMITTED 1", ""),
    "other times": (shot(event(timestamp=0), event(timestamp=-1)), "new COMMITTED 2", ""),
    "no value": (shot(event(value=None)), "new COMMITTED 1", ""),
    "no such scope": (shot(event(), scope="lax"), "UnknownScope", ""),
    "no scope": (shot(event(), scope=""), INVALID, ""),
    "of another partition": (lambda w: shot(event(), label=elsewhere(w))(w), INVALID, ""),
    "made further ahead": (lambda w: shot(label=made_at(w, w.wall_ms + DAY + 1))(w), "ClockSkew", ""),
    "made at the beginning of time": (lambda w: shot(label=made_at(w, 0))(w), "Expired", ""),
    "open": (shot(event(), label="A"), INVALID, ""),
    "committed": (shot(event(), label="C"), INVALID, ""),
    "aborted": (shot(event(), label="X"), "TransactionAborted", "why"),
    "repeated": (shot(event(value=b"not compared"), label="S"), "S COMMITTED 1", ""),
    "repeated with more": (shot(event(), event(), label="S"), INVALID, ""),
    "repeated with a name": (shot(event(), label="S", name="daily"), INVALID, ""),
    "no name": (shot(event(), name=""), INVALID, ""),
    "longer name": (shot(event(), name="n" * 257), INVALID, ""),
}  # fmt: skip


ONE_SHOT |= {
    "too many headers": (among(event()._replace(headers=(r.EventHeader("h", b""),) * 1_001)), INVALID, ""),
    "a big event": (
        after(lambda w: w.create("nyc/small", 1, max_message_bytes="20000"), lambda w: w.created("nyc/small", 0),
              then=shot(event("nyc/small", value=bytes(20_001)))), "EventTooLarge", "",
    ),
}  # fmt: skip


# -- prepare, force --------------------------------------------------------------------------------


def preparing(label: str = "A", attempt: bytes = b"1", **given: Any) -> Make:
    return lambda w: replace(w.committing(label, **given), prepare=r.Prepare(b"", attempt))


def with_batch_bytes(count: int) -> Make:
    """nyc/a takes this many bytes a batch by now, and A wrote more."""

    def lower(world: World) -> None:
        world.write("A", "w1", count=3)
        world.finish("A", "w1")
        row = world.state.streams["nyc/a"]
        small = {**row.settings, "max.message.bytes": str(count)}
        world.log_rows([(stream_key("nyc/a"), replace(row, settings=small))])

    return lower


def committing_prepared(secret: bytes | None) -> Make:
    return lambda w: r.Commit(w.token("A"), (), None, None, 0, secret=secret)


def by_ledger(world: World) -> r.Commit:
    return replace(world.committing("A"), prepare=r.Prepare(BY, b"1"))


PREPARE: dict[str, Row] = {
    "an unfinished writer": (
        after(asks(lambda w: r.Touch(w.token("A"), "nyc/a", 7)), then=preparing()),
        "WritersUnfinished", "let it finish",
    ),
    "committed": (preparing("C"), "AlreadyCommitted", "was not prepared"),
    "too many prepared": (Lowered("PREPARED", 0, preparing()), "TooManyTransactions", "end some of them"),
    "too many bytes": (
        after(with_batch_bytes(1_000), with_settings(max_uncommitted_bytes=10), then=preparing()),
        "TooManyUncommittedBytes", "end some",
    ),
    "a batch that its stream takes no more": (
        after(with_batch_bytes(20), then=preparing()), "EventTooLarge", "takes up to 20 now",
    ),
    "positions": (
        lambda w: replace(preparing()(w), consumed=r.Consumed("nyc/p", b"", ())), "FeatureNotEnabled", "level 3",
    ),
    "the same again": (after(asks(preparing()), then=preparing()), "A PREPARED 0", ""),
    "another attempt": (after(asks(preparing()), then=preparing(attempt=b"2")), ILLEGAL, "by another attempt"),
    "another ledger": (after(asks(preparing()), then=by_ledger), ILLEGAL, "by another attempt"),
    "another name": (after(asks(preparing()), then=preparing(name="other")), INVALID, "another name or number"),
    "touch after it": (after(asks(preparing()), then=touch("nyc/b")), ILLEGAL, "touch does not"),
    "register after it": (
        after(asks(preparing()), then=lambda w: r.Register(w.token("A"), receipt()(w))),
        ILLEGAL, "register does not",
    ),
    "its name": (
        after(asks(preparing(name="x")), then=shot(name="x")), "ReservedByPrepared", "has to be ended first",
    ),
    "its number": (
        after(asks(preparing(name="s", number=7)), then=commit("N", name="s", number=8)),
        "ReservedByPrepared", "number 7 of the series",
    ),
    "its series is set": (
        after(asks(preparing(name="s", number=7)), then=series(7, 9)),
        "ReservedByPrepared", "has to be ended first",
    ),
    "committed with a short secret": (
        after(asks(by_ledger), then=committing_prepared(b"short")), INVALID, "has 32 bytes",
    ),
    "committed without its secret": (
        after(asks(by_ledger), then=committing_prepared(None)), "NotAuthorized", "whose word alone ends it",
    ),
    "committed with another secret": (
        after(asks(by_ledger), then=committing_prepared(b"o" * 32)), "NotAuthorized", "whose word alone ends it",
    ),
    "aborted without its secret": (
        after(asks(by_ledger), then=lambda w: r.Abort(w.token("A"), "")),
        "NotAuthorized", "whose word alone ends it",
    ),
    "in one command, unknown stream": (
        lambda w: replace(prepared("new")(w), events=(event("nyc/none"),)), "UnknownStream", "create it first",
    ),
    "in one command, a big value": (
        lambda w: replace(prepared("new")(w), events=(event(value=bytes(70_000)),)),
        "EventTooLarge", "write them to journals",
    ),
    "in one command, a big header": (
        lambda w: replace(prepared("new")(w), events=(event(headers={"h": bytes(70_000)}),)),
        "EventTooLarge", "write them to journals",
    ),
    "in one command, an open one's id": (prepared("A"), INVALID, "make a new one"),
    "in one command, too many": (
        Lowered("PREPARED", 0, prepared("new")), "TooManyTransactions", "end some of them",
    ),
    "in one command, a waiting stream": (
        after(asks(prepared("new")), keep_waiting("nyc/a"),
              then=lambda w: r.Commit(w.token("new"), (), None, None, 0, secret=LEDGER)), "NotReady", "no leader",
    ),
}  # fmt: skip


DELETE |= {
    "with a prepared transaction": (
        after(asks(preparing()), then=this(r.DeleteStream("nyc/a"))), ILLEGAL, "--outcome commit|abort`",
    ),
}  # fmt: skip


def force(label: str = "A", outcome: bool | None = None) -> Make:
    return lambda w: r.Force(w.id(label), "", outcome)


FORCE: dict[str, Row] = {
    "open": (force(), ILLEGAL, "impossible in state OPEN"),
    "committed": (force("C"), "AlreadyCommitted", "its outcome is final"),
    "not prepared, with an outcome": (force(outcome=True), ILLEGAL, "give no outcome"),
    "prepared, without an outcome": (after(asks(preparing()), then=force()), ILLEGAL, "`--outcome`"),
    "never begun": (force("new"), UNKNOWN, ""),
}  # fmt: skip


# -- questions -------------------------------------------------------------------------------------


def runs(stream: str = "nyc/a", **changes: int) -> Make:
    return lambda w: r.ListRuns(
        w.token("A"), stream, (replace(r.RunsWanted(w.writer("w1"), 0, 0, 0), **changes),)
    )


QUESTIONS: dict[str, Row] = {
    "runs of no partition": (runs(partition=7), INVALID, "name a writer, a journal partition"),
    "runs of no writer": (runs(writer=0), INVALID, "name a writer"),
    "runs that fall": (runs(first=1), INVALID, "offsets that rise"),
    "runs before the first": (runs(first=-1), INVALID, "offsets that rise"),
    "runs that are not read yet": (runs(end=1), "NotReady", "is not read up to 1 yet"),
    "runs of an untouched stream": (runs("nyc/b"), "UnknownStream", "never touched"),
    "state, of another partition": (
        lambda w: r.GetState(w.id(elsewhere(w))), INVALID, "control partition 7; this is 0",
    ),
    "state, never begun": (lambda w: r.GetState(w.id("new")), UNKNOWN, ""),
    "resolve, of another partition": (
        lambda w: r.Resolve(w.id(elsewhere(w)), "nyc"), INVALID, "control partition 7; this is 0",
    ),
    "resolve, made further ahead": (
        lambda w: r.Resolve(w.id(made_at(w, w.wall_ms + DAY + 1)), "nyc"), "ClockSkew", "",
    ),
    "list none": (lambda w: r.ListTransactions(None, True, 0), INVALID, "1 to 10,000"),
    "list more": (lambda w: r.ListTransactions(None, True, MAX_LISTED + 1), INVALID, "1 to 10,000"),
    "list none open": (lambda w: r.ListOpen(None, None, 0), INVALID, "1 to 10,000"),
    "list more open": (lambda w: r.ListOpen(None, None, MAX_LISTED + 1), INVALID, "1 to 10,000"),
    "describe no stream": (lambda w: r.DescribeStreams(None, "nyc/none"), "UnknownStream", ""),
    "describe one being made": (lambda w: r.DescribeStreams(None, "nyc/creating"), "NotReady", ""),
    "series of no scope": (lambda w: r.ListSeries("lax", None, None), "UnknownScope", ""),
    "safe time of no scope": (lambda w: r.SafeTime("lax", None), "UnknownScope", ""),
    "abort, committed": (lambda w: r.Abort(w.token("C"), ""), "AlreadyCommitted", "no abort any more"),
}  # fmt: skip


# World, lane, and rows of each command.
TABLES: dict[str, tuple[Callable[[], World], str | None, dict[str, Row]]] = {
    "scope": (made, None, SCOPES),
    "create": (made, None, CREATE),
    "alter": (made, "admin", ALTER),
    "scale": (made, None, SCALE),
    "delete": (made, "admin", DELETE),
    "grant": (made, "admin", GRANT),
    "lane": (made, "admin", LANE),
    "quota": (made_with_quotas, "etl", QUOTA),
    "begin": (made, None, BEGIN),
    "by token": (made, None, TOKEN),
    "touch": (made, None, TOUCH),
    "writer": (made, None, WRITERS),
    "commit": (made, None, COMMIT),
    "series": (made, "admin", SERIES),
    "one-shot": (made, None, ONE_SHOT),
    "prepare": (made, None, PREPARE),
    "force": (made, "admin", FORCE),
    "question": (made, None, QUESTIONS),
}


@pytest.mark.parametrize(
    ("command", "case"), [(command, case) for command, rows in TABLES.items() for case in rows[2]]
)
def test_a_command_is_answered(command: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_world, lane, rows = TABLES[command]
    world = make_world()
    check_row(world, rows[case], monkeypatch, lane)
    if command == "one-shot" and refused(world):
        assert world.plan() == ""


@pytest.mark.parametrize("case", QUOTA)
def test_a_quota_of_one_lane_refuses_no_other_lane(case: str) -> None:
    world = made_with_quotas()
    command = QUOTA[case][0](world)
    world.ask("it", command, lane="web")
    assert not refused(world), world.message


@pytest.mark.parametrize("case", RECEIPTS)
@pytest.mark.parametrize("way", ["register", "own", "receipts"])
def test_a_receipt_is_checked_wherever_it_comes(case: str, way: str) -> None:
    make, answer, words = RECEIPTS[case]
    world = made()
    given = make(world)
    if way == "register":
        said = world.register("A", given)
    else:
        own, receipts = ([given], []) if way == "own" else ([], [given])
        said = world.commit("A", own=own, receipts=receipts)
    if answer.startswith("registered"):
        assert (said == answer) == (way == "register")
        assert "InvalidArgument" not in said
    else:
        assert said == answer
        assert words in world.message


def test_an_id_is_good_after_a_refusal_and_the_name_is_free() -> None:
    world = made()
    assert world.one_shot("new", event("nyc/none"), name="daily") == "UnknownStream"
    assert world.get("N") == "N OPEN"
    assert world.one_shot("new", event(), name="daily") == "new COMMITTED 1"


def test_the_longest_keepalive_of_the_wire_is_allowed(world: World) -> None:
    assert world.settings.max_keepalive_ms < 1 << 31, "a token can't carry more"
    assert world.begin("A", keepalive_ms=world.settings.max_keepalive_ms) == "begun A"


@pytest.mark.parametrize(("retention_ms", "allowed_ms"), [(3_600_000, 1_800_000), (7, 3)])
def test_a_short_retention_allows_less_skew(retention_ms: int, allowed_ms: int) -> None:
    world = nyc(retention_ms=retention_ms)
    assert world.begin(world.new_id("A", made_ms=world.wall_ms + allowed_ms)) == "begun A"
    assert world.begin(world.new_id("B", made_ms=world.wall_ms + allowed_ms + 1)) == "ClockSkew"
