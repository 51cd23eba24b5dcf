"""A client of anabranch in one file, without anabranch: only docs/protocol.md.

Needs a Kafka client (confluent-kafka), an Avro library (fastavro) and the folder of schemas.

    # one transaction: begin, touch, write, register, commit
    python raw_client.py --bootstrap HOST:PORT nyc/flights --csv flights.csv --key carrier

    # join a transaction begun elsewhere as one more writer; prints the receipt for the committer
    python raw_client.py --bootstrap HOST:PORT nyc/flights --rows 1000 --token HEX

    # read the committed events
    python raw_client.py --bootstrap HOST:PORT nyc/flights --read

    # move money between two rows of a table: both have changed, or nothing has
    python raw_client.py --bootstrap HOST:PORT bank/accounts --transfer ann bob 5

    # make a processor, take its tasks, and copy what they have not consumed yet: each event exactly once
    python raw_client.py --bootstrap HOST:PORT nyc/copy --processor nyc/copier --input nyc/flights
"""

from __future__ import annotations

import argparse
import csv
import hmac
import io
import json
import random
import re
import secrets
import struct
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import fastavro
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

SCHEMAS = Path(__file__).parents[1] / "anabranch" / "protocol" / "schemas"
ANSWER_S = 60
REPEAT_S = 5
VERSION = 1
TYPES = {
    "FindScope": 1, "Begin": 4, "Touch": 5, "Register": 6, "Commit": 7, "OneShot": 8,
    "Abort": 9, "Resolve": 10, "Heartbeat": 12, "SafeTime": 16, "CreateProcessor": 27, "TakeTasks": 29,
    "DescribeProcessors": 31, "Reply": 32, "Receipt": 33, "EpochRecord": 97, "CommitRecord": 98,
}  # fmt: skip
Row = tuple[bytes | None, bytes]


class Refused(Exception):
    """A controller refused a command; nothing changed."""


class Avro:
    """Section 2: version byte, type byte, Avro body. Fields above this client's feature level are left out."""

    def __init__(self, folder: Path) -> None:
        self._raw = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.avsc")}
        for each in self._raw.values():
            if each["type"] == "record":
                fields = each["fields"]
                each["fields"] = [
                    field for field in fields if field.get("level", VERSION) <= VERSION
                ]
        self._named: dict[str, Any] = {}
        self._parsed: dict[str, Any] = {}

    def schema(self, name: str) -> Any:
        if name not in self._parsed:
            for part in re.findall(r'"anabranch\.(\w+)"', json.dumps(self._raw[name])):
                self.schema(part)
            self._parsed[name] = fastavro.parse_schema(self._raw[name], self._named)
        return self._parsed[name]

    def frame(self, name: str, record: dict[str, Any]) -> bytes:
        out = io.BytesIO(bytes((VERSION, TYPES[name])))
        out.seek(2)
        fastavro.schemaless_writer(out, self.schema(name), record)
        return out.getvalue()

    def unframe(self, name: str, data: bytes) -> Any:
        if data[:2] != bytes((VERSION, TYPES[name])):
            raise ValueError(f"not a {name} of version {VERSION}: {data[:2].hex()}")
        body: Any = io.BytesIO(data[2:])
        return fastavro.schemaless_reader(body, self.schema(name), None, return_record_name=True)


