"""A bank in processors: transfers come as a stream of commands; accounts are rows of a table, and of a database.

It is two programs, as users would write them:

- The *bank* (`program`) is a processor. It carries out commands between rows of the table, which it reads with
  locks. A handler can't hold a transaction of a database: its batch is handled again after a conflict, and is
  committed with other events. So it passes commands with an account in the database to the stream ``desk``.
- The *desk* (`tests.processing.desk`) consumes that stream by `Client.read` with a task ownership. Each command is
  one transaction of a ledger: rows of the table with locks, rows of the database, the outcome, and the position.

Values begin with an id that no other event has, and all that is read and committed is recorded, for the checker:
each command has one outcome, and the total is right after each commit. `check_effects` judges what a checker can't
know: that a commit changes accounts as its outcomes say.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from anabranch.client.client import Client
from anabranch.core.stream_settings import derived_table
from anabranch.processing.app import Processor
from anabranch.protocol.schemas.records import Derivation
from anabranch.types import Event
from checker.programs import number_in
from checker.recorder import Recorder
from tests.tables.recorded import RecordedTables, RecordedTransaction, RecordedWrites
from tests.workload.recording import id_of

SCOPE = os.environ.get("ANABRANCH_TRIAL_SCOPE", "bank")
START, TASKS = 50, 4
IN_TABLE = [f"account-{number:02}" for number in range(8)]
IN_DATABASE = [f"held-{number}" for number in range(4)]
ACCOUNTS = [*IN_TABLE, *IN_DATABASE]
OWNERS = [f"owner-{number}" for number in range(10)]  # names of accounts; each has one
BRANCHES = [f"branch-{number}" for number in range(3)]
PAIR = ("pair-0", "pair-1")  # written together, without a look at them; handlers read the first
NOTE = "note-"  # rows of others
# The derived tables of the accounts, if there are some: their kind, and by version which parts of a row, split at
# slashes, are its values. Totals are of balances.
DERIVED: dict[str, tuple[str, list[tuple[int, ...]]]] = {
    "by-name": ("unique", [(2,), (1, 2), (2,)]),
    "by-branch": ("index", [(3,), (2, 3), (3,)]),
    # One version: while all accounts are written, a build of totals breaks its locks for minutes.
    "sums": ("totals", [(3,)]),
}
VERSIONS = 3
DERIVES = "ANABRANCH_BANK_DERIVES"  # set: programs have the functions
TOTAL = START * (len(IN_TABLE) + len(PAIR))
TABLES = (
    "create table account (name varchar(20) primary key, balance bigint not null)",
    "create table postings (id varchar(80) primary key, txn_id varchar(40), account varchar(20))",
)
_count = itertools.count()


def unique() -> str:
    """A text that no other call gives, in any process."""
    return f"{os.getpid()}.{next(_count)}"


def row_of(number: int, before: bytes | None = None) -> bytes:
    """A new row. It keeps the name and branch of the row ``before`` it."""
    kept = (before or b"").split(b"/")[2:]
    return b"/".join([b"%d" % number, unique().encode(), *kept])


def first_row(account: str) -> bytes:
    """The row with which an account is opened. Accounts of the table have a name and a branch, too."""
    row = row_of(START)
    if account not in IN_TABLE:
        return row
    at = IN_TABLE.index(account)
    return b"/".join([row, OWNERS[at].encode(), BRANCHES[at % len(BRANCHES)].encode()])


@dataclass(frozen=True)
class Names:
    """The streams of a bank in a scope."""

    scope: str

    @property
    def commands(self) -> str:
        return f"{self.scope}/transfers"

    @property
    def desk(self) -> str:
        return f"{self.scope}/desk"

    @property
    def done(self) -> str:
        return f"{self.scope}/done"

    @property
    def rejected(self) -> str:
        return f"{self.scope}/rejected"

    @property
    def accounts(self) -> str:
        return f"{self.scope}/accounts"

    @property
    def database(self) -> str:
        """The rows of the database, as histories have them."""
        return f"{self.scope}/database"

    @property
    def streams(self) -> list[str]:
        return [self.commands, self.desk, self.done, self.rejected]

    @property
    def bank_tasks(self) -> str:
        """The processor of the table's part."""
        return f"{self.scope}/bank"

    @property
    def desk_tasks(self) -> str:
        """The processor of the database's part."""
        return f"{self.scope}/cashier"

    def create(self, client: Client) -> None:
        """The streams, the table, and the processor of the desk."""
        for stream in self.streams:
            client.create_stream(stream, segments=2)
        client.create_table(self.accounts, 2)
        client.create_processor(self.desk_tasks, self.desk, tasks=TASKS)

    def open_accounts(self, recorder: Recorder, client: Client) -> None:
        """Write the first rows, in one commit."""
        with client.begin(self.scope) as txn:
            writes = writing(recorder, txn, self, f"opening.{unique()}")
            for name in (*IN_TABLE, *PAIR):
                writes.write(self.accounts, first_row(name), name.encode())
            writes.commit(timeout=60.0)


