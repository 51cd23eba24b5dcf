"""A stream of a test's own, where a raw client does wrong beside a healthy transaction."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import anabranch
from anabranch.ports import Log
from anabranch.protocol.schemas import records as r
from tests.cluster import Cluster
from tests.core.labels import SECRET, Begun
from tests.crash.oracle import check_stream, read_stream
from tests.crash.raw import Pen, Raw, make_txn_id
from tests.waiting import wait_until

SEGMENTS = 2
KEEPALIVE_MS = 600_000
SOON_S = 20.0
WAIT_MS = 10_000


@dataclass
class Place:
    """A stream of its own, and an open transaction of a raw client that is about to do wrong."""

    cluster: Cluster
    client: anabranch.Client
    raw: Raw
    log: Log
    scope: str

    @property
    def stream(self) -> str:
        return f"{self.scope}/events"

    @property
    def journal(self) -> str:
        return f"{self.scope}.events.journal"

    def begin(self) -> bytes:
        """A new transaction's token."""
        begun = self.raw.ask(r.Begin(make_txn_id(), self.scope, None, KEEPALIVE_MS, SECRET))
        assert isinstance(begun, Begun)
        return begun.token

    def touched(self) -> tuple[bytes, Pen, r.Touched]:
        """(token, a writer, where to write)."""
        token = self.begin()
        touched = self.raw.ask(r.Touch(token, self.stream))
        return token, Pen(self.raw, token[1:17]), touched

    def write(
        self, headers: list[tuple[str, bytes]], *, count: int = 1, partition: int = 0
    ) -> None:
        """Plain records into the journal, without keys."""
        self.raw.produce([(self.journal, partition, None, b"bad", headers)] * count)

    def rejected(self, reason: str, at_least: int) -> int:
        """The count of a reason, once it has come so far."""

        def count() -> int:
            return self.client.describe(self.stream).rejected.get(reason, 0)

        wait_until(lambda: count() >= at_least)
        return count()

    def visible(self) -> list[bytes]:
        """All payloads, and that history agrees."""
        found = read_stream(self.log, self.stream)
        check_stream(found)
        return sorted(e.value for e in found.events)

    def state(self, token: bytes) -> r.Outcome:
        outcome = self.raw.ask(r.GetState(token[1:17]))
        assert isinstance(outcome, r.Outcome)
        return outcome


@contextmanager
def beside(client: anabranch.Client, stream: str) -> Iterator[list[bytes]]:
    """A transaction of two writers around something; gives its payloads."""
    values = [f"healthy {n:03}".encode() for n in range(40)]
    txn = client.begin(stream.partition("/")[0])
    token = txn.token()
    with client.join(token) as writer:
        for value in values[:15]:
            writer.write(stream, value, key=value)
    for value in values[15:30]:
        txn.write(stream, value, key=value)
    txn.flush()
    yield values
    for value in values[30:]:
        txn.write(stream, value, key=value)
    began = time.monotonic()
    counts = txn.commit().counts
    assert time.monotonic() - began < SOON_S
    assert (counts.committed, counts.rejected, counts.left_out) == (40, 0, 0)
