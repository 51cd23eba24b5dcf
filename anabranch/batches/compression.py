"""The four codecs of RecordBatch v2. A limit on the unpacked bytes protects from hostile batches."""

from __future__ import annotations

import threading
from typing import Final, Literal

import cramjam

from anabranch.batches.format import Buffer
from anabranch.ports import CorruptBatch, UnpacksToMore

NONE: Final = 0
GZIP: Final = 1
SNAPPY: Final = 2
LZ4: Final = 3
ZSTD: Final = 4

Codec = Literal["none", "gzip", "snappy", "lz4", "zstd"]
CODECS: dict[Codec, int] = {"none": NONE, "gzip": GZIP, "snappy": SNAPPY, "lz4": LZ4, "zstd": ZSTD}
NAMES = {number: name for name, number in CODECS.items()}

MAX_UNPACKED_BYTES = 512 << 20
_FIRST_SCRATCH_BYTES = 1 << 20
_KEPT_SCRATCH_BYTES = 64 << 20  # a bigger buffer is freed at the next use
# cramjam's message if the buffer was too small. Any other error means that the data is damaged.
_NO_ROOM = "failed to write whole buffer"
# Java's snappy streams begin with a magic, a version and a compatible version; blocks with lengths follow.
_XERIAL_MAGIC = b"\x82SNAPPY\x00"
_XERIAL_HEADER_SIZE = 16
# lz4's fast mode; cramjam's default is the slow one.
_LZ4_LEVEL = 1
_GZIP_LEVEL = 6
_ZSTD_LEVEL = 3


class _Scratch(threading.local):
    """A buffer for unpacking in each thread; it grows to the largest need, except for rare giants."""

    def __init__(self) -> None:
        self.room = bytearray(_FIRST_SCRATCH_BYTES)


_scratch = _Scratch()


def compress(codec: int, data: Buffer) -> bytes:
    """``data`` compressed so that Kafka's brokers and clients can read it."""
    if codec == NONE:
        return bytes(data)
    if codec == GZIP:
        return bytes(cramjam.gzip.compress(data, level=_GZIP_LEVEL))
    if codec == SNAPPY:
        return bytes(cramjam.snappy.compress_raw(data))
    if codec == LZ4:
        # Kafka's reader supports only frames of independent blocks.
        packer = cramjam.lz4.Compressor(
            level=_LZ4_LEVEL, content_checksum=False, block_linked=False
        )
        packer.compress(bytes(data))
        return bytes(packer.finish())
    if codec == ZSTD:
        return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL))
    raise CorruptBatch(f"compression {codec} is not known")


def decompress_scratch(codec: int, data: Buffer, *, limit: int = MAX_UNPACKED_BYTES) -> memoryview:
    """``data`` unpacked, in a buffer that the next call of the same thread overwrites.

    Raises: CorruptBatch (not of this codec), UnpacksToMore (more than ``limit`` bytes).
    """
    if codec == NONE:
        return memoryview(data)
    if len(_scratch.room) > _KEPT_SCRATCH_BYTES:
        _scratch.room = bytearray(_FIRST_SCRATCH_BYTES)
    if codec == SNAPPY:
        return _unpack_snappy(data, limit)
    if codec == GZIP:
        into = cramjam.gzip.decompress_into
    elif codec == LZ4:
        into = cramjam.lz4.decompress_into
    elif codec == ZSTD:
        into = cramjam.zstd.decompress_into
    else:
        raise CorruptBatch(f"compression {codec} is not known")
    while True:
        room = _scratch.room
        try:
            size = into(data, room)
        except cramjam.DecompressionError as error:
            if str(error) != _NO_ROOM:
                raise CorruptBatch(f"{NAMES[codec]}: {error}") from error
            _grow(len(room) + 1, limit)
        else:
            if size > limit:
                raise UnpacksToMore(f"a batch unpacks to more than {limit:,} bytes")
            return memoryview(room)[:size]


def decompress(codec: int, data: Buffer, *, limit: int = MAX_UNPACKED_BYTES) -> bytes:
    """``data`` unpacked, in bytes of its own. Raises as `decompress_scratch`."""
    return bytes(decompress_scratch(codec, data, limit=limit))


def _grow(need: int, limit: int) -> None:
    size = len(_scratch.room)
    if need > limit:
        raise UnpacksToMore(f"a batch unpacks to more than {limit:,} bytes")
    while size < need:
        size *= 2
    _scratch.room = bytearray(size)


def _unpack_snappy(data: Buffer, limit: int) -> memoryview:
    view = memoryview(data)
    if bytes(view[: len(_XERIAL_MAGIC)]) != _XERIAL_MAGIC:
        size = _unpack_snappy_block(view, 0, limit)
        return memoryview(_scratch.room)[:size]
    at, done = _XERIAL_HEADER_SIZE, 0
    if len(view) < at:
        raise CorruptBatch("snappy: a frame shorter than its header")
    while at < len(view):
        size = int.from_bytes(view[at : at + 4], "big")
        at += 4
        if size == 0 or at + size > len(view):
            raise CorruptBatch("snappy: a block beyond the end")
        done += _unpack_snappy_block(view[at : at + size], done, limit)
        at += size
    return memoryview(_scratch.room)[:done]


def _unpack_snappy_block(block: memoryview, done: int, limit: int) -> int:
    """Unpack into the scratch buffer from ``done`` on; the size that the block states is checked first."""
    try:
        need = cramjam.snappy.decompress_raw_len(block)
        if done + need > len(_scratch.room):
            kept = bytes(memoryview(_scratch.room)[:done])
            _grow(done + need, limit)
            _scratch.room[:done] = kept
        if done + need > limit:
            raise UnpacksToMore(f"a batch unpacks to more than {limit:,} bytes")
        return cramjam.snappy.decompress_raw_into(
            block, memoryview(_scratch.room)[done : done + need]
        )
    except cramjam.DecompressionError as error:
        raise CorruptBatch(str(error)) from error
