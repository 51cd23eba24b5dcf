"""The Python client as a child of the conformance kit: ``python -m anabranch.conformance.python_client``.

Requests of docs/conformance.md become calls of `anabranch.Client`; `Operations` has one method for each.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from hashlib import sha256
from typing import Any

import anabranch
from anabranch.batches.format import Packed
from anabranch.batches.records import Record, encode_record
from anabranch.conformance.child import to_bytes, to_text
from anabranch.errors import AnabranchError
from anabranch.kafka.cluster import Cluster
from anabranch.kafka.idempotent_producer import JournalProducer
from anabranch.kafka.settings import parse_settings
from anabranch.ports import LogError, TopicPartition
from anabranch.topics.names import journal_topic

_THREADS = 96  # requests at the same time


class Operations:
    """The operations that the kit asks for, each with the request's arguments."""

    def __init__(self) -> None:
        self._client: anabranch.Client | None = None
        self._handles: dict[str, anabranch.Transaction | anabranch.Writer] = {}
        self._numbers = itertools.count(1)
        self._bootstrap = ""
        self._timeout_s = 0.0

    @property
    def client(self) -> anabranch.Client:
        """The client of the last ``connect``."""
        if self._client is None:
            raise anabranch.errors.IllegalState("connect comes first")
        return self._client

    def hello(self) -> dict[str, Any]:
        return {"client": f"anabranch {anabranch.__version__} (Python)"}

    def connect(self, bootstrap: str, prefix: str, timeout_ms: int) -> dict[str, Any]:
        if self._client is not None:
            self._client.close()
        self._handles.clear()
        self._bootstrap, self._timeout_s = bootstrap, timeout_ms / 1000
        self._client = anabranch.connect(bootstrap, prefix=prefix, timeout=self._timeout_s)
        return {}

    def begin(self, scope: str, name: str | None, keepalive_ms: int) -> dict[str, Any]:
        txn = self.client.begin(scope, name, keepalive_ms / 1000)
        if txn.result is not None:
            return outcome(txn.result)
        token = txn.token()  # opens it
        return {"txn": self._keep(txn), "token": to_text(token)}

    def join(self, token: str) -> dict[str, Any]:
        return {"txn": self._keep(self.client.join(to_bytes(token) or b""))}

    def write(self, txn: str, events: list[dict[str, Any]]) -> dict[str, Any]:
        handle = self._handles[txn]
        for event in events:
            stream, value, key, headers, timestamp = fields_of(event)
            handle.write(stream, value, key, headers, timestamp)
        handle.flush()
        return {}

    def receipt(self, txn: str, finished: bool) -> dict[str, Any]:
        writer = self._handles[txn]
        if not isinstance(writer, anabranch.Writer):
            raise anabranch.errors.InvalidArgument("a receipt is of a joined writer")
        receipt = writer.finish() if finished else writer.flush()
        return {"receipt": to_text(receipt.to_bytes())}

    def commit(
        self, txn: str, receipts: list[str] | None, name: str | None, number: int | None
    ) -> dict[str, Any]:
        handle = self._transaction(txn)
        given = None if receipts is None else [to_bytes(one) or b"" for one in receipts]
        return outcome(handle.commit(given, name=name, number=number))

    def commit_decided(self, txn: str) -> dict[str, Any]:
        result = self._transaction(txn).commit(wait="decided")
        return outcome(result, "COMMITTED" if result.is_merged else "FINALIZE_IN_PROGRESS")

    def session(self, events: list[dict[str, Any]]) -> dict[str, Any]:
        failed, sent = set[int](), list[int]()
        session = self.client.session()
        for number, event in enumerate(events):
            stream, value, key, headers, timestamp = fields_of(event)
            try:
                session.apply(stream, value, key, headers, timestamp)
                sent.append(number)
            except AnabranchError:
                failed.add(number)
        try:
            session.close()
        except anabranch.errors.RowsFailed as error:
            failed |= {sent[one.number] for one in error.errors}
        return {"failed": sorted(failed)}

    def prepare(self, txn: str, secret: str, attempt: str) -> dict[str, Any]:
        by = sha256(to_bytes(secret) or b"").digest()
        found = self._transaction(txn).prepare(by=by, attempt=to_bytes(attempt) or b"")
        return outcome(found, found.state)

    def decide(self, txn_id: str, secret: str, commit: bool) -> dict[str, Any]:
        ended, given = to_bytes(txn_id) or b"", to_bytes(secret)
        if commit:
            return outcome(self.client.commit(ended, secret=given))
        self.client.abort(ended, secret=given)
        state = self.client.state(ended)
        return outcome(state, state.state)

    def read(self, stream: str) -> dict[str, Any]:
        with closing(self.client.snapshot(stream, mode="latest").read(stream)) as found:
            return {"events": [event_of(event) for event in found]}

    def abort(self, txn: str) -> dict[str, Any]:
        self._transaction(txn).abort()
        return {}

    def resolve(self, token: str) -> dict[str, Any]:
        found = self.client.resolve(to_bytes(token) or b"")
        return outcome(found, found.state)

    def one_shot(
        self, scope: str, name: str | None, events: list[dict[str, Any]]
    ) -> dict[str, Any]:
        with self.client.begin(scope) as txn:
            for event in events:
                stream, value, key, headers, timestamp = fields_of(event)
                txn.write(stream, value, key, headers, timestamp)
            return outcome(txn.commit(name=name))

    def plain(self, stream: str, events: list[dict[str, Any]]) -> dict[str, Any]:
        """Write plain records to a journal. Any Kafka producer can do this; here it is the one of `write_batch`."""
        deadline = time.monotonic() + self._timeout_s
        with closing(Cluster(parse_settings(self._bootstrap, {}))) as cluster:
            producer = JournalProducer(cluster, deadline)
            with closing(producer):
                batch = packed(map(fields_of, events))
                producer.append(TopicPartition(journal_topic(stream), 0), batch, deadline)
                producer.flush(deadline)
        return {}

    def load(
        self,
        scope: str,
        stream: str,
        in_flight: int,
        duration_s: float,
        count: int,
        value_bytes: int,
    ) -> dict[str, Any]:
        """One-shots in a loop, by as many threads as are to be in flight. ``count``: events of each."""
        until, value = time.monotonic() + duration_s, b"x" * value_bytes

        def commit_all(thread: int) -> int:
            for number in itertools.count():
                if time.monotonic() >= until:
                    return number
                with self.client.begin(scope) as txn:
                    for i in range(count):
                        txn.write(stream, value, b"%d-%d-%d" % (thread, number, i))
                    txn.commit()
            return 0

        began = time.monotonic()
        with ThreadPoolExecutor(in_flight) as threads:
            committed = sum(threads.map(commit_all, range(in_flight)))
        return {"committed": committed, "seconds": time.monotonic() - began}

    def _keep(self, handle: anabranch.Transaction | anabranch.Writer) -> str:
        name = f"{next(self._numbers)}"
        self._handles[name] = handle
        return name

    def _transaction(self, name: str) -> anabranch.Transaction:
        handle = self._handles[name]
        if not isinstance(handle, anabranch.Transaction):
            raise anabranch.errors.InvalidArgument("only the client that began it ends it here")
        return handle


