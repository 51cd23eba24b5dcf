"""Turns at hot rows: `transact` asks for one after its locks broke at a row, and reads anew once it has come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from anabranch.client.session import Session
from anabranch.core.locks.table_writes import fingerprint
from anabranch.errors import (
    AnabranchError,
    FeatureNotEnabled,
    LocksBroken,
    NotAuthorized,
    RetryError,
    UnsupportedVersion,
)
from anabranch.protocol import limits
from anabranch.protocol.defaults import HOT_ROW_S, NO_TURNS_S, TURN_WAIT_S
from anabranch.protocol.legal_names import split_stream
from anabranch.protocol.schemas import records as r

log = logging.getLogger("anabranch.client")

_MOST_HOT = 1_000  # rows that are remembered


class HotRow(LocksBroken):
    """A row at which others take turns was read without a turn. `transact` catches this error."""


class RowTurn(NamedTuple):
    """A turn that has come. ``txn_id``: of the transaction that is to commit in it.

    ``timestamp``: all commits up to this time are on the log; ``last``: each table's newest one.
    """

    txn_id: bytes
    row: tuple[str, int]  # table and fingerprint
    timestamp: int
    last: dict[str, int]


class HotRows:
    """The rows of a replica at which others took turns a moment ago. Thread-safe."""

    def __init__(self, session: Session, tables: Sequence[str]) -> None:
        self.session, self.tables = session, tables
        self._until: dict[tuple[str, bytes], float] = {}
        self.no_turns_until = 0.0  # the controller knows no turns

    def has(self, table: str, key: bytes) -> bool:
        """Whether the row is hot."""
        return bool(self._until) and self.session.now() < self._until.get((table, key), 0.0)

    def note(self, table: str, key: bytes, *, hot: bool) -> None:
        """Note whether others want the row."""
        if not hot:
            self._until.pop((table, key), None)
            return
        if len(self._until) >= _MOST_HOT:
            self._until.clear()
        self._until[table, key] = self.session.now() + HOT_ROW_S


class Turns:
    """The turns of one call of `transact`: it has one at a time, ``held``."""

    def __init__(self, hot: HotRows) -> None:
        self._hot, self._session = hot, hot.session
        self.held: RowTurn | None = None

    def check_cold(self, table: str, key: bytes) -> None:
        """Raise `HotRow` if the row is hot and no turn is held: the locks would be broken."""
        if self.held is None and self._hot.has(table, key):
            raise HotRow(f"others take turns at {table} {key!r:.100}", table=table, key=key)

    def take_after(self, error: AnabranchError, deadline: float) -> bool:
        """Wait for a turn for the next try, if locks broke at a known row. Returns whether it has come.

        If they broke in a turn at that row, the turn continues.
        """
        if not (isinstance(error, LocksBroken) and error.key):
            self.give_up()
            return False
        if self.held is not None and self.held.row != (error.table, fingerprint(error.key)):
            self.give_up()
        former, self.held = self.held, None
        with suppress(RetryError):
            txn_id = self._session.new_txn_id(split_stream(error.table)[0], deadline)
            return self._take(txn_id, error.table, error.key, former, deadline)
        return False

    def take_for(self, txn_id: bytes, table: str, key: bytes, deadline: float) -> RowTurn | None:
        """Wait for a turn for a transaction that was advised to take one, if none is held."""
        if self.held is None:
            self._take(txn_id, table, key, None, deadline)
            return self.held
        return None

    def _take(
        self, txn_id: bytes, table: str, key: bytes, former: RowTurn | None, deadline: float
    ) -> bool:
        hot, now = self._hot, self._session.now()
        if not key or now < hot.no_turns_until:
            return False
        deadline, point = min(deadline, now + TURN_WAIT_S), fingerprint(key)
        tables = hot.tables if len(hot.tables) <= limits.TURN_TABLES.value else (table,)
        before = None if former is None else former.txn_id
        wait_ms = max(1, int((deadline - now) * 1000))
        command = r.TakeTurn(txn_id, before, table, point, tuple(tables), wait_ms)
        answer = None
        try:
            answer = self._session.take_turn(command, deadline)
        except (FeatureNotEnabled, UnsupportedVersion, NotAuthorized) as none:
            log.info("no turns at hot rows: %s", none)
            hot.no_turns_until = now + NO_TURNS_S
        except RetryError as late:
            log.debug("no turn at a row of %s in time: %s", table, late)
        hot.note(table, key, hot=answer is not None and answer.decided)
        if answer is not None:
            last = {each.table: each.last for each in answer.tables}
            self.held = RowTurn(txn_id, (table, point), answer.timestamp, last)
        return answer is not None

    def committed(self, txn_id: bytes) -> None:
        """Note that this transaction is committed, which has ended its turn."""
        if self.held is not None and self.held.txn_id == txn_id:
            self.held = None

    def give_up(self) -> None:
        """Let the next one have the row."""
        if self.held is not None:
            command = r.TakeTurn(self.held.txn_id, None, *self.held.row, (), 0)
            self.held = None
            with suppress(AnabranchError):
                self._session.give_up_turn(command)
