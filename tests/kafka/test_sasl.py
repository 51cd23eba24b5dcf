"""SASL's exchanges, by the examples of the RFCs, and against brokers that are none."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from anabranch.errors import UnsupportedSetting
from anabranch.kafka.oauth_tokens import (
    ClientCredentials,
    KeptToken,
    TokenFile,
    of_callback,
    token_and_end,
)
from anabranch.kafka.sasl import Exchange, OAuthBearer, Plain, SaslError, Scram
from anabranch.kafka.settings import parse_settings

NONCE = "rOprNGfwEbeRWgbNEkqO"
FIRST = f"r={NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
FINAL = "v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def scram(user: str = "user") -> Exchange:
    return Scram("SCRAM-SHA-256", user, "pencil", lambda: NONCE).exchange(0.0)


def test_the_example_of_rfc_7677() -> None:
    exchange = scram()
    assert next(exchange) == f"n,,n=user,r={NONCE}".encode()
    assert (
        exchange.send(FIRST.encode())
        == (
            f"c=biws,r={NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
            "p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
        ).encode()
    )
    with pytest.raises(StopIteration):
        exchange.send(FINAL.encode())


def test_names_are_escaped() -> None:
    assert next(scram("a=b,c")) == f"n,,n=a=3Db=2Cc,r={NONCE}".encode()


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (FIRST.replace("4096", "4095"), "4095 iterations"),
        (FIRST.replace("4096", "999999999"), "999999999 iterations"),
        (FIRST.replace("4096", "0"), "not one of SCRAM"),
        (FIRST.replace("r=r", "r=s"), "does not continue ours"),
        (FIRST.replace("%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0", ""), "does not continue ours"),
        (FIRST.replace("W22Z", "W2 Z"), "no base64"),
        (FIRST.replace("W22Z", "W2öZ"), "no base64"),
        (f"m=ext,{FIRST}", "not one of SCRAM"),
        ("e=unknown-user", "not one of SCRAM"),
        ("", "not one of SCRAM"),
    ],
)
def test_a_first_answer_that_is_malformed_is_refused(first: str, said: str) -> None:
    exchange = scram()
    next(exchange)
    with pytest.raises(SaslError, match=said):
        exchange.send(first.encode())


@pytest.mark.parametrize("final", [FINAL.replace("6", "7"), "v=", "", "e=invalid-proof"])
def test_a_broker_that_does_not_know_the_password(final: str) -> None:
    exchange = scram()
    next(exchange)
    exchange.send(FIRST.encode())
    with pytest.raises(SaslError, match="does not prove"):
        exchange.send(final.encode())


def test_plain_sends_one_message() -> None:
    exchange = Plain("tim", "tanstaaftanstaaf").exchange(0.0)
    assert next(exchange) == b"\0tim\0tanstaaftanstaaf"  # RFC 4616
    with pytest.raises(StopIteration):
        exchange.send(b"")


def test_oauthbearer() -> None:
    """RFC 7628, with the extensions of KIP-342."""
    exchange = OAuthBearer("me", lambda _: "vF9dft4q", {"traceId": "1"}).exchange(0.0)
    assert next(exchange) == b"n,,\x01auth=Bearer vF9dft4q\x01traceId=1\x01\x01"
    assert exchange.send(b'{"status":"invalid_token","scope":"x"}') == b"\x01"
    with pytest.raises(SaslError, match="invalid_token"):
        exchange.send(b"")


def test_a_token_file_is_read_each_time(tmp_path: Path) -> None:
    file = tmp_path / "token"
    token = TokenFile(file)
    with pytest.raises(FileNotFoundError):
        token(0.0)
    for text in ("one", "two"):
        file.write_text(f"{text}\n")
        assert token(0.0) == text
    for wrong in ("", "a\x01auth=b", "a b"):
        file.write_text(wrong)
        with pytest.raises(OSError, match="holds no token"):
            token(0.0)
    file.write_text("e30.eyJleHAiOjE3MH0.")
    with pytest.raises(OSError, match="has ended"):
        token(0.0)
    file.write_text("e30.eyJleHAiOjQxMDI0NDQ4MDB9.")
    assert token_and_end(file) == ("e30.eyJleHAiOjQxMDI0NDQ4MDB9.", 4_102_444_800.0)


class Provider(ThreadingHTTPServer):
    """Gives tokens to clients that know the secret."""

    answers: list[tuple[int, dict[str, object]]]
    asked: list[tuple[str, str]]


@pytest.fixture
def provider() -> Iterator[Provider]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            made.asked.append((self.headers["Authorization"], form))
            code, answer = made.answers.pop(0)
            self.send_response(code)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    made = Provider(("127.0.0.1", 0), Handler)
    made.answers, made.asked = [], []
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


def test_client_credentials(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"http://127.0.0.1:{provider.server_port}/token"
    token = KeptToken(ClientCredentials(url, "me", "hush", "logs", None))
    soon = time.monotonic() + 30
    cases: list[tuple[int, dict[str, object], type[Exception], str]] = [
        (401, {"error": "hush"}, SaslError, "refuses the client: 401"),
        (503, {}, OSError, "answers 503"),
        (302, {"access_token": "t"}, OSError, "answers 302"),
        (200, {"token": "t"}, OSError, "with no token"),
        (200, {"access_token": "t\x01"}, OSError, "holds no token"),
    ]
    for code, answer, kind, said in cases:
        provider.answers.append((code, answer))
        with pytest.raises(kind, match=said) as caught:
            token(soon)
        assert "hush" not in str(caught.value)
    provider.answers.append((200, {"access_token": "one", "expires_in": 3600}))
    assert [token(soon), token(soon)] == ["one", "one"]
    assert set(provider.asked) == {
        ("Basic bWU6aHVzaA==", "grant_type=client_credentials&scope=logs")
    }
    # Past most of its life it is replaced; as long as it lasts, it is better than none.
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.8 * 3600)
    provider.answers.append((503, {}))
    assert [token(now + 3600), token(now + 3600)] == ["one", "one"]
    monkeypatch.setattr(time, "monotonic", lambda: now + 0.9 * 3600)
    provider.answers.append((200, {"access_token": "two", "expires_in": 3600}))
    assert token(now + 3600) == "two"
    assert not provider.answers


def test_tokens_of_a_callback() -> None:
    """confluent-kafka's ``oauth_cb``: asked again only past most of a token's life."""
    answers: list[object] = [
        ("one", time.time() + 3600),
        ("two", time.time() - 1, "principal", {}),
        ("three", time.time() + 3600),
        ("\x01", time.time() + 3600),
        None,
        ValueError("nothing"),
    ]

    def give(config: str) -> Any:
        assert config == "region=x"
        answer: Any = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    soon = time.monotonic() + 30
    token = of_callback(give, "region=x")
    assert [token(soon), token(soon)] == ["one", "one"]
    ended = of_callback(give, "region=x")
    with pytest.raises(OSError, match="has ended"):
        ended(soon)
    assert ended(soon) == "three"
    while answers:
        with pytest.raises(OSError, match="oauth_cb"):
            of_callback(give, "region=x")(soon)
    options = {
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "OAUTHBEARER",
        "sasl.oauthbearer.config": "region=x",
    }
    answers.append(("four", time.time() + 3600))
    mechanism = parse_settings("a:1", options | {"oauth_cb": give}).sasl
    assert mechanism is not None
    assert b"auth=Bearer four" in next(mechanism.exchange(soon))
    with pytest.raises(UnsupportedSetting, match="oauth_cb"):
        parse_settings("a:1", options)