@dataclass(frozen=True)
class Command:
    """A transfer. ``id``: of no other."""

    id: str
    source: str
    target: str
    amount: int

    @classmethod
    def of(cls, value: bytes | None) -> Command:
        """The command of an event: one of a user, or one that was passed on."""
        name, _, body = (value or b"").decode().partition(" ")
        return cls(name.partition("/")[0], **json.loads(body))

    @property
    def value(self) -> bytes:
        """Of a user's event."""
        return f"{self.id} {self._body(self.amount)}".encode()

    @property
    def is_of_database(self) -> bool:
        return not {self.source, self.target}.isdisjoint(IN_DATABASE)

    def become(self, what: str, amount: int) -> bytes:
        """The value of an event that follows from it. ``amount``: that is moved."""
        return f"{self.id}/{what}.{unique()} {self._body(amount)}".encode()

    def _body(self, amount: int) -> str:
        return json.dumps({"source": self.source, "target": self.target, "amount": amount})


def program(
    names: Names,
    before: Callable[[], None] = lambda: None,
    *,
    concurrent: bool = False,
    **more: Any,
) -> Processor:
    """The processor. ``before``: called between a command's reads and its writes.

    ``concurrent``: its handler is ``async``.
    """
    app = Processor(names.bank_tasks, tasks=TASKS, **more)
    transfers = app.input(names.commands)
    accounts = app.table(names.accounts)
    desk, done, rejected = map(app.output, (names.desk, names.done, names.rejected))

    def transfer(event: Any) -> None:
        command = Command.of(event.value)
        if command.is_of_database:
            desk.write(command.become("passed", command.amount), key=event.key)
            return
        amount = command.amount + fee_of(accounts[PAIR[0].encode()])
        source = accounts[command.source.encode()]
        has = number(source)
        if amount % 7 == 0:  # as it was when the command was written
            accounts.get(command.source.encode(), at=event.commit_timestamp)
        if amount % 11 == 0:  # a range, with a lock
            assert len(list(accounts.items(prefix="account-"))) == len(IN_TABLE)
        if amount % 13 == 0:
            del accounts[f"{NOTE}{amount % 3}".encode()]
        if has < amount:
            rejected.write(command.become("rejected", 0), key=event.key)
            return
        target = accounts[command.target.encode()]
        before()
        accounts[command.source.encode()] = row_of(has - amount, source)
        accounts[command.target.encode()] = row_of(number(target) + amount, target)
        done.write(command.become("done", amount), key=event.key)

    async def transfer_later(event: Any) -> None:
        await asyncio.sleep(0)
        transfer(event)

    app.on(transfers)(transfer_later if concurrent else transfer)
    return app


def number(row: bytes | None) -> int:
    """The number that a row begins with."""
    return number_in(id_of(row))


