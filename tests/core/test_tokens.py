"""Tokens: what was signed comes back; anything else is refused, and the message says why."""

import hashlib
import hmac
from contextlib import nullcontext, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.tokens import (
    MAX_KEEPALIVE_MS,
    Token,
    check_proof,
    key_id,
    operator_proof,
    peek,
    prove,
    sign,
    verify,
)
from anabranch.errors import InvalidArgument, InvalidToken

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
TOKEN = Token(bytes.fromhex("0001" + "018bcfe56800" + "0123456789abcdef"), 60_000, "nyc")

SECRET = bytes(range(64, 96))


def check(data: bytes) -> None:
    verify(data, KEY)
    check_proof(data, SECRET, KEY)


def whole(token: Token, key: bytes, secret: bytes = SECRET) -> bytes:
    return prove(sign(token, key), secret)


scopes = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", fullmatch=True)
tokens = st.builds(
    Token,
    st.binary(min_size=16, max_size=16),
    st.integers(1, MAX_KEEPALIVE_MS),
    scopes,
)
keys = st.binary(min_size=32, max_size=32)


@given(tokens, keys)
def test_a_signed_token_comes_back(token: Token, key: bytes) -> None:
    data = whole(token, key)
    assert verify(data, key) == token == peek(data)
    assert whole(token, key) == data


@pytest.mark.parametrize("scope", ["x", "x" * 100])
def test_the_shortest_and_the_longest_scope(scope: str) -> None:
    token = Token(bytes(16), 1, scope)
    assert verify(whole(token, KEY), KEY) == token
    with pytest.raises(InvalidToken, match="malformed token: 89 bytes"):
        peek(whole(token, KEY)[:89])


def test_layout() -> None:
    signed = (
        b"\x01"
        + hashlib.sha256(KEY).digest()[:4]
        + TOKEN.txn_id
        + (60_000).to_bytes(4, "big")
        + b"nyc"
    )
    public = signed + hmac.new(KEY, signed, hashlib.sha256).digest()
    assert sign(TOKEN, KEY) == public
    assert whole(TOKEN, KEY) == public + hmac.new(SECRET, public, hashlib.sha256).digest()
    assert operator_proof(public, KEY) == hmac.digest(KEY, b"operator" + public, "sha256")
    assert key_id(KEY) == hashlib.sha256(KEY).digest()[:4]


def test_every_single_bit_flip_is_refused() -> None:
    data = whole(TOKEN, KEY)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidToken) as refused:
            check(bytes(flipped))
        where = bit // 8
        expected = "malformed" if where == 0 else "another key" if where < 5 else "tampered"
        if where >= len(data) - 32:
            expected = "proof is not of the secret"
        assert expected in str(refused.value)


def test_every_cut_and_every_extension_is_refused() -> None:
    data = whole(TOKEN, KEY)
    for size in range(len(data)):
        with pytest.raises(InvalidToken):
            verify(data[:size], KEY)
        with pytest.raises(InvalidToken):
            verify(data[size + 1 :], KEY)
    for more in (b"\0", b"x" * 200):
        with pytest.raises(InvalidToken):
            verify(data + more, KEY)


@given(st.binary(max_size=200))
def test_other_bytes_are_refused(data: bytes) -> None:
    for forged in (data, b"\x01" + key_id(KEY) + data):
        with pytest.raises(InvalidToken):
            verify(forged, KEY)
        with suppress(InvalidToken):  # it may be well formed by chance: peek does not verify
            peek(forged)


def test_a_token_of_another_key_names_both() -> None:
    with pytest.raises(InvalidToken, match="another key") as refused:
        verify(whole(TOKEN, OTHER), KEY)
    assert key_id(KEY).hex() in str(refused.value)
    assert key_id(OTHER).hex() in str(refused.value)


def test_a_mac_under_the_right_key_id_but_another_key_is_tampering() -> None:
    forged = bytearray(whole(TOKEN, OTHER))
    forged[1:5] = key_id(KEY)
    with pytest.raises(InvalidToken, match="tampered"):
        verify(bytes(forged), KEY)


@pytest.mark.parametrize(
    ("keepalive", "scope"),
    [(0, b"nyc"), (1 << 31, b"nyc"), (5, b"_nyc"), (5, b"\xff"), (5, b"a.b")],
)
def test_signed_nonsense_is_still_malformed(keepalive: int, scope: bytes) -> None:
    signed = b"\x01" + key_id(KEY) + TOKEN.txn_id + keepalive.to_bytes(4, "big") + scope
    data = prove(signed + hmac.digest(KEY, signed, "sha256"), SECRET)
    with pytest.raises(InvalidToken, match="malformed"):
        verify(data, KEY)
    with pytest.raises(InvalidToken, match="malformed"):
        peek(data)


def test_what_is_not_bytes_is_malformed() -> None:
    for wrong in ("text", None, 7):
        with pytest.raises(InvalidToken, match="malformed"):
            peek(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "token",
    [
        Token(b"short", 1, "nyc"),
        Token(bytes(16), 0, "nyc"),
        Token(bytes(16), MAX_KEEPALIVE_MS + 1, "nyc"),
        Token(bytes(16), 1, ""),
        Token(bytes(16), 1, "a/b"),
        Token(bytes(16), 1, "x" * 101),
    ],
)
def test_a_bad_part_is_not_signed(token: Token) -> None:
    with pytest.raises(InvalidArgument):
        sign(token, KEY)


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_key_of_another_size_is_refused(size: int) -> None:
    for call in (
        lambda: key_id(bytes(size)),
        lambda: sign(TOKEN, bytes(size)),
        lambda: verify(whole(TOKEN, KEY), bytes(size)),
    ):
        with pytest.raises(InvalidArgument):
            call()


@pytest.mark.parametrize(
    ("secret", "proof", "holds"),
    [
        (SECRET, hmac.digest(SECRET, sign(TOKEN, KEY), "sha256"), True),
        (SECRET, operator_proof(sign(TOKEN, KEY), KEY), True),
        (None, operator_proof(sign(TOKEN, KEY), KEY), True),
        (OTHER, hmac.digest(SECRET, sign(TOKEN, KEY), "sha256"), False),
        (None, hmac.digest(SECRET, sign(TOKEN, KEY), "sha256"), False),
        (SECRET, operator_proof(sign(TOKEN, KEY), OTHER), False),
        (SECRET, hmac.digest(KEY, sign(TOKEN, KEY), "sha256"), False),
        (SECRET, SECRET, False),
        (SECRET, bytes(32), False),
    ],
)
def test_whose_proof_holds(secret: bytes | None, proof: bytes, holds: bool) -> None:
    data = sign(TOKEN, KEY) + proof
    with suppress(InvalidToken) if not holds else nullcontext():
        check_proof(data, secret, KEY)
        assert holds
