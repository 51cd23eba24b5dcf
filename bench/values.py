"""Writing and reading typed values, against the same bytes.

Values are msgspec structs as JSON, keys are str. *bytes*: names of streams, and values that are encoded already and
never decoded. *by hand*: names, and the program encodes before it writes, and decodes what it reads. *typed*: a
handle. Seconds of CPU of this process, each in turn, medians.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import msgspec

import anabranch
from bench.setting import Place

GOAL = 0.8
WAYS = ("bytes", "by hand", "typed")


class Order(msgspec.Struct):  # type: ignore[misc,unused-ignore]
    item: str
    count: int
    note: str


def run(place: Place, *, quick: bool = False) -> dict[str, Any]:
    """Events a second of CPU, for each way."""
    events, rounds = (100_000, 3) if quick else (300_000, 7)
    orders = [Order("apple", i, "n" * 60) for i in range(events)]
    rates: dict[str, dict[str, list[float]]] = {
        what: {way: [] for way in WAYS} for what in ("write", "read")
    }
    with anabranch.connect(place.bootstrap) as client:
        for _ in range(rounds):
            for way in WAYS:
                stream = place.new_stream(segments=1)
                for what, work in (("write", write), ("read", read)):
                    begun = time.process_time()
                    count = work(client, stream, way, orders)
                    assert count == events, (what, way, count)
                    rates[what][way].append(events / (time.process_time() - begun))
    found = {
        what: {way: round(statistics.median(taken)) for way, taken in ways.items()}
        for what, ways in rates.items()
    }
    return {"events": events, "rounds": rounds, "goal": GOAL, "per_cpu_s": found}


def write(client: anabranch.Client, stream: str, way: str, orders: list[Order]) -> int:
    encode = msgspec.json.Encoder().encode
    with client.begin(stream.partition("/")[0]) as txn:
        txn.token()
        if way == "typed":
            typed = client.stream(stream, key=str, value=Order)
            count = txn.write_many(typed, ((order, order.item) for order in orders))
        elif way == "by hand":
            count = txn.write_many(
                stream, ((encode(order), order.item.encode()) for order in orders)
            )
        else:
            value = encode(orders[0])
            count = txn.write_many(stream, ((value, b"apple") for _ in orders))
        txn.commit()
    return count


def read(client: anabranch.Client, stream: str, way: str, orders: list[Order]) -> int:
    decode, left = msgspec.json.Decoder(Order).decode, len(orders)
    source: Any = client.stream(stream, key=str, value=Order) if way == "typed" else stream
    with client.read(source, timeout=30.0) as reader:
        for event in reader:
            if way == "by hand":
                assert event.key is not None
                assert event.value is not None
                event.key.decode()
                decode(event.value)
            left -= 1
            if not left:
                break
    return len(orders) - left


def table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    head = ["events a second of CPU", *WAYS, "typed, of bytes", "typed, of by hand"]
    rows = []
    for what, rates in result["per_cpu_s"].items():
        shares = [rates["typed"] / rates[way] for way in ("bytes", "by hand")]
        numbers = [f"{rates[way]:,}" for way in WAYS]
        rows.append([what, *numbers, f"{shares[0]:.2f} × (goal ≥ {GOAL})", f"{shares[1]:.2f} ×"])
    return head, rows
