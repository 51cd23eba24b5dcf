"""A client of anabranch in one file, without anabranch: only docs/protocol.md.

Needs a Kafka client (confluent-kafka), an Avro library (fastavro) and the folder of schemas.

    # one transaction: begin, touch, write, register, commit
    python raw_client.py --bootstrap HOST:PORT nyc/flights --csv flights.csv --key carrier

    # join a transaction begun elsewhere as one more writer; prints the receipt for the committer
    python raw_client.py --bootstrap HOST:PORT nyc/flights --rows 1000 --token HEX

    # read the committed events
    python raw_client.py --bootstrap HOST:PORT nyc/flights --read
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

SCHEMAS = Path(__file__).parents[1] / "anabranch" / "schemas"
ANSWER_S = 60
REPEAT_S = 5
VERSION = 1
TYPES = {
    "FindScope": 1, "Begin": 4, "Touch": 5, "Register": 6, "Commit": 7,
    "Abort": 9, "Resolve": 10, "Heartbeat": 12, "Reply": 32, "Receipt": 33,
}  # fmt: skip
Row = tuple[bytes | None, bytes]


class Refused(Exception):
    """A controller refused a command; nothing changed."""


class Avro:
    """Section 2: version byte, type byte, Avro body."""

    def __init__(self, folder: Path) -> None:
        self._raw = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.avsc")}
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
        value = self.avro.frame(name, command)
        self._digests[cid] = sha256(value).digest()[:8]
        self._producer.produce(self._commands, value, partition=partition, headers=headers)
        self._producer.poll(0)
        return cid

    def ask(self, partition: int, name: str, command: dict[str, Any]) -> Any:
        """The answer as (name of its record, record). Sends again until there is one (section 11)."""
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

    def ask(self, command: str, /, **fields: Any) -> Any:
        return self._commands.ask(self.partition, command, fields)[1]

    def heartbeat(self) -> None:
        self._commands.send(self.partition, "Heartbeat", {"tokens": [self.token]})

    def commit(self, own: list[dict[str, Any]]) -> Any:
        """The outcome. Never guesses: an unanswered commit is resolved, then sent again if need be."""
        command = {"token": self.token, "own": own, "receipts": None, "name": None}
        while True:
            try:
                return self.ask("Commit", **command, wait_ms=30_000)
            except TimeoutError:
                about = {"txn_id": self.txn_id, "scope": self.scope, "token": self.token}
                outcome = self.ask("Resolve", **about)
                if outcome["state"] in ("COMMITTED", "ABORTED"):
                    return outcome


def begin(commands: Commands, scope: str, name: str | None, keepalive_ms: int) -> Any:
    """Section 5: a new transaction, or the outcome of the committed one of that name."""
    _, found = commands.ask(0, "FindScope", {"scope": scope, "create": False})
    control, now_ms = found["control_partition"], int(time.time() * 1000)
    txn_id = control.to_bytes(2, "big") + now_ms.to_bytes(6, "big") + secrets.token_bytes(8)
    secret = secrets.token_bytes(32)  # tokens are made from it
    command = {"txn_id": txn_id, "scope": scope, "name": name, "keepalive_ms": keepalive_ms}
    kind, answer = commands.ask(control, "Begin", command | {"secret": secret})
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


class Writer:
    """Sections 8 and 9: one writer of one stream, and its receipt."""

    def __init__(self, bootstrap: str, transaction: Transaction, stream: str) -> None:
        self._id = secrets.randbits(64) - (1 << 63)
        about = {"token": transaction.token, "stream": stream, "writer": self._id}
        touched = transaction.ask("Touch", **about)
        self._segments = touched["segments"]
        self._txn_id = transaction.txn_id
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
        """The receipt, once all is acknowledged. A writer that lost a write gives none."""
        if self._producer.flush(120) or self._failed:
            raise SystemExit(f"a write failed: {self._failed or 'no acknowledgement'}; begin again")
        extents = [{"stream": self._stream, "partition": p, **e} for p, e in self._extents.items()]
        whose = {"txn_id": self._txn_id, "writer": self._id}
        return {**whose, "sequence": 1, "finished": True, "extents": extents}


def read(bootstrap: str, stream: str) -> Iterator[dict[str, Any]]:
    """Section 13: all events committed by now, partition by partition in commit order."""
    topic = stream.replace("/", ".")
    ends = {place.partition: place.offset for place in ends_of(bootstrap, topic)}
    consumer = consumer_of(bootstrap, "read_committed")
    consumer.assign([TopicPartition(topic, partition, 0) for partition in ends])
    while ends:
        message = consumer.poll(10)
        if message is None:
            continue
        partition, next_offset = message.partition() or 0, message.offset() or 0
        error = message.error()
        if error is None:
            if partition in ends and next_offset < ends[partition]:
                yield event_of(message)
            next_offset += 1
        elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            raise SystemExit(f"can't read {topic}: {error}")
        if next_offset >= ends.get(partition, 0):
            ends.pop(partition, None)
    consumer.close()


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
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
        }
    )


def ends_of(bootstrap: str, topic: str) -> list[TopicPartition]:
    """High watermarks, which lie also behind invisible records (section 12)."""
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
    options = parser.parse_args()
    if options.read:
        for event in read(options.bootstrap, options.stream):
            print(json.dumps(event))
        return
    avro = Avro(options.schemas)
    commands = Commands(options.bootstrap, options.prefix, avro, options.lane)
    try:
        if options.token:
            transaction = Transaction(commands, options.token)
            receipt = write(options, transaction)
            print(commands.avro.frame("Receipt", receipt).hex())
        else:
            print_outcome(whole_transaction(options, commands))
    finally:
        commands.close()


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
    """Write all rows and register the receipt."""
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
