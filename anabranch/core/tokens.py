"""Tokens: the signed bytes by which another process joins a transaction. Pure: key and secret are given.

``01 | key id (4) | txn id (16) | keepalive ms (4, big endian) | scope (ASCII) | HMAC-SHA256 (32) | proof (32)``

The HMAC covers all before it, by the controllers' key; the key id is the first 4 bytes of that key's SHA-256. This
part is public: controllers send it on a topic that others read. The proof is the HMAC of that part by the secret
that began the transaction. The beginning client adds it; controllers know the secret and carry out no command
without it. An operator, who has no secret, proves with the controllers' key.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from dataclasses import dataclass

from anabranch.core.ids import TXN_ID_SIZE, check_scope
from anabranch.errors import InvalidArgument, InvalidToken

KEY_SIZE = 32
KEY_ID_SIZE = 4
TOKEN_VERSION = 1
MAX_KEEPALIVE_MS = (1 << 31) - 1
_HEAD = struct.Struct(f">B{KEY_ID_SIZE}s{TXN_ID_SIZE}sI")
_MAC_SIZE = hashlib.sha256().digest_size
_TAIL_SIZE = 2 * _MAC_SIZE  # signature and proof
_MIN_SIZE = _HEAD.size + 1 + _TAIL_SIZE
_MAX_SIZE = _HEAD.size + 100 + _TAIL_SIZE
_OPERATOR = b"operator"  # no signed bytes begin so


@dataclass(frozen=True, slots=True)
class Token:
    """The content of a token: a transaction's id, its keepalive in milliseconds, and its scope."""

    txn_id: bytes
    keepalive_ms: int
    scope: str


def key_id(key: bytes) -> bytes:
    """The id of a key, 4 bytes, which does not reveal it. `InvalidArgument` for a wrong size."""
    return hashlib.sha256(_check_key(key)).digest()[:KEY_ID_SIZE]


def sign(token: Token, key: bytes) -> bytes:
    """The token's bytes without a proof, signed with a key of 32 bytes.

    The same token and key give the same bytes. `InvalidArgument` for a part out of its range.
    """
    if len(token.txn_id) != TXN_ID_SIZE:
        raise InvalidArgument(f"a transaction id has {TXN_ID_SIZE} bytes, not {len(token.txn_id)}")
    if not 1 <= token.keepalive_ms <= MAX_KEEPALIVE_MS:
        raise InvalidArgument(
            f"keepalive {token.keepalive_ms} ms is not within 1..{MAX_KEEPALIVE_MS}"
        )
    head = _HEAD.pack(TOKEN_VERSION, key_id(key), token.txn_id, token.keepalive_ms)
    signed = head + check_scope(token.scope).encode("ascii")
    return signed + _mac(signed, key)


def prove(signed: bytes, secret: bytes) -> bytes:
    """The token to hand on: signed by a controller, proved by the secret that began the transaction."""
    return signed + _mac(signed, secret)


def operator_proof(data: bytes, key: bytes) -> bytes:
    """The proof that an operator, who has the controllers' key, sends this."""
    return _mac(_OPERATOR + data, _check_key(key))


def check_proof(data: bytes, secret: bytes | None, key: bytes) -> None:
    """`InvalidToken` unless the token's proof is by this secret, or an operator's."""
    signed, proof = data[:-_MAC_SIZE], data[-_MAC_SIZE:]
    own = secret is not None and hmac.compare_digest(proof, _mac(signed, secret))
    if not own and not hmac.compare_digest(proof, operator_proof(signed, key)):
        raise InvalidToken(
            "the token's proof is not of the secret that began the transaction: ask for the token of its begin"
        )


def verify(data: bytes, key: bytes) -> Token:
    """The content of a token, if it was signed with this key and not changed since. Its proof is not checked.

    `InvalidToken` otherwise; its message tells malformed, other key and tampered apart.
    """
    data = _check_form(data)
    if not hmac.compare_digest(data[1 : 1 + KEY_ID_SIZE], key_id(key)):
        raise InvalidToken(
            f"the token was signed with another key (id {data[1 : 1 + KEY_ID_SIZE].hex()}, here "
            f"{key_id(key).hex()}): it belongs to another cluster, or the key file was replaced"
        )
    signed, signature = data[:-_TAIL_SIZE], data[-_TAIL_SIZE:-_MAC_SIZE]
    if not hmac.compare_digest(signature, _mac(signed, key)):
        raise InvalidToken(
            "the token was tampered with, or cut, or has no proof: its signature does not match"
        )
    return _parse(data)


def peek(data: bytes) -> Token:
    """The unverified content of a token: for clients, which have no key. `InvalidToken` if it is malformed."""
    return _parse(_check_form(data))


def _mac(signed: bytes, key: bytes) -> bytes:
    return hmac.digest(key, signed, "sha256")


def _check_key(key: bytes) -> bytes:
    if len(key) != KEY_SIZE:
        raise InvalidArgument(f"a token key has {KEY_SIZE} bytes, not {len(key)}")
    return key


def _check_form(data: bytes) -> bytes:
    if not isinstance(data, bytes):
        raise InvalidToken(f"malformed token: bytes expected, not {type(data).__name__}")
    if not _MIN_SIZE <= len(data) <= _MAX_SIZE:
        raise InvalidToken(
            f"malformed token: {len(data)} bytes; a token with its proof has {_MIN_SIZE} to {_MAX_SIZE}"
        )
    if data[0] != TOKEN_VERSION:
        raise InvalidToken(f"malformed token: version {data[0]}; this side knows {TOKEN_VERSION}")
    return data


def _parse(data: bytes) -> Token:
    _, _, txn_id, keepalive_ms = _HEAD.unpack_from(data)
    try:
        scope = check_scope(data[_HEAD.size : -_TAIL_SIZE].decode("ascii"))
    except (UnicodeDecodeError, InvalidArgument) as error:
        raise InvalidToken(f"malformed token: its scope is not one: {error}") from error
    if not 1 <= keepalive_ms <= MAX_KEEPALIVE_MS:
        raise InvalidToken(f"malformed token: a keepalive of {keepalive_ms} ms")
    return Token(txn_id, keepalive_ms, scope)
