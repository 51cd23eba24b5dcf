"""Fuzzed: a controller in memory that reads what others put into commands, journals, history and status.

Commands and journals can be written by anybody: nothing there may stop it, and it answers afterwards. What only
controllers write (history, status) may stop it, by a named error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from random import Random
from typing import Any

from anabranch.batches.records import Record, encode_batch
from anabranch.controller.history_tail import load_tail
from anabranch.controller.leadership import fold_to_end
from anabranch.core.rows import Entry
from anabranch.core.state import State
from anabranch.errors import InvariantViolation, MalformedRecord, UnsupportedVersion
from anabranch.ports import CorruptBatch, LogRefused, TopicPartition
from anabranch.protocol.ids import TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import decode, encode
from anabranch.testing.memory.table import MemoryStore
from anabranch.topics.names import commands_topic, history_topic, journal_topic, status_topic
from tests.controller.world import World
from tests.core.labels import SECRET
from tests.fuzz.mutate import mutated, mutated_batch
from tests.fuzz.samples import records_of_all_types
from tests.fuzz.target import Target, always

STREAM = "nyc/flights"
COMMANDS = TopicPartition(commands_topic(), 0)
JOURNAL = TopicPartition(journal_topic(STREAM), 0)
_EDGES: dict[type, tuple[Any, ...]] = {
    int: (0, 1, -1, 1000, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 31, (1 << 63) - 1, -(1 << 63)),
    str: ("", "nyc", "nyc/flights", "nyc/x", "x" * 300, "é/🚲", "a/b/c", "\x00", ".", "a.b/c"),
    bytes: (b"", b"\x00", bytes(16), b"\xff" * 16, b"x" * 5000),
    bool: (True, False),
}


class Place:
    """A controller that leads, a stream, and a transaction with something in the journal."""

    def __init__(self) -> None:
        self.world = World()
        self.controller = self.world.controller()
        self.controller.lead()
        self.world.stream(self.controller, STREAM)
        self.txn_id = self.world.txn_id()
        self.begun = self.world.ask(
            self.controller, r.Begin(self.txn_id, "nyc", "a name", 60_000, SECRET)
        )
        self.touched = self.world.ask(self.controller, r.Touch(self.begun.token, STREAM))
        events = [(b"k%d" % i, b"v") for i in range(4)]
        self.receipt = self.world.write(
            self.txn_id, 5, STREAM, self.touched.segments, events, epoch=self.touched.stream_epoch
        )

    def put(self, place: TopicPartition, data: bytes) -> bool:
        """Append a batch unchecked, as far as this log can hold it."""
        try:
            self.world.cluster.partition(place).append(data, -1, -1, -1, transactional=False)
        except (LogRefused, CorruptBatch):
            return False
        return True

    def go_on(self) -> None:
        """Step, let time pass, and ask: nothing is raised, and there is an answer."""
        for _ in range(3):
            self.controller.step(0)
        self.world.clock.now += 10.0
        for _ in range(3):
            self.controller.step(0)
        answer = self.world.ask(self.controller, r.GetState(self.txn_id), steps=200)
        assert isinstance(answer, r.Outcome), answer


def _commands() -> list[bytes]:
    place = Place()
    token, txn_id, receipt = place.begun.token, place.txn_id, place.receipt
    new = place.world.txn_id()
    event = r.Event(STREAM, 0, b"k", b"v", (r.EventHeader("h", b"x"),), -1)
    made = (
        r.FindScope("nyc", True),
        r.CreateStream("nyc/more", 2, {"retention.ms": "1000"}),
        r.DescribeStreams("nyc", None),
        r.DescribeStreams(None, STREAM),
        r.Begin(new, "nyc", "name", 5000, SECRET),
        r.Begin(txn_id, "nyc", "a name", 60_000, SECRET),
        r.Touch(token, STREAM),
        r.Register(token, receipt),
        r.Commit(token, (receipt,), None, None, 500),
        r.Commit(token, (), (receipt,), "named", 0, 3),
        r.OneShot(new, "nyc", None, (event, event)),
        r.Abort(token, "why"),
        r.Resolve(new, "nyc"),
        r.GetState(txn_id),
        r.Heartbeat((token, token)),
        r.AdoptScope("other", "open"),
        r.ListTransactions("nyc", True, 10),
        r.SafeTime("nyc", None),
        r.SafeTime("nyc", 1 << 52),
        r.Scale(STREAM, 3, (), ()),
        r.Scale(STREAM, 0, (0,), (r.KeyRange(0, 1 << 31), r.KeyRange(1 << 31, 1 << 32))),
    )
    return [encode(command) for command in made]


def changed_command(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A command with other values, or other bytes."""
    if random.random() < 0.3:
        return mutated(random, data, seeds)
    record = decode(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        record = _changed(random, record, [decode(random.choice(seeds))])
    try:
        return encode(record)
    except (AttributeError, MalformedRecord):  # of another type now
        return mutated(random, data, seeds)


def _changed(random: Random, value: Any, others: list[Any]) -> Any:
    """A value with a part of it changed: to the edge, longer, shorter, or of another."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = random.choice(dataclasses.fields(value)).name
        return dataclasses.replace(value, **{name: _changed(random, getattr(value, name), others)})
    if isinstance(value, r.OneShot | r.Event | r.EventHeader | r.TxnRow):
        name = random.choice(value._fields)
        parts: dict[str, Any] = {name: _changed(random, getattr(value, name), others)}
        return value._replace(**parts)
    if isinstance(value, tuple):
        if value and random.random() < 0.6:
            at = random.randrange(len(value))
            one = _changed(random, value[at], others)
            return (*value[:at], one, *value[at + 1 :])
        return random.choice(((), value[1:], value * 2, value * random.choice((3, 50))))
    if isinstance(value, dict):
        return {**value, random.choice(_EDGES[str]): random.choice(_EDGES[str])}
    if value is None:
        return random.choice((None, *_EDGES[str], *_EDGES[int][:4]))
    if isinstance(value, bytes) and value and random.random() < 0.6:
        return mutated(random, value, [value])
    if random.random() < 0.1:
        return None
    return random.choice(_EDGES.get(type(value), (value,)))


def _take_command(data: bytes) -> None:
    place = Place()
    place.world.send(data)
    place.go_on()


def _take_batch(where: TopicPartition, data: bytes) -> None:
    place = Place()
    if place.put(where, data):
        place.go_on()


def _command_batches() -> list[bytes]:
    headers = (("ab.cid", b"1" * 16), ("ab.reply", bytes(4)))
    commands = _commands()
    return [
        encode_batch([Record(i, 5, b"", c, headers) for i, c in enumerate(commands[:many])], codec)
        for many in (1, 5)
        for codec in (None, "zstd", "lz4", "gzip", "snappy")
    ]


def _journal_batches() -> list[bytes]:
    place = Place()
    write = ((TXN_HEADER, pack_txn_header(place.txn_id, 5, 0)),)
    other = ((TXN_HEADER, pack_txn_header(place.txn_id, 6, 7)),)
    found = []
    for codec in (None, "zstd", "lz4"):
        for headers in (((write,)), ((),), (write, (), other)):
            rows = [Record(i, 5, b"k", b"v%d" % i, headers[i % len(headers)]) for i in range(9)]
            found.append(encode_batch(rows, codec))
    return found


def _values(place: TopicPartition) -> list[bytes]:
    made = Place()
    made.world.ask(made.controller, r.Commit(made.begun.token, (made.receipt,), None, None, 0))
    return [record.value for record in made.world.committed(place) if record.value]


_HISTORY = TopicPartition(history_topic(STREAM), 0)
_STATUS = TopicPartition(status_topic(), 0)


def _read_tail(data: bytes) -> None:
    place = Place()
    place.world.cluster.produce(_HISTORY, [Record(0, 5, None, data)])
    load_tail(place.world.cluster.log("x"), place.world.clock, STREAM)


def _status_rows() -> list[bytes]:
    """Keys and values of rows, the size of the key in front."""
    place = Place()
    place.world.ask(place.controller, r.Commit(place.begun.token, (place.receipt,), None, None, 0))
    rows = [(row.key or b"", row.value) for row in place.world.committed(_STATUS)]
    return [bytes((len(key),)) + key + value for key, value in rows if value is not None]


def _fold(data: bytes) -> None:
    size = data[0] if data else 0
    key, value = data[1 : 1 + size], data[1 + size :]
    place = Place()
    log, clock = place.world.cluster.log("x"), place.world.clock
    table = MemoryStore().open("x")
    state = State(table)
    place.world.cluster.produce(_STATUS, [Record(0, 5, key, value)])
    try:
        fold_to_end(log, table, state, clock, _STATUS)
    except (MalformedRecord, UnsupportedVersion):
        # A null value takes it away, as the error says.
        place.world.cluster.produce(_STATUS, [Record(0, 5, key, None)])
        fold_to_end(log, table, State(table), clock, _STATUS)
        raise


def changed_row(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A row with another key or value, or with a value of another type."""
    key, value = data[1 : 1 + data[0]], data[1 + data[0] :]
    choice = random.random()
    if choice < 0.4:
        value = mutated(random, value, [seed[1 + seed[0] :] for seed in seeds])
    elif choice < 0.7:
        key = mutated(random, key, [seed[1 : 1 + seed[0]] for seed in seeds])[:255]
    elif choice < 0.9:
        value = random.choice(records_of_all_types())
    else:
        key = key[:16] + bytes((random.choice(list(Entry)),)) + key[17:]
    return bytes((len(key),)) + key + value


TARGETS = (
    Target("commands", _commands, always(_take_command), (), changed_command, 150),
    Target(
        "command-batches",
        _command_batches,
        always(partial(_take_batch, COMMANDS)),
        (),
        mutated_batch,
    ),
    Target(
        "journal-batches",
        _journal_batches,
        always(partial(_take_batch, JOURNAL)),
        (),
        mutated_batch,
    ),
    Target(
        "history-tail",
        lambda: _values(_HISTORY),
        always(_read_tail),
        # A whole record, but of an epoch that is not there: only a controller can have written that.
        (MalformedRecord, UnsupportedVersion, InvariantViolation),
    ),
    Target(
        "status-rows",
        _status_rows,
        always(_fold),
        (MalformedRecord, UnsupportedVersion),
        changed_row,
    ),
)
