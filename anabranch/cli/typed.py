"""The options `--key` and `--value`: codecs of keys and values, under the words of `Client.stream`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from anabranch.cli.options import option
from anabranch.errors import InvalidArgument
from anabranch.presentation.rows import bytes_fields, bytes_text
from anabranch.topics.names import stream_topic
from anabranch.values import Stream, codec_of, stream_of

_WORDS = {"bytes": bytes, "str": str, "json": json}
KeyCodec = Annotated[
    str | None, option("--key CODEC", "Keys are bytes, str, json, or a codec MODULE:NAME.")
]
ValueCodec = Annotated[
    str | None, option("--value CODEC", "Values are bytes, str, json, or a codec MODULE:NAME.")
]


@dataclass(frozen=True)
class Typed:
    """The codecs of a command that reads."""

    key_codec: KeyCodec = None
    value_codec: ValueCodec = None

    def given(self, name: str) -> Any:
        """The stream's name, or its handle if there is a codec. Raises: InvalidArgument."""
        return name if self.key_codec is self.value_codec is None else self.handle(name)

    def handle(self, name: str) -> Stream[Any, Any]:
        """The stream's handle. Raises: InvalidArgument."""
        mode = getattr(self, "undecodable", "raise")
        return stream_of(name, spec_of(self.key_codec), spec_of(self.value_codec), mode)


@dataclass(frozen=True)
class TypedReading(Typed):
    """The codecs of a command that reads events."""

    undecodable: Annotated[
        str, option("--undecodable MODE", "raise, skip, or the stream of dead letters.")
    ] = "raise"


def spec_of(word: str | None) -> Any:
    """What a word of `--key` or `--value` means, for `codec_of`. Raises: InvalidArgument."""
    if word is None or word in _WORDS:
        return None if word is None else _WORDS[word]
    module, _, name = word.partition(":")
    if not module or not name:
        raise InvalidArgument(f"codec {word!r}: {', '.join(_WORDS)}, or MODULE:NAME")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidArgument(f"codec {word!r} can't be imported: {error}") from error


def line_encoder(
    word: str | None, stream: str, *, of_keys: bool = False
) -> Callable[[bytes], bytes]:
    """A function that encodes what a person wrote: with str it is text, with other codecs JSON.

    It raises `InvalidArgument` for a text that the codec does not take.
    """
    spec = spec_of(word)
    if spec is None or spec is bytes:
        return lambda text: text
    codec = codec_of(spec, stream_topic(stream), of_keys=of_keys)

    def encode(text: bytes) -> bytes:
        try:
            if spec is str:
                value: Any = text.decode()
            else:
                value = codec.decode(text) if isinstance(spec, type) else json.loads(text)
            coded: bytes = codec.encode(value)
            return coded
        except Exception as error:
            raise InvalidArgument(f"{text!r:.100}: codec {codec.name}: {error}") from error

    return encode


def fields(**data: Any) -> dict[str, Any]:
    """Bytes as `bytes_fields`, decoded keys and values as JSON."""
    row: dict[str, Any] = {}
    for name, each in data.items():
        if each is None or isinstance(each, bytes):
            row |= bytes_fields(**{name: each})
        else:
            row[name] = json.loads(_json_of(each))
    return row


def shown(value: Any) -> str:
    """A decoded key or value as one cell: a text as it is, others as JSON."""
    return bytes_text(
        value
        if isinstance(value, bytes)
        else (value if isinstance(value, str) else _json_of(value)).encode()
    )


def _json_of(value: Any) -> str:
    def plain(each: Any) -> Any:
        if hasattr(each, "model_dump"):
            return each.model_dump(mode="json")
        if hasattr(each, "__struct_fields__"):
            import msgspec

            return msgspec.to_builtins(each)
        if hasattr(each, "DESCRIPTOR"):  # a message of Protobuf
            from google.protobuf.json_format import MessageToDict

            return MessageToDict(each)
        return str(each)

    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=plain)
