"""Parts of one commit together: locks, positions, names and numbers, a coordinator (decision 0054)."""

from __future__ import annotations

import random
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from anabranch.core import rows as k
from anabranch.core.locks import frozen
from anabranch.core.locks.table_writes import Keys, fingerprint
from anabranch.core.state import State
from anabranch.protocol import limits
from anabranch.protocol.ids import hash_of
from anabranch.protocol.limits import PREPARED_HOLD_MS
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import LEVEL
from tests.core.labels import MINUTE, SECRET
from tests.core.test_frozen_locks import BIG, WAYS, Big, journal, one_shot, plain_write
from tests.core.test_ownership import ALL, INPUTS, NAME, Workers
from tests.core.test_prepared import give_up
from tests.core.test_table_locks import A, B, told

PREPARE = r.Prepare(b"", b"1")


class Both(Big, Workers):
    """Two tables, and a processor of four tasks that worker a owns."""

    def __init__(self, level: int = LEVEL) -> None:
        super().__init__()
        self.log_rows([(k.FEATURE_KEY, r.FeatureRow(level, 1))])
        self.make("nyc/in")
        self.ask("create", r.CreateProcessor(NAME, 4, INPUTS))
        self.take("a")

    def shot(
        self, label: str, *rows: tuple[str, bytes], who: str = "a", sequence: int = 1, **given: Any
    ) -> str:
        """A one-shot of these rows that moves the tasks of a worker: how it was answered."""
        name = given.get("name")
        if label not in self.ids and name is None:
            self.marked(label)
        events = tuple(r.Event(table, -1, key, b"v", (), -1) for table, key in rows)
        consumed = self.consumed(who, sequence, 10 + sequence)
        locks = given.get("locks", ())
        self.ask(label, r.OneShot(self.id(label), "nyc", name, events, consumed, locks))
        return told(self.result)

    def begun(self, label: str, who: str | None = "a") -> None:
        """Begin a transaction that moves positions of a worker's tasks, at a snapshot."""
        self.new_id(label)
        hash_ = None if who is None else hash_of(NAME, self.token_of(who))
        begin = r.Begin(self.id(label), "nyc", None, MINUTE, SECRET, hash_, self.told()[0])
        assert self.ask("begin", begin) == f"begun {label}"

    def ask_end(self, label: str, who: str | None = "a", **given: Any) -> str:
        """Commit or prepare by journals: the answer, or the state."""
        if label in self.writers:
            self.finish(label, label)
        consumed = None if who is None else self.consumed(who, given.pop("sequence", 1), 11)
        command = r.Commit(
            self.token(label), (), None, given.get("name"), given.get("wait_ms", 10_000),
            given.get("number"), consumed, given.get("prepare"),
        )  # fmt: skip
        self.ask(f"end {label}", command)
        for _ in range(3):
            answers = [
                result for to, result in self.said if to.correlation_id == f"end {label}".encode()
            ]
            if answers:
                return told(answers[0])
            self.wait(60)
        return "waits"

    def prepared(
        self, label: str, *read: bytes, wrote: tuple[bytes, ...] = (), **given: Any
    ) -> str:
        """Prepare a transaction that read rows of A, and wrote rows of B, in one command."""
        by, who = given.get("by", b""), given.get("who")
        points = tuple(sorted(map(fingerprint, read)))
        since, last = self.told()
        locks = (r.TableLocks(A, since, last[A], points, ()),) if read else ()
        events = tuple(r.Event(given.get("table", B), -1, key, b"v", (), -1) for key in wrote)
        consumed = None if who is None else self.consumed(who, given.get("sequence", 1), 11)
        command = r.PrepareEvents(
            self.id(label), "nyc", given.get("name"), events, SECRET, r.Prepare(by, b"1"), consumed, locks,
        )  # fmt: skip
        self.ask(f"prepare {label}", command)
        return told(self.result)

    def journal_prepared(self, label: str, *read: bytes, wrote: tuple[bytes, ...] = ()) -> str:
        """The same by journals."""
        self.begun(label, None)
        if read:
            self.reads(label, *read)
        for key in wrote:
            self.writes(label, B, key, size=10)
        return self.ask_end(label, None, prepare=PREPARE)

    def decided(self, label: str, *, commits: bool = True) -> str:
        """Its coordinator decides: how the transaction ended."""
        token = self.token(label)
        given = r.Commit(token, (), None, None, 0) if commits else r.Abort(token, "")
        self.ask(f"decide {label}", given)
        for _ in range(3):
            self.wait(60)
        return Big.row(self, label).state

    def refusal_of(self, asker: str) -> str:
        (found,) = [x for to, x in self.said if to.correlation_id == asker.encode()]
        return told(found)


