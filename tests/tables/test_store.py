"""The store against a naive model: random commits, sweeps, crashes and drops, read at every promised time."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import IllegalState, UnsupportedVersion
from anabranch.tables import store as store_module
from anabranch.tables.indexes import Indexed
from anabranch.tables.store import Rows, Seen, Store
from tests.tables.worlds import Versions, as_it_lies, visible

KEYS = [b"\0", b"\0\0", b"\0\xff", b"a", b"a\0", b"a\0\0b", b"a\xff", b"b", b"\xff", b"\xff\xff"]
TABLES = ("s/one", "s/two")
END = 1 << 62

INDEXES = {TABLES[0]: [Indexed(TABLES[0], "ends", lambda key, row: {row[-1:], key[:1], b"\0"})]}

Commit = tuple[int, bytes, list[tuple[bytes, bytes | None]]]


def versions_of(commits: list[Commit]) -> Versions:
    found: Versions = {}
    for timestamp, _, rows in commits:
        for key, value in dict(rows).items():
            found.setdefault(key, []).append((timestamp, value))
    return found


@pytest.mark.parametrize("identity", [b"2/c", b"\xff"])
def test_a_folder_of_another_form_is_refused(tmp_path: Path, identity: bytes) -> None:
    store = Store(tmp_path / "0", "c", {})
    store.end_loading()
    store._db.put(store_module.IDENTITY, identity)
    store.close()
    for _ in ("first", "again"):
        with pytest.raises(UnsupportedVersion, match="this release knows form 1: upgrade it, or"):
            Store(tmp_path / "0", "c", {})


def test_numbers_of_tables_begin_again_from_one(tmp_path: Path) -> None:
    """Numbers have two bytes, and the last one is for marks. Rows of another table and of a mark stay."""
    store = Store(tmp_path / "0", "c", INDEXES)
    store.end_loading()
    numbers = []
    rows, kept = Rows(), store.begin(TABLES[1], "id")
    rows.add(kept.number, bytes(16), 7, [b"k"], [b"v"])
    rows.marks[TABLES[1]] = kept._replace(position=1, last=7, complete=7)
    store.write(rows)
    store._given = 65_530
    for life in range(5):
        mark = store.begin(TABLES[0], str(life))
        assert store.begin(TABLES[0], str(life)).number == mark.number, "it has no rows"
        numbers.append((mark.number, *mark.indexes.values()))
        rows = Rows()
        indexes = store.indexes(TABLES[0])
        rows.add(mark.number, bytes(16), 8, [b"%d" % life], [b"v"], indexes)
        if life % 2:  # else it is interrupted
            rows.marks[TABLES[0]] = mark._replace(position=1, last=8, complete=8)
        store.write(rows)
        assert list(store.rows(mark.number, b"", None, 9)) == [(b"%d" % life, b"v")]
        assert list(store.lookup(indexes[0][0], b"v")) == [b"%d" % life]
        assert list(store.rows(kept.number, b"", None, 9)) == [(b"k", b"v")]
    assert numbers == [(65_531, 65_532), (65_533, 65_534), (2, 3), (4, 5), (6, 7)]
    store.close()
    store = Store(tmp_path / "0", "c", INDEXES)
    assert {name: mark.number for name, mark in store.marks.items()} == {
        TABLES[0]: 6,
        TABLES[1]: kept.number,
    }
    store.close()


class Lives:
    """Two tables in a folder, and the commits that they should have."""

    def __init__(self, tmp: Path, chance: random.Random) -> None:
        self.tmp, self.chance = tmp, chance
        self.commits: dict[str, list[Commit]] = {table: [] for table in TABLES}
        self.lives = 0
        self.store = Store(tmp / "0", "c", INDEXES)
        self.store.end_loading()
        for table in TABLES:
            self.store.begin(table, "id")

    def commit(self) -> None:
        """The next commit of one or both tables, in one or several writes; or those after a crash again."""
        time = 10 + max((c[0] for commits in self.commits.values() for c in commits), default=0)
        for table in self.chance.choice([TABLES, TABLES[:1], TABLES[1:]]):
            mark = self.store.marks[table]
            known = self.commits[table]
            if mark.position == len(known):
                rows = [
                    (self.chance.choice(KEYS), self.chance.choice([None, b"", b"%d" % time, b"x"]))
                    for _ in range(self.chance.randint(1, 6))
                ]
                known.append((time, time.to_bytes(16, "big"), rows))
            at, txn, rows = known[mark.position]
            cut = self.chance.randrange(len(rows))
            for piece, is_last in ((rows[:cut], False), (rows[cut:], True)):
                batch = Rows()
                indexes = self.store.indexes(table)
                batch.add(
                    mark.number, txn, at, [k for k, _ in piece], [v for _, v in piece], indexes
                )
                if is_last:
                    batch.marks[table] = mark._replace(
                        position=mark.position + 1, last=at, complete=max(at, mark.complete)
                    )
                self.store.write(batch)
                if self.chance.random() < 0.1:
                    self.crash()
                    return

    def sweep(self) -> None:
        table = self.chance.choice(TABLES)
        mark = self.store.marks[table]
        pieces = self.store.sweep(
            table, self.chance.randint(mark.floor, max(mark.floor, mark.last))
        )
        for _ in zip(range(self.chance.choice([1, 2, 99])), pieces, strict=False):
            pass

    def crash(self) -> None:
        """Go on with a copy of the folder as it lies on the disk."""
        self.lives += 1
        if self.chance.random() < 0.5:
            self.store._db.flush()
        copy = as_it_lies(self.store.folder, self.tmp / str(self.lives))
        self.store.close()
        self.store = Store(copy, "c", INDEXES)
        for table in TABLES:
            if table not in self.store.marks:
                self.store.begin(table, "id")

    def drop(self) -> None:
        self.store.begin(self.chance.choice(TABLES), "other")

    def check(self) -> None:
        table = self.chance.choice(TABLES)
        mark = self.store.marks[table]
        laid = self.commits[table][: mark.position]
        versions = versions_of(laid)
        txns = {timestamp: txn for timestamp, txn, _ in laid}
        at = self.chance.randint(mark.floor, max(mark.floor, mark.last))
        rows = visible(versions, at)
        low, high = sorted(
            (self.chance.choice([b"", *KEYS]), self.chance.choice([*KEYS, b"\xff" * 3]))
        )
        end = None if high == b"\xff" * 3 else high
        wanted: dict[bytes, Seen] = {}
        for key in sorted(versions):
            newest, _ = versions[key][-1]
            seen = Seen(key, rows.get(key), newest, txns[newest])
            found = self.store.get(mark.number, key, at)
            assert found.value == seen.value
            if newest > at or key in rows:  # else there may be a deletion, which is swept
                assert found.timestamp > mark.last or found == seen
                wanted[key] = seen
        wanted = {k: seen for k, seen in wanted.items() if low <= k and (end is None or k < end)}
        given = list(self.store.scan(mark.number, low, end, at))
        # The first pieces of a commit may be there, above the last whole one.
        early = {seen.key: seen for seen in given if seen.timestamp > mark.last}
        assert all(seen.value == rows.get(key) for key, seen in early.items())
        assert given == [(wanted | early)[key] for key in sorted(wanted | early)]
        there = [(seen.key, seen.value) for seen in given if seen.value is not None]
        assert list(self.store.rows(mark.number, low, end, at)) == there
        assert self.store.get_many(mark.number, KEYS, at) == rows
        assert {k: self.store.row(mark.number, k, at) for k in KEYS} == dict.fromkeys(KEYS) | rows
        back = self.store.scan(mark.number, low, end, at, reverse=True)
        assert list(back) == given[::-1]
        for prefix, index in self.store.indexes(table):
            by_value: dict[bytes, list[bytes]] = {}
            for key in sorted(rows):
                for value in index.of(key, rows[key]):
                    by_value.setdefault(value, []).append(key)
            for value, keys in by_value.items():
                hints = list(self.store.lookup(prefix, value))
                assert hints == sorted(hints)
                assert set(keys) <= set(hints), value


def test_a_folder_whose_making_was_cut_off_is_made(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "LOG").touch()
    Store(tmp_path / "rows", "c").close()


@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 20))]
)
def test_random_lives(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "PIECE", 3)
    monkeypatch.setattr(store_module, "_BY_STEPS", 1)
    lives = Lives(tmp_path, random.Random(seed))
    for _ in range(120):
        kind = lives.chance.choices(
            [lives.commit, lives.sweep, lives.crash, lives.drop], [60, 20, 3, 1]
        )[0]
        kind()
        lives.check()
    lives.store.close()


def test_entries_go_with_their_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row overwritten often: swept in pieces, with a version of an old value laid down in between."""
    monkeypatch.setattr(store_module, "PIECE", 7)
    index = Indexed("s/a", "row", lambda _, row: row)
    store = Store(tmp_path / "rows", "c", {"s/a": [index]})
    store.end_loading()
    mark = store.begin("s/a", "id")
    ((prefix, _),) = indexes = store.indexes("s/a")

    def lay(at: int, value: bytes | None) -> None:
        rows = Rows()
        rows.add(mark.number, b"t" * 16, at, [b"k"], [value], indexes)
        rows.marks["s/a"] = store.marks["s/a"]._replace(last=at, complete=at)
        store.write(rows)

    def entries() -> list[int]:
        return [n for n in range(60) if list(store.lookup(prefix, b"%d" % n))]

    for number in range(50):
        lay(1 + number, b"%d" % number)
    for at, _ in enumerate(store.sweep("s/a", 50)):
        if at == 2:
            lay(60, b"5")  # above the floor; its entry must not go with the old version's
    assert entries() == [5, 49]
    lay(61, None)
    assert sum(store.sweep("s/a", 70)) == 3 + 2
    assert entries() == []
    store.close()


