"""Commands repeated until answered; refusals sorted; outcomes resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from anabranch import errors
from anabranch.client.session import Session
from anabranch.core import authorize
from anabranch.core.stream_states import STREAMS
from anabranch.core.transaction_states import TRANSACTIONS
from anabranch.protocol.defaults import FIRST_REPEAT_S
from anabranch.protocol.schemas import records as r
from anabranch.protocol.tokens import peek
from tests.client.answers import STREAM, TXN, obliging, outcome, refusal, token_of
from tests.client.doubles import HYBRID_TIME, ManualClock, ScriptedBus, scripted_ports


def session_of(script: Any) -> tuple[Session, ScriptedBus, ManualClock]:
    bus, clock, ports = scripted_ports(script)
    return Session(ports), bus, clock


def in_turn(*answers: Any) -> Any:
    """A script that gives these answers, one a command."""
    left: Iterator[Any] = iter(answers)
    return lambda command: next(left)


@pytest.mark.parametrize("why", ["UnsupportedVersion", "FeatureNotEnabled"])
def test_below_feature_level_4_a_safe_time_is_of_all_streams(why: str) -> None:
    reply = r.SafeTimeReply("nyc", 9, ())
    session, bus, clock = session_of(
        in_turn(r.ScopeInfo("nyc", 0), refusal(why), reply, reply, reply)
    )
    assert session.instant([STREAM], None, clock.now + 10) == 9
    assert session.instant([STREAM], None, clock.now + 10) == 9
    clock.now += 60.0  # the level may have been raised
    session.instant([STREAM], None, clock.now + 10)
    streams = [sent.command.streams for sent in bus.sent if isinstance(sent.command, r.SafeTime)]
    assert streams == [(STREAM,), (), (), (STREAM,)]


# -- repeating ------------------------------------------------------------------------------------------


def test_one_answer_is_enough_and_a_scope_is_remembered() -> None:
    session, bus, clock = session_of(obliging)
    for _ in range(3):
        assert session.find_scope("nyc", clock.now + 10) == 0
    assert bus.names() == ["FindScope"]
    assert session.highest_timestamp == 0, "the answer of the directory has no commit timestamp"
    session.transactions(r.ListTransactions(None, True, 10, None), clock.now + 10)
    assert session.highest_timestamp == HYBRID_TIME


def test_a_lost_command_is_repeated_with_the_same_ids() -> None:
    session, bus, clock = session_of(in_turn(None, None, r.ScopeInfo("nyc", 0)))
    session.find_scope("nyc", clock.now + 30)
    assert [sent.at - bus.sent[0].at for sent in bus.sent] == [
        0,
        FIRST_REPEAT_S,
        3 * FIRST_REPEAT_S,
    ]
    assert len({sent.correlation_id for sent in bus.sent}) == 1
    assert len({sent.command for sent in bus.sent}) == 1


def test_a_late_answer_to_the_first_try_counts() -> None:
    session, bus, clock = session_of(in_turn((3.0, r.ScopeInfo("nyc", 0)), None))
    started = clock.now
    session.find_scope("nyc", clock.now + 30)
    assert clock.now == started + 3.0
    assert len(bus.sent) == 2


def test_a_scope_that_its_partition_does_not_know_is_created_again() -> None:
    """Retention took what the directory had said; the directory repeats it at each creation."""
    unknown = refusal("UnknownScope")
    found = r.ScopeInfo("nyc", 3)
    script = [found, unknown] * 3
    session, bus, clock = session_of(
        in_turn(*script, found, stream_list := obliging(r.CreateStream("nyc/a", 1, {})))
    )
    assert (
        session.create_stream(r.CreateStream("nyc/a", 1, {}), clock.now + 10)
        == stream_list.streams[0]
    )
    assert [type(sent.command) for sent in bus.sent] == [r.FindScope, r.CreateStream] * 4
    session, bus, clock = session_of(lambda c: found if isinstance(c, r.FindScope) else unknown)
    with pytest.raises(errors.NotReady):
        session.create_stream(r.CreateStream("nyc/a", 1, {}), clock.now + 100)
    assert clock.now < 1010


def test_a_second_answer_is_not_taken_for_the_next_command() -> None:
    answers = [r.ScopeInfo("nyc", 0), (0.1, r.ScopeInfo("nyc", 7))]
    session, _, clock = session_of(in_turn(answers, r.ScopeInfo("sea", 3)))
    assert session.find_scope("nyc", clock.now + 10) == 0
    assert session.find_scope("sea", clock.now + 10) == 3


def test_silence_from_the_start_is_not_ready() -> None:
    session, _, clock = session_of(lambda command: None)
    started = clock.now
    with pytest.raises(errors.NotReady, match="anabranch controller"):
        session.find_scope("nyc", clock.now + 10)
    assert clock.now == started + 10


def test_silence_later_is_a_deadline() -> None:
    session, _, clock = session_of(in_turn(r.ScopeInfo("nyc", 0), *[None] * 9))
    session.find_scope("nyc", clock.now + 10)
    with pytest.raises(errors.DeadlineExceeded, match="FindScope"):
        session.find_scope("sea", clock.now + 10)


def test_an_unexpected_answer_is_malformed() -> None:
    session, _, clock = session_of(lambda command: r.Registered(1))
    with pytest.raises(errors.MalformedRecord, match="Registered"):
        session.find_scope("nyc", clock.now + 10)


def test_a_command_that_is_too_large_is_not_sent() -> None:
    session, bus, clock = session_of(obliging)
    bus.max_bytes = 100
    events = [r.Event(STREAM, -1, None, b"x" * 100, (), -1)]
    with pytest.raises(errors.EventTooLarge):
        session.one_shot(r.OneShot(TXN, "nyc", None, tuple(events)), clock.now + 10)
    assert bus.sent == []


# -- refusals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code",
    [
        "UnknownScope", "UnknownStream", "StreamExists", "InvalidToken", "IllegalState", "AlreadyCommitted",
        "TransactionAborted", "Expired", "ReceiptsNotCovered", "ReceiptMismatch", "WritersUnfinished",
        "TooManyTransactions", "ClockSkew", "InvalidArgument", "UnsupportedVersion", "CrossScope",
    ],
)  # fmt: skip
def test_a_refusal_is_raised_as_its_error(code: str) -> None:
    session, bus, clock = session_of(lambda command: refusal(code))
    with pytest.raises(getattr(errors, code), match="what to do"):
        session.touch(token_of(), STREAM, 1, clock.now + 10)
    assert len(bus.sent) == 1


@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize(
    "refused",
    [
        lambda: authorize.refusal("etl", authorize.Right.SCALE, STREAM),
        lambda: TRANSACTIONS.judge("OPEN", "begin_finalize", ""),
        lambda: STREAMS.judge("LOST", "refuse_create", STREAM),
    ],
)
def test_a_refusal_of_one_copy_does_not_speak_for_the_other(refused: Any, copies: int) -> None:
    """The first one may be carried out just before its lane's right is taken away."""
    try:
        error = refused()
    except errors.AnabranchError as raised:
        error = raised
    answer = refusal(type(error).__name__, str(error))
    script = in_turn(r.ScopeInfo("nyc", 0), *[None] * (copies - 1), answer)
    session, bus, clock = session_of(script)
    said = "nothing was changed by this copy, but one sent before may be carried out"
    with pytest.raises(type(error), match="nothing was changed") as caught:
        session.ask_stream(STREAM, r.Scale(STREAM, 4, (), ()), clock.now + 10)
    assert (len(bus.sent), said in str(caught.value)) == (1 + copies, copies == 2)


