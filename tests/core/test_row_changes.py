"""Changes to rows that commute: what becomes of a row, when the client has to revalidate, what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from anabranch.core.decisions.decide import decide
from anabranch.core.decisions.turn import Turn
from anabranch.core.locks import numbers, recent_writes
from anabranch.core.locks.table_writes import Keys
from anabranch.errors import NotANumber, NumberOverflow
from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from tests.core.harness import event
from tests.core.test_one_commit import Both
from tests.core.test_registered_locks import Long
from tests.core.test_table_locks import PLAIN, A, B, told

K = b"k"
MOST = limits.MOST_NUMBER
LEAST = limits.LEAST_NUMBER


class Counters(Long):
    """Tables of numbers. ``rows``: as a replica has them, from what the rounds wrote."""

    def __init__(self, **changes: Any) -> None:
        self.rows: dict[tuple[str, bytes], bytes | None] = {}
        super().__init__(**changes)

    def close(self, turn: Turn, *more: Any) -> str:
        said = super().close(turn, *more)
        for commit in turn.round.commits:
            for part in commit.parts:
                for each in part.events:
                    self.rows[commit.stream, each.key or b""] = each.value
        return said

    def mark(self, *tables: str) -> tuple[r.TableLocks, ...]:
        """Each table, through now."""
        since, last = self.told()
        return tuple(r.TableLocks(table, since, last[table], (), ()) for table in tables or (A, B))

    def change(
        self,
        kind: r.ChangeKind = "ADD",
        number: int = 1,
        key: bytes = K,
        table: str = A,
        **how: Any,
    ) -> r.RowChange:
        """A change on the row as it is now, unless ``base`` is another one."""
        base = how["base"] if "base" in how else self.rows.get((table, key))
        return r.RowChange(table, key, kind, number, base)

    def shot(self, *changes: r.RowChange, **how: Any) -> r.OneShot:
        self.numbers += 1
        name = how.pop("label", f"shot {self.numbers}")
        locks = how.pop("locks", None)
        return r.OneShot(
            self.id(name),
            "nyc",
            how.pop("name", None),
            how.pop("events", ()),
            how.pop("consumed", None),
            self.mark() if locks is None else locks,
            changes,
        )

    def add(self, number: int = 1, key: bytes = K, **how: Any) -> str:
        """Add to the row as it is now, or on what ``stale`` was."""
        base, locks = how.pop("stale", (self.rows.get((A, key)), None))
        command = self.shot(self.change("ADD", number, key, base=base), locks=locks, **how)
        self.ask("add", command)
        return told(self.result)

    def stale(self, key: bytes = K) -> dict[str, Any]:
        """What a replica knows of a row now: for adds to come."""
        return {"stale": (self.rows.get((A, key)), self.mark())}

    def value(self, key: bytes = K, table: str = A) -> bytes | None:
        return self.rows.get((table, key))


# -- numbers ---------------------------------------------------------------------------------------

CHANGES: list[tuple[str, r.ChangeKind, int | None, int, int]] = [
    ("added to nothing", "ADD", None, 5, 5),
    ("added", "ADD", 3, 5, 8),
    ("taken away", "ADD", 3, -5, -2),
    ("up to the most", "ADD", MOST - 1, 1, MOST),
    ("down to the least", "ADD", LEAST + 1, -1, LEAST),
    ("the least to the most", "ADD", MOST, LEAST, -1),
    ("the least of nothing", "MIN", None, 5, 5),
    ("lower", "MIN", 7, 5, 5),
    ("not lower", "MIN", 5, 7, 5),
    ("the most of nothing", "MAX", None, -5, -5),
    ("higher", "MAX", 5, 7, 7),
    ("not higher", "MAX", 7, 5, 7),
]


@pytest.mark.parametrize(("kind", "before", "number", "then"), [case[1:] for case in CHANGES])
def test_what_becomes_of_a_row(kind: r.ChangeKind, before: Any, number: int, then: int) -> None:
    """By the client's row, and by the number that the leader keeps."""
    bank = Counters()
    base = None if before is None else b"%d" % before
    for key in (K, b"l"):
        bank.ask("change", bank.shot(bank.change(kind, number, key, base=base)))
        assert bank.value(key) == b"%d" % then == numbers_text(kind, before, number)
        assert bank.result.committed == 1
    if before is not None:
        bank.ask("set", bank.shot(bank.change("ADD", before, b"m", base=None)))
        bank.ask("change", bank.shot(bank.change(kind, number, b"m", base=b"wrong")))
        assert bank.value(b"m") == b"%d" % then


