"""What type checkers see: only `tests/values/test_typing.py` runs mypy and pyright over this file."""

from __future__ import annotations

import json
from typing import Any, assert_type

import pydantic

import anabranch
from anabranch import Change, Client, Event, Stream, Transaction
from anabranch.aio import AsyncClient, AsyncReader, AsyncTransaction
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


async def check_reading_by_asyncio(client: AsyncClient) -> None:
    orders = client.stream("shop/orders", key=str, value=Order)
    async for event in client.read(orders):
        assert_type(event, Event[str, Order])
        assert_type(event.value, Order | None)
    async for event in client.read([orders]):
        assert_type(event, Event[str, Order])
    async for plain in client.read("shop/orders"):
        assert_type(plain, Event)
    async for mixed in client.read(["shop/plain", orders]):
        assert_type(mixed, Event[Any, Any])
    async with client.read(orders, group="mail") as reader:
        assert_type(reader, AsyncReader[str, Order])
        assert_type(await anext(reader), Event[str, Order])
        async for event in reader:
            assert_type(event.key, str | None)
            print(event.value.count)  # WRONG
        await reader.commit()
    async for committed in client.read_transactions(orders):
        for one in committed.events:
            assert_type(one, Event[str, Order])
    snapshot = await client.snapshot(orders)
    async for event in snapshot.read(orders):
        assert_type(event, Event[str, Order])
    async for event in snapshot.changes(orders):
        assert_type(event, Event[str, Order])
    async for change in client.changes(orders):
        assert_type(change, Change[str, Order])


async def check_tables_by_asyncio(client: AsyncClient, txn: AsyncTransaction) -> None:
    orders = client.stream("shop/orders", key=str, value=Order)
    await txn.write(orders, Order(item="apple"), key="ann")
    await txn.write(orders, b"apple", key="ann")  # WRONG
    async with client.replica(orders) as replica, replica.begin() as rows:
        assert_type(await rows.get(orders, "ann"), Order | None)
        async for key, row in rows.scan(orders):
            assert_type((key, row), tuple[str, Order])
        async for plain_key, _ in rows.scan("shop/orders"):
            assert_type(plain_key, bytes)
        async with replica.snapshot() as view:
            async for key, row in view.scan(orders):
                assert_type((key, row), tuple[str, Order])


def handler(event: anabranch.Event) -> bytes | None:
    return event.value
