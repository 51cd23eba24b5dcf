"""What type checkers see: only `tests/values/test_typing.py` runs mypy and pyright over this file."""

from __future__ import annotations

import json
from typing import Any, assert_type

import pydantic

import anabranch
from anabranch import Change, Client, Event, Stream, Transaction
from anabranch.reading.ordered_reader import Reader


class Order(pydantic.BaseModel):
    item: str


def decode(data: bytes) -> int:
    return int(data)


def check_handles(client: Client) -> None:
    assert_type(client.stream("shop/orders"), Stream[bytes, bytes])
    assert_type(client.stream("shop/orders", key=str), Stream[str, bytes])
    assert_type(client.stream("shop/orders", value=Order), Stream[bytes, Order])
    assert_type(client.stream("shop/orders", key=str, value=Order), Stream[str, Order])
    assert_type(client.stream("shop/orders", str, json), Stream[str, Any])
    assert_type(client.stream("shop/orders", str, (str, decode)), Stream[str, int])


def check_reading(client: Client) -> None:
    orders = client.stream("shop/orders", key=str, value=Order)
    assert_type(next(client.read(orders)), Event[str, Order])
    assert_type(next(client.read([orders])), Event[str, Order])
    assert_type(client.read("shop/orders"), Reader[bytes, bytes])
    assert_type(next(client.read(["shop/orders"])), Event)
    assert_type(next(client.read("shop/orders")).value, bytes | None)
    for event in client.read(orders):
        assert_type(event.key, str | None)
        assert_type(event.value, Order | None)
    for committed in client.read_transactions(orders):
        for one in committed.events:
            assert_type(one, Event[str, Order])
    assert_type(next(client.snapshot(orders).read(orders)), Event[str, Order])
    assert_type(next(client.changes(orders)), Change[str, Order])


def check_writing(client: Client, txn: Transaction) -> None:
    orders = client.stream("shop/orders", key=str, value=Order)
    txn.write(orders, Order(item="apple"), key="ann")
    txn.write_many(orders, [(Order(item="apple"), "ann")])
    txn.write("shop/orders", b"apple", key=b"ann")
    txn.write(orders, b"apple", key="ann")  # WRONG
    txn.write(orders, Order(item="apple"), key=b"ann")  # WRONG
    txn.write("shop/orders", "apple")  # WRONG


def check_tables(client: Client) -> None:
    orders = client.stream("shop/orders", key=str, value=Order)
    with client.replica(orders) as replica, replica.begin() as txn:
        assert_type(txn.get(orders, "ann"), Order | None)
        assert_type(txn.get("shop/orders", b"ann"), bytes | None)
        assert_type(next(txn.scan(orders)), tuple[str, Order])
        txn.put(orders, "ann", Order(item="apple"))
        txn.put(orders, "ann", b"apple")  # WRONG
        with replica.snapshot() as view:
            assert_type(view.get(orders, "ann"), Order | None)


def handler(event: anabranch.Event) -> bytes | None:
    return event.value
