"""Transactions over control partitions, by the leaders' real decisions; messages are passed by hand."""

from __future__ import annotations

import cProfile
import random
from collections import Counter
from dataclasses import replace

import pytest

from anabranch.core.decisions.across import coordinating
from anabranch.core.decisions.across.receiving import next_due_ms
from anabranch.core.round import Message
from anabranch.protocol import hybrid_time
from anabranch.protocol.schemas import records as r
from tests.core.across.leaders import Leaders, Sent, losing
from tests.core.harness import event

MINUTES_US = 600_000_000


def assert_committed_once(leaders: Leaders, *streams: str) -> None:
    """Each stream has transaction A once, all at one timestamp."""
    merges = leaders.merges()
    assert sorted(merges) == sorted(streams)
    times = {at for its in merges.values() for _, at in its}
    assert [len(its) for its in merges.values()] == [1] * len(streams)
    assert len(times) == 1


def test_one_transaction_over_two_control_partitions() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.seen.clear()
    assert leaders.commit() == ""
    assert leaders.settle() == "[commit A] A COMMITTED 2"
    assert leaders.seen == [
        "0>1 AskVote TIMESTAMP 1", "1>0 Vote YES 1 at p", "0>1 Decide COMMIT", "1>0 Done",
    ]  # fmt: skip
    assert_committed_once(leaders, "nyc/a", "ber/a")
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert leaders.parts() == (r.PartInfo(1, ("ber",), "COMMITTED", 0, None, -1),)


def steps(leaders: Leaders, after: int) -> None:
    """Deliver messages this many times."""
    for _ in range(after):
        leaders.deliver()


