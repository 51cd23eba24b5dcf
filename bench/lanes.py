"""One-shots at 64 in flight by 1, 20 and 200 lanes (goal: 0.95 of one lane's); what grants and tokens cost.

One process asks for all lanes in turn, with one producer of commands and one consumer of all their replies, so that
its own cost is the same for each row. Lanes are made as the rows go: the last row has one lane again, among 200.
Each lane's answers are one more partition to write to, behind the commit. *grants*: CPU of a decision's check with
so many grants of a lane, none remembered. *token*: CPU to check a token with five caveats.
"""

from __future__ import annotations

import itertools
import secrets
import statistics
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

import anabranch
from anabranch.core import authorize
from anabranch.core.state import State
from anabranch.protocol import tokens
from anabranch.protocol.ids import CORRELATION_HEADER, REPLY_HEADER, make_txn_id
from anabranch.protocol.schemas.codec import decode_as, encode
from anabranch.protocol.schemas.records import Event, OneShot, Outcome, Reply
from anabranch.topics.names import commands_topic, replies_topic
from bench.setting import Place, percentile

LANES, QUICK_LANES = (1, 20, 200), (1, 20)
IN_FLIGHT = 64
EVENTS = tuple(b"key-%d" % i for i in range(10))
GRANTS = (1, 100, 1_000)
TIMES = 20_000
GOAL, GOAL_TOKEN_US = 0.95, 50


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Medians of rounds for each number of lanes, and the ratio to one lane."""
    rounds, seconds = (1, 2.0) if quick else (3, 5.0)
    counts = QUICK_LANES if quick else LANES
    stream = place.new_stream(segments=2)
    scope = stream.partition("/")[0]
    made: list[str] = []
    rows = []
    with anabranch.connect(place.bootstrap, lane="admin", timeout=60) as admin:
        for used, there in [*((n, n) for n in counts), (1, counts[-1])]:
            for number in range(len(made), there):
                admin.add_lane(f"bench-{number}", quotas={"work": 10_000_000})
                admin.grant(f"bench-{number}", f"{scope}/*", "write")
                made.append(f"bench-{number}")
            asker = _Asker(place.bootstrap, made[:used], stream)
            asker.run(1.0)
            found = [asker.run(seconds) for _ in range(rounds)]
            asker.close()
            middle = {key: statistics.median(one[key] for one in found) for key in found[0]}
            rows.append({"lanes": used, "there": there, **middle})
    for row in rows:
        row["ratio"] = row["per_s"] / rows[0]["per_s"]
    grants = {count: _grants_us(count) for count in GRANTS}
    return {"in_flight": IN_FLIGHT, "rows": rows, "grants_us": grants, "token_us": _token_us()}


class _Asker:
    """One-shots by several lanes in turn, so many in flight."""

    def __init__(self, bootstrap: str, lanes: Sequence[str], stream: str) -> None:
        self._stream = stream
        self._lanes = itertools.cycle(lanes)
        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "bench",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 100,
            }
        )
        places = [TopicPartition(replies_topic(lane=lane), 0) for lane in lanes]
        for place in places:
            place.offset = self._consumer.get_watermark_offsets(place, timeout=30)[1]
        self._consumer.assign(places)
        self._began: dict[bytes, float] = {}

    def run(self, seconds: float) -> dict[str, float]:
        """Rate, and latencies, of the one-shots that are answered in this time."""
        start = time.monotonic()
        taken: list[float] = []
        while (now := time.monotonic()) < start + seconds:
            while len(self._began) < IN_FLIGHT:
                self._send()
            self._producer.poll(0)
            for message in self._consumer.consume(IN_FLIGHT, 0.05):
                began = self._began.pop(message.key() or b"", None)
                if began is None:
                    continue
                result = decode_as(Reply, message.value() or b"").result
                if not isinstance(result, Outcome) or result.state != "COMMITTED":
                    raise RuntimeError(f"a one-shot was answered by {result}")
                taken.append(time.monotonic() - began)
        taken.sort()
        ms = {f"p{p}_ms": 1000 * percentile(taken, p / 100) for p in (50, 99)}
        return {"per_s": len(taken) / (now - start), **ms}

    def _send(self) -> None:
        txn_id = make_txn_id(0, int(time.time() * 1000), secrets.randbits(64))
        events = tuple(Event(self._stream, -1, key, b"v" * 100, (), -1) for key in EVENTS)
        command = OneShot(txn_id, self._stream.partition("/")[0], None, events)
        asked = secrets.token_bytes(16)
        headers: Any = [(CORRELATION_HEADER, asked), (REPLY_HEADER, bytes(4))]
        topic = commands_topic(lane=next(self._lanes))
        self._producer.produce(topic, encode(command), partition=0, headers=headers)
        self._began[asked] = time.monotonic()

    def close(self) -> None:
        self._producer.flush(10)
        self._consumer.close()


class _NoRows:
    """A table without rows."""

    def get(self, key: bytes) -> None:
        return None

    def scan(self, prefix: bytes, first: bytes = b"") -> Any:
        return iter(())

    scan_back = scan


def _grants_us(count: int) -> float:
    state = State(_NoRows())
    state.grants["etl"] = {f"s{i}/*": 4 for i in range(count)}
    began = time.process_time()
    for _ in range(TIMES):
        state.rights.clear()
        authorize.check_right(state, "etl", authorize.Right.WRITE, "s0/a")
    return 1e6 * (time.process_time() - began) / TIMES


def _token_us() -> float:
    secret, txn_id = secrets.token_bytes(32), make_txn_id(0, 1, 1)
    token = tokens.make(secret, tokens.Token(txn_id, 30_000, 1, "bench", "etl"))
    for sooner in range(5):
        token = tokens.narrow(token, not_after_ms=2_000_000_000_000 - sooner)
    began = time.process_time()
    for _ in range(TIMES):
        tokens.is_genuine(tokens.peek(token), secret)
    return 1e6 * (time.process_time() - began) / TIMES


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Head and rows for people."""
    head = ["lanes used / there", "one-shots /s", "p50 / p99 ms", "of one lane", "goal"]
    rows = [
        [
            f"{row['lanes']} / {row['there']}",
            f"{row['per_s']:,.0f}",
            f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}",
            f"{row['ratio']:.2f} ×",
            f"≥ {GOAL} ×",
        ]
        for row in result["rows"]
    ]
    for count, us in result["grants_us"].items():
        rows.append([f"{count:,} grants", "", f"{us:.1f} us", "", ""])
    rows.append(
        ["a token, 5 caveats", "", f"{result['token_us']:.1f} us", "", f"≤ {GOAL_TOKEN_US} us"]
    )
    return head, rows
