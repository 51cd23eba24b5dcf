"""System tables of a client: rows for operators, from controllers, histories and replicas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from anabranch.client.reading import Reading
from anabranch.client.shared import Shared
from anabranch.core.hybrid_time import to_text
from anabranch.core.legal_names import check_scope
from anabranch.core.stream_settings import is_table
from anabranch.core.stream_states import CREATING, GIVEN_UP
from anabranch.errors import AnabranchError, InvalidArgument, NotAuthorized
from anabranch.presentation.system_tables import (
    CommitRow,
    commit_rows,
    lock_rows,
    table_rows,
    transaction_rows,
    version_rows,
)
from anabranch.reading.history import check_at
from anabranch.reading.snapshot import At
from anabranch.schemas import records as r
from anabranch.types import Listed, StreamDescription, description_of, info_of, open_of


class SystemTables:
    """The rows of system tables."""

    def __init__(self, shared: Shared, reading: Reading) -> None:
        self._shared = shared
        self._session = shared.session
        self._reading = reading

    def rows(
        self,
        name: str,
        of: str | None,
        *,
        key: bytes | None,
        start: At,
        until: At,
        folder: str | Path | None,
        limit: int,
        timeout: float | None,
    ) -> Listed[Any]:
        """As `Client.system`, whose arguments `check_call` has checked."""
        missing: dict[int, AnabranchError] = {}
        deadline = self._shared.deadline(timeout)
        if name == "transactions":
            opened = self._session.open_ones(r.ListOpen(of, None, limit), deadline).each(open_of)
            wanted = r.ListTransactions(of, True, limit, None)
            listed = self._session.transactions(wanted, self._shared.deadline(timeout))
            found: Iterable[Any] = transaction_rows(
                opened, listed.each(info_of), self._session.wall()
            )
            missing = opened.missing | listed.missing
        elif name == "locks":
            locks = self._session.table_locks(r.ListTableLocks(of, limit), deadline)
            found, missing = lock_rows(locks), locks.missing
        elif name == "tables":
            streams = self._session.streams(of, deadline).each(description_of)
            missing = streams.missing
            found = table_rows(streams, self._newest(streams, self._shared.deadline(timeout)))
        elif name == "commits":
            found = self._commits(
                of or "", check_at(start, "start"), check_at(until), limit, deadline
            )
        else:
            table, row = of or "", key or b""
            with (
                self._reading.replica([table], folder, timeout) as replica,
                replica.snapshot(until, timeout=timeout) as view,
            ):
                found = list(islice(version_rows(table, view.versions(table, row)), limit))
        return Listed(islice(found, limit), missing)

    def _commits(
        self, of: str, above: int | None, until: int | None, limit: int, deadline: float
    ) -> list[CommitRow]:
        scope, slash, _ = of.partition("/")
        # The histories have all commits up to a safe time by now.
        until = self._session.instant(check_scope(scope), until, deadline)
        if above is not None and above > until:
            raise InvalidArgument(f"start {to_text(above)} is later than {to_text(until)}, the end")
        if slash:
            names = [self._session.describe(of, deadline).stream]
        else:
            gone = {CREATING, *GIVEN_UP}
            found = self._session.streams(scope, deadline)
            names = [each.stream for each in found if each.state not in gone]
        left = max(0.1, deadline - self._session.now())
        return commit_rows(self._reading.readers().ports, names, above or 0, until, limit, left)

    def _newest(self, found: Sequence[StreamDescription], deadline: float) -> dict[str, int]:
        """The newest commit of each table among these streams, for scopes in which this lane may see all tables."""
        newest: dict[str, int] = {}
        tables = [
            each.stream for each in found if is_table(each.settings) and each.state != CREATING
        ]
        for scope, its in groupby(tables, lambda table: table.partition("/")[0]):
            # The latter if a table was deleted meanwhile.
            with suppress(NotAuthorized, InvalidArgument):
                told = self._session.safe_tables(scope, None, list(its), deadline)
                newest |= {each.table: each.last for each in told.tables}
        return newest