class Commands:
    """Sections 3 and 4: commands out, replies in."""

    def __init__(self, bootstrap: str, prefix: str, avro: Avro, lane: str = "open") -> None:
        self.avro = avro
        of = "" if lane == "open" else f".{lane}"
        self._commands, replies = f"{prefix}.commands{of}", f"{prefix}.replies{of}"
        self._producer = producer_of(bootstrap, **{"linger.ms": 0})
        self.seen = 0  # the highest hybrid time in answers (section 12)
        # Any partition; its end is known before the first command is sent.
        here = random.choice(ends_of(bootstrap, replies))
        self._reply_partition = here.partition
        self._consumer = consumer_of(bootstrap, "read_committed")
        self._consumer.assign([here])
        self._digests: dict[
            bytes, bytes
        ] = {}  # of commands that wait for an answer, by correlation id

    def send(self, partition: int, name: str, command: dict[str, Any], cid: bytes = b"") -> bytes:
        cid = cid or secrets.token_bytes(16)
        headers: Any = [("ab.cid", cid), ("ab.reply", struct.pack(">i", self._reply_partition))]
        headers.append(("ab.ht", struct.pack(">q", self.seen)))
        value = self.avro.frame(name, command)
        self._digests[cid] = sha256(value).digest()[:8]
        self._producer.produce(self._commands, value, partition=partition, headers=headers)
        self._producer.poll(0)
        return cid

    def ask(self, partition: int, name: str, command: dict[str, Any]) -> Any:
        """The answer as (name of its record, record). Sends the command again until it is answered (section 11)."""
        deadline, cid = time.monotonic() + ANSWER_S, b""
        while time.monotonic() < deadline:
            cid = self.send(partition, name, command, cid)
            answer = self._wait_for(cid, time.monotonic() + REPEAT_S)
            if answer is None:
                continue
            kind, record = answer[0].rpartition(".")[2], answer[1]
            if kind != "Refusal":
                return kind, record
            if record["code"] != "NotReady":
                raise Refused(f"{record['code']}: {record['message']}")
            time.sleep(0.5)
        raise TimeoutError(f"{name} was not answered in {ANSWER_S} s")

    def close(self) -> None:
        self._producer.flush(10)
        self._consumer.close()

    def _wait_for(self, cid: bytes, deadline: float) -> Any:
        while (left := deadline - time.monotonic()) > 0:
            message = self._consumer.poll(left)
            if message is not None and not message.error() and message.key() == cid:
                reply = self.avro.unframe("Reply", message.value() or b"")
                if reply["command"] == self._digests[cid]:
                    if reply["result"][0] != "anabranch.ScopeInfo":
                        self.seen = max(self.seen, reply["hybrid_time"])
                    return reply["result"]
        return None


class Transaction:
    """Sections 5, 6 and 10. Its id is bytes 1 to 16 of the token, its control partition 1 and 2."""

    def __init__(self, commands: Commands, token: bytes) -> None:
        self._commands = commands
        self.token = token
        self.txn_id = token[1:17]
        self.partition = int.from_bytes(token[1:3], "big")
        self.scope = token[38 : 38 + token[37]].decode("ascii")

    @property
    def seen(self) -> int:
        """The time for writers' receipts: see `Commands.seen`."""
        return self._commands.seen

    def ask(self, command: str, /, **fields: Any) -> Any:
        return self._commands.ask(self.partition, command, fields)[1]

    def heartbeat(self) -> None:
        self._commands.send(self.partition, "Heartbeat", {"tokens": [self.token]})

    def commit(self, own: list[dict[str, Any]]) -> Any:
        """The outcome. An unanswered commit is resolved, and sent again if the transaction has not ended."""
        command = {"token": self.token, "own": own, "receipts": None, "name": None, "validated": []}
        while True:
            try:
                return self.ask("Commit", **command, wait_ms=30_000)
            except TimeoutError:
                about = {"txn_id": self.txn_id, "scope": self.scope, "token": self.token}
                outcome = self.ask("Resolve", **about)
                if outcome["state"] in ("COMMITTED", "ABORTED"):
                    return outcome


def find_scope(commands: Commands, scope: str) -> int:
    """Section 4: the control partition of a scope."""
    _, found = commands.ask(0, "FindScope", {"scope": scope, "create": False, "near": None})
    control: int = found["control_partition"]
    return control


def new_id(control: int, *, marked: bool = False) -> bytes:
    """Section 5: a transaction's id; marked as in section 10, if it moves positions in one shot."""
    time_ms = int(time.time() * 1000) | marked << 47
    return control.to_bytes(2, "big") + time_ms.to_bytes(6, "big") + secrets.token_bytes(8)


