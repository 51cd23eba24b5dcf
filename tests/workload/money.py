"""Processes that move money between rows of two tables, and record what their transactions read."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import anabranch
from anabranch.errors import RetryError
from checker.recorder import SUFFIX, Recorder
from tests.tables.recorded import RecordedTables, RecordedTransaction, RecordedWrites
from tests.workload.children import Ending, repeat, run_threads
from tests.workload.recording import TROUBLE
from tests.workload.writers import connect
from tests.workload.zygote import Spec, say

TOTAL = 800  # over the rows of accounts that begin with a
PAIR = "pair"  # one row in each table: their sum never falls below 0
RATE = "rate"  # in limits: written by transactions that know no locks
WORK = {"transfer": 8, "pair": 4, "reshape": 2, "count": 2, "blind": 2}
THREADS = 2
CALL_S = 30.0


@dataclass(frozen=True)
class Move(Spec):
    """A process that moves money, until SIGTERM. ``streams``: the tables of accounts and of limits.

    ``slot``: the next process in it uses the same folder, or deletes it first.
    """

    streams: tuple[str, ...] = ()
    spool: str = ""
    slot: int = 0
    seed: int = 0

    run: ClassVar[str] = "tests.workload.money:move"


def move(number: int, given: dict[str, Any]) -> int:
    """Run the process of a `Move`."""
    spec = Move(**given)
    ending = Ending()
    folder = Path(spec.spool) / f"{spec.slot}.rows"
    if random.Random(spec.seed).random() < 0.3:
        shutil.rmtree(folder, ignore_errors=True)
    recorder = Recorder(Path(spec.spool) / f"{spec.name}{SUFFIX}")
    with connect(spec, CALL_S) as client:
        while not ending.is_set():
            try:
                rows = client.replica(*spec.streams, folder=folder)
            except RetryError as error:  # no controller is there just now
                say(number, "trouble", kind=type(error).__name__)
                continue
            bank = RecordedTables(lambda: recorder, rows, scope_of(spec), spec.name)
            with rows:
                movers = [
                    _Mover(number, spec, client, bank, recorder, ending, n) for n in range(THREADS)
                ]
                work = [partial(repeat, number, ending, one.one, TROUBLE) for one in movers]
                return run_threads(number, work)
    return 0


def scope_of(spec: Move) -> str:
    return spec.streams[0].partition("/")[0]


def number_in(row: bytes | None) -> int:
    """The number that a row begins with; 0 for no row."""
    return 0 if row is None else int(row.partition(b"/")[0])


class _Txn:
    """A transaction's rows as numbers, by text; each new row is unlike all others."""

    def __init__(self, txn: RecordedTransaction) -> None:
        self.txn = txn
        self._count = count()

    def get(self, table: str, key: str) -> int:
        """The number in a row; 0 for no row."""
        return number_in(self.txn.get(table, key.encode()))

    def all(self, table: str, low: str, high: str) -> dict[str, int]:
        """The rows of a range."""
        found = self.txn.scan(table, low.encode(), high.encode())
        return {key.decode(): number_in(row) for key, row in found}

    def put(self, table: str, key: str, number: int) -> None:
        self.txn.put(table, key.encode(), self.row(number))

    def row(self, number: int) -> bytes:
        """A new row."""
        return f"{number}/{self.txn.name}.{next(self._count)}".encode()


@dataclass
class _Mover:
    number: int
    spec: Move
    client: anabranch.Client
    bank: RecordedTables
    recorder: Recorder
    ending: Ending
    thread: int

    def __post_init__(self) -> None:
        self._chance = random.Random(f"{self.spec.seed}/{self.thread}")
        self._accounts, self._limits = self.spec.streams

    def one(self) -> None:
        """Do one piece of work; after trouble, pause."""
        (kind,) = self._chance.choices(list(WORK), list(WORK.values()))
        try:
            getattr(self, f"_{kind}")()
        except TROUBLE:
            self.ending.wait(self._chance.uniform(0.0, 0.2))
            raise

    # -- the kinds ------------------------------------------------------------------------------------

    def _transfer(self) -> None:
        chance = self._chance
        source, target = (f"a{n:02}" for n in chance.sample(range(8), 2))
        amount = chance.randrange(1, 60)

        def body(txn: _Txn) -> None:
            fee = txn.get(self._limits, RATE) % 3
            has, other = txn.get(self._accounts, source), txn.get(self._accounts, target)
            if has >= amount + fee:
                txn.put(self._accounts, source, has - amount - fee)
                txn.put(self._accounts, target, other + amount + fee)

        self._act(body)

    def _pair(self) -> None:
        """Each half may be taken from as long as both together have enough: the classic write skew."""
        chance = self._chance
        mine, amount = chance.randrange(2), chance.randrange(1, 80)
        both = self._accounts, self._limits

        def body(txn: _Txn) -> None:
            held = [txn.get(table, PAIR) for table in both]
            if sum(held) >= amount:
                txn.put(both[mine], PAIR, held[mine] - amount)
            else:
                txn.put(both[mine], PAIR, held[mine] + 60)

        self._act(body)

    def _reshape(self) -> None:
        """A row more, or one less: who reads the range must not miss it."""
        chance = self._chance
        new = f"a{chance.randrange(10, 40)}"

        def body(txn: _Txn) -> None:
            rows = txn.all(self._accounts, "a", "b")
            if sum(rows.values()) != TOTAL:
                say(self.number, "failed", why=f"a total of {rows} at {txn.txn.timestamp}")
            most, least = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
            if new not in rows and len(rows) < 12:
                txn.txn.insert(self._accounts, new.encode(), txn.row(rows[most] // 2))
                txn.put(self._accounts, most, rows[most] - rows[most] // 2)
            elif most != least:
                txn.put(self._accounts, most, rows[most] + rows[least])
                txn.txn.delete(self._accounts, least.encode())

        self._act(body)

    def _count(self) -> None:
        with self.bank.snapshot(fresh=self._chance.random() < 0.5, timeout=20.0) as view:
            rows = {k: number_in(row) for k, row in view.scan(self._accounts, b"a", b"b")}
            if sum(rows.values()) != TOTAL:
                say(self.number, "failed", why=f"a total of {rows} at {view.timestamp}")

    def _blind(self) -> None:
        """By the journal, open while streams scale: it writes what others read."""
        scope = scope_of(self.spec)
        with self.client.begin(scope) as begun:
            txn = RecordedWrites(self.recorder, begun, scope, label := self.bank.label())
            begun.token()
            for n, key in enumerate((RATE, f"j{self.spec.slot}")):
                row = f"{self._chance.randrange(100)}/{label}.{n}".encode()
                txn.write(self._limits, row, key.encode())
            self.ending.wait(self._chance.uniform(0.0, 1.5))
            txn.commit(timeout=20.0)
        say(self.number, "commit")

    def _act(self, body: Callable[[_Txn], None]) -> None:
        if self._chance.random() < 0.6:
            self.bank.transact(lambda txn: body(_Txn(txn)), timeout=20.0)
        else:
            txn = self.bank.begin(timeout=20.0)
            with txn.txn:
                body(_Txn(txn))
                self.ending.wait(self._chance.uniform(0.0, 0.3))
                txn.commit(timeout=20.0)
        say(self.number, "commit")