def test_outcome_unknown_names_the_transaction_and_its_token() -> None:
    session, _, clock = session_of(lambda command: refusal("OutcomeUnknown"))
    token = token_of()
    for ask in (
        lambda: session.touch(token, STREAM, 1, clock.now + 10),
        lambda: session.abort(token, "", clock.now + 10),
    ):
        with pytest.raises(errors.OutcomeUnknown, match="what to do") as caught:
            ask()
        assert (caught.value.txn_id, caught.value.token) == (peek(token).txn_id, token)


def test_an_unknown_refusal_is_a_fix_call_error() -> None:
    session, _, clock = session_of(lambda command: refusal("FromTheFuture"))
    with pytest.raises(errors.FixCallError, match="FromTheFuture: what to do"):
        session.touch(token_of(), STREAM, 1, clock.now + 10)


def test_not_ready_is_asked_again_under_new_ids() -> None:
    session, bus, clock = session_of(
        in_turn(refusal("NotReady"), refusal("NotReady"), r.Touched(STREAM, 0, ()))
    )
    session.touch(token_of(), STREAM, 1, clock.now + 10)
    assert len({sent.correlation_id for sent in bus.sent}) == 3


def test_not_ready_to_the_end_is_raised() -> None:
    session, bus, clock = session_of(lambda command: refusal("NotReady"))
    started = clock.now
    with pytest.raises(errors.NotReady):
        session.touch(token_of(), STREAM, 1, clock.now + 10)
    assert 8 < clock.now - started <= 10
    assert 10 < len(bus.sent) < 30


