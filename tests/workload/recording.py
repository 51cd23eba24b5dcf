"""What histories say of events, transactions and snapshots (`docs/inside/checker.md`)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from confluent_kafka import Message

import anabranch
from anabranch.core.decisions.turn import WAITING
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    Expired,
    FixCallError,
    OutcomeUnknown,
    RetryError,
    UnknownTransaction,
)
from anabranch.types import Receipt, Result
from checker.recorder import Failed, Recorder, Unknown

# Frozen brokers keep connections open: librdkafka's own minute would take most of a run.
PATIENCE = {"socket.timeout.ms": 10_000}
# What callers have to expect while processes die.
TROUBLE = (RetryError, BeginAgainError, AskOutcomeError, Failed, Unknown)
PADDING = 16  # random bytes of a value, in hexadecimal
STATES = {
    "OPEN": "open",
    "COMMIT_IN_PROGRESS": "committing",
    "FINALIZE_IN_PROGRESS": "committing",
    "COMMITTED": "committed",
    "ABORT_IN_PROGRESS": "aborting",
    "ABORTED": "aborted",
    "PREPARED": "prepared",
}


class Row(NamedTuple):
    """An event to write. ``id``: of no other event; the value begins with it."""

    stream: str
    key: str
    id: str

    @property
    def value(self) -> bytes:
        """The id, and bytes that don't compress."""
        return f"{self.id} {os.urandom(PADDING).hex()}".encode()


def by_stream(events: Sequence[Row]) -> dict[str, list[Row]]:
    """In the same order within each stream."""
    found: dict[str, list[Row]] = {}
    for event in events:
        found.setdefault(event.stream, []).append(event)
    return found


def id_of(value: bytes | None) -> str:
    """The id that a value begins with."""
    return (value or b"").partition(b" ")[0].decode()


def txn_of(headers: Any) -> str | None:
    """The transaction id in the header ab.txn."""
    value = dict(headers or ()).get("ab.txn")
    return value[:16].hex() if value else None


def key_of(message: Message) -> str | None:
    """A message's key."""
    key = message.key()
    return key.decode() if isinstance(key, bytes) else None


def seen(event: anabranch.Event) -> list[Any]:
    """An event that the library gave."""
    return [
        event.stream,
        event.partition,
        event.offset,
        event.key.decode() if event.key is not None else None,
        id_of(event.value),
        event.txn_id.hex() if event.txn_id is not None else None,
        event.commit_timestamp,
    ]


def seen_raw(stream: str, message: Message) -> list[Any]:
    """An event that a plain consumer gave."""
    place = [stream, message.partition(), message.offset()]
    return [*place, key_of(message), id_of(message.value()), txn_of(message.headers()), None]


@contextmanager
def sorted_out() -> Iterator[None]:
    """Errors of the library as the recorder's two kinds: certainly without effect, and not known."""
    try:
        yield
    except OutcomeUnknown as error:
        raise Unknown(f"{type(error).__name__}: {error}") from error
    except (RetryError, BeginAgainError, FixCallError) as error:
        raise Failed(f"{type(error).__name__}: {error}") from error


class RecordedTransaction:
    """A transaction of the library, recorded. ``handle``: its name in the history, of no other."""

    def __init__(
        self, recorder: Recorder, client: anabranch.Client, scope: str, handle: str
    ) -> None:
        self._recorder = recorder
        self._client = client
        self._scope = scope
        self.handle = handle
        self.txn: anabranch.Transaction

    def begin(self, keepalive: float | None) -> RecordedTransaction:
        """Begin it. ``keepalive``: seconds; None: a one-shot, which gets its id at its commit."""
        with self._recorder.asking("begin", txn=self.handle, scope=self._scope) as answer:
            if keepalive is None:
                self.txn = self._client.begin(self._scope)
            else:
                self.txn = self._client.begin(self._scope, keepalive=keepalive)
                self.txn.token()
            txn_id = self.txn.txn_id
            answer["txn_id"] = txn_id.hex() if txn_id and keepalive is not None else None
        return self

    def write(self, events: Sequence[Row]) -> None:
        """Write by the writer that began it."""
        write_all(self._recorder, self.txn, (self.handle, "own"), events)

    def commit(
        self,
        others: Sequence[str] = (),
        receipts: Sequence[Receipt | bytes] | None = None,
        series: str | None = None,
        number: int | None = None,
    ) -> Result:
        """Commit; the history knows all outcomes. ``others``: writers besides its own that it takes.

        Raises: Failed, Unknown, FixCallError, after the transaction was aborted, or its outcome asked for.
        """
        asked = {"writers": ["own", *others], "series": series, "number": number}
        try:
            with (
                self._recorder.asking("commit", txn=self.handle, **asked) as answer,
                sorted_out(),
            ):
                given = None if receipts is None else list(receipts)
                result = self.txn.commit(receipts=given, name=series, number=number)
                answer |= {
                    "txn_id": result.txn_id.hex(),
                    "timestamp": result.commit_timestamp,
                    "committed": result.counts.committed,
                    "replayed": series is not None and result.txn_id != self.txn.txn_id,
                }
        except Unknown:
            if self.txn.txn_id is not None:
                ask_state(self._recorder, self._client, self.txn.txn_id, final=True)
            raise
        except Failed as error:
            with suppress(AnabranchError):
                self.abort()
            if isinstance(error.__cause__, FixCallError):
                raise error.__cause__ from error  # no caller has to expect it
            raise
        return result

    def abort(self) -> None:
        with self._recorder.asking("abort", txn=self.handle):
            self.txn.abort()

    def forget(self) -> None:
        """Send no more heartbeats: it becomes stale, unless it is over."""
        self.txn._discard()


def write_all(recorder: Recorder, to: Any, who: tuple[str, str], events: Sequence[Row]) -> None:
    """Write to a handle of the library, one operation for each stream. ``who``: transaction and writer."""
    handle, writer = who
    for stream, rows in by_stream(events).items():
        listed = [[row.key, row.id] for row in rows]
        with recorder.asking("write", txn=handle, writer=writer, stream=stream, events=listed):
            for row in rows:
                to.write(stream, row.value, key=row.key.encode())


def ask_state(recorder: Recorder, client: anabranch.Client, txn_id: bytes, *, final: bool) -> str:
    """The state that controllers answer with. ``final``: an unknown transaction is aborted by it."""
    with recorder.asking("state", txn_id=txn_id.hex()) as answer:
        answer["timestamp"] = None
        try:
            info = client.resolve(txn_id) if final else client.state(txn_id)
        except UnknownTransaction:
            answer["state"] = "unknown"
        except Expired:
            answer["state"] = "expired"
        else:
            # A commit that waits may be refused yet: to the checker the transaction is open.
            answer["state"] = "open" if info.reason == WAITING else STATES[info.state]
            answer["timestamp"] = info.commit_timestamp or None
    return str(answer["state"])


def take_snapshot(
    recorder: Recorder,
    client: anabranch.Client,
    name: str,
    streams: Sequence[str],
    asked_for: int | None = None,
) -> int:
    """Take a snapshot and read it. Returns its timestamp."""
    asked = {"snapshot": name, "streams": list(streams), "asked_for": asked_for}
    with recorder.asking("snapshot", **asked) as answer:
        snapshot = client.snapshot(list(streams), asked_for)
        answer["timestamp"] = snapshot.timestamp
    for stream in streams:
        with (
            recorder.asking("snapshot_read", snapshot=name, stream=stream) as answer,
            snapshot.read(stream) as events,
        ):
            answer["events"] = [seen(event) for event in events]
    return snapshot.timestamp
