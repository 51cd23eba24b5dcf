"""The records of the wire protocol as classes, made from this folder's ``*.avsc`` files; see ``records.pyi``."""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Literal

from anabranch.protocol.schemas.making import made

StreamState = Literal[
    "CREATING",
    "ACTIVE",
    "LOST",
    "RECOVERING",
    "FORGETTING",
    "FORGOTTEN",  # the stream has no row, so this is never logged
]
ShownStreamState = Literal[StreamState, "WAITING"]  # not readable or writable now; never logged
globals().update(made(__name__))


def is_record(cls: type) -> bool:
    """Whether a class of this module is a record of the protocol."""
    return is_dataclass(cls) or issubclass(cls, tuple)
