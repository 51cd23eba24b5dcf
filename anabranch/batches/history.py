"""Decoding of records of a stream's history topic."""

from __future__ import annotations

from anabranch.errors import MalformedRecord, UnsupportedVersion
from anabranch.schemas.codec import decode
from anabranch.schemas.records import CommitRecord, EpochRecord

HistoryRecord = EpochRecord | CommitRecord


def decode_history(topic: str, offset: int, value: bytes | None, advice: str) -> HistoryRecord:
    """A record by its value. ``advice``: what to do about a foreign one, the end of the error's sentence.

    Raises: MalformedRecord, UnsupportedVersion: written by no controller, or by a newer one.
    """
    kind: type[MalformedRecord | UnsupportedVersion] = MalformedRecord
    try:
        record = decode(value or b"")
        if isinstance(record, EpochRecord | CommitRecord):
            return record
        what = f"a {type(record).__name__}"
    except (MalformedRecord, UnsupportedVersion) as error:
        kind, what = type(error), str(error)
    who = "no" if kind is MalformedRecord else "a newer, or no,"
    raise kind(
        f"{topic} has a record at offset {offset} that {who} controller wrote: {what}. {advice}"
    )
