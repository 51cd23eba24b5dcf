"""Writers that record: transactions of every kind, alone and with helpers in other processes, and plain writes.

What a process asks and is told goes into its history (`docs/inside/checker.md`) before and after.
"""

from __future__ import annotations

import contextlib
import json
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka import KafkaError, KafkaException, Message, Producer

import anabranch
from anabranch.errors import (
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    RetryError,
)
from anabranch.topics.names import journal_topic
from checker.recorder import Failed, Recorder, Unknown
from tests.crash.children import put
from tests.crash.zygote import Spec, say
from tests.faults.acting import (
    CALL_S,
    PATIENCE,
    Ending,
    Row,
    ask_state,
    by_stream,
    in_threads,
    rows,
    sorted_out,
    value_of,
    write_all,
)

BIG = 250  # events of one flush of a big one
COLUMN_ROWS = 900
KEEPALIVE_S = 10.0
FORGOTTEN_S = 3.0
HELPERS_S = 4.0


@dataclass(frozen=True)
class Write(Spec):
    """Begins transactions, and commits, aborts or forgets them; or writes without one."""

    scope: str = ""
    spool: str = ""
    seed: int = 0

    run = "tests.faults.writing:write"


def write(number: int, told: dict[str, Any]) -> int:
    """Until SIGTERM; then what is under way is finished."""
    spec = Write(**told)
    ending = Ending()
    recorder = Recorder(Path(spec.spool) / f"{spec.name}.history")
    plain = Plain(recorder, spec.bootstrap)
    with anabranch.connect(
        spec.bootstrap, prefix=spec.prefix, timeout=CALL_S, config=PATIENCE
    ) as client:

        def work(thread: int) -> None:
            lane = _Lane(number, client, spec, recorder, thread, plain, ending)
            while not ending.event.is_set():
                lane.one()

        return in_threads(number, ending, work)


