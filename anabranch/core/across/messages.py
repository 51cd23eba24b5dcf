"""Messages between leaders: who may have sent one, which time it may bring, and who gives way to whom."""

from __future__ import annotations

import hmac
from enum import Enum

from anabranch.errors import ClockSkew
from anabranch.protocol import hybrid_time
from anabranch.protocol.ids import control_partition_of, made_ms_of
from anabranch.protocol.schemas import records as r

LEVEL = 4  # the feature level of messages and their rows
MAC_HEADER = "ab.mac"
MAC_SIZE = 32
MOST_PARTITIONS = 1 << 16  # an id has two bytes for the number of its control partition
TO_COORDINATOR = (r.Enlist, r.Vote, r.Done, r.AskDecision)
ToCoordinator = r.Enlist | r.Vote | r.Done | r.AskDecision
ToParticipant = r.Enlisted | r.AskVote | r.Decide


def mac_of(secret: bytes, sender: int, receiver: int, payload: bytes) -> bytes:
    """The HMAC of an encoded message. ``secret``: of the transaction; only controllers read it (M3)."""
    said = sender.to_bytes(2, "big") + receiver.to_bytes(2, "big") + payload
    return hmac.digest(secret, said, "sha256")


def is_genuine(
    secret: bytes, sender: int, receiver: int, payload: bytes, mac: bytes | None
) -> bool:
    """Whether a leader that knows the transaction made the message, for this receiver."""
    found = mac_of(secret, sender, receiver, payload)
    return mac is not None and hmac.compare_digest(found, mac)


def ends_of(message: ToCoordinator | ToParticipant, other: int) -> tuple[int, int]:
    """(sender, receiver) of a message. ``other``: the control partition that is not the coordinator."""
    coordinator = control_partition_of(message.txn_id)
    return (other, coordinator) if isinstance(message, TO_COORDINATOR) else (coordinator, other)


def time_of(clock: int, now_us: int) -> int:
    """The time that a message brings: about the timestamp that its sender would give now (T1).

    ``clock``: the sender's hybrid time. This alone may be the time of a commit long ago, and would not show that
    the sender's clock is wrong.
    """
    return max(clock, hybrid_time.from_us(now_us))


def raised(clock: int, brought: int, now_us: int, skew_ms: int) -> int:
    """The hybrid time after a message that brings a time (T1). `ClockSkew`: it is too far ahead of the wall clock.

    The limit is measured from the wall clock, not from hybrid time, so that messages can't push that step by step.
    A time that hybrid time has reached already is always accepted.
    """
    if brought <= clock:
        return clock
    ahead_ms = (hybrid_time.to_us(brought) - now_us) / 1000
    if ahead_ms > skew_ms:
        raise ClockSkew(
            f"another controller's time is {ahead_ms:,.0f} ms ahead of this one's clock, {skew_ms:,} are allowed: "
            "set the clocks"
        )
    return brought


class Meeting(Enum):
    """A vote has met another transaction, and the writes of one may break the locks of the other."""

    WAIT = "wait"
    AGAIN = "again"


def age(txn_id: bytes) -> tuple[int, bytes, int]:
    """The sort key of transactions by age, the oldest first: the same order at every controller."""
    return made_ms_of(txn_id), txn_id[8:], control_partition_of(txn_id)


def meet(asker: bytes, other: bytes, *, decided: bool) -> Meeting:
    """Whether a vote waits for another transaction, or is refused and asked for again (L2).

    The older transaction waits, and the younger one gives way, wherever they meet. So an older one only waits for a
    younger one: there is no cycle, and the oldest is never refused. No vote waits for a decided transaction: that
    one merges only after the open entries before it, and their votes may wait for this one.
    """
    if decided or age(other) < age(asker):
        return Meeting.AGAIN
    return Meeting.WAIT
