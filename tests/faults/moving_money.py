"""Processes that move money between rows of two tables, and record what their transactions read."""

from __future__ import annotations

import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import anabranch
from anabranch.errors import AskOutcomeError, BeginAgainError, RetryError
from checker.recorder import SUFFIX, Recorder
from tests.crash.children import run_guarded, until_told
from tests.crash.zygote import Spec, say
from tests.faults.acting import CALL_S, PATIENCE
from tests.tables.recorded import RecordedTables, RecordedTransaction, RecordedWrites

TOTAL = 800  # over the rows of accounts that begin with a
PAIR = "pair"  # one row in each table: their sum never falls below 0
RATE = "rate"  # in limits: written by transactions that know no locks
WORK = {"transfer": 8, "pair": 4, "reshape": 2, "count": 2, "blind": 2}
THREADS = 2


@dataclass(frozen=True)
class Move(Spec):
    """``slot``: the next process in it goes on with the folder, or deletes it first."""

    scope: str = ""
    spool: str = ""
    slot: int = 0
    seed: int = 0

    run: ClassVar[str] = "tests.faults.moving_money:move"


def tables_of(scope: str) -> tuple[str, str]:
    """Accounts, and limits."""
    return f"{scope}/accounts", f"{scope}/limits"


def move(number: int, told: dict[str, Any]) -> int:
    """Run until SIGTERM, then finish the work in hand."""
    spec = Move(**told)
    ending = until_told()
    folder = Path(spec.spool) / f"{spec.slot}.rows"
    if random.Random(spec.seed).random() < 0.3:
        shutil.rmtree(folder, ignore_errors=True)
    recorder = Recorder(Path(spec.spool) / f"{spec.name}{SUFFIX}")

    def work(client: anabranch.Client, bank: RecordedTables, thread: int) -> None:
        chance = random.Random(f"{spec.seed}/{thread}")
        mover = _Mover(number, spec, client, bank, recorder, chance, ending)
        while not ending.is_set():
            mover.one()

    with anabranch.connect(
        spec.bootstrap, prefix=spec.prefix, timeout=CALL_S, config=PATIENCE
    ) as client:
        while not ending.is_set():
            try:
                rows = client.replica(*tables_of(spec.scope), folder=folder)
            except RetryError as error:  # no controller is there just now
                say(number, "trouble", kind=type(error).__name__)
                continue
            bank = RecordedTables(lambda: recorder, rows, spec.scope, spec.name)
            with rows:
                bodies = [partial(work, client, bank, n) for n in range(THREADS)]
                return run_guarded(number, bodies, lambda why: say(number, "failed", why=why))
    return 0


def number_in(row: bytes | None) -> int:
    """The number in a row, which begins with it; 0: there is none."""
    return 0 if row is None else int(row.partition(b"/")[0])


class _Txn:
    """A transaction's rows as numbers, by text; each new row is unlike all others."""

    def __init__(self, txn: RecordedTransaction) -> None:
        self.txn = txn
        self._count = count()

    def get(self, table: str, key: str) -> int:
        """The number in a row; 0: there is none."""
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


class _Mover:
    def __init__(
        self,
        number: int,
        spec: Move,
        client: anabranch.Client,
        bank: RecordedTables,
        recorder: Recorder,
        chance: random.Random,
        ending: threading.Event,
    ) -> None:
        self._number, self._spec, self._client, self._bank = number, spec, client, bank
        self._recorder, self._chance, self._ending = recorder, chance, ending
        self._accounts, self._limits = tables_of(spec.scope)

    def one(self) -> None:
        """One piece of work; trouble is told, and no reason to end."""
        (kind,) = self._chance.choices(list(WORK), list(WORK.values()))
        try:
            getattr(self, f"_{kind}")()
        except (RetryError, BeginAgainError, AskOutcomeError) as error:
            say(self._number, "trouble", kind=type(error).__name__)
            self._ending.wait(self._chance.uniform(0.0, 0.2))

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
                say(self._number, "defect", why=f"a total of {rows} at {txn.txn.timestamp}")
            most, least = max(rows, key=rows.__getitem__), min(rows, key=rows.__getitem__)
            if new not in rows and len(rows) < 12:
                txn.txn.insert(self._accounts, new.encode(), txn.row(rows[most] // 2))
                txn.put(self._accounts, most, rows[most] - rows[most] // 2)
            elif most != least:
                txn.put(self._accounts, most, rows[most] + rows[least])
                txn.txn.delete(self._accounts, least.encode())

        self._act(body)

    def _count(self) -> None:
        with self._bank.snapshot(fresh=self._chance.random() < 0.5, timeout=20.0) as view:
            rows = {k: number_in(row) for k, row in view.scan(self._accounts, b"a", b"b")}
            if sum(rows.values()) != TOTAL:
                say(self._number, "defect", why=f"a total of {rows} at {view.timestamp}")

    def _blind(self) -> None:
        """By the journal, open while streams scale: it writes what others read."""
        scope = self._spec.scope
        with self._client.begin(scope) as begun:
            txn = RecordedWrites(self._recorder, begun, scope, label := self._bank.label())
            begun.token()
            for n, key in enumerate((RATE, f"j{self._spec.slot}")):
                row = f"{self._chance.randrange(100)}/{label}.{n}".encode()
                txn.write(self._limits, row, key.encode())
            self._ending.wait(self._chance.uniform(0.0, 1.5))
            txn.commit(timeout=20.0)
        say(self._number, "told")

    def _act(self, body: Callable[[_Txn], None]) -> None:
        if self._chance.random() < 0.6:
            self._bank.transact(lambda txn: body(_Txn(txn)), timeout=20.0)
        else:
            txn = self._bank.begin(timeout=20.0)
            with txn.txn:
                body(_Txn(txn))
                self._ending.wait(self._chance.uniform(0.0, 0.3))
                txn.commit(timeout=20.0)
        say(self._number, "told")
