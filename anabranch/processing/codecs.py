"""Codecs of values: they encode a handler's objects as bytes, and decode them."""

from __future__ import annotations

import json
from collections.abc import Callable
from json.encoder import c_make_encoder, encode_basestring  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from anabranch.errors import InvalidArgument


class Codec(NamedTuple):
    """Two functions, which encode an object and decode it, and their name."""

    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    name: str = ""


def _same(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise InvalidArgument(
            f"a value is bytes, not {type(value).__name__}: name a codec, as in value=json"
        )
    return value


_compact = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
_read = json.JSONDecoder().scan_once  # type: ignore[attr-defined]
# `JSONEncoder.encode` makes this C encoder for each call, which costs as much as the encoding itself.
_encoder = c_make_encoder and c_make_encoder(
    None, _compact.default, encode_basestring, None, ":", ",", False, False, True
)


def _to_json(value: Any) -> bytes:
    text = _compact.encode(value) if _encoder is None else "".join(_encoder(value, 0))
    return text.encode()


def _of_json(data: bytes) -> Any:
    text = data.decode()
    try:
        value, end = _read(text, 0)
        if end == len(text):
            return value
    except StopIteration:
        pass
    return json.loads(text)  # white space around it, or not JSON


RAW = Codec(_same, bytes, "bytes")
_KNOWN: dict[Any, Codec] = {
    None: RAW,
    bytes: RAW,
    str: Codec(str.encode, lambda data: data.decode(), "str"),
    json: Codec(_to_json, _of_json, "json"),
}


def codec_of(value: Any) -> Codec:
    """The codec for None or bytes (unchanged), str, json, or an object with ``dumps`` and ``loads``."""
    if value is None or value in (bytes, str, json):
        return _KNOWN[value]
    if not callable(getattr(value, "dumps", None)) or not callable(getattr(value, "loads", None)):
        raise InvalidArgument(
            f"{value!r:.100} is no codec: None, bytes, str, json, or an object with dumps and loads"
        )

    def encode(given: Any) -> bytes:
        found = value.dumps(given)
        return found.encode() if isinstance(found, str) else _same(found)

    return Codec(encode, value.loads, getattr(value, "__name__", type(value).__qualname__))
