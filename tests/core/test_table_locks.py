"""Locks on tables, judged with one-shots: what holds, what has to be checked again, what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from anabranch.core.command_events import CommandEvents, SomeEvents
from anabranch.core.decisions.streams import stream_forgotten
from anabranch.core.locks import table_writes
from anabranch.core.locks.recent_writes import RecentWrites
from anabranch.core.locks.table_writes import FEW_KEYS, Keys, Write, fingerprint, write_of
from anabranch.core.round import Part, StreamCommit
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas import records as r
from tests.core.harness import World

A, B, PLAIN = "nyc/a", "nyc/b", "nyc/plain"


class Bank(World):
    """Two tables and a stream; a replica that is never behind unless a test says so."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(**changes)
        self.find_scope()
        for name in (A, B):
            self.make(name, table="true")
        self.make(PLAIN)
        self.numbers = 0

    def make(self, stream: str, **settings: str) -> None:
        self.create(stream, 2, **settings)
        self.created(stream, 0, 0)

    def delete(self, stream: str) -> None:
        self.ask("delete", r.DeleteStream(stream), lane="admin")
        turn = self.new_turn()
        stream_forgotten(turn, stream)
        self.close(turn)

    def put(self, *rows: tuple[str, bytes], locks: tuple[r.TableLocks, ...] = ()) -> str:
        """A one-shot of these rows: COMMITTED, Revalidate or what it is refused with."""
        self.numbers += 1
        events = tuple(r.Event(table, -1, key, b"v", (), -1) for table, key in rows)
        shot = r.OneShot(self.id(f"shot {self.numbers}"), "nyc", None, events, None, locks)
        self.ask(f"shot {self.numbers}", shot)
        return told(self.result)

    def told(self) -> tuple[int, dict[str, int]]:
        """A time, and the newest commits of the tables at it."""
        self.ask("now", r.SafeTime("nyc", None, (A, B)))
        return self.result.timestamp, {at.table: at.last for at in self.result.tables}

    def lock(self, table: str, *keys: bytes, span: Any = None) -> r.TableLocks:
        """A lock since now."""
        since, last = self.told()
        ranges = () if span is None else (r.LockedRange(*span),)
        points = tuple(sorted(map(fingerprint, keys)))
        return r.TableLocks(table, since, last[table], points, ranges)


def told(result: Any) -> str:
    if isinstance(result, r.Refusal):
        return result.code
    return result.state if isinstance(result, r.Outcome) else type(result).__name__


@pytest.mark.parametrize(
    ("points", "span", "written", "found"),
    [
        ((b"k",), None, b"k", "Revalidate"),
        ((b"k",), None, b"l", "COMMITTED"),
        ((b"absent",), None, b"absent", "Revalidate"),
        ((), (b"a", b"m"), b"k", "Revalidate"),
        ((), (b"a", b"k"), b"k", "COMMITTED"),
        ((), (b"k", None), b"k", "Revalidate"),
        ((), (b"l", None), b"k", "COMMITTED"),
        ((), (b"", None), b"k", "Revalidate"),
    ],
)
def test_a_lock_is_validated_again_when_it_may_be_broken(
    points: tuple[bytes, ...], span: Any, written: bytes, found: str
) -> None:
    bank = Bank()
    assert bank.put((A, b"k")) == "COMMITTED"
    lock = bank.lock(A, *points, span=span)
    assert bank.put((A, b"0"), locks=(lock,)) == "COMMITTED", "own writes break nothing"
    assert bank.put((A, written)) == "COMMITTED"
    before = len(bank.log)
    assert bank.put((B, b"x"), locks=(lock,)) == found
    if found == "Revalidate":
        assert bank.result.tables[0].last == bank.state.tables[A].last
        assert {key[16] for key, _ in bank.log[-1]} == {2}, "only that the round was led is logged"
        assert len(bank.log) == before + 1


def test_the_second_of_one_round_sees_what_the_first_writes() -> None:
    bank = Bank()
    lock = bank.lock(A, b"k")
    shots = [
        r.OneShot(
            bank.id(str(i)), "nyc", None, (r.Event(A, -1, b"k", b"v", (), -1),), None, (lock,)
        )
        for i in range(2)
    ]
    bank.turn(*((f"shot {i}", shot) for i, shot in enumerate(shots)))
    assert [told(result) for _, result in bank.said] == ["COMMITTED", "Revalidate"]
    bank.ask("again", shots[0])
    assert told(bank.result) == "COMMITTED", "a repeated one is answered, not judged"