def begin(commands: Commands, scope: str, name: str | None, keepalive_ms: int) -> Any:
    """Section 5: a new transaction, or the outcome of the committed one of that name."""
    control = find_scope(commands, scope)
    txn_id = new_id(control)
    secret = secrets.token_bytes(32)  # tokens are made from it
    command = {"txn_id": txn_id, "scope": scope, "name": name, "keepalive_ms": keepalive_ms}
    command |= {"secret": secret, "snapshot": 0}  # it reads no tables
    kind, answer = commands.ask(control, "Begin", command)
    if kind != "Begun":
        return answer
    return Transaction(commands, make_token(secret, scope, answer))


def make_token(secret: bytes, scope: str, begun: dict[str, Any]) -> bytes:
    """Section 5, "The token": with all rights, without an end or caveats, by a client of lane "open"."""
    times = struct.pack(">IQQ", begun["keepalive_ms"], begun["begun_ms"], 0)
    signed: bytes = b"\2" + begun["txn_id"] + times
    for text in (scope.encode(), b"open"):
        signed += bytes((len(text),)) + text
    signed += struct.pack(">BQ", 31, 0)
    return signed + b"\0" + hmac.digest(secret, signed, "sha256")


def position(key: bytes) -> int:
    """Section 7: the position of a key."""
    h = crc32(key)
    h ^= h >> 16
    h = h * 0x85EBCA6B & 0xFFFFFFFF
    h ^= h >> 13
    h = h * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def fingerprint(key: bytes) -> int:
    """Section 16: the hash by which a lock names a key, as a signed 64-bit number."""
    crc = 0xFFFFFFFF  # CRC-32C: Castagnoli's polynomial, reflected
    for byte in key:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    unsigned = position(key) << 32 | crc ^ 0xFFFFFFFF
    return unsigned - (unsigned >> 63 << 64)


class Writer:
    """Sections 8 and 9: one writer of one stream, and its receipt."""

    def __init__(self, bootstrap: str, transaction: Transaction, stream: str) -> None:
        self._id = secrets.randbits(64) - (1 << 63)
        about = {"token": transaction.token, "stream": stream, "writer": self._id}
        touched = transaction.ask("Touch", **about)
        self._segments = touched["segments"]
        self._txn_id, self._of = transaction.txn_id, transaction
        self._stream = stream
        self._topic = stream.replace("/", ".") + ".journal"
        epoch = touched["stream_epoch"]
        self._header = struct.pack(">16sqi", transaction.txn_id, self._id, epoch)
        self._extents: dict[int, dict[str, Any]] = {}
        self._failed: KafkaError | None = None
        self._producer = producer_of(bootstrap, **{"compression.type": "lz4", "linger.ms": 50})

    def write(self, key: bytes | None, value: bytes) -> None:
        if key is None:
            partition = random.choice(self._segments)["partition"]
        else:
            at = position(key)
            partition = next(s["partition"] for s in self._segments if s["low"] <= at < s["high"])
        extent = self._extents.setdefault(partition, {"count": 0, "crc_sum": 0})
        extent["count"] += 1
        extent["crc_sum"] += crc32(value, crc32(key or b""))
        headers: Any = [("ab.txn", self._header)]
        while len(self._producer) > 20_000:
            self._producer.poll(0.1)
        self._producer.produce(
            self._topic, value, key, partition, self._acknowledged, headers=headers
        )
        self._producer.poll(0)

    def _acknowledged(self, error: KafkaError | None, message: Message) -> None:
        self._failed = self._failed or error
        extent, offset = self._extents[message.partition() or 0], message.offset() or 0
        extent["first"] = min(offset, extent.get("first", offset))
        extent["end"] = max(offset + 1, extent.get("end", 0))

    def receipt(self) -> dict[str, Any]:
        """The receipt, once all writes are acknowledged. A writer that lost a write has no receipt."""
        if self._producer.flush(120) or self._failed:
            raise SystemExit(f"a write failed: {self._failed or 'no acknowledgement'}; begin again")
        extents = [{"stream": self._stream, "partition": p, **e} for p, e in self._extents.items()]
        whose = {"txn_id": self._txn_id, "writer": self._id}
        told = {"extents": extents, "seen": self._of.seen}
        return {**whose, "sequence": 1, "finished": True, **told}