# -- outcomes -------------------------------------------------------------------------------------------

UNKNOWN = errors.OutcomeUnknown
ABORTED = errors.TransactionAborted
_committed = outcome()
_aborted = outcome(state="ABORTED")
_open = outcome(state="OPEN")
_going_on = outcome(state="COMMIT_IN_PROGRESS")
_no_right = refusal("NotAuthorized")

# (answers to the commits, in turn; answers to the resolves, in turn; the outcome), the last for ever.
SETTLED: dict[str, tuple[list[Any], list[Any], Any]] = {
    "answered": ([_committed], [None], "COMMITTED"),
    "answered late": ([(15.0, _committed)], [None], "COMMITTED"),
    "answer lost, resolved": ([None], [_committed], "COMMITTED"),
    "command lost, resolved": ([None], [_aborted], ABORTED),
    "resolved at the second try": ([None], [None, _committed], "COMMITTED"),
    "aborted": ([refusal("TransactionAborted")], [None], ABORTED),
    "answered that it is aborted": ([_aborted], [None], ABORTED),
    "nothing at all": ([None], [None], UNKNOWN),
    "still open: committed again": ([None] * 5 + [_committed], [_open], "COMMITTED"),
    "still being committed": ([None] * 5 + [_committed], [_going_on], "COMMITTED"),
    "open to the end": ([None], [_open], UNKNOWN),
    "outcome expired": ([None], [refusal("Expired")], UNKNOWN),
    "the only copy expired": ([refusal("Expired")], [None], errors.Expired),
    "refused after a repeat, outcome expired": (
        [None, refusal("Expired")],
        [refusal("Expired")],
        UNKNOWN,
    ),
    "refused after a repeat, and a wrong clock": (
        [None, refusal("UnknownStream")],
        [refusal("ClockSkew")],
        UNKNOWN,
    ),
    "refused": ([refusal("WritersUnfinished")], [None], errors.WritersUnfinished),
    "refused after a repeat": (
        [None, refusal("ReceiptMismatch")],
        [_aborted],
        (ABORTED, errors.ReceiptMismatch),
    ),
    "refused after a repeat, and done": ([None, refusal("NotReady")], [_committed], "COMMITTED"),
    "refused after a repeat, and committed": (
        [None, refusal("UnknownStream")],
        [_committed],
        "COMMITTED",
    ),
    "refused after a repeat, open": (
        [None, refusal("ReceiptMismatch")],
        [_open],
        errors.ReceiptMismatch,
    ),
    "refused after a repeat, waits": (
        [None, refusal("ReceiptMismatch"), _committed],
        [_going_on],
        "COMMITTED",
    ),
    "refused after a repeat, and then silence": ([None, refusal("UnknownStream")], [None], UNKNOWN),
    "no right": ([_no_right], [None], errors.NotAuthorized),
    "unknown": ([refusal("UnknownTransaction")], [None], errors.UnknownTransaction),
    "not ready, then no right": ([refusal("NotReady"), _no_right], [None], errors.NotAuthorized),
    "no right after a repeat": ([None, _no_right], [_no_right], UNKNOWN),
    "no right after a repeat, open": ([None, _no_right], [_open], errors.NotAuthorized),
    "no right after a repeat, aborted": (
        [None, _no_right],
        [_aborted],
        (ABORTED, errors.NotAuthorized),
    ),
    "no right to ask": ([None], [_no_right], UNKNOWN),
    "a wrong clock when it is asked": ([None], [refusal("ClockSkew")], UNKNOWN),
    "not ready, then silence": (
        [refusal("NotReady"), None],
        [_aborted],
        (ABORTED, errors.NotReady),
    ),
    "not ready, then silence, done": ([refusal("NotReady"), None], [_committed], "COMMITTED"),
    "not ready, then nothing at all": ([refusal("NotReady"), None], [None], UNKNOWN),
    "not ready, then committed": ([refusal("NotReady"), _committed], [None], "COMMITTED"),
}


