"""The scenarios that the kit plays, in their order; each is a function of a `Play`.

The file is long because it has one function for each scenario, and they share the tools at its end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from typing import Any

import anabranch
from anabranch.batches.records import Record, encode_batch
from anabranch.conformance.checks import Written, difference
from anabranch.conformance.child import ChildError, NoAnswer
from anabranch.conformance.play import VISIBLE_S, Controllers, Play, Result, Tested, lines_of
from anabranch.conformance.wire import (
    PASS,
    Script,
    Sent,
    Treatment,
    answer_to,
    broken_replies,
)
from anabranch.errors import AnabranchError
from anabranch.ports import TopicPartition
from anabranch.protocol.ids import DECIDED_HEADER
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import id_named
from anabranch.topics.names import stream_topic

SHORT_S = 6.0  # the timeout of a client whose commit is not answered
_DOUBT_S = 3.0  # of one whose write is not answered
_FALSE_TIME = 1 << 62  # the hybrid time of made-up replies, far ahead of all clocks
_TRUE_AFTER_S = 0.3  # true answers follow made-up ones
_KEEPALIVE_MS = 1500
_BEFORE_MS = 3_600_000_000 << 12  # an hour of hybrid time
_IN_FLIGHT = 24


@dataclass(frozen=True)
class Scenario:
    """A scenario. ``rules``: the first one is broken if it can't be played to its end.

    ``alone``: other scenarios must not run at the same time. ``own``: needs controllers that the kit started.
    """

    name: str
    rules: tuple[str, ...]
    play: Callable[[Play], None]
    alone: bool = False
    own: bool = False


SCENARIOS: dict[str, Scenario] = {}
_Body = Callable[[Play], None]


class NotPlayed(Exception):
    """The scenario can't be played here; the text says why."""


def scenario(*rules: str, alone: bool = False, own: bool = False) -> Callable[[_Body], _Body]:
    """Add a scenario. Its name is the function's, with dashes."""

    def add(body: _Body) -> _Body:
        name = body.__name__.replace("_", "-")
        SCENARIOS[name] = Scenario(name, rules, body, alone, own)
        return body

    return add


# -- transactions ---------------------------------------------------------------------------------------


@scenario("R10.3", "R5.1", "R5.2", "R5.3", "R6.1", "R7.1", "R8.1", "R8.2", "R9.1", "R10.1")
def begin_write_commit(play: Play) -> None:
    """Begin, write twice to two streams, commit: all kinds of keys, values, headers and times."""
    events = _many_kinds(play.one, "a") + _many_kinds(play.two, "b")
    client = play.client()
    txn = client.begin(play.scope)
    txn.write(events[:7])
    txn.write(events[7:])
    result = txn.commit()
    play.expect(events)
    play.committed("R10.3", result, txn.txn_id, len(events))
    play.refused("R5.7", _OVER, lambda: txn.write(events[:1]))
    again = client.begin(play.scope)
    again.write(more := play.events(play.two, 200))
    play.committed("R10.3", again.commit(), again.txn_id, len(more))
    play.expect(more)


@scenario("R10.3", "R8.2", "R5.1")
def one_shot(play: Play) -> None:
    """Whole transactions in one command."""
    events = _many_kinds(play.one, "a") + _many_kinds(play.two, "b")
    client = play.client()
    play.committed("R10.3", client.one_shot(play.scope, events), None, len(events))
    play.expect(events)
    more = play.events(play.one, 5, key="same") + play.events(play.one, 5, key="same")
    play.committed("R10.3", client.one_shot(play.scope, more), None, len(more))
    play.expect(more)


@scenario("R10.1", "R5.4", "R6.1", "R8.4", "R9.1", "R9.3", "R10.4")
def join(play: Play) -> None:
    """Two processes write to one transaction; the commit takes receipts by list, or all that are registered."""
    beginner, helper = play.client(), play.client()
    txn = beginner.begin(play.scope)
    writer = helper.join(txn.token)
    mine, theirs = play.events(play.one), play.events(play.two)
    txn.write(mine)
    writer.write(theirs[:1])
    writer.receipt(finished=False)
    play.refused("R10.4", ["WritersUnfinished"], txn.commit)
    writer.write(theirs[1:])
    writer.receipt()
    play.committed("R10.4", txn.commit(), txn.txn_id, len(mine) + len(theirs))
    play.expect(mine + theirs)

    other = beginner.begin(play.scope)
    taken, left = helper.join(other.token), helper.join(other.token)
    some, lost = play.events(play.one), play.events(play.one)
    taken.write(some)
    left.write(lost)
    receipt = taken.receipt()
    left.receipt()
    result = other.commit([receipt])
    play.expect(some)
    play.committed("R10.1", result, other.txn_id, len(some))
    play.check("R10.1", result.left_out == len(lost), f"left_out is {result.left_out}")
    touches = [sent.command.writer for sent in helper.wire.of(r.Touch) if sent.copy == 1]
    play.check("R8.4", len(set(touches)) == 3, f"three joins wrote as {len(set(touches))} writers")


