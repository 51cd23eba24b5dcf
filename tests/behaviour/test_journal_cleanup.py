"""Journals on a real cluster: cut while transactions come and go, moved under an old one, over a kill."""

from __future__ import annotations

import os
import shutil
import time

import pytest

import anabranch
from anabranch.errors import AnabranchError
from anabranch.kafka.log import KafkaLog
from anabranch.ports import TopicPartition
from tests.cluster import Cluster
from tests.failpoints import VARIABLE

pytestmark = pytest.mark.broker

SOON_S = 30.0
EVENTS = 1_500  # of a young transaction: a fifth of a megabyte


@pytest.mark.soak
@pytest.mark.parametrize("own_cluster", [("--move-bytes", str(768 << 10))], indirect=True)
def test_an_old_transaction_holds_no_journal_and_commits_whole(
    own_cluster: Cluster, log: KafkaLog, unique: str
) -> None:
    own, stream = own_cluster, f"p{unique}/long"
    journal = TopicPartition(f"p{unique}.long.journal", 0)
    written: list[bytes] = []

    def young(count: int, by: anabranch.Client | None = None) -> None:
        for _ in range(count):
            with (by or client).begin(f"p{unique}") as txn:
                txn.token()  # so it is no one-shot
                txn.write_many(stream, ((os.urandom(120), b"k") for _ in range(EVENTS)))
                txn.commit()

    def write_old(count: int) -> int:
        """The first offset of its records."""
        at = log.end_offsets([journal], committed=False)[journal]
        for _ in range(count):
            written.append(b"old-%d" % len(written))
            old.write(stream, written[-1], key=b"key")
            if len(written) % 50 == 0:
                old.flush()
        old.flush()
        return at

    def young_ones_until_killed(by: anabranch.Client) -> None:
        until = time.monotonic() + SOON_S
        while time.monotonic() < until:
            young(5, by)

    def wait_cut(beyond: int) -> None:
        until = time.monotonic() + SOON_S
        while True:
            # In this order: records may be deleted between the two calls.
            start = log.start_offsets([journal])[journal]
            low = client.describe(stream).low_water.get(0, 0)
            assert start <= low, "nothing goes that is not on the log first"
            if start > beyond:
                return
            assert time.monotonic() < until, (
                f"the journal begins at {start}, {beyond} is needed by nobody"
            )
            young(1)
            time.sleep(0.5)

    with anabranch.connect(own.bootstrap, prefix=own.prefix, timeout=60) as client:
        client.create_stream(stream)
        old = client.begin(f"p{unique}")
        first = write_old(500)
        young(8)
        wait_cut(first + 500)
        assert client.describe(stream).uncommitted_bytes > 0

        # Again, and the controller dies with copies appended and no row about them.
        second = write_old(300)
        own.controller.stop()
        own.controller.environment = {VARIABLE: "append:stream#1:after:kill"}
        own.controller.module = "tests.failpoints"
        own.controller.start().wait_leading()
        with (
            anabranch.connect(own.bootstrap, prefix=own.prefix, timeout=5) as brief,
            pytest.raises(AnabranchError),
        ):
            young_ones_until_killed(brief)
        assert not own.controller.running, "killed in mid-move"
        # Its successor has no table.
        own.controller.environment = {}
        own.controller.module = "anabranch.cli"
        shutil.rmtree(own.controller.folder / "data")
        own.controller.start().wait_leading()
        young(8)
        wait_cut(second + 300)
        write_old(1)
        assert old.commit().counts.committed == len(written) == 801
        found = [e.value for e in client.snapshot(stream).read(stream) if e.key == b"key"]
        assert found == written, "whole, once, in order"