# -- positions and locks ---------------------------------------------------------------------------


def test_a_one_shot_has_locks_and_positions() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    assert bank.shot("X", (A, b"k"), (B, b"x"), locks=(lock,)) == "COMMITTED"
    assert bank.result.tables == (r.TableTime(A, bank.result.commit_timestamp),)
    assert [bank.task(task) for task in ALL] == ["1 a 1:11"] * 4
    assert bank.state.txn_row(bank.id("X")) is None, "the tasks' rows prove it"
    assert bank.shot("X", (A, b"k"), (B, b"x"), locks=(lock,)) == "COMMITTED", "repeated"
    assert bank.task() == "1 a 1:11"


def test_its_locks_are_revalidated_before_anything_moves() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    assert bank.put((A, b"k")) == "COMMITTED"
    before = len(bank.log)
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "Revalidate"
    assert bank.result.tables == (r.TableTime(A, bank.state.tables[A].last),)
    assert bank.task() == "1 a 0:-"
    assert {key[16] for key, _ in bank.log[before]} == {2}, "nothing is logged but the round"
    assert bank.shot("X", (A, b"k"), locks=(bank.lock(A, b"k"),)) == "COMMITTED"
    assert bank.put((B, b"x"), locks=(lock,)) == "Revalidate", "its write breaks locks of others"


@pytest.mark.parametrize("name", [None, "n"])
def test_a_one_shot_with_positions_takes_turns_at_rows(name: str | None) -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    if name is None:
        bank.marked("W")
    for label in "HW":
        bank.ask(label, r.TakeTurn(bank.id(label), None, A, fingerprint(b"k"), (A,), 10_000))
    holders = bank.memory.row_turns.queues
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "Revalidate"
    assert bank.result.writers == (fingerprint(b"k"), 0)
    assert bank.task() == "1 a 0:-"
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "COMMITTED", "the next copy is carried out"
    event = r.Event(A, -1, b"k", b"v", (), -1)
    bank.ask("H", r.OneShot(bank.id("H"), "nyc", None, (event,), None, (bank.lock(A, b"k"),)))
    (queue,) = holders.as_dict().values()
    assert queue.holder is not None
    assert queue.holder.txn_id == bank.id("W")
    lock = bank.lock(A, b"k")
    assert bank.shot("W", (A, b"k"), name=name, sequence=2, locks=(lock,)) == "COMMITTED"
    assert not holders.as_dict()


def test_a_former_owner_is_refused_though_its_locks_hold() -> None:
    bank = Both()
    lock = bank.lock(A, b"k")
    bank.take("b")
    assert bank.shot("X", (A, b"k"), locks=(lock,)) == "OwnershipLost"
    assert bank.shot("Y", (A, b"k"), who="b", locks=(lock,)) == "COMMITTED"


@pytest.mark.parametrize("ends", ["holds", "broken", "fenced"])
def test_a_transaction_with_registered_locks_moves_positions(ends: str) -> None:
    """Nothing new: level 1 has it."""
    bank = Both(1)
    bank.begun("J")
    bank.reads("J", b"k")
    bank.writes("J", B, b"x", size=10)
    bank.finish("J", "J")
    if ends == "broken":
        assert bank.put((A, b"k")) == "COMMITTED"
    if ends == "fenced":
        bank.take("b")
    bank.ask_end("J")
    assert (Big.row(bank, "J").state, bank.task()) == {
        "holds": ("COMMITTED", "1 a 1:11"),
        "broken": ("ABORTED", "1 a 0:-"),
        "fenced": ("ABORTED", "2 b 0:-"),
    }[ends]


@pytest.mark.parametrize("level", [1, 2])
def test_below_the_level_nothing_is_together(level: int) -> None:
    bank = Both(level)
    assert bank.shot("X", (A, b"k"), locks=(bank.lock(A, b"k"),)) == "FeatureNotEnabled"
    assert bank.shot("N", (A, b"k"), name="n") == "FeatureNotEnabled"
    assert bank.prepared("P", b"k") == bank.prepared("P", who="a") == "FeatureNotEnabled"
    bank.reads("T", b"k")
    assert bank.ask_end("T", None, prepare=PREPARE) == "FeatureNotEnabled"
    bank.begun("J")
    assert bank.ask_end("J", name="n") == bank.ask_end("J", prepare=PREPARE) == "FeatureNotEnabled"
    assert bank.shot("X", (A, b"k")) == "COMMITTED"
    assert bank.prepared("P", wrote=(b"x",)) == "PREPARED"