def test_a_cursor_is_not_read_after_its_block(tmp_path: Path) -> None:
    """Another iterator would keep the folder open."""
    store = Store(tmp_path / "rows", "c")
    with store.cursor() as cursor:
        assert store.get(1, b"k", 9, cursor).value is None
    with pytest.raises(RuntimeError, match="after the end"):
        store.get(1, b"k", 9, cursor)
    store.close()


def test_one_folder_one_owner(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    held = Store(folder, "c")
    with pytest.raises(IllegalState, match=r"a folder of its own.* may be deleted"):
        Store(folder, "c")
    for others in (tmp_path, folder / "LOCK"):
        with pytest.raises(IllegalState, match=r"or empty at first$"):
            Store(others / "here", "c")
    held.close()
    with pytest.raises(IllegalState, match="a replica of cluster c, not of d"):
        Store(folder, "d")
    Store(folder, "c").close()


FORK = """
import os, pathlib, sys, threading
from anabranch.errors import NotForkSafe
from anabranch.tables.store import Store
store = Store(pathlib.Path(sys.argv[1]), "c")
store._db.put(b"k", b"v")
store.end_loading()  # by a thread of RocksDB
threading.Thread(target=threading.Event().wait, daemon=True).start()  # as a replica has one
if os.fork() == 0:
    try:
        Store(pathlib.Path(sys.argv[1] + "-own"), "c")
    except NotForkSafe:
        sys.exit(7)
_, status = os.wait()
assert (os.waitstatus_to_exitcode(status), store._db.get(b"k")) == (7, b"v"), status
store.close()
"""


def test_a_forked_child_ends_as_it_likes_and_opens_no_folder(tmp_path: Path) -> None:
    """Without its threads RocksDB ends a process by a signal, and a flush never ends."""
    call = [sys.executable, "-c", FORK, str(tmp_path / "rows")]
    done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_no_reader_finds_the_folder_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first load the folder is opened in another way. Reads begin once `loading` is over."""
    store = Store(tmp_path / "rows", "c")
    seen, opened = [], store._opened

    def noted(*, loading: bool) -> object:
        seen.append(store.loading)
        return opened(loading=loading)

    monkeypatch.setattr(store, "_opened", noted)
    store.end_loading()
    assert (seen, store.loading) == ([True], False)
    store.close()


def test_half_read_rows_end_with_the_store(tmp_path: Path) -> None:
    """Open iterators would keep the folder locked. Reading one on raises an error, as there may be more rows."""
    index = Indexed("s/a", "row", lambda _, row: row)
    store = Store(tmp_path / "rows", "c", {"s/a": [index]})
    store.end_loading()
    mark = store.begin("s/a", "id")
    ((prefix, _),) = indexes = store.indexes("s/a")
    for at in (1, 2):
        rows = Rows()
        rows.add(mark.number, b"t" * 16, at, [b"k", b"l"], [b"v", b"v"], indexes)
        store.write(rows)
    number = mark.number
    reads: list[Callable[[], Iterator[Any]]] = [
        lambda: store.rows(number, b"", None, 9),
        lambda: store.stamped(number, 9),
        lambda: store.scan(number, b"", None, 9),
        lambda: store.scan(number, b"", None, 9, reverse=True),
        lambda: store.versions(number, b"k", 9),
        lambda: store.lookup(prefix, b"v"),
    ]
    half_read = [read() for read in [*reads, *reads]]  # half of them are not begun
    assert all(map(next, half_read[: len(reads)]))
    store.close()
    Store(tmp_path / "rows", "c").close()
    for found in half_read:
        with pytest.raises(IllegalState, match="open another one"):
            next(found)