class Log:
    """Section 13: ranges of partitions, read_committed."""

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap
        self._consumer = consumer_of(bootstrap, "read_committed")

    def span(self, topic: str, partition: int, first: int, end: int) -> Iterator[Message]:
        self._consumer.assign([TopicPartition(topic, partition, first)])
        while first < end:
            message = self._consumer.poll(10)
            if message is None:
                continue
            error, first = message.error(), message.offset() or 0
            if error is None:
                if first < end:
                    yield message
                first += 1
            elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
                raise SystemExit(f"can't read {topic}: {error}")

    def all(self, topic: str) -> Iterator[Message]:
        """All that is committed by now, partition by partition."""
        for place in ends_of(self._bootstrap, topic):
            yield from self.span(topic, place.partition, 0, place.offset)

    def close(self) -> None:
        self._consumer.close()


def read(bootstrap: str, stream: str) -> Iterator[dict[str, Any]]:
    """Section 13: all events committed by now, partition by partition in commit order."""
    log = Log(bootstrap)
    yield from (event_of(message) for message in log.all(stream.replace("/", ".")))
    log.close()


class Tasks:
    """Section 10, "Positions": takes tasks of a processor, and keeps their positions."""

    def __init__(self, commands: Commands, processor: str, wanted: list[int] | None) -> None:
        self._commands, self._processor = commands, processor
        self._scope = processor.partition("/")[0]
        self._control = find_scope(commands, self._scope)
        about = {"scope": self._scope, "processor": processor, "after": None}
        found: list[Any] = []
        more: int | None = 0
        while more is not None:
            info = self._ask("DescribeProcessors", about | {"task": more})
            found, more = found + info["tasks"], info["more"]
        terms = {t["task"]: t["term"] for t in found if not wanted or t["task"] in wanted}
        self._fencing_token = secrets.token_bytes(16)
        take = {
            "processor": processor,
            "fencing_token": self._fencing_token,
            "holder": "raw_client",
        }
        take |= {"tasks": [*terms], "terms": [*terms.values()]}
        info = self._ask("TakeTasks", take)
        while any(task["in_progress"] for task in info["tasks"]):  # wait for commits under way
            time.sleep(0.1)
            info = self._ask("TakeTasks", take)
        self.inputs, self.count = info["inputs"], info["task_count"]
        self._sequences = {task["task"]: task["sequence"] for task in info["tasks"]}
        # Of each input, task -> record of its history, segment in that, offset there.
        self.stands = [dict.fromkeys(terms, (one["record"], -1, -1)) for one in self.inputs]
        for task in info["tasks"]:
            for at in task["positions"]:
                where = at["record"], at["segment"], at["offset"]
                self.stands[at["input"]][task["task"]] = where

    def _ask(self, name: str, command: dict[str, Any]) -> Any:
        return self._commands.ask(self._control, name, command)[1]["processors"][0]

    def commit(self, number: int, at: int, timestamp: int, events: list[dict[str, Any]]) -> None:
        """Write events, and move the tasks to after the record ``at`` of an input: both or neither."""
        here = {"input": number, "record": at + 1, "timestamp": timestamp}
        alike: dict[int, list[int]] = {}
        for task, (record, _, _) in self.stands[number].items():
            if record <= at:
                self.stands[number][task] = (at + 1, -1, -1)
                self._sequences[task] += 1
                alike.setdefault(self._sequences[task], []).append(task)
        moved = [here | {"segment": -1, "offset": -1}]
        steps = [{"tasks": t, "sequence": n, "positions": moved} for n, t in alike.items()]
        consumed = {
            "processor": self._processor,
            "fencing_token": self._fencing_token,
            "steps": steps,
        }
        about = {"txn_id": new_id(self._control, marked=True), "scope": self._scope, "name": None}
        self._commands.ask(
            self._control, "OneShot", about | {"events": events, "consumed": consumed, "locks": []}
        )


