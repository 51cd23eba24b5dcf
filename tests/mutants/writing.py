"""Writers of the recorded workload: transactions of all kinds, and plain writes."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from zlib import crc32

from confluent_kafka import KafkaError, Message, Producer

import anabranch
from anabranch.errors import (
    AlreadyCommitted,
    AnabranchError,
    AskOutcomeError,
    BeginAgainError,
    FixCallError,
    RetryError,
    UnknownTransaction,
)
from anabranch.types import Receipt, Result, TransactionInfo
from checker.recorder import Failed, Recorder, Unknown

KEYS = 8
PLAIN_KEYS = 4
KEEPALIVE_S = 2.0
BIG = 120  # events of a flush of a big transaction
STATES = {
    "OPEN": "open",
    "COMMIT_IN_PROGRESS": "committing",
    "FINALIZE_IN_PROGRESS": "committing",
    "COMMITTED": "committed",
    "ABORT_IN_PROGRESS": "aborting",
    "ABORTED": "aborted",
    "PREPARED": "prepared",
}
# What a caller has to expect where controllers die.
TROUBLE = (RetryError, BeginAgainError, AskOutcomeError, AlreadyCommitted, UnknownTransaction)
Pairs = list[tuple[str, str]]  # key, id


def value_of(id_: str, chance: random.Random) -> bytes:
    """An event's value: its id, and something that does not compress."""
    return f"{id_} {chance.randbytes(12).hex()}".encode()


def ask_state(client: anabranch.Client, recorder: Recorder, txn_id: str, *, final: bool) -> None:
    """Ask what became of a transaction. ``final``: of one that nobody knows it is settled now."""
    with contextlib.suppress(Unknown), recorder.asking("state", txn_id=txn_id) as told:
        try:
            info: TransactionInfo = (client.resolve if final else client.state)(txn_id)
        except UnknownTransaction:
            told.update(state="unknown", timestamp=None)
        except AnabranchError as error:
            raise Unknown(str(error)) from error
        else:
            told.update(state=STATES[info.state], timestamp=info.commit_timestamp or None)


