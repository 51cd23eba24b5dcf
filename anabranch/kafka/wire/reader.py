"""Reading the fields of an answer, one after the other."""

from __future__ import annotations

import struct

from anabranch.batches.format import Buffer
from anabranch.kafka.wire.errors import MalformedAnswer


class Reader:
    """Reads an answer's fields; `MalformedAnswer` for one that does not fit."""

    def __init__(self, body: Buffer, flexible: bool) -> None:
        self.body = memoryview(body)
        self.at = 0
        self.flexible = flexible

    def take(self, form: struct.Struct) -> tuple[int, ...]:
        try:
            values = form.unpack_from(self.body, self.at)
        except struct.error:
            raise MalformedAnswer("an answer ends in the middle of a field") from None
        self.at += form.size
        return values

    def i16(self) -> int:
        return int.from_bytes(self.view(2), "big", signed=True)

    def i32(self) -> int:
        return int.from_bytes(self.view(4), "big", signed=True)

    def skip(self, count: int) -> None:
        if self.at + count > len(self.body):
            raise MalformedAnswer("an answer ends in the middle of a field")
        self.at += count

    def raw(self, count: int) -> bytes:
        return bytes(self.view(count))

    def view(self, count: int) -> memoryview:
        start = self.at
        self.skip(count)
        return self.body[start : self.at]

    def uvarint(self) -> int:
        value = shift = 0
        while shift < 35:
            try:  # the check of `skip`, without the cost of a call
                byte = self.body[self.at]
            except IndexError:
                raise MalformedAnswer("an answer ends in the middle of a field") from None
            self.at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise MalformedAnswer("a number of too many bytes")

    def array(self) -> int:
        """An array's size; null counts as empty."""
        size = self.uvarint() - 1 if self.flexible else self.i32()
        if size > len(self.body):
            raise MalformedAnswer(f"an array of {size}")
        return max(size, 0)

    def string(self) -> str | None:
        size = self.uvarint() - 1 if self.flexible else self.i16()
        return None if size < 0 else self.raw(size).decode("utf-8", "replace")

    def nullable_bytes(self) -> memoryview:
        size = self.uvarint() - 1 if self.flexible else self.i32()
        return self.view(max(size, 0))

    def tags(self) -> None:
        if self.flexible:
            for _ in range(self.uvarint()):
                self.uvarint()
                self.skip(self.uvarint())
