"""How much one open transaction holds of its control partition after each round, and the most that it may hold.

Everything is counted in the rows of the leader's table, and nothing is taken from the product's own counts. So a
limit that is not checked is found, and so is a kind of row that nothing limits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

from anabranch.controller.controller import Controller
from anabranch.core import rows as k
from anabranch.core.decisions import quotas
from anabranch.core.rows import Entry
from anabranch.core.state import State
from anabranch.protocol import limits
from anabranch.protocol.hybrid_time import to_ms
from anabranch.protocol.ids import TXN_ID_SIZE
from anabranch.protocol.messages import size_of
from anabranch.protocol.schemas.codec import encode
from anabranch.protocol.schemas.records import ReadLockRow
from tests.sim.check_log import hold

Rows = Mapping[
    Entry, list[tuple[bytes, Any]]
]  # of a transaction: a row's key behind its kind, and the row


class Thing(NamedTuple):
    """Something of which a transaction may hold many.

    ``limit``: the name of its limit in `anabranch.protocol.limits`. ``few``: the limit in runs with greedy clients,
    which no other transaction of these runs comes to.
    """

    limit: str
    few: int
    count: Callable[[Rows], int]


def _sets(rows: Rows) -> list[ReadLockRow]:
    return [row for _, row in rows[Entry.READ_LOCK] if isinstance(row, ReadLockRow)]


def _locks(rows: Rows) -> int:
    """A table of which nothing is locked, and a writer that was read from, count as one."""
    return sum(
        len(each.read_from) + sum(len(on.points) + len(on.ranges) or 1 for on in each.locks)
        for each in _sets(rows)
    )


def _ranges(rows: Rows) -> int:
    """Of the table with most of them."""
    found: dict[str, int] = defaultdict(int)
    for each in _sets(rows):
        for on in each.locks:
            found[on.table] += len(on.ranges)
    return max(found.values(), default=0)


def _events(rows: Rows) -> int:
    return sum(len(encode(row)) - 200 for _, row in rows[Entry.PREPARED])


# `limits.UNCOMMITTED` and the quota `staged` are not among them: they refuse new streams and writers, and known
# writers append to journals without asking, so no number of bytes is the most. tests/core/test_quotas.py has the
# refusals.
THINGS: dict[str, Thing] = {
    "bytes of receipts": Thing(
        "RECEIPTS", 20_000, lambda rows: size_of(row.receipt for _, row in rows[Entry.WRITER])
    ),
    "locks": Thing("LOCKS", 60, _locks),
    "sets of locks": Thing("LOCKS", 60, lambda rows: len(_sets(rows))),
    "ranges of a table": Thing("RANGES", 60, _ranges),
    "askers of its commit": Thing(
        "WAITERS", 12, lambda rows: sum(len(row.askers) for _, row in rows[Entry.PENDING_COMMIT])
    ),
    "bytes of prepared events": Thing("PREPARED_EVENTS", limits.PREPARED_EVENTS.value, _events),
    "writers": Thing("WRITERS", 60, lambda rows: len(rows[Entry.WRITER])),
    "participants": Thing(
        "PARTICIPANTS", limits.PARTICIPANTS.value, lambda rows: len(rows[Entry.PARTITION])
    ),
    "tables": Thing("TABLES", 20, lambda rows: sum(len(row.tables) for _, row in rows[Entry.READS])),
}  # fmt: skip

_ROW = 400  # bytes of a row and its key, without what is counted beside it, at most
# What limits the number of rows of a kind, and the bytes that one of these things may have.
KINDS: dict[Entry, dict[str, int]] = {
    Entry.TXN: {},
    Entry.PARTICIPANT: {},
    Entry.WRITER: {"writers": _ROW, "bytes of receipts": 1},
    Entry.LABEL: {"writers": _ROW},
    Entry.PENDING_COMMIT: {"bytes of receipts": 1, "askers of its commit": _ROW},
    Entry.STAGED_MERGE: {},
    Entry.MOVED: {},
    Entry.YIELDED: {},
    Entry.PREPARED: {"bytes of prepared events": 1},
    Entry.READ_LOCK: {
        "locks": _ROW, "ranges of a table": 2 * limits.ROW_KEY.value, "sets of locks": _ROW,
        "writers": _ROW,
    },
    Entry.READS: {"tables": _ROW},
    Entry.VOTES: {},
    Entry.PARTITION: {"participants": _ROW},
    Entry.COORDINATOR: {},
}  # fmt: skip
_ONE = 8_000  # bytes of a row of which there is one, and of what streams and journals bring about


_AGE = "snapshot"  # the quota of the age of what tables are read at
_FEW_MS = 60_000  # … in runs with greedy clients
_LATE_MS = 11_000  # leaders look now and then, and clients may have raised the time by the skew


def check_held(leader: Controller, now_ms: float) -> None:
    """No open transaction holds more of anything than it may, nor more bytes than all of that comes to.

    ``now_ms``: by a clock that is right.
    """
    for txn_id in leader.state.open:
        rows, size = _rows(leader, txn_id)
        _check_age(leader, rows, now_ms)
        for name, thing in THINGS.items():
            found, most = thing.count(rows), getattr(limits, thing.limit).value
            hold(found <= most, f"{txn_id.hex()} holds {found:,} {name}, {most:,} are allowed")
        for kind, found in size.items():
            its = KINDS.get(kind)
            if its is None:
                hold(False, f"{txn_id.hex()} holds rows {kind.name}, which nothing limits")
            elif its:
                most = _ONE + sum(
                    getattr(limits, THINGS[n].limit).value * b for n, b in its.items()
                )
                hold(
                    found <= most,
                    f"{txn_id.hex()}: rows {kind.name} of {found:,} bytes; {most:,} are due",
                )


def _check_age(leader: Controller, rows: Rows, now_ms: float) -> None:
    """A transaction that reads tables at an old snapshot is over, by the leader's clock and by the right one."""
    for _, row in rows[Entry.TXN]:
        if row.state != "OPEN" or not rows[Entry.READS] or rows[Entry.PENDING_COMMIT]:
            continue
        now_ms = min(now_ms, to_ms(leader.state.round.hybrid_time))
        age_ms, most_ms = now_ms - to_ms(row.snapshot), limits.QUOTAS[_AGE].value
        hold(
            age_ms <= most_ms + _LATE_MS,
            f"{row.txn_id.hex()} reads tables as of {age_ms:,.0f} ms ago, {most_ms:,} are allowed",
        )