def numbers_text(kind: r.ChangeKind, before: int | None, number: int) -> bytes:
    return b"%d" % numbers.changed(kind, before, number)


@pytest.mark.parametrize("number", [0, 1, -1, 10, MOST, LEAST])
def test_a_row_that_a_change_wrote_is_a_number(number: int) -> None:
    assert numbers.number_in(b"%d" % number) == number


@pytest.mark.parametrize(
    "value",
    [
        b"", b" ", b"5 ", b" 5", b"5\n", b"+5", b"05", b"00", b"-0", b"--5", b"-", b"5.0", b"1e3", b"0x5", b"1_000",
        b"five", b"null", b'"5"', "\u0665".encode(), b"\x05", b"5\0", b"%d" % (MOST + 1), b"%d" % (LEAST - 1),
        b"9" * 30,
    ],
)  # fmt: skip
def test_what_is_no_number(value: bytes) -> None:
    with pytest.raises(NotANumber, match="64 bits"):
        numbers.number_in(value)
    bank = Counters()
    assert bank.add(stale=(value, bank.mark())) == "NotANumber"
    assert bank.value() is None


@pytest.mark.parametrize(("before", "number"), [(MOST, 1), (LEAST, -1), (LEAST, LEAST)])
def test_a_sum_of_more_than_64_bits(before: int, number: int) -> None:
    with pytest.raises(NumberOverflow):
        numbers.changed("ADD", before, number)
    bank = Counters()
    assert bank.add(before) == "COMMITTED"
    command = bank.shot(bank.change("ADD", 1, b"other"), bank.change("ADD", number))
    bank.ask("add", command)
    assert told(bank.result) == "NumberOverflow"
    assert (bank.value(), bank.value(b"other")) == (b"%d" % before, None), "all or nothing"
    assert bank.add(0) == "COMMITTED", "the leader has the number still"


# -- which number ----------------------------------------------------------------------------------


def nothing(_: Counters) -> None:
    pass


def another_row(bank: Counters) -> None:
    assert bank.put((A, b"other")) == "COMMITTED"


def put(bank: Counters) -> None:
    assert bank.put((A, b"other"), (A, K)) == "COMMITTED"


def delete(bank: Counters) -> None:
    gone = r.Event(A, -1, K, None, (), -1)
    bank.ask("delete", r.OneShot(bank.id("delete"), "nyc", None, (gone,)))


def by_a_journal(bank: Counters) -> None:
    bank.commit_to(A, K)
    bank.rows[A, K] = b"v"


def another_by_a_journal(bank: Counters) -> None:
    bank.commit_to(A, b"other")


def unknown_keys(bank: Counters) -> None:
    bank.begin("U")
    bank.touch("U", A)
    bank.write("U", "u", A)
    bank.finish("U", "u")
    assert bank.end("U") == "COMMITTED"


def many_keys(bank: Counters) -> None:
    others = [b"%05d" % number for number in range(5_000)]
    bank.new_id("M")
    bank.begin("M")
    bank.touch("M", A)
    bank.write("M", "m", A, digest=Keys.of([*others, K]).to_bytes())
    bank.finish("M", "m")
    assert bank.end("M") == "COMMITTED"


def takeover(bank: Counters) -> None:
    bank.lead()


def made_again(bank: Counters) -> None:
    bank.abort("T")
    bank.delete(A)
    bank.make(A, table="true")
    bank.rows.clear()


def small_window(bank: Counters) -> None:
    bank.memory.recent_writes.limit = 1_000
    for number in range(20):
        assert bank.put((B, b"%d" % number)) == "COMMITTED"