@scenario("R5.3", "R5.4")
def tokens(play: Play) -> None:
    """Tokens between this client and the Python client, in both directions."""
    client, python = play.client(), play.python()
    txn = client.begin(play.scope)
    events = play.events(play.one, 4)
    with python.join(txn.token) as writer:
        writer.write(play.one, events[0].value, events[0].key)
    txn.write(events[1:2])
    play.committed("R5.3", txn.commit(), txn.txn_id, 2)
    with python.begin(play.scope) as other:
        joined = client.join(other.token())
        joined.write(events[2:])
        receipt = joined.receipt()
        count = other.commit([receipt]).counts.committed
    play.check("R5.4", count == 2, f"{count} events of the joined client were committed, not 2")
    play.expect(events)


@scenario("R12.3")
def time_of_a_token(play: Play) -> None:
    """The client joins by the token of another client, which has seen a later time."""
    client, python = play.client(), play.python()
    client.one_shot(play.scope, first := play.events(play.one, 1))
    with python.begin(play.scope) as ahead:
        ahead.write(play.one, b"ahead", b"key-ahead")
        ahead.commit()
    with python.begin(play.scope) as txn:
        token = txn.token()
        seen = python.last_timestamp
        joined = client.join(token)
        joined.write(events := play.events(play.one, 1))
        txn.commit([joined.receipt()])
    play.expect([*first, Written(play.one, b"key-ahead", b"ahead"), *events])
    for sent in client.wire.of(r.Touch):
        play.check("R12.3", sent.time >= seen, f"Touch has {sent.time}; the token has {seen}")


@scenario("R5.5", "R5.7")
def names(play: Play) -> None:
    """A name commits once; a new transaction of an open name ends the former one."""
    client = play.client()
    txn = client.begin(play.scope, name="nightly")
    txn.write(events := play.events(play.one))
    first = txn.commit()
    play.expect(events)
    play.committed("R5.5", first, txn.txn_id, len(events))
    answer = client.ask("begin", scope=play.scope, name="nightly", keepalive_ms=60_000)
    same = "outcome" in answer and Result.of(answer).txn_id == first.txn_id
    play.check("R5.5", same, f"begin with a committed name: {answer!r:.200}")
    again = client.one_shot(play.scope, play.events(play.one), name="nightly")
    play.check("R5.5", again.txn_id == first.txn_id, f"a one-shot of that name: {again}")
    late = client.begin(play.scope)
    late.write(play.events(play.one))
    claimed = late.commit(name="nightly")
    play.check("R5.5", claimed.txn_id == first.txn_id, f"a commit that claims the name: {claimed}")
    former = client.begin(play.scope, name="hourly")
    former.write(play.events(play.two))
    newer = client.begin(play.scope, name="hourly")
    newer.write(more := play.events(play.two))
    play.refused("R5.7", ["TransactionAborted"], former.commit)
    play.committed("R5.5", newer.commit(), newer.txn_id, len(more))
    play.expect(more)


@scenario("R10.6")
def numbers(play: Play) -> None:
    """Numbered commits of a series: each number commits once."""
    client = play.client()

    def commit(number: int) -> tuple[bytes, Callable[[], Result], list[Written]]:
        txn = client.begin(play.scope)
        txn.write(events := play.events(play.one, 2))
        return txn.txn_id, lambda: txn.commit(name="batches", number=number), events

    txn_id, call, events = commit(5)
    play.committed("R10.6", first := call(), txn_id, 2)
    play.expect(events)
    _, call, _ = commit(5)
    again = call()
    play.check("R10.6", again.txn_id == first.txn_id, f"number 5 again: {again}")
    _, call, _ = commit(4)
    play.refused("R10.6", ["AlreadyCommitted"], call)


@scenario("R10.5", "R5.7")
def abort(play: Play) -> None:
    """Aborts before, after and instead of a commit."""
    client = play.client()
    txn = client.begin(play.scope)
    txn.write(play.events(play.one))
    txn.abort()
    txn.abort()
    play.check("R10.5", True, "")
    play.refused("R5.7", ["TransactionAborted"], txn.commit)
    state = client.resolve(txn.token).state
    play.check("R10.5", state == "ABORTED", f"an aborted transaction is {state}")
    done = client.begin(play.scope)
    done.write(events := play.events(play.one))
    play.committed("R10.3", done.commit(), done.txn_id, len(events))
    play.expect(events)
    play.refused("R10.5", ["AlreadyCommitted"], done.abort)
    state = client.resolve(done.token).state
    play.check("R11.2", state == "COMMITTED", f"a committed transaction is {state}")


