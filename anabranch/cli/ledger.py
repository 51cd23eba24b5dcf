"""`anabranch ledger`: the table by which a database decides transactions, and their recovery."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from anabranch.cli.errors import DRIVERS, CheckFailed, failure_of
from anabranch.cli.options import App, ClusterOptions, LogFormat, Yes, argument, option, seconds_of
from anabranch.cli.output import print_result, show, show_failure
from anabranch.errors import AskOutcomeError, InvalidArgument, NoLedger, RetryError, count_of
from anabranch.presentation.rows import time_text, transaction_row

if TYPE_CHECKING:
    from anabranch.ledger import Ledger, Recovered

DATABASE_VARIABLE = "ANABRANCH_LEDGER"
FORMS = (
    "give postgresql://USER@HOST/NAME, libpq's words such as 'host=HOST dbname=NAME', or the path of an "
    "SQLite file"
)
Table = Annotated[str, option("--table NAME", "The ledger's table.")]
TABLE = "anabranch_ledger"
app = App(no_args_is_help=True, help="Create, recover, adopt and list a database's ledger.")


@dataclass(frozen=True)
class LedgerOptions(ClusterOptions):
    """The options of all commands of a ledger."""

    database: Annotated[
        str | None,
        option(
            "--database -d URL",
            "The database: postgresql://HOST/NAME, or the path of an SQLite file.",
            envvar=DATABASE_VARIABLE,
        ),
    ] = None
    table: Table = TABLE

    def ledger(self, *, new: bool = False) -> Ledger:
        """The ledger; as `ledger_of`."""
        return ledger_of(self.database, self.table, new=new)


def ledger_of(database: str | None, table: str, *, new: bool = False) -> Ledger:
    """A ledger by its database. ``new``: an SQLite file that is missing will be made.

    Raises: InvalidArgument (no database is given), NoLedger (its file is missing).
    """
    from anabranch.ledger import Ledger

    return Ledger(_connector(database, new=new), table=table)


def _connector(database: str | None, *, new: bool) -> Callable[[], Any]:
    if not database:
        raise InvalidArgument(
            f"no database given: use --database URL or set {DATABASE_VARIABLE}, such as postgresql://HOST/NAME"
        )
    scheme, is_url, _ = database.partition("://")
    if is_url and scheme == "sqlite":
        path = database.removeprefix("sqlite://").removeprefix("/") or "FILE"
        raise InvalidArgument(
            f"--database {database}: of SQLite give the file's path: --database {path}"
        )
    if is_url and scheme not in ("postgresql", "postgres"):
        raise InvalidArgument(f"--database {scheme}://… is not supported: {FORMS}")
    if is_url or "=" in database:
        import psycopg

        return lambda: psycopg.connect(database)
    import sqlite3

    if not new and not Path(database).exists():  # connecting would make an empty file
        raise NoLedger(
            f"there is no file {database}: correct --database, or make it with `anabranch ledger create`"
        )
    return lambda: sqlite3.connect(database)


@app.command("create")
def create(options: LedgerOptions) -> None:
    """Create the ledger's table in a database, for this cluster. The command is safe to repeat."""
    ledger = options.ledger(new=True)
    with options.client() as client:
        ledger.create(client)
    print_result(
        {"table": options.table}, f"the ledger is in {options.table}", as_json=options.json
    )