class Writing:
    """One thread: one transaction after the other."""

    def __init__(
        self,
        client: anabranch.Client,
        recorder: Recorder,
        streams: Sequence[str],
        name: str,
        chance: random.Random,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._streams = streams
        self._scope = streams[0].partition("/")[0]
        self._name = name
        self._chance = chance
        self._numbers = 0
        self._lock = threading.Lock()
        self._known: list[str] = []
        self._highest = 0

    def until(self, ending: threading.Event) -> None:
        """Transactions until the event is set."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (4, self._one_shot),
            (4, self._short),
            (3, self._attempts),
            (2, self._aborted),
            (2, self._crowd),
            (1, self._big),
            (2, self._numbered),
            (2, self._ask),
        ]
        while not ending.is_set():
            kind = self._chance.choices([k for _, k in kinds], [w for w, _ in kinds])[0]
            with contextlib.suppress(*TROUBLE, Unknown, Failed):
                kind()

    # -- kinds ----------------------------------------------------------------------------------------

    def _one_shot(self) -> None:
        handle, txn = self._begin(opened=False)
        for stream in self._streams:
            self._write(handle, "own", txn, stream, self._chance.randint(1, 3))
        self._commit(handle, txn, lambda: txn.commit(), ["own"])

    def _short(self) -> None:
        with self._opened() as (handle, txn):
            for _ in range(self._chance.randint(1, 3)):
                stream = self._chance.choice(self._streams)
                self._write(handle, "own", txn, stream, self._chance.randint(2, 6))
                if self._chance.random() < 0.5:
                    txn.flush()  # so that it has several runs
            self._commit(handle, txn, lambda: txn.commit(), ["own"])

    def _attempts(self) -> None:
        """A task is tried twice: of the first attempt everything is registered, and it is not taken."""
        with self._opened() as (handle, txn):
            token = txn.token()
            self._write(handle, "own", txn, self._streams[0], 2)
            receipts: list[Receipt] = []
            for name in ("dead", "second"):
                writer = self._client.join(token)
                self._write(handle, name, writer, self._chance.choice(self._streams), 3)
                if name == "dead":
                    writer.flush()
                    writer.discard()
                else:
                    with self._recorder.asking("finish", txn=handle, writer=name):
                        receipts.append(writer.finish())
            self._commit(handle, txn, lambda: txn.commit(receipts=receipts), ["own", "second"])

    def _aborted(self) -> None:
        with self._opened() as (handle, txn):
            for stream in self._streams:
                self._write(handle, "own", txn, stream, 3)
            txn.flush()
            with self._recorder.asking("abort", txn=handle):
                txn.abort()

    def _crowd(self) -> None:
        """Some that were open while the stream is scaled commit together."""
        together = time.monotonic() + self._chance.uniform(0.3, 1.2)
        seeds = [self._chance.random() for _ in range(3)]

        def one(seed: float) -> None:
            chance = random.Random(seed)
            with contextlib.suppress(*TROUBLE, Unknown, Failed), self._opened() as (handle, txn):
                self._write(handle, "own", txn, self._streams[0], chance.randint(1, 4))
                txn.flush()
                time.sleep(max(0.0, together - time.monotonic()))
                self._commit(handle, txn, lambda: txn.commit(), ["own"])

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(one, seeds))

    def _big(self) -> None:
        with self._opened() as (handle, txn):
            for _ in range(3):
                self._write(handle, "own", txn, self._streams[0], BIG)
                txn.flush()
            self._commit(handle, txn, lambda: txn.commit(), ["own"])

    def _numbered(self) -> None:
        """A number of this thread's own series, mostly tried twice; the second one gives way."""
        self._highest += 1
        number = self._highest
        for _ in range(self._chance.choice((1, 2, 2))):
            self._one_numbered(self._name, number)

    def _one_numbered(self, series: str, number: int) -> None:
        with self._opened() as (handle, txn):
            self._write(handle, "own", txn, self._streams[-1], 2)
            call = partial(txn.commit, name=series, number=number)
            self._commit(handle, txn, call, ["own"], series=series, number=number)

    def _ask(self) -> None:
        with self._lock:
            txn_id = self._chance.choice(self._known) if self._known else ""
        if txn_id:
            ask_state(self._client, self._recorder, txn_id, final=False)

    # -- how ------------------------------------------------------------------------------------------

    def _next(self) -> int:
        with self._lock:
            self._numbers += 1
            return self._numbers

    def _begin(self, *, opened: bool) -> tuple[str, anabranch.Transaction]:
        handle = f"{self._name}.t{self._next()}"
        with self._recorder.asking("begin", txn=handle, scope=self._scope) as told:
            txn = self._client.begin(self._scope, keepalive=KEEPALIVE_S)
            if opened:
                txn.token()
            told["txn_id"] = txn.txn_id.hex() if txn.txn_id else None
            if txn.txn_id:
                self._knows(txn.txn_id.hex())
        return handle, txn

    def _knows(self, txn_id: str) -> None:
        with self._lock:
            self._known.append(txn_id)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[str, anabranch.Transaction]]:
        """What is left by an error is silent from then on."""
        handle, txn = self._begin(opened=True)
        try:
            yield handle, txn
        finally:
            txn._discard()  # nothing is said of it any more: it goes stale

    def _write(
        self,
        handle: str,
        name: str,
        writer: anabranch.Transaction | anabranch.Writer,
        stream: str,
        count: int,
    ) -> None:
        pairs = [
            (f"k{self._chance.randrange(KEYS)}", f"{self._name}.{self._next()}")
            for _ in range(count)
        ]
        with self._recorder.asking("write", txn=handle, writer=name, stream=stream, events=pairs):
            for key, id_ in pairs:
                writer.write(stream, value_of(id_, self._chance), key=key.encode())

    def _commit(
        self,
        handle: str,
        txn: anabranch.Transaction,
        call: Callable[[], Result],
        writers: list[str],
        **claimed: str | int,
    ) -> None:
        with self._recorder.asking("commit", txn=handle, writers=writers, **claimed) as told:
            try:
                result = call()
            except AskOutcomeError as error:
                txn_id = getattr(error, "txn_id", None)
                if txn_id:
                    self._knows(txn_id.hex())
                raise Unknown(str(error)) from error
            except (BeginAgainError, FixCallError) as error:
                raise Failed(f"{type(error).__name__}: {error}") from error
            told.update(
                txn_id=result.txn_id.hex(),
                timestamp=result.commit_timestamp,
                committed=result.counts.committed,
            )
            if claimed:
                told["replayed"] = result.txn_id != txn.txn_id
            self._knows(result.txn_id.hex())


class Plainly:
    """Plain writes by an ordinary producer, to the partitions that the journals began with."""

    def __init__(
        self, bootstrap: str, recorder: Recorder, streams: Sequence[str], name: str, seed: int
    ) -> None:
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 5}
        )
        self._recorder = recorder
        self._streams = streams
        self._name = name
        self._chance = random.Random(f"{seed}/plain")
        self._numbers = 0

    def until(self, ending: threading.Event) -> None:
        """A few at a time until the event is set."""
        while not ending.wait(self._chance.uniform(0.02, 0.2)):
            with contextlib.suppress(Unknown):
                self._some()

    def _some(self) -> None:
        stream = self._chance.choice(self._streams)
        pairs: Pairs = []
        burst = self._chance.random() < 0.3  # of one key, each in a batch of its own
        only = self._chance.randrange(PLAIN_KEYS)
        for _ in range(20 if burst else self._chance.randint(1, 5)):
            self._numbers += 1
            # Keys of its own: transactions come in another order than plain writes.
            number = only if burst else self._chance.randrange(PLAIN_KEYS)
            pairs.append((f"{self._name}.p{number}", f"{self._name}.plain.{self._numbers}"))
        errors: list[KafkaError | None] = []

        def told(error: KafkaError | None, _: Message) -> None:
            errors.append(error)

        with self._recorder.asking("plain", stream=stream, events=pairs, producer=self._name):
            for key, id_ in pairs:
                self._producer.produce(
                    f"{stream.replace('/', '.')}.journal",
                    value=value_of(id_, self._chance),
                    key=key.encode(),
                    partition=crc32(key.encode()) % 2,
                    on_delivery=told,
                )
                if burst or self._chance.random() < 0.5:
                    self._producer.flush(5.0)  # so that there are several batches
            self._producer.flush(5.0)
            if len(errors) < len(pairs) or any(errors):
                raise Unknown(f"{len(errors)} of {len(pairs)} were told, {errors[:1]}")
