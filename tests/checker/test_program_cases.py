"""Tiny histories of a bank: commands and their outcomes, accounts in a table and in a database."""

from __future__ import annotations

from tests.checker.table import FOUR, ONE, THREE, TWO, Table
from tests.checker.tape import Tape

TABLE = Table()
wrong, right = TABLE.wrong, TABLE.right


def committed(tape: Tape, txn: str, txn_id: str, at: int, **events: str) -> None:
    """A transaction that writes one event to each of these streams of the scope."""
    tape.begin(txn, None)
    for stream, name in events.items():
        tape.write(txn, name, stream=f"s/{stream}", key=None if stream == "database" else "k")
    tape.commit(txn, txn_id, at, len(events))


def log(tape: Tape, stream: str, *rows: tuple[int, str, str, int]) -> None:
    """``rows``: offset, id, transaction id, timestamp."""
    is_table = {"table": True} if stream == "accounts" else {}
    key = None if stream == "database" else "k"
    told = {"start": 0, "end": 100, "events": [[at, key, name, by] for at, name, by, _ in rows]}
    tape.do("end", "log", told, stream=f"s/{stream}", partition=0, **is_table)
    if stream != "database":
        records = [[at, when, [by], [[0, at, at + 1]]] for at, _, by, when in rows]
        tape.commits(*records, stream=f"s/{stream}")


def outcomes(tape: Tape, *names: str) -> None:
    """Commands one and two, and outcomes, each of a transaction of its own."""
    ids = (THREE, FOUR, "5" * 32)
    committed(tape, "c1", ONE, 10, commands="one")
    committed(tape, "c2", TWO, 20, commands="two")
    log(tape, "commands", (0, "one", ONE, 10), (2, "two", TWO, 20))
    found = [(2 * n, name, ids[n], 30 + n) for n, name in enumerate(names)]
    for at, name, by, when in found:
        committed(tape, f"o{at}", by, when, done=name)
    log(tape, "done", *found)
    tape.do("end", "outcomes", commands=["s/commands"], outcomes=["s/done"])


@right
def one_outcome_of_each(tape: Tape) -> None:
    outcomes(tape, "two/done.1", "one/done.2")


@wrong("no-outcome")
def a_command_without_one(tape: Tape) -> None:
    outcomes(tape, "one/done.1")


@wrong("two-outcomes")
def a_command_with_two(tape: Tape) -> None:
    outcomes(tape, "one/done.1", "two/done.2", "one/rejected.3")


@wrong("unexplained")
def an_outcome_of_no_command(tape: Tape) -> None:
    outcomes(tape, "one/done.1", "two/done.2", "three/done.3")


def money(tape: Tape, *changes: tuple[str, str | None]) -> None:
    """Of one account in a table and a database; each change is a row's id, and that of a database's row or None."""
    committed(tape, "first", ONE, 10, accounts="50/first")
    rows, others = [(0, "50/first", ONE, 10)], []
    for n, (row, other) in enumerate(changes, 2):
        by, when = f"{n}" * 32, 10 * n
        committed(tape, f"t{n}", by, when, accounts=row, **({"database": other} if other else {}))
        rows.append((2 * n, row, by, when))
        others += [(n, other, by, when)] if other else []
    log(tape, "accounts", *rows)
    log(tape, "database", *others)
    tape.do("end", "total", tables=["s/accounts"], changes=["s/database"], total=50)


@right
def the_database_has_what_the_table_lacks(tape: Tape) -> None:
    money(tape, ("20/a", "30/b"), ("20/c", None), ("55/d", "-35/e"))


@wrong("wrong-total")
def money_is_made(tape: Tape) -> None:
    money(tape, ("20/a", "30/b"), ("60/c", "-30/d"))


@wrong("wrong-total")
def money_is_away_for_one_commit(tape: Tape) -> None:
    money(tape, ("20/a", None), ("50/b", None))


@right
def rows_without_a_number_do_not_count(tape: Tape) -> None:
    money(tape)
    tape.do("end", "total", tables=[], changes=["s/nothing"], total=7)


test_each_anomaly_is_named, test_a_sound_history_is_accepted = TABLE.tests()
