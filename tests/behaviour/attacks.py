"""Commands of hostile content: by name, what makes a payload. What is big is packed to next to nothing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from anabranch.protocol import limits
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.codec import TYPES, encode
from tests.crash.raw import make_txn_id
from tests.fuzz.samples import sample

SCOPE = "honest"
STREAM = f"{SCOPE}/events"
SMALL = f"{SCOPE}/small"
Attack = Callable[[Random], Any]


def _text(size: int) -> str:
    return "x" * size


def shot(*events: r.Event, name: str | None = None) -> r.OneShot:
    """A single-request transaction."""
    return r.OneShot(make_txn_id(), SCOPE, name, events)


def event(stream: str = STREAM, size: int = 1, headers: int = 0, at: int = -1) -> r.Event:
    """An event of so many bytes."""
    few = tuple(r.EventHeader("h", b"") for _ in range(headers))
    return r.Event(stream, -1, b"k", bytes(size), few, at)


def _setting(name: str, value: str) -> Attack:
    return lambda random: r.CreateStream(f"{SCOPE}/s{random.getrandbits(64):x}", 1, {name: value})


def _garbage(random: Random) -> bytes:
    return bytes((1, random.choice(list(TYPES)))) + random.randbytes(random.randrange(200))


def _mutated(random: Random) -> bytes:
    data = bytearray(encode(sample(random.choice(list(TYPES.values())), random.getrandbits(32))))
    for _ in range(random.randrange(1, 4)):
        data[random.randrange(2, len(data)) if len(data) > 2 else 0] = random.randrange(256)
    return bytes(data)


ATTACKS: dict[str, Attack] = {
    "a bomb": lambda _: bytes(limits.BATCH.value + 1),
    "a big one": lambda _: bytes(limits.BATCH.value - 1000),
    "a scope of 14 MB": lambda _: r.FindScope(_text(14 << 20), True),
    "a scope of 900 KB": lambda _: r.FindScope(_text(900 << 10), True),
    "a reason of 900 KB": lambda _: r.Abort(b"t" * 60, _text(900 << 10)),
    "4M tokens": lambda _: b"\x01\x0c" + b"\x80\x92\xf4\x03" + bytes(4_000_001),
    "400,000 tokens": lambda _: b"\x01\x0c" + b"\x80\xea\x30" + bytes(400_001),
    "5,000 digits": _setting("scale.events.per.second", "1" * 5_000),
    "40,000 digits": _setting("retention.ms", "1" * 40_000),
    "no room for markers": _setting("max.message.bytes", "70"),
    "an unknown setting": _setting("x" * 5_000, "1"),
    "an event that is too big": lambda _: shot(event(SMALL, 50_000)),
    "an event of the year 146,140,482": lambda _: shot(event(at=1 << 62)),
    "20,000 headers": lambda _: shot(event(headers=20_000)),
    "20,000 events": lambda _: shot(*[event(size=0)] * 20_000),
    "one name again": lambda _: shot(event(), name="again"),
    "a name that is begun again": lambda _: r.Begin(
        make_txn_id(), SCOPE, "again and again", 1000, bytes(32)
    ),
    "a long list": lambda _: r.ListTransactions(None, True, 10_000),
    "all streams": lambda _: r.DescribeStreams(None, None),
    "100,000 segments": lambda _: r.Scale(STREAM, 0, tuple(range(100_000)), ()),
    "30,000 extents": lambda _: r.Register(
        b"t" * 60, r.Receipt(bytes(16), 1, 1, True, (r.Extent(STREAM, 0, 0, 0, 0, 0),) * 30_000)
    ),
    "branch -1 of a union": lambda _: b"\x01\x04" + make_txn_id() + b"\x0chonest\x01\x06abc" + b"\xc0\xa9\x07",
    "garbage": _garbage,
    "mutated": _mutated,
    "any record": lambda random: sample(random.choice(list(TYPES.values())), random.getrandbits(32)),
    "nothing": lambda _: b"",
}  # fmt: skip