def settled(leaders: Leaders) -> str:
    """Let time pass until nothing is repeated any more; what was answered."""
    said = [leaders.settle()]
    said += [leaders.wait(ms) for ms in (0, 300, 600, 1200, 2400)]
    return "; ".join(filter(None, said))


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("after", range(5))
def test_a_successor_goes_on_from_each_step(number: int, after: int) -> None:
    """Its memory is gone, and so are the messages that its round had not sent yet."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    steps(leaders, after)
    leaders.bag = [one for one in leaders.bag if one.sender != number]
    leaders.lead(number)
    leaders.wait(0)
    settled(leaders)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]
    assert_committed_once(leaders, "nyc/a", "ber/a")
    assert leaders[0].commit("A", receipts=[leaders.receipt("A")]) == "A COMMITTED 2"


@pytest.mark.parametrize("kind", [r.AskVote, r.Vote, r.Decide, r.Done])
def test_what_is_lost_is_sent_again_and_what_comes_twice_changes_nothing(kind: type) -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    with losing(leaders, kind):
        leaders.settle(times=2)
    leaders.wait(300)
    said = leaders.settle(times=3)
    assert leaders.states() == ["COMMITTED", "COMMITTED"], said
    assert_committed_once(leaders, "nyc/a", "ber/a")


# After how many deliveries the client aborts, and what becomes of it.
@pytest.mark.parametrize(
    ("after", "said", "then"),
    [
        (0, "A ABORTED", "ABORTED"),
        (1, "A ABORTED", "ABORTED"),
        (2, "OutcomeUnknown", "COMMITTED"),
        (3, "OutcomeUnknown", "COMMITTED"),
        (4, "AlreadyCommitted", "COMMITTED"),
    ],
)
def test_an_abort_ends_it_everywhere_or_nowhere(after: int, said: str, then: str) -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    steps(leaders, after)
    assert said in leaders[0].abort("A")
    settled(leaders)
    assert leaders.states() == [then, then]
    assert len(leaders.merges()) == (2 if then == "COMMITTED" else 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [pytest.param(30), pytest.param(1_000, marks=pytest.mark.soak)])
def test_of_a_commit_and_an_abort_that_race_one_wins_everywhere(count: int) -> None:
    """The abort comes between any two messages, which may be doubled and come in any order."""
    chance, won, leaders = random.Random(count), Counter[str](), Leaders(3)
    for number in range(count):
        if number % 50 == 49:  # a scan of a big table of these leaders takes long
            leaders = Leaders(3)
        label = f"A{number}"
        leaders.begin(label, streams=("nyc/a", "ber/a", "tok/a"))
        said = leaders.commit(label, asker=f"commit {label}")
        for _ in range(chance.randrange(6)):
            leaders.collect()
            chance.shuffle(leaders.bag)
            late = leaders.bag[: chance.randrange(len(leaders.bag) + 1)]
            del leaders.bag[: len(late)]
            said += leaders.deliver(times=chance.choice((1, 2)))
            leaders.bag += late
        said += leaders[0].abort(label)
        said += settled(leaders)
        merged = [s for s, its in leaders.merges().items() if label in dict(its)]
        for one in leaders.all:
            one.rounds.clear()
        (outcome,) = set(leaders.states(label))
        won[outcome] += 1
        assert len(merged) == (3 if outcome == "COMMITTED" else 0), label
        assert f"{label} {outcome}" in said, said
    assert min(won["COMMITTED"], won["ABORTED"]) > count / 10, won


def test_an_abort_is_answered_at_once_and_a_participant_that_is_away_is_told_later() -> None:
    leaders = Leaders()
    leaders.begin()
    with losing(leaders, r.Decide):
        assert leaders[0].abort("A") == "A ABORTED (aborted by a client)"
        leaders.settle()
    assert leaders.states() == ["ABORT_IN_PROGRESS", "OPEN"]
    assert leaders[0].get("A") == "A ABORTED (aborted by a client)"
    leaders.lead(0)
    leaders.wait(0)
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert leaders.touch("A", "ber/a") == "TransactionAborted"


def test_a_refused_commit_leaves_all_open_and_can_be_mended() -> None:
    leaders = Leaders()
    leaders.begin()
    true = leaders.receipt("A")
    bent = [replace(e, count=0) if e.stream == "ber/a" else e for e in true.extents]
    leaders[0].commit("A", receipts=[replace(true, extents=tuple(bent))])
    assert leaders.settle() == "[commit A] ReceiptMismatch"
    assert leaders.states() == ["OPEN", "OPEN"]
    leaders.write("A", "w1", "ber/a")
    good = replace(leaders.receipt("A"), sequence=2)
    leaders[0].commit("A", receipts=[good], asker="again")
    assert "A COMMITTED 3" in settled(leaders)
    assert_committed_once(leaders, "nyc/a", "ber/a")


def test_a_writer_that_only_the_participant_knows_is_not_left_out_silently() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.touch("A", "ber/a", leaders[0].writer("w2"))
    leaders.commit(exactly=False)
    assert leaders.settle() == "[commit A] WritersUnfinished"
    leaders.commit(asker="exactly these")
    assert "[exactly these] A COMMITTED 2" in settled(leaders)


def test_a_participant_that_is_away_until_the_deadline_is_named_and_all_stays_open() -> None:
    leaders = Leaders()
    leaders.begin()
    with losing(leaders, r.AskVote):
        leaders.commit(wait_ms=2_000)
        leaders.settle()
        leaders.wait(1_000)
        leaders[0].ask("list", r.ListOpen(None, leaders[0].id("A"), 1))
        found: r.OpenList = leaders[0].result
        waits = found.transactions[0].waits
        assert waits is not None
        text = "waits 1.0 s for the vote of control partition 1, whose leader does not answer"
        assert waits.text == text
        assert leaders.parts() == (r.PartInfo(1, ("ber",), "OPEN", 1, None, 1_000),)
        assert leaders.wait(1_001) == "[commit A] NotReady"
    assert "did not come before the deadline: the commit waits 2.0 s for" in leaders[0].message
    settled(leaders)
    assert leaders.states() == ["OPEN", "OPEN"]
    leaders.commit(asker="again")
    assert "[again] A COMMITTED 2" in settled(leaders)


def test_c1_a_vote_of_a_former_round_of_votes_does_not_count() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit(wait_ms=1_000)
    leaders.deliver()
    (old,) = leaders.bag
    leaders.bag.clear()
    leaders.wait(1_001)
    leaders.commit(asker="again")
    leaders.bag.append(old)
    leaders.deliver()
    assert leaders.states()[0] == "OPEN"
    settled(leaders)
    times = {at for its in leaders.merges().values() for _, at in its}
    assert min(times) > old.record.timestamp


def test_m2_a_late_copy_of_a_question_promises_nothing() -> None:
    """The votes of its round of votes were taken back. Nobody would ask for another one before the next commit."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit(wait_ms=1_000)
    leaders.collect()
    (late,) = leaders.bag
    leaders.bag.clear()
    leaders.wait(1_001)
    assert leaders.states() == ["OPEN", "OPEN"]
    leaders.bag.append(late)
    settled(leaders)
    assert leaders.states() == ["OPEN", "OPEN"]
    assert not leaders[1].memory.holds.in_use