@scenario("R10.8", "R10.7", "R10.3")
def prepared(play: Play) -> None:
    """Two transactions are prepared; later another connection commits one of them and aborts the other one."""
    client, coordinator = play.client(), play.client()
    secret, ready = os.urandom(32), []
    for stream in (play.one, play.two):
        txn = client.begin(play.scope)
        txn.write(events := play.events(stream))
        for _ in range(2):
            state = txn.prepare(secret, b"first").state
            play.check("R10.7", state == "PREPARED", f"prepare was answered {state}")
        play.refused("R10.8", _PREPARED, lambda: txn.write(play.events(stream)))  # noqa: B023
        ready.append((txn, events))
    _check_prepares(play, client, secret)
    (one, events), (other, _) = ready
    for txn in (one, other):
        state = play.kit.state(txn.txn_id).state
        play.check(
            "R10.8", state == "PREPARED", f"a prepared transaction is {state} before the decision"
        )
    for _ in range(2):
        result = coordinator.decide(one.txn_id, secret, commit=True)
        play.committed("R10.8", result, one.txn_id, len(events))
        state = coordinator.decide(other.txn_id, secret, commit=False).state
        play.check("R10.8", state == "ABORTED", f"an abort was answered {state}")
    _check_decisions(play, coordinator, secret)
    play.expect(events)


@scenario("R10.9")
def decided(play: Play) -> None:
    """A commit is answered at its decision, which may be its merge, and again at its merge."""
    client = play.client()
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one, 50))
    first = txn.commit_decided()
    known = first.state in ("FINALIZE_IN_PROGRESS", "COMMITTED") and first.committed == len(events)
    play.check("R10.9", known and first.txn_id == txn.txn_id, f"a decision is reported as {first}")
    asked = [sent for sent in client.wire.sent if sent.kind == "Commit"]
    named = all(DECIDED_HEADER in sent.headers for sent in asked)
    play.check("R10.9", bool(asked) and named, "a Commit has no ab.decided")
    play.committed("R10.9", txn.commit(), txn.txn_id, len(events))
    play.expect(events)


@scenario("R10.10")
def sessions(play: Play) -> None:
    """Rows of a session: all of one key, in order; one of them is of a stream that is not there."""
    client = play.client()
    events = play.events(play.one, 60, key="same")
    nowhere = events[0]._replace(stream=f"{play.scope}/nowhere")
    failed = client.session([*events[:40], nowhere, *events[40:]])
    play.check("R10.10", failed == [40], f"rows {failed} are reported as failed, not [40]")
    play.expect(events)


@scenario("R10.7", "R10.8", "R3.3", "R11.1")
def lost_answers_of_a_coordinator(play: Play) -> None:
    """The first answers to a prepare and to the decision are lost; an unknown secret is refused."""
    client, coordinator = play.client(), play.client()
    for each in (client, coordinator):
        each.wire.script = lambda sent: Treatment(
            answer=not (sent.kind == "Commit" and sent.copy == 1)
        )
    secret = os.urandom(32)
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    state = txn.prepare(secret, b"only").state
    play.check("R10.7", state == "PREPARED", f"prepare was answered {state}")
    _check_prepares(play, client, secret)
    wrong = os.urandom(32)
    play.refused("R10.8", _DENIED, lambda: coordinator.decide(txn.txn_id, wrong, commit=True))
    result = coordinator.decide(txn.txn_id, secret, commit=True)
    play.committed("R10.8", result, txn.txn_id, len(events))
    play.expect(events)


@scenario("R13.1", "R13.2")
def reading(play: Play) -> None:
    """A stream with commits, an open and an aborted transaction, a native transaction that was aborted, and, for
    a client that reads by the history, foreign records.
    """
    client, stream = play.client(), play.one
    first = play.events(stream, 10) + play.events(stream, 5, key="same")
    times = {client.one_shot(play.scope, first).commit_timestamp: first}
    hidden = client.begin(play.scope)
    hidden.write(play.events(stream))
    ended = client.begin(play.scope)
    ended.write(play.events(stream))
    ended.abort()
    _abort_natively(play, stream)
    txn = client.begin(play.scope)
    txn.write(later := play.events(stream, 10) + play.events(stream, 5, key="same"))
    times[txn.commit().commit_timestamp] = later
    play.expect(first + later)
    _check_read(play, "R13.1", client, stream, times)
    if any(one.commit_timestamp is not None for one in client.read(stream)):
        foreign = Record(0, int(time.time() * 1000), b"foreign", b"foreign")
        play.log.send([(TopicPartition(stream_topic(stream), 0), encode_batch([foreign]))], {})
        play.expect([Written(stream, b"foreign", b"foreign")])  # for plain consumers
        last = play.events(stream, 10)
        times[client.one_shot(play.scope, last).commit_timestamp] = last
        play.expect(last)
        _check_read(play, "R13.2", client, stream, times)
    hidden.abort()


