"""System tables: commits as the histories have them, against a naive model; versions as ClickHouse sees them."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from functools import partial

import pytest

from anabranch.errors import InvalidArgument
from anabranch.presentation import system_tables as system
from anabranch.protocol.hybrid_time import from_us
from anabranch.protocol.ids import NO_TXN
from anabranch.protocol.schemas.records import BrokenLock
from anabranch.tables.store import Seen
from tests.cli.fakes import TXN_ID, opened, transaction
from tests.client.world import World
from tests.tables.worlds import reader_ports

STREAMS = ("bank/a", "bank/b", "bank/c")


def test_commits_are_those_of_the_histories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits of one and of several streams, by any bounds and limit."""
    world, draw = World(), random.Random(4)
    for stream in STREAMS:
        world.client.create_stream(stream)
    made: dict[int, tuple[bytes, tuple[str, ...], int]] = {}
    for number in range(120):
        if number == 30:  # from now on all are of one millisecond
            monkeypatch.setattr(world.clock, "wall", partial(float, world.clock.wall()))
        chosen = tuple(sorted(draw.sample(STREAMS, draw.randint(1, 3))))
        with world.client.begin("bank") as txn:
            rows = [(stream, b"%d" % n) for stream in chosen for n in range(draw.randint(1, 3))]
            for stream, value in rows:
                txn.write(stream, value, key=b"%d" % number)
            result = txn.commit()
        made[result.commit_timestamp] = result.txn_id, chosen, len(rows)
    times = sorted(made)
    ports = reader_ports(world)
    for above, until, limit in [
        (0, times[-1], 1000), (0, times[-1], 1), (0, times[0], 5), (0, times[0] - 1, 5),
        *((*sorted(draw.sample(times, 2)), draw.choice((1, 2, 50))) for _ in range(40)),
    ]:  # fmt: skip
        wanted = [at for at in reversed(times) if above < at <= until][:limit]
        found = system.commit_rows(ports, STREAMS, above, until, limit, 9.0)
        assert [(c.commit_timestamp, c.txn_id, c.streams, c.rows) for c in found] == [
            (at, *made[at]) for at in wanted
        ]
        of_one = [at for at in reversed(times) if above < at <= until and "bank/b" in made[at][1]]
        found = system.commit_rows(ports, ["bank/b"], above, until, limit, 9.0)
        assert [c.commit_timestamp for c in found] == of_one[:limit]


def test_versions_end_where_the_next_begins() -> None:
    """The newest first: written, deleted, written by a plain producer, and written over."""
    at = [from_us(n * 1_000_000) for n in range(5)]
    seen = [
        Seen(b"k", None, at[4], b"4" * 16),
        Seen(b"k", b"three", at[3], NO_TXN),
        Seen(b"k", b"two", at[2], b"2" * 16),
        Seen(b"k", None, at[1], b"1" * 16),
    ]
    found = list(system.version_rows("bank/a", seen))
    assert [(v.value, v.mincsn, v.maxcsn, v.mintid, v.maxtid) for v in found] == [
        (b"three", at[3], at[4], None, b"4" * 16),
        (b"two", at[2], at[3], b"2" * 16, None),
    ]
    [stands] = system.version_rows("bank/a", seen[2:3])
    assert (stands.maxcsn, stands.maxtid, stands.until) == (None, None, None)
    assert stands.since == datetime.fromtimestamp(2, UTC)


def test_open_transactions_come_first_and_once() -> None:
    lost = BrokenLock("nyc/a", b"k", None, 5 << 12, b"")
    running = opened(
        transaction(state="OPEN", commit_timestamp=0, finished_ms=0, snapshot=7, broken=lost)
    )
    ended = transaction(txn_id=bytes(16))
    found = list(system.transaction_rows([running], [ended, running.info], 9e9))
    assert [(t.txn_id, t.state, t.age, t.rows, t.writers) for t in found] == [
        (TXN_ID, "OPEN", 60.0, 0, 1), (bytes(16), "COMMITTED", 1.0, 10, 0),
    ]  # fmt: skip
    assert [t.snapshot for t in found] == [7, None]
    assert str(found[0].broken).startswith("nyc/a b'k' was read, and written by another at 1970-")
    assert found[1].broken is None


@pytest.mark.parametrize(
    ("name", "of", "given", "why"),
    [
        ("nothing", None, {}, "transactions, locks, commits, tables, versions"),
        ("commits", None, {}, "of one scope or stream"),
        ("versions", "bank/a", {}, "give its key"),
        ("locks", None, {"start": 1}, "no argument 'start'"),
        ("tables", None, {"key": b"k"}, "no argument 'key'"),
        ("tables", None, {"limit": 0}, "1 to 10,000 rows"),
        ("tables", None, {"limit": True}, "1 to 10,000 rows"),
    ],
)
def test_bad_calls(name: str, of: str | None, given: dict[str, object], why: str) -> None:
    call = {"limit": 1, "key": None, "start": None} | given
    with pytest.raises(InvalidArgument, match=why):
        system.check_call(name, of, **call)