def fee_of(pair: bytes | None) -> int:
    """What a transfer costs the source, and brings the target, by the first row of the pair."""
    return number(pair) % 3


def open_database(cursor: Any, mark: str = "%s") -> None:
    """Make the tables, and the accounts in them."""
    for statement in TABLES:
        cursor.execute(statement)
    for account in IN_DATABASE:
        cursor.execute(f"insert into account values ({mark}, {mark})", (account, START))


def record_database(recorder: Recorder, cursor: Any, names: Names) -> dict[str, tuple[str, str]]:
    """Record the rows that the database has at the end. Returns them: id -> transaction and account.

    Raises: AssertionError (a balance is not its first one with all postings, or below 0).
    """
    cursor.execute("select id, txn_id, account from postings order by id")
    rows = {name: (txn_id, account) for name, txn_id, account in cursor.fetchall()}
    events = [[at, None, name, txn_id] for at, (name, (txn_id, _)) in enumerate(rows.items())]
    with recorder.asking("log", stream=names.database, partition=0) as told:
        told |= {"start": 0, "end": len(events), "events": events}
    cursor.execute("select name, balance from account")
    balances = dict(cursor.fetchall())
    for account in IN_DATABASE:
        moved = sum(number_in(name) for name, (_, of) in rows.items() if of == account)
        assert balances[account] == START + moved >= 0, account
    return rows


def record_rules(recorder: Recorder, names: Names) -> None:
    """What has to be true of the whole history."""
    own = {"commands": [names.commands], "outcomes": [names.done, names.rejected]}
    recorder.note("outcomes", **own)
    recorder.note("total", tables=[names.accounts], changes=[names.database], total=TOTAL)
    recorder.note("drained", processor=names.bank_tasks, streams=[names.commands])
    recorder.note("drained", processor=names.desk_tasks, streams=[names.desk])


def writing(recorder: Recorder, txn: Any, names: Names, label: str) -> Any:
    """Recorded writes of a transaction that reads nothing."""
    return RecordedWrites(recorder, txn, names.scope, label)


def blind(recorder: Recorder, client: Client, names: Names, first: int) -> None:
    """Write the pair without a look at it: the total stays. ``first``: the number of its first row."""
    with client.begin(names.scope) as txn:
        writes = writing(recorder, txn, names, f"blind.{unique()}")
        for name, value in zip(PAIR, (first, 2 * START - first), strict=True):
            writes.write(names.accounts, row_of(value), name.encode())
        writes.write(names.accounts, f"n.{unique()}".encode(), f"{NOTE}{first % 3}".encode())
        writes.commit(timeout=20.0)


def move(bank: RecordedTables, names: Names, source: int, target: int) -> None:
    """A transfer by another program, in a transaction on the table."""

    def transfer(txn: RecordedTransaction) -> None:
        one, other = (IN_TABLE[n % len(IN_TABLE)].encode() for n in (source, target))
        gives = txn.get(names.accounts, one)
        if one == other or not number(gives):
            return
        gets = txn.get(names.accounts, other)
        txn.put(names.accounts, one, row_of(number(gives) - 1, gives))
        txn.put(names.accounts, other, row_of(number(gets) + 1, gets))

    bank.transact(transfer, timeout=20.0)


def derive(client: Client, names: Names, last: int = VERSIONS) -> None:
    """Take the functions of all versions up to the last one. Raises: as `Client.derive`."""
    for name, (kind, versions) in DERIVED.items():
        how = {} if kind == "index" else {kind: True}
        for version, fields in enumerate(versions[:last], 1):
            function = partial(_values, kind, fields)
            client.derive(names.accounts, name, function, version=version, **how)


def _values(kind: str, fields: tuple[int, ...], _: bytes, row: bytes) -> list[Any]:
    parts = row.split(b"/")
    found = [parts[number] for number in fields if number < len(parts)]
    return [(value, number(row)) for value in found] if kind == "totals" else found


