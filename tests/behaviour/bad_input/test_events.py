"""One rule for events, by each way to write: what is legal is taken; the rest raises an error or is counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple
from zlib import crc32

import pyarrow as pa
import pytest

import anabranch
from anabranch import errors
from anabranch.ports import Log
from anabranch.protocol.limits import AHEAD_MS, HEADERS, LATEST, ROW_KEY
from anabranch.protocol.schemas import records as r
from tests.behaviour.bad_input.place import SOON_S, WAIT_MS, Place
from tests.cluster import Cluster
from tests.crash.raw import Raw, Refused, Written, make_txn_id

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
LIMIT = 20_000
Headers = tuple[tuple[str, bytes], ...]


class Row(NamedTuple):
    """An event, and what becomes of it.

    ``ahead``: the time is this far ahead of now. ``name``: of another stream; journals and plain writes have none.
    ``error``: of a call, and of a commit whose receipt has the record; empty: it is taken. ``counted``: why a
    record in a journal is in no commit, which then misses it. ``unsent``: brokers refuse the record itself.
    """

    error: str = ""
    counted: str = ""
    settings: dict[str, str | int] = {}  # noqa: RUF012 - never changed
    key: bytes | None = b"k"
    size: int = 0
    headers: Headers = ()
    timestamp: int = 0
    ahead: int | None = None
    name: str = ""
    unsent: bool = False

    @property
    def time(self) -> int:
        return self.timestamp if self.ahead is None else int(time.time() * 1000) + self.ahead

    def value(self, way: str) -> bytes:
        return way.encode().ljust(self.size, b".")

    def stream(self, place: Place) -> str:
        return self.name.replace("SCOPE", place.scope) or place.stream


WRONG = "InvalidArgument"
TABLE: dict[str, str | int] = {"table": "true"}
SMALL: dict[str, str | int] = {"max.message.bytes": LIMIT}
SECOND: dict[str, str | int] = {"retention.ms": 1_000}

ROWS: dict[str, Row] = {
    "the last millisecond of 9999": Row(timestamp=LATEST),
    "the one after it": Row(WRONG, "bad_time", timestamp=LATEST + 1),
    "2^62": Row(WRONG, "bad_time", timestamp=1 << 62),
    "a time below 0": Row(WRONG, "bad_time", timestamp=-2),
    "a year ahead": Row(ahead=365 * DAY_MS),
    "half an hour ahead, short retention": Row(settings=SECOND, ahead=AHEAD_MS // 2),
    "a day ahead, short retention": Row(WRONG, "bad_time", SECOND, ahead=DAY_MS),
    "a day ahead, a week's": Row(settings={"retention.ms": 7 * DAY_MS}, ahead=DAY_MS),
    "what fits": Row(settings=SMALL, size=LIMIT - 200),
    "what does not": Row("EventTooLarge", settings=SMALL, size=LIMIT + 1, unsent=True),
    "headers that do not": Row(
        "EventTooLarge", settings=SMALL, headers=(("h", b"x" * LIMIT),), unsent=True
    ),
    "most headers": Row(headers=(("h", b""),) * (HEADERS.value - 1)),
    "more headers": Row(WRONG, "bad_header", headers=(("h", b""),) * (HEADERS.value + 1)),
    "a reserved header": Row(WRONG, "bad_header", headers=(("ab.variant", b"x"),)),
    "a header without a name, twice": Row(headers=(("", b""), ("", b"x"))),
    "no key": Row(key=None),
    "an empty key": Row(key=b""),
    "a row": Row(settings=TABLE, key=b"x" * ROW_KEY.value),
    "a row without a key": Row(WRONG, "bad_key", TABLE, key=None),
    "a row with an empty key": Row(WRONG, "bad_key", TABLE, key=b""),
    "a row whose key is long": Row(WRONG, "bad_key", TABLE, key=b"x" * (ROW_KEY.value + 1)),
    "a name without a scope": Row(WRONG, name="events"),
    "a name with a dot": Row(WRONG, name="SCOPE/a.b"),
    "a name of no stream": Row("UnknownStream", name="SCOPE/none"),
}

# One of each error, and what is just legal.
QUICK = (
    "the last millisecond of 9999",
    "the one after it",
    "half an hour ahead, short retention",
    "a day ahead, short retention",
    "what fits",
    "what does not",
    "most headers",
    "more headers",
    "a reserved header",
    "no key",
    "a row",
    "a row without a key",
    "a name without a scope",
    "a name of no stream",
)


def by_command(place: Place, row: Row, value: bytes) -> None:
    headers = tuple(r.EventHeader(*pair) for pair in row.headers)
    event = r.Event(row.stream(place), -1, row.key, value, headers, row.time or -1)
    place.raw.ask(r.OneShot(make_txn_id(), place.scope, None, (event,)))


def by_journal(place: Place, row: Row, value: bytes) -> None:
    token, pen, _ = place.touched()
    record = (place.journal, 0, row.key, value, [pen.header, *row.headers])
    (offset,) = place.raw.produce([record], row.time)
    checksum = crc32(value, crc32(row.key or b""))
    pen.accounts[place.stream, 0] = Written(offset, offset + 1, 1, checksum)
    try:
        place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
    except Refused:
        assert place.state(token).state == "OPEN"
        raise


def by_plain_write(place: Place, row: Row, value: bytes) -> None:
    place.raw.produce([(place.journal, 0, row.key, value, [*row.headers])], row.time)


def by_write(place: Place, row: Row, value: bytes, *, opened: bool) -> None:
    with place.client.begin(place.scope) as txn:
        if opened:
            txn.token()
            txn.write(place.stream, b"first", key=b"k")
        txn.write(row.stream(place), value, row.key, row.headers, row.time or None)
        txn.commit()


def by_batch(place: Place, row: Row, value: bytes) -> None:
    pairs = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    columns = {
        "value": pa.array([value]),
        "key": pa.array([row.key], pa.binary()),
        "headers": pa.array([[{"key": k, "value": v} for k, v in row.headers]], pairs),
        "timestamp": pa.array([row.time or None], pa.int64()),
    }
    with place.client.begin(place.scope) as txn:
        txn.token()
        txn.write_batch(row.stream(place), pa.table(columns))
        txn.commit()


CALLS: dict[str, Callable[[Place, Row, bytes], None]] = {
    "a command": by_command,
    "a buffered write": lambda place, row, value: by_write(place, row, value, opened=False),
    "a write once it is open": lambda place, row, value: by_write(place, row, value, opened=True),
    "a batch": by_batch,
}
JOURNAL, PLAIN = "a journal", "a plain write"
WAYS = CALLS | {JOURNAL: by_journal, PLAIN: by_plain_write}


def written(place: Place, row: Row) -> dict[str, str]:
    """The errors, by each way; a good plain record comes last."""
    found = {}
    for way, write in (CALLS if row.name else WAYS).items():
        try:
            write(place, row, row.value(way))
        except (errors.InvalidArgument, errors.EventTooLarge, errors.UnknownStream) as error:
            found[way] = type(error).__name__
        except Refused as error:
            found[way] = error.code
        except AssertionError as error:
            if not (row.unsent and "MSG_SIZE_TOO_LARGE" in str(error)):
                raise
            found[way] = "unsent"
    place.raw.produce([(place.journal, 0, b"k", b"last", [])])
    return found


def due(row: Row) -> dict[str, str]:
    """The errors that are due."""
    found = dict.fromkeys(CALLS, row.error) if row.error else {}
    if row.unsent:
        found |= dict.fromkeys((JOURNAL, PLAIN), "unsent")
    elif row.counted:
        found[JOURNAL] = row.error if row.counted == "bad_time" else "ReceiptMismatch"
    return found


def seen(place: Place) -> set[bytes]:
    """The values in the stream, once the last plain record is there."""
    until = time.monotonic() + SOON_S
    while True:
        read = place.client.snapshot(place.stream).read(place.stream)
        values = {event.value or b"" for event in read}
        if b"last" in values or time.monotonic() > until:
            return values - {b"last", b"first"}
        time.sleep(0.05)


@pytest.mark.parametrize(
    "rows", [pytest.param(QUICK, id="few"), pytest.param(ROWS, id="all", marks=pytest.mark.long)]
)
def test_an_event_is_judged_alike_by_all_ways(
    rows: Collection[str],
    cluster: Cluster,
    client: anabranch.Client,
    raw: Raw,
    log: Log,
    unique: str,
    subtests: pytest.Subtests,
) -> None:
    places = {
        what: Place(cluster, client, raw, log, f"e{number}{unique}")
        for number, what in enumerate(rows)
    }
    with ThreadPoolExecutor(8) as pool:
        made = [
            pool.submit(client.create_stream, place.stream, settings=ROWS[what].settings)
            for what, place in places.items()
        ]
    assert [each.exception() for each in made] == [None] * len(made)
    raised = {what: written(place, ROWS[what]) for what, place in places.items()}
    for what in rows:
        row = ROWS[what]
        with subtests.test(what):
            assert raised[what] == due(row)
            if row.name:
                continue
            taken = {row.value(way) for way in WAYS if not row.error}
            assert seen(places[what]) == taken
            count = 1 if row.counted == "bad_time" else 2  # the commit names the time itself
            rejected = {row.counted: count} if row.counted else {}
            # What an open transaction had written is `late` if its abort is read first.
            found = client.describe(places[what].stream).rejected
            assert {why: n for why, n in found.items() if why != "late"} == rejected