def few_numbers(bank: Counters) -> None:
    recent = bank.memory.recent_writes
    recent.numbers_size += recent_writes.NUMBERS_BYTES - 2 * 250
    assert bank.add(1, b"x") == "COMMITTED"
    assert bank.add(1, b"y") == "COMMITTED"
    recent.numbers_size -= recent_writes.NUMBERS_BYTES - 2 * 250


# What happens after an add, the answer to a second one whose replica has seen neither, and the row after a third
# one whose replica has seen everything.
MEANWHILE: list[tuple[Callable[[Counters], None], str, Any]] = [
    (nothing, "COMMITTED", b"111"),
    (another_row, "COMMITTED", b"111"),
    (another_by_a_journal, "COMMITTED", b"111"),
    (put, "Revalidate", "NotANumber"),  # `put` writes the row "v"
    (delete, "Revalidate", b"100"),
    (by_a_journal, "Revalidate", "NotANumber"),
    (unknown_keys, "Revalidate", b"101"),
    (many_keys, "Revalidate", b"101"),
    (takeover, "Revalidate", b"101"),
    (made_again, "Revalidate", b"100"),
    (small_window, "Revalidate", b"101"),
    (few_numbers, "Revalidate", b"101"),
]


@pytest.mark.parametrize(("meanwhile", "second", "third"), MEANWHILE)
def test_the_number_is_that_just_below_the_commit(
    meanwhile: Callable[[Counters], None], second: str, third: Any
) -> None:
    bank = Counters()
    stale = bank.stale()
    assert bank.add(1, **stale) == "COMMITTED"
    assert bank.value() == b"1"
    meanwhile(bank)
    before = bank.value()
    assert bank.add(10, **stale) == second
    if second == "Revalidate":
        assert bank.value() == before, "nothing is written"
        assert {each.table for each in bank.result.tables} == {A, B}
    answer = bank.add(100)
    if isinstance(third, bytes):
        assert (answer, bank.value()) == ("COMMITTED", third)
    else:
        assert (answer, bank.value()) == (third, before)


def test_one_row_many_times_in_a_round() -> None:
    """In order, each over the one before; a write in between makes the rest revalidate."""
    bank = Counters()
    shots = [bank.shot(bank.change("ADD", 10**n, base=None)) for n in range(3)]
    bank.turn(*((f"add {n}", shot) for n, shot in enumerate(shots)))
    assert [told(result) for _, result in bank.said] == ["COMMITTED"] * 3
    assert bank.value() == b"111"
    between = r.OneShot(bank.id("put"), "nyc", None, (event(A, K, b"5"),))
    more = [bank.shot(bank.change("ADD", 10**n, base=None)) for n in range(3, 5)]
    bank.turn(("add", more[0]), ("put", between), ("again", more[1]))
    assert [told(result) for _, result in bank.said] == ["COMMITTED", "COMMITTED", "Revalidate"]
    assert bank.value() == b"5"
    assert bank.add(2) == "COMMITTED"
    assert bank.value() == b"7"


def overlapped(bank: Counters, former: Turn | None, command: Any) -> Turn:
    """A turn that decides one command while the round before is being written."""
    now = (bank.wall_us, bank.now_ms)
    turn = Turn(bank.state, bank.index, bank.settings, bank.memory, *now, former)
    decide(turn, command, bank.asker("overlapped"))
    return turn


def test_rounds_that_overlap() -> None:
    """The next round adds to what the round under way makes of the row."""
    bank = Counters()
    marks = bank.mark()
    first = overlapped(bank, None, bank.shot(bank.change(number=1, base=None), locks=marks))
    second = overlapped(bank, first, bank.shot(bank.change(number=10, base=None), locks=marks))
    bank.close(first)
    second.follows()
    third = bank.shot(bank.change(number=100, base=None), locks=marks)
    decide(second, third, bank.asker("third"))
    bank.close(second)
    assert bank.value() == b"111"
    assert bank.add(1000, stale=(None, marks)) == "COMMITTED"
    assert bank.value() == b"1111"


