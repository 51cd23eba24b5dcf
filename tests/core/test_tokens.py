"""Tokens: what was signed comes back; anything else is refused, and the message says why."""

import hashlib
import hmac
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.core.tokens import MAX_KEEPALIVE_MS, Token, key_id, peek, sign, verify
from anabranch.errors import InvalidArgument, InvalidToken

KEY = bytes(range(32))
OTHER = bytes(range(1, 33))
TOKEN = Token(bytes.fromhex("0001" + "018bcfe56800" + "0123456789abcdef"), 60_000, "nyc")

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
    data = sign(token, key)
    assert verify(data, key) == token == peek(data)
    assert sign(token, key) == data


@pytest.mark.parametrize("scope", ["x", "x" * 100])
def test_the_shortest_and_the_longest_scope(scope: str) -> None:
    token = Token(bytes(16), 1, scope)
    assert verify(sign(token, KEY), KEY) == token
    with pytest.raises(InvalidToken, match="malformed token: 57 bytes"):
        peek(sign(token, KEY)[:57])


def test_layout() -> None:
    signed = (
        b"\x01"
        + hashlib.sha256(KEY).digest()[:4]
        + TOKEN.txn_id
        + (60_000).to_bytes(4, "big")
        + b"nyc"
    )
    assert sign(TOKEN, KEY) == signed + hmac.new(KEY, signed, hashlib.sha256).digest()
    assert key_id(KEY) == hashlib.sha256(KEY).digest()[:4]


def test_every_single_bit_flip_is_refused() -> None:
    data = sign(TOKEN, KEY)
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidToken) as refused:
            verify(bytes(flipped), KEY)
        where = bit // 8
        expected = "malformed" if where == 0 else "another key" if where < 5 else "tampered"
        assert expected in str(refused.value)


def test_every_cut_and_every_extension_is_refused() -> None:
    data = sign(TOKEN, KEY)
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
        verify(sign(TOKEN, OTHER), KEY)
    assert key_id(KEY).hex() in str(refused.value)
    assert key_id(OTHER).hex() in str(refused.value)


def test_a_mac_under_the_right_key_id_but_another_key_is_tampering() -> None:
    forged = bytearray(sign(TOKEN, OTHER))
    forged[1:5] = key_id(KEY)
    with pytest.raises(InvalidToken, match="tampered"):
        verify(bytes(forged), KEY)


@pytest.mark.parametrize(
    ("keepalive", "scope"),
    [(0, b"nyc"), (1 << 31, b"nyc"), (5, b"_nyc"), (5, b"\xff"), (5, b"a.b")],
)
def test_signed_nonsense_is_still_malformed(keepalive: int, scope: bytes) -> None:
    signed = b"\x01" + key_id(KEY) + TOKEN.txn_id + keepalive.to_bytes(4, "big") + scope
    data = signed + hmac.digest(KEY, signed, "sha256")
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
        lambda: verify(sign(TOKEN, KEY), bytes(size)),
    ):
        with pytest.raises(InvalidArgument):
            call()
