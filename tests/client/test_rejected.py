"""`Client.rejected`: what a journal had that no commit has, over takeovers with and without a status table."""

from __future__ import annotations

import pytest

from anabranch.batches.records import Record
from anabranch.client.client import Client
from anabranch.core import rejections
from anabranch.errors import FeatureNotEnabled, UnknownStream
from anabranch.ports import TopicPartition
from anabranch.protocol import limits
from anabranch.protocol.legal_names import ADMIN_LANE
from anabranch.testing.memory.cluster import MemoryCluster
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import journal_topic

TABLE = "nyc/rows"
BAD = limits.ROW_KEY.value + 1


class World:
    def __init__(self, level: int = 4) -> None:
        self.cluster = MemoryCluster(feature_level=level)
        self.client: Client = self.cluster.connect()
        self.client.create_table(TABLE)

    def write(
        self, *keys: bytes | None, headers: tuple[tuple[str, bytes | None], ...] = ()
    ) -> None:
        """Plain writes of a producer, in one batch."""
        now_ms = int(self.cluster.clock.wall() * 1000)
        records = [Record(0, now_ms, key, b"v", headers) for key in keys]
        log = self.cluster.brokers.log("producer")
        log.produce(TopicPartition(journal_topic(TABLE), 0), records)
        self.cluster.advance(1)

    def lead_again(self, *, table: bool) -> None:
        self.cluster.stop_controller()
        if not table:
            self.cluster._stores[0] = MemoryStore()
        self.cluster.start_controller()
        self.cluster.advance(1)

    def seen(self) -> tuple[dict[str, int], list[tuple[int, bytes | None, str]]]:
        found = self.client.rejected(TABLE)
        return dict(found.counts), [(one.offset, one.key, one.reason) for one in found.records]


@pytest.mark.parametrize("table", [True, False])
@pytest.mark.parametrize("pause", [0, 20])
def test_it_is_known_after_a_takeover(table: bool, pause: int) -> None:
    world = World()
    assert world.seen() == ({}, [])
    world.write(b"good", b"x" * BAD, b"", None)
    world.write(b"k", headers=(("ab.txn", b"short"),))
    expected = (
        {"bad_key": 3, "bad_header": 1},
        [
            (4, b"k", "bad_header"),
            (3, None, "bad_key"),
            (2, b"", "bad_key"),
            (1, b"x" * limits.REJECTED_KEY, "bad_key"),
        ],
    )
    assert world.seen() == expected
    world.cluster.advance(pause)  # the cleaner has logged it meanwhile
    for _ in range(2):
        world.lead_again(table=table)
        assert world.seen() == expected
    world.write(b"good", b"")
    world.lead_again(table=table)
    world.cluster.advance(100)  # the journal is cut
    world.lead_again(table=False)
    counts, records = world.seen()
    assert counts == {"bad_key": 4, "bad_header": 1}
    assert records == [(6, b"", "bad_key"), *expected[1]]
    rows = world.client.snapshot(TABLE).read(TABLE)
    assert [event.key for event in rows] == [b"good", b"good"]


def test_a_former_leaders_table_adds_nothing_again() -> None:
    """Leaders with tables of their own take turns: what one has read, and not logged, the other has counted."""
    world = World()
    world.cluster.advance(7)  # the cleaner has just been here
    world.write(b"", b"good")
    former = world.cluster._stores[0]
    assert any(key.startswith(b"x") for key in former.snapshot()), (
        "it is in the table, and not logged"
    )
    world.lead_again(table=False)
    world.cluster.advance(20)
    world.cluster.stop_controller()
    world.cluster._stores[0] = former
    world.cluster.start_controller()
    world.cluster.advance(1)
    assert world.seen() == ({"bad_key": 1}, [(0, b"", "bad_key")])
    world.cluster.advance(20)
    assert world.seen() == ({"bad_key": 1}, [(0, b"", "bad_key")])


def test_counts_are_kept_for_ever_and_records_for_a_week(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "REJECTED", limits.REJECTED._replace(value=5))
    world = World()
    world.write(*[b""] * 4)
    world.cluster.advance(10)
    world.write(*[b""] * 4)
    world.write(*[b""] * 4)
    counts, records = world.seen()
    assert (counts, [offset for offset, *_ in records]) == ({"bad_key": 12}, [11, 10, 9, 8, 7])
    world.cluster.clock.epoch += 8 * 86_400
    world.lead_again(table=True)
    world.write(b"")
    world.cluster.advance(10)
    assert world.seen() == ({"bad_key": 13}, [(12, b"", "bad_key")])


def test_a_flood_is_logged_before_its_journal_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rejections, "_MOST_BATCHES", 1)
    world = World()
    for _ in range(30):
        world.write(b"")
    world.cluster.advance(100)
    world.lead_again(table=False)
    assert world.seen()[0] == {"bad_key": 30}


def test_a_new_stream_of_the_name_has_none() -> None:
    world = World()
    world.write(b"")
    world.cluster.advance(10)
    world.write(b"")
    with world.cluster.connect(lane=ADMIN_LANE) as operator:
        operator.delete_stream(TABLE)
    with pytest.raises(UnknownStream):
        world.seen()
    world.client.create_table(TABLE)
    assert world.seen() == ({}, [])
    world.lead_again(table=False)
    assert world.seen() == ({}, [])


def test_it_needs_the_feature_level() -> None:
    world = World(level=3)
    world.write(b"", b"good")
    with pytest.raises(FeatureNotEnabled):
        world.seen()
    assert world.client.describe(TABLE).rejected == {"bad_key": 1}
    world.cluster.advance(100)