def test_a_question_that_was_overtaken_finds_that_it_is_aborted() -> None:
    """O3: the participant has logged it, although it never heard of the transaction."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.collect()
    (ask,) = leaders.bag
    leaders.bag.clear()
    leaders.all[1] = fresh = type(leaders[1])(1, 2)
    fresh.ids, fresh.writers, fresh.asked = (
        getattr(leaders[0], n) for n in ("ids", "writers", "asked")
    )
    leaders[0].abort("A")
    leaders.settle()
    leaders.bag.append(ask)
    leaders.settle()
    assert leaders.states() == ["ABORTED", "ABORTED"]


def test_a_touch_that_would_open_too_much_is_refused_before_its_coordinator_counts_on_it() -> None:
    """Otherwise the commit would wait for the vote of a part that there is not."""
    leaders = Leaders()
    leaders.begin("A", streams=("nyc/a",))
    leaders[1].settings = replace(leaders[1].settings, max_open=0)
    assert leaders.touch("A", "ber/a") == "TooManyTransactions"
    assert leaders.commit() == ""
    assert leaders[0].turn() == "[commit A] A COMMITTED 1"


def test_a_touch_waits_for_the_coordinator_for_five_seconds() -> None:
    leaders = Leaders()
    leaders[0].begin("A")
    with losing(leaders, r.Enlist):
        assert leaders.touch("A", "ber/a") == ""
        assert leaders.wait(4_900) == ""
        assert leaders.wait(200) == "[touch A ber/a] NotReady"
    assert leaders.touch("A", "ber/a").startswith("touched ber/a")


def test_a_participant_is_enlisted_only_while_it_is_open_and_no_commit_waits() -> None:
    """O1: its events would be acknowledged, and never merged."""
    leaders = Leaders(3)
    leaders.begin()
    with losing(leaders, r.AskVote):
        leaders.commit()
        assert leaders.touch("A", "tok/a") == "NotReady"
    settled(leaders)
    assert leaders.touch("A", "tok/a") == "AlreadyCommitted"
    leaders[0].begin("B")
    leaders[0].abort("B")
    assert leaders.touch("B", "tok/a") == "TransactionAborted"


def test_a_participant_never_expires_by_itself() -> None:
    """O2."""
    leaders = Leaders()
    leaders.begin()
    leaders[1].wait(10 * 60_000)
    assert leaders.states() == ["OPEN", "OPEN"]


def test_messages_that_are_forged_or_impossible_are_counted_and_not_acted_on() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.collect()
    (ask,) = leaders.bag
    ask.mac = bytes(32)
    leaders.settle()
    assert leaders[1].round.ignored == ["forged"]
    assert leaders.states() == ["OPEN", "OPEN"]
    leaders.wait(300)
    assert leaders.states() == ["COMMITTED", "COMMITTED"]


def test_a_forged_abort_of_an_id_of_next_year_logs_nothing() -> None:
    """Its row would be purged one day, and then each older id would count as forgotten."""
    leaders = Leaders()
    leaders[0].new_id("A", made_ms=leaders[0].wall_ms + 365 * 86_400_000)
    head = r.TxnHead("nyc", "open", 1_000, 0, b"s" * 32, 0)
    decision = r.Decide(leaders[0].id("A"), head, "ABORT", 0, "")
    leaders.bag.append(Sent(0, Message(1, decision, b"s" * 32), 0))
    leaders.settle()
    assert leaders[1].round.ignored == ["unknown"]
    assert leaders.states() == ["-", "-"]


def test_where_such_transactions_are_switched_off_a_message_begins_none() -> None:
    """A program that can write to `control` could make up the secret that a first question brings."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.collect()
    (ask,) = leaders.bag
    other = Leaders()[1]
    other.settings = replace(other.settings, across=False)
    other.receive(ask)
    assert other.round.ignored == ["off"]
    assert not other.state.open


def test_without_a_streams_journals_read_a_vote_waits_and_comes_by_itself() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders[1].held = True
    leaders.commit()
    leaders.settle()
    assert leaders.seen[-1] == "1>0 Vote WAITING 1"
    leaders[1].held = False
    leaders[1].turn()
    assert leaders.settle() == "[commit A] A COMMITTED 2"


