"""Names and numbers of series that commits claim: whose they are, and what a late claim is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anabranch.core import rows as k
from anabranch.core.authorize import Right
from anabranch.core.decisions import claims
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.conftest import some
from tests.core.harness import DAY, World, nyc, states
from tests.core.labels import MINUTE
from tests.core.tables import fold, rows_of, table_of
from tests.core.test_model import Watch

# -- names claimed by the commit ---------------------------------------------------------------


def test_a_free_name_is_claimed_by_the_decision(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    own = [opened.receipt("A", "w1")]
    opened.commit("A", own=own, name="daily")
    assert opened.holder("daily") == "nobody"
    assert opened.wait(10_000) == "[commit A] ReceiptsNotCovered"
    assert (opened.holder("daily"), opened.row("A").name) == ("nobody", None)
    opened.held = False
    opened.commit("A", own=own, name="daily")
    assert (opened.holder("daily"), opened.row("A").name) == ("A", "daily")
    assert opened.turn() == "[commit A] A COMMITTED 1"
    assert opened.begin("B", name="daily") == "A COMMITTED 1"
    opened.begin("C", name="weekly")
    opened.commit("C", name="weekly")
    assert opened.turn() == "[commit C] C COMMITTED 0", "its own name again"
    assert opened.holder("weekly") == "C"


@pytest.mark.parametrize("waits", [False, True])
def test_a_name_of_an_open_transaction_goes_to_the_commit(opened: World, waits: bool) -> None:
    opened.begin("B", name="daily")
    opened.touch("B")
    opened.held = True
    opened.write("B", "w2")
    if waits:
        opened.commit("B", own=[opened.receipt("B", "w2")])
    said = opened.commit("A", name="daily")
    assert said == ("[commit B] TransactionAborted" if waits else "")
    assert opened.ops() == "ABORT_TXN B nyc/a:0; BEGIN_COMMIT A nyc/a:0"
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert opened.get("B") == "B ABORTED (superseded by a newer transaction named 'daily')"


def test_a_name_held_by_a_committed_one(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.commit("B")
    opened.turn()
    opened.write("A", "w1")
    answer = opened.commit("A", own=[opened.receipt("A", "w1")], name="daily")
    assert answer == "B COMMITTED 0"
    assert opened.ops() == "ABORT_TXN A nyc/a:0"
    assert opened.get("A") == (
        f"A ABORTED (the name 'daily' was committed before by {opened.id('B').hex()})"
    )
    assert opened.commit("A", name="daily") == "B COMMITTED 0", "the same answer again"
    assert opened.commit("A") == "TransactionAborted"
    assert opened.holder("daily") == "B"


def test_two_claim_one_name(opened: World) -> None:
    opened.begin("B")
    assert (
        opened.turn(
            ("commit A", opened.committing("A", name="daily")),
            ("commit B", opened.committing("B", name="daily")),
        )
        == ""
    )
    assert states(opened, "A") == ("COMMIT_IN_PROGRESS", True)
    assert states(opened, "B") == ("OPEN", False)
    assert opened.turn() == "[commit A] A COMMITTED 0; [commit B] A COMMITTED 0"
    assert opened.get("B").startswith("B ABORTED")


@pytest.mark.parametrize("patient", [False, True])
def test_a_claim_on_a_name_whose_holder_is_decided_and_not_merged_yet(patient: bool) -> None:
    """The holder's merge must wait for a bigger one before it."""
    world = nyc(round_bytes=10)
    for label in "ABC":
        world.begin(label, name="daily" if label == "B" else None)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "ABC"}
    world.turn(*((f"commit {x}", world.committing(x, own=own[x])) for x in "AB"))
    wait_ms = 10_000 if patient else 0
    claim = world.commit("C", name="daily", wait_ms=wait_ms, own=own["C"])
    after = world.turn()
    if patient:
        assert claim == "[commit A] A COMMITTED 1"
        assert after == "[commit B] B COMMITTED 1; [commit C] B COMMITTED 1"
    else:
        assert claim == "[commit A] A COMMITTED 1; NotReady"
        assert after == "[commit B] B COMMITTED 1"
        assert world.get("C") == "C OPEN"


def commit(world: World, label: str, number: int, series: str = "s", **given: Any) -> str:
    """Begin it if it is not, and commit it; what the commit is answered, at once or a turn later."""
    if world.state.txn_row(world.id(label)) is None:
        world.begin(label)
    said = world.commit(label, asker=label, name=series, number=number, **given)
    return said or world.turn().removeprefix(f"[{label}] ")