@scenario("R5.6")
def heartbeats(play: Play) -> None:
    """A transaction stays open much longer than its keepalive while the client is idle."""
    client = play.client()
    txn = client.begin(play.scope, keepalive_ms=_KEEPALIVE_MS)
    txn.write(events := play.events(play.one))
    time.sleep(_KEEPALIVE_MS / 1000 * 2.5)
    beats = [sent.at for sent in client.wire.of(r.Heartbeat)]
    gaps = [b - a for a, b in pairwise(beats)]
    longest = max(gaps, default=9.9)
    in_time = longest < _KEEPALIVE_MS / 1000 * 0.6
    play.check("R5.6", in_time, f"{len(beats)} heartbeats, {longest:.1f} s between two of them")
    play.committed("R5.6", txn.commit(), txn.txn_id, len(events))
    play.expect(events)


@scenario("R5.7")
def ended_by_others(play: Play) -> None:
    """A newer transaction of its name ends it: the client learns it by a heartbeat or a refusal."""
    client = play.client()
    txn = client.begin(play.scope, name="hourly", keepalive_ms=_KEEPALIVE_MS)
    txn.write(play.events(play.one))
    with play.kit.begin(play.scope, name="hourly") as newer:
        newer.abort()
    time.sleep(_KEEPALIVE_MS / 1000)
    play.refused("R5.7", ["TransactionAborted"], txn.commit)


@scenario("R6.2", "R7.1")
def scaling(play: Play) -> None:
    """The stream is scaled while a transaction is open; later transactions write by the new segments."""
    client = play.client()
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one, 20))
    play.kit.scale(play.one, segments=5)
    txn.write(more := play.events(play.one, 20))
    play.committed("R6.2", txn.commit(), txn.txn_id, 40)
    after = client.begin(play.scope)
    after.write(last := play.events(play.one, 40))
    play.committed("R6.2", after.commit(), after.txn_id, 40)
    play.expect([*events, *more, *last])


@scenario("R8.7")
def plain_writes(play: Play) -> None:
    """Records of a plain producer in a journal."""
    client = play.client()
    client.plain(play.one, events := play.events(play.one, 6))
    play.expect(events)


@scenario("R8.5")
def reserved_headers(play: Play) -> None:
    """A header's name that only the protocol may use."""
    client = play.client()
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    bad = [one._replace(headers=(("ab.mine", b"x"),)) for one in play.events(play.one, 1)]
    play.refused("R8.5", ["InvalidArgument"], lambda: txn.write(bad))
    play.committed("R8.5", txn.commit(), txn.txn_id, len(events))
    play.expect(events)


@scenario("R10.4")
def quotas(play: Play) -> None:
    """A lane that may have one open transaction."""
    lane = f"conf-{play.scope}"
    with anabranch.connect(
        play.target.bootstrap,
        prefix=play.target.prefix,
        lane="admin",
    ) as admin:
        try:
            admin.add_lane(lane, quotas={"open": 1})
            admin.grant(lane, f"{play.scope}/*", ("describe", "write"))
        except AnabranchError as error:
            raise NotPlayed(f"no lane can be made: {error}") from None
    stream = play.one
    client = play.client(lane=lane, timeout=SHORT_S)
    first = client.begin(play.scope)
    play.refused("R10.4", ["TooManyTransactions"], lambda: client.begin(play.scope))
    first.write(events := play.events(stream))
    play.committed("R10.4", first.commit(), first.txn_id, len(events))
    second = client.begin(play.scope)
    second.write(more := play.events(stream))
    play.committed("R10.4", second.commit(), second.txn_id, len(more))
    play.expect(events + more)


@scenario("R11.6")
def unknown_stream(play: Play) -> None:
    """Refusals that say what is wrong with the call."""
    client = play.client()
    known = play.one
    txn = client.begin(play.scope)
    missing = play.events(f"{play.scope}/missing", 1)

    def write_and_commit() -> Result:
        txn.write(missing)
        return txn.commit()

    play.refused("R11.6", ["UnknownStream"], write_and_commit)
    play.refused(
        "R11.6", ["UnknownScope"], lambda: client.begin("conformance-no-such-scope").write(missing)
    )
    client.one_shot(play.scope, events := play.events(known))
    play.expect(events)


# -- lost, late and false answers -----------------------------------------------------------------------


