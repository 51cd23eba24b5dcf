"""Parts of all kernels: numbers, texts, checksums and key positions, and the cache of compiled code.

A function without an ``end`` argument checks no bounds: its caller has checked them.

Each walk has its own code for a record's length, timestamp and offset: a shared inlined function would take 10 to
20 ns more for each record, and a whole copy takes 20 ns (measured).
"""
# The types of this code are numba's, not Python's.
# mypy: ignore-errors
# ruff: noqa: ANN001, ANN202, ANN206, SLF001

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import caching, cgutils
from numba.extending import intrinsic

from anabranch.infra.fetch import cache_root

log = logging.getLogger("anabranch.compiled")

MALFORMED_RESULT = -1
NO_ROOM = -2

# Errors of numba for a damaged file of compiled code, which is a pickle.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ImportError, RuntimeError, EOFError)
_DAMAGED += (OverflowError, MemoryError, pickle.UnpicklingError)
_MIN_RECORD = 7
_MAX_I32 = (1 << 31) - 1


def _crc_tables(polynomial: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    """Tables of a CRC-32 for 16 bytes at once (slicing by 16); its polynomial is reflected."""
    tables = np.zeros((16, 256), dtype=np.uint32)
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (polynomial if crc & 1 else 0)
        tables[0, byte] = crc
    for k in range(1, 16):
        for byte in range(256):
            before = int(tables[k - 1, byte])
            tables[k, byte] = before >> 8 ^ int(tables[0, before & 0xFF])
    return tables.reshape(-1)


_ZLIB = _crc_tables(0xEDB88320)
_CASTAGNOLI = _crc_tables(0x82F63B78)
_U = np.uint64
_inline = numba.njit(inline="always", nogil=True)
_BYTES_IN = types.Array(types.uint8, 1, "C", readonly=True)
_BYTES_OUT = types.Array(types.uint8, 1, "C")
_LONG = types.int64
_LONGS = types.int64[::1]

# A process's own folders for compiled code, such as a controller's: add one before any kernel is imported.
own_folders: list[Path] = []
kept_in: set[str] = set()  # folders with the code that this process uses
_warned: set[str] = set()
_SOURCE = __loader__.get_data(__file__)


def compiled(signature: Any = None, *, nogil: bool = True) -> Callable[..., Any]:
    """Compile a function at import, or load it from the cache, so that callers never wait in the middle of a round.

    Without a signature it is compiled at its first call. ``nogil``: whether other threads run meanwhile; after a
    walk of microseconds its thread would then wait for a busy one, up to 5 ms.
    """

    def compile_now(function):
        dispatcher = numba.njit(nogil=nogil)(function)
        dispatcher._cache = _Caches(function)
        if signature is not None:
            dispatcher.compile(signature)
            dispatcher.disable_compile()
        return dispatcher

    return compile_now


def _folders(file: str) -> list[Path]:
    """The folders for compiled code of a source file, in the order of searching and storing."""
    part = caching._CacheLocator.get_suitable_cache_subpath(file)
    asked, chosen = numba.config.CACHE_DIR, os.environ.get("ANABRANCH_CACHE")
    found = [Path(asked) / part] if asked else []
    found.append(Path(file).parent / "__pycache__")
    shared = [cache_root() / "compiled" / part]
    own = [folder / part for folder in own_folders]
    found += shared + own if chosen else own + shared
    # The package's own folder is trusted like its code.
    return [folder for folder in found if folder.name == "__pycache__" or _is_safe(folder)]


def _is_safe(folder: Path) -> bool:
    """Whether only this user, or root, can have written code there."""
    for part in (folder.parent, folder):
        try:
            found = part.stat()
        except OSError:
            return True  # a missing folder is made for this user alone
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            _warn_once(
                f"others may write to {part}: compiled code is not kept there; chmod go-w {part}"
            )
            return False
    return True


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        log.warning("%s", text)


class _Caches:
    """numba's cache of one function in several folders: read from each, stored in the first writable one."""

    def __init__(self, function) -> None:
        self._caches = [
            _cache_in(folder, function) for folder in _folders(inspect.getfile(function))
        ]

    def load_overload(self, signature, context):
        """The compiled function, or None."""
        for cache in self._caches:
            try:
                found = cache.load_overload(signature, context)
            except OSError:
                continue
            except _DAMAGED as error:  # the code is compiled again
                _warn_once(f"compiled code in {cache.cache_path} can't be read: {error!r}")
                continue
            if found is not None:
                kept_in.add(cache.cache_path)
                return found
        _warn_once(
            "compiling code, once, for half a minute or longer; `anabranch warm` does it ahead of time"
        )
        return None

    def save_overload(self, signature, compiled_function) -> None:
        """Store the function. If no folder is writable, each process compiles for itself."""
        for cache in self._caches:
            try:
                cache.save_overload(signature, compiled_function)
            except OSError:
                continue
            kept_in.add(cache.cache_path)
            return
        tried = ", ".join(str(cache.cache_path) for cache in self._caches)
        _warn_once(
            f"compiled code can't be kept ({tried}): each start takes half a minute more; set $ANABRANCH_CACHE"
        )


def _cache_in(folder: Path, function):
    class Place(caching._CacheLocator):
        @classmethod
        def from_function(cls, function, file):
            return cls()

        def ensure_cache_path(self):
            for part in (folder.parent, folder):
                part.mkdir(mode=0o755, parents=True, exist_ok=True)

        def get_cache_path(self):
            return str(folder)

        def get_source_stamp(self):
            # numba's own stamp covers only the function's own file.
            read = function.__globals__["__loader__"].get_data
            return hashlib.sha256(read(inspect.getfile(function)) + _SOURCE).hexdigest()

        def get_disambiguator(self):
            return str(function.__code__.co_firstlineno)

    class Impl(caching.CompileResultCacheImpl):
        _locator_classes = (Place,)

    class Cache(caching.FunctionCache):
        _impl_class = Impl

    return Cache(function)


@intrinsic
def _load64(context, array, index):
    """Eight bytes at any address as a little-endian number (of a little-endian machine)."""

    def generate(context, builder, signature, arguments):
        made = context.make_array(signature.args[0])(context, builder, arguments[0])
        place = builder.gep(made.data, [arguments[1]])
        loaded = builder.load(builder.bitcast(place, ir.IntType(64).as_pointer()))
        loaded.align = 1
        return loaded

    return types.uint64(array, index), generate


@intrinsic
def _move(context, target, target_at, source, source_at, size):
    """Copy bytes between two arrays; the caller has checked the bounds."""

    def generate(context, builder, signature, arguments):
        into = context.make_array(signature.args[0])(context, builder, arguments[0])
        out_of = context.make_array(signature.args[2])(context, builder, arguments[2])
        cgutils.raw_memcpy(
            builder,
            builder.gep(into.data, [arguments[1]]),
            builder.gep(out_of.data, [arguments[3]]),
            arguments[4],
            1,
        )
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at, size), generate


