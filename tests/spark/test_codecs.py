"""Columns that codecs decode and encode, without Spark and without a broker."""

from __future__ import annotations

import json
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from types import ModuleType
from typing import Annotated, Any, Optional

import msgspec
import pyarrow as pa
import pydantic
import pytest
from pyspark.sql import types as t

from anabranch.errors import InvalidArgument, UndecodableValue
from anabranch.reading.event_columns import batch_of
from anabranch.spark.codecs import Codecs, Decoding, shape_of
from anabranch.spark.columns import chosen
from anabranch.spark.options import Options
from anabranch.spark.sink.encoding import CodecRows
from anabranch.spark.source.plan import codecs_of
from anabranch.types import Event

STREAM = "shop/orders"
AT = datetime(2026, 1, 2, 3, 4, 5, 678000, UTC)


class Part(msgspec.Struct, rename="camel"):  # type: ignore[misc,call-arg,unused-ignore]
    part_no: int
    tags: list[str]


class Sized(pydantic.BaseModel):
    at: datetime
    day: date | None
    raw: bytes
    sizes: dict[str, int]
    number: Annotated[int, pydantic.Field(alias="no")]
    parts: list[Annotated[bool, "x"]]


class Deep(pydantic.BaseModel):
    of: int | str
    exact: Decimal
    anything: Any
    price: float = 1.5
    inner: Optional[Deep] = None  # noqa: UP045
    outer: Sized | None = None


def number(data: bytes) -> int:
    return int(data)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> str:
    """A module with codecs, as the options name it."""
    module: Any = ModuleType("made_codecs")
    module.Part, module.Sized, module.Deep = Part, Sized, Deep
    module.PAIR, module.UNKNOWN = (str.encode, number), (str.encode, lambda data: [data.decode()])
    monkeypatch.setitem(sys.modules, "made_codecs", module)
    return "made_codecs"


def schema(**options: str) -> t.StructType:
    return chosen(Options(options))


def test_types_become_columns(made: str) -> None:
    assert schema()["value"].dataType == t.BinaryType()
    kinds = {
        "str": "string",
        "json": "string",
        f"{made}:PAIR": "bigint",
        f"{made}:UNKNOWN": "string",
    }
    for word, kind in kinds.items():
        assert schema(key=word)["key"].dataType.simpleString() == kind
    part = "struct<partNo:bigint,tags:array<string>>"
    assert schema(value=f"{made}:Part")["value"].dataType.simpleString() == part
    sized = "struct<at:timestamp,day:date,raw:binary,sizes:map<string,bigint>,no:bigint,parts:array<boolean>>"
    assert schema(value=f"{made}:Sized")["value"].dataType.simpleString() == sized
    deep = f"struct<of:string,exact:string,anything:string,price:double,inner:string,outer:{sized}>"
    assert schema(value=f"{made}:Deep")["value"].dataType.simpleString() == deep
    assert shape_of(list[Any]).kind.simpleString() == "array<string>"


def decoding(codecs: Codecs, bury: Any = None, columns: str = "") -> Decoding:
    options = {"key": codecs.key, "value": codecs.value, "columns": columns}
    return Decoding(codecs, STREAM, chosen(Options(options)), bury)


def events(*values: bytes | None, key: bytes | None = b"ann") -> pa.RecordBatch:
    headers = [("from", b"here"), ("none", None)]
    return batch_of(
        [
            Event(STREAM, key, value, headers, 1_700_000_000_123, None, 7, 0, 2, 10 + i)
            for i, value in enumerate(values)
        ]
    )


SIZED = Sized.model_validate(
    {"at": AT, "day": None, "raw": b"1", "sizes": {"a": 1}, "no": 5, "parts": [True]}
)


@pytest.mark.parametrize("value", [Part(1, ["a", "b"]), SIZED], ids=["msgspec", "pydantic"])
def test_a_model_comes_as_a_struct_and_back(made: str, value: Any) -> None:
    codecs = Codecs(value=f"{made}:{type(value).__name__}")
    raw = codecs.handle(STREAM).encode(None, value)[1]
    column = decoding(codecs)(events(raw, None)).column("value")
    row, nothing = column.to_pylist()
    assert nothing is None
    if value is SIZED:
        wanted = {"at": AT, "day": None, "raw": b"1", "sizes": [("a", 1)], "no": 5, "parts": [True]}
        assert row == wanted
    kinds = {"value": schema(value=codecs.value)["value"].dataType}
    written = CodecRows(codecs, kinds)(STREAM, pa.record_batch({"value": column}))
    assert written.column("value").to_pylist() == [raw, None]