def task_of(message: Message, low: int, high: int, tasks: int) -> int:
    """Section 10: the task of an event in a segment of these positions."""
    key, offset = message.key(), message.offset() or 0
    at = position(key) if isinstance(key, bytes) else -1
    if low <= at < high:
        return at * tasks >> 32
    first, last = low * tasks >> 32, (high - 1) * tasks >> 32
    return first + offset % (last - first + 1)


def process(bootstrap: str, tasks: Tasks, output: str, avro: Avro) -> int:
    """Copy the events that the tasks have not consumed yet, in capitals; returns how many."""
    copied = 0
    for number, one in enumerate(tasks.inputs):
        history, log, stands = Log(bootstrap), Log(bootstrap), tasks.stands[number]
        lowest = min(stands.values())[0]
        layouts: dict[int, dict[int, tuple[int, int]]] = {}
        for message in history.all(one["stream"].replace("/", ".") + ".history"):
            at, value = message.offset() or 0, message.value() or b""
            epoch = value[1] == TYPES["EpochRecord"]
            record = avro.unframe("EpochRecord" if epoch else "CommitRecord", value)
            if (
                not layouts
                and (at - 1 if record["previous"] == -2 else record["previous"]) >= lowest
            ):
                raise SystemExit(f"retention took what was not consumed of {one['stream']}")
            if epoch:
                ranges = {s["segment_id"]: (s["low"], s["high"]) for s in record["segments"]}
                layouts[record["stream_epoch"]] = ranges
            elif at >= lowest:
                events = []
                order = [part["segment_id"] for part in record["segments"]]
                for index, event in events_of(log, one["stream"], record):
                    task = task_of(
                        event, *layouts[record["stream_epoch"]][order[index]], tasks.count
                    )
                    if task in stands:
                        begin, segment, below = stands[task]
                        within = order.index(segment) if segment in order else -1
                        if (at, index, event.offset() or 0) >= (begin, within, below):
                            events.append(capitals(event, output))
                if events:
                    tasks.commit(number, at, record["timestamp"], events)
                    copied += len(events)
        history.close()
        log.close()
    return copied


def events_of(log: Log, stream: str, record: Any) -> Iterator[tuple[int, Message]]:
    """The events of a commit in a stream, each with the number of its segment in the record."""
    for index, part in enumerate(record["segments"]):
        where = part["partition"], part["first"], part["end"]
        left = part["count"]
        for message in log.span(stream.replace("/", "."), *where):
            headers: Any = dict(message.headers() or [])
            if (
                headers.get("ab.txn", bytes(16))[:16] == record["txn_id"]
            ):  # else it is not of this commit
                left -= 1
                yield index, message
        if left:
            raise SystemExit(f"retention took {left} events of {stream} that were not consumed")