@_inline
def _byte(body, at):
    # An unsigned index saves numba's handling of negative ones.
    return np.int64(body[_U(at)])


def _crc_by(tables):
    """A function that continues a CRC's running value over more bytes."""
    T = tables

    @_inline
    def _crc(body, start, stop, crc):
        i = _U(start)
        end = _U(stop)
        low = _U(0xFF)
        while end - i >= _U(16):
            a = _load64(body, i) ^ crc
            b = _load64(body, i + _U(8))
            crc = _U(
                T[_U(15 * 256) + (a & low)]
                ^ T[_U(14 * 256) + ((a >> _U(8)) & low)]
                ^ T[_U(13 * 256) + ((a >> _U(16)) & low)]
                ^ T[_U(12 * 256) + ((a >> _U(24)) & low)]
                ^ T[_U(11 * 256) + ((a >> _U(32)) & low)]
                ^ T[_U(10 * 256) + ((a >> _U(40)) & low)]
                ^ T[_U(9 * 256) + ((a >> _U(48)) & low)]
                ^ T[_U(8 * 256) + (a >> _U(56))]
                ^ T[_U(7 * 256) + (b & low)]
                ^ T[_U(6 * 256) + ((b >> _U(8)) & low)]
                ^ T[_U(5 * 256) + ((b >> _U(16)) & low)]
                ^ T[_U(4 * 256) + ((b >> _U(24)) & low)]
                ^ T[_U(3 * 256) + ((b >> _U(32)) & low)]
                ^ T[_U(2 * 256) + ((b >> _U(40)) & low)]
                ^ T[_U(1 * 256) + ((b >> _U(48)) & low)]
                ^ T[b >> _U(56)]
            )
            i += _U(16)
        if end - i >= _U(8):
            a = _load64(body, i) ^ crc
            crc = _U(
                T[_U(7 * 256) + (a & low)]
                ^ T[_U(6 * 256) + ((a >> _U(8)) & low)]
                ^ T[_U(5 * 256) + ((a >> _U(16)) & low)]
                ^ T[_U(4 * 256) + ((a >> _U(24)) & low)]
                ^ T[_U(3 * 256) + ((a >> _U(32)) & low)]
                ^ T[_U(2 * 256) + ((a >> _U(40)) & low)]
                ^ T[_U(1 * 256) + ((a >> _U(48)) & low)]
                ^ T[a >> _U(56)]
            )
            i += _U(8)
        while i < end:
            crc = _U(T[(crc ^ _U(body[i])) & low]) ^ (crc >> _U(8))
            i += _U(1)
        return crc

    return _crc