@scenario("R11.1", "R3.3", "R11.4")
def lost_answers(play: Play) -> None:
    """The first answer to each command is lost, the second one comes twice."""
    client = play.client()

    def script(sent: Sent) -> Treatment:
        lost = sent.copy == 1 and sent.kind in ("Begin", "Touch", "Commit", "OneShot")
        return Treatment(answer=not lost)

    client.wire.script = script
    shot: Future[Any] = client.start(
        "one_shot", scope=play.scope, name=None, events=lines_of(one := play.events(play.one))
    )
    txn = client.begin(play.scope)
    txn.write(two := play.events(play.two))
    play.committed("R11.1", txn.commit(), txn.txn_id, len(two))
    play.committed("R11.4", Result.of(shot.result(30)), None, len(one))
    play.expect(one + two)


@scenario("R3.4")
def late_answers(play: Play) -> None:
    """The answer to a command's first copy comes after the answer to the second one, when none is expected."""
    client = play.client()
    client.wire.script = lambda sent: Treatment(
        delay=2.6 if sent.kind == "Begin" and sent.copy == 1 else 0.0
    )
    txn = client.begin(play.scope)
    client.wire.script = lambda _: PASS
    txn.write(events := play.events(play.one))
    time.sleep(1.0)  # the other answer to Begin comes meanwhile
    play.committed("R3.4", txn.commit(), txn.txn_id, len(events))
    play.expect(events)


@scenario("R3.5", "R3.4", "R12.2")
def stray_replies(play: Play) -> None:
    """Before each answer come replies of other commands and other clients."""
    client = play.client()
    client.wire.script = _strays
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    play.committed("R3.5", txn.commit(), txn.txn_id, len(events))
    play.committed("R3.5", client.one_shot(play.scope, more := play.events(play.two)), None, 3)
    aborted = client.begin(play.scope)
    aborted.abort()
    play.refused("R3.5", ["TransactionAborted"], aborted.commit)
    play.expect(events + more)


@scenario("R3.6", "R12.2")
def outcomes_of_others(play: Play) -> None:
    """Before each answer comes the outcome of another transaction, under the command's id and digest."""
    client = play.client()
    client.wire.script = _outcomes_of_others
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    play.committed("R3.6", txn.commit(), txn.txn_id, len(events))
    play.expect(events + _one_shot(play, "R3.6", client, play.two))


@scenario("R2.2")
def broken_answers(play: Play) -> None:
    """A reply under the right id that is no reply: the client waits for the true one, or fails by name."""
    client = play.client(timeout=SHORT_S)
    faults = [name for name, _ in broken_replies(Sent(0, b"", {}, 0.0))]
    for number, fault in enumerate(faults):
        client.wire.script = _broken(number)
        events = play.events(play.one, 1)
        try:
            result = client.one_shot(play.scope, events)
            play.check("R2.2", result.state == "COMMITTED", f"a reply {fault} led to {result}")
            play.expect(events)
        except ChildError as error:
            play.check("R2.2", error.name in _REFUSED, f"a reply {fault} led to {error}")
            play.maybe.append(events)
        client.wire.script = lambda _: PASS
    play.expect(_one_shot(play, "R2.2", client, play.one))


@scenario("R11.2")
def unanswered_commit(play: Play) -> None:
    """No copy of a commit is answered, though it is carried out."""
    client = play.client(timeout=SHORT_S)
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    client.wire.script = lambda sent: Treatment(answer=sent.kind != "Commit")
    play.committed("R11.2", txn.commit(), txn.txn_id, len(events))
    play.expect(events)
    _check_resolved(play, client, "Commit")


@scenario("R11.2", "R11.4")
def unanswered_one_shot(play: Play) -> None:
    """No copy of a one-shot is answered, though it is carried out."""
    client = play.client(timeout=SHORT_S)
    stream = play.one
    client.wire.script = lambda sent: Treatment(answer=sent.kind != "OneShot")
    play.committed("R11.2", client.one_shot(play.scope, events := play.events(stream)), None, 3)
    play.expect(events)
    _check_resolved(play, client, "OneShot")


@scenario("R11.3")
def refusal_of_a_copy(play: Play) -> None:
    """The first copy of a commit is carried out without an answer, and the second one is refused."""
    client = play.client(timeout=2 * SHORT_S)
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))

    def script(sent: Sent) -> Treatment:
        if sent.kind not in ("Commit", "OneShot"):
            return PASS
        if sent.copy == 1:
            return Treatment(answer=False)
        return _refused(sent, "TooManyUncommittedBytes")

    client.wire.script = script
    play.committed("R11.3", txn.commit(), txn.txn_id, len(events))
    play.expect(events + _one_shot(play, "R11.3", client, play.two))