class Table:
    """Section 16: the versions of a table's rows, by the COMMIT records of its history."""

    def __init__(self, bootstrap: str, table: str, avro: Avro) -> None:
        self._bootstrap, self._avro, self._table = bootstrap, avro, table
        self._history = table.replace("/", ".") + ".history"
        self._records, self._events, self._position = Log(bootstrap), Log(bootstrap), 0
        self._versions: dict[bytes, list[tuple[int, bytes | None]]] = {}  # by time
        self.last = 0  # timestamp of the newest record that was read
        self.complete = 0  # the hybrid time up to which it has every commit

    def reach(self, timestamp: int, last: int) -> None:
        """Read until the table is complete through ``timestamp``. ``last``: its newest commit up to then."""
        deadline = time.monotonic() + ANSWER_S
        while self.last < last:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._history} does not show the commit at {last}")
            [place] = ends_of(self._bootstrap, self._history)
            for message in self._records.span(self._history, 0, self._position, place.offset):
                self._lay(message.value() or b"")
            self._position = max(self._position, place.offset)
        self.complete = max(self.complete, timestamp, self.last)

    def _lay(self, value: bytes) -> None:
        name = "EpochRecord" if value[1] == TYPES["EpochRecord"] else "CommitRecord"
        record = self._avro.unframe(name, value)
        if name == "CommitRecord":
            found = events_of(self._events, self._table, record)
            rows = {
                key: event.value() for _, event in found if isinstance(key := event.key(), bytes)
            }
            for key, row in rows.items():  # a transaction has one version of a key: its last value
                version = record["timestamp"], row if isinstance(row, bytes) else None
                self._versions.setdefault(key, []).append(version)
        if name == "CommitRecord" or not self.last:  # without commits: the time of the first epoch
            self.last = record["timestamp"]

    def get(self, key: bytes, at: int) -> bytes | None:
        """The row of a key as of a hybrid time."""
        seen = [row for timestamp, row in self._versions.get(key, []) if timestamp <= at]
        return seen[-1] if seen else None

    def is_newer(self, key: bytes, than: int) -> bool:
        """Whether a key was written after a hybrid time, by the records read so far."""
        return any(timestamp > than for timestamp, _ in self._versions.get(key, []))


class Broken(Exception):
    """A row that was read has changed since: nothing was written."""


class Bank:
    """Section 16: transfers between two rows of a table."""

    def __init__(self, commands: Commands, table: Table, name: str) -> None:
        self._commands, self._table, self._name = commands, table, name
        self._scope = name.partition("/")[0]
        self._control = find_scope(commands, self._scope)
        self.looked_again = self.begun_again = 0

    def transfer(self, payer: bytes, payee: bytes, amount: int) -> Any:
        """The outcome. The transfer begins again whenever others change one of the two rows meanwhile."""
        while True:
            about = {"scope": self._scope, "at": None, "tables": [self._name]}
            safe = self._ask("SafeTime", about)[1]
            self._table.reach(safe["timestamp"], safe["tables"][0]["last"])
            snapshot = self._table.complete
            held = [int(self._table.get(key, snapshot) or 0) for key in (payer, payee)]
            if held[0] < amount:
                raise SystemExit(
                    f"{payer.decode()} has {held[0]}, not {amount}: nothing was changed"
                )
            rows = {payer: held[0] - amount, payee: held[1] + amount}
            try:
                outcome = self._commit(snapshot, rows)
            except Broken:
                outcome = None
            if outcome is not None and outcome["state"] == "COMMITTED":
                return outcome
            self.begun_again += 1
            time.sleep(random.uniform(0.002, 0.02))

    def _commit(self, snapshot: int, rows: dict[bytes, int]) -> Any:
        """The outcome of a one-shot that commits if the rows have not changed since the snapshot."""
        events = [one_event(self._name, key, b"%d" % held) for key, held in rows.items()]
        shot: dict[str, Any] = {"txn_id": new_id(self._control), "scope": self._scope, "name": None}
        shot |= {"events": events, "consumed": None}
        points = sorted(map(fingerprint, rows))
        while True:
            # In this order: `is_newer` also sees the records read after ``since`` was taken.
            since, last = self._table.complete, self._table.last
            if any(self._table.is_newer(key, snapshot) for key in rows):
                raise Broken
            locks = {
                "table": self._name,
                "since": since,
                "last": last,
                "points": points,
                "ranges": [],
            }
            try:
                kind, answer = self._ask("OneShot", shot | {"locks": [locks]})
            except TimeoutError:  # `Resolve` aborts it, unless it is committed
                return self._ask(
                    "Resolve", {**{k: shot[k] for k in ("txn_id", "scope")}, "token": None}
                )[1]
            if kind == "Outcome":
                return answer
            self.looked_again += 1  # the table lacked commits: the controller logged nothing
            self._table.reach(answer["timestamp"], answer["tables"][0]["last"])

    def _ask(self, name: str, command: dict[str, Any]) -> Any:
        return self._commands.ask(self._control, name, command)