_crc, _crc32c = _crc_by(_ZLIB), _crc_by(_CASTAGNOLI)


@_inline
def _position(crc):
    """The position of a key, from its CRC's running value."""
    mixed = np.uint32(crc ^ _U(0xFFFFFFFF))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    mixed = np.uint32(mixed * np.uint32(0x85EBCA6B))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(13)))
    mixed = np.uint32(mixed * np.uint32(0xC2B2AE35))
    mixed = np.uint32(mixed ^ (mixed >> np.uint32(16)))
    return np.int64(mixed)


@_inline
def _varint(body, at, end):
    """(value, next) of a zigzag varint of 32 bits; next is -1 if it is malformed."""
    if at < end and _byte(body, at) < 0x80:
        raw = _byte(body, at)
        return (raw >> 1) ^ -(raw & 1), at + 1
    if at + 1 < end and _byte(body, at + 1) < 0x80:
        raw = (_byte(body, at) & 0x7F) | _byte(body, at + 1) << 7
        return (raw >> 1) ^ -(raw & 1), at + 2
    raw = np.int64(0)
    shift = 0
    while shift < 35:
        if at >= end:
            return np.int64(0), np.int64(-1)
        byte = _byte(body, at)
        at += 1
        raw |= (byte & 0x7F) << shift
        if byte < 0x80:
            if raw >> 32 != 0:
                return np.int64(0), np.int64(-1)
            return (raw >> 1) ^ -(raw & 1), at
        shift += 7
    return np.int64(0), np.int64(-1)


@_inline
def _long(body, at, end):
    """(value, next) of any zigzag varint of 64 bits; next is -1 if it is malformed, or was -1."""
    bits = np.uint64(0)
    shift = 0
    while at >= 0 and shift < 70:
        if at >= end:
            return np.int64(0), np.int64(-1)
        byte = np.uint64(body[_U(at)])
        at += 1
        if shift == 63 and byte > 1:
            return np.int64(0), np.int64(-1)
        bits |= (byte & np.uint64(0x7F)) << np.uint64(shift)
        if byte < 0x80:
            half = np.int64(bits >> np.uint64(1))
            if bits & np.uint64(1):
                return ~half, at
            return half, at
        shift += 7
    return np.int64(0), np.int64(-1)


@_inline
def _varlong(body, at, end):
    """As `_long`, quicker for short numbers."""
    if at < end and _byte(body, at) < 0x80:
        raw = _byte(body, at)
        return (raw >> 1) ^ -(raw & 1), at + 1
    if at + 1 < end and _byte(body, at + 1) < 0x80:
        raw = (_byte(body, at) & 0x7F) | _byte(body, at + 1) << 7
        return (raw >> 1) ^ -(raw & 1), at + 2
    return _long(body, at, end)


@_inline
def _put_varint(out, at, value):
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    while raw > np.uint64(0x7F):
        out[at] = np.uint8((raw & np.uint64(0x7F)) | np.uint64(0x80))
        at += 1
        raw >>= np.uint64(7)
    out[at] = np.uint8(raw)
    return at + 1


@_inline
def _varint_size(value):
    raw = (np.uint64(value) << np.uint64(1)) ^ np.uint64(value >> 63)
    size = 1
    while raw > np.uint64(0x7F):
        size += 1
        raw >>= np.uint64(7)
    return size


@numba.njit(nogil=True)
def _is_utf8(body, at, last):
    """Whether bytes are UTF-8, as Python and the standard have it: nothing overlong, no surrogates."""
    while at < last:
        byte = _byte(body, at)
        at += 1
        if byte < 0x80:
            continue
        if byte < 0xC2 or byte > 0xF4:
            return False
        more = 1
        low = 0x80
        high = 0xBF
        if byte >= 0xF0:
            more = 3
            if byte == 0xF0:
                low = 0x90
            elif byte == 0xF4:
                high = 0x8F
        elif byte >= 0xE0:
            more = 2
            if byte == 0xE0:
                low = 0xA0
            elif byte == 0xED:
                high = 0x9F
        if last - at < more:
            return False
        for _ in range(more):
            byte = _byte(body, at)
            if byte < low or byte > high:
                return False
            low = 0x80
            high = 0xBF
            at += 1
    return True


@_inline
def _is_text(body, at, last):
    """Whether bytes are UTF-8, by a quicker way for ASCII than `_is_utf8`."""
    high = np.int64(0)
    for i in range(at, last):
        high |= _byte(body, i)
    return high < 0x80 or _is_utf8(body, at, last)