@scenario("R11.4", "R11.2")
def lost_one_shot(play: Play) -> None:
    """No copy of a one-shot arrives until its transaction is resolved; then all of them do."""
    client = play.client(timeout=SHORT_S)
    stream = play.one
    client.wire.script = lambda sent: Treatment(forward=sent.kind != "OneShot")
    events = play.events(stream)
    play.refused(
        "R11.2",
        ["TransactionAborted", "OutcomeUnknown"],
        lambda: client.one_shot(play.scope, events),
    )
    client.wire.script = lambda _: PASS
    ids = {sent.command.txn_id for sent in client.wire.of(r.OneShot)}
    play.check("R11.4", len(ids) == 1, f"one call sent {len(ids)} transactions")
    if client.wire.of(r.Resolve):
        client.wire.release()
    else:
        play.check("R11.2", False, "no Resolve was sent")
    play.expect(_one_shot(play, "R11.4", client, stream))


@scenario("R11.5")
def silence(play: Play) -> None:
    """From the commit on nothing is answered."""
    client = play.client(timeout=SHORT_S)
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    client.wire.script = lambda _: Treatment(answer=False)
    began = time.monotonic()
    play.refused("R11.5", ["OutcomeUnknown"], txn.commit)
    took = time.monotonic() - began
    play.check("R11.5", took < SHORT_S + 3, f"a timeout of {SHORT_S:.0f} s took {took:.1f} s")
    play.expect(events)
    client.wire.script = lambda _: PASS
    state = client.resolve(txn.token).state
    play.check("R11.2", state == "COMMITTED", f"resolved as {state}")


@scenario("R3.7", "R11.6")
def not_ready(play: Play) -> None:
    """Commands are refused as `NotReady` at first."""
    client = play.client()
    asked: dict[str, list[bytes]] = {}

    def script(sent: Sent) -> Treatment:
        cids = asked.setdefault(sent.kind, [])
        if sent.kind in ("Begin", "Touch", "Commit", "OneShot") and len(cids) < 2:
            cids.append(sent.cid)
            return _refused(sent, "NotReady")
        return PASS

    client.wire.script = script
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    play.committed("R11.6", txn.commit(), txn.txn_id, len(events))
    play.expect(events + _one_shot(play, "R11.6", client, play.two))
    for kind, cids in asked.items():
        play.check("R3.7", len(set(cids)) == len(cids), f"{kind} was sent again under its old id")


@scenario("R11.6")
def unknown_code(play: Play) -> None:
    """A refusal of a code that the client can't know."""
    client = play.client(timeout=SHORT_S)
    stream = play.one

    client.wire.script = lambda s: _refused(s, "NotInvented") if s.kind == "OneShot" else PASS
    events = play.events(stream)
    try:
        result = client.one_shot(play.scope, events)
        play.check("R11.6", False, f"a refusal was taken for {result}")
    except ChildError as error:
        named = "NotInvented" in f"{error}"
        play.check("R11.6", named, f"the error does not name the code: {error}")
    count = len(client.wire.of(r.OneShot))
    play.check("R11.6", count == 1, f"the refused command was sent {count} times")


@scenario("R12.3")
def former_leader(play: Play) -> None:
    """An answer of a former leader arrives late, with an old time."""
    client = play.client()
    client.one_shot(play.scope, first := play.events(play.one))

    def older(reply: r.Reply) -> r.Reply:
        return reply._replace(hybrid_time=max(0, reply.hybrid_time - _BEFORE_MS))

    client.wire.script = lambda _: Treatment(change=older)
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    play.committed("R12.3", txn.commit(), txn.txn_id, len(events))
    play.expect(first + events)
    lowest = min(sent.time for sent in client.wire.of(r.Commit))
    received = client.wire.of(r.Begin)[0].time
    play.check("R12.3", lowest >= received, f"ab.ht fell from {received} to {lowest}")


# -- with the kit's own cluster -------------------------------------------------------------------------


@scenario("R11.4", "R11.2", alone=True, own=True)
def takeover(play: Play) -> None:
    """The leader is killed under one-shots and an open transaction; another controller takes over."""
    client = play.client()
    client.wire.script = lambda _: Treatment(sure=False)  # an answer may come after its call's time
    txn = client.begin(play.scope)
    txn.write(events := play.events(play.one))
    shots = []
    for n in range(_IN_FLIGHT):
        some = play.events(play.two)
        shots.append(
            (some, client.start("one_shot", scope=play.scope, name=None, events=lines_of(some)))
        )
        if n == _IN_FLIGHT // 2:
            _own(play).kill_leader()
    for some, future in shots:
        try:
            result = Result.of(future.result(60))
            play.committed("R11.2", result, None, len(some))
            play.expect(some)
        except ChildError as error:
            play.check("R11.4", error.name in _NO_EFFECT, f"a one-shot failed: {error}")
            if error.name == "OutcomeUnknown":
                play.maybe.append(some)
    txn.write(more := play.events(play.one))
    play.committed("R11.2", txn.commit(), txn.txn_id, len(events) + len(more))
    play.expect(events + more)


