"""The role of an ordered reader's member: it notes each event as it comes, for `order_check`."""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zlib import crc32

from anabranch.cli.session import connected
from anabranch.errors import NotReady
from examples.flights.child import Orders, Say
from examples.flights.events import Kind, Small, kind_of
from examples.flights.ticker import END
from examples.flights.writers import target_from

if TYPE_CHECKING:
    from anabranch import Event

# After so long without an event a member looks whether it shall end.
_SILENCE_S = 0.5
_KINDS = tuple(Kind)
_NOTE = struct.Struct(">diqqq8sIBii")
_KEY_SIZE = 8


class Note(NamedTuple):
    """An event as a member saw it.

    ``at``: when, by the monotonic clock, which all processes share. ``key``: `digest_of` the key. ``value``: its
    CRC-32. ``number``, ``within``: number and index of a `Small`, else -1.
    """

    at: float
    partition: int
    offset: int
    segment_id: int
    commit_timestamp: int
    key: bytes
    value: int
    kind: Kind
    number: int = -1
    within: int = -1

    def to_bytes(self) -> bytes:
        """As it stands in a member's file."""
        return _NOTE.pack(*self[:7], _KINDS.index(self.kind), *self[8:])

    @classmethod
    def read(cls, path: Path) -> Iterator[Note]:
        """All of a file, in order."""
        for fields in _NOTE.iter_unpack(path.read_bytes()):
            yield cls._make((*fields[:7], _KINDS[fields[7]], *fields[8:]))


def digest_of(key: bytes | None) -> bytes:
    """A key in 8 bytes; no key: zeros."""
    return bytes(_KEY_SIZE) if key is None else blake2b(key, digest_size=_KEY_SIZE).digest()


def read_in_order(parameters: Mapping[str, Any], say: Say, orders: Orders) -> None:
    """One member of a group. Says which of the last transaction's events it got, and ends when told to."""
    group = f"{parameters['scope']}.ordered"
    digests: dict[bytes | None, bytes] = {}
    count = 0
    with (
        Path(parameters["file"]).open("wb") as file,
        connected(target_from(parameters)) as client,
        client.read(parameters["stream"], group=group, timeout=_SILENCE_S) as reader,
    ):
        say("ready")
        while not orders.finish.is_set():
            try:
                for event in reader:
                    note = _note(event, digests)
                    file.write(note.to_bytes())
                    count += 1
                    if note.kind is Kind.SMALL and note.number == END:
                        say("end", index=note.within)
            except NotReady:
                continue  # the other member has not come so far yet
    say("report", events=count)


def _note(event: Event, digests: dict[bytes | None, bytes]) -> Note:
    key = digests.get(event.key)
    if key is None:
        key = digests[event.key] = digest_of(event.key)
    kind = kind_of(event.value)
    value = event.value or b""
    small = Small.from_bytes(value) if kind is Kind.SMALL else None
    return Note(
        time.monotonic(),
        event.partition,
        event.offset,
        event.segment_id,
        event.commit_timestamp,
        key,
        crc32(value),
        kind,
        small.number if small else -1,
        small.index if small else -1,
    )
