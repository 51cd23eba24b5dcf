"""Reads frames from standard input, a line of hexadecimal digits each, and prints what became of each, as JSON.

It runs in the former release, so it uses nothing but the codec.
"""

from __future__ import annotations

import json
import sys

import anabranch
from anabranch.batches.one_shots import decode_lazily
from anabranch.errors import AnabranchError
from anabranch.protocol.schemas.codec import LEVEL, TYPES, decode, encode


def main() -> None:
    """``same``: whether it is written again as it was. ``error``: the class and the text, of both readers."""
    print(json.dumps({"file": anabranch.__file__, "level": LEVEL, "types": sorted(TYPES)}))
    for line in sys.stdin:
        data = bytes.fromhex(line)
        try:
            print(json.dumps({"same": encode(decode(data)) == data}))
        except AnabranchError as error:
            print(
                json.dumps({"error": [type(error).__name__, str(error)], "lazily": _lazily(data)})
            )


def _lazily(data: bytes) -> str:
    try:
        return type(decode_lazily(data)).__name__
    except AnabranchError as error:
        return type(error).__name__


if __name__ == "__main__":
    main()
