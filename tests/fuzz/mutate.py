"""Mutations of bytes, by a seeded generator: what hostile, cut or mixed-up input looks like."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TypeAlias

from crc32c import crc32c

from anabranch.batches.compression import MAX_UNPACKED_BYTES, compress, decompress
from anabranch.batches.format import HEADER_SIZE, Buffer, read_header

Mutate: TypeAlias = Callable[[Random, bytes, Sequence[bytes]], bytes]

MOST_BYTES = 1 << 20  # no input is longer
_CRC_AT, _COVERED_FROM = 17, 21
_LENGTH_AT, _LENGTH_FROM = 8, 12

# Numbers at the edges of what fields can hold, as varints (zigzag or not) and in fixed widths.
_HEX = (
    "00 01 02 03 7f 7e 8001 ff7f feff03 ffff03 feffffff0f ffffffff0f fcffffff0f 8080808010 feffffff1f "
    "feffffffffffffffff01 ffffffffffffffffff01 ffffffffffffffff7f 80808080808080808002 "
    "80808080808080808080 ffffffffffffffffffff01 8000 808000"
)
_VARINTS = tuple(bytes.fromhex(text) for text in _HEX.split(" "))
_EDGES = (0, 1, -1, 2, 127, 128, 255, 1 << 15, (1 << 16) - 1, (1 << 31) - 1, -(1 << 31))
_WIDE_EDGES = (*_EDGES, 1 << 31, (1 << 62) - 1, (1 << 63) - 1, -(1 << 63), -2)
_BYTES = (0, 1, 2, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF)


def _flip(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    out = bytearray(data)
    for _i in range(random.choice((1, 1, 1, 2, 4, 16))):
        out[random.randrange(len(out))] ^= 1 << random.randrange(8)
    return bytes(out)


def _set_byte(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    out = bytearray(data)
    out[random.randrange(len(out))] = random.choice((*_BYTES, random.randrange(256)))
    return bytes(out)


def _cut(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: random.randrange(len(data))]


def _take_out(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + data[at + random.choice((1, 1, 2, 4, 8, random.randrange(1, 64))) :]


def _put_varint(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A number at the edge in place of one byte, or before it."""
    at = random.randrange(len(data))
    return data[:at] + random.choice(_VARINTS) + data[at + random.randrange(3) :]


def _put_fixed(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    size = random.choice((2, 4, 4, 8))
    at = random.randrange(len(data))
    value = random.choice(_WIDE_EDGES) & ((1 << 8 * size) - 1)
    return data[:at] + value.to_bytes(size, "big") + data[at + size :]


def _repeat(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = random.randrange(len(data))
    part = data[at : at + random.choice((1, 2, 8, 64))]
    times = random.choice((2, 3, 16, 256, 4096))
    return data[:at] + part * times + data[at:]


def _splice(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """The beginning of one, the end of another; often cut at the same place."""
    other = random.choice(seeds)
    at = random.randrange(len(data))
    there = at if random.random() < 0.5 else random.randrange(len(other) + 1)
    return data[:at] + other[there:]


def _append(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    return data + random.choice((b"\x00", b"\xff", random.randbytes(9), random.choice(seeds)))


def _noise(random: Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Random bytes, after the right beginning or not."""
    kept = random.choice((0, 1, 2, 4, min(len(data), 61)))
    return data[:kept] + random.randbytes(random.choice((0, 1, 4, 16, 64, 500)))


_STEPS: tuple[Mutate, ...] = (
    _flip,
    _flip,
    _set_byte,
    _set_byte,
    _cut,
    _take_out,
    _put_varint,
    _put_varint,
    _put_fixed,
    _repeat,
    _splice,
    _append,
    _noise,
)


def mutated(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """One to a few mutations, one after the other."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        data = random.choice(_STEPS)(random, data or b"\x00", seeds)
    return data[:MOST_BYTES]


def mutated_batch(random: Random, data: bytes, seeds: Sequence[bytes]) -> bytes:
    """A record batch whose damage passes the checks: length and CRC are made right again, mostly.

    Half of the mutations change the records before they are packed.
    """
    if random.random() < 0.1:
        return mutated(random, data, seeds)
    header, packed = data[:HEADER_SIZE], data[HEADER_SIZE:]
    codec = read_header(data).compression
    choice = random.random()
    if choice < 0.3:
        header = mutated(random, header, [seed[:HEADER_SIZE] for seed in seeds])
        header = header[:HEADER_SIZE].ljust(HEADER_SIZE, b"\x00")
    if choice < 0.15 or 0.3 <= choice < 0.4:
        packed = mutated(random, packed, [seed[HEADER_SIZE:] for seed in seeds])
    elif choice >= 0.4:
        bodies = [_body(seed) for seed in (data, random.choice(seeds))]
        packed = compress(codec, mutated(random, bodies[0], bodies))
    return sealed(header + packed)


def _body(batch: bytes) -> bytes:
    codec = read_header(batch).compression
    return decompress(codec, batch[HEADER_SIZE:], limit=MAX_UNPACKED_BYTES)


def sealed(data: Buffer) -> bytes:
    """The batch with its length, magic and CRC made right."""
    out = bytearray(data)
    out[_LENGTH_AT:_LENGTH_FROM] = (len(out) - _LENGTH_FROM).to_bytes(4, "big")
    out[16] = 2
    out[_CRC_AT:_COVERED_FROM] = crc32c(memoryview(bytes(out))[_COVERED_FROM:]).to_bytes(4, "big")
    return bytes(out)
