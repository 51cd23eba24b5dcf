"""The controller's records in a journal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ParticipantOp = Literal["BEGIN_TXN", "BEGIN_COMMIT", "FINALIZE_COMMIT", "ABORT_TXN"]


@dataclass(frozen=True, slots=True)
class JournalOp:
    """A participant op in a journal, by the controller (header ab.op)."""

    op: ParticipantOp
    txn_id: bytes
    stream_epoch: int
    commit_timestamp: int