def test_a_round_that_is_dropped_leaves_no_number() -> None:
    bank = Counters()
    marks = bank.mark()
    assert bank.add(1, stale=(None, marks)) == "COMMITTED"
    kept = dict(bank.memory.recent_writes.numbers)
    turn = bank.new_turn()
    decide(turn, bank.shot(bank.change(number=10)), bank.asker("dropped"))
    assert told(turn.round.replies[0][1]) == "COMMITTED"
    assert bank.memory.recent_writes.numbers == kept


def test_a_repeated_command_changes_nothing_more() -> None:
    bank = Counters()
    command = bank.shot(bank.change(), bank.change(key=b"l"), events=(event(PLAIN),))
    for _ in range(3):
        bank.ask("add", command)
        assert (told(bank.result), bank.result.committed) == ("COMMITTED", 3)
    assert (bank.value(), bank.value(b"l")) == (b"1", b"1")
    bank.lead()
    bank.ask("add", command)
    assert told(bank.result) == "COMMITTED"
    assert bank.value() == b"1"


def test_a_name_is_answered_first() -> None:
    bank = Counters()
    assert bank.add(1, name="once") == "COMMITTED"
    bank.lead()  # so the leader keeps no number
    stale = (b"no number", bank.mark())
    assert bank.add(1, name="once", stale=stale) == "COMMITTED"
    assert bank.result.txn_id == bank.id("shot 1")
    assert bank.value() == b"1"


# -- with locks ------------------------------------------------------------------------------------


def test_a_change_breaks_the_locks_of_others() -> None:
    bank = Counters()
    lock = bank.lock(A, K)
    bank.locked(K)
    bank.wrote(b"x")
    assert bank.add() == "COMMITTED"
    assert bank.put((B, b"x"), locks=(lock,)) == "Revalidate"
    assert bank.row("T").state in ("ABORTED", "ABORT_IN_PROGRESS")


def test_a_row_may_be_locked_and_changed() -> None:
    """Then the transaction waits for no other, but a change by another one breaks the lock."""
    bank = Counters()
    lock = bank.lock(A, K)
    (_, other) = bank.mark()
    assert bank.add(1, stale=(None, (lock, other))) == "COMMITTED"
    assert bank.add(1, stale=(None, (lock, other))) == "Revalidate"
    assert bank.value() == b"1"


def test_a_change_and_positions_are_one_commit() -> None:
    bank = Both()

    def shot(label: str, who: str, sequence: int) -> str:
        if label not in bank.ids:
            bank.marked(label)
        consumed, marks = bank.consumed(who, sequence, 10 + sequence), (bank.lock(A),)
        change = r.RowChange(A, K, "ADD", 1, None)
        bank.ask(label, r.OneShot(bank.id(label), "nyc", None, (), consumed, marks, (change,)))
        return told(bank.result)

    assert shot("X", "a", 1) == shot("X", "a", 1) == "COMMITTED"
    assert (bank.result.committed, bank.task()) == (1, "1 a 1:11")
    bank.take("b")
    assert shot("Y", "a", 2) == "OwnershipLost"
    assert shot("Y", "b", 2) == "COMMITTED"
    written = [
        event.value
        for round_ in bank.rounds
        for commit in round_.commits
        for part in commit.parts
        for event in part.events
    ]
    assert written == [b"1", b"2"]


# -- what is refused -------------------------------------------------------------------------------

