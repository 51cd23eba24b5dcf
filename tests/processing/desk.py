"""The desk of a bank (`tests.processing.bank`): each command is one transaction of a ledger.

    python -m tests.processing.desk BOOTSTRAP PREFIX DSN SCOPE FOLDER HISTORY TASK...

carries out the commands of these tasks until SIGTERM, and records what it does in a file of the folder HISTORY.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psycopg

import anabranch
from anabranch.client.client import Client
from anabranch.client.replica import Replica
from anabranch.errors import AnabranchError, LocksBroken
from anabranch.ledger import Ledger
from anabranch.types import Event, TaskOwnership
from tests.ledger.places import PostgresPlace
from tests.processing import bank, planted
from tests.processing.bank import IN_TABLE, PAIR, Command, Names, fee_of, number, row_of, unique
from tests.processing.recorded import WorkRecorder, recorder_in
from tests.tables.recorded import RecordedTables, RecordedTransaction, text
from tests.workload.recording import id_of

BY_JOURNALS = 0.3
IDLE_S = 1.0
PAUSE_S = 0.2


class Desk:
    """One consumer of the stream ``desk``: it carries out the commands of some tasks.

    ``mark``: of a parameter in the database's statements. ``lock``: what locks a selected row. ``chance``: whether
    a transaction goes through journals, with registered locks, or by one command.
    """

    def __init__(
        self, client: Client, names: Names, replica: Replica, ledger: Ledger, work: WorkRecorder
    ) -> None:
        self.client, self.names, self.ledger, self.work = client, names, ledger, work
        self.bank = RecordedTables(lambda: work.recorder, replica, names.scope, unique())
        self.mark, self.lock, self.chance = "%s", "for update", random.Random(os.getpid())
        self.before: Callable[[], None] = lambda: None

    def serve(
        self, tasks: Collection[int], wait: float, stop: threading.Event | None = None
    ) -> None:
        """Take tasks, and carry out commands until ``stop``; without it, until none comes for ``wait`` seconds.

        Raises: as `Ledger.commit`, but nothing after a conflict: the command is carried out again.
        """
        ownership = self.client.take_tasks(self.names.desk_tasks, tasks)
        with self.client.read(self.names.desk, timeout=wait, ownership=ownership) as reader:
            while True:
                for event in reader:
                    while not self._carried_out(reader, ownership, event):
                        pass
                    if stop is not None and stop.is_set():
                        return
                if stop is None or stop.is_set():
                    return

    def _carried_out(self, reader: Any, ownership: TaskOwnership, event: Event) -> bool:
        """Whether it is committed; else its locks were broken."""
        consumed = reader.consumed()
        txn = self.bank.begin(ownership=ownership)
        moves = self.work.moves(ownership, consumed, [id_of(event.value)])
        try:
            with txn.txn, self.ledger.commit(txn.txn, consumed=consumed) as cursor:
                self._carry_out(txn, cursor, event)
                txn.ask_commit(prepares=True, **moves)
        except LocksBroken as error:
            txn.failed(error)
            reader.put_back(consumed)
            return False
        except BaseException as error:
            txn.failed(error)
            raise
        if txn.txn.result is not None:  # else recovery commits it
            txn.committed(txn.txn.result)
        return True

    def _carry_out(self, txn: RecordedTransaction, cursor: Any, event: Event) -> None:
        command, names = Command.of(event.value), self.names
        has: dict[str, int] = {}
        rows: dict[str, bytes | None] = {}
        fee = fee_of(txn.get(names.accounts, PAIR[0].encode()))
        for account in sorted((command.source, command.target)):  # all lock in one order
            if account in IN_TABLE:
                rows[account] = txn.get(names.accounts, account.encode())
                has[account] = number(rows[account])
                continue
            select = f"select balance from account where name = {self.mark} {self.lock}"
            cursor.execute(select, (account,))
            ((has[account],),) = cursor.fetchall()
        amount = command.amount + fee
        if has[command.source] < amount:
            self._write(txn, names.rejected, event.key, command.become("rejected", 0))
            return
        self.before()
        for account, change in ((command.source, -amount), (command.target, amount)):
            if account in IN_TABLE:
                row = row_of(has[account] + change, rows[account])
                txn.put(names.accounts, account.encode(), row)
            else:
                self._post(txn, cursor, account, change)
        self._write(txn, names.done, event.key, command.become("done", amount))
        if self.chance.random() < BY_JOURNALS:
            txn.txn.flush()

    def _post(self, txn: RecordedTransaction, cursor: Any, account: str, change: int) -> None:
        update = f"update account set balance = balance + {self.mark} where name = {self.mark}"
        cursor.execute(update, (change, account))
        name = row_of(change).decode()
        insert = f"insert into postings values ({self.mark}, {self.mark}, {self.mark})"
        assert txn.txn.txn_id is not None
        cursor.execute(insert, (name, txn.txn.txn_id.hex(), account))
        txn.note_write(self.names.database, [[None, name]], elsewhere=True)

    def _write(
        self, txn: RecordedTransaction, stream: str, key: bytes | None, value: bytes
    ) -> None:
        txn.txn.write(stream, value, key)
        txn.note_write(stream, [[text(key or b""), id_of(value)]])


def main() -> None:
    """The process."""
    bootstrap, prefix, dsn, scope, folder, history, *tasks = sys.argv[1:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    names, bug = Names(scope), os.environ.get(planted.VARIABLE)
    work = WorkRecorder(recorder_in(Path(history), "desk"))
    with anabranch.connect(bootstrap, prefix=prefix, timeout=20.0) as client, work.installed():
        if bug:
            planted.BUGS[bug]().start()
        while not stop.is_set():
            try:
                if os.environ.get(bank.DERIVES):
                    bank.derive(client, names)
                with client.replica(names.accounts, folder=Path(folder)) as replica:
                    ledger = Ledger(PostgresPlace(dsn).connect)
                    desk = Desk(client, names, replica, ledger, work)
                    while not stop.is_set():
                        desk.serve([*map(int, tasks)], IDLE_S, stop)
            except (AnabranchError, psycopg.Error) as error:
                print(f"{time.time():.3f} {type(error).__name__}: {error}", flush=True)
                stop.wait(PAUSE_S)


if __name__ == "__main__":
    main()