# -- one after another --------------------------------------------------------------------------

# (numbers in the order in which they come; what the last is told; where the series is; its transaction)
ORDERS: list[tuple[str, str, str, str]] = [
    ("0", "A COMMITTED 0", "0 by A", "A COMMITTED 0"),
    ("7", "A COMMITTED 0", "7 by A", "A COMMITTED 0"),
    ("0 1", "B COMMITTED 0", "1 by B", "B COMMITTED 0"),
    ("0 5", "B COMMITTED 0", "5 by B", "B COMMITTED 0"),
    ("5 5", "A COMMITTED 0", "5 by A", "number 5 of the series 's' was committed before by <A>"),
    ("5 4", "AlreadyCommitted", "5 by A", "at number 5 before, committed by <A>: 4 comes too late"),
    ("5 0", "AlreadyCommitted", "5 by A", "at number 5 before, committed by <A>: 0 comes too late"),
    ("5 4 4", "AlreadyCommitted", "5 by A", "4 comes too late"),
    ("5 4 6", "C COMMITTED 0", "6 by C", "C COMMITTED 0"),
    ("5 6 5", "AlreadyCommitted", "6 by B", "at number 6 before, committed by <B>: 5 comes too late"),
    ("5 5 6", "C COMMITTED 0", "6 by C", "C COMMITTED 0"),
    (f"{1 << 32} 0", "AlreadyCommitted", f"{1 << 32} by A", "0 comes too late"),
]  # fmt: skip


@pytest.mark.parametrize("take_over", [False, True], ids=["one leader", "always a new leader"])
@pytest.mark.parametrize(("numbers", "told", "stands", "state"), ORDERS, ids=[o[0] for o in ORDERS])
def test_in_this_order(numbers: str, told: str, stands: str, state: str, take_over: bool) -> None:
    world = nyc()
    last = ""
    for label, number in zip("ABC", numbers.split(), strict=False):
        last = commit(world, label, int(number))
        if take_over:
            world.lead(keep_table=False)
    assert last == told
    assert world.series("s") == stands
    assert (told == "AlreadyCommitted") == ("AlreadyCommitted" in last)
    got = world.get(label)
    for known in "ABC":
        got = got.replace(world.id(known).hex(), f"<{known}>")
    assert state in got
    again = commit(world, label, int(number))
    assert again == told, "the same command, the same answer"


def test_the_answer_stays_the_same_wherever_the_series_goes(world: World) -> None:
    commit(world, "A", 5)
    assert commit(world, "B", 5) == "A COMMITTED 0"
    assert commit(world, "C", 4) == "AlreadyCommitted"
    said = world.message
    assert "at number 5" in said
    commit(world, "D", 9)
    for _ in range(2):
        assert commit(world, "B", 5) == "A COMMITTED 0"
        assert (commit(world, "C", 4), world.message) == ("AlreadyCommitted", said)
        world.lead(keep_table=False)
    assert commit(world, "B", 6) == "TransactionAborted", "another command"
    assert world.commit("B") == "TransactionAborted"


def test_a_begin_of_one_that_gave_way_has_the_same_answer(world: World) -> None:
    """Who has not the token, but what it takes to begin, asks again by beginning."""
    commit(world, "A", 5)
    commit(world, "B", 5)
    commit(world, "C", 4)
    assert world.begin("B") == "A COMMITTED 0"
    assert world.begin("C") == "AlreadyCommitted"
    world.begin("D")
    world.abort("D")
    assert world.begin("D") == "TransactionAborted"


# -- for ever -----------------------------------------------------------------------------------


def test_a_series_is_never_forgotten(world: World) -> None:
    commit(world, "A", 5)
    world.wait(4 * DAY)
    commit(world, "B", 5)
    assert world.wait(4 * DAY) == ""
    assert world.get("A") == "Expired"
    assert commit(world, "B", 5) == "AlreadyCommitted", "whose outcome it was is not known any more"
    assert (
        f"number 5 of the series 's' was committed before by {world.id('A').hex()}" in world.message
    )
    world.lead(keep_table=False)
    assert world.series("s") == "5 by A"
    assert commit(world, "C", 5) == "AlreadyCommitted"
    assert world.get("C").startswith("C ABORTED (number 5 of the series 's'")
    assert commit(world, "D", 6) == "D COMMITTED 0"
    world.wait(8 * DAY)
    left = [k.split_key(key[1:])[1].name for key in world.table.rows if key[:1] == k.STATUS]
    assert sorted(set(left)) == ["CHANGED", "EPOCH", "ROUND", "SCOPE", "SERIES", "STREAM", "TERM"]