def test_three_control_partitions_and_one_that_has_only_the_coordinator() -> None:
    leaders = Leaders(3)
    leaders.begin(streams=("ber/a", "tok/a"))
    leaders.commit()
    assert leaders.settle() == "[commit A] A COMMITTED 2"
    assert_committed_once(leaders, "ber/a", "tok/a")


def test_a_commit_is_answered_at_its_decision_if_that_is_asked_for() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders[0].at_decision = True
    leaders.commit()
    leaders.deliver()
    said = leaders.deliver()
    assert said.startswith("[commit A] A FINALIZE_IN_PROGRESS (but 2 committed at ")


def test_c4_a_stream_that_is_lost_after_the_vote_is_no_way_back_after_the_decision() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.deliver()
    leaders.lose("ber/a")
    said = settled(leaders)
    assert "A COMMITTED 1, 1 left out (1 event left out, as their stream is LOST: ber/a)" in said
    assert_committed_once(leaders, "nyc/a")


def test_c4_a_stream_that_is_lost_before_the_decision_ends_the_transaction() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.deliver()
    leaders.bag.clear()
    leaders.lose("ber/a")
    assert "[commit A] StreamLost" in settled(leaders)
    assert leaders.states() == ["ABORTED", "ABORTED"]
    assert leaders[0].get("A") == "A ABORTED (ber/a is lost: abort it)"


def test_h3_a_vote_waits_for_no_hold() -> None:
    """Of two transactions each has voted first at one participant. No time passes: neither takes its votes back."""
    leaders = Leaders(3)
    for label in "AB":
        leaders.begin(label, streams=("ber/a", "tok/a"))
        leaders.commit(label)
    leaders.collect()
    asked = leaders.bag
    leaders.bag = [asked[0], asked[3]]
    leaders.deliver()
    leaders.bag += asked[1:3]
    leaders.settle()
    assert [leaders.states(label) for label in "AB"] == [["COMMITTED"] * 3] * 2


def test_h8_no_two_control_partitions_give_one_timestamp() -> None:
    """Their clocks show the same, and all that they give in this moment is different."""
    leaders = Leaders()
    for label in "ABC":
        leaders[0].one_shot(f"{label}0", event("nyc/a"))
        leaders[1].one_shot(f"{label}1", event("ber/a"), scope="ber")
    times = [at for its in leaders.merges().values() for _, at in its]
    assert len({*times}) == 6


def test_c2_the_commit_is_later_than_a_participants_promise_whose_clock_is_ahead() -> None:
    """… and its timestamp is one of the coordinator's own (H9), which logs nothing when the first vote comes."""
    leaders, streams = Leaders(3), ("nyc/a", "ber/a", "tok/a")
    leaders.begin(streams=streams)
    leaders[1].wall_us += 500_000
    leaders.commit()
    leaders.deliver()
    votes, leaders.bag = leaders.bag, []
    for vote in votes:
        leaders[0].receive(vote)
    leaders.settle()
    (at,) = {at for its in leaders.merges().values() for _, at in its}
    assert at > votes[0].record.timestamp
    assert hybrid_time.logical_of(at) == 0
    assert_committed_once(leaders, *streams)


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        *[(kind, "before") for kind in ("commit", "one-shot", "staged", "prepared")],
        *[(kind, "decided") for kind in ("staged", "prepared")],
    ],
)
def test_t1_a_clock_that_is_minutes_ahead_is_refused_by_name_and_stops_nobody_else(
    ahead: int, kind: str, when: str
) -> None:
    """Before the decision it is an error. After it, the merge waits for the clock, and holds nothing meanwhile."""
    leaders = Leaders(chunk_bytes=1_000)
    if kind != "one-shot":
        leaders.begin()
    if kind == "staged":
        leaders.write("A", "w1", "ber/a", size=5_000)
    if when == "before":
        leaders[ahead].wall_us += MINUTES_US
    if kind == "one-shot":
        leaders.one_shot("A", "nyc/a", "ber/a")
    else:
        (leaders.prepare if kind == "prepared" else leaders.commit)()
    said = leaders.settle()
    if when == "decided":
        leaders[ahead].wall_us += MINUTES_US
        if kind == "prepared":
            leaders.commit_prepared()
    for ms in (0, 60, 300, 1_200):
        leaders.carry()
        leaders.wait(ms)
    assert leaders[0].one_shot("B", event("nyc/a")) == "B COMMITTED 1"
    assert leaders[1].one_shot("C", event("ber/a"), scope="ber") == "C COMMITTED 1"
    merged = {stream: [label for label, _ in its] for stream, its in leaders.merges().items()}
    assert merged == {"nyc/a": ["B"], "ber/a": ["C"]}
    if when == "before":
        assert "] ClockSkew" in said
        assert leaders.states() == ["ABORTED" if kind == "one-shot" else "OPEN"] * 2
        return
    times = [its.hybrid_time >> 12 for its in (leaders[0].state.round, leaders[1].state.round)]
    assert abs(times[0] - times[1]) > MINUTES_US / 2, "one clock has moved the other"
    turn = leaders[0].new_turn()
    wait = coordinating.waits_for(turn, turn.open(leaders[0].id("A")))
    assert wait is not None
    assert "control partition 1, which answered that its vote has to wait: another" in wait.text
    assert "set the clocks" in wait.text
    leaders[1 - ahead].wall_us += MINUTES_US
    settled(leaders)
    assert leaders.states() == ["COMMITTED"] * 2
    assert [its[-1] for its in leaders.merges().values()] == [leaders.merges()["nyc/a"][-1]] * 2