def _rows(leader: Controller, txn_id: bytes) -> tuple[Rows, dict[Entry, int]]:
    """A transaction's rows, and their bytes, by kind."""
    rows: dict[Entry, list[tuple[bytes, Any]]] = defaultdict(list)
    size: dict[Entry, int] = defaultdict(int)
    for key, value in leader.table.scan(k.STATUS + txn_id):
        _, kind, identifier = k.split_key(key[1:])
        rows[kind].append((identifier, k.read_row(key[1:], value)))
        size[kind] += len(key) - 1 - TXN_ID_SIZE + len(value)
    return rows, size


@contextmanager
def few_of_each() -> Iterator[None]:
    """In here limits are small, so that a client soon comes to them."""
    few_ms = limits.QUOTAS[_AGE]._replace(value=_FEW_MS)
    real_default = quotas._default

    def default(state: State, lane: str, name: str) -> int | None:
        """Also the lane `open` has this quota, whose senders are trusted in all runs."""
        return _FEW_MS if name == _AGE else real_default(state, lane, name)

    with ExitStack() as stack:
        stack.enter_context(patch.dict(limits.QUOTAS, {_AGE: few_ms}))
        stack.enter_context(patch.object(quotas, "_default", default))
        for thing in {each.limit: each for each in THINGS.values()}.values():
            real = getattr(limits, thing.limit, None)
            if real is not None:
                few = real._replace(value=min(real.value, thing.few))
                stack.enter_context(patch.object(limits, thing.limit, few))
        yield