def test_locks_that_come_after_the_prepare_was_asked_for_need_the_level_too() -> None:
    bank = Both(1)
    bank.begun("J", None)
    bank.touch("J", B)
    bank.held = True
    bank.write("J", "J", B)
    bank.finish("J", "J")
    command = replace(bank.committing("J"), prepare=PREPARE)
    assert bank.ask("end", command) == ""
    locks = (r.TableLocks(A, 0, 0, (fingerprint(b"k"),), ()),)
    bank.ask("lock", r.LockReads(bank.token("J"), bank.writer("J"), 1, locks))
    assert (bank.refusal_of("lock"), bank.refusal_of("end")) == ("ReadsLocked", "FeatureNotEnabled")


# -- positions and a claim -------------------------------------------------------------------------


def test_a_one_shot_with_positions_and_a_name_leaves_a_row() -> None:
    bank = Both()
    assert bank.shot("X", (A, b"k"), name="n") == "COMMITTED"
    assert (bank.holder("n"), bank.task(), Big.row(bank, "X").state) == (
        "X",
        "1 a 1:11",
        "COMMITTED",
    )
    bank.take("b")
    assert bank.shot("X", (A, b"k"), name="n") == "COMMITTED", (
        "its row is the proof, not the tasks'"
    )
    assert bank.shot("X", (A, b"k"), name="n", sequence=2) == "InvalidArgument", "other positions"
    assert bank.resolve("X").startswith("X COMMITTED")
    bank.marked("Y")
    assert bank.shot("Y", (A, b"k"), name="m") == "InvalidArgument"


def test_what_gives_way_moves_no_position_and_is_never_called_committed() -> None:
    bank = Both()
    assert bank.one_shot("E", name="n") == "E COMMITTED 0"
    for _ in range(2):
        assert bank.shot("X", (A, b"k"), name="n") == "AlreadyCommitted"
        assert bank.id("E").hex() in bank.message
        assert (bank.task(), Big.row(bank, "X").state) == ("1 a 0:-", "ABORTED")
    assert bank.prepared("P", wrote=(b"x",), name="n", who="a") == "AlreadyCommitted"
    assert bank.prepared("P", wrote=(b"x",), name="n", who="a") == "AlreadyCommitted"
    assert bank.shot("Z", (A, b"k")) == "COMMITTED", "the positions move alone"


def test_a_late_copy_of_what_was_resolved_is_not_called_committed_either() -> None:
    bank = Both()
    bank.one_shot("E", name="n")
    assert bank.resolve("X").startswith("X ABORTED")
    assert bank.shot("X", (A, b"k"), name="n") == "AlreadyCommitted"
    assert bank.task() == "1 a 0:-"


def test_a_former_owner_learns_that_first() -> None:
    bank = Both()
    bank.one_shot("E", name="n")
    bank.take("b")
    assert bank.shot("X", (A, b"k"), name="n") == "OwnershipLost"


@pytest.mark.parametrize("number", [None, 7])
@pytest.mark.parametrize("prepare", [None, PREPARE])
@pytest.mark.parametrize("taken", [False, True])
def test_by_journals_a_claim_moves_with_positions(
    number: int | None, prepare: Any, taken: bool
) -> None:
    bank = Both()
    if taken:
        bank.begin("E")
        bank.commit("E", name="n", number=number)
        bank.turn()
    bank.begun("J")
    bank.writes("J", B, b"x", size=10)
    said = bank.ask_end("J", name="n", number=number, prepare=prepare)
    if taken:
        assert (said, Big.row(bank, "J").state, bank.task()) == (
            "AlreadyCommitted",
            "ABORTED",
            "1 a 0:-",
        )
        assert bank.ask_end("J", name="n", number=number, prepare=prepare) == "AlreadyCommitted"
        assert bank.series("n") == ("nowhere" if number is None else "7 by E")
        return
    if prepare is not None:
        assert (said, bank.task()) == ("PREPARED", "1 a 0:- !J")
        assert bank.decided("J") == "COMMITTED"
    assert (Big.row(bank, "J").state, bank.task()) == ("COMMITTED", "1 a 1:11")
    assert (bank.holder("n") if number is None else bank.series("n")) == (
        "J" if number is None else "7 by J"
    )


# -- prepared, with locks --------------------------------------------------------------------------

KINDS = ("one command", "journals")