@scenario("R8.6", alone=True, own=True)
def write_in_doubt(play: Play) -> None:
    """The broker does not answer a write until the client gives up."""
    client = play.client(timeout=_DOUBT_S)
    txn = client.begin(play.scope)
    txn.write(before := play.events(play.one))
    doubted = play.events(play.one)
    own = _own(play)
    own.pause_broker()
    began = time.monotonic()
    try:
        future = client.start("write", txn=txn.name, events=lines_of(doubted))
        time.sleep(_DOUBT_S + 1.5)
    finally:
        own.resume_broker()
    try:
        future.result(4 * _DOUBT_S)
        written = True
    except ChildError:
        written = False
    except TimeoutError:
        raise NoAnswer(f"a write took {time.monotonic() - began:.0f} s") from None
    try:
        result = txn.commit()
    except ChildError as error:
        play.check("R8.6", not written, f"a write succeeded, and the commit failed: {error}")
        play.maybe.append(before + doubted)
        return
    count = len(before) + len(doubted)
    right = written and result.committed == count
    play.check(
        "R8.6", right, f"the write in doubt {'succeeded' if written else 'failed'}: {result}"
    )
    play.expect(before + doubted)


# -- tools ------------------------------------------------------------------------------------------------

_OVER = ("AlreadyCommitted", "IllegalState", "TransactionAborted")
_PREPARED = ("IllegalState", "OutcomeUnknown")
_DENIED = ("NotAuthorized", "OutcomeUnknown", "UnknownTransaction")
_NO_EFFECT = ("TransactionAborted", "OutcomeUnknown")
_REFUSED = ("MalformedRecord", "UnsupportedVersion", "OutcomeUnknown")
_ASKED = ("Begin", "Touch", "Register", "Commit", "OneShot", "Abort")


def _own(play: Play) -> Controllers:
    if play.target.controllers is None:
        raise NotPlayed("the cluster is not the kit's own")
    return play.target.controllers


def _many_kinds(stream: str, key: str) -> list[Written]:
    """Events with all that a record may have, under keys that begin with ``key``."""
    name = key.encode()
    return [
        Written(stream, name + b"-JFK", b"1545"),
        Written(stream, name + b"-JFK", b"1714"),
        Written(stream, name + "-Zürich".encode(), "größer".encode()),
        Written(stream, None, name + b" without a key"),
        Written(stream, b"", name + b" with an empty key"),
        Written(stream, name + b"-deleted", None),
        Written(stream, name + b"-empty", b""),
        Written(stream, name + bytes(range(256)), bytes(range(255, -1, -1)) * 40),
        Written(stream, name + b"-h", b"x", (("n", b"1"), ("n", b"2"), ("null", None), ("é", b""))),
        Written(stream, name + b"-t", b"x", (), 1_700_000_000_123),
        *(Written(stream, b"%s-%d" % (name, n), b"v%d" % n) for n in range(30)),
    ]


def _strays(sent: Sent) -> Treatment:
    """Before the true answer: replies of others, and replies that only seem to be of this command."""
    if sent.kind not in _ASKED:
        return PASS
    txn_id = _txn_of(sent)
    over = r.Refusal("TransactionAborted", "made up by the kit")
    other = replace(sent, payload=b"other")
    return Treatment(
        delay=_TRUE_AFTER_S,
        false=[
            (None, b"no key"),
            (b"short", b"\x01"),
            (os.urandom(16), os.urandom(100)),
            (os.urandom(16), answer_to(sent, over, _FALSE_TIME)),
            (sent.cid, answer_to(other, over, _FALSE_TIME)),
            (sent.cid, answer_to(other, _outcome(txn_id), _FALSE_TIME)),
        ],
    )


def _outcomes_of_others(sent: Sent) -> Treatment:
    if sent.kind not in _ASKED:
        return PASS
    false = answer_to(sent, _outcome(os.urandom(16)), _FALSE_TIME)
    return Treatment(delay=_TRUE_AFTER_S, false=[(sent.cid, false)])


def _txn_of(sent: Sent) -> bytes:
    command = sent.command
    return bytes(command.txn_id if hasattr(command, "txn_id") else id_named(command.token))