def rules(commits: list[Any], resolves: list[Any]) -> Any:
    def script(command: Any) -> Any:
        answers = resolves if isinstance(command, r.Resolve) else commits
        return answers.pop(0) if len(answers) > 1 else answers[0]

    return script


@pytest.mark.parametrize("case", SETTLED)
@pytest.mark.parametrize("kind", ["commit", "one-shot"])
def test_the_outcome_of_an_uncertain_commit_is_found(case: str, kind: str) -> None:
    commits, resolves, expected = SETTLED[case]
    if isinstance(expected, tuple):  # of a commit, and of a one-shot
        expected = expected[kind == "one-shot"]
    session, bus, clock = session_of(rules(list(commits), list(resolves)))
    deadline = clock.now + 30

    def run() -> r.Outcome:
        if kind == "commit":
            return session.commit(r.Commit(token_of(), (), None, None, 0), deadline)
        return session.one_shot(r.OneShot(TXN, "nyc", None, ()), deadline)

    if isinstance(expected, str):
        assert run().state == expected
    else:
        with pytest.raises(expected) as caught:
            run()
        if expected is UNKNOWN:
            assert caught.value.txn_id == TXN
            assert caught.value.token == (token_of() if kind == "commit" else None)
    assert clock.now <= deadline
    # A commit that may be on its way is never left for another id.
    assert {sent.command.txn_id for sent in bus.sent if hasattr(sent.command, "txn_id")} <= {TXN}


def test_resolve_is_asked_only_when_the_commit_stays_unanswered() -> None:
    session, bus, clock = session_of(rules([None], [_committed]))
    started = clock.now
    session.commit(r.Commit(token_of(), (), None, None, 0), clock.now + 30)
    resolve = next(sent for sent in bus.sent if isinstance(sent.command, r.Resolve))
    assert resolve.at == pytest.approx(started + 20)
    assert bus.names()[:2] == ["Commit", "Commit"]


def test_the_controller_waits_for_the_journal_shorter_than_the_client() -> None:
    session, bus, clock = session_of(obliging)
    session.commit(r.Commit(token_of(), (), None, None, 0), clock.now + 30)
    assert bus.of(r.Commit)[0].wait_ms == 18_000
    session.commit(r.Commit(token_of(), (), None, None, 0), clock.now + 0.4)
    assert 100 < bus.of(r.Commit)[1].wait_ms < 200
    session.commit(r.Commit(token_of(), (), None, None, 0), clock.now + 1e6)
    assert bus.of(r.Commit)[2].wait_ms == 600_000


@pytest.mark.parametrize("number", [None, 17], ids=["name", "number"])
def test_what_a_commit_gave_way_to_is_known_though_its_answer_was_lost(number: int | None) -> None:
    """RESOLVE knows that the transaction is aborted, not what it gave way to: the answer to the commit says it."""
    other = outcome(b"\0" * 15 + b"\1", name="n")
    for answer in (other, refusal("AlreadyCommitted"), refusal("TransactionAborted"), None):
        resolved: list[bool] = []

        def script(command: Any, answer: Any = answer, resolved: list[bool] = resolved) -> Any:
            if isinstance(command, r.Resolve):
                resolved.append(True)
                return _aborted
            return answer if resolved else None

        session, _, clock = session_of(script)

        def run(session: Session = session, deadline: float = clock.now + 30) -> r.Outcome:
            return session.commit(r.Commit(token_of(), (), None, "n", 0, number), deadline)

        if answer is other:
            assert run() == other
        else:
            code = answer.code if isinstance(answer, r.Refusal) else "TransactionAborted"
            with pytest.raises(type(errors.error_of(code, ""))):
                run()