def rename(bank: RecordedTables, names: Names, account: str, name: str) -> None:
    """Give an account another name. Raises: UniqueViolation (another one has it)."""

    def change(txn: RecordedTransaction) -> None:
        parts = (txn.get(names.accounts, account.encode()) or b"").split(b"/")
        row = b"/".join([parts[0], unique().encode(), name.encode(), *parts[3:]])
        txn.put(names.accounts, account.encode(), row)

    bank.transact(change, timeout=20.0)


def level(bank: RecordedTables, names: Names, branch: str) -> None:
    """Move money from the richest account of a branch to the poorest one, which are looked up."""

    def change(txn: RecordedTransaction) -> None:
        found = txn.look_up(names.accounts, "by-branch", branch.encode())
        total = txn.total(names.accounts, "sums", branch.encode())
        assert total == (sum(number(row) for _, row in found), len(found)), (total, found)
        found.sort(key=lambda row: number(row[1]))
        (poor, one), (rich, other) = found[0], found[-1]
        if number(other) - number(one) > 1:
            txn.put(names.accounts, poor, row_of(number(one) + 1, one))
            txn.put(names.accounts, rich, row_of(number(other) - 1, other))

    bank.transact(change, timeout=20.0)


def derived_tables(names: Names) -> list[str]:
    """The names of the derived tables, of all versions."""
    return [
        derived_table(Derivation(names.accounts, name, version))
        for name, (_, versions) in DERIVED.items()
        for version in range(1, len(versions) + 1)
    ]


def record_derivations(recorder: Recorder, names: Names) -> None:
    """Record what the derived tables have."""
    for name, (kind, versions) in DERIVED.items():
        for version, fields in enumerate(versions, 1):
            table = derived_table(Derivation(names.accounts, name, version))
            asked = {"source": names.accounts, "name": name, "version": version, "number": 0}
            recorder.note("derivation", table=table, type=kind, fields=list(fields), **asked)


def check_effects(
    rows: Iterable[Event], outcomes: Iterable[Event], database: Mapping[str, tuple[str, str]],
    names: Names,
) -> Counter[str]:  # fmt: skip
    """Each commit changes accounts as its outcomes say, and none is below 0. Returns counts.

    ``rows``: all events of the table; ``outcomes``: of both streams; ``database``: as `record_database` returns it.
    """
    found = Counter[str]()
    wanted: dict[str, Counter[str]] = defaultdict(Counter)  # by transaction
    for event in outcomes:
        kind, command = event.stream.rpartition("/")[2], Command.of(event.value)
        found[kind] += 1
        found["of the database"] += command.is_of_database
        if event.stream == names.done:
            effect = wanted[(event.txn_id or b"").hex()]
            effect[command.source] -= command.amount
            effect[command.target] += command.amount
    commits: dict[tuple[int, str], dict[str, int]] = defaultdict(dict)
    for event in rows:
        account = (event.key or b"").decode()
        if account in IN_TABLE:
            at = event.commit_timestamp or 0, (event.txn_id or b"").hex()
            commits[at][account] = number(event.value)
    got: dict[str, Counter[str]] = defaultdict(Counter)
    balances: dict[str, int] = {}
    for number_of_commit, ((timestamp, txn_id), changed) in enumerate(sorted(commits.items())):
        assert min(changed.values()) >= 0, f"{changed} at {timestamp}"
        if number_of_commit:
            for account, value in changed.items():
                got[txn_id][account] += value - balances[account]
            found["of others"] += txn_id not in wanted
        balances |= changed
    for name, (txn_id, account) in database.items():
        got[txn_id][account] += number_in(name)
    for txn_id, effect in wanted.items():
        assert _moved(effect) == _moved(got[txn_id]), txn_id
        found["commits"] += 1
    return found


def _moved(effect: Mapping[str, int]) -> dict[str, int]:
    return {account: change for account, change in effect.items() if change}


app = program(Names(SCOPE), commit_interval=0.02)