def _outcome(txn_id: bytes) -> r.Outcome:
    return r.Outcome(
        txn_id=txn_id, state="COMMITTED", scope="made-up", name=None, commit_timestamp=_FALSE_TIME,
        committed=99, rejected=0, left_out=0, reason="", begun_ms=0, finished_ms=0,
        keepalive_ms=60_000, streams=(), writers=(), owner="open",
    )  # fmt: skip


def _broken(number: int) -> Script:
    """Answer the first copy of a one-shot by the broken reply of this number, before the true one."""

    def script(sent: Sent) -> Treatment:
        if sent.kind != "OneShot" or sent.copy > 1:
            return PASS
        value = [value for _, value in broken_replies(sent)][number]
        return Treatment(delay=_TRUE_AFTER_S, false=[(sent.cid, value)], sure=False)

    return script


def _refused(sent: Sent, code: str) -> Treatment:
    """Not passed on, and answered by a refusal."""
    refusal = r.Refusal(code, "nothing was changed: made up by the kit")
    return Treatment(forward=False, false=[(sent.cid, answer_to(sent, refusal))])


def _check_prepares(play: Play, client: Tested, secret: bytes) -> None:
    prepares = [sent.command.prepare for sent in client.wire.of(r.Commit)]
    by = {prepare.by for prepare in prepares if prepare is not None}
    play.check("R10.7", by == {sha256(secret).digest()}, "`prepare.by` is not the secret's SHA-256")
    for sent in client.wire.of(r.Commit):
        has = sent.command.prepare is not None and sent.command.secret is None
        play.check("R10.7", has, "a Commit does not only prepare")
    by_txn: dict[bytes, set[bytes]] = {}
    for sent in client.wire.of(r.Commit):
        if sent.command.prepare is not None:
            by_txn.setdefault(_txn_of(sent), set()).add(sent.command.prepare.attempt)
    one = all(len(attempts) == 1 for attempts in by_txn.values())
    play.check("R10.7", one, f"attempts of transactions: {list(by_txn.values())}")


def _check_decisions(play: Play, coordinator: Tested, secret: bytes) -> None:
    for kind in (r.Commit, r.Abort):
        decisions = coordinator.wire.of(kind)
        right = bool(decisions) and all(sent.command.secret == secret for sent in decisions)
        play.check("R10.8", right, f"{kind.__name__} has not the coordinator's secret")


def _abort_natively(play: Play, stream: str) -> None:
    """Append records to each partition in a native transaction, and abort it, like a merge that was interrupted."""
    topic = stream_topic(stream)
    record = Record(0, int(time.time() * 1000), b"same", b"aborted")
    with closing(play.log.producer(f"conformance-{play.scope}", timeout=60.0)) as producer:
        for partition in range(play.log.partition_counts([topic])[topic]):
            producer.append([(TopicPartition(topic, partition), encode_batch([record]))])
        producer.abort()


def _check_read(
    play: Play, rule: str, client: Tested, stream: str, times: dict[int, list[Written]]
) -> None:
    """All events of these commits, by their times, are read. Plain readers may get them a little later."""
    wanted = [event for events in times.values() for event in events]
    until = time.monotonic() + VISIBLE_S
    while True:
        found = client.read(stream)
        differs = difference(wanted, [one.event for one in found])
        if not differs or time.monotonic() > until:
            break
        time.sleep(0.2)
    if not play.check(rule, not differs, differs):
        return
    same = [one.event.value for one in found if one.event.key == b"same"]
    in_order = [event.value for event in wanted if event.key == b"same"]
    play.check(rule, same == in_order, "events of a key are not in their order")
    for at, events in times.items():
        given = {
            one.commit_timestamp for one in found if one.event.value in {e.value for e in events}
        }
        play.check(
            "R13.2", given <= {at, None}, f"events of the commit at {at} have the times {given}"
        )


def _one_shot(play: Play, rule: str, client: Tested, stream: str) -> list[Written]:
    """Commit events by one more one-shot, to show that the client continues. Returns them."""
    play.committed(rule, client.one_shot(play.scope, events := play.events(stream)), None, 3)
    return events


def _check_resolved(play: Play, client: Tested, kind: str) -> None:
    """Check when, and by which producer, the outcome of an unanswered command was asked for."""
    asked = client.wire.of(r.Resolve)
    if not play.check("R11.2", bool(asked), f"no Resolve after an unanswered {kind}"):
        return
    doubted = [sent for sent in client.wire.sent if sent.kind == kind]
    same = doubted[0].producer == asked[0].producer
    play.check("R11.2", same, f"Resolve and {kind} are of different producers")
    waited = asked[0].at - doubted[0].at
    wait_s = getattr(doubted[0].command, "wait_ms", 0) / 1000
    play.check("R10.2", waited >= wait_s * 0.9, f"{waited:.1f} s instead of more than {wait_s} s")
