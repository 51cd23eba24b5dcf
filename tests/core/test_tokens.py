"""Tokens: what was made comes back, narrowed if it was; all other bytes are refused."""

import hmac
import pickle
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anabranch.errors import InvalidArgument, InvalidToken
from anabranch.protocol.tokens import (
    ALL_RIGHTS,
    MAX_CAVEATS,
    MAX_KEEPALIVE_MS,
    Rights,
    Token,
    TokenBytes,
    is_genuine,
    make,
    names_of,
    narrow,
    peek,
    rights_of_names,
)

SECRET = bytes(range(64, 96))
OTHER = bytes(32)
BEGUN = 1_767_225_600_012
TXN = bytes.fromhex("0001" + "018bcfe56800" + "0123456789abcdef")
TOKEN = Token(TXN, 60_000, BEGUN, "nyc", "etl", seen=9)
HEAD = (
    b"\2" + TXN + (60_000).to_bytes(4, "big") + BEGUN.to_bytes(8, "big") + (9).to_bytes(8, "big")
    + b"\3nyc" + b"\3etl" + b"\x1f" + bytes(8)
)  # fmt: skip

lanes = st.from_regex(r"[a-z0-9][a-z0-9-]{0,49}", fullmatch=True)
tokens = st.builds(
    Token,
    st.binary(min_size=16, max_size=16),
    st.integers(1, MAX_KEEPALIVE_MS),
    st.integers(0, 253_402_300_799_999),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}", fullmatch=True),
    lanes,
    st.integers(1, 31),
    st.integers(0, 253_402_300_799_999),
    st.frozensets(lanes, max_size=2),
    st.integers(0, (1 << 63) - 1),
)


def verify(data: bytes, secret: bytes) -> Token:
    """The content of a genuine token, as a controller takes it."""
    token = peek(data)
    if not is_genuine(token, secret):
        raise InvalidToken("not genuine")
    return token


def mac(key: bytes, *messages: bytes) -> bytes:
    for message in messages:
        key = hmac.digest(key, message, "sha256")
    return key


def raw(head: bytes, *caveats: bytes, secret: bytes = SECRET, count: int | None = None) -> bytes:
    """A token by hand."""
    number = bytes((len(caveats) if count is None else count,))
    parts = b"".join(bytes((len(caveat),)) + caveat for caveat in caveats)
    return head + number + parts + mac(secret, head, *caveats)


@given(tokens, st.binary(min_size=32, max_size=32))
def test_a_token_comes_back(token: Token, secret: bytes) -> None:
    data = make(secret, token)
    assert verify(data, secret) == token == peek(data)
    assert make(secret, token) == data
    with pytest.raises(InvalidToken, match="not genuine"):
        verify(data, bytes(reversed(secret)) if secret[0] != secret[-1] else OTHER[:31] + b"z")


def test_a_token_has_the_bytes_of_the_protocol_page() -> None:
    assert make(SECRET, TOKEN) == raw(HEAD)
    narrowed = narrow(make(SECRET, TOKEN), rights=5, not_after_ms=BEGUN + 1, lane="wide")
    end = (BEGUN + 1).to_bytes(8, "big")
    assert narrowed == raw(HEAD, b"\1\5", b"\2" + end, b"\3wide")
    found = verify(narrowed, SECRET)
    assert found == replace(TOKEN, rights=5, not_after_ms=BEGUN + 1, lanes=frozenset({"wide"}))


# How a token of rights 7 that ends at BEGUN, for lane "a", may be narrowed; and how not.
NARROWED: dict[str, tuple[dict[str, Any], dict[str, Any] | str]] = {
    "nothing": ({}, {}),
    "the same": ({"rights": 7, "not_after_ms": BEGUN, "lane": "a"}, {}),
    "rights": ({"rights": 2}, {"rights": 2}),
    "sooner": ({"not_after_ms": BEGUN - 1}, {"not_after_ms": BEGUN - 1}),
    "other rights": ({"rights": 8}, "has no right to abort"),
    "more rights": ({"rights": 15}, "has no right to abort"),
    "unknown rights": ({"rights": 1 | 32}, "never widened"),
    "no rights": ({"rights": 0}, "would have no right"),
    "later": ({"not_after_ms": BEGUN + 1}, "ends before"),
    "no end": ({"not_after_ms": 0}, "ends before"),
    "another lane": ({"lane": "b"}, "for lane a only"),
    "no lane": ({"lane": "A b"}, "not a lane"),
    "before all time": ({"not_after_ms": -1}, "Unix milliseconds"),
}


@pytest.mark.parametrize("case", NARROWED)
def test_a_token_is_narrowed_never_widened(case: str) -> None:
    asked, expected = NARROWED[case]
    token = replace(TOKEN, rights=7, not_after_ms=BEGUN, lanes=frozenset({"a"}))
    if isinstance(expected, str):
        with pytest.raises(InvalidArgument, match=expected):
            narrow(make(SECRET, token), **asked)
    else:
        narrowed = narrow(make(SECRET, token), **asked)
        assert verify(narrowed, SECRET) == replace(token, **expected)
        assert (narrowed == make(SECRET, token)) == (not expected)


def test_caveats_are_bounded_and_add_up() -> None:
    data = make(SECRET, replace(TOKEN, not_after_ms=BEGUN + 100))
    for step in range(MAX_CAVEATS):
        data = narrow(data, not_after_ms=BEGUN + 99 - step)
    assert verify(data, SECRET).not_after_ms == BEGUN + 84
    with pytest.raises(InvalidArgument, match="at most 16 caveats"):
        narrow(data, rights=1)
    by_hand = raw(HEAD, b"\1\6", b"\3a", b"\1\3", b"\3b")
    assert verify(by_hand, SECRET) == replace(TOKEN, rights=2, lanes=frozenset("ab"))


