"""Tokens as programs give them away: rights by their names, an end in seconds from now."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from anabranch.clock import SystemClock
from anabranch.core.ids import check_type
from anabranch.core.tokens import TokenBytes, rights_of_names
from anabranch.core.tokens import narrow as narrow_exactly
from anabranch.errors import InvalidArgument

RightNames: TypeAlias = "str | Iterable[str]"
WRITER = ("write", "heartbeat")  # the rights of a token that is asked for without any


def narrow(
    token: bytes,
    *,
    rights: RightNames | None = None,
    expires: float | None = None,
    lane: str | None = None,
) -> TokenBytes:
    """A token that is good for less than this one; the arguments are those of `Transaction.token`.

    Nothing is sent. None: as before. Raises: InvalidArgument (more than the token has), InvalidToken.
    """
    return narrow_at(token, rights, expires, lane, SystemClock().wall())


def narrow_at(
    token: bytes,
    rights: RightNames | None,
    expires: float | None,
    lane: str | None,
    now: float,
) -> TokenBytes:
    """`narrow` by another clock; ``now``: Unix seconds."""
    end_ms = None
    if expires is not None:
        check_type("a token's end, in seconds from now,", expires, int, float)
        if not 0 < expires < 1e10:
            raise InvalidArgument(f"a token expires in {expires!r} seconds: above 0")
        end_ms = int((now + expires) * 1000)
    chosen = None if rights is None else rights_of_names(rights)
    return narrow_exactly(token, rights=chosen, not_after_ms=end_ms, lane=lane)