def test_a_log_and_its_compacted_form_give_the_same(world: World) -> None:
    for label, number in zip("ABCDE", (3, 3, 5, 4, 6), strict=True):
        commit(world, label, number)
    world.begin("F")
    world.commit("F", name="s", number=8)  # decided, not merged
    last: dict[bytes, tuple[int, bytes | None]] = {}
    for i, rows in enumerate(world.log):
        for key, value in rows:
            last[key] = (i, value)
    compacted = [
        [(key, value) for key, value in rows if last[key] == (i, value)]
        for i, rows in enumerate(world.log)
    ]
    expected = rows_of(table_of(world.state))
    for log in (world.log, compacted):
        state = fold(log)
        assert rows_of(table_of(state)) == expected
        row = state.series("nyc", "s")
        assert row is not None
        assert (row.number, world.label(row.txn_id), row.earlier_number) == (8, "F", 6)


# -- at the same time ---------------------------------------------------------------------------


def test_two_race_for_one_number(world: World) -> None:
    world.begin("A")
    world.begin("B")
    asked = [(label, world.committing(label, name="s", number=3)) for label in "AB"]
    assert world.turn(*asked) == ""
    assert world.series("s") == "3 by A"
    assert world.turn() == "[A] A COMMITTED 0; [B] A COMMITTED 0"
    assert world.get("B").startswith("B ABORTED (number 3 of the series")


def test_a_series_is_merged_one_by_one_in_its_order(world: World) -> None:
    world.begin("A")
    world.begin("B")
    asked = [(x, world.committing(x, name="s", number=n)) for x, n in (("A", 4), ("B", 3))]
    world.turn(*asked)
    assert world.series("s") == "4 by A"
    assert world.turn() == "[A] A COMMITTED 0; [B] AlreadyCommitted"


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("patient", [False, True])
def test_while_one_of_the_series_is_being_merged(patient: bool, number: int) -> None:
    """Its merge must wait for a bigger one before it, and whatever is claimed waits for it."""
    world = nyc(round_bytes=10)
    for label in "ABC":
        world.begin(label)
        world.touch(label)
        world.write(label, f"w{label}")
    own = {label: [world.receipt(label, f"w{label}")] for label in "ABC"}
    world.turn(
        ("A", world.committing("A", own=own["A"])),
        ("B", world.committing("B", own=own["B"], name="s", number=3)),
    )
    wait_ms = 10_000 if patient else 0
    said = world.commit("C", asker="C", name="s", number=number, own=own["C"], wait_ms=wait_ms)
    assert said == "[A] A COMMITTED 1" + ("" if patient else "; NotReady")
    after = world.turn()
    if not patient:
        assert after == "[B] B COMMITTED 1"
        assert world.get("C") == "C OPEN"
        after += "; [C] " + commit(world, "C", number, own=own["C"])
    elif number == 4:
        after += "; " + world.turn()
    told = {2: "AlreadyCommitted", 3: "B COMMITTED 1", 4: "C COMMITTED 1"}[number]
    assert after == f"[B] B COMMITTED 1; [C] {told}"


@pytest.mark.parametrize("before", [False, True], ids=["first", "after another"])
@pytest.mark.parametrize("take_over", [False, True], ids=["one leader", "a new leader"])
def test_a_number_whose_commit_is_aborted_is_free_again(
    world: World, before: bool, take_over: bool
) -> None:
    if before:
        commit(world, "A", 2)
    world.begin("B")
    world.commit("B", name="s", number=5)
    assert (world.series("s"), world.row("B").state) == ("5 by B", "COMMIT_IN_PROGRESS")
    if take_over:
        world.lead(keep_table=False)
    assert world.abort("B").endswith("B ABORTED (aborted by a client)")
    assert world.series("s") == ("2 by A" if before else "nowhere")
    assert commit(world, "B", 5) == "TransactionAborted"
    assert commit(world, "C", 3) == "C COMMITTED 0"
    assert commit(world, "D", 5) == "D COMMITTED 0"