def test_a_caveat_is_never_taken_off_or_changed() -> None:
    data = narrow(narrow(make(SECRET, TOKEN), rights=1), lane="a")
    for caveats in ((), (b"\1\1",), (b"\3a",), (b"\1\3", b"\3a"), (b"\3a", b"\1\1")):
        forged = raw(HEAD, *caveats)[:-32] + data[-32:]
        peek(forged)
        with pytest.raises(InvalidToken, match="not genuine"):
            verify(forged, SECRET)


def test_every_single_bit_flip_every_cut_and_every_extension_is_refused() -> None:
    data = bytes(narrow(make(SECRET, TOKEN), rights=1, not_after_ms=BEGUN, lane="a"))
    forged = [data[:size] for size in range(len(data))]
    forged += [data[size:] for size in range(1, len(data))]
    forged += [data + b"\0", data + data]
    for bit in range(len(data) * 8):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        forged.append(bytes(flipped))
    for each in forged:
        with pytest.raises(InvalidToken):
            verify(each, SECRET)


@given(st.binary(max_size=300))
def test_other_bytes_are_refused(data: bytes) -> None:
    for forged in (data, b"\2" + data, HEAD + data):
        with pytest.raises(InvalidToken):
            verify(forged, SECRET)
        with suppress(InvalidToken):  # it may be well formed by chance: peek does not verify
            peek(forged)


def changed(at: int, value: bytes) -> bytes:
    return HEAD[:at] + value + HEAD[at + len(value) :]


MALFORMED = {
    "the version before": raw(changed(0, b"\1")),
    "a future version": raw(changed(0, b"\3")),
    "no keepalive": raw(changed(17, bytes(4))),
    "a keepalive of 2^31 ms": raw(changed(17, b"\x80\0\0\0")),
    "begun after all time": raw(changed(21, b"\xff" * 8)),
    "no scope": raw(changed(38, b"_yc")),
    "a scope that is not ASCII": raw(changed(38, b"\xff")),
    "no owner": raw(changed(42, b"ETL")),
    "a right of the future": raw(changed(45, b"\x20")),
    "a caveat of the future": raw(HEAD, b"\4x"),
    "an empty caveat": raw(HEAD, b""),
    "rights of two bytes": raw(HEAD, b"\1\1\1"),
    "a short end": raw(HEAD, b"\2\1"),
    "an end that is none": raw(HEAD, b"\2" + bytes(8)),
    "a lane that is none": raw(HEAD, b"\3A"),
    "fewer caveats than told": raw(HEAD, b"\1\1", count=2),
    "more caveats than told": raw(HEAD, b"\1\1", count=0),
    "17 caveats": raw(HEAD, *[b"\1\1"] * 17),
    "caveats as long as they get": raw(HEAD, *[b"\3" + b"a" * 254] * 16),
    "nothing": b"",
    "text": "text",
    "none": None,
}


@pytest.mark.parametrize("case", MALFORMED)
def test_what_is_malformed_is_refused_though_it_is_signed(case: str) -> None:
    for read in (peek, lambda data: verify(data, SECRET), narrow):
        with pytest.raises(InvalidToken, match="malformed token"):
            read(MALFORMED[case])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"txn_id": b"short"},
        {"keepalive_ms": 0},
        {"keepalive_ms": MAX_KEEPALIVE_MS + 1},
        {"begun_ms": -1},
        {"scope": ""},
        {"scope": "a/b"},
        {"scope": "x" * 101},
        {"owner": "Etl"},
        {"rights": 0},
        {"rights": 32},
        {"not_after_ms": 1 << 63},
        {"lanes": frozenset({""})},
        {"lanes": frozenset(map(str, range(17)))},
        {"seen": 1 << 63},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_bad_part_makes_no_token(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        make(SECRET, replace(TOKEN, **change))


@pytest.mark.parametrize("size", [0, 31, 33, 64])
def test_a_secret_of_another_size_makes_no_token(size: int) -> None:
    with pytest.raises(InvalidArgument):
        make(bytes(size), TOKEN)


@pytest.mark.parametrize("owner", ["x", "x" * 50])
@pytest.mark.parametrize("scope", ["x", "x" * 100])
def test_the_smallest_and_the_biggest(scope: str, owner: str) -> None:
    token = replace(TOKEN, scope=scope, owner=owner)
    assert verify(raw(make(SECRET, token)[:-33], *[b"\3" + b"a" * 50] * 16), SECRET).lanes


def test_its_text_says_what_it_is_and_hides_its_bytes() -> None:
    data = narrow(make(SECRET, TOKEN), rights=3, not_after_ms=BEGUN, lane="a")
    said = f"token of {TXN.hex()} (write, heartbeat; until 2026-01-01T00:00:00Z; lane a)"
    assert [repr(data), str(data), f"{data}", f"{data!r:}"] == [said] * 4
    assert repr(make(SECRET, TOKEN)).endswith("(write, heartbeat, commit, abort, state; no end)")
    again = pickle.loads(pickle.dumps(data))
    assert type(again) is TokenBytes
    assert again == data == bytes(data)
    assert hash(data) == hash(bytes(data))


def test_rights_have_names() -> None:
    assert rights_of_names("all") == ALL_RIGHTS == sum(Rights)
    assert rights_of_names("write") == 1
    assert rights_of_names(("heartbeat", "state")) == 18
    assert names_of(22) == ["heartbeat", "commit", "state"]
    for wrong in ("", "Write", "read", (), ("write", 7), "_x"):
        with pytest.raises(InvalidArgument):
            rights_of_names(wrong)  # type: ignore[arg-type]