def transfer_all(options: argparse.Namespace, commands: Commands) -> dict[str, Any]:
    """Make the transfers, and return their outcomes."""
    payer, payee, amount = options.transfer
    table = Table(options.bootstrap, options.stream, commands.avro)
    bank = Bank(commands, table, options.stream)
    done = [
        bank.transfer(payer.encode(), payee.encode(), int(amount)) for _ in range(options.times)
    ]
    counts = {"looked_again": bank.looked_again, "begun_again": bank.begun_again}
    ids = [outcome["txn_id"].hex() for outcome in done]
    return {"committed": ids, "commit_timestamp": done[-1]["commit_timestamp"], **counts}


def capitals(message: Message, output: str) -> dict[str, Any]:
    value = message.value()
    return one_event(output, message.key(), value.upper() if isinstance(value, bytes) else None)


def one_event(stream: str, key: Any, value: bytes | None) -> dict[str, Any]:
    """An event of a one-shot."""
    rest = {"segment_id": -1, "headers": [], "timestamp": -1}
    return {"stream": stream, "key": key, "value": value, **rest}


def event_of(message: Message) -> dict[str, Any]:
    headers: Any = dict(message.headers() or [])
    return {
        "partition": message.partition(),
        "offset": message.offset(),
        "key": text(message.key()),
        "value": text(message.value()),
        "txn_id": headers.get("ab.txn", b"")[:16].hex(),
    }


def producer_of(bootstrap: str, **more: Any) -> Producer:
    """An idempotent producer, without native transactions."""
    safe = {"enable.idempotence": True, "acks": "all"}
    return Producer({"bootstrap.servers": bootstrap, **safe, **more})


def consumer_of(bootstrap: str, isolation: str) -> Consumer:
    """A consumer outside of any group."""
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 20,  # the last record is often a marker, which is no message
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
        }
    )


def ends_of(bootstrap: str, topic: str) -> list[TopicPartition]:
    """The partitions' high watermarks, which count invisible records, too (section 12)."""
    consumer = consumer_of(bootstrap, "read_uncommitted")
    partitions = consumer.list_topics(topic, timeout=30).topics[topic].partitions
    if not partitions:
        raise SystemExit(f"there is no topic {topic}")
    found = []
    for partition in partitions:
        watermarks = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=30)
        found.append(TopicPartition(topic, partition, watermarks[1]))
    consumer.close()
    return found


def text(data: bytes | str | None) -> str | None:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else data