def test_a_new_leader_is_not_sure_of_what_it_did_not_see() -> None:
    bank = Bank()
    idle, lock = bank.lock(B, b"k"), bank.lock(A, b"k")
    assert bank.put((A, b"l")) == "COMMITTED"
    bank.lead()
    assert bank.put((PLAIN, b"x"), locks=(idle,)) == "COMMITTED", "`last` is in a row"
    assert bank.put((PLAIN, b"x"), locks=(lock,)) == "Revalidate"
    assert bank.put((PLAIN, b"x"), locks=(bank.lock(A, b"k"),)) == "COMMITTED"
    bank.lead(keep_table=False)
    assert bank.put((PLAIN, b"x"), locks=(bank.lock(B, b"k"),)) == "COMMITTED"


def test_last_proves_that_the_replica_saw_it() -> None:
    """A broker that was cut off told the replica an old end: it is complete by its own word alone."""
    bank = Bank()
    stale = bank.lock(A, b"k")
    assert bank.put((A, b"k")) == "COMMITTED"
    since = bank.told()[0]
    assert bank.put((B, b"x"), locks=(stale._replace(since=since),)) == "Revalidate"
    assert bank.put((A, b"other")) == "COMMITTED"
    assert bank.put((B, b"x"), locks=(stale._replace(since=since),)) == "Revalidate"


def test_a_commit_whose_keys_are_not_known_may_have_written_any() -> None:
    bank = Bank()
    lock = bank.lock(A, b"k")
    bank.begin("T")
    bank.touch("T", A)
    bank.write("T", "w", A)
    bank.finish("T", "w")
    bank.commit("T")
    bank.wait(1_000)
    assert bank.row("T").state == "COMMITTED"
    assert bank.put((PLAIN, b"x"), locks=(lock,)) == "Revalidate"
    assert bank.put((PLAIN, b"x"), locks=(bank.lock(A, b"k"),)) == "COMMITTED"


def test_digests_say_what_a_naive_set_says() -> None:
    """Points are those of all keys; a range is touched if a key is in it, or lies between known bounds."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    alphabet = [b"", *(b"%03d" % i for i in range(200)), b"2" * 70_000]
    for _ in range(200):
        runs = [draw.sample(alphabet, draw.choice((0, 1, 5, 40, 90))) for _ in range(3)]
        digests = [Keys.of([*run, None, *run[:1]]).to_bytes() for run in runs]
        events = tuple(r.Event(A, -1, key, b"v", (), -1) for key in draw.sample(alphabet, 2))
        own = SomeEvents(CommandEvents.of(events), range(len(events)))
        commit = StreamCommit(NO_TXN, A, 0, 7, (Part(0, 0, events=own),))
        keys = sorted({key for run in runs for key in run} | {event.key or b"" for event in events})
        write = write_of(commit, digests)
        assert list(write.points or ()) == sorted(map(fingerprint, keys)), f"seed {seed}"
        exact = len(keys) <= FEW_KEYS
        low, high = sorted(draw.sample(alphabet, 2))
        inside = any(low <= key < high for key in keys)
        if not exact:
            inside = keys[0] < high and keys[-1] >= low
        assert write.touches(r.LockedRange(low, high)) == inside, f"seed {seed}"
        ends = sorted(draw.sample(alphabet, 12))
        spans = tuple(r.LockedRange(*ends[at : at + 2]) for at in range(0, 12, 2))
        spans = (*spans[:-1], r.LockedRange(ends[-2], draw.choice([None, ends[-1]])))
        wanted = any(map(write.touches, spans))
        assert write.touches_any(spans, [span.low for span in spans]) == wanted, f"seed {seed}"
        assert write_of(commit, [*digests, b""]).points is None


def test_the_window_forgets_the_oldest_and_says_so() -> None:
    bank = Bank()
    bank.memory.recent_writes.limit = 20_000
    first = bank.lock(A, b"k")
    for i in range(100):
        assert bank.put((A, b"%d" % i)) == "COMMITTED"
    assert bank.memory.recent_writes.size <= 20_000
    recent = bank.lock(A, b"k")
    assert bank.put((A, b"100")) == "COMMITTED"
    assert bank.put((PLAIN, b"x"), locks=(first,)) == "Revalidate"
    assert bank.put((PLAIN, b"x"), locks=(recent,)) == "COMMITTED"


def test_the_window_is_what_a_plain_list_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that are written or dropped, small, big and unknown writes, a limit: held, unless it was written."""
    monkeypatch.setattr(table_writes, "FEW_POINTS", 4)
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    keys = [b"%d" % i for i in range(12)]
    for _ in range(150):
        window = RecentWrites(reach=10, limit=draw.choice([600, 1_500, 4_000]))
        commits: list[tuple[int, list[bytes] | None]] = [
            (10, [])
        ]  # timestamps, and keys where known
        for _ in range(40):
            draft, before = window.draft(), len(commits)
            for _ in range(draw.randint(0, 3)):
                last = commits[-1][0]
                written = draw.sample(keys, draw.choice([0, 1, 2, 3, 6]))
                write = Write.of(0, written).at(last + 1)
                if len(written) > table_writes.FEW_POINTS:
                    write = Write(last + 1, *Keys.of(written))
                    assert write.is_packed, f"seed {seed}"
                unknown = draw.random() < 0.07
                draft.add(A, Write(last + 1, None, ()) if unknown else write, last)
                commits.append((last + 1, None if unknown else written))
                since = draw.randint(max(10, last - 12), last + 1)
                newest = max(at for at, _ in commits if at <= since)
                read = draw.sample(keys, draw.randint(0, 2))
                points = tuple(sorted(map(fingerprint, read)))
                held = draft.holds(r.TableLocks(A, since, newest, points, ()), commits[-1][0])
                above = [some for at, some in commits if at > since]
                broken = any(some is None or {*read} & {*some} for some in above)
                assert held == (not broken and (since >= window.reach or not above)), f"seed {seed}"
            if draw.random() < 0.85:
                window.follow(draft)
            else:
                del commits[before:]
            kept = window.table(A)
            assert window.size == sum(w.size for w in (kept.writes if kept else ())), f"seed {seed}"
            assert window.size <= window.limit, f"seed {seed}"


