"""What each command is refused for: one table, of which a row is a command, its answer, and words of the message.

`World` checks that a refused command changes nothing. Rows with another answer are the last values allowed.
Who may send what is `tests/core/test_rights.py`'s; what depends on other transactions or on a size that was reached
is with its subject.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from anabranch.core.authorize import ADD, TAKE
from anabranch.core.decisions.questions import MAX_LISTED
from anabranch.core.journal_runs import NEVER
from anabranch.protocol.limits import MAX_WAIT_MS
from anabranch.protocol.schemas import records as r
from tests.core.harness import DAY, World, event, nyc
from tests.core.labels import MINUTE

# The command, its answer, and words of the refusal.
Row = tuple[Callable[[World], Any], str, str]
INVALID, UNKNOWN = "InvalidArgument", "UnknownTransaction"


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


def made_at(world: World, ms: int) -> str:
    return world.new_id("new", made_ms=ms)


def elsewhere(world: World) -> str:
    return world.new_id("new", partition=7)


def begin(label: str = "new", **given: Any) -> Callable[[World], r.Begin]:
    return lambda world: world.beginning(label, **given)


BEGIN: dict[str, Row] = {
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


def touch(stream: str, label: str = "A") -> Callable[[World], r.Touch]:
    return lambda world: r.Touch(world.token(label), stream)


TOUCH: dict[str, Row] = {
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


COMMIT: dict[str, Row] = {
    "shortest wait": (commit(wait_ms=0), "", ""),
    "longest wait": (commit(wait_ms=MAX_WAIT_MS), "", ""),
    "negative wait": (commit(wait_ms=-1), INVALID, ""),
    "longer wait": (commit(wait_ms=MAX_WAIT_MS + 1), INVALID, ""),
    "no name": (commit(name=""), INVALID, ""),
    "longer name": (commit(name="n" * 257), INVALID, ""),
    "another name than it began with": (commit("N", name="weekly"), INVALID, "'daily'"),
    "number without series": (commit(number=0), INVALID, "the series' name"),
    "negative number": (commit(name="s", number=-1), INVALID, "0 to 2"),
    "series without name": (commit(name="", number=0), INVALID, "1 to 256"),
    "longer series": (commit(name="s" * 257, number=0), INVALID, "1 to 256"),
    "aborted": (commit("X"), "TransactionAborted", "why"),
    "aborted, with a name": (commit("X", name="weekly"), "TransactionAborted", ""),
}  # fmt: skip


def create(stream: str, segments: int = 1, **given: str) -> Callable[[World], r.CreateStream]:
    return lambda _: r.CreateStream(stream, segments, given)


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
            create(stream, segments, **{"retention.ms": ms}), "StreamExists", "2 segments",
        )
        for stream in ("sfo/a", "nyc/creating")
        for what, segments, ms in (("segments", 3, "1"), ("settings", 2, "2"))
    },
}  # fmt: skip


def this(command: Any) -> Callable[[World], Any]:
    return lambda _: command


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


QUESTIONS: dict[str, Row] = {
    "state, of another partition": (lambda w: r.GetState(w.id(elsewhere(w))), INVALID, ""),
    "state, never begun": (lambda w: r.GetState(w.id("new")), UNKNOWN, ""),
    "resolve, of another partition": (lambda w: r.Resolve(w.id(elsewhere(w)), "nyc"), INVALID, ""),
    "resolve, made further ahead": (
        lambda w: r.Resolve(w.id(made_at(w, w.wall_ms + DAY + 1)), "nyc"), "ClockSkew", "",
    ),
    "list none": (lambda w: r.ListTransactions(None, True, 0), INVALID, ""),
    "list more": (lambda w: r.ListTransactions(None, True, MAX_LISTED + 1), INVALID, ""),
    "list none open": (lambda w: r.ListOpen(None, None, 0), INVALID, ""),
    "list more open": (lambda w: r.ListOpen(None, None, MAX_LISTED + 1), INVALID, ""),
    "describe no stream": (lambda w: r.DescribeStreams(None, "nyc/none"), "UnknownStream", ""),
    "describe one being made": (lambda w: r.DescribeStreams(None, "nyc/creating"), "NotReady", ""),
    "series of no scope": (lambda w: r.ListSeries("lax", None, None), "UnknownScope", ""),
    "safe time of no scope": (lambda w: r.SafeTime("lax", None), "UnknownScope", ""),
    "abort, committed": (lambda w: r.Abort(w.token("C"), ""), "AlreadyCommitted", ""),
}  # fmt: skip


def grant(lane: str, pattern: str, rights: int, said: str) -> Row:
    return lambda _: r.SetGrant(lane, pattern, rights), INVALID, said


GRANT: dict[str, Row] = {
    f"{given[0]} {given[1]} {given[2]}": grant(*given)
    for given in (
        ("nobody", "nyc/*", 4, "no lane 'nobody'"),
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

TABLES: dict[str, dict[str, Row]] = {
    "begin": BEGIN, "one-shot": ONE_SHOT, "touch": TOUCH, "by token": TOKEN, "commit": COMMIT,
    "create": CREATE, "scope": SCOPES, "question": QUESTIONS, "grant": GRANT,
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "case"), [(command, case) for command, rows in TABLES.items() for case in rows]
)
def test_a_command_is_answered(command: str, case: str) -> None:
    make, answer, words = TABLES[command][case]
    world = made()
    asked = make(world)
    lane = "admin" if command == "grant" else None
    assert world.ask("it", asked, lane=lane) == answer
    if words:
        assert words in world.message
    if command == "one-shot" and isinstance(world.said[-1][1], r.Refusal):
        assert world.plan() == ""


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
