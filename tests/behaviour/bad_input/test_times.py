"""Times of events, by each way to write: legal times are committed, others raise an error or are counted."""

from __future__ import annotations

import time
from collections.abc import Callable

import pyarrow as pa
import pytest

import anabranch
from anabranch import errors
from anabranch.core.limits import AHEAD_MS, LATEST
from anabranch.ports import Log
from anabranch.schemas import records as r
from tests.behaviour.bad_input.place import SOON_S, WAIT_MS, Place
from tests.cluster import Cluster
from tests.crash.raw import Raw, Refused, make_txn_id

pytestmark = pytest.mark.broker

DAY_MS = 86_400_000
# The stream's retention; an event's time, or None and how far ahead it is; whether the stream accepts it.
TIMES: dict[str, tuple[int, int | None, int, bool]] = {
    "the last millisecond of 9999": (-1, LATEST, 0, True),
    "the one after it": (-1, LATEST + 1, 0, False),
    "2^62": (-1, 1 << 62, 0, False),
    "below 0": (-1, -2, 0, False),
    "a year ahead": (-1, None, 365 * DAY_MS, True),
    "half an hour ahead, short retention": (1_000, None, AHEAD_MS // 2, True),
    "a day ahead, short retention": (1_000, None, DAY_MS, False),
    "a day ahead, a week's retention": (7 * DAY_MS, None, DAY_MS, True),
}


def seen(place: Place) -> list[bytes | None]:
    return [event.value for event in place.client.snapshot(place.stream).read(place.stream)]


def by_command(place: Place, timestamp: int) -> None:
    event = r.Event(place.stream, -1, b"k", b"event", (), timestamp)
    place.raw.ask(r.OneShot(make_txn_id(), place.scope, None, (event,)))


def by_journal(place: Place, timestamp: int) -> None:
    token, pen, touched = place.touched()
    pen.write(place.stream, touched.segments, [(b"k", b"event")], timestamp)
    try:
        place.raw.ask(r.Commit(token, (pen.receipt(),), None, None, WAIT_MS))
    except Refused:
        assert place.state(token).state == "OPEN"
        raise


def by_plain_write(place: Place, timestamp: int) -> None:
    """A good record of the same batch is committed, whatever happens to the other."""
    record = (place.journal, 0, b"k", b"event", list[tuple[str, bytes]]())
    place.raw.produce([record], timestamp)
    place.raw.produce([(place.journal, 0, b"k", b"other", [])])
    until = time.monotonic() + SOON_S
    while b"other" not in seen(place) and time.monotonic() < until:
        time.sleep(0.05)
    wrong = place.client.describe(place.stream).rejected
    assert wrong == ({} if b"event" in seen(place) else {"bad_time": 1})


def by_write(place: Place, timestamp: int, *, opened: bool) -> None:
    with place.client.begin(place.scope) as txn:
        if opened:
            txn.token()
            txn.write(place.stream, b"first", key=b"k")
        txn.write(place.stream, b"event", key=b"k", timestamp=timestamp)
        txn.commit()


def by_batch(place: Place, timestamp: int) -> None:
    columns = {"value": [b"event"], "key": [b"k"], "timestamp": [timestamp]}
    with place.client.begin(place.scope) as txn:
        txn.token()
        txn.write_batch(place.stream, pa.table(columns))
        txn.commit()


WAYS: dict[str, Callable[[Place, int], None]] = {
    "a command": by_command,
    "a journal": by_journal,
    "a plain write": by_plain_write,
    "a buffered write": lambda place, at: by_write(place, at, opened=False),
    "a write once it is open": lambda place, at: by_write(place, at, opened=True),
    "a batch": by_batch,
}


@pytest.mark.parametrize("what", TIMES)
def test_a_time_is_judged_alike_by_all_ways(
    cluster: Cluster, client: anabranch.Client, raw: Raw, log: Log, unique: str, what: str
) -> None:
    retention_ms, absolute, ahead_ms, is_taken = TIMES[what]
    found, codes = {}, set()
    for number, (way, write) in enumerate(WAYS.items()):
        place = Place(cluster, client, raw, log, f"t{number}{unique}")
        client.create_stream(place.stream, segments=2, settings={"retention.ms": retention_ms})
        try:
            write(place, absolute or int(time.time() * 1000) + ahead_ms)
        except errors.InvalidArgument:
            codes.add("InvalidArgument")
        except Refused as error:
            codes.add(error.code)
        found[way] = seen(place).count(b"event")
    assert found == dict.fromkeys(WAYS, int(is_taken))
    assert codes == (set() if is_taken else {"InvalidArgument"})