class Plain:
    """A producer that knows nothing of transactions. Threads take turns."""

    def __init__(self, recorder: Recorder, bootstrap: str) -> None:
        self._recorder = recorder
        self._bootstrap = bootstrap
        self._producer: Producer | None = None
        self._lock = threading.Lock()

    def write(self, stream: str, events: Sequence[Row]) -> None:
        """Acknowledged, or nobody knows."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(
                    {
                        "bootstrap.servers": self._bootstrap,
                        "enable.idempotence": True,
                        "acks": "all",
                        "linger.ms": 5,
                        "message.timeout.ms": 60_000,
                        "log_level": 0,
                        **PATIENCE,
                    }
                )
            failed: list[KafkaError] = []

            def delivered(error: KafkaError | None, _: Message) -> None:
                if error is not None:
                    failed.append(error)

            listed = [[event.key, event.id] for event in events]
            with self._recorder.asking("plain", stream=stream, events=listed):
                try:
                    for event in events:
                        self._producer.produce(
                            journal_topic(stream),
                            value_of(event),
                            event.key.encode(),
                            on_delivery=delivered,
                        )
                except KafkaException as error:  # an idempotent producer may fail for good
                    self._producer = None
                    raise Unknown(f"not taken: {error}") from error
                left = self._producer.flush(CALL_S)
                if left or failed:
                    self._producer = None  # its sequence may have a hole
                    raise Unknown(f"{left} not acknowledged, {failed[:1]}")


class _Lane:
    """A thread of a writer: one transaction after the other."""

    def __init__(
        self,
        number: int,
        client: anabranch.Client,
        spec: Write,
        recorder: Recorder,
        thread: int,
        plain: Plain,
        ending: Ending,
    ) -> None:
        self._number = number
        self._client = client
        self._scope = spec.scope
        self._spool = Path(spec.spool)
        self._recorder = recorder
        self._plain = plain
        self._ending = ending
        self._chance = random.Random(f"{spec.seed}/{thread}")
        self._base = f"{spec.name}.{thread}"
        self._made = 0
        self._series_number = 0
        self._old_ids: list[bytes] = []

    def one(self) -> None:
        """Something; only troubles that a caller has to expect are passed over."""
        kinds = {
            self._one_shot: 6,
            self._short: 4,
            self._long: 2,
            self._team: 4,
            self._numbered: 2,
            self._big: 1,
            self._columns: 1,
            self._aborted: 1,
            self._forgotten: 1,
            self._without: 2,
            self._ask: 1,
        }
        kind = self._chance.choices(list(kinds), list(kinds.values()))[0]
        self._made += 1
        try:
            kind(f"{self._base}.{self._made}")
        except (RetryError, BeginAgainError, AskOutcomeError, Failed, Unknown) as error:
            say(self._number, "trouble", kind=kind.__name__, why=str(error)[:300])

    def _rows(self, name: str, most: int) -> list[Row]:
        return rows(name, self._chance.randint(1, most), self._chance, self._scope)

    def _one_shot(self, handle: str) -> None:
        op = self._recorder.ask("begin", txn=handle, scope=self._scope)
        txn = self._client.begin(self._scope)
        self._recorder.told(op, "ok", txn_id=None)
        write_all(self._recorder, txn, handle, "own", self._rows(handle, 20))
        self._commit(txn, handle, ["own"])

    def _begin(self, handle: str, keepalive: float = KEEPALIVE_S) -> anabranch.Transaction:
        with self._recorder.asking("begin", txn=handle, scope=self._scope) as told:
            txn = self._client.begin(self._scope, keepalive=keepalive)
            txn.token()
            assert txn.txn_id is not None
            told["txn_id"] = txn.txn_id.hex()
        self._old_ids.append(txn.txn_id)
        return txn

    def _short(self, handle: str) -> None:
        txn = self._begin(handle)
        write_all(self._recorder, txn, handle, "own", self._rows(handle, 30))
        self._commit(txn, handle, ["own"])

    def _long(self, handle: str) -> None:
        txn = self._begin(handle)
        for part in range(3):
            write_all(self._recorder, txn, handle, "own", self._rows(f"{handle}.{part}", 20))
            time.sleep(self._chance.uniform(0.1, 1.0))
        self._commit(txn, handle, ["own"])

    def _big(self, handle: str) -> None:
        txn = self._begin(handle)
        for part in range(3):
            events = rows(f"{handle}.{part}", BIG, self._chance, self._scope)
            write_all(self._recorder, txn, handle, "own", events)
            txn.flush()
        self._commit(txn, handle, ["own"])

    def _columns(self, handle: str) -> None:
        """By a producer of our own, in place of librdkafka's."""
        txn = self._begin(handle)
        for part in range(3):
            events = rows(f"{handle}.{part}", COLUMN_ROWS, self._chance, self._scope)
            for stream, of_stream in by_stream(events).items():
                listed = [[event.key, event.id] for event in of_stream]
                table = pa.table(
                    {
                        "key": [event.key for event in of_stream],
                        "value": [value_of(event) for event in of_stream],
                    }
                )
                asked = {"txn": handle, "writer": "own", "stream": stream, "events": listed}
                with self._recorder.asking("write", **asked):
                    txn.write_batch(stream, table)
            txn.flush()
        self._commit(txn, handle, ["own"])

    def _team(self, handle: str) -> None:
        """This process and others, of whom any may die. Those that gave a receipt in time are taken."""
        txn = self._begin(handle)
        names = [f"h{n}" for n in range(self._chance.randint(1, 2))]
        for name in names:
            count = self._chance.choice((1, 7, 120))
            put(
                self._spool / f"{handle}.{name}.task",
                json.dumps([txn.token().hex(), handle, name, count]),
            )
        write_all(self._recorder, txn, handle, "own", self._rows(handle, 30))
        receipts: dict[str, bytes] = {}
        until = time.monotonic() + HELPERS_S
        while len(receipts) < len(names) and time.monotonic() < until:
            for name in names:
                path = self._spool / f"{handle}.{name}.receipt"
                if name not in receipts and path.exists():
                    receipts[name] = bytes.fromhex(path.read_text())
            time.sleep(0.01)
        writers = ["own", *receipts]
        self._commit(txn, handle, writers, receipts=list(receipts.values()))

    def _numbered(self, handle: str) -> None:
        """The same number again until it is told to be committed, as a batch job does; or until SIGTERM."""
        self._series_number += 1
        for attempt in range(4):
            if attempt and self._ending.event.is_set():
                return
            again = f"{handle}.{attempt}"
            try:
                txn = self._begin(again)
                write_all(self._recorder, txn, again, "own", self._rows(again, 15))
                self._commit(
                    txn, again, ["own"], series=f"{self._base}.s", number=self._series_number
                )
            except (RetryError, BeginAgainError, AskOutcomeError, Failed, Unknown) as error:
                say(self._number, "trouble", kind="numbered", why=str(error)[:300])
            else:
                return

    def _aborted(self, handle: str) -> None:
        txn = self._begin(handle)
        write_all(self._recorder, txn, handle, "own", self._rows(handle, 20))
        if self._chance.random() < 0.7:
            txn.flush()
        self._abort(txn, handle)

    def _forgotten(self, handle: str) -> None:
        txn = self._begin(handle, FORGOTTEN_S)
        write_all(self._recorder, txn, handle, "own", self._rows(handle, 20))
        txn.flush()

    def _without(self, handle: str) -> None:
        for stream, events in by_stream(self._rows(handle, 10)).items():
            self._plain.write(stream, events)

    def _ask(self, handle: str) -> None:
        """What became of an earlier one."""
        if self._old_ids:
            txn_id = self._chance.choice(self._old_ids)
            ask_state(self._recorder, self._client, txn_id, final=False)

    def _abort(self, txn: anabranch.Transaction, handle: str) -> None:
        with self._recorder.asking("abort", txn=handle):
            txn.abort()

    def _commit(
        self,
        txn: anabranch.Transaction,
        handle: str,
        writers: list[str],
        *,
        receipts: list[bytes] | None = None,
        series: str | None = None,
        number: int | None = None,
    ) -> None:
        asked = {"txn": handle, "writers": writers, "series": series, "number": number}
        try:
            with self._recorder.asking("commit", **asked) as told, sorted_out():
                result = txn.commit(receipts=receipts, name=series, number=number)
                told |= {
                    "txn_id": result.txn_id.hex(),
                    "timestamp": result.commit_timestamp,
                    "committed": result.counts.committed,
                    "replayed": result.txn_id != txn.txn_id,
                }
        except Unknown:
            if txn.txn_id is not None:
                ask_state(self._recorder, self._client, txn.txn_id, final=True)
            raise
        except Failed:
            with contextlib.suppress(AnabranchError):
                self._abort(txn, handle)
            raise
        say(self._number, "told")
