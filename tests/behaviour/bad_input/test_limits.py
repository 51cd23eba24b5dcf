"""Events that are too large, and a full disk."""

from __future__ import annotations

import os
import resource
import time
from contextlib import suppress
from pathlib import Path

import pytest

import anabranch
from anabranch import errors
from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from anabranch.topics.names import topics_of
from tests.behaviour.bad_input.place import WAIT_MS, Place
from tests.behaviour.steps import alter_topics
from tests.cluster import Cluster
from tests.crash.oracle import check_stream, read_stream
from tests.crash.raw import Pen
from tests.waiting import wait_until

pytestmark = pytest.mark.broker

LIMIT = 20_000


def test_data_that_the_stream_refuses_once_merged(place: Place) -> None:
    """The limits of stream and journal were lowered: that transaction is aborted, others go on.

    Where the stream's alone is lower, the stream waits (tests/controller/test_trouble.py).
    """
    token, pen, touched = place.touched()
    pen.write(place.stream, touched.segments, [(b"k", b"x" * 50_000)])
    topics = topics_of(place.stream)[:2]
    alter_topics(place.cluster.bootstrap, topics, "max.message.bytes", str(LIMIT))

    def limits() -> set[str]:
        found = place.log.describe_topics(topics).values()
        return {info.config["max.message.bytes"] for info in found}

    wait_until(lambda: limits() == {str(LIMIT)})
    others = [place.touched() for _ in range(4)]
    for _, other_pen, _ in others:
        other_pen.write(place.stream, touched.segments, [(b"k", b"fits")])
    commands = [r.Commit(t, (p.receipt(),), None, None, WAIT_MS) for t, p, _ in others]
    refused = r.Commit(token, (pen.receipt(),), None, None, WAIT_MS)
    answers = place.raw.ask_all([*commands[:2], refused, *commands[2:]])
    assert isinstance(answers[2], r.Refusal)
    assert answers[2].code == "TransactionAborted"
    assert {a.state for i, a in enumerate(answers) if i != 2} == {"COMMITTED"}
    outcome = place.state(token)
    assert outcome.state == "ABORTED"
    assert "refused" in outcome.reason
    assert place.visible().count(b"fits") == 4


# The topic's limit, and sizes of events that writers put into one partition, in order. The journal takes each.
FITTING = {
    "small ones, many": (LIMIT, [[1_000] * 60]),
    "a big one behind small ones": (LIMIT, [[4_000, 4_000, 18_000]]),
    "two writers": (LIMIT, [[9_000], [15_000], [9_000]]),
    "just what fits, again and again": (LIMIT, [[19_000] * 5]),
    "a big one behind small ones, default limit": (1_048_588, [[200_000, 200_000, 900_000]]),
}


@pytest.mark.parametrize("what", FITTING)
def test_all_that_the_journal_takes_is_merged(place: Place, what: str) -> None:
    """The pieces of a commit are put together into batches: never into one that the stream refuses."""
    limit, writers = FITTING[what]
    small = f"{place.scope}/fitting"
    place.client.create_stream(small, settings={"max.message.bytes": limit})
    token = place.begin()
    touched = place.raw.ask(r.Touch(token, small))
    receipts = []
    for writer in writers:
        pen = Pen(place.raw, token[1:17])
        for n, size in enumerate(writer):
            pen.write(small, touched.segments, [(b"k", f"{n:04}".encode() + b"x" * (size - 4))])
        receipts.append(pen.receipt())
    outcome = place.raw.ask(r.Commit(token, tuple(receipts), None, None, WAIT_MS))
    assert (outcome.state, outcome.committed) == ("COMMITTED", sum(map(len, writers)))


@pytest.mark.soak
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")
def test_a_controller_whose_disk_is_full_says_so_and_ends(
    own_cluster: Cluster, log: Log, unique: str, tmp_path: Path
) -> None:
    """The next one, with room, continues from the log."""
    controller, scope = own_cluster.controller, f"full{unique}"
    stream = f"{scope}/events"
    with anabranch.connect(own_cluster.bootstrap, prefix=own_cluster.prefix) as client:
        client.create_stream(stream)
        txn = client.begin(scope)
        txn.token()
        txn.write(stream, b"before", key=b"k")
        txn.flush()
        resource.prlimit(controller.pid, resource.RLIMIT_FSIZE, (20_000, 20_000))
        answered = []
        until = time.monotonic() + 30
        while controller.running and time.monotonic() < until:
            other = client.begin(scope)
            other.write(stream, os.urandom(5_000), key=b"o")
            with suppress(errors.OutcomeUnknown, errors.RetryError):
                answered.append(other.commit(timeout=3).txn_id)
        assert controller.process is not None
        assert controller.process.wait(30) == 6
        assert "can't be written" in controller.log_file.read_text()
        controller.folder = tmp_path / "another disk"
        controller.start()
        controller.wait_leading()
        txn.write(stream, b"after", key=b"k")
        assert txn.commit().counts.committed == 2
        assert {client.state(txn_id).state for txn_id in answered} <= {"COMMITTED"}
        check_stream(read_stream(log, stream))