def rows_of(options: argparse.Namespace) -> Iterator[Row]:
    if options.csv is None:
        for i in range(options.rows):
            yield b"key-%d" % (i % 100), json.dumps({"row": i}).encode()
        return
    with open(0 if options.csv == "-" else options.csv, encoding="utf-8", newline="") as opened:
        for row in csv.DictReader(opened):
            yield row[options.key].encode() if options.key else None, json.dumps(row).encode()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("stream", help="scope/stream; it must exist")
    parser.add_argument("--bootstrap", required=True, metavar="HOST:PORT")
    parser.add_argument("--prefix", default="anabranch", help="of the control topics")
    parser.add_argument("--lane", default="open", help="the lane to ask by")
    parser.add_argument("--schemas", type=Path, default=SCHEMAS, help="folder of the *.avsc")
    parser.add_argument("--csv", metavar="FILE", help="a row is an event; -: standard input")
    parser.add_argument("--key", metavar="COLUMN", help="of the CSV; without: no key")
    parser.add_argument("--rows", type=int, default=100, help="without --csv: make up so many")
    parser.add_argument("--name", help="makes the transaction idempotent")
    parser.add_argument("--keepalive", type=float, default=60, metavar="SECONDS")
    parser.add_argument(
        "--token", type=bytes.fromhex, metavar="HEX", help="join this transaction; print a receipt"
    )
    parser.add_argument("--read", action="store_true", help="print committed events as JSON")
    parser.add_argument(
        "--transfer", nargs=3, metavar=("FROM", "TO", "AMOUNT"), help="between rows of this table"
    )
    parser.add_argument("--times", type=int, default=1, help="so many transfers")
    parser.add_argument("--processor", help="scope/name: copy what its tasks have not consumed")
    parser.add_argument("--input", action="append", help="make that processor, of 4 tasks, first")
    parser.add_argument("--task", type=int, action="append", help="take only this one")
    options = parser.parse_args()
    if options.read:
        for event in read(options.bootstrap, options.stream):
            print(json.dumps(event))
        return
    avro = Avro(options.schemas)
    commands = Commands(options.bootstrap, options.prefix, avro, options.lane)
    try:
        if options.transfer:
            print(json.dumps(transfer_all(options, commands)))
        elif options.processor:
            print(process_all(options, commands))
        elif options.token:
            transaction = Transaction(commands, options.token)
            receipt = write(options, transaction)
            print(commands.avro.frame("Receipt", receipt).hex())
        else:
            print_outcome(whole_transaction(options, commands))
    finally:
        commands.close()


def process_all(options: argparse.Namespace, commands: Commands) -> str:
    """Make the processor if inputs are given, take its tasks, and consume all present events."""
    if options.input:
        # Without a topic id, a later stream of the same name would be taken for this input.
        begin = {"topic_id": "", "record": 0, "timestamp": 0}
        inputs = [{"stream": stream, **begin} for stream in options.input]
        about = {
            "processor": options.processor,
            "tasks": 4,
            "inputs": inputs,
            "stores": [],
            "kinds": [],
        }
        control = find_scope(commands, options.processor.partition("/")[0])
        commands.ask(control, "CreateProcessor", about)
    tasks = Tasks(commands, options.processor, options.task)
    return json.dumps({"copied": process(options.bootstrap, tasks, options.stream, commands.avro)})


def whole_transaction(options: argparse.Namespace, commands: Commands) -> Any:
    """The outcome of a transaction of our own, or of the committed one of this name."""
    scope = options.stream.partition("/")[0]
    begun = begin(commands, scope, options.name, int(options.keepalive * 1000))
    if not isinstance(begun, Transaction):
        return begun
    try:
        receipt = write(options, begun, beat_s=options.keepalive / 3)
    except BaseException:
        begun.ask("Abort", token=begun.token, reason="the raw client could not write")
        raise
    return begun.commit([receipt])


def write(
    options: argparse.Namespace, transaction: Transaction, beat_s: float | None = None
) -> dict[str, Any]:
    writer = Writer(options.bootstrap, transaction, options.stream)
    last_beat = time.monotonic()
    for key, value in rows_of(options):
        writer.write(key, value)
        if beat_s is not None and time.monotonic() > last_beat + beat_s:
            transaction.heartbeat()
            last_beat = time.monotonic()
    receipt = writer.receipt()
    transaction.ask("Register", token=transaction.token, receipt=receipt)
    return receipt


def print_outcome(outcome: dict[str, Any]) -> None:
    shown = ("state", "commit_timestamp", "committed", "rejected", "left_out", "reason")
    picked = {field: outcome[field] for field in shown}
    print(json.dumps({"txn_id": outcome["txn_id"].hex(), **picked}))


if __name__ == "__main__":
    try:
        main()
    except (Refused, OSError, KeyError) as error:  # a TimeoutError too
        sys.exit(f"raw_client: {type(error).__name__}: {error}")