def test_a_big_commit_is_compared_by_its_lowest_and_highest_key() -> None:
    bank = Bank()
    low, high = bank.lock(A, span=(b"", b"b")), bank.lock(A, span=(b"k", b"l"))
    bank.put(*((A, b"k%03d" % i) for i in range(FEW_KEYS + 1)))
    assert bank.put((PLAIN, b"x"), locks=(low,)) == "COMMITTED"
    assert bank.put((PLAIN, b"x"), locks=(high,)) == "Revalidate"


def test_a_lock_needs_the_right_to_read_its_table() -> None:
    bank = Bank()
    lock = bank.lock(A, b"k")
    bank.grant("writer", "nyc/*", 4)
    with bank.by("writer"):
        assert bank.put((A, b"k"), locks=(lock,)) == "NotAuthorized"


def test_a_table_that_is_made_again_is_another_one() -> None:
    bank = Bank()
    lock = bank.lock(A, b"k")
    bank.delete(A)
    assert A not in bank.state.tables
    bank.make(A, table="true")
    assert bank.put((PLAIN, b"x"), locks=(lock,)) == "Revalidate"


def test_random_histories_in_the_order_of_timestamps() -> None:
    """Two lagging replicas, one-shots that read and write, takeovers: each read is what stood just below."""
    seed = random.randrange(1 << 32)
    draw = random.Random(seed)
    bank = Bank()
    keys = [b"%d" % i for i in range(6)]
    versions: dict[bytes, list[int]] = {key: [0] for key in keys}  # timestamps, of table A
    commits = looked = 0
    seen: list[tuple[int, int]] = []  # what replicas were told: (complete through, last)
    for _ in range(400):
        since, last = bank.told()[0], bank.state.tables[A].last
        seen = [*seen[-4:], (since, last)]
        if draw.random() < 0.03:
            bank.lead(keep_table=draw.random() < 0.5)
        complete, its_last = draw.choice(seen)
        read, written = draw.choice(keys), draw.choice(keys)
        snapshot = draw.choice([at for at, _ in seen if at <= complete])
        newest = max(at for at in versions[read] if at <= complete)
        if newest > snapshot:
            continue  # its own replica says that it is broken
        lock = r.TableLocks(A, complete, its_last, (fingerprint(read),), ())
        if draw.random() < 0.3:
            lock = lock._replace(points=(), ranges=(r.LockedRange(read, read + b"\0"),))
        answer = bank.put((A, written), locks=(lock,))
        if answer == "COMMITTED":
            at = bank.result.commit_timestamp
            assert max(versions[read]) <= snapshot, f"seed {seed}: lost update of {read!r}"
            versions[written].append(at)
            commits += 1
        else:
            assert answer == "Revalidate"
            looked += 1
    assert min(commits / 50, looked / 20) > 1, (commits, looked)


def test_a_window_of_nothing_stays_small() -> None:
    windows = RecentWrites()
    draft = windows.draft()
    windows.follow(draft)
    assert (windows.size, windows.reach) == (0, 0)