def test_what_comes_between_the_vote_and_the_decision_waits_and_is_merged_after_it() -> None:
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.deliver()
    assert leaders[1].one_shot("B", event("ber/a"), scope="ber") == ""
    assert leaders[0].one_shot("C", event("nyc/a")) == "C COMMITTED 1"
    assert leaders.settle() == "[one-shot B] B COMMITTED 1; [commit A] A COMMITTED 2"
    for stream, its in leaders.merges().items():
        assert [at for _, at in its] == sorted(at for _, at in its), stream
    assert [label for label, _ in leaders.merges()["ber/a"]] == ["A", "B"]
    assert [label for label, _ in leaders.merges()["nyc/a"]] == ["C", "A"]


@pytest.mark.parametrize("when", ["while votes are out", "after the deadline"])
def test_c6_votes_on_other_receipts_do_not_count(when: str) -> None:
    """The participant is still prepared, with the receipts of the former commit."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit(wait_ms=1_000)
    leaders.deliver()
    late, leaders.bag = leaders.bag, []
    if when == "after the deadline":
        with losing(leaders, r.AskVote):
            assert leaders.wait(1_001) == "[commit A] NotReady"
    assert leaders.states() == ["OPEN", "PREPARED"]
    for stream in ("nyc/a", "ber/a"):
        leaders.write("A", "w1", stream)
    more = replace(leaders.receipt("A"), sequence=2)
    assert leaders[0].commit("A", receipts=[more], asker="more") == ""
    leaders.bag += late
    assert "[more] A COMMITTED 4" in settled(leaders)
    assert_committed_once(leaders, "nyc/a", "ber/a")


def test_a_copy_of_a_vote_that_comes_after_the_decision_is_not_kept() -> None:
    """Its timestamp would look like one that is held for too long, in each turn until the participant is done."""
    leaders = Leaders()
    leaders.begin()
    leaders.commit()
    leaders.deliver()
    copies = [*leaders.bag]
    with losing(leaders, r.Done):
        leaders.settle()
        leaders.bag += copies
        leaders.wait(1_000)
    assert leaders.states() == ["FINALIZE_IN_PROGRESS", "COMMITTED"]
    assert next_due_ms(leaders[0].memory.across, leaders[0].now_ms) not in (None, 0)


def calls_of_a_turn(leaders: Leaders) -> int:
    with cProfile.Profile() as profile:
        leaders[0].turn()
    return sum([entry.callcount for entry in profile.getstats()])


def test_what_waits_for_a_participant_that_is_away_costs_little_in_each_turn() -> None:
    leaders, count = Leaders(), 20
    leaders[0].turn()
    before = calls_of_a_turn(leaders)
    with losing(leaders, r.AskVote, r.Decide):
        for number in range(count):
            leaders.begin(f"A{number}")
            leaders.commit(f"A{number}", asker=f"commit {number}")
        leaders.settle()
        waiting = calls_of_a_turn(leaders) - before
        for number in range(count):
            leaders[0].abort(f"A{number}")
        leaders.settle()
        ending = calls_of_a_turn(leaders) - before
    assert (waiting < 25 * count, ending < 15 * count) == (True, True), (waiting, ending)