@app.command("recover")
def recover(
    options: LedgerOptions,
    scope: Annotated[str | None, argument("SCOPE", "Only transactions of this scope.")] = None,
    older_than: Annotated[
        str,
        option(
            "--older-than SPAN", "Only transactions prepared at least this long ago: 90s, 30m, 1h."
        ),
    ] = "60s",
    every: Annotated[str, option("--every SPAN", "The time between two checks.")] = "10s",
    once: Annotated[
        bool,
        option("--once", "Check once, and fail if there are alarms or waiting transactions."),
    ] = False,
    http: Annotated[
        str | None,
        option(
            "--http HOST:PORT",
            "Serve /metrics (Prometheus), /live and /ready here.",
            show_default=False,
        ),
    ] = None,
    log_format: LogFormat = "text",
) -> None:
    """End prepared transactions of dead processes as the database decided, until Ctrl-C or SIGTERM.

    Run one such service for each ledger; several do no harm. A check reads at most 1,000 rows. The service waits
    for a database or a cluster that does not answer.
    """
    from anabranch.ledger.watch import watched

    age, pause = seconds_of(older_than), seconds_of(every)
    ledger = options.ledger()
    with watched(http, options.table, pause) as watch, options.client() as client:
        while True:
            try:
                found = watch.look(lambda: ledger.recover(client, scope, age))
            except Exception as error:
                if once or not _passes(error):
                    raise
                show_failure(failure_of(error), as_json=options.json)
            else:
                _show(found, as_json=options.json, always=once)
                if once and found.alarms:
                    raise CheckFailed(f"{count_of(len(found.alarms), 'alarm')}, shown above")
                for why in (*found.missing.values(), *found.waiting.values()) if once else ():
                    raise why
            if once:
                return
            time.sleep(pause)


def _passes(error: Exception) -> bool:
    """Whether waiting may help: the cluster or the database does not answer."""
    if isinstance(error, RetryError | AskOutcomeError):
        return True
    loaded = (sys.modules.get(name) for name in DRIVERS)
    return any(module and isinstance(error, module.OperationalError) for module in loaded)


def _show(found: Recovered, *, as_json: bool, always: bool) -> None:
    document = {
        "committed": [txn_id.hex() for txn_id in found.committed],
        "aborted": [txn_id.hex() for txn_id in found.aborted],
        "held": [txn_id.hex() for txn_id in found.held],
        "waiting": {txn_id.hex(): str(why) for txn_id, why in found.waiting.items()},
        "missing": {str(partition): str(why) for partition, why in found.missing.items()},
        "expired": [txn_id.hex() for txn_id in found.expired],
        "forgotten": found.forgotten,
        "alarms": {txn_id.hex(): text for txn_id, text in found.alarms.items()},
    }
    if not always and not any(document.values()):
        return
    line = (
        f"committed {len(found.committed)}, aborted {len(found.aborted)}, held by a process {len(found.held)}, "
        f"waiting {len(found.waiting)}, expired {len(found.expired)}, rows forgotten {found.forgotten}, "
        f"alarms {len(found.alarms)}"
    )
    more = [f"ALARM {txn_id.hex()}: {text}" for txn_id, text in found.alarms.items()]
    more += [f"waiting {txn_id.hex()}: {why}" for txn_id, why in found.waiting.items()]
    more += [f"no answer of control partition {p}: {why}" for p, why in found.missing.items()]
    more += [
        f"expired {txn_id.hex()}: it has ended, and its outcome was deleted"
        for txn_id in found.expired
    ]
    print_result(document, line, *more, as_json=as_json)


@app.command("adopt")
def adopt(
    options: LedgerOptions,
    keep: Annotated[
        bool,
        option(
            "--keep",
            "Keep the secret: the server moved with all its rows, and the former one is gone.",
        ),
    ] = False,
    yes: Yes = False,
) -> None:
    """Assign the ledger to its present server, after its database was restored, copied or promoted.

    The ledger gets a new secret. The command lists the transactions that were prepared with the former one: check
    their rows in the former database, then end them by force.
    """
    ledger = options.ledger()
    with options.client_after("The ledger will belong only to this server.", yes=yes) as client:
        left = ledger.adopt(client, keep=keep)
    rows = map(transaction_row, left)
    columns = ("txn_id", "scope", "owner", "name", "state")
    title = "Prepared with the former secret"
    show("prepared", rows, columns, as_json=options.json, title=title)


@app.command("list")
def list_rows(options: LedgerOptions) -> None:
    """List the ledger's rows, the oldest first: at most 1,000."""
    rows = [
        {
            "txn_id": row.txn_id.hex(),
            "outcome": row.outcome,
            "made_at": time_text(row.made),
            "former": row.former,
        }
        for row in options.ledger().rows()
    ]
    show("rows", rows, ("txn_id", "outcome", "made_at", "former"), as_json=options.json)