def test_it_is_claimed_by_the_decision_not_before(world: World) -> None:
    world.begin("A")
    world.touch("A")
    world.held = True
    world.write("A", "w1")
    own = [world.receipt("A", "w1")]
    assert world.commit("A", own=own, name="s", number=3) == ""
    assert world.series("s") == "nowhere"
    assert world.wait(10_000) == "[commit A] ReceiptsNotCovered"
    assert world.get("A") == "A OPEN"
    assert commit(world, "B", 3) == "B COMMITTED 0"
    world.held = False
    assert commit(world, "A", 3, own=own) == "B COMMITTED 0"
    assert world.ops() == "ABORT_TXN A nyc/a:0"


# -- names, scopes, arguments -------------------------------------------------------------------


def test_a_series_and_a_name_are_two_things(world: World) -> None:
    assert commit(world, "A", 3) == "A COMMITTED 0"
    assert (world.holder("s"), world.row("A").name) == ("nobody", None)
    world.begin("B", name="s")
    assert commit(world, "C", 3) == "A COMMITTED 0"
    assert world.get("B") == "B OPEN"
    world.commit("B", name="s")
    assert world.turn() == "[commit B] B COMMITTED 0"
    assert (world.series("s"), world.holder("s")) == ("3 by A", "B")
    assert commit(world, "D", 4) == "D COMMITTED 0"
    world.begin("E")
    assert world.commit("E", name="s") == "B COMMITTED 0"


def test_one_that_began_under_a_name_has_both(world: World) -> None:
    world.begin("A", name="daily")
    assert commit(world, "A", 3) == "A COMMITTED 0"
    assert (world.series("s"), world.holder("daily")) == ("3 by A", "A")


def test_series_are_of_a_scope_and_have_a_name(world: World) -> None:
    commit(world, "A", 3)
    assert commit(world, "B", 2, "other") == "B COMMITTED 0"
    world.find_scope("sfo")
    world.begin("C", scope="sfo")
    command = r.Commit(world.token("C", scope="sfo"), (), (), "s", 1000, 3)
    world.ask("C", command)
    assert world.turn() == "[C] C COMMITTED 0"
    assert (world.series("s"), world.series("s", "sfo")) == ("3 by A", "3 by C")


def test_a_repeated_commit_before_the_merge_waits_too(world: World) -> None:
    world.begin("A")
    world.commit("A", asker="1", name="s", number=3)
    assert world.commit("A", asker="2", name="s", number=3) == "[1] A COMMITTED 0; A COMMITTED 0"


def test_a_begin_again_after_the_commit_claimed_a_name(world: World) -> None:
    """Who joins late by beginning is told the outcome, not that the arguments differ."""
    world.begin("A")
    world.commit("A", name="daily")
    assert world.row("A").name == "daily"
    assert world.begin("A") == "begun A; [commit A] A COMMITTED 0"
    assert world.begin("A") == "A COMMITTED 0"
    assert world.begin("A", name="weekly") == "InvalidArgument"
    world.begin("B")
    world.commit("B", name="daily")
    assert world.begin("B") == "A COMMITTED 0", "as its commit was told"


# -- whatever happens ---------------------------------------------------------------------------

AGAIN = ("NotReady", "ReceiptsNotCovered", "UnknownTransaction", "Expired", "TooManyTransactions")
# What each commit claims: a few numbers twice, one in another series.
NUMBERS = {
    "A": ("s", 1),
    "B": ("s", 1),
    "C": ("s", 2),
    "D": ("s", 2),
    "E": ("s", 3),
    "F": ("s", 5),
    "G": ("s", 4),
    "H": ("t", 1),
}

labels = st.sampled_from(sorted(NUMBERS))
moves = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(("write", "commit", "commit", "commit", "commit", "abort")), labels
        ),
        st.tuples(st.just("together"), st.lists(labels, min_size=2, max_size=4)),
        st.tuples(st.just("wait"), st.sampled_from((0, 1, 300, 300, MINUTE, 4 * DAY, 8 * DAY))),
        st.tuples(st.sampled_from(("lead", "hold")), st.booleans()),
    ),
    min_size=10,
    max_size=60,
)


