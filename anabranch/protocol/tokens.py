"""Tokens: bytes by which another process acts for a transaction (layout: ``docs/protocol.md``, The token).

The client that began the transaction makes tokens with its secret. Each client with a token can *narrow* the token:
add *caveats*, which permit less. A controller checks a token with the secret in the transaction's row.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import IntFlag
from functools import lru_cache

from anabranch.errors import InvalidArgument, InvalidToken, NotAuthorized
from anabranch.protocol.hybrid_time import MAX
from anabranch.protocol.ids import SECRET_SIZE, TXN_ID_SIZE
from anabranch.protocol.legal_names import check_lane, check_scope, check_type

TOKEN_VERSION = 2
MAX_CAVEATS = 16
MAX_KEEPALIVE_MS = (1 << 31) - 1
_FRONT = struct.Struct(f">B{TXN_ID_SIZE}sIQQ")  # version, id, keepalive, begun, seen
_BACK = struct.Struct(">BQ")  # rights, not after
_TIME = struct.Struct(">Q")
_MAC_SIZE = 32
_MAX_TIME = 253_402_300_799_999  # the last millisecond of the year 9999
_MAX_SIZE = _FRONT.size + 101 + 51 + _BACK.size + 1 + MAX_CAVEATS * 52 + _MAC_SIZE
# Kinds of caveats.
_RIGHTS = 1
_NOT_AFTER = 2
_LANE = 3


class Rights(IntFlag):
    """The rights that a token may give."""

    WRITE = 1
    HEARTBEAT = 2
    COMMIT = 4
    ABORT = 8
    STATE = 16


ALL_RIGHTS = Rights(31)
SEE = Rights.STATE | Rights.COMMIT  # either right permits seeing the transaction


class TokenBytes(bytes):
    """The bytes of a token. Their `repr` does not show them, because they are secret."""

    __slots__ = ()

    def __repr__(self) -> str:
        token = peek(self)
        rights = ", ".join(names_of(token.rights))
        end = token.not_after_ms
        until = f"until {datetime.fromtimestamp(end / 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        lanes = "".join(f"; lane {lane}" for lane in sorted(token.lanes))
        return f"token of {token.txn_id.hex()} ({rights}; {until if end else 'no end'}{lanes})"

    __str__ = __repr__


@dataclass(frozen=True, slots=True)
class Token:
    """The content of a token: what is left of its rights after all caveats.

    ``begun_ms``, ``not_after_ms``: Unix milliseconds; if ``not_after_ms`` is 0, the token has no end. ``rights``: a
    sum of `Rights`. ``lanes``: the lane that uses the token has to be equal to each of them; empty: any lane.
    ``owner``: the lane of the token's maker. This is a hint: the owner in the transaction's row counts. ``seen``:
    the highest hybrid time that the token's maker had seen.
    """

    txn_id: bytes
    keepalive_ms: int
    begun_ms: int
    scope: str
    owner: str
    rights: int = ALL_RIGHTS
    not_after_ms: int = 0
    lanes: frozenset[str] = frozenset()
    seen: int = 0
    chain: tuple[bytes, ...] = field(default=(), repr=False, compare=False)  # as read, MAC last


def make(secret: bytes, token: Token) -> TokenBytes:
    """The token's bytes, made with the transaction's secret. `InvalidArgument` for a field out of its range.

    The same token and secret give the same bytes. ``lanes`` become caveats.
    """
    if len(secret) != SECRET_SIZE or len(token.txn_id) != TXN_ID_SIZE:
        raise InvalidArgument(
            f"a secret has {SECRET_SIZE} bytes and a transaction id {TXN_ID_SIZE}, not {len(secret)} and "
            f"{len(token.txn_id)}"
        )
    if not 1 <= token.keepalive_ms <= MAX_KEEPALIVE_MS:
        raise InvalidArgument(
            f"keepalive {token.keepalive_ms:,} ms is not within 1 and {MAX_KEEPALIVE_MS:,}"
        )
    _check_time(token.begun_ms, token.not_after_ms)
    if not 1 <= token.rights <= ALL_RIGHTS or not 0 <= token.seen <= MAX:
        raise InvalidArgument("a token has one right at least, and a hybrid time")
    texts = check_scope(token.scope).encode("ascii"), check_lane(token.owner).encode("ascii")
    signed = b"".join(
        (
            _FRONT.pack(
                TOKEN_VERSION, token.txn_id, token.keepalive_ms, token.begun_ms, token.seen
            ),
            *(bytes((len(text),)) + text for text in texts),
            _BACK.pack(token.rights, token.not_after_ms),
        )
    )
    caveats = [bytes((_LANE,)) + check_lane(lane).encode("ascii") for lane in sorted(token.lanes)]
    return _write(signed, (), _mac(secret, signed), caveats)


def narrow(
    data: bytes,
    *,
    rights: int | None = None,
    not_after_ms: int | None = None,
    lane: str | None = None,
) -> TokenBytes:
    """The token with more caveats: no other rights, until this time (Unix milliseconds), for no other lane.

    `InvalidArgument` for a caveat that would widen the token; `InvalidToken` as `peek`.
    """
    token = peek(data)
    signed, *caveats, mac = token.chain
    more = []
    if rights is not None and rights != token.rights:
        beyond = rights & ~token.rights
        if beyond or not rights:
            lacks = f"has no right to {_text(beyond)}" if beyond else "would have no right"
            raise InvalidArgument(f"a token is narrowed, never widened: this one {lacks}")
        more.append(bytes((_RIGHTS, rights)))
    if not_after_ms is not None and not_after_ms != token.not_after_ms:
        _check_time(not_after_ms)
        if not not_after_ms or 0 < token.not_after_ms < not_after_ms:
            raise InvalidArgument("a token is narrowed, never widened: this one ends before")
        more.append(bytes((_NOT_AFTER,)) + _TIME.pack(not_after_ms))
    if lane is not None and token.lanes != {check_lane(lane)}:
        if token.lanes:
            raise InvalidArgument(
                f"a token is narrowed, never widened: this one is for lane {', '.join(token.lanes)} only"
            )
        more.append(bytes((_LANE,)) + lane.encode("ascii"))
    return _write(signed, tuple(caveats), mac, more)


def peek(data: bytes) -> Token:
    """The content of a token, not verified. `InvalidToken` if it is malformed, cut, or of another version."""
    if not isinstance(data, bytes):
        raise InvalidToken(f"malformed token: bytes expected, not {type(data).__name__}")
    if data[:1] != bytes((TOKEN_VERSION,)):
        raise InvalidToken(
            f"malformed token: {data!r:.40} is not a token of version {TOKEN_VERSION}"
        )
    if len(data) > _MAX_SIZE:
        raise InvalidToken(
            f"malformed token: {len(data):,} bytes; a token has at most {_MAX_SIZE:,}"
        )
    try:
        return _read(data)
    except (IndexError, struct.error, UnicodeDecodeError, InvalidArgument) as error:
        raise InvalidToken(
            f"malformed token: it is cut, or a part is out of its range: {error}"
        ) from None


def is_genuine(token: Token, secret: bytes) -> bool:
    """Whether a token of `peek` was made with this secret, and not changed since except by narrowing."""
    signed, *caveats, stated = token.chain
    mac = _mac(secret, signed)
    for caveat in caveats:
        mac = _mac(mac, caveat)
    return hmac.compare_digest(mac, stated)


def id_named(data: bytes) -> bytes:
    """The transaction id of a token, or of a bare id (16 bytes). `InvalidToken`."""
    return data if len(data) == TXN_ID_SIZE else peek(data).txn_id


def check_right(token: Token, right: int) -> None:
    """`NotAuthorized` unless the token has one of these rights."""
    if not token.rights & right:
        has = ", ".join(names_of(token.rights)) or "nothing"
        raise NotAuthorized(
            f"the token is good for {has} only: ask its maker for one with right {_text(right)}"
        )


def rights_of_names(names: str | Iterable[str]) -> int:
    """The sum of rights that are given by name: one, several, or "all". `InvalidArgument`."""
    found = 0
    for name in (names,) if isinstance(names, str) else names:
        check_type("a right", name, str)
        right = ALL_RIGHTS if name == "all" else Rights.__members__.get(name.upper())
        if right is None or name != name.lower():
            raise InvalidArgument(
                f"{name!r} is no right: {', '.join(names_of(ALL_RIGHTS))}, or all"
            )
        found |= right
    if not found:
        raise InvalidArgument("a token without a right is good for nothing: name one at least")
    return found


def names_of(rights: int) -> list[str]:
    return [(right.name or "").lower() for right in Rights if right & rights]


def _text(rights: int) -> str:
    return " or ".join(names_of(rights)) or "operate"


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.digest(key, message, "sha256")


def _check_time(*times_ms: int) -> None:
    for ms in times_ms:
        if not 0 <= ms <= _MAX_TIME:
            raise InvalidArgument(f"a token's time is {ms}: Unix milliseconds, 0 to {_MAX_TIME}")


def _write(signed: bytes, before: tuple[bytes, ...], mac: bytes, more: list[bytes]) -> TokenBytes:
    """The bytes of a token to which the caveats ``more`` are added; each of them renews the MAC.

    `InvalidArgument` if the token would have more than `MAX_CAVEATS`.
    """
    for caveat in more:
        mac = _mac(mac, caveat)
    caveats = (*before, *more)
    if len(caveats) > MAX_CAVEATS:
        raise InvalidArgument(
            f"a token has at most {MAX_CAVEATS} caveats: narrow one that has fewer"
        )
    parts = [bytes((len(caveat),)) + caveat for caveat in caveats]
    return TokenBytes(b"".join((signed, bytes((len(caveats),)), *parts, mac)))


@lru_cache(1 << 6)  # one command peeks at its token several times
def _read(data: bytes) -> Token:
    """The content of a token's bytes. Raises the errors that `peek` translates if they are malformed."""
    _, txn_id, keepalive_ms, begun_ms, seen = _FRONT.unpack_from(data)
    scope, at = _part(data, _FRONT.size)
    owner, at = _part(data, at)
    rights, not_after_ms = _BACK.unpack_from(data, at)
    if not 1 <= keepalive_ms <= MAX_KEEPALIVE_MS or rights > ALL_RIGHTS:
        raise InvalidArgument(f"keepalive {keepalive_ms} ms, rights {rights}")
    at += _BACK.size
    signed, count = data[:at], data[at]
    at += 1
    caveats, lanes = [], set()
    for _ in range(count):
        caveat, at = _part(data, at)
        caveats.append(caveat)
        kind, value = caveat[0], caveat[1:]
        if kind == _RIGHTS and len(value) == 1:
            rights &= value[0]
        elif kind == _NOT_AFTER:
            (end,) = _TIME.unpack(value)
            if not end:
                raise InvalidArgument("0 is no end")
            not_after_ms = min(end, not_after_ms or end)
        elif kind == _LANE:
            lanes.add(check_lane(value.decode("ascii")))
        else:
            raise InvalidArgument(f"caveat {kind} is not known here")
    if at + _MAC_SIZE != len(data) or count > MAX_CAVEATS:
        raise InvalidArgument(f"{len(data)} bytes, {count} caveats")
    _check_time(begun_ms, not_after_ms)
    return Token(
        txn_id,
        keepalive_ms,
        begun_ms,
        check_scope(scope.decode("ascii")),
        check_lane(owner.decode("ascii")),
        rights,
        not_after_ms,
        frozenset(lanes),
        seen,
        (signed, *caveats, data[at:]),
    )


def _part(data: bytes, at: int) -> tuple[bytes, int]:
    """The bytes that follow their length at ``at``, and the offset of their end."""
    end = at + 1 + data[at]
    return data[at + 1 : end], end
