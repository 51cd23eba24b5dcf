"""The codecs that tests write and read with, each under a name that the command line can import."""

from __future__ import annotations

import json
import os
from functools import cache
from typing import Any, NamedTuple

import msgspec
import pydantic
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer, ProtobufSerializer
from google.protobuf.json_format import MessageToDict
from google.type.money_pb2 import Money

from anabranch.values import spec_of

REGISTRY = (
    "ANABRANCH_TEST_REGISTRY"  # a variable: its address, also for processes that the tests start
)
AVRO_SCHEMA = json.dumps(
    {
        "type": "record",
        "name": "Order",
        "fields": [{"name": "item", "type": "string"}, {"name": "count", "type": "int"}],
    }
)


class Order(pydantic.BaseModel):
    item: str
    count: int


class Line(msgspec.Struct):  # type: ignore[misc,unused-ignore]
    item: str
    count: int


PAIR = (lambda number: b"%d" % number, int)


@cache
def registry_client(url: str, number: int = 0) -> Any:
    """A client that stays open, as no call closes its sockets. ``number``: another one has caches of its own."""
    return SchemaRegistryClient({"url": url})


def avro(number: int = 0) -> tuple[Any, Any]:
    client = registry_client(os.environ[REGISTRY], number)
    return AvroSerializer(client, AVRO_SCHEMA), AvroDeserializer(client)


def protobuf() -> tuple[Any, Any]:
    client = registry_client(os.environ[REGISTRY])
    settings = {"use.deprecated.format": False}
    return ProtobufSerializer(Money, client, settings), ProtobufDeserializer(Money, settings)


def __getattr__(name: str) -> Any:
    """AVRO and PROTOBUF, made when a process first asks."""
    if name in ("AVRO", "PROTOBUF"):
        return {"AVRO": avro, "PROTOBUF": protobuf}[name]()
    raise AttributeError(name)


class Kind(NamedTuple):
    """A codec. ``word``: of the command line. ``value``: one; ``plain``: the same as JSON."""

    word: str
    value: Any
    plain: Any

    @property
    def spec(self) -> Any:
        return spec_of(self.word)


MONEY = Money(currency_code="EUR", units=5)
KINDS = {
    "bytes": Kind("bytes", b"5 apples", "5 apples"),
    "str": Kind("str", "5 Äpfel", "5 Äpfel"),
    "json": Kind("json", {"apples": [5, None]}, {"apples": [5, None]}),
    "pair": Kind("tests.values.kinds:PAIR", 5, 5),
    "pydantic": Kind(
        "tests.values.kinds:Order", Order(item="apple", count=5), {"item": "apple", "count": 5}
    ),
    "msgspec": Kind(
        "tests.values.kinds:Line", Line(item="apple", count=5), {"item": "apple", "count": 5}
    ),
    "avro": Kind(
        "tests.values.kinds:AVRO", {"item": "apple", "count": 5}, {"item": "apple", "count": 5}
    ),
    "protobuf": Kind("tests.values.kinds:PROTOBUF", MONEY, MessageToDict(MONEY)),
}
