"""Records that controllers answer with, made short."""

from __future__ import annotations

from typing import Any

from anabranch.protocol.ids import control_partition_of, make_txn_id
from anabranch.protocol.partitioner import even_ranges
from anabranch.protocol.schemas import records as r
from anabranch.protocol.schemas.records import TxnState
from anabranch.protocol.tokens import Token, TokenBytes, id_named, make

STREAM = "nyc/flights"
TXN = make_txn_id(0, 1_700_000_000_000, 42)


def segments(count: int) -> tuple[r.SegmentRange, ...]:
    return tuple(
        r.SegmentRange(number, low, high, number)
        for number, (low, high) in enumerate(even_ranges(count))
    )


def token_of(
    txn_id: bytes = TXN, scope: str = "nyc", keepalive_ms: int = 30_000, seen: int = 0
) -> TokenBytes:
    """With all rights, by any secret: it is not checked here."""
    return make(bytes(32), Token(txn_id, keepalive_ms, 1, scope, "open", seen=seen))


def outcome(txn_id: bytes = TXN, state: TxnState = "COMMITTED", **more: Any) -> r.Outcome:
    fields: dict[str, Any] = {
        "scope": "nyc",
        "name": None,
        "commit_timestamp": 99 if state == "COMMITTED" else 0,
        "committed": 3,
        "rejected": 0,
        "left_out": 0,
        "reason": "" if state == "COMMITTED" else "why",
        "begun_ms": 1,
        "finished_ms": 2,
        "keepalive_ms": 30_000,
        "streams": (),
        "writers": (),
        "owner": "open",
    }
    return r.Outcome(txn_id=txn_id, state=state, **(fields | more))


def refusal(code: str, message: str = "what to do") -> r.Refusal:
    return r.Refusal(code, message)


def obliging(command: Any, *, streams: int = 2, scopes: int = 1) -> Any:
    """A controller's answers when all goes well; commits take all that is claimed."""
    match command:
        case r.FindScope(scope=scope):
            return r.ScopeInfo(scope, 1 if scope == "sea" else len(scope) % scopes)
        case r.CreateStream(stream=stream, segments=count):
            return r.StreamList((stream_info(stream, count),))
        case r.DescribeStreams(stream=stream):
            return r.StreamList((stream_info(stream or STREAM, streams),))
        case r.Begin(txn_id=txn_id, keepalive_ms=keepalive_ms):
            return r.Begun(txn_id, keepalive_ms, 1)
        case r.Touch(stream=stream) if stream.startswith("sea/"):
            return refusal("CrossScope")
        case r.Touch(stream=stream):
            return r.Touched(stream, 0, segments(streams))
        case r.Register(receipt=receipt):
            return r.Registered(receipt.sequence)
        case r.Commit(token=token, own=own, receipts=receipts):
            return outcome(id_named(token), writers=(*own, *(receipts or ())))
        case r.OneShot(txn_id=txn_id, events=events):
            return outcome(txn_id, committed=len(events))
        case r.Abort(token=token):
            return outcome(id_named(token), "ABORTED")
        case r.GetState(txn_id=txn_id):
            return outcome(txn_id, "OPEN")
        case r.Resolve(txn_id=txn_id):
            return outcome(txn_id, "ABORTED")
        case r.ListTransactions():
            return r.TransactionList((outcome(),))
        case _:
            return None


def stream_info(stream: str, count: int) -> r.StreamInfo:
    return r.StreamInfo(stream, "ACTIVE", 0, 0, segments(count), {}, {}, {"0": 5}, count, {}, 0, "")


def partition_of(txn_id: bytes) -> int:
    return control_partition_of(txn_id)