# -- heartbeats -----------------------------------------------------------------------------------------


def test_heartbeats_go_in_one_command_for_each_control_partition() -> None:
    session, bus, clock = session_of(lambda command: None)
    tokens = [token_of(p.to_bytes(2, "big") + bytes([i]) * 14) for p in (0, 3) for i in range(1, 4)]
    digests = session.beat(b"cid", tokens, clock.now + 1)
    assert [(s.partition, s.command.tokens) for s in bus.sent] == [
        (0, tuple(tokens[:3])),
        (3, tuple(tokens[3:])),
    ]
    assert session.receive_beat(b"cid", digests, clock.now + 1) == ()


def test_the_answer_to_a_heartbeat_names_what_is_over() -> None:
    session, _, clock = session_of(lambda command: r.Ended((_aborted,)))
    digests = session.beat(b"cid", [token_of()], clock.now + 1)
    assert session.receive_beat(b"cid", digests, clock.now + 1) == (_aborted,)


# -- answers that are not ours --------------------------------------------------------------------------

OTHER = b"\0" * 15 + b"x"


def commit(session: Session, clock: ManualClock, **given: Any) -> r.Outcome:
    named, deadline = given.get("by", token_of()), clock.now + 30
    command = r.Commit(named, (), (), given.get("name"), 0, given.get("number"))
    return session.commit(command, deadline)


# (what a commit claims, the outcome that comes under its correlation id and digest, whether it is believed)
OUTCOMES: list[tuple[dict[str, Any], r.Outcome, bool]] = [
    ({}, outcome(TXN), True),
    ({}, outcome(OTHER), False),
    ({}, outcome(OTHER, name="n"), False),
    ({"name": "n"}, outcome(OTHER, name="n"), True),
    ({"name": "n"}, outcome(OTHER, name="m"), False),
    ({"name": "n"}, outcome(OTHER), False),
    ({"name": "n"}, outcome(OTHER, name="n", scope="sfo"), False),
    ({"name": "n", "number": 7}, outcome(OTHER), True),
    ({"name": "n", "number": 7}, outcome(OTHER, scope="sfo"), False),
    # A bare id names no scope.
    ({"by": TXN}, outcome(OTHER), False),
    ({"by": TXN, "name": "n"}, outcome(OTHER, name="n"), True),
    ({"by": TXN, "name": "n"}, outcome(OTHER, name="m"), False),
    ({"by": TXN, "name": "n", "number": 7}, outcome(OTHER), True),
]


@pytest.mark.parametrize(("claims", "found", "believed"), OUTCOMES)
def test_an_outcome_of_another_transaction(
    claims: dict[str, Any], found: r.Outcome, believed: bool
) -> None:
    session, _, clock = session_of(lambda c: found if isinstance(c, r.Commit) else None)
    if believed:
        assert commit(session, clock, **claims) == found
    else:
        with pytest.raises(errors.OutcomeUnknown):
            commit(session, clock, **claims)


def test_an_answer_to_another_command_is_passed_over() -> None:
    """The forged answer does not end the wait, is no error, and moves no time; the true one counts."""
    forged = r.Reply(b"c", b"another!", 1 << 60, outcome(TXN))
    session, _, clock = session_of(lambda command: [forged] * 50)
    with pytest.raises(errors.OutcomeUnknown):
        commit(session, clock)
    assert (session.highest_timestamp, session._answered) == (0, False)
    true = outcome(TXN)._replace(committed=9)
    session, bus, clock = session_of(in_turn([forged, (1.0, true), forged]))
    assert commit(session, clock) == true
    assert len(bus.sent) == 1


def test_every_command_has_a_correlation_id_of_its_own() -> None:
    asked: list[int] = []
    bus, clock, ports = scripted_ports(obliging)
    entropy = ports.entropy

    def counting(n: int) -> bytes:
        asked.append(n)
        return entropy(n)

    session = Session(replace(ports, entropy=counting))
    for _ in range(3):
        session.state(TXN, None, clock.now + 10)
    assert asked == [16, 16, 16]
    assert len({sent.correlation_id for sent in bus.sent}) == 3