def test_fields_that_spark_lacks_are_json(made: str) -> None:
    codecs = Codecs(value=f"{made}:Deep")
    inner = Deep(of="x", exact=Decimal("1.5"), anything=None)
    value = Deep(of=5, exact=Decimal(1), anything={"a": [1]}, inner=inner, outer=SIZED)
    raw = codecs.handle(STREAM).encode(None, value)[1]
    (row,) = decoding(codecs)(events(raw)).column("value").to_pylist()
    found = (row["of"], row["exact"], row["anything"], row["price"])
    assert found == ("5", '"1"', '{"a":[1]}', 1.5)
    assert json.loads(row["inner"])["exact"] == "1.5"
    assert row["outer"]["no"] == 5


@pytest.mark.parametrize("word", ["json", "made_codecs:UNKNOWN"])
def test_other_values_come_as_json(made: str, word: str) -> None:
    value = b'{"a": "\xc3\xa4"}' if word == "json" else b"x"
    batch = decoding(Codecs("str", word))(events(value))
    assert batch.column("key").to_pylist() == ["ann"]
    assert batch.column("value").to_pylist() == ['{"a":"ä"}' if word == "json" else '["x"]']


def test_an_undecodable_value_is_an_error_skipped_or_a_dead_letter(made: str) -> None:
    batch = events(b"1", b"x", b"99999999999999999999", b"4")
    with pytest.raises(UndecodableValue, match=r"shop/orders\[2\]@11, key b'ann': codec .*number"):
        decoding(Codecs(value=f"{made}:PAIR"))(batch)
    with pytest.raises(UndecodableValue, match=r"shop/orders\[2\]@12.*Overflow"):
        decoding(Codecs(value=f"{made}:PAIR"))(batch.take([0, 2]))
    skipping = decoding(Codecs(value=f"{made}:PAIR", undecodable="skip"))
    left = skipping(batch)
    assert left.column("value").to_pylist() == [1, 4]
    assert left.column("offset").to_pylist() == [10, 13]
    assert skipping.skipped == 2
    letters: list[tuple[str, Event]] = []
    burying = decoding(
        Codecs(value=f"{made}:PAIR", undecodable="shop/dead"),
        lambda to, e, _: letters.append((to, e)),
    )
    assert burying(batch).num_rows == 2
    headers = [("from", b"here"), ("none", None)]
    assert [(to, e.value, e.headers, e.timestamp) for to, e in letters] == [
        ("shop/dead", b"x", headers, 1_700_000_000_123),
        ("shop/dead", b"99999999999999999999", headers, 1_700_000_000_123),
    ]


def test_only_columns_that_are_read_are_decoded() -> None:
    batch = events(b"\xff")
    assert decoding(Codecs("str", "str"), columns="key,offset")(batch)["key"].to_pylist() == ["ann"]
    with pytest.raises(UndecodableValue):
        decoding(Codecs("str", "str"))(batch)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"undecodable": "skip"}, "option undecodable needs option key or value"),
        ({"value": "json", "undecodable": "stop"}, "undecodable='stop': 'raise', 'skip', or"),
        ({"value": "json", "undecodable": STREAM}, "dead letters of shop/orders go to another"),
        ({"value": "nowhere:Order"}, "give its module to Spark"),
    ],
)
def test_wrong_options_of_the_source(options: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        codecs_of(Options(options), [STREAM])


def test_texts_are_written_as_json_says(made: str) -> None:
    codecs = Codecs("str", f"{made}:Part")
    kinds = {"key": t.StringType(), "value": t.StringType()}
    text = '{"partNo": 1, "tags": []}'
    batch = pa.record_batch({"key": ["a", None], "value": [text, None]})
    written = CodecRows(codecs, kinds)(STREAM, batch).to_pydict()
    assert written == {"key": [b"a", None], "value": [b'{"partNo":1,"tags":[]}', None]}
    batch = pa.record_batch({"key": ["a"], "value": ["{}"]})
    with pytest.raises(InvalidArgument, match="shop/orders: codec Part does not encode the value"):
        CodecRows(codecs, kinds)(STREAM, batch)