def outcome(
    result: anabranch.Result | anabranch.TransactionInfo, state: str = "COMMITTED"
) -> dict[str, Any]:
    """The outcome of a transaction, for an answer."""
    counts = result.counts
    return {
        "outcome": {
            "txn_id": to_text(result.txn_id),
            "state": state,
            "commit_timestamp": result.commit_timestamp,
            "committed": counts.committed,
            "rejected": counts.rejected,
            "left_out": counts.left_out,
        }
    }


def event_of(event: anabranch.Event) -> dict[str, Any]:
    """An event that was read, for an answer."""
    return {
        "key": to_text(event.key),
        "value": to_text(event.value),
        "headers": [[name, to_text(value)] for name, value in event.headers],
        "timestamp": event.timestamp,
        "commit_timestamp": event.commit_timestamp,
    }


Fields = tuple[str, bytes | None, bytes | None, list[tuple[str, bytes | None]], int | None]


def fields_of(event: dict[str, Any]) -> Fields:
    """Stream, value, key, headers and time of an event in a request."""
    headers = [(name, to_bytes(value)) for name, value in event["headers"]]
    key, value = to_bytes(event["key"]), to_bytes(event["value"])
    return event["stream"], value, key, headers, event["timestamp"]


def packed(events: Iterable[Fields]) -> Packed:
    """A batch of plain records."""
    body, now = bytearray(), int(time.time() * 1000)
    count = 0
    for _, value, key, headers, _ in events:
        record = Record(0, now, key, value, tuple(headers))
        encode_record(body, record, count, 0)
        count += 1
    return Packed(bytes(body), 0, count, now, now)


def answers(operations: Any, lines: Iterable[str], write: Callable[[dict[str, Any]], None]) -> None:
    """Answer each request in a thread of its own, until the input ends."""

    def answer(request: dict[str, Any]) -> None:
        number, op = request.pop("id"), request.pop("op")
        try:
            method = None if op.startswith("_") else getattr(operations, op, None)
            if method is None:
                write({"id": number, "error": "NotOffered", "message": op})
            else:
                write({"id": number, "ok": method(**request)})
        except (AnabranchError, LogError, LookupError, TypeError, ValueError) as error:
            write({"id": number, "error": type(error).__name__, "message": str(error)})

    with ThreadPoolExecutor(_THREADS) as threads:
        for line in lines:
            threads.submit(answer, json.loads(line))


def main(operations: Any) -> None:
    """Serve the kit on standard input and output."""
    lock = threading.Lock()
    out = sys.stdout

    def write(answer: dict[str, Any]) -> None:
        with lock, suppress(BrokenPipeError):
            out.write(json.dumps(answer) + "\n")
            out.flush()

    answers(operations, _lines(), write)


def _lines() -> Iterator[str]:
    yield from iter(sys.stdin.readline, "")


if __name__ == "__main__":
    main(Operations())