Make = Callable[[Counters], r.OneShot]
REFUSED: dict[str, tuple[Make, str, str]] = {
    "a row twice": (lambda b: b.shot(b.change(), b.change("MAX")), "InvalidArgument", "each row once"),
    "changed and written": (
        lambda b: b.shot(b.change(), events=(event(A, b"l"), event(A, K))), "InvalidArgument", "do one of both",
    ),
    "65 rows": (
        lambda b: b.shot(*(b.change(key=b"%d" % n) for n in range(65))), "InvalidArgument", "64 are allowed",
    ),
    "no mark of the table": (lambda b: b.shot(b.change(), locks=b.mark(B)), "InvalidArgument", "is missing"),
    "a stream": (
        lambda b: b.shot(b.change(table=PLAIN), locks=(b.mark(A)[0]._replace(table=PLAIN),)),
        "InvalidArgument", "make one with `create_table`",
    ),
    "no table at all": (
        lambda b: b.shot(b.change(table="nyc/none"), locks=(b.mark(A)[0]._replace(table="nyc/none"),)),
        "UnknownStream", "",
    ),
    "no key": (lambda b: b.shot(b.change(key=b"")), "InvalidArgument", "is not empty"),
    "a big key": (lambda b: b.shot(b.change(key=b"k" * 8193)), "InvalidArgument", "8,192 are allowed"),
    "a mark of a time to come": (
        lambda b: b.shot(b.change(), locks=tuple(m._replace(since=MOST) for m in b.mark())),
        "InvalidArgument", "a controller's reply",
    ),
    "no number": (lambda b: b.shot(b.change(base=b"five")), "NotANumber", "nyc/a b'k'"),
    "an overflow": (lambda b: b.shot(b.change(number=MOST, base=b"1")), "NumberOverflow", "nyc/a b'k'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_refusals(case: tuple[Make, str, str]) -> None:
    make, code, text = case
    bank = Counters()
    bank.ask("change", make(bank))
    assert told(bank.result) == code
    assert text in bank.message
    assert bank.rows == {}


def test_a_lane_needs_the_rights_to_write_and_to_read_times() -> None:
    bank = Counters()
    command = bank.shot(bank.change())
    for lane, rights in (("reader", 8), ("writer", 4)):
        bank.grant(lane, "nyc/*", rights)
        with bank.by(lane):
            bank.ask("change", command)
        assert told(bank.result) == "NotAuthorized"
    assert bank.rows == {}


# -- all together ----------------------------------------------------------------------------------


KINDS: tuple[r.ChangeKind, ...] = ("ADD", "ADD", "MIN", "MAX")


def _row(number: int | None) -> bytes | None:
    return None if number is None else b"%d" % number


def test_random_histories() -> None:
    """Replicas that lag, adds, writes, deletions, rounds of several, takeovers: each number is right."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    bank = Counters()
    keys = [b"%d" % number for number in range(4)]
    truth: dict[bytes, int | None] = dict.fromkeys(keys)
    known = [(bank.mark(), dict(truth))]
    committed = revalidated = 0
    for _ in range(500):
        known = [*known[-3:], (bank.mark(), dict(truth))]
        if draw.random() < 0.02:
            bank.lead(keep_table=draw.random() < 0.5)
        if draw.random() < 0.02:
            bank.memory.recent_writes.limit = draw.choice((1_000, 1 << 27))
        shots: list[r.OneShot] = []
        made: list[tuple[bytes, r.ChangeKind | None, int | None]] = []
        for _ in range(draw.randint(1, 3)):
            marks, rows = draw.choice(known)
            key, number = draw.choice(keys), draw.randint(-5, 5)
            if draw.random() < 0.2:
                put = draw.choice((None, number))
                shots.append(bank.shot(events=(r.Event(A, -1, key, _row(put), (), -1),), locks=()))
                made.append((key, None, put))
                continue
            kind = draw.choice(KINDS)
            changes = bank.change(kind, number, key, base=_row(rows[key]))
            shots.append(bank.shot(changes, locks=marks))
            made.append((key, kind, number))
        bank.turn(*((str(n), shot) for n, shot in enumerate(shots)))
        for (_, result), (key, done, then) in zip(bank.said, made, strict=True):
            if told(result) == "Revalidate":
                revalidated += 1
                continue
            assert told(result) == "COMMITTED", f"seed {seed}"
            committed += 1
            truth[key] = then if done is None else numbers.changed(done, truth[key], then or 0)
        found = {key: bank.rows.get((A, key)) for key in keys}
        assert found == {key: _row(number) for key, number in truth.items()}, f"seed {seed}"
    assert min(committed / 100, revalidated / 20) > 1, (committed, revalidated)