def prepare(bank: Both, kind: str, label: str, *read: bytes, **given: Any) -> str:
    make = bank.prepared if kind == "one command" else bank.journal_prepared
    return make(label, *read, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("way", WAYS)
def test_who_would_break_its_locks_waits_for_its_end(
    kind: str, lead: bool | None, way: str
) -> None:
    for key in (b"read", b"other"):
        bank = Both()
        assert prepare(bank, kind, "P", b"read", wrote=(b"x",)) == "PREPARED"
        if lead is not None:
            bank.lead(keep_table=lead)
            bank.wait(60)
        for _ in range(2):
            assert WAYS[way](bank, key) == (key == b"other")
        assert bank.decided("P") == "COMMITTED"
        bank.wait(300)
        assert WAYS[way](bank, key)
        assert bank.memory.merging.waiting.as_dict() == {}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("commits", [True, False])
def test_after_the_hold_nothing_waits_but_plain_writes(kind: str, commits: bool) -> None:
    bank = Both()
    assert prepare(bank, kind, "P", b"read", wrote=(b"x",)) == "PREPARED"
    assert not journal(bank, b"read")
    assert not one_shot(bank, b"read")
    assert not plain_write(bank, b"read")
    bank.lead()
    bank.wait(PREPARED_HOLD_MS)
    shot = r.OneShot(bank.id("S"), "nyc", None, (r.Event(A, -1, b"read", b"v", (), -1),), None, ())
    assert bank.ask("S", shot) == "ReservedByPrepared"
    assert bank.id("P").hex() in bank.message
    bank.wait(60)
    assert bank.state_of("J") == "ABORTED", "it was decided, and is given up"
    assert not plain_write(bank, b"read"), "nobody could be told"
    assert bank.decided("P", commits=commits) == ("COMMITTED" if commits else "ABORTED")
    assert plain_write(bank, b"read")
    assert bank.ask("S", shot).startswith("S COMMITTED")


def test_after_the_hold_nothing_waits_for_a_decided_one_whose_stream_is_in_trouble() -> None:
    bank = Both()
    assert bank.journal_prepared("P", b"read", wrote=(b"x",)) == "PREPARED"
    bank.memory.waiting = {B: "its topic has no leader"}
    assert bank.decided("P") == "FINALIZE_IN_PROGRESS"
    assert not journal(bank, b"read")
    for _ in range(PREPARED_HOLD_MS // 1_000):
        bank.wait(1_000)
    assert bank.state_of("J") == "ABORTED"
    shot = r.OneShot(bank.id("S"), "nyc", None, (r.Event(A, -1, b"read", b"v", (), -1),), None, ())
    assert bank.ask("S", shot) == "ReservedByPrepared"
    bank.memory.waiting = {}
    bank.wait(1_000)
    assert bank.state_of("P") == "COMMITTED"
    assert bank.ask("S", shot).startswith("S COMMITTED")


@pytest.mark.parametrize("ahead_s", [-3_600, 3_600])
def test_the_hold_ends_though_leaders_have_different_clocks(ahead_s: int) -> None:
    bank = Both()
    bank.wall_us += ahead_s * 1_000_000
    assert bank.prepared("P", b"read", wrote=(b"x",)) == "PREPARED"
    bank.wall_us -= ahead_s * 1_000_000
    bank.lead()
    assert not journal(bank, b"read")
    shot = r.OneShot(bank.id("S"), "nyc", None, (r.Event(A, -1, b"read", b"v", (), -1),), None, ())
    said = []
    for _ in range(PREPARED_HOLD_MS // 1_000 + 1):
        said.append(bank.ask("S", shot))
        bank.wait(1_000)
    assert said[0] == ("NotReady" if ahead_s > 0 else "ReservedByPrepared")
    assert said[-1] == "ReservedByPrepared"
    assert bank.state_of("J") == "ABORTED"


@pytest.mark.parametrize("size", [10, BIG])
@pytest.mark.parametrize("claims", [True, False])
def test_a_commit_that_is_given_up_after_the_hold_gives_all_back(size: int, claims: bool) -> None:
    claim: dict[str, Any] = {"name": "n", "number": 7} if claims else {}
    bank = Both()
    assert bank.prepared("P", b"read", wrote=(b"x",)) == "PREPARED"
    bank.begun("J")
    bank.writes("J", A, b"read", size=size)
    assert bank.ask_end("J", **claim) == "waits"
    assert bank.task() == "1 a 0:- !J"
    bank.grow()
    bank.wait(PREPARED_HOLD_MS)
    bank.wait(60)
    assert Big.row(bank, "J").state == "ABORTED"
    assert (bank.task(), bank.series("n")) == ("1 a 0:-", "nowhere")
    assert bank.shot("S", (A, b"z")) == "COMMITTED", "the tasks can be moved"
    reset = bank.ask("reset", r.ResetProcessor(NAME, 0, INPUTS, False))
    assert not isinstance(bank.result, r.Refusal), reset
    bank.begun("K", None)
    assert bank.ask_end("K", None, **claim) == "COMMITTED"
    assert bank.series("n") == ("7 by K" if claims else "nowhere")


def test_a_wait_for_many_costs_no_more_than_one_for_few(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = Both()
    labels = [f"P{n:02}" for n in range(frozen.MOST_ON + 4)]
    for label in labels:
        assert bank.prepared(label, b"read", wrote=(b"x",)) == "PREPARED"
    monkeypatch.setattr(State, "prepared_row", None)  # no row with events is read
    assert not one_shot(bank, b"read")
    (waiting,) = bank.memory.merging.waiting.as_dict().values()
    assert len(waiting.on) == frozen.MOST_ON
    assert not one_shot(bank, b"read")
    monkeypatch.undo()
    for label in labels[: frozen.MOST_ON]:
        assert bank.decided(label) == "COMMITTED"
        assert not one_shot(bank, b"read")
    for label in labels[frozen.MOST_ON :]:
        assert not one_shot(bank, b"read")
        assert bank.decided(label) == "COMMITTED"
    assert one_shot(bank, b"read")


@pytest.mark.parametrize("kind", KINDS)
def test_reading_what_many_prepared_ones_write_takes_several_rounds(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = Both()
    for n in range(6):
        keys = tuple(b"%d-%d" % (n, i) for i in range(40 if kind == "one command" else 4))
        assert prepare(bank, kind, f"P{n}", wrote=keys) == "PREPARED"
    bank.lead()
    bank.wait(60)
    since, last = bank.told()
    locks = (r.TableLocks(B, since, last[B], (fingerprint(b"z"),), ()),)
    command = r.PrepareEvents(bank.id("Q"), "nyc", None, (), SECRET, PREPARE, None, locks)
    monkeypatch.setattr(limits, "ROUND_WORK", limits.ROUND_WORK._replace(value=10))
    tries = 0
    while bank.ask("prepare", command) == "NotReady":
        tries += 1
    assert told(bank.said[-1][1]) == "PREPARED"
    assert 1 < tries < 6


def test_who_waits_is_listed() -> None:
    bank = Both()
    assert bank.prepared("P", b"read", wrote=(b"x",)) == "PREPARED"
    assert not one_shot(bank, b"read")
    bank.ask("list", r.ListTableLocks("nyc", 10))
    (found,) = bank.result.locks
    assert (found.txn_id, found.table, found.points, found.frozen) == (bank.id("P"), A, 1, True)
    assert found.waiting == (bytes(16),)


@pytest.mark.parametrize("kind", KINDS)
def test_its_locks_hold_when_it_is_prepared(kind: str) -> None:
    bank = Both()
    if kind == "one command":
        lock = bank.lock(A, b"k")
        assert bank.put((A, b"k")) == "COMMITTED"
        command = r.PrepareEvents(bank.id("P"), "nyc", None, (), SECRET, PREPARE, None, (lock,))
        bank.ask("prepare", command)
        assert told(bank.result) == "Revalidate"
        assert bank.state.txn_row(bank.id("P")) is None
    else:
        bank.begun("P", None)
        bank.lock_reads(b"k", label="P", writer="P")
        assert bank.ask_end("P", None, prepare=PREPARE) == "Revalidate"
        bank.validate(label="P", writer="P")
        bank.writes("P", B, b"x", size=10)
        assert bank.put((A, b"k")) == "COMMITTED"
        assert bank.ask_end("P", None, prepare=PREPARE) == "ABORTED"


@pytest.mark.parametrize("more", [0, 1])
def test_its_locks_are_no_bigger_than_those_that_are_registered(more: int) -> None:
    bank = Both()
    since, last = bank.told()
    low = b"a" * (limits.LOCK_BYTES.value - 8 - 1 + more)
    locks = (r.TableLocks(A, since, last[A], (7,), (r.LockedRange(low, b"b"),)),)
    bank.begun("J", None)
    bank.touch("J", B)
    registered = bank.ask("lock", r.LockReads(bank.token("J"), bank.writer("J"), 1, locks))
    assert told(bank.result) == ("InvalidArgument" if more else "ReadsLocked"), registered
    command = r.PrepareEvents(bank.id("P"), "nyc", None, (), SECRET, PREPARE, None, locks)
    bank.ask("prepare", command)
    assert told(bank.result) == ("EventTooLarge" if more else "PREPARED")


# The first is prepared (or staged) and has read `a`, and wrote `b`; the second wants to be.
PAIRS = {
    # reads, writes of the first; reads, writes of the second; whether both may be prepared
    "apart": ((b"a",), (b"x",), (b"c",), (b"y",), True),
    "the same is read": ((b"a",), (b"x",), (b"a",), (b"y",), True),
    "the second would break the first": ((b"a",), (b"x",), (), (b"a",), False),
    "the first would break the second": ((), (b"c",), (b"c",), (b"y",), False),
    "each would break the other": ((b"a",), (b"c",), (b"c",), (b"a",), False),
    "both write it": ((), (b"x",), (), (b"x",), True),
}


@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS])
@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("pair", PAIRS)
def test_no_two_are_prepared_of_which_one_would_break_the_other(
    kinds: tuple[str, str], lead: bool | None, pair: str
) -> None:
    """Both databases may commit: then both have to, in any order, and at once."""
    read, wrote, reads, writes, both = PAIRS[pair]
    for last_first in (False, True) if both else (False,):
        bank = Both()
        assert put_both(bank, kinds[0], "P", read, wrote) == "PREPARED"
        if lead is not None:
            bank.lead(keep_table=lead)
            bank.wait(60)
        said = put_both(bank, kinds[1], "Q", reads, writes)
        assert said == (
            "PREPARED" if both else "NotReady" if kinds[1] == "one command" else "waits"
        )
        order = ["P", "Q"] if both else ["P"]
        for label in reversed(order) if last_first else order:
            assert bank.decided(label) == "COMMITTED"
        bank.wait(60)
        if not both and kinds[1] == "journals":
            ended = bank.state_of("Q")
            assert ended == ("FROZEN" if pair == "the second would break the first" else "ABORTED")


def put_both(
    bank: Both, kind: str, label: str, read: tuple[bytes, ...], wrote: tuple[bytes, ...]
) -> str:
    """Rows are read and written in table A alone."""
    if kind == "one command":
        return bank.prepared(label, *read, wrote=wrote, table=A)
    bank.begun(label, None)
    if read:
        bank.reads(label, *read)
    for key in wrote:
        bank.writes(label, A, key, size=10)
    return bank.ask_end(label, None, prepare=PREPARE)


def test_a_prepare_that_waits_for_another_is_refused_after_the_hold() -> None:
    bank = Both()
    assert bank.prepared("P", b"a", wrote=(b"x",)) == "PREPARED"
    assert put_both(bank, "journals", "Q", (), (b"a",)) == "waits"
    bank.wait(PREPARED_HOLD_MS - 1_000)
    assert bank.state_of("Q") == "OPEN"
    bank.wait(1_000)
    assert bank.refusal_of("end Q") == "ReservedByPrepared"
    assert bank.prepared("R", wrote=(b"a",), table=A) == "ReservedByPrepared"
    assert bank.decided("P", commits=False) == "ABORTED"
    assert bank.ask_end("Q", None, prepare=PREPARE) == "PREPARED"


@pytest.mark.parametrize("kind", [*KINDS, "staged"])
def test_what_waits_for_a_plain_write_that_waits_for_a_prepared_one_is_refused_after_the_hold(
    kind: str,
) -> None:
    """Plain writes wait without an end, and bar locks that they break."""
    bank = Both()
    assert bank.prepared("P", b"read", wrote=(b"x",)) == "PREPARED"
    bank.write_plainly(A, digest=Keys.of([b"read", b"u"]).to_bytes())
    bank.wait(60)
    bank.wait(frozen.BARS_MS)
    if kind == "staged":
        bank.new("U")
        bank.reads("U", b"u")
        bank.writes("U", B, b"big")
        assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    else:
        waits = "NotReady" if kind == "one command" else "waits"
        assert prepare(bank, kind, "U", b"u", wrote=(b"y",)) == waits
    said = []
    for _ in range(PREPARED_HOLD_MS // 1_000):
        bank.wait(1_000)
        said += [told(result) for to, result in bank.said if to.correlation_id == b"end U"]
    if kind == "staged":
        assert bank.state_of("U") == "ABORTED"
    elif kind == "journals":
        assert said == ["ReservedByPrepared"]
    else:
        assert bank.prepared("U", b"u", wrote=(b"y",)) == "ReservedByPrepared"
    assert bank.index.plain_waiting(bank.state)
    assert bank.decided("P") == "COMMITTED"
    assert not bank.index.plain_waiting(bank.state)


def test_a_staged_merge_and_a_prepared_one() -> None:
    """What is staged waits for nobody; what is prepared, when it commits, for what is staged alone."""
    bank = Both()
    assert bank.prepared("P", b"a", wrote=(b"x",), table=A) == "PREPARED"
    bank.new("S")  # it has read what P writes: P will wait for it
    bank.reads("S", b"x")
    bank.writes("S", B, b"big")
    assert bank.commits("S") == "FROZEN"
    bank.new("U")  # it would break a lock of P
    bank.writes("U", A, b"a")
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    assert bank.decided("P") == "PREPARED"
    assert bank.said == [] or told(bank.said[0][1]) == "NotReady"
    assert bank.carry("S") == "COMMITTED"
    assert bank.decided("P") == "COMMITTED"
    bank.wait(300)
    bank.grow()
    assert bank.carry("U") == "COMMITTED"


def test_a_staged_merge_waits_for_a_prepared_one_for_the_hold_alone() -> None:
    bank = Both()
    assert bank.prepared("P", b"a", wrote=(b"x",)) == "PREPARED"
    bank.new("U")
    bank.writes("U", A, b"a")
    assert bank.commits("U") == "COMMIT_IN_PROGRESS"
    bank.wait(PREPARED_HOLD_MS)
    assert bank.state_of("U") == "ABORTED"
    assert bank.decided("P") == "COMMITTED"


def test_a_prepared_one_that_is_big_is_staged_and_waits_for_no_prepared_one() -> None:
    """Its writes may be unknown to a successor: another prepared one's locks don't hold it."""
    bank = Both()
    bank.begun("P", None)
    bank.reads("P", b"a")
    bank.writes("P", A, b"x", size=BIG)
    assert bank.ask_end("P", None, prepare=PREPARE) == "PREPARED"
    assert bank.prepared("Q", b"q", wrote=(b"y",)) == "PREPARED"
    for place, runs in list(bank.journals.items()):
        bank.journals[place] = [one._replace(run=one.run._replace(digest=b"")) for one in runs]
    bank.lead(keep_table=False)
    bank.wait(60)
    bank.ask("decide", r.Commit(bank.token("P"), (), None, None, 0))
    for _ in range(4):
        bank.wait(60)
        bank.grow()
    assert bank.carry("P") == "COMMITTED"
    assert bank.decided("Q") == "COMMITTED"


# -- prepared, with positions ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [None, True, False])
@pytest.mark.parametrize("commits", [True, False])
def test_its_tasks_are_in_progress_until_it_ends(
    kind: str, lead: bool | None, commits: bool
) -> None:
    bank = Both()
    if kind == "one command":
        assert bank.prepared("P", b"k", wrote=(b"x",), who="a") == "PREPARED"
    else:
        bank.begun("P")
        bank.reads("P", b"k")
        bank.writes("P", B, b"x", size=10)
        assert bank.ask_end("P", prepare=PREPARE) == "PREPARED"
    assert bank.task() == "1 a 0:- !P"
    if lead is not None:
        bank.lead(keep_table=lead)
    assert bank.shot("X", (A, b"z")) == "NotReady"
    assert bank.ask("reset", r.ResetProcessor(NAME, 0, INPUTS, False)) == "ReservedByPrepared"
    assert bank.ask("delete", r.DeleteProcessor(NAME, 0)) == "ReservedByPrepared"
    bank.take("b")
    assert bank.result.processors[0].tasks[0].in_progress == bank.id("P"), (
        "the taker is told to wait"
    )
    assert bank.task() == "2 b 0:- !P"
    assert bank.decided("P", commits=commits) == ("COMMITTED" if commits else "ABORTED")
    assert bank.task() == ("2 b 1:11" if commits else "2 b 0:-"), "it ends as its database did"
    assert bank.shot("Y", (A, b"z"), who="b", sequence=2 if commits else 1) == "COMMITTED"


@pytest.mark.parametrize("kind", KINDS)
def test_a_fenced_worker_prepares_nothing(kind: str) -> None:
    bank = Both()
    bank.begun("P")
    bank.take("b")
    if kind == "one command":
        assert bank.prepared("Q", wrote=(b"x",), who="a") == "OwnershipLost"
    else:
        assert bank.ask_end("P", prepare=PREPARE) == "OwnershipLost"
        assert Big.row(bank, "P").state == "ABORTED"


def test_what_was_prepared_is_what_is_committed() -> None:
    bank = Both()
    bank.begun("P")
    assert bank.ask_end("P", prepare=PREPARE) == "PREPARED"
    assert bank.ask_end("P", prepare=PREPARE) == "PREPARED", "repeated"
    assert bank.ask_end("P", prepare=PREPARE, sequence=2) == "InvalidArgument"
    assert bank.ask_end("P", sequence=2) == "InvalidArgument"
    assert bank.ask_end("P", None, prepare=PREPARE) == "InvalidArgument"
    assert bank.ask_end("P") == "COMMITTED", "the coordinator may name the positions"
    assert bank.ask_end("P", None) == "COMMITTED", "… or not"
    assert bank.ask_end("P", prepare=PREPARE) == "COMMITTED"
    assert bank.ask_end("P", sequence=2) == "AlreadyCommitted"
    assert bank.prepared("Q", who="a", sequence=2) == "PREPARED", "without an event"
    assert bank.decided("Q") == "COMMITTED"
    assert bank.prepared("Q", who="a", sequence=2) == "COMMITTED"
    assert bank.prepared("Q", who="a", sequence=3) == "InvalidArgument"
    assert bank.task() == "1 a 2:11"


def test_an_operator_forces_its_end_and_a_lost_stream_is_left_out() -> None:
    bank = Both()
    by = sha256(b"l" * 32).digest()
    assert bank.prepared("P", b"k", wrote=(b"x",), who="a", by=by) == "PREPARED"
    assert bank.ask("force", r.Force(bank.id("P"), "", False)).startswith("P ABORTED")
    assert (bank.task(), bank.state.locks.count) == ("1 a 0:-", 0)
    assert bank.prepared("Q", b"k", wrote=(b"x",), who="a", by=by) == "PREPARED"
    give_up(bank, B)
    assert bank.ask("force", r.Force(bank.id("Q"), "", True)).startswith(
        "Q COMMITTED 0, 1 left out"
    )
    assert (bank.task(), bank.state.locks.count) == ("1 a 1:11", 0)


def test_random_prepared_ones_all_commit_and_no_read_is_broken() -> None:
    """Readers and writers of few rows, prepared in both ways, staged, plain; takeovers between all steps."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    keys = [b"%d" % i for i in range(5)]
    ended: list[str] = []
    for _ in range(12):
        bank = Both()
        plans: dict[str, tuple[list[bytes], list[bytes]]] = {}
        read_at: dict[str, int] = {}
        for n in range(6):
            label = f"X{n}"
            read = draw.sample(keys, draw.randrange(3))
            wrote = draw.sample(keys, draw.choice((1, 2)))
            plans[label] = read, wrote
            read_at[label] = bank.told()[0]
            how = draw.choice(("one command", "journals", "staged", "journal"))
            if how == "one command":
                if bank.prepared(label, *read, wrote=tuple(wrote), table=A) != "PREPARED":
                    plans.pop(label)
                continue
            bank.new(label)
            if read:
                bank.reads(label, *read)
                read_at[label] = bank.told()[0]
            for key in wrote:
                bank.writes(label, A, key, size=BIG if how == "staged" else 10)
            if how == "journals":
                bank.ask_end(label, None, prepare=PREPARE)
            else:
                bank.commits(label)
            if draw.random() < 0.2:
                bank.lead(keep_table=draw.random() < 0.5)
        for _ in range(60):
            bank.grow()
            for label in list(plans):
                state = Big.row(bank, label).state
                if state == "PREPARED" and draw.random() < 0.3:
                    bank.ask(f"decide {label}", r.Commit(bank.token(label), (), None, None, 0))
                elif state == "FINALIZE_IN_PROGRESS" and draw.random() < 0.5:
                    bank.carry(label)
            bank.wait(300)
        states = {label: Big.row(bank, label).state for label in plans}
        # One whose prepare was refused is still open.
        assert set(states.values()) <= {"COMMITTED", "ABORTED", "OPEN"}, f"seed {seed}: {states}"
        times = {label: Big.row(bank, label).commit_timestamp for label in plans}
        for label, (read, _) in plans.items():
            for other, (_, wrote) in plans.items():
                if states[label] == states[other] == "COMMITTED" and label != other:
                    between = read_at[label] < times[other] < times[label]
                    assert not (between and set(read) & set(wrote)), f"seed {seed}: {label} {other}"
        ended += states.values()
    assert ended.count("COMMITTED") > 15
