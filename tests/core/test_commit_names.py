"""Names claimed by commits."""

from __future__ import annotations

import pytest

from tests.core.harness import World, nyc, states

# -- names claimed by the commit ---------------------------------------------------------------


def test_a_free_name(opened: World) -> None:
    opened.commit("A", name="daily")
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert (opened.holder("daily"), opened.row("A").name) == ("A", "daily")
    assert opened.begin("B", name="daily") == "A COMMITTED 0"


def test_a_name_is_claimed_by_the_decision_not_before(opened: World) -> None:
    opened.held = True
    opened.write("A", "w1")
    opened.commit("A", own=[opened.receipt("A", "w1")], name="daily")
    assert opened.holder("daily") == "nobody"
    assert opened.wait(10_000) == "[commit A] ReceiptsNotCovered"
    assert (opened.holder("daily"), opened.row("A").name) == ("nobody", None)


def test_a_name_held_by_an_open_one(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.touch("B")
    opened.commit("A", name="daily")
    assert opened.ops() == "ABORT_TXN B nyc/a:0; BEGIN_COMMIT A nyc/a:0"
    assert opened.turn() == "[commit A] A COMMITTED 0"
    assert opened.get("B") == "B ABORTED (superseded by a newer transaction named 'daily')"


def test_a_name_held_by_an_open_one_whose_commit_waits(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.touch("B")
    opened.held = True
    opened.write("B", "w2")
    opened.commit("B", own=[opened.receipt("B", "w2")])
    assert opened.commit("A", name="daily") == "[commit B] TransactionAborted"
    assert opened.turn() == "[commit A] A COMMITTED 0"


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


def test_its_own_name_again(opened: World) -> None:
    opened.begin("B", name="daily")
    opened.commit("B", name="daily")
    assert opened.turn() == "[commit B] B COMMITTED 0"
    assert opened.holder("daily") == "B"