class Answers:
    """The same command gets the same answer, for as long as its outcome is known."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.first: dict[str, Any] = {}

    def check(self) -> None:
        for to, result in self.world.said:
            label = self.world.asked[to.correlation_id].split(" ")[0]
            if label not in NUMBERS:
                continue
            if isinstance(result, r.Refusal) and result.code in AGAIN:
                continue
            if isinstance(result, r.Refusal) and result.code == "TransactionAborted":
                result = result.code  # its wording depends on who says it
            first = self.first.setdefault(label, result)
            if result == first:
                continue
            assert isinstance(first, r.Outcome), f"{label}: {first}, then {result}"
            assert first.txn_id != self.world.id(label), f"{label}: {first}, then {result}"
            assert self.world.state.txn_row(first.txn_id) is None, "it is still known"
            assert result.code == "AlreadyCommitted"


@settings(
    max_examples=some(70),
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(moves)
def test_no_number_is_committed_twice_or_after_a_higher_one(life: list[tuple[str, Any]]) -> None:
    """And a repeated command gets the answer that it got before."""
    world = nyc(purge_per_look=3, round_bytes=250)
    watch, answers = Watch(world), Answers(world)
    sent: dict[str, r.Commit] = {}
    for i, (kind, what) in enumerate(life):
        match kind:
            case "write":
                touch = r.Touch(world.token(what), "nyc/a")
                world.turn((f"begin {i}", world.beginning(what)), (f"touch {i}", touch))
                world.write(what, f"w{what}")
            case "commit" | "together":
                commands: list[tuple[str, Any]] = []
                for j, label in enumerate(what if kind == "together" else [what]):
                    series, number = NUMBERS[label]
                    if label not in sent:
                        own = [world.receipt(label, f"w{label}")] if label in world.ids else []
                        sent[label] = world.committing(label, own=own, name=series, number=number)
                    commands.append((f"begin {i} {j}", world.beginning(label)))
                    commands.append((f"{label} {i} {j}", sent[label]))
                world.turn(*commands)
            case "abort":
                world.ask(f"abort {i}", r.Abort(world.token(what), ""))
            case "wait":
                world.wait(what)
            case "lead":
                world.lead(keep_table=what)
            case "hold":
                world.held = what
        if kind not in ("lead", "hold"):
            watch.look()
            answers.check()
    for series, number in watch.highest.items():
        row = world.state.series("nyc", series)
        assert row is not None
        assert number in (row.number, row.earlier_number)


# -- where it stands, and an operator's word ------------------------------------------------------

JUMP = 1 << 32


def runs(world: World) -> tuple[int, ...]:
    row = world.state.series("nyc", "s")
    assert row is not None
    return row.runs


def set_series(world: World, expected: int | None, number: int, lane: str = "admin") -> str:
    world.lane = lane
    said = world.ask("operator", r.SetSeries("nyc", "s", expected, number))
    world.lane = "open"
    return said


@pytest.mark.parametrize(
    ("number", "answer"),
    [
        (7 + JUMP, "B COMMITTED 0"),
        (8 + JUMP, "InvalidArgument"),
        ((1 << 63) - 1, "InvalidArgument"),
    ],
)
def test_a_number_may_be_further_than_the_next_up_to_a_limit(
    world: World, number: int, answer: str
) -> None:
    first = commit(world, "F", number - 7, "first")
    assert first.replace("F", "B") == answer, "from 0 on it is as far"
    commit(world, "A", 7)
    assert commit(world, "B", number) == answer
    if answer == "InvalidArgument":
        assert "anabranch series set" in world.message
        assert (world.get("B"), world.series("s")) == ("B OPEN", "7 by A")
        assert commit(world, "B", 8) == "B COMMITTED 0"


def test_which_numbers_were_committed(world: World) -> None:
    for i, number in enumerate((3, 4, 5, 9, 11, 12)):
        commit(world, f"T{i}", number)
    assert runs(world) == (3, 5, 9, 9, 11, 12)
    for number in (13, 20):  # one that is aborted after all leaves what stood before
        world.begin(f"U{number}")
        world.commit(f"U{number}", name="s", number=number)
        world.abort(f"U{number}")
        assert runs(world) == (3, 5, 9, 9, 11, 12)
    for i in range(claims.MAX_RUNS):
        commit(world, f"V{i}", 100 + 2 * i)
    found = runs(world)
    assert len(found) == 2 * claims.MAX_RUNS
    assert (found[0], found[-1]) == (3, 100 + 2 * claims.MAX_RUNS - 2)
    assert list(found) == sorted(found)


# (where it stands, what is expected, where it is set, the answer, the runs then)
SET: list[tuple[int | None, int | None, int, str, tuple[int, ...] | None]] = [
    (7, 7, 3, "s 3 by 0", (3, 3)),
    (7, 7, 9, "s 9 by 0", (7, 7, 9, 9)),
    (7, 7, 8, "s 8 by 0", (7, 8)),
    (7, 7, -1, "none", None),
    (7, 3, 7, "s 7 by A", (7, 7)),
    (7, 6, 5, "IllegalState", (7, 7)),
    (7, None, 5, "IllegalState", (7, 7)),
    (None, None, 5, "s 5 by 0", (5, 5)),
    (None, 5, 6, "IllegalState", None),
    (7, 7, -2, "InvalidArgument", (7, 7)),
]


@pytest.mark.parametrize(("stands", "expected", "number", "answer", "left"), SET)
def test_an_operator_sets_it(
    world: World,
    stands: int | None,
    expected: int | None,
    number: int,
    answer: str,
    left: tuple[int, ...] | None,
) -> None:
    if stands is not None:
        commit(world, "A", stands)
    for _ in range(2):
        assert set_series(world, expected, number) == answer
        row = world.state.series("nyc", "s")
        assert (row.runs if row is not None else None) == left
    world.lead(keep_table=False)
    if number == 3:
        assert commit(world, "B", 3) == "AlreadyCommitted"
        assert "by an operator" in world.message
        assert commit(world, "C", 4) == "C COMMITTED 0"


def test_it_is_set_once_wherever_it_goes_then(world: World) -> None:
    commit(world, "A", 5)
    assert set_series(world, 5, 3) == "s 3 by 0"
    commit(world, "B", 4)
    world.begin("C")
    world.commit("C", name="s", number=5)
    world.abort("C")
    commit(world, "D", 5)
    assert set_series(world, 5, 3) == "s 5 by D"


def test_it_is_not_set_while_one_is_committed(world: World) -> None:
    commit(world, "A", 7)
    assert set_series(world, 7, 3, lane="etl") == "NotAuthorized"
    world.begin("B")
    world.commit("B", name="s", number=8)
    assert set_series(world, 8, 3).startswith("NotReady")
    assert world.series("s") == "8 by B"


def test_lists_of_series(world: World) -> None:
    names = [f"s{i:03}" for i in range(limits.LIST_ROWS.value + 3)]
    rows = [
        (k.series_key("nyc", s), r.SeriesRow(i, bytes(16), -1, bytes(16), (), "open"))
        for i, s in enumerate(names)
    ]
    world.log_rows(rows)
    world.ask("list", r.ListSeries("nyc", None, None))
    first = world.result
    assert ([s.series for s in first.series], first.more) == (names[3:][::-1], True)
    world.ask("list", r.ListSeries("nyc", None, first.series[-1].series))
    assert ([s.series for s in world.result.series], world.result.more) == (names[:3][::-1], False)
    world.ask("list", r.ListSeries("nyc", "s007", None))
    assert [(s.series, s.number) for s in world.result.series] == [("s007", 7)]
    assert world.ask("list", r.ListSeries("nyc", "none", None)) == "none"
    assert world.ask("list", r.ListSeries("sfo", None, None)) == "UnknownScope"


def test_a_lane_lists_its_own_however_many_others_there_are(world: World) -> None:
    most = limits.LIST_ROWS.value
    names = [f"s{i:04}" for i in range(3 * most)]
    owners = ("web", "etl", "", *("web",) * (len(names) - 6), "etl", "web", "etl")
    world.grant("etl", "nyc/a", Right.DESCRIBE)
    world.log_rows(
        [
            (k.series_key("nyc", name), r.SeriesRow(7, bytes(16), -1, bytes(16), (), owner))
            for name, owner in zip(names, owners, strict=True)
        ]
    )

    def listed(before: str | None = None) -> list[int]:
        world.ask("list", r.ListSeries("nyc", None, before), lane="etl")
        assert not world.result.more
        return [int(info.series[1:]) for info in world.result.series]

    last = 3 * most - 1
    assert listed() == [last, last - 2, 2, 1]
    assert listed(names[2]) == [1]
    for at, owner in (last, "web"), (500, "etl"):
        row = world.state.series("nyc", names[at])
        assert row is not None
        world.log_rows([(k.series_key("nyc", names[at]), replace(row, owner=owner))])
    assert listed() == [last - 2, 500, 2, 1]
    assert (world.state.series_of("etl"), world.state.series_of("")) == (3, 1)
    world.log_rows([(k.series_key("nyc", name), None) for name in names])
    assert listed() == []
    assert not [key for key in world.table.rows if key.startswith(k.OWNED)]
