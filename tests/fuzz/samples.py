"""Valid inputs: records of every type with edge values, and record batches of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

from anabranch.batches.records import Record, encode_batch
from anabranch.protocol.ids import OP_HEADER, TXN_HEADER, pack_txn_header
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, encode, schema_of
from anabranch.testing.memory.partition import encode_sparse

CODECS = (None, "gzip", "snappy", "lz4", "zstd")
_LONGS = (0, 1, -1, 63, 64, 1 << 31, (1 << 63) - 1, -(1 << 63))
_INTS = (0, 1, -1, 63, 64, (1 << 31) - 1, -(1 << 31))
_TEXTS = ("", "a", "nyc/flights", "é🚲", "x" * 200)


@cache
def records_of_all_types() -> tuple[bytes, ...]:
    """Some framed records of every type."""
    return tuple(encode(sample(cls, i)) for cls in TYPES.values() for i in range(3))


def sample(cls: Any, seed: int) -> Any:
    """A record with values made by chance; the first (0) has short arrays and no nulls."""
    return _record(Random(f"{cls.__name__}/{seed}"), cls)


def _record(random: Random, cls: Any) -> Any:
    return cls(*[_value(random, field["type"]) for field in schema_of(cls)["fields"]])


def _value(random: Random, avro: Any) -> Any:
    if isinstance(avro, list):
        return _value(random, random.choice(avro))
    if isinstance(avro, str):
        return _named(random, avro)
    kind = avro["type"]
    if kind == "array":
        return tuple(_value(random, avro["items"]) for _ in range(random.randrange(4)))
    if kind == "map":
        return {
            random.choice(_TEXTS): _value(random, avro["values"])
            for _ in range(random.randrange(3))
        }
    if kind == "fixed":
        return random.randbytes(avro["size"])
    if kind == "enum":
        return random.choice(avro["symbols"])
    if kind == "record":
        return _named(random, avro["name"])
    return _value(random, kind)


def _named(random: Random, name: str) -> Any:
    simple: dict[str, Callable[[], Any]] = {
        "string": lambda: random.choice(_TEXTS),
        "bytes": lambda: random.randbytes(random.choice((0, 1, 30, 70))),
        "boolean": lambda: random.random() < 0.5,
        "int": lambda: random.choice(_INTS),
        "long": lambda: random.choice(_LONGS),
        "null": lambda: None,
        "anabranch.TxnId": lambda: random.randbytes(16),
    }
    if name in simple:
        return simple[name]()
    cls = getattr(r, name.rpartition(".")[2], None)
    return _record(random, cls) if isinstance(cls, type) else random.choice(_enum(name))


def _enum(name: str) -> tuple[str, ...]:
    from typing import get_args

    return get_args(getattr(r, name.rpartition(".")[2]))


_TXNS = tuple(pack_txn_header(bytes([i]) * 16, i - 1, 0) for i in range(3))
_HEADERS: tuple[tuple[tuple[str, bytes | None], ...], ...] = (
    (),
    ((TXN_HEADER, _TXNS[0]),),
    ((TXN_HEADER, _TXNS[1]),),
    (("h", b"v"), (TXN_HEADER, _TXNS[0]), ("null", None)),
    ((OP_HEADER, b"\x01\x60"),),
    ((TXN_HEADER, b"short"),),
    ((TXN_HEADER, None),),
    (("ab.x", b""), ("é", b"")),
)


@cache
def batches() -> tuple[bytes, ...]:
    """Batches in all codecs: of one writer, of several, plain, with gaps, empty, many small records."""
    random = Random("batches")
    made = []
    for codec in CODECS:
        pure = [_row(random, i, _HEADERS[1]) for i in range(random.choice((1, 5, 300)))]
        mixed = [_row(random, i, random.choice(_HEADERS)) for i in range(40)]
        made += [encode_batch(pure, codec), encode_batch(mixed, codec)]
    small = [Record(i, 5, None, None) for i in range(1000)]
    gaps = [_row(random, i, ()) for i in (3, 4, 9)]
    made += [encode_batch(small), encode_sparse(gaps, base_offset=2, next_offset=12)]
    made += [encode_sparse([], base_offset=0, next_offset=2), encode_batch(small[:1])]
    return tuple(made)


def _row(random: Random, offset: int, headers: tuple[tuple[str, bytes | None], ...]) -> Record:
    key = random.choice((None, b"", b"k", random.randbytes(30)))
    value = random.choice((None, b"", b"value" * 10, random.randbytes(100)))
    return Record(offset, 1_700_000_000_000 + random.choice((0, -5, 300)), key, value, headers)
